"""The reference sampler: which tokens it samples, from which distribution, and that other rows change nothing.

Every filter and penalty against transformers' processor of the same name, on the same logits.
The random numbers: Random123's published answers, and the native twin equal to the reference bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from helpers.samplers import make_row, normal
from nanoinfer.errors import NanoinferError, TokensExcluded
from nanoinfer.sampling import filters
from nanoinfer.sampling.filters import Floats
from nanoinfer.sampling.rng import philox4x32, uniform, uniform_reference
from nanoinfer.sampling.sampler import filtered_weights, inverse_transform, sample
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence

INF, NAN = math.inf, math.nan
LAST = 1 - 2**-53  # the largest uniform


def draw(logits: Seq[float], row: Sequence) -> int:
    return sample(np.array([logits], np.float32), [row])[0].token_id


# The inverse transform ---------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0, 1) | st.just(0.0), max_size=30),
    st.integers(0, 30),
    st.floats(0, 1, exclude_max=True) | st.just(LAST),
)
def test_the_inverse_transform_is_its_definition(weights: list[float], at: int, u: float) -> None:
    weights.insert(at, 1.0)
    running = np.cumsum(np.array(weights))
    expected = next(i for i, total in enumerate(running) if total > u * running[-1])
    assert inverse_transform(np.array([weights]), np.array([[u]])).tolist() == [expected]
    assert weights[expected] > 0


def test_the_token_is_the_inverse_transform_of_the_uniform_of_seed_sample_and_position() -> None:
    logits = normal(1, 50)
    running = np.cumsum(np.exp(logits[0].astype(np.float64)))
    for seed in range(4):
        for index in range(3):
            for position in range(4):
                u = uniform(seed=seed, sample=index, position=position)
                row = make_row(SamplingParams(), output=[1] * position, seed=seed, index=index)
                expected = int((running <= u * running[-1]).sum())
                assert sample(logits, [row])[0].token_id == expected


# Distributions -----------------------------------------------------------------------------------------------

LOGITS = [0.3, -1.2, 2.1, 1.7, -0.4, 0.9, 1.1, -2.5, 0.0, 1.3, -0.8, 0.6]
PROMPT, OUTPUT, END = [2, 5, 5], [3, 9, 3, 7], (2, 11)
CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.3),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.9),
    "bias": SamplingParams(logit_bias={0: 2.5, 2: -100.0, 11: -1.0}),
    "min_tokens": SamplingParams(min_tokens=5),
    "min_tokens reached": SamplingParams(min_tokens=4),
    "all": SamplingParams(
        temperature=1.4, top_k=8, top_p=0.9, min_p=0.05, presence_penalty=0.4, frequency_penalty=0.3,
        repetition_penalty=1.3, logit_bias={8: 1.5}, min_tokens=9,
    ),
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=1.8),
}  # fmt: skip


def probabilities(p: SamplingParams) -> np.ndarray:
    """What LOGITS become, from the documentation of SamplingParams, one token at a time."""
    z = np.array(LOGITS)
    for t in {*PROMPT, *OUTPUT}:
        z[t] = z[t] / p.repetition_penalty if z[t] > 0 else z[t] * p.repetition_penalty
    for t in set(OUTPUT):
        z[t] -= p.presence_penalty + p.frequency_penalty * OUTPUT.count(t)
    for t, bias in (p.logit_bias or {}).items():
        z[t] += bias
    if len(OUTPUT) < p.min_tokens:
        z[list(END)] = -INF
    order = sorted(range(len(z)), key=lambda t: -z[t])
    if p.temperature == 0:
        return np.eye(len(z))[order[0]]
    weights = np.exp(z / p.temperature)
    weights[order[p.top_k or len(z) :]] = 0
    kept, total = [], 0.0
    for t in order:
        if total < p.top_p:
            kept.append(t)
        total += weights[t] / weights.sum()
    weights[[t for t in order if t not in kept]] = 0
    weights[weights < p.min_p * weights.max()] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    params, expected = CASES[name], probabilities(CASES[name])
    rows = [make_row(params, PROMPT, OUTPUT, END, seed, index) for seed in range(1000) for index in range(4)]
    drawn = [s.token_id for s in sample(np.tile(np.float32(LOGITS), (len(rows), 1)), rows)]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    support = expected > 0
    assert counts[~support].sum() == 0
    if support.sum() > 1:
        assert chisquare(counts[support], expected[support] * len(rows)).pvalue > 1e-6


def test_draws_follow_the_distribution_along_one_text() -> None:
    rows = [make_row(SamplingParams(), output=[1] * position, seed=5) for position in range(2000)]
    drawn = [s.token_id for s in sample(np.tile(np.float32(LOGITS), (len(rows), 1)), rows)]
    expected = probabilities(SamplingParams()) * len(rows)
    assert chisquare(np.bincount(drawn, minlength=len(LOGITS)), expected).pvalue > 1e-6


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_weights_are_transformers_in_the_documented_order(data: st.DataObject) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    V = data.draw(st.integers(2, 60))
    logits = normal(1, V, seed=data.draw(st.integers(0, 2**32))) * 3
    token = st.integers(0, V - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=6))
    output = data.draw(st.lists(token, max_size=6))
    end = data.draw(st.sets(token, max_size=V - 1))
    p = SamplingParams(
        temperature=data.draw(st.floats(0.1, 5)),
        top_k=data.draw(st.integers(1, V + 5)),
        top_p=data.draw(st.floats(0.05, 0.999)),
        min_p=data.draw(st.floats(0.001, 0.9)),
        repetition_penalty=data.draw(st.floats(0.1, 5)),
        min_tokens=data.draw(st.integers(0, 8)),
        logit_bias=data.draw(st.dictionaries(token, st.integers(-80, 80).map(lambda i: i / 16), min_size=1)),
    )
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(p.repetition_penalty),
            transformers.SequenceBiasLogitsProcessor({(t,): bias for t, bias in (p.logit_bias or {}).items()}),
            transformers.MinNewTokensLengthLogitsProcessor(
                len(prompt), p.min_tokens, torch.tensor([*end], dtype=torch.int64)
            ),
            transformers.TemperatureLogitsWarper(p.temperature),
            transformers.TopKLogitsWarper(p.top_k),
            transformers.TopPLogitsWarper(p.top_p),
            transformers.MinPLogitsWarper(p.min_p),
        ]
    )
    theirs = processors(torch.tensor([[*prompt, *output]]), torch.tensor(logits).double()).softmax(-1)
    ours = filtered_weights(logits, [make_row(p, prompt, output, tuple(end))])
    np.testing.assert_allclose(ours / ours.sum(), theirs.numpy(), rtol=1e-9, atol=1e-15)


# Greedy, extremes and errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias={0: 1})]
)
def test_greedy_takes_the_first_of_equals(params: SamplingParams) -> None:
    assert draw([0.0, 1.0, 5.0, 2.0, 5.0, 5.0], make_row(params)) == 2
    assert draw([-INF, -3e38, -3e38], make_row(params)) == 1


def test_greedy_with_penalties_takes_the_largest_adjusted_logit() -> None:
    logits = [1.0, 4.0, 3.0, 2.5]
    assert draw(logits, make_row(SamplingParams(temperature=0.0, repetition_penalty=2.0), [1])) == 2
    assert draw(logits, make_row(SamplingParams(temperature=0.0, presence_penalty=2.0), [2], [1])) == 2
    assert draw(logits, make_row(SamplingParams(temperature=0.0, frequency_penalty=1.0), [0], [1, 1, 2])) == 3
    assert draw(logits, make_row(SamplingParams(temperature=0.0, logit_bias={0: 3.5}))) == 0
    assert draw(logits, make_row(SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0))) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6, 1.0, 1e6])
def test_huge_logits_and_extreme_temperatures_give_finite_weights(temperature: float) -> None:
    logits = np.float32([[3e38, -3e38, 3e38, 0.0, -INF]])
    weights = filtered_weights(logits, [make_row(SamplingParams(temperature=temperature))])
    assert weights.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]]
    assert draw([1.0, 3.0, 2.0], make_row(SamplingParams(temperature=min(temperature, 1e-3)))) == 1


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias={0: 1.0})]
)
@pytest.mark.parametrize("logits", [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF], [NAN, NAN, NAN]], ids=str)
def test_logits_that_are_not_finite_are_an_error(params: SamplingParams, logits: list[float]) -> None:
    good = [0.0, 1.0, 2.0]
    with pytest.raises(NanoinferError, match=r"largest logit is (nan|-?inf)") as caught:
        sample(np.float32([good, logits]), [make_row(params)] * 2)
    assert isinstance(caught.value, TokensExcluded) == (logits == [-INF] * 3)


@pytest.mark.parametrize("penalty", [1e-3, 1e3])
def test_no_penalty_that_is_allowed_overflows(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=-1e3, frequency_penalty=-1e3)
    assert draw([3e38, -3e38, 0.0], make_row(params, [0, 1, 2], [0, 1, 2] * 50)) == 0


@pytest.mark.parametrize("k", [12, 13, 2**31, 2**63, 10**30])
def test_top_k_past_the_vocabulary_keeps_all(k: int) -> None:
    rows = [make_row(SamplingParams(top_k=k)), make_row(SamplingParams())]
    weights = filtered_weights(np.float32([LOGITS, LOGITS]), rows)
    assert np.array_equal(weights[0], weights[1])


def test_min_tokens_masks_the_end_tokens_until_it_is_reached() -> None:
    logits, params = [1.0, 2.0, 9.0, 3.0], SamplingParams(temperature=0.0, min_tokens=2)
    drawn = [draw(logits, make_row(params, output=[0] * n, end=(2, 3))) for n in range(4)]
    assert drawn == [1, 1, 2, 2]
    assert draw(logits, make_row(params)) == 2  # no end tokens: nothing to mask


def test_prompt_tokens_past_the_logits_are_not_penalised() -> None:
    """A padded vocabulary: ids that a prompt may hold but that are never drawn."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert draw([1.0, 3.0, 2.0], make_row(params, [7, 1, 900])) == 2


