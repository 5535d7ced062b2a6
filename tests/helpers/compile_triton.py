"""Compile the Triton kernels for a GPU that is not here, through their own launchers, and say what came out.

    python tests/helpers/compile_triton.py CAPABILITY FORMATS WIDTHS LAYERS     e.g. 90 bfloat16,int4 768,1600 llama

It prints one JSON line a kernel. Every launch is turned into a compilation with the very specialisations of a real one.
TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nanoinfer.kernels.triton import attention as attention_module
from nanoinfer.kernels.triton import experts as experts_module
from nanoinfer.kernels.triton import launch
from nanoinfer.kernels.triton import products as products_module
from nanoinfer.kernels.triton.attention import Scores, attention
from nanoinfer.kernels.triton.epilogue import GELU_TANH, SILU, Epilogue, Places
from nanoinfer.kernels.triton.experts import BLOCK, expert_product
from nanoinfer.kernels.triton.heads import store_heads
from nanoinfer.kernels.triton.products import product
from nanoinfer.kernels.triton.quantize import Weight, dense
from nanoinfer.kernels.triton.rows import Norm, layer_norm
from nanoinfer.kernels.triton.step import begin

OPERATIONS = r"\b((?:LDG|LDGSTS|STG|LDL|STL|ATOM|ATOMG|RED|CCTL|MEMBAR|HMMA|HGMMA)\.[\w.]+|BAR\.SYNC|ACQBULK|UBLKPF)"
BRANCH = r"/\*(\w+)\*/[^/]*\bBRA\b[^/]* 0x(\w+)"
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
        launch.is_available = lambda device: capability >= 90
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
    """Return registers, spills, shared memory, loads and barriers, and the length of the longest loop of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", f.name)
        sass = _tool("cuobjdump", "-sass", f.name)
    order = re.findall(OPERATIONS, sass)
    jumps = [(int(at, 16), int(to, 16)) for at, to in re.findall(BRANCH, sass)]
    return {
        "kernel": name,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "local_bytes": int(re.search(r"LOCAL:(\d+)", usage)[1]),  # type: ignore[index]
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "operations": dict(Counter(order)),
        "order": order,
        "loop": max((at - to) // 16 + 1 for at, to in [(-16, 0), *jumps]),  # instructions are 16 bytes
    }


def _tool(name: str, *args: str) -> str:
    return subprocess.run([BIN / name, *args], check=True, capture_output=True, text=True).stdout


# What to compile -----------------------------------------------------------------------------------------


def weight(name: str, n: int, k: int) -> Weight:
    """A weight whose values do not matter: formats of quantize.py, "int8" and "int4" with bfloat16 operands."""
    if name == "int8":
        return Weight(torch.empty(n, k, dtype=torch.int8), k, 8, torch.bfloat16, torch.empty(n))
    if name == "int4":
        scale = torch.empty(n, k // 64, dtype=torch.bfloat16)
        zero = torch.empty(n, k // 64, dtype=torch.uint8)
        return Weight(torch.empty(n, k // 2, dtype=torch.uint8), k, 4, torch.bfloat16, scale, zero, 64)
    return dense(torch.empty(n, k, dtype=getattr(torch, name)))


def compile_layer(name: str, C: int, rows: int) -> None:
    """Launch everything of a step at the shapes of GPT-2 with n_embd C; a row is a text with one new token."""
    H, D, context = C // 64, 64, 1024
    dtype = weight(name, 1, 64).operand
    x, q, h = torch.empty(rows, C), torch.empty(rows, C, dtype=dtype), torch.empty(rows, 4 * C, dtype=dtype)
    keys = torch.empty(rows, H, 1040, D, dtype=dtype)
    pos = torch.zeros(rows, 1, dtype=torch.int64)
    places = Places(keys, keys, torch.zeros(rows, dtype=torch.int64), pos)
    norm = Norm(torch.empty(C, dtype=dtype), torch.empty(C, dtype=dtype), 1e-5)
    bias = torch.empty(4 * C, dtype=dtype)
    one = torch.zeros(rows, dtype=torch.int64)
    begin(pos, one, one, one, one, torch.empty(9, C, dtype=dtype), torch.empty(9, C, dtype=dtype), 1024, pos, x)
    product(x, weight(name, 3 * C, C), q, norm, Epilogue(bias, store=places))
    attention(q, places, context, q)
    product(q, weight(name, C, C), x, None, Epilogue(bias, residual=x))
    product(x, weight(name, 4 * C, C), h, norm, Epilogue(bias, activation=GELU_TANH))
    product(h, weight(name, C, 4 * C), x, None, Epilogue(bias, residual=x))
    layer_norm(x, norm, q)
    product(q, weight(name, 50257, C), torch.empty(rows, 50257))
    if rows > 1:  # one text that verifies its proposals
        places = Places(keys[:1], keys[:1], places.slots[:1], pos.view(1, rows))
        attention(q, places, context, q)


def compile_llama(name: str, C: int, rows: int) -> None:
    """Launch a layer of Llama's kind, and what other families have in it: norms of heads, a window, a soft cap."""
    H, D, F = C // 64, 64, 4 * C
    K = H // 4 if H % 4 == 0 else H // 5
    dtype = weight(name, 1, 64).operand
    x, q, h = torch.empty(rows, C), torch.empty(rows, C, dtype=dtype), torch.empty(rows, F, dtype=dtype)
    keys, pos = torch.empty(rows, K, 1040, D, dtype=dtype), torch.zeros(rows, 1, dtype=torch.int64)
    places = Places(keys, keys, torch.zeros(rows, dtype=torch.int64), pos)
    norm = Norm(torch.empty(C, dtype=dtype), None, 1e-5, rms=True)
    one, angles = torch.zeros(rows, dtype=torch.int64), (torch.empty(rows, 1, 1, D), torch.empty(rows, 1, 1, D))
    begin(pos, one, one, one, one, torch.empty(9, C, dtype=dtype), None, 1024, pos, x, 12.5)
    qkv = torch.empty(rows, (H + 2 * K) * D, dtype=dtype)
    product(x, weight(name, (H + 2 * K) * D, C), qkv, norm)
    store_heads(qkv, q, places, None, angles)
    store_heads(qkv, q, places, Norm(torch.empty(H + K, D, dtype=dtype), None, 1e-5, rms=True), angles)
    store_heads(torch.empty(rows, (H + K) * D, dtype=dtype), q, places, None, angles, 1e-6)
    for width in (128, 512):
        wide = Places(*[torch.empty(rows, 1, 1040, width, dtype=dtype)] * 2, places.slots, pos)
        attention(torch.empty(rows, 1024, dtype=dtype), wide, 1024, torch.empty(rows, 1024, dtype=dtype))
    for scores in (None, Scores(window=256, softcap=50.0, sinks=torch.empty(H, dtype=dtype))):  # none, all at once
        attention(q, places, 1024, q, scores=scores)
    product(q, weight(name, C, C), x, None, Epilogue(residual=x, scale=0.22))
    product(x, weight(name, F, C), h, norm, Epilogue(activation=SILU))
    product(x, weight(name, F, C), h, norm, Epilogue(residual=h, gates=True))
    layer_norm(x, norm, q)


def compile_experts(name: str, C: int, rows: int) -> None:
    """Launch the products of a mixture of 8 experts: 4 of them for each row, and all of them for each row."""
    E, k, F = 8, 4, 2 * C
    stack = weight(name, E * F, C)
    x, bias = torch.empty(rows, C, dtype=stack.operand), torch.empty(E * F, dtype=stack.operand)
    chosen, places = torch.zeros(rows * k, dtype=torch.int64), torch.zeros(E, BLOCK, dtype=torch.int64)
    expert_product(x, stack, E, chosen, None, torch.empty(rows * k, F, dtype=stack.operand), bias)
    expert_product(x, stack, E, chosen.new_zeros(E), places, torch.empty(rows * E, F, dtype=stack.operand))


def main() -> None:
    """Compile for one capability and print one JSON line a kernel: what was asked for, and what came out."""
    capability, formats = int(sys.argv[1]), sys.argv[2].split(",")
    layers = {"gpt2": compile_layer, "llama": compile_llama, "experts": compile_experts}[sys.argv[4]]
    seen = set()
    for module in (products_module, attention_module, experts_module):
        module.multiprocessors = lambda device: 132  # type: ignore[attr-defined]
    for name in formats:
        for C in map(int, sys.argv[3].split(",")):
            for rows in (1, 5, 48, 200) if C == 1600 else (1, 5):
                with Compiled(capability) as compiled:
                    layers(name, C, rows)
                for kernel_name, kernel in compiled.kernels:
                    if kernel.hash not in seen:
                        seen.add(kernel.hash)
                        print(json.dumps({"format": name, "C": C, "rows": rows, **describe(kernel_name, kernel)}))


if __name__ == "__main__":
    main()
