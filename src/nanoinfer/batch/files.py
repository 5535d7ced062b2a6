"""The files of a batch: where lines are read, and where records are written, which a later run continues.

Lines are read one at a time, with a limit on their length and a hash of all that was read.

Beside the file OUT is OUT.state, which is replaced atomically now and then, after the file was synchronized to the
disk. It has the settings of the job and a checkpoint: how much of the input and of the output belong to the records
written so far, with the hash of both. After a kill at any moment, the next run

    1. compares the settings, and the hash of the output up to the checkpoint
    2. reads the input up to the checkpoint and compares its hash
    3. truncates the output to the checkpoint, so that a record is never there twice or in part
    4. continues with the next line

So a kill loses the records of the last moments, and they are generated again. Two runs of a job at the same time are
refused by a lock on the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from nanoinfer.errors import NanoinferError, escaped, reason
from nanoinfer.utils.files import lock, read_object, require_writable, write_atomically

FORMAT = "nanoinfer-batch/1"
MAX_STATE_BYTES = 1 << 20
STANDARD_PATHS = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Names of standard output, which may be a file: as a file it would be replaced, and have its state in /dev."""
CHECKPOINT_SEC = 0.25
"""Shortest time between two checkpoints; longer on a slow disk, so that they take at most a twentieth of the time."""
_STARTS = (b'{"line": ', b'{"id": "batch_req_')  # of records; after a loss of power the file may end with zeros
_NOTHING = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """How far a job is: the records that were written, and the input that they are for."""

    num_records: int = 0
    num_errors: int = 0
    first_error: str = ""
    """The message of the first error record, with its line."""
    input_bytes: int = 0
    input_sha256: str = _NOTHING
    output_bytes: int = 0
    output_sha256: str = _NOTHING


class StreamOutput:
    """Writes records to standard output: what was written before is not known."""

    resumable = False

    def __init__(self) -> None:
        self.done = Checkpoint()

    def skip(self, reader: LineReader) -> None:
        """Read the lines whose records are there already: none."""

    def start(self) -> None:
        """Do nothing: the stream is open."""

    def write(self, record: bytes, place: Place, error: str = "") -> None:
        """Write the record of a line; `error`: its message, if it is an error record."""
        sys.stdout.buffer.write(record)
        sys.stdout.buffer.flush()
        self.done = _after(self.done, error)

    def checkpoint(self) -> None:
        """Do nothing: a stream cannot be continued."""

    finish = close = checkpoint


