"""Models on the Hugging Face Hub: folders in its layout, and GGUF files by the name of their quantization.

    owner/repo                        a folder; if it has no weights but GGUF files, one of them, which is logged
    owner/repo:Q4_K_M                 the GGUF file with this quantization in its name, in one or several parts
    hf://owner/repo/path/name.gguf    a GGUF file by its path

Files lie in the cache of huggingface_hub (HF_HUB_CACHE). A download of a GGUF file continues the one that was
interrupted before, and the content is compared with the Hub's SHA-256 before it becomes part of the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from nanoinfer.checkpoints import huggingface, tokenizer_files
from nanoinfer.checkpoints.gguf.file import PART
from nanoinfer.errors import NanoinferError
from nanoinfer.models import pooling
from nanoinfer.models.presets import REPOSITORIES
from nanoinfer.utils.checks import show
from nanoinfer.utils.files import escaped, reason
from nanoinfer.utils.progress import ProgressBar

log = logging.getLogger("nanoinfer")

SCHEME = "hf://"
_PLAIN = r"\w[\w.-]*"
_REPOSITORY = rf"{_PLAIN}/{_PLAIN}"
_NAME = re.compile(rf"(?:{SCHEME})?({_REPOSITORY})(?::({_PLAIN}))?|{_PLAIN}", re.ASCII)
_FILE = re.compile(rf"{SCHEME}({_REPOSITORY})/([^:]+\.gguf)", re.ASCII | re.IGNORECASE)
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q8_0")  # if the name gives no quantization
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9_])(?:(?:I?Q|TQ)\d\w*|MXFP4\w*|BF16|F16|F32)(?![A-Za-z0-9_])", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # GGUF files of other things begin with these
_FOLDER_FILES = [
    "config.json", huggingface.ADAPTER, "generation_config.json", "*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json", "tokenizer.model",
    "tiktoken.model", *tokenizer_files.CHAT_FILES, *pooling.FILES,
]  # fmt: skip


def find(name: str) -> Path | None:
    """Return the local folder or GGUF file of a name, downloaded if it is not in the cache; None: it is no such name.

    Raises:
        NanoinferError: the repository or file does not exist, the name fits several files, the network is unavailable
            and the file is not in the cache, or it was damaged on the way.
    """
    if file := _FILE.fullmatch(name):
        return _download(file[1], _parts_of(file[1], file[2]))
    if not (found := _NAME.fullmatch(name)):
        return None
    repo_id, tag = found[1] or REPOSITORIES.get(name, name), found[2]
    files = _list(repo_id)
    groups = group_files(files)
    if tag is not None:
        chosen = _only(repo_id, f"with {tag} in its name", having(tag, groups), groups)
    elif _has_folder(files) or not groups:
        return _folder(repo_id)
    else:
        chosen = _default(repo_id, groups)
    return _download(repo_id, groups[chosen])


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


def _default(repo_id: str, groups: dict[str, list[str]]) -> str:
    """Return the file to use if the name gives no quantization, and say which."""
    if len(groups) == 1:
        return next(iter(groups))
    for tag in _PREFERRED:
        if found := having(tag, groups):
            chosen = _only(repo_id, f"with {tag} in its name", found, groups)
            break
    else:
        chosen = next(iter(groups))
    what = escaped(chosen)
    log.warning(
        "%s has %d GGUF files: using %s; to use another, give %s:QUANTIZATION", repo_id, len(groups), what, repo_id
    )
    return chosen


def _only(repo_id: str, what: str, found: list[str], groups: dict[str, list[str]]) -> str:
    if len(found) == 1:
        return found[0]
    listed = textwrap.shorten(escaped(", ".join(found or groups) or "none", 4000), 300, placeholder=" ...")
    if found:
        raise NanoinferError(
            f"model {repo_id} has {len(found)} GGUF files {what}: give one as {SCHEME}{repo_id}/FILE: {listed}"
        )
    raise NanoinferError(f"model {repo_id} has no GGUF file {what}; its GGUF files: {listed}")


def _parts_of(repo_id: str, file: str) -> list[str]:
    """Return the files of all parts of a GGUF file in a repository."""
    if not PART.search(file):
        return [file]
    return group_files(_list(repo_id)).get(PART.sub(".gguf", file), [file])


@contextmanager
def _reaching(repo_id: str) -> Iterator[None]:
    """Explain what a request to the Hub or its cache raises."""
    try:
        yield
    except NanoinferError:
        raise
    except Exception as e:  # of many types: HTTP, DNS, cache, permission, no such module
        why = textwrap.shorten(escaped(" ".join(str(e).split()), 4000), 160, placeholder="...") or type(e).__name__
        raise NanoinferError(
            f"model {repo_id!r} could not be fetched from the Hugging Face Hub ({why}): check the name and the"
            " network, or give a local folder, a ckpt.pt, shakespeare, or random:gpt2"
        ) from None


def _folder(repo_id: str) -> Path:
    """Return the local folder of a repository, with the files of a model in the Hugging Face layout."""
    with _reaching(repo_id):
        import huggingface_hub

        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_FOLDER_FILES))
        if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(repo_id, allow_patterns=[huggingface.PICKLED])  # into the same folder
        return folder


def _list(repo_id: str) -> list[str]:
    """Return the paths of a repository's files; of those in the cache if the Hub cannot be reached."""
    with _reaching(repo_id):
        import huggingface_hub

        try:  # list_repo_files would wait and ask again for 20 seconds where there is no network
            return [file.rfilename for file in huggingface_hub.HfApi().model_info(repo_id).siblings or []]
        except Exception:
            if not (cached := _cached_files(repo_id)):
                raise
            return cached


