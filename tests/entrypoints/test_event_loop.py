"""The event loop goes on while a step runs: all routes and all methods of AsyncLLM during a step that does not end.

An engine holds a step until the test ends it, and with it what a real step holds: the core's lock, and a lock that
every operation of the engine takes, as the decoder of `native` has one. What waited for the step in the event loop
would wait until the engine gives up. tests/native/test_native_locks.py has real steps.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `server` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from starlette.types import ASGIApp

from helpers import asgi
from helpers.asgi import Response
from helpers.async_llm import freed
from helpers.chat import chat_folder
from nanoinfer import LLM, AsyncLLM, AsyncOutputStream, SamplingParams
from nanoinfer.engines.base import Engine
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from nanoinfer.server import page_routes
from nanoinfer.server.app import ROUTES

GIVE_UP_SEC = 20.0  # a step that is not released ends, so that the test does
TICKS = 10
MAX_CPU_SEC = 0.05  # of the loop's thread between two ticks: what a busy machine does not change
HI = [{"role": "user", "content": "Hi"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100_000, overflow="slide", logprobs=2, ignore_eos=True)


class Hold:
    """Lets a step of an engine run until `release`."""

    def __init__(self, engine: Engine) -> None:
        self._lock = threading.RLock()
        self.holds = False
        """Whether the next step is held."""
        self.began, self.ended = threading.Event(), threading.Event()
        self.gave_up = False
        kind = type(engine)
        named = [name for name in vars(Engine) if not name.startswith("_") and hasattr(kind, name)]
        engine.__class__ = type("Held", (kind,), {name: self._locked(kind, name) for name in named})

    def _locked(self, kind: Any, name: str) -> Any:
        found = getattr(kind, name)
        call = found.fget if isinstance(found, property) else found

        def locked(engine: Any, *arguments: Any) -> Any:
            with self._lock:
                if name == "extend" and self.holds:
                    self.began.set()
                    self.gave_up |= not self.ended.wait(GIVE_UP_SEC)
                return call(engine, *arguments)

        return property(locked) if isinstance(found, property) else locked

    async def start(self) -> None:
        """Hold the next step, and wait for it."""
        self.holds = True
        while not self.began.is_set():
            await asyncio.sleep(0.001)

    def release(self) -> None:
        self.holds = False
        self.ended.set()


class Beat:
    """Ticks in the event loop, and measures the work between two ticks."""

    def __init__(self) -> None:
        self.num_ticks = 0
        self.cpu_sec = 0.0
        """The most CPU time of the loop's thread between two ticks."""

    async def run(self) -> None:
        cpu = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            self.num_ticks += 1
            before, cpu = cpu, time.thread_time()
            self.cpu_sec = max(self.cpu_sec, cpu - before)

    @contextmanager
    def beating(self) -> Iterator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()


async def during(hold: Hold, name: str, call: Callable[[], Awaitable[Any]], waits: bool) -> asyncio.Future[Any]:
    """Begin a call during a step, and let the loop run. Return its task, which is done unless it waits for the step."""
    beat = Beat()
    with beat.beating():
        task = asyncio.ensure_future(call())
        while beat.num_ticks < TICKS or not (task.done() or waits):
            await asyncio.sleep(0.001)
            assert not hold.gave_up, f"{name} has waited for the step{' in the event loop' * (beat.num_ticks < TICKS)}"
    assert task.done() != waits, name
    assert beat.cpu_sec < MAX_CPU_SEC, f"{name} has run for {beat.cpu_sec * 1000:.0f} ms in the event loop"
    return task


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(chat_folder(tmp_path_factory.mktemp("chat") / "tiny")), engine="native", max_num_seqs=4)


# The server ----------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """A request to a route, and whether its response needs a step."""

    body: dict[str, Any] | None = None
    waits: bool = False
    path: str = ""
    status: int = 200


