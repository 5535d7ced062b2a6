"""Mixed traffic on a server: each answer is the one that the library gives for the same seed, and memory stays flat.

`make soak` runs it for 30 minutes, `make test-all` for one.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import select
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from nanoinfer import LLM, SamplingParams
from server_process import serving

SECONDS = 60 * float(os.environ.get("NANOINFER_TEST_SOAK_MINUTES", "1"))
NUM_CLIENTS = 12
MODEL = "shakespeare"
OPTIONS = {"engine": "native", "max_num_seqs": 8, "kv_cache_memory": 64 << 20}
PROMPTS = [
    "O Romeo,",
    "To be",
    "ROMEO:\nWhat",
    "First Citizen:\n",
    "é",
    " " * 20,
    "O Romeo, Romeo, wherefore",
    "x" * 300,
]
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"seed": 1, "max_tokens": 40, "top_k": 20},
    {"seed": 2, "max_tokens": 16, "n": 3, "top_p": 0.9},
    {"seed": 3, "max_tokens": 30, "logprobs": 3},
    {"seed": 4, "max_tokens": 60, "stop": ["\n", "the"]},
    {"seed": 5, "max_tokens": 30, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"seed": 6, "max_tokens": 600, "overflow": "slide"},
    {"seed": 7, "max_tokens": 1, "logit_bias": {"5": 3.0}},
    {"seed": 8, "max_tokens": 40, "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){2}"}},
    {"seed": 9, "max_tokens": 40, "structured_outputs": {"json": '{"enum": ["yes", "no", 5]}'}, "temperature": 2.0},
]
SLACK_BYTES = (64 if SECONDS < 120 else 16) << 20  # caches fill in the first minute


class Traffic:
    """Clients in threads, each of which sends one request after the other until the time is over."""

    def __init__(self, url: str) -> None:
        self.address = url.removeprefix("http://")
        llm = LLM(MODEL, **OPTIONS)  # type: ignore[arg-type]
        self.cases = [(prompt, shape) for prompt in PROMPTS for shape in SHAPES]
        params = [SamplingParams(**_python(shape)) for _, shape in self.cases]
        outputs = llm.generate([prompt for prompt, _ in self.cases], params)
        self.expected = [[(o.text, o.finish_reason) for o in output.outputs] for output in outputs]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.end = time.monotonic() + SECONDS

    def run(self) -> None:
        """Run all clients."""
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 120)
        assert not any(thread.is_alive() for thread in threads)

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        connection = http.client.HTTPConnection(self.address, timeout=60)
        while time.monotonic() < self.end and not self.wrong:
            kind = rng.choice(("whole", "whole", "stream", "stream", "leave", "bad", "get"))
            # The read of a slow response may outlast the server's keep_alive_sec: connect again, as clients do.
            if connection.sock is not None and select.select([connection.sock], [], [], 0)[0]:
                connection.close()
            try:
                getattr(self, kind)(connection, rng)
            except Exception as e:
                self.wrong.append(f"{kind}: {type(e).__name__}: {e}")
            self.counts[kind] += 1
            if kind == "leave":
                connection.close()
        connection.close()

    def _send(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def whole(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        """Compare a whole response."""
        i = rng.randrange(len(self.cases))
        prompt, shape = self.cases[i]
        found = json.load(self._send(connection, {"prompt": prompt, **shape}))
        self._compare(i, [(c["text"], c["finish_reason"]) for c in found["choices"]])

    def stream(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        """Compare a stream, some of which are read slowly."""
        i, pause = rng.randrange(len(self.cases)), rng.choice((0, 0, 0.02))
        prompt, shape = self.cases[i]
        texts, reasons = ["" for _ in self.expected[i]], [None for _ in self.expected[i]]
        for line in self._send(connection, {"prompt": prompt, "stream": True, **shape}):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
            time.sleep(pause)
        self._compare(i, list(zip(texts, reasons, strict=True)))

    def leave(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        """Leave in the middle of an answer."""
        body = {"prompt": rng.choice(PROMPTS), "max_tokens": 100_000, "overflow": "slide", "n": rng.choice((1, 4))}
        if rng.random() < 0.5:
            self._send(connection, {**body, "stream": True}).read(rng.randrange(1, 2000))
        else:
            connection.request("POST", "/v1/completions", json.dumps(body))
            time.sleep(rng.random() / 20)

    def bad(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        """Send what is refused."""
        bodies = ({"prompt": "a", "n": 0}, {"prompt": 5}, {"unknown": 1}, {"prompt": "a " * 5000}, [], {"prompt": []})
        response = self._send(connection, rng.choice(bodies))  # type: ignore[arg-type]
        response.read()
        assert response.status == 400

    def get(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        """Read something else."""
        connection.request("GET", rng.choice(("/health", "/metrics", "/v1/models")))
        response = connection.getresponse()
        response.read()
        assert response.status == 200

    def _compare(self, i: int, found: list[tuple[str, str | None]]) -> None:
        if found != self.expected[i]:
            self.wrong.append(f"case {self.cases[i]}: {found} is not {self.expected[i]}")


def _python(shape: dict[str, Any]) -> dict[str, Any]:
    bias = shape.get("logit_bias")
    return shape if bias is None else {**shape, "logit_bias": {int(token): value for token, value in bias.items()}}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_mixed_traffic_gives_the_answers_of_the_library_in_flat_memory() -> None:
    options = itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(v)) for name, v in OPTIONS.items())
    with serving(MODEL, *options) as server:
        traffic = Traffic(server.url)
        sizes: list[int] = []
        clients = threading.Thread(target=traffic.run)
        clients.start()
        while clients.is_alive():
            sizes.append(resident_bytes(server.process.pid))
            clients.join(SECONDS / 200)
        assert traffic.wrong == []
        connection = http.client.HTTPConnection(traffic.address, timeout=60)
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        connection.close()
        quarter = len(sizes) // 4
        first, last = max(sizes[quarter : 2 * quarter]), max(sizes[-quarter:])
        print(f"\n{SECONDS:.0f} s: {dict(traffic.counts)}; memory {sizes[0] >> 20}, {first >> 20}, {last >> 20} MiB")
        assert 'num_requests_running{model_name="shakespeare"} 0.0' in metrics
        assert 'num_requests_waiting{model_name="shakespeare"} 0.0' in metrics
        assert min(traffic.counts[kind] for kind in ("whole", "stream", "leave", "bad", "get")) > 0
        assert last <= first + SLACK_BYTES + first * 0.02
        assert server.lines[1:] == []  # nothing is reported
