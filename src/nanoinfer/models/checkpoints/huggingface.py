"""The Hugging Face layout: a local folder or a Hub repository with config.json and *.safetensors; and saving it.

Covered: GPT-2 (`model_type: gpt2`), one file or a sharded index, names with and without the `transformer.`
prefix, tied and untied heads. Not covered: `pytorch_model.bin` (a pickle; convert it to safetensors).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.files import write_atomically
from nanoinfer.models.checkpoints import hf_config
from nanoinfer.models.checkpoints.weights import CONV1D, Weights, check

if TYPE_CHECKING:
    import torch

    from nanoinfer.models.gpt import GPT

_HUB_FILES = [
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
]
MAP_BYTES = 32 << 20
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks that old checkpoints carry along


def download(repo_id: str) -> Path:
    """Return the local folder of a Hub repository, fetched if it is not in the cache.

    Raises:
        NanoinferError: there is no such repository, or no network and nothing in the cache.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except Exception as e:  # many kinds (HTTP, DNS, cache, permission); each is one clear sentence to the user
        reason = " ".join(str(e).split())[:160] or type(e).__name__
        raise NanoinferError(
            f"model {repo_id!r} could not be fetched from the Hugging Face Hub ({reason}): check the name and the"
            " network, or give a local folder, a ckpt.pt, shakespeare, or random:gpt2"
        ) from None


def load_folder(folder: Path, dtype: torch.dtype | None = None) -> tuple[GPT, ModelConfig]:
    """Return the model in a Hugging Face folder: what `open_folder` finds, in memory."""
    weights = open_folder(folder, dtype)
    return weights.gpt(), weights.config


def open_folder(folder: Path, dtype: torch.dtype | None = None) -> Weights:
    """Return the weights in a Hugging Face folder, checked. Its files stay mapped as long as they are kept.

    Args:
        folder: holds config.json and model.safetensors (or its sharded index).
        dtype: dtype of the weights in memory; None is float32.

    Raises:
        NanoinferError: a file is missing or broken, or asks for what we do not do.
    """
    import torch
    from safetensors import SafetensorError

    config = hf_config.read(folder / "config.json")
    ours: dict[str, tuple[_File, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in map(_File, _weight_files(folder)):
        for key, shape in file.shapes().items():
            if key.endswith(_BUFFERS):
                continue
            if (name := _our_name(key)) in ours:
                raise NanoinferError(f"{folder} holds tensor {name!r:.80} twice: keep one")
            ours[name] = (file, key)
            shapes[name] = shape[::-1] if CONV1D.search(name) else shape

    def read(name: str) -> torch.Tensor:
        file, key = ours[name]
        try:
            tensor = file.tensor(key)
        except SafetensorError as e:  # a dtype that torch does not have
            raise NanoinferError(f"{folder}: tensor {key} cannot be read: {e}") from None
        return tensor.t() if CONV1D.search(name) else tensor

    return check(config, shapes, read, str(folder), dtype or torch.float32)


def _our_name(key: str) -> str:
    """h.0.ln_1.weight -> transformer.h.0.ln_1.weight; lm_head.weight stays."""
    return key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"


class _File:
    """A safetensors file, mapped: its tensors take memory once they are used, and as long as the map stays.

    So it is mapped anew after every MAP_BYTES of tensors; the last map goes with the last tensor of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: set[tuple[int, ...]] = set()  # inode, size and time: more than one means that it was changed
        self._map()

    def _map(self) -> None:
        """Open the file. The library checks the header's sizes against the file's."""
        from safetensors import SafetensorError, safe_open

        try:
            before = self._path.stat()
            self._file: Any = safe_open(str(self._path), framework="pt")
            after = self._path.stat()
        except (SafetensorError, OSError) as e:
            reason = " ".join(str(e).split())[:200]
            raise NanoinferError(f"{self._path} is no valid safetensors file: {reason}") from None
        self._states |= {(s.st_ino, s.st_size, s.st_mtime_ns) for s in (before, after)}
        if len(self._states) > 1:
            raise NanoinferError(f"{self._path} was changed while it was read: load it again")
        self._num_bytes = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        return {key: tuple(self._file.get_slice(key).get_shape()) for key in self._file.keys()}

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor, part of the mapped file. Raises NanoinferError: the file is not the same any more."""
        if self._num_bytes > MAP_BYTES:
            self._map()
        tensor: torch.Tensor = self._file.get_tensor(key)
        self._num_bytes += tensor.nbytes
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: one, or those that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    there = sorted(p.name for p in folder.iterdir() if p.is_file())
    if not index.is_file():
        hint = "; convert pytorch_model.bin to safetensors first" if "pytorch_model.bin" in there else ""
        found = ", ".join(there[:8]) or "nothing"
        raise NanoinferError(f"{folder} has no model.safetensors (it holds: {found}){hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise NanoinferError(f"{index} is no index of weights: {' '.join(str(e).split())[:200]}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:  # a path would leave the folder
            raise NanoinferError(f"{index} names the file {name!r:.80}: only plain names in the same folder are read")
        if name not in there:
            raise NanoinferError(f"{index} names the file {name!r:.80}, which is not in {folder}")
    return [folder / name for name in names]


def save(model: GPT, folder: Path, tokenizer_json: str | None = None, dtype: torch.dtype | None = None) -> None:
    """Write a model as a Hugging Face folder that `transformers` loads as GPT2LMHeadModel.

    Each file is written beside its place and then moved there, so that a reader never sees half a file.
    Models without biases get zero ones: the layout has no way to say "none".

    Args:
        model: the model; its own dtype is not changed.
        folder: made if it is not there.
        tokenizer_json: content of tokenizer.json, where there is one.
        dtype: dtype of the stored weights; None is the model's own.

    Raises:
        NanoinferError: the folder cannot be written.
    """
    import torch
    from safetensors.torch import save as to_bytes

    config = model.config
    tensors: dict[str, torch.Tensor] = {}
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        p = p.detach().to("cpu", dtype or p.dtype)
        tensors[name] = (p.t() if CONV1D.search(name) else p).contiguous()
        if not config.bias and CONV1D.search(name):
            tensors[name.replace(".weight", ".bias")] = torch.zeros(p.shape[0], dtype=p.dtype)
        elif not config.bias and p.dim() == 1:  # a layer norm
            tensors[name.replace(".weight", ".bias")] = torch.zeros_like(p)
    dtype_name = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    files = {
        "model.safetensors": to_bytes(tensors, metadata={"format": "pt"}),
        "config.json": json.dumps(hf_config.to_dict(config, dtype_name), indent=2).encode() + b"\n",
    }
    if tokenizer_json is not None:
        files["tokenizer.json"] = tokenizer_json.encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as e:
        raise NanoinferError(f"{folder} cannot be written: {e.strerror}: choose another folder") from None
