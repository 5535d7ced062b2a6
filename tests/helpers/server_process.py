"""Start `nanoinfer serve` on a free port, for tests and clients."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY = re.compile(r"listening on (http://\S+)")


class ServerProcess:
    """A running server: its process, its URL, and the lines that it has written to stderr.

    Args:
        model: to serve.
        options: of `nanoinfer serve`.
        limits: commands of the shell that starts it, such as "ulimit -n 100".
        python: options of the interpreter.
    """

    def __init__(self, model: str | Path, *options: str, limits: str = "", python: Sequence[str] = ()) -> None:
        serve = ["-m", "nanoinfer", "serve", str(model), "--port", "0", *options]
        command = ["sh", "-c", f'{limits}\nexec "$0" "$@"', sys.executable, *python, *serve]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(180) or not self.url:  # with Ray on a busy machine, more than a minute
            self.process.kill()
            raise AssertionError(f"the server did not start: {self.lines}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if not self.url and (found := READY.search(line)):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait(self, timeout: float = 30) -> int:
        """Return the exit code of a process that ends."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code


@contextmanager
def serving(model: str | Path, *options: str, limits: str = "", python: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """Run a server; end it with SIGTERM."""
    server = ServerProcess(model, *options, limits=limits, python=python)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        assert server.process.stderr is not None
        server.process.stderr.close()


def wait_until(condition: Callable[[], bool], timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
