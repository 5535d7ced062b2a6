"""Seeds of the fuzzers: small valid inputs of every kind, written by the project itself."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers as hf
from nanoinfer.bench import results
from nanoinfer.bench.case import Case, Figures, Row
from nanoinfer.checkpoints import huggingface, nanogpt
from nanoinfer.checkpoints.gpt_loading import init_weights, weights_of
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.models.transformer import Transformer
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.training import loop
from nanoinfer.training.train_config import TrainConfig
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CHARS = "\n abcdefgh\u00e9\U0001f600"
TINY = ModelConfig(vocab_size=len(CHARS), block_size=8, n_layer=1, n_head=2, n_embd=4, bos_token_id=0)
TEXT = "a bad cab fed a deaf bee; he had a \u00e9 and a \U0001f600. " * 8


@cache
def model_folder(shards: bool = False) -> dict[str, bytes]:
    """Return the files of a tiny model: name -> content."""
    from tempfile import TemporaryDirectory

    gpt = Transformer(TINY)
    init_weights(gpt, TINY.n_layer, 0)
    with TemporaryDirectory() as folder:
        huggingface.save(weights_of(gpt), Path(folder), tokenizers.char_to_json(CHARS))
        files = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    if shards:
        files["a.safetensors"] = files.pop("model.safetensors")
    return files


@cache
def packed_folder(weights: str = "int8") -> dict[str, bytes]:
    """Return the files of a tiny model with packed weights: name -> content."""
    from tempfile import TemporaryDirectory

    from nanoinfer.checkpoints import packed
    from nanoinfer.checkpoints.load import load_model

    with TemporaryDirectory() as source, TemporaryDirectory() as folder:
        for name, content in model_folder().items():
            (Path(source) / name).write_bytes(content)
        tokenizer = tokenizers.char_to_json(CHARS)
        packed.write_folder(load_model(source).weights, Path(folder), weights, tokenizer, threads=1)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


@cache
def exported() -> list[bytes]:
    """Return GGUF files as `nanoinfer export` writes them: a Llama in F16 and a GPT-2 in Q8_0, with tokenizers."""
    from tempfile import TemporaryDirectory

    from nanoinfer.checkpoints.gguf import export as gguf_export
    from nanoinfer.checkpoints.load import LoadedModel
    from nanoinfer.checkpoints.weights import Weights
    from nanoinfer.models.parameters import initialize

    tokenizer, made = tokenizers.from_json(trained()["bpe"], "bpe"), []
    gpt2 = replace(TINY, vocab_size=tokenizer.vocab_size + 2, n_embd=32)
    rotary = (LayerKind(rotary=Rotary(256, scaling="llama3", factor=8.0, original_context=8192)),)
    llama = replace(
        gpt2, family="llama", n_embd=256, n_head=1, norm="rms", gated_mlp=True, learned_positions=False, bias=False,
        activation="silu", layers=rotary,
    )  # fmt: skip
    for config, format in ((llama, "F16"), (gpt2, "Q8_0")):
        weights = Weights(config, "float32", partial(initialize, config, 0))
        model = LoadedModel("m", config, tokenizer, weights=weights)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "a.gguf"
            gguf_export.write_file(model.weights, path, format, gguf_export.describe_text(model), "m")
            made.append(path.read_bytes())
    return made


def without(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """Return all files but one."""
    return {k: v for k, v in files.items() if k != name}


def make_index() -> list[bytes]:
    """Return an index of one shard."""
    return [b'{"metadata": {"total_size": 9}, "weight_map": {"wte.weight": "a.safetensors", "b": "a.safetensors"}}']


def make_meta() -> list[bytes]:
    """Return nanoGPT's meta.pkl in three pickle protocols."""
    ids = {c: i for i, c in enumerate(CHARS)}
    meta = {"vocab_size": len(ids), "itos": {i: c for c, i in ids.items()}, "stoi": ids}
    return [pickle.dumps(meta, protocol) for protocol in (0, 2, 4)]


