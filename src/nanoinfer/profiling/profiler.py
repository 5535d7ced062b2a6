"""Profile a generation by operator and by part of the model (docs/profile.md).

The same generation runs three times: a warm-up of a few tokens, a timed run, and a run under torch's profiler, unless
no operator of PyTorch runs (engine native). The profiler adds about half a microsecond to each operator, which would
count as time of the Python code around the operators. So the parts are measured without it:

    on a CPU    wall time between the spans of `profiling/spans.py` in the timed run
    on a GPU    time of the kernels launched inside each span, from the profiler; "Python and host" is the rest of the
                wall time of the timed run, in which the GPU was idle

Operators, launches and the trace come from the run under the profiler.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.prompts import Prompt
from nanoinfer.profiling import spans as sp
from nanoinfer.profiling.launches import Launches, count, is_launch
from nanoinfer.profiling.recording import new_job, random_prompts
from nanoinfer.sampling_params import SamplingParams

OTHERS = "everything else"
_NAMED = (sp.MATRIX_PRODUCTS, sp.ATTENTION, sp.OUTPUT_HEAD, sp.SAMPLING)
_RUNTIME = re.compile(r"cu(da)?[A-Z]|Activity Buffer|Buffer Flush|Lazy Function")  # events that are not operators


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
    clock, plain = job.clocked() if on_cpu else (None, job.run(None, None))
    spans: sp.Spans
    if clock is not None and llm.engine.model is None and trace is None:  # no operator of PyTorch runs
        spans, run, events = clock, plain, []
    else:
        recorder, spans, run = job.recorded()
        if trace is not None:
            recorder.export_chrome_trace(str(trace))
        events = list(recorder.events())
    seconds = clock.seconds if clock else _kernel_seconds(events, plain.seconds)
    wall_sec = sum(seconds.values())
    operators = _operators(events, run.seconds, on_cpu)
    calls = {part: 0 if part == sp.HOST else spans.calls[part] for part in sp.PARTS}
    return Profile(
        model=llm.model_name,
        engine=llm.engine_name,
        device=llm.device,
        dtype=llm.model.weight_format,
        decode_only=decode_only,
        num_steps=spans.calls[sp.ENGINE],
        num_tokens=run.num_tokens,
        token_ids=run.token_ids,
        wall_sec=wall_sec,
        profiled_sec=run.seconds,
        parts=[ProfileRow(p, calls[p], seconds[p], 100 * seconds[p] / wall_sec) for p in sp.PARTS],
        operators=operators,
        operator_calls_per_token=sum(row.calls for row in operators) / run.num_tokens,
        kernel_launches_per_token=None if on_cpu else sum(map(is_launch, events)) / run.num_tokens,
        launches=None if on_cpu else count(events, spans.calls[sp.ENGINE], llm.config.n_layer),
        tells_apart=sp.tells_apart(spans, llm.config),
        waited_sec=plain.waited_sec,
    )


def breakdown_percent(
    llm: LLM,
    *,
    batch: int = 1,
    prompt_tokens: int = 32,
    output_tokens: int = 17,
    params: SamplingParams | None = None,
) -> dict[str, float]:
    """Return the share of five parts in the time of decoding, 100 in total.

    Args:
        llm: on any engine, idle.
        batch: number of sequences; their prompts are random tokens.
        prompt_tokens: tokens per prompt.
        output_tokens: output tokens per sequence; the first is sampled in prefill and not measured.
        params: sampling parameters, except max_tokens and ignore_eos. None is greedy.

    Raises:
        NanoinferError: no token was generated in the measured part, or the engine's parts cannot be distinguished.
    """
    asked = replace(params or SamplingParams(temperature=0), max_tokens=output_tokens, ignore_eos=True)
    job = replace(new_job(llm, random_prompts(llm, batch, prompt_tokens), asked, decode_only=True), parts=_NAMED)
    job.warm_up()
    seconds: Counter[str]
    spans: sp.Spans
    if llm.device == "cpu":
        clock, _ = job.clocked()
        spans, seconds = clock, clock.seconds
    else:
        plain = job.run(None, None)
        recorder, spans, _ = job.recorded()
        seconds = _kernel_seconds(list(recorder.events()), plain.seconds)
    if not sp.tells_apart(spans, llm.config):
        raise NanoinferError(
            f"engine={llm.engine_name!r} runs the model in one call, so its time cannot be divided into parts: use"
            " another engine"
        )
    total = sum(seconds.values())
    percent = {part: 100 * seconds[part] / total for part in _NAMED}
    return percent | {OTHERS: max(0.0, 100 - sum(percent.values()))}


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
