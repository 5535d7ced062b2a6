"""Connect to a Ray cluster, or start one on this machine; which nodes it has, and with which versions.

`local` starts a cluster that only this machine can reach: Ray binds its ports to the address of its node, which is
127.0.0.1 where RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0, on Linux too.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nanoinfer import __version__
from nanoinfer.errors import NanoinferError, escaped, missing_extra, one_line

LOCAL = "local"
CONNECT_SEC = 5.0
LOCAL_STORE_BYTES = 512 << 20
"""Shared memory of a local cluster."""
# Ray reads these variables when it is imported.
_ENVIRONMENT = {"RAY_DEDUP_LOGS_SKIP_REGEX": "(?s)."}  # Ray prints no errors of others on stdout
_LOCAL_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# Ray waits 10 minutes for an address where something else answers.
_REMOTE_ENVIRONMENT = {"RAY_gcs_server_port_wait_time_s": "2", "RAY_py_gcs_connect_timeout_s": "5"}


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster, and disconnect at the end; a local one ends then. Ray's logs stay in its folder.

    Does nothing where this process is connected already.

    Args:
        address: "local", "auto" (the one that runs on this machine) or HOST:PORT.

    Raises:
        NanoinferError: ray is not installed, nothing answers at the address, or it has another version of Ray.
    """
    os.environ.update(_ENVIRONMENT)
    if address == LOCAL:
        os.environ.update(_LOCAL_ENVIRONMENT)
    else:
        os.environ.update({**_REMOTE_ENVIRONMENT, **os.environ})
        if address != "auto":
            _check_answers(address)
    try:
        import ray
    except ImportError:
        raise NanoinferError(missing_extra("ray", "cluster")) from None
    if ray.is_initialized():
        yield
        return
    warnings.filterwarnings("ignore", module=r"ray\.")
    options = {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES} if address == LOCAL else {}
    with _own_stderr():
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as e:  # ConnectionError, RuntimeError (another version), errors of gRPC
            hint = ": set RAY_AUTH_MODE=token if it requires a token" if isinstance(e, ConnectionError) else ""
            raise NanoinferError(f"--ray {address}: {one_line(e)}{hint}") from None
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _own_stderr() -> Iterator[None]:
    """Redirect descriptor 2 to /dev/null: Ray's C++ code also writes its log there. sys.stderr still works."""
    before, kept, sink = sys.stderr, os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        if before is sys.__stderr__:
            sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        sys.stderr = before
        os.close(kept)
        os.close(sink)


def _check_answers(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or "://" in address:
        raise NanoinferError(f"--ray {escaped(address, 80)} is no address: give HOST:PORT of a cluster, auto, or local")
    try:
        socket.create_connection((host, int(port)), CONNECT_SEC).close()
    except (OSError, OverflowError) as e:
        raise NanoinferError(
            f"--ray {address} does not answer: {one_line(e)}: start a cluster (ray start --head), or use --ray local"
        ) from None


def capacity(cpus_per_actor: int) -> int:
    """Return how many actors the cluster's nodes have CPUs for, whatever else runs on them."""
    return sum(cpus // cpus_per_actor for cpus in _node_cpus())


def plan_actors(num_actors: int | None, cpus_per_actor: int | None) -> tuple[int, int]:
    """Return how many actors to start, and the CPUs of each: by default one on each node, with those of the smallest.

    Raises:
        NanoinferError: the cluster has too few CPUs.
    """
    nodes = _node_cpus()
    if cpus_per_actor is None:
        cpus_per_actor = min(nodes, default=1)
    limit = capacity(cpus_per_actor)
    if limit == 0:
        raise NanoinferError(
            f"no node of the cluster has {cpus_per_actor} CPUs for an actor; the largest of {len(nodes)} nodes has"
            f" {max(nodes, default=0)}: lower --cpus-per-actor, or add nodes"
        )
    if num_actors is not None and num_actors > limit:
        raise NanoinferError(
            f"--num-actors {num_actors} with {cpus_per_actor} CPUs each do not fit the cluster, which has room for"
            f" {limit}: lower it, or --cpus-per-actor"
        )
    return num_actors or limit, cpus_per_actor


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    import ray

    return {"nanoinfer": __version__, "ray": ray.__version__}


def check_versions(expected: Mapping[str, str]) -> None:
    """Raise NanoinferError if a version on this node is not the expected one."""
    for name, version in versions().items():
        if version != expected[name]:
            raise NanoinferError(
                f"it has {name} {version}, and the command runs with {name} {expected[name]}: install the same"
                " version on all nodes"
            )


def node_name() -> str:
    """Return this node's address and the beginning of its id."""
    import ray

    context = ray.get_runtime_context()
    return f"{ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})"


def _node_cpus() -> list[int]:
    """Return the number of CPUs of each node that is alive and has any."""
    import ray

    cpus = (int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    return [count for count in cpus if count]
