"""The generation core: runs requests and returns their outputs. One step is schedule, run, postprocess.

The core connects the scheduler, the engine and the sampler, which do not depend on each other. All generation (the LLM
class, streaming) runs this loop.

Requests are isolated from each other. A fault of one sequence (logits that are not
finite, a row that the sampler or the drafter refuses, a token that the tokenizer cannot decode) ends that sequence with
finish_reason="error". An exception in the engine ends all running requests.

A step holds a lock, so that several threads may use one core. An exception, Ctrl-C included, may interrupt a step at
any point. The core then discards the step: it ends all running requests, and resets the engine, the drafter and the
device sampler. If a second exception interrupts the reset, the next call repeats it (`_begin`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

from nanoinfer.core.adapters import Adapters
from nanoinfer.core.beam_search import BeamSearches
from nanoinfer.core.output_processor import OutputProcessor
from nanoinfer.core.overlap import InFlightStep, OverlapScheduler
from nanoinfer.core.step import ENGINE, Observer, Step, StepRunner
from nanoinfer.engines.base import Engine
from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.sampling.sampler import Sampler, not_finite
from nanoinfer.sampling_params import BeamSearchParams, LoRARequest, SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText
from nanoinfer.scheduling.work import ScheduledSequence, SchedulerStats, num_prefill, sampling_sequences
from nanoinfer.speculative.speculator import Speculator
from nanoinfer.tokenizers.tokenizer import Tokenizer
from nanoinfer.utils import processes

if TYPE_CHECKING:
    from nanoinfer.core.prefix_file import StoredPrefixes

T = TypeVar("T")
HAND_OVER_SEC, MAX_HAND_OVER_SLEEPS = 1e-4, 100
"""How long and how often a thread that has run a step sleeps until a waiting one has the lock: locks are not fair."""


class _WaitingThreads(set[int]):
    """The threads that wait for the lock; as a context manager, it contains the current thread."""

    def __enter__(self) -> None:
        self.add(threading.get_ident())

    def __exit__(self, *error: object) -> None:  # an interrupt may have ended the wait
        self.discard(threading.get_ident())


class Core:
    """Runs any number of requests on an engine. Thread-safe.

    Args:
        engine, scheduler, sampler: see their interfaces.
        tokenizer: decodes tokens; None: outputs have token ids only.
        vocab_size: number of tokens that may be sampled; larger ids have no text.
        clock: returns seconds; tests pass a fake one.
        speculator: proposes tokens to verify; None: every step samples one token.
        overlap: launches a step before the tokens of the previous one are read; None: tokens are read in each step.
        adapters: loads those of requests; None: requests have none.
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
        overlap: OverlapScheduler | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self.clock = clock
        self.speculator = speculator
        self.observer = Observer()
        self._overlap, self.adapters = overlap, adapters
        self.stored: StoredPrefixes | None = None
        self._in_flight: InFlightStep | None = None
        self._ids = itertools.count()
        self.outputs = OutputProcessor(tokenizer, clock)
        self._beams = BeamSearches(scheduler)
        self._steps = StepRunner(engine, sampler, vocab_size, self._beams, self.outputs.add_logprobs, clock)
        self._lock = processes.step_lock()
        self._generation = processes.generation()
        self._waiting = _WaitingThreads()
        self._cancelled: deque[Request] = deque()
        self.num_blocks = engine.num_free_blocks  # of the KV cache: no sequence is open yet
        self._end()

    @property
    def published(self) -> SchedulerStats:
        """The counts that metrics read. Takes no lock: during a step they may be those before it or after it."""
        num_running = len({s.request.request_id for s in self.scheduler.running})
        return replace(self.scheduler.stats, num_running=num_running)

    # Requests --------------------------------------------------------------------------------------------

    def make(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        seed: int,
        end_token_ids: tuple[int, ...] = (),
        salt: str | None = None,
        priority: int = 0,
        beams: BeamSearchParams | None = None,
    ) -> Request:
        """Return a new request. `submit` queues it.

        Args:
            prompt: text of the prompt; None if token ids were given.
            token_ids: tokens of the prompt, inside the vocabulary.
            params: sampling parameters; the caller has checked them against the model.
            seed: seed of the request's random numbers.
            end_token_ids: the model's end-of-text tokens.
            salt: only requests of the same salt share prefixes (scheduling/prefix_cache.py).
            priority: requests of smaller priority are admitted first.
            beams: of a beam search; `params` are then its `sampling_params`.

        Raises:
            NanoinferError: the request exceeds the engine's limits (see `Request.check`).
        """
        end = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
        request = Request(next(self._ids), prompt, token_ids, params, seed, tuple(sorted(end)), beams=beams)
        request.salt, request.priority, request.arrival_sec = salt, priority, self.clock()
        for i in range(params.num_sequences):
            text = self._text(params, token_ids)
            request.sequences.append(Sequence(request, i, text, self.engine.limits.block_size, list(token_ids)))
            request.check(self.engine.limits)  # before the prompt is copied for the next one
        request.num_dropped_tokens = request.sequences[0].next_start
        return request

    def adapt(self, request: Request, lora: LoRARequest | None) -> None:
        """Set the adapter of a request that is not queued yet. Raises NanoinferError as `Adapters.read`."""
        if lora is not None:
            assert self.adapters is not None
            self.adapters.assign(lora, request)

    def _text(self, params: SamplingParams, prompt_token_ids: list[int]) -> OutputText:
        tokenizer = self._tokenizer if params.detokenize else None
        stream = tokenizer.stream(prompt_token_ids) if tokenizer is not None else None
        skipped = tokenizer.special_tokens if tokenizer is not None and params.skip_special_tokens else None
        return OutputText(stream, params.stop, skipped, include_stop=params.include_stop_str_in_output)

    def submit(self, requests: Seq[Request]) -> None:
        """Queue requests. If this call is interrupted, the caller must cancel them.

        Raises:
            QueueFull: max_num_queued requests would not be enough. None of them is queued.
            NanoinferError: an adapter has no place (`Adapters.load`). None of them is queued.
        """
        self.between_steps(lambda: self._submit(requests))

    def _submit(self, requests: Seq[Request]) -> None:
        if self.adapters is not None:
            self.adapters.load(requests)
        self.scheduler.add(*requests)
        for request in requests:
            self.outputs.add(request)
            if self._overlap is not None:
                self._overlap.add(request)

    def cancel(self, requests: Seq[Request]) -> None:
        """End requests before the next step. Takes no lock: a finalizer may call it."""
        self._cancelled.extend(requests)

    def abort(self, *requests: Request) -> None:
        """End requests now and free their resources. Their outputs keep the tokens generated so far."""
        self.cancel(requests)
        self.between_steps(lambda: None)

    def reset_prefix_cache(self) -> None:
        """Close all idle sequences, and forget those that are stored."""

        def close_all() -> None:
            self.scheduler.cache.forget_stored()
            while self.scheduler.cache.close_oldest():
                pass

        self.between_steps(lambda: self._guarded(close_all))

    def save_prefix_cache(self) -> int:
        """Write the idle sequences to prefix_cache_file; return how many it has. Raises NanoinferError if it cannot."""
        if self.stored is None:
            raise NanoinferError("there is no prefix_cache_file: name one when the model is loaded")
        return self.between_steps(self.stored.save)

    def set_speculator(self, speculator: Speculator | None) -> None:
        """Let another drafter propose tokens from the next step on, or none."""

        def change() -> None:
            if self.speculator is not None:
                self.speculator.drafter.reset()
            self.speculator = speculator

        self.between_steps(lambda: self._guarded(change))

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.between_steps(lambda: self.scheduler.unfinished)

    def output(self, request: Request) -> RequestOutput:
        """Return a request's output so far, between two steps: see `OutputProcessor.output`.

        That of a request that has ended waits for no step.
        """
        return request.output or self.between_steps(lambda: self.outputs.output(request))

    # The step --------------------------------------------------------------------------------------------

    def step(self, until: Callable[[], bool] | None = None) -> list[Delta]:
        """Run one step; return and queue its deltas: one for each sequence that sampled or whose beam search ended.

        With overlap scheduling, a call launches a step and returns the deltas of the previous one; the first call
        returns none. Without unfinished requests, a call does nothing.

        Args:
            until: returns whether the caller needs no step any more: it is called with the lock held, because another
                thread may have run the step while this one waited for the lock. None: the step is run in any case.

        Raises:
            Exception: the engine failed. All running requests have been ended and closed.
        """
        with self._waiting, self._lock_in_turn():
            self._begin()
            self._clean = False
            try:
                deltas: list[Delta] = []
                if until is None or not until():
                    if (launches := self._may_launch()) or self._in_flight is not None:
                        deltas = self._step_ahead(launches)
                    else:  # schedule, run, postprocess
                        start, scheduled = self.clock(), self._schedule()
                        if scheduled:
                            step = Step(scheduled, self.speculator)
                            tokens = self._steps.run(step, self.observer)
                            deltas = self._postprocess(scheduled, tokens, step.faults)
                        seconds = self.clock() - start
                        self.scheduler.prefill_limit.note(num_prefill(scheduled), seconds)
                        self.observer.stepped(seconds)
            except BaseException as e:
                self._recover(e)
                raise
            self._end()
        for _ in range(MAX_HAND_OVER_SLEEPS):
            if not self._waiting or self._lock.locked():
                break
            time.sleep(HAND_OVER_SEC)
        return deltas

    def _may_launch(self) -> bool:
        """Return whether the next step can be launched before the tokens of the previous one are read."""
        ahead = self._overlap is not None and not self.observer.reads_logits and self.speculator is None
        return ahead and cast(OverlapScheduler, self._overlap).may_run()

    def _step_ahead(self, launches: bool) -> list[Delta]:
        """Schedule and launch if `launches`, then postprocess the step before (overlap.py)."""
        start, before, self._in_flight = self.clock(), self._in_flight, None
        if launches and (work := self._schedule()):
            with self.observer.span(ENGINE):
                self._in_flight = cast(OverlapScheduler, self._overlap).launch(work)
            self._in_flight.since = start
        return [] if before is None else self._postprocess(before.work, *self._read(before))

    def use_engine(self, num_tokens: int, use: Callable[[Engine], T]) -> T:
        """Call `use` with the engine between two steps, and return its result.

        Steps run until there is capacity for one more sequence of `num_tokens` tokens. `use` may open at most one
        sequence and must close it.
        """
        results: list[T] = []

        def use_if_open() -> Exception | None:
            if self.scheduler.can_open(num_tokens):
                try:
                    results.append(use(self.engine))
                except Exception as e:
                    if set(self.engine.handles) != self.scheduler.handles:
                        raise
                    return e  # the engine is as it was
            return None

        while not results:
            if (error := self.between_steps(lambda: self._guarded(use_if_open))) is not None:
                raise error
            if not results:
                self.step(until=lambda: self.scheduler.can_open(num_tokens))
        return results[0]

    # Operations ------------------------------------------------------------------------------------------

    def between_steps(self, operation: Callable[[], T]) -> T:
        """Run an operation between two others, which changes no running sequence if it raises."""
        with self._waiting, self._lock_in_turn():
            self._begin()
            return operation()

    def _guarded(self, operation: Callable[[], T]) -> T:
        """Run an operation, and recover if it raises."""
        self._clean = False
        try:
            result = operation()
        except BaseException as e:
            self._recover(e)
            raise
        self._end()
        return result

    def _lock_in_turn(self) -> AbstractContextManager[object]:
        """Return the lock that every operation holds."""
        processes.wait_if_exiting()
        if self._generation != processes.generation():  # forked child: the lock's owner may not exist here
            self._generation, self._lock = processes.generation(), processes.step_lock()
            self._waiting.clear()
        return self._lock if not processes.is_exiting() else nullcontext()

    def _begin(self) -> None:
        """Start an operation: recover from an interrupted one, and end the requests that were cancelled."""
        self._waiting.discard(threading.get_ident())
        if not self._clean:
            self._recover(None)
        if self._cancelled:
            self._guarded(self._end_cancelled)

    def _end_cancelled(self) -> None:
        """End the requests that were cancelled."""
        while self._cancelled:
            request = self._cancelled[0]
            self._close(self.scheduler.abort(request))
            request.finished_sec = request.finished_sec or self.clock()  # waiting requests have nothing to close
            self.outputs.end([request])
            self._cancelled.popleft()

    def _end(self) -> None:
        """End an operation: engine and scheduler are consistent."""
        self._clean = True  # False during an operation, and after one that was interrupted
        self.scheduler.stats.num_free_blocks = self.engine.num_free_blocks

    def _recover(self, error: BaseException | None) -> None:
        """End all running requests and reset the engine, after an exception at any point of an operation."""
        message = one_line(error) if isinstance(error, Exception) else None
        now = self.clock()
        for s in self.scheduler.abort_running(message):
            s.request.finished_sec = s.request.finished_sec or now
        self._in_flight = None
        self.outputs.end()
        self.engine.reset()
        if self.speculator is not None:
            self.speculator.drafter.reset()
        if self._overlap is not None:
            self._overlap.reset()
        self._end()

    def _schedule(self) -> list[ScheduledSequence]:
        """Return the work of the next step, after freeing what was made for the sequences that were preempted."""
        work, now = self.scheduler.schedule(), self.clock()
        for w in work:
            if not w.sequence.request.scheduled_sec:
                w.sequence.request.scheduled_sec = now
        for s in self.scheduler.take_preempted():
            self._forget(s)
        return work

    def _postprocess(
        self, work: Seq[ScheduledSequence], tokens: Seq[Seq[int]], faults: Mapping[object, str]
    ) -> list[Delta]:
        """Append the sampled tokens to their sequences, close finished ones, and return a delta for each sequence."""
        sampling = sampling_sequences(work)
        before = [(s, len(s.token_ids)) for s in sampling if s.finish_reason is None and s.request.beams is None]
        for s, error in faults.items():
            cast(Sequence, s).abort(error)
        if len(before) < len(sampling):
            before += [(s, len(s.prompt_token_ids)) for s in self._beams.advance(work)]
        ended = self.scheduler.postprocess(work, tokens)
        if ended:
            self._close(ended)
            if not self.scheduler.unfinished:
                self._in_flight = None  # all its sequences have finished: discard the in-flight step
        deltas = [self.outputs.delta(s, num_before) for s, num_before in before]
        if ended:
            self.outputs.end([s.request for s in ended])
        self.scheduler.stats.num_output_tokens += sum([delta.num_tokens for delta in deltas])
        return deltas

    def _read(self, in_flight: InFlightStep) -> tuple[list[list[int]], dict[object, str]]:
        """Wait for a step's tokens; return them, and the sequences whose logits are not finite, which have none."""
        tokens, sequences, now = in_flight.tokens.read(), in_flight.sequences, self.clock()
        self.scheduler.prefill_limit.note(num_prefill(in_flight.work), now - in_flight.since)
        if self._in_flight is not None:
            self._in_flight.since = now
        for s in sequences:
            if not s.request.first_token_sec:
                s.request.first_token_sec = now
        failed = [s for s, t in zip(sequences, tokens, strict=True) if t < 0 and s.finish_reason is None]
        return [[token] if token >= 0 else [] for token in tokens], dict.fromkeys(failed, not_finite())

    def _close(self, ended: list[Sequence]) -> None:
        """Free the resources of finished sequences, and record when their requests finished."""
        now = self.clock()
        for s in ended:
            self._forget(s)
            if s.request.finished:
                s.request.finished_sec = now

    def _forget(self, s: Sequence) -> None:
        """Free what drafter and device sampler have for a sequence."""
        if self.speculator is not None:
            self.speculator.drafter.forget(s)
        if self._overlap is not None:
            self._overlap.forget(s)
