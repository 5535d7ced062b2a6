"""Find out whether an open file is still the one at its path, and copy its content where it is not.

Another process may remove, replace or move a file while it is written. Writes to it succeed then, and a removed file
is gone as soon as it is closed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from shutil import copyfileobj

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import write_atomically


class OutputLost(NanoinferError):
    """The file at the path of an output is not the one that is written."""


def what_happened(fd: int, path: Path) -> str:
    """Return what has happened to the file that was opened at a path: "" if it is there.

    Raises:
        OSError: the path cannot be looked up.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "was removed"
    if os.path.samestat(found, os.fstat(fd)):
        return ""
    return f"was replaced by {'a folder' if stat.S_ISDIR(found.st_mode) else 'another file'}"


def current_path(fd: int) -> str | None:
    """Return the path that an open file has now; None if it was removed, or where /proc does not tell."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return path if os.path.samestat(os.stat(path), os.fstat(fd)) else None
    except OSError:
        return None


def save_copy(fd: int, path: Path, state: bytes) -> Path:
    """Copy an open file and its state to new files beside `path`, else in the temporary folder; return their path.

    Raises:
        OSError: neither folder can be written.
    """
    try:
        return _copy_to(path, fd, state)
    except OSError as e:
        try:
            return _copy_to(Path(tempfile.gettempdir()) / path.name, fd, state)
        except OSError:
            raise e from None


def _copy_to(path: Path, fd: int, state: bytes) -> Path:
    """Copy to the first of PATH.saved, PATH.saved-1, ... that does not exist and has no state."""
    copy, number = path.with_name(f"{path.name}.saved"), 0
    while os.path.lexists(copy) or os.path.lexists(f"{copy}.state"):
        number += 1
        copy = path.with_name(f"{path.name}.saved-{number}")
    try:
        with open(copy, "xb") as target, open(fd, "rb", closefd=False) as source:
            source.seek(0)
            copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        write_atomically(Path(f"{copy}.state"), state)
    except FileExistsError:
        return _copy_to(path, fd, state)  # made by another process just now
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    return copy
