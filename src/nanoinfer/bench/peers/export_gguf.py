"""A Hugging Face folder as a GGUF file of architecture "gpt2".

The `gguf` package writes float32; the other types are made from that file by llama.cpp's own quantizer, so that
they are what its users get: Q4_0 keeps a tied embedding in 8 bits or 6 (Q8_0, Q6_K), positions and everything with one
dimension stay float32.

Covered: tied and untied heads, any MLP width. Not covered: exact GELU (llama.cpp's GPT-2 has the tanh
approximation only), and in Q8_0 and Q4_0 widths that are no multiple of 32. The vocabulary is "t0", "t1", ...:
prompts of a benchmark are token ids, but llama.cpp loads no file without a tokenizer.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from nanoinfer.bench.backends.capabilities import require_module, silence_llama_cpp
from nanoinfer.bench.peers import export_once
from nanoinfer.checks import require_choice
from nanoinfer.config import ModelConfig
from nanoinfer.environment import num_cpus
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import hf_config
from nanoinfer.models.checkpoints.huggingface import load_folder

FILE_TYPES = {  # llama.cpp's name -> its constant of the quantizer
    "F32": "LLAMA_FTYPE_ALL_F32",
    "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
}
QUANT_BLOCK = 32  # weights of Q8_0 and Q4_0 that share a scale
_FILE = "model.gguf"
_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LAYER = re.compile(r"transformer\.h\.(\d+)\.(.+)")


def export_gguf(weights: Path, folder: Path, file_type: str) -> Path:
    """Return a GGUF file, written if it is not there.

    Args:
        weights: Hugging Face folder.
        folder: the file is made in its sub-folder `gguf-<file_type>`; all but F32 need and keep the F32 one.
        file_type: llama.cpp's name for the format of the weights: one of FILE_TYPES.

    Raises:
        NanoinferError: unknown type, a model that the format cannot hold, gguf or llama_cpp is missing, or a
            folder cannot be read or written.
    """
    require_choice("file_type", file_type, tuple(FILE_TYPES))
    config = hf_config.read(weights / "config.json")
    if config.activation != "gelu_new":
        raise NanoinferError(
            f"{weights}: activation={config.activation!r} cannot be exported: llama.cpp's GPT-2 has gelu_new only"
        )
    for name, width in (("n_embd", config.n_embd), ("n_inner", config.mlp_dim)):
        if file_type.startswith("Q") and width % QUANT_BLOCK:
            raise NanoinferError(
                f"{weights}: {name}={width} cannot be exported as {file_type}: it is no multiple of {QUANT_BLOCK}"
            )
    if file_type == "F32":
        require_module("gguf")
        made = export_once(folder / "gguf-F32", weights, lambda partial: _write_f32(weights, partial / _FILE))
        return made / _FILE
    source = export_gguf(weights, folder, "F32")
    made = export_once(
        folder / f"gguf-{file_type}", weights, lambda partial: _quantize(source, partial / _FILE, file_type)
    )
    return made / _FILE


def gguf_name(name: str) -> str:
    """transformer.h.3.attn.c_attn.weight -> blk.3.attn_qkv.weight."""
    stem, _, kind = name.rpartition(".")
    if match := _LAYER.fullmatch(stem):
        return f"blk.{match.group(1)}.{_LAYER_NAMES[match.group(2)]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _write_f32(weights: Path, path: Path) -> None:
    """Write the float32 file."""
    gguf = require_module("gguf")
    model, config = load_folder(weights)
    writer = gguf.GGUFWriter(str(path), "gpt2")
    try:
        writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
        writer.add_block_count(config.n_layer)
        writer.add_context_length(config.block_size)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(config.mlp_dim)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        _add_tokenizer(writer, config)
        for name, p in model.state_dict().items():
            if name != "lm_head.weight" or not config.tie_word_embeddings:
                writer.add_tensor(gguf_name(name), p.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_tokenizer(out: Any, config: ModelConfig) -> None:
    """Add the least that llama.cpp takes for a tokenizer: byte-level BPE with one merge."""
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    out.add_token_merges(["t 0"])
    out.add_bos_token_id(0)  # the default, 11, need not be in a small vocabulary
    out.add_eos_token_id(0)
    out.add_add_bos_token(False)


def _quantize(source: Path, path: Path, file_type: str) -> None:
    """Write a float32 file in another type."""
    llama_cpp = require_module("llama_cpp")
    silence_llama_cpp()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, FILE_TYPES[file_type])
    params.nthread = num_cpus()
    code = llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(params))
    if code:
        raise NanoinferError(f"{source} cannot be quantized to {file_type}: llama.cpp's quantizer returned {code}")
