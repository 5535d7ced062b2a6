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
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf import export as gguf_export
from nanoinfer.checkpoints.gguf.tokenizer import write_no_tokenizer
from nanoinfer.checkpoints.weights import Weights, more_bits
from nanoinfer.config import Experts, ModelConfig
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
    if gguf_export.format_of(name, shape, "F16") == "F32" or file_format == "Q8_0":
        return gguf_export.format_of(name, shape, file_format)
    part = name.split(".")[-2]
    if file_format == "Q6_K" or part == ("token_embd" if config.tie_word_embeddings else "output"):
        return "Q6_K"
    if file_format == "Q4_K_M" or part.endswith("_exps"):
        better = part in ("attn_v", "attn_qkv") or part.startswith("ffn_down")
        return "Q6_K" if better and more_bits(int(name.split(".")[1]), config.n_layer) else "Q4_K"
    grouped = part == "attn_v" and config.n_head // config.n_kv_head >= 4
    early = part == "ffn_down" and int(name.split(".")[1]) < config.n_layer // 8
    return "Q5_K" if grouped or early else "IQ4_XS"


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
    small = replace(config, n_layer=1, layers=config.layers[:1])
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        one = Path(folder) / "one.gguf"
        gguf_export.write_file(
            Weights(small, "float32", lambda: initialize(small, 0)), one, "F16", write_no_tokenizer(small), shape
        )
        reader = gguf.GGUFReader(one)
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            value = field.contents()
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            if name.endswith(".block_count"):
                value = config.n_layer
            writer.add_key_value(name, FORMATS[file_format] if name == "general.file_type" else value, field.types[0])
        tensors = [(t.name, tuple(map(int, reversed(t.shape))), np.array(t.data)) for t in reader.tensors]
        for name, dims, values in _repeated(tensors, config.n_layer):
            format = format_of(name, dims, file_format, config)
            if format == "F32":
                writer.add_tensor(name, values)
                continue
            blocks = blocks_of(format, dims[-1])
            rows = np.resize(blocks, (*dims[:-1], blocks.shape[1]))
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[format])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


Tensor = tuple[str, tuple[int, ...], NDArray[np.generic]]


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
