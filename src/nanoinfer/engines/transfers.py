"""What goes between the host and the device in a step of static shapes, and never makes one wait for the other.

Uploads go through pinned memory, whose pages the device reads by itself; tokens come back the same way, with an event
that says when they have arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StepInputs:
    """The tensors that calls of (R, n) tokens read (see slots.py). One table, so that an upload is one copy."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, tokens + 5, dtype=torch.int64, device=device)
        # What the table holds, less the padding's tokens; None: unknown.
        self._have: list[list[int]] | None = [[0] * (tokens + 5) for _ in range(rows)]
        self.given = self._table[:, :tokens]
        self.start, self.count, self.slots, self.wanted, self.sampler_slots = self._table[:, tokens:].unbind(1)

    def put(self, want: list[list[int]]) -> None:
        """Make the table hold `want`: given, start, count, slot, wanted, sampler_slot of each row."""
        if want != self._have:
            self.forget()
            self._table.copy_(upload(want, self._table.device))
            self._have = want

    def advanced(self) -> None:
        """Note that a call has added count to start."""
        for row in self._have or ():
            row[-5] += row[-4]

    def forget(self) -> None:
        """Note that nobody knows whether a call has: it was interrupted."""
        self._have = None


class PendingTokens:
    """Tokens on their way to the host: copied when the device has them, waited for when they are read."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, dict[int, int]]] = []
        self._events: list[torch.cuda.Event] = []

    def add(self, tokens: Tensor, rows: dict[int, int]) -> None:
        """Send for tokens, (R,): those of the batch's members that drew, member -> row."""
        here = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        here.copy_(tokens, non_blocking=True)
        if tokens.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tokens.device))  # not of the current device
            self._events.append(event)
        self._parts.append((here, rows))

    def read(self) -> list[int]:
        """Wait for the tokens and return them, in the batch's order."""
        for event in self._events:
            event.synchronize()
        found: dict[int, int] = {}
        for here, rows in self._parts:
            values = here.tolist()
            found.update({i: values[row] for i, row in rows.items()})
        return [found[i] for i in sorted(found)]


def upload(values: list[list[int]] | list[int], device: torch.device) -> Tensor:
    """Return integers as a tensor on the device, without waiting for it."""
    here = torch.tensor(values, dtype=torch.int64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def pick(x: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of x; x itself where that is all of them in order."""
    return x if rows == list(range(len(x))) else x[upload(rows, x.device)]
