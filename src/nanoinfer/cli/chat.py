"""`nanoinfer chat`: a conversation in the terminal.

Examples:
    nanoinfer chat path/to/model            # /help lists the commands
    nanoinfer chat path/to/model --system "Be brief." --temp 0.5
    nanoinfer chat shakespeare --chat-template turns.jinja --engine native
    nanoinfer chat path/to/model --tools tools.json   # you answer its calls
    cat questions.txt | nanoinfer chat path/to/model    # one turn a line
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import (
    NO_FLAGS,
    PATH,
    chat_template_flag,
    flags,
    generation_config_flag,
    generic_tools_flag,
    llm_config,
    of_model,
    tokenizer_flag,
)
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import CHAT_MAX_TOKENS, COMMAND_DEFAULTS, SamplingParams
from nanoinfer.utils.files import escaped, parse_json, read_text

_SKIPPED = ("best_of", "n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", *NO_FLAGS)


@command("chat")
@argument("model", metavar="MODEL", help="A model with a chat template: as for `generate`.")
@tokenizer_flag
@click.option("--system", metavar="TEXT", help="System message.")
@chat_template_flag
@generic_tools_flag
@click.option("--tools", metavar="FILE", type=PATH, help="JSON list of tools, in OpenAI's shape, that may be called.")
@click.option("--tool-choice", metavar="TEXT", help="none, auto, required or the name of a tool. [default: auto]")
@click.option(
    "--enable-thinking/--no-enable-thinking",
    default=None,
    help="Whether the model shall reason; for templates that have the variable. [default: as the template has it]",
)
@click.option("--reasoning-effort", metavar="TEXT", help="none, low, medium or high; for templates that have it.")
@click.option(
    "--thinking-token-budget",
    metavar="INT",
    type=int,
    help="Most tokens of the reasoning, after which its end is forced. [default: any]",
)
@click.option("--hide-reasoning", is_flag=True, help="Do not show reasoning, which is dimmed on a terminal only.")
@generation_config_flag
@flags(SamplingParams, "params", skip=_SKIPPED, defaults={**COMMAND_DEFAULTS, "max_tokens": CHAT_MAX_TOKENS})
@llm_config("speculation", "engine")
def chat(
    system: str | None,
    chat_template: Path | None,
    tools: Path | None,
    hide_reasoning: bool,
    config: LLMConfig,
    params: SamplingParams,
    **options: Any,
) -> None:
    """Hold a conversation with a model that has a chat template."""
    if chat_template is not None:
        options["chat_template"] = read_text(chat_template, "a chat template")
    if tools is not None:
        options["parallel_tool_calls"] = False  # each result is typed
        options["tools"] = parse_json(read_text(tools, "a list of tools"), f"{escaped(tools)} is not JSON")

    from nanoinfer.cli.chat_session import Session
    from nanoinfer.entrypoints.llm import LLM

    llm = LLM.from_config(config)
    params = of_model(params, llm)
    conversation = llm.conversation(system, **options)
    if unread := conversation.unread_options():
        negated = "no-" if options.get(unread[0]) is False else ""
        flag = f"--{negated}{unread[0].replace('_', '-')}"
        raise NanoinferError(f"{flag}: the chat template of {escaped(llm.model_name)} does not read it: leave it out")
    session = Session(conversation, params, hide_reasoning=hide_reasoning)
    if sys.stdin.isatty():
        print(
            f"{escaped(llm.model_name)} on {llm.engine_name}, {llm.model.weight_format}. /help lists the commands.\n"
            f"Answers end after at most {_bound(params, llm.config.block_size)}.",
            file=sys.stderr,
        )
    if not session.run():
        raise click.exceptions.Exit(1)


def _bound(params: SamplingParams, block_size: int) -> str:
    """Return what bounds the length of an answer."""
    assert params.max_tokens is not None  # the flag has a default
    if params.overflow == "stop" and block_size < params.max_tokens:
        return f"{block_size} tokens (the context length; --max-tokens ends them earlier)"
    return f"{params.max_tokens} tokens (--max-tokens changes it)"
