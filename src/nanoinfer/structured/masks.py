"""The tokens that a grammar permits at each position of an output, computed while the engine runs.

    start    the masks of a step's rows, which depend on the tokens so far and on the proposals only, are computed: by a
             thread, or at once where that takes less than handing it over
    (core)   the engine extends the sequences and returns the logits
    apply    wait for the masks; exclude the other tokens' logits, before the sampler sees them
    push     (Sequence.append) advance by a sampled token; after the last one that the grammar permits, the output ends

So penalties, biases, filters and random numbers work on masked logits as on any, and all samplers give the same tokens.
Log-probabilities are those of the model: they are computed from the logits before.

With proposals, each row that is verified has its mask. Proposals after the first that the grammar refuses are dropped.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.sampling.sampler import Sampled, add_logprobs
from nanoinfer.speculative.base import Proposal
from nanoinfer.structured.grammars import Grammar, Lexer, LexerFailed
from nanoinfer.utils.arrays import Array, to_numpy
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    import llguidance

    from nanoinfer.scheduling.sequence import Sequence
    from nanoinfer.speculative.speculator import StepProposals
    from nanoinfer.speculative.verify import Group

T = TypeVar("T")
Excluded = NDArray[Any]
"""The tokens that a mask excludes: their ids if they are few, else (vocab_size,) bool."""
EXCLUDED = np.float32("-inf")  # not Python's: converting it takes most of the time of few assignments
FEW = 8
"""The vocabulary's size over the most ids: more are slower than booleans."""
AT_ONCE_SEC = 200e-6
"""Time of a step's masks below which they are computed without the thread, which costs 20 to 80 us and a core."""
REPLAYED = 64
"""Tokens that are consumed at a time when an output moves to another lexer; other threads run in between."""


