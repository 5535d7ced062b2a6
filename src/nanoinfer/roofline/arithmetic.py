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

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.parameters import recurrent_vectors
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
    C, V, s = config.n_embd, config.vocab_size, fmt.vector_bytes
    norm = (config.norm_weight != "none") + ("norm" in config.biases)  # vectors of a norm
    kinds: dict[tuple[int, ...], list[int]] = {}  # layers by what they cost
    for i in range(config.n_layer):
        sizes = (*config.qkv_widths(i), config.at(i).kv_dim, config.at(i).mlp_dim, config.layer(i).recurrent)
        kinds.setdefault((config.layer(i).window or 0, *_layer_weights(config, fmt, i), *sizes), []).append(i)

    def experts(num_bytes: int) -> Poly:
        """Return the bytes of a layer's chosen experts, of which one has `num_bytes`, 0 in a layer without."""
        mixture = config.experts
        if mixture is None or not num_bytes:
            return Poly()
        return Poly(chosen=(Chosen(mixture.count, mixture.per_token, tokens, num_bytes),))

    layers = tuple(
        (
            Cost(
                tokens * (2 * sum(rows * columns for _, rows, columns in _attention_matrices(config, of[0])))
                # q k^T and scores v: 2 products over all heads
                + (products(w) * (2 * config.at(of[0]).attn_dim) if config.layer(of[0]).attends else Poly())
                + (tokens * _state_products(config) if config.layer(of[0]).recurrent else Poly()),
                Poly.of({(0, 0): attention})
                + (kv_cache_layer(config.at(of[0]), fmt, reach(w)) if config.layer(of[0]).attends else Poly())
                + (state_layer(config) if config.layer(of[0]).recurrent else Poly()),
            ),
            Cost(
                tokens * (2 * _mlp_weights(config.at(of[0]), config.layer(of[0]), expert > 0)),
                Poly.of({(0, 0): mlp}) + experts(expert),
            ),
            len(of),
        )
        for (w, attention, mlp, expert, *_), of in sorted(
            kinds.items(), key=lambda kind: (kind[0][0] == 0, *kind[0]), reverse=True
        )
    )
    head_norms = 2 if config.embedding_norm else 1
    head_matrix = fmt.of("transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight")
    vectors = head_norms * norm * C + config.head_bias * V + norm * config.per_layer_dim
    head = Cost(logits * (2 * C * V), Poly.of({(0, 0): head_matrix.matrix_bytes(V, C) + vectors * s}))
    return StepCost(layers, head)


def _attention_matrices(config: ModelConfig, layer: int) -> list[tuple[str, int, int]]:
    """Return the matrices of a layer's attention: name, rows, columns."""
    C, H, latent = config.n_embd, config.n_head, config.latent
    qkv = ("attn.c_attn", sum(config.qkv_widths(layer)), C)
    if (state := config.recurrence) is not None and config.layer(layer).beside:
        return [qkv, ("attn.c_proj", C, config.attn_dim), ("attn.state_proj", C, state.inner_dim)]
    if state is not None and config.layer(layer).recurrent:
        return [qkv, ("attn.c_proj", C, state.inner_dim)]
    if latent is None:
        return [qkv, ("attn.c_proj", C, config.at(layer).attn_dim)]
    q_b = [("attn.q_b", H * latent.query_dim, latent.query_rank)] if latent.query_rank else []
    kv = [("attn.k_b", H * latent.rank, latent.plain_dim), ("attn.v_b", H * latent.value_dim, latent.rank)]
    return [qkv, *q_b, *kv, ("attn.c_proj", C, H * latent.value_dim)]


