"""nanoGPT's files: `ckpt.pt` (weights and shape) and `meta.pkl` (a character-level vocabulary).

Both are pickles and untrusted. `ckpt.pt` is read by `torch.load(weights_only=True)` alone, with no
fallback; `meta.pkl` by an unpickler that knows no classes or functions at all.

Covered: checkpoints of nanoGPT's train.py, compiled (`_orig_mod.`) or not, with or without biases, any
block size and vocabulary. nanoGPT's MLP uses the exact GELU, OpenAI's checkpoints the tanh approximation:
a ckpt.pt gets the exact one, as nanoGPT itself would run it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.weights import Weights, check
from nanoinfer.models.tokenizers import CharTokenizer

if TYPE_CHECKING:
    import torch

    from nanoinfer.models.gpt import GPT

MAX_META_BYTES = 4 << 20  # nanoGPT's Shakespeare meta.pkl has 700 bytes; every character that Unicode assigns fits
MAX_PICKLE_BYTES = 64 << 20  # of a checkpoint's structure, without its tensors; GPT-2's has 0.1 MB
MAX_TUPLES = 50_000
_OPCODES = (
    "PROTO FRAME STOP MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "INT LONG LONG1 LONG4 BININT BININT1 BININT2 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS GLOBAL STACK_GLOBAL".split()
)


def load_checkpoint(path: Path, dtype: torch.dtype | None = None) -> tuple[GPT, ModelConfig, str | None]:
    """Return the model of a nanoGPT `ckpt.pt`, its config and data set: what `open_checkpoint` finds, in memory."""
    weights, dataset = open_checkpoint(path, dtype)
    return weights.gpt(), weights.config, dataset


def open_checkpoint(path: Path, dtype: torch.dtype | None = None) -> tuple[Weights, str | None]:
    """Return the weights of a nanoGPT `ckpt.pt`, checked, and the name of the data set it was trained on.

    The file stays mapped as long as the weights are kept.

    Args:
        path: the file.
        dtype: dtype of the weights in memory; None is float32.

    Raises:
        NanoinferError: the file is broken, is no nanoGPT checkpoint, or holds anything but plain data.
    """
    import torch

    try:
        _check_nesting(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except NanoinferError:
        raise
    except Exception as e:  # UnpicklingError, RuntimeError, EOFError, ...: all mean "not a checkpoint we read"
        text = " ".join(str(e).split())  # PyTorch's own says how to switch the safety off
        reason = f"it asks for {m[1]}" if (m := re.search(r"GLOBAL (\S+)", text)) else text[:160]
        raise NanoinferError(f"{path} cannot be read as a checkpoint of tensors and plain data: {reason}") from None
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        keys = list(checkpoint)[:6] if isinstance(checkpoint, dict) else []
        found = ", ".join(f"{str(k)!r:.40}" for k in keys) or f"a {type(checkpoint).__name__}"
        raise NanoinferError(f"{path} is no nanoGPT checkpoint: it needs model and model_args, and holds {found}")
    config = _config(checkpoint["model_args"], path)
    tensors = checkpoint["model"]
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors, tensors.values())):
        raise NanoinferError(f"{path}: model is not a dict of names to dense tensors")
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    if len(state) != len(tensors):
        raise NanoinferError(f"{path} holds tensors both with and without the prefix _orig_mod.: keep one of each")
    state = {name: t for name, t in state.items() if not name.endswith(".attn.bias")}  # old causal masks
    _check_bytes(state, path)
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    weights = check(config, shapes, state.__getitem__, str(path), dtype or torch.float32)
    data = checkpoint.get("config")
    dataset = data.get("dataset") if isinstance(data, dict) else None
    return weights, dataset if isinstance(dataset, str) else None


def _check_nesting(path: Path) -> None:
    """Refuse a pickle with so many tuples that hashing them, nested, could overflow the C stack.

    PyTorch's safe unpickler hashes dict keys, and a tuple 200,000 deep ends the process. GPT-2 XL's
    checkpoint with its optimizer has about 10,000 tuples.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("/data.pkl") or entry.filename == "data.pkl":
                if entry.file_size > MAX_PICKLE_BYTES:
                    raise NanoinferError(
                        f"{path}: its {entry.filename} has {entry.file_size} bytes; the limit is {MAX_PICKLE_BYTES}"
                    )
                names = (opcode.name for opcode, _, _ in pickletools.genops(archive.read(entry)))
                if (count := sum(name.startswith("TUPLE") for name in names)) > MAX_TUPLES:
                    raise NanoinferError(f"{path}: its {entry.filename} has {count} tuples; the limit is {MAX_TUPLES}")


