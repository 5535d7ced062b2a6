"""The Triton kernels compiled for GPUs that are not here, at GPT-2's shapes: registers, memory, and how they load.

In a process of its own each: where there is no device, this one runs kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from helpers.environment import TESTS

pytest.importorskip("triton", reason="triton is not installed")

OTHERS = ("product_rows", "attention", "join_parts", "begin", "norm")
SHARED_BYTES = {75: 64 << 10, 80: 99 << 10, 90: 99 << 10}
"""8.0 and 9.0 have more; 8.6, 8.9 and 12.0 do not."""
CASES = [
    (90, "bfloat16,int4", "768"), (90, "bfloat16,int4", "768,1600"), (80, "float32,int8", "1600"),
    (75, "float16", "768"),
]  # fmt: skip


def compiled(capability: int, formats: str, widths: str, layers: str = "gpt2") -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = TESTS / "helpers" / "compile_triton.py"
    run = subprocess.run(
        [sys.executable, script, str(capability), formats, widths, layers],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.nightly  # the kernels of other families, below, and the sampler's are compiled daily
@pytest.mark.parametrize("capability, formats, widths", CASES)
def test_kernels_compile_and_stream(capability: int, formats: str, widths: str) -> None:
    kernels = compiled(capability, formats, widths)
    assert {k["kernel"] for k in kernels} >= {f"{name}_kernel" for name in ("product", *OTHERS)}
    check(kernels, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability, formats", [(90, "int4"), (90, "bfloat16"), (80, "float16")])
@pytest.mark.nightly_if(lambda formats: formats != "int4")
def test_kernels_of_other_families_compile_and_stream(capability: int, formats: str) -> None:
    kernels = compiled(capability, formats, "768", "llama")
    assert {k["kernel"] for k in kernels} >= {f"{name}_kernel" for name in ("product", "heads", *OTHERS)}
    check(kernels, capability)


@pytest.mark.slow
def test_kernels_of_experts_compile_and_stream() -> None:
    kernels = compiled(90, "bfloat16,int4", "768", "experts")
    assert {k["kernel"] for k in kernels} == {"expert_kernel"}
    check(kernels, 90)


def check(kernels: list[dict[str, Any]], capability: int) -> None:
    for k in kernels:
        operations: dict[str, int] = k["operations"]
        if capability >= 80:  # before, Triton has no tensor cores: some products spill
            assert k["local_bytes"] == 0, k
            spilled = sum(n for op, n in operations.items() if op.startswith(("LDL", "STL")))
            assert spilled <= (16 if k["kernel"] == "product_rows_kernel" else 4), k  # once a program
        assert k["shared_bytes"] <= SHARED_BYTES[capability], k
        if k["kernel"] in ("product_kernel", "product_rows_kernel", "expert_kernel", "attention_kernel"):
            loads = {op: n for op, n in operations.items() if op.startswith(("LDG.", "LDGSTS."))}
            wide = sum(n for op, n in loads.items() if ".128" in op)
            bytewise = sum(n for op, n in loads.items() if ".U8" in op or ".U16" in op)
            assert wide >= 1, k  # weights, keys and values: 16 bytes at a time
            assert bytewise <= 32, k  # scales and zero points, one a group
        if k["kernel"].startswith(("product", "expert")) and k["format"] != "float32" and capability >= 80:
            tensor_cores = any(op.startswith(("HMMA", "HGMMA")) for op in operations)
            assert tensor_cores == (k["kernel"] != "product_kernel"), k
        if k["kernel"] == "product_kernel":
            order = k["order"]
            first = next(i for i, op in enumerate(order) if op.startswith("LDG") and ".128" in op)
            assert first < order.index("BAR.SYNC"), k  # weights are on their way before the row's statistics
            if k["format"] == "int4":  # 64 weights a thread in 8 rows of a loop's turn
                assert k["loop"] <= 64 * 6.5, k
        if capability >= 90:
            wait = k["order"].index("ACQBULK")
            before, after = k["order"][:wait], k["order"][wait:]
            assert not any(op.startswith(("STG", "BAR")) for op in before), k
            assert any(op.startswith("STG") for op in after), k
            assert k["kernel"] != "product_kernel" or any(".128" in op for op in before), k  # weights
