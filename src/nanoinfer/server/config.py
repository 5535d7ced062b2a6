"""The options and limits of the server: one frozen dataclass, from which the flags of `nanoinfer serve` are made."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.checks import keep_float, keep_int, show
from nanoinfer.errors import NanoinferError


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Raises:
        NanoinferError: a field is out of range.
    """

    host: str = "127.0.0.1"
    """Name or address of the interface to listen on; 0.0.0.0 is all."""
    port: int = 8000
    """Port to listen on; 0: a free one."""
    served_model_name: tuple[str, ...] = ()
    """Name of the model in requests and responses, instead of its own. May be repeated: responses have the first."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        keep_int(self, "port", 0, 65535)
        keep_float(self, "shutdown_timeout", 0.0, 86400.0)
        for name in self.served_model_name:
            if not isinstance(name, str) or not name:
                raise NanoinferError(f"served_model_name={show(name)} is not a string of one or more characters")
