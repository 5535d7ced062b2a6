"""Forks, exits and threads that cannot be created. Each runs in a process of its own, within a time limit.

A model is loaded in a child of a process whose torch had already computed on several threads, and so on: nothing may
hang, nothing may abort.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from helpers.models import make_limits, make_model, refuses
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.devices import resolve_device
from nanoinfer.engines.dynamic import DynamicEngine
from nanoinfer.utils import processes

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.skipif("NANOINFER_TEST_EXTENSION" in os.environ, reason="a new process has the installed extension"),
]

PREPARE = """
import multiprocessing, os, signal, sys, threading, time
import torch
from nanoinfer import LLM, NanoinferError, SamplingParams
torch.set_num_threads(2)
params = SamplingParams(max_tokens=3, temperature=0)
options = {"engine": sys.argv[2], "max_num_seqs": 2} | ({"threads": int(sys.argv[3])} if len(sys.argv) > 3 else {})
def load():
    return LLM(sys.argv[1], **options)
def tokens(llm):
    return llm.generate("Go", params)[0].outputs[0].token_ids
def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        try:
            os._exit(work())
        except BaseException as e:
            print(type(e).__name__, e, file=sys.stderr, flush=True)
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
(torch.randn(600, 600) @ torch.randn(600, 600)).to(torch.bfloat16)  # torch's threads are running
"""
LOADED = PREPARE + "llm = load(); expected = tokens(llm)\n"
FORKS = """
assert in_child(lambda: tokens(llm) != expected) == 0, "the parent's engine"
assert in_child(lambda: tokens(load()) != expected) == 0, "an engine of its own"
assert in_child(lambda: in_child(lambda: tokens(llm) != expected)) == 0, "the child of a child"
def work():
    global llm
    new = load()
    del new
    same = tokens(llm) == expected
    del llm
    return not same
assert in_child(work) == 0, "its own dropped, then the parent's"
def work(queue):
    queue.put((tokens(llm), tokens(load())))
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=work, args=(queue,))
child.start()
assert queue.get(timeout=100) == (expected, expected)
child.join(20)
assert child.exitcode == 0
assert tokens(llm) == expected
"""
FIRST = PREPARE + "assert in_child(lambda: len(tokens(load())) != 3) == 0"
ENGINES = [("native", "1"), ("native", "2"), ("static",), ("paged",), ("dynamic",), ("recompute",)]


def run(script: str, *arguments: str, limit: float = 120) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, timeout=limit
    )
    assert done.returncode == 0, done.stderr
    return done


def need(engine: str) -> None:
    if engine == "native":
        pytest.importorskip("nanoinfer._native", reason="the native extension is not built")


# Forks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES, ids=" ".join)
@pytest.mark.slow_if(lambda engine: engine != ("native", "2"))
@pytest.mark.nightly_if(lambda engine: engine not in (("native", "2"), ("static",)))
def test_forked_children_generate(engine: tuple[str, ...], tiny_folder: Path) -> None:
    need(engine[0])
    done = run(LOADED + FORKS, str(tiny_folder), *engine)
    warnings = done.stderr.count("PyTorch computes with one thread")
    assert warnings == (0 if engine[0] == "native" else 3)  # one for each child that loads


@pytest.mark.parametrize("engine", ["native", "static"])
@pytest.mark.slow
def test_a_forked_child_loads_the_first_model(engine: str, tiny_folder: Path) -> None:
    need(engine)
    run(FIRST, str(tiny_folder), engine)


@pytest.mark.nightly  # nothing is in the compiler's cache: a minute on one core
def test_forked_children_compile(tiny_folder: Path, tmp_path: Path) -> None:
    """With nothing in the compiler's cache: its workers are threads and processes of the parent's."""
    env = f"import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path / 'cache')!r}\n"
    uses = "\n".join(FORKS.strip().splitlines()[:2])
    run(env + LOADED + uses, str(tiny_folder), "compiled", limit=300)


BUSY = """
def work():
    try:
        return 0 if tokens(llm) == expected else 9
    except NanoinferError as e:
        return 7 if "forked" in str(e) and chr(10) not in str(e) else 8
def generate():
    while True:
        llm.generate("Go", SamplingParams(max_tokens=20))
threading.Thread(target=generate, daemon=True).start()
outcomes = set()
for _ in range(6):
    time.sleep(0.01)
    start = time.monotonic()
    outcomes.add(in_child(work))
