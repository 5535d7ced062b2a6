"""The pipeline of Ray Data that generates for pieces of files: tasks that read, a pool of actors, results in order.

    pieces -> read tasks -> blocks of lines -> actors with a model each -> blocks of records -> this process, in order

Ray repeats the tasks of dead workers, actors and nodes on others. A loss that it cannot repair (a node with the only
copy of a result) ends the pipeline, and a new one runs the remaining pieces. Both give the same bytes, because a record
is a function of its line. Faults of the input, the model and the engine are rows with a `fault`: they arrive in order,
once, and are not tried again.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from nanoinfer.batch.lines import LineReader
from nanoinfer.batch.output import FileOutput, StreamOutput
from nanoinfer.errors import NanoinferError
from nanoinfer.ray.actor import Answer, Job, LineActor, check_of, datasource, from_table
from nanoinfer.ray.connect import Pool, capacity, pool_of, versions
from nanoinfer.ray.plan import Piece, changed, plan, without
from nanoinfer.utils.progress import ProgressBar

CALLS = 8
"""Blocks that an actor works on at a time."""
BLOCK_BYTES = 1 << 16
"""Size at which Ray divides what a task reads into blocks."""
READ_TASKS = 4
"""Read tasks at a time."""
FAILURES = 3
"""Pipelines that may end one after the other without a result."""
PLACEMENT_SEC = 30.0
"""How long a cluster may have too few CPUs for the actors before the batch continues with fewer."""


def answers(pieces: Sequence[Piece], job: Job, skip: int = 0) -> Generator[Answer, None, None]:
    """Return the record of each line of the pieces, in order. `skip`: leave out so many lines at the beginning.

    Raises:
        NanoinferError: an input cannot be read, a node cannot load the model, an engine failed, no node has enough
            CPUs, or the pipeline failed several times without a result.
    """
    from ray.exceptions import RayError

    (left, skip), failures = without(pieces, skip), 0
    while left:
        done = 0
        try:
            for answer in _run(left, job, pool_of(job.num_actors, job.cpus_per_actor)):
                done += 1
                if done > skip:
                    yield answer
            return
        except RayError as e:
            failures = 1 if done > skip else failures + 1
            if failures == FAILURES:
                raise NanoinferError(f"the pipeline ended {FAILURES} times without a result: {_cause(e)}") from None
            left, skip = without(left, max(done, skip))


def run_file(
    names: Sequence[str], reader: LineReader, output: FileOutput | StreamOutput, job: Job, bar: ProgressBar
) -> None:
    """Write the records of the lines that the reader has not read yet. The caller closes the output.

    The output and its checkpoints are those of `nanoinfer batch` without a cluster, which continues what this has
    begun, and the other way round. A checkpoint needs the place and the hash of each line, so the files are read in
    step with the records. This also detects a line that has changed since an actor read it.

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


def _run(pieces: Sequence[Piece], job: Job, pool: Pool) -> Iterator[Answer]:
    import ray
    from ray.exceptions import RayError
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.execution_no_progress_timeout_s = -1  # the first record may take a model's download
    context.enable_progress_bars = False
    context.target_max_block_size, context.target_min_block_size = BLOCK_BYTES, 1
    size = min(pool.num_actors, len(pieces))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    started = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})  # actors put themselves into it
    threads = job.config.engine.threads or pool.cpus_per_actor
    config = replace(job.config, engine=replace(job.config.engine, threads=threads))
    dataset = ray.data.read_datasource(
        datasource(pieces, job.files), override_num_blocks=len(pieces), num_cpus=0, concurrency=READ_TASKS
    ).map_batches(
        LineActor,
        fn_constructor_args=(replace(job, config=config), versions(), started),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=size, max_tasks_in_flight_per_actor=2 * CALLS, max_concurrent_calls_per_actor=CALLS
        ),
        num_cpus=pool.cpus_per_actor,
    )
    ended = threading.Event()
    watch = (ended, Pool(size, pool.cpus_per_actor), started)
    threading.Thread(target=_watch, args=watch, name="placement", daemon=True).start()
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield from from_table(table)
    finally:
        ended.set()
        with suppress(RayError):
            started.shutdown(force=True)


def _watch(ended: threading.Event, pool: Pool, started: Any) -> None:
    """End the pipeline where the cluster has lost the CPUs of an actor: Ray waits for another node for ever."""
    import ray

    since = time.monotonic()
    while not ended.wait(1.0):
        if capacity(pool.cpus_per_actor) >= pool.num_actors:
            since = time.monotonic()
        elif time.monotonic() >= since + PLACEMENT_SEC:
            while not started.empty():
                ray.kill(started.get())
            return


def _cause(error: Exception) -> str:
    """Return the last line of an error of Ray, which quotes a traceback, and the address of the node in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    node = re.search(r"\bip[=:]\s*([\w.:]+)", str(error))
    return f"{lines[-1][:300]}{f' (node {node[1]})' if node else ''}"