class OutputGrammar:
    """The state of a grammar after the tokens of one output. It has no memory of llguidance before its first mask.

    Args:
        grammar: of the request.
        end_token_ids: tokens that end the output, permitted where the grammar permits an end.
    """

    def __init__(self, grammar: Grammar, end_token_ids: Seq[int]) -> None:
        self._grammar = grammar
        self._ends = [i for i in end_token_ids if i < grammar.vocab_size]
        self._token_ids: list[int] = []
        self._state: tuple[Lexer, llguidance.LLMatcher] | None = None
        self._computed: threading.Event | None = None  # of masks that the thread computes
        self._last: tuple[NDArray[np.bool_] | None, Excluded | None] = None, None  # a mask, and what it excludes
        self._masks: list[Excluded] = []
        self._in_text = grammar.marker_starts is not None  # no marker has begun
        self._settles = False
        self.is_settled = False
        """Whether text is written, after which the mask is the last one. The matcher is not told of such text."""
        self._error: str | None = None
        self._sec = 0.0

    @property
    def workers(self) -> Workers:
        """The thread that computes masks."""
        return self._grammar.workers

    def push(self, token_id: int) -> bool:
        """Add a token; return whether the output is complete: nothing may follow.

        Raises:
            NanoinferError: the grammar does not permit the token, or a limit is exceeded.
        """
        text = self._grammar.text(token_id) if self._in_text else ""
        self._in_text, self.is_settled = bool(text), self.is_settled and bool(text)
        if self.is_settled:
            self._token_ids.append(token_id)
            return False
        self._settles = bool(text.strip())

        def consume(lexer: Lexer, matcher: llguidance.LLMatcher) -> bool:
            matcher.consume_token(token_id)
            lexer.check(matcher)
            return bool(matcher.is_stopped())

        try:
            complete = self._with_state(consume)
        except NanoinferError as e:
            raise NanoinferError(_said(e)) from None
        self._token_ids.append(token_id)
        return complete

    def num_permitted(self, token_ids: list[int]) -> int:
        """Return how many of the next tokens the grammar permits: none if the matcher fails, as the next mask says."""
        try:
            lexer, matcher = self._state or self._move()
            count = int(matcher.validate_tokens(token_ids))
            lexer.check(matcher)
            return count
        except NanoinferError:
            return 0

    @property
    def expected_sec(self) -> float:
        """Time that the next mask may take: of the longest of the last ones. Infinite while one is computed."""
        return self._sec if self._computed is None or self._computed.is_set() else math.inf

    def defer(self) -> None:
        """Let `take` wait for `compute`, which another thread will call."""
        self._computed = threading.Event()

    def compute(self, proposed: Seq[int]) -> None:
        """Compute the masks after the tokens so far, and after each proposed token as far as the grammar permits it."""
        start, computed = time.perf_counter(), self._computed
        self._masks, self._error = [], None
        try:
            if (first := self._excluded(self._next_mask())) is None:
                raise NanoinferError(
                    "no token of the model continues the output as the grammar asks: change the grammar"
                )
            self._masks.append(first)
            self.is_settled = self._settles
            if proposed:
                self._compute_proposed(proposed)
        except Exception as e:
            if not self._masks:  # else it comes again, if the proposals are accepted
                self._error = _said(e)
        finally:
            self._sec = max(time.perf_counter() - start, self._sec / 2)
            if computed is not None:
                computed.set()

    def _compute_proposed(self, proposed: Seq[int]) -> None:
        lexer, matcher = self._state or self._move()
        matcher = matcher.deep_copy()
        for token_id in proposed:
            if not matcher.consume_token(token_id):
                lexer.check(matcher)
            if matcher.is_stopped():
                break
            if (excluded := self._excluded(lexer.read_mask(matcher))) is None:
                break
            self._masks.append(excluded)

    def _next_mask(self) -> NDArray[np.bool_]:
        """Return the mask after the tokens so far, with a new lexer if the present one is worn."""
        if self._state is not None and self._state[0].worn:
            self._move()
        if not self._token_ids:
            return self._with_state(lambda lexer, _: lexer.first_mask)
        return self._with_state(Lexer.read_mask)

    def _with_state(self, use: Callable[[Lexer, llguidance.LLMatcher], T]) -> T:
        """Call a function, again with a new lexer if it raises NanoinferError and the new one may not fail."""
        lexer, matcher = self._state or self._move()
        try:
            return use(lexer, matcher)
        except NanoinferError as e:
            if not lexer.retire(e):
                raise
        del lexer, matcher  # their memory
        return use(*self._move())

    def _move(self) -> tuple[Lexer, llguidance.LLMatcher]:
        """Return the grammar's lexer, and a matcher after the tokens so far on it. Both are kept."""
        self._state = None  # freed before the next one is made, if no other output has it
        lexer = self._grammar.lexer()
        matcher = lexer.new_matcher()
        for i in range(0, len(self._token_ids), REPLAYED):
            matcher.consume_tokens(self._token_ids[i : i + REPLAYED])
            lexer.check(matcher)
        self._state = lexer, matcher
        return self._state

    def take(self) -> list[Excluded]:
        """Wait for the masks; return what they exclude in each of the step's rows that may be sampled from.

        Raises:
            NanoinferError: the grammar permits no token, or a limit is exceeded.
        """
        if self._computed is not None:
            self._computed.wait()
            self._computed = None
        if self._error is not None:
            raise NanoinferError(self._error)
        return self._masks

    def _excluded(self, mask: NDArray[np.bool_]) -> Excluded | None:
        """Return the tokens that a mask of the lexer excludes; None: all."""
        if mask is self._last[0]:
            return self._last[1]
        V = self._grammar.vocab_size
        excluded: Excluded = ~mask[:V]
        if mask[V]:
            excluded[self._ends] = False
        if (count := np.count_nonzero(excluded)) * FEW < V:
            excluded = np.flatnonzero(excluded)
        self._last = mask, None if count == V else excluded
        return self._last[1]


def _said(error: Exception) -> str:
    """Return the message for the user. The grammar may come from tools or from a budget, so a panic names no field."""
    return f"{'' if isinstance(error, LexerFailed) else 'structured_outputs: '}{one_line(error)}"


