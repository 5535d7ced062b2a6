"""Frames between a front and a replica."""

from __future__ import annotations

import asyncio
import struct

from nanoinfer.cluster.link import BODY, END, MAX_FRAME_BYTES, START, Link, read_frame


class Writer:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def test_frames_of_one_turn_are_written_together_and_read_in_any_pieces() -> None:
    async def main() -> None:
        frames = [(1, START, b"[200, []]"), (2, BODY, b""), (1, END, b"x" * 1000), (2**32 - 1, BODY, bytes(range(256)))]
        link = Link(writer := Writer())  # type: ignore[arg-type]
        for number, kind, payload in frames:
            link.send(number, kind, payload[:3], payload[3:])
        assert writer.written == []
        await asyncio.sleep(0)
        (data,) = writer.written
        for size in (1, 2, 7, 9, 100, len(data)):
            reader = asyncio.StreamReader()
            reading = asyncio.create_task(_read_all(reader))
            for at in range(0, len(data), size):
                reader.feed_data(data[at : at + size])
                await asyncio.sleep(0)
            reader.feed_eof()
            assert await reading == frames

    asyncio.run(main())


async def _read_all(reader: asyncio.StreamReader) -> list[tuple[int, int, bytes]]:
    found = []
    while (frame := await read_frame(reader)) is not None:
        found.append(frame)
    return found


def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("<IIB", MAX_FRAME_BYTES + 1, 1, BODY))
        assert await asyncio.wait_for(read_frame(reader), 10) is None

    asyncio.run(main())


def test_what_is_sent_after_the_end_is_dropped() -> None:
    async def main() -> None:
        link = Link(writer := Writer())  # type: ignore[arg-type]
        link.send(1, BODY, b"last")
        link.close()
        assert writer.closed
        assert writer.written[0].endswith(b"last")
        link.send(1, BODY, b"dropped")
        await asyncio.sleep(0)
        assert len(writer.written) == 1

    asyncio.run(main())
