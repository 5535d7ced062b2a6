"""One output for one or several files: the records of a cluster, written and continued as those of one machine.

The output and its checkpoints are those of `nanoinfer batch` without a cluster, which continues what this has begun,
and the other way round. A checkpoint needs the place and the hash of each line, so the files are read in step with the
records. This also detects a line that has changed since an actor read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from nanoinfer.batch.lines import LineReader
from nanoinfer.batch.output import FileOutput, StreamOutput
from nanoinfer.ray.actor import Job, check_of
from nanoinfer.ray.pipeline import answers
from nanoinfer.ray.plan import Piece, changed, plan
from nanoinfer.utils.progress import ProgressBar


def run_file(
    names: Sequence[str], reader: LineReader, output: FileOutput | StreamOutput, job: Job, bar: ProgressBar
) -> None:
    """Write the records of the lines that the reader has not read yet. The caller closes the output.

    Args:
        names: regular files.
        reader: reads the same files; it is where the output ends.
        output: is started when there is a first record.
        job: how to generate.
        bar: shows how far it is.

    Raises:
        NanoinferError: see `answers`; a file was changed meanwhile; the output cannot be written.
    """
    started = False
    while not reader.at_end():  # again, where lines were added meanwhile
        pieces: list[Piece] = []
        before = 0
        for name in names:
            made, num_lines = plan(name, job.files, before, len(pieces))
            pieces, before = pieces + made, before + num_lines
        total, start = sum(piece.num_lines for piece in pieces), output.done.num_records
        with closing(answers(pieces, job, start)) as results:
            for answer in results:
                line = next(reader, None)
                if line is None or (line.place.number, check_of(line)) != (answer.number, answer.check):
                    raise changed(line.place.file if line is not None else names[-1])
                if not started:
                    output.start()
                    started = True
                output.write(answer.record, line.place, answer.error)
                output.checkpoint()
                if bar.due():
                    bar.update(output.done.num_records, total)
        if not start < output.done.num_records == total:
            raise changed(names[-1])
