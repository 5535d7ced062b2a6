"""The process that loads a model once and forks its replicas, which share its weights.

    python -m nanoinfer.cluster.host     a pickled HostSpec on standard input, which then stays open

A forked replica shares the memory of this process: weights, tokenizer and code are in memory once, and a replica adds
its KV cache and the pages that it modifies. A replica that has ended is replaced in milliseconds. The end of standard
input ends this process and the replicas. The first line on standard output says whether the model is loaded.

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
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanoinfer.cluster.link import Replica
from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError
from nanoinfer.server.access_log import configure_logging
from nanoinfer.server.app import build_routes
from nanoinfer.server.config import ServerConfig
from nanoinfer.utils.files import reason
from nanoinfer.utils.processes import end_with_parent

log = logging.getLogger("nanoinfer.server")

SHORT_LIFE_SEC = 5.0
"""A replica that ends earlier is replaced after a delay, which doubles each time: it may fail at once again."""
MAX_DELAY_SEC = 30.0
_END_SEC = 5.0


@dataclass(frozen=True)
class HostSpec:
    """What a host runs."""

    config: LLMConfig
    server: ServerConfig
    address: str
    """Path of the front's socket."""
    model: int
    """Number of the model among those of the front."""
    generation: int
    """How often the model was loaded: the replicas of different hosts differ in it."""
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
    except NanoinferError as e:
        return _report({"error": str(e)})
    except MemoryError:
        return _report({"error": "out of memory"})
    _report({"loaded": llm.model_name})
    if forks:
        _Replicas(llm, spec).run()
    else:
        _run(llm, spec, 0)


def _report(line: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the front has ended, and standard input, too
        print(json.dumps(line), flush=True)


def _run(llm: LLM, spec: HostSpec, number: int) -> None:
    """Answer requests in this process until the front ends the connection."""
    app, service = build_routes(AsyncLLM.from_llm(llm), spec.server)
    limits = llm.core.engine.limits
    who = {
        "model": spec.model, "generation": spec.generation, "replica": number, "names": service.names,
        "max_num_seqs": limits.max_num_seqs, "max_num_tokens": limits.max_num_cached_tokens,
    }  # fmt: skip
    asyncio.run(Replica(app, who).run(spec.address))


class _Replicas:
    """Forks the replicas, and replaces those that end."""

    def __init__(self, llm: LLM, spec: HostSpec) -> None:
        self._llm, self._spec = llm, spec
        self._running: dict[int, tuple[int, float]] = {}  # pid -> number of the replica, and when it began
        self._due = dict.fromkeys(range(len(spec.cores)), 0.0)  # number -> when it is to be started
        self._delays = dict.fromkeys(self._due, 0.0)

    def run(self) -> None:
        """Run them until standard input ends."""
        self._wake = os.pipe()
        for end in self._wake:
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake[1])
        gc.collect()
        gc.freeze()  # else the first collection of each replica would write to, and so copy, all objects
        while True:
            for number in [n for n, due in self._due.items() if due <= time.monotonic()]:
                self._start(number)
            wait = min(self._due.values(), default=time.monotonic() + 3600.0) - time.monotonic()
            ready, _, _ = select.select([sys.stdin, self._wake[0]], [], [], max(0.0, wait))
            if sys.stdin in ready:
                break
            if ready:
                os.read(self._wake[0], 1 << 10)
            self._reap()
        self._end()

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
                self._become_replica(number)
                code = 0
            except BaseException as e:
                log.error(
                    "replica %d of %s has failed: %s", number, self._llm.model_name, type(e).__name__, exc_info=True
                )
            finally:
                os._exit(code)
        del self._due[number]
        self._running[pid] = number, time.monotonic()

    def _become_replica(self, number: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)  # the host alone holds the pipes from and to the front
        os.dup2(null, 1)
        for end in (*self._wake, null):
            os.close(end)
        if (cores := self._spec.cores[number]) and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        _run(self._llm, self._spec, number)

    def _reap(self) -> None:
        """Forget replicas that have ended, and plan their successors."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            number, began = self._running.pop(pid)
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
            self._plan(number, f"has ended ({how})", short=time.monotonic() - began < SHORT_LIFE_SEC)

    def _plan(self, number: int, what: str, short: bool) -> None:
        """Plan the next start of a replica: after a delay if the last one was short."""
        self._delays[number] = min(MAX_DELAY_SEC, 2 * self._delays[number] or 1.0) if short else 0.0
        self._due[number] = time.monotonic() + self._delays[number]
        again = f"in {self._delays[number]:g} s" if short else "at once"
        log.warning("replica %d of %s %s: it is started again %s", number, self._llm.model_name, what, again)

    def _end(self) -> None:
        """Wait for the replicas, whose connections the front has ended; end those that do not end."""
        until = time.monotonic() + _END_SEC
        while self._running and time.monotonic() < until:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                del self._running[pid]
            else:
                time.sleep(0.01)
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
