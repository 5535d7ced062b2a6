"""Seeds of quantized folders: a tiny Llama whose matrices have random codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load, save
from seeds import TINY

from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import LayerKind, Rotary
from nanoinfer.models.parameters import initialize

CONFIG = replace(
    TINY, family="llama", n_embd=32, norm="rms", gated_mlp=True, learned_positions=False, bias=False, activation="silu",
    n_inner=64, tie_word_embeddings=False, layers=(LayerKind(rotary=Rotary(16)),),
)  # fmt: skip
Tensors = dict[str, torch.Tensor]


def words(*shape: int) -> torch.Tensor:
    """Return random 32-bit words."""
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(0)).int()


def gptq(rows: int, columns: int) -> Tensors:
    """Return the tensors of a matrix of 4 bits in groups of 32."""
    groups = columns // 32
    return {
        "qweight": words(columns // 8, rows), "qzeros": words(groups, rows // 8),
        "scales": torch.full((groups, rows), 0.01, dtype=torch.float16), "g_idx": torch.arange(columns).int() // 32,
    }  # fmt: skip


def packed(rows: int, columns: int) -> Tensors:
    """Return the tensors of a matrix of compressed-tensors with 4 bits and zero points."""
    return {
        "weight_packed": words(rows, columns // 8), "weight_scale": torch.full((rows, columns // 32), 0.01),
        "weight_zero_point": words(rows // 8, columns // 32), "weight_shape": torch.tensor([rows, columns]),
    }  # fmt: skip


def fp8(rows: int, columns: int) -> Tensors:
    """Return the tensors of a matrix of FP8 with blocks of 16 x 32."""
    codes = words(rows, columns // 4).view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.full((rows // 16, columns // 32), 0.01)}


def nf4(rows: int, columns: int) -> Tensors:
    """Return the tensors of a matrix of bitsandbytes with nested scales."""
    state = {"blocksize": 64, "shape": [rows, columns], "nested_blocksize": 256, "nested_offset": 0.5}
    blocks = rows * columns // 64
    return {
        "weight": words(rows * columns // 8, 1).view(torch.uint8).reshape(-1, 1),
        "weight.absmax": torch.zeros(blocks, dtype=torch.uint8), "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.nested_absmax": torch.ones(-(-blocks // 256)), "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip


def ternary(rows: int, columns: int) -> Tensors:
    """Return the tensors of a matrix of BitNet's."""
    return {"weight": words(rows // 4, columns // 4).view(torch.uint8), "weight_scale": torch.tensor([0.25])}


METHODS: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "packed": (packed, {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "ternary": (ternary, {"quant_method": "bitnet", "linear_class": "autobitlinear"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}  # fmt: skip


@cache
def quantized_folder(method: str) -> dict[str, bytes]:
    """Return the files of a model: name -> content."""
    make, described = METHODS[method]
    with TemporaryDirectory() as folder:
        huggingface.save(Weights(CONFIG, "float32", partial(initialize, CONFIG, 0)), Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    tensors: Tensors = {}
    for name, tensor in load(files["model.safetensors"]).items():
        if "proj" in name:
            found = make(*tensor.shape)
            tensors |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in found.items()}
        else:
            tensors[name] = tensor
    files["model.safetensors"] = save(tensors)
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"quantization_config": described}).encode()
    return files
