"""The generation core: requests in, text out. One step is schedule, run, postprocess.

Here the scheduler's policy, the engine and the sampler meet; none of them knows the others. Everything
that generates (the LLM class, streaming, later a server) drives this one loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from nanoinfer.ahead import Ahead, Flight
from nanoinfer.engines.base import PENDING, Engine, Handle, StepBatch
from nanoinfer.models.tokenizers import decode
from nanoinfer.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sampler import Sampled, SamplerRow
from nanoinfer.scheduling.scheduler import Scheduler, Work, drawing
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText
from nanoinfer.speculative.speculator import Round, Speculator
from nanoinfer.speculative.verify import draw

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.models.tokenizers import Tokenizer

Sampler = Callable[["Tensor", Seq[SamplerRow]], list[Sampled]]


class Core:
    """Runs requests on an engine, any number at a time. Not thread-safe.

    Args:
        engine: extends sequences.
        scheduler: decides what runs.
        sampler: draws tokens.
        tokenizer: makes text; None: token ids only.
        vocab_size: tokens that may be drawn: ids from here on have no text.
        clock: seconds; a fake one in tests.
        speculator: proposes tokens to verify; None: every step draws one token. May be changed while nothing is
            unfinished.
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
        ahead: Ahead | None = None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self.speculator = speculator
        self._ahead = ahead
        self._flight: Flight | None = None
        self._next_id = 0
        self._logprobs: WeakKeyDictionary[Sequence, list[dict[int, Logprob]]] = WeakKeyDictionary()

    def add(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        seed: int,
        end_token_ids: tuple[int, ...],
    ) -> Request:
        """Queue a request, checked by the caller, and return it.

        Raises:
            NanoinferError: it can never run here (see `Scheduler.add`).
        """
        end = {*params.stop_token_ids}
        if not params.ignore_eos:
            end.update(end_token_ids)
        request = Request(self._next_id, prompt, token_ids, params, seed, tuple(sorted(end)))
        request.arrival_sec = self._clock()
        for i in range(params.n):
            stream = self._tokenizer.stream() if self._tokenizer else None
            text = OutputText(stream, params.stop)
            request.sequences.append(Sequence(request, i, text, self.engine.limits.block_size, list(token_ids)))
        request.num_dropped_tokens = request.sequences[0].wanted_start
        self.scheduler.add(request)
        if self._ahead is not None:
            self._ahead.add(request)
        self._next_id += 1
        return request

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.unfinished

    def step(self) -> list[Delta]:
        """Run one step; return what it added, one delta for each text that drew.

        Where the engine runs ahead, a step is launched and what the one before it drew is returned: nothing, the first
        time. An error of the engine, the sampler or the drafter ends all running requests (they are closed) and is
        raised.
        """
        try:
            flight, self._flight = self._flight, None
            if self._ahead is not None and self.speculator is None and self._ahead.may_run():
                self._flight = self._launch(self._ahead)
            elif flight is None:
                work = self.scheduler.schedule()
                return self._finish(work, self._run(work))
            return self._finish(flight.work, self._read(flight)) if flight is not None else []
        except BaseException:
            self._flight = None
            for request in {s.request: None for s in self.scheduler.running}:
                self.abort(request)
            raise

    def _finish(self, work: list[Work], tokens: list[list[int]]) -> list[Delta]:
        """Add the drawn tokens to their texts, close those that ended, and return what each text gained."""
        before = [(s, s.num_output_tokens) for s in drawing(work) if s.finish_reason is None]
        self._close(self.scheduler.postprocess(work, tokens))
        if not self.scheduler.unfinished:
            self._flight = None  # of texts that ended meanwhile: nobody waits for its tokens
        return [self._delta(s, n) for s, n in before]

    def _launch(self, ahead: Ahead) -> Flight | None:
        """Start the next step, where there is one before the last one's tokens are read."""
        work = self.scheduler.schedule()
        if not work:
            return None
        flight = ahead.launch(work, self._batch(work, Round()))
        self.scheduler.defer(work)
        return flight

    def _read(self, flight: Flight) -> list[list[int]]:
        """Wait for a step's tokens."""
        found = flight.read()
        now = self._clock()
        for s, _ in found:
            self._note_first(s, now)
        return [[token] for _, token in found]

    def _note_first(self, s: Sequence, now: float) -> None:
        if s.num_output_tokens == 0 and s.sample_index == 0:
            s.request.first_token_sec = now

    def _run(self, work: list[Work]) -> list[list[int]]:
        """Propose, feed the engine, fork siblings, draw; return the tokens of each sequence that draws."""
        done = self.speculator.propose(work) if self.speculator is not None else Round()
        start = self._clock()
        logits = self.engine.extend(self._batch(work, done))
        kept = self._draw(work, done, logits)
        tokens = [[drawn.token_id for drawn in some] for some in kept]
        now = self._clock()
        for s, some in zip(drawing(work), kept, strict=True):
            self._note_first(s, now)
            self._logprobs_of(s, some)
            if (proposal := done.proposals.get(s)) is not None and len(some) <= len(proposal.token_ids):
                handle = Handle(cast(int, s.handle))
                num_wrong = len(proposal.token_ids) + 1 - len(some)
                self.engine.truncate(handle, self.engine.length(handle) - num_wrong)
        if self.speculator is not None:
            self.speculator.learn(work, done, tokens, now - start, self.engine.hidden)
        return tokens

    def _batch(self, work: list[Work], done: Round) -> StepBatch:
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

    def _draw(self, work: list[Work], done: Round, logits: Tensor) -> list[list[Sampled]]:
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
        groups = [(cast("SamplerRow", s), done.proposals.get(s)) for s in drawing(work)]
        rule = self.speculator.rule if self.speculator is not None else "reproduce"
        return draw(self._sampler, logits[:, : self._vocab_size], groups, rule=rule)

    def _logprobs_of(self, sequence: Sequence, some: list[Sampled]) -> None:
        described = [self._describe(drawn.logprobs) for drawn in some if drawn.logprobs is not None]
        if described:
            self._logprobs.setdefault(sequence, []).extend(described)

    def _describe(self, logprobs: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        """Add each token's text."""
        tokenizer = self._tokenizer
        return {
            token: Logprob(value, rank, decode(tokenizer, [token]) if tokenizer else None)
            for token, (value, rank) in logprobs.items()
        }

    def _delta(self, sequence: Sequence, num_before: int) -> Delta:
        ended = sequence.finish_reason is not None
        text = sequence.text.take(finished=ended)
        num_tokens = sequence.num_output_tokens - num_before
        return Delta(sequence.request.request_id, sequence.sample_index, text, sequence.finish_reason, num_tokens)

    def _close(self, ended: list[Sequence]) -> None:
        """Free what ended sequences held, and note when their requests ended."""
        now = self._clock()
        for s in ended:
            if self.speculator is not None:
                self.speculator.forget(s)
            if self._ahead is not None:
                self._ahead.forget(s)
            if s.handle is not None:
                self.engine.close(Handle(s.handle))
                s.handle = None
            if s.request.finished:
                s.request.finished_sec = now

    def abort(self, request: Request) -> None:
        """End a request where it is, and free what it held. Its texts keep what they have."""
        self._close(self.scheduler.abort(request))
        request.finished_sec = request.finished_sec or self._clock()  # one that waited held nothing to close

    def output(self, request: Request) -> RequestOutput:
        """Return what has come of a request so far (finish_reason "" for texts that go on)."""
        outputs = [self._completion(s) for s in request.sequences]
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            outputs,
            request.seed,
            request.num_dropped_tokens,
            self._metrics(request, [len(o.token_ids) for o in outputs]),
        )

    def _completion(self, s: Sequence) -> CompletionOutput:
        logprobs = None
        if cast(SamplingParams, s.params).logprobs is not None:  # tokens drawn past the end are no part of the text
            logprobs = list(self._logprobs.get(s, ()))[: s.num_output_tokens]
        token_ids = list(s.output_token_ids)
        return CompletionOutput(s.sample_index, s.text.text, token_ids, s.finish_reason or "", s.stop_reason, logprobs)

    def _metrics(self, request: Request, lengths: list[int]) -> RequestMetrics:
        now = request.finished_sec or self._clock()
        first = request.first_token_sec or now
        longest = max(lengths)
        return RequestMetrics(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=sum(lengths),
            ttft_sec=first - request.arrival_sec,
            tpot_sec=(now - first) / (longest - 1) if longest > 1 else None,
            total_sec=now - request.arrival_sec,
            speculation=self._speculation(request),
        )

    def _speculation(self, request: Request) -> SpeculationMetrics | None:
        if self.speculator is None:
            return None
        t = self.speculator.tally(request)
        return SpeculationMetrics(
            num_proposed=t.num_proposed,
            num_accepted=t.num_accepted,
            num_rejected=t.num_rejected,
            num_verify_steps=t.num_verify_steps,
            mean_accepted_length=t.num_accepted / t.num_verify_steps if t.num_verify_steps else None,
            draft_share=t.draft_sec / (t.draft_sec + t.step_sec) if t.draft_sec + t.step_sec > 0 else 0.0,
        )