def start(sequences: Seq[Sequence], done: StepProposals, rule: str) -> None:
    """Cut the proposals of sequences with a grammar, and start computing their masks.

    Args:
        sequences: those that sample in this step.
        done: the proposals of the step.
        rule: of verification. "reject" needs the first refused proposal: replacing it depends on its probability.
    """
    work: list[tuple[OutputGrammar, list[int]]] = []
    expected_sec = 0.0
    for s in sequences:
        if not isinstance(grammar := s.grammar, OutputGrammar):
            continue
        proposed: list[int] = []
        if (proposal := done.proposals.get(s)) is not None:
            count = grammar.num_permitted(proposal.token_ids) + (rule == "reject")
            if (cut := _first(proposal, count)) is None:
                del done.proposals[s]
            else:
                done.proposals[s], proposed = cut, cut.token_ids
        if grammar.is_settled and not proposed:
            continue
        expected_sec += grammar.expected_sec
        work.append((grammar, proposed))
    if not work:
        return

    def compute() -> None:
        for grammar, proposed in work:
            grammar.compute(proposed)

    if expected_sec < AT_ONCE_SEC:
        compute()
    else:
        for grammar, _ in work:
            grammar.defer()
        work[0][0].workers.put(compute)


def _first(proposal: Proposal, count: int) -> Proposal | None:
    """Return the first tokens of a proposal; None if there are none."""
    if count >= len(proposal.token_ids):
        return proposal
    weights = None if proposal.weights is None else proposal.weights[:count]
    return replace(proposal, token_ids=proposal.token_ids[:count], weights=weights) if count else None


class MaskedRows:
    """The rows of a step with some sequences that have a grammar.

    Args:
        logits: the rows of `groups`, (R, V) float32; changed where they are NumPy's or on the CPU.
        groups: the sequences that are sampled.
    """

    def __init__(self, logits: Array, groups: Seq[Group]) -> None:
        self.errors: dict[object, str] = {}
        """Sequences for which there is no mask, with the reason."""
        self._num_masked: dict[object, int] = {}
        self._raw: dict[object, NDArray[Any]] = {}
        in_place = isinstance(logits, np.ndarray) and logits.flags.writeable
        self.logits: Any = logits if in_place else _clone(logits)
        at = 0
        for row, proposal in groups:
            count = 1 + (len(proposal.token_ids) if proposal is not None else 0)
            if (grammar := getattr(row, "grammar", None)) is not None:
                try:
                    masks = grammar.take()
                except NanoinferError as e:
                    self.errors[row] = str(e)
                else:
                    if row.params.num_logprobs is not None:
                        self._raw[row] = _clone(to_numpy(self.logits[at : at + count]))
                    if proposal is not None:
                        self._num_masked[row] = len(masks)
                    for i, excluded in enumerate(masks[:count]):
                        if excluded.size:  # text outside of calls may be anything
                            _exclude(self.logits, at + i, excluded)
            at += count

    def finish(self, groups: Seq[Group], kept: list[list[Sampled]]) -> list[list[Sampled]]:
        """Return the tokens that were sampled with a mask, with the model's log-probabilities.

        Sequences in `errors` have none. Of a sequence with proposals, those after a complete output are discarded.
        """
        if not (self.errors or self._num_masked or self._raw):
            return kept
        finished = []
        for (row, _), some in zip(groups, kept, strict=True):
            some = [] if row in self.errors else some[: self._num_masked.get(row)]
            if (raw := self._raw.get(row)) is not None:
                some = add_logprobs(raw, [sampled.token_id for sampled in some], [row] * len(some))
            finished.append(some)
        return finished


def _clone(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def _exclude(logits: Any, row: int, excluded: Excluded) -> None:
    """Exclude tokens of one row, on any device."""
    if isinstance(logits, np.ndarray):
        if excluded.dtype == np.bool_:  # in half the time of an assignment
            np.copyto(logits[row], EXCLUDED, where=excluded)
        else:  # of one dimension: in half the time of two
            values = logits[row]
            values[excluded] = EXCLUDED
        return
    import torch

    logits[row, torch.from_numpy(excluded).to(logits.device)] = float(EXCLUDED)
