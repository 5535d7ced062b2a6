"""What the Triton kernels make of a GPU's memory: GB/s by shape, format and rows, against torch.

    python benchmarks/triton_kernels.py [--json] [--width 768 1600]

Products of GPT-2 (768) and GPT-2 XL (1600) with everything fused into them, against F.linear of the same dtype alone
(quantized weights: against bfloat16), and attention over 1,023 tokens against scaled_dot_product_attention. Weights
take turns, more of them than the second-level cache holds, as the layers of a model do. Whole decode steps at batch
1 against `cuda_graph`'s. Results are checked before anything is timed.
GB/s = bytes of weights (or keys and values) / median time of a launch in a CUDA graph.

The sizes to tune by this are the table of src/nanoinfer/kernels/triton/tiles.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nanoinfer.models.gpt_loading import load_gpt

FORMATS = ("float32", "bfloat16", "int8", "int4")
ROWS = (1, 5, 16)
CACHE_BYTES = 200e6
"""More than the second-level cache of any GPU here: copies of a weight are used in turns until they exceed it."""
ROUNDS, CONTEXT = 25, 1023
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
STEP_TOLERANCE = 5e-2
"""Of a whole step in bfloat16, whose residual stream `cuda_graph` rounds twice a layer: 0.017 in 48 layers."""


def microseconds(call: Callable[[int], object], turns: int) -> float:
    """Return the median time of call(0), call(1), ... call(turns - 1), each, replayed as one graph."""
    call(0)  # compiled outside the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(turns):
            call(i)
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / turns)
    return statistics.median(times)


def check(out: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Exit with 1 where a kernel is wrong: its time would mean nothing."""
    error = ((out.double() - expected).norm() / expected.norm()).item()
    if not error < tolerance:
        sys.exit(f"{what}: relative error {error:.2g} exceeds {tolerance}: nothing was timed")


def product_row(name: str, n: int, k: int, rows: int) -> dict[str, Any]:
    from nanoinfer.kernels.triton.products import Epilogue, product
    from nanoinfer.kernels.triton.quantize import dense, dequantize, pack_int4, pack_int8

    dtype = torch.float32 if name == "float32" else torch.bfloat16
    pack = {"int8": pack_int8, "int4": pack_int4}.get(name, dense)
    first = torch.randn(n, k, device="cuda", dtype=dtype) * k**-0.5
    packed = pack(first)
    turns = max(2, min(64, int(CACHE_BYTES / packed.num_bytes()) + 1))
    weights = [packed] + [pack(torch.randn_like(first) * k**-0.5) for _ in range(turns - 1)]
    plain = [first] + [torch.randn_like(first) for _ in range(turns - 1)]
    x, bias = torch.randn(rows, k, device="cuda", dtype=dtype), torch.randn(n, device="cuda", dtype=dtype)
    out = torch.empty(rows, n, device="cuda", dtype=dtype)
    product(x, packed, out, None, Epilogue(bias))
    check(out, x.double() @ dequantize(packed).double().T + bias, TOLERANCE[dtype], f"{name} ({n}, {k}) x {rows}")
    ours = microseconds(lambda i: product(x, weights[i], out, None, Epilogue(bias)), turns)
    theirs = microseconds(lambda i: F.linear(x, plain[i], bias), turns)
    return {
        "kernel": "product", "format": name, "n": n, "k": k, "rows": rows, "us": ours, "torch_us": theirs,
        "gb_per_sec": packed.num_bytes() / ours / 1e3,
        "torch_gb_per_sec": first.numel() * dtype.itemsize / theirs / 1e3,
    }  # fmt: skip


def attention_row(heads: int, rows: int, new: int) -> dict[str, Any]:
    from nanoinfer.kernels.triton.attention import attention
    from nanoinfer.kernels.triton.products import Pages

    D, dtype = 64, torch.bfloat16
    shape = (rows, heads, 1040, D)
    num_bytes = 2 * rows * heads * CONTEXT * D * dtype.itemsize
    turns = max(2, min(64, int(CACHE_BYTES / num_bytes) + 1))
    caches = [[torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)] for _ in range(turns)]
    pos = (torch.arange(new, device="cuda") + CONTEXT - new).repeat(rows, 1)
    pages = [Pages(k, v, torch.arange(rows, device="cuda")[:, None], pos) for k, v in caches]
    q = torch.randn(rows * new, heads * D, device="cuda", dtype=dtype)
    out = torch.empty_like(q)
    queries = q.view(rows, new, heads, D).transpose(1, 2)
    mask = (torch.arange(CONTEXT, device="cuda") <= pos[..., None])[:, None]

    def reference(i: int, kind: torch.dtype = dtype) -> torch.Tensor:
        k, v = (c[:, :, :CONTEXT].to(kind) for c in caches[i])
        return F.scaled_dot_product_attention(queries.to(kind), k, v, attn_mask=mask if new > 1 else None)

    attention(q, pages[0], CONTEXT + 1, out)
    expected = reference(0, torch.float64).transpose(1, 2).reshape(out.shape)
    check(out, expected, TOLERANCE[dtype], f"attention {rows} x {new}")
    ours = microseconds(lambda i: attention(q, pages[i], CONTEXT + 1, out), turns)
    theirs = microseconds(reference, turns)
    return {
        "kernel": "attention", "format": "bfloat16", "n": heads, "k": D, "rows": rows * new, "us": ours,
        "torch_us": theirs, "gb_per_sec": num_bytes / ours / 1e3, "torch_gb_per_sec": num_bytes / theirs / 1e3,
    }  # fmt: skip


