"""The harness: load, check, warm up, then time the backends of one shape round by round beside each other.

    for each shape:   load all -> check greedy tokens -> warm up until steady -> rounds: A B C, A B C, ... -> rows

A backend that cannot be loaded, generates other tokens, or dies is a row with its error; the others continue.
All backends of one shape are in memory at once if they fit; otherwise they run in parts, which their rows note. With
Options.together=False each is a part.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, takewhile
from pathlib import Path

import numpy as np

from nanoinfer.bench.case import BUSY, IRREGULAR, Case, Row, RunTimes, is_steady, naive_token_times, summarize
from nanoinfer.bench.results import NAIVE, add_speculation, fill_in
from nanoinfer.bench.suites import Options
from nanoinfer.bench.worker import Processes, RunResult, WorkerProcess
from nanoinfer.config import ModelConfig
from nanoinfer.engines.devices import free_memory
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError, escaped
from nanoinfer.profiling.checks import MAX_NATS, NUM_SEQUENCES, require_close
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.utils.environment import MAX_WAITED
from nanoinfer.utils.progress import ProgressBar

CHECK_TOKENS = 16  # greedy tokens compared before anything is timed
CHECK_PROMPT_TOKENS = 4096  # of the first prompts together: the check runs no more of them
CHECK_TOKENS_SHORTENED = 2  # the same where each needs a forward pass over everything
WARM_UP_SEC = 5.0  # of untimed runs, after which a backend counts as warm
PROCESS_BYTES = 500 << 20  # a worker with its libraries, before any weights; twice that with a GPU's context
NAIVE_LIMIT_SEC = 4.0  # a run without a cache that would take longer is extrapolated
NUM_LENGTHS = 7  # that an extrapolated run is measured at
NUM_LENGTHS_SHORT = 3  # for up to 64 tokens, along which the time hardly changes


@dataclass
class _Loaded:
    """A backend that is loaded, with its row and what it has run."""

    row: Row
    worker: WorkerProcess
    checked_sec: float = 0.0
    """Time of the run that was checked."""
    rounds: list[RunTimes] = field(default_factory=list)
    timed_sec: float = 0.0
    """Time of all rounds, with what is around them."""

    @property
    def case(self) -> Case:
        """The row's case."""
        return self.row.case


