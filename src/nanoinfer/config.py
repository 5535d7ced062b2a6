"""The configuration of models, engines, speculation and the scheduler, as frozen dataclasses; the GPT-2 presets.

The line under each field is its `--help` text. This module does not import PyTorch, because the scheduler and the
command line's help use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from typing import Any

from nanoinfer.checks import keep_int, require_bool, require_choice, require_float, require_int, show
from nanoinfer.errors import NanoinferError

ACTIVATIONS = ("gelu_new", "gelu")
DTYPES = ("float32", "bfloat16", "float16")
CACHE_DTYPES = ("float32", "bfloat16", "int8")
RULES = ("reproduce", "reject")
SAMPLERS = ("auto", "reference", "flashinfer")
MIB = 1 << 20


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model of the GPT-2 family, with nanoGPT's names.

    Raises:
        NanoinferError: a field is out of range, or `n_embd` is not a multiple of `n_head`.
    """

    vocab_size: int = 50257
    """Number of rows of the token embedding and of the output head."""
    block_size: int = 1024
    """Context length: the number of learned positions."""
    n_layer: int = 12
    """Number of transformer blocks."""
    n_head: int = 12
    """Number of attention heads in each block."""
    n_embd: int = 768
    """Width of the residual stream."""
    n_inner: int | None = None
    """Width of the MLP's hidden layer; None: 4 * n_embd."""
    bias: bool = True
    """Whether linear layers and layer norms have biases."""
    activation: str = "gelu_new"
    """`gelu_new` (tanh approximation, as OpenAI's GPT-2) or `gelu` (exact, as nanoGPT)."""
    layer_norm_epsilon: float = 1e-5
    """Constant added to the variance in layer norms."""
    tie_word_embeddings: bool = True
    """Whether the output head shares the weights of the token embedding."""
    bos_token_id: int | None = None
    """Token that replaces an empty prompt; None: an empty prompt is an error."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence; the first separates documents in training. Empty: the model has no end token."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            require_int(name, getattr(self, name), 1, 2**31 - 1)
        if self.n_inner is not None:
            require_int("n_inner", self.n_inner, 1, 2**31 - 1)
        if self.n_embd % self.n_head:
            raise NanoinferError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        require_bool("bias", self.bias)
        require_bool("tie_word_embeddings", self.tie_word_embeddings)
        require_choice("activation", self.activation, ACTIVATIONS)
        require_float("layer_norm_epsilon", self.layer_norm_epsilon, 0.0, 1.0)
        if self.bos_token_id is not None:
            require_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        if not isinstance(self.eos_token_ids, tuple):
            raise NanoinferError(f"eos_token_ids={show(self.eos_token_ids)} is not a tuple of token ids")
        for token_id in self.eos_token_ids:
            require_int("eos_token_ids", token_id, 0, self.vocab_size - 1)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.n_layer * self.n_embd * bytes_per_value


def _gpt2(n_layer: int, n_head: int, n_embd: int) -> ModelConfig:
    return ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, bos_token_id=50256, eos_token_ids=(50256,))


PRESETS: dict[str, ModelConfig] = {
    "gpt2": _gpt2(n_layer=12, n_head=12, n_embd=768),  # 124M parameters
    "gpt2-medium": _gpt2(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": _gpt2(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": _gpt2(n_layer=48, n_head=25, n_embd=1600),  # 1,558M
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine and the sampler. "auto" and None are resolved when the engine is built."""

    engine: str = "auto"
    """Engine that runs the model; auto is the fastest that supports it. `nanoinfer engines` lists them."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: cuda if available, else cpu."""
    dtype: str = "auto"
    """Dtype of the weights: float32, bfloat16 or float16; auto is float32 on a CPU, 16 bits on a GPU."""
    quantization: str | None = None
    """Weight format: int8 or int4, on engines that have it (default: the dtype)."""
    max_num_seqs: int | None = None
    """Maximum number of concurrent sequences (default: as many as kv_cache_memory holds, up to 64)."""
    kv_cache_memory: int | None = None
    """Memory for keys and values, in bytes (default: a quarter of the free memory)."""
    kv_cache_dtype: str = "auto"
    """Dtype of keys and values on engine native: float32, bfloat16 or int8."""
    threads: int | None = None
    """CPU threads of engine native (default: the number of CPUs of this process)."""
    graph_memory: int | None = None
    """Maximum memory for CUDA graphs, in bytes (default: an eighth of the free memory)."""
    sampler: str = "auto"
    """auto (fastest that matches the reference token for token), reference, or flashinfer (same distribution)."""

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, ("auto", *DTYPES))
        require_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", *CACHE_DTYPES))
        require_choice("sampler", self.sampler, SAMPLERS)
        keep_int(self, "threads", 1, 1024, optional=True)
        keep_int(self, "max_num_seqs", 1, 65536, optional=True)
        keep_int(self, "kv_cache_memory", 1, optional=True)
        keep_int(self, "graph_memory", 0, optional=True)


