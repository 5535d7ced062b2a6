"""vLLM's most used arguments of `LLM(...)` that are no options here: values without effect, remedies for others.

LLM(model, tensor_parallel_size=1, swap_space=4)  ->  the same as LLM(model), and a line in the log
LLM(model, tensor_parallel_size=2)                ->  NanoinferError: tensor_parallel_size=2 is not supported ...
LLM(model, dtype="half", max_num_seqs=8)          ->  the same as LLM(model, dtype="float16", max_num_seqs=8)

docs/from-vllm.md has the same table. Any other name that is no option is a TypeError, which names that page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from nanoinfer.checkpoints.load import is_local
from nanoinfer.config import OF_CHATS, PARTS, EngineConfig, LLMConfig, SchedulerConfig, SpeculationConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.messages import is_list
from nanoinfer.pooling_params import PoolingConfig
from nanoinfer.sampling_params import MAX_LOGPROBS, SamplingParams
from nanoinfer.utils.checks import plain, show

log = logging.getLogger("nanoinfer")


@dataclass(frozen=True)
class Foreign:
    """An argument that is no option here."""

    accepted: str
    """The values that have no effect, in words."""
    accepts: Callable[[Any, Mapping[str, Any]], bool]
    """Whether a value is one of them; the second argument has the options that are given, and the model."""
    why: str
    """What happens here, whatever the value is."""
    remedy: str = "leave it out"
    """What to do instead of giving another value."""


def _only(values: Iterable[Any], why: str, remedy: str = "leave it out") -> Foreign:
    """Return an argument that has no effect if it is one of some values. True is not 1, and 1.0 is 1."""
    known = list(values)

    def accepts(value: Any, given: Mapping[str, Any]) -> bool:
        return any(isinstance(value, bool) is isinstance(v, bool) and value == v for v in known)

    return Foreign(", ".join(f"`{value!r}`" for value in known), accepts, why, remedy)


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _on_gpu(given: Mapping[str, Any]) -> bool:
    from nanoinfer.engines.devices import num_cuda_devices

    return given.get("device", "auto") != "cpu" and num_cuda_devices() > 0


def _shares_memory(value: Any, given: Mapping[str, Any]) -> bool:
    """Whether a share of a GPU's memory is not exceeded anyway, by weights of up to a fifth of it.

    Keys, values and graphs take 3/8 of what the weights leave. No memory of a GPU is used for a model on a CPU.
    """
    return _is_number(value, 0.5 if _on_gpu(given) else 1e-9, 1)


def _captures_nothing(value: Any, given: Mapping[str, Any]) -> bool:
    engine = given.get("engine", "auto")
    eager = engine in ("recompute", "dynamic", "static", "paged", "native") or (engine == "auto" and not _on_gpu(given))
    return isinstance(value, bool) and (eager or not value)


_ONE_DEVICE = ("one device computes", "leave it out, and run a process for each device")
_TASKS = ("a model generates, embeds and scores", "use vLLM for classes and rewards")

FOREIGN: dict[str, Foreign] = {
    # devices and memory
    "tensor_parallel_size": _only([1], *_ONE_DEVICE),
    "pipeline_parallel_size": _only([1], *_ONE_DEVICE),
    "distributed_executor_backend": _only([None, "uni"], *_ONE_DEVICE),
    "gpu_memory_utilization": Foreign(
        "0.5 to 1; on a CPU any",
        _shares_memory,
        "keys and values take a quarter of the free memory",
        "give kv_cache_memory, their number of bytes",
    ),
    "block_size": _only([None, 16], "a block has 16 tokens", "leave it out; max_model_len is the context length"),
    "swap_space": Foreign(
        "0 or more", lambda value, given: _is_number(value, 0, float("inf")), "no keys and values are swapped"
    ),
    "cpu_offload_gb": _only(
        [0], "all weights are on the device", "give device='cpu', or a quantization, which makes them smaller"
    ),
    # steps
    "enforce_eager": Foreign(
        "`False`; `True` on a CPU or with an engine without graphs",
        _captures_nothing,
        "the engine determines whether steps are captured or compiled",
        "give engine='static', which does neither",
    ),
    "enable_chunked_prefill": _only(
        [None, True],
        "a prompt longer than max_num_batched_tokens is split",
        "give max_num_batched_tokens as long as the context, and target_step_ms=None: then none is split",
    ),
    "speculative_config": _only(
        [None], "draft determines the speculation", "give draft='prompt-lookup' (ngram) or a model, and speculate_k"
    ),
    "disable_log_stats": _only(
        [True], "no statistics are logged", "leave it out: RequestOutput.metrics and a server's /metrics have them"
    ),
    "max_logprobs": Foreign(
        f"0 to {MAX_LOGPROBS:,}",
        lambda value, given: _is_number(value, 0, MAX_LOGPROBS),
        f"each request may ask for up to {MAX_LOGPROBS:,} log-probabilities",
    ),
    # the model
    "task": _only(["auto", "generate", "embed", "embedding", "score"], *_TASKS),
    "runner": _only(["auto", "generate", "pooling"], *_TASKS),
    "limit_mm_per_prompt": Foreign(
        "`None`, or 0 of each kind",
        lambda value, given: value is None or (isinstance(value, Mapping) and not any(value.values())),
        "models here read text only",
    ),
    "enable_lora": _only([False], "adapters are not supported", "merge the adapter into the model's weights"),
    "trust_remote_code": _only([False, True], "no code in a model's files runs"),
    "tokenizer_mode": _only(["auto", "hf"], "tokenizer.json is used", "give tokenizer= a folder or a file"),
    "revision": _only(
        [None, "main"],
        "the Hub's branch main is loaded",
        "download the revision by huggingface_hub.snapshot_download, and give its folder",
    ),
    "download_dir": Foreign(
        "`None`; any for a model on this machine",
        lambda value, given: value is None or (isinstance(given["model"], (str, Path)) and is_local(given["model"])),
        "models are downloaded to the Hub's cache",
        "set the environment variable HF_HUB_CACHE to that folder",
    ),
}

RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
DTYPES = {"half": "float16", "float": "float32"}
"""Other names of dtypes. PyTorch's dtypes are accepted, too."""
_NONE_IS_DEFAULT = ("seed", "max_num_batched_tokens", "enable_prefix_caching")
_NESTED = {
    "pooler_config": ("pooling_type", ()),
    "hf_overrides": (
        "classifier_from_token",
        ("architectures", "is_original_qwen3_reranker", "is_matryoshka", "matryoshka_dimensions"),
    ),
}
"""Dicts of options: the key that is an option here, and those that vLLM needs beside it and that change nothing."""