def _is_plain(name: object, tensor: object) -> bool:
    """Whether this is a named tensor of numbers in memory: no sparse, nested, quantized or meta tensor."""
    import torch

    return (
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
    )


def _check_bytes(state: dict[str, torch.Tensor], path: Path) -> None:
    """Refuse tensors that claim more than the file holds: strides of 0, or many of the same bytes.

    Only the tied head shares its bytes with another tensor.
    """
    claimed = sum(t.numel() * t.element_size() for name, t in state.items() if name != "lm_head.weight")
    if claimed > (size := path.stat().st_size):
        raise NanoinferError(f"{path}: its tensors claim {claimed} bytes, but the file has only {size}")


def _config(args: Any, path: Path) -> ModelConfig:
    """Return the config for a checkpoint's model_args."""
    fields = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    if not isinstance(args, dict):
        raise NanoinferError(f"{path}: model_args is a {type(args).__name__}, not a dict")
    if missing := [name for name in fields if args.get(name) is None]:
        raise NanoinferError(f"{path}: model_args must give {', '.join(fields)}; it lacks {', '.join(missing)}")
    if unknown := sorted(f"{str(k)!r:.40}" for k in args.keys() - {*fields, "bias", "dropout"}):
        raise NanoinferError(f"{path}: model_args asks for {', '.join(unknown)}, which is not supported")
    for name in (*fields, "bias"):
        if not isinstance(args.get(name, True), (int, float, str)):  # a tensor has no truth and no one-line text
            raise NanoinferError(f"{path}: model_args: {name} is a {type(args[name]).__name__}, not a number")
    gpt2_vocabulary = args["vocab_size"] in (50257, 50304)
    eot = 50256 if gpt2_vocabulary else None
    try:
        return ModelConfig(
            **{name: args[name] for name in fields},
            bias=args.get("bias", True),
            activation="gelu",
            bos_token_id=eot,
            eos_token_id=eot,
        )
    except NanoinferError as e:
        raise NanoinferError(f"{path}: model_args: {e}") from None


class _PlainDispatch(dict[int, Any]):
    """The steps that a plain pickle may take; any other ends it."""

    def __missing__(self, opcode: int) -> Any:
        raise pickle.UnpicklingError(f"it holds something else (opcode {opcode:#04x})")


class _PlainUnpickler(pickle._Unpickler):
    """Admits dicts, lists, strings and integers: anything that must be looked up by name is refused.

    The pure-Python unpickler on purpose: the C one sizes its memo table by a number in the file. Other types
    are refused because they can end the process before they are looked at: a bytearray is allocated by a
    number in the file, and hashing a deep tuple overflows the C stack. GLOBAL is admitted to `find_class`,
    which names what it refuses.
    """

    dispatch = _PlainDispatch((op, pickle._Unpickler.dispatch[op]) for op in (getattr(pickle, o)[0] for o in _OPCODES))

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it asks for a persistent object")


def load_meta(path: Path) -> CharTokenizer:
    """Return the character-level tokenizer of a nanoGPT `meta.pkl`.

    Raises:
        NanoinferError: the file is broken, too large, tries to run code, or is no vocabulary of characters.
    """
    if (size := path.stat().st_size) > MAX_META_BYTES:
        raise NanoinferError(f"{path} has {size} bytes, more than the {MAX_META_BYTES} that a meta.pkl may have")
    try:
        meta = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        stoi, itos = meta["stoi"], meta["itos"]
        chars = [itos[i] for i in range(len(itos))]
    except Exception as e:  # a hostile pickle can raise anything at all
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
        raise NanoinferError(f"{path} is no plain meta.pkl of dicts, lists, strings and integers ({reason})") from None
    plain = all(isinstance(c, str) and c for c in chars)
    if not plain or not isinstance(stoi, dict) or stoi != {c: i for i, c in enumerate(chars)}:
        raise NanoinferError(f"{path}: stoi and itos are not each other's inverse over ids 0, 1, 2, ...")
    try:
        return CharTokenizer(chars)
    except NanoinferError as e:
        raise NanoinferError(f"{path}: {e}") from None


def find_meta(checkpoint: Path, dataset: str | None) -> Path | None:
    """Return the meta.pkl of a checkpoint: beside it, or where nanoGPT's own tree has it.

    nanoGPT keeps `out-x/ckpt.pt` and `data/<dataset>/meta.pkl` under one root.
    """
    places = [checkpoint.parent / "meta.pkl"]
    if dataset and re.fullmatch(r"\w[\w.-]*", dataset):
        places.append(checkpoint.resolve().parent.parent / "data" / dataset / "meta.pkl")
    return next((p for p in places if p.is_file()), None)
