"""Folders of a small Llama in the formats of quantization tools, and the values that the formats define, in float64.

Packing follows the descriptions of the formats bit by bit, with Python's integers, not the code that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from helpers.families import SMALL, transformers

Array = NDArray[Any]
Stored = dict[str, torch.Tensor]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Case:
    """A method and its options."""

    config: dict[str, Any]
    """quantization_config."""
    pack: Callable[[Array, np.random.Generator], tuple[Stored, Array]]
    """(out, in) float32 -> the tensors by the ends of their names, and the values in float64."""
    format: str | None = None
    """The format in which engine native computes; None: float32."""
    skipped: tuple[str, ...] = ("lm_head",)
    """Matrices that stay as they are."""


def words(values: Array, bits: int) -> Array:
    """Pack integers (rows, n) into int32 words, the first value in the lowest bits."""
    found = []
    for row in values.tolist():
        whole = sum(value << (bits * i) for i, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        found.append([(whole >> (32 * i)) & 0xFFFFFFFF for i in range(count)])
    return np.array(found, np.uint64).astype(np.uint32).view(np.int32)


def rounded(
    w: Array, bits: int, group: int, rng: np.random.Generator, symmetric: bool, dtype: torch.dtype
) -> tuple[Array, torch.Tensor, Array]:
    """Return codes of 0 to 2**bits - 1, (out, in), scales and zero points, (out, groups)."""
    rows, columns = w.shape
    group = columns if group < 0 else group
    half, top = 1 << (bits - 1), (1 << bits) - 1
    grouped = w.reshape(rows, -1, group)
    scale = torch.tensor(np.abs(grouped).max(2) / half + 1e-3, dtype=dtype)
    zero = np.full(scale.shape, half) if symmetric else rng.integers(1, top + 1, scale.shape)
    codes = np.clip(np.rint(grouped / scale.double().numpy()[..., None]) + zero[..., None], 0, top).astype(np.int64)
    return codes.reshape(rows, columns), scale, zero


def values(codes: Array, scale: torch.Tensor, zero: Array, of: Array) -> Array:
    """(code - zero point of the group) * scale of the group; `of`: the group of each column."""
    return (codes - zero[:, of]) * scale.double().numpy()[:, of]


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    version: int = 1,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
    g_idx: bool = True,
) -> Callable[[Array, np.random.Generator], tuple[Stored, Array]]:
    def pack(w: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        codes, scale, zero = rounded(w, bits, group, rng, symmetric, dtype)
        of = np.arange(w.shape[1]) // (w.shape[1] if group < 0 else group)
        if shuffled:
            of = rng.permutation(of)
        stored = {
            ".qweight": torch.tensor(words(codes, bits).T.copy()),
            ".qzeros": torch.tensor(words(((zero - 1) if version == 1 else zero).T, bits)),
            ".scales": scale.T.contiguous(),
        }
        if g_idx:
            stored[".g_idx"] = torch.tensor(of, dtype=torch.int32)
        return stored, values(codes, scale, zero, of)

    return pack


def awq(w: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    codes, scale, zero = rounded(w, 4, 32, rng, False, torch.float16)
    turned = lambda a: words(a.reshape(len(a), -1, 8)[:, :, AWQ_ORDER].reshape(len(a), -1), 4)  # noqa: E731
    stored = {".qweight": turned(codes.T), ".qzeros": turned(zero.T)}
    return (
        {name: torch.tensor(a) for name, a in stored.items()} | {".scales": scale.T.contiguous()},
        values(codes, scale, zero, np.arange(w.shape[1]) // 32),
    )


def packed(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Callable[[Array, np.random.Generator], tuple[Stored, Array]]:
    """compressed-tensors, pack-quantized: unsigned codes; zero points are packed along the rows."""

    def pack(w: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        codes, scale, zero = rounded(w, bits, group, rng, symmetric, dtype)
        of = np.arange(w.shape[1]) // (w.shape[1] if group < 0 else group)
        stored = {
            ".weight_packed": torch.tensor(words(codes, bits)),
            ".weight_scale": scale,
            ".weight_shape": torch.tensor(w.shape, dtype=torch.int64),
        }
        if shuffled:
            of = rng.permutation(of)
            stored[".weight_g_idx"] = torch.tensor(of, dtype=torch.int32)
        if not symmetric:
            stored[".weight_zero_point"] = torch.tensor(words(zero.T, bits).T.copy())
        return stored, values(codes, scale, zero, of)

    return pack


def int8(
    group: int = -1, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Callable[[Array, np.random.Generator], tuple[Stored, Array]]:
    """compressed-tensors, int-quantized: signed codes; group 0: one scale."""

    def pack(w: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        flat = w.reshape(1, -1) if group == 0 else w
        codes, scale, zero = rounded(flat, 8, -1 if group == 0 else group, rng, symmetric, dtype)
        of = np.arange(flat.shape[1]) // (flat.shape[1] if group <= 0 else group)
        exact = values(codes, scale, zero, of).reshape(w.shape)
        stored = {
            ".weight": torch.tensor((codes - 128).reshape(w.shape), dtype=torch.int8),
            ".weight_scale": scale if group else scale.reshape(1),
        }
        if not symmetric:
            stored[".weight_zero_point"] = torch.tensor(zero - 128, dtype=torch.int8)
        return stored, exact

    return pack


def fp8(
    block: tuple[int, int] | None,
    name: str = ".weight_scale_inv",
    *,
    kind: torch.dtype = torch.float8_e4m3fn,
    dtype: torch.dtype = torch.float32,
) -> Callable[[Array, np.random.Generator], tuple[Stored, Array]]:
    """FP8 with a scale for each block, for each row (1, 0), or for the matrix (None)."""

    def pack(w: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
        rows, columns = block or w.shape
        columns = columns or w.shape[1]
        count = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
        if dtype == torch.float8_e8m0fnu:
            scale = torch.tensor(2.0 ** rng.integers(-9, -2, count), dtype=dtype)
        else:
            scale = torch.tensor(rng.uniform(1e-3, 1e-2, count), dtype=dtype)
        spread = np.repeat(np.repeat(scale.double().numpy(), rows, 0), columns, 1)[: w.shape[0], : w.shape[1]]
        codes = torch.tensor(w / spread).clamp(-400, 400).to(kind)
        return {".weight": codes, name: scale if block else scale.reshape(())}, codes.double().numpy() * spread

    return pack


def mxfp4(w: Array, rng: np.random.Generator) -> tuple[Stored, Array]:
    """compressed-tensors, mxfp4-pack-quantized: the first number of a byte in the low bits."""
    codes = rng.integers(0, 16, w.shape)
    exponents = rng.integers(118, 126, (w.shape[0], w.shape[1] // 32))
    numbers = np.array(E2M1 + [-n for n in E2M1])[codes]
    stored = {
        ".weight_packed": torch.tensor(codes[:, ::2] | codes[:, 1::2] << 4, dtype=torch.uint8),
        ".weight_scale": torch.tensor(exponents, dtype=torch.uint8),
    }
    return stored, numbers * np.repeat(2.0 ** (exponents - 127), 32, axis=1)


def group(bits: int, type: str = "int", format: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """Return the config of compressed-tensors with one group."""
    weights = {"num_bits": bits, "type": type, "symmetric": True, "strategy": "group"} | more
    return {
        "quant_method": "compressed-tensors", "format": format,
        "quantization_status": "frozen" if type == "float" else "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


def _gptq(bits: int = 4, group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True, "desc_act": False} | more


CASES: dict[str, Case] = {
    "packed-int4": Case(group(4), packed(), "q4_0"),
    "packed-int4-bfloat16-scales": Case(group(4), packed(dtype=torch.bfloat16), "q4_0"),
    "packed-int4-float32-scales": Case(group(4), packed(dtype=torch.float32)),
    "packed-int4-zero-points": Case(group(4), packed(symmetric=False), "q5_0"),
    "packed-int4-groups-of-16": Case(group(4), packed(group=16)),
    "packed-int4-channel": Case(group(4, strategy="channel"), packed(group=-1), "q4_0"),
    "packed-int4-ordered": Case(group(4), packed(shuffled=True)),
    "packed-int3": Case(group(3), packed(3), "q4_0"),
    "packed-int8": Case(group(8), packed(8), "q8_0"),
    "int8-channel": Case(group(8, format="int-quantized"), int8(), "q8_0"),
    "int8-tensor": Case(group(8, format="int-quantized"), int8(0), "q8_0"),
    "int8-zero-points": Case(group(8, format="int-quantized"), int8(32, symmetric=False)),
    "compressed-fp8-channel": Case(
        group(8, "float", "float-quantized"), fp8((1, 0), ".weight_scale", dtype=torch.bfloat16)
    ),
    "compressed-fp8-tensor": Case(group(8, "float", "float-quantized"), fp8(None, ".weight_scale")),
    "compressed-fp8-block": Case(
        group(8, "float", "float-quantized", block_structure=[24, 48]), fp8((24, 48), ".weight_scale")
    ),
    "compressed-mxfp4": Case(group(4, "float", "mxfp4-pack-quantized"), mxfp4, "mxfp4"),
    "fp8-blocks": Case({"quant_method": "fp8", "weight_block_size": [40, 40]}, fp8((40, 40))),
    "fp8-e5m2": Case({"quant_method": "fp8", "weight_block_size": [40, 40]}, fp8((40, 40), kind=torch.float8_e5m2)),
    "fp8-e8m0": Case(
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        fp8((32, 32), dtype=torch.float8_e8m0fnu),
    ),
    "fp8-tensor": Case({"quant_method": "fp8", "activation_scheme": "static"}, fp8(None, ".weight_scale")),
    "fp8-rows": Case({"quant_method": "fp8"}, fp8((1, 0), ".weight_scale")),
    "gptq": Case(_gptq(), gptq(), "q4_0"),
    "gptq-v2": Case(_gptq(checkpoint_format="gptq_v2"), gptq(version=2), "q4_0"),
    "gptq-zero-points": Case(_gptq(sym=False), gptq(symmetric=False), "q5_0"),
    "gptq-without-g_idx": Case(_gptq(), gptq(g_idx=False), "q4_0"),
    "gptq-one-group": Case(_gptq(group_size=-1), gptq(group=-1), "q4_0"),
    "gptq-ordered": Case(_gptq(desc_act=True), gptq(shuffled=True)),
    "gptq-2-bits": Case(_gptq(2), gptq(2), "q4_0"),
    "gptq-3-bits": Case(_gptq(3), gptq(3), "q4_0"),
    "gptq-8-bits": Case(_gptq(8), gptq(8), "q8_0"),
    "gptq-float32-scales": Case(_gptq(), gptq(dtype=torch.float32)),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq, "q5_0"
    ),
}


def base_folder(path: Path, config: str = "LlamaConfig", **fields: Any) -> Path:
    """Write a random model of which all matrices have multiples of 32 rows and columns."""
    torch.manual_seed(4)
    shape = SMALL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | fields
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape))
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.05, 0.2)
    model.save_pretrained(path)
    return path


def quantized_folders(
    base: Path, path: Path, case: Case, keep: Callable[[str], bool] = lambda name: False, transposed: bool = False
) -> tuple[Path, Path]:
    """Write the model quantized, and in float32 with the exact values rounded once. Return the folders.

    Args:
        base: the model's folder.
        path: an empty folder.
        case: how to quantize.
        keep: whether a matrix stays as it is.
        transposed: whether the base stores matrices as (in, out).
    """
    rng = np.random.default_rng(5)
    stored: Stored = {}
    exact: Stored = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        whole = (
            tensor.ndim != 2
            or "embed" in name
            or "wte" in name
            or "wpe" in name
            or any(part in name for part in case.skipped)
        )
        if whole or keep(name):
            stored[name] = exact[name] = tensor
            continue
        matrix = tensor.T if transposed else tensor
        found, dense = case.pack(matrix.numpy(), rng)
        stored |= {name.removesuffix(".weight") + end: part.contiguous() for end, part in found.items()}
        floats = torch.tensor(dense.astype(np.float32))
        exact[name] = (floats.T if transposed else floats).contiguous()
    return write(base, path / "quantized", stored, case.config), write(base, path / "exact", exact, None)


def write(base: Path, path: Path, tensors: Mapping[str, torch.Tensor], quantization: Any) -> Path:
    """Write a folder with the base's config and these tensors."""
    path.mkdir(parents=True)
    config = json.loads((base / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path
