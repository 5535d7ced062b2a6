"""Frames between a front and a replica."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from nanoinfer.cluster.link import BODY, END, MAX_FRAME_BYTES, START, Link, split_head, with_head


class Pipe(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


async def _link(found: list[Any], lost: list[Link]) -> tuple[Link, Pipe]:
    link, pipe = Link(lambda link, *frame: found.append(frame), lost.append), Pipe()
    link.connection_made(pipe)
    return link, pipe


def test_frames_of_one_turn_are_written_together_and_read_in_any_pieces() -> None:
    async def main() -> None:
        frames = [(1, START, b"[200, []]"), (2, BODY, b""), (1, END, b"x" * 1000), (2**32 - 1, BODY, bytes(range(256)))]
        sender, pipe = await _link([], [])
        for number, kind, payload in frames:
            sender.send(number, kind, payload[:3], payload[3:])
        assert pipe.written == []
        await asyncio.sleep(0)
        (data,) = pipe.written
        for size in (1, 2, 7, 9, 100, len(data)):
            found: list[Any] = []
            receiver, _ = await _link(found, [])
            for at in range(0, len(data), size):
                receiver.data_received(data[at : at + size])
            assert found == frames

    asyncio.run(main())


def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    async def main() -> None:
        found: list[Any] = []
        link, pipe = await _link(found, [])
        link.data_received(struct.pack("<IIB", MAX_FRAME_BYTES + 1, 1, BODY))
        assert pipe.closed
        assert not found

    asyncio.run(main())


def test_the_end_is_reported_once_and_what_is_sent_later_dropped() -> None:
    async def main() -> None:
        lost: list[Link] = []
        link, pipe = await _link([], lost)
        link.send(1, BODY, b"last")
        link.close()
        assert pipe.closed
        assert pipe.written[0].endswith(b"last")
        link.connection_lost(None)
        link.send(1, BODY, b"dropped")
        await asyncio.sleep(0)
        assert lost == [link]
        assert not any(b"dropped" in data for data in pipe.written)

    asyncio.run(main())


def test_json_and_bytes_of_a_payload() -> None:
    head, body = {"path": "/v1/ü", "n": [1]}, b"\x00{]"
    assert split_head(b"".join(with_head(head, body))) == (head, body)