def _storage(repo_id: str) -> Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="model"))


def _cached_files(repo_id: str) -> list[str]:
    """Return the paths of a repository's files in the cache."""
    storage = _storage(repo_id)
    try:
        folder = storage / "snapshots" / (storage / "refs" / "main").read_text()
    except OSError:
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _download(repo_id: str, files: Sequence[str]) -> Path:
    """Return the local path of the first of some files; download and check those that are not in the cache."""
    if wrong := [file for file in files if {"", ".", ".."} & set(file.split("/"))]:
        raise NanoinferError(f"model {repo_id}: {show(wrong[0])} is not the path of a file in a repository")
    if (part := PART.search(files[0])) and len(files) != (count := int(part[2])):
        what = f"{len(files)} of the {count} parts of {show(files[0])}"
        raise NanoinferError(f"model {repo_id} has {what}: give another file")
    with _reaching(repo_id):
        paths = [_file(repo_id, file) for file in files]
        return paths[0]


def _file(repo_id: str, file: str) -> Path:
    """Return the local path of a file, downloaded if it is not in the cache."""
    import huggingface_hub

    try:
        metadata = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo_id, file))
    except Exception:
        if isinstance(there := huggingface_hub.try_to_load_from_cache(repo_id, file), str):
            return Path(there)
        raise
    if re.fullmatch(r"[0-9a-f]{64}", metadata.etag or ""):  # in the Hub's storage of large files, as all models are
        blob = _storage(repo_id) / "blobs" / str(metadata.etag)
        if not blob.exists():
            _complete(blob, file, metadata.location, metadata.size)
    return Path(huggingface_hub.hf_hub_download(repo_id, file))  # which finds the content, and links to it


def _complete(blob: Path, file: str, url: str, num_bytes: int | None) -> None:
    """Download a blob of the cache, whose name is its SHA-256, or the rest of it.

    huggingface_hub's own download begins anew: since version 2 it keeps nothing of one that was interrupted.

    Raises:
        NanoinferError: the content has another SHA-256; it is deleted.
    """
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.partial")
    own = urlsplit(url).netloc == urlsplit(ENDPOINT).netloc
    headers = build_hf_headers() if own else {}  # the token is for the Hub alone
    with open(partial, "a+b", buffering=0) as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # another process may download it: then this one waits
        if blob.exists():
            partial.unlink(missing_ok=True)
            return
        if (start := f.seek(0, os.SEEK_END)) > (num_bytes or start):
            start = f.truncate(0)
        http_get(url, f, resume_size=start, headers=headers, expected_size=num_bytes, displayed_filename=file)
        f.seek(0)
        digest, total = hashlib.sha256(), os.fstat(f.fileno()).st_size
        with ProgressBar("check") as bar:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
                bar.update(f.tell(), total)
        if digest.hexdigest() != blob.name:
            partial.unlink()
            raise NanoinferError(
                f"{show(file)} was damaged on the way: its SHA-256 is {digest.hexdigest()[:12]}..., and should be"
                f" {blob.name[:12]}...: it is deleted: download it again"
            )
        partial.replace(blob)


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine."""

    name: str
    """As `load_model` takes it."""
    path: Path
    """Its folder or GGUF file."""
    num_bytes: int
    """Of its files."""


def cached_models() -> list[LocalModel]:
    """Return the models in the Hub's cache in the order of their names. Reads no file.

    Raises:
        NanoinferError: the cache cannot be read.
    """
    import huggingface_hub

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.CacheNotFound:
        return []
    except (OSError, ValueError) as e:
        why = reason(e) if isinstance(e, OSError) else "it is not a folder"
        where = escaped(Path(huggingface_hub.constants.HF_HUB_CACHE))
        raise NanoinferError(
            f"the Hub's cache {where} cannot be read: {why}: set HF_HUB_CACHE to another one"
        ) from None
    models = []
    for repo in repos:
        revisions = sorted(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        if repo.repo_type != "model" or not revisions:
            continue
        folder = revisions[-1].snapshot_path
        sizes = {f.file_path.relative_to(folder).as_posix(): f.size_on_disk for f in revisions[-1].files}
        groups = group_files(sizes)
        if _has_folder(sizes):
            num_bytes = sum(size for file, size in sizes.items() if not file.lower().endswith(".gguf"))
            models.append(LocalModel(repo.repo_id, folder, num_bytes))
        for file, parts in groups.items():
            tag = _QUANTIZATION.findall(file)
            short = tag and having(tag[-1], groups) == [file]
            name = f"{repo.repo_id}:{tag[-1]}" if short else f"{SCHEME}{repo.repo_id}/{parts[0]}"
            models.append(LocalModel(name, folder / parts[0], sum(sizes[part] for part in parts)))
    return sorted(models, key=lambda model: model.name)
