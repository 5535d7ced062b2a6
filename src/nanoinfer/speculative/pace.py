"""How many tokens to propose, decided while it runs, none included.

Three things are known: what a step costs by its number of tokens (costs.py, kept current by every step that is
timed), what the drafter costs, and how often this text's proposals were accepted lately. roofline/speculation.py says
which number is the best for them: it is computed once for each batch size and acceptance, and looked up.

Two rules keep it from ever costing more than it gives:
- An account for each text. It is opened with half a percent of the time that the text may take, credited with the
  time that accepted tokens saved and half a percent of all time spent, and charged with what drafting and verifying
  cost above a plain step. Texts that decode together pay together: a round is begun when their accounts can pay it
  even if all of it is wrong. (A round costs nearly the same for one text as for all of them, so one of many cannot pay
  it alone; and a text that began with bad luck is not shut out while the others gain.) So the loss is bounded,
  whoever proposes.
- A drafter that has a prompt to read first does so only for a text that has enough tokens to come to earn twice
  that; the account is lent what it costs.

A text that proposed in vain is tried again with one token after 4, 8, ... up to 512 plain steps. Every 64th round is
a plain step, so that the cost of both kinds stays known.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.roofline.speculation import best_speculation
from nanoinfer.speculative.costs import StepTimes

MAX_K = 12
ALLOWANCE = 0.005  # of the time spent, that speculation may lose
OPENING = 0.0055  # of the time that a text may still take: what it may lose beside that
MOST_OPENING = 4.0  # plain steps: the text may end early
MIN_GAIN = 1.02  # predicted speed-up below which it is not worth the trouble
PRIOR_ROUNDS = 3.0  # how many rounds of its own a text needs to outweigh what others showed
FORGET = 0.9  # of what is known, each round
PLAIN_EVERY = 64
NUM_RECENT = 9  # times of a kind of step that are remembered
FADE_EVERY = 4  # plain steps after which one that is not plain is forgotten
FIRST_RETRY, LAST_RETRY = 4, 512


@dataclass
class Trust:
    """How often a text's proposals were right lately, and what they gained: the state of one text."""

    num_right: float = 0.0
    num_wrong: float = 0.0
    balance_sec: float = 0.0
    """What speculation has gained so far; see the account above."""
    opened: bool = False
    lent: bool = False
    """Whether the account was lent what it costs to read the prompt."""
    num_plain: int = 0
    """Plain steps since the last proposal."""
    retry_after: int = FIRST_RETRY

    def acceptance(self, prior: float) -> float:
        """Return the estimated probability that a proposal is accepted."""
        return (self.num_right + PRIOR_ROUNDS * prior) / (self.num_right + self.num_wrong + PRIOR_ROUNDS)

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Note a round's outcome. A proposal after a wrong one was never judged."""
        self.note(num_accepted, num_accepted < num_proposed)

    def note(self, num_right: float, num_wrong: float) -> None:
        """Add a round to what is known, and forget some of the earlier ones."""
        self.num_right = FORGET * self.num_right + num_right
        self.num_wrong = FORGET * self.num_wrong + num_wrong


@dataclass(frozen=True)
class Wish:
    """One text of a step, before anything is proposed."""

    trust: Trust
    num_tokens: int
    """Most tokens that may be proposed."""
    num_to_come: int
    """Most tokens that the text may still get."""
    num_behind: int
    """Tokens that the drafter has to read first."""


@dataclass(frozen=True)
class Outcome:
    """A step that did nothing but decode."""

    texts: list[tuple[Trust, int, int]]
    """Each text with the numbers of its tokens that were proposed and accepted."""
    step_sec: float
    """Engine and sampler."""
    draft_sec: float
    expected_draft_sec: float
    """Of `Drafter.estimate_sec`."""


class Drift:
    """How much longer something takes than was measured at the start: the median of the last few times.

    A median, because a step beside another process or on a cold page takes several times as long, and says nothing of
    the next.
    """

    def __init__(self, otherwise: Drift | None = None) -> None:
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._otherwise = otherwise
        self.ratio = 1.0

    def learn(self, predicted_sec: float, actual_sec: float) -> None:
        """Take note of one more."""
        self._recent.append(actual_sec / predicted_sec)
        self._update()

    def fade(self) -> None:
        """Forget the oldest: what has not been seen for long is no reason against trying it again."""
        if self._recent:
            self._recent.popleft()
        self._update()

    def _update(self) -> None:
        expected = self._otherwise.ratio if self._otherwise is not None else 1.0
        known = [*self._recent, *[expected] * (3 - len(self._recent))]  # one or two alone may be anything
        self.ratio = statistics.median(known)


