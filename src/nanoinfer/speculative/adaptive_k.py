"""Choose the number of tokens to propose in each step (num_speculative_tokens, k); 0 is plain decoding.

    expected tokens per second of k = (sequences + expected accepted tokens) / (draft + step seconds)

A bound limits what speculation can lose: it spends from a credit, which 1% of the total time and the time saved by
accepted tokens fill again. docs/speculative.md ("How many tokens") describes credit, debt and probes. step_costs.py
estimates the seconds of the target's steps, the drafter its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanoinfer.config import MAX_K
from nanoinfer.speculative.step_costs import DecayedRatio, StepCosts

PRIOR_ACCEPTANCE = 0.7  # acceptance rate assumed before the first proposal
PRIOR_ROUNDS = 3.0  # weight of the prior, in rounds
FORGET = 0.93  # decay of older rounds, per round
MIN_GAIN = 1.02  # expected speed-up below which a step is plain
LOSS_SHARE = 0.01  # share of the total time that speculation may lose
OPENING_STEPS, MAX_CREDIT_STEPS = 1.5, 8.0  # credit, in plain steps
MAX_DEBT_STEPS = 4.0  # limit of the debt, in plain steps; the first sequence may exceed it
FEW_BEHIND = 8  # tokens that a drafter processes together with its proposals, without a debt
FIRST_RETRY, LAST_RETRY = 4, 32  # plain steps between probes
LEARNED_STEPS = 4  # plain steps that are learned together
FIRST_PLAIN, PLAIN_EVERY = 8, 64  # rounds between plain steps: 8 at first, 64 later


class StepOutcome(NamedTuple):
    """Result of a step in which every sequence decoded."""

    rounds: Sequence[tuple[int, int]]
    """Numbers of proposed and accepted tokens of each sequence."""
    step_sec: float
    """Time of engine and sampler."""
    draft_sec: float = 0.0
    """Time of the drafter."""
    drafted: tuple[int, int, int] | None = None
    """Arguments of `Drafter.estimate_sec` for the requests to the drafter; None if there were none."""


class Acceptance:
    """Acceptance rates of recent proposals, by depth: decayed means over the rounds of all sequences."""

    def __init__(self) -> None:
        self._accepted, self._judged = [0.0] * MAX_K, [0.0] * MAX_K

    def learn(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Add the numbers of (proposed, accepted) tokens of a step's sequences as one round; decay earlier rounds."""
        for depth in range(MAX_K):
            judged = [accepted > depth for proposed, accepted in rounds if depth < min(accepted + 1, proposed)]
            self._judged[depth] = FORGET * self._judged[depth] + len(judged) / len(rounds)
            self._accepted[depth] = FORGET * self._accepted[depth] + sum(judged) / len(rounds)

    def reached(self) -> list[float]:
        """Return the probability that the proposal at each depth is accepted."""
        rate, reached = PRIOR_ACCEPTANCE, [1.0]
        for accepted, judged in zip(self._accepted, self._judged, strict=True):
            rate = (accepted + PRIOR_ROUNDS * rate) / (judged + PRIOR_ROUNDS)  # a new depth: the rate of the one before
            reached.append(reached[-1] * rate)
        return reached[1:]


