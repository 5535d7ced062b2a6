"""How many tokens to propose in a step, chosen while running; 0 (plain decoding) is one of the choices.

    expected tokens per second of k = (sequences + expected accepted tokens) / (draft + step seconds)

- Accepted tokens: for each depth, how often a proposal there was right when all before it were (AcceptanceStats), of
  all sequences, and of each sequence on its own.
- Seconds: step_costs.py for steps of the target, the drafter's own estimate for drafts; both are corrected by what is
  measured.
- Loss: speculation has a credit in seconds. Each step adds 1% of its time, accepted tokens add the time that they
  saved, drafting and verifying take what they cost beyond a plain step. A step is speculated on only if the
  credit covers the loss when every proposal is wrong. Reading a prompt into a draft model is lent, one loan at a time,
  to sequences that are expected to gain twice as much. So the loss is bounded by 1% of the time, the opening
  credit and one loan, whatever the drafter proposes. The credit belongs to the engine and not to a request: short
  requests speculate from their first step if those before them gained.
- Where 0 is best, one sequence proposes one token after 4, 8, ... 32 steps. Where it is not, every 64th
  step is plain, so that the cost of both stays known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoinfer.speculative.step_costs import LatencyCorrection, StepCosts

MAX_K = 12
PRIOR_ACCEPTANCE = 0.7  # before anything was proposed
PRIOR_ROUNDS = 4.0  # rounds of its own that outweigh what is known beforehand
FORGET = 0.95  # weight of what is known, after each round
MIN_GAIN = 1.02  # expected speed-up below which a step is plain
LOSS_SHARE = 0.01  # of all time, that speculation may lose
OPENING_STEPS, MAX_CREDIT_STEPS = 2.0, 8.0  # credit, in plain steps
MAX_LOAN_STEPS = 4.0  # a loan may be larger for one sequence
FEW_BEHIND = 8  # tokens that a drafter reads beside its proposals at no cost worth a loan
FIRST_RETRY, LAST_RETRY = 4, 32  # plain steps between probes
FIRST_PLAIN, PLAIN_EVERY = 8, 64  # rounds between plain steps: 8 at first, 64 later
NUM_WORSE = 6  # values of k in a row that are not better: none behind them is considered
DRAFT_RATE = 0.2


class AcceptanceStats:
    """How often proposals were accepted lately, by depth.

    Args:
        shared: of all sequences: what is expected of this one before it has rounds of its own. None: these are of all.
    """

    def __init__(self, shared: AcceptanceStats | None = None) -> None:
        self._shared = shared
        self._accepted, self._judged = [0.0] * MAX_K, [0.0] * MAX_K
        self.rates: list[float] = []
        """Probability that the proposal at a depth is accepted if all before it are."""
        self._reached: list[float] = []
        self._update()

    @property
    def reached(self) -> list[float]:
        """Probability that the proposal at a depth is accepted."""
        return self._reached if self._shared is None or self._judged[0] else self._shared.reached

    def learn(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Add the (proposed, accepted) tokens of a step's sequences, as one round together; forget earlier ones."""
        accepted, judged = self._accepted, self._judged
        for depth in range(MAX_K):
            accepted[depth] *= FORGET
            judged[depth] *= FORGET
        for num_proposed, num_accepted in rounds:
            for depth in range(min(num_accepted + 1, num_proposed, MAX_K)):  # none after the first wrong one is judged
                judged[depth] += 1 / len(rounds)
                accepted[depth] += (depth < num_accepted) / len(rounds)
        self._update()

    def _update(self) -> None:
        rate, reached = PRIOR_ACCEPTANCE, 1.0
        self.rates, self._reached = [], []
        for depth in range(MAX_K):  # a depth that was not tried is taken to be like the one before it
            prior = rate if self._shared is None else self._shared.rates[depth]
            rate = (self._accepted[depth] + PRIOR_ROUNDS * prior) / (self._judged[depth] + PRIOR_ROUNDS)
            reached *= rate
            self.rates.append(rate)
            self._reached.append(reached)


@dataclass(frozen=True)
class DraftBudget:
    """What a sequence of a step can use."""

    acceptance: AcceptanceStats
    max_tokens: int
    """Most tokens that may be proposed."""
    num_to_come: int
    """Most tokens that the sequence may still get."""
    num_behind: int
    """Tokens that the drafter must read first."""


@dataclass(frozen=True)
class StepOutcome:
    """A step in which every sequence decoded."""

    rounds: Sequence[tuple[AcceptanceStats | None, int, int]]
    """Each sequence with the numbers of its tokens that were proposed and accepted."""
    step_sec: float
    """Engine and sampler."""
    draft_sec: float = 0.0
    drafted: tuple[int, int, int] | None = None
    """The arguments of `draft_sec` for what was asked of the drafter; None: nothing was."""


