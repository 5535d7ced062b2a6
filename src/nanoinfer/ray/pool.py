"""Generate for lines on a Ray cluster: a pool of actors with a model each, and the records in order.

    lines -> [ block | block | block ... ] -> actors with a model each -> records in the order of the lines

The window of blocks is bounded, so memory does not grow with the input. When an actor ends, this process, which has the
window, sends its blocks to others: a record is a function of its line, so the output is the same. An actor that cannot
be placed, because the cluster has lost CPUs, is no obstacle to the others.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nanoinfer.batch.files import Line, LineReader, Output
from nanoinfer.batch.run import BatchOptions, LineService, Result
from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.ray.connect import check_versions, node_name, plan_actors, versions
from nanoinfer.utils.progress import ProgressBar

CALLS = 8
"""Blocks that an actor works on at a time."""
BLOCK_LINES, BLOCK_BYTES = 32, 1 << 16
FAILURES = 3
"""How often each actor may end without a record between."""
PLACEMENT_SEC = 30.0
"""How long a batch without actors waits for a node that is large enough."""


@dataclass(frozen=True)
class Job:
    """A batch: its model, its options and its actors."""

    config: LLMConfig
    options: BatchOptions
    own_params: tuple[str, ...]
    """Fields of the sampling parameters that the model's generation_config.json does not replace."""
    several: bool = False
    """Whether records name the file of their line."""
    num_actors: int | None = None
    """None: as many as there are CPUs for."""
    cpus_per_actor: int | None = None
    """None: those of the smallest node."""
    folder: str = field(default_factory=os.getcwd)
    """Where relative paths begin: a model in a folder has the same name on all nodes."""


class LineActor:
    """Has a model, and generates for blocks of lines.

    A fault of the model or the engine is a string: Ray would print an exception with its traceback.

    Args:
        job: what to generate.
        versions: of the process that started the batch.
    """

    def __init__(self, job: Job, versions: dict[str, str]) -> None:
        self._fault = ""
        with suppress(OSError):
            os.chdir(job.folder)
        try:
            check_versions(versions)
            llm = LLM.from_config(job.config)
            options = replace(job.options, defaults=llm.requests.merge(job.options.defaults, job.own_params))
            self._service = LineService(llm, options, job.several)
        except Exception as e:
            self._fault = f"node {node_name()}: {one_line(e)}"

    async def fault(self) -> str:
        """Return why the model is not loaded; "": it is."""
        return self._fault

    async def answer(self, lines: list[Line]) -> list[Result] | str:
        """Return the records of lines, or the fault of the engine."""
        try:
            return await asyncio.wrap_future(self._service.submit(lines))
        except Exception as e:
            return f"node {node_name()}: {one_line(e)}"


@dataclass(eq=False)
class _Actor:
    """An actor of the pool."""

    handle: Any
    starting: Any
    """The reference of its `fault`; None: it has its model."""
    num_blocks: int = 0


@dataclass(eq=False)
class _Block:
    """Lines for one call."""

    lines: list[Line] = field(default_factory=list)
    actor: _Actor | None = None
    results: list[Result] | None = None


def answers(lines: Iterable[Line], job: Job) -> Generator[tuple[Line, Result], None, None]:
    """Yield the lines in order, each with its record.

    Raises:
        NanoinferError: a node cannot load the model, an engine failed, no node has enough CPUs, or the actors ended
            several times without a record; or from `lines`.
    """
    pool, blocks = _Pool(job), _blocks(lines)
    window: deque[_Block] = deque()
    try:
        while True:
            while len(window) < pool.max_blocks and (block := next(blocks, None)) is not None:
                window.append(block)
            if not window:
                return
            pool.assign(window)
            if (results := window[0].results) is None:
                pool.wait()
            else:
                yield from zip(window.popleft().lines, results, strict=True)
    finally:
        pool.close()


def _blocks(lines: Iterable[Line]) -> Iterator[_Block]:
    block, num_bytes = _Block(), 0
    for line in lines:
        block.lines.append(line)
        num_bytes += line.num_bytes
        if len(block.lines) == BLOCK_LINES or num_bytes >= BLOCK_BYTES:
            yield block
            block, num_bytes = _Block(), 0
    if block.lines:
        yield block


