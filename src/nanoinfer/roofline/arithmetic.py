"""FLOPs and bytes of one step of a GPT, as polynomials in B and N.

    B sequences   N tokens that the newest token sees, itself included   m new tokens of each sequence
    C = n_embd    F = width of the MLP    V = vocab_size    L = n_layer    s = bytes of a key or value

Every step is one operation, extend by m tokens, so there is one count for all of them:

    step                      m        logits for        FLOPs of one layer
    prefill                   N        the last token    B N (8 C^2 + 4 C F) + 4 B N^2 C
    cached decoding           1        that token        B (8 C^2 + 4 C F)   + 4 B N C
    verifying k drafts        k + 1    all m             B m (8 C^2 + 4 C F) + 4 B m N C

FLOPs counted: matrix products, 2 for each multiply-add, which is what torch's FLOP counter counts. Not
counted: biases, layer norm, softmax, GELU, residuals (they take no time that the bytes do not take). Scores
are the whole m x N rectangle, as an engine with a mask computes it; `causal=True` counts what the mask
keeps, m N - m (m - 1) / 2, which is what a kernel that skips masked blocks can get down to.

Bytes counted: what a step reads. All weights once, the tied output head once, never `wpe` and never the
rows looked up in `wte`; keys and values of the N tokens of each sequence, at the width they are stored in.
Not counted: writing m new keys and values (decoding: 1/N of what is read), and activations, which stay in
the caches of a fused engine; `StepCost.activations` says what they would add in an engine that fuses
nothing but attention. Attention is counted as fused: scores never go to memory.

tests/test_roofline.py holds all of this against counts taken from the real model. Derivation in plain words:
docs/inference-math.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.formats import WeightFormat


@dataclass(frozen=True)
class Poly:
    """A polynomial in B and N with integer coefficients.

    str(Poly.of({(1, 2): 4, (0, 0): 100}))  ->  "4 B N^2 + 100"
    """

    terms: tuple[tuple[int, int, int], ...] = ()
    """(power of B, power of N, coefficient), highest powers first, no zeros, no powers twice."""

    @staticmethod
    def of(coefficients: dict[tuple[int, int], int]) -> Poly:
        """Return the polynomial with these coefficients of B^i N^j, keyed by (i, j)."""
        return _collect([(i, j, c) for (i, j), c in coefficients.items()])

    def __add__(self, other: Poly) -> Poly:
        return _collect([*self.terms, *other.terms])

    def __mul__(self, factor: int) -> Poly:
        return _collect([(i, j, c * factor) for i, j, c in self.terms])

    def __call__(self, B: int, N: int) -> int:
        """Return the value at B sequences and N tokens, exactly."""
        return sum(c * B**i * N**j for i, j, c in self.terms)

    def __str__(self) -> str:
        parts = []
        for i, j, c in self.terms:
            powers = [f"{x}^{p}" if p > 1 else x for x, p in (("B", i), ("N", j)) if p]
            parts.append((" - " if c < 0 else " + ") + " ".join([f"{abs(c):,}", *powers]))
        text = "".join(parts) or " + 0"
        return text[3:] if text.startswith(" + ") else f"-{text[3:]}"


def _collect(terms: list[tuple[int, int, int]]) -> Poly:
    """Return the sum of terms, in canonical form."""
    terms = sorted(terms, reverse=True)
    sums = [(i, j, sum(c for *_, c in group)) for (i, j), group in groupby(terms, key=lambda t: t[:2])]
    return Poly(tuple(t for t in sums if t[2]))


@dataclass(frozen=True)
class Cost:
    """FLOPs done and bytes read."""

    flops: Poly
    bytes: Poly

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: int) -> Cost:
        return Cost(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True)
class StepCost:
    """What one step costs, by part."""

    attention: Cost
    """One layer's attention with the layer norm before it."""
    mlp: Cost
    """One layer's MLP with the layer norm before it."""
    head: Cost
    """The last layer norm and the output head."""
    n_layer: int
    activations: Poly
    """Bytes of activations in an engine that fuses nothing but attention; in no total."""

    @property
    def layer(self) -> Cost:
        """One whole layer."""
        return self.attention + self.mlp

    @property
    def model(self) -> Cost:
        """The whole model."""
        return self.layer * self.n_layer + self.head