class AdaptiveK:
    """Chooses the number of tokens to propose for each sequence of a step.

    Args:
        costs: seconds of the target's steps; may be shared with others of the same engine.
        draft_sec: (sequences, proposals of each, tokens to read) -> seconds of the drafter, as measured at the start.
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
        """Return whether the next step is plain for sure, and count it."""
        self._num_to_wait -= 1
        return self._num_to_wait >= 0

    @property
    def next_is_plain(self) -> bool:
        """Whether the next step is plain for sure."""
        return self._num_to_wait > 0

    def choose(self, budgets: Sequence[DraftBudget]) -> list[int]:
        """Return how many tokens to propose for each sequence of a step in which all of them decode."""
        num_seqs = len(budgets)
        plain_sec = self._costs(num_seqs, num_seqs)
        if self.credit_sec is None:
            self.credit_sec = OPENING_STEPS * plain_sec
        known = self._costs.plain(num_seqs)  # the more a plain step costs, the less its exact time matters
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
            able, k = self._probe(num_seqs, [b for b in budgets if b.max_tokens > 0]), 1
        else:
            self._probes, self._retry_after, self._gain = False, FIRST_RETRY, gain
        ks = self._affordable(num_seqs, able, k)
        return [ks.get(id(b), 0) for b in budgets]

    def _best(self, num_seqs: int, able: Sequence[DraftBudget]) -> tuple[int, float]:
        """Return the k of the most expected tokens per second if `able` of `num_seqs` propose, and the speed-up."""
        most = max((b.max_tokens for b in able), default=0)
        num, tokens, best = len(able), float(num_seqs), (0, MIN_GAIN)
        reached = map(sum, zip(*(b.acceptance.reached for b in able), strict=True))
        plain_rate = num_seqs / self._costs(num_seqs, num_seqs)
        draft_ratio = self._costs.level.ratio * self._draft.ratio
        for k, accepted in zip(range(1, most + 1), reached, strict=False):
            if k > best[0] + NUM_WORSE:
                break
            tokens += accepted
            sec = self._draft_sec(num, k, num) * draft_ratio + self._costs(num_seqs, num_seqs + k * num)
            if tokens / sec > plain_rate * best[1]:
                best = k, tokens / sec / plain_rate
        return best

    def _draft_only(self, num: int, k: int) -> float:
        """Return the seconds of proposals for sequences that the drafter has read."""
        return self._draft_sec(num, k, num) * self._costs.level.ratio * self._draft.ratio

    def _reading_sec(self, budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds that the drafter needs to read what it has not read of some sequences."""
        behind = sum(b.num_behind for b in budgets if b.num_behind > FEW_BEHIND)
        return self._extra_reading(len(budgets), behind) * self._costs.level.ratio * self._read.ratio

    def _extra_reading(self, num: int, behind: int) -> float:
        return max(0.0, self._draft_sec(num, 1, behind) - self._draft_sec(num, 1, num)) if behind > num else 0.0

    def _ready(self, able: Sequence[DraftBudget], gain_per_token: float) -> list[DraftBudget]:
        """Return the sequences that the drafter has read, and those that it should read now."""
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

    def _probe(self, num_seqs: int, able: list[DraftBudget]) -> list[DraftBudget]:
        """Return the sequence that proposes one token though 0 is best; none as long as it is too early."""
        self._probes, due = True, self._probes
        self._num_to_wait = self._retry_after
        if not due:
            return []
        cheapest = min(able, key=lambda b: b.num_behind)
        return [cheapest] if self._reading_sec([cheapest]) < (self.credit_sec or 0.0) else []

    def _affordable(self, num_seqs: int, able: Sequence[DraftBudget], k: int) -> dict[int, int]:
        """Return k for each sequence that proposes, lowered until the credit covers the loss if all are wrong."""
        plain_sec = self._costs(num_seqs, num_seqs)
        for most in range(k if able else 0, 0, -1):
            num_tokens = num_seqs + sum(min(most, b.max_tokens) for b in able)
            extra = self._draft_only(len(able), most) + self._costs(num_seqs, num_tokens) - plain_sec
            if extra <= (self.credit_sec or 0.0):
                return {id(b): min(most, b.max_tokens) for b in able}
        return {}

    def learn(self, outcome: StepOutcome) -> None:
        """Take a step into account."""
        num_seqs = len(outcome.rounds)
        rounds = [(p, a) for _, p, a in outcome.rounds if p]
        num_tokens = num_seqs + sum(p for p, _ in rounds)
        step_sec = min(outcome.step_sec, 2 * self._costs(num_seqs, num_tokens))  # more is a disturbance
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
        """Correct the estimates of the drafter's time; return the seconds that it read prompts."""
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
        """Set when to probe again: soon where the last probe was right."""
        if asked and not rounds:  # nothing was proposed: that was no probe
            self._num_to_wait = 0
        elif rounds:
            self._retry_after = FIRST_RETRY if any(a for _, a in rounds) else min(2 * self._retry_after, LAST_RETRY)
            self._num_to_wait = self._retry_after
