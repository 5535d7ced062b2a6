"""Hooks and fixtures of all tests, and what must be set before the package is imported."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import io
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("helpers")  # before they are imported

from helpers.environment import HAS_TORCH, INTERPRETED, TESTS  # noqa: E402

if HAS_TORCH:
    import torch
if INTERPRETED:  # set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis") is not None:  # a failure is one of the change; test-nightly draws at random
    from hypothesis import settings

    settings.register_profile("random")
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")

os.fsync = lambda fd: None  # what a process has written outlives it: no test turns the power off

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; child processes would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

if folder := os.environ.get("NANOINFER_TEST_EXTENSION"):  # make asan: use this build of the extension
    (library,) = Path(folder).glob("_native*.so")
    spec = importlib.util.spec_from_file_location("nanoinfer._native", library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["nanoinfer._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nanoinfer._native"])

from helpers import interpreter  # noqa: E402
from helpers.models import Run, make_folder  # noqa: E402

if INTERPRETED:
    interpreter.leave_out_repeated_work()

USES_TORCH = re.compile(r"^(?:import|from) (?:torch|transformers|nanoinfer\.training)\b", re.MULTILINE)
USES_HELPER = re.compile(r"^from helpers(?:\.| import )(\w+)", re.MULTILINE)


def uses_torch(path: Path) -> bool:
    """Return whether a file of tests imports PyTorch, or a helper that does."""
    text = path.read_text()
    helpers = [TESTS / "helpers" / f"{name}.py" for name in USES_HELPER.findall(text)]
    return USES_TORCH.search(text) is not None or any(map(uses_torch, helpers))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without PyTorch, leave out the tests of the rungs in PyTorch, and those that compare with it."""
    left_out = not HAS_TORCH and collection_path.match("test_*.py") and uses_torch(collection_path)
    return True if left_out else None


RAY = ("test_batch_on_ray", "test_disturbed_batch", "test_generator", "test_ray_serve")
"""Files whose tests share a cluster."""


def group_of(file: str) -> str:
    """Return the group whose tests one process runs: a file, or those of Ray."""
    return "ray" if Path(file).stem in RAY else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups by files: pytest 9 does not read the attribute to which xdist 3.8 adds the group of a marker."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`slow_if(condition)`: mark the cases of a matrix as slow whose parameters meet the condition; so `nightly_if`.

    With several processes (`--dist loadgroup --no-loadscope-reorder`), a process runs a group at a time. Ray's is the
    first one, and those without slow cases are the last ones, so that all processes end at about the same time.
    """
    for item in items:
        for marker in ("slow", "nightly"):
            for mark in item.iter_markers(f"{marker}_if"):
                (condition,) = mark.args
                parameters = item.callspec.params  # type: ignore[attr-defined]
                if condition(**{name: parameters[name] for name in inspect.signature(condition).parameters}):
                    item.add_marker(marker)
    if getattr(config.option, "loadgroup", False):  # set by pytest-xdist in the processes that it starts
        group = {item.path: group_of(str(item.path)) for item in items}
        num_slow = Counter(group[item.path] for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (group[item.path] != "ray", -num_slow[group[item.path]], group[item.path]))


def pytest_collection_finish() -> None:
    """Leave the objects of modules and of the list of tests, a million, out of each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), 60))
    return True


@pytest.fixture(autouse=True)
def _log() -> None:
    """Log as in a new process: a test, or a library that it calls, may leave the package's logger configured."""
    log = logging.getLogger("nanoinfer")
    log.handlers, log.propagate, log.disabled = [], True, False
    log.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


@pytest.fixture
def quick_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks in this process measure the machine's ceiling in milliseconds instead of six seconds."""
    from nanoinfer.roofline import ceilings

    monkeypatch.setattr(ceilings, "CPU_WORKLOAD", ceilings.Workload(num_bytes=1 << 22, matrix_size=64, num_rounds=1))


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    if HAS_TORCH:
        torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for all tests of a file."""
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    """It runs on a CPU, in `native` if that is built."""
    from nanoinfer import LLM

    return LLM(str(folder), device="cpu", max_num_seqs=4)


@pytest.fixture
def model(llm: Any) -> Iterator[Any]:
    """An AsyncLLM. After the test no request is left, and the engine holds what the scheduler knows."""
    from helpers.async_llm import running

    with running(llm) as model:
        yield model


@pytest.fixture
def app(model: Any) -> Any:
    """The server's application for the model."""
    from nanoinfer.server.app import build_app
    from nanoinfer.server.config import ServerConfig

    return build_app(model, ServerConfig())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in this process: arguments -> exit code, stdout, stderr."""
    from nanoinfer.cli import main  # only if a test needs it

    def call(*arguments: object, stdin: bytes | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nanoinfer", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as e:
            main()
        out, err = capsys.readouterr()
        return int(e.value.code or 0), out, err

    return call
