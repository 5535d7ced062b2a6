"""Choose the number of tokens to propose in each step (num_speculative_tokens, k); 0 is plain decoding.

    expected tokens per second of k = (sequences + expected accepted tokens) / (draft + step seconds)

docs/speculative.md ("How many tokens") describes the acceptance statistics, the loss budget (`credit_sec`), the loan
for the prefill of a draft model (`loan_sec`) and the probes. step_costs.py estimates the seconds of the target's steps,
the drafter its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.speculative.step_costs import LatencyCorrection, StepCosts

MAX_K = 12
PRIOR_ACCEPTANCE = 0.7  # acceptance rate assumed before the first proposal
PRIOR_ROUNDS = 4.0  # weight of the prior, in rounds
FORGET = 0.95  # decay of older rounds, per round
MIN_GAIN = 1.02  # expected speed-up below which a step is plain
LOSS_SHARE = 0.01  # share of the total time that speculation may lose
OPENING_STEPS, MAX_CREDIT_STEPS = 2.0, 8.0  # credit, in plain steps
MAX_LOAN_STEPS = 4.0  # limit of a loan for several sequences; one sequence may exceed it
FEW_BEHIND = 8  # tokens that a drafter processes together with its proposals without a loan
FIRST_RETRY, LAST_RETRY = 4, 32  # plain steps between probes
FIRST_PLAIN, PLAIN_EVERY = 8, 64  # rounds between plain steps: 8 at first, 64 later
NUM_WORSE = 6  # the search for the best k stops after this many values in a row without improvement
DRAFT_RATE = 0.2  # learning rate of the correction of draft times


class AcceptanceStats:
    """Acceptance rate of recent proposals, by depth.

    Args:
        shared: statistics over all sequences, the prior for this sequence. None if these are the shared statistics.
    """

    def __init__(self, shared: AcceptanceStats | None = None) -> None:
        self._shared = shared
        self._accepted, self._judged = [0.0] * MAX_K, [0.0] * MAX_K
        self.rates: list[float] = []
        """Probability that the proposal at a depth is accepted, given that all before it were."""
        self._reached: list[float] = []
        self._update()

    @property
    def reached(self) -> list[float]:
        """Probability that the proposal at a depth is accepted."""
        return self._reached if self._shared is None or self._judged[0] else self._shared.reached

    def learn(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Add the numbers of (proposed, accepted) tokens of a step's sequences as one round; decay earlier rounds."""
        accepted, judged = self._accepted, self._judged
        for depth in range(MAX_K):
            accepted[depth] *= FORGET
            judged[depth] *= FORGET
        for num_proposed, num_accepted in rounds:
            for depth in range(min(num_accepted + 1, num_proposed, MAX_K)):  # up to the first rejected proposal
                judged[depth] += 1 / len(rounds)
                accepted[depth] += (depth < num_accepted) / len(rounds)
        self._update()

    def _update(self) -> None:
        rate, reached = PRIOR_ACCEPTANCE, 1.0
        self.rates, self._reached = [], []
        for depth in range(MAX_K):  # a depth without proposals has the rate of the depth before it
            prior = rate if self._shared is None else self._shared.rates[depth]
            rate = (self._accepted[depth] + PRIOR_ROUNDS * prior) / (self._judged[depth] + PRIOR_ROUNDS)
            reached *= rate
            self.rates.append(rate)
            self._reached.append(reached)


@dataclass(frozen=True)
class DraftBudget:
    """Limits and statistics of one sequence, from which its number of proposals is chosen."""

    acceptance: AcceptanceStats
    max_tokens: int
    """Maximum number of tokens to propose."""
    num_to_come: int
    """Maximum number of tokens that the sequence may still generate."""
    num_behind: int
    """Tokens that the drafter must process first."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step in which every sequence decoded."""

    rounds: Sequence[tuple[AcceptanceStats | None, int, int]]
    """Statistics of each sequence with its numbers of proposed and accepted tokens."""
    step_sec: float
    """Time of engine and sampler."""
    draft_sec: float = 0.0
    """Time of the drafter."""
    drafted: tuple[int, int, int] | None = None
    """Arguments of `Drafter.estimate_sec` for the requests to the drafter; None if there were none."""


