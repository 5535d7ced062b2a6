"""The configuration of models as a frozen dataclass. engine_config.py has those of engines, speculation and scheduler.

This module does not import PyTorch: the scheduler and the help use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanoinfer.engine_config import DTYPES as DTYPES  # of this module to all others
from nanoinfer.engine_config import GENERATION_CONFIGS as GENERATION_CONFIGS
from nanoinfer.engine_config import OF_CHATS as OF_CHATS
from nanoinfer.engine_config import PARTS as PARTS
from nanoinfer.engine_config import SAMPLERS as SAMPLERS
from nanoinfer.engine_config import EngineConfig as EngineConfig
from nanoinfer.engine_config import EngineLimits as EngineLimits
from nanoinfer.engine_config import LLMConfig as LLMConfig
from nanoinfer.engine_config import SchedulerConfig as SchedulerConfig
from nanoinfer.engine_config import SpeculationConfig as SpeculationConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.layer_config import Experts as Experts  # of this module to all others
from nanoinfer.layer_config import Latent as Latent
from nanoinfer.layer_config import LayerKind as LayerKind
from nanoinfer.layer_config import Rotary as Rotary
from nanoinfer.layer_config import check_kv_layers
from nanoinfer.utils.checks import require_bool, require_choice, require_float, require_int, show

ACTIVATIONS = ("gelu_new", "gelu", "silu", "relu", "relu2", "clamped_silu")
BIASES = ("norm", "qkv", "proj", "mlp")
"""Parts of a model that may have biases: norms; queries, keys and values; attention's output; the MLP."""
CHOICES = {
    "activation": ACTIVATIONS,
    "norm": ("layer", "rms"),
    "norm_weight": ("plain", "one_plus", "none"),
    "norm_placement": ("before", "after", "both", "shared"),
    "qk_norm": ("none", "head", "heads", "whole"),
}
"""Fields of ModelConfig that are one of several names."""
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
    """Where biases are: some of BIASES. True: everywhere; False: nowhere. Experts: `Experts.bias`."""
    activation: str = "gelu_new"
    """One of ACTIVATIONS: gelu_new (tanh approximation), gelu (exact), silu, relu, relu2 (its square), clamped_silu (of
    gated MLPs: models/layers.py)."""
    norm_epsilon: float = 1e-5
    """Constant added to the variance or the mean square in norms."""
    tie_word_embeddings: bool = True
    """Whether the output head shares the weights of the token embedding."""
    bos_token_id: int | None = None
    """Token that replaces an empty prompt; None: an empty prompt is an error."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence; the first separates documents in training. Empty: the model has no end token."""
    family: str = "gpt2"
    """Family (models/families) that reads and writes this model's checkpoints."""
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
    """Norm of queries and keys: none, head (each head alone, all with the same weights), heads (each head alone, with
    weights of its own and no biases; a layer norm) or whole (all heads together)."""
    attention_scale: float | None = None
    """Factor of attention scores; None: head_dim**-0.5."""
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: bool = False
    """Whether each head has a learned score that only the sum of its softmax contains."""
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
    sub_norms: bool = False
    """Whether attention's output and the MLP's hidden layer are normalised before the matrices that follow them."""
    rounded_inputs: bool = False
    """Whether the inputs of a layer's matrices are rounded to 8 bits, with one scale for each token."""
    experts: Experts | None = None
    """The mixture of experts in the layers that have one."""
    per_layer_dim: int = 0
    """Width of the embedding that each token has for each layer; 0: there is none."""
    latent: Latent | None = None
    """Latent attention, in all layers. head_size is then `Latent.head_dim`, and num_kv_heads is 1."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_head", "n_embd"):
            require_int(name, getattr(self, name), 1, 2**31 - 1)
        require_int("n_layer", self.n_layer, 1, MAX_LAYERS)
        require_int("per_layer_dim", self.per_layer_dim, 0, 2**31 - 1)
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
        if self.qk_norm == "heads" and (self.norm, self.norm_weight) != ("layer", "plain"):
            raise NanoinferError("qk_norm=heads needs norm=layer and norm_weight=plain")
        if self.head_bias and self.tie_word_embeddings:
            raise NanoinferError("head_bias=True needs tie_word_embeddings=False")
        if self.sub_norms and not (self.gated_mlp and self.norm == "rms" and self.experts is None):
            raise NanoinferError("sub_norms=True needs norm=rms, gated_mlp=True and no experts")
        if self.rounded_inputs and (self.experts is not None or self.per_layer_dim):
            raise NanoinferError("rounded_inputs=True is not supported with experts or per-layer embeddings")
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
        most = None if self.latent is None else self._check_latent(self.latent)
        for kind, i in {kind: i for i, kind in enumerate(self.layers)}.items():
            kind.check(most or self.at(i).head_dim)
        check_kv_layers(self.layers, lambda i: (self.at(i).n_kv_head, self.at(i).head_dim))
        if self.experts is None and any(kind.experts for kind in self.layers):
            raise NanoinferError("a layer has experts, but the config does not describe them: set experts")
        if self.experts is not None:
            require_int("experts * n_embd", self.experts.count * self.n_embd, 1, 2**31 - 1)
            if not self.gated_mlp:
                raise NanoinferError("experts need gated_mlp=True: each expert is a gated MLP")
            places = self.norm, self.norm_placement, all(kind.experts for kind in self.layers)
            if self.experts.beside and places != ("rms", "both", True):
                raise NanoinferError(
                    "experts beside an MLP need norm=rms, norm_placement=both, and to be in every layer"
                )
        if self.activation == "clamped_silu" and not self.gated_mlp:
            raise NanoinferError("activation=clamped_silu needs gated_mlp=True: it clamps the product's factors")
        rotaries = {kind.rotary for kind in self.layers if kind.rotary is not None}
        if len({(r.query_growth, r.query_growth and r.original_context) for r in rotaries}) > 1:
            raise NanoinferError("query_growth differs between layers: give all rotated layers the same")

    def _check_latent(self, latent: Latent) -> int:
        """Return how much of a head may be rotated."""
        if (self.head_dim, self.n_kv_head, self.norm) != (latent.head_dim, 1, "rms"):
            raise NanoinferError(f"latent attention needs head_size={latent.head_dim}, num_kv_heads=1 and norm=rms")
        found = [f"{name}=True" for name in ("sinks", "sub_norms", "rounded_inputs") if getattr(self, name)]
        found += [f"qk_norm={self.qk_norm}"] if self.qk_norm != "none" else []
        found += [kind.differing for kind in self.layers if kind.differing is not None]
        found += ["query_growth" for kind in self.layers if kind.rotary is not None and kind.rotary.query_growth]
        if found:
            raise NanoinferError(f"latent attention is not supported with {found[0]}")
        return latent.rotary_dim

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
    def biases(self) -> tuple[str, ...]:
        """Where biases are: some of BIASES."""
        return self.bias if isinstance(self.bias, tuple) else BIASES if self.bias else ()

    def layer(self, index: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layers[index] if self.layers else LayerKind()

    def at(self, layer: int) -> ModelConfig:
        """Return the config with the sizes of a layer, and without `layers`; itself if they are the model's."""
        sizes = self.layer(layer).sizes
        return replace(self, layers=(), **sizes) if sizes else self

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to, in most models its own."""
        of = self.layer(layer).kv_layer
        return layer if of is None else of

    @property
    def differing(self) -> str | None:
        """What most models do not have, for messages: layers of several sizes or without keys, for example; or None."""
        found = next(filter(None, (kind.differing for kind in self.layers)), None)
        beside = self.experts is not None and self.experts.beside
        return "per-layer embeddings" if self.per_layer_dim else "experts beside an MLP" if beside else found

    def qkv_widths(self, layer: int) -> tuple[int, ...]:
        """Return the widths of what a layer projects to: queries, keys and values, without those that it lacks.

        Of latent attention: queries or 0, their latent or 0, and what the keys of all heads are made of.
        """
        if (latent := self.latent) is not None:
            return 0 if latent.query_rank else self.n_head * latent.query_dim, latent.query_rank, latent.head_dim
        at = self.at(layer)
        return (at.attn_dim, at.kv_dim, at.kv_dim)[: self.layer(layer).num_projections]

    @property
    def windows(self) -> set[int | None]:
        """The different windows of the layers."""
        return {self.layer(i).window for i in range(self.n_layer)}

    @property
    def block_norms(self) -> tuple[str, ...]:
        """The norms of a block, in the order of its operations; those of queries and keys are not among them.

        An MLP with experts beside it has its norms inside (models/beside.py), but for the last one.
        """
        names = _BLOCK_NORMS[self.norm_placement]
        beside = self.experts is not None and self.experts.beside
        return tuple(name for name in names if name != "ln_2") if beside else names

    @property
    def is_gpt2(self) -> bool:
        """Whether the layers are GPT-2's, apart from sizes, biases and the variant of GELU."""
        sizes = {name: getattr(self, name) for name in _GPT2_FIELDS}
        return self.activation in ("gelu_new", "gelu") and self == ModelConfig(**sizes)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * bytes_per_value * sum(self.at(i).kv_dim for i in range(self.n_layer) if self.kv_layer(i) == i)


_GPT2_FIELDS = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner", "bias", "activation", "norm_epsilon",
    "tie_word_embeddings", "bos_token_id", "eos_token_ids", "family",
)  # fmt: skip
_FLAGS = (
    "tie_word_embeddings", "learned_positions", "parallel_residual", "gated_mlp", "embedding_norm", "head_bias",
    "sinks", "sub_norms", "rounded_inputs",
)  # fmt: skip
_FACTORS = (
    "attention_scale", "attention_softcap", "embedding_scale", "logits_softcap", "residual_scale", "final_scale",
)  # fmt: skip
_BLOCK_NORMS = {
    "before": ("ln_1", "ln_2"),
    "after": ("post_1", "post_2"),
    "both": ("ln_1", "post_1", "ln_2", "post_2"),
    "shared": ("ln_1",),
}