class FileOutput:
    """Writes records to a file, and continues one that an earlier run has begun. Nothing is changed before `start`.

    Args:
        path: the file.
        settings: what determines the records, besides the input: JSON values by name.
        overwrite: start again, whatever the file and its state contain.

    Raises:
        NanoinferError: the file cannot be written, is being written by another process, was written with other
            settings, or it or the file at the path of the state has content that this command did not write.
    """

    resumable = True

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool) -> None:
        self.name = escaped(path)
        self._path, self._state = path, path.with_name(path.name + ".state")
        self._settings = json.loads(json.dumps(settings))  # as they are read again: tuples are lists
        self._hash = hashlib.sha256()
        self._fd = -1
        self._due = 0.0
        self._saved: Checkpoint | None = None
        self.done = Checkpoint()
        if path.exists():
            self._open(os.O_RDWR)
        elif not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            why = "Permission denied" if path.parent.is_dir() else f"there is no folder {escaped(path.parent)}"
            raise NanoinferError(f"{self.name} cannot be written: {why}")
        if overwrite:
            return
        try:
            if self._fd >= 0 and os.fstat(self._fd).st_size:
                self.done = self._load()
                self._check_content()
            elif self._state.exists() and not self._is_known():
                raise _foreign(escaped(self._state))
        except BaseException:
            self.close()
            raise

    def skip(self, reader: LineReader) -> None:
        """Read the lines whose records are in the file.

        Raises:
            NanoinferError: the input is not the one that the file was made from.
        """
        if not self.done.input_bytes:
            return
        place = None
        while (place is None or place.end < self.done.input_bytes) and not reader.at_end():
            place = next(reader).place
        if place is None or (place.end, place.digest) != (self.done.input_bytes, self.done.input_sha256):
            raise self._refusal(f"was made from another input: its first {self.done.num_records} lines have changed")

    def start(self) -> None:
        """Remove what was written after the checkpoint, and be ready for the next record."""
        try:
            if self._fd < 0:
                self._open(os.O_RDWR | os.O_CREAT)
            if os.fstat(self._fd).st_size >= self.done.output_bytes:  # a shorter one would be filled with zeros
                os.ftruncate(self._fd, self.done.output_bytes)
        except OSError as e:
            raise _unwritable(self.name, e) from None
        self._save()

    def write(self, record: bytes, place: Place, error: str = "") -> None:
        """Write the record of a line; `error`: its message, if it is an error record."""
        remaining = memoryview(record)
        try:
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError as e:
            raise _unwritable(self.name, e) from None
        self._hash.update(record)
        self.done = replace(
            _after(self.done, error),
            input_bytes=place.end,
            input_sha256=place.digest,
            output_bytes=self.done.output_bytes + len(record),
            output_sha256=self._hash.hexdigest(),
        )

    def checkpoint(self) -> None:
        """Save how far the job is, if it went on and the last time is long enough ago. Raises as `finish`."""
        if self.done != self._saved and time.monotonic() >= self._due:
            self._save()

    def finish(self) -> None:
        """Remove what an interrupt left of a record, and save how far the job is. Raises NanoinferError: it cannot."""
        if self._saved is not None:
            self.start()

    def close(self) -> None:
        """Close the file, after `finish` where an error has ended the job."""
        try:
            with suppress(OSError, NanoinferError):  # a full disk: the last checkpoint is still valid
                self.finish()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._saved = -1, None

    def _save(self) -> None:
        """Write the state, after the file."""
        start, done = time.monotonic(), self.done
        state = {"format": FORMAT, "settings": self._settings, "checkpoint": asdict(done)}
        content = json.dumps(state, indent=1).encode()
        try:
            os.fsync(self._fd)
            write_atomically(self._state, content)
        except OSError as e:
            raise _unwritable(escaped(self._state), e) from None
        self._saved = done
        end = time.monotonic()
        self._due = end + max(CHECKPOINT_SEC, 20 * (end - start))

    def _open(self, flags: int) -> None:
        try:
            self._fd = os.open(self._path, flags | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise _unwritable(self.name, e) from None
        if not lock(self._fd):
            self.close()
            raise NanoinferError(f"{self.name} is being written by another process: wait until it has ended")

    def _load(self) -> Checkpoint:
        """Return the checkpoint of the file's state."""
        if not self._state.exists():
            raise _foreign(self.name)
        state = read_object(self._state, MAX_STATE_BYTES, "the state of a batch")
        names = {f.name: type(f.default) for f in fields(Checkpoint)}
        values = state.get("checkpoint")
        if (
            not isinstance(values, dict)
            or state.get("format") != FORMAT
            or not isinstance(state.get("settings"), dict)
            or {name: type(value) for name, value in values.items()} != names
        ):
            raise self._refusal(f"cannot be continued: {escaped(self._state.name)} is malformed")
        before, now = state["settings"], self._settings
        for name in {**now, **before}:
            if before.get(name) != now.get(name):
                raise self._refusal(f"was made with {name}={before.get(name)!r}, not {now.get(name)!r}")
        return Checkpoint(**values)

    def _is_known(self) -> bool:
        """Return whether the file at the path of the state is that of a batch."""
        with suppress(NanoinferError):
            return read_object(self._state, MAX_STATE_BYTES, "the state of a batch").get("format") == FORMAT
        return False

    def _check_content(self) -> None:
        """Compare the hash of the file up to the checkpoint, and the beginning of what follows."""
        self._hash = self._read_hash()
        rest = os.read(self._fd, 64)
        begins = rest[:1] == b"\0" or any(rest[: len(start)] == start[: len(rest)] for start in _STARTS)
        if self._hash.hexdigest() != self.done.output_sha256 or not begins:
            raise self._refusal("was changed by another program")

    def _read_hash(self) -> Any:
        """Return the hash (of hashlib) of the content up to the last record."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        digest, remaining = hashlib.sha256(), self.done.output_bytes
        while remaining > 0 and (piece := os.read(self._fd, min(remaining, 1 << 20))):
            digest.update(piece)
            remaining -= len(piece)
        return digest

    def _refusal(self, why: str) -> NanoinferError:
        return NanoinferError(f"{self.name} {why}: give another output, or replace it by --overwrite")


Output = FileOutput | StreamOutput


def open_output(name: str, settings: Mapping[str, Any], overwrite: bool) -> Output:
    """Return where records are written, after checking that it can be. Raises as `FileOutput`."""
    if name in (STANDARD, *STANDARD_PATHS):
        return StreamOutput()
    path = Path(name)
    try:
        mode = os.stat(path).st_mode if path.exists() else stat.S_IFREG
    except (OSError, ValueError) as e:  # a name that is too long, a null byte
        raise _unwritable(escaped(path), e) from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise NanoinferError(f"{escaped(path)} is {kind}: give the name of a file, or - for standard output")
    return FileOutput(path, settings, overwrite)


def open_parts(
    inputs: list[str], output: str, settings: Mapping[str, Any], overwrite: bool
) -> list[tuple[LineReader, Output]]:
    """Return readers and their outputs: one of all files, or of a folder one of each .jsonl file, in a second folder.

    Args:
        inputs: files, or one folder.
        output: a file, "-", or a folder, which is made if it does not exist.
        settings, overwrite: as for `FileOutput`.

    Raises:
        NanoinferError: as LineReader and FileOutput; the folder has no .jsonl files.
    """
    if len(inputs) > 1 or not os.path.isdir(inputs[0]):
        reader = LineReader(inputs)
        refuse_same_file(inputs, output)
        return [(reader, open_output(output, settings, overwrite))]
    source, target = Path(inputs[0]), Path(output)
    names = sorted(path.name for path in source.glob("*.jsonl"))
    if not names:
        raise NanoinferError(f"{escaped(source)} has no .jsonl files: give files, or a folder of them")
    require_writable(target)
    # The number of a file is that of its lines' seeds, too: one that comes before others changes theirs.
    return [
        (LineReader([str(source / name)]), FileOutput(target / name, {**settings, "file": i}, overwrite))
        for i, name in enumerate(names)
    ]


def refuse_same_file(inputs: list[str], output: str) -> None:
    """Raise NanoinferError if the output, or its state, is one of the inputs."""
    for name in inputs:
        for target in (output, f"{output}.state"):
            is_same = False
            with suppress(OSError, ValueError):  # one of them does not exist
                is_same = os.path.samefile(name, target)
            if is_same:
                raise NanoinferError(
                    f"{escaped(name)} is the input and {escaped(output)} the output: they are the same file"
                )


def _after(done: Checkpoint, error: str) -> Checkpoint:
    """Return the counts after one more record."""
    return replace(
        done,
        num_records=done.num_records + 1,
        num_errors=done.num_errors + bool(error),
        first_error=done.first_error or error,
    )


def _foreign(name: str) -> NanoinferError:
    return NanoinferError(
        f"{name} exists and was not written by this command: give another output, or replace it by --overwrite"
    )


def _unwritable(name: str, error: Exception) -> NanoinferError:
    return NanoinferError(f"{name} cannot be written: {reason(error)}")


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
