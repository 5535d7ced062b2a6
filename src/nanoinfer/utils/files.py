"""Read and write whole files: regular files only, with a size limit and one-line errors.

A pipe or a device is refused without blocking. Type and size are checked on the open file, so the file cannot be
replaced between the check and the read.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nanoinfer.errors import NanoinferError, escaped, reason

MAX_TEXT_BYTES = 1 << 30
MAX_JSON_DIGITS = 1000  # of one number; Python needs time quadratic in the digits of an integer


class RegularFile:
    """A regular file, open for reading at any offset. It is closed when the object is deleted.

    `read` copies bytes, and raises an error if the file has changed since it was opened. Where another process
    truncates a memory-mapped file, access ends this process with SIGBUS.

    Args:
        path: the file; symbolic links are followed.
        what: description of the expected content, for error messages: "a config".

    Raises:
        NanoinferError: the file is missing or not readable, or is a folder, pipe or device.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._fd = -1
        try:  # without O_NONBLOCK, opening a pipe would wait for a writer
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

    def fileno(self) -> int:
        """Return the descriptor, which this object closes."""
        return self._fd

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes from offset `start`. The caller limits num_bytes.

        Raises:
            NanoinferError: the file is too short, or has changed since it was opened.
        """
        content = bytearray(num_bytes)
        self.read_into(start, memoryview(content))
        return bytes(content)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from offset `start`. Raises as `read`."""
        done = 0
        while done < len(buffer):
            try:  # Linux reads at most 2 GiB per call
                count = os.preadv(self._fd, [buffer[done:]], start + done)
            except OSError as e:
                raise NanoinferError(f"{escaped(self.path)} cannot be read: {reason(e)}") from None
            if not count:
                break
            done += count
        self.check(complete=done == len(buffer))

    def check(self, complete: bool = True) -> None:
        """Raise NanoinferError if the file has changed since it was opened, or a read of it was not complete."""
        status = os.fstat(self._fd)
        if not complete or (status.st_size, status.st_mtime_ns) != (self.size, self._time):
            raise NanoinferError(f"{escaped(self.path)} was changed while it was read: load it again")

    def map(self) -> mmap.mmap:
        """Map the whole file, read-only. Processes that map it share its pages. See the class about truncation.

        Raises:
            NanoinferError: the file cannot be mapped, or has changed since it was opened.
        """
        try:
            content = mmap.mmap(self._fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as e:  # ValueError: it has become shorter
            raise NanoinferError(f"{escaped(self.path)} cannot be mapped into memory: {reason(e)}") from None
        self.read(0, 0)
        return content


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, by which its format is known; b"" if it is not a regular file."""
    try:
        file = RegularFile(path, "a model")
        return file.read(0, min(count, file.size))
    except NanoinferError:
        return b""


def read_limited(path: Path, limit: int, what: str) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. `what`: see `RegularFile`.

    Raises:
        NanoinferError: the file is missing, not a regular file, larger than the limit, or changes during the read.
    """
    file = RegularFile(path, what)
    if file.size > limit:
        raise NanoinferError(f"{escaped(path)} has {file.size} bytes; the limit for {what} is {limit}")
    return file.read(0, file.size)


def read_text(path: Path, what: str = "a text") -> str:
    """Return the content of a UTF-8 file unchanged, including CRLF and a byte-order mark.

    Raises:
        NanoinferError: as `read_limited`, or the content is not UTF-8.
    """
    return decode_utf8(read_limited(path, MAX_TEXT_BYTES, what), escaped(path))


def decode_utf8(content: bytes, what: str) -> str:
    """Return the text of bytes; `what` names them in the error. Raises NanoinferError if they are not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise NanoinferError(f"{what} is not UTF-8 (byte {e.start}: {e.reason}): convert it") from None


def read_json(path: Path, limit: int, what: str) -> Any:
    """Return the content of a JSON file of at most `limit` bytes.

    Raises:
        NanoinferError: as `read_limited`; or the content is not JSON, nests too deep, has a duplicate key, or a number
            of more than MAX_JSON_DIGITS characters.
    """
    return parse_json(read_limited(path, limit, what), f"{escaped(path)} cannot be read as {what}")


def read_object(path: Path, limit: int, what: str) -> dict[str, Any]:
    """Return the content of a JSON file that is an object. Raises NanoinferError as `read_json`, or if it is none."""
    content = read_json(path, limit, what)
    if not isinstance(content, dict):
        raise NanoinferError(f"{escaped(path)} contains a {type(content).__name__}: it is not a JSON object")
    return content


def parse_json(text: str | bytes, complaint: str) -> Any:
    """Parse JSON; `complaint` begins the error message. Python's parser accepts NaN and Infinity: check numbers.

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
    """Build an object; refuse duplicate keys, for which readers use different values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (twice, _), *_ = (Counter(k for k, _ in pairs) - Counter(list(fields))).items()
        raise ValueError(f"the key {twice[:80]!r} is duplicated")
    return fields


def _short(digits: str) -> str:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(digits)} characters; the limit is {MAX_JSON_DIGITS}")
    return digits


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write files to a folder, each atomically; create the folder. Raises NanoinferError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as e:
        raise NanoinferError(f"{escaped(folder)} cannot be written: {reason(e)}: choose another folder") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically: readers see the old or the new file, also after a crash."""
    with replacing(path) as f:
        f.write(content)


def require_writable(folder: Path, name: str | None = None) -> None:
    """Create a folder; raise NanoinferError if files, or one of this name, cannot be written in it."""
    import tempfile  # not at the start of every program

    path = folder / (name or "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{name or ''}."):  # not one without a name
            pass
        if name is not None and path.exists() and not path.is_file():
            raise IsADirectoryError(0, "it is a folder or a device")
    except OSError as e:
        raise NanoinferError(f"{path} cannot be written: {e.strerror}: choose another place") from None


def lock(fd: int) -> bool:
    """Lock an open file; return False if another process has locked it. A file system without locks returns True."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return not isinstance(e, BlockingIOError)
    return True


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` atomically at the end of the block, or is deleted after an exception.

    If `private`, its owner alone may read it. Raises OSError if it cannot be written, another process is writing it,
    or `path` is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is a folder, a pipe or a device")  # root can replace even /dev/null by a file
    partial = path.with_name(path.name + ".tmp")
    partial.touch(0o600 if private else 0o666)
    with open(partial, "r+b") as f:  # not emptied before it is locked: another process may be writing it
        # it may have been renamed after it was opened, and is `path` now
        if not (lock(f.fileno()) and partial.exists() and os.path.samestat(os.fstat(f.fileno()), partial.stat())):
            raise OSError(errno.EBUSY, "another process is writing it")
        try:
            f.truncate()
            if private:
                os.fchmod(f.fileno(), 0o600)
            yield f
            f.flush()
            os.fsync(f.fileno())
            os.replace(partial, path)
        except BaseException:  # disk full or interrupted
            partial.unlink(missing_ok=True)
            raise
