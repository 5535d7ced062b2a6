"""FLOPs and bytes of one step of a GPT, as polynomials in B and N.

    B sequences   N tokens that the newest token attends to, including itself   m new tokens of each sequence
    C = n_embd    F = width of the MLP    V = vocab_size    L = n_layer    s = bytes of a key or value

Every step is the same operation, extend by m tokens, so one count covers all of them:

    step                      m        logits for        FLOPs of one layer
    prefill                   N        the last token    B N (8 C^2 + 4 C F) + 4 B N^2 C
    cached decoding           1        that token        B (8 C^2 + 4 C F)   + 4 B N C
    verifying k drafts        k + 1    all m             B m (8 C^2 + 4 C F) + 4 B m N C

FLOPs include matrix products with 2 FLOPs per multiply-add, as torch's FLOP counter does. They exclude biases, layer
norm, softmax, GELU and residuals, whose cost is hidden behind memory traffic. Attention scores are counted as the whole
m x N rectangle, which an engine with a mask computes; `causal=True` counts only the m N - m (m - 1) / 2 scores that the
mask keeps, the minimum for a kernel that skips masked blocks.

Bytes include the reads of a step: all weights once, a tied output head once, and the keys and values of the N tokens of
each sequence in their stored format. They exclude `wpe` and the looked-up rows of `wte`; writes of m new keys and
values (1/N of the reads in decoding); and activations, which stay in the caches of a fused engine.
`StepCost.activations` is the traffic of activations in an engine that fuses only attention. Attention is counted as
fused: scores are not written to memory.

tests/test_roofline.py compares these formulas with counts of the real model. docs/inference-math.md derives them.
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
    """(power of B, power of N, coefficient), highest powers first, without zeros or duplicate powers."""

    @staticmethod
    def of(coefficients: dict[tuple[int, int], int]) -> Poly:
        """Return the polynomial with these coefficients of B^i N^j, keyed by (i, j)."""
        return _collect([(i, j, c) for (i, j), c in coefficients.items()])

    def __add__(self, other: Poly) -> Poly:
        return _collect([*self.terms, *other.terms])

    def __mul__(self, factor: int) -> Poly:
        return _collect([(i, j, c * factor) for i, j, c in self.terms])

    def __call__(self, B: int, N: int) -> int:
        """Return the exact value at B sequences and N tokens."""
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
    """FLOPs and bytes read."""

    flops: Poly
    bytes: Poly

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: int) -> Cost:
        return Cost(self.flops * factor, self.bytes * factor)


@dataclass(frozen=True)
class StepCost:
    """Cost of one step, by part of the model."""

    attention: Cost
    """One layer's attention with the layer norm before it."""
    mlp: Cost
    """One layer's MLP with the layer norm before it."""
    head: Cost
    """The final layer norm and the output head."""
    n_layer: int
    activations: Poly
    """Bytes of activations in an engine that fuses only attention; not part of any total."""

    @property
    def layer(self) -> Cost:
        """Cost of one layer."""
        return self.attention + self.mlp

    @property
    def model(self) -> Cost:
        """Cost of the whole model."""
        return self.layer * self.n_layer + self.head


def prefill(config: ModelConfig, fmt: WeightFormat, *, causal: bool = False) -> StepCost:
    """Return the cost to process N tokens of each new sequence, with logits after the last token.

    It is also the cost of decoding one token in an engine without a KV cache.
    """
    products = Poly.of({(1, 2): 1, (1, 1): 1}) if causal else Poly.of({(1, 2): 2})
    return _step(config, fmt, Poly.of({(1, 1): 1}), products, Poly.of({(1, 0): 1}))


def decode(config: ModelConfig, fmt: WeightFormat) -> StepCost:
    """Return the cost to extend each sequence by one token to N tokens."""
    return extend(config, fmt, 1)


def extend(config: ModelConfig, fmt: WeightFormat, num_new: int, *, causal: bool = False) -> StepCost:
    """Return the cost to extend each sequence by `num_new` tokens to N tokens, with logits after each new token.

    Raises:
        NanoinferError: num_new < 1.
    """
    if num_new < 1:
        raise NanoinferError(f"num_new={num_new} is less than 1, the fewest new tokens of each sequence in a step")
    tokens = Poly.of({(1, 0): num_new})
    masked = num_new * (num_new - 1) if causal else 0
    products = Poly.of({(1, 1): 2 * num_new, (1, 0): -masked})
    return _step(config, fmt, tokens, products, tokens)


def _step(config: ModelConfig, fmt: WeightFormat, tokens: Poly, products: Poly, logits: Poly) -> StepCost:
    """Return the cost of a step.

    Args:
        config: the model's shape.
        fmt: weight format.
        tokens: new tokens of all sequences.
        products: twice the number of (query, key) pairs of all sequences.
        logits: rows of logits.
    """
    C, F, V, s = config.n_embd, config.mlp_dim, config.vocab_size, fmt.vector_bytes
    bias = int(bool(config.biases))
    norm = (1 + bias) * C * s
    attn_weights = fmt.matrix_bytes(3 * C, C) + fmt.matrix_bytes(C, C) + bias * 4 * C * s + norm
    mlp_weights = fmt.matrix_bytes(F, C) + fmt.matrix_bytes(C, F) + bias * (F + C) * s + norm
    attention = Cost(
        tokens * (2 * 4 * C * C) + products * (2 * C),  # q k^T and scores v: 2 products of C over all heads
        Poly.of({(0, 0): attn_weights}) + kv_cache_layer(config, fmt),
    )
    mlp = Cost(tokens * (2 * 2 * C * F), Poly.of({(0, 0): mlp_weights}))
    head = Cost(logits * (2 * C * V), Poly.of({(0, 0): fmt.matrix_bytes(V, C) + norm}))
    # Values that each operation reads and writes besides weights and KV cache, per token and layer: ln_1 2C, c_attn 4C,
    # writing k and v 4C, attention 2C, c_proj 2C, add 3C, ln_2 2C, c_fc C + F, GELU 2F, c_proj F + C, add 3C. Per
    # token: wte + wpe 3C, ln_f 2C. Per row of logits: output head C + V.
    a_token = config.n_layer * (24 * C + 4 * F) + 5 * C
    activations = tokens * (a_token * s) + logits * ((C + V) * s)
    return StepCost(attention, mlp, head, config.n_layer, activations)


def kv_cache_layer(config: ModelConfig, fmt: WeightFormat) -> Poly:
    """Return the bytes of one layer's KV cache for B sequences of N tokens."""
    a_value = fmt.vector_bytes if fmt.cache_bytes is None else fmt.cache_bytes
    return Poly.of({(1, 1): 2 * (config.n_embd * a_value + config.n_head * fmt.cache_scale_bytes)})
