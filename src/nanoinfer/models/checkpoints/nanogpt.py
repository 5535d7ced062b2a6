"""nanoGPT's files: `ckpt.pt` (weights and shape) and `meta.pkl` (a character-level vocabulary).

Both are pickles and untrusted. `ckpt.pt` is read by torch_archive.py, `meta.pkl` by an unpickler that knows no
classes or functions at all (plain_pickle.py); neither executes anything, and there is no fallback.

Covered: checkpoints of nanoGPT's train.py, compiled (`_orig_mod.`) or not, with or without biases, any
block size and vocabulary. nanoGPT's MLP uses the exact GELU, OpenAI's checkpoints the tanh approximation:
a ckpt.pt gets the exact one, as nanoGPT itself would run it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.files import escaped, read_limited, reason
from nanoinfer.models.checkpoints.plain_pickle import PlainUnpickler
from nanoinfer.models.checkpoints.torch_archive import check_state, read_archive
from nanoinfer.models.checkpoints.weights import Weights, check
from nanoinfer.models.tokenizers import CharTokenizer

if TYPE_CHECKING:
    import torch

    from nanoinfer.models.gpt import GPT

MAX_META_BYTES = 4 << 20  # nanoGPT's Shakespeare meta.pkl has 700 bytes


def load_checkpoint(path: Path, dtype: torch.dtype | None = None) -> tuple[GPT, ModelConfig, str | None]:
    """Return the model of a nanoGPT `ckpt.pt`, its config and data set: what `open_checkpoint` finds, in memory."""
    weights, dataset = open_checkpoint(path, dtype)
    return weights.gpt(), weights.config, dataset


def open_checkpoint(path: Path, dtype: torch.dtype | None = None) -> tuple[Weights, str | None]:
    """Return the weights of a nanoGPT `ckpt.pt`, checked, and the name of the data set it was trained on.

    The file stays open as long as the weights are kept, and is read tensor by tensor.

    Args:
        path: the file.
        dtype: dtype of the weights in memory; None is float32.

    Raises:
        NanoinferError: the file is broken, is no nanoGPT checkpoint, or holds anything but plain data.
    """
    import torch

    checkpoint, num_bytes = read_archive(path)
    where = escaped(path)
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        keys = list(checkpoint)[:6] if isinstance(checkpoint, dict) else []
        found = ", ".join(f"{str(k)!r:.40}" for k in keys) or f"a {type(checkpoint).__name__}"
        raise NanoinferError(f"{where} is no nanoGPT checkpoint: it needs model and model_args, and holds {found}")
    config = _config(checkpoint["model_args"], where)
    tensors = checkpoint["model"]
    check_state(tensors, num_bytes, f"{where}: model")
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    if len(state) != len(tensors):
        raise NanoinferError(f"{where} holds tensors both with and without the prefix _orig_mod.: keep one of each")
    state = {name: t for name, t in state.items() if not name.endswith(".attn.bias")}  # old causal masks
    weights = check(config, state, where, dtype or torch.float32)
    data = checkpoint.get("config")
    dataset = data.get("dataset") if isinstance(data, dict) else None
    return weights, dataset if isinstance(dataset, str) else None


def _config(args: Any, where: str) -> ModelConfig:
    """Return the config for a checkpoint's model_args."""
    fields = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    if not isinstance(args, dict):
        raise NanoinferError(f"{where}: model_args is a {type(args).__name__}, not a dict")
    if missing := [name for name in fields if args.get(name) is None]:
        raise NanoinferError(f"{where}: model_args must give {', '.join(fields)}; it lacks {', '.join(missing)}")
    if unknown := sorted(f"{str(k)!r:.40}" for k in args.keys() - {*fields, "bias", "dropout"}):
        raise NanoinferError(f"{where}: model_args asks for {', '.join(unknown)}, which is not supported")
    for name in (*fields, "bias"):
        if not isinstance(args.get(name, True), (int, float, str)):  # a tensor has no truth and no one-line text
            raise NanoinferError(f"{where}: model_args: {name} is a {type(args[name]).__name__}, not a number")
    eot = (50256,) if args["vocab_size"] in (50257, 50304) else ()
    try:
        return ModelConfig(
            **{name: args[name] for name in fields},
            bias=args.get("bias", True),
            activation="gelu",
            bos_token_id=eot[0] if eot else None,
            eos_token_ids=eot,
        )
    except NanoinferError as e:
        raise NanoinferError(f"{where}: model_args: {e}") from None


def load_meta(path: Path) -> CharTokenizer:
    """Return the character-level tokenizer of a nanoGPT `meta.pkl`.

    Raises:
        NanoinferError: the file is broken, too large, tries to run code, or is no vocabulary of characters.
    """
    raw, where = read_limited(path, MAX_META_BYTES, "a meta.pkl"), escaped(path)
    try:
        meta = PlainUnpickler(raw).load()
        stoi, itos = meta["stoi"], meta["itos"]
        chars = [itos[i] for i in range(len(itos))]
    except Exception as e:  # a hostile pickle can raise anything at all
        why = f"{type(e).__name__}: {reason(e)}"
        raise NanoinferError(f"{where} is no plain meta.pkl of dicts, lists, strings and integers ({why})") from None
    plain = all(isinstance(c, str) and c for c in chars)
    if not plain or not isinstance(stoi, dict) or stoi != {c: i for i, c in enumerate(chars)}:
        raise NanoinferError(f"{where}: stoi and itos are not each other's inverse over ids 0, 1, 2, ...")
    try:
        return CharTokenizer(chars)
    except NanoinferError as e:
        raise NanoinferError(f"{where}: {e}") from None


def find_meta(checkpoint: Path, dataset: str | None) -> Path | None:
    """Return the meta.pkl of a checkpoint: beside it, or where nanoGPT's own tree has it.

    nanoGPT keeps `out-x/ckpt.pt` and `data/<dataset>/meta.pkl` under one root.
    """
    places = [checkpoint.parent / "meta.pkl"]
    if dataset and re.fullmatch(r"\w[\w.-]*", dataset):
        places.append(checkpoint.resolve().parent.parent / "data" / dataset / "meta.pkl")
    return next((p for p in places if p.is_file()), None)
