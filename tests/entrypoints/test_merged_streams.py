"""Streams that one task reads, with a sink that takes outputs before the task wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from nanoinfer.entrypoints.async_streams import Found, MergedStreams


class Stream:
    """Stands for an `AsyncOutputStream`: outputs are numbers, the last one `last`."""

    unread = finished = left = False

    def __init__(self, last: int, slow: bool = False) -> None:
        self.last, self.slow, self.outputs = last, slow, list[int]()
        self.wake: Callable[[], None]

    def begin(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def arrive(self, *outputs: int) -> None:
        self.outputs += outputs
        self.wake()

    @property
    def ready(self) -> bool:
        return bool(self.outputs)

    def take(self) -> int:
        output = self.outputs.pop(0)
        self.finished, self.unread = output == self.last, self.slow
        return output

    async def read(self, output: int) -> int:
        self.unread = False
        if output < 0:
            raise ValueError("cannot be read")
        return output * 10

    def leave(self) -> None:
        self.left = True


class Sink:
    """Takes outputs for which `takes` is true, and fails at `failing`."""

    def __init__(self, takes: Callable[[int], bool] = lambda output: True, failing: int | None = None) -> None:
        self.takes, self.failing, self.ready, self.taken = takes, failing, True, list[int]()

    def __call__(self, found: Found) -> bool:
        outputs = [cast(int, output) for _, output in found]
        if self.failing in outputs:
            raise ValueError("cannot be written")
        if self.ready and all(map(self.takes, outputs)):
            self.taken += outputs
            return True
        return False


class Reading:
    """A task that reads merged streams."""

    def __init__(self, *streams: Stream, sink: Sink) -> None:
        self.read: list[int] = []
        self.reported: list[tuple[int, int, bool]] = []
        self.merged = MergedStreams(cast(Any, streams), cast(Any, self.reported.extend))
        self.merged.sink = cast(Any, sink)
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        async for found in self.merged:
            self.read += [cast(int, output) for _, output in found]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_output_is_taken_once_by_the_sink_or_the_task() -> None:
    stream, sink = Stream(last=9), Sink(takes=lambda output: output % 3 != 0)
    reading = Reading(stream, sink=sink)
    await settle()
    for output in range(10):
        sink.ready = output != 4
        stream.arrive(output)
        await settle()
    await reading.task
    assert (sink.taken, reading.read) == ([1, 2, 5, 7, 8], [0, 3, 4, 6, 9])
    assert reading.reported == [(0, output, output == 9) for output in range(10)]


async def test_the_sink_gets_the_outputs_of_a_step_together_and_ends_the_task() -> None:
    streams, sink = [Stream(last=2), Stream(last=3)], Sink()
    reading = Reading(*streams, sink=sink)
    await settle()
    streams[0].outputs.append(1)
    streams[1].arrive(3)
    streams[0].arrive(2)
    await reading.task
    assert (sink.taken, reading.read) == ([1, 3, 2], [])
    assert reading.reported == [(0, 1, False), (1, 3, True), (0, 2, True)]


@pytest.mark.parametrize("failing", [0, 1])
async def test_an_error_of_the_sink_is_raised_also_at_the_last_output(failing: int) -> None:
    stream = Stream(last=1)
    reading = Reading(stream, sink=Sink(failing=failing))
    await settle()
    for output in range(failing + 1):
        stream.arrive(output)
    with pytest.raises(ValueError, match="cannot be written"):
        await reading.task
    assert stream.left
    assert reading.reported == [(0, output, False) for output in range(failing)]


async def test_what_is_read_elsewhere_goes_to_the_task_and_is_reported_when_it_was_read() -> None:
    stream, sink = Stream(last=-1, slow=True), Sink()
    reading = Reading(stream, sink=sink)
    await settle()
    stream.arrive(7)
    await settle()
    assert (sink.taken, reading.read, reading.reported) == ([], [70], [(0, 70, False)])
    stream.arrive(-1)
    with pytest.raises(ValueError, match="cannot be read"):
        await reading.task
    assert reading.reported == [(0, 70, False)]
