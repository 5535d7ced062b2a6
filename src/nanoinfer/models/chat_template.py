"""Chat templates: turn a list of messages into the text of a prompt, by the Jinja template that comes with a model.

A template is a program from an untrusted file. Jinja's sandbox hides Python's internals from it, but bounds neither
time nor memory: one filter or one multiplication can ask for any amount of both inside a single call, where no hook of
the interpreter runs. So a child process renders it (chat_template_worker.py), under limits of the operating system. It
is started at the first rendering (about 60 ms), keeps the compiled template, and is replaced if a limit ended it.

Covered: what `apply_chat_template` of transformers gives a template (docs/chat.md). Not covered: continuing the last
message.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoinfer.checks import show
from nanoinfer.errors import NanoinferError
from nanoinfer.files import escaped, reason

MAX_TEMPLATE = 1 << 20  # characters; those of today have up to 30,000
MAX_OUTPUT = 4 << 20  # characters
MEMORY_BYTES = 512 << 20
CPU_SEC = 2.0
WAIT_SEC = 30.0  # for an answer: on a busy machine, CPU_SEC take longer
_INHERITED = ("LD_LIBRARY_PATH", "TZ")  # of the environment, which may hold secrets


class ChatTemplate:
    """A chat template. Thread-safe: one rendering at a time.

    Args:
        source: the Jinja template.
        special_tokens: variables of each rendering: {"bos_token": "<s>", ...}.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if not isinstance(source, str) or not source:
            raise NanoinferError(f"chat_template={show(source)} is not a Jinja template")
        if len(source) > MAX_TEMPLATE:
            raise NanoinferError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE}")
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._worker: _Worker | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of a conversation.

        Args:
            messages: as `chat_messages.as_conversation` returns them.
            variables: of the template, such as add_generation_prompt; they replace special tokens of the same name.

        Raises:
            NanoinferError: the template refuses the messages, has an error, or exceeds a limit; or a value cannot be
                given to a template.
        """
        given = {"messages": messages, "tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            request = json.dumps(given, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as e:
            raise NanoinferError(f"the messages cannot be given to the chat template: {reason(e)}") from None
        if self._pid != os.getpid():  # forked: the worker answers the parent
            self._pid, self._lock, self._worker = os.getpid(), threading.Lock(), None
        with self._lock:
            worker, self._worker = self._worker or _Worker(self.source), None
            answer = worker.ask(request)  # an exception leaves no worker behind: the next call starts one
            self._worker = worker
        if (text := answer.get("text")) is not None:
            return str(text)
        what = "refuses the messages" if answer["refused"] else "cannot be rendered"
        raise NanoinferError(f"the chat template {what}: {escaped(answer['error'])}")


class _Worker:
    """A child process that renders one template. Deleting the object ends it."""

    def __init__(self, source: str) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("chat_template_worker.py")), *_folders()]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,  # Ctrl-C is for this process
            )
        except (OSError, ValueError) as e:
            raise NanoinferError(f"no process can be started to render the chat template: {reason(e)}") from None
        work = {"template": source, "max_output": MAX_OUTPUT, "memory_bytes": MEMORY_BYTES, "cpu_sec": CPU_SEC}
        self._first = json.dumps(work).encode() + b"\n"

    def ask(self, request: bytes) -> dict[str, Any]:
        """Return the answer to a request. Raises NanoinferError if a limit has ended the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer is then missing, too
            for content in (self._first, request):
                left = memoryview(content)
                while left:
                    left = left[self._process.stdin.write(left) :]
        self._first = b""
        line = self._read_line(time.monotonic() + WAIT_SEC)
        if not line:
            raise NanoinferError(f"the chat template cannot be rendered: {self._ended()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read_line(self, deadline: float) -> bytes:
        """Return a line; empty if the process has ended, or does not answer in time."""
        assert self._process.stdout is not None
        source, content = self._process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while not content.endswith(b"\n"):
            if (left := deadline - time.monotonic()) <= 0 or not poll.poll(left * 1000):
                return b""
            if not (piece := os.read(source, 1 << 16)):
                return b""
            content += piece
        return bytes(content)

    def _ended(self) -> str:
        """End the process and return why there is no answer."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.5)
            if code == -signal.SIGPROF:
                return f"it needs more than {CPU_SEC:g} s of CPU time"
            return f"its process ended with code {code}"
        self._process.kill()
        self._process.wait()
        return f"there was no answer within {WAIT_SEC:.0f} s"

    def __del__(self) -> None:
        if (process := getattr(self, "_process", None)) is not None:
            process.stdin.close()
            process.stdout.close()
            process.kill()
            process.wait()


def _folders() -> list[str]:
    """Return the folders that the worker imports jinja2 from."""
    folders = []
    for name in ("jinja2", "markupsafe"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise NanoinferError(f"{name} is not installed: chat templates need it; install nanoinfer again")
        folders.append(str(Path(found.origin).parents[1]))
    return list(dict.fromkeys(folders))