assert outcomes <= {0, 7}, outcomes
assert in_child(lambda: tokens(load()) != expected) == 0
"""


@pytest.mark.parametrize("engine", [("native", "1"), ("native", "2"), ("static",)], ids=" ".join)
@pytest.mark.slow
@pytest.mark.nightly_if(lambda engine: engine == ("native", "1"))
def test_a_fork_within_another_threads_step_works_or_is_an_error(engine: tuple[str, ...], tiny_folder: Path) -> None:
    need(engine[0])
    run(LOADED + BUSY, str(tiny_folder), *engine)


def test_a_gpu_does_not_pass_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DynamicEngine(make_model(), make_limits())
    assert engine.survives_fork
    engine.survives_fork = False  # as on a GPU
    batch = StepBatch()
    batch.add(engine.open(), [1])
    engine.extend(batch)
    monkeypatch.setattr(processes, "_generation", 1)
    refuses(lambda: engine.extend(batch), "forked", "spawn")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == "cpu"  # a CUDA build of PyTorch on a machine without a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("auto", "cuda", "cuda:0"):
        refuses(lambda name=name: resolve_device(name), f"device={name!r}", "forked", "spawn", "device=cpu")  # type: ignore[misc]
    assert resolve_device("cpu") == "cpu"


# The end of the interpreter -----------------------------------------------------------------------------------

DAEMON = """
llm = None if os.environ["WAIT"] == "0" else load()
def generate():
    while True:
        (llm or load()).generate(["Go", "A rose"], SamplingParams(max_tokens=20))
for _ in range(2):
    threading.Thread(target=generate, daemon=True).start()
time.sleep(float(os.environ["WAIT"]) or 0.02)
print(time.monotonic(), flush=True)
"""


@pytest.mark.parametrize("engine", ENGINES[:-1], ids=" ".join)
@pytest.mark.slow
@pytest.mark.nightly_if(lambda engine: engine != ("native", "1"))
def test_daemon_threads_that_generate_do_not_disturb_the_exit(
    engine: tuple[str, ...], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(engine[0])
    for wait in ("0", "0.01", "0.1"):  # 0: while they load
        monkeypatch.setenv("WAIT", wait)
        done = run(PREPARE + DAEMON, str(tiny_folder), *engine)
        assert done.stderr == ""
        assert time.monotonic() - float(done.stdout) < processes.EXIT_WAIT_SEC  # no step lasts long here


def test_the_exit_waits_for_a_step_and_lets_no_other_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, log = processes.step_lock(), []
    inside = threading.Event()

    def work() -> None:
        while True:  # as a thread that generates: the lock is asked for again as soon as it is released
            processes.wait_if_exiting()
            with lock:
                log.append("begin")
                inside.set()
                while not processes._is_exiting:  # the step in which the exit begins, however late that is
                    time.sleep(0.001)
                time.sleep(0.1)
                log.append("end")

    monkeypatch.setattr(processes, "_locks", [weakref.ref(lock)])
    monkeypatch.setattr(processes, "_is_exiting", False)
    threading.Thread(target=work, daemon=True).start()
    inside.wait()
    processes._at_exit()
    at_exit = log.copy()
    assert at_exit == ["begin", "end"]
    assert processes.is_exiting()  # the main thread may go on, without the lock
    with processes.computing():
        pass
    time.sleep(0.05)
    assert log == at_exit


def test_a_forked_child_has_one_thread_of_torch_and_another_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_generation", 0)
    threads = torch.get_num_threads()
    try:
        processes._after_fork_in_child()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert processes.generation() == 1


# Threads that cannot be created ---------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from nanoinfer import LLM, NanoinferError, SamplingParams
LLM(sys.argv[1], engine="native", threads=1)
with open("/proc/self/statm") as f:
    size = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (512 << 20), size + (512 << 20)))
for _ in range(2):
    try:
        LLM(sys.argv[1], engine="native", threads=1024, max_num_seqs=1)
    except NanoinferError as e:
        print(e)
print(len(LLM(sys.argv[1], engine="native", threads=2, max_num_seqs=1).generate("Go")[0].outputs[0].token_ids))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_threads_that_cannot_be_created_are_an_error(tiny_folder: Path) -> None:
    need("native")
    *errors, number = run(LIMITED, str(tiny_folder)).stdout.splitlines()
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("engine=native: threads=1024: only ")
        assert 0 <= int(error.split("only ")[1].split(" threads")[0]) < 1023
        assert "use a smaller threads=N" in error
    assert int(number) > 0
