"""The limit of open files (RLIMIT_NOFILE): it is raised, and as many connections are allowed as leave the rest of it.

Each connection is a file descriptor. Without one, a server can neither accept a connection nor start a process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.server.config import ServerConfig

log = logging.getLogger("nanoinfer.server")

MAX_CONNECTIONS = 1024
NUM_REFUSED = 16
"""Maximum number of connections above the maximum that stay open until their clients have read the response."""
RESERVE = 48
"""Number of descriptors that are kept for what is opened later: 3 for the event loop, 2 for each of the processes of
templates and grammars and 6 more while one starts, NUM_REFUSED and a few that are accepted; the rest for libraries."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def with_max_connections(config: ServerConfig) -> ServerConfig:
    """Raise the soft limit of open files to the hard one, and return a configuration whose connections fit into it.

    Args:
        config: if it has no max_connections, the result has as many as fit, at most MAX_CONNECTIONS.

    Raises:
        NanoinferError: the connections do not fit.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        with suppress(OSError, ValueError):  # macOS refuses more than its own maximum
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            limit = hard
    others = len(os.listdir("/dev/fd")) + RESERVE
    most = MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else limit - others
    wanted = config.max_connections or max(1, min(MAX_CONNECTIONS, most))
    if limit != resource.RLIM_INFINITY and wanted > most:
        raise NanoinferError(
            f"max_connections={wanted} requires {wanted + others} open files and the limit is {limit}:"
            " lower --max-connections or raise the limit (ulimit -Hn)"
        )
    return replace(config, max_connections=wanted)


class ReportOnce:
    """Handles errors of an event loop: logs once that no connection can be accepted, others as the loop does itself.

    asyncio tries again after a second. Until then clients wait in the socket's queue.
    """

    def __init__(self) -> None:
        self._has_reported = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error. Called by the loop."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _SHORT:
            return loop.default_exception_handler(context)
        if not self._has_reported:
            self._has_reported = True
            log.error("no connection is accepted for the time being: %s: raise the limit (ulimit -Hn)", error.strerror)
