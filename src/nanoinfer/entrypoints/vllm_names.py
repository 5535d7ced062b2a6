"""vLLM's names for what `LLM(...)` takes: its most used arguments that are no options here, dtypes, None as a default.

LLM(model, tensor_parallel_size=1)      ->  the same as LLM(model), and a line in the log
LLM(model, tensor_parallel_size=2)      ->  NanoinferError: tensor_parallel_size=2 is not supported ...
LLM(model, dtype="half")                ->  the same as LLM(model, dtype="float16")

docs/from-vllm.md lists the names. Any other name that is no option is a TypeError, which names that page.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

from nanoinfer.config import OF_CHATS, PARTS, LLMConfig
from nanoinfer.errors import NanoinferError, show
from nanoinfer.sampling_params import SamplingParams

log = logging.getLogger("nanoinfer")

_ONE_DEVICE = "one device computes: run a process for each device"
_TASKS = "a model generates, embeds and scores: use vLLM for classes and rewards"
FOREIGN: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), _ONE_DEVICE),
    "pipeline_parallel_size": ((1,), _ONE_DEVICE),
    "distributed_executor_backend": ((None, "uni"), _ONE_DEVICE),
    "gpu_memory_utilization": ((), "kv_cache_memory is the memory of keys and values, in bytes"),
    "block_size": ((None, 16), "a block has 16 tokens; max_model_len is the context length"),
    "swap_space": ((), "no keys and values are swapped"),
    "cpu_offload_gb": ((0,), "all weights are on the device: give device='cpu', or a quantization"),
    "enforce_eager": ((), "engine='static' neither captures nor compiles"),
    "enable_chunked_prefill": ((None, True), "give max_num_batched_tokens as long as the context, target_step_ms=0"),
    "speculative_config": ((None,), "give draft='prompt-lookup' (ngram) or a model, and speculate_k"),
    "disable_log_stats": ((), "RequestOutput.metrics and a server's /metrics have the statistics"),
    "max_logprobs": ((), "each request may ask for 1,000"),
    "task": (("auto", "generate", "embed", "score"), _TASKS),
    "runner": (("auto", "generate", "pooling"), _TASKS),
    "limit_mm_per_prompt": ((None,), "models here read text only"),
    "max_cpu_loras": ((), "max_loras adapters are in memory"),
    "lora_dtype": (("auto",), "the factors have the model's dtype"),
    "trust_remote_code": ((False, True), "no code in a model's files runs"),
    "tokenizer_mode": (("auto", "hf"), "give tokenizer= a folder or a file"),
    "revision": ((None, "main"), "download it by huggingface_hub.snapshot_download, and give its folder"),
    "download_dir": ((), "the environment variable HF_HUB_CACHE is the folder of downloads"),
}
"""Argument -> the values that have no effect (none: any value has none), and what holds here, or is to be done."""
DTYPES = {"half": "float16", "float": "float32"}
"""Other names of dtypes. PyTorch's dtypes are accepted, too."""
_NONE_IS_DEFAULT = ("seed", "max_num_batched_tokens", "enable_prefix_caching")


def llm_config(model: str, options: Mapping[str, Any]) -> LLMConfig:
    """Return the configuration of `LLM(model, **options)`, whose options have this project's names or vLLM's.

    Values that have no effect are logged, in one line.

    Raises:
        NanoinferError: a value is invalid, or asks for something that is not here; the message has the remedy.
        TypeError: there is no option of that name.
    """
    foreign = {name: value for name, value in options.items() if name in FOREIGN}
    own = {name: value for name, value in options.items() if name not in FOREIGN}
    own = {name: value for name, value in own.items() if value is not None or name not in _NONE_IS_DEFAULT}
    if "dtype" in own:
        own["dtype"] = _dtype(own["dtype"])
    tokenizer, seed = own.pop("tokenizer", None), own.pop("seed", 0)
    config = LLMConfig.from_options(model, tokenizer, seed, own)
    for name, value in foreign.items():
        accepted, remedy = FOREIGN[name]
        if accepted and value not in accepted:
            values = ", ".join(map(repr, accepted))
            raise NanoinferError(f"{name}={show(value)} is not supported (accepted: {values}): {remedy}")
    if foreign:
        ignored = ", ".join(f"{name}={show(value)} ({FOREIGN[name][1]})" for name, value in foreign.items())
        log.warning("vLLM's arguments without effect here (docs/from-vllm.md): %s", ignored)
    if seed and "random:" not in str(model):
        log.warning("seed=%s is that of random weights: give SamplingParams(seed=...) for reproducible outputs", seed)
    return config


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


def model_defaults(values: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that a model's generation_config.json has: {"max_new_tokens": 9} -> max_tokens=9.

    Raises:
        NanoinferError: one of them is invalid.
    """
    try:
        return SamplingParams(**{"max_tokens" if name == "max_new_tokens" else name: v for name, v in values.items()})
    except NanoinferError as e:
        raise NanoinferError(f"generation_config.json: {e}: give SamplingParams, or generation_config='vllm'") from None


def _dtype(value: Any) -> Any:
    """Return the name of a dtype in any of its forms: "half", torch.float16 -> "float16"."""
    name = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
    return DTYPES.get(name, name) if isinstance(name, str) else name
