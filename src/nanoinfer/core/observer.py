"""The core's profiling hook: it is called around each call of the engine and the sampler. profiling/ implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

ENGINE = "engine"
SAMPLER = "sampler"


class Observer(Protocol):
    """Observes the steps of a core. Set `core.observer` between two steps."""

    def span(self, part: str) -> AbstractContextManager[object]:
        """Return a context manager that is entered before a call of `part` (ENGINE or SAMPLER), and exited after it."""


class NoObserver:
    """The default observer; does nothing."""

    def span(self, part: str) -> AbstractContextManager[object]:
        """Return a context manager that does nothing."""
        return nullcontext()
