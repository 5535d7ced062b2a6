"""The package as it is installed: version, types, exported names, metadata, build, shell completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import nanoinfer
from helpers.environment import ROOT
from nanoinfer.errors import missing_extra

PACKAGE = Path(nanoinfer.__file__).parent
HEAVY = {"torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "click", "rich", "importlib.metadata"}
OUTPUT_TYPES = (
    "CompletionOutput", "Delta", "Logprob", "LoglikelihoodOutput", "PerplexityOutput", "RequestMetrics",
    "RequestOutput", "SpeculationMetrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python from 3.11 on")
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_version_is_that_of_the_metadata(project: dict[str, Any]) -> None:
    assert nanoinfer.__version__ == version("nanoinfer") == project["version"]
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == project["version"]


def test_version_of_a_source_tree_that_was_never_installed(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = [{str(PACKAGE.parent)!r}]; import nanoinfer; print(nanoinfer.__version__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "unknown\n"


def test_every_exported_name_is_importable() -> None:
    assert set(OUTPUT_TYPES) <= set(nanoinfer.__all__)
    assert len(set(nanoinfer.__all__)) == len(nanoinfer.__all__)
    for name in nanoinfer.__all__:
        assert getattr(nanoinfer, name).__name__ == name
        assert name in dir(nanoinfer)
    with pytest.raises(AttributeError, match="module 'nanoinfer' has no attribute 'no_such_name'"):
        nanoinfer.no_such_name  # noqa: B018


def test_import_loads_nothing_heavy() -> None:
    names = ", ".join(("SamplingParams", "NanoinferError", *OUTPUT_TYPES))
    code = f"import sys; before = set(sys.modules); from nanoinfer import {names}; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(re.findall(r"'(.*?)'", done.stdout)) & HEAVY == set()


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_metadata(project: dict[str, Any]) -> None:
    assert "Typing :: Typed" in project["classifiers"]
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    supported = [c for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert supported == [f"Programming Language :: Python :: 3.{minor}" for minor in range(int(low), int(high))]
    extras = set(project["optional-dependencies"])
    for path in PACKAGE.rglob("*.py"):
        for extra in re.findall(r'missing_extra\([^)]*"(\w+)"\)', path.read_text()):
            assert extra in extras, path.name


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    assert missing_extra("triton", "gpu") == (
        "triton is not installed: pip install '.[gpu]' in the folder of nanoinfer's source"
    )
    for path in [p for p in PACKAGE.rglob("*.py") if p.name != "errors.py"]:
        assert not re.search(r"pip install[^\n]*\[", path.read_text()), f"{path.name}: use errors.missing_extra"


def test_no_page_and_no_message_installs_a_package_that_no_index_has() -> None:
    """The Makefile names extras of the package that it has installed; pip asks no index for that one."""
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    places += [p for name in ("src", "benchmarks", "examples", "tests", "fuzz") for p in ROOT.glob(f"{name}/**/*.py")]
    for path in [p for p in places if "log" not in (p.stem, p.parent.name)]:  # those are history
        assert not re.search(r"pip install (?:-\S+ )*['\"]?nanoinfer", path.read_text()), path.name


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_a_missing_compiler_names_the_way_without_one(tmp_path: Path) -> None:
    environment = os.environ | {"CXX": str(tmp_path / "no-such-compiler")}
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path / "build"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "no C++ compiler was found" in message
    assert "NANOINFER_NO_NATIVE=1 pip install" in message


def test_shell_completion() -> None:
    asked = os.environ | {"_NANOINFER_COMPLETE": "bash_complete", "COMP_WORDS": "nanoinfer ge", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "nanoinfer"]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["plain,generate"]
    asked = os.environ | {"_NANOINFER_COMPLETE": "bash_source"}
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    assert "_NANOINFER_COMPLETE=bash_complete" in done.stdout
