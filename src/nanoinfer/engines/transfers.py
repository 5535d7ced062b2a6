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
        columns = tokens + 7
        self._table = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        # Contents of the table, without the tokens of padding; None: unknown.
        self._have: list[list[int]] | None = [[0] * columns for _ in range(rows)]
        self._num_advanced = 0
        """Steps since the host's copy was up to date."""
        self.given = self._table[:, :tokens]
        self.state_row, self.num_pending = self._table[:, tokens : tokens + 2].unbind(1)
        self.start, self.count, self.slots, self.wanted, self.sampler_slots = self._table[:, tokens + 2 :].unbind(1)

    def put(self, want: list[list[int]]) -> None:
        """Upload `want`, the columns of each row in the order of static_shapes.py, if the table differs from it."""
        if self._num_advanced:
            for row in self._have or ():
                row[-5] += row[-4] * self._num_advanced
            self._num_advanced = 0
        if want != self._have:
            self.invalidate()
            self._table.copy_(upload(want, self._table.device))
            self._have = want

    def advance(self) -> None:
        """Note that a step added count to start on the device."""
        self._num_advanced += 1

    def invalidate(self) -> None:
        """Invalidate the host's copy of the table, after an interrupted step."""
        self._have, self._num_advanced = None, 0


class PendingTokens:
    """Sampled tokens that are being copied to the host asynchronously; `read` waits for them."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._parts: list[tuple[Tensor, list[tuple[int, int]]]] = []
        self._events: list[torch.cuda.Event] = []

    def add(self, tokens: Tensor, places: list[tuple[int, int]]) -> None:
        """Start copying tokens, (R,), to the host. places: (index in the result, row) of each."""
        here = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        here.copy_(tokens, non_blocking=True)
        if tokens.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tokens.device))  # not the current device's stream
            self._events.append(event)
        self._parts.append((here, places))

    def read(self) -> list[int]:
        """Wait for the tokens and return them, in the batch's order."""
        for event in self._events:
            event.synchronize()
        found = [0] * self._num_tokens
        for here, places in self._parts:
            values = here.tolist()
            for i, row in places:
                found[i] = values[row]
        return found


def upload(values: list[list[int]] | list[int], device: torch.device) -> Tensor:
    """Return integers as a tensor on the device, without waiting for the copy."""
    here = torch.tensor(values, dtype=torch.int64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def select(rows: list[int], device: torch.device) -> slice | Tensor:
    """Return an index of some rows of a tensor on the device: a slice if they are consecutive, which uploads nothing.

    [2, 3, 4] -> slice(2, 5)
    """
    first = rows[0] if rows else 0
    whole = slice(first, first + len(rows))
    return whole if rows == list(range(whole.start, whole.stop)) else upload(rows, device)