PROMPT: dict[str, Any] = {"prompt": "To be", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
RESPONDED: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3, "temperature": 0, "ignore_eos": True}
CHATTED: dict[str, Any] = {"messages": HI, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
ASKED: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 3, "temperature": 0}
CASES: dict[str, list[Route]] = {
    f"POST {COMPLETIONS}": [
        Route(PROMPT, waits=True),
        Route(PROMPT | {"stream": True, "n": 2, "logprobs": 2, "echo": True}, waits=True),
        Route(PROMPT | {"prompt": ["a", "b"], "best_of": 2}, waits=True),
        Route(PROMPT | {"n": 0}, status=400),
    ],
    f"POST {CHAT}": [Route(CHATTED, waits=True), Route(CHATTED | {"stream": True, "logprobs": True}, waits=True)],
    f"POST {MESSAGES}": [Route(ASKED, waits=True), Route(ASKED | {"stream": True}, waits=True), Route({}, status=400)],
    f"POST {COUNT_TOKENS}": [Route({"model": "m", "messages": HI})],
    f"POST {RESPONSES}": [
        Route(RESPONDED, waits=True),
        Route(RESPONDED | {"stream": True, "instructions": "Be brief."}, waits=True),
        Route(RESPONDED | {"previous_response_id": "a"}, status=400),
    ],
    f"POST {EMBEDDINGS}": [
        Route({"input": "To be"}, waits=True),
        Route({"input": ["a", [5, 6]], "encoding_format": "base64", "dimensions": 3}, waits=True),
        Route({"input": []}, status=400),
    ],
    "GET /v1/models": [Route()],
    "GET /v1/models/{model:path}": [Route(path="/v1/models/m"), Route(path="/v1/models/x", status=404)],
    "POST /tokenize": [Route({"prompt": "To be"}), Route({"messages": HI})],
    "POST /detokenize": [Route({"tokens": [1, 2]})],
    "GET /tokenizer_info": [Route()],
    "GET /info": [Route()],
    "GET /health": [Route()],
    "GET /metrics": [Route()],
    "GET /openapi.json": [Route()],
    "POST /page/markdown": [Route({"text": "# a\n- b"}), Route({"text": "*a* " * 5000}), Route({}, status=400)],
    "POST /page/explain": [Route({"prompt": "a", "max_tokens": 3}, waits=True), Route({}, status=400)],
    "GET of the page": [Route(path=route.path) for route in page_routes.routes()],
}


def test_every_route_has_a_case() -> None:
    assert CASES.keys() == {*(f"{spec.method} {spec.path}" for spec in ROUTES), "GET of the page"}


def requests(app: ASGIApp) -> Iterator[tuple[str, Route, Callable[[], Awaitable[Response]]]]:
    """Yield the name of each case, the case, and its request."""
    for name, cases in CASES.items():
        method, path = name.split(" ", 1)
        for case in cases:
            body = b"" if case.body is None else json.dumps(case.body).encode()
            yield name, case, lambda m=method, p=case.path or path, b=body: asgi.call(app, m, p, body=b)


def test_no_route_waits_for_a_step_in_the_event_loop(llm: LLM) -> None:
    hold = Hold(llm.core.engine)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        running = model.generate("Go", LONG)
        await anext(running)
        await hold.start()
        try:
            tasks = [(n, r, await during(hold, n, send, r.waits)) for n, r, send in requests(app)]
        finally:
            hold.release()
        for name, case, task in tasks:
            found = await task
            assert (found.status, found.complete) == (case.status, True), (name, found.content)
        await running.aclose()
        await freed(model)

    asgi.serve(llm, main, served_model_name=("m",))


# AsyncLLM ------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """What a method is called on: the model, and iterators whose requests run, and which have something to take."""

    model: AsyncLLM
    streams: list[AsyncOutputStream]


async def at_once(call: Callable[[], Any]) -> Any:
    return call()


async def enter(running: Running) -> None:
    async with AsyncLLM.from_llm(running.model.llm) as other:
        other.shutdown()


