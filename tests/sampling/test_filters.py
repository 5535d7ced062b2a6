"""Every filter and penalty against transformers' processor of the same name, on the same logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoinfer.sampling import filters
from nanoinfer.sampling.filters import Floats

INF = math.inf
SETTINGS = settings(max_examples=80, deadline=None)
NO_IDS = torch.zeros(1, 0, dtype=torch.int64)
VALUES = st.floats(-30, 30, width=32) | st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0])  # the latter make ties


@st.composite
def batches(draw: st.DrawFn) -> Floats:
    """(B, V) float64 with ties and -inf, at least one finite value in each row."""
    V = draw(st.integers(1, 24))
    row = st.lists(VALUES, min_size=V, max_size=V).filter(lambda values: max(values) > -INF)
    return np.array(draw(st.lists(row, min_size=1, max_size=4)), np.float64)


def column(values: list[float]) -> Floats:
    return np.array(values, np.float64)[:, None]


def theirs(processor: LogitsProcessor, row: Floats, ids: torch.Tensor = NO_IDS) -> Floats:
    """Return what a processor of transformers makes of one row."""
    return processor(ids, torch.tensor(row)[None])[0].numpy()


def per_row(data: st.DataObject, values: st.SearchStrategy[float], logits: Floats) -> list[float]:
    return data.draw(st.lists(values, min_size=len(logits), max_size=len(logits)))


def same_in_company(apply: Callable[[Floats, int, int], Floats], logits: Floats) -> Floats:
    """Apply to rows [first, last) at once and one by one; assert bit-identical results and return them."""
    together = apply(logits, 0, len(logits))
    for i in range(len(logits)):
        assert np.array_equal(apply(logits[i : i + 1], i, i + 1)[0], together[i])
    return together


def ties_of(logits: Floats, kept: Floats) -> Floats:
    """Return the row with its kept values and all that equal the least of them: a sort breaks ties at random."""
    return np.where(logits < kept[kept > -INF].min(), -INF, logits)


@SETTINGS
@given(batches(), st.data())
def test_top_k_is_transformers(logits: Floats, data: st.DataObject) -> None:
    ks = per_row(data, st.integers(0, 30), logits)
    ours = same_in_company(lambda part, a, b: filters.top_k(part, np.array(ks[a:b])), logits)
    for row, got, k in zip(logits, ours, ks, strict=True):
        assert np.array_equal(got, theirs(TopKLogitsWarper(int(k)), row) if k else row)


@SETTINGS
@given(batches(), st.data())
def test_top_p_is_transformers_with_ties_kept_together(logits: Floats, data: st.DataObject) -> None:
    ps = per_row(data, st.floats(0.01, 0.99) | st.just(1.0), logits)
    sums = torch.tensor(logits).sort(-1, descending=True).values.softmax(-1).cumsum(-1).numpy()
    assume(bool(((np.abs(sums - column(ps)) > 1e-9) | (column(ps) == 1)).all()))  # else rounding decides
    ours = same_in_company(lambda part, a, b: filters.top_p(part, column(ps[a:b])), logits)
    for row, got, p in zip(logits, ours, ps, strict=True):
        assert np.array_equal(got, ties_of(row, theirs(TopPLogitsWarper(p), row)) if p < 1 else row)


@SETTINGS
@given(batches(), st.data())
def test_min_p_is_transformers(logits: Floats, data: st.DataObject) -> None:
    ps = per_row(data, st.floats(0.001, 1.0) | st.just(0.0), logits)
    with np.errstate(divide="ignore", invalid="ignore"):
        border = logits.max(-1, keepdims=True) + np.log(column(ps))
        near = ~(np.abs(logits - border) > 1e-9)
    assume(not (near & (logits > -INF) & (column(ps) < 1)).any())  # else rounding decides
    ours = same_in_company(lambda part, a, b: filters.min_p(part, column(ps[a:b])), logits)
    for row, got, p in zip(logits, ours, ps, strict=True):
        assert np.array_equal(got, theirs(MinPLogitsWarper(p), row) if p else row)


@SETTINGS
@given(batches(), st.data())
def test_repetition_penalty_is_transformers(logits: Floats, data: st.DataObject) -> None:
    B, V = logits.shape
    penalties = per_row(data, st.floats(0.05, 20) | st.just(1.0), logits)
    ids = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, V - 1), min_size=5, max_size=5), min_size=B, max_size=B))
    )
    seen = torch.zeros(B, V, dtype=torch.bool).scatter(1, ids, True).numpy()
    ours = same_in_company(
        lambda part, a, b: filters.repetition_penalty(part, seen[a:b], column(penalties[a:b])), logits
    )
    for row, got, penalty, seen_ids in zip(logits, ours, penalties, ids, strict=True):
        assert np.array_equal(got, theirs(RepetitionPenaltyLogitsProcessor(penalty), row, seen_ids[None]))


@SETTINGS
@given(batches(), st.data())
def test_presence_and_frequency_penalty_are_the_formula(logits: Floats, data: st.DataObject) -> None:
    B, V = logits.shape
    presence = per_row(data, st.floats(-10, 10) | st.just(0.0), logits)
    frequency = per_row(data, st.floats(-10, 10) | st.just(0.0), logits)
    outputs = [data.draw(st.lists(st.integers(0, V - 1), max_size=8)) for _ in range(B)]
    counts = np.array([[output.count(t) for t in range(V)] for output in outputs], np.float64)
    ours = same_in_company(
        lambda part, a, b: filters.presence_frequency_penalty(
            part, counts[a:b], column(presence[a:b]), column(frequency[a:b])
        ),
        logits,
    )
    for i, output in enumerate(outputs):
        for t in range(V):
            penalty = presence[i] * (t in output) + frequency[i] * output.count(t)
            assert ours[i, t].item() == pytest.approx(logits[i, t].item() - penalty, rel=1e-12, abs=1e-12)


@SETTINGS
@given(batches())
def test_neutral_settings_leave_a_row_bit_identical(logits: Floats) -> None:
    B, V = logits.shape
    zero, one, everything = column([0.0] * B), column([1.0] * B), np.ones((B, V), np.bool_)
    for result in (
        filters.top_k(logits, np.zeros(B, np.int64)),
        filters.top_k(logits, np.full(B, V)),
        filters.top_p(logits, one),
        filters.min_p(logits, zero),
        filters.repetition_penalty(logits, everything, one),
        filters.presence_frequency_penalty(logits, everything * 3.0, zero, zero),
    ):
        assert result.tobytes() == logits.tobytes()


def test_ties_and_excluded_tokens_by_hand() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -INF, 2.0, 2.0]])

    def kept(result: Floats) -> list[int]:
        return np.flatnonzero(result[0] > -INF).tolist()

    assert kept(filters.top_k(logits, np.array([1]))) == [1, 2]
    assert kept(filters.top_k(logits, np.array([3]))) == [1, 2, 4, 5]
    assert kept(filters.top_k(logits, np.array([6]))) == [0, 1, 2, 4, 5]
    assert kept(filters.top_p(logits, column([1e-300]))) == [1, 2]
    assert kept(filters.top_p(logits, column([0.72]))) == [1, 2, 4, 5]  # the 3s have 0.698 together
    assert kept(filters.min_p(logits, column([1.0]))) == [1, 2]
    assert kept(filters.min_p(logits, column([0.3]))) == [1, 2, 4, 5]  # exp(-1) = 0.37
