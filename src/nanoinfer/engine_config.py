"""The configuration of engines, speculation and the scheduler, as frozen dataclasses. A part of config.py.

The line under each field is its `--help` text. This module does not import PyTorch: the scheduler and the help use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from nanoinfer.errors import NanoinferError, show
from nanoinfer.sampling_params import PoolingConfig
from nanoinfer.utils.checks import bounded, chosen, keep_fields, keep_int

DTYPES = ("float32", "bfloat16", "float16")
CACHE_DTYPES = ("float32", "bfloat16", "int8", "int4")
RULES = ("reproduce", "reject")
SAMPLERS = ("auto", "reference")
GENERATION_CONFIGS = ("auto", "vllm")
MAX_K = 12  # of num_speculative_tokens that is chosen at run time


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine and the sampler. "auto" and None are resolved when the engine is built."""

    engine: str = "auto"
    """Engine that runs the model; auto is the fastest that supports it. `nanoinfer engines` lists them."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: cuda if available, else cpu."""
    dtype: str = chosen("auto", ("auto", *DTYPES))
    """Dtype of the weights: float32, bfloat16 or float16; auto: the checkpoint's, without float16 on CPUs."""
    quantization: str | None = None
    """Weight format: int8 or int4, on engines that have it (default: the dtype)."""
    max_model_len: int | None = bounded(None, 1)
    """Context length in tokens, at most the model's (default: the model's)."""
    max_num_seqs: int | None = bounded(None, 1, 65536)
    """Maximum number of concurrent sequences (default: as many as kv_cache_memory holds, up to 64)."""
    kv_cache_memory: int | None = bounded(None, 1)
    """Memory for keys and values, in bytes (default: a quarter of the free memory)."""
    kv_cache_dtype: str = chosen("auto", ("auto", *CACHE_DTYPES))
    """Dtype of keys and values: float32, bfloat16 (engine native), int8 or int4 (engines in PyTorch: rounded to it)."""
    threads: int | None = bounded(None, 1, 1024)
    """CPU threads of engine native (default: the number of CPUs of this process)."""
    graph_memory: int | None = bounded(None, 0)
    """Maximum memory for CUDA graphs, in bytes (default: an eighth of the free memory)."""
    enable_lora: bool = False
    """Whether requests may name LoRA adapters (docs/lora.md)."""
    max_loras: int = bounded(8, 1, 1024)
    """Maximum number of adapters in memory."""
    max_lora_rank: int = bounded(16, 1, 1024)
    """Maximum rank of an adapter."""
    max_speculate_k: int = bounded(0, 0, 64)
    """Proposals per step that the states of recurrent layers leave room to reject (default: those of the draft)."""
    sampler: str = chosen("auto", SAMPLERS)
    """auto (the fastest one, whose tokens are the reference's), or reference."""

    def with_adapters(self, count: int) -> EngineConfig:
        """Return options for a model with at least `count` adapters; 0: the same."""
        return replace(self, enable_lora=True, max_loras=max(self.max_loras, count)) if count else self

    def __post_init__(self) -> None:
        keep_fields(self)


