"""Engines that are wrong in one way each, for tests/engines/test_first_use.py: a child process imports them by name."""

from __future__ import annotations

import os
import time
from typing import Any

from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.static import StaticEngine


class Shifted(StaticEngine):
    """Its logits are those of `static`, but for one of a later step."""

    def extend(self, batch: StepBatch) -> Any:
        """Return the logits."""
        logits = super().extend(batch).clone()
        if batch.num_new == [1, 1]:
            logits[1, 3] += logits.std()
        return logits


class NotFinite(StaticEngine):
    """One of its logits is NaN."""

    def extend(self, batch: StepBatch) -> Any:
        """Return the logits."""
        logits = super().extend(batch).clone()
        logits[0, 0] = float("nan")
        return logits


class Aborts(StaticEngine):
    """It ends its process."""

    def extend(self, batch: StepBatch) -> Any:
        """End the process."""
        os.abort()


class Raises(StaticEngine):
    """It raises."""

    def extend(self, batch: StepBatch) -> Any:
        """Raise an error."""
        raise RuntimeError("an illegal memory access was encountered")


class Waits(StaticEngine):
    """It never returns."""

    def extend(self, batch: StepBatch) -> Any:
        """Wait for ever."""
        time.sleep(3600)
