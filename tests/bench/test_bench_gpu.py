"""What the benchmark does on a GPU, shown with stand-ins where there is none: counts, memory, devices, the suite."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch

from helpers.models import TINY, make_folder, make_limits, make_model, refuses
from nanoinfer import LLM
from nanoinfer.bench import machine, model_folders, results, worker
from nanoinfer.bench import run as running
from nanoinfer.bench.case import Case, Row, RunTimes, summarize
from nanoinfer.bench.harness import Harness
from nanoinfer.bench.run import Plan, run
from nanoinfer.bench.suites import GPU_LARGE, SUITES, Options
from nanoinfer.bench.worker import Processes, RunResult, WorkerProcess
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.static import StaticEngine
from nanoinfer.errors import NanoinferError
from nanoinfer.models.presets import PRESETS
from nanoinfer.profiling import profiler
from nanoinfer.profiling.checks import require_close, verify_ratio
from nanoinfer.roofline import ceilings as measuring
from nanoinfer.roofline.ceilings import Ceiling, Workload, measure
from nanoinfer.utils.progress import ProgressBar

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CEILING = Ceiling("here", 3e12, {"float32": 5e13, "bfloat16": 7e14}, "test")
FIGURES = summarize([RunTimes(4, [[0.1, 0.2, 0.3]])])
ON_GPU = Case("static", "m", "bfloat16", prompt_tokens=4, output_tokens=4, device="cuda:0")


# Launches --------------------------------------------------------------------------------------------------


def event(name: str, device: str = "CUDA", is_user_annotation: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), is_user_annotation=is_user_annotation)


def two_steps() -> Iterator[SimpleNamespace]:
    """Three layers of two kernels, one kernel of the head that shares a name with them, one graph and one launch."""
    for _step in range(2):
        for _layer in range(3):
            yield event("gemm<bf16>")
            yield event("attention")
        yield event("gemm<bf16>")
        yield event("Memcpy DtoH (Device -> Pinned)")
        yield event("Memset (Device)")
        yield event("nanoinfer: attention", is_user_annotation=True)
        for name in ("cudaGraphLaunch", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize", "aten::mm"):
            yield event(name, "CPU")


def test_kernels_and_launches_of_a_step() -> None:
    made = profiler.count(list(two_steps()), num_steps=2, n_layer=3)
    assert made == profiler.Launches(kernels_per_step=7.0, kernels_per_layer=2, launches_per_step=2.0)


def test_kernels_that_nobody_saw_are_unknown_and_not_zero() -> None:
    hidden = [e for e in two_steps() if e.device_type.name == "CPU"]
    assert profiler.count(hidden, 2, 3) is None
    assert profiler.count([], 0, 3) is None


def test_what_is_a_launch() -> None:
    for name in ("LaunchKernel", "LaunchKernelEx", "LaunchCooperativeKernel", "GraphLaunch"):
        assert all(profiler.is_launch(event(prefix + name, "CPU")) for prefix in ("cu", "cuda"))
        assert not profiler.is_launch(event(f"cuda{name}"))
    for name in ("cudaLaunchHostFunc", "cudaGraphInstantiate", "my_cudaLaunchKernel"):
        assert not profiler.is_launch(event(name, "CPU"))


def test_a_cpu_launches_no_kernels(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), engine="static", device="cpu")
    refuses(lambda: profiler.measure_launches(llm), "device='cpu' launches no kernels")


@pytest.mark.gpu
@GPU
def test_launches_are_counted_on_a_gpu(tiny_folder: Path) -> None:
    made = profiler.measure_launches(LLM(str(tiny_folder), engine="static", device="cuda"), batch=2, prompt_tokens=4)
    assert made.kernels_per_layer >= 4
    assert made.kernels_per_step >= TINY.n_layer * made.kernels_per_layer + 1
    assert made.launches_per_step >= 0.9 * made.kernels_per_step  # no graphs: one each


# Verifying -------------------------------------------------------------------------------------------------


class Timed:
    """An engine whose steps take a time of their own by a clock that stands still otherwise."""

    def __init__(self, sec: dict[int, float]) -> None:
        self.inner = StaticEngine(make_model(), make_limits())
        self.now, self._sec = 0.0, sec
        self.steps: list[tuple[int, int]] = []

    def extend(self, batch: StepBatch) -> torch.Tensor:
        self.steps.append((batch.num_new[0], batch.num_logits[0]))
        self.now += self._sec.get(batch.num_new[0], 9.0)
        return self.inner.extend(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_the_verify_ratio_is_of_steps_at_the_same_length() -> None:
    engine = Timed({1: 0.25, 5: 0.375})
    text = [1, 2, 3, 4, 5, 6, 7]
    assert verify_ratio(engine, text, clock=lambda: engine.now) == 1.5  # type: ignore[arg-type]
    assert engine.steps[0] == (7, 0)
    assert set(engine.steps[1:]) == {(1, 1), (5, 5)}
    assert engine.steps[1:].count((1, 1)) == engine.steps[1:].count((5, 5))
    engine.inner.open()  # nothing of the measurement is open: all sampler_slots are free
    assert len(engine.inner._lengths) == 1


def test_verifying_needs_a_text_and_a_clock() -> None:
    engine = Timed({})
    refuses(lambda: verify_ratio(engine, [1, 2], clock=lambda: 0.0), "prompt_tokens=2")  # type: ignore[arg-type]
    refuses(lambda: verify_ratio(engine, [1] * 7, clock=lambda: 0.0), "0.0 s by the clock")  # type: ignore[arg-type]
    assert not engine.inner._lengths


def test_a_worker_verifies(tiny_folder: Path) -> None:
    with WorkerProcess(Case("native", "m", prompt_tokens=8, output_tokens=4)) as one:
        one.load(tiny_folder)
        assert 0.1 < one.ask("verify") < 20
        refuses(lambda: one.ask("launches"), "launches no kernels")


@pytest.mark.nightly
def test_workers_write_the_logits_of_the_last_tokens_of_their_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    """`dynamic` in float32 as expected; `static` in bfloat16 close to it, with other weights not."""
    other = make_folder(tmp_path / "other", seed=1)
    found = []
    case = Case("static", "m", batch=3, prompt_tokens=8, output_tokens=4)
    for changes, folder in (({"backend": "dynamic"}, tiny_folder), ({"dtype": "bfloat16"}, tiny_folder), ({}, other)):
        with WorkerProcess(replace(case, **changes)) as one:
            one.load(folder)
            one.ask("logits", path=str(tmp_path / "logits.npy"))
            found.append(np.load(tmp_path / "logits.npy"))
    expected, close, far = found
    assert expected.shape == (2, 4, TINY.vocab_size)
    require_close(close[:1], expected, "int8")
    refuses(lambda: require_close(far, expected, "int4"), "not timed: its logits differ from float32's by")


# Memory ----------------------------------------------------------------------------------------------------


def test_memory_of_a_gpu_is_torchs_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def peak(device: str) -> int:
        asked.append(device)
        return 7 << 20

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert worker.peak_memory("cuda:1") == 7 << 20
    assert asked == ["cuda:1"]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)  # another allocator
    assert worker.peak_memory("cuda:0") is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # asking would start CUDA
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: pytest.fail("asked"))
    assert worker.peak_memory("cuda:0") is None
    assert (worker.peak_memory("cpu") or 0) > 50 << 20


def test_parts_fit_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PRESETS["gpt2"]
    made = Harness(tmp_path, config, CEILING, Options(), ProgressBar("bench", False))
    large = replace(ON_GPU, model="random:gpt2", batch=512, prompt_tokens=32, output_tokens=64)
    group = [replace(large, backend=name) for name in ("static", "recompute", "transformers-dynamic")]
    group.append(replace(group[-1], draft="prompt-lookup"))
    cache = 512 * 1024 * 36_864  # whole slots in bfloat16
    free = {"cpu": 100 << 30, "cuda:0": 100 << 30}
    monkeypatch.setattr("nanoinfer.bench.harness.free_memory", free.__getitem__)
    assert cache < made._memory_bytes(large) < cache + (2 << 30)
    assert made._parts(group) == [group]
    free["cuda:0"] = 3 * cache  # 5/6 of it hold two
    assert made._parts(group) == [group[:2], group[2:]]
    free["cpu"] = 1  # each too large: a part of its own, with its drafts
    assert made._parts(group) == [group[:1], group[1:2], group[2:]]
    on_cpu = [replace(c, device="cpu") for c in group]
    assert made._memory_bytes(on_cpu[0]) < (1 << 30) + 512 * 96 * 2 * 36_864  # 96 tokens of each sequence
    free["cpu"] = 20 << 30
    assert made._parts(on_cpu) == [on_cpu]


# Devices ---------------------------------------------------------------------------------------------------


class Seen(Exception):
    """Raised by a stand-in to end a run where the test has seen enough."""


def test_the_device_asked_for_reaches_ceiling_and_cases(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    """cuda:1 is not cuda:0: the second device was measured against the first's ceiling, on the first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cases: list[Case] = []
    original = running._cases

    def keep(*args: Any) -> list[Case]:
        cases.extend(original(*args))
        return cases

    def stop(*args: Any, device: str, **kwargs: Any) -> Ceiling:
        raise Seen(device)

    monkeypatch.setattr(running, "_cases", keep)
    monkeypatch.setattr(machine, "describe_machine", lambda device: {})
    monkeypatch.setattr(measuring, "measure", stop)
    for asked, is_ in (("cuda:1", "cuda:1"), ("cuda", "cuda:0"), ("auto", "cuda:0"), ("cpu", "cpu")):
        cases.clear()
        with pytest.raises(Seen, match=is_):
            run(Plan(model=str(tiny_folder), engine=("static",), device=asked), "test", log=lambda _: None)
        assert {c.device for c in cases} == {is_}


