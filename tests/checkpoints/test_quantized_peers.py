"""Quantized folders against the packages that define them, where these are installed: values equal theirs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanoinfer.checkpoints.quantized.methods import dequantized
from nanoinfer.models.stored import read_safetensors

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 40, 96


def matrix(columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(3)) * 0.1


def values(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> np.ndarray:
    """Return what is read of the tensors, whose names are the ends after NAME."""
    save_file({f"{NAME}.{end}": tensor.contiguous() for end, tensor in tensors.items()}, path / "t.safetensors")
    found = dequantized(read_safetensors(path / "t.safetensors"), config, str(path), ())[0]
    assert list(found) == [f"{NAME}.weight"]
    return found[f"{NAME}.weight"].read().dense().values


SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 5, "strategy": "channel", "symmetric": False}),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize("format, options", SCHEMES, ids=[f"{i}-{f}" for i, (f, _) in enumerate(SCHEMES)])
def test_compressed_tensors(format: str, options: dict[str, Any], tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(**options)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    rows = {"tensor": 1, "block": 2}.get(options["strategy"], ROWS)
    columns = {"group": COLUMNS // 32, "block": 2}.get(options["strategy"], 1)
    state = {"weight": matrix(), "weight_scale": torch.rand(rows, columns) * 0.02 + 0.01}
    if format.startswith("mxfp4"):
        state["weight_scale"] = torch.full((rows, columns), 2.0**-4)
    if options["strategy"] == "tensor":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if not options.get("symmetric", True):
        half = 1 << options["num_bits"] - 1
        state["weight_zero_point"] = torch.randint(-half, half, (rows, columns), dtype=torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.model_dump()}},
    }
    np.testing.assert_array_equal(values(tmp_path, compressed, config), expected.float().numpy())


@pytest.mark.parametrize("kind", ["nf4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_bitsandbytes(kind: str, nested: bool, tmp_path: Path) -> None:
    """Its sums of nested scales are float32; ours are exact, so that values differ in their last bits.

    Rows are whole blocks: bitsandbytes 0.50.2 dequantizes others wrongly on a CPU with AVX-512.
    """
    logging.disable(logging.WARNING)  # the package warns that others are missing
    try:
        functional = pytest.importorskip("bitsandbytes.functional")
    finally:
        logging.disable(logging.NOTSET)
    packed, state = functional.quantize_4bit(matrix(128), blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": packed} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    found = values(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    expected = functional.dequantize_4bit(packed, state).numpy()
    if nested:
        np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("columns", [COLUMNS, 64])
def test_mxfp4_of_transformers(columns: int, tmp_path: Path) -> None:
    """As gpt-oss stores its experts; the reference returns (experts, in, out)."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, ROWS, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, ROWS, columns // 32), dtype=torch.uint8)
    save_file({"e_blocks": blocks, "e_scales": scales}, tmp_path / "t.safetensors")
    found = dequantized(read_safetensors(tmp_path / "t.safetensors"), {"quant_method": "mxfp4"}, "here", ())[0]["e"]
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(found.read().values, expected.transpose(1, 2).numpy())
