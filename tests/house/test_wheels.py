"""The wheels of `make wheels` in dist/: the text of the source build, and the native path on Arm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.environment import ROOT

pytestmark = pytest.mark.nightly
PYTHONS = ROOT / "build/wheels"  # Debian 13's Python for each architecture, unpacked by packaging/wheels.py
TEST_NEEDS = ("pytest", "hypothesis")
GENERATE = ("-m", "nanoinfer", "generate", "O Romeo,", "--seed", "1", "--max-tokens", "40")
FAST = "formats or samplers or window or models_without or generate_and_eval or packed"  # seconds each when emulated


def install(machine: str, site: Path, *needs: str) -> list[str]:
    """pip's install of the wheel for Python 3.13 of ``machine`` into ``site``; the start of a command that runs it."""
    wheels = list((ROOT / "dist").glob(f"nanoinfer-*-cp312-abi3-*_{machine}.whl"))
    if not wheels:
        pytest.skip(f"make wheels has left no wheel for {machine} in dist/")
    platforms = [f"--platform=manylinux{name}_{machine}" for name in ("_2_28", "_2_24", "2014", "_2_17")]
    target = ["--python-version=3.13", "--abi=cp313", "--abi=abi3", "--implementation=cp", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", *target]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--target", str(site), *platforms]
    subprocess.run([*command, *wheels, *needs], check=True)
    return [str(PYTHONS / machine / "usr/bin/python")]


def test_the_wheel_generates_the_text_of_the_source_build(tmp_path: Path) -> None:
    python = install("x86_64", tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*python, *GENERATE], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    source = subprocess.run([sys.executable, *GENERATE], capture_output=True, text=True, check=True)
    assert done.stdout == source.stdout


def test_the_native_path_runs_on_emulated_arm(tmp_path: Path) -> None:
    python = install("aarch64", tmp_path, *TEST_NEEDS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*python, "-m", "pytest", "-p", "no:cacheprovider", "tests/native/native_path.py", "-k", FAST]
    subprocess.run(command, env=env, cwd=ROOT, check=True)
