"""What the Triton kernels make of a GPU's memory: GB/s of whole steps, products and attention, against other kernels.

    python benchmarks/triton_kernels.py [--only steps] [--models gpt2 gpt2-xl] [--output rows.jsonl]

steps: decode steps at batch 1 in each format, against those of `cuda_graph` and the roofline's prediction, and the time
    of verifying 5 tokens.
variants, variants-int4 (only with --only): a step with other tiles, splits and launches, to choose those of tiles.py.
products: those of a layer as they run in a step, with norm, bias and residual, all of them cold, against F.linear of
    bfloat16 alone. Weights take turns, more of them than the second-level cache holds, as the layers of a model do.
attention: over 1,023 tokens, against scaled_dot_product_attention.

Results are checked before they are timed. GB/s = bytes of weights (or keys and values) / median time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu_rows import captured, measure, microseconds, parser
from gpu_steps import estimate
from sampler import make_rows
from torch import Tensor

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import PENDING, StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kernels.triton import attention as attentions
from nanoinfer.kernels.triton import products
from nanoinfer.kernels.triton import tiles as triton_tiles
from nanoinfer.kernels.triton.attention import attention
from nanoinfer.kernels.triton.epilogue import GELU_TANH, Epilogue, Places
from nanoinfer.kernels.triton.quantize import dense, dequantize, pack_int4, pack_int8
from nanoinfer.kernels.triton.rows import Norm
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.transformer import Transformer
from nanoinfer.profiling.checks import verify_ratio
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline import ceilings as roofline_measure
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.sampling.triton import TritonSampler

Row = dict[str, Any]
GROUPS = ("steps", "products", "attention")
VARIANT_GROUPS = {"variants": None, "variants-int4": "int4"}
STEPS = (("triton", None), ("cuda_graph", None), ("triton", "int8"), ("triton", "int4"))  # engine, quantization
ROWS = (1, 5, 64)
KINDS = ("qkv", "attn_proj", "mlp_fc", "mlp_proj", "head")
CACHE_BYTES = 200e6
"""More than the second-level cache of any GPU here: copies of a weight are used in turns until they exceed it."""
ROUNDS, CONTEXT, PROMPT = 25, 1023, 17
TOLERANCE = 2e-2  # relative, of one kernel in bfloat16
STEP_TOLERANCE = {None: 5e-2, "int8": 1e-1, "int4": 5e-1}
"""Relative, of a step's logits against float32's. GPT-2 124M with random weights: 0.011, 0.023 and 0.27; three times
that was measured with 48 layers in bfloat16, whose residual stream `cuda_graph` rounds twice a layer."""


def check(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise an error where a kernel is wrong: its time would mean nothing."""
    error = ((out.double() - expected).norm() / expected.norm()).item()
    if not error < tolerance:
        raise ValueError(f"relative error {error:.2g} exceeds {tolerance}: not timed")


# Steps -----------------------------------------------------------------------------------------------------


def make_gpt(config: ModelConfig, device: str, dtype: torch.dtype) -> Transformer:
    """Return a model with random weights, the same for each dtype but for their rounding."""
    with torch.device(device):
        gpt = Transformer(config)
    generator = torch.Generator(device).manual_seed(0)
    for name, p in gpt.named_parameters():
        p.data = p.data.normal_(0.0, 0.02, generator=generator) + float("ln_" in name and name.endswith("weight"))
    return gpt.to(dtype).requires_grad_(False).eval()


def make_engine(name: str, quantization: str | None, config: ModelConfig, device: str, dtype: torch.dtype) -> Any:
    """Return an engine for one sequence."""
    module, _, target = ENGINES[name].target.partition(":")
    cls = getattr(importlib.import_module(module), target)
    limits = EngineLimits(1, config.block_size, config.block_size)
    return cls(make_gpt(config, device, dtype), limits, EngineConfig(quantization=quantization))


@functools.cache
def expected_logits(config: ModelConfig, device: str) -> Tensor:
    return logits_after(make_engine("static", None, config, device, torch.float32)).double()


def logits_after(engine: Any) -> Tensor:
    """Return the logits of the fourth token after a prompt: a first step, one that is recorded, and a replay."""
    handle = engine.open()
    engine.extend(StepBatch([handle], list(range(1, PROMPT + 1)), [PROMPT], [0]))
    for token in (5, 6, 7, 8):
        logits = engine.extend(StepBatch([handle], [token], [1], [1])).clone()
    engine.close(handle)
    return logits