class Pace:
    """Chooses k for each text of a step.

    Args:
        times: seconds of the target's steps.
        draft_sec: (number of texts, proposals, tokens to read first) -> seconds of a round of proposals.
    """

    def __init__(self, times: StepTimes, draft_sec: Callable[[int, int, int], float]) -> None:
        self._times, self._draft_sec = times, draft_sec
        self.plain, self.draft = Drift(), Drift()
        self.verify = Drift(otherwise=self.plain)
        self._prior = Trust(num_right=2.0, num_wrong=1.0)  # of all texts together: two of three, to begin with
        self._num_rounds = self._num_plain = 0
        self._best: dict[tuple[int, int], tuple[int, float]] = {}
        self._best_at: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def _overall(self) -> float:
        return self._prior.num_right / (self._prior.num_right + self._prior.num_wrong)

    def plain_sec(self, num_seqs: int) -> float:
        """Return the seconds of a plain step."""
        return self._times(num_seqs) * self.plain.ratio

    def choose(self, texts: list[Wish]) -> list[int]:
        """Return how many tokens to propose for each text of a step that decodes nothing else."""
        num_seqs = len(texts)
        if self._num_rounds % PLAIN_EVERY == PLAIN_EVERY - 1 or self.best(num_seqs, 1.0)[0] == 0:
            return [0] * num_seqs
        return self._affordable(texts, [self._choose(text, num_seqs) for text in texts])

    def _affordable(self, texts: list[Wish], chosen: list[int]) -> list[int]:
        """Return the choices, cut to what the accounts can pay if every proposal is wrong."""
        num_seqs, means = len(texts), sum(text.trust.balance_sec for text in texts)
        for most in range(max(chosen), 0, -1):
            asked = [(text, min(k, most)) for text, k in zip(texts, chosen, strict=True) if k > 0]
            behind = sum(text.num_behind for text, _ in asked)
            draft = self._draft_sec(len(asked), most, behind) * self.draft.ratio
            step = self._times(num_seqs + sum(k for _, k in asked)) * self.verify.ratio
            if draft + step - self.plain_sec(num_seqs) <= means:
                return [min(k, most) for k in chosen]
        return [0] * num_seqs

    def _choose(self, text: Wish, num_seqs: int) -> int:
        trust, share = text.trust, self.plain_sec(num_seqs) / num_seqs
        if not trust.opened:
            trust.opened = True
            trust.balance_sec = share * min(MOST_OPENING, OPENING * text.num_to_come)
        if text.num_tokens < 1:
            return 0
        k, gain = self.best(num_seqs, trust.acceptance(self._overall))
        if k == 0:
            k, gain = int(trust.num_plain >= trust.retry_after), 1.0
        if text.num_behind > 8:  # a prompt to read first: is there enough to come?
            reading = self._draft_sec(1, 1, text.num_behind) * self.draft.ratio
            if text.num_to_come * share * (1 - 1 / gain) < 2 * reading:
                return 0
            trust.balance_sec += 0.0 if trust.lent else reading
            trust.lent = True
        return min(k, text.num_tokens)

    def best(self, num_seqs: int, acceptance: float) -> tuple[int, float]:
        """Return the number of proposals for an acceptance, and the speed-up to expect; (0, 1) where none pays."""
        now = (self.plain.ratio, self.verify.ratio, self.draft.ratio)
        if any(abs(a - b) > 0.02 * b for a, b in zip(now, self._best_at, strict=True)):
            self._best, self._best_at = {}, now
        key = (num_seqs, round(acceptance * 32))
        if key not in self._best:
            self._best[key] = self._find_best(num_seqs, key[1] / 32)
        return self._best[key]

    def _find_best(self, num_seqs: int, acceptance: float) -> tuple[int, float]:
        plain = self.plain_sec(num_seqs)

        def verify_cost(num_tokens: int) -> float:
            return self._times(num_seqs * num_tokens) * self.verify.ratio / plain

        one = self._draft_sec(num_seqs, 1, num_seqs) * self.draft.ratio / plain
        all_of_them = self._draft_sec(num_seqs, MAX_K, num_seqs) * self.draft.ratio / plain
        more = (all_of_them - one) / (MAX_K - 1)  # the formula wants one price for each; the rest goes to verifying
        best = best_speculation(acceptance, more, lambda n: verify_cost(n) + one - more, max_k=MAX_K)
        return (best.speculate_k, best.speedup) if best.speedup >= MIN_GAIN else (0, 1.0)

    def learn(self, outcome: Outcome) -> None:
        """Take note of a step that did nothing but decode."""
        num_seqs, num_proposed = len(outcome.texts), sum(p for _, p, _ in outcome.texts)
        plain = self.plain_sec(num_seqs)
        self._num_rounds += 1
        if num_proposed == 0:
            self.plain.learn(self._times(num_seqs), outcome.step_sec)
            self._num_plain += 1
            if self._num_plain % FADE_EVERY == 0:
                self.verify.fade()
                self.draft.fade()
        else:
            self.verify.learn(self._times(num_seqs + num_proposed), outcome.step_sec)
            self.draft.learn(outcome.expected_draft_sec, outcome.draft_sec)
            judged = [(p, a) for _, p, a in outcome.texts if p]
            wrong = sum(a < p for p, a in judged) / len(judged)
            self._prior.note(sum(a for _, a in judged) / len(judged), wrong)  # one round, whatever its size
        extra = outcome.step_sec + outcome.draft_sec - plain if num_proposed else outcome.draft_sec
        for trust, proposed, accepted in outcome.texts:
            trust.balance_sec += ALLOWANCE * plain / num_seqs
            if proposed == 0:
                trust.balance_sec -= 0.0 if num_proposed else extra / num_seqs  # asked for nothing
                trust.num_plain += 1
                continue
            trust.balance_sec += accepted * plain / num_seqs - extra * proposed / num_proposed
            trust.num_plain = 0
            trust.retry_after = FIRST_RETRY if accepted else min(2 * trust.retry_after, LAST_RETRY)
            trust.learn(proposed, accepted)
