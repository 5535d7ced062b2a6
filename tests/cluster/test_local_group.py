"""Loading, unloading and reloading a model on this machine, with hosts and replicas that the test controls."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")

from helpers.asgi import until
from nanoinfer import NanoinferError
from nanoinfer.cluster import front, local
from nanoinfer.cluster.host import HostSpec, _Replicas
from nanoinfer.cluster.local import Group
from nanoinfer.config import LLMConfig
from nanoinfer.protocols.fields import FieldError
from nanoinfer.server.config import ClusterConfig, ServerConfig


class Replica:
    num_in_flight = 0

    async def get(self, path: str) -> bytes:
        return b'{"data": []}'


class StubHost:
    """A host that has loaded its model when the test says so."""

    names = ("m",)

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[None] = loop.create_future()
        self.watching: asyncio.Future[None] = loop.create_future()
        self.running: dict[int, Replica] = {}
        self.has_ended = False

    async def start(self) -> None:
        await self.loaded
        self.running[0] = Replica()

    async def end(self) -> None:
        self.has_ended = True


class Hosts(list[StubHost]):
    """Those that a group has started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle_unload: float = 0.0) -> None:
        super().__init__()
        self.group = Group(LLMConfig(model="m"), ServerConfig(), ClusterConfig(idle_unload=idle_unload), "")
        monkeypatch.setattr(local, "Host", self._add)

    def _add(self, *_: Any) -> StubHost:
        self.append(StubHost())
        return self[-1]

    async def started(self) -> Group:
        """Return the group after its first host has loaded the model."""
        starting = asyncio.create_task(self.group.start())
        await self.load(0)
        await starting
        return self.group

    async def load(self, number: int, error: Exception | None = None) -> None:
        """Let a host load its model, or fail."""
        await until(lambda: len(self) > number)
        if error is None:
            self[number].loaded.set_result(None)
        else:
            self[number].loaded.set_exception(error)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


async def leaves_while_it_is_loaded(hosts: Hosts, number: int) -> None:
    asking = asyncio.create_task(hosts.group.ready())
    await until(lambda: len(hosts) > number)
    asking.cancel()
    await asyncio.wait([asking])


async def test_a_model_whose_client_left_while_it_was_loaded_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, idle_unload=0.01)
    await leaves_while_it_is_loaded(hosts, 0)
    await hosts.load(0)
    await until(lambda: hosts[0].has_ended)  # it is idle
    asking = asyncio.create_task(hosts.group.ready())
    await hosts.load(1)
    await asking
    await hosts.group.stop()


async def test_an_error_is_not_that_of_a_request_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, logged = Hosts(monkeypatch), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    await leaves_while_it_is_loaded(hosts, 0)
    await hosts.load(0, NanoinferError("no such file"))
    await until(lambda: hosts.group._starting is None or hosts.group._starting.done())
    asking = asyncio.create_task(hosts.group.ready())
    await hosts.load(1)
    await asking
    await hosts.group.stop()
    gc.collect()
    assert logged == []


async def test_a_model_is_not_unloaded_while_it_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, idle_unload=0.01)
    group = await hosts.started()
    reloading = asyncio.create_task(group.reload())
    await until(lambda: len(hosts) == 2)
    for _ in range(20):
        await asyncio.sleep(0.001)
    await group.ready()
    assert [host.has_ended for host in hosts] == [False, False]
    await hosts.load(1)
    await reloading
    assert hosts[0].has_ended
    await until(lambda: hosts[1].has_ended)  # the new one is idle
    assert not group.replicas
    await group.stop()


@pytest.mark.parametrize("error", [NanoinferError("no such file"), OSError("too many open files")])
async def test_a_reload_that_fails_leaves_what_there_was(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    hosts = Hosts(monkeypatch, idle_unload=0.05)
    group = await hosts.started()
    reloading = asyncio.create_task(group.reload())
    await hosts.load(1, error)
    with pytest.raises(type(error), match=str(error)):
        await reloading
    assert not hosts[0].has_ended
    await until(lambda: hosts[0].has_ended)  # and it is still unloaded when it is idle
    await group.stop()


async def test_requests_that_wait_hear_that_the_model_cannot_be_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)
    group = await hosts.started()
    hosts[0].running.clear()
    asking = asyncio.create_task(group.ready())
    for _ in range(10):
        await asyncio.sleep(0)
    hosts[0].watching.set_result(None)
    await hosts.load(1, NanoinferError("no such file"))
    with pytest.raises(FieldError, match="no such file"):
        await asking
    await group.stop()


async def test_a_request_that_waits_for_a_replica_is_answered_by_a_host_of_a_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = Hosts(monkeypatch)
    group = await hosts.started()
    reloading = asyncio.create_task(group.reload())
    await until(lambda: len(hosts) == 2)
    hosts[0].running.clear()
    asking = asyncio.create_task(group.ready())
    await hosts.load(1)
    await reloading
    assert await asking == list(hosts[1].running.values())
    await group.stop()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "m: the process that loads it has ended"),
        ('{"error": "no such file"}\n', "m: no such file"),
        ('{"names": ["m"], "limits": [8, 100]}\n', "m: its process has ended before its replicas were ready"),
    ],
)
async def test_a_host_that_does_not_load_its_model(monkeypatch: pytest.MonkeyPatch, lines: str, message: str) -> None:
    monkeypatch.setattr(local, "HOST_COMMAND", ("printf", lines))
    group = Group(LLMConfig(model="m"), ServerConfig(), ClusterConfig(), "")
    with pytest.raises(NanoinferError, match=message):
        await group.start()


def test_a_host_that_cannot_be_started_is_an_error_that_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*command: str, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def main() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        group = Group(LLMConfig(model="m"), ServerConfig(), ClusterConfig(), "")
        with pytest.raises(NanoinferError, match="m: no process can be started that loads it: Resource temporarily"):
            await group.start()

    run(main())


def test_a_replica_that_cannot_be_forked_is_started_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    spec = HostSpec(LLMConfig(model="m"), ServerConfig(), f"{tmp_path}/", [[]])
    replicas = _Replicas(SimpleNamespace(model_name="m"), spec)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "fork", refuse)
    for delay in (1.0, 2.0, 4.0):
        replicas._start(0)
        assert (replicas._delays, replicas._running) == ({0: delay}, {})
    assert replicas._due[0] > 0.0


async def test_signals_during_a_reload_are_one_more_reload() -> None:
    requested, loads = asyncio.Event(), []

    class Model:
        model = "m"

        async def reload(self) -> None:
            loads.append(loaded := asyncio.get_running_loop().create_future())
            await loaded

    reloading = asyncio.create_task(front.reload([Model()], requested))  # type: ignore[list-item]
    requested.set()
    await until(lambda: len(loads) == 1)
    for _ in range(24):
        requested.set()
    loads[0].set_exception(OSError("no descriptor"))
    await until(lambda: len(loads) == 2)
    loads[1].set_result(None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(loads), reloading.done()) == (2, False)
    requested.set()
    await until(lambda: len(loads) == 3)
    reloading.cancel()
