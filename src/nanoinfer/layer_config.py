"""What may differ from layer to layer of a model: windows, rotary embeddings, experts, sizes. A part of config.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import require_bool, require_choice, require_float, require_int

SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 4096
"""Each expert of a config is described, before the weights are compared with their number."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021): each pair of dimensions is rotated by an angle that grows with the
    position. Dimension i is paired with dimension i + dim / 2.

    Raises:
        NanoinferError: a field is out of range.
    """

    dim: int
    """Number of dimensions of a head that are rotated, the first ones; even."""
    base: float = 10000.0
    """Pair i turns by base**(-2 i / dim) radians at each position."""
    scaling: str = "none"
    """How frequencies are lowered for longer contexts: none, linear (all), llama3 or yarn (the low ones), longrope
    (each by its own factor), proportional (all, and those of the last pairs are 0), or dynamic (none within the model's
    context length)."""
    factor: float = 1.0
    """Scaled frequencies are divided by it."""
    low_freq_factor: float = 1.0
    """llama3, yarn: frequencies with fewer turns than this in the original context are divided."""
    high_freq_factor: float = 4.0
    """llama3, yarn: frequencies with more turns than this in the original context are kept; those between are
    blended."""
    original_context: int = 8192
    """llama3, yarn, longrope, query_growth: the context length before the frequencies were scaled."""
    truncate: bool = True
    """yarn: whether the range of blended pairs is widened to whole numbers."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency if the context length is at most the original one."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisor of each frequency if the context length is more than the original one."""
    attention_factor: float = 1.0
    """Factor of the rotated dimensions."""
    num_turning: int = 0
    """proportional: number of pairs that turn, the first ones."""
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / original_context))."""

    def __post_init__(self) -> None:
        require_int("rotary dim", self.dim, 2, 2**16)
        if self.dim % 2:
            raise NanoinferError(f"rotary dim={self.dim} is not even")
        require_float("rope_theta", self.base, 1.0, 1e12)
        require_choice("rope_type", self.scaling, SCALINGS)
        require_float("rope factor", self.factor, 1.0, 1e6)
        require_float("low_freq_factor", self.low_freq_factor, 1e-3, 1e6)
        require_float("high_freq_factor", self.high_freq_factor, 1e-3, 1e6)
        if self.low_freq_factor >= self.high_freq_factor:
            raise NanoinferError(
                f"low_freq_factor={self.low_freq_factor} is not less than high_freq_factor={self.high_freq_factor}"
            )
        require_int("original_max_position_embeddings", self.original_context, 1, 2**24)
        require_bool("truncate", self.truncate)
        require_int("num_turning", self.num_turning, 0, self.dim // 2 if self.scaling == "proportional" else 0)
        require_float("attention_factor", self.attention_factor, 1e-3, 1e3)
        require_float("llama_4_scaling_beta", self.query_growth, 0.0, 1e3)
        for name in ("short_factors", "long_factors"):
            factors: tuple[float, ...] = getattr(self, name)
            if len(factors) != (self.dim // 2 if self.scaling == "longrope" else 0):
                raise NanoinferError(f"{name} has {len(factors)} numbers for {self.dim // 2} pairs of dimensions")
            for factor in factors:
                require_float(name, factor, 1e-3, 1e6)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of an MLP (Shazeer et al. 2017): a router chooses some gated MLPs for each token.

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
    scale: float = 1.0
    """Factor of the chosen experts' sum."""
    shared_width: int = 0
    """Width of the hidden layer of an expert that all tokens take; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a product with the input."""
    bias: bool = False
    """Whether the router and the matrices of the experts have biases, but for those of the shared expert."""
    scoring: str = "softmax"
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
    """Whether the experts stand beside the layer's MLP (models/beside.py), not in its place."""

    def __post_init__(self) -> None:
        require_int("experts", self.count, 1, MAX_EXPERTS)
        require_int("experts per token", self.per_token, 1, self.count)
        require_int("width of an expert", self.width, 1, (2**31 - 1) // self.count)
        require_bool("normalize", self.normalize)
        require_float("scale of experts", self.scale, 1e-6, 1e6)
        require_int("width of the shared expert", self.shared_width, 0, 2**31 - 1)
        require_bool("shared_gate", self.shared_gate)
        require_bool("bias of experts", self.bias)
        if self.shared_gate and not self.shared_width:
            raise NanoinferError("shared_gate=True needs a shared expert: set shared_width")
        require_choice("scoring", self.scoring, SCORINGS)
        require_bool("correction", self.correction)
        require_int("groups of experts", self.groups, 1, self.count)
        if self.count % self.groups:
            raise NanoinferError(f"experts={self.count} is not a multiple of groups of experts={self.groups}")
        require_int("groups of experts per token", self.groups_per_token, 1, self.groups)
        require_int("experts per token", self.per_token, 1, self.count // self.groups * self.groups_per_token)
        require_int("experts that score a group", self.group_top, 1, self.count // self.groups)
        require_bool("experts beside an MLP", self.beside)
        if self.beside and (self.shared_width or self.bias):
            raise NanoinferError("experts beside an MLP have no shared expert and no biases: leave both out")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are products of one small vector.

    Raises:
        NanoinferError: a field is out of range.
    """

    rank: int
    """Width of the latent of keys and values."""
    rotary_dim: int
    """Width of the rotated part of queries and keys; that of keys is shared by all heads."""
    plain_dim: int
    """Width of the other part of the queries and keys of a head."""
    value_dim: int
    """Width of the values of a head."""
    query_rank: int = 0
    """Width of the latent of queries; 0: they are a product of the layer's input."""
    norm_epsilon: float = 1e-6
    """Constant in the norms of the latents."""
    further_layers: int = field(default=0, compare=False)
    """Layers after the last one in a folder, which predict further tokens. They are not read."""

    def __post_init__(self) -> None:
        for name in ("rank", "rotary_dim", "plain_dim", "value_dim"):
            require_int(f"latent {name}", getattr(self, name), 1, 2**15)
        require_int("latent further_layers", self.further_layers, 0, 2**15)
        require_int("latent query_rank", self.query_rank, 0, 2**16)
        require_float("latent norm_epsilon", self.norm_epsilon, 0.0, 1.0)

    @property
    def query_dim(self) -> int:
        """Width of the queries of a head."""
        return self.plain_dim + self.rotary_dim

    @property
    def head_dim(self) -> int:
        """Width of a head in attention, where all heads share one key: the rotated part, then the latent."""
        return self.rotary_dim + self.rank


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer."""

    window: int | None = None
    """A query attends to this many positions, its own included; None: to all earlier ones."""
    rotary: Rotary | None = None
    """Rotation of queries and keys; None: this layer has none."""
    experts: bool = False
    """Whether the MLP is a mixture of experts (`ModelConfig.experts`)."""
    n_head: int | None = None
    """Number of attention heads; None: the model's, as for the next three."""
    num_kv_heads: int | None = None
    """Number of heads of keys and values."""
    head_size: int | None = None
    """Width of one head."""
    n_inner: int | None = None
    """Width of the MLP's hidden layer."""
    kv_layer: int | None = None
    """Earlier layer whose keys and values this one attends to; None: it has its own."""
    keys_as_values: bool = False
    """Whether values are the keys as they are before their norm and rotation."""
    value_norm: bool = False
    """Whether each head of values has a norm, without weight and bias."""
    scaled: bool = False
    """Whether the block's output is multiplied by a number, which is a parameter."""

    @property
    def num_projections(self) -> int:
        """How many of queries, keys and values, in this order, a layer projects to."""
        return 1 if self.kv_layer is not None else 2 if self.keys_as_values else 3

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes that are not the model's, by the names of ModelConfig's fields."""
        given = {name: getattr(self, name) for name in ("n_head", "num_kv_heads", "head_size", "n_inner")}
        return {name: size for name, size in given.items() if size is not None}

    @property
    def differing(self) -> str | None:
        """What most models' layers do not have, for messages, or None."""
        if self.sizes:
            return "layers of different sizes"
        if self.kv_layer is not None:
            return "layers that attend to the keys and values of others"
        found = {name for name in ("keys_as_values", "value_norm", "scaled") if getattr(self, name)}
        return f"layers with {', '.join(sorted(found))}" if found else None

    def check(self, head_dim: int) -> None:
        """Raise NanoinferError if a field is out of range for heads of this width."""
        if self.window is not None:
            require_int("window", self.window, 1, 2**31 - 1)
        for name, size in self.sizes.items():
            require_int(name, size, 1, 2**31 - 1)
        for name in ("keys_as_values", "value_norm", "scaled"):
            require_bool(name, getattr(self, name))
        if self.rotary is not None and self.rotary.dim > head_dim:
            raise NanoinferError(f"rotary dim={self.rotary.dim} is more than head_dim={head_dim}")
        if self.rotary is not None and self.rotary.query_growth and self.rotary.dim < head_dim:
            raise NanoinferError(f"query_growth needs rotary dim={head_dim}, the whole head")
        if self.rotary is not None and self.rotary.query_growth and (self.sizes or self.kv_layer is not None):
            raise NanoinferError("query_growth needs the same heads of queries and keys in all layers")
        if self.kv_layer is not None and (self.keys_as_values or self.value_norm):
            raise NanoinferError(f"kv_layer={self.kv_layer}: a layer without keys has neither values nor their norm")


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
