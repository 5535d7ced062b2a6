"""Request ids, the access log, and what is logged of an exception.

The access log has one JSON object in each line. It has neither prompts nor outputs, headers, keys or the query:

    {"time": "2026-11-22T08:00:00.123Z", "request_id": "...", "client": "127.0.0.1", "method": "POST",
     "path": "/v1/completions", "status": 200, "duration_sec": 0.42, "prompt_tokens": 5, "completion_tokens": 60}

A status of 0 means that the client disconnected before the response began; "complete": false that it did not get all.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.errors import NanoinferError, escaped, reason
from nanoinfer.server.http import SentResponse, unexpected

log = logging.getLogger("nanoinfer.server")

MAX_LINES = 10_000  # that wait to be written; more are discarded
_MAX_PATH_CHARS = 256
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class AccessLog:
    """Writes lines to a file in a thread of its own, so that no request waits for the disk.

    Lines that cannot be written, because the disk is full or too slow, are discarded.

    Args:
        path: a file to append to; "-" is standard output.

    Raises:
        NanoinferError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = sys.stdout if path == "-" else os.fdopen(os.open(path, flags, 0o640), "a", encoding="utf-8")
        except (OSError, ValueError) as e:
            raise NanoinferError(f"--access-log {escaped(path)} cannot be opened: {reason(e)}") from None
        lines: queue.Queue[logging.LogRecord] = queue.Queue(MAX_LINES)
        self._queued, self._listener = QueueHandler(lines), QueueListener(lines, logging.StreamHandler(self._file))
        self._listener.start()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Queue one line."""
        self._queued.handle(logging.makeLogRecord({"msg": json.dumps(entry)}))

    def close(self) -> None:
        """Write what is queued."""
        with suppress(queue.Full):
            self._listener.stop()
        if self._file is not sys.stdout:
            with suppress(OSError):
                self._file.close()


def count_tokens(scope: Scope, num_prompt: int, num_output: int) -> None:
    """Note a request's token counts for its line in the access log. Routes call it for each prompt."""
    tokens = scope.setdefault("state", {}).setdefault("num_tokens", [0, 0])
    tokens[0] += num_prompt
    tokens[1] += num_output


class LogRequests:
    """ASGI middleware, the outermost: gives each request an id, and calls `records` at its end.

    An exception that comes this far is a response, too: uvicorn would answer with a text of its own.

    The id is that of the header X-Request-Id, if it is well-formed, or a random one. It is in scope["state"] as
    "request_id" and in the response's header. Only HTTP and lifespan events pass.

    Args:
        app: the application.
        records: get the entry of the access log of each request.
    """

    def __init__(self, app: ASGIApp, *records: Callable[[Mapping[str, Any]], None]) -> None:
        self.app, self._records = app, records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request an id, pass it on, and record it."""
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, ids = time.perf_counter(), [value for name, value in scope["headers"] if name == b"x-request-id"]
        well_formed = len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0])
        request_id = str(ids[0], "ascii") if well_formed else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        added = ((b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff"))
        response = SentResponse(send, added)
        try:
            await self.app(scope, receive, response)
        except Exception as e:
            if response.status:
                raise  # uvicorn ends the connection
            await unexpected(e, scope).send(response, scope)
        finally:
            entry = {
                "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "request_id": request_id,
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"][:16],
                "path": scope["path"][:_MAX_PATH_CHARS],
                "status": response.status,
                "duration_sec": round(time.perf_counter() - started, 6),
            }
            if (tokens := state.get("num_tokens")) is not None:
                entry["prompt_tokens"], entry["completion_tokens"] = tokens
            if not response.is_complete:
                entry["complete"] = False
            for record in self._records:
                record(entry)


class OneLine(logging.Formatter):
    """Formats a record on one line, without a traceback unless the level is debug.

    Args:
        tracebacks: whether to add them.
    """

    def __init__(self, tracebacks: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with the exception's type instead of the traceback."""
        if self._tracebacks:
            return super().format(record)
        plain = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "stack_info": None})
        text = " ".join(super().format(plain).split())
        return f"{text}: {record.exc_info[0].__name__}" if record.exc_info and record.exc_info[0] else text


def configure_logging(level: str) -> None:
    """Log what nanoinfer reports to standard error, from a level on: one of `LOG_LEVELS`.

    If standard error cannot be written, for example because the disk is full, the record is lost and nothing else.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(level == "debug"))
    for name in ("nanoinfer", "asyncio", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        # uvicorn reports what clients do, which the access log has, and exceptions that were reported before.
        logger.setLevel("CRITICAL" if name == "uvicorn" and level != "debug" else level.upper())