class _Pool:
    """The actors. They are started as there are blocks for them."""

    def __init__(self, job: Job) -> None:
        self._num_actors, self._cpus = plan_actors(job.num_actors, job.cpus_per_actor)
        threads = job.config.engine.threads or self._cpus
        self._job = replace(job, config=replace(job.config, engine=replace(job.config.engine, threads=threads)))
        self.max_blocks = 2 * CALLS * self._num_actors
        """Blocks in the window."""
        self._actors: list[_Actor] = []
        self._calls: dict[Any, _Block] = {}  # by the reference of the result
        self._num_ended = 0  # since the last record
        self._progress = time.monotonic()

    def assign(self, window: Iterable[_Block]) -> None:
        """Send blocks that no actor has to those that have room."""
        waiting = [block for block in window if block.actor is None and block.results is None]
        while len(self._actors) < min(self._num_actors, len(self._calls) + len(waiting)):
            self._start()
        for block in waiting:
            free = [a for a in self._actors if a.starting is None and a.num_blocks < CALLS]
            if free:
                block.actor = actor = min(free, key=lambda a: a.num_blocks)
                actor.num_blocks += 1
                self._calls[actor.handle.answer.remote(block.lines)] = block

    def wait(self) -> None:
        """Wait a moment for a call or the start of an actor to end. Raises NanoinferError: see `answers`."""
        import ray
        from ray.exceptions import RayError

        starting = {actor.starting: actor for actor in self._actors if actor.starting is not None}
        done, _ = ray.wait([*self._calls, *starting], num_returns=1, timeout=1.0)
        if not done and len(starting) == len(self._actors) and time.monotonic() > self._progress + PLACEMENT_SEC:
            plan_actors(None, self._cpus)  # raises if no node is large enough any more
        for reference in done:
            block = self._calls.pop(reference, None)
            actor = starting[reference] if block is None else block.actor
            assert actor is not None
            try:
                answer = ray.get(reference)
            except RayError as e:  # the actor has ended, or its node with the result
                self._lose(actor, e)
                if block is not None:
                    block.actor = None
                continue
            if isinstance(answer, str) and answer:
                raise NanoinferError(answer)
            self._progress = time.monotonic()
            if block is None:
                actor.starting = None
            else:
                block.results, self._num_ended = answer, 0
                actor.num_blocks -= 1

    def _start(self) -> None:
        import ray

        options = {"num_cpus": self._cpus, "max_concurrency": CALLS, "scheduling_strategy": "SPREAD"}
        handle = ray.remote(LineActor).options(**options).remote(self._job, versions())
        self._actors.append(_Actor(handle, handle.fault.remote()))

    def _lose(self, actor: _Actor, error: Exception) -> None:
        """Remove an actor. Its blocks are sent to others."""
        import ray

        if actor not in self._actors:
            return  # another of its calls has failed before
        self._actors.remove(actor)
        ray.kill(actor.handle)
        for reference in [r for r, block in self._calls.items() if block.actor is actor]:
            self._calls.pop(reference).actor = None
        self._num_ended += 1
        if self._num_ended >= FAILURES * self._num_actors:
            raise NanoinferError(f"the actors ended {self._num_ended} times without a record: {_cause(error)}")

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor.handle)


def run(parts: Sequence[tuple[LineReader, Output]], job: Job, bar: ProgressBar) -> None:
    """Write the records of the lines that the readers have not read yet. The caller closes the outputs.

    The outputs and their checkpoints are those of `nanoinfer batch` without a cluster, which continues what this has
    begun, and the other way round.

    Args:
        parts: readers, each where its output ends, and their outputs, which are started when there is a first record.
        job: how to generate.
        bar: shows how far it is.

    Raises:
        NanoinferError: see `answers`; an output cannot be written.
    """
    rest, names = iter(parts), list[str]()
    with closing(answers(_lines(parts), job)) as results:
        for line, result in results:
            if line.place.file not in names:
                reader, output = next(part for part in rest if line.place.file in part[0].names)
                names = reader.names
                output.start()
            output.write(result.record, line.place, result.error)
            output.checkpoint()
            if bar.due():
                totals = [reader.total_lines or 0 for reader, _ in parts]
                bar.update(sum(output.done.num_records for _, output in parts), sum(totals))


def _lines(parts: Sequence[tuple[LineReader, Output]]) -> Iterator[Line]:
    num_lines = 0
    for reader, _ in parts:
        reader.num_before = num_lines
        yield from reader
        num_lines += reader.num_lines


def _cause(error: Exception) -> str:
    """Return the last line of an error of Ray, which quotes a traceback, and the address of the node in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    node = re.search(r"\bip[=:]\s*([\w.:]+)", str(error))
    return f"{lines[-1][:300]}{f' (node {node[1]})' if node else ''}"
