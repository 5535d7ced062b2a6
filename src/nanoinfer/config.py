"""The configuration of models, and of what may differ from layer to layer, as frozen dataclasses.

engine_config.py has those of engines, speculation and scheduler.

This module does not import PyTorch: the scheduler and the help use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nanoinfer.engine_config import DTYPES as DTYPES  # of this module to all others
from nanoinfer.engine_config import GENERATION_CONFIGS as GENERATION_CONFIGS
from nanoinfer.engine_config import MAX_K as MAX_K
from nanoinfer.engine_config import OF_CHATS as OF_CHATS
from nanoinfer.engine_config import PARTS as PARTS
from nanoinfer.engine_config import SAMPLERS as SAMPLERS
from nanoinfer.engine_config import EngineConfig as EngineConfig
from nanoinfer.engine_config import EngineLimits as EngineLimits
from nanoinfer.engine_config import LLMConfig as LLMConfig
from nanoinfer.engine_config import SchedulerConfig as SchedulerConfig
from nanoinfer.engine_config import SpeculationConfig as SpeculationConfig
from nanoinfer.errors import NanoinferError, show
from nanoinfer.recurrence import Latent as Latent
from nanoinfer.recurrence import Recurrence
from nanoinfer.utils import checks
from nanoinfer.utils.checks import bounded, chosen, keep_fields, require_int

SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
SCORINGS = ("softmax", "sigmoid")
ACTIVATIONS = ("gelu_new", "gelu", "silu", "relu", "relu2", "clamped_silu")
MAX = 2**31 - 1
BIASES = ("norm", "qkv", "proj", "mlp")
"""Parts of a model that may have biases: norms; queries, keys and values; attention's output; the MLP."""
MAX_LAYERS, MAX_EXPERTS = 10_000, 4096
"""Each layer and expert of a config is described, before the weights are compared with their number."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021): each pair of dimensions is rotated by an angle that grows with the
    position. Dimension i is paired with dimension i + dim / 2.

    Raises:
        NanoinferError: a field is out of range.
    """

    dim: int
    """Number of dimensions of a head that are rotated, the first ones; even."""
    base: float = bounded(10000.0, 1.0, 1e12, name="rope_theta")
    """Pair i turns by base**(-2 i / dim) radians at each position."""
    scaling: str = chosen("none", SCALINGS, name="rope_type")
    """How frequencies are lowered for longer contexts: none, linear (all), llama3 or yarn (the low ones), longrope
    (each by its own factor), proportional (all, and those of the last pairs are 0), or dynamic (none within the model's
    context length)."""
    factor: float = bounded(1.0, 1.0, 1e6, name="rope factor")
    """Scaled frequencies are divided by it."""
    low_freq_factor: float = bounded(1.0, 1e-3, 1e6)
    """llama3, yarn: frequencies with fewer turns than this in the original context are divided."""
    high_freq_factor: float = bounded(4.0, 1e-3, 1e6)
    """llama3, yarn: frequencies with more turns than this in the original context are kept; those between are
    blended."""
    original_context: int = bounded(8192, 1, 2**24, name="original_max_position_embeddings")
    """llama3, yarn, longrope, query_growth: the context length before the frequencies were scaled."""
    truncate: bool = True
    """yarn: whether the range of blended pairs is widened to whole numbers."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency if the context length is at most the original one."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency if the context length is more than the original one."""
    attention_factor: float = bounded(1.0, 1e-3, 1e3)
    """Factor of the rotated dimensions."""
    num_turning: int = 0
    """proportional: number of pairs that turn, the first ones."""
    query_growth: float = bounded(0.0, 0.0, 1e3, name="llama_4_scaling_beta")
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / original_context))."""

    def __post_init__(self) -> None:
        require_int("rotary dim", self.dim, 2, 2**16)
        if self.dim % 2:
            raise NanoinferError(f"rotary dim={self.dim} is not even")
        keep_fields(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise NanoinferError(
                f"low_freq_factor={self.low_freq_factor} is not less than high_freq_factor={self.high_freq_factor}"
            )
        require_int("num_turning", self.num_turning, 0, self.dim // 2 if self.scaling == "proportional" else 0)
        for name in ("short_factors", "long_factors"):
            factors: tuple[float, ...] = getattr(self, name)
            if len(factors) != (self.dim // 2 if self.scaling == "longrope" else 0):
                raise NanoinferError(f"{name} has {len(factors)} numbers for {self.dim // 2} pairs of dimensions")
            for factor in factors:
                checks.require_float(name, factor, 1e-3, 1e6)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of an MLP (Shazeer et al. 2017): a router chooses some MLPs for each token.

    Raises:
        NanoinferError: a field is out of range, or fields contradict each other.
    """

    count: int
    """Number of experts."""
    per_token: int
    """Number of experts that the router chooses for a token."""
    width: int
    """Width of the hidden layer of one expert."""
    normalize: bool
    """Whether the weights of the chosen experts are divided by their sum; else they are those of a softmax over all."""
    scale: float = bounded(1.0, 1e-6, 1e6, name="scale of experts")
    """Factor of the chosen experts' sum."""
    shared_width: int = bounded(0, 0, MAX, name="width of the shared expert")
    """Width of the hidden layer of an expert that all tokens take; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a product with the input."""
    bias: bool = False
    """Whether the router and the matrices of the experts have biases, but for those of the shared expert."""
    scoring: str = chosen("softmax", SCORINGS)
    """softmax (over all experts) or sigmoid (of each logit): the scores, which choose experts and become weights."""
    correction: bool = False
    """Whether each expert has a number that is added to its score where experts are chosen, not in its weight."""
    groups: int = 1
    """Number of equal groups of consecutive experts. Only experts of the groups with the highest scores are chosen."""
    groups_per_token: int = 1
    """Number of groups whose experts may be chosen for a token."""
    group_top: int = 1
    """The score of a group is the sum of its so many highest scores."""
    beside: bool = False
    """Whether the experts stand beside the layer's MLP (models/experts.py), not in its place."""

    def __post_init__(self) -> None:
        require_int("experts", self.count, 1, MAX_EXPERTS)
        require_int("experts per token", self.per_token, 1, self.count)
        require_int("width of an expert", self.width, 1, MAX // self.count)
        keep_fields(self)
        if self.shared_gate and not self.shared_width:
            raise NanoinferError("shared_gate=True needs a shared expert: set shared_width")
        require_int("groups of experts", self.groups, 1, self.count)
        if self.count % self.groups:
            raise NanoinferError(f"experts={self.count} is not a multiple of groups of experts={self.groups}")
        require_int("groups of experts per token", self.groups_per_token, 1, self.groups)
        require_int("experts per token", self.per_token, 1, self.count // self.groups * self.groups_per_token)
        require_int("experts that score a group", self.group_top, 1, self.count // self.groups)
        if self.beside and (self.shared_width or self.bias):
            raise NanoinferError("experts beside an MLP have no shared expert and no biases: leave both out")


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer."""

    window: int | None = bounded(None, 1, MAX)
    """A query attends to this many positions, its own included; None: to all earlier ones."""
    rotary: Rotary | None = None
    """Rotation of queries and keys; None: this layer has none."""
    experts: bool = False
    """Whether the MLP is a mixture of experts (`ModelConfig.experts`)."""
    n_head: int | None = bounded(None, 1, MAX)
    """Number of attention heads; None: the model's, as for the next three."""
    num_kv_heads: int | None = bounded(None, 1, MAX)
    """Number of heads of keys and values."""
    head_size: int | None = bounded(None, 1, MAX)
    """Width of one head."""
    n_inner: int | None = bounded(None, 1, MAX)
    """Width of the MLP's hidden layer."""
    kv_layer: int | None = None
    """Earlier layer whose keys and values this one attends to; None: it has its own."""
    keys_as_values: bool = False
    """Whether values are the keys as they are before their norm and rotation."""
    value_norm: bool = False
    """Whether each head of values has a norm, without weight and bias."""
    scaled: bool = False
    """Whether the block's output is multiplied by a number, which is a parameter."""
    recurrent: bool = False
    """Whether the layer has a state (`ModelConfig.recurrence`) in place of attention."""
    beside: bool = False
    """Whether a recurrent layer has attention too: both read the same input, and their outputs are added."""
    mlp: bool = True
    """Whether the layer has an MLP, or experts; else it is attention or a state alone."""

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self.beside or not self.recurrent

    @property
    def num_projections(self) -> int:
        """How many of queries, keys and values, in this order, a layer projects to."""
        return 1 if self.kv_layer is not None else 2 if self.keys_as_values else 3

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes that are not the model's, by the names of ModelConfig's fields."""
        sizes = {name: getattr(self, name) for name in ("n_head", "num_kv_heads", "head_size", "n_inner")}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def differing(self) -> str | None:
        """What most models' layers do not have, for messages, or None."""
        if self.sizes:
            return "layers of different sizes"
        if self.kv_layer is not None:
            return "layers that attend to the keys and values of others"
        if self.recurrent:
            return "recurrent layers"
        if not self.mlp:
            return "layers without an MLP"
        names = {name for name in ("keys_as_values", "value_norm", "scaled") if getattr(self, name)}
        return f"layers with {', '.join(sorted(names))}" if names else None

    def check(self, head_dim: int) -> None:
        """Raise NanoinferError if a field is out of range for heads of this width."""
        keep_fields(self)
        state = {name: getattr(self, name) for name in ("n_inner", "experts", "recurrent", "beside", "mlp")}
        if self.recurrent and self != LayerKind(rotary=self.rotary if self.beside else None, **state):
            raise NanoinferError("a recurrent layer has no window, no positions, no keys and no values: leave them out")
        if self.beside > self.recurrent or self.experts > self.mlp:
            raise NanoinferError("beside=True needs recurrent=True, and experts=True needs mlp=True")
        if self.rotary is not None and self.rotary.dim > head_dim:
            raise NanoinferError(f"rotary dim={self.rotary.dim} is more than head_dim={head_dim}")
        if self.rotary is not None and self.rotary.query_growth and self.rotary.dim < head_dim:
            raise NanoinferError(f"query_growth needs rotary dim={head_dim}, the whole head")
        if self.rotary is not None and self.rotary.query_growth and (self.sizes or self.kv_layer is not None):
            raise NanoinferError("query_growth needs the same heads of queries and keys in all layers")
        if self.kv_layer is not None and (self.keys_as_values or self.value_norm):
            raise NanoinferError(f"kv_layer={self.kv_layer}: a layer without keys has neither values nor their norm")


@dataclass(frozen=True)
class Backbone:
    """The model that an assistant proposes tokens for. Its embedding and hidden states are the assistant's inputs, and
    `LayerKind.kv_layer` are layers of it (speculative/assistant.py). A field out of range raises NanoinferError."""

    width: int = bounded(1, 1, MAX // 2, name="backbone_hidden_size")
    """Width of its embedding and hidden states."""
    groups: int = bounded(0, 0, MAX, name="num_centroids")
    """Number of equal groups of tokens, each of which has a vector; 0: all tokens are scored."""
    scored_groups: int = bounded(0, 0, MAX, name="centroid_intermediate_top_k")
    """Number of groups whose tokens are scored, those with the largest products of their vectors."""

    def __post_init__(self) -> None:
        keep_fields(self)
        if bool(self.groups) != bool(self.scored_groups) or self.scored_groups > self.groups:
            raise NanoinferError(f"centroid_intermediate_top_k={self.scored_groups} of num_centroids={self.groups}")


def check_kv_layers(layers: tuple[LayerKind, ...], heads: Callable[[int], tuple[int, int]]) -> None:
    """Raise NanoinferError if a layer attends to keys that are not there, or in other heads than its own.

    Args:
        layers: of a model.
        heads: returns the number of heads of keys of a layer, and their width.
    """
    for i, kind in enumerate(layers):
        if (of := kind.kv_layer) is None:
            continue
        if not 0 <= require_int("kv_layer", of, 0) < i or layers[of].kv_layer is not None:
            raise NanoinferError(f"kv_layer={of} of layer {i} is not an earlier layer that has its own keys and values")
        if heads(i) != heads(of):
            raise NanoinferError(f"kv_layer={of} of layer {i}: it has (heads, width) {heads(of)}, not {heads(i)}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer as data. The defaults describe GPT-2; other families set the fields that differ.

    Raises:
        NanoinferError: a field is out of range, or fields contradict each other.
    """

    vocab_size: int = bounded(50257, 1, MAX)
    """Number of rows of the token embedding and of the output head."""
    block_size: int = bounded(1024, 1, MAX)
    """Context length in tokens."""
    n_layer: int = bounded(12, 1, MAX_LAYERS)
    """Number of transformer blocks."""
    n_head: int = bounded(12, 1, MAX)
    """Number of attention heads (of queries) in each block."""
    n_embd: int = bounded(768, 1, MAX)
    """Width of the residual stream."""
    n_inner: int | None = None
    """Width of the MLP's hidden layer; None: 4 * n_embd."""
    bias: bool | tuple[str, ...] = True
    """Where biases are: some of BIASES. True: everywhere; False: nowhere. Experts: `Experts.bias`."""
    activation: str = chosen("gelu_new", ACTIVATIONS)
    """One of ACTIVATIONS: gelu_new (tanh approximation), gelu (exact), silu, relu, relu2 (its square), clamped_silu (of
    gated MLPs: models/layers.py)."""
    norm_epsilon: float = bounded(1e-5, 0.0, 1.0)
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
    norm: str = chosen("layer", ("layer", "rms"))
    """layer (subtracts the mean) or rms."""
    norm_weight: str = chosen("plain", ("plain", "one_plus", "none"))
    """What norms multiply by: plain (the weight), one_plus (1 + the weight), or none."""
    norm_placement: str = chosen("before", ("before", "after", "both", "shared"))
    """Where the norms of a block stand: before attention and MLP, after them (before the residual), or both; shared:
    attention and MLP, in parallel, have the same one before them."""
    parallel_residual: bool = False
    """Whether attention and MLP read the same input, and the block adds both."""
    gated_mlp: bool = False
    """Whether the MLP's hidden layer is activation(gate(x)) * fc(x)."""
    qk_norm: str = chosen("none", ("none", "head", "heads", "whole"))
    """Norm of queries and keys: none, head (each head alone, all with the same weights), heads (each head alone, with
    weights of its own and no biases; a layer norm) or whole (all heads together)."""
    attention_scale: float | None = bounded(None, 1e-6, 1e6)
    """Factor of attention scores; None: head_dim**-0.5."""
    attention_softcap: float | None = bounded(None, 1e-6, 1e6)
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: bool = False
    """Whether each head has a learned score that only the sum of its softmax contains."""
    embedding_scale: float | None = bounded(None, 1e-6, 1e6)
    """Factor of the token embedding."""
    embedding_norm: bool = False
    """Whether the embedding is normalised before the first block."""
    residual_scale: float | None = bounded(None, 1e-6, 1e6)
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    final_scale: float | None = bounded(None, 1e-6, 1e6)
    """Factor of the final hidden states, and thereby of the logits."""
    head_bias: bool = False
    """Whether the output head has biases."""
    logits_softcap: float | None = bounded(None, 1e-6, 1e6)
    """Logits l become softcap * tanh(l / softcap)."""
    sub_norms: bool = False
    """Whether attention's output and the MLP's hidden layer are normalised before the matrices that follow them."""
    rounded_inputs: bool = False
    """Whether the inputs of a layer's matrices are rounded to 8 bits, with one scale for each token."""
    experts: Experts | None = None
    """The mixture of experts in the layers that have one."""
    per_layer_dim: int = bounded(0, 0, MAX)
    """Width of the embedding that each token has for each layer; 0: there is none."""
    latent: Latent | None = None
    """Latent attention, in all layers. head_size is then `Latent.head_dim`, and num_kv_heads is 1."""
    recurrence: Recurrence | None = None
    """The state of the recurrent layers."""
    attention_gate: bool = False
    """Whether attention's output is multiplied by the sigmoid of a projection of the layer's input."""
    mtp: bool = False
    """Whether the model is a block that predicts a further token of another model (`MTPInput` in models/layers.py)."""
    backbone: Backbone | None = None
    """The other model of an assistant, which has `mtp`."""
    weight_factors: tuple[tuple[str, tuple[tuple[float, int], ...]], ...] = field(default=(), compare=False)
    """(name of a stored matrix in a layer, (factor, number of rows) of its parts): what the rows of stored weights are
    multiplied by when they are read. A single part may have any number of rows."""

    def __post_init__(self) -> None:
        keep_fields(self)
        require_int("n_inner", self.mlp_dim, 1, MAX)
        self._check_heads()
        self._check_biases()
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
            return checks.require_bool("bias", self.bias)
        for part in self.bias:
            checks.require_choice("bias", part, BIASES)
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
        rotary_dim = None if self.latent is None else self._check_latent(self.latent)
        for kind, i in {kind: i for i, kind in enumerate(self.layers)}.items():
            kind.check(rotary_dim or self.at(i).head_dim)
        if self.backbone is None:
            check_kv_layers(self.layers, lambda i: (self.at(i).n_kv_head, self.at(i).head_dim))
        elif self.backbone.groups and self.vocab_size % self.backbone.groups:
            raise NanoinferError(f"vocab_size={self.vocab_size} is no multiple of num_centroids={self.backbone.groups}")
        if (self.recurrence is not None) != any(kind.recurrent for kind in self.layers):
            raise NanoinferError("recurrent layers need a description of their state, and no others do: set recurrence")
        if self.parallel_residual and not all(kind.mlp for kind in self.layers):
            raise NanoinferError("parallel_residual=True needs an MLP in each layer")
        if self.recurrence is not None and any(kind.beside for kind in self.layers):
            others = self.recurrence.rule, self.qk_norm, self.norm_placement, self.sinks or self.attention_gate
            if others != ("mamba2", "none", "before", False):
                raise NanoinferError("beside=True is attention of plain heads beside rule=mamba2, with norms before it")
        if self.experts is None and any(kind.experts for kind in self.layers):
            raise NanoinferError("a layer has experts, but the config does not describe them: set experts")
        if self.experts is not None:
            require_int("experts * n_embd", self.experts.count * self.n_embd, 1, MAX)
            places = self.norm, self.norm_placement, self.gated_mlp and all(kind.experts for kind in self.layers)
            if self.experts.beside and places != ("rms", "both", True):
                raise NanoinferError(
                    "experts beside an MLP need norm=rms, norm_placement=both, gated_mlp=True, and to be in every layer"
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
        flags = ("sinks", "sub_norms", "rounded_inputs", "attention_gate")
        refused = [f"{name}=True" for name in flags if getattr(self, name)]
        refused += [f"qk_norm={self.qk_norm}"] if self.qk_norm != "none" else []
        refused += [kind.differing for kind in self.layers if kind.differing is not None]
        refused += ["query_growth" for kind in self.layers if kind.rotary is not None and kind.rotary.query_growth]
        if refused:
            raise NanoinferError(f"latent attention is not supported with {refused[0]}")
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
    def source_dim(self) -> int:
        """Width of the embedding and of `StepBatch.previous` of a model with `mtp`."""
        return self.n_embd if self.backbone is None else self.backbone.width

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

    @property
    def mlp_inputs(self) -> tuple[str, ...]:
        """The matrices of an MLP, or of an expert, that multiply its input."""
        return ("c_gate", "c_fc") if self.gated_mlp else ("c_fc",)

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
        layer = next(filter(None, (kind.differing for kind in self.layers)), None)
        beside = self.experts is not None and self.experts.beside
        return "per-layer embeddings" if self.per_layer_dim else "experts beside an MLP" if beside else layer

    def qkv_widths(self, layer: int) -> tuple[int, ...]:
        """Return the widths of what a layer projects to: queries, keys, values and gate, without those that it lacks.

        Of a recurrent layer: `Recurrence.widths`; with attention beside it, queries, keys, values, and their sum. Of
        latent attention: queries or 0, their latent or 0, and what the keys of all heads are made of.
        """
        if (latent := self.latent) is not None:
            return 0 if latent.query_rank else self.n_head * latent.query_dim, latent.query_rank, latent.head_dim
        if self.layer(layer).recurrent:
            assert self.recurrence is not None
            widths = self.recurrence.widths
            return (self.attn_dim, self.kv_dim, self.kv_dim, sum(widths)) if self.layer(layer).beside else widths
        at = self.at(layer)
        widths = (at.attn_dim, at.kv_dim, at.kv_dim)[: self.layer(layer).num_projections]
        return (*widths, at.attn_dim) if self.attention_gate else widths

    @property
    def kv_layers(self) -> list[int]:
        """The layers that have keys and values of their own."""
        return [i for i in range(self.n_layer) if self.layer(i).kv_layer is None and self.layer(i).attends]

    @property
    def recurrent_layers(self) -> list[int]:
        """The layers that have a state."""
        return [i for i, kind in enumerate(self.layers) if kind.recurrent]

    @property
    def windows(self) -> set[int | None]:
        """The different windows of the layers."""
        return {self.layer(i).window for i in range(self.n_layer)}

    def block_norms(self, kind: LayerKind) -> tuple[str, ...]:
        """Return the norms of a block, in the order of its operations; those of queries and keys are not among them.

        An MLP with experts beside it has its norms inside (models/experts.py), but for the last one.
        """
        names = tuple(n for n in _BLOCK_NORMS[self.norm_placement] if kind.mlp or n not in ("ln_2", "post_2"))
        beside = self.experts is not None and self.experts.beside
        return tuple(name for name in names if name != "ln_2") if beside else names

    @property
    def is_gpt2(self) -> bool:
        """Whether the layers are GPT-2's, apart from sizes, biases and the variant of GELU."""
        sizes = {name: getattr(self, name) for name in _GPT2_FIELDS}
        return self.activation in ("gelu_new", "gelu") and self == ModelConfig(**sizes)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * bytes_per_value * sum(self.at(i).kv_dim for i in self.kv_layers)


_GPT2_FIELDS = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner", "bias", "activation", "norm_epsilon",
    "tie_word_embeddings", "bos_token_id", "eos_token_ids", "family",
)  # fmt: skip
_BLOCK_NORMS = {
    "before": ("ln_1", "ln_2"),
    "after": ("post_1", "post_2"),
    "both": ("ln_1", "post_1", "ln_2", "post_2"),
    "shared": ("ln_1",),
}
