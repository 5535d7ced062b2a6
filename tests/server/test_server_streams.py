"""Streams: of 200 none waits while others go on, and a stream is the same however its parts are written."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from starlette.types import ASGIApp, Message

from helpers.asgi import HOST, serve
from helpers.server_process import ServerProcess, serving
from nanoinfer import LLM, AsyncLLM, SamplingParams
from nanoinfer.entrypoints.async_llm import NUM_PREPARING
from nanoinfer.protocols.fields import COMPLETIONS

NUM_STREAMS = 200
LENGTHS = [12 + i % 5 for i in range(NUM_STREAMS)]
PROMPTS = [f"{i} O Romeo, Romeo!" for i in range(NUM_STREAMS)]
MAX_OVERTAKING = 4
"""Chunks that a stream may receive between two of another one. It is 2 where the event loop wakes them in changing
order. A chunk has the tokens of all steps since the last one, so how many these are depends on the machine."""


async def read(app: ASGIApp, i: int, log: list[tuple[int, list[int]]]) -> None:
    """Send stream i, and log the token ids of its chunks."""
    body = {"prompt": PROMPTS[i], "max_tokens": LENGTHS[i], "seed": i, "ignore_eos": True, "stream": True}
    unread = [json.dumps(body | {"return_token_ids": True}).encode()]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop()}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Message) -> None:
        assert message.get("status", 200) == 200
        for line in message.get("body", b"").split(b"\n\n"):
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if choice["token_ids"]:
                    log.append((i, choice["token_ids"]))

    headers = [(name.encode(), value.encode()) for name, value in HOST.items()]
    await app({"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "state": {}}, receive, send)


@pytest.mark.slow
@pytest.mark.nightly_if(lambda max_num_seqs: max_num_seqs == 200)
@pytest.mark.parametrize("max_num_seqs", [200, 64])
def test_no_stream_of_200_is_starved(max_num_seqs: int) -> None:
    llm = LLM("shakespeare", engine="native", max_num_seqs=max_num_seqs)
    params = [SamplingParams(max_tokens=n, seed=i, ignore_eos=True) for i, n in enumerate(LENGTHS)]
    expected = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params)]
    log: list[tuple[int, list[int]]] = []

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        await asyncio.gather(*(read(app, i, log) for i in range(NUM_STREAMS)))

    serve(llm, main)

    # Each has its tokens.
    found: list[list[int]] = [[] for _ in LENGTHS]
    for i, ids in log:
        found[i] += ids
    assert found == expected

    # Between two chunks of a stream, no other stream gets more than a few.
    since: dict[int, dict[int, int]] = {}  # running stream -> chunks of each other stream since its last one
    num_left = list(LENGTHS)
    for i, ids in log:
        assert max(since.get(i, {}).values(), default=0) <= MAX_OVERTAKING
        since[i] = {}
        num_left[i] -= len(ids)
        if not num_left[i]:
            del since[i]
        for j, counts in since.items():
            if j != i:
                counts[i] = counts.get(i, 0) + 1

    # They start in the order of their arrival; those that start in the same step in any order.
    order = list(dict.fromkeys(i for i, _ in log))
    late = [i for place, i in enumerate(order) if abs(place - i) > max_num_seqs]
    assert len(late) <= NUM_PREPARING  # a thread that prepares a request may have to wait for a CPU


BODY = {"prompt": ["O Romeo,", "My lord"], "max_tokens": 24, "seed": 5, "n": 2, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("shakespeare", "--engine=native") as running:
        yield running


def request(server: ServerProcess, body: dict[str, Any], version: str = "1.1") -> bytes:
    """Return the bytes of a request, which does not end the connection."""
    data = json.dumps(body).encode()
    host = server.url.removeprefix("http://")
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def connect(server: ServerProcess, buffer: int | None = None) -> socket.socket:
    """Connect. With a small buffer, segments are smaller: one that does not fit is sent 0.2 s later, in parts."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.settimeout(60)
    if buffer is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, buffer // 8)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    return connection


def events(body: bytes) -> dict[int, tuple[str, list[int]]]:
    """Return text and tokens of each choice of a stream."""
    found: dict[int, tuple[str, list[int]]] = {}
    lines = [line for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line[6:])["choices"]
        text, ids = found.get(choice["index"], ("", []))
        found[choice["index"]] = text + choice["text"], ids + choice["token_ids"]
    return found


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.slow_if(lambda logprobs: logprobs)
def test_both_versions_of_http_have_the_same_events_and_connections_go_on(
    server: ServerProcess, logprobs: int | None
) -> None:
    """A part of an HTTP/1.1 response is written without ASGI, one of HTTP/1.0 is not."""
    body = BODY | {"return_token_ids": True, "logprobs": logprobs}
    llm = LLM("shakespeare", engine="native")
    outputs = llm.generate(BODY["prompt"], SamplingParams(max_tokens=24, seed=5, n=2, ignore_eos=True))
    every = [o for output in outputs for o in output.outputs]
    expected = {i: (o.text, list(o.token_ids)) for i, o in enumerate(every)}
    host = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(host, timeout=60)) as client:
        for _ in range(3):  # on one connection
            client.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
            response = client.getresponse()
            assert response.getheader("transfer-encoding") == "chunked"
            assert events(response.read()) == expected
    with closing(connect(server)) as connection:
        connection.sendall(request(server, body, version="1.0"))
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.getheader("transfer-encoding") is None
        assert events(response.read()) == expected


@pytest.mark.slow
def test_a_reader_who_pauses_gets_all_tokens(server: ServerProcess) -> None:
    """Its outputs go to the task while it does not read: they are merged, and none is lost."""
    body = BODY | {"prompt": ["O Romeo,"], "n": 16, "max_tokens": 480, "logprobs": 5, "return_token_ids": True}
    with closing(connect(server, buffer=4096)) as connection:
        connection.sendall(request(server, body))
        response = http.client.HTTPResponse(connection)
        response.begin()
        first = response.read1(100)
        while b'num_requests_running{model_name="shakespeare"} 0.0' not in urlopen(f"{server.url}/metrics").read():
            time.sleep(0.01)  # until all tokens are generated, of which the sockets hold a part
        found = events(whole := first + response.read())
    assert whole.count(b"\n\n") < 16 * 480 / 4  # a reader who does not pause gets an event for each token
    assert {index: len(ids) for index, (_, ids) in found.items()} == dict.fromkeys(range(16), 480)