class AdaptiveK:
    """Chooses the number of tokens to propose for each sequence of a step.

    Args:
        costs: seconds of the target's steps; may be shared by several instances on one engine.
        draft_sec: `Drafter.estimate_sec`, based on measurements at the start.
    """

    def __init__(self, costs: StepCosts, draft_sec: Callable[[int, int, int], float]) -> None:
        self._costs, self._estimate_sec = costs, draft_sec
        self._acceptance, self._draft = Acceptance(), DecayedRatio()
        self._credit_sec: float | None = None
        self._debt_sec = 0.0  # time of catching up that later gains have not repaid
        self._num_to_wait, self._retry_after = 0, FIRST_RETRY
        self._probes = False
        self._num_plain = self._num_since_plain = 0
        self._unlearned: list[float] = []  # seconds of plain steps of `_num_seqs` sequences, learned together
        self._num_seqs = 0

    def waits(self) -> bool:
        """Count a step of the wait before the next probe; return whether it must be plain."""
        self._num_to_wait -= 1
        return self._num_to_wait >= 0

    def choose(self, limits: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Return the number of tokens to propose for each sequence of a step in which all sequences decode.

        Args:
            limits: maximum number of tokens to propose for each; it may generate one more.
            behind: tokens of each that the drafter must process first.
        """
        self._learn_plain()
        num_seqs, plain_sec = len(limits), self._costs(len(limits), len(limits))
        if self._credit_sec is None:
            self._credit_sec = OPENING_STEPS * plain_sec
        able = [i for i, limit in enumerate(limits) if limit > 0]
        if not able or self._num_since_plain >= min(PLAIN_EVERY, FIRST_PLAIN * self._num_plain):
            return [0] * num_seqs
        k, gain = self._best(num_seqs, [limits[i] for i in able])
        chosen = self._caught_up(limits, behind, able, plain_sec / num_seqs * (1 - 1 / gain)) if k else []
        if len(chosen) < len(able):
            k, _ = self._best(num_seqs, [limits[i] for i in chosen])
        self._probes = k == 0
        if self._probes:
            self._num_to_wait = self._retry_after
            cheapest = min(able, key=behind.__getitem__)
            k, chosen = 1, [cheapest]
            if self._reading_sec(1, behind[cheapest]) > self._credit_sec:
                return [0] * num_seqs
        for top in range(k, 0, -1):  # lower k until the credit covers the loss if all proposals are rejected
            num_tokens = num_seqs + sum(min(top, limits[i]) for i in chosen)
            if self._draft_sec(len(chosen), top) + self._costs(num_seqs, num_tokens) - plain_sec <= self._credit_sec:
                return [min(top, limits[i]) if i in chosen else 0 for i in range(num_seqs)]
        return [0] * num_seqs

    def _best(self, num_seqs: int, limits: Sequence[int]) -> tuple[int, float]:
        """Return the k with the most expected tokens per second if these sequences propose, and its speed-up."""
        tokens, best, gain = float(num_seqs), 0, MIN_GAIN
        plain_rate = num_seqs / self._costs(num_seqs, num_seqs)
        for k, reached in zip(range(1, max(limits, default=0) + 1), self._acceptance.reached(), strict=False):
            tokens += len(limits) * reached
            sec = self._draft_sec(len(limits), k) + self._costs(num_seqs, num_seqs + k * len(limits))
            if tokens / sec > plain_rate * gain:
                best, gain = k, tokens / sec / plain_rate
        return best, gain

    def _draft_sec(self, num: int, k: int) -> float:
        """Return the seconds to propose for sequences that the drafter has already processed."""
        return self._estimate_sec(num, k, num) * self._costs.level.ratio * self._draft.ratio

    def _reading_sec(self, num: int, num_behind: int) -> float:
        """Return the seconds that the drafter needs to catch up with sequences that are far behind."""
        if num_behind <= FEW_BEHIND * num:
            return 0.0
        extra = self._estimate_sec(num, 1, num_behind) - self._estimate_sec(num, 1, num)
        return max(0.0, extra) * self._costs.level.ratio * self._draft.ratio

    def _caught_up(
        self, limits: Sequence[int], behind: Sequence[int], able: Sequence[int], gain_per_token: float
    ) -> list[int]:
        """Return the sequences that the drafter has processed, and those that the debt lets it process now."""
        chosen, debt, limit = [], self._debt_sec, MAX_DEBT_STEPS * self._costs(len(able), len(able))
        for i in able:
            if (reading := self._reading_sec(1, behind[i])) > 0.0:
                if (debt > 0.0 and debt + reading > limit) or (limits[i] + 1) * gain_per_token < 2 * reading:
                    continue
                debt += reading
            chosen.append(i)
        return chosen

    def learn(self, outcome: StepOutcome) -> None:
        """Update statistics, costs and credit with the result of a step."""
        if outcome.drafted is not None or len(outcome.rounds) != self._num_seqs:
            self._learn_plain()
        if outcome.drafted is None:
            self._num_seqs = len(outcome.rounds)
            self._unlearned.append(outcome.step_sec)
            if len(self._unlearned) == LEARNED_STEPS:
                self._learn_plain()
        else:
            self._learn(outcome)

    def _learn_plain(self) -> None:
        """Learn from plain steps as from one of their median duration; each alone would take 1% of a short step."""
        if steps := self._unlearned:
            self._unlearned = []
            self._learn(StepOutcome([(0, 0)] * self._num_seqs, statistics.median(steps)), len(steps))

    def _learn(self, outcome: StepOutcome, num_steps: int = 1) -> None:
        num_seqs, rounds = len(outcome.rounds), [r for r in outcome.rounds if r[0]]
        num_tokens = num_seqs + sum(proposed for proposed, _ in rounds)
        step_sec = min(outcome.step_sec, 2 * self._costs(num_seqs, num_tokens))  # a longer step was disturbed
        self._costs.learn(num_seqs, num_tokens, outcome.step_sec)
        reading = self._learn_draft(outcome)
        if rounds:
            self._num_since_plain += 1
            self._acceptance.learn(rounds)
        else:
            self._num_plain, self._num_since_plain = self._num_plain + num_steps, 0
        if self._probes and outcome.drafted is not None:
            if rounds:
                accepted = any(accepted for _, accepted in rounds)
                self._retry_after = FIRST_RETRY if accepted else min(2 * self._retry_after, LAST_RETRY)
            self._num_to_wait = self._retry_after if rounds else 0  # no proposal: probe again in the next step
        if self._credit_sec is None:
            return
        plain_sec = self._costs(num_seqs, num_seqs)
        saved = sum(accepted for _, accepted in rounds) * plain_sec / num_seqs
        extra = outcome.draft_sec - reading + (step_sec - plain_sec if rounds else 0.0)
        gain = saved - extra + LOSS_SHARE * (step_sec * num_steps + outcome.draft_sec)
        repaid = max(0.0, min(gain, self._debt_sec))
        self._debt_sec += reading - repaid
        self._credit_sec = min(self._credit_sec + gain - repaid, MAX_CREDIT_STEPS * plain_sec)

    def _learn_draft(self, outcome: StepOutcome) -> float:
        """Correct the estimate of the drafter's time; return the seconds that it spent on catching up."""
        if outcome.drafted is None:
            return 0.0
        num, k, num_behind = outcome.drafted
        reading = self._reading_sec(num, num_behind)
        expected = self._draft_sec(num, k) + reading
        self._draft.learn(max(outcome.draft_sec, 1e-9) / expected * self._draft.ratio)
        return outcome.draft_sec * reading / expected
