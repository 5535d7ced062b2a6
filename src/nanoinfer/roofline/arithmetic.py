"""FLOPs and bytes of one step of a model, as polynomials in B and N.

    B sequences   N tokens that the newest token attends to, including itself   m new tokens of each sequence
    C = n_embd    F = width of the MLP    V = vocab_size    L = n_layer    s = bytes of a key or value
    A = width of all heads of queries     K = width of all heads of keys   w = a layer's window
    G = 3 matrices of a gated MLP, else 2
    E = experts of a layer with a mixture       k = experts of a token

Every step is the same operation, extend by m tokens, so one count covers all of them:

    step                      m        logits for        FLOPs of one layer
    prefill                   N        the last token    B N (4 C (A + K) + 2 G C F) + 4 B N^2 A
    cached decoding           1        that token        B (4 C (A + K) + 2 G C F)   + 4 B N A
    verifying k drafts        k + 1    all m             B m (4 C (A + K) + 2 G C F) + 4 B m N A

In GPT-2, A = K = C and G = 2. With a window, the new tokens of a step read the keys of min(N, w + m - 1) tokens.

With experts, F is k times the width of one, and the width of the shared one. A step reads those experts that any of its
T tokens chooses: E (1 - (1 - k / E)^T) of them on average, if each token chooses any k alike (uniform routing). Trained
routers prefer some experts, so a step reads fewer.

FLOPs are those of matrix products, 2 per multiply-add, as torch's FLOP counter counts them. Attention scores are
counted as the whole rectangle of the new tokens and the keys that they read, and recurrent layers one token after
another. Bytes are what a step reads: all weights once, a tied output head once, the keys and values that the new tokens
attend to, in their stored format, and the state of each recurrent layer.
docs/inference-math.md derives both and says what is left out; tests/roofline/test_roofline.py compares them with counts
of the real model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from nanoinfer.checkpoints.weights import has_format
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.parameters import CORRECTION, LAYER, Shapes, shapes
from nanoinfer.roofline.formats import WeightFormat


@dataclass(frozen=True)
class Chosen:
    """Bytes of the experts that the tokens of a step choose, in all layers, with uniform routing.

    str(Chosen(8, 2, tokens, 100))  ->  "100 chosen(2 of 8, 1 B)"
    """

    count: int
    """Number of experts of a layer."""
    per_token: int
    """Number of experts that a token chooses."""
    tokens: Poly
    """Number of tokens."""
    num_bytes: int
    """Bytes of one expert of each layer."""

    def __call__(self, B: int, N: int) -> int:
        """Return the expected number of bytes, rounded."""
        missed = (1 - self.per_token / self.count) ** self.tokens(B, N)
        return round(self.num_bytes * self.count * (1.0 - missed))

    def __str__(self) -> str:
        return f"{self.num_bytes:,} chosen({self.per_token} of {self.count}, {self.tokens})"


@dataclass(frozen=True)
class Poly:
    """A polynomial in B, N and min(N, window) with integer coefficients, and the bytes of chosen experts.

    str(Poly.of({(1, 2): 4, (0, 0): 100}))  ->  "4 B N^2 + 100"
    str(Poly.of({(1, 1): 4}, window=512))   ->  "4 B min(N, 512)"
    """

    terms: tuple[tuple[int, int, int, int], ...] = ()
    """(power of B, power of N, window, coefficient), highest powers first, without zeros or duplicate powers. With a
    window above 0, N stands for min(N, window)."""
    chosen: tuple[Chosen, ...] = ()
    """Further terms, those of chosen experts."""

    @staticmethod
    def of(coefficients: dict[tuple[int, int], int], window: int = 0) -> Poly:
        """Return the polynomial with these coefficients of B^i N^j, keyed by (i, j); N is min(N, window) if given."""
        return _collect([(i, j, window if j else 0, c) for (i, j), c in coefficients.items()])

    def __add__(self, other: Poly) -> Poly:
        merged: dict[tuple[int, int, Poly], int] = {}
        for term in (*self.chosen, *other.chosen):
            key = term.count, term.per_token, term.tokens
            merged[key] = merged.get(key, 0) + term.num_bytes
        chosen = tuple(Chosen(*key, num_bytes) for key, num_bytes in merged.items())
        return replace(_collect([*self.terms, *other.terms]), chosen=chosen)

    def __mul__(self, factor: int) -> Poly:
        chosen = tuple(replace(term, num_bytes=term.num_bytes * factor) for term in self.chosen)
        return replace(_collect([(i, j, window, c * factor) for i, j, window, c in self.terms]), chosen=chosen)

    def __call__(self, B: int, N: int) -> int:
        """Return the value at B sequences and N tokens: exact but for the term of chosen experts."""
        terms: int = sum(c * B**i * (min(N, window) if window else N) ** j for i, j, window, c in self.terms)
        return terms + sum(term(B, N) for term in self.chosen)

    def __str__(self) -> str:
        parts = []
        for i, j, window, c in self.terms:
            N = f"min(N, {window:,})" if window else "N"
            powers = [f"{x}^{p}" if p > 1 else x for x, p in (("B", i), (N, j)) if p]
            parts.append((" - " if c < 0 else " + ") + " ".join([f"{abs(c):,}", *powers]))
        parts += [f" + {term}" for term in self.chosen]
        text = "".join(parts) or " + 0"
        return text[3:] if text.startswith(" + ") else f"-{text[3:]}"


def _collect(terms: list[tuple[int, int, int, int]]) -> Poly:
    """Return the sum of terms, in canonical form."""
    terms = sorted(terms, key=lambda t: (t[0], t[1], -t[2]), reverse=True)
    sums = [(*key, sum(c for *_, c in group)) for key, group in groupby(terms, key=lambda t: t[:3])]
    return Poly(tuple(t for t in sums if t[3]))


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

    layers: tuple[tuple[Cost, Cost, int], ...]
    """For each kind of layer (its window and the formats of its matrices), the widest window first: one layer's
    attention and its MLP, with their norms, and the number of such layers."""
    head: Cost
    """The final norm and the output head, and the norm of the embedding if there is one."""

    @property
    def attention(self) -> Cost:
        """Cost of one layer's attention with its norms, of the first kind."""
        return self.layers[0][0]

    @property
    def mlp(self) -> Cost:
        """Cost of one layer's MLP with its norms, of the first kind."""
        return self.layers[0][1]

    @property
    def layer(self) -> Cost:
        """Cost of one layer, of the first kind."""
        return self.attention + self.mlp

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that steps read, all experts included."""
        read = self.model.bytes
        return read(0, 0) + sum(term.num_bytes * term.count for term in read.chosen)

    @property
    def model(self) -> Cost:
        """Cost of the whole model."""
        total = self.head
        for attention, mlp, num_layers in self.layers:
            total += (attention + mlp) * num_layers
        return total


def prefill(config: ModelConfig, fmt: WeightFormat) -> StepCost:
    """Return the cost to process N tokens of each new sequence, with logits after the last token.

    It is also the cost of decoding one token in an engine without a KV cache.
    """
    return _step(config, fmt, Poly.of({(1, 1): 1}), lambda w: Poly.of({(1, 2): 2}), lambda w: 0, Poly.of({(1, 0): 1}))


def decode(config: ModelConfig, fmt: WeightFormat) -> StepCost:
    """Return the cost to extend each sequence by one token to N tokens."""
    return extend(config, fmt, 1)


def extend(config: ModelConfig, fmt: WeightFormat, num_new: int) -> StepCost:
    """Return the cost to extend each sequence by `num_new` tokens to N tokens, with logits after each new token.

    Raises:
        NanoinferError: num_new < 1.
    """
    if num_new < 1:
        raise NanoinferError(f"num_new={num_new} is less than 1, the fewest new tokens of each sequence in a step")
    tokens = Poly.of({(1, 0): num_new})

    def reach(w: int) -> int:
        return w + num_new - 1 if w else 0

    return _step(config, fmt, tokens, lambda w: Poly.of({(1, 1): 2 * num_new}, window=reach(w)), reach, tokens)


def _step(
    config: ModelConfig, fmt: WeightFormat, tokens: Poly, products: Callable[[int], Poly], reach: Callable[[int], int],
    logits: Poly,
) -> StepCost:  # fmt: skip
    """Return the cost of a step.

    Args:
        config: the model's shape.
        fmt: weight format.
        tokens: new tokens of all sequences.
        products: window (0: none) -> twice the number of (query, key) pairs of all sequences.
        reach: window -> the window of the new tokens together.
        logits: rows of logits.
    """
    C, V, s, mixture = config.n_embd, config.vocab_size, fmt.vector_bytes, config.experts
    kinds: dict[tuple[Any, ...], list[int]] = {}  # layers by what they cost
    for i, weights in enumerate(_layer_weights(config, fmt)):
        kind, at = config.layer(i), config.at(i)
        key = kind.window or 0, *weights, at.attn_dim, at.kv_dim, kind.attends, kind.recurrent
        kinds.setdefault(key, []).append(i)
    layers = []
    for key in sorted(kinds, key=lambda key: (key[0] == 0, *key), reverse=True):
        window, attention, mlp, *_, attends, recurrent = key
        at = config.at(kinds[key][0])
        of_attention, of_mlp = (
            Cost(tokens * (2 * w.products), Poly.of({(0, 0): w.num_bytes})) for w in (attention, mlp)
        )
        if attends:  # q k^T and scores v: 2 products over all heads
            of_attention += Cost(products(window) * (2 * at.attn_dim), kv_cache_layer(at, fmt, reach(window)))
        if recurrent:
            of_attention += Cost(tokens * _state_products(config), state_layer(config))
        if mixture is not None and mlp.expert_bytes:
            chosen = Chosen(mixture.count, mixture.per_token, tokens, mlp.expert_bytes)
            of_mlp += Cost(Poly(), Poly(chosen=(chosen,)))
        layers.append((of_attention, of_mlp, len(kinds[key])))
    norm = (config.norm_weight != "none") + ("norm" in config.biases)  # vectors of a norm
    head_norms = 2 if config.embedding_norm else 1
    head_matrix = fmt.of("transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight")
    vectors = head_norms * norm * C + config.head_bias * V + norm * config.per_layer_dim
    head = Cost(logits * (2 * C * V), Poly.of({(0, 0): head_matrix.matrix_bytes(V, C) + vectors * s}))
    return StepCost(tuple(layers), head)


class _Weights(NamedTuple):
    """The weights of a layer's attention or of its MLP, with their norms."""

    num_bytes: int
    """Bytes of those that all tokens read."""
    expert_bytes: int
    """Bytes of one expert."""
    products: int
    """Number of weights with which a token is multiplied."""