WAITING: dict[str, Callable[[Running], Awaitable[Any]]] = {
    "AsyncLLM.generate": lambda r: anext(r.model.generate("To be", GREEDY)),
    "AsyncLLM.chat": lambda r: anext(r.model.chat(HI, GREEDY)),
    "AsyncLLM.embed": lambda r: r.model.embed(["To be", "or"]),
    "AsyncLLM.score": lambda r: r.model.score("To be", ["or", "not"]),
    "AsyncLLM.pool": lambda r: r.model.pool(lambda: r.model.llm.pooler.embed("a", None)),
    "AsyncLLM.loglikelihood": lambda r: r.model.loglikelihood("To", " be"),
    "AsyncLLM.perplexity": lambda r: r.model.perplexity("To be"),
    "AsyncLLM.__aexit__": enter,  # it waits for its engine thread, which waits for the core
}
AT_ONCE: dict[str, Callable[[Running], Awaitable[Any]]] = {
    "AsyncLLM.from_llm": lambda r: at_once(lambda: AsyncLLM.from_llm(r.model.llm)),
    "AsyncLLM.__aenter__": lambda r: AsyncLLM.from_llm(r.model.llm).__aenter__(),
    "AsyncLLM.num_unfinished_requests": lambda r: at_once(lambda: r.model.num_unfinished_requests),
    "AsyncLLM.is_running": lambda r: at_once(lambda: r.model.is_running),
    "AsyncLLM.tokenize": lambda r: r.model.tokenize("To be"),
    "AsyncLLM.decode": lambda r: r.model.decode([1, 2]),
    "AsyncLLM.apply_chat_template": lambda r: r.model.apply_chat_template(HI),
    "AsyncLLM.abort": lambda r: r.model.abort("aborted"),
    "AsyncLLM.__del__": lambda r: at_once(lambda: AsyncLLM.from_llm(r.model.llm).__del__()),
    "AsyncOutputStream.begin": lambda r: at_once(lambda: r.model.generate("Go", LONG).begin(asyncio.Event())),
    "AsyncOutputStream.finished": lambda r: at_once(lambda: r.streams[0].finished),
    "AsyncOutputStream.ready": lambda r: at_once(lambda: r.streams[0].ready),
    "AsyncOutputStream.take": lambda r: at_once(r.streams[0].take),
    "AsyncOutputStream.unread": lambda r: at_once(lambda: r.streams[2].unread),
    "AsyncOutputStream.read": lambda r: r.streams[2].read(r.streams[2].take()),
    "AsyncOutputStream.__anext__": lambda r: anext(r.streams[1]),
    "AsyncOutputStream.aclose": lambda r: r.streams[0].aclose(),
    "AsyncOutputStream.leave": lambda r: at_once(r.streams[1].leave),
    "AsyncOutputStream.__del__": lambda r: at_once(lambda: r.streams.pop() and None),
}
AT_THE_END = ("AsyncLLM.shutdown", "AsyncLLM.close")
LOADS = ("AsyncLLM.from_config",)  # as the constructor does: it is not for event loops


def public(kind: type) -> set[str]:
    hooks = {"__aenter__", "__aexit__", "__anext__", "__del__"}
    named = [name for base in (kind, *kind.__bases__) if base.__module__.startswith("nanoinfer") for name in vars(base)]
    return {f"{kind.__name__}.{name}" for name in named if not name.startswith("_") or name in hooks}


def test_every_method_has_a_case() -> None:
    assert public(AsyncLLM) | public(AsyncOutputStream) == {*WAITING, *AT_ONCE, *AT_THE_END, *LOADS}


@pytest.mark.parametrize("end", AT_THE_END)
def test_no_method_waits_for_a_step_in_the_event_loop(llm: LLM, end: str) -> None:
    hold = Hold(llm.core.engine)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        streams = [model.generate("Go", LONG, name) for name in ("a", "b", "aborted")]
        streams.insert(2, model.chat(HI, LONG))
        for stream in streams:
            await anext(stream)
        while not all(stream.ready for stream in streams):
            await asyncio.sleep(0.001)
        await hold.start()
        try:
            running = Running(model, streams)
            waiting = [await during(hold, n, lambda c=c: c(running), True) for n, c in WAITING.items()]
            for name, call in AT_ONCE.items():
                await (await during(hold, name, lambda c=call: c(running), False))
            if end == "AsyncLLM.close":
                ended = await during(hold, end, model.close, True)
            else:
                ended = await during(hold, end, lambda: at_once(model.shutdown), False)
        finally:
            hold.release()
        await ended
        await asyncio.gather(*waiting, return_exceptions=True)

    asgi.serve(llm, main)
    assert llm.generate("To be", GREEDY)[0].outputs[0].finish_reason == "length"  # the model is still usable
