"""The hook of the core: what is told when a step enters the engine and the sampler. profiling/ measures with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

ENGINE = "engine"
SAMPLER = "sampler"


class Observer(Protocol):
    """Observes the steps of a core: `core.observer = ...`, between two steps."""

    def span(self, part: str) -> AbstractContextManager[object]:
        """Return what is entered before a call of the engine or the sampler, and left after it.

        Args:
            part: ENGINE or SAMPLER.
        """
        ...


class NoObserver:
    """Observes nothing."""

    def span(self, part: str) -> AbstractContextManager[object]:
        """Return what does nothing."""
        return nullcontext()
