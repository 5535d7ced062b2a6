"""Replicas on a Ray cluster: deployments of Ray Serve, whose responses come over links.

Serve places the replicas on nodes, replaces those that end, adds and removes some by the number of requests, and
replaces them one after the other when the model is loaded again. A request is a call of a deployment: Serve chooses the
replica with the router below, and counts the call until the response has ended. The response itself does not pass
through Ray: a token of each stream would be a message of Ray, which takes as long as a step of a small model.

    client -> front ---- call: number, request, blocks of its prompt ----> Serve -> replica
    client <- front <------------------- link: frames ---------------------------------+
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoinfer.cluster.config import ClusterConfig
from nanoinfer.cluster.group import Group
from nanoinfer.cluster.link import HELLO, Link, connect
from nanoinfer.cluster.remote import Answer, Answers, Remote
from nanoinfer.cluster.replica import Replica, describe
from nanoinfer.cluster.routing import TOKENS_PER_BLOCK, PrefixTable, choose
from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.errors import NanoinferError, one_line, printable
from nanoinfer.ray.connect import capacity, check_versions, node_name, versions
from nanoinfer.server.app import build_routes
from nanoinfer.server.config import ServerConfig
from nanoinfer.utils.workers import Workers

log = logging.getLogger("nanoinfer.server")

LOOPBACK = "127.0.0.1"
MAX_NUM_SEQS, MAX_NUM_TOKENS = 64, 1 << 18
"""Assumed for each replica: Serve does not pass the real values to the router."""
_HEALTH_SEC, _POLL_SEC = 2.0, 0.05
_LOGGING = {"log_level": "ERROR", "enable_access_log": False}


class RayReplica:
    """A deployment: a model that answers over a link to the front."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: LLMConfig, server: ServerConfig, address: tuple[str, int], who: dict[str, Any],
        expected: dict[str, str],
    ) -> None:  # fmt: skip
        """Load the model and connect.

        Args:
            config: of the model.
            server: of the server.
            address: where the front listens.
            who: the number of the model, and the secret that authenticates the replica.
            expected: the versions of the front (`connect.versions`).
        """
        context = serve.get_replica_context()
        who = {**who, "replica": context.replica_id.unique_id}
        try:
            (await _connect(address)).close()
        except OSError:  # the front was killed: Serve would start its replicas again and again
            await asyncio.to_thread(lambda: serve.delete(context.app_name, _blocking=False))
            raise
        try:
            check_versions(expected)
            self._llm = await asyncio.to_thread(AsyncLLM.from_config, config)
        except Exception as e:
            await _report(address, {**who, "error": f"node {node_name()}: {one_line(e)}"})
            raise
        if node_address() == LOOPBACK:
            _bind_to_loopback()
        app, service = build_routes(self._llm, server)
        self._replica = Replica(app, {**who, **describe(self._llm, service.names)})
        self._running = asyncio.create_task(self._replica.run(address))
        while not self._replica.is_connected:
            if self._running.done():
                self._running.result()
                raise ConnectionError("the front has refused the connection")
            await asyncio.sleep(0.01)

    async def __call__(self, number: int, head: dict[str, Any], body: bytes, blocks: Sequence[int]) -> None:
        """Answer a request. `blocks` are for the router."""
        await self._replica.answer(number, head, body)

    def check_health(self) -> None:
        """Raise if the engine or the connection has ended: Serve then replaces this replica."""
        if not self._llm.is_running:
            raise RuntimeError("the engine has ended")
        if not self._replica.is_connected:
            raise RuntimeError("the connection to the front has ended")


def check_capacity(num_replicas: int, cores: int) -> None:
    """Raise NanoinferError if the cluster has too few CPUs: Serve would wait for others without a word."""
    if (most := capacity(cores)) < num_replicas:
        raise NanoinferError(
            f"{num_replicas} replicas of {cores} CPUs do not fit into the cluster, which has CPUs for {most}: lower"
            " --replicas or --cores-per-replica, or add nodes"
        )