def _mlp_weights(config: ModelConfig, kind: LayerKind, mixed: bool) -> int:
    """Return the number of weights with which an MLP multiplies a token, or a mixture of experts if `mixed`.

    The products of per-layer embeddings count here: making a layer's input, the gate, and the one after it.
    """
    C, experts, inputs = config.n_embd, config.experts, 3 * config.n_embd * config.per_layer_dim
    if not mixed or experts is None:
        return kind.mlp * C * config.mlp_dim * (3 if config.gated_mlp else 2) + inputs
    width = experts.per_token * experts.width + (config.mlp_dim if experts.beside else experts.shared_width)
    return 3 * C * width + C * experts.count + C * experts.shared_gate + inputs


def _layer_weights(config: ModelConfig, fmt: WeightFormat, layer: int) -> tuple[int, int, int]:
    """Return the bytes of the weights of a layer's attention and of its MLP, with their norms, and of one expert.

    The MLP of a layer with experts is what all tokens take: the router, in float32 with quantized weights, and the
    shared expert or the MLP beside them.
    """
    at, C, s = config.at(layer), config.n_embd, fmt.vector_bytes
    F, A, widths = at.mlp_dim, at.attn_dim, config.qkv_widths(layer)

    def matrix(name: str, rows: int, columns: int) -> int:
        return fmt.of(f"transformer.h.{layer}.{name}.weight").matrix_bytes(rows, columns)

    norm = (config.norm_weight != "none") + ("norm" in config.biases)  # vectors of a norm
    of_mlp = sum(name in ("ln_2", "post_2") for name in config.block_norms(config.layer(layer)))
    of_attention = len(config.block_norms(config.layer(layer))) - of_mlp
    qk_norm = {"head": len(widths[:2]) * at.head_dim, "whole": sum(widths[:2])}.get(config.qk_norm, 0)
    if (latent := config.latent) is not None:
        qk_norm = latent.query_rank + latent.rank
    recurrent = config.layer(layer).recurrent
    if recurrent:
        qk_norm = sum(math.prod(shape) for shape in recurrent_vectors(config).values())
    qkv, proj, bias = (int(part in config.biases) for part in ("qkv", "proj", "mlp"))
    if recurrent and config.recurrence is not None:
        qkv = proj = int(config.recurrence.projection_bias)
    vectors = qkv * sum(widths) + proj * C + norm * (of_attention * C + config.sub_norms * A)
    vectors += qk_norm * (1 if recurrent else norm)
    vectors += config.sinks * at.n_head + (sum(widths[:2]) if config.qk_norm == "heads" else 0)
    attention = sum(matrix(*of) for of in _attention_matrices(config, layer)) + vectors * s
    norms = norm * of_mlp * C * s + config.layer(layer).scaled * s
    if P := config.per_layer_dim:
        inputs = fmt.of("transformer.per_layer.c_in.weight").matrix_bytes(P, C)  # of c_in's rows, this layer's
        norms += inputs + matrix("after.c_gate", P, C) + matrix("after.c_proj", C, P) + norm * C * s
    if config.layer(layer).experts and config.experts is not None:
        E, D, beside = config.experts.count, config.experts.width, config.experts.beside
        S = F if beside else config.experts.shared_width
        of_all = matrix("mlp.experts.c_proj", E * C, D)
        of_all += sum(matrix(f"mlp.experts.{name}", E * D, C) for name in ("c_gate", "c_fc"))
        shared = sum(matrix(f"mlp.shared.{name}", S, C) for name in ("c_gate", "c_fc"))
        shared += matrix("mlp.shared.c_proj", C, S) if S else 0
        router = E * (C + config.experts.bias) + config.experts.shared_gate * C
        shared += router * s + E * config.experts.correction * 4 + beside * (4 * norm * C + C + E) * s
        return attention, norms + shared, of_all // E + config.experts.bias * (2 * D + C) * s
    if not config.layer(layer).mlp:
        return attention, norms, 0
    mlp = matrix("mlp.c_fc", F, C) + matrix("mlp.c_proj", C, F) + bias * (F + C) * s
    if config.gated_mlp:
        mlp += matrix("mlp.c_gate", F, C) + bias * F * s
    return attention, norms + mlp + norm * config.sub_norms * F * s, 0


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
