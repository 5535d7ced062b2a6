"""Divide files into pieces: runs of lines that a task reads, without looking at the lines before them.

    pieces, _ = plan("a.jsonl", Files())   # [Piece("a.jsonl", 0, 3120, 1, 0, 32), Piece("a.jsonl", 3120, ...), ...]
    for line in read(pieces[1], Files()): ...

Pieces grow with the input: small ones divide a small input among many actors, and a large one has few enough of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from nanoinfer.batch.lines import Line, LineReader
from nanoinfer.errors import NanoinferError
from nanoinfer.ray.rows import to_lines
from nanoinfer.utils.files import escaped, reason

if TYPE_CHECKING:
    from pyarrow import fs

MIN_LINES = 32
MAX_BYTES = 4 << 20
ROWS = 1024
"""Rows of a Parquet file in memory."""
PARQUET = ".parquet"


@dataclass(frozen=True)
class Piece:
    """A run of lines of a file, or a row group of a Parquet file, whose rows count as lines."""

    file: str
    offset: int
    """Bytes before its first line; of a Parquet file, the number of its row group."""
    num_bytes: int
    """0: of a Parquet file."""
    first_line: int
    """The number of its first line in the file, from 1."""
    lines_before: int
    """Lines of the files before this one, which the number of a line counts."""
    num_lines: int
    """Those that are not blank."""


@dataclass(frozen=True)
class Files:
    """Opens files. It may be sent to another process.

    Args:
        system: the file system of pyarrow that they are in; None: that of the machine where the batch was started.
        folder: where relative paths begin.
    """

    system: fs.FileSystem | None = None
    folder: str = field(default_factory=os.getcwd)

    def open(self, name: str, offset: int = 0) -> BinaryIO:
        """Open a file for reading. Raises OSError."""
        if self.system is None:
            file: Any = open(os.path.join(self.folder, name), "rb")  # noqa: SIM115
        else:
            try:
                file = self.system.open_input_file(name)
            except ValueError as e:  # of pyarrow
                raise OSError(str(e)) from None
        if offset:
            file.seek(offset)
        return cast(BinaryIO, file)


def plan(name: str, files: Files, before: int = 0, num_pieces: int = 0) -> tuple[list[Piece], int]:
    """Return the pieces of a file, and how many lines it has, blank ones included. A JSONL file is read once.

    Args:
        name: a JSONL file, or a Parquet file.
        files: opens it.
        before: lines of the files before this one.
        num_pieces: pieces before these.

    Raises:
        NanoinferError: the file cannot be read.
    """
    if name.endswith(PARQUET):
        return _row_groups(name, files, before)
    pieces: list[Piece] = []
    reader = LineReader([name], files.open)
    for line in reader:
        end = line.offset + line.num_bytes
        last = pieces[-1] if pieces else None
        limit = MIN_LINES - 1 + num_pieces + len(pieces)
        if last is not None and last.num_lines < limit and end - last.offset <= MAX_BYTES:
            pieces[-1] = replace(last, num_bytes=end - last.offset, num_lines=last.num_lines + 1)
        else:
            pieces.append(Piece(name, line.offset, line.num_bytes, line.place.line, before, 1))
    return pieces, reader.num_lines


def read(piece: Piece, files: Files) -> Iterator[Line]:
    """Return the lines of a piece.

    Raises:
        NanoinferError: the file cannot be read, or has fewer lines than before.
    """
    if piece.file.endswith(PARQUET):
        lines = _rows(piece, files)
    else:
        reader = LineReader([piece.file], lambda name: files.open(name, piece.offset), piece.first_line)
        lines = islice(reader, piece.num_lines)
    count = 0
    for line in lines:
        count, line_number = count + 1, line.place.line
        yield replace(line, place=replace(line.place, number=piece.lines_before + line_number))
    if count < piece.num_lines:
        raise changed(piece.file)


def open_parquet(name: str, files: Files) -> Any:
    """Return a pyarrow.parquet.ParquetFile. Raises NanoinferError if there is none that can be read."""
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(files.open(name))
    except (OSError, ValueError) as e:  # ValueError: of pyarrow, about malformed files
        raise unreadable(name, e) from None


def _row_groups(name: str, files: Files, before: int) -> tuple[list[Piece], int]:
    file = open_parquet(name, files)
    pieces, first = [], 1
    for group in range(file.num_row_groups):
        if rows := file.metadata.row_group(group).num_rows:
            pieces.append(Piece(name, group, 0, first, before, rows))
            first += rows
    return pieces, first - 1


def _rows(piece: Piece, files: Files) -> Iterator[Line]:
    import pyarrow as pa

    file = open_parquet(piece.file, files)
    number = piece.first_line
    try:
        for batch in file.iter_batches(ROWS, row_groups=[piece.offset]):
            for line in to_lines(pa.Table.from_batches([batch]), None):
                yield replace(line, place=replace(line.place, file=piece.file, line=number))
                number += 1
    except NanoinferError as e:
        raise NanoinferError(f"{escaped(piece.file)}: {e}") from None
    except (OSError, ValueError, IndexError) as e:  # IndexError: the row group is gone
        raise unreadable(piece.file, e) from None


def without(pieces: Sequence[Piece], num_lines: int) -> tuple[list[Piece], int]:
    """Leave out the pieces whose lines are among the first; return how many lines of the first one that is left are."""
    left = list(pieces)
    while left and left[0].num_lines <= num_lines:
        num_lines -= left.pop(0).num_lines
    return left, num_lines


def changed(file: str) -> NanoinferError:
    """Return the error about an input that is not what it was."""
    return NanoinferError(f"{escaped(file)} was changed while it was read: run the same command again")


def unreadable(file: str, error: Exception) -> NanoinferError:
    """Return the error about an input that cannot be read."""
    return NanoinferError(f"{escaped(file)} cannot be read as prompts: {reason(error)}")
