"""The harness: load, check, warm up, then time the backends of one shape round by round beside each other.

    for each shape:   load all -> check greedy tokens -> warm up until steady -> rounds: A B C, A B C, ... -> rows

A backend that cannot be loaded, says other words, or dies is a row with its error; the others go on.
Backends of one shape are all in memory at once where they fit; where they do not, they are run in parts,
and their rows say so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from nanoinfer.bench import extrapolate
from nanoinfer.bench.backends import prepare
from nanoinfer.bench.case import Case
from nanoinfer.bench.derived_metrics import add_speculation, fill_in
from nanoinfer.bench.memory_plan import split
from nanoinfer.bench.process import Processes, Run, WorkerHandle
from nanoinfer.bench.results import Row
from nanoinfer.bench.stats import RunTimes, by_position, is_steady, summarize
from nanoinfer.config import ModelConfig
from nanoinfer.engines.devices import free_memory
from nanoinfer.engines.registry import ENGINES
from nanoinfer.environment import num_cpus
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.ceilings import Ceiling

NAIVE = ("recompute", "nanogpt")
CHECK_TOKENS = 16  # greedy tokens compared before anything is timed
CHECK_TOKENS_SHORTENED = 2  # the same where each costs a pass over everything
WARM_UP_SEC = 5.0  # of untimed runs, after which a backend is warm
LOAD_AT_ONCE = 8  # workers on a GPU that load at the same time, at most one for two CPUs


@dataclass(frozen=True)
class Options:
    """How carefully to measure."""

    rounds: int = 3
    """Timed runs of each case."""
    max_warmups: int = 3
    """Untimed runs until two in a row agree within 10%."""
    naive_limit_sec: float = 4.0
    """A run without a cache that would take longer is extrapolated from its time at a few lengths."""
    max_case_sec: float = 6.0
    """A case that has been timed for this long gets no further round; every case gets one."""
    vary_prompts: bool = False
    """Every round has prompts of its own, the same for all cases of a shape."""
    breakdown: bool = False
    """Also profile where the time goes: our engines, where their rounds fit max_case_sec."""
    verify: bool = False
    """Also measure what verifying 5 tokens costs: our engines at batch 1."""
    budget_sec: float | None = None
    """No further backend is loaded after this time; what is loaded is finished. None: no limit."""


@dataclass(frozen=True)
class Status:
    """Progress, for whoever shows it."""

    what: str
    done: int
    """Cases finished."""
    total: int
    seconds_left: float | None


class Harness:
    """Measures cases of one model.

    Args:
        weights: Hugging Face folder with the model's weights in float32.
        config: the model's shape.
        ceiling: what this machine can do.
        options: how carefully to measure.
        show: called with the progress.
        clock: seconds; a fake one in tests.
    """

    def __init__(
        self,
        weights: Path,
        config: ModelConfig,
        ceiling: Ceiling,
        options: Options,
        show: Callable[[Status], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._weights, self._config, self._ceiling, self._options = weights, config, ceiling, options
        self._show, self._clock = show, clock
        self._started = clock()
        self._done = self._total = 0

    def run(self, cases: Sequence[Case], keep: Callable[[list[Row]], None]) -> None:
        """Measure the cases, shape by shape, in the order given.

        Args:
            cases: what to measure.
            keep: called with the rows of each shape as soon as they are there.
        """
        self._total = len(cases)
        for _, same_shape in groupby(cases, key=lambda c: c.shape):
            group = list(same_shape)
            parts = self._parts(group)
            for part in parts:
                if self._late:
                    return
                rows = self._run_part(part, self._reference_case(group))
                if len(parts) > 1:
                    for row in rows:
                        row.note = _join(row.note, "not interleaved with all of its shape: they do not fit the memory")
                keep(rows)

    @property
    def _late(self) -> bool:
        """Whether the time that may be spent is spent."""
        budget = self._options.budget_sec
        return budget is not None and self._clock() - self._started >= budget

    def _parts(self, group: list[Case]) -> list[list[Case]]:
        """Split the backends of a shape so that each part fits two thirds of the free memory (of a GPU's 5/6)."""
        weights = sum(f.stat().st_size for f in self._weights.glob("*.safetensors"))
        room = [free_memory(torch.device("cpu")) * 2 // 3]
        if (device := group[0].device) != "cpu":
            room.append(free_memory(torch.device(device)) * 5 // 6)
        return split(group, self._config, weights, room)

    def _reference_case(self, group: list[Case]) -> Case | None:
        """Return whose greedy tokens the others are held to: the first of our engines in float32, not shortened."""
        exact = [c for c in group if c.backend in ENGINES and _is_exact(c)]
        return min(exact, key=self._shortened) if exact else None

    # One part: all of its backends are alive at once ----------------------------------------------------

    def _run_part(self, cases: list[Case], reference: Case | None) -> list[Row]:
        rows = {case: Row(case) for case in cases}
        runs: dict[Case, list[RunTimes]] = {case: [] for case in cases}
        spent = dict.fromkeys(cases, 0.0)
        with Processes(self._weights) as processes:
            workers = self._load(cases, rows, processes)
            cases = [case for case in cases if case in workers or rows[case].error is not None]
            checked_sec = self._check(workers, rows, reference)
            for case, worker in workers.items():
                if rows[case].error is None and not self._shortened(case):
                    with self._step(rows[case], "warm up"):
                        self._warm_up(worker, checked_sec[case])
            for i in range(self._options.rounds):
                for case, worker in workers.items():
                    if rows[case].error is None and (i == 0 or spent[case] < self._options.max_case_sec):
                        start = self._clock()
                        with self._step(rows[case], f"round {i + 1} of {self._options.rounds}"):
                            runs[case].append(self._timed(case, worker, rows[case], i))
                        spent[case] += self._clock() - start
            for case, worker in workers.items():
                quick = spent[case] < self._options.max_case_sec and not self._shortened(case)
                if self._options.breakdown and quick and rows[case].error is None and case.backend in ENGINES:
                    with self._step(rows[case], "profile"), contextlib.suppress(NanoinferError):
                        rows[case].breakdown_percent = worker.breakdown()  # an engine may be opaque: then unknown
                if rows[case].error is None and case.backend in ENGINES and not self._shortened(case):
                    self._count(case, worker, rows[case])
        for case in cases:
            row = rows[case]
            self._done += 1
            if row.error is None:
                row.figures = summarize(runs[case])
                row.round_sec = [r.total_sec for r in runs[case]]
                if case.batch == 1 and case.workload == "uniform":
                    row.per_position_sec = by_position(runs[case], case.prompt_tokens) or None
                fill_in(row, self._config, self._ceiling, naive=case.backend in NAIVE)
        return [rows[case] for case in cases]

    def _load(self, cases: list[Case], rows: dict[Case, Row], processes: Processes) -> dict[Case, WorkerHandle]:
        """Return the backends that could be loaded; the rows of those that could not get the reason.

        On a GPU several load at a time, and what compiles is run once: a compiler would otherwise be in the check.
        """
        together = []
        for case in cases:
            with self._step(rows[case], "load"):
                prepare(case, self._weights)  # here, so that exporting is not in the worker's peak memory
                if case.device != "cpu":
                    together.append(case)
        at_once = min(LOAD_AT_ONCE, max(1, num_cpus() // 2))
        workers: dict[Case, WorkerHandle] = {}
        for first in range(0, len(together), at_once):
            if not self._late:
                some = together[first : first + at_once]
                processes.load_together(some, lambda case: case.backend not in NAIVE, at_once)
        for case in cases:
            if rows[case].error is None and (processes.knows(case) or not self._late):
                with self._step(rows[case], "load"):
                    workers[case] = processes.worker(case)
        return workers

    def _count(self, case: Case, worker: WorkerHandle, row: Row) -> None:
        """Add what is counted and compared outside of the timing; what an engine cannot say stays unknown."""
        if case.device != "cpu":
            with self._step(row, "count launches"), _noting(row, "launches"):
                for name, value in worker.launches().items():
                    setattr(row, name, value)
        if self._options.verify and case.batch == 1 and case.backend not in NAIVE:
            with self._step(row, "verify"), _noting(row, "cost of verifying"):
                row.verify_ratio = worker.verify()

    @contextlib.contextmanager
    def _step(self, row: Row, what: str) -> Iterator[None]:
        """Show what is going on; make its failure the row's error."""
        spent = self._clock() - self._started
        left = spent / self._done * (self._total - self._done) if self._done else None
        case = row.case
        shape = f"batch {case.batch}, {case.prompt_tokens} + {case.output_tokens} tokens"
        self._show(Status(f"{case.label}, {shape}: {what}", self._done, self._total, left))
        try:
            yield
        except NanoinferError as e:
            row.error = str(e)

    def _check(
        self, workers: dict[Case, WorkerHandle], rows: dict[Case, Row], reference: Case | None
    ) -> dict[Case, float]:
        """Compare greedy float32 tokens with the reference's; a backend that says other words is not timed.

        Returns:
            the seconds that each case's run took: its first warm-up.
        """
        seconds: dict[Case, float] = {}
        expected: dict[Case | None, list[list[int]]] = {}
        with Processes(self._weights) as processes:
            if reference is not None and reference not in workers and any(_is_exact(c) for c in workers):
                with contextlib.suppress(NanoinferError):  # it is in another part, or failed there
                    expected[reference] = self._sample(processes.worker(reference)).tokens
            order = sorted(workers, key=lambda c: (c != reference, c.draft is not None))
            for case in order:
                if rows[case].error is not None:
                    continue
                with self._step(rows[case], "check"):
                    checked = self._sample(workers[case])
                    run, seconds[case] = checked.tokens, checked.times.total_sec
                    if case == reference or case.draft is None:
                        expected[case] = run
                    held_to = _held_to(case, reference)
                    if held_to in expected:
                        difference = _difference(run, expected[held_to])
                        rows[case].same_tokens = difference is None
                        if difference is not None:
                            raise NanoinferError(f"not timed: {difference}")
        return seconds

    def _sample(self, worker: WorkerHandle) -> Run:
        case = worker.case
        count = CHECK_TOKENS_SHORTENED if self._shortened(case) else CHECK_TOKENS
        return worker.run(output_tokens=min(count, case.output_tokens))

    def _warm_up(self, worker: WorkerHandle, first_sec: float) -> None:
        """Run until two runs agree; short ones, for what is warmed up (caches, compilers, clocks) is per step.

        On a GPU they are as long as the timed ones: graphs are captured, and code is compiled, for lengths of text
        that a short run does not reach.

        Args:
            first_sec: what the check took, the same short run.
        """
        short = worker.case.device == "cpu"
        seconds = [first_sec] if short else []
        shape = {"output_tokens": min(CHECK_TOKENS, worker.case.output_tokens)} if short else {}
        while len(seconds) < self._options.max_warmups and sum(seconds) < WARM_UP_SEC and not is_steady(seconds):
            seconds.append(worker.run(**shape).times.total_sec)

    def _timed(self, case: Case, worker: WorkerHandle, row: Row, round_index: int) -> RunTimes:
        if not self._shortened(case):
            run = worker.run(seed=round_index if self._options.vary_prompts else 0)
            _note_memory(row, run)
            if run.speculation is not None:
                add_speculation(row, run.speculation, self._config, self._ceiling)
            return run.times

        def step_sec(length: int) -> float:
            run: Run = worker.run(prompt_tokens=length, output_tokens=1)
            _note_memory(row, run)
            return run.times.ttft_sec

        count = extrapolate.NUM_POSITIONS if case.output_tokens > 64 else extrapolate.NUM_POSITIONS_SHORT
        times = extrapolate.token_times(
            step_sec, case.prompt_tokens, case.output_tokens, self._config.block_size, count
        )
        row.note = f"extrapolated from its time at {count} lengths"
        return RunTimes(case.prompt_tokens * case.batch, [extrapolate.arrivals(times)] * case.batch)

    def _shortened(self, case: Case) -> bool:
        """Return whether a naive case would take too long: by the arithmetic, which is never too pessimistic."""
        from nanoinfer.roofline import arithmetic
        from nanoinfer.roofline.formats import FORMATS

        if case.backend not in NAIVE or case.workload == "mixed":
            return False
        mean = min(self._config.block_size, case.prompt_tokens + case.output_tokens // 2)
        flops = arithmetic.prefill(self._config, FORMATS[case.dtype]).model.flops(case.batch, mean)
        peaks = self._ceiling.flops_per_sec
        fastest = peaks.get(case.dtype) or max(peaks.values())
        return flops / fastest * case.output_tokens > self._options.naive_limit_sec


@contextlib.contextmanager
def _noting(row: Row, what: str) -> Iterator[None]:
    """Make a failure a note of the row, whose figures stand without."""
    try:
        yield
    except NanoinferError as e:
        row.note = _join(row.note, f"{what} unknown: {e}")


def _note_memory(row: Row, run: Run) -> None:
    row.peak_memory_bytes, row.kv_cache_bytes = run.peak_memory_bytes, run.kv_cache_bytes
    row.reserved_memory_bytes = run.reserved_bytes


def _held_to(case: Case, reference: Case | None) -> Case | None:
    """Return the case whose greedy tokens a case must repeat; None: nobody's.

    A draft must not change a word, also in few bits where rows do not depend on company, as those of `native`.
    """
    if _is_exact(case):
        return reference
    exact_rows = case.sampler == "greedy" and case.backend == "native"
    return case.plain if case.draft is not None and exact_rows else None


def _is_exact(case: Case) -> bool:
    return case.dtype == "float32" and case.quantization is None and case.sampler == "greedy"


def _difference(run: list[list[int]], expected: list[list[int]]) -> str | None:
    """Say where texts first leave the expected ones, None if nowhere; they may be shorter.

    _difference([[1, 2]], [[1, 3, 4]]) -> "token 1 of sequence 0 is 2, the reference's is 3"
    """
    for i, (a, b) in enumerate(zip(run, expected, strict=True)):
        for t, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"token {t} of sequence {i} is {x}, the reference's is {y}"
    return None


def _join(*notes: str) -> str:
    return "; ".join(n for n in notes if n)
