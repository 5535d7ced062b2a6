"""The memory of a server is at most the sum that docs/server-security.md promises: each part, and all at once."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.environment import ROOT

pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.server_process import ServerProcess, serving
from nanoinfer.protocols.fields import COMPLETIONS, EMBEDDINGS, MAX_INPUTS
from nanoinfer.server.limits import INPUT_VALUES, MAX_EMBEDDING_VALUES, NUM_ENTRIES_IN_FLIGHT
from nanoinfer.structured.grammars import MAX_CACHED_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")]
DOCUMENT = ROOT / "docs" / "server-security.md"
MIB = 1 << 20
SLACK = 48 * MIB  # what the allocator keeps
CONNECTIONS, IN_FLIGHT, BODY, ENTRIES, CONTEXT = 300, 16, MIB, 50_000, 512
MEGABYTE = random.Random(0).randbytes(10**6).translate(bytes(97 + i % 26 if i > 9 else 32 for i in range(256))).decode()
WORST = "1 " * 500_000  # the most words, whose pieces the tokenizer keeps until it has all
OPTIONS = [f"--max-requests-in-flight={IN_FLIGHT}", f"--max-connections={CONNECTIONS}", "--engine=native",
           f"--max-logprob-entries={ENTRIES}", f"--max-body-bytes={BODY}"]  # fmt: skip


class Part(NamedTuple):
    """A part of the sum: a row of the table."""

    row: str
    """How its first cell begins."""
    num_bytes: int
    """The bound with OPTIONS."""
    fill: Callable[[ServerProcess, ExitStack], object]
    """Makes a server use it; what the stack closes is held until the measurement."""


def promised(row: str) -> str:
    """Return the bound in the table's row."""
    (cell,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| ([^|]*) \|", DOCUMENT.read_text(), re.M)
    return str(cell)


def opened(server: ServerProcess, stack: ExitStack) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=120))


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n".encode()


def ask(server: ServerProcess, body: Any, path: str = COMPLETIONS) -> int:
    """Return the status of a response, which is read to its end."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with ExitStack() as stack:
        connection = opened(server, stack)
        connection.sendall(head(path, len(content)) + content)
        received = start = connection.recv(1 << 16)
        while received:
            received = connection.recv(1 << 16)
        return int(start[9:12])


def at_once(server: ServerProcess, bodies: list[Any], path: str = COMPLETIONS) -> set[int]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return set(threads.map(lambda body: ask(server, body, path), bodies))


def heads(server: ServerProcess, stack: ExitStack) -> None:
    """Open connections that have sent half of a large head."""
    for _ in range(CONNECTIONS - 20):
        opened(server, stack).sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 16_000)


def bodies(server: ServerProcess, stack: ExitStack) -> None:
    """Send bodies of each kind, then some of which the last byte is missing."""
    numbers = b'{"prompt": [' + b",".join([b"300"] * 250_000) + b"]}"
    wide = json.dumps({"prompt": "\U0001f600" + "a" * 1_000_000}, ensure_ascii=False).encode()
    assert at_once(server, [numbers] * IN_FLIGHT) == {400}
    assert at_once(server, [wide] * IN_FLIGHT) == {400}
    for _ in range(IN_FLIGHT):
        opened(server, stack).sendall(head(COMPLETIONS, len(wide)) + wide[:-1])


def long_texts(server: ServerProcess, stack: ExitStack) -> None:
    assert at_once(server, [{"prompt": MEGABYTE}] * IN_FLIGHT) == {400}
    for text in (MEGABYTE, WORST):
        assert at_once(server, [{"prompt": text}] * 4, "/tokenize") == {200}


def logprobs(server: ServerProcess, stack: ExitStack) -> None:
    body = {"prompt": [5] * 100, "max_tokens": 200, "logprobs": 20, "n": 7, "ignore_eos": True, "echo": True}
    assert 0.85 * ENTRIES < 7 * 300 * 21
    assert at_once(server, [body, {**body, "stream": True}] * (IN_FLIGHT // 2)) <= {200, 429}
    assert ask(server, body) == 200  # those before have ended


def embeddings(server: ServerProcess, stack: ExitStack) -> None:
    """Ask for as many embeddings as a request may have, in all requests at once."""
    body = {"input": [[i % 2000, i // 2000] for i in range(MAX_INPUTS)]}
    assert IN_FLIGHT * MAX_INPUTS * (256 + INPUT_VALUES) > MAX_EMBEDDING_VALUES
    assert at_once(server, [body, {**body, "encoding_format": "base64"}] * (IN_FLIGHT // 2), EMBEDDINGS) == {200, 429}
    assert ask(server, body, EMBEDDINGS) == 200  # those before have ended


def grammars(server: ServerProcess, stack: ExitStack) -> None:
    """Send grammars whose tables of states grow, and use each."""
    for first in range(0, 80, 8):
        made = []
        for number in range(first, first + 8):
            names = [chr(97 + j % 26) + chr(97 + j // 26) for j in range(100)]
            terminals = "\n".join(f"A{j}: /[a-z ]*{name}[a-z ]*{j}{number}/" for j, name in enumerate(names))
            text = "start: (" + "|".join(f"A{j}" for j in range(100)) + ")*\n" + terminals
            made.append({"prompt": "a", "max_tokens": 60, "seed": number, "temperature": 2.0,
                         "structured_outputs": {"grammar": text}})  # fmt: skip
        assert at_once(server, made) <= {200, 400}


PARTS = {
    part.row: part
    for part in (
        Part("a connection", CONNECTIONS * 64 * 1024, heads),
        Part("a request in flight", IN_FLIGHT * 12 * BODY, bodies),
        Part("a long text", 450 * BODY, long_texts),
        Part("log-probabilities", 800 * NUM_ENTRIES_IN_FLIGHT * ENTRIES, logprobs),
        Part("embeddings", 16 * MAX_EMBEDDING_VALUES, embeddings),
        Part("compiled grammars", MAX_CACHED_BYTES, grammars),
    )
}
FIRST = "compiled grammars"
"""A part that takes long to fill: it is filled once, before the others."""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with serving("shakespeare", *OPTIONS) as process:
        first = {"prompt": "a", "max_tokens": 2, "logprobs": 2, "structured_outputs": {"regex": "a+"}}
        assert ask(process, first) == 200
        yield process


def memory(server: ServerProcess, name: str) -> int:
    """Return the resident bytes of a process: VmRSS, now, or VmHWM, at most so far."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB", status, re.M)
    return int(kib) * 1024


