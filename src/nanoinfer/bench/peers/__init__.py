"""Exporters: one of our Hugging Face folders, rewritten in the file format of a peer.

An export is a folder that is complete or not there: it is written beside its place and then moved. It carries the
fingerprint of the weights it was made from, so that it is made once, and again when the weights change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from nanoinfer.errors import NanoinferError

FOLDER = "exports"  # inside the weights folder, where backends look
_STAMP = "made-from.txt"


def export_once(target: Path, weights: Path, write: Callable[[Path], None]) -> Path:
    """Return the folder `target`, written by `write` unless it is there and made from these weights.

    Args:
        target: folder to make.
        weights: Hugging Face folder that is exported.
        write: fills the empty folder it is given.

    Raises:
        NanoinferError: the weights cannot be read, or the folder cannot be written.
    """
    try:
        made_from = fingerprint(weights)
        if _is_made(target, made_from):
            return target
        partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        try:
            write(partial)
            (partial / _STAMP).write_text(made_from, encoding="utf-8")
            if not _is_made(target, made_from):  # another process may have been faster
                shutil.rmtree(target, ignore_errors=True)  # made from other weights
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as e:
        raise NanoinferError(f"export {target} cannot be made: {' '.join(str(e).split())[:200]}") from None
    return target


def _is_made(target: Path, made_from: str) -> bool:
    """Return whether `target` is there and made from the weights with this fingerprint."""
    stamp = target / _STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == made_from


def fingerprint(weights: Path) -> str:
    """Return what changes when the model in a folder does: a digest of config and file sizes and times."""
    digest = hashlib.sha256((weights / "config.json").read_bytes())
    for path in sorted(weights.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
