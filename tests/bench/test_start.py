"""benchmarks/start.py: the clock, the memory, the sizes, the table."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from helpers.environment import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import start

PRINTS_LATE = "import time; time.sleep(0.3); print('x', flush=True); time.sleep(2); print('y')"


@pytest.mark.slow
def test_the_clock_stops_at_the_first_byte() -> None:
    began = time.perf_counter()
    seconds, _ = start.start(PRINTS_LATE, [])
    assert 0.3 < seconds < time.perf_counter() - began - 1  # of the 2 s after the first byte; the start may take long


def test_the_peak_is_that_of_the_process() -> None:
    used = [start.start(f"b'x' * {n}; print(1)", [])[1] for n in (1, 100 * start.MIB)]
    assert 90 * start.MIB < used[1] - used[0] < 110 * start.MIB


@pytest.mark.parametrize("code", ["pass", "print(1); raise SystemExit(3)"])
def test_a_process_that_fails_or_prints_nothing_ends_it(code: str) -> None:
    with pytest.raises(SystemExit, match="exit code"):
        start.start(code, [])


@pytest.mark.slow
def test_the_clock_of_a_server_stops_at_its_first_answer() -> None:
    pytest.importorskip("uvicorn", reason="the extra server is not installed")
    pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    began = time.perf_counter()
    seconds, peak = start.start(start.FIRST_ANSWER, ["serve", "shakespeare"])
    assert 0.1 < seconds < time.perf_counter() - began
    assert peak > 30 * start.MIB
    with pytest.raises(SystemExit, match="shakespeer"):
        start.start(start.FIRST_ANSWER, ["serve", "shakespeer"])


def test_medians_without_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([(9.0, 900), (8.0, 800), (1.0, 10), (2.0, 20), (3.0, 30), (4.0, 40), (2.0, 20), (9.0, 90)])
    monkeypatch.setattr(start, "start", lambda code, arguments: next(results))
    rows = start.measure([start.Program("m", "a", "a", [], 0.5), start.Program("m", "b", "b", [])], 3)
    assert rows == [start.Row("m", "a", 2.0, 1.0, 3.0, 20, 0.5), start.Row("m", "b", 4.0, 2.0, 9.0, 40, None)]


def test_a_size_counts_what_a_distribution_requires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each distribution once, extras and what is not installed left out."""
    needs = {"a": ["b>=1", "c; extra == 'x'", "gone; sys_platform == 'win32'"], "b": ["a"], "c": []}
    for name, requires in needs.items():
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        (info / "METADATA").write_text(head + "".join(f"Requires-Dist: {r}\n" for r in requires))
        (tmp_path / f"{name}.py").write_bytes(b"x" * (100 if name == "b" else 10))
        (info / "RECORD").write_text(f"{name}.py,,\nmissing.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    sizes = start.installed_bytes("a")
    assert list(sizes.items()) == [("b", 100), ("a", 10)]
    assert start.show_install("a", sizes).startswith("installed, a: 0 MB, of which\n  b 0.0, a 0.0")


def test_a_call_prints_80_columns_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start.main(["--case", "help", "--rounds", "1", "--output", str(tmp_path / "start.json")])
    out = capsys.readouterr().out
    assert "nanoinfer --help" in out
    assert max(map(len, out.splitlines())) <= 80
    (row,) = json.loads((tmp_path / "start.json").read_text())["rows"]
    assert 0.01 < row["first_byte_sec"] < 30
    assert row["peak_bytes"] > 10 * start.MIB


def test_a_model_is_written_once_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = start.Programs(tmp_path, 1)
    folder = programs._folder("model", "shakespeare")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert programs._folder("model", "shakespeare") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert (folder / "tokenizer.json").is_file()
    names = [p.system for p in programs._peers("m", folder, "")]
    err = capsys.readouterr().err
    assert names == ["llama.cpp"] or "llama.cpp is not installed" in err