def test_passages_are_made_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path) -> None:
    def stop(model: str, device: str = "auto") -> None:
        raise Seen(f"{model} on {device}")

    monkeypatch.setattr("nanoinfer.entrypoints.llm.LLM", stop)
    with pytest.raises(Seen, match="shakespeare on cpu"):
        model_folders.write_passages(tmp_path, "wide:shakespeare:gpt2", None)


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H100", total_memory=80 << 30, L2_cache_size=50 << 20, multi_processor_count=132, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    described = machine.describe_machine("cuda:1")
    said = described["gpu_details"]
    assert described["gpu"] == "NVIDIA H100"
    assert (said["capability"], said["multiprocessors"]) == ("9.0", 132)


# The ceiling of a GPU --------------------------------------------------------------------------------------


def test_copies_are_timed_between_waits_and_count_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is empty at every reading of the clock; a round is all of its copies; the median round counts."""
    log: list[str] = []
    took = iter([100.0, 4.0, 8.0, 6.0])  # not timed; then three rounds
    now = [0.0]

    def clock() -> float:
        log.append("clock")
        return now[0]

    def wait(device: str) -> None:
        log.append("wait")
        if log.count("copy") and log[-2] == "copy":
            now[0] += next(took)

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    workload = Workload(num_bytes=1 << 12, matrix_size=8, num_rounds=3, num_copies=2)
    seconds = measuring._seconds(lambda: log.append("copy"), "cuda:0", workload, clock)
    assert seconds == 6.0 / 2
    assert log == ["wait", "clock", "copy", "copy", "wait", "clock"] * 4

    monkeypatch.setattr(measuring, "_seconds", lambda call, *rest: call() is None or 0.5)
    monkeypatch.setattr(torch, "ones", lambda n, device: torch.zeros(n))
    assert measuring._copy_bandwidth("cuda:0", workload, clock) == 2 * (1 << 12) / 0.5


@pytest.mark.gpu
@GPU
def test_a_gpu_copies_at_most_what_its_data_sheet_says() -> None:
    reserved = torch.cuda.memory_reserved()
    ceiling = measure(device="cuda:0")
    assert 1e11 < ceiling.bandwidth_bytes_per_sec < 1e13
    # What stays are workspaces of cuBLAS, 32 MiB for each handle and stream; the buffers had 1 GiB.
    assert torch.cuda.memory_reserved() - reserved < 256 << 20


# The harness -----------------------------------------------------------------------------------------------


class FakeHandle:
    """Answers as a worker on a GPU would."""

    log_weight: ClassVar[dict[str, float]] = {}
    """Weight format -> logit of token 0; the others are 0."""
    waited_sec: ClassVar[float | None] = None

    def __init__(self, case: Case, log: list[tuple[str, Any]]) -> None:
        self.case, self._log = case, log

    def run(self, case: Case, seed: int = 0) -> RunResult:
        fields = ("output_tokens", "prompt_tokens", "draft")
        self._log.append(("run", {f: getattr(case, f) for f in fields if getattr(case, f) != getattr(self.case, f)}))
        tokens = case.output_tokens
        times = RunTimes(4, [[0.1 * (i + 1) for i in range(tokens)]], self.waited_sec)
        return RunResult([[1] * tokens], times, peak_memory_bytes=100)

    def ask(self, what: str, path: str = "") -> Any:
        self._log.append((what, None))
        if what == "logits":
            logits = np.zeros((self.case.batch, 4, 8))
            logits[..., 0] = self.log_weight.get(self.case.format, 0.0)
            return np.save(path, logits)
        if what == "launches" and self.case.backend == "dynamic":
            raise NanoinferError("torch's profiler saw no kernel")
        return {
            "launches": {"kernels_per_step": 60.0, "kernels_per_layer": 5, "launches_per_step": 1.0}, "verify": 1.08
        }[what]  # fmt: skip


class FakeProcesses:
    """Stands for `worker.Processes`."""

    log: list[tuple[str, Any]]

    def __init__(self, weights: Path, pythons: object = None) -> None:
        pass

    def __enter__(self) -> FakeProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def worker(self, case: Case) -> FakeHandle:
        return FakeHandle(case, self.log)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The harness with stand-ins for processes and for a GPU's memory; returns what they were asked."""
    FakeProcesses.log = []
    monkeypatch.setattr("nanoinfer.bench.harness.Processes", FakeProcesses)
    monkeypatch.setattr("nanoinfer.bench.harness.free_memory", lambda device: 60 << 30)
    return FakeProcesses.log