def make_tiktoken() -> list[bytes]:
    """Return nanochat's tokenizer.pkl in two pickle protocols."""
    import tiktoken

    tokens = [*(bytes([i]) for i in range(256)), b"ab", b"abc", b"  "]
    ranks = {token: i for i, token in enumerate(tokens)}
    special = {"<|bos|>": len(ranks), "<|assistant_end|>": len(ranks) + 1}
    made = tiktoken.Encoding("rustbpe", pat_str=nanogpt.PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return [pickle.dumps(made, protocol) for protocol in (3, 4)]


@cache
def trained() -> dict[str, str]:
    """Return a tokenizer.json of every kind: name -> content."""
    special = ["<unk>", "[UNK]", "[SEP]"]
    kinds: dict[str, tuple[Any, Any, Any, Any]] = {
        "bpe": (models.BPE(), trainers.BpeTrainer(vocab_size=280, show_progress=False, special_tokens=["<|endoftext|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet()), pre_tokenizers.ByteLevel(add_prefix_space=False),
                decoders.ByteLevel()),
        "unigram": (models.Unigram(), trainers.UnigramTrainer(vocab_size=40, unk_token="<unk>", special_tokens=special,
                    show_progress=False), pre_tokenizers.Metaspace(), decoders.Metaspace()),
        "wordpiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(vocab_size=60, special_tokens=special,
                      show_progress=False), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
    }  # fmt: skip
    made = {"char": tokenizers.char_to_json(CHARS)}
    for name, (model, trainer, split, decoder) in kinds.items():
        core = hf.Tokenizer(model)
        core.pre_tokenizer, core.decoder = split, decoder
        if name == "wordpiece":
            core.normalizer = normalizers.BertNormalizer()
        core.train_from_iterator([TEXT], trainer)
        made[name] = core.to_str()
    return made


def make_tokenizers() -> list[bytes]:
    """Return a tokenizer.json of every kind, and one with truncation, padding, a normalizer and a pattern splitter."""
    core = hf.Tokenizer.from_str(trained()["bpe"])
    core.enable_truncation(16)
    core.enable_padding(length=40)
    core.normalizer = normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.NFKC()])
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(hf.Regex("e+"), "isolated"), core.pre_tokenizer])
    return [text.encode() for text in (*trained().values(), core.to_str())]


def make_vocab() -> list[bytes]:
    """Return files like GPT-2's vocab.json."""
    return [str(hf.Tokenizer.from_str(trained()["bpe"]).get_vocab()).replace("'", '"').encode(), b'{"a": 0, "b": 1}']


def _ranked() -> list[str]:
    tokens = [*(bytes([i]) for i in range(256)), b"ab", b"ba"]
    return [base64.b64encode(token).decode() for token in tokens]


def make_tekken() -> list[bytes]:
    """Return a tekken.json with five special tokens."""
    config = {"pattern": ".|\\n", "default_vocab_size": 263, "default_num_special_tokens": 5}
    listed = [{"rank": i, "token_str": f"<{i}>"} for i in range(5)]
    vocab = [{"rank": i, "token_bytes": token} for i, token in enumerate(_ranked())]
    return [json.dumps({"config": config, "special_tokens": listed, "vocab": vocab}).encode()]


def train_config(folder: Path) -> TrainConfig:
    """Return the config of a run of two steps that saves its state after each step."""
    return TrainConfig(
        data=(str(folder / "text.txt"),), out=str(folder), n_layer=1, n_head=2, n_embd=4, block_size=8, batch_size=2,
        max_steps=2, eval_interval=1, eval_tokens=16, warmup_steps=1, device="cpu",
    )  # fmt: skip


@cache
def run_folder() -> dict[str, bytes]:
    """Return the files of a training run that was stopped after its first step."""
    from tempfile import TemporaryDirectory

    def stop(progress: loop.TrainProgress) -> None:
        raise KeyboardInterrupt

    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        try:
            loop.train(loop.prepare(train_config(folder)), stop)
        except KeyboardInterrupt:
            pass
        return {p.name: p.read_bytes() for p in folder.iterdir()}


def make_results() -> list[bytes]:
    """Return benchmark results with all fields, and with a failed row."""
    figures = Figures(3, 0.01, 0.03, 0.03, 0.04, 30.0, 800.0, 27.0, 2.75, 4.5)
    rows = [
        Row(Case("static", "random:gpt2"), figures, True, 10**9, 10**8, 1e6, 1e6, 44.0, 5.0,
                    speedup=1.0, round_sec=[2.7, 2.8]),
        Row(Case("native", "random:gpt2", batch=4, draft="x"), figures, acceptance_percent=50.0),
        Row(Case("recompute", "random:gpt2"), error="it failed"),
    ]  # fmt: skip
    machine: dict[str, Any] = {"cpu": "a CPU", "cores": 2, "threads": 2, "memory_bytes": 10**10, "gpu": None}
    ceiling: dict[str, Any] = {"read_bytes_per_sec": 3e10, "flops_per_sec": {"float32": 1e12}, "source": "measured"}
    made = results.Results(
        "ladder", "recompute", "2026-11-21", "abc", "nanoinfer bench", machine, {"torch": "2"}, ceiling, rows
    )
    return [results.to_json(made).encode(), results.to_json(replace(made, suite="peers")).encode()]
