"""Read the lines of input files one at a time, with a limit on their length and a hash of all that was read."""

from __future__ import annotations

import hashlib
import os
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from nanoinfer.errors import NanoinferError, escaped, reason

MAX_LINE_BYTES = 4 << 20
"""A longer line is skipped without being held in memory."""
STANDARD = "-"
"""Name of standard input and of standard output."""
_CHUNK_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Place:
    """Where a line is."""

    number: int
    """Its number from 1, counted over all files, also those of other readers (`LineReader.num_before`)."""
    file: str
    line: int
    """Its number in its file, from 1."""
    end: int
    """Bytes of all files up to its end."""
    digest: str
    """SHA-256 of these bytes."""


@dataclass(frozen=True)
class Line:
    """A line that is not blank."""

    place: Place
    content: bytes | None
    """Without the newline; None: longer than MAX_LINE_BYTES."""
    num_bytes: int


class LineReader(Iterator[Line]):
    """Reads the lines of several files, one after the other. Blank lines are counted and left out.

    Args:
        names: the files; "-" is standard input.

    Raises:
        NanoinferError: a file is missing, not readable or a folder, or "-" is given twice; while reading: a read fails.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        regular = [_check(name) for name in self.names]
        self.is_regular = all(regular)
        """Whether all files are regular files, which can be read again."""
        self.num_before = 0
        """Lines of the files that other readers have read before: numbers of lines continue theirs."""
        if self.names.count(STANDARD) > 1:
            raise NanoinferError("the input - (standard input) is given twice: give it once")
        self._hash = hashlib.sha256()
        self._next_file = 0
        self._file: BinaryIO | None = None
        self._chunk, self._at = b"", 0
        self._end = self._number = self._line = 0
        self._peeked: Line | None = None
        self._total_lines: int | None = None

    def __next__(self) -> Line:
        line = self._peeked or self._next()
        self._peeked = None
        return replace(line, place=replace(line.place, number=self.num_before + line.place.number))

    def _next(self) -> Line:
        while True:
            if self._file is None:
                if self._next_file == len(self.names):
                    raise StopIteration
                self._open(self.names[self._next_file])
            size, content = self._read_line()
            if size == 0:
                self.close()
                continue
            self._end, self._number, self._line = self._end + size, self._number + 1, self._line + 1
            if content is not None and self._line == 1:
                content = content.removeprefix(_BOM)
            if content is None or content.strip():
                name = self.names[self._next_file - 1]
                place = Place(self._number, name, self._line, self._end, self._hash.hexdigest())
                return Line(place, content, size)

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self.names)

    @property
    def num_lines(self) -> int:
        """Number of lines read so far, blank ones included."""
        return self._number

    @property
    def total_lines(self) -> int | None:
        """Number of lines that are not blank; the files are read for it once. None: one is not a regular file."""
        if self.is_regular and self._total_lines is None:
            self._total_lines = sum(1 for _ in LineReader(self.names))
        return self._total_lines

    def at_end(self) -> bool:
        """Return whether no line is left. Waits for the next one."""
        if self._peeked is None:
            with suppress(StopIteration):
                self._peeked = self._next()
        return self._peeked is None

    def ready(self) -> bool:
        """Return whether the next line, or a part of it, can be read without waiting for another process."""
        if self._peeked is not None or self._file is None or self._chunk.find(b"\n", self._at) >= 0:
            return True
        try:
            poll = select.poll()
            poll.register(self._file.fileno(), select.POLLIN)
        except (OSError, ValueError):  # not a file of the operating system
            return True
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the current file; the next line is that of the next file."""
        if self._file is not None and self.names[self._next_file - 1] != STANDARD:
            self._file.close()
        self._file = None

    def _open(self, name: str) -> None:
        try:
            self._file = sys.stdin.buffer if name == STANDARD else open(name, "rb")  # noqa: SIM115
        except OSError as e:
            raise _unreadable(name, e) from None
        self._next_file += 1
        self._chunk, self._at, self._line = b"", 0, 0

    def _read_line(self) -> tuple[int, bytes | None]:
        """Return the bytes of the next line and its content without the newline; 0 at the end of the file."""
        assert self._file is not None
        parts: list[bytes] = []
        size = 0
        while not (parts and parts[-1].endswith(b"\n")):
            if self._at == len(self._chunk):
                try:
                    self._chunk, self._at = self._file.read1(_CHUNK_BYTES), 0  # type: ignore[attr-defined]
                except OSError as e:
                    raise _unreadable(self.names[self._next_file - 1], e) from None
                if not self._chunk:
                    break
            end = self._chunk.find(b"\n", self._at) + 1 or len(self._chunk)
            piece = self._chunk[self._at : end]
            self._at, size = end, size + len(piece)
            self._hash.update(piece)
            if size > MAX_LINE_BYTES:
                parts.clear()
            parts.append(piece)
        return size, b"".join(parts).removesuffix(b"\n") if size <= MAX_LINE_BYTES else None


def _check(name: str) -> bool:
    """Return whether a file that can be read is a regular one, no pipe or device."""
    if name == STANDARD:
        return False
    try:
        status = os.stat(name)
    except (OSError, ValueError) as e:  # ValueError: a null byte in the name
        raise _unreadable(name, e) from None
    if stat.S_ISDIR(status.st_mode):
        raise NanoinferError(f"{escaped(name)} is a folder, not a file of prompts: give files")
    if not os.access(name, os.R_OK):
        raise NanoinferError(f"{escaped(name)} cannot be read as prompts: Permission denied")
    return stat.S_ISREG(status.st_mode)


def _unreadable(name: str, error: Exception) -> NanoinferError:
    shown = "standard input" if name == STANDARD else escaped(Path(name))
    return NanoinferError(f"{shown} cannot be read as prompts: {reason(error)}")
