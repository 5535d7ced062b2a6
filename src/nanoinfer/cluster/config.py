"""The options of several replicas and models: one frozen dataclass, from which flags of `nanoinfer serve` are made."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import bounded, keep_fields


@dataclass(frozen=True)
class ClusterConfig:
    """Options of replicas.

    Raises:
        NanoinferError: a field is out of range.
    """

    replicas: int = bounded(1, 1, 1024)
    """Number of replicas of each model: processes that share its weights."""
    cores_per_replica: int | None = bounded(None, 1)
    """Cores of each replica, to which it is pinned (default: an equal share); with ray, its CPUs (default: 1)."""
    idle_unload: float = bounded(0.0, 0.0, 1e9)
    """Seconds without a request after which a model is unloaded until the next one; 0: never."""
    ray: str | None = None
    """Run the replicas on a Ray cluster: HOST:PORT, auto (the one on this machine) or local (start one here)."""
    max_replicas: int | None = bounded(None, 1)
    """With ray: maximum number of replicas; Ray adds and removes replicas by the number of requests."""
    target_requests: float = bounded(32.0, 0.0, 1e9, low_open=True)
    """With max_replicas: requests per replica above which Ray adds replicas."""
    stream_interval_ms: int = bounded(50, 0, 10_000)
    """With ray: milliseconds for which the events of a stream are collected into one message of Ray; 0: one each."""

    def __post_init__(self) -> None:
        keep_fields(self)
        if self.max_replicas is not None and self.ray is None:
            raise NanoinferError(f"max_replicas={self.max_replicas} needs ray: give --ray ADDRESS, too")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise NanoinferError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}: raise it")
        if self.ray is not None and self.idle_unload:
            raise NanoinferError("idle_unload is not supported with ray: leave it out")

    @property
    def needs_front(self) -> bool:
        """Whether one model needs a front and processes of its own."""
        return self.replicas != 1 or self.cores_per_replica is not None or self.idle_unload > 0 or self.ray is not None
