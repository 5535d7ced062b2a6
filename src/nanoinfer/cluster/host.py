"""The process that loads a model once and forks its replicas, which share its weights.

    python -m nanoinfer.cluster.host     a pickled HostSpec on standard input, which then stays open

A forked replica shares the memory of this process: weights, tokenizer and code are in memory once, and a replica adds
its KV cache and the pages that it modifies. This process opens the sockets on which the replicas listen: a request that
comes while a replica is replaced waits in the socket. Standard output has a line of JSON when the model is loaded, and
one, [number, runs], whenever a replica begins or ends. The end of standard input ends this process and the replicas.

Only engine native survives a fork. A model of another engine runs in this process: one replica, and loaded again if it
ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanoinfer.cluster.link import BACKLOG, serve
from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, reason
from nanoinfer.server.access_log import configure_logging
from nanoinfer.server.app import build_routes
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.service import served_names
from nanoinfer.utils.processes import end_with_parent

log = logging.getLogger("nanoinfer.server")

SHORT_LIFE_SEC = 5.0
"""A replica that ends earlier is replaced after a delay, which doubles each time: it may fail at once again."""
MAX_DELAY_SEC = 30.0
_POLL_SEC = 0.02


@dataclass(frozen=True)
class HostSpec:
    """The model of a host, and its replicas."""

    config: LLMConfig
    server: ServerConfig
    path: str
    """Beginning of the paths of the replicas' sockets, to which the number of the replica is added."""
    cores: Sequence[Sequence[int]]
    """Cores of each replica; empty: all."""


def main() -> None:
    """Load the model and run replicas until standard input ends."""
    try:
        spec: HostSpec = pickle.load(sys.stdin.buffer)
    except EOFError:  # the front ended before it sent it
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends the hosts
    configure_logging(spec.server.log_level)
    try:
        llm = LLM.from_config(spec.config)
        forks = llm.engine_name == "native" and "torch" not in sys.modules
        if len(spec.cores) > 1 and not forks:
            raise NanoinferError(
                f"replicas={len(spec.cores)} needs engine native, and the engine is"
                f" {llm.engine_name}: use --engine native"
            )
        names, replicas = served_names(llm, spec.server), _Replicas(llm, spec)
    except NanoinferError as e:
        return _report({"error": str(e)})
    except OSError as e:  # of the sockets: their folder ends with the front
        return _report({"error": reason(e)})
    except MemoryError:
        return _report({"error": "out of memory"})
    limits = llm.core.engine.limits
    _report({"names": names, "limits": [limits.max_num_seqs, limits.max_num_cached_tokens]})
    if forks:
        replicas.run()
    else:
        _report([0, True])
        asyncio.run(replicas.answer(0))


def _report(line: Any) -> None:
    with suppress(BrokenPipeError):  # the front has ended, and standard input, too
        print(json.dumps(line), flush=True)


class _Replicas:
    """Forks the replicas, and replaces those that end."""

    def __init__(self, llm: LLM, spec: HostSpec) -> None:
        self._llm, self._spec = llm, spec
        self._listeners = [socket.socket(socket.AF_UNIX) for _ in spec.cores]
        for number, listener in enumerate(self._listeners):
            listener.bind(f"{spec.path}{number}")
            listener.listen(BACKLOG)
        self._running: dict[int, tuple[int, float]] = {}  # pid -> number of the replica, and when it began
        self._due = dict.fromkeys(range(len(spec.cores)), 0.0)  # number -> when it is to be started
        self._delays = dict.fromkeys(self._due, 0.0)

    async def answer(self, number: int) -> None:
        """Be a replica: answer requests until standard input ends."""
        app, _ = build_routes(AsyncLLM.from_llm(self._llm), self._spec.server)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
        async with await serve(app, self._listeners[number]):
            await ended.wait()

    def run(self) -> None:
        """Run the replicas until standard input ends; they end with this process."""
        gc.collect()
        gc.freeze()  # else the first collection of each replica would write to, and so copy, all objects
        while not select.select([sys.stdin], [], [], _POLL_SEC)[0]:
            self._reap()
            for number in [n for n, due in self._due.items() if due <= time.monotonic()]:
                self._start(number)

    def _start(self, number: int) -> None:
        host = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:  # no process or memory is to be had
            self._plan(number, f"cannot be started: {reason(e)}", short=True)
            return
        if pid == 0:
            code = 1
            try:
                end_with_parent(host)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the host alone writes to the front
                if (cores := self._spec.cores[number]) and hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(0, cores)
                asyncio.run(self.answer(number))
                code = 0
            except BaseException as e:
                log.error(
                    "replica %d of %s has failed: %s", number, self._llm.model_name, type(e).__name__, exc_info=True
                )
            finally:
                os._exit(code)
        del self._due[number]
        self._running[pid] = number, time.monotonic()
        _report([number, True])

    def _reap(self) -> None:
        """Forget replicas that have ended, and plan their successors."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            number, began = self._running.pop(pid)
            _report([number, False])
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
            self._plan(number, f"has ended ({how})", short=time.monotonic() - began < SHORT_LIFE_SEC)

    def _plan(self, number: int, what: str, short: bool) -> None:
        """Plan the next start of a replica: after a delay if the last one was short."""
        self._delays[number] = min(MAX_DELAY_SEC, 2 * self._delays[number] or 1.0) if short else 0.0
        self._due[number] = time.monotonic() + self._delays[number]
        again = f"in {self._delays[number]:g} s" if short else "at once"
        log.warning("replica %d of %s %s: it is started again %s", number, self._llm.model_name, what, again)


if __name__ == "__main__":
    main()