def llm_config(model: str, options: Mapping[str, Any]) -> LLMConfig:
    """Return the configuration of `LLM(model, **options)`, whose options have this project's names or vLLM's.

    Values that have no effect are logged, in one line.

    Raises:
        NanoinferError: a value is invalid, or asks for something that is not here; the message has the remedy.
        TypeError: there is no option of that name.
    """
    own: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for name, value in options.items():
        (foreign if name in FOREIGN else own)[RENAMED.get(name, name)] = value
    if len(own) + len(foreign) < len(options):  # before they are moved
        raise NanoinferError("kv_cache_memory and kv_cache_memory_bytes are both given: give one of them")
    own = {name: value for name, value in own.items() if value is not None or name not in _NONE_IS_DEFAULT}
    said = _take_pooling(own)
    if "dtype" in own:
        own["dtype"] = _dtype(own["dtype"])
    tokenizer, seed = own.pop("tokenizer", None), own.pop("seed", 0)
    config = LLMConfig.from_options(model, tokenizer, seed, own)
    for name, value in foreign.items():
        _check(name, value, {**own, "model": model})
    said += [f"{name}={show(value)} ({FOREIGN[name].why})" for name, value in foreign.items()]
    if said:
        log.warning("vLLM's arguments without effect here (docs/from-vllm.md): %s", ", ".join(said))
    if seed and "random:" not in str(model):
        log.warning("seed=%s is that of random weights: give SamplingParams(seed=...) for reproducible outputs", seed)
    return config


