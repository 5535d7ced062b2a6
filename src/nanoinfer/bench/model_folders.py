"""Temporary folders with the measured models, which all backends load from.

A folder is removed at the end of the run; one that a killed run left behind, whose lock is free, by the next run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nanoinfer.bench import prompts
from nanoinfer.bench.case import Case

PREFIX = "nanoinfer-bench-"


class ModelFolders(ExitStack):
    """The folders of the models that a call measures, each written once, with passages from `text` or the model.

    Those with random weights remain in the folder `keep`, if there is one, for other calls.
    """

    def __init__(self, text: Path | None, log: Callable[[str], None], keep: Path | None = None) -> None:
        super().__init__()
        self._text, self._log, self._keep = text, log, keep
        self._folders: dict[str, Path] = {}

    def folder(self, cases: list[Case]) -> Path:
        """Return the folder for some cases of one model, with passages for prompts if a case needs them."""
        from nanoinfer.checkpoints import huggingface
        from nanoinfer.checkpoints.load import load_model

        model = cases[0].model
        if model not in self._folders:
            keep = self._keep if model.startswith("random:") else None
            folder = self.enter_context(temporary_folder()) if keep is None else keep / model.replace(":", "-")
            self._folders[model] = folder
            if not (folder / "config.json").exists():  # float32, which every backend loads or exports from
                huggingface.save(load_model(model).take(), folder)
        folder = self._folders[model]
        if any(c.workload in ("text", "copy") for c in cases) and not prompts.read(folder):
            self._log("preparing passages for prompts ...")
            prompts.write(folder, model, self._text)
        return folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder, which is locked and removed at the end; remove those of killed runs first."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(old, fcntl.LOCK_NB):  # OSError: locked, or of another user
            if any(old.iterdir()):  # an empty one may be about to be locked
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as made, _locked(Path(made)):
        yield Path(made)


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """Hold the lock of a folder; with LOCK_NB raise OSError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)
