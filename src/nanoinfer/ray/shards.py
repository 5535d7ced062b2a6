"""A folder of shards: for each JSONL or Parquet file of the input, one of the same name in the output.

A shard appears in the output when it is complete. STATE, a file there, has the settings of the batch, the shards of
the input, and what is known of those that are complete: the same command does the others. Lines are numbered across
the shards, as those of several files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from nanoinfer.batch.lines import Line, LineReader
from nanoinfer.batch.output import MAX_STATE_BYTES, difference_of, take_lock
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.ray.pool import Job, answers
from nanoinfer.ray.rows import add_records, to_lines
from nanoinfer.ray.service import Result
from nanoinfer.utils.files import escaped, parse_json, reason
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

STATE = "_nanoinfer_batch.json"
FORMAT = "nanoinfer-shards/1"
PARQUET = ".parquet"
ENDINGS = (".jsonl", PARQUET)
ROWS = 1024
"""Rows of a Parquet file in memory."""


def is_uri(name: str) -> bool:
    """Return whether a name is a URI."""
    return "://" in name


@dataclass(frozen=True)
class Folder:
    """A folder, which may not exist yet, or a file, as a folder that has nothing else."""

    name: str
    """Its path or URI, as it was given."""
    system: fs.FileSystem
    path: str
    is_file: bool

    @classmethod
    def of(cls, name: str) -> Folder:
        """Return the folder of a path or a URI. Raises NanoinferError: pyarrow does not know such URIs."""
        try:
            from pyarrow import fs
        except ImportError:
            raise NanoinferError(missing_extra("pyarrow", "cluster")) from None
        with cannot(name, "be opened"):
            system, path = (
                fs.FileSystem.from_uri(name) if is_uri(name) else (fs.LocalFileSystem(), os.path.abspath(name))
            )
            return cls(name, system, path, system.get_file_info(path).is_file)

    def at(self, name: str) -> str:
        """Return the path of a file in it."""
        return self.path if self.is_file else f"{self.path.rstrip('/')}/{name}"

    def open(self, path: str) -> BinaryIO:
        """Open one of its files for reading. Raises OSError."""
        try:
            return cast(BinaryIO, self.system.open_input_file(path))
        except ValueError as e:  # of pyarrow
            raise OSError(str(e)) from None

    def sizes(self) -> dict[str, int]:
        """Return the sizes of its files by name, sorted. Raises NanoinferError."""
        from pyarrow import fs

        with cannot(self.name, "be read"):
            what = [self.path] if self.is_file else fs.FileSelector(self.path)
            found = self.system.get_file_info(what)
            return {f.base_name: f.size for f in sorted(found, key=lambda f: str(f.base_name)) if f.is_file}

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file; None if it does not exist. Raises NanoinferError."""
        path = self.at(name)
        with cannot(path, "be read"), suppress(FileNotFoundError), self.system.open_input_file(path) as file:
            return bytes(file.read(limit))
        return None

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Open a file that appears when the block has ended without an exception. Raises NanoinferError."""
        part = self.at(f".{name}.part")
        try:
            with cannot(self.at(name), "be written"):
                stream = self.system.open_output_stream(part)
            with stream:
                yield stream
            with cannot(self.at(name), "be written"):
                self.system.move(part, self.at(name))
        except BaseException:
            with suppress(OSError):
                self.system.delete_file(part)
            raise


@contextmanager
def cannot(name: str, what: str) -> Iterator[None]:
    """Turn errors of files into one of a line: "NAME cannot be written: Permission denied"."""
    try:
        yield
    except NanoinferError:
        raise
    except (OSError, ValueError) as e:  # ValueError: of pyarrow
        raise NanoinferError(f"{escaped(name)} cannot {what}: {reason(e)}") from None


@dataclass
class Shard:
    """What is known of a shard."""

    size: int
    """Bytes of the input."""
    num_lines: int = 0
    """Blank lines included."""
    num_records: int = 0
    num_errors: int = 0
    first_error: str = ""
    """The message of the first error record, with its line."""
    complete: bool = False


class Shards:
    """The shards of a batch. A folder of this machine is locked until `close`.

    Args:
        source: a folder or one shard: a path or a URI.
        target: a folder, which is made if it does not exist: a path or a URI.
        settings: what determines the records, besides the input.
        overwrite: start again, whatever the target contains.

    Raises:
        NanoinferError: there are no shards; the target was not written by this command, with other settings or from
            other shards, or is being written; one of them cannot be read or written.
    """

    def __init__(self, source: str, target: str, settings: Mapping[str, Any], overwrite: bool) -> None:
        self._source, self._target = Folder.of(source), Folder.of(target)
        self._settings = json.loads(json.dumps(settings))  # as they are read again: tuples are lists
        self._lock = -1
        found = {name: Shard(size) for name, size in self._source.sizes().items() if name.endswith(ENDINGS)}
        if not found:
            raise NanoinferError(f"{escaped(source)} has no shards: give a folder of .jsonl or .parquet files")
        if self._target.is_file:
            raise NanoinferError(f"{escaped(target)} is a file: give a folder, as the input has shards")
        with cannot(target, "be written"):
            self._target.system.create_dir(self._target.path, recursive=True)
            if not is_uri(target):
                self._lock = os.open(self._target.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._lock >= 0:
                take_lock(self._lock, escaped(target))
            self.shards = found if overwrite else self._continued(found)
        except BaseException:
            self.close()
            raise

    @property
    def complete(self) -> bool:
        """Whether all shards are complete."""
        return all(shard.complete for shard in self.shards.values())

    def counts(self) -> tuple[int, int, str]:
        """Return the numbers of records and of error records in complete shards, and the first error."""
        done = [shard for shard in self.shards.values() if shard.complete]
        first = next((shard.first_error for shard in done if shard.first_error), "")
        return sum(shard.num_records for shard in done), sum(shard.num_errors for shard in done), first

    def run(self, job: Job, bar: ProgressBar) -> None:
        """Generate for the shards that are not complete. Raises NanoinferError: see `answers`."""
        num_records = self.counts()[0]

        def shown(results: Iterator[tuple[Any, Result | None]]) -> Iterator[tuple[Any, Result | None]]:
            nonlocal num_records
            for item, result in results:
                num_records += result is not None
                if bar.due():
                    bar.update(num_records, None)
                yield item, result

        with closing(answers(self._items(), job)) as found:
            results = shown(found)
            for name, shard in self.shards.items():
                if not shard.complete:
                    self.shards[name] = self._write(name, results)
                    self._save()

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _items(self) -> Iterator[Any]:
        """Yield the lines of the shards that are not complete, each table after its lines, each Shard at its end."""
        before = 0
        for name, shard in self.shards.items():
            path, num_lines = self._source.at(name), shard.num_lines
            if shard.complete:
                pass
            elif name.endswith(PARQUET):
                num_lines = 0
                with cannot(path, "be read as prompts"):
                    for table in self._tables(path):
                        for i, line in enumerate(_lines(table, path), num_lines + 1):
                            yield replace(line, place=replace(line.place, number=before + i, file=path, line=i))
                        num_lines += table.num_rows
                        yield table
            else:
                reader = LineReader([path], self._source.open)
                for line in reader:
                    yield replace(line, place=replace(line.place, number=before + line.place.number))
                num_lines = reader.num_lines
            if not shard.complete:
                yield replace(shard, num_lines=num_lines)
            before += num_lines

    def _tables(self, path: str) -> Iterator[pa.Table]:
        """Return the rows of a Parquet file, ROWS at a time, after a table without rows."""
        import pyarrow as pa
        from pyarrow import parquet

        file = parquet.ParquetFile(self._source.open(path))
        yield file.schema_arrow.empty_table()
        for batch in file.iter_batches(ROWS):
            yield pa.Table.from_batches([batch])

    def _write(self, name: str, results: Iterator[tuple[Any, Result | None]]) -> Shard:
        """Write the results up to the end of a shard; return it with what is known of it."""
        shard, records = self.shards[name], list[bytes]()
        num_records, errors = 0, list[str]()
        with self._target.writing(name) as stream, ExitStack() as stack:
            writer: Any = None
            for item, result in results:
                if result is not None:
                    num_records += 1
                    errors += [result.error] if result.error else []
                    if name.endswith(PARQUET):
                        records.append(result.record)
                    else:
                        stream.write(result.record)
                elif isinstance(item, Shard):
                    shard = item
                    break
                else:
                    table = add_records(item, records)
                    records.clear()
                    writer = writer or stack.enter_context(_parquet_writer(stream, table.schema))
                    writer.write_table(table)
        first = errors[0] if errors else ""
        return replace(shard, num_records=num_records, num_errors=len(errors), first_error=first, complete=True)

    def _continued(self, shards: dict[str, Shard]) -> dict[str, Shard]:
        """Return the shards with those that an earlier run has completed.

        Raises:
            NanoinferError: see the class.
        """
        there = self._target.sizes()
        content = self._target.read(STATE, MAX_STATE_BYTES)
        if content is None:
            if others := [name for name in there if not name.startswith(".")]:
                raise self._refusal(f"has files that this command did not write, such as {escaped(others[0])}")
            return shards
        state = parse_json(content, f"{escaped(self._target.at(STATE))} is malformed")
        try:
            before = {name: Shard(**values) for name, values in state["shards"].items()}
            settings = dict(state["settings"])
            known = state["format"] == FORMAT
        except (TypeError, ValueError, KeyError, AttributeError):
            known = False
        if not known:
            raise self._refusal(f"cannot be continued: {STATE} is malformed")
        if difference := difference_of(settings, self._settings):
            raise self._refusal(difference)
        if [(n, s.size) for n, s in before.items()] != [(n, s.size) for n, s in shards.items()][: len(before)]:
            raise self._refusal(f"was made from other shards than those in {escaped(self._source.name)}")
        return shards | {name: shard for name, shard in before.items() if shard.complete and name in there}

    def _save(self) -> None:
        state = {"format": FORMAT, "settings": self._settings, "shards": {n: asdict(s) for n, s in self.shards.items()}}
        with self._target.writing(STATE) as file:
            file.write(json.dumps(state, indent=1).encode())

    def _refusal(self, why: str) -> NanoinferError:
        return NanoinferError(f"{escaped(self._target.name)} {why}: give another output, or replace it by --overwrite")


def _lines(table: pa.Table, path: str) -> list[Line]:
    try:
        return to_lines(table, None)
    except NanoinferError as e:
        raise NanoinferError(f"{escaped(path)}: {e}") from None


def _parquet_writer(stream: Any, schema: pa.Schema) -> Any:
    from pyarrow import parquet

    return parquet.ParquetWriter(stream, schema)