# Log-probabilities -------------------------------------------------------------------------------------------

HALVES = [math.log(w) for w in (0.0625, 0.5, 0.125, 0.25, 0.0625)]


def logprobs(params: SamplingParams, logits: Seq[float] = HALVES) -> list[tuple[int, float, int]]:
    """(token, probability, rank) in order."""
    (drawn,) = sample(np.float32([logits]), [make_row(params)])
    assert drawn.logprobs is not None
    assert next(iter(drawn.logprobs)) == drawn.token_id
    return [(t, pytest.approx(math.exp(value), rel=1e-6), rank) for t, (value, rank) in drawn.logprobs.items()]


def test_logprobs_are_the_raw_distribution_drawn_token_first() -> None:
    greedy = SamplingParams(temperature=0.0, logprobs=3)
    assert logprobs(greedy) == [(1, 0.5, 1), (3, 0.25, 2), (2, 0.125, 3)]
    odd = SamplingParams(temperature=0.0, logprobs=2, logit_bias={2: 100.0}, top_k=1)
    assert logprobs(odd) == [(2, 0.125, 3), (1, 0.5, 1), (3, 0.25, 2)]
    assert logprobs(SamplingParams(temperature=0.0, logprobs=0)) == [(1, 0.5, 1)]
    assert [t for t, _, _ in logprobs(SamplingParams(temperature=0.0, logprobs=1000))][:3] == [1, 3, 2]