def step_row(model: str, device: str = "cuda", num_steps: int = 200) -> dict[str, Any]:
    """A decode step at batch 1 of engine `triton`, against one of `cuda_graph`: tokens are compared, then timed."""
    from nanoinfer.config import EngineLimits
    from nanoinfer.engines.cuda_graph import CudaGraphEngine
    from nanoinfer.engines.triton_engine import TritonEngine
    from nanoinfer.models.checkpoints.load import load_model

    loaded = load_model(model, dtype="bfloat16")
    config, weights = loaded.config, loaded.take()
    limits = EngineLimits(1, config.block_size, config.block_size)
    reference = CudaGraphEngine(load_gpt(weights, device), limits)
    fused = TritonEngine(load_gpt(weights, device), limits)
    first, last = (logits_after(engine) for engine in (reference, fused))
    check(last, first.double(), STEP_TOLERANCE, f"step of {model}")
    theirs, ours = (step_microseconds(engine, num_steps) for engine in (reference, fused))
    num_bytes = 2 * (  # bfloat16
        sum(p.numel() for p in reference.model.parameters()) - config.block_size * config.n_embd
    )
    return {
        "kernel": "step", "format": "bfloat16", "n": config.n_layer,
        "k": config.n_embd, "rows": 1, "us": ours, "torch_us": theirs, "gb_per_sec": num_bytes / ours / 1e3,
        "torch_gb_per_sec": num_bytes / theirs / 1e3,
    }  # fmt: skip


def logits_after(engine: Any) -> torch.Tensor:
    """Return the logits of the fourth token after a prompt: a first step, one that is recorded, and a replay."""
    from nanoinfer.engines.base import StepBatch

    handle = engine.open()
    engine.extend(StepBatch([handle], list(range(1, 18)), [17], [0]))
    for token in (5, 6, 7, 8):
        logits = engine.extend(StepBatch([handle], [token], [1], [1])).clone()
    engine.close(handle)
    return logits


def step_microseconds(engine: Any, num_steps: int) -> float:
    """Return the time of a greedy step that is launched before the last one is read, the mean over `num_steps`."""
    from nanoinfer.engines.base import PENDING, StepBatch

    def largest(logits: torch.Tensor, sampler_slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    elapsed = 0.0
    for _ in range(2):  # the second time no length is new: nothing is compiled or captured
        handle = engine.open()
        engine.step(StepBatch([handle], [1, 2, 3], [3], [1]), largest, [0]).read()
        batch = StepBatch([handle], [PENDING], [1], [1])
        start = time.perf_counter()
        for _ in range(num_steps):
            drawn = engine.step(batch, largest, [0])
        drawn.read()
        elapsed = time.perf_counter() - start
        engine.close(handle)
    return 1e6 * elapsed / num_steps


def main() -> int:
    """Measure, and print a table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--width", type=int, nargs="+", default=[768, 1600], help="n_embd, a multiple of 64")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: these kernels can only be timed on one", file=sys.stderr)
        return 2
    from nanoinfer.models.presets import PRESETS

    rows = []
    for C in arguments.width:
        shapes = ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C), (50257, C))
        rows += [product_row(name, n, k, m) for name in FORMATS for n, k in shapes for m in ROWS]
        rows += [attention_row(C // 64, *shape) for shape in ((1, 1), (1, 5), (16, 1))]
    presets = [name for name, config in PRESETS.items() if config.n_embd in arguments.width]
    rows += [step_row(f"random:{name}") for name in presets]
    if arguments.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| kernel | format | n | k | rows | us | GB/s | torch us | torch GB/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['kernel']} | {r['format']} | {r['n']} | {r['k']} | {r['rows']} | {r['us']:.2f} "
            f"| {r['gb_per_sec']:.0f} | {r['torch_us']:.2f} | {r['torch_gb_per_sec']:.0f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