@dataclass(frozen=True)
class EngineLimits:
    """Capacity of an engine."""

    max_num_seqs: int
    """Maximum number of open sequences."""
    block_size: int
    """Maximum number of tokens in one sequence."""
    max_num_cached_tokens: int
    """Maximum number of tokens in all open sequences together."""


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of speculative decoding."""

    draft: str | None = None
    """Draft source: prompt-lookup, a model, a draft head, self:int8, self:int4, self:LAYERS or auto (default: none)."""
    speculate_k: str | int = "auto"
    """Tokens proposed per step: 1 to 64, or auto (adapts to the acceptance rate; may be 0)."""
    speculate_rule: str = "reproduce"
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
        require_choice("speculate_rule", self.speculate_rule, RULES)

    @property
    def fixed_k(self) -> int | None:
        """Tokens proposed in each step; None for auto."""
        return self.speculate_k if isinstance(self.speculate_k, int) else None


@dataclass(frozen=True)
class LLMConfig:
    """The complete configuration of an LLM: the model, and how to run it."""

    model: str
    """Model name or path, as `models.checkpoints.load.load_model` accepts it."""
    tokenizer: str | None = None
    """Path of the tokenizer; None: the model's own."""
    seed: int = 0
    """Seed of random weights."""
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    @classmethod
    def from_options(cls, model: str, tokenizer: str | None, seed: int, options: dict[str, Any]) -> LLMConfig:
        """Return the configuration from keyword options: fields of EngineConfig and SpeculationConfig.

        Raises:
            TypeError: neither class has a field of that name.
        """
        names = {f.name for f in fields(SpeculationConfig)}
        speculation = {name: value for name, value in options.items() if name in names}
        engine = {name: value for name, value in options.items() if name not in names}
        for name in engine.keys() - {f.name for f in fields(EngineConfig)}:
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
        return cls(model, tokenizer, seed, EngineConfig(**engine), SpeculationConfig(**speculation))


def llm_signature() -> Signature:
    """Return the signature of `LLM.__init__` with all options."""
    options = [f for config in (EngineConfig, SpeculationConfig) for f in fields(config)]
    kind, positional = Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [
            Parameter("self", positional),
            Parameter("model", positional, annotation="str"),
            Parameter("tokenizer", kind, default=None, annotation="str | None"),
            Parameter("seed", kind, default=0, annotation="int"),
            *(Parameter(f.name, kind, default=f.default, annotation=f.type) for f in options),
        ],
        return_annotation=None,
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler: the capacity of the engine, and the size of one step."""

    max_num_seqs: int
    """Maximum number of open sequences."""
    block_size: int
    """Maximum number of tokens in one sequence: the model's context length."""
    max_num_cached_tokens: int | None = None
    """Maximum number of tokens in all open sequences together; None: max_num_seqs * block_size."""
    max_num_batched_tokens: int = field(default=2048)
    """Maximum number of tokens in one step; longer prompts are split into chunks."""

    def __post_init__(self) -> None:
        keep_int(self, "max_num_seqs", 1)
        keep_int(self, "block_size", 1)
        keep_int(self, "max_num_batched_tokens", 1)
        keep_int(self, "max_num_cached_tokens", 1, optional=True)
