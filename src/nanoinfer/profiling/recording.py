"""Repeat one generation: as a warm-up, timed, and under torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.inputs.prompts import Prompt
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.profiling import spans as sp
from nanoinfer.profiling.verify_cost import synchronize
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.environment import waited_seconds

WARMUP_TOKENS = 4


@dataclass(frozen=True)
class Measured:
    """One run of a job."""

    seconds: float
    """Wall time of the measured part."""
    num_tokens: int
    """Tokens generated in that part."""
    token_ids: list[list[int]]
    """All tokens of each output."""
    waited_sec: float | None
    """Time that the threads waited for a core in that part, in total; None: not known."""


@dataclass(frozen=True)
class Job:
    """A generation and the part of it to measure."""

    llm: LLM
    prompts: Prompt | Sequence[Prompt]
    params: SamplingParams
    decode_only: bool
    parts: tuple[str, ...] = sp.PARTS
    """The parts that get spans."""

    def run(self, spans: sp.Spans | None, recorder: AbstractContextManager[Any] | None) -> Measured:
        """Generate once.

        Args:
            spans: attached to the parts of the model during the measurement.
            recorder: torch's profiler; entered before the clock starts.

        Raises:
            NanoinferError: no token was generated in the measured part.
        """
        start, num_tokens, outputs = 0.0, 0, dict[int | str, RequestOutput]()
        before = waited_seconds()
        self.llm.reset_prefix_cache()  # a prompt that was run before would not be processed
        with ExitStack() as stack:
            if not self.decode_only:
                start = self._begin(stack, spans, recorder)
            ids, stream = self.llm.stream_outputs(self.prompts, self.params)
            stack.enter_context(closing(cast(Any, stream)))
            if self.decode_only:
                outputs = self._skip_first_tokens(len(ids), stream)
                before = waited_seconds()
                start = self._begin(stack, spans, recorder)
            for item in stream:
                if isinstance(item, RequestOutput):
                    outputs[item.request_id] = item.check()
                else:
                    num_tokens += item.num_tokens
            seconds, after = self._now() - start, waited_seconds()
        if not num_tokens:
            raise NanoinferError(
                "no token was generated in the profiled part because all outputs had ended: use a shorter prompt, or"
                " ignore_eos=True"
            )
        token_ids = [completion.token_ids for i in ids for completion in outputs[i].outputs]
        waited = None if before is None or after is None else after - before
        return Measured(seconds, num_tokens, token_ids, waited)

    def _begin(self, stack: ExitStack, spans: sp.Spans | None, recorder: AbstractContextManager[Any] | None) -> float:
        """Start the measurement, which ends when the stack is closed; return the time."""
        if recorder is not None:
            stack.enter_context(recorder)
        if spans is not None:
            stack.enter_context(sp.attached(self.llm.core, spans, self.parts))
        start = self._now()
        if spans is not None:
            spans.enter(sp.HOST)
            stack.callback(spans.leave)
        return start

    def _skip_first_tokens(
        self, num_requests: int, stream: Iterator[Delta | RequestOutput]
    ) -> dict[int | str, RequestOutput]:
        """Run until every sequence has its first token; return the outputs that are finished by then."""
        begun: set[tuple[int, int]] = set()
        outputs = {}
        while len(begun) < num_requests * self.params.n:
            item = next(stream)
            if isinstance(item, Delta):
                begun.add((item.request_id, item.index))
            else:
                outputs[item.request_id] = item
        return outputs

    def _now(self) -> float:
        """Return the time after synchronizing with the GPU, if there is one."""
        synchronize(self.llm.device)
        return time.perf_counter()

    def warm_up(self) -> None:
        """Generate a few tokens so that nothing is compiled, captured or paged in during the measurement.

        On a GPU, run the whole generation, because graphs are captured and code is compiled for longer sequences too.
        """
        if self.llm.device != "cpu":
            self.run(None, None)
            return
        num_tokens = min(self.params.max_tokens or WARMUP_TOKENS, WARMUP_TOKENS)
        for output in self.llm.generate(self.prompts, replace(self.params, max_tokens=num_tokens, min_tokens=0)):
            output.check()

    def clocked(self) -> tuple[sp.Clock, Measured]:
        """Generate once and measure the wall time of the spans; for a CPU, where calls are synchronous."""
        clock = sp.Clock()
        return clock, self.run(clock, None)

    def recorded(self) -> tuple[Any, sp.Ranges, Measured]:
        """Generate once under torch's profiler; return the profiler, its ranges and the run.

        Raises:
            NanoinferError: torch is not installed, or no token was generated in the measured part.
        """
        try:
            import torch
        except ModuleNotFoundError:
            raise NanoinferError(f"operators cannot be profiled: {missing_extra('torch', 'torch')}") from None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.llm.device != "cpu":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        recorder, ranges = torch.profiler.profile(activities=activities), sp.Ranges()
        return recorder, ranges, self.run(ranges, recorder)


def new_job(llm: LLM, prompts: Prompt | Sequence[Prompt], params: SamplingParams, decode_only: bool) -> Job:
    """Return the job with a fixed seed, so that every run samples the same tokens."""
    if decode_only and params.max_tokens == 1:
        raise NanoinferError("max_tokens=1: the first token is sampled in prefill: use 2 or more to profile decoding")
    return Job(llm, prompts, params if params.seed is not None else replace(params, seed=0), decode_only)


def random_prompts(llm: LLM, batch: int, prompt_tokens: int) -> list[list[int]]:
    """Return prompts of random tokens from a fixed seed."""
    tokens = np.random.default_rng(0).integers(llm.config.vocab_size, size=(batch, prompt_tokens))
    return cast(list[list[int]], tokens.tolist())
