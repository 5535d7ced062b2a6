"""The options of the server and of its replicas: dataclasses from which flags of `nanoinfer serve` are made."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from nanoinfer.errors import NanoinferError, show
from nanoinfer.sampling_params import LoRARequest, named_adapters
from nanoinfer.utils.checks import bounded, chosen, keep_fields

MAX_SEC = 86400.0
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Raises:
        NanoinferError: a field is out of range.
    """

    host: str = "127.0.0.1"
    """Name or address of the interface to listen on; 0.0.0.0 is all."""
    port: int = bounded(8000, 0, 65535)
    """Port to listen on; 0: a free one."""
    served_model_name: tuple[str, ...] = ()
    """Name of the model in requests and responses, instead of its own. May be repeated: responses have the first."""
    lora_modules: tuple[str, ...] = ()
    """Adapter that requests name as their model, as NAME=PATH (docs/lora.md). May be repeated."""
    default_max_tokens: int | None = bounded(None, 1)
    """max_tokens of requests that have none (default: 16 for completions; chats end at the context length)."""
    shutdown_timeout: float = bounded(30.0, 0.0, MAX_SEC)
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Key that requests must have; NANOINFER_API_KEY and --api-key-file hide it from other users. May be repeated."""
    api_key_file: str | None = None
    """File with one API key in each line."""
    allowed_host: tuple[str, ...] = ()
    """Further name of this server in the Host header, without port; *: any. May be repeated."""
    allowed_origin: tuple[str, ...] = ()
    """Origin whose web pages may use the server, as https://name[:port]; *: any. May be repeated."""
    access_log: str | None = None
    """File for one JSON line per request; -: standard output (default: none)."""
    log_level: str = chosen("warning", LOG_LEVELS)
    """debug (with tracebacks), info, warning, error or critical."""
    max_body_bytes: int = bounded(1 << 20, 1)
    """Maximum size of a request's body, in bytes."""
    max_header_bytes: int = bounded(1 << 14, 1)
    """Maximum size of a request's line and headers together, in bytes."""
    max_connections: int | None = bounded(None, 1)
    """Maximum number of open connections (default: 1024, or what the limit of open files allows)."""
    max_requests_in_flight: int = bounded(512, 1)
    """Maximum number of requests that are received or answered at the same time."""
    max_sequences: int = bounded(256, 1)
    """Maximum number of outputs that one request generates: prompts times n or best_of."""
    max_logprobs: int = bounded(20, 0)
    """Maximum value of logprobs, top_logprobs and prompt_logprobs."""
    max_logprob_entries: int = bounded(1 << 18, 1)
    """Maximum number of log-probabilities that one request may return: outputs times tokens times (logprobs + 1)."""
    header_timeout_sec: float = bounded(10.0, 0.0, MAX_SEC, low_open=True)
    """Maximum time to receive a request's line and headers, in seconds."""
    body_timeout_sec: float = bounded(30.0, 0.0, MAX_SEC, low_open=True)
    """Maximum time to receive a request's body, in seconds."""
    send_timeout_sec: float = bounded(30.0, 0.0, MAX_SEC, low_open=True)
    """Time in seconds in which a client must take 16 KiB of a response, or its end."""
    request_timeout_sec: float = bounded(600.0, 0.0, MAX_SEC, low_open=True)
    """Maximum time to answer a request, in seconds."""
    keep_alive_sec: float = bounded(10.0, 0.0, MAX_SEC, low_open=True)
    """Time in seconds after which an idle connection is closed."""

    def __post_init__(self) -> None:
        keep_fields(self)
        for origin in self.allowed_origin:
            scheme, separator, host = origin.partition("://")
            if origin != "*" and (not scheme or not separator or not host or any(c in host for c in "/?#@, ")):
                raise NanoinferError(f"allowed_origin={show(origin)} is neither * nor of the form https://name[:port]")
        for name in self.allowed_host:
            if name != "*" and not _is_host(name):
                raise NanoinferError(f"allowed_host={show(name)} is neither * nor a name or address without a port")
        for name in self.served_model_name:
            if not isinstance(name, str) or not name:
                raise NanoinferError(f"served_model_name={show(name)} is not a string of one or more characters")
        named_adapters(self.lora_modules)

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """The adapters of `lora_modules` by their names."""
        return named_adapters(self.lora_modules)


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


def _is_host(name: str) -> bool:
    if ":" not in name:
        return re.fullmatch(r"[\w.-]+", name, re.ASCII) is not None
    with suppress(ValueError):
        return ip_address(name).version == 6
    return False
