"""How a model makes embeddings, from its files: the modules of sentence-transformers, or GGUF's metadata.

    modules.json            the list of modules: Transformer, Pooling, Normalize
    1_Pooling/config.json   which tokens make an embedding

Without them, an embedding is the normalized hidden state of the last token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.sampling_params import PoolingConfig
from nanoinfer.utils.files import read_json, read_object

MODULES = "modules.json"
FILES = (MODULES, "[0-9]_Pooling/config.json")
"""The files that are read, as patterns."""
MAX_BYTES = 1 << 20
_FLAG = "pooling_mode_"
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_GGUF = {0: "last", 1: "mean", 3: "last"}


@dataclass(frozen=True)
class Pooling:
    """The pooling of a model that makes embeddings."""

    kind: str = "last"
    """One of POOLING_TYPES."""
    normalize: bool = True
    """Whether embeddings are normalized unless a request overrides it."""
    unsupported: str = ""
    """Why the model's files cannot be followed, with the remedy; empty if they can."""

    def to_files(self) -> dict[str, dict[str, bytes]]:
        """Return the files that it is read from, by their folders: "" is the model's. None for the default."""
        if self.unsupported or self == Pooling():
            return {}
        modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
        modules += [{"path": "", "type": "Normalize"}] if self.normalize else []
        config = {"pooling_mode": self.kind.replace("last", "lasttoken")}
        return {
            "": {MODULES: json.dumps(modules, indent=2).encode()},
            "1_Pooling": {"config.json": json.dumps(config).encode()},
        }

    def with_options(self, options: PoolingConfig) -> Pooling:
        """Return it with the user's options in place of the files' values."""
        return self if options.pooling_type == "auto" else replace(self, kind=options.pooling_type, unsupported="")


def read(folder: Path) -> Pooling:
    """Return the pooling of a folder's files. What is malformed or unknown is the reason in `unsupported`."""
    if not (path := folder / MODULES).is_file():
        return Pooling()
    try:
        modules = read_json(path, MAX_BYTES, "a list of modules")
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise NanoinferError(f"{escaped(path)} is not a list of modules")
        return _of_modules(folder, modules)
    except NanoinferError as e:
        return Pooling(unsupported=f"{e}: give pooling_type=last or mean to ignore it")


def of_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a GGUF file's metadata."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind is None:
        return Pooling()
    if kind not in _GGUF:
        return Pooling(unsupported=f"pooling_type={show(kind)} of the GGUF file is not supported: give pooling_type=")
    return Pooling(_GGUF[kind])


def _of_modules(folder: Path, modules: list[dict[str, Any]]) -> Pooling:
    pooling = Pooling(normalize=False)
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Normalize":
            pooling = replace(pooling, normalize=True)
        elif kind == "Pooling":
            pooling = replace(pooling, kind=_kind(_config(folder, module), escaped(folder)))
        elif kind != "Transformer":
            raise NanoinferError(f"{escaped(folder)}: the module {show(module.get('type'))} is not supported")
    return pooling


def _config(folder: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    name = module.get("path")
    if not isinstance(name, str) or Path(name).name != name or name == "..":  # a path could leave the folder
        raise NanoinferError(f"{escaped(folder)}: the module's path {show(name)} is not the name of a folder in it")
    return read_object(folder / name / "config.json", MAX_BYTES, "the config of a module")


def _kind(raw: Mapping[str, Any], where: str) -> str:
    """Return the kind of pooling: {"pooling_mode_lasttoken": true} or {"pooling_mode": "lasttoken"} -> "last"."""
    mode = raw.get("pooling_mode")
    on = [mode] if mode is not None else [name for name, value in raw.items() if name.startswith(_FLAG) and value]
    kind = _MODES.get(str(on[0]).removeprefix(_FLAG)) if len(on) == 1 else None
    if kind is None:
        raise NanoinferError(f"{where}: the pooling {show(on)} is not supported: only the last token and the mean are")
    return kind
