"""The effect of reduced precision: perplexity and distance from float32 on a text that the model was not trained on.

Every configuration of the native engine sees the same tokens as the reference (float32 on engine `static`), in
windows that do not overlap, and gives its whole distribution at every position. So do the weight formats of engine
`triton`, which takes gpt2 models: their values take the place of the weights in `static`, which needs no GPU. For a
GGUF file, the reference computes with its dequantized values; the blocks of the file are one more configuration of
`native`, and llama.cpp computes with the same file (pip install '.[peers]'). Printed for each: perplexity, its
difference from the reference's, the mean Kullback-Leibler divergence KL(reference, this) in nats per token, how often
the most likely token is the same, and the bytes of the packed weights.

Run: python benchmarks/quality.py [TEXT] [--model shakespeare] [--model MODEL.gguf] [--tokens N] [--window N]

TEXT is a UTF-8 file; its last 10% of characters are used (`nanoinfer train` trains on the first 90%). Without TEXT, all
of docs/inference-math.md is used. With --tokens, windows are spread evenly over the text. The table goes to stdout as
markdown, progress to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoinfer import LLM
from nanoinfer.checkpoints.load import is_gguf
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.kernels.triton.quantize import Weight, dequantize, pack_int4, pack_int8
from nanoinfer.models.transformer import Transformer
from nanoinfer.training.data import split_texts
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.arrays import to_numpy
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from vs_llamacpp import LlamaCpp

PEER = "llama.cpp, the same file"
CHUNK = 128  # positions whose logits are held at a time
WINDOW = 512
DEFAULT_TEXT = Path(__file__).parents[1] / "docs" / "inference-math.md"
Source = Callable[[list[int]], Iterator[torch.Tensor]]
"""Yields the log-probabilities after each token of a window but the last, (CHUNK, V) float64, a chunk at a time."""

REFERENCE: dict[str, Any] = {"engine": "static", "dtype": "float32"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8, float32 keys and values": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}

FILE_BLOCKS: dict[str, dict[str, Any]] = {
    "blocks of the file, float32 keys and values": {"kv_cache_dtype": "float32"},
    "blocks of the file": {},
    "blocks of the file, int8 keys and values": {"kv_cache_dtype": "int8"},
    "blocks of the file, int4 keys and values": {"kv_cache_dtype": "int4"},
}
"""Configurations for a model whose file has quantized blocks."""

VALUES = {"int8 of triton": pack_int8, "int4 of triton": pack_int4}
"""Formats that are measured with their unpacked weights."""


@dataclass
class Total:
    """Sums over positions, float64."""

    num_tokens: int = 0
    loss: float = 0.0
    """Nats."""
    divergence: float = 0.0
    """KL(reference, this), nats."""
    num_same_top: int = 0
    per_window: list[float] = field(default_factory=list)
    """Loss of each window, less the reference's: its spread is the difference's error."""


def windows(ids: list[int], block_size: int, max_tokens: int | None) -> list[list[int]]:
    """Return windows of block_size + 1 tokens that share only their ends, evenly spread: max_tokens at most."""
    count = (len(ids) - 1) // block_size
    keep = count if max_tokens is None else max(1, min(count, max_tokens // block_size))
    starts = [i * count // keep * block_size for i in range(keep)]
    return [ids[s : s + block_size + 1] for s in starts]


def distributions(engine: Engine, window: list[int]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities of an engine: a `Source` for each engine."""
    handle = engine.open()
    try:
        for at in range(0, len(window) - 1, CHUNK):
            inputs = window[at : min(at + CHUNK, len(window) - 1)]
            batch = StepBatch()
            batch.add(handle, inputs, len(inputs))
            yield torch.from_numpy(to_numpy(engine.extend(batch))).double().log_softmax(-1)
    finally:
        engine.close(handle)


