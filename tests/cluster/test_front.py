"""The front, with replicas in the same process that answer with small applications."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")

from starlette.types import ASGIApp, Receive, Scope, Send

from helpers.asgi import Response, call, post, until
from helpers.replicas import Setup, front
from nanoinfer import NanoinferError
from nanoinfer.cluster import front as cluster_front
from nanoinfer.cluster.front import ATTEMPTS
from nanoinfer.cluster.link import head_of
from nanoinfer.server.access import combined_salt
from nanoinfer.server.access_log import count_tokens
from nanoinfer.server.http import respond, respond_json

EVENTS = [(b"content-type", b"text/event-stream")]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


async def waits(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(3600)


def says(text: str) -> ASGIApp:
    """Return one that says what it got."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        if scope["path"] == "/metrics":
            return await respond(send, b"")
        count_tokens(scope, 3, len(text))
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        await respond_json(send, {
            "text": text, "body": body.decode("latin-1"), "path": scope["path"],
            "headers": headers, "client": scope["client"], "salt": combined_salt(scope, None),
        }, 201)  # fmt: skip

    return app


class Streams:
    """An application that sends parts when it is told to."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.num_sent = 0
        self.cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            while part := await self.parts.get():
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self.num_sent += 1
            await send({"type": "http.response.body", "body": b"end"})
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_a_request_and_its_response_pass(tmp_path: Path) -> None:
    async def main() -> Response:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, says("hello"))
            return await post(setup.app, {"prompt": "ü"}, "/v1/x", headers={"x-a": "\xfc", "x-api-key": "k"})

    found = run(main())
    got = json.loads(found.content)
    assert (found.status, got["text"], got["path"], got["client"]) == (201, "hello", "/v1/x", ["127.0.0.1", 1])
    assert json.loads(got["body"]) == {"prompt": "ü"}
    assert got["headers"]["x-a"] == "\xfc"
    assert "x-api-key" not in got["headers"]
    assert found.headers["content-length"] == str(len(found.content))
    assert found.scope["state"]["num_tokens"] == [3, 5]


def test_a_stream_passes_part_by_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, streams := Streams())
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            streams.parts.put_nowait(b"one")
            found = await _part(setup, streams, asking, 1)
            streams.parts.put_nowait(b"two")
            streams.parts.put_nowait(b"")
            found = await asking
            assert (found.status, found.content, found.complete) == (200, b"onetwoend", True)
            assert found.headers["content-type"] == "text/event-stream"

    async def _part(setup: Setup, streams: Streams, asking: asyncio.Task[Response], count: int) -> None:
        await until(lambda: streams.num_sent == count)
        assert not asking.done()

    run(main())


async def test_a_client_that_leaves_ends_the_request_in_the_replica(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        remote = await setup.add(0, 0, streams := Streams())
        gone = asyncio.Event()
        asking = asyncio.create_task(post(setup.app, {"prompt": "a"}, disconnect=gone))
        streams.parts.put_nowait(b"one")
        await until(lambda: streams.num_sent == 1 and remote.num_in_flight == 1)
        gone.set()
        await asking
        await until(lambda: streams.cancelled)
        assert remote.num_in_flight == 0


async def test_a_response_that_is_not_read_waits_in_the_replica(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        remote = await setup.add(0, 0, streams := Streams())
        num_parts = 100
        for _ in range(num_parts):
            streams.parts.put_nowait(b"x" * (1 << 16))
        streams.parts.put_nowait(b"")
        head = head_of({"method": "POST", "path": "/", "headers": [], "state": {}})
        async with remote.request(head, b"{}") as answer:
            await answer.head()
            before = -1
            while streams.num_sent != before:  # until the buffers of the connection are full
                before = streams.num_sent
                await asyncio.sleep(0.05)
            assert before < num_parts / 2
            content, more = b"", True
            while more:
                part, more = await answer.part()
                content += part
        assert content == num_parts * b"x" * (1 << 16) + b"end"


async def test_a_request_whose_replica_ends_is_sent_to_another(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        await setup.add(0, 0, waits)
        asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
        await until(setup.groups[0].is_used)
        await setup.add(0, 1, says("second"))
        setup.lose(0)
        found = await asking
        assert (found.status, json.loads(found.content)["text"]) == (201, "second")
        text = (await call(setup.app, path="/metrics")).content.decode()
        assert 'nanoinfer:requests_retried_total{model_name="a"} 1.0' in text


def test_a_request_outlives_two_replicas_that_end_together(tmp_path: Path) -> None:
    """The second one has ended, too, when the first is known to have; the front does not know it yet."""

    async def main() -> Response:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, waits)
            await setup.add(0, 1, waits)
            first: Any = setup.groups[0].replicas[0]
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            await until(setup.groups[0].is_used)
            first, second = (0, 1) if first.num_in_flight else (1, 0)
            setup.lose(first)
            await until(setup.groups[0].is_used)
            setup.lose(second)
            await setup.add(0, 2, says("third"))
            return await asking

    assert json.loads(run(main()).content)["text"] == "third"


async def test_a_request_that_ends_several_replicas_is_given_up(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:

        async def ends(scope: Scope, receive: Receive, send: Send) -> None:
            setup.lose(min(setup.groups[0].host.running))
            await asyncio.sleep(3600)

        for number in range(ATTEMPTS + 1):
            await setup.add(0, number, ends)
        found = await post(setup.app, {"prompt": "a"})
        assert (found.status, found.error["code"]) == (503, "service_unavailable")
        assert f"{ATTEMPTS} replicas have ended" in found.error["message"]
        assert len(setup.groups[0].replicas) == 1


async def test_a_stream_whose_replica_ends_has_the_error_as_its_last_event(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        await setup.add(0, 0, streams := Streams())
        await setup.add(0, 1, says("other"))
        asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
        streams.parts.put_nowait(b"data: one\n\n")
        await until(lambda: streams.num_sent == 1)
        for _ in range(10):
            await asyncio.sleep(0)
        setup.lose(0)
        found = await asking
        first, _, last = found.content.partition(b"data: one\n\n")
        assert (found.status, first) == (200, b"")
        message = json.loads(last.removeprefix(b"data: "))["error"]["message"]
        assert message.startswith("the replica that ran this request has ended: send the request again")


async def test_a_failure_in_the_replica_is_its_response(tmp_path: Path) -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        raise NanoinferError("temperature=-1 is below 0")

    async with front(tmp_path) as setup:
        await setup.add(0, 0, refuses)
        found = await post(setup.app, {"prompt": "a"})
        assert (found.status, found.error["message"]) == (400, "temperature=-1 is below 0")


async def test_a_request_waits_for_a_replica(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
        await until(setup.groups[0].is_used)
        await setup.add(0, 0, says("late"))
        assert json.loads((await asking).content)["text"] == "late"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/x", {}, "of a"),
        ("/v1/x", {"model": "a"}, "of a"),
        ("/v1/x", {"model": "b"}, "of b"),
        ("/v1/models/b", None, "of b"),
        ("/info", None, "of a"),
    ],
)
def test_the_model_of_a_request(tmp_path: Path, path: str, body: Any, expected: str) -> None:
    async def main() -> Response:
        async with front(tmp_path, ("a", "b")) as setup:
            await setup.add(0, 0, says("of a"))
            await setup.add(1, 0, says("of b"))
            return await (call(setup.app, path=path) if body is None else post(setup.app, body, path))

    assert json.loads(run(main()).content)["text"] == expected


@pytest.mark.parametrize("name", ["c", 7, None, ["a"], {"a": 1}])
def test_an_unknown_model(tmp_path: Path, name: Any) -> None:
    async def main() -> Response:
        async with front(tmp_path, ("a", "b")) as setup:
            await setup.add(0, 0, says("of a"))
            return await post(setup.app, {"model": name, "prompt": "a"})

    found = run(main())
    if name is None:
        assert found.status == 201
    else:
        assert (found.status, found.error["code"], found.error["param"]) == (404, "model_not_found", "model")
        assert "this server has a, b" in found.error["message"]


async def test_health_and_models(tmp_path: Path) -> None:
    async with front(tmp_path, ("a", "b")) as setup:
        await setup.add(0, 0, says(""))
        for group in setup.groups:
            group.described = [{"id": group.model}]
        found = await call(setup.app)
        assert (found.status, found.error["message"]) == (503, "no replica of b runs")
        await setup.add(1, 0, says(""))
        assert ((await call(setup.app)).status, (await call(setup.app)).content) == (200, b"")
        listed = json.loads((await call(setup.app, path="/v1/models")).content)
        assert listed == {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
def test_other_methods_than_get_are_the_replicas_to_refuse(tmp_path: Path, path: str) -> None:
    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_json(send, {"path": scope["path"]}, 405)

    async def main() -> None:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, refuses)
            for method in ("POST", "OPTIONS"):
                assert (await call(setup.app, method, path)).status == 405

    run(main())


def _metrics(count: int, usage: float, until: asyncio.Event | None = None) -> ASGIApp:
    text = f"""# HELP nanoinfer:http_responses_total Responses.
