"""Profile a generation by operator and by part of the model (docs/profile.md).

The same generation runs three times: a warm-up of a few tokens, a timed run, and a run under torch's profiler, unless
no operator of PyTorch runs (engine native). The profiler adds about half a microsecond to each operator, which would
count as time of the Python code around the operators. So the parts are measured without it:

    on a CPU    wall time between the spans of `profiling/spans.py` in the timed run
    on a GPU    time of the kernels launched inside each span, from the profiler; "Python and host" is the rest of the
                wall time of the timed run, in which the GPU was idle

Operators, launches and the trace come from the run under the profiler. The kernels per layer are the sum over kernel
names of (runs in a step) // (number of layers). Rounding down excludes the kernels of output head and sampler: 25 runs
of one name with 12 layers are 2 per layer.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.inputs.prompts import Prompt
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.profiling import spans as sp
from nanoinfer.profiling.checks import synchronize
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.environment import waited_seconds

WARMUP_TOKENS = 4
DECODE_STEPS = 16
PREFILL_TOKENS = 2048  # about the prompt tokens per step, while other sequences in the batch decode already

# cudaLaunchKernel, cudaLaunchKernelExC, cudaLaunchCooperativeKernel, cuLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch
_LAUNCH = re.compile(r"cu(da)?(Launch\w*Kernel|GraphLaunch)")
_NO_KERNEL = re.compile(r"(Memcpy|Memset)\b")
_RUNTIME = re.compile(r"cu(da)?[A-Z]|Activity Buffer|Buffer Flush|Lazy Function")  # events that are not operators


@dataclass(frozen=True)
class Launches:
    """Counts of a decode step."""

    kernels_per_step: float
    """Kernels that ran on the device."""
    kernels_per_layer: int
    """Kernels of one layer."""
    launches_per_step: float
    """Launches of kernels and graphs by the host."""


@dataclass(frozen=True)
class ProfileRow:
    """One operator, or one part of the model."""

    name: str
    calls: int
    self_sec: float
    """Time without nested calls: on a CPU, its CPU time; on a GPU, the time of the kernels that it launched."""
    share_percent: float
    """Share of the wall time of the run in which it was measured."""


@dataclass(frozen=True)
class Profile:
    """One profiled generation."""

    model: str
    engine: str
    device: str
    dtype: str
    """Format of the weights: `ModelInfo.weight_format`."""
    decode_only: bool
    """Whether the profile begins after the first token of every sequence."""
    num_steps: int
    """Number of the engine's steps."""
    num_tokens: int
    """Tokens sampled in the profiled part of the generation, over all sequences."""
    token_ids: list[list[int]]
    """Output tokens of each sequence in the run under the profiler."""
    wall_sec: float
    """Wall time of the run without torch's profiler: the sum of the parts."""
    profiled_sec: float
    """Wall time of the run under torch's profiler, to which the operators' shares refer."""
    parts: list[ProfileRow]
    """One row for each of `spans.PARTS`, in that order; 100% in total."""
    operators: list[ProfileRow]
    """Operators of PyTorch, longest first; none on engine native. The remainder to 100% is Python, the profiler, and on
    a GPU idle time."""
    operator_calls_per_token: float
    kernel_launches_per_token: float | None
    """On a GPU: launches of kernels and graphs; None on a CPU."""
    launches: Launches | None
    """On a GPU: kernels and launches per step, including prefill unless decode_only; None on a CPU or if unknown."""
    tells_apart: bool
    """False if the engine runs the model in one call, whose time is "rest of the engine" as a whole."""
    waited_sec: float | None
    """Time that the threads of this process waited for a core, in total, in the run without torch's profiler. Unless it
    is small beside `wall_sec`, the shares are not those of an idle machine. None where the system does not say it."""


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

    def run(self, spans: sp.Spans | None = None, recorder: AbstractContextManager[Any] | None = None) -> Measured:
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
            stack.enter_context(sp.attached(self.llm.core, spans))
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
            self.run()
            return
        num_tokens = min(self.params.max_tokens or WARMUP_TOKENS, WARMUP_TOKENS)
        for output in self.llm.generate(self.prompts, replace(self.params, max_tokens=num_tokens, min_tokens=0)):
            output.check()

    def recorded(self) -> tuple[Any, sp.Spans, Measured]:
        """Generate once under torch's profiler; return the profiler, the spans and the run.

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
        recorder, spans = torch.profiler.profile(activities=activities), sp.Spans(mark_ranges=True)
        return recorder, spans, self.run(spans, recorder)


def new_job(llm: LLM, prompts: Prompt | Sequence[Prompt], params: SamplingParams, decode_only: bool) -> Job:
    """Return the job with a fixed seed, so that every run samples the same tokens."""
    if decode_only and params.max_tokens == 1:
        raise NanoinferError("max_tokens=1: the first token is sampled in prefill: use 2 or more to profile decoding")
    return Job(llm, prompts, params if params.seed is not None else replace(params, seed=0), decode_only)


def random_prompts(llm: LLM, batch: int, prompt_tokens: int) -> list[list[int]]:
    """Return prompts of random tokens from a fixed seed."""
    tokens = np.random.default_rng(0).integers(llm.config.vocab_size, size=(batch, prompt_tokens))
    return cast(list[list[int]], tokens.tolist())


def profile(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    decode_only: bool = False,
    trace: Path | None = None,
) -> Profile:
    """Profile one generation. `llm` is unchanged afterwards.

    Args:
        llm: on any engine.
        prompts: as for `LLM.generate`.
        params: for all prompts; seed=None is seed 0 here, because every run must sample the same tokens.
        decode_only: begin the profile when every sequence has its first token.
        trace: file for a Chrome trace of the run under the profiler; overwritten if it exists.

    Raises:
        NanoinferError: a prompt or parameter is invalid, or no token was generated in the profiled part.
    """
    job = new_job(llm, prompts, params or SamplingParams(), decode_only)
    job.warm_up()
    on_cpu = llm.device == "cpu"
    clock = spans = sp.Spans()
    plain = run = job.run(clock if on_cpu else None)
    events: list[Any] = []
    if not on_cpu or llm.engine.model is not None or trace is not None:  # otherwise no operator of PyTorch runs
        recorder, spans, run = job.recorded()
        if trace is not None:
            recorder.export_chrome_trace(str(trace))
        events = list(recorder.events())
    seconds = clock.seconds if on_cpu else _kernel_seconds(events, plain.seconds)
    wall_sec = sum(seconds.values())
    operators = _operators(events, run.seconds, on_cpu)
    calls = {part: 0 if part == sp.HOST else spans.calls[part] for part in sp.PARTS}
    return Profile(
        model=llm.model_name, engine=llm.engine_name, device=llm.device, dtype=llm.model.weight_format,
        decode_only=decode_only, num_steps=spans.calls[sp.ENGINE], num_tokens=run.num_tokens, token_ids=run.token_ids,
        wall_sec=wall_sec, profiled_sec=run.seconds,
        parts=[ProfileRow(p, calls[p], seconds[p], 100 * seconds[p] / wall_sec) for p in sp.PARTS], operators=operators,
        operator_calls_per_token=sum(row.calls for row in operators) / run.num_tokens,
        kernel_launches_per_token=None if on_cpu else sum(map(is_launch, events)) / run.num_tokens,
        launches=None if on_cpu else count(events, spans.calls[sp.ENGINE], llm.config.n_layer),
        tells_apart=sp.tells_apart(spans, llm.config), waited_sec=plain.waited_sec,
    )  # fmt: skip


def _operators(events: list[Any], wall_sec: float, on_cpu: bool) -> list[ProfileRow]:
    """Return the operators, longest first, with their CPU time, or on a GPU the time of their kernels."""
    calls: Counter[str] = Counter()
    micros: defaultdict[str, float] = defaultdict(float)
    for e in events:
        if e.device_type.name == "CPU" and not e.name.startswith(sp.PREFIX) and not _RUNTIME.match(e.name):
            calls[e.name] += 1
            micros[e.name] += e.self_cpu_time_total if on_cpu else sum(k.duration for k in e.kernels)
    rows = [ProfileRow(n, calls[n], t * 1e-6, 100 * t * 1e-6 / wall_sec) for n, t in micros.items()]
    return sorted(rows, key=lambda row: -row.self_sec)


def _kernel_seconds(events: list[Any], wall_sec: float) -> Counter[str]:
    """Return the seconds of each part on a GPU: the time of its kernels; for the host, the rest of the wall time.

    A kernel belongs to the innermost span in which the CPU launched it. A kernel without a recorded launch, for example
    one replayed from a graph, belongs to the engine.
    """
    seconds: Counter[str] = Counter()
    known = total = 0.0
    for e in events:
        if e.device_type.name == "CUDA":
            annotation = e.is_user_annotation or e.name.startswith(sp.PREFIX)
            total += 0.0 if annotation else e.time_range.elapsed_us() * 1e-6
            continue
        own = sum(k.duration for k in e.kernels if not k.name.startswith(sp.PREFIX)) * 1e-6
        if own:
            known += own
            seconds[_part_of(e)] += own
    seconds[sp.ENGINE] += max(0.0, total - known)  # type: ignore[assignment]
    seconds[sp.HOST] += max(0.0, wall_sec - sum(seconds.values()))  # type: ignore[assignment]
    return seconds


def _part_of(event: Any) -> str:
    """Return the part of the innermost span that contains a profiler event."""
    while event is not None and not event.name.startswith(sp.PREFIX):
        event = event.cpu_parent
    return event.name.removeprefix(sp.PREFIX) if event is not None else sp.HOST


def measure_launches(
    llm: LLM, *, batch: int = 1, prompt_tokens: int = 32, params: SamplingParams | None = None
) -> Launches:
    """Return the counts of a decode step after prompts of random tokens. `llm` must be idle, on a CUDA device.

    `params`, without its max_tokens and ignore_eos, has the sampling; None is greedy.

    Raises:
        NanoinferError: the device is a CPU, or the profiler recorded no kernel.
    """
    if llm.device == "cpu":
        raise NanoinferError(f"device={llm.device!r} launches no kernels: count them on a CUDA device")
    # In a large batch, the first sequences decode during the prefill of the last ones: all must generate beyond that.
    tokens = 1 + DECODE_STEPS + batch * prompt_tokens // PREFILL_TOKENS
    sampling = replace(params or SamplingParams(temperature=0), max_tokens=tokens, min_tokens=0, ignore_eos=True)
    job = new_job(llm, random_prompts(llm, batch, prompt_tokens), sampling, decode_only=True)
    job.warm_up()
    recorder, spans, _ = job.recorded()
    counts = count(list(recorder.events()), spans.calls[sp.ENGINE], llm.config.n_layer)
    if counts is None:
        raise NanoinferError(
            f"torch's profiler recorded no kernel on {llm.device}: check that this process may use CUPTI"
        )
    return counts


def is_launch(event: Any) -> bool:
    """Return whether a profiler event is the launch of a kernel or a graph by the host."""
    return event.device_type.name == "CPU" and bool(_LAUNCH.match(event.name))


def is_kernel(event: Any) -> bool:
    """Return whether a profiler event is a kernel on the device, not a copy, a fill or an annotation."""
    if event.device_type.name != "CUDA" or event.is_user_annotation or event.name.startswith(sp.PREFIX):
        return False
    return not _NO_KERNEL.match(event.name)


def count(events: Sequence[Any], num_steps: int, n_layer: int) -> Launches | None:
    """Return the counts of a step from the events of `num_steps` steps; None if the profiler recorded no kernel."""
    kernels = Counter(e.name for e in events if is_kernel(e))
    if not kernels or not num_steps:
        return None
    layer = sum(calls // (num_steps * n_layer) for calls in kernels.values())
    return Launches(kernels.total() / num_steps, layer, sum(map(is_launch, events)) / num_steps)


# The start ---------------------------------------------------------------------------------------------------

_CHILD = """
import sys, time
times = [float(sys.argv[1]), time.time()]
import nanoinfer.cli.generate, nanoinfer.entrypoints.llm, pickle
config, prompts, params = pickle.load(sys.stdin.buffer)
times.append(time.time())
llm = nanoinfer.entrypoints.llm.LLM.from_config(config)
times.append(time.time())
llm.generate(prompts, params)
times.append(time.time())
print("\\n", times)
"""
_PARTS = ("interpreter", "imports", "load", "first step")


def profile_start(config: LLMConfig, prompts: Prompt, params: SamplingParams) -> dict[str, float]:
    """Return the seconds of each part of a start, in a new process that does what `generate` does for a token.

    Raises:
        NanoinferError: the process failed, as it says.
    """
    request = pickle.dumps((config, prompts, params))  # for this program's own child
    command = [sys.executable, "-c", _CHILD, str(time.time())]
    done = subprocess.run(command, input=request, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or [f": the process ended with {done.returncode}"]
        raise NanoinferError(lines[-1].partition(": ")[2])
    times = json.loads(done.stdout.splitlines()[-1])
    return {part: after - before for part, (before, after) in zip(_PARTS, pairwise(times), strict=True)}