def step_row(
    config: ModelConfig, name: str, quantization: str | None, device: str = "cuda", num_steps: int = 200
) -> Row:
    """Check a step, time it, and time a step that verifies 5 tokens."""
    engine = make_engine(name, quantization, config, device, torch.bfloat16)
    check(logits_after(engine), expected_logits(config, device), STEP_TOLERANCE[quantization])
    usec, fmt = step_microseconds(engine, num_steps), FORMATS[quantization or "bfloat16"]
    cost = arithmetic.decode(config, fmt)
    predicted = estimate(name, config, fmt, ceiling(device), 1, num_steps // 2)
    assert predicted is not None  # the kernels of GPT-2 are counted
    ratio = verify_ratio(engine, list(range(1, PROMPT + 1)), device=device)
    gb_per_sec = cost.model.bytes(0, 0) / usec / 1e3
    terms = {"predicted_usec": 1e6 * predicted.seconds, "bytes_usec": 1e6 * predicted.bytes_sec}
    per_kernel = 1e6 * predicted.seconds_per_kernel(usec / 1e6)
    return {**terms, "usec": usec, "usec_per_kernel": per_kernel, "gb_per_sec": gb_per_sec, "verify_ratio": ratio}


@functools.cache
def ceiling(device: str) -> Ceiling:
    return roofline_measure.measure(device=device)


def step_microseconds(engine: Any, num_steps: int) -> float:
    """Return the time of a greedy step that is launched before the last one is read, the mean over `num_steps`."""
    fused = TritonSampler(1, engine.config.vocab_size, engine.device)
    fused.assign(0, make_rows(SamplingParams(temperature=0.0), 1, torch.Generator())[0])
    elapsed = 0.0
    for _ in range(2):  # the second time no length is new: nothing is compiled or captured
        handle = engine.open()
        engine.step(StepBatch([handle], [1, 2, 3], [3], [1]), fused.sample_slots, [0]).read()
        batch = StepBatch([handle], [PENDING], [1], [1])
        start = time.perf_counter()
        for _ in range(num_steps):
            tokens = engine.step(batch, fused.sample_slots, [0])
        tokens.read()
        elapsed = time.perf_counter() - start
        engine.close(handle)
    return 1e6 * elapsed / num_steps


# Variants of a step ----------------------------------------------------------------------------------------


def tiles(change: Callable[[Any], Any]) -> Any:
    """Patch what tiles.py chooses for products of one row."""
    chosen = products.product_tile

    def product_tile(n: int, k: int, rows: int, *rest: int) -> Any:
        tile = chosen(n, k, rows, *rest)
        return change(tile) if rows == 1 else tile

    return patch.object(products, "product_tile", product_tile)


VARIANTS: dict[str, Callable[[], Any]] = {
    "as chosen": contextlib.nullcontext,
    "without PDL": lambda: patch.object(triton_tiles, "USE_PDL", False),
    "attention not split": lambda: patch.object(attentions, "attention_splits", lambda *shape: 1),
    **{f"{n} stages": partial(tiles, lambda t, n=n: replace(t, num_stages=n)) for n in (2, 4, 5, 6)},
    **{f"{n} warps": partial(tiles, lambda t, n=n: replace(t, num_warps=n)) for n in (2, 8)},
    **{f"block_k x {x:g}": partial(tiles, lambda t, x=x: replace(t, block_k=int(t.block_k * x))) for x in (0.5, 2)},
    **{f"block_n x {x:g}": partial(tiles, lambda t, x=x: replace(t, block_n=int(t.block_n * x))) for x in (0.5, 2)},
}


def variant_row(variant: str, config: ModelConfig, quantization: str | None, device: str = "cuda") -> Row:
    """Time a step with something changed. Attention reads 17 to 220 tokens."""
    with VARIANTS[variant]():
        return step_row(config, "triton", quantization, device)


# Products and attention ------------------------------------------------------------------------------------


def product_row(kind: str, name: str, config: ModelConfig, rows: int, device: str = "cuda") -> Row:
    """One product of a step: qkv, attn_proj, mlp_fc, mlp_proj or head."""
    C, H, hidden, dtype = config.n_embd, config.n_head, config.mlp_dim, torch.bfloat16
    n, k = {
        "qkv": (3 * C, C), "attn_proj": (C, C), "mlp_fc": (hidden, C), "mlp_proj": (C, hidden),
        "head": (config.vocab_size, C),
    }[kind]  # fmt: skip
    randn = partial(torch.randn, device=device)
    plain = randn(n, k, dtype=dtype) * k**-0.5
    packed = {"int8": pack_int8, "int4": pack_int4}.get(name, dense)(plain)
    turns = max(2, min(64, int(CACHE_BYTES / packed.num_bytes()) + 1))
    normed, projects = kind in ("qkv", "mlp_fc"), kind in ("attn_proj", "mlp_proj")
    x = randn(rows, k, dtype=torch.float32 if normed else dtype)
    out = torch.empty(
        rows, n if kind != "qkv" else C, device=device, dtype=torch.float32 if projects or kind == "head" else dtype
    )
    places = Places(
        *(randn(rows, H, 8, C // H, dtype=dtype) for _ in range(2)),
        torch.arange(rows, device=device), torch.zeros(rows, 1, dtype=torch.int64, device=device),
    )  # fmt: skip

    def one_of_a_layer(first: bool) -> tuple[Any, ...]:
        fields = {f: None if (t := getattr(packed, f)) is None else t.clone() for f in ("data", "scale", "zero")}
        weight = packed if first else replace(packed, **fields)
        norm = Norm(1 + 0.1 * randn(k, dtype=dtype), randn(k, dtype=dtype), 1e-5) if normed else None
        bias = randn(n, dtype=dtype) if kind != "head" else None
        gelu, store = GELU_TANH if kind == "mlp_fc" else 0, places if kind == "qkv" else None
        return weight, norm, Epilogue(bias, gelu, residual=out if projects else None, store=store)

    layers = [one_of_a_layer(i == 0) for i in range(turns)]

    def run(weight: Any, norm: Any, epilogue: Any) -> None:
        products.product(x, weight, out, norm, epilogue)

    weight, norm, epilogue = layers[0]
    residual = out.normal_().double()
    run(*layers[0])
    inputs = x.double()
    if normed:
        inputs = F.layer_norm(inputs, (k,), norm.weight.double(), norm.bias.double(), norm.eps)
    expected = inputs @ dequantize(weight).double().T + (0.0 if epilogue.bias is None else epilogue.bias.double())
    expected = F.gelu(expected, approximate="tanh") if kind == "mlp_fc" else expected
    check(out, (residual + expected) if projects else expected[:, : out.shape[1]], TOLERANCE)
    xs, others = x.to(dtype), [plain.clone() for _ in range(turns)]
    plainly = [partial(F.linear, xs, w, epilogue.bias) for w in others]
    return timed([partial(run, *layer) for layer in layers], plainly, packed.num_bytes(), plain.nbytes)


def attention_row(config: ModelConfig, rows: int, new: int, device: str = "cuda", context: int = CONTEXT) -> Row:
    """Attention of the last `new` tokens of `rows` sequences."""
    H, D, dtype = config.n_head, config.head_dim, torch.bfloat16
    num_bytes = 2 * rows * H * context * D * dtype.itemsize
    turns = max(2, min(64, int(CACHE_BYTES / num_bytes) + 1))
    shape = (rows, H, context + 17, D)
    caches = [[torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(turns)]
    pos = (torch.arange(new, device=device) + context - new).repeat(rows, 1)
    places = [Places(k, v, torch.arange(rows, device=device), pos) for k, v in caches]
    q = torch.randn(rows * new, H * D, device=device, dtype=dtype)
    out = torch.empty_like(q)
    queries = q.view(rows, new, H, D).transpose(1, 2)
    mask = (torch.arange(context, device=device) <= pos[..., None])[:, None]

    def reference(i: int, kind: torch.dtype = dtype) -> Tensor:
        k, v = (c[:, :, :context].to(kind) for c in caches[i])
        return F.scaled_dot_product_attention(queries.to(kind), k, v, attn_mask=mask if new > 1 else None)

    attention(q, places[0], context + 1, out)
    check(out, reference(0, torch.float64).transpose(1, 2).reshape(out.shape), TOLERANCE)
    ours = [partial(attention, q, place, context + 1, out) for place in places]
    return timed(ours, [partial(reference, i) for i in range(turns)], num_bytes, num_bytes)


def timed(
    ours: Sequence[Callable[[], object]], theirs: Sequence[Callable[[], object]], num_bytes: int, their_bytes: int
) -> Row:
    """Time calls that take turns, replayed as one graph."""
    row: Row = {}
    for prefix, calls, size in (("", ours, num_bytes), ("torch_", theirs, their_bytes)):
        replay, _ = captured(lambda calls=calls: [call() for call in calls])
        row[f"{prefix}usec"] = usec = microseconds(replay, ROUNDS, len(calls))
        row[f"{prefix}gb_per_sec"] = size / usec / 1e3
    return row


# The cases -------------------------------------------------------------------------------------------------


def cases(groups: Sequence[str], models: Sequence[str]) -> dict[str, Callable[[], Row]]:
    """Return the cases by name, whole steps first."""
    made: dict[str, Callable[[], Row]] = {}
    for group, model in product(groups, models):
        config = PRESETS[model]
        if group == "steps":
            made |= {f"step {model} {e} {q or 'bfloat16'}": partial(step_row, config, e, q) for e, q in STEPS}
        elif group in VARIANT_GROUPS:
            q = VARIANT_GROUPS[group]
            for variant in VARIANTS:
                made[f"step {model} triton {q or 'bfloat16'}, {variant}"] = partial(variant_row, variant, config, q)
        elif group == "products":
            for rows, kind, fmt in product(ROWS, KINDS, ("bfloat16", "int8", "int4")):
                made[f"{kind} {model} {fmt} {rows} rows"] = partial(product_row, kind, fmt, config, rows)
        else:
            for rows, new in ((1, 1), (1, 5), (16, 1)):
                made[f"attention {model} {rows} x {new} tokens"] = partial(attention_row, config, rows, new)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options: argparse.ArgumentParser = parser(__doc__ or "", "kernels")
    options.add_argument("--only", action="append", choices=(*GROUPS, *VARIANT_GROUPS), help="groups; may be repeated")
    options.add_argument("--models", nargs="+", default=["gpt2-xl", "gpt2"], help="presets of GPT-2")
    args = options.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: these kernels can only be timed on one", file=sys.stderr)
        return 2
    with torch.inference_mode():
        return measure(cases(args.only or GROUPS, args.models), args)


if __name__ == "__main__":
    sys.exit(main())