def harness(tmp_path: Path, options: Options, clock: Any = time.perf_counter) -> Harness:
    return Harness(tmp_path, TINY, CEILING, options, ProgressBar("bench", False), clock)


def measured(harness: Harness, cases: list[Case]) -> list[Row]:
    """Return the last row of each case."""
    rows: dict[Case, Row] = {}
    harness.run(cases, lambda some: rows.update({row.case: row for row in some}))
    return [rows[case] for case in cases if case in rows]


@pytest.mark.parametrize("waited, note", [(0.01, ""), (2.0, "the machine was busy: threads waited 4.0 s for a core")])
def test_a_row_says_that_the_machine_was_busy(
    waited: float, note: str, tmp_path: Path, log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHandle, "waited_sec", waited)
    (row,) = measured(harness(tmp_path, Options(rounds=2, max_warmups=2)), [replace(ON_GPU, output_tokens=8)])
    assert row.note == note


def test_a_row_of_a_gpu_has_its_counts_and_memory(tmp_path: Path, log: list[tuple[str, Any]]) -> None:
    cases = [ON_GPU, replace(ON_GPU, backend="dynamic"), replace(ON_GPU, backend="vllm")]
    rows = measured(harness(tmp_path, Options(rounds=1, max_warmups=2, verify=True)), cases)
    static, dynamic, loop = rows
    assert not any(row.unfinished for row in rows)
    assert [r.error for r in rows] == [None] * 3
    assert (static.kernels_per_step, static.kernels_per_layer, static.launches_per_step) == (60.0, 5, 1.0)
    assert static.peak_memory_bytes == 100
    assert static.verify_ratio == 1.08
    assert (dynamic.kernels_per_step, dynamic.note) == (None, "launches unknown: torch's profiler saw no kernel")
    assert (loop.kernels_per_step, loop.verify_ratio) == (None, None)  # a peer is not asked


