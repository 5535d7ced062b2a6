"""The process of the server: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from types import FrameType

import anyio
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, escaped, printable, reason
from nanoinfer.server.access_log import AccessLog, configure_logging
from nanoinfer.server.app import build_app
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.connections import BoundedServer, uvicorn_options, with_max_connections
from nanoinfer.server.http import Refusal, SentResponse
from nanoinfer.server.service import served_names

log = logging.getLogger("nanoinfer.server")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound to the host and port, but does not listen yet.

    Raises:
        NanoinferError: the host is unknown, or the port is in use or not permitted.
    """
    where = f"{escaped(config.host)}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = min(
            found, key=lambda info: info[0] != socket.AF_INET
        )  # localhost has ::1, too
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, UnicodeError) as e:  # UnicodeError: a name that is too long
        raise NanoinferError(
            f"{where} cannot be listened on: {reason(e)}: choose another --host or --port (0: a free one)"
        ) from None
    return bound


def url(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


def serve(llm: AsyncLLM, config: ServerConfig, bound: socket.socket) -> None:
    """Serve a model until SIGTERM or SIGINT, then finish what runs within the time limit. A second SIGINT ends at once.

    SIGHUP writes the prefix cache, if it has a file.

    Args:
        llm: is closed at the end.
        config: options and limits.
        bound: from `bind`; is closed at the end.
    """
    with log_files(config) as access_log:
        config = with_max_connections(config)
        app = build_app(llm, config, access_log)
        names = served_names(llm.llm, config)
        if llm.llm.core.stored is not None:
            save = partial(Thread, target=_save_prefix_cache, args=(llm.llm,))
            signal.signal(signal.SIGHUP, lambda number, frame: save().start())
        try:
            asyncio.run(listen(app, config, bound, f"model: {', '.join(map(printable, names))}"))
        finally:
            bound.close()
            llm.shutdown()


def _save_prefix_cache(llm: LLM) -> None:
    try:
        log.info("prefix cache: %d sequences are written", llm.save_prefix_cache())
    except NanoinferError as e:
        log.error("%s", e)


@contextmanager
def log_files(config: ServerConfig) -> Iterator[AccessLog | None]:
    """Configure the log, and open the access log, if there is one, for the context."""
    configure_logging(config.log_level)
    access_log = AccessLog(config.access_log) if config.access_log is not None else None
    try:
        yield access_log
    finally:
        if access_log is not None:
            access_log.close()


async def listen(app: ASGIApp, config: ServerConfig, bound: socket.socket, about: str) -> None:
    """Answer requests until SIGTERM or SIGINT, as `serve` does.

    Args:
        app: answers them.
        config: with max_connections.
        bound: from `bind`.
        about: what is served, for the line that says that the server listens.

    Raises:
        KeyboardInterrupt: at the second SIGINT.
    """
    about = f"{about}; connections: {config.max_connections}"
    server = _Server(app, config, f"nanoinfer: listening on {url(bound)} ({about})")
    await server.serve(sockets=[bound])
    left = list(server.server_state.tasks)  # of requests that were not finished in time
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    if server.num_cut:
        log.warning("%d requests were ended after shutdown_timeout=%g seconds", server.num_cut, config.shutdown_timeout)
    if server.force_exit:
        raise KeyboardInterrupt


async def _import_all() -> None:
    """Import what requests would import, which fails when no file can be opened."""
    structured = ("llguidance", "nanoinfer.structured.check_worker", "nanoinfer.structured.masks")
    for name in ("concurrent.futures.thread", "importlib.metadata", *structured):
        with suppress(ImportError):  # an extra that is not installed: requests that need it are refused
            importlib.import_module(name)
    await anyio.sleep(0)  # anyio imports its backend in the first call


class _Server(BoundedServer):
    """uvicorn's server, without its log and with exit code 0 after a signal."""

    def __init__(self, app: ASGIApp, config: ServerConfig, ready: str) -> None:
        self._ready = ready
        self.num_cut = 0
        """Number of requests that did not end within the time limit of the shutdown."""
        super().__init__(
            uvicorn.Config(
                self._until_the_end(app),
                lifespan="off",
                **uvicorn_options(config),
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout),
            )
        )

    def _until_the_end(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers 503 to the requests that the shutdown's time limit has cancelled."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = SentResponse(send)
            try:
                await app(scope, receive, response)
            except asyncio.CancelledError:
                if not self.should_exit:
                    raise
                self.num_cut += 1
                if not response.status:
                    await Refusal(503, "the server has been shut down").send(send, scope)

        return answer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await _import_all()
        await super().startup(sockets)
        print(self._ready, file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals. uvicorn raises them again at the end, so that the exit code would be that of a kill."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; at the second SIGINT, end at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