def node_address() -> str:
    """Return the address of this node, to which Ray binds its ports."""
    address: str = ray.util.get_node_ip_address()
    return address


def _bind_to_loopback() -> None:
    """Make Serve bind the port of this replica to loopback. Ray Serve 2.60 binds it to all addresses."""
    module: Any = importlib.import_module("ray.serve._private.replica")
    add_port = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", LOOPBACK))


async def _connect(address: tuple[str, int]) -> Link:
    return await connect(address, lambda *frame: None, lambda link: None)


async def _report(address: tuple[str, int], who: dict[str, Any]) -> None:
    """Report to the front why a replica has not started."""
    link = await _connect(address)
    link.send(0, HELLO, json.dumps(who).encode())
    link.close()


class _Routed:
    """What the router stores of a replica."""

    max_num_seqs = MAX_NUM_SEQS

    def __init__(self, replica: RunningReplica) -> None:
        self.replica = replica
        self.prefixes = PrefixTable(MAX_NUM_TOKENS // TOKENS_PER_BLOCK)
        self.num_in_flight = 0


class Router(RequestRouter):  # type: ignore[misc]
    """Chooses replicas as `routing.choose` does. Serve runs it in the process of the front."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin. Called by Serve. Args: kwargs: policy, one of `routing.POLICIES`."""
        self._policy: str = kwargs["policy"]
        self._routed: dict[ReplicaID, _Routed] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request, then the others."""
        self._routed = {r.replica_id: self._routed.get(r.replica_id) or _Routed(r) for r in candidate_replicas}
        known = list(self._routed.values())
        if pending_request is None or not known:
            return [candidate_replicas]
        chosen = choose(known, pending_request.kwargs["blocks"], self._policy).replica
        return [[chosen], [r for r in candidate_replicas if r is not chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request. Called by Serve."""
        if (routed := self._routed.get(replica_id)) is not None:
            routed.num_in_flight += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request. Called by Serve."""
        if (routed := self._routed.get(replica_id)) is not None:
            routed.num_in_flight -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica. Called by Serve."""
        super().on_replica_actor_died(replica_id)
        self._routed.pop(replica_id, None)


class RayGroup(Group):
    """The replicas of a model on a Ray cluster.

    Args:
        number: of the model among those of the front.
        config: of the model.
        server: of the server.
        cluster: how many replicas.
        address: where the front listens for them.
        secret: by which they authenticate themselves.
    """

    def __init__(
        self, number: int, config: LLMConfig, server: ServerConfig, cluster: ClusterConfig, address: tuple[str, int],
        secret: str,
    ) -> None:  # fmt: skip
        super().__init__(config.model, cluster.routing)
        self._name = f"nanoinfer-{number}-{secret[:8]}"  # of an application of Serve
        self._server, self._cluster, self._secret = server, cluster, secret
        self._cores = cluster.cores_per_replica or 1
        self._arguments = (
            _with_threads(config, self._cores),
            server,
            address,
            {"model": number, "secret": secret},
            versions(),
        )
        self._handle: Any = None
        self._failed, self._generation = "", 0
        self._answers = Answers()
        self._threads = Workers("nanoinfer-ray", 2)
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        """Whether there is a replica."""
        return bool(self.replicas)

    @property
    def num_in_flight(self) -> int:
        """Number of requests that wait or are answered."""
        return len(self._answers)

    async def start(self) -> None:
        """Deploy the replicas, and return when all are ready. Raises NanoinferError if one cannot be started."""
        await self._deploy(lambda: len(self.replicas) >= self._cluster.replicas)

    async def _deploy(self, is_ready: Callable[[], bool]) -> None:
        self._failed = ""
        self._generation += 1
        config, server, address, who, expected = self._arguments
        arguments = config, server, address, {**who, "generation": self._generation}, expected
        cluster = self._cluster
        count: dict[str, Any] = {"num_replicas": cluster.replicas}
        if cluster.max_replicas is not None:
            count = {"autoscaling_config": {
                "min_replicas": cluster.replicas, "max_replicas": cluster.max_replicas,
                "target_ongoing_requests": cluster.target_requests,
            }}  # fmt: skip
        router: Any = {"request_router_class": Router, "request_router_kwargs": {"policy": self.policy}}
        deployment = serve.deployment(
            name="replicas", **count, ray_actor_options={"num_cpus": self._cores},
            max_ongoing_requests=self._server.max_requests_in_flight, health_check_period_s=_HEALTH_SEC,
            graceful_shutdown_timeout_s=self._server.shutdown_timeout, max_constructor_retry_count=1,
            request_router_config=RequestRouterConfig(**router),
            logging_config=_LOGGING,
        )(RayReplica)  # fmt: skip
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        # The front has the port, so Serve needs no proxy.
        await self._threads.run(lambda: serve.start(proxy_location="Disabled", logging_config=_LOGGING))
        application = deployment.options(version=str(self._generation), _internal=True).bind(*arguments)
        # In a daemon thread: Serve does not return before the replicas are ready, and this process may end before.
        deploying = asyncio.create_task(
            self._threads.run(lambda: serve.run(application, name=self._name, route_prefix=None))
        )
        while not (deploying.done() and is_ready()):
            if self._failed:
                raise NanoinferError(f"{printable(self.model)}: {self._failed}")
            if deploying.done() and (error := deploying.exception()) is not None:
                raise NanoinferError(f"{printable(self.model)}: Ray Serve: {one_line(error)}")
            await asyncio.sleep(_POLL_SEC)
        self._handle = deploying.result()
        await self.describe()

    async def wake(self) -> None:
        """Do nothing: Serve starts replicas."""

    async def reload(self) -> None:
        """Deploy again: Serve replaces the replicas one after the other. Raises as `start`."""
        old = list(self.replicas)
        await self._deploy(lambda: all(remote not in self.replicas for remote in old))

    async def stop(self) -> None:
        """Delete the deployment, which ends the replicas."""
        for remote in self.replicas:
            remote.link.close()
        await self._threads.run(lambda: serve.delete(self._name, _blocking=False))

    def join(self, remote: Remote) -> None:
        """Add a replica that has connected. Raises ValueError if it does not know the secret."""
        self._check(remote.who)
        remote.answers = self._answers
        super().join(remote)

    def fail(self, who: dict[str, Any]) -> None:
        """Record that a replica could not start. Raises ValueError if it does not know the secret."""
        self._check(who)
        self._failed = str(who["error"])
        if self._handle is not None:  # one that Serve adds or replaces; `start` raises the error
            log.error("%s: %s", self.model, self._failed)

    def _check(self, who: dict[str, Any]) -> None:
        if not hmac.compare_digest(str(who["secret"]), self._secret):
            raise ValueError

    async def ask(self, head: dict[str, Any], body: bytes, blocks: Sequence[int]) -> Answer:
        """Send a request to a replica, and return its response, which has not begun. Serve waits for a replica."""
        answer = _RayAnswer(self._answers)
        answer.call = asyncio.create_task(_wait(self._handle.remote(answer.number, head, body, blocks=blocks), answer))
        self._calls.add(answer.call)  # the event loop keeps no reference
        answer.call.add_done_callback(self._calls.discard)
        return answer


class _RayAnswer(Answer):
    """The response to a call of the deployment."""

    call: asyncio.Task[None]

    def close(self) -> None:
        """End the exchange, and the call if no replica answers it yet."""
        super().close()
        if self.remote is None:
            self.call.cancel()


async def _wait(call: Any, answer: Answer) -> None:
    """Wait for the end of a call of the deployment; if it fails, the response is lost."""
    try:
        await call
    except asyncio.CancelledError:
        call.cancel()
        raise
    except Exception as e:  # the replica has ended, or Serve has refused the call
        log.debug("a call of a replica has failed: %s", one_line(e))
        answer.lose()


def _with_threads(config: LLMConfig, threads: int) -> LLMConfig:
    return replace(config, engine=replace(config.engine, threads=config.engine.threads or threads))