def test_on_a_gpu_warm_ups_are_as_long_as_what_is_timed(tmp_path: Path, log: list[tuple[str, Any]]) -> None:
    case = replace(ON_GPU, output_tokens=40)
    harness(tmp_path, Options(rounds=1)).run([case], lambda rows: None)
    runs = [shape for what, shape in log if what == "run"]
    assert runs == [{}, {"output_tokens": 16}, {}, {}, {}]  # compilation, the check, two equal warm-ups, one round
    log.clear()
    harness(tmp_path, Options(rounds=1)).run([replace(case, device="cpu")], lambda rows: None)
    runs = [shape for what, shape in log if what == "run"]
    assert runs == [{"output_tokens": 16}, {"output_tokens": 16}, {}]


def test_when_the_time_is_over_nothing_new_begins(tmp_path: Path, log: list[tuple[str, Any]]) -> None:
    ticks = iter(range(10_000))

    def clock() -> float:
        return float(next(ticks))

    cases = [replace(ON_GPU, batch=b) for b in (1, 2, 4, 8, 16, 32)]
    rows = measured(harness(tmp_path, Options(rounds=1, budget_sec=15.0), clock), cases)
    assert 1 <= len(rows) < 6
    assert [r.case for r in rows] == cases[: len(rows)]
    assert all(r.figures is not None for r in rows)  # what had begun was finished
    assert measured(harness(tmp_path, Options(rounds=1, budget_sec=0.0), clock), cases) == []


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_in_few_bits_are_compared_before_anything_is_timed(tmp_path: Path, log: list[tuple[str, Any]]) -> None:
    half, int8, int4 = (replace(ON_GPU, backend="triton", quantization=q) for q in (None, "int8", "int4"))
    peer = replace(ON_GPU, backend="transformers-dynamic")
    weights = {"bfloat16": 0.01, "int8": 0.5, "int4": math.nan}
    with patch.object(FakeHandle, "log_weight", weights):
        rows = measured(harness(tmp_path, Options(rounds=1, verify=True)), [half, int8, int4, peer])
    assert [row.error for row in rows] == [
        None,
        "not timed: its logits differ from float32's by 0.015 nats per token, the limit is 0.002",
        "not timed: its logits differ from float32's by nan nats per token, the limit is 0.05",
        None,
    ]
    assert [row.figures is None for row in rows] == [False, True, True, False]
    assert [what for what, _ in log if what in ("logits", "verify")] == ["logits"] * 4 + ["verify"]  # and float32's
    log.clear()
    measured(harness(tmp_path, Options(rounds=1, verify=True)), [half])
    assert [what for what, _ in log].count("logits") == 1  # float32's are kept with the weights