def test_the_table_has_these_parts() -> None:
    assert promised("a connection") == "64 KiB"
    assert promised("a request in flight") == "12 × `--max-body-bytes`"
    assert promised("a long text") == "450 × `--max-body-bytes`, one at a time"

    assert promised("log-probabilities") == "800 bytes × 4 × `--max-logprob-entries`, all together"
    assert promised("embeddings") == "16 bytes × 16,777,216 values, all together"
    assert promised("compiled grammars") == "256 MiB"


def fill(server: ServerProcess, row: str, stack: ExitStack) -> None:
    """Fill a part of the sum in a server that has used nothing yet: it is at most what the table says."""
    before = memory(server, "VmRSS")
    PARTS[row].fill(server, stack)
    used = memory(server, "VmHWM") - before
    print(f"{row}: {used / MIB:.0f} of {PARTS[row].num_bytes / MIB:.0f} MiB")
    # Bodies are received for most of the other parts.
    assert (
        used <= PARTS[row].num_bytes + (PARTS["a request in flight"].num_bytes if row != "a connection" else 0) + SLACK
    )


@pytest.mark.nightly_if(lambda row: row != "a request in flight")
@pytest.mark.parametrize("row", [row for row in PARTS if row != FIRST])
def test_a_part_of_the_sum(server: ServerProcess, row: str) -> None:
    with ExitStack() as stack:
        fill(server, row, stack)
    assert ask(server, {"prompt": "a", "max_tokens": 2}) == 200


@pytest.mark.nightly
def test_the_first_part_alone_and_then_all_at_once(server: ServerProcess) -> None:
    """One after the other, so that what each of them leaves behind adds up."""
    before = memory(server, "VmRSS")
    with ExitStack() as stack:
        fill(server, FIRST, stack)
        for part in PARTS.values():
            if part.row != FIRST and part.fill not in (heads, bodies):
                part.fill(server, stack)
        bodies(server, stack)
        stack.close()
        heads(server, stack)
        used = memory(server, "VmHWM") - before
    total = sum(part.num_bytes for part in PARTS.values())
    print(f"all: {used / MIB:.0f} of {total / MIB:.0f} MiB")
    assert used <= total + SLACK