def of_llamacpp(system: LlamaCpp, window: list[int]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities of llama.cpp: a `Source`."""
    system.clear()
    for at in range(0, len(window) - 1, CHUNK):
        logits = system.run([(0, window[at : min(at + CHUNK, len(window) - 1)], True)])
        yield torch.from_numpy(logits).double().log_softmax(-1)


def compare(sources: dict[str, Source], texts: list[list[int]]) -> dict[str, Total]:
    """Run all sources side by side; the first is the reference."""
    totals = {name: Total() for name in sources}
    with ProgressBar("windows") as bar:
        for i, window in enumerate(texts):
            bar.update(i, len(texts))
            _add_window(sources, window, totals)
    return totals


def _add_window(sources: dict[str, Source], window: list[int], totals: dict[str, Total]) -> None:
    """Add one window's figures of every source to the totals."""
    before = {name: t.loss for name, t in totals.items()}
    at = 1
    for chunk in zip(*(source(window) for source in sources.values()), strict=True):
        reference = chunk[0]
        targets = torch.tensor(window[at : at + len(reference)])[:, None]
        at += len(reference)
        for total, mine in zip(totals.values(), chunk, strict=True):
            total.num_tokens += len(mine)
            total.loss -= mine.gather(-1, targets).sum().item()
            total.divergence += (reference.exp() * (reference - mine)).sum().item()
            total.num_same_top += int((mine.argmax(-1) == reference.argmax(-1)).sum())
    losses = {name: t.loss - before[name] for name, t in totals.items()}
    for name, total in totals.items():
        total.per_window.append(losses[name] - losses["reference"])


def weight_bytes(engine: Engine) -> int:
    """Return the bytes of an engine's weights."""
    decoder = getattr(engine, "_decoder", None)
    if decoder is not None:
        return int(decoder.weight_bytes)
    model: torch.nn.Module = engine.model  # type: ignore[attr-defined]
    return sum(p.numel() * p.element_size() for p in model.parameters())


def round_weights(model: Transformer, pack: Callable[[torch.Tensor], Weight]) -> int:
    """Replace a model's linear weights by the values of their packed format; return the bytes of the packed weights."""
    num_bytes = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = pack(module.weight.data)
            module.weight = torch.nn.Parameter(dequantize(weight), requires_grad=False)  # the embedding keeps its own
            num_bytes += weight.num_bytes()
    return num_bytes


def load(model: str, threads: int | None, window: int) -> tuple[LLM, dict[str, Source], dict[str, int]]:
    """Return the reference, and the source and the bytes of weights of each configuration, the reference first."""
    common: dict[str, Any] = {"max_num_seqs": 1}
    native = common | {"engine": "native", "threads": threads}
    quantized = is_gguf(Path(model))
    reference = LLM(model, **common, **REFERENCE)
    llms = {"reference": reference}
    for name, options in (CONFIGURATIONS | (FILE_BLOCKS if quantized else {})).items():
        llms[name] = LLM(model, **native, **options)
    sizes = {name: weight_bytes(llm.engine) for name, llm in llms.items()}
    for name, pack in VALUES.items() if reference.config.is_gpt2 else ():
        llms[name] = LLM(model, **common, **REFERENCE)
        sizes[name] = round_weights(llms[name].engine.model, pack)  # type: ignore[attr-defined]
    sources: dict[str, Source] = {name: partial(distributions, llm.engine) for name, llm in llms.items()}
    if quantized and importlib.util.find_spec("llama_cpp") is not None:
        from vs_llamacpp import LlamaCpp

        sources[PEER] = partial(of_llamacpp, LlamaCpp(model, 1, window, threads))
        sizes[PEER] = Path(model).stat().st_size
    elif quantized:
        print("quality: llama.cpp is left out: pip install '.[peers]'", file=sys.stderr)
    return reference, sources, sizes


def measure(model: str, text: str, max_tokens: int | None, threads: int | None, window: int = WINDOW) -> list[str]:
    """Return the lines of one model's section."""
    first, sources, sizes = load(model, threads, window)
    c = first.config
    window = min(window, c.block_size)
    texts = windows(first.tokenize(text), window, max_tokens)
    if not texts or len(texts[0]) < 2:
        raise NanoinferError(f"the text is shorter than one window of {window} tokens")
    totals = compare(sources, texts)
    reference = totals.pop("reference")
    n = reference.num_tokens
    num_parameters = first.engine.model.num_parameters()  # type: ignore[attr-defined]
    lines = [
        f"## {Path(model).name}: {c.n_layer} layers, {c.n_embd} wide, {num_parameters:,} parameters",
        "",
        f"{n:,} tokens in {len(texts)} windows of {window}. Reference (float32, engine static): perplexity"
        f" {math.exp(reference.loss / n):.4f}, {reference.loss / n:.4f} nats per token.",
        "",
        "| weights | MB | perplexity | against float32 | KL, nats per token | same most likely token |",
        "|---|---|---|---|---|---|",
    ]
    for name, t in totals.items():
        d = (t.loss - reference.loss) / n
        spread = torch.tensor(t.per_window).std().item() * math.sqrt(len(texts)) / n if len(texts) > 1 else math.nan
        lines.append(
            f"| {name} | {sizes[name] / 1e6:.1f} | {math.exp(t.loss / n):.4f} |"
            f" {100 * math.expm1(d):+.3f}% (± {200 * spread:.3f}) | {t.divergence / n:.6f} |"
            f" {100 * t.num_same_top / n:.2f}% |"
        )
    return [*lines, ""]


def read(path: Path | None) -> str:
    """Return the text to measure on: the end of a file on whose beginning a model was trained, or the default."""
    if path is not None:
        _, (held_out,) = split_texts([path.read_text(encoding="utf-8")], TrainConfig.val_fraction)
        return held_out
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    print(f"Text: docs/{DEFAULT_TEXT.name}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}...\n")
    return text


def main() -> int:
    """Print a section for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("text", type=Path, nargs="?", help="UTF-8 text, of which the last 10%% are used")
    parser.add_argument("--model", action="append", help="repeat for several; default: shakespeare")
    parser.add_argument("--tokens", type=int, help="tokens to use at most; default: all")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window; default: %(default)s")
    parser.add_argument("--threads", type=int, help="threads of the native engine")
    args = parser.parse_args()
    try:
        text = read(args.text)
        for model in args.model or ["shakespeare"]:
            print("\n".join(measure(model, text, args.tokens, args.threads, args.window)), flush=True)
    except (NanoinferError, OSError, UnicodeDecodeError) as e:
        print(f"quality: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