def test_rows_are_kept_after_every_round(tmp_path: Path, log: list[tuple[str, Any]]) -> None:
    cases = [ON_GPU, replace(ON_GPU, backend="dynamic")]
    seen: list[list[tuple[str, int, bool]]] = []

    def keep(rows: list[Row]) -> None:
        seen.append([(row.case.backend, len(row.round_sec or ()), row.unfinished) for row in rows])

    harness(tmp_path, Options(rounds=2)).run(cases, keep)
    assert seen == [
        [],
        [("static", 1, True), ("dynamic", 1, True)],
        [("static", 2, True), ("dynamic", 2, True)],
        [("static", 2, False), ("dynamic", 2, True)],
        [("static", 2, False), ("dynamic", 2, False)],
    ]


def test_backends_that_take_no_turns_are_kept_one_by_one(
    tmp_path: Path, log: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = [replace(ON_GPU, backend=name, dtype="float32") for name in ("static", "cuda_graph", "triton")]
    loaded, seen = [], []
    monkeypatch.setattr(FakeProcesses, "worker", lambda self, c: loaded.append(c.backend) or FakeHandle(c, log))

    def keep(rows: list[Row]) -> None:
        seen.append((loaded[-1], [(row.case.backend, row.same_tokens, row.unfinished, row.note) for row in rows]))

    harness(tmp_path, Options(rounds=1, together=False)).run(exact[1:], keep, exact)
    assert loaded == ["cuda_graph", "static", "triton"]  # the reference, which was measured before, is loaded once
    assert [kept for at, kept in seen if at == "triton"][-1] == [("triton", True, False, "")]
    assert [kept for at, kept in seen if at == "static"][-1] == [("cuda_graph", True, False, "")]


def test_a_process_that_cannot_be_loaded_raises_its_reason_each_time(tiny_folder: Path) -> None:
    good, bad = Case("native", "m", output_tokens=4, prompt_tokens=4), Case("warp", "m")
    with Processes(tiny_folder) as processes:
        assert len(processes.worker(good).run().tokens[0]) == 4
        for _ in range(2):
            refuses(lambda: processes.worker(bad), "engine='warp' is unknown")


def test_a_worker_that_hangs_on_a_gpu_is_ended(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    monkeypatch.setattr(worker, "GPU_ANSWER_SEC", 0.01)
    with WorkerProcess(replace(ON_GPU, device="cuda:0")) as one:
        os.kill(one._process.pid, signal.SIGSTOP)  # it answers nothing, however slow this machine is
        refuses(lambda: one.load(tiny_folder), "gave no answer in 0 s, and was ended")
        refuses(one.run, "its process was killed")


# The suite, and how it is shown ----------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_suite_is_one_line() -> None:
    refuses(
        lambda: run(Plan(suite=("gpu",)), "test", log=lambda _: pytest.fail("it began to measure")),
        "suite='gpu' measures a CUDA device",
        "device='cpu'",
    )


@pytest.mark.parametrize("quick", [False, True])
def test_the_suite_measures_every_target(quick: bool) -> None:
    cases = SUITES["gpu"].cases("random:gpt2", PRESETS["gpt2"], [], quick)
    assert len(set(cases)) == len(cases)
    have = {(c.backend, c.model, c.batch, c.dtype, c.quantization) for c in cases}
    for model in ("random:gpt2", GPU_LARGE):
        for rung in ("cuda_graph", "triton"):
            assert (rung, model, 1, "bfloat16", None) in have
        assert ("transformers-dynamic", model, 1, "bfloat16", None) in have
        assert {("triton", model, 1, "bfloat16", q) for q in ("int8", "int4")} <= have
    assert {(name, "random:gpt2", 512, "bfloat16", None) for name in ("static", "cuda_graph")} <= have
    exact = {c.backend for c in cases if c.dtype == "float32" and c.batch == 1}
    assert {"static", "cuda_graph", "triton"} <= exact  # their tokens are compared before they are timed
    if not quick:
        assert {c.batch for c in cases if c.model == "random:gpt2"} == {1, 8, 64, 512}
        assert {c.dtype for c in cases if c.backend == "transformers-static"} == {"float32", "bfloat16", "float16"}
        assert {"recompute", "compiled", "transformers-static"} <= exact


def test_a_full_run_continues_a_quick_one() -> None:
    quick, full = (SUITES["gpu"].cases("random:gpt2", PRESETS["gpt2"], [], quick) for quick in (True, False))
    assert set(quick) < set(full)
    small = {c.backend for c in quick if c.model == "random:gpt2" and c.batch == 1}
    assert {"compiled", "transformers-static"} <= small


def gpu_results() -> results.Results:
    row = Row(replace(ON_GPU, model="random:gpt2"), FIGURES, True, 1 << 30, mbu_percent=50.0)
    row.kernels_per_step, row.kernels_per_layer, row.launches_per_step, row.verify_ratio = 63.0, 5, 2.0, 1.25
    other = Row(replace(ON_GPU, backend="dynamic", model=GPU_LARGE), FIGURES)
    return results.Results(
        "gpu", "static", "2026-01-01", None, "nanoinfer bench", {"gpu": "H100", "gpu_details": {"cuda": "1"}},
        {}, {"read_bytes_per_sec": 3e12, "flops_per_sec": {"bfloat16": 7e14}, "source": "copies"}, [row, other],
    )  # fmt: skip


def shown(made: results.Results) -> str:
    from rich.console import Console  # a GPU's machine may lack it, which has tests of its own in this file

    from nanoinfer.bench import table

    out = StringIO()
    table.show(made, Console(file=out, width=170))
    return out.getvalue()


def test_counts_are_in_table_and_file() -> None:
    made = gpu_results()
    text = shown(made)
    assert "ceiling of H100: copies 3,000 GB/s, read and written" in text
    words = [line.split() for line in text.splitlines()]
    head = next(w for w in words if w[:1] == ["backend"])
    line = next(w for w in words if w[:2] == ["static", "bfloat16"])
    at = head.index("kernels") + 1  # a label has two words
    assert head[at - 1 : at + 3] == ["kernels", "launches", "verify", "a"]
    assert line[at : at + 4] == ["63.0", "2.00", "1.25", "5.00"]
    assert "of a decode step" in text
    assert "1,074" in line  # MB
    assert "gpt2-xl, batch 1, 4+4 tokens" in " ".join(text.split())
    again = results.from_json(results.to_json(made), "here")
    assert [r.case for r in again.rows] == [r.case for r in made.rows]
    assert (again.rows[0].kernels_per_step, again.rows[0].verify_ratio) == (63.0, 1.25)


def test_models_are_written_once_and_random_ones_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nanoinfer.checkpoints import load

    made: list[str] = []
    original = load.load_model
    monkeypatch.setattr(load, "load_model", lambda model: made.append(model) or original("shakespeare"))
    for _ in range(2):
        with model_folders.ModelFolders(None, lambda _: None, tmp_path / "kept") as models:
            names = ("random:gpt2", "shakespeare", "random:gpt2", "shakespeare")
            kept, other, *again = [models.folder([Case("static", name)]) for name in names]
            assert again == [kept, other]
    assert made == ["random:gpt2", "shakespeare", "shakespeare"]
    assert kept == tmp_path / "kept" / "random-gpt2"
    assert (kept / "model.safetensors").exists()
    assert not other.exists()


def written_figures(made: results.Results) -> list[object]:
    """Return the figures of each row as the file holds them: rounded."""
    return [row.get("figures") for row in json.loads(results.to_json(made))["rows"]]


@pytest.mark.usefixtures("quick_ceiling")
def test_minutes_are_checked_and_resume_goes_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(lambda: Plan(minutes=0.0), "minutes=0.0")
    said: list[str] = []
    plan = Plan(model=str(tiny_folder), engine=("native",), output_tokens=(4,), rounds=1, output=tmp_path / "r.json")
    with monkeypatch.context() as patch:
        now = itertools.count(step=1.0)  # each look at the clock is a second later
        patch.setattr(running, "time", SimpleNamespace(monotonic=lambda: next(now)))
        (late,), _ = run(replace(plan, minutes=0.01), "test", log=said.append)
    assert late.rows == []
    assert "1 of 1 cases are left after 0.01 minutes: use --resume" in said[-1]
    (made,), _ = run(plan, "test", log=said.append)
    again = replace(plan, output=None, resume=tmp_path / "r.json", minutes=0.01)
    (kept,), _ = run(again, "test", log=said.append)
    assert written_figures(kept) == written_figures(made)


@pytest.mark.usefixtures("quick_ceiling")
def test_resuming_keeps_the_ceiling_and_failed_rows_but_not_unfinished_ones(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    plan = Plan(model=str(tiny_folder), engine=("native",), output_tokens=(4,), rounds=1, output=path)
    (made,), _ = run(plan, "test", log=lambda _: None)
    made.rows[0].error, made.rows[0].figures = "out of memory", None
    made.ceiling["read_bytes_per_sec"] = 123e9
    asked: list[list[Case]] = []

    def measure_again(self: Harness, cases: list[Case], keep: Any, suite: Any) -> None:
        asked.append(cases)
        if asked[1:]:  # the first is stopped
            keep([Row(case, FIGURES) for case in cases])

    monkeypatch.setattr(Harness, "run", measure_again)
    said: list[str] = []

    def resume(**options: Any) -> results.Results:
        path.write_text(results.to_json(made))
        (again,), _ = run(replace(plan, output=None, resume=path, minutes=9.0, **options), "test", log=said.append)
        assert results.to_json(results.read(path)) == results.to_json(again)
        return again

    again = resume()
    assert [row.error for row in again.rows] == ["out of memory"]
    assert again.ceiling["read_bytes_per_sec"] == 123e9
    assert asked == []
    made.rows[0].error, made.rows[0].figures, made.rows[0].unfinished = None, FIGURES, True
    again = resume()
    assert [row.unfinished for row in again.rows] == [True]  # kept until the case is measured
    assert "1 of 1 cases are left" in said[-1]
    assert [row.unfinished for row in resume().rows] == [False]
    made.rows[0] = Row(made.rows[0].case, error="out of memory")
    assert [row.error for row in resume(retry=True).rows] == [None]
    made.machine["cpu"] = "another"
    assert resume().ceiling["read_bytes_per_sec"] != 123e9


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ceiling")
def test_a_suite_of_two_models_runs_each_on_its_own_weights(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    other = make_folder(tmp_path / "other", replace(TINY, n_embd=8, block_size=16), seed=1)
    first = Case("static", str(tiny_folder), prompt_tokens=8, output_tokens=4)
    cases = [first, replace(first, backend="triton-9"), replace(first, model=str(other), prompt_tokens=4)]
    suite = replace(SUITES["gpu"], model=str(tiny_folder), device=None, cases=lambda *asked: cases)
    monkeypatch.setitem(SUITES, "gpu", suite)
    plan = Plan(suite=("gpu",), rounds=1, device="cpu", output=tmp_path / "r.json")
    (made,), _ = run(plan, "test", log=lambda _: None)
    assert [r.case.model for r in made.rows] == [str(tiny_folder), str(tiny_folder), str(other)]
    here, missing, there = made.rows
    assert "engine='triton-9' is unknown" in str(missing.error)
    assert (here.weight_bytes or 0) > (there.weight_bytes or 0) > 0
    assert here.kernels_per_step is None  # on a CPU
    assert (here.verify_ratio or 0) > 0.1
    assert there.verify_ratio is None
    assert there.note.startswith(
        "cost of verifying unknown: prompt_tokens=4 is not an integer >= 5"
    )  # its prompt has 4
    again = replace(plan, output=None, resume=tmp_path / "r.json")
    (kept,), _ = run(again, "test", log=lambda _: None)
    assert written_figures(kept) == written_figures(made)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["static", "recompute", "transformers-dynamic", "transformers-static"])
def test_on_a_gpu_backends_say_the_same_and_report_its_memory(tiny_folder: Path, name: str) -> None:
    """The whole way: a process of its own, its memory, its counts; in float32 the tokens of `dynamic` on the CPU."""
    if name.startswith("transformers"):
        pytest.importorskip("transformers", reason="transformers is an optional peer")
    case = Case(name, "m", batch=2, prompt_tokens=8, output_tokens=6, device="cuda:0")
    with Processes(tiny_folder) as processes:
        expected = processes.worker(replace(case, backend="dynamic", device="cpu")).run().tokens
        handle = processes.worker(case)
        made = handle.run()
        assert made.tokens == expected
        assert 0 < (made.peak_memory_bytes or 0) < 8 << 30
        if name == "static":
            assert handle.ask("launches")["kernels_per_step"] > TINY.n_layer
            assert 0.1 < handle.ask("verify") < 20
