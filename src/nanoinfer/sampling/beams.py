"""Beam search: which tokens extend which beams, and when the search ends. Arithmetic is NumPy's.

    start    one beam: the prompt, with log-probability 0
    step     each beam proposes its most likely tokens; all proposals are sorted by the sum of their log-probabilities
             - one of the first W that ends (an end token, or max_tokens) is a finished output
             - the first W that do not end are the beams of the next step
             - of the finished outputs, the W with the highest scores are kept
    score    log-probability / (number of generated tokens, the end token included) ** length_penalty
    end      W outputs are finished, and early_stopping is satisfied (`_is_finished`); or max_tokens is reached

The rule is that of `generate(num_beams=W, do_sample=False)` in transformers 5 (generation/utils.py, `_beam_search`).
With W = 1, transformers decodes greedily: it ends with the first end token, as here with early_stopping=True.

Of equal proposals, the one of the better beam is first, then the one of the smaller token id; of equal finished
outputs, the one that was finished first. Log-probabilities are summed in float64.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError
from nanoinfer.sampling.filters import Floats
from nanoinfer.sampling.sampler import largest, not_finite
from nanoinfer.sampling_params import BeamSearchParams
from nanoinfer.utils.arrays import Array, to_numpy


@dataclass(frozen=True)
class Candidates:
    """The most likely next tokens of one beam, the most likely first; of equal ones, the smaller id first."""

    token_ids: NDArray[np.int64]
    logprobs: Floats


def find_candidates(logits: Array, count: int, temperature: float = 0.0) -> Candidates:
    """Return the `count` most likely tokens with their log-probabilities.

    Args:
        logits: (V,) float32, on any device; not changed.
        count: number of tokens; all V if it is larger.
        temperature: divides the logits; 0 and 1 leave them as they are.

    Raises:
        NanoinferError: the largest logit is not finite (the model overflowed).
    """
    row = to_numpy(logits)
    top = row.max()
    if not np.isfinite(top):
        raise NanoinferError(not_finite(top))
    token_ids = np.array(largest(row, min(count, len(row))), np.int64)
    with np.errstate(over="ignore"):  # to -inf, by a tiny temperature
        scaled = (row - top) / np.float32(temperature or 1.0)
    return Candidates(token_ids, scaled[token_ids] - np.log(np.exp(scaled).sum(dtype=np.float64)))


class _Node(NamedTuple):
    """The last token of a beam or of a finished output. Beams with a common beginning share its nodes."""

    token_id: int
    before: _Node | None


class _Beam(NamedTuple):
    node: _Node | None
    cum_logprob: float


@dataclass(frozen=True)
class Hypothesis:
    """A finished output."""

    token_ids: list[int]
    """The generated tokens, including an end token."""
    cum_logprob: float
    """Sum of their log-probabilities."""
    score: float


def score_of(cum_logprob: float, num_tokens: int, length_penalty: float) -> float:
    """Return the score of an output of `num_tokens` tokens."""
    return float(cum_logprob / num_tokens**length_penalty)


class BeamSearch:
    """The search for one prompt. Call `advance` until it is done."""

    def __init__(self, params: BeamSearchParams, end_token_ids: Collection[int], max_tokens: int) -> None:
        self._width, self._penalty = params.beam_width, params.length_penalty
        self._early = True if params.beam_width == 1 else params.early_stopping
        self._ends = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._beams = [_Beam(None, 0.0)]
        self._finished: list[tuple[float, _Beam]] = []  # (score, output), the best first
        self.num_tokens = 0
        """Generated tokens of each beam."""
        self.finished = False
        """Whether the search has ended."""

    @property
    def num_candidates(self) -> int:
        """Candidates of each beam that `advance` needs: at most W go on, beside those that are end tokens."""
        return self._width + len(self._ends)

    def advance(self, candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Choose the beams of the next step.

        Args:
            candidates: of each beam, in the order of the last result; at first, of the prompt alone.

        Returns:
            (index of the extended beam, token) of each beam of the next step, the best first; W pairs if the vocabulary
            has W tokens that are not end tokens. Empty if the search is done.
        """
        assert not self.finished
        assert len(candidates) == len(self._beams)
        self.num_tokens += 1
        parents = np.repeat(np.arange(len(candidates)), [len(c.token_ids) for c in candidates]).tolist()
        tokens = np.concatenate([c.token_ids for c in candidates]).tolist()
        sums = np.concatenate([b.cum_logprob + c.logprobs for b, c in zip(self._beams, candidates, strict=True)])
        chosen: list[tuple[int, int]] = []
        beams: list[_Beam] = []
        for place, i in enumerate(np.argsort(-sums, kind="stable").tolist()):
            parent, token = parents[i], tokens[i]
            beam = _Beam(_Node(token, self._beams[parent].node), sums[i].item())
            if token not in self._ends and self.num_tokens < self._max_tokens:
                chosen.append((parent, token))
                beams.append(beam)
            elif place < self._width:
                self._finish(beam)
            if len(beams) == self._width:
                break
        self._beams = beams
        self.finished = self._is_finished()
        return [] if self.finished else chosen

    def _finish(self, beam: _Beam) -> None:
        """Add a finished output, and drop the worst if there are more than W."""
        score = score_of(beam.cum_logprob, self.num_tokens, self._penalty)
        self._finished.append((score, beam))
        self._finished.sort(key=lambda item: -item[0])  # stable
        del self._finished[self._width :]

    def _is_finished(self) -> bool:
        """Return whether the search ends after this step."""
        if not self._beams:
            return True
        if len(self._finished) < self._width:
            return False
        if self._early is True:
            return True
        # The score that the best beam would have with the same log-probability: at its present length, or with "never"
        # at the length that is best for it. Log-probabilities are negative, and only fall as tokens are added.
        longest = self._early == "never" and self._penalty > 0
        length = self._max_tokens if longest else self.num_tokens
        return score_of(self._beams[0].cum_logprob, length, self._penalty) <= self._finished[-1][0]

    def results(self) -> list[Hypothesis]:
        """Return the finished outputs, the best first: W, once the search is done."""
        return [Hypothesis(_tokens(beam.node), beam.cum_logprob, score) for score, beam in self._finished]


def _tokens(node: _Node | None) -> list[int]:
    """Return the tokens from the first to that of a node."""
    tokens = []
    while node is not None:
        tokens.append(node.token_id)
        node = node.before
    return tokens[::-1]
