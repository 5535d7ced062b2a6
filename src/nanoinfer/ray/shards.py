"""A folder of shards: for each JSONL or Parquet file of the input, one of the same name in the output.

A shard appears in the output when it is complete. STATE, a file there, has the settings of the batch, the shards of
the input, and what is known of those that are complete: the same command does the others. All shards go through one
pipeline. Lines are numbered across the shards, as those of several files.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from nanoinfer.batch.output import MAX_STATE_BYTES, difference_of
from nanoinfer.errors import NanoinferError
from nanoinfer.ray.actor import Answer, Job, check_of
from nanoinfer.ray.folders import Folder, cannot, is_uri
from nanoinfer.ray.pipeline import answers
from nanoinfer.ray.plan import PARQUET, ROWS, Piece, changed, open_parquet, plan
from nanoinfer.ray.rows import add_records, to_lines
from nanoinfer.utils.files import escaped, parse_json
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    import pyarrow as pa

STATE = "_nanoinfer_batch.json"
FORMAT = "nanoinfer-shards/1"
ENDINGS = (".jsonl", PARQUET)


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
        self.files = self._source.files
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
                self._take_lock()
        try:
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
        before = 0
        pieces: list[Piece] = []
        for name, shard in self.shards.items():
            if not shard.complete:
                made, shard.num_lines = plan(self._source.at(name), self.files, before, len(pieces))
                shard.num_records = sum(piece.num_lines for piece in made)
                pieces += made
            before += shard.num_lines
        total = sum(shard.num_records for shard in self.shards.values())
        with closing(answers(pieces, job)) as found:
            results = _shown(found, bar, self.counts()[0], total)
            for name, shard in self.shards.items():
                if not shard.complete:
                    self.shards[name] = self._write(name, shard, results)
                    self._save()

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, name: str, shard: Shard, results: Iterator[Answer]) -> Shard:
        """Write the next results as a shard; return it with the errors among them."""
        first = list(islice(results, min(1, shard.num_records)))  # a fault of the model leaves no file
        errors: list[str] = []
        count = 0

        def own() -> Iterator[Answer]:
            nonlocal count
            for answer in islice(chain(first, results), shard.num_records):
                count += 1
                if answer.error:
                    errors.append(answer.error if not errors else "")
                yield answer
            if count < shard.num_records:
                raise changed(self._source.at(name))

        with self._target.writing(name) as stream:
            if name.endswith(PARQUET):
                self._write_parquet(self._source.at(name), own(), stream)
            else:
                for answer in own():
                    stream.write(answer.record)
        return replace(shard, num_errors=len(errors), first_error="".join(errors[:1]), complete=True)

    def _write_parquet(self, path: str, results: Iterator[Answer], stream: Any) -> None:
        """Write the rows of a shard, which are read again, with the columns of their records."""
        from pyarrow import parquet

        file = open_parquet(path, self.files)
        with parquet.ParquetWriter(stream, add_records(file.schema_arrow.empty_table(), []).schema) as writer:
            for table in _tables(file):
                found = list(islice(results, table.num_rows))
                if [check_of(line) for line in to_lines(table, None)] != [answer.check for answer in found]:
                    raise changed(path)
                writer.write_table(add_records(table, [answer.record for answer in found]))

    def _take_lock(self) -> None:
        self._lock = os.open(self._target.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise NanoinferError(
                f"{escaped(self._target.name)} is being written by another process: wait until it has ended"
            ) from None
        except OSError:  # a file system without locks
            pass

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


def _shown(results: Iterator[Answer], bar: ProgressBar, done: int, total: int) -> Iterator[Answer]:
    """Return the results, and show how many there were."""
    for answer in results:
        done += 1
        if bar.due():
            bar.update(done, total)
        yield answer


def _tables(file: Any) -> Iterator[pa.Table]:
    """Return the rows of a Parquet file, ROWS at a time."""
    import pyarrow as pa

    for batch in file.iter_batches(ROWS):
        yield pa.Table.from_batches([batch])
