"""int4 and llama.cpp's Q4_K_M made from the same floats: distance from these floats.

    python benchmarks/same_floats.py --model shakespeare --text play.txt
    python benchmarks/same_floats.py --model SmolLM2-135M-Instruct.Q4_1.gguf

The model is written as a GGUF file in F16, whose values are the reference (float32, engine `static`). From it are made
int4 of `native` and llama.cpp's Q4_K_M. The values of a quantized file lie on a grid that a format with the same
groups could hit: the channels of the residual stream, of the MLPs and of the values are therefore permuted first, which
changes the order of the sums alone. Keys and values are float32 in `native`, float16 in llama.cpp.

It needs llama-cpp-python (pip install '.[peers]'). Of --text the last 10% are used, as in quality.py.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import quality
from numpy.typing import NDArray
from vs_llamacpp import LlamaCpp

from nanoinfer import LLM
from nanoinfer.checkpoints.gguf import export as gguf_export
from nanoinfer.checkpoints.load import load_model
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.parameters import LAYER
from nanoinfer.utils.arrays import HostTensor

Order = NDArray[np.intp]


def permuted(weights: Weights, seed: int = 0) -> Weights:
    """Return a model that computes the same function with other orders of its channels, in float32."""
    generator = np.random.default_rng(seed)
    config = weights.config
    stream = generator.permutation(config.n_embd)
    orders = [_layer_orders(config, stream, generator) for _ in range(config.n_layer)]

    def read() -> Iterator[tuple[str, HostTensor]]:
        for name, tensor in weights.read():
            values, layer = tensor.float32(), LAYER.match(name)
            part = name.split(".")[-2]
            if layer is None:  # embeddings, norms and the head: the last dimension is the stream
                values = values if name == "lm_head.bias" else values[..., stream]
            elif part not in ("q_norm", "k_norm"):  # within a head, which stays as it is
                rows, columns = orders[int(layer[1])].get(".".join(name.split(".")[3:5]), (stream, None))
                values = values[rows] if values.ndim == 1 else values[rows][:, columns]
            yield name, HostTensor(np.ascontiguousarray(values), "float32")

    return replace(weights, read=read, stored_dtype="float32", block_formats={})


def _layer_orders(config: ModelConfig, stream: Order, generator: np.random.Generator) -> dict[str, tuple[Order, Order]]:
    """Return the orders of the rows and columns of a layer's matrices."""
    D, mlp = config.head_dim, generator.permutation(config.mlp_dim)
    heads = [generator.permutation(D) for _ in range(config.n_kv_head)]  # of the values
    shared, first = config.n_head // config.n_kv_head, config.attn_dim + config.kv_dim
    values = np.concatenate([first + k * D + order for k, order in enumerate(heads)])
    attended = np.concatenate([h * D + heads[h // shared] for h in range(config.n_head)])
    return {
        "attn.c_attn": (np.concatenate([np.arange(first), values]), stream),
        "attn.c_proj": (stream, attended),
        "mlp.c_fc": (mlp, stream),
        "mlp.c_gate": (mlp, stream),
        "mlp.c_proj": (stream, mlp),
    }


def quantize_by_llamacpp(source: Path, target: Path) -> None:
    """Write a GGUF file in Q4_K_M by llama.cpp's quantizer."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    options: Any = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


def sources_of(model: str, folder: Path) -> tuple[LLM, dict[str, quality.Source], dict[str, int], bool]:
    """Write the models to a folder. Return the reference, each system, its bytes, and whether channels are permuted."""
    loaded, floats = load_model(model), folder / "floats.gguf"
    is_permuted = bool(loaded.weights.block_formats)
    if is_permuted:
        loaded.weights = permuted(loaded.weights)
    gguf_export.write_file(loaded.weights, floats, "F16", gguf_export.describe_text(loaded), "floats")
    loaded = load_model(str(floats))
    weights = loaded.weights
    quantize_by_llamacpp(floats, folder / "theirs.gguf")
    common: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": min(quality.WINDOW, weights.config.block_size)}
    native = common | {"engine": "native", "kv_cache_dtype": "float32"}
    llms = {
        "reference": LLM(str(floats), **common, **quality.REFERENCE),
        "int4 of `native`": LLM(str(floats), **native, quantization="int4"),
    }
    files = {"llama.cpp's Q4_K_M": "theirs"}
    llms |= {f"{name}, by `native`": LLM(str(folder / f"{file}.gguf"), **native) for name, file in files.items()}
    sizes = {name: quality.weight_bytes(llm.engine) for name, llm in llms.items()}
    sources: dict[str, quality.Source] = {n: partial(quality.distributions, llm.engine) for n, llm in llms.items()}
    for name, file in files.items():
        path = folder / f"{file}.gguf"
        sources[f"{name}, by llama.cpp"] = partial(quality.of_llamacpp, LlamaCpp(str(path), 1, common["max_model_len"]))
        sizes[f"{name}, by llama.cpp"] = path.stat().st_size
    return llms["reference"], sources, sizes, is_permuted


def main() -> int:
    """Print the table of a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="shakespeare", help="default: %(default)s")
    parser.add_argument("--text", type=Path, help="text to measure on, as TEXT of quality.py")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to measure on; default: %(default)s")
    args = parser.parse_args()
    try:
        text = quality.read(args.text)
        with tempfile.TemporaryDirectory() as folder:
            reference, sources, sizes, is_permuted = sources_of(args.model, Path(folder))
            window = min(quality.WINDOW, reference.config.block_size)
            texts = quality.windows(reference.tokenize(text), window, args.tokens)
            totals = quality.compare(sources, texts)
    except (NanoinferError, OSError, UnicodeDecodeError, RuntimeError) as e:
        print(f"same_floats: {e}", file=sys.stderr)
        return 1
    print_table(totals, sizes, f"{Path(args.model).name}{', channels permuted' if is_permuted else ''}")
    return 0


def print_table(totals: dict[str, quality.Total], sizes: dict[str, int], title: str) -> None:
    """Print the figures of each system as markdown."""
    reference = totals["reference"]
    n = reference.num_tokens
    print(f"{title}: {n:,} tokens in windows; perplexity of the floats {math.exp(reference.loss / n):.4f}\n")
    print("| made from the same floats | MB | perplexity | KL | same most likely token |\n|---|---:|---:|---:|---:|")
    for name, t in totals.items():
        if name != "reference":
            figures = f"{math.exp(t.loss / n):.4f} | {t.divergence / n:.5f} | {100 * t.num_same_top / n:.1f}%"
            print(f"| {name} | {sizes[name] / 1e6:.2f} | {figures} |")


if __name__ == "__main__":
    sys.exit(main())
