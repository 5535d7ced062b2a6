"""Temporary folders with the measured models, which all backends load from.

A process of its own removes each folder when every process that uses it has ended, however it ended: a benchmark
that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nanoinfer.bench import prompts
from nanoinfer.bench.case import Case


class ModelFolders(ExitStack):
    """The folders of the models that a call measures, each written once, and removed at the end.

    Args:
        text: source of the prompts of the workloads text and copy; None: the model samples them.
        log: receives a line about what takes time.
    """

    def __init__(self, text: Path | None, log: Callable[[str], None]) -> None:
        super().__init__()
        self._text, self._log = text, log
        self._folders: dict[str, Path] = {}

    def folder(self, cases: list[Case]) -> Path:
        """Return the folder for some cases of one model, with passages for prompts if a case needs them."""
        model = cases[0].model
        if model not in self._folders:
            self._folders[model] = self.enter_context(_weights(model))
        folder = self._folders[model]
        if any(c.workload in ("text", "copy") for c in cases) and not prompts.read(folder):
            self._log("preparing passages for prompts ...")
            prompts.write(folder, model, self._text)
        return folder


@contextmanager
def _weights(model: str) -> Iterator[Path]:
    """A folder with the model's weights in float32, which every backend loads or exports from."""
    from nanoinfer.models.checkpoints import huggingface
    from nanoinfer.models.checkpoints.load import load_model

    with shared_folder() as folder:
        huggingface.save(load_model(model).take(), folder)
        yield folder


_REMOVE = """
import fcntl, os, shutil, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder, removed when this process leaves the context and all that `hold` the folder have ended."""
    folder = Path(tempfile.mkdtemp(prefix="nanoinfer-bench-"))
    lock = hold(folder)
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVE, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not reach it
    )
    try:
        yield folder
    finally:
        os.close(lock)
        with contextlib.suppress(subprocess.TimeoutExpired):  # while a process holds the folder, the remover waits
            remover.wait(timeout=10)
        if remover.poll() is not None:
            shutil.rmtree(folder, ignore_errors=True)  # the remover was killed, or could not lock


def hold(folder: Path) -> int:
    """Keep a shared folder until this process ends, or closes the descriptor that is returned."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
