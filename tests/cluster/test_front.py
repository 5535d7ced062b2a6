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
from nanoinfer.cluster import metrics
from nanoinfer.cluster.front import ATTEMPTS
from nanoinfer.cluster.link import WINDOW_BYTES
from nanoinfer.server.access import combined_salt
from nanoinfer.server.access_log import count_tokens
from nanoinfer.server.http import respond, respond_json

EVENTS = [(b"content-type", b"text/event-stream")]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


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


def lose(setup: Setup, number: int, group: int = 0) -> None:
    """End the connection of a replica, as its death does."""
    setup.groups[group].replicas[number].link.abort()


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


def test_a_client_that_leaves_ends_the_request_in_the_replica(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main())


def test_a_response_that_is_not_read_waits_in_the_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            remote = await setup.add(0, 0, streams := Streams())
            part, num_parts = b"x" * (WINDOW_BYTES // 8), 40
            for _ in range(num_parts):
                streams.parts.put_nowait(part)
            streams.parts.put_nowait(b"")
            answer = remote.ask({"method": "POST", "path": "/", "query_string": "", "headers": [], "client": None,
                                 "state": {}}, b"{}")  # fmt: skip
            await until(lambda: streams.num_sent == 8)
            for _ in range(20):
                await asyncio.sleep(0)
            assert streams.num_sent == 8  # and the ninth waits
            body = bytearray()
            while answer.num_tokens is None:
                await answer.wait()
                body += answer.take()
            assert bytes(body) == num_parts * part + b"end"
            answer.close()

    run(main())


def test_a_request_whose_replica_ends_is_sent_to_another(tmp_path: Path) -> None:
    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)

    async def main() -> None:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, waits)
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            await until(lambda: setup.groups[0].num_in_flight == 1)
            await setup.add(0, 1, says("second"))
            lose(setup, 0)
            found = await asking
            assert (found.status, json.loads(found.content)["text"]) == (201, "second")
            text = (await call(setup.app, path="/metrics")).content.decode()
            assert 'nanoinfer:requests_retried_total{model_name="a"} 1.0' in text

    run(main())


def test_a_request_outlives_two_replicas_that_end_together(tmp_path: Path) -> None:
    """The second one has ended, too, when the first is known to have; the front does not know it yet."""

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)

    async def main() -> Response:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, waits)
            await setup.add(0, 1, waits)
            first = setup.groups[0].replicas[0]
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            await until(lambda: setup.groups[0].num_in_flight == 1)
            lose(setup, 0 if first.num_in_flight else 1)
            await until(lambda: len(setup.groups[0].replicas) == 1)
            for _ in range(10):
                await asyncio.sleep(0)
            lose(setup, 0)
            await until(lambda: not setup.groups[0].replicas)
            await setup.add(0, 2, says("third"))
            return await asking

    assert json.loads(run(main()).content)["text"] == "third"


def test_a_request_that_ends_several_replicas_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            number = 0

            async def ends(scope: Scope, receive: Receive, send: Send) -> None:
                lose(setup, 0)
                await asyncio.sleep(3600)

            for number in range(ATTEMPTS + 1):
                await setup.add(0, number, ends)
            found = await post(setup.app, {"prompt": "a"})
            assert (found.status, found.error["code"]) == (503, "service_unavailable")
            assert f"{ATTEMPTS} replicas have ended" in found.error["message"]
            assert len(setup.groups[0].replicas) == 1

    run(main())


def test_a_stream_whose_replica_ends_has_the_error_as_its_last_event(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, streams := Streams())
            await setup.add(0, 1, says("other"))
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            streams.parts.put_nowait(b"data: one\n\n")
            await until(lambda: streams.num_sent == 1)
            for _ in range(10):
                await asyncio.sleep(0)
            lose(setup, 0)
            found = await asking
            first, _, last = found.content.partition(b"data: one\n\n")
            assert (found.status, first) == (200, b"")
            message = json.loads(last.removeprefix(b"data: "))["error"]["message"]
            assert message.startswith("the replica that ran this request has ended: send the request again")

    run(main())


def test_a_failure_in_the_replica_is_its_response(tmp_path: Path) -> None:
    async def main() -> None:
        async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
            raise NanoinferError("temperature=-1 is below 0")

        async with front(tmp_path) as setup:
            await setup.add(0, 0, refuses)
            found = await post(setup.app, {"prompt": "a"})
            assert (found.status, found.error["message"]) == (400, "temperature=-1 is below 0")

    run(main())


def test_a_request_waits_for_a_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            await until(lambda: setup.groups[0].num_waiting == 1)
            assert setup.groups[0].num_woken == 1
            await setup.add(0, 0, says("late"))
            assert json.loads((await asking).content)["text"] == "late"

    run(main())


