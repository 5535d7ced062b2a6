"""Rows of logits and controls, and the comparison of a sampler with the reference.

Where the two differ, an oracle decides: the running sums in extended precision must have a border within 1e-12 of
the uniform (or the probabilities one within 1e-12 of top_p), so that the last bit of an exp or a sum may decide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError
from nanoinfer.sampling import native, sampler
from nanoinfer.sampling.rng import uniform
from nanoinfer.sampling_params import BadWords, SamplingParams
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText

NEAR = 1e-12
GPT2_V = 50257
Logits = NDArray[np.float32]


def make_row(
    params: SamplingParams,
    prompt: Seq[int] = (0,),
    output: Seq[int] = (),
    end: tuple[int, ...] = (),
    seed: int = 0,
    index: int = 0,
) -> Sequence:
    request = Request(0, None, [*prompt], params, seed, end)
    return Sequence(request, index, OutputText(None, ()), 1024, [*prompt, *output])


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def outcome(sample: Callable[..., list[sampler.Sampled]], logits: Logits, rows: list[Sequence]) -> Any:
    """The drawn tokens, or the error's words."""
    try:
        return sample(logits, rows)
    except NanoinferError as error:
        return str(error)


def tokens_within_rounding(logits: Logits, row: Sequence, u: float) -> set[int]:
    """What a sampler may draw whose sums are rounded otherwise."""
    tokens = set()
    for shift in (0.0, -NEAR, NEAR) if row.params.top_p < 1 else (0.0,):
        params = replace(row.params, top_p=min(1.0, max(1e-300, row.params.top_p + shift)))
        shifted = make_row(params, row.prompt_token_ids, row.output_token_ids, row.end_token_ids)
        shifted.request.bad_words = row.bad_words
        weights = sampler.filtered_weights(logits[None], [shifted])[0].astype(np.longdouble)
        running = weights.cumsum()
        for v in (u - NEAR, u, u + NEAR):
            tokens.add(int(((running > v * running[-1]) & (weights > 0)).argmax()))
    return tokens


def agree(
    logits: Logits, rows: list[Sequence], uniforms: list[float] | None = None, draw: native.Sampler = native.sample
) -> int:
    """Assert that `draw` draws what the reference does; return how many rows needed the oracle."""
    before = logits.copy()
    expected, drawn = outcome(sampler.sample, logits, rows), outcome(draw, logits, rows)
    assert np.array_equal(logits, before, equal_nan=True)
    if isinstance(expected, str) or isinstance(drawn, str):
        assert drawn == expected
        return 0
    different = [i for i, (a, b) in enumerate(zip(drawn, expected, strict=True)) if a != b]
    for i in different:
        row = rows[i]
        u = uniform(seed=row.seed, sample=row.sample_index, position=row.num_output_tokens)
        u = u if uniforms is None else uniforms[i]
        assert drawn[i].token_id in tokens_within_rounding(logits[i], row, u), (row.params, u, drawn[i], expected[i])
    return len(different)


LOGITS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "normal": lambda V, g: g.normal(0, 3, V),
    "flat": lambda V, g: g.normal(0, 0.01, V),
    "peaked": lambda V, g: g.normal(0, 12, V),
    "integers": lambda V, g: g.integers(-4, 5, V),
    "two values": lambda V, g: g.integers(0, 2, V),
    "equal": lambda V, g: np.zeros(V),
    "signed zeros": lambda V, g: np.zeros(V) * (g.integers(0, 2, V) * 2.0 - 1),
    "masked": lambda V, g: np.where(g.random(V) < 0.8, -math.inf, g.normal(0, 1, V)),
    "ascending": lambda V, g: np.linspace(-9, 5, V),
    "descending": lambda V, g: np.linspace(5, -9, V),
    "one stands out": lambda V, g: np.where(np.arange(V) == V // 2, 3e38, g.normal(0, 1, V)),
    "huge": lambda V, g: g.normal(0, 1, V).clip(-3, 3) * 1e38,
    "tiny": lambda V, g: g.normal(0, 1, V) * 1e-42,
    "a comb": lambda V, g: (np.arange(V) % max(1, V // 512) == 0) * 0.5,  # evenly spaced samples mislead
    "a far tail": lambda V, g: g.normal(0, 1, V) - (g.random(V) < 0.5) * 700,
}


def make_logits(kind: str, V: int, generator: np.random.Generator) -> Logits:
    """One row of logits, (1, V)."""
    return np.asarray(LOGITS[kind](V, generator), np.float32)[None]


NEUTRAL: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "logit_bias": None, "min_tokens": 0,
    "bad_words": (), "allowed_token_ids": None,
}  # fmt: skip


def random_row(rng: random.Random, V: int, seed: int) -> Sequence:
    """A row with some of the controls on."""
    some = {
        "top_k": rng.choice([1, 2, 5, 50, V // 2 + 1, max(1, V - 1), V, V + 7, 10**30]),
        "top_p": rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9, rng.uniform(0.01, 1)]),
        "min_p": rng.choice([1e-9, 0.02, 0.5, 1.0, math.exp(-3), rng.random()]),
        "presence_penalty": rng.choice([0.5, -2.0, 1e3]),
        "frequency_penalty": rng.choice([0.3, -0.1, -1e3]),
        "repetition_penalty": rng.choice([1.3, 0.7, 1e-3, 1e3]),
        "logit_bias": {rng.randrange(V): rng.choice([5, -1e6, 1e6, rng.random()]) for _ in range(rng.choice([1, 9]))},
        "min_tokens": 9,
        "bad_words": ("word",),
        "allowed_token_ids": [rng.randrange(V) for _ in range(rng.choice([1, 3, V]))],
    }  # fmt: skip
    share = rng.choice([0.15, 0.4, 1.0])
    chosen = {name: value if rng.random() < share else NEUTRAL[name] for name, value in some.items()}
    temperature = rng.choice([0.0, 5e-324, 1e-300, 1e-3, 0.3, 0.8, 0.8, 1.0, 1.0, 3.0, 100.0, 1e6])
    ids = [rng.randrange(V + V // 4 + 1) for _ in range(rng.choice([1, 3, 40]))]
    output = [rng.choice([i for i in ids if i < V] or [0]) for _ in range(rng.choice([0, 1, 5, 60]))]
    end = tuple({rng.randrange(V) for _ in range(rng.choice([0, 1, 3]))})
    row = make_row(SamplingParams(temperature=temperature, **chosen), ids, output, end, seed)
    if row.params.bad_words:
        lengths = [rng.randrange(len(output) + 1) for _ in range(6)]
        row.request.bad_words = BadWords([[*output[len(output) - n :], rng.randrange(V)] for n in lengths])
    return row


CONTROLS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 50},
    "large top_k": {"top_k": 900},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.02},
    "top_k, top_p": {"top_k": 300, "top_p": 0.8},
    "top_p, min_p": {"top_p": 0.9, "min_p": 0.05},
    "top_k, min_p": {"top_k": 20, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "all": {
        "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.2,
        "frequency_penalty": 0.1, "logit_bias": {5: 2.0}, "min_tokens": 2000,
    },
}  # fmt: skip
