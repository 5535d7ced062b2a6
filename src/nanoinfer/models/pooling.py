"""How a model makes embeddings and scores, from its files: the modules of sentence-transformers, or GGUF's metadata.

    modules.json            the list of modules: Transformer, Pooling, Normalize, or Transformer, LogitScore
    1_Pooling/config.json   which tokens make an embedding
    1_LogitScore/config.json   whose logits score a document

Without them, an embedding is the normalized hidden state of the last token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import NanoinferError
from nanoinfer.pooling_params import PoolingConfig
from nanoinfer.utils.checks import require_int, show
from nanoinfer.utils.files import escaped, read_json, read_object, read_text

if TYPE_CHECKING:
    from nanoinfer.tokenizers.tokenizer import Tokenizer

MODULES = "modules.json"
FILES = (MODULES, "[0-9]_Pooling/config.json", "[0-9]_LogitScore/config.json")
"""The files that are read, as patterns."""
MAX_BYTES = 1 << 20
_FLAG = "pooling_mode_"
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
_GGUF = {0: "last", 1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True)
class Pooling:
    """How a model makes embeddings, and scores if it is a reranker."""

    kind: str = "last"
    """One of POOLING_TYPES."""
    normalize: bool = True
    """Whether embeddings are normalized unless a request says otherwise."""
    true_id: int | None = None
    """Token that is likely after a relevant document; None: scores are the cosines of embeddings."""
    false_id: int | None = None
    """Token that is likely after an irrelevant document; None: a score depends on the logit of true_id only."""
    template: str | None = None
    """Jinja template of a reranker's prompts; None: the model's own."""
    unsupported: str = ""
    """Why the model's files cannot be followed, with the remedy; empty if they can."""

    def to_files(self) -> dict[str, dict[str, bytes]]:
        """Return the files that it is read from, by their folders: "" is the model's. None for the default."""
        if self.unsupported or self == Pooling():
            return {}
        modules = [{"path": "", "type": "Transformer"}]
        folders: dict[str, dict[str, Any]] = {"1_Pooling": {"pooling_mode": self.kind.replace("last", "lasttoken")}}
        if self.true_id is not None:
            folders = {"1_LogitScore": {"true_token_id": self.true_id, "false_token_id": self.false_id}}
        modules += [{"path": name, "type": name.partition("_")[2]} for name in folders]
        modules += [{"path": "", "type": "Normalize"}] if self.normalize else []
        made = {name: {"config.json": json.dumps(config).encode()} for name, config in folders.items()}
        return {"": {MODULES: json.dumps(modules, indent=2).encode()}, **made}

    def with_options(self, options: PoolingConfig, tokenizer: Tokenizer | None) -> Pooling:
        """Return it with what a user has given in place of the files.

        Raises:
            NanoinferError: a classifier is not one token, or the template cannot be read.
        """
        found = self
        if options.pooling_type != "auto":
            found = replace(found, kind=options.pooling_type, unsupported="")
        if tokens := options.classifiers:
            ids = [_token_id(token, tokenizer) for token in tokens]
            found = replace(found, true_id=ids[-1], false_id=ids[0] if len(ids) == 2 else None, unsupported="")
        if options.score_template is not None:
            found = replace(found, template=read_text(Path(options.score_template), "a template"))
        return found


def read(folder: Path) -> Pooling:
    """Return what the files of a folder say. What is malformed or unknown is the reason in `unsupported`."""
    if not (path := folder / MODULES).is_file():
        return Pooling()
    try:
        modules = read_json(path, MAX_BYTES, "a list of modules")
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise NanoinferError(f"{escaped(path)} is not a list of modules")
        return _of_modules(folder, modules)
    except NanoinferError as e:
        return Pooling(unsupported=f"{e}: give pooling_type=last, mean or cls to ignore it")


def of_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """Return what the metadata of a GGUF file says."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind is None:
        return Pooling()
    if kind not in _GGUF:
        return Pooling(unsupported=f"pooling_type={show(kind)} of the GGUF file is not supported: give pooling_type=")
    return Pooling(_GGUF[kind])


def _of_modules(folder: Path, modules: list[dict[str, Any]]) -> Pooling:
    found = Pooling(normalize=False)
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Normalize":
            found = replace(found, normalize=True)
        elif kind == "Pooling":
            found = replace(found, kind=_kind(_config(folder, module), escaped(folder)))
        elif kind == "LogitScore":
            raw = _config(folder, module)
            if raw.get("true_token_id") is None:
                raise NanoinferError(f"{escaped(folder)}: LogitScore has no true_token_id")
            true = require_int("true_token_id", raw["true_token_id"], 0, 2**31 - 1)
            false = raw.get("false_token_id")
            false = None if false is None else require_int("false_token_id", false, 0, 2**31 - 1)
            found = replace(found, true_id=true, false_id=false)
        elif kind != "Transformer":
            raise NanoinferError(f"{escaped(folder)}: the module {show(module.get('type'))} is not supported")
    return found


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
        raise NanoinferError(f"{where}: the pooling {show(on)} is not supported: only the last, mean or first token is")
    return kind


def _token_id(token: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        raise NanoinferError(f"classifier_from_token={show(token)} needs a tokenizer: give tokenizer=")
    core = getattr(tokenizer, "core", None)
    if core is not None and (found := core.token_to_id(token)) is not None:
        return int(found)
    ids = tokenizer.encode(token)
    if len(ids) != 1:
        raise NanoinferError(
            f"classifier_from_token: {show(token)} is {len(ids)} tokens of the model, not one: give another word"
        )
    return ids[0]
