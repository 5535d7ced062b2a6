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

from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.models.tokenizers import decode
from nanoinfer.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sampler import Sampled, SamplerRow
from nanoinfer.scheduling.scheduler import Scheduler, Work, drawing
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText

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
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self._next_id = 0
        self._logprobs: WeakKeyDictionary[Sequence, list[dict[int, Logprob]]] = WeakKeyDictionary()

    def add(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        seed: int,
        eos_token_id: int | None,
    ) -> Request:
        """Queue a request, checked by the caller, and return it.

        Raises:
            NanoinferError: it can never run here (see `Scheduler.add`).
        """
        end = {*params.stop_token_ids}
        if eos_token_id is not None and not params.ignore_eos:
            end.add(eos_token_id)
        request = Request(self._next_id, prompt, token_ids, params, seed, tuple(sorted(end)))
        request.arrival_sec = self._clock()
        for i in range(params.n):
            stream = self._tokenizer.stream() if self._tokenizer else None
            text = OutputText(stream, params.stop)
            request.sequences.append(Sequence(request, i, text, self.engine.limits.block_size, list(token_ids)))
        request.num_dropped_tokens = request.sequences[0].wanted_start
        self.scheduler.add(request)
        self._next_id += 1
        return request

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.unfinished

    def step(self) -> list[Delta]:
        """Run one step; return what it added, one delta for each text that drew a token.

        An error of the engine or the sampler ends all running requests (they are closed) and is raised.
        """
        work = self.scheduler.schedule()
        try:
            tokens = self._run(work)
            ended = self.scheduler.postprocess(work, tokens)
        except BaseException:
            for request in {s.request: None for s in self.scheduler.running}:
                self.abort(request)
            raise
        self._close(ended)
        return [self._delta(s) for s in drawing(work)]

    def _run(self, work: list[Work]) -> list[list[int]]:
        """Feed the engine, fork siblings, draw; return the tokens of each sequence that draws."""
        batch = StepBatch()
        for w in work:
            s = w.sequence
            if s.handle is None:
                s.handle = self.engine.open()
            if w.restart:
                self.engine.truncate(Handle(s.handle), 0)
            batch.add(Handle(s.handle), w.token_ids, num_logits=int(w.draws))
        logits = self.engine.extend(batch)
        draws = [w for w in work if w.draws]
        for w in draws:
            for fork in w.forks:
                fork.handle = self.engine.fork(Handle(cast(int, w.sequence.handle)))
        rows = [i for i, w in enumerate(draws) for _ in (w.sequence, *w.forks)]
        if len(rows) > len(draws):
            logits = logits[rows]
        sequences = drawing(work)
        sampled = self._sampler(logits[:, : self._vocab_size], cast("list[SamplerRow]", sequences))
        now = self._clock()
        for s, drawn in zip(sequences, sampled, strict=True):
            if s.num_output_tokens == 0 and s.sample_index == 0:
                s.request.first_token_sec = now
            if drawn.logprobs is not None:
                self._logprobs.setdefault(s, []).append(self._describe(drawn.logprobs))
        return [[drawn.token_id] for drawn in sampled]

    def _describe(self, logprobs: dict[int, tuple[float, int]]) -> dict[int, Logprob]:
        """Add each token's text."""
        tokenizer = self._tokenizer
        return {
            token: Logprob(value, rank, decode(tokenizer, [token]) if tokenizer else None)
            for token, (value, rank) in logprobs.items()
        }

    def _delta(self, sequence: Sequence) -> Delta:
        ended = sequence.finish_reason is not None
        text = sequence.text.take(finished=ended)
        return Delta(sequence.request.request_id, sequence.sample_index, text, sequence.finish_reason)

    def _close(self, ended: list[Sequence]) -> None:
        """Free what ended sequences held, and note when their requests ended."""
        now = self._clock()
        for s in ended:
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
        outputs = [
            CompletionOutput(
                s.sample_index,
                s.text.text,
                list(s.output_token_ids),
                s.finish_reason or "",
                s.stop_reason,
                list(self._logprobs.get(s, ())) if cast(SamplingParams, s.params).logprobs is not None else None,
            )
            for s in request.sequences
        ]
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            outputs,
            request.seed,
            request.num_dropped_tokens,
            self._metrics(request, [len(o.token_ids) for o in outputs]),
        )

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
        )
