"""A pytest plugin: each test is a row (gpu_rows.py), and a test that has one does not run again.

`pytest -m gpu -p gpu_tests --rows rows.jsonl --shard 0/4 tests/gpu/test_triton_kernels.py` runs a quarter of its tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_rows import LIMIT_SEC, Rows, is_broken


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, required=True)
    parser.addoption("--shard", default="0/1")
    parser.addoption("--limit", type=float, default=LIMIT_SEC)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config))


class Reporter:
    """Writes the rows of a share of the tests of one file."""

    def __init__(self, config: pytest.Config) -> None:
        self._index, self._count = map(int, config.option.shard.split("/"))
        by = f"tests {Path(config.args[0]).name} {config.option.shard}"
        self._rows = Rows(config.option.rows, by, config.option.limit)

    @pytest.hookimpl(trylast=True)  # after -m has deselected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mine = items[self._index :: self._count]
        known = self._rows.results()
        items[:] = [item for item in mine if item.nodeid not in known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        with self._rows.running(item.nodeid):
            return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the row of a test; a phase that fails after it passed replaces it."""
        if report.failed:
            self._note(report)
            if is_broken(report.longreprtext):
                os._exit(1)  # the tests that are left need a new process
        elif report.skipped:
            self._rows.append(case=report.nodeid, skipped=message(report))
        elif report.when == "call":
            self._rows.append(case=report.nodeid, seconds=round(report.duration, 2))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            self._rows.append(done=True)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        """Write a failure; what fails for want of a package is skipped."""
        error = message(report)
        self._rows.append(case=report.nodeid, **{"skipped" if error.startswith("ModuleNotFound") else "error": error})


def message(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return why a test failed or was skipped: the first line of its error."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    errors = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")] or text.strip().splitlines()
    return " ".join((errors or ["no message"])[0].split())[:300]
