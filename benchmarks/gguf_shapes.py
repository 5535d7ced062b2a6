"""Write GGUF files in the shape of published models and in the formats of llama.cpp's quantizer, to measure speed.

    python benchmarks/gguf_shapes.py FOLDER --shape qwen3-0.6b --format Q4_K_M   # repeat both for several

Each tensor has the format that `llama-quantize` without an importance matrix gives it (src/llama-quant.cpp). Its
rows are 32 rows of random weights, quantized by ggml and repeated: speed depends on shapes and formats only, and a file
of 4 billion weights takes seconds. It needs llama-cpp-python and gguf (pip install '.[peers]').
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf import export as gguf_export
from nanoinfer.checkpoints.gguf.tokenizer import write_no_tokenizer
from nanoinfer.checkpoints.weights import Weights, more_bits
from nanoinfer.config import Experts, ModelConfig, Rotary
from nanoinfer.models.parameters import initialize
from nanoinfer.models.presets import PRESETS

FORMATS = {"Q4_K_M": 15, "Q6_K": 18, "Q8_0": 7, "IQ4_XS": 30}
"""Formats of whole files, and llama.cpp's numbers of them."""
ROWS = 32
SHAPES = PRESETS | {
    # Qwen3-30B-A3B: its widths and its 8 experts a token, with 12 of 48 layers and 64 of 128 experts
    "qwen3-30b-a3b-cut": replace(
        PRESETS["qwen3-4b"], n_embd=2048, n_layer=12, n_head=32, num_kv_heads=4, head_size=128, family="qwen3_moe",
        layers=tuple(replace(kind, experts=True) for kind in PRESETS["qwen3-4b"].layers[:12]),
        experts=Experts(64, 8, 768, normalize=True), tie_word_embeddings=False,
    ),
}  # fmt: skip


def format_of(name: str, shape: tuple[int, ...], file_format: str, config: ModelConfig) -> str:
    """Return the format that llama.cpp's quantizer gives a tensor: ("blk.0.attn_v.weight", ...) -> "Q6_K"."""
    part = name.split(".")[-2]
    if gguf_export.format_of(name, shape, "F16") == "F32" or part in (
        "ssm_conv1d",
        "ssm_norm",
        "conv",
        name.split(".")[1],
    ):
        return "F32"
    if file_format == "Q8_0":
        return gguf_export.format_of(name, shape, file_format)
    if file_format == "Q6_K" or part == ("token_embd" if config.tie_word_embeddings else "output"):
        return "Q6_K"
    if file_format == "Q4_K_M" or part.endswith("_exps"):
        better = part in ("attn_v", "attn_qkv") or part.startswith("ffn_down")
        return "Q6_K" if better and more_bits(int(name.split(".")[1]), config.n_layer) else "Q4_K"
    grouped = part == "attn_v" and config.n_head // config.n_kv_head >= 4
    early = part == "ffn_down" and int(name.split(".")[1]) < config.n_layer // 8
    return "Q5_K" if grouped or early else "IQ4_XS"


NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""Formats of rows that are no multiple of 256, as llama.cpp's quantizer chooses them."""


@functools.cache
def blocks_of(format: str, width: int) -> NDArray[np.uint8]:
    """Return ROWS rows of `width` random weights as ggml quantizes them, (ROWS, bytes of a row)."""
    import gguf
    import llama_cpp

    library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so*"))))
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    kind = gguf.GGMLQuantizationType[format]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    values = 0.02 * np.random.default_rng(0).standard_normal((ROWS, width), np.float32)
    blocks = np.empty((ROWS, width // size * num_bytes), np.uint8)
    library.ggml_quantize_chunk(kind, values.ctypes.data, blocks.ctypes.data, 0, *values.shape, None)
    return blocks


def write(path: Path, shape: str, file_format: str) -> None:
    """Write a file. The metadata is that of `nanoinfer export` for the same shape with one layer."""
    import gguf

    config = SHAPES[shape]
    architecture, metadata, tensors = hybrid(config) if config.recurrence else _exported(config, path.parent, shape)
    writer = gguf.GGUFWriter(path, architecture)
    metadata |= {"general.file_type": FORMATS[file_format]}
    for name, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, gguf.GGUFValueType.UINT32 if type(value) is int else kind)
    for name, dims, values in tensors:
        format = format_of(name, dims, file_format, config)
        if format == "F32":
            writer.add_tensor(name, values)
            continue
        format = NARROW.get(format, format) if dims[-1] % 256 else format
        blocks = blocks_of(format, dims[-1])
        rows = np.resize(blocks, (*dims[:-1], blocks.shape[1]))
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Tensor = tuple[str, tuple[int, ...], NDArray[np.generic]]
"""Name, shape, and values, which are not used where the format is not float32."""


def _exported(config: ModelConfig, folder: Path, shape: str) -> tuple[str, dict[str, Any], Iterator[Tensor]]:
    """Return the architecture, the metadata and the tensors of what `nanoinfer export` writes of one layer."""
    import gguf

    small = replace(config, n_layer=1, layers=config.layers[:1])
    with tempfile.TemporaryDirectory(dir=folder) as part:
        one = Path(part) / "one.gguf"
        weights = Weights(small, "float32", lambda: initialize(small, 0))
        gguf_export.write_file(weights, one, "F16", write_no_tokenizer(small), shape)
        reader = gguf.GGUFReader(one)
        metadata = {n: f.contents() for n, f in reader.fields.items() if not n.startswith(("GGUF.", "general.arch"))}
        architecture = reader.fields["general.architecture"].contents()
        tensors = [(t.name, tuple(map(int, reversed(t.shape))), np.array(t.data)) for t in reader.tensors]
    return architecture, metadata | {f"{architecture}.block_count": config.n_layer}, _repeated(tensors, config.n_layer)


def hybrid(config: ModelConfig) -> tuple[str, dict[str, Any], Iterator[Tensor]]:
    """Return the same of a model with recurrent layers, in llama.cpp's names (conversion/{qwen,lfm2,granite}.py)."""
    state = config.recurrence
    assert state is not None
    rotary = next((kind.rotary for kind in config.layers if kind.rotary is not None), Rotary(config.head_dim))
    delta, heads = state.rule == "delta", [0 if kind.recurrent else config.n_kv_head for kind in config.layers]
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size, "block_count": config.n_layer, "context_length": config.block_size,
        "embedding_length": config.n_embd, "feed_forward_length": config.mlp_dim, "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head if delta else heads, "rope.freq_base": rotary.base,
        "attention.layer_norm_rms_epsilon": config.norm_epsilon,
    }  # fmt: skip
    ssm = {
        "ssm.conv_kernel": state.taps, "ssm.state_size": state.key_dim, "ssm.group_count": state.num_key_heads,
        "ssm.time_step_rank": state.num_heads, "ssm.inner_size": state.inner_dim,
    }  # fmt: skip
    fields |= {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": rotary.dim, "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4, **ssm,
    } if delta else {"shortconv.l_cache": state.taps} if state.rule == "conv" else {
        "attention.scale": config.attention_scale, "embedding_scale": float(config.embedding_scale or 1),
        "residual_scale": config.residual_scale, "logit_scale": 1 / (config.final_scale or 1), "expert_count": 0,
        "rope.scaling.finetuned": False, **ssm,
    }  # fmt: skip
    name = {"delta": "qwen35", "conv": "lfm2", "mamba2": "granitehybrid"}[state.rule]
    metadata = {f"{name}.{key}": value for key, value in fields.items()}
    return name, metadata | {"tokenizer.ggml.model": "no_vocab"}, _hybrid_tensors(config, state.rule)


