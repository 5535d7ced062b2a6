"""The generation core: requests in, text out. One step is schedule, run, postprocess.

Here the scheduler's policy, the engine and the sampler meet; none of them knows the others. Everything
that generates (the LLM class, streaming, later a server) drives this one loop.

Requests do not disturb each other: what a step adds to a request is put into that request's own queue, and a fault of
one sequence (logits that are not finite, a row that the sampler or the drafter refuses, a token without text) ends that
sequence with finish_reason="error". An exception of the engine ends all running requests with it.

A step holds a lock, so that several threads may use one core. An exception can come at any point of it, Ctrl-C
included; what is half done then is not repaired but dropped: all running requests end, and engine, drafter and device
sampler are reset. Where a second exception interrupts that, the next call does it again (`_settle`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

from nanoinfer import isolation, processes, request_outputs
from nanoinfer.engines.base import PENDING, Engine, Handle, StepBatch
from nanoinfer.errors import one_line
from nanoinfer.isolation import Faults
from nanoinfer.observer import ENGINE, SAMPLER, NoObserver, Observer
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.overlap import InFlightStep, OverlapScheduler
from nanoinfer.request_outputs import Logprobs
from nanoinfer.sampling.sampler import Sampled, Sampler, not_finite
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler, Work, drawing
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText
from nanoinfer.speculative.speculator import SpecStep, Speculator

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.models.tokenizers import Tokenizer

log = logging.getLogger("nanoinfer")

T = TypeVar("T")
HAND_OVER_SEC = 1e-4  # a lock of Python's is not fair: a thread that steps in a loop must let the others have it


class Core:
    """Runs requests on an engine, any number at a time. May be used from several threads.

    Args:
        engine, scheduler, sampler: see their interfaces.
        tokenizer: makes text; None: token ids only.
        vocab_size: tokens that may be drawn: ids from here on have no text.
        clock: seconds; a fake one in tests.
        speculator: proposes tokens to verify; None: every step draws one token. A request keeps the one that is set
            when it is made.
        ahead: launches steps before the last one's tokens are read; None: tokens are read at once.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        speculator: Speculator | None = None,
        ahead: OverlapScheduler | None = None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self.speculator = speculator
        self.observer: Observer = NoObserver()
        self._overlap = ahead
        self._in_flight: InFlightStep | None = None
        self._ids = itertools.count()
        self._logprobs = Logprobs(tokenizer)
        self._speculators: WeakKeyDictionary[Request, Speculator] = WeakKeyDictionary()
        self._lock = processes.step_lock()
        self._generation = processes.generation()
        self._waiting: set[int] = set()  # threads that wait for the lock
        self._clean = True  # engine and scheduler agree; False within an operation, and after one was interrupted
        self._cancelled: deque[Request] = deque()

    # Requests --------------------------------------------------------------------------------------------

    def make(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        seed: int,
        end_token_ids: tuple[int, ...] = (),
    ) -> Request:
        """Return a request that is not queued yet.

        Args:
            prompt: its text; None where token ids were given.
            token_ids: the prompt, in range.
            params: checked against the model by the caller.
            seed: of its random numbers.
            end_token_ids: the model's end-of-text tokens.

        Raises:
            NanoinferError: it can never run here (see `Scheduler.check`).
        """
        end = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
        request = Request(next(self._ids), prompt, token_ids, params, seed, tuple(sorted(end)))
        request.arrival_sec = self._clock()
        for i in range(params.n):
            stream = self._tokenizer.stream(token_ids) if self._tokenizer else None
            text = OutputText(stream, params.stop)
            request.sequences.append(Sequence(request, i, text, self.engine.limits.block_size, list(token_ids)))
        request.num_dropped_tokens = request.sequences[0].wanted_start
        self.scheduler.check(request)
        return request

    def submit(self, requests: Seq[Request]) -> None:
        """Queue those requests that have not failed. The caller cancels them when this is interrupted."""
        with self._turn():
            self._settle()
            for request in [r for r in requests if not r.finished]:
                if self.speculator is not None:
                    self._speculators[request] = self.speculator
                if self._overlap is not None:
                    self._overlap.add(request)
                self.scheduler.add(request)

    def cancel(self, requests: Seq[Request]) -> None:
        """End requests before the next step. Takes no lock, so that a finalizer may call it at any point of a step."""
        self._cancelled.extend(requests)

    def abort(self, *requests: Request) -> None:
        """End requests where they are, and free what they held. Their outputs keep what they have."""
        self.cancel(requests)
        with self._turn():
            self._settle()

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        with self._turn():
            self._settle()
            return self.scheduler.unfinished

    # The step --------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Run one step; return what it added, one delta for each sequence that drew; its request's queue gets it, too.

        Where the engine runs ahead, a step is launched and what the one before it drew is returned: nothing, the first
        time. Nothing is done where nothing is unfinished.

        Raises:
            Exception: of the engine. All running requests have ended with it and are closed.
        """
        with self._turn():
            self._settle()
            self._clean = False
            try:
                deltas: list[Delta] = []
                in_flight, self._in_flight = self._in_flight, None
                if self._overlap is not None and not self._speculates() and self._overlap.may_run():
                    self._in_flight = self._launch(self._overlap)
                elif in_flight is None:
                    for speculator, work in self._parts(self.scheduler.schedule()):
                        faults: Faults = {}
                        deltas += self._finish(work, self._run(work, speculator, faults), faults)
                if in_flight is not None:
                    faults = {}
                    deltas += self._finish(in_flight.work, self._read(in_flight, faults), faults)
            except BaseException as e:
                self._recover(e)
                raise
            self._clean = True
        if self._waiting:
            time.sleep(HAND_OVER_SEC)
        return deltas

    def use_engine(self, num_tokens: int, use: Callable[[Engine], T]) -> T:
        """Call `use` with the engine between two steps, and return what it returns.

        Steps are run until a sequence of `num_tokens` tokens has room beside the running ones. `use` opens one at most,
        and closes it.
        """
        while True:
            with self._turn():
                self._settle()
                if self.scheduler.has_room(num_tokens):
                    self._clean = False
                    try:
                        result = use(self.engine)
                    except BaseException as e:
                        owned = {s.handle for s in self.scheduler.running if s.handle is not None}
                        if not isinstance(e, Exception) or set(self.engine.handles) != owned:
                            self._recover(e)
                        self._clean = True
                        raise
                    self._clean = True
                    return result
            self.step()

    def _turn(self) -> AbstractContextManager[object]:
        """Return the lock that every operation holds, having noted that this thread wants it."""
        processes.wait_if_exiting()
        if self._generation != processes.generation():  # a forked child: a thread that held the lock stayed behind
            self._generation, self._lock, self._waiting = processes.generation(), processes.step_lock(), set()
        self._waiting.add(threading.get_ident())
        return self._lock if not processes.is_exiting() else nullcontext()

    def _settle(self) -> None:
        """Begin an operation: repair what an interrupted one left, and end the requests that were cancelled."""
        self._waiting.discard(threading.get_ident())
        if not self._clean:
            self._recover(None)
        if not self._cancelled:
            return
        self._clean = False
        try:
            while self._cancelled:
                request = self._cancelled[0]
                self._close(self.scheduler.abort(request))
                request.finished_sec = request.finished_sec or self._clock()  # one that waited held nothing to close
                self._cancelled.popleft()
        except BaseException as e:
            self._recover(e)
            raise
        self._clean = True

    def _recover(self, error: BaseException | None) -> None:
        """End all running requests and free what they held, whatever state an exception left anything in."""
        message = one_line(error) if isinstance(error, Exception) else None
        now = self._clock()
        for s in self.scheduler.abort_running(message):
            s.handle = None
            s.request.finished_sec = s.request.finished_sec or now
        self._in_flight = None
        self.engine.reset()
        for speculator in {*self._speculators.values()}:
            speculator.reset()
        if self._overlap is not None:
            self._overlap.reset()
        self._clean = True

    def _speculates(self) -> bool:
        """Return whether an unfinished request has a speculator."""
        return bool(self._speculators) and any(not r.finished for r in self._speculators)

    def _parts(self, work: list[Work]) -> list[tuple[Speculator | None, list[Work]]]:
        """Return the work by speculator: requests may have different ones where the draft was changed meanwhile."""
        if not self._speculators:
            return [(None, work)]
        parts: dict[Speculator | None, list[Work]] = {}
        for w in work:
            parts.setdefault(self._speculators.get(w.sequence.request), []).append(w)
        return list(parts.items())

    def _finish(self, work: list[Work], tokens: list[list[int]], faults: Faults) -> list[Delta]:
        """Add the drawn tokens to their sequences, close those that ended, and return what each gained."""
        before = [(s, s.num_output_tokens) for s in drawing(work) if s.finish_reason is None]
        for s, error in faults.items():
            cast(Sequence, s).abort(error)
        self._close(self.scheduler.postprocess(work, tokens))
        if not self.scheduler.unfinished:
            self._in_flight = None  # all of its sequences have ended
        deltas = []
        for s, num_before in before:
            deltas.append(request_outputs.delta(s, num_before))
            if s.request.deltas is not None:
                s.request.deltas.append(deltas[-1])
        return deltas

    def _launch(self, ahead: OverlapScheduler) -> InFlightStep | None:
        """Start the next step, where there is one before the last one's tokens are read."""
        work = self.scheduler.schedule()
        if not work:
            return None
        with self.observer.span(ENGINE):
            in_flight = ahead.launch(work, self._batch(work, SpecStep()))
        self.scheduler.defer(work)
        return in_flight

    def _read(self, in_flight: InFlightStep, faults: Faults) -> list[list[int]]:
        """Wait for a step's tokens."""
        found = in_flight.read()
        now = self._clock()
        for s, token in found:
            self._note_first(s, now)
            if token < 0 and s.finish_reason is None:
                faults[s] = not_finite()
        return [[token] if token >= 0 else [] for _, token in found]

    def _note_first(self, s: Sequence, now: float) -> None:
        if s.num_output_tokens == 0 and s.sample_index == 0:
            s.request.first_token_sec = now

    def _run(self, work: list[Work], speculator: Speculator | None, faults: Faults) -> list[list[int]]:
        """Propose, feed the engine, fork siblings, draw; return the tokens of each sequence that draws.

        Args:
            work: of the step.
            speculator: of its requests.
            faults: sequences that cannot go on are added, with the reason; they draw no tokens.
        """
        done = isolation.propose(speculator, work, faults) if speculator is not None else SpecStep()
        start = self._clock()
        batch, rule = self._batch(work, done), speculator.rule if speculator is not None else "reproduce"
        with self.observer.span(ENGINE):
            logits = self.engine.extend(batch)
        with self.observer.span(SAMPLER):
            kept = self._draw(work, done, logits, rule, faults)
        tokens = [[drawn.token_id for drawn in some] for some in kept]
        now = self._clock()
        for s, some in zip(drawing(work), kept, strict=True):
            if some:
                self._note_first(s, now)
            self._logprobs.add(s, some)
            if (proposal := done.proposals.get(s)) is not None and len(some) <= len(proposal.token_ids):
                handle = Handle(cast(int, s.handle))
                num_wrong = len(proposal.token_ids) + 1 - len(some)
                self.engine.truncate(handle, self.engine.length(handle) - num_wrong)
        if speculator is not None:
            speculator.learn(work, done, tokens, now - start, self.engine.hidden)
        return tokens

    def _batch(self, work: list[Work], done: SpecStep) -> StepBatch:
        """Return what the engine is fed: the tokens it has not seen, and proposals after them."""
        batch = StepBatch()
        for w in work:
            s = w.sequence
            if s.handle is None:
                s.handle = self.engine.open()
            if w.restart:
                self.engine.truncate(Handle(s.handle), 0)
            if (proposal := done.proposals.get(s)) is not None:
                drafts = proposal.token_ids
                batch.add(Handle(s.handle), [*w.token_ids, *drafts], num_logits=1 + len(drafts))
            else:
                batch.add(Handle(s.handle), w.token_ids + [PENDING] * w.pending, num_logits=int(w.draws))
        return batch

    def _draw(self, work: list[Work], done: SpecStep, logits: Tensor, rule: str, faults: Faults) -> list[list[Sampled]]:
        """Fork siblings and draw the tokens of each sequence from its rows; siblings draw from the same row."""
        rows: list[int] = []
        at = 0
        for w in work:
            if not w.draws:
                continue
            for fork in w.forks:
                fork.handle = self.engine.fork(Handle(cast(int, w.sequence.handle)))
            proposal = done.proposals.get(w.sequence)
            count = 1 + (len(proposal.token_ids) if proposal is not None else 0)
            rows += range(at, at + count)
            rows += [at] * len(w.forks)
            at += count
        if len(rows) > at:
            logits = logits[rows]
        groups = [(s, done.proposals.get(s)) for s in drawing(work)]
        return isolation.draw_tokens(self._sampler, logits[:, : self._vocab_size], groups, rule, faults)

    def _close(self, ended: list[Sequence]) -> None:
        """Free what ended sequences held, and note when their requests ended."""
        now = self._clock()
        for s in ended:
            if (speculator := self._speculators.get(s.request)) is not None:
                speculator.forget(s)
            if self._overlap is not None:
                self._overlap.forget(s)
            if s.handle is not None:
                self.engine.close(Handle(s.handle))
                s.handle = None
            if s.request.finished:
                s.request.finished_sec = now

    def output(self, request: Request) -> RequestOutput:
        """Return what a request has produced so far (finish_reason None for sequences that are not finished)."""
        speculator = self._speculators.get(request)
        stats = speculator.stats(request) if speculator is not None else None
        return request_outputs.output(request, self._logprobs, stats, self._clock())