class AdaptiveK:
    """Chooses the number of tokens to propose for each sequence of a step.

    Args:
        costs: seconds of the target's steps; may be shared by several instances on one engine.
        draft_sec: `Drafter.estimate_sec`, based on measurements at the start.
    """

    def __init__(self, costs: StepCosts, draft_sec: Callable[[int, int, int], float]) -> None:
        self._costs, self._draft_sec = costs, draft_sec
        self.acceptance = AcceptanceStats()
        self._draft, self._read = LatencyCorrection(), LatencyCorrection()
        self.credit_sec: float | None = None
        self.loan_sec = 0.0
        self._num_to_wait = 0
        self._retry_after = FIRST_RETRY
        self._probes = False
        self._num_since_plain = 0
        self._gain = 1.0
        """Expected speed-up of the last choice."""

    def waits(self) -> bool:
        """Count a step of the wait before the next probe; return whether it must be plain."""
        self._num_to_wait -= 1
        return self._num_to_wait >= 0

    @property
    def next_is_plain(self) -> bool:
        """Whether the next step must be plain."""
        return self._num_to_wait > 0

    def choose(self, budgets: Sequence[DraftBudget]) -> list[int]:
        """Return the number of tokens to propose for each sequence of a step in which all sequences decode."""
        num_seqs = len(budgets)
        plain_sec = self._costs(num_seqs, num_seqs)
        if self.credit_sec is None:
            self.credit_sec = OPENING_STEPS * plain_sec
        known = self._costs.plain(num_seqs)
        enough = min(PLAIN_EVERY, FIRST_PLAIN * (1 + known.num_updates)) if known is not None else 0
        if self._num_since_plain >= self._gain * enough:
            return [0] * num_seqs
        if not (able := [b for b in budgets if b.max_tokens > 0]):
            return [0] * num_seqs
        k, gain = self._best(num_seqs, able)
        if k > 0 and (ready := self._ready(able, plain_sec / num_seqs * (1 - 1 / gain))) != able:
            able = ready
            k, gain = self._best(num_seqs, able)
        if k == 0:
            able, k = self._probe([b for b in budgets if b.max_tokens > 0]), 1
        else:
            self._probes, self._retry_after, self._gain = False, FIRST_RETRY, gain
        ks = self._affordable(num_seqs, able, k)
        return [ks.get(id(b), 0) for b in budgets]

    def _best(self, num_seqs: int, able: Sequence[DraftBudget]) -> tuple[int, float]:
        """Return the k with the most expected tokens per second if `able` of `num_seqs` propose, and its speed-up."""
        most = max((b.max_tokens for b in able), default=0)
        num, tokens, best = len(able), float(num_seqs), (0, MIN_GAIN)
        reached = map(sum, zip(*(b.acceptance.reached for b in able), strict=True))
        plain_rate = num_seqs / self._costs(num_seqs, num_seqs)
        for k, accepted in zip(range(1, most + 1), reached, strict=False):
            if k > best[0] + NUM_WORSE:
                break
            tokens += accepted
            sec = self._draft_only(num, k) + self._costs(num_seqs, num_seqs + k * num)
            if tokens / sec > plain_rate * best[1]:
                best = k, tokens / sec / plain_rate
        return best

    def _draft_only(self, num: int, k: int) -> float:
        """Return the seconds to propose for sequences that the drafter has already processed."""
        return self._draft_sec(num, k, num) * self._costs.level.ratio * self._draft.ratio

    def _reading_sec(self, budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds that the drafter needs to catch up with some sequences."""
        behind = sum(b.num_behind for b in budgets if b.num_behind > FEW_BEHIND)
        return self._extra_reading(len(budgets), behind) * self._costs.level.ratio * self._read.ratio

    def _extra_reading(self, num: int, behind: int) -> float:
        return max(0.0, self._draft_sec(num, 1, behind) - self._draft_sec(num, 1, num)) if behind > num else 0.0

    def _ready(self, able: Sequence[DraftBudget], gain_per_token: float) -> list[DraftBudget]:
        """Return the sequences that the drafter has processed, and those that get a loan to be processed now."""
        ready: list[DraftBudget] = []
        lent, room = 0.0, MAX_LOAN_STEPS * self._costs(len(able), len(able))
        for b in able:
            if b.num_behind > FEW_BEHIND:
                reading = self._reading_sec([b])
                too_much = self.loan_sec > 0 or (lent > 0 and lent + reading > room)
                if too_much or b.num_to_come * gain_per_token < 2 * reading:
                    continue
                lent += reading
            ready.append(b)
        return ready

    def _probe(self, able: list[DraftBudget]) -> list[DraftBudget]:
        """Return the sequence that probes: it proposes one token although k = 0 is best. Empty if no probe is due."""
        self._probes, due = True, self._probes
        self._num_to_wait = self._retry_after
        if not due:
            return []
        cheapest = min(able, key=lambda b: b.num_behind)
        return [cheapest] if self._reading_sec([cheapest]) < (self.credit_sec or 0.0) else []

    def _affordable(self, num_seqs: int, able: Sequence[DraftBudget], k: int) -> dict[int, int]:
        """Return k for each sequence that proposes, lowered until the credit covers the loss if all are rejected."""
        plain_sec = self._costs(num_seqs, num_seqs)
        for most in range(k if able else 0, 0, -1):
            num_tokens = num_seqs + sum(min(most, b.max_tokens) for b in able)
            extra = self._draft_only(len(able), most) + self._costs(num_seqs, num_tokens) - plain_sec
            if extra <= (self.credit_sec or 0.0):
                return {id(b): min(most, b.max_tokens) for b in able}
        return {}

    def learn(self, outcome: StepOutcome) -> None:
        """Update statistics, costs and credit with the result of a step."""
        num_seqs = len(outcome.rounds)
        rounds = [(p, a) for _, p, a in outcome.rounds if p]
        num_tokens = num_seqs + sum(p for p, _ in rounds)
        step_sec = min(outcome.step_sec, 2 * self._costs(num_seqs, num_tokens))  # a longer step was disturbed
        self._costs.learn(num_seqs, num_tokens, outcome.step_sec)
        self._num_since_plain = self._num_since_plain + 1 if rounds else 0
        reading = self._learn_draft(outcome)
        if rounds:
            self.acceptance.learn(rounds)
            for stats, num_proposed, num_accepted in outcome.rounds:
                if num_proposed and stats is not None:
                    stats.learn([(num_proposed, num_accepted)])
        if self._probes:
            self._after_probe(outcome.drafted is not None, rounds)
        if self.credit_sec is None:
            return
        plain_sec = self._costs(num_seqs, num_seqs)
        saved = sum(a for _, a in rounds) * plain_sec / num_seqs
        extra = outcome.draft_sec - reading + (step_sec - plain_sec if rounds else 0.0)
        gain = saved - extra + LOSS_SHARE * (step_sec + outcome.draft_sec)
        repaid = max(0.0, min(gain, self.loan_sec))
        self.loan_sec += reading - repaid
        self.credit_sec = min(self.credit_sec + gain - repaid, MAX_CREDIT_STEPS * plain_sec)

    def _learn_draft(self, outcome: StepOutcome) -> float:
        """Correct the estimates of the drafter's time; return the seconds that it spent on catching up."""
        if outcome.drafted is None:
            return 0.0
        num, k, behind = outcome.drafted
        level = self._costs.level.ratio
        proposing = self._draft_only(num, k)
        reading = self._extra_reading(num, behind) * level * self._read.ratio if behind > FEW_BEHIND * num else 0.0
        log_error = math.log(max(outcome.draft_sec, 1e-9) / (proposing + reading))
        if reading == 0.0:
            self._draft.move(log_error, max(DRAFT_RATE, 1 / (1 + self._draft.num_updates)))
        elif reading > proposing:
            self._read.move(log_error, 0.5)
        return outcome.draft_sec * reading / (proposing + reading)

    def _after_probe(self, asked: bool, rounds: list[tuple[int, int]]) -> None:
        """Set the wait before the next probe: short if this probe was accepted, otherwise twice as long as before."""
        if asked and not rounds:  # the drafter proposed nothing: probe again in the next step
            self._num_to_wait = 0
        elif rounds:
            self._retry_after = FIRST_RETRY if any(a for _, a in rounds) else min(2 * self._retry_after, LAST_RETRY)
            self._num_to_wait = self._retry_after
