"""What runs on the nodes of a cluster: tasks that read the lines of a piece, actors that generate for them.

Both send tables. A fault of the input, the model or the engine is a row of its own, with the message in column `fault`:
exceptions would be tried again, and be printed with tracebacks by Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoinfer.batch.lines import Line, Place
from nanoinfer.batch.run import BatchOptions
from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.ray.connect import check_versions, node_name
from nanoinfer.ray.plan import Files, Piece, read
from nanoinfer.ray.service import LineService

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 256
"""Lines that are in memory before they are given to Ray."""
_LINE = ("number", "file", "line", "num_bytes", "content")
_ANSWER = ("number", "check", "record", "error")


@dataclass(frozen=True)
class Job:
    """What a batch is, and how it is to run."""

    config: LLMConfig
    options: BatchOptions
    given: tuple[str, ...]
    """Fields of the sampling parameters that the model's generation_config.json does not replace."""
    several: bool = False
    """Whether records name the file of their line."""
    files: Files = field(default_factory=Files)
    num_actors: int | None = None
    """None: as many as there are CPUs for."""
    cpus_per_actor: int | None = None
    """None: those of the smallest node."""


@dataclass(frozen=True)
class Answer:
    """The record of a line."""

    number: int
    """Of the line."""
    check: bytes
    """See `check_of`."""
    record: bytes
    error: str
    """The message of an error record, with its line; "": it is none."""


def check_of(line: Line) -> bytes:
    """Return a hash of a line, by which two readings of a file are compared."""
    return hashlib.blake2b(b"" if line.content is None else line.content, digest_size=8).digest()


def datasource(pieces: Sequence[Piece], files: Files) -> Any:
    """Return the ray.data.Datasource that has a read task for each piece."""
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    def task(piece: Piece) -> ReadTask:
        about = BlockMetadata(num_rows=piece.num_lines, size_bytes=piece.num_bytes, exec_stats=None, input_files=None)
        return ReadTask(partial(_blocks, piece, files), about)

    class Lines(Datasource):  # type: ignore[misc]
        """The lines of the pieces."""

        def estimate_inmemory_data_size(self) -> int:
            """Return the bytes of all pieces."""
            return sum(piece.num_bytes for piece in pieces)

        def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
            """Return the tasks, one for each piece."""
            return [task(piece) for piece in pieces]

        @property
        def supports_distributed_reads(self) -> bool:
            """Whether other nodes have the files."""
            return files.system is not None

    return Lines()


class LineActor:
    """Has a model, and generates for blocks of lines.

    Args:
        job: what to generate.
        versions: of the process that started the batch.
        started: a queue that gets the handle of the actor; None: this is no actor.
    """

    def __init__(self, job: Job, versions: dict[str, str], started: Any = None) -> None:
        import ray

        if started is not None:
            started.put(ray.get_runtime_context().current_actor)
            with suppress(OSError):  # a model in a folder has the same name on all nodes
                os.chdir(job.files.folder)
        self._node, self._fault = node_name(), ""
        try:
            check_versions(versions)
            llm = LLM.from_config(job.config)
            options = replace(job.options, defaults=llm.requests.merge(job.options.defaults, job.given))
            self._service = LineService(llm, options, job.several)
        except Exception as e:
            self._fault = self._about(e)

    async def __call__(self, table: pa.Table) -> pa.Table:
        """Return the answers to a block of lines, up to the first fault."""
        if self._fault:
            return _to_table(_ANSWER, (), self._fault)
        lines, fault = _to_lines(table)
        rows: list[dict[str, Any]] = []
        try:
            results = await asyncio.wrap_future(self._service.submit(lines))
            for line, result in zip(lines, results, strict=True):
                rows.append(vars(Answer(line.place.number, check_of(line), result.record, result.error)))
        except Exception as e:
            fault = self._about(e)
        return _to_table(_ANSWER, rows, fault)

    def _about(self, error: Exception) -> str:
        return f"node {self._node}: {one_line(error)}"


def from_table(table: pa.Table) -> Iterator[Answer]:
    """Return the answers in a block. Raises NanoinferError where it has a fault."""
    for row in table.to_pylist():
        if (fault := row.pop("fault")) is not None:
            raise NanoinferError(fault)
        yield Answer(**row)


def _blocks(piece: Piece, files: Files) -> Iterator[pa.Table]:
    """Read a piece in tables of ROWS lines; a fault ends it."""
    rows: list[dict[str, Any]] = []
    fault = None
    try:
        for line in read(piece, files):
            place = line.place
            rows.append({"number": place.number, "file": place.file, "line": place.line,
                         "num_bytes": line.num_bytes, "content": line.content})  # fmt: skip
            if len(rows) == ROWS:
                yield _to_table(_LINE, rows)
                rows = []
    except NanoinferError as e:
        fault = str(e)
    yield _to_table(_LINE, rows, fault)


def _to_lines(table: pa.Table) -> tuple[list[Line], str | None]:
    """Return the lines of a block before the first fault, and the fault."""
    lines: list[Line] = []
    for row in table.to_pylist():
        if row["fault"] is not None:
            return lines, row["fault"]
        place = Place(row["number"], row["file"], row["line"], 0, "")
        lines.append(Line(place, row["content"], row["num_bytes"]))
    return lines, None


def _to_table(names: Sequence[str], rows: Iterable[dict[str, Any]], fault: str | None = None) -> pa.Table:
    """Return rows as a table with a column `fault`, which the last row has if there is one."""
    import pyarrow as pa

    kinds = {"file": pa.string(), "error": pa.string(), "content": pa.binary(), "record": pa.binary(),
             "check": pa.binary()}  # fmt: skip
    schema = pa.schema([(name, kinds.get(name, pa.int64())) for name in names] + [("fault", pa.string())])
    return pa.Table.from_pylist([*rows, *([{"fault": fault}] if fault is not None else [])], schema)
