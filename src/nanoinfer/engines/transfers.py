"""Transfers between host and device in a step with static shapes. Neither side waits for the other.

Uploads go through pinned memory, which the device reads asynchronously. Sampled tokens are copied back the same way;
an event marks the end of the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StepInputs:
    """The input tensors of steps of (R, n) tokens (static_shapes.py): columns of one table, uploaded in one copy."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, tokens + 5, dtype=torch.int64, device=device)
        # Contents of the table, without the tokens of padding; None: unknown.
        self._have: list[list[int]] | None = [[0] * (tokens + 5) for _ in range(rows)]
        self.given = self._table[:, :tokens]
        self.start, self.count, self.slots, self.wanted, self.sampler_slots = self._table[:, tokens:].unbind(1)

    def put(self, want: list[list[int]]) -> None:
        """Upload `want` if the table differs from it: given, start, count, slot, wanted, sampler_slot of each row."""
        if want != self._have:
            self.invalidate()
            self._table.copy_(upload(want, self._table.device))
            self._have = want

    def advance(self) -> None:
        """Add count to start in the host's copy, after a step did so on the device."""
        for row in self._have or ():
            row[-5] += row[-4]

    def invalidate(self) -> None:
        """Invalidate the host's copy of the table, after an interrupted step."""
        self._have = None


class PendingTokens:
    """Sampled tokens that are being copied to the host asynchronously; `read` waits for them."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, dict[int, int]]] = []
        self._events: list[torch.cuda.Event] = []

    def add(self, tokens: Tensor, rows: dict[int, int]) -> None:
        """Start copying tokens, (R,), to the host. rows: index in the batch -> row, for each sequence that sampled."""
        here = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        here.copy_(tokens, non_blocking=True)
        if tokens.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tokens.device))  # not the current device's stream
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
    """Return integers as a tensor on the device, without waiting for the copy."""
    here = torch.tensor(values, dtype=torch.int64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def pick(x: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of x, or x itself if they are all of its rows in order."""
    return x if rows == list(range(len(x))) else x[upload(rows, x.device)]