def prefill(config: ModelConfig, fmt: WeightFormat, *, causal: bool = False) -> StepCost:
    """Return the cost of N tokens of each sequence, from nothing, with logits after the last.

    It is also the cost of one token in an engine without a cache.
    """
    products = Poly.of({(1, 2): 1, (1, 1): 1}) if causal else Poly.of({(1, 2): 2})
    return _step(config, fmt, Poly.of({(1, 1): 1}), products, Poly.of({(1, 0): 1}))


def decode(config: ModelConfig, fmt: WeightFormat) -> StepCost:
    """Return the cost of one more token of each sequence, which then has N tokens."""
    return extend(config, fmt, 1)


def extend(config: ModelConfig, fmt: WeightFormat, num_new: int, *, causal: bool = False) -> StepCost:
    """Return the cost of `num_new` more tokens of each sequence, which then has N, with logits after each.

    Raises:
        NanoinferError: num_new < 1.
    """
    if num_new < 1:
        raise NanoinferError(f"num_new={num_new}: a step has 1 or more new tokens of each sequence")
    tokens = Poly.of({(1, 0): num_new})
    masked = num_new * (num_new - 1) if causal else 0
    products = Poly.of({(1, 1): 2 * num_new, (1, 0): -masked})
    return _step(config, fmt, tokens, products, tokens)


def _step(config: ModelConfig, fmt: WeightFormat, tokens: Poly, products: Poly, logits: Poly) -> StepCost:
    """Return the cost of a step.

    Args:
        config: the model's shape.
        fmt: how weights are stored.
        tokens: new tokens of all sequences.
        products: twice the number of (query, key) pairs of all sequences.
        logits: rows of logits.
    """
    C, F, V, s = config.n_embd, config.mlp_dim, config.vocab_size, fmt.vector_bytes
    bias = int(config.bias)
    norm = (1 + bias) * C * s
    attn_weights = fmt.matrix_bytes(3 * C, C) + fmt.matrix_bytes(C, C) + bias * 4 * C * s + norm
    mlp_weights = fmt.matrix_bytes(F, C) + fmt.matrix_bytes(C, F) + bias * (F + C) * s + norm
    attention = Cost(
        tokens * (2 * 4 * C * C) + products * (2 * C),  # q k^T and scores v: 2 products of C over all heads
        Poly.of({(0, 0): attn_weights}) + kv_cache_layer(config, fmt),
    )
    mlp = Cost(tokens * (2 * 2 * C * F), Poly.of({(0, 0): mlp_weights}))
    head = Cost(logits * (2 * C * V), Poly.of({(0, 0): fmt.matrix_bytes(V, C) + norm}))
    # What each operation reads and writes beside weights and cache, a token and layer, in values:
    # ln_1 2C, c_attn 4C, writing k and v 4C, attention 2C, c_proj 2C, add 3C, ln_2 2C, c_fc C + F, GELU 2F,
    # c_proj F + C, add 3C; then wte + wpe 3C and ln_f 2C a token, and the head C + V a row of logits.
    a_token = config.n_layer * (24 * C + 4 * F) + 5 * C
    activations = tokens * (a_token * s) + logits * ((C + V) * s)
    return StepCost(attention, mlp, head, config.n_layer, activations)


def kv_cache_layer(config: ModelConfig, fmt: WeightFormat) -> Poly:
    """Return the bytes of one layer's keys and values of B sequences of N tokens."""
    a_value = fmt.vector_bytes if fmt.cache_bytes is None else fmt.cache_bytes
    return Poly.of({(1, 1): 2 * (config.n_embd * a_value + config.n_head * fmt.cache_scale_bytes)})