def test_equals_have_the_same_rank() -> None:
    last = SamplingParams(temperature=0.0, logprobs=5, logit_bias={4: 100.0})
    ranks = {t: rank for t, _, rank in logprobs(last)}
    assert ranks == {1: 1, 3: 2, 2: 3, 0: 4, 4: 4}
    assert {rank for _, _, rank in logprobs(last, [0.0] * 5)} == {1}
    some = SamplingParams(temperature=0.0, logprobs=2, logit_bias={4: 100.0})
    assert [t for t, _, _ in logprobs(some, [0.0, 1.0, 0.0, 1.0, 1.0])] == [4, 1, 3]  # of equals, the first


def test_logprobs_are_none_unless_asked_for() -> None:
    assert sample(np.float32([HALVES]), [make_row(SamplingParams())])[0].logprobs is None


# Company -----------------------------------------------------------------------------------------------------


@st.composite
def params_of_any_kind(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.1, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        min_tokens=draw(st.integers(0, 4)),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        logit_bias=draw(st.sampled_from([None, {1: 2.0}])),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_draws_the_same_alone_and_in_company(data: st.DataObject) -> None:
    V, B = data.draw(st.integers(2, 70)), data.draw(st.integers(1, 6))
    logits = normal(B, V, seed=data.draw(st.integers(0, 2**32))) * 3
    rows = [
        make_row(
            data.draw(params_of_any_kind()),
            output=data.draw(st.lists(st.integers(0, V - 1), max_size=4)),
            end=data.draw(st.sampled_from([(), (1,)])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            index=i,
        )
        for i in range(B)
    ]
    before = logits.copy()
    together, weights = sample(logits, rows), filtered_weights(logits, rows)
    assert np.array_equal(logits, before)
    for i, row in enumerate(rows):
        alone = logits[i : i + 1]
        assert sample(alone, [row]) == [together[i]]
        assert np.array_equal(filtered_weights(alone, [row])[0], weights[i])


def test_no_rows_are_no_tokens() -> None:
    assert sample(np.zeros((0, 5), np.float32), []) == []


def test_a_tensor_gives_the_tokens_of_an_array() -> None:
    """Of any strides, with a gradient, and in inference mode."""
    torch = pytest.importorskip("torch")
    rows = [make_row(CASES[name], PROMPT, OUTPUT, END, seed=7) for name in CASES]
    array = normal(len(rows), 2 * len(LOGITS))[:, ::2]
    expected = sample(array, rows)
    assert len({drawn.token_id for drawn in expected}) > 3
    tensor = torch.from_numpy(array.copy())
    for logits in (tensor, tensor.T.contiguous().T, tensor.clone().requires_grad_()):
        assert sample(logits, rows) == expected
    with torch.inference_mode():
        assert sample(tensor * 1, rows) == expected


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


WORD64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
MAX = 2**64 - 1


def words(text: str) -> tuple[int, ...]:
    """ "1f a0" -> (31, 160)."""
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(
    "counter, key, answer",
    [  # Random123 (Salmon et al. 2011), tests/kat_vectors, philox4x32 with 10 rounds
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(answer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seed, sample, position, answer",
    [
        (0, 0, 0, "6627e8d5 e169c58d"),
        (MAX, MAX, MAX, "408f276d 41c83b0e"),
        (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, "d16cfe09 94fdcceb"),
    ],
)
def test_a_uniform_is_the_first_53_bits_of_two_words(seed: int, sample: int, position: int, answer: str) -> None:
    """The position is the low half of the counter, the sample the high half, the seed the key."""
    first, second = words(answer)
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniform_reference(seed=seed, sample=sample, position=position) == expected
    assert uniform(seed=seed, sample=sample, position=position) == expected


@settings(max_examples=100, deadline=None)
@given(WORD64, WORD64, WORD64)
@example(0, 0, 0)
@example(MAX, MAX, MAX)
def test_native_equals_the_reference_bit_for_bit(seed: int, sample: int, position: int) -> None:
    native = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    expected = uniform_reference(seed=seed, sample=sample, position=position)
    assert native.uniform(seed=seed, sample=sample, position=position).hex() == expected.hex()
    assert 0.0 <= expected < 1.0


@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
def test_uniforms_are_uniform_along_each_argument(varied: str) -> None:
    arguments = {"seed": 7, "sample": 0, "position": 0}
    counts, pairs, last = [0] * 64, [0] * 64, 0.0
    for i in range(20_000):
        u = uniform(**(arguments | {varied: i}))
        counts[int(u * 64)] += 1
        pairs[int(last * 8) * 8 + int(u * 8)] += 1  # a number says nothing about the next
        last = u
    assert chisquare(counts).pvalue > 1e-6
    assert chisquare(pairs).pvalue > 1e-6


@pytest.mark.parametrize("name", ["seed", "sample", "position"])
@pytest.mark.parametrize("bad", [-1, 2**64, 10**100, 1.0, math.nan, "1", None, [1]], ids=str)
def test_native_rejects_what_is_no_64_bit_integer(name: str, bad: object) -> None:
    native = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    with pytest.raises(TypeError):
        native.uniform(**({"seed": 1, "sample": 2, "position": 3} | {name: bad}))


def test_native_takes_its_three_arguments_by_name_only() -> None:
    native = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    with pytest.raises(TypeError):
        native.uniform(1, 2, 3)
    with pytest.raises(TypeError):
        native.uniform(seed=1, sample=2)
    with pytest.raises(TypeError):
        native.uniform(seed=1, sample=2, position=3, state=4)