# TYPE nanoinfer:http_responses_total counter
# TYPE nanoinfer:generation_tokens_total counter
nanoinfer:generation_tokens_total{{model_name="a"}} {count}
# TYPE nanoinfer:kv_cache_usage_perc gauge
nanoinfer:kv_cache_usage_perc{{model_name="a"}} {usage}
# TYPE nanoinfer:ttft histogram
nanoinfer:ttft_bucket{{model_name="a",le="+Inf"}} {count}
nanoinfer:ttft_count{{model_name="a"}} {count}
nanoinfer:ttft_sum{{model_name="a"}} 1.5
"""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if until is not None:
            await until.wait()
        await respond(send, text.encode(), content_type=b"text/plain")

    return app


async def test_metrics_have_the_number_of_their_replica(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        await setup.add(0, 0, _metrics(5, 0.5))
        await setup.add(0, 1, _metrics(7, 0.25))
        lines = (await call(setup.app, path="/metrics")).content.decode().splitlines()
        for line in (
            'nanoinfer:generation_tokens_total{model_name="a",replica="0"} 5.0',
            'nanoinfer:generation_tokens_total{model_name="a",replica="1"} 7.0',
            'nanoinfer:kv_cache_usage_perc{model_name="a",replica="1"} 0.25',
            'nanoinfer:ttft_bucket{le="+Inf",model_name="a",replica="0"} 5.0',
            'nanoinfer:replicas{model_name="a"} 2.0',
        ):
            assert line in lines, "\n".join(lines)
        setup.lose(0)
        lines = (await call(setup.app, path="/metrics")).content.decode().splitlines()
        assert not any('replica="0"' in line for line in lines)
        declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert sorted(set(declared)) == sorted(declared)  # twice is an error of Go's parser
        assert "nanoinfer:http_responses_total" in declared


async def test_metrics_do_not_wait_for_a_replica_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(tmp_path) as setup:
        answers = asyncio.Event()
        await setup.add(0, 0, _metrics(5, 0.5))
        await setup.add(0, 1, _metrics(7, 0.25, until=answers))
        for seconds, replicas in ((0.3, "0"), (30.0, "01")):
            monkeypatch.setattr(cluster_front, "REPLICA_SEC", seconds)
            (answers.set if seconds > 1 else answers.clear)()
            text = (await call(setup.app, path="/metrics")).content.decode()
            lines = [line for line in text.splitlines() if line.startswith("nanoinfer:generation_tokens")]
            assert [line.split('replica="')[1][0] for line in lines] == list(replicas)


async def test_a_connection_that_sends_no_request_ends(tmp_path: Path) -> None:
    async with front(tmp_path) as setup:
        await setup.add(0, 0, says("a"))
        reader, writer = await asyncio.open_unix_connection(f"{setup.groups[0].path}-0")
        writer.write(b"GET ")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert (await post(setup.app, {"prompt": "a"})).status == 201


def test_many_requests_at_once(tmp_path: Path) -> None:
    async def main() -> list[Response]:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, says("a"))
            return await asyncio.gather(*(post(setup.app, {"prompt": "a"}) for _ in range(400)))

    assert {response.status for response in run(main())} == {201}
