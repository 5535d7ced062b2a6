"""200 streams at once: each gets its tokens, none waits while others go on, and those that wait start in order."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from starlette.types import ASGIApp, Message

from helpers.asgi import HOST, serve
from nanoinfer import LLM, AsyncLLM, SamplingParams
from nanoinfer.entrypoints.async_llm import NUM_PREPARING
from nanoinfer.openai_protocol import COMPLETIONS

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
