"""Reading and writing whole files: regular files only, never more than a limit, errors of one line.

A path that names a pipe or a device is refused before it can block, and the size is that of the file that was
opened, so that no other file can take its place between the check and the read.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

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


class RegularFile:
    """A regular file, open for reading at any place; closed when it is used no more.

    Bytes are copied out of it and never mapped: a map of a file that another process cuts short ends this one
    with SIGBUS. A file that changes after it was opened is an error at the next read.

    Args:
        path: the file; symbolic links are followed.
        what: what it should be, for error messages: "a config".

    Raises:
        NanoinferError: the file is missing, not ours to read, or a folder, pipe or device.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._fd = -1
        try:  # O_NONBLOCK: opening a pipe would wait for somebody to write to it
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as e:  # ValueError: a null byte in the path
            raise NanoinferError(f"{escaped(path)} cannot be read as {what}: {reason(e)}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
            raise NanoinferError(f"{escaped(path)} is {kind}, not a file that can be read as {what}")
        self.size = status.st_size
        self._time = status.st_mtime_ns

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return so many bytes, of which the caller has checked that they are not too many for memory.

        Raises:
            NanoinferError: the file ends before them, or was changed since it was opened.
        """
        content = bytearray(num_bytes)
        self.read_into(start, memoryview(content))
        return bytes(content)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes. Raises NanoinferError as `read`."""
        done = 0
        while done < len(buffer):
            try:  # Linux reads at most 2 GiB at a time
                count = os.preadv(self._fd, [buffer[done:]], start + done)
            except OSError as e:
                raise NanoinferError(f"{escaped(self.path)} cannot be read: {reason(e)}") from None
            if not count:
                break
            done += count
        status = os.fstat(self._fd)
        if done < len(buffer) or (status.st_size, status.st_mtime_ns) != (self.size, self._time):
            raise NanoinferError(f"{escaped(self.path)} was changed while it was read: load it again")


def read_limited(path: Path, limit: int, what: str) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Args:
        path: the file.
        limit: bytes; a larger file is not read at all.
        what: what it should be, for error messages: "a config".

    Raises:
        NanoinferError: the file is missing, no regular file, larger than the limit, or changes while it is read.
    """
    file = RegularFile(path, what)
    if file.size > limit:
        raise NanoinferError(f"{escaped(path)} has {file.size} bytes; the limit for {what} is {limit}")
    return file.read(0, file.size)


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
        (twice, _), *_ = (Counter(k for k, _ in pairs) - Counter(list(made))).items()
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