def _take_pooling(own: dict[str, Any]) -> list[str]:
    """Replace pooler_config and hf_overrides by the options that they stand for; return what else they have, in words.

    {"hf_overrides": {"classifier_from_token": ["no", "yes"], ...}}  ->  {"classifier_from_token": ["no", "yes"]}
    """
    ignored = []
    for name, (key, others) in _NESTED.items():
        value = own.pop(name, None) or {}
        if not isinstance(value, Mapping) or value.keys() - {key, *others}:
            raise NanoinferError(
                f"{name}={show(value)} is not supported (accepted: a dict with {key}): change config.json"
            )
        if value.get(key) is not None:
            own[key] = value[key].lower() if key == "pooling_type" and isinstance(value[key], str) else value[key]
        ignored += [f"{name}[{other!r}] (config.json describes the model)" for other in others if other in value]
    return ignored


def _check(name: str, value: Any, given: Mapping[str, Any]) -> None:
    known, value = FOREIGN[name], plain(value)
    if not known.accepts(value, given):
        accepted = known.accepted.replace("`", "")
        raise NanoinferError(
            f"{name}={show(value)} is not supported (accepted: {accepted}): {known.why}: {known.remedy}"
        )


def llm_signature() -> Signature:
    """Return the signature of `LLM.__init__` with all options."""
    options = [f for config in PARTS for f in fields(config)]
    of_chats = [f for f in fields(LLMConfig) if f.name in OF_CHATS]
    kind, positional = Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [
            Parameter("self", positional),
            Parameter("model", positional, annotation="str"),
            Parameter("tokenizer", kind, default=None, annotation="str | None"),
            Parameter("seed", kind, default=0, annotation="int"),
            *(Parameter(f.name, kind, default=f.default, annotation=f.type) for f in of_chats),
            *(Parameter(f.name, kind, default=f.default, annotation=f.type) for f in options),
        ],
        return_annotation=None,
    )


def one_of(prompts: Any, prompt_token_ids: Any) -> Any:
    """Return the prompts of `generate(prompts)` or `generate(prompt_token_ids=...)`, in a form of `prompts`.

    one_of(None, [5, 6])  ->  {"prompt_token_ids": [5, 6]}

    Raises:
        NanoinferError: none or both of them are given.
    """
    if (prompts is None) is (prompt_token_ids is None):
        raise NanoinferError("generate: give either prompts or prompt_token_ids (several prompts are a list)")
    if prompt_token_ids is None:
        return prompts
    ids = plain(prompt_token_ids)
    several = is_list(ids) and (not ids or any(is_list(plain(prompt)) for prompt in ids))
    return [{"prompt_token_ids": prompt} for prompt in ids] if several else {"prompt_token_ids": ids}


def model_defaults(given: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that a model's generation_config.json has: {"max_new_tokens": 9} -> max_tokens=9.

    Raises:
        NanoinferError: one of them is invalid.
    """
    try:
        return SamplingParams(**{"max_tokens" if name == "max_new_tokens" else name: v for name, v in given.items()})
    except NanoinferError as e:
        raise NanoinferError(f"generation_config.json: {e}: give SamplingParams, or generation_config='vllm'") from None


def _dtype(value: Any) -> Any:
    """Return the name of a dtype in any of its forms: "half", torch.float16 -> "float16"."""
    name = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
    return DTYPES.get(name, name) if isinstance(name, str) else name


@dataclass(frozen=True, init=False)
class EngineArgs(EngineConfig, SpeculationConfig, SchedulerConfig, PoolingConfig):
    """The arguments of `LLM(...)`, checked and without those that have no effect.

    `LLM(**dataclasses.asdict(args))` and `AsyncLLM.from_engine_args(args)` load the model.

    Raises:
        NanoinferError, TypeError: as `LLM`, for its arguments alone: no model is loaded.
    """

    model: str = field(kw_only=True)
    tokenizer: str | None = None
    seed: int = 0
    generation_config: str = "auto"

    def __init__(self, model: str, **options: Any) -> None:
        config = llm_config(model, options)
        for part in (config, config.engine, config.speculation, config.scheduler, config.pooling):
            for f in fields(part):
                if f.name not in ("engine", "speculation", "scheduler", "pooling") or part is not config:
                    object.__setattr__(self, f.name, getattr(part, f.name))

    @property
    def config(self) -> LLMConfig:
        """The configuration of the model."""
        options = asdict(self)
        return LLMConfig.from_options(options.pop("model"), options.pop("tokenizer"), options.pop("seed"), options)


@dataclass(frozen=True, init=False)
class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLM(...)`: see `EngineArgs`."""
