"""Compile the Triton kernels for a GPU that is not here, through their own launchers, and say what came out.

    python tests/compile_triton.py CAPABILITY PART     one JSON line a launch; CAPABILITY 75, 80, 90; PART see PARTS

Every launch is turned into a compilation with the very specialisations of a real one. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

OPERATIONS = r"\b((?:LDG|LDGSTS|STG|LDL|STL|ATOM|ATOMG|RED|CCTL|MEMBAR|HMMA)\.[\w.]+)"
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


class Driver:
    """Stands where Triton asks for a GPU."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Collects what the launches inside `with` compile to."""

    def __init__(self, capability: int) -> None:
        triton.runtime.driver.set_active(Driver(capability))
        self.kernels: list[Any] = []

    def __enter__(self) -> Compiled:
        self._run = run = JITFunction.run

        def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            self.kernels.append((function.__name__, kernel))
            return kernel

        JITFunction.run = compile_only
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run


def describe(name: str, kernel: Any) -> dict[str, Any]:
    """Return registers, spills, shared memory and the widths of the loads of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", f.name)
        sass = _tool("cuobjdump", "-sass", f.name)
    loads: dict[str, int] = {}
    for op in re.findall(OPERATIONS, sass):
        loads[op.rstrip(";")] = loads.get(op.rstrip(";"), 0) + 1
    return {
        "kernel": name,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "local_bytes": int(re.search(r"LOCAL:(\d+)", usage)[1]),  # type: ignore[index]
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "operations": loads,
    }


def _tool(name: str, *args: str) -> str:
    return subprocess.run([BIN / name, *args], check=True, capture_output=True, text=True).stdout
