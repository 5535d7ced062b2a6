"""The configuration of what layers have in place of keys and values: a state (models/recurrent.py), or latents."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import bounded, keep_fields, require_choice, require_int

RULES = ("conv", "delta", "mamba2")


@dataclass(frozen=True)
class Recurrence:
    """The state of a layer: the last inputs of a causal convolution, and a matrix for each head.

    Raises:
        NanoinferError: a field is out of range, or fields contradict each other.
    """

    rule: str
    """conv (a gated short convolution, without matrices; LFM2), delta (the gated delta rule; Yang et al. 2024, arXiv
    2412.06464) or mamba2 (Dao and Gu 2024, arXiv 2405.21060)."""
    taps: int
    """Width of the convolution in tokens."""
    num_heads: int
    """Number of matrices; of `conv`, 1."""
    value_dim: int
    """Width of the values of a head; of `conv`, that of the layer."""
    num_key_heads: int = 0
    """Number of heads of queries and keys, each shared by num_heads / num_key_heads heads; of `conv`, 0."""
    key_dim: int = 0
    """Width of a key."""
    bias: bool = False
    """Whether the convolution has biases."""
    projection_bias: bool = False
    """Whether the layer's two projections have biases."""
    norm_groups: int = 1
    """mamba2: number of equal groups of values that are normalised each by itself; 0: there is no norm."""
    tiled: bool = False
    """Whether the heads that share a key are num_key_heads apart, as in GGUF files; else they are adjacent."""

    def __post_init__(self) -> None:
        require_choice("rule", self.rule, RULES)
        require_int("taps of a convolution", self.taps, 2, 64)
        low = 0 if self.rule == "conv" else 1
        require_int("heads of a state", self.num_heads, 1, 2**15)
        require_int("values of a state", self.value_dim, 1, 2**16)
        require_int("heads of keys of a state", self.num_key_heads, low, self.num_heads)
        require_int("width of the keys of a state", self.key_dim, low, 2**12)
        keep_fields(self)
        low, high = (0, self.inner_dim) if self.rule == "mamba2" else (1, 1)
        require_int("groups of a state's norm", self.norm_groups, low, high)
        if self.norm_groups and self.inner_dim % self.norm_groups:
            raise NanoinferError(f"{self.inner_dim} values of a state are no multiple of {self.norm_groups} groups")
        if self.num_key_heads and self.num_heads % self.num_key_heads:
            raise NanoinferError(f"{self.num_heads} heads of a state are no multiple of {self.num_key_heads} of keys")

    @property
    def inner_dim(self) -> int:
        """Width of the values of all heads."""
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Width of the convolution: queries, keys and values, or values alone."""
        return 2 * self.num_key_heads * self.key_dim + self.inner_dim

    @property
    def num_gates(self) -> int:
        """Numbers of a token that are no inputs of the convolution: decays, and of `delta` rates of learning."""
        return {"conv": 0, "delta": 2, "mamba2": 1}[self.rule] * self.num_heads

    @property
    def num_inputs(self) -> int:
        """Numbers of a token that change the state of a layer."""
        return self.num_channels + self.num_gates

    @property
    def num_state(self) -> int:
        """Numbers in the state of a layer."""
        return (self.taps - 1) * self.num_channels + self.num_heads * self.key_dim * self.value_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the parts of a layer's first projection.

        conv: two gates and the values; delta: inputs of the convolution, gate, rates of learning, decays; mamba2: gate,
        inputs of the convolution, steps.
        """
        inner, channels, heads = self.inner_dim, self.num_channels, self.num_heads
        if self.rule == "conv":
            return inner, inner, inner
        return (channels, inner, heads, heads) if self.rule == "delta" else (inner, channels, heads)


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
    query_rank: int = bounded(0, 0, 2**16, name="latent query_rank")
    """Width of the latent of queries; 0: they are a product of the layer's input."""
    norm_epsilon: float = bounded(1e-6, 0.0, 1.0, name="latent norm_epsilon")
    """Constant in the norms of the latents."""
    further_layers: int = field(default=0, compare=False)
    """Layers after the last one in a folder, which predict further tokens."""

    def __post_init__(self) -> None:
        for name in ("rank", "rotary_dim", "plain_dim", "value_dim"):
            require_int(f"latent {name}", getattr(self, name), 1, 2**15)
        require_int("latent further_layers", self.further_layers, 0, 2**15)
        keep_fields(self)

    @property
    def query_dim(self) -> int:
        """Width of the queries of a head."""
        return self.plain_dim + self.rotary_dim

    @property
    def head_dim(self) -> int:
        """Width of a head in attention, where all heads share one key: the rotated part, then the latent."""
        return self.rotary_dim + self.rank
