"""Where the time of a generation goes: by operator, and by part of the model.

The same generation runs three times: a few tokens to warm up, once for the clock, once under torch's profiler.
The profiler records each operator, which costs about half a microsecond apiece: nothing to a large model, a third
of the time of a small one, and all of it would be charged to the Python around the operators. So the parts are
measured without it:

    on a CPU    wall time between the spans of `profiling/spans.py`, in the run for the clock
    on a GPU    time of the kernels that were launched inside each span, from the profiler; "Python and host" is
                the rest of the wall time of the run for the clock, in which the GPU had nothing to do

Operators, launches and the trace come from the run under the profiler.

    from nanoinfer.profiling.profiler import profile
    for row in profile(LLM("shakespeare"), "O Romeo,", SamplingParams(max_tokens=32)).parts: print(row)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.llm import LLM
from nanoinfer.profiling import spans as sp
from nanoinfer.profiling.launches import Launches, count, is_launch
from nanoinfer.profiling.recording import new_job, random_prompts
from nanoinfer.prompts import Prompt
from nanoinfer.sampling_params import SamplingParams

OTHERS = "everything else"
_NAMED = (sp.MATRIX_PRODUCTS, sp.ATTENTION, sp.OUTPUT_HEAD, sp.SAMPLING)
_RUNTIME = re.compile(r"cu(da)?[A-Z]|Activity Buffer|Buffer Flush|Lazy Function")  # events that are no operators


@dataclass(frozen=True)
class ProfileRow:
    """One operator, or one part of the model."""

    name: str
    calls: int
    self_sec: float
    """Its own time, less that of what it calls: of the CPU, or on a GPU of the kernels that it launched."""
    share_percent: float
    """Of the wall time of the run that it was measured in."""


@dataclass(frozen=True)
class Profile:
    """One profiled generation."""

    model: str
    engine: str
    device: str
    dtype: str
    decode_only: bool
    """Whether the profile begins after the first token of every text."""
    num_steps: int
    """Calls of the engine."""
    num_tokens: int
    """Tokens drawn in the part of the generation that is profiled, all texts together."""
    token_ids: list[list[int]]
    """All tokens of each text, as they came under the profiler."""
    wall_sec: float
    """Of the run without torch's profiler; the parts add up to it."""
    profiled_sec: float
    """Of the run under torch's profiler; the operators are shares of it."""
    parts: list[ProfileRow]
    """All of `spans.PARTS`, in that order; 100% together."""
    operators: list[ProfileRow]
    """Longest first. What is missing to 100% is Python, the profiler, and on a GPU idle time."""
    operator_calls_per_token: float
    kernel_launches_per_token: float | None
    """On a GPU: launches of kernels and of graphs; None on a CPU."""
    launches: Launches | None
    """On a GPU: kernels and launches of a step, prompts included unless decode_only; None on a CPU, or if unknown."""
    tells_apart: bool
    """False: the engine runs the model in a call of its own, which is "rest of the engine" as a whole."""


def profile(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    decode_only: bool = False,
    trace: Path | None = None,
) -> Profile:
    """Profile one generation; nothing of the profiling stays behind in `llm`.

    Args:
        llm: on any engine.
        prompts: as for `LLM.generate`.
        params: for all prompts; seed=None is seed 0 here, since each run must draw the same tokens.
        decode_only: leave out what happens until every text has its first token.
        trace: file for a Chrome trace of the run under the profiler; written in place.

    Raises:
        NanoinferError: a prompt or parameter is not usable, or nothing is left to profile.
    """
    job = new_job(llm, prompts, params or SamplingParams(), decode_only)
    job.warm_up()
    on_cpu = llm.device.type == "cpu"
    clock = job.clocked() if on_cpu else None
    plain_sec = 0.0 if on_cpu else job.run(None, None).seconds
    recorder, ranges, run = job.recorded()
    if trace is not None:
        recorder.export_chrome_trace(str(trace))
    events = list(recorder.events())
    seconds = clock.seconds if clock else _kernel_seconds(events, plain_sec)
    wall_sec = sum(seconds.values())
    operators = _operators(events, run.seconds, on_cpu)
    calls = {part: 0 if part == sp.HOST else ranges.calls[part] for part in sp.PARTS}
    made = None if on_cpu else count(events, ranges.calls[sp.ENGINE], llm.config.n_layer)
    launches = sum(map(is_launch, events))
    return Profile(
        model=llm.model_name,
        engine=llm.engine_name,
        device=str(llm.device),
        dtype=str(llm.dtype).removeprefix("torch."),
        decode_only=decode_only,
        num_steps=ranges.calls[sp.ENGINE],
        num_tokens=run.num_tokens,
        token_ids=run.token_ids,
        wall_sec=wall_sec,
        profiled_sec=run.seconds,
        parts=[ProfileRow(p, calls[p], seconds[p], 100 * seconds[p] / wall_sec) for p in sp.PARTS],
        operators=operators,
        operator_calls_per_token=sum(row.calls for row in operators) / run.num_tokens,
        kernel_launches_per_token=None if on_cpu else launches / run.num_tokens,
        launches=made,
        tells_apart=sp.tells_apart(ranges, llm.config.n_layer),
    )