def test_a_request_is_sent_in_the_turn_in_which_a_replica_is_there(tmp_path: Path) -> None:
    async def main() -> Response:
        async with front(tmp_path) as setup:
            remote, (group,) = await setup.add(0, 0, says("short")), setup.groups
            group.leave(remote)
            asking = asyncio.create_task(post(setup.app, {"prompt": "a"}))
            await until(lambda: group.num_waiting == 1)
            for _ in range(10):
                await asyncio.sleep(0)
            group.join(remote)
            asyncio.get_running_loop().call_soon(group.leave, remote)
            found = await asking
            remote.link.close()
            return found

    assert run(main()).status == 201


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


def test_health_and_models(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main())


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


def _metrics(count: int, usage: float, model: str = "a", until: asyncio.Event | None = None) -> ASGIApp:
    text = f"""# HELP nanoinfer:http_responses_total Responses.
# TYPE nanoinfer:http_responses_total counter
# TYPE nanoinfer:generation_tokens_total counter
nanoinfer:generation_tokens_total{{model_name="{model}"}} {count}
# TYPE nanoinfer:kv_cache_usage_perc gauge
nanoinfer:kv_cache_usage_perc{{model_name="{model}"}} {usage}
# TYPE nanoinfer:ttft histogram
nanoinfer:ttft_bucket{{model_name="{model}",le="+Inf"}} {count}
nanoinfer:ttft_count{{model_name="{model}"}} {count}
nanoinfer:ttft_sum{{model_name="{model}"}} 1.5
"""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if until is not None:
            await until.wait()
        await respond(send, text.encode(), content_type=b"text/plain")

    return app


def test_metrics_are_summed_and_by_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            await setup.add(0, 0, _metrics(5, 0.5))
            await setup.add(0, 1, _metrics(7, 0.25))
            lines = (await call(setup.app, path="/metrics")).content.decode().splitlines()
            for line in (
                'nanoinfer:generation_tokens_total{model_name="a"} 12.0',
                'nanoinfer:replica_generation_tokens_total{model_name="a",replica="0"} 5.0',
                'nanoinfer:replica_generation_tokens_total{model_name="a",replica="1"} 7.0',
                'nanoinfer:kv_cache_usage_perc{model_name="a"} 0.375',
                'nanoinfer:ttft_bucket{le="+Inf",model_name="a"} 12.0',
                'nanoinfer:ttft_sum{model_name="a"} 3.0',
                'nanoinfer:replicas{model_name="a"} 2.0',
            ):
                assert line in lines, "\n".join(lines)
            lose(setup, 0)
            await until(lambda: len(setup.groups[0].replicas) == 1)
            lines = (await call(setup.app, path="/metrics")).content.decode().splitlines()
            assert 'nanoinfer:generation_tokens_total{model_name="a"} 12.0' in lines  # counters do not go back
            assert 'nanoinfer:kv_cache_usage_perc{model_name="a"} 0.25' in lines
            assert not any('replica="0"' in line for line in lines)
            declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
            assert sorted(set(declared)) == sorted(declared)  # twice is an error of Go's parser
            assert "nanoinfer:http_responses_total" in declared

    run(main())


def test_a_mean_is_of_the_replicas_of_one_model(tmp_path: Path) -> None:
    async def main() -> str:
        async with front(tmp_path, ("a", "b")) as setup:
            await setup.add(0, 0, _metrics(5, 0.5))
            await setup.add(1, 0, _metrics(5, 0.25, "b"))
            await setup.add(1, 1, _metrics(5, 0.75, "b"))
            return (await call(setup.app, path="/metrics")).content.decode()

    lines = run(main()).splitlines()
    assert 'nanoinfer:kv_cache_usage_perc{model_name="a"} 0.5' in lines
    assert 'nanoinfer:kv_cache_usage_perc{model_name="b"} 0.5' in lines


def test_metrics_do_not_wait_for_a_replica_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had counted stays, once, until it answers again."""

    async def main() -> None:
        async with front(tmp_path) as setup:
            answers = asyncio.Event()
            await setup.add(0, 0, _metrics(5, 0.5))
            await setup.add(0, 1, _metrics(7, 0.25, until=answers))
            counted = []
            for seconds in (30.0, 0.01, 0.01, 30.0):
                monkeypatch.setattr(metrics, "REPLICA_SEC", seconds)
                (answers.set if seconds > 1 else answers.clear)()
                text = (await call(setup.app, path="/metrics")).content.decode()
                counted.append([line for line in text.splitlines() if line.startswith("nanoinfer:generation_tokens")])
            assert counted == [['nanoinfer:generation_tokens_total{model_name="a"} 12.0']] * 4
            answers.set()

    run(main())


def test_a_connection_that_does_not_say_who_it_is_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with front(tmp_path) as setup:
            reader, writer = await asyncio.open_unix_connection(setup.path)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
            writer.close()
            assert not setup.groups[0].replicas

    run(main())