def _layer_weights(config: ModelConfig, fmt: WeightFormat) -> list[tuple[_Weights, _Weights]]:
    """Return the weights of attention and MLP of each layer.

    The products of per-layer embeddings are the MLP's: making a layer's input, the gate, and the one after it.
    """
    tensors: list[tuple[Shapes, Shapes]] = [({}, {}) for _ in range(config.n_layer)]
    for name, shape in shapes(config).items():
        if (layer := LAYER.match(name)) is not None:
            is_mlp = not name.startswith(("ln_1.", "attn.", "post_1."), layer.end())
            tensors[int(layer[1])][is_mlp][name] = shape
    c_in = {"transformer.per_layer.c_in.weight": (config.per_layer_dim, config.n_embd)}  # of its rows, those of a layer
    return [
        (_weights(config, fmt, attention), _weights(config, fmt, mlp | (c_in if config.per_layer_dim else {})))
        for attention, mlp in tensors
    ]


def _weights(config: ModelConfig, fmt: WeightFormat, tensors: Shapes) -> _Weights:
    num_bytes = expert_bytes = products = 0
    count, per_token = (config.experts.count, config.experts.per_token) if config.experts is not None else (1, 1)
    for name, shape in tensors.items():
        size, of_expert = math.prod(shape), ".experts." in name
        if has_format(name, shape):
            stored = fmt.of(name).matrix_bytes(*shape)
        else:
            stored = size * (4 if name.endswith(CORRECTION) else fmt.vector_bytes)
        expert_bytes, num_bytes = expert_bytes + of_expert * stored, num_bytes + (not of_expert) * stored
        if len(shape) == 2 and not name.endswith(".conv"):
            products += size * per_token // count if of_expert else size
    return _Weights(num_bytes, expert_bytes // count, products)


def _state_products(config: ModelConfig) -> int:
    """Return the FLOPs of a token in a recurrent layer, one token after another: products with the state of a head."""
    state = config.recurrence
    assert state is not None
    products = {"conv": 0, "delta": 3, "mamba2": 2}[state.rule]  # k and q times the state, and what is added to it
    return 2 * (products * state.key_dim * state.inner_dim + state.taps * state.num_channels)


def state_layer(config: ModelConfig) -> Poly:
    """Return the bytes of the state of one recurrent layer for B sequences."""
    assert config.recurrence is not None
    return Poly.of({(1, 0): 4 * config.recurrence.num_state})


def kv_cache_layer(config: ModelConfig, fmt: WeightFormat, window: int = 0) -> Poly:
    """Return the bytes of one layer's KV cache for B sequences of N tokens, or of their last `window` tokens."""
    a_value = fmt.vector_bytes if fmt.cache_bytes is None else fmt.cache_bytes
    per_token = 2 * (config.kv_dim * a_value + config.n_kv_head * fmt.cache_scale_bytes)
    return Poly.of({(1, 1): per_token}, window=window)
