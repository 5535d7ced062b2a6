"""Benchmarks, ceilings and the list of engines where PyTorch is not installed, or is installed and not needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoinfer.bench import results
from nanoinfer.roofline import ceilings as measuring
from nanoinfer.roofline.ceilings import Workload, measure

pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

QUICK = (
    "from nanoinfer.roofline import ceilings;"
    "ceilings.CPU_WORKLOAD = ceilings.Workload(num_bytes=1 << 22, matrix_size=64, num_rounds=1);"
)
HIDE = """
import sys
from importlib.machinery import PathFinder

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of a process, and of its children, that find no torch."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    path = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def nanoinfer(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    code = f"{QUICK} from nanoinfer.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_native_is_measured_and_reported(no_torch: dict[str, str], tmp_path: Path, tiny_folder: Path) -> None:
    done = nanoinfer(
        no_torch, "bench", "--engine", "native", "--engine", "static", "--engine", "transformers-dynamic",
        "--model", tiny_folder, "--prompt-tokens", 8, "--output-tokens", 8, "--rounds", 1,
        "--output", tmp_path / "r.json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    native, *others = results.read(tmp_path / "r.json").rows
    assert native.error is None
    assert native.same_tokens is True
    assert native.mbu_percent is not None
    assert (native.peak_memory_bytes or 0) < 300 << 20  # PyTorch alone would take as much
    for row in others:
        assert row.error is not None
        assert row.error.startswith((f"engine={row.case.backend!r} cannot run: ", f"{row.case.backend} cannot run: "))
        assert "torch is not installed: pip install" in row.error
    assert nanoinfer(no_torch, "bench", "--load", tmp_path / "r.json", "--report", tmp_path / "out").returncode == 1
    assert (tmp_path / "out" / "custom-throughput.svg").is_file()


def test_roofline_and_engines(no_torch: dict[str, str]) -> None:
    done = nanoinfer(no_torch, "roofline", "gpt2", "--dtype", "int8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decode"]["tokens_per_sec"] > 0
    listed = nanoinfer(no_torch, "engines", "--json")
    found = {row["name"]: row for row in json.loads(listed.stdout)}
    assert found["native"]["available"] is True
    assert "torch is not installed" in found["static"]["why_not"]
    assert "no CUDA device" in nanoinfer(no_torch, "engines").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["roofline", "gpt2"],
        ["engines"],
        ["bench", "--engine", "native", "--prompt-tokens", "4", "--output-tokens", "4", "--rounds", "1", "--model"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_an_installed_torch_is_not_imported(arguments: list[str], tiny_folder: Path) -> None:
    given = [*arguments, str(tiny_folder)] if arguments[-1] == "--model" else arguments
    code = f"{QUICK} import sys; from nanoinfer.cli.app import run; print(run({given}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_numpy_measures_without_the_native_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 20.5, 30.0, 31.0])  # two rounds of reading, two of a product
    ceiling = measure(Workload(num_bytes=1 << 16, matrix_size=8, num_rounds=2), clock=lambda: next(times))
    assert ceiling.bandwidth_bytes_per_sec == (1 << 16) / 2.0
    assert ceiling.flops_per_sec == {"float32": 2 * 8**3 / 0.5}
    assert "NumPy" in ceiling.source