def _hybrid_tensors(config: ModelConfig, rule_name: str) -> Iterator[Tensor]:
    delta, mamba = rule_name == "delta", rule_name == "mamba2"
    state, C, F, D = config.recurrence, config.n_embd, config.mlp_dim, config.head_dim
    assert state is not None
    queries = (1 + config.attention_gate) * config.n_head * D
    both = {"attn_norm": (C,), "post_attention_norm" if delta else "ffn_norm": (C,), "ffn_gate": (F, C),
            "ffn_up": (F, C), "ffn_down": (C, F)}  # fmt: skip
    attention = {"attn_q": (queries, C), "attn_k": (config.kv_dim, C), "attn_v": (config.kv_dim, C),
                 "attn_output": (C, config.n_head * D)}  # fmt: skip
    attention |= {} if mamba else {"attn_q_norm": (D,), "attn_k_norm": (D,)}
    convolution = {"shortconv.in_proj": (3 * C, C), "shortconv.out_proj": (C, C), "shortconv.conv": (C, state.taps)}
    convolution = {
        "ssm_in": (state.inner_dim + state.num_channels + state.num_heads, C),
        "ssm_conv1d": (state.num_channels, state.taps),
        "ssm_conv1d.bias": (state.num_channels,), "ssm_dt": (state.num_heads,),
        "ssm_a": (state.num_heads, 1),
        "ssm_d": (state.num_heads, 1), "ssm_norm": (state.num_key_heads, state.inner_dim // state.num_key_heads),
        "ssm_out": (C, state.inner_dim),
    } if mamba else convolution  # fmt: skip
    rule = {
        "attn_qkv": (state.num_channels, C), "attn_gate": (state.inner_dim, C), "ssm_beta": (state.num_heads, C),
        "ssm_alpha": (state.num_heads, C), "ssm_conv1d": (state.num_channels, state.taps), "ssm_dt": (state.num_heads,),
        "ssm_a": (state.num_heads,), "ssm_norm": (state.value_dim,), "ssm_out": (C, state.inner_dim),
    }  # fmt: skip
    ends = {"ssm_dt": ".bias", "ssm_a": "", "ssm_d": "", "ssm_conv1d.bias": ""}
    norm = "token_embd_norm" if rule_name == "conv" else "output_norm"
    names = {"token_embd.weight": (config.vocab_size, C), f"{norm}.weight": (C,)}
    for layer, kind in enumerate(config.layers):
        parts: dict[str, tuple[int, ...]] = both | ((rule if delta else convolution) if kind.recurrent else attention)
        names |= {f"blk.{layer}.{part}{ends.get(part, '.weight')}": dims for part, dims in parts.items()}
    for name, dims in names.items():
        small = math.prod(dims) < 2**16
        yield name, dims, np.full(dims if small else 1, -1 if name.endswith("ssm_a") else 0.2, np.float32)


def _repeated(tensors: list[Tensor], n_layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a model of n_layer layers that are all like the first."""
    yield from (t for t in tensors if not t[0].startswith("blk."))
    for layer in range(n_layer):
        for name, dims, values in tensors:
            if name.startswith("blk."):
                yield name.replace("blk.0.", f"blk.{layer}."), dims, values


def main() -> None:
    """Write the files that do not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), required=True)
    parser.add_argument("--format", action="append", choices=list(FORMATS), required=True)
    given = parser.parse_args()
    for shape in given.shape:
        for format in given.format:
            if not (path := given.folder / f"{shape}.{format}.gguf").exists():
                write(path, shape, format)
            print(path, f"{path.stat().st_size / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
