"""Help of a sub-command: options grouped by topic, then its examples, in 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])
NAME_WIDTH = 28  # of the column of options; a longer name has a line of its own

_SAMPLING = (
    "temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty bad_words allowed_token_ids"
    " seed n sampler"
)
_ENGINE = (
    "engine device dtype quantization threads max_model_len max_num_seqs kv_cache_memory kv_cache_dtype graph_memory"
)
_LENGTH = "max_tokens min_tokens stop stop_token_ids include_stop_str_in_output ignore_eos overflow slide_stride"
_POOLING = "pooling_type"
_RUNNING = {"Speculative decoding": "draft speculate_k speculate_rule", "Engine and memory": _ENGINE}
# Sub-command -> topic -> names of its parameters. What is in no topic stands under "Options", before the topics.
TOPICS: dict[str, dict[str, str]] = {
    "generate": {
        "Output length": _LENGTH + " truncate_prompt_tokens",
        "Output": "echo as_json logprobs prompt_logprobs skip_special_tokens",
        "Sampling": _SAMPLING + " best_of logit_bias generation_config",
        "Structured outputs": "json_schema json_object regex choice grammar",
        "Beam search": "beam_width length_penalty early_stopping",
        **_RUNNING,
    },
    "chat": {
        "Tools and reasoning": "tools tool_choice generic_tools enable_thinking reasoning_effort thinking_token_budget"
        " hide_reasoning",
        "Output length": _LENGTH,
        "Sampling": _SAMPLING.replace(" n ", " ") + " generation_config",  # one answer
        **_RUNNING,
    },
    "batch": {
        "On a Ray cluster": "ray num_actors cpus_per_actor",
        "Output length": _LENGTH + " truncate_prompt_tokens",
        "Sampling": _SAMPLING + " generation_config logprobs prompt_logprobs skip_special_tokens",
        "Embeddings and scores": _POOLING,
        **_RUNNING,
    },
    "serve": {
        "Chats": "chat_templates generic_tools",
        "Replicas": "replicas cores_per_replica idle_unload ray max_replicas target_requests",
        "Access and logs": "api_key api_key_file allowed_host allowed_origin access_log log_level",
        "Limits of a request": "max_body_bytes max_header_bytes max_sequences max_logprobs max_logprob_entries max_stop"
        " max_bad_words max_stop_chars max_token_entries",
        "Limits of number and time": "max_connections max_requests_in_flight header_timeout_sec body_timeout_sec"
        " send_timeout_sec request_timeout_sec keep_alive_sec",
        "Sampling": "generation_config default_max_tokens",
        "Embeddings and scores": _POOLING,
        "Speculative decoding": _RUNNING["Speculative decoding"],
        "Scheduling": "max_num_batched_tokens target_step_ms max_num_queued enable_prefix_caching",
        "Engine and memory": _ENGINE + " sampler",
    },
    "eval": {"Engine and memory": _ENGINE + " sampler"},
    "bench": {
        "What to measure without --suite": "engine dtype quantization sampler batch prompt_tokens output_tokens"
        " workload draft speculate_k baseline",
        "Measuring": "rounds quick minutes",
        "Results": "as_json output resume load report",
    },
    "profile": {
        "Sampling": _SAMPLING,
        "Output": "overflow slide_stride trace as_json logprobs prompt_logprobs",
        "Engine and memory": _ENGINE,
    },
    "train": {
        "Initial model and target": "init distill distill_tokens tokenizer vocab_size",
        "Shape of a new model": "n_layer n_head n_embd block_size bias dropout",
        "Optimization": "batch_size max_steps learning_rate min_learning_rate warmup_steps weight_decay beta1 beta2"
        " grad_clip seed device autocast",
        "Validation": "eval_interval eval_tokens val_fraction",
    },
}


class _Argument(click.Argument):
    """A positional argument with a help text; click's own has one from 8.5 on."""

    def __init__(self, names: Sequence[str], *, text: str, **options: Any) -> None:
        super().__init__(names, **options)
        self.text = text


def argument(name: str, *, help: str, metavar: str, **options: Any) -> Callable[[_Function], _Function]:
    """Return the decorator that adds a positional argument."""
    return click.argument(name, cls=_Argument, text=help, metavar=metavar, **options)


class Command(click.Command):
    """A sub-command whose help has topics."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each topic."""
        topic_of = {name: topic for topic, names in TOPICS.get(self.name or "", {}).items() for name in names.split()}
        topics = ("Arguments", "Options", *topic_of.values())
        sections: dict[str, list[tuple[str, str]]] = {topic: [] for topic in topics}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, _Argument):
                sections["Arguments"].append((parameter.metavar or "", parameter.text))
            elif record := parameter.get_help_record(ctx):
                sections[topic_of.get(parameter.name or "", "Options")].append(record)
        names = [name for rows in sections.values() for name, _ in rows if len(name) <= NAME_WIDTH]
        width = max(map(len, names), default=0)  # the same in all sections
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


def command(name: str) -> Callable[[Callable[..., Any]], Command]:
    """Return the decorator that makes a function a sub-command.

    The help is the first line of the function's docstring, and its "Examples:", whose lines are kept ("\\b").
    """

    def decorate(function: Callable[..., Any]) -> Command:
        line, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
        epilog = "\n".join(["\b", "Examples:", *(f"  {line.strip()}" for line in examples.splitlines())])
        return click.command(name, Command, help=line, epilog=epilog)(function)

    return decorate