@dataclass(frozen=True)
class EngineLimits:
    """Capacity of an engine."""

    max_num_seqs: int
    """Maximum number of running sequences."""
    block_size: int
    """Maximum number of tokens in one sequence."""
    max_num_cached_tokens: int
    """Maximum number of tokens in all open sequences together; of a pool, the places in all blocks."""
    max_idle_seqs: int = 0
    """Maximum number of idle sequences that stay open beside the running ones; 0 where each reserves memory."""
    num_states: int = 0
    """Number of states of recurrent layers that open sequences and kept prefixes share (kv/states.py)."""
    num_pending: int = 1
    """Newest tokens of a sequence whose inputs a state keeps."""


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of speculative decoding."""

    draft: str | None = None
    """Draft source: prompt-lookup[:shared], mtp, a model, self:int8, self:int4, self:LAYERS or auto (default: none)."""
    speculate_k: str | int = "auto"
    """Tokens proposed per step: 1 to 64, or auto (adapts to the acceptance rate; may be 0)."""
    speculate_rule: str = chosen("reproduce", RULES)
    """reproduce: exactly the tokens of plain decoding; reject: the same distribution, higher acceptance."""

    def __post_init__(self) -> None:
        if self.draft is not None and (not isinstance(self.draft, str) or not self.draft):
            raise NanoinferError(f"draft={show(self.draft)} is neither a name nor None")
        k: Any = self.speculate_k
        if isinstance(k, str) and k.isdecimal() and len(k) <= 100:  # Python refuses to parse more than 4,300 digits
            object.__setattr__(self, "speculate_k", k := int(k))
        if not isinstance(k, str):
            keep_int(self, "speculate_k", 1, 64)
        elif k != "auto":
            raise NanoinferError(f"speculate_k={show(k)} is neither auto nor an integer in [1, 64]")
        keep_fields(self)

    @property
    def fixed_k(self) -> int | None:
        """Tokens proposed in each step; None for auto."""
        return self.speculate_k if isinstance(self.speculate_k, int) else None


@dataclass(frozen=True)
class SchedulerConfig:
    """Options of the scheduler."""

    max_num_batched_tokens: int = bounded(2048, 1)
    """Maximum number of tokens in one step; longer prompts are split into chunks."""
    max_num_queued: int | None = bounded(None, 1)
    """Maximum number of requests that wait to be admitted; more are refused (default: any number)."""
    enable_prefix_caching: bool = True
    """Whether requests that begin with the same tokens share their keys and values."""
    prefix_cache_file: str | None = None
    """File that keeps the prefix cache of engine native: read at the start, written at exit (default: none)."""
    target_step_ms: int | None = bounded(80, 0, 1_000_000)
    """Time of a step in ms that limits its prompt tokens while streamed requests decode; 0: no limit."""

    def __post_init__(self) -> None:
        keep_fields(self)
        if self.prefix_cache_file is not None and (
            not isinstance(self.prefix_cache_file, str) or not self.prefix_cache_file or not self.enable_prefix_caching
        ):
            raise NanoinferError(
                f"prefix_cache_file={show(self.prefix_cache_file)}: give the name of a file, and enable_prefix_caching"
            )


OF_CHATS = ("generation_config", "chat_template")
"""Fields of LLMConfig that are options of `LLM` and in none of PARTS."""
PARTS = (EngineConfig, SpeculationConfig, SchedulerConfig, PoolingConfig)  # in the order of LLMConfig's fields


@dataclass(frozen=True)
class LLMConfig:
    """The complete configuration of an LLM: the model, and how to run it."""

    model: str
    """Model name or path, as `models.checkpoints.load.load_model` accepts it."""
    tokenizer: str | None = None
    """Path of the tokenizer; None: the model's own."""
    seed: int = 0
    """Seed of random weights."""
    generation_config: str = chosen("auto", GENERATION_CONFIGS)
    """auto: sampling parameters that are not given come from the model's generation_config.json; vllm: they do not."""
    chat_template: str | None = None
    """Jinja template to use instead of the model's own."""
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    def __post_init__(self) -> None:
        keep_fields(self)
        if self.chat_template is not None and not (isinstance(self.chat_template, str) and self.chat_template):
            raise NanoinferError(f"chat_template={show(self.chat_template)} is not a Jinja template")

    @classmethod
    def from_options(cls, model: str, tokenizer: str | None, seed: int, options: dict[str, Any]) -> LLMConfig:
        """Return the configuration from the fields of OF_CHATS and PARTS.

        Raises TypeError if none of them has a field of that name.
        """
        options = dict(options)
        of_chats = {name: options.pop(name) for name in OF_CHATS if name in options}
        owner = {f.name: kind for kind in PARTS for f in fields(kind)}
        fields_of: dict[Any, dict[str, Any]] = {kind: {} for kind in PARTS}
        for name, value in options.items():
            if name not in owner:
                raise TypeError(
                    f"LLM() got an unexpected keyword argument {name!r}: help(LLM) and docs/from-vllm.md list them"
                )
            fields_of[owner[name]][name] = value
        engine, speculation, scheduler, pooling = (kind(**values) for kind, values in fields_of.items())
        return cls(
            model, tokenizer, seed, **of_chats,
            engine=engine, speculation=speculation, scheduler=scheduler, pooling=pooling,
        )  # fmt: skip