def breakdown_percent(
    llm: LLM,
    *,
    batch: int = 1,
    prompt_tokens: int = 32,
    output_tokens: int = 17,
    params: SamplingParams | None = None,
) -> dict[str, float]:
    """Return where the time of decoding goes: five parts, 100 together.

    Args:
        llm: on any engine, idle.
        batch: prompts of random tokens, generated for together.
        prompt_tokens: tokens of each.
        output_tokens: tokens of each text; the first comes with the prompt and is not measured.
        params: how to sample; its max_tokens and ignore_eos are not used. None is greedy.

    Raises:
        NanoinferError: nothing to measure, or an engine whose parts cannot be told apart.
    """
    asked = replace(params or SamplingParams(temperature=0), max_tokens=output_tokens, ignore_eos=True)
    job = replace(new_job(llm, random_prompts(llm, batch, prompt_tokens), asked, decode_only=True), parts=_NAMED)
    job.warm_up()
    seconds: Counter[str]
    spans: sp.Spans
    if llm.device.type == "cpu":
        spans = clock = job.clocked()
        seconds = clock.seconds
    else:
        plain = job.run(None, None)
        recorder, spans, _ = job.recorded()
        seconds = _kernel_seconds(list(recorder.events()), plain.seconds)
    if not sp.tells_apart(spans, llm.config.n_layer):
        raise NanoinferError(
            f"engine={llm.engine_name!r} runs the model in a call of its own: the parts of its time are not known"
        )
    total = sum(seconds.values())
    percent = {part: 100 * seconds[part] / total for part in _NAMED}
    return percent | {OTHERS: max(0.0, 100 - sum(percent.values()))}


def _operators(events: list[Any], wall_sec: float, on_cpu: bool) -> list[ProfileRow]:
    """Return the operators, longest first: their own time on the CPU, or that of their kernels."""
    calls: Counter[str] = Counter()
    micros: defaultdict[str, float] = defaultdict(float)
    for e in events:
        if e.device_type.name == "CPU" and not e.name.startswith(sp.PREFIX) and not _RUNTIME.match(e.name):
            calls[e.name] += 1
            micros[e.name] += e.self_cpu_time_total if on_cpu else sum(k.duration for k in e.kernels)
    rows = [ProfileRow(n, calls[n], t * 1e-6, 100 * t * 1e-6 / wall_sec) for n, t in micros.items()]
    return sorted(rows, key=lambda row: -row.self_sec)


def _kernel_seconds(events: list[Any], wall_sec: float) -> Counter[str]:
    """Return the seconds of each part on a GPU: its kernels', and for the host what they leave of the wall time.

    A kernel belongs to the innermost span in which the CPU launched it. One whose launch is not known (replayed
    from a graph, say) is the engine's.
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
    """Return the part of the innermost span that a profiler event lies in."""
    while event is not None and not event.name.startswith(sp.PREFIX):
        event = event.cpu_parent
    return event.name.removeprefix(sp.PREFIX) if event is not None else sp.HOST
