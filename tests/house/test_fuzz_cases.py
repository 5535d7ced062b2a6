"""What the fuzzers found (make fuzz) stays right: each case does what tests/fuzz_cases/manifest.json expects.

A case is run by the fuzzer's own target, in a child with limits on time and memory: it cannot end the suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from helpers.environment import ROOT, TESTS

CASES = TESTS / "fuzz_cases"
MANIFEST: dict[str, dict[str, str]] = json.loads((CASES / "manifest.json").read_text(encoding="utf-8"))
WORKER = ROOT / "fuzz" / "worker.py"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")]


@cache
def outcomes() -> dict[str, dict[str, str]]:
    """Replay all cases in one process, which forks a child for each."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("NANOINFER_TEST_EXTENSION", None)
    command = [sys.executable, str(WORKER), "--replay", *(str(CASES / name) for name in MANIFEST)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MANIFEST)
def test_a_case_does_what_is_expected(name: str) -> None:
    outcome, expected = outcomes()[name], MANIFEST[name]
    assert outcome["kind"] in expected["expect"].split(" or "), f"{expected['fault']}: {outcome['detail']}"


def test_the_manifest_names_every_case() -> None:
    assert {p.name for p in CASES.iterdir()} - {"manifest.json"} == MANIFEST.keys()
