"""Reading and writing whole files: regular files only, never more than a limit, errors of one line.

A path that names a pipe or a device is refused before it can block, and the size is that of the file that was
opened, so that no other file can take its place between the check and the read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nanoinfer.errors import NanoinferError

MAX_TEXT_BYTES = 1 << 30
MAX_JSON_DIGITS = 1000  # of one number; Python needs time quadratic in the digits of an integer


def escaped(text: object, limit: int = 300) -> str:
    r"""Return text from outside as it may stand in a one-line message: 'a\nb\x1b[1m' -> 'a\\nb\\x1b[1m'.

    Control characters could move a terminal's cursor or begin a second line. What is longer than `limit` is cut.
    """
    shown = str(text)
    shown = shown if len(shown) <= limit else f"{shown[:limit]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def reason(error: BaseException) -> str:
    """Return an exception's message for a one-line message of ours."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return escaped(" ".join(text.split()))


@contextmanager
def open_regular(path: Path, what: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading; yield it, unbuffered, and its size in bytes.

    Args:
        path: the file; symbolic links are followed.
        what: what it should be, for error messages: "a config".

    Raises:
        NanoinferError: the file is missing, not ours to read, or a folder, pipe or device.
    """
    try:
        f = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    except (OSError, ValueError) as e:  # ValueError: a null byte in the path
        raise NanoinferError(f"{escaped(path)} cannot be read as {what}: {reason(e)}") from None
    with f:
        status = os.fstat(f.fileno())
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
            raise NanoinferError(f"{escaped(path)} is {kind}, not a file that can be read as {what}")
        yield f, status.st_size


def read_at(f: BinaryIO, start: int, num_bytes: int, path: Path) -> bytes:
    """Return bytes of an open file; the file's position does not matter.

    Raises:
        NanoinferError: the file ends before them: it was cut short after its size was checked.
    """
    content = bytearray()
    while len(content) < num_bytes:
        try:  # Linux returns at most 2 GiB at a time
            piece = os.pread(f.fileno(), min(num_bytes - len(content), 1 << 30), start + len(content))
        except OSError as e:
            raise NanoinferError(f"{escaped(path)} cannot be read: {reason(e)}") from None
        if not piece:
            raise NanoinferError(f"{escaped(path)} was changed while it was read: load it again")
        if len(piece) == num_bytes:
            return piece
        content += piece
    return bytes(content)


def read_limited(path: Path, limit: int, what: str) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Args:
        path: the file.
        limit: bytes; a larger file is not read at all.
        what: what it should be, for error messages: "a config".

    Raises:
        NanoinferError: the file is missing, no regular file, larger than the limit, or changes while it is read.
    """
    with open_regular(path, what) as (f, size):
        if size > limit:
            raise NanoinferError(f"{escaped(path)} has {size} bytes; the limit for {what} is {limit}")
        return read_at(f, 0, size, path)


def read_text(path: Path, what: str = "a text") -> str:
    """Return the content of a UTF-8 file, character for character: CRLF and a byte-order mark stay as they are.

    Raises:
        NanoinferError: as `read_limited`; or the content is not UTF-8.
    """
    try:
        return read_limited(path, MAX_TEXT_BYTES, what).decode()
    except UnicodeDecodeError as e:
        raise NanoinferError(f"{escaped(path)} is not UTF-8 (byte {e.start}: {e.reason}): convert it") from None


def read_json(path: Path, limit: int, what: str) -> Any:
    """Return what a JSON file of at most `limit` bytes holds.

    Raises:
        NanoinferError: as `read_limited`; or it is no JSON, nests too deep, names a key twice, or holds a
            number of more than MAX_JSON_DIGITS characters.
    """
    return parse_json(read_limited(path, limit, what), f"{escaped(path)} cannot be read as {what}")


def parse_json(text: str | bytes, complaint: str) -> Any:
    """Return what a JSON text holds. NaN and Infinity are numbers to Python: who takes numbers checks them.

    Args:
        text: the JSON.
        complaint: how an error's message begins.

    Raises:
        NanoinferError: see `read_json`.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_int=lambda s: int(_short(s)), parse_float=lambda s: float(_short(s))
        )
    except (ValueError, RecursionError) as e:
        raise NanoinferError(f"{complaint}: {reason(e)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; a key that stands twice has two meanings, and readers differ in which they take."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return made


def _short(digits: str) -> str:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(digits)} characters; the limit is {MAX_JSON_DIGITS}")
    return digits


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: readers, and a crash at any time, see the old file or the new one."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with open(partial, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:  # disk full, interrupted, or `path` is a folder: do not leave half a file behind
        partial.unlink(missing_ok=True)
        raise
