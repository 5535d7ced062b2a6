"""The configuration of models, engines, speculation and the scheduler, as frozen dataclasses.

The line under each field is its `--help` text. This module does not import PyTorch: the scheduler and the help use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.layer_config import Experts as Experts  # of this module to all others
from nanoinfer.layer_config import Latent as Latent
from nanoinfer.layer_config import LayerKind as LayerKind
from nanoinfer.layer_config import Rotary as Rotary
from nanoinfer.pooling_params import PoolingConfig
from nanoinfer.utils.checks import keep_int, require_bool, require_choice, require_float, require_int, show

ACTIVATIONS = ("gelu_new", "gelu", "silu", "relu2")
BIASES = ("norm", "qkv", "proj", "mlp")
"""Parts of a model that may have biases: norms; queries, keys and values; attention's output; the MLP."""
CHOICES = {
    "activation": ACTIVATIONS,
    "norm": ("layer", "rms"),
    "norm_weight": ("plain", "one_plus", "none"),
    "norm_placement": ("before", "after", "both", "shared"),
    "qk_norm": ("none", "head", "whole"),
}
"""Fields of ModelConfig that are one of several names."""
DTYPES = ("float32", "bfloat16", "float16")
CACHE_DTYPES = ("float32", "bfloat16", "int8")
RULES = ("reproduce", "reject")
SAMPLERS = ("auto", "reference", "flashinfer")
GENERATION_CONFIGS = ("auto", "vllm")
MAX_LAYERS = 10_000
"""Each layer of a config is described, before the weights are compared with their number."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer as data. The defaults describe GPT-2; other families set the fields that differ.

    Raises:
        NanoinferError: a field is out of range, or fields contradict each other.
    """

    vocab_size: int = 50257
    """Number of rows of the token embedding and of the output head."""
    block_size: int = 1024
    """Context length in tokens."""
    n_layer: int = 12
    """Number of transformer blocks."""
    n_head: int = 12
    """Number of attention heads (of queries) in each block."""
    n_embd: int = 768
    """Width of the residual stream."""
    n_inner: int | None = None
    """Width of the MLP's hidden layer; None: 4 * n_embd."""
    bias: bool | tuple[str, ...] = True
    """Where biases are: some of BIASES. True: everywhere; False: nowhere. Experts have none."""
    activation: str = "gelu_new"
    """One of ACTIVATIONS: gelu_new (tanh approximation), gelu (exact), silu, relu2 (the square of relu)."""
    norm_epsilon: float = 1e-5
    """Constant added to the variance or the mean square in norms."""
    tie_word_embeddings: bool = True
    """Whether the output head shares the weights of the token embedding."""
    bos_token_id: int | None = None
    """Token that replaces an empty prompt; None: an empty prompt is an error."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence; the first separates documents in training. Empty: the model has no end token."""
    family: str = "gpt2"
    """Family whose file in models/families reads and writes this model's checkpoints."""
    num_kv_heads: int | None = None
    """Number of heads of keys and values, each shared by several heads of queries; None: n_head."""
    head_size: int | None = None
    """Width of one head; None: n_embd / n_head."""
    learned_positions: bool = True
    """Whether a learned vector for each position is added to the token embedding."""
    layers: tuple[LayerKind, ...] = ()
    """The kind of each layer; empty: all are `LayerKind()`."""
    norm: str = "layer"
    """layer (subtracts the mean) or rms."""
    norm_weight: str = "plain"
    """What norms multiply by: plain (the weight), one_plus (1 + the weight), or none."""
    norm_placement: str = "before"
    """Where the norms of a block stand: before attention and MLP, after them (before the residual), or both; shared:
    attention and MLP, in parallel, have the same one before them."""
    parallel_residual: bool = False
    """Whether attention and MLP read the same input, and the block adds both."""
    gated_mlp: bool = False
    """Whether the MLP's hidden layer is activation(gate(x)) * fc(x)."""
    qk_norm: str = "none"
    """Norm of queries and keys: none, head (each head alone) or whole (all heads together)."""
    attention_scale: float | None = None
    """Factor of attention scores; None: head_dim**-0.5."""
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    embedding_scale: float | None = None
    """Factor of the token embedding."""
    embedding_norm: bool = False
    """Whether the embedding is normalised before the first block."""
    residual_scale: float | None = None
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    final_scale: float | None = None
    """Factor of the final hidden states, and thereby of the logits."""
    head_bias: bool = False
    """Whether the output head has biases."""
    logits_softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap)."""
    experts: Experts | None = None
    """The mixture of experts in the layers that have one."""
    latent: Latent | None = None
    """Latent attention, in all layers. head_size is then `Latent.head_dim`, and num_kv_heads is 1."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_head", "n_embd"):
            require_int(name, getattr(self, name), 1, 2**31 - 1)
        require_int("n_layer", self.n_layer, 1, MAX_LAYERS)
        if self.n_inner is not None:
            require_int("n_inner", self.n_inner, 1, 2**31 - 1)
        self._check_heads()
        self._check_biases()
        for name, choices in CHOICES.items():
            require_choice(name, getattr(self, name), choices)
        for name in _FLAGS:
            require_bool(name, getattr(self, name))
        require_float("norm_epsilon", self.norm_epsilon, 0.0, 1.0)
        for name in _FACTORS:
            if getattr(self, name) is not None:
                require_float(name, getattr(self, name), 1e-6, 1e6)
        self._check_layers()
        if self.norm_placement == "shared" and not self.parallel_residual:
            raise NanoinferError("norm_placement=shared needs parallel_residual=True")
        if self.head_bias and self.tie_word_embeddings:
            raise NanoinferError("head_bias=True needs tie_word_embeddings=False")
        if self.bos_token_id is not None:
            require_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        if not isinstance(self.eos_token_ids, tuple):
            raise NanoinferError(f"eos_token_ids={show(self.eos_token_ids)} is not a tuple of token ids")
        for token_id in self.eos_token_ids:
            require_int("eos_token_ids", token_id, 0, self.vocab_size - 1)

    def _check_biases(self) -> None:
        """Check `bias`, and make equal places equal values: ("qkv", "norm") -> ("norm", "qkv"), all of them -> True."""
        if not isinstance(self.bias, tuple):
            return require_bool("bias", self.bias)
        for part in self.bias:
            require_choice("bias", part, BIASES)
        parts = tuple(part for part in BIASES if part in self.bias)
        object.__setattr__(self, "bias", parts if 0 < len(parts) < len(BIASES) else bool(parts))
        return None

    def _check_heads(self) -> None:
        if self.head_size is None and self.n_embd % self.n_head:
            raise NanoinferError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        require_int("head_dim", self.head_dim, 1, 2**16)
        require_int("num_kv_heads", self.n_kv_head, 1, self.n_head)
        if self.n_head % self.n_kv_head:
            raise NanoinferError(f"n_head={self.n_head} is not a multiple of num_kv_heads={self.n_kv_head}")

    def _check_layers(self) -> None:
        if self.layers and len(self.layers) != self.n_layer:
            raise NanoinferError(f"there are {len(self.layers)} kinds of layers for n_layer={self.n_layer} layers")
        most = self.head_dim if self.latent is None else self.latent.checked(self.head_dim, self.n_kv_head, self.norm)
        for kind in set(self.layers):
            if kind.window is not None:
                require_int("window", kind.window, 1, 2**31 - 1)
            if kind.rotary is not None and kind.rotary.dim > most:
                raise NanoinferError(f"rotary dim={kind.rotary.dim} is more than head_dim={most}")
            if kind.rotary is not None and kind.rotary.query_growth and kind.rotary.dim < self.head_dim:
                raise NanoinferError(f"query_growth needs rotary dim={self.head_dim}, the whole head")
        if self.experts is None and any(kind.experts for kind in self.layers):
            raise NanoinferError("a layer has experts, but the config does not describe them: set experts")
        if self.experts is not None:
            require_int("experts * n_embd", self.experts.count * self.n_embd, 1, 2**31 - 1)
            if not self.gated_mlp:
                raise NanoinferError("experts need gated_mlp=True: each expert is a gated MLP")
        rotaries = {kind.rotary for kind in self.layers if kind.rotary is not None}
        if len({(r.query_growth, r.query_growth and r.original_context) for r in rotaries}) > 1:
            raise NanoinferError("query_growth differs between layers: give all rotated layers the same")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    @property
    def n_kv_head(self) -> int:
        """Number of heads of keys and values, each shared by n_head / n_kv_head heads of queries."""
        return self.n_head if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def attn_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.n_head * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.n_kv_head * self.head_dim

    @property
    def attn_parts(self) -> tuple[int, ...]:
        """Widths of the parts of c_attn: queries, keys, values; of latent attention queries, their latent, keys'."""
        if (latent := self.latent) is None:
            return self.attn_dim, self.kv_dim, self.kv_dim
        return 0 if latent.query_rank else self.n_head * latent.query_dim, latent.query_rank, latent.head_dim

    @property
    def biases(self) -> tuple[str, ...]:
        """Where biases are: some of BIASES."""
        return self.bias if isinstance(self.bias, tuple) else BIASES if self.bias else ()

    def layer(self, index: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layers[index] if self.layers else LayerKind()

    @property
    def windows(self) -> set[int | None]:
        """The different windows of the layers."""
        return {self.layer(i).window for i in range(self.n_layer)}

    @property
    def block_norms(self) -> tuple[str, ...]:
        """The norms of a block, in the order of its operations; those of queries and keys are not among them."""
        return _BLOCK_NORMS[self.norm_placement]

    @property
    def is_gpt2(self) -> bool:
        """Whether the layers are GPT-2's, apart from sizes, biases and the variant of GELU."""
        sizes = {name: getattr(self, name) for name in _GPT2_FIELDS}
        return self.activation in ("gelu_new", "gelu") and self == ModelConfig(**sizes)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.n_layer * self.kv_dim * bytes_per_value


_GPT2_FIELDS = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner", "bias", "activation", "norm_epsilon",
    "tie_word_embeddings", "bos_token_id", "eos_token_ids", "family",
)  # fmt: skip
_FLAGS = ("tie_word_embeddings", "learned_positions", "parallel_residual", "gated_mlp", "embedding_norm", "head_bias")
_FACTORS = (
    "attention_scale", "attention_softcap", "embedding_scale", "logits_softcap", "residual_scale", "final_scale",
)  # fmt: skip
_BLOCK_NORMS = {
    "before": ("ln_1", "ln_2"),
    "after": ("post_1", "post_2"),
    "both": ("ln_1", "post_1", "ln_2", "post_2"),
    "shared": ("ln_1",),
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine and the sampler. "auto" and None are resolved when the engine is built."""

    engine: str = "auto"
    """Engine that runs the model; auto is the fastest that supports it. `nanoinfer engines` lists them."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: cuda if available, else cpu."""
    dtype: str = "auto"
    """Dtype of the weights: float32, bfloat16 or float16; auto: the checkpoint's, without float16 on CPUs."""
    quantization: str | None = None
    """Weight format: int8 or int4, on engines that have it (default: the dtype)."""
    max_model_len: int | None = None
    """Context length in tokens, at most the model's (default: the model's)."""
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
        keep_int(self, "max_model_len", 1, optional=True)
        keep_int(self, "max_num_seqs", 1, 65536, optional=True)
        keep_int(self, "kv_cache_memory", 1, optional=True)
        keep_int(self, "graph_memory", 0, optional=True)


@dataclass(frozen=True)
class EngineLimits:
    """Capacity of an engine."""

    max_num_seqs: int
    """Maximum number of running sequences."""
    block_size: int
    """Maximum number of tokens in one sequence."""
    max_num_cached_tokens: int
    """Maximum number of tokens in all open sequences together; of a pool, the places in all blocks."""
    max_kept_seqs: int = 0
    """Maximum number of sequences that are kept open beside the running ones; 0 where each reserves memory."""


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
class SchedulerConfig:
    """Options of the scheduler."""

    max_num_batched_tokens: int = 2048
    """Maximum number of tokens in one step; longer prompts are split into chunks."""
    max_num_queued: int | None = None
    """Maximum number of requests that wait to be admitted; more are refused (default: any number)."""
    enable_prefix_caching: bool = True
    """Whether requests that begin with the same tokens share their keys and values."""
    target_step_ms: int | None = 80
    """Time of a step in ms that limits its prompt tokens while streamed requests decode; 0: no limit."""

    def __post_init__(self) -> None:
        keep_int(self, "max_num_batched_tokens", 1)
        keep_int(self, "max_num_queued", 1, optional=True)
        keep_int(self, "target_step_ms", 0, 1_000_000, optional=True)
        require_bool("enable_prefix_caching", self.enable_prefix_caching)


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
    generation_config: str = "auto"
    """auto: sampling parameters that are not given come from the model's generation_config.json; vllm: they do not."""
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    def __post_init__(self) -> None:
        require_choice("generation_config", self.generation_config, GENERATION_CONFIGS)

    @classmethod
    def from_options(cls, model: str, tokenizer: str | None, seed: int, options: dict[str, Any]) -> LLMConfig:
        """Return the configuration from generation_config and the fields of PARTS.

        Raises TypeError if none of them has a field of that name.
        """
        options = dict(options)
        defaults = options.pop("generation_config", "auto")
        owner = {f.name: kind for kind in PARTS for f in fields(kind)}
        given: dict[Any, dict[str, Any]] = {kind: {} for kind in PARTS}
        for name, value in options.items():
            if name not in owner:
                raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
            given[owner[name]][name] = value
        return cls(model, tokenizer, seed, defaults, *(kind(**given[kind]) for kind in given))
