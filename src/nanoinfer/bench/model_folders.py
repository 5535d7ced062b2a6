"""The models that a call of `nanoinfer bench` measures: their shapes, and folders that all backends load from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nanoinfer.bench import prompts
from nanoinfer.bench.case import Case
from nanoinfer.config import ModelConfig
from nanoinfer.roofline.shapes import find_shape


class Models(ExitStack):
    """The folders of the models that a call measures, each written once, and removed at the end.

    Args:
        text: where the prompts of the workloads text and copy come from; None: the model makes them up.
        say: told what takes time.
    """

    def __init__(self, text: Path | None, say: Callable[[str], None]) -> None:
        super().__init__()
        self._text, self._say = text, say
        self._folders: dict[str, Path] = {}

    def config(self, model: str) -> ModelConfig:
        """Return a model's shape."""
        return find_shape(model)

    def folder(self, cases: list[Case]) -> Path:
        """Return the folder for some cases of one model, with passages for prompts where they want them."""
        model = cases[0].model
        if model not in self._folders:
            self._folders[model] = self.enter_context(_weights(model))
        folder = self._folders[model]
        if any(c.workload in ("text", "copy") for c in cases) and not prompts.read(folder):
            self._say("taking passages for prompts ...")
            prompts.write(folder, model, self._text)
        return folder


@contextmanager
def _weights(model: str) -> Iterator[Path]:
    """A folder with the model's weights in float32, which every backend loads or exports from."""
    from nanoinfer.models.checkpoints import huggingface
    from nanoinfer.models.checkpoints.load import load_model

    with tempfile.TemporaryDirectory(prefix="nanoinfer-bench-") as folder:
        huggingface.save(load_model(model).gpt, Path(folder))
        yield Path(folder)
