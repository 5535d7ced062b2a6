"""What may differ from layer to layer of a model: windows, rotary embeddings, experts. A part of config.py."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import require_bool, require_choice, require_float, require_int

SCALINGS = ("none", "linear", "llama3", "yarn", "longrope")
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
    """How frequencies are lowered for longer contexts: none, linear (all), llama3 or yarn (the low ones), or longrope
    (each by its own factor)."""
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


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer."""

    window: int | None = None
    """A query attends to this many positions, its own included; None: to all earlier ones."""
    rotary: Rotary | None = None
    """Rotation of queries and keys; None: this layer has none."""
    experts: bool = False
    """Whether the MLP is a mixture of experts (`ModelConfig.experts`)."""