class Harness:
    """Measures cases of one model, whose float32 weights are in a Hugging Face folder."""

    def __init__(
        self, weights: Path, config: ModelConfig, ceiling: Ceiling, options: Options, bar: ProgressBar,
        clock: Callable[[], float] = time.perf_counter, pythons: Mapping[str, Path] | None = None,
    ) -> None:  # fmt: skip
        self._weights, self._config, self._ceiling, self._options = weights, config, ceiling, options
        self._bar, self._clock, self._pythons = bar, clock, pythons
        self._started = clock()
        self._done = self._total = 0
        self._expected: dict[Case | None, list[list[int]]] = {}  # greedy tokens that others must repeat

    def run(self, cases: Sequence[Case], keep: Callable[[list[Row]], None], suite: Sequence[Case] = ()) -> None:
        """Measure the cases, shape by shape, in the order given; call `keep` with rows whenever some have changed.

        The reference of a shape may also be a case of the suite that is not measured again.
        """
        self._total = len(cases)
        for _, same_shape in groupby(cases, key=lambda c: c.shape):
            group = list(same_shape)
            parts = self._parts(group)
            for part in parts:
                if self._late:
                    return
                # The reference of the greedy tokens is the first of our engines in float32, not shortened.
                exact = [
                    c for c in suite or cases if c.shape == part[0].shape and c.backend in ENGINES and _is_exact(c)
                ]
                reference = min(exact, key=self._shortened, default=None)
                alone = "not interleaved with all of its shape: they do not fit the memory"
                alone = alone if len(parts) > 1 and self._options.together else ""
                self._run_part([Row(case, note=alone, unfinished=True) for case in part], reference, keep)
                if not sys.stderr.isatty():  # where there is no bar
                    self._bar.print(f"{self._done} of {self._total} cases are done")

    @property
    def _late(self) -> bool:
        """Whether the time budget is spent."""
        return self._clock() - self._started >= self._options.budget_sec

    def _parts(self, group: list[Case]) -> list[list[Case]]:
        """Split the backends of a shape, in their order, into parts that fit 2/3 of the free memory, of a GPU 5/6.

        Neighbours in as many bits stay together if they fit: what is compared is then interleaved.
        """
        device = group[0].device
        room = free_memory("cpu") * 2 // 3
        if device != "cpu":
            room = min(room, free_memory(device) * 5 // 6)
        parts: list[list[Case]] = [[]]
        used = 0
        for _, of_bits in groupby(group, key=lambda c: c.bits):
            same = list(of_bits)
            whole = sum(self._memory_bytes(case) for case in dict.fromkeys(case.loaded for case in same))
            ahead = whole if whole <= room else 0
            for case in same:
                # Those that differ in their draft share a process.
                if case.loaded not in [c.loaded for c in parts[-1]]:
                    need = self._memory_bytes(case)
                    if used and (used + max(need, ahead) > room or not self._options.together):
                        parts.append([])
                        used = 0
                    used, ahead = used + need, 0
                parts[-1].append(case)
        return parts

    def _memory_bytes(self, case: Case) -> int:
        """Return about how many bytes a backend takes, of the main memory or of a GPU's."""
        weights = sum(f.stat().st_size for f in self._weights.glob("*.safetensors"))
        on_gpu, tokens = case.device != "cpu", self._config.block_size  # a GPU's engines reserve whole slots
        if not on_gpu:
            tokens = min(tokens, case.prompt_tokens + case.output_tokens)
        half = case.format != "float32" and (on_gpu or case.backend in ENGINES)
        cache = self._config.kv_bytes_per_token(2 if half else 4)
        return (1 + on_gpu) * PROCESS_BYTES + 2 * weights + case.batch * tokens * cache

    def _run_part(self, part: list[Row], reference: Case | None, keep: Callable[[list[Row]], None]) -> None:
        """Measure the rows of backends that are alive together."""
        loaded: list[_Loaded] = []

        def alive() -> list[_Loaded]:
            return [backend for backend in loaded if backend.row.error is None]

        def keep_so_far() -> None:
            for backend in alive():
                if rounds := backend.rounds:
                    backend.row.figures, backend.row.round_sec = summarize(rounds), [run.total_sec for run in rounds]
                    fill_in(backend.row, self._config, self._ceiling)
            keep([row for row in part if row.error is not None or row.figures is not None])

        with Processes(self._weights, self._pythons) as processes:
            for row in takewhile(lambda _: not self._late, part):
                with self._step(row, "load"):
                    loaded.append(backend := _Loaded(row, processes.worker(row.case)))
                    if row.case.device != "cpu" and row.case.backend not in NAIVE:
                        backend.worker.run(row.case)  # compiles its code: the time of that is no part of the warm-up
            self._check(alive(), reference)
            if self._options.verify:
                self._check_logits(alive())
            for backend in alive():
                if not self._shortened(backend.case):
                    with self._step(backend.row, "warm up"):
                        self._warm_up(backend)
            keep_so_far()
            for i in range(self._options.rounds):
                for backend in alive():
                    if i == 0 or backend.timed_sec < self._options.max_case_sec:
                        self._time_round(backend, i)
                keep_so_far()
            for backend in loaded:
                if backend.row.error is None:
                    self._measure_more(backend)
                backend.row.unfinished = False
                keep_so_far()
        self._done += sum(not row.unfinished for row in part)

    def _measure_more(self, backend: _Loaded) -> None:
        """Measure what is not part of the timing; what an engine does not support stays unknown."""
        row, worker, case = backend.row, backend.worker, backend.case
        if case.backend in ENGINES and not self._shortened(case):
            if case.device != "cpu":
                with self._step(row, "count launches", unknown="launches"):
                    row.update(worker.ask("launches"))
            if self._options.verify and case.batch == 1 and case.backend not in NAIVE:
                with self._step(row, "verify", unknown="cost of verifying"):
                    row.verify_ratio = worker.ask("verify")
        waited = sum(run.waited_sec or 0.0 for run in backend.rounds)
        if waited > MAX_WAITED * sum(run.total_sec for run in backend.rounds):
            row.add_note(f"{BUSY}: threads waited {waited:.1f} s for a core")

    @contextlib.contextmanager
    def _step(self, row: Row, what: str, unknown: str = "") -> Iterator[None]:
        """Show the current step; record its failure as the row's error, or as a note that something is unknown."""
        case = row.case
        shape = f"batch {case.batch}, {case.prompt_tokens} + {case.output_tokens} tokens"
        self._bar.update(self._done, self._total, f"{case.label}, {shape}: {what}")
        try:
            yield
        except NanoinferError as e:
            if unknown:
                row.add_note(f"{unknown} unknown: {escaped(e)}")
            else:
                row.error, row.figures, row.unfinished = escaped(e), None, False

    def _check(self, loaded: list[_Loaded], reference: Case | None) -> None:
        """Compare greedy float32 tokens with the reference's."""
        expected = self._expected
        with Processes(self._weights, self._pythons) as processes:
            known = {*expected, *(backend.case for backend in loaded)}
            if reference is not None and reference not in known and any(_is_exact(b.case) for b in loaded):
                with contextlib.suppress(NanoinferError):  # it is in another part, or failed there
                    expected[reference] = self._sample(processes.worker(reference), reference).tokens
            for backend in sorted(loaded, key=lambda b: (b.case != reference, b.case != b.case.plain)):
                case = backend.case
                with self._step(backend.row, "check"):
                    checked = self._sample(backend.worker, case)
                    backend.checked_sec = checked.times.total_sec
                    if case in (reference, case.plain):
                        expected[case] = checked.tokens
                    if (other := _reference_of(case, reference)) in expected:
                        difference = _difference(checked.tokens, expected[other])
                        backend.row.same_tokens = difference is None
                        if difference is not None:
                            raise NanoinferError(f"not timed: {difference}")

    def _check_logits(self, loaded: list[_Loaded]) -> None:
        """Compare the logits of our engines in reduced precision with those of `static` in float32."""
        for backend in loaded:
            row, case = backend.row, backend.case
            if case.backend not in ENGINES or case.format not in MAX_NATS:
                continue
            path = self._weights / f"logits-{case.prompt_tokens}.npy"  # kept as long as the weights
            exact = replace(case, backend="static", dtype="float32", quantization=None, batch=NUM_SEQUENCES)
            try:
                if not path.exists():
                    with Processes(self._weights, self._pythons) as processes:
                        self._logits(processes.worker(exact)).replace(path)
            except NanoinferError as e:
                row.add_note(f"logits not compared with float32's: {escaped(e)}")
                continue
            with self._step(row, "compare logits"):
                require_close(np.load(self._logits(backend.worker)), np.load(path), case.format)

    def _logits(self, worker: WorkerProcess) -> Path:
        """Return a file with the logits that are compared."""
        worker.ask("logits", path=str(path := self._weights / "logits.npy"))
        return path

    def _sample(self, worker: WorkerProcess, case: Case) -> RunResult:
        """Generate the tokens of the check."""
        return worker.run(_shorter(case, CHECK_TOKENS_SHORTENED if self._shortened(case) else CHECK_TOKENS))

    def _warm_up(self, backend: _Loaded) -> None:
        """Run until two runs agree: on a CPU short ones as that of the check, which is the first."""
        # On a GPU as long as the timed ones: graphs are captured, and code is compiled, for each sequence length.
        on_cpu = backend.case.device == "cpu"
        seconds = [backend.checked_sec] if on_cpu else []
        shape = _shorter(backend.case, CHECK_TOKENS) if on_cpu else backend.case
        while len(seconds) < self._options.max_warmups and sum(seconds) < WARM_UP_SEC and not is_steady(seconds):
            seconds.append(backend.worker.run(shape).times.total_sec)

    def _time_round(self, backend: _Loaded, i: int) -> None:
        """Run a backend once and keep its times."""
        start = self._clock()
        with self._step(backend.row, f"round {i + 1} of {self._options.rounds}"):
            backend.rounds.append(self._timed(backend.worker, backend.row, i))
        backend.timed_sec += self._clock() - start

    def _timed(self, worker: WorkerProcess, row: Row, round_index: int) -> RunTimes:
        case = row.case

        def run(shape: Case, seed: int = 0) -> RunResult:
            result = worker.run(shape, seed)
            row.peak_memory_bytes = result.peak_memory_bytes
            return result

        if self._shortened(case):
            count = NUM_LENGTHS if case.output_tokens > 64 else NUM_LENGTHS_SHORT
            row.note = f"extrapolated from its time at {count} lengths"
            seconds = naive_token_times(
                lambda length: run(replace(case, prompt_tokens=length, output_tokens=1)).times.ttft_sec,
                case.prompt_tokens, case.output_tokens, self._config.block_size, count,
            )  # fmt: skip
            return RunTimes(case.prompt_tokens * case.batch, [list(accumulate(seconds))] * case.batch)
        result = run(case, seed=round_index if self._options.vary_prompts else 0)
        if result.speculation is not None:
            add_speculation(row, result.speculation)
        return result.times

    def _shortened(self, case: Case) -> bool:
        """Return whether a naive case would take too long, by the arithmetic, which never overestimates the time."""
        if case.backend not in NAIVE or case.workload in IRREGULAR:
            return False
        cost = arithmetic.prefill(self._config, FORMATS[case.dtype]).model
        flops = cost.flops(case.batch, case.mean_length(self._config.block_size))
        peaks = self._ceiling.flops_per_sec
        fastest = peaks.get(case.dtype) or max(peaks.values())
        return flops / fastest * case.output_tokens > NAIVE_LIMIT_SEC


def _shorter(case: Case, output_tokens: int) -> Case:
    """Return a case with at most so many output tokens, and as many sequences as CHECK_PROMPT_TOKENS allow."""
    batch = min(case.batch, max(2, CHECK_PROMPT_TOKENS // case.prompt_tokens))
    return replace(case, batch=batch, output_tokens=min(output_tokens, case.output_tokens))


def _reference_of(case: Case, reference: Case | None) -> Case | None:
    """Return the case whose greedy tokens a case must repeat; None if there is none.

    A draft, a shared prefix or smaller steps must not change a token, also in few bits where rows do not depend on the
    batch, as those of `native`.
    """
    if _is_exact(case):
        return reference
    exact_rows = case.sampler == "greedy" and case.backend == "native"
    return case.plain if case != case.plain and exact_rows else None


def _is_exact(case: Case) -> bool:
    return case.dtype == "float32" and case.quantization is None and case.sampler == "greedy"


def _difference(run: list[list[int]], expected: list[list[int]]) -> str | None:
    """Return where sequences, which may be shorter, first differ from the expected ones; None if nowhere."""
    for i, (a, b) in enumerate(zip(run, expected, strict=True)):
        for t, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"token {t} of sequence {i} is {x}, the reference's is {y}"
    return None
