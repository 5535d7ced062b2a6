"""Load nanoGPT's files: `ckpt.pt` (weights and config) and `meta.pkl` (a character-level vocabulary).

Both files are untrusted pickles. torch_archive.py reads `ckpt.pt`; an unpickler without classes and functions
(torch_archive.py, too) reads `meta.pkl`. Neither executes code, and there is no fallback to pickle or torch.load.

Covered: checkpoints of nanoGPT's train.py, compiled (`_orig_mod.`) or not, with or without biases, with any block size
and vocabulary. nanoGPT's MLP uses the exact GELU while OpenAI's checkpoints use the tanh approximation, so a ckpt.pt is
loaded with the exact GELU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoinfer.checkpoints.torch_archive import PlainUnpickler, check_state, read_archive
from nanoinfer.checkpoints.weights import Weights, check
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.families import FAMILIES
from nanoinfer.tokenizers.tokenizer import CharTokenizer
from nanoinfer.utils.files import escaped, read_limited, reason

MAX_META_BYTES = 4 << 20  # nanoGPT's Shakespeare meta.pkl has 700 bytes


def open_checkpoint(path: Path, dtype: str = "float32") -> tuple[Weights, str | None]:
    """Return the checked weights of a nanoGPT `ckpt.pt`, and the name of the data set it was trained on.

    The file stays open as long as the weights exist, and tensors are read one at a time.

    Args:
        path: the file.
        dtype: dtype to compute in.

    Raises:
        NanoinferError: the file is malformed, is not a nanoGPT checkpoint, or contains anything but plain data.
    """
    checkpoint, num_bytes = read_archive(path)
    where = escaped(path)
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        keys = list(checkpoint)[:6] if isinstance(checkpoint, dict) else []
        found = ", ".join(f"{str(k)!r:.40}" for k in keys) or f"a {type(checkpoint).__name__}"
        raise NanoinferError(f"{where} is not a nanoGPT checkpoint: it must have model and model_args, but has {found}")
    config = _config(checkpoint["model_args"], where)
    tensors = checkpoint["model"]
    check_state(tensors, num_bytes, f"{where}: model")
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    if len(state) != len(tensors):
        raise NanoinferError(f"{where} has tensors both with and without the prefix _orig_mod.: keep one of each")
    weights = check(config, state, where, dtype, _LAYOUT)
    data = checkpoint.get("config")
    dataset = data.get("dataset") if isinstance(data, dict) else None
    return weights, dataset if isinstance(dataset, str) else None


_LAYOUT = replace(FAMILIES["gpt2"], transposed=frozenset())
"""nanoGPT stores linear layers as (out, in)."""


def _config(args: Any, where: str) -> ModelConfig:
    """Return the config for a checkpoint's model_args."""
    fields = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    if not isinstance(args, dict):
        raise NanoinferError(f"{where}: model_args is a {type(args).__name__}, not a dict")
    if missing := [name for name in fields if args.get(name) is None]:
        raise NanoinferError(f"{where}: model_args must have {', '.join(fields)}; missing: {', '.join(missing)}")
    if unknown := sorted(f"{str(k)!r:.40}" for k in args.keys() - {*fields, "bias", "dropout"}):
        raise NanoinferError(f"{where}: model_args has {', '.join(unknown)}, which is not supported")
    for name in (*fields, "bias"):
        if not isinstance(args.get(name, True), (int, float, str)):  # a tensor has no truth value and no one-line text
            raise NanoinferError(f"{where}: model_args: {name} is a {type(args[name]).__name__}, not a number")
    eot = (50256,) if args["vocab_size"] in (50257, 50304) else ()
    with about(f"{where}: model_args"):
        return ModelConfig(
            **{name: args[name] for name in fields},
            bias=args.get("bias", True),
            activation="gelu",
            bos_token_id=eot[0] if eot else None,
            eos_token_ids=eot,
        )


def load_meta(path: Path) -> CharTokenizer:
    """Return the character-level tokenizer of a nanoGPT `meta.pkl`.

    Raises:
        NanoinferError: the file is malformed or too large, contains code, or is not a vocabulary of characters.
    """
    raw, where = read_limited(path, MAX_META_BYTES, "a meta.pkl"), escaped(path)
    try:
        meta = PlainUnpickler(raw).load()
        stoi, itos = meta["stoi"], meta["itos"]
        chars = [itos[i] for i in range(len(itos))]
    except Exception as e:  # a hostile pickle can raise any exception
        why = f"{type(e).__name__}: {reason(e)}"
        raise NanoinferError(f"{where} is not a meta.pkl of dicts, lists, strings and integers ({why})") from None
    plain = all(isinstance(c, str) and c for c in chars)
    if not plain or not isinstance(stoi, dict) or stoi != {c: i for i, c in enumerate(chars)}:
        raise NanoinferError(f"{where}: stoi is not the inverse of itos over the ids 0, 1, 2, ...")
    with about(where):
        return CharTokenizer(chars)


def find_meta(checkpoint: Path, dataset: str | None) -> Path | None:
    """Return the meta.pkl of a checkpoint, or None: in its folder, or in the data folder of nanoGPT's source tree.

    nanoGPT stores `out-x/ckpt.pt` and `data/<dataset>/meta.pkl` under one root.
    """
    places = [checkpoint.parent / "meta.pkl"]
    if dataset and re.fullmatch(r"\w[\w.-]*", dataset):
        places.append(checkpoint.resolve().parent.parent / "data" / dataset / "meta.pkl")
    return next((p for p in places if p.is_file()), None)
