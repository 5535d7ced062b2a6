"""The rule of beam search on known log-probabilities: against an exhaustive search, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from helpers.models import refuses
from nanoinfer.sampling.beams import BeamSearch, Candidates, Hypothesis, find_candidates
from nanoinfer.sampling_params import BeamSearchParams

Rows = Callable[[tuple[int, ...]], np.ndarray]
"""Logits of the next token after some tokens."""


def run(rows: Rows, params: BeamSearchParams, ends: tuple[int, ...], max_tokens: int) -> tuple[list[Hypothesis], int]:
    """Return the results of a search, and the number of its steps."""
    search = BeamSearch(params, ends, max_tokens)
    beams: list[tuple[int, ...]] = [()]
    while not search.finished:
        found = [find_candidates(rows(b), search.num_candidates, params.temperature) for b in beams]
        beams = [(*beams[parent], token) for parent, token in search.advance(found)]
        assert len(set(beams)) == len(beams) <= params.beam_width
        assert not any(set(b) & set(ends) for b in beams)
    return search.results(), search.num_tokens


def random_rows(vocab_size: int, seed: int) -> Rows:
    """Return rows that depend on all tokens before them."""
    return lambda tokens: (
        np.random.default_rng([seed, *tokens]).normal(0, 2, vocab_size).astype(np.float32)  # type: ignore[no-any-return]
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum())  # type: ignore[no-any-return]


def all_outputs(rows: Rows, vocab_size: int, ends: tuple[int, ...], max_tokens: int) -> list[tuple[list[int], float]]:
    """Return every possible output with its log-probability."""
    outputs = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            if not set(tokens[:-1]) & set(ends) and (tokens[-1] in ends or length == max_tokens):
                sums = [log_softmax(rows(tokens[:i]))[token] for i, token in enumerate(tokens)]
                outputs.append((list(tokens), sum(sums)))
    return outputs


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("ends", [(3,), (0, 3)])
def test_a_wide_search_finds_the_best_of_all_outputs(penalty: float, ends: tuple[int, ...]) -> None:
    rows = random_rows(4, seed=len(ends))
    outputs = all_outputs(rows, 4, ends, max_tokens=3)
    assert len(outputs) <= 64  # so that no beam is ever dropped
    expected = sorted(outputs, key=lambda o: -o[1] / len(o[0]) ** penalty)
    found, num_steps = run(rows, BeamSearchParams(64, length_penalty=penalty, early_stopping="never"), ends, 3)
    assert num_steps == 3
    assert [h.token_ids for h in found] == [tokens for tokens, _ in expected]
    for hypothesis, (tokens, total) in zip(found, expected, strict=True):
        assert hypothesis.cum_logprob == pytest.approx(total, abs=1e-5)
        assert hypothesis.score == pytest.approx(total / len(tokens) ** penalty, abs=1e-5)


def probabilities(table: dict[tuple[int, ...], list[float]]) -> Rows:
    return lambda tokens: np.log(np.array(table[tokens], np.float32))


E = 2  # the end token of the tables below
TABLE = {
    (): [0.55, 0.44, 0.01],
    (0,): [0.5, 0.3, 0.2],
    (1,): [0.05, 0.05, 0.9],
    (0, 0): [0.4, 0.3, 0.3],
    (0, 1): [0.3, 0.3, 0.4],
    (0, 0, 0): [0.1, 0.1, 0.8],
    (0, 0, 1): [0.3, 0.3, 0.4],
    (0, 1, 0): [0.3, 0.3, 0.4],
    (0, 1, 1): [0.3, 0.3, 0.4],
}


def test_two_beams_find_what_greedy_decoding_misses() -> None:
    greedy, _ = run(probabilities(TABLE), BeamSearchParams(1), (E,), 4)
    assert [h.token_ids for h in greedy] == [[0, 0, 0, E]]
    found, _ = run(probabilities(TABLE), BeamSearchParams(2, length_penalty=0.0), (E,), 4)
    assert found[0].token_ids == [1, E]
    assert found[0].score == found[0].cum_logprob == pytest.approx(math.log(0.44 * 0.9), abs=1e-6)


def test_one_beam_ends_with_the_first_end_token_as_greedy_decoding() -> None:
    table = {(): [0.3, 0.2, 0.5], (0,): [0.98, 0.01, 0.01], (0, 0): [0.98, 0.01, 0.01]}
    for early_stopping in (False, True, "never"):
        params = BeamSearchParams(1, early_stopping=early_stopping)
        (found,), num_steps = run(probabilities(table), params, (E,), 3)
        assert (found.token_ids, num_steps) == ([E], 1)


def test_early_stopping_decides_how_long_the_search_goes_on() -> None:
    V, end = 21, 20

    def rows(tokens: tuple[int, ...]) -> np.ndarray:
        """The first two tokens are 0 (0.63) or the end (0.3); all later ones are as likely, and never the end."""
        p = np.full(V, 0.07 / 19) if len(tokens) < 2 else np.full(V, 0.05)
        if len(tokens) < 2:
            p[0] = 0.63
        p[end] = 0.3 if len(tokens) < 2 else 1e-9
        return np.log(p).astype(np.float32)

    num_steps = {}
    for early_stopping in (False, True, "never"):
        params = BeamSearchParams(2, early_stopping=early_stopping)
        found, num_steps[early_stopping] = run(rows, params, (end,), 12)
        assert [h.token_ids for h in found] == [[0, end], [end]]
    # The second output scores log 0.3 = -1.20. After t steps the best beam has b = -0.92 - 3.00 (t - 2).
    # True: two outputs are finished. False: b / t <= -1.20 at t = 3. never: b / 12 <= -1.20 at t = 7.
    assert num_steps == {True: 2, False: 3, "never": 7}


def test_an_end_token_that_is_not_among_the_first_does_not_finish() -> None:
    table = {(): [0.5, 0.4, 0.1], (0,): [0.5, 0.4, 0.1], (1,): [0.5, 0.4, 0.1]}
    search = BeamSearch(BeamSearchParams(2), (E,), 2)
    rows = probabilities(table)
    assert search.advance([find_candidates(rows(()), search.num_candidates)]) == [(0, 0), (0, 1)]
    assert search.results() == []  # the end token was third
    search = BeamSearch(BeamSearchParams(2), (0, 2), 9)
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert search.advance([find_candidates(row, search.num_candidates)]) == [(0, 1), (0, 3)]
    assert [h.token_ids for h in search.results()] == [[0]]  # token 2 was third, although a beam comes after it


def test_equal_proposals_are_taken_from_the_better_beam_and_by_their_ids() -> None:
    flat = np.zeros(5, np.float32)
    search = BeamSearch(BeamSearchParams(3), (), 3)
    assert search.advance([find_candidates(flat, search.num_candidates)]) == [(0, 0), (0, 1), (0, 2)]
    assert search.advance([find_candidates(flat, search.num_candidates)] * 3) == [(0, 0), (0, 1), (0, 2)]
    assert search.advance([find_candidates(flat, search.num_candidates)] * 3) == []
    assert [h.token_ids for h in search.results()] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]


def test_more_finished_outputs_than_beams_leave_the_best() -> None:
    def of(tokens: list[int], *logprobs: float) -> Candidates:
        return Candidates(np.array(tokens), np.array(logprobs))

    search = BeamSearch(BeamSearchParams(2, length_penalty=0.0), (0,), 9)
    assert search.advance([of([0, 1, 2], -1.0, -2.0, -2.5)]) == [(0, 1), (0, 2)]
    assert search.advance([of([1, 0], -0.1, -0.2), of([0, 1], -9.0, -9.5)]) == [(0, 1), (1, 1)]
    assert [(h.token_ids, h.score) for h in search.results()] == [([0], -1.0), ([1, 0], -2.2)]
    assert search.advance([of([0, 1], -0.05, -4.0), of([0, 1], -0.1, -9.0)]) == []  # the best beam cannot improve
    assert [h.token_ids for h in search.results()] == [[0], [1, 1, 0]]
    assert search.finished


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5, 2.0])
def test_candidates_are_the_most_likely_tokens(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 3, 101).astype(np.float32)
    found = find_candidates(logits, 7, temperature)
    expected = log_softmax(logits / (temperature or 1.0))
    assert found.token_ids.tolist() == np.argsort(-expected, kind="stable")[:7].tolist()
    np.testing.assert_allclose(found.logprobs, expected[found.token_ids], atol=1e-6)
    assert len(find_candidates(logits, 1000).token_ids) == 101


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    row = np.full(4, bad, np.float32)
    refuses(lambda: find_candidates(row, 2), "the model's largest logit is", "dtype=float32")


def test_a_tiny_temperature_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    found = find_candidates(np.array([1.0, 2.0, 3.0], np.float32), 3, 1e-45)
    assert found.logprobs.tolist() == [0.0, -math.inf, -math.inf]
    assert not recwarn.list
