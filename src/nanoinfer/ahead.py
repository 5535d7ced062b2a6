"""Running ahead: the next step is launched before the tokens of this one are read.

    device   | step 1 | step 2 | step 3 |
    host       launch 2, read 1   launch 3, read 2

A device that draws its own tokens need not wait for the host to see them. What the host decides from a token (that its
text ends) comes one step late: that text has then drawn one token too many, which is dropped when it is read. What it
can know beforehand (max_tokens, a full context, a window that slides) comes in time.

Covered: engines that are `RunsAhead`, with a sampler on the device. Not covered, so that steps are read at once:
speculation, and requests that the sampler refuses or whose samples have not forked yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from nanoinfer.engines.base import Engine, Pending, RunsAhead, StepBatch
from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.scheduling.scheduler import Work, drawing
from nanoinfer.scheduling.sequence import Request, Sequence

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger("nanoinfer")


class DeviceSampler(Protocol):
    """Draws tokens on the device. What it knows of a text is kept in a seat: parameters, counts, the position."""

    num_seats: int

    def covers(self, row: SamplerRow) -> str | None:
        """Return why it cannot draw for such a row, or None."""
        ...

    def seat(self, seat: int, row: SamplerRow) -> None:
        """Take down all that matters of a row; its tokens so far included."""
        ...

    def draw(self, logits: Tensor, seats: Tensor, wanted: Tensor) -> Tensor:
        """Draw a token for each row that is wanted, and note it in its seat: see `engines.base.Draw`."""
        ...


@dataclass(frozen=True)
class Flight:
    """A step whose tokens have not been read."""

    work: list[Work]
    tokens: Pending

    def read(self) -> list[tuple[Sequence, int]]:
        """Wait for the tokens; return them with their sequences. A token < 0: the logits were not finite."""
        return list(zip(drawing(self.work), self.tokens.read(), strict=True))


@dataclass
class _Seat:
    number: int
    position: int
    """Output tokens that the sampler knows of."""


class Ahead:
    """Launches steps that draw on the device.

    Args:
        engine: keeps drawn tokens on its device.
        sampler: draws there.
    """

    def __init__(self, engine: RunsAhead, sampler: DeviceSampler) -> None:
        self._engine = engine
        self._sampler = sampler
        self._seats: dict[Sequence, _Seat] = {}
        self._free = list(reversed(range(sampler.num_seats)))
        self._held_back: set[Request] = set()

    def add(self, request: Request) -> None:
        """Take note of a request."""
        if len(request.sequences) > 1 or self._refuses(request):
            self._held_back.add(request)

    def may_run(self) -> bool:
        """Return whether all unfinished requests can be drawn for on the device."""
        if self._held_back:
            self._held_back = {r for r in self._held_back if not r.finished and (self._refuses(r) or not _forked(r))}
        return not self._held_back

    def _refuses(self, request: Request) -> bool:
        return self._sampler.covers(cast(SamplerRow, request.sequences[0])) is not None

    def launch(self, work: list[Work], batch: StepBatch) -> Flight:
        """Start a step.

        Args:
            work: from the scheduler, without forks.
            batch: the same for the engine.
        """
        seats = [self._seat(s) for s in drawing(work)]
        flight = Flight(work, self._engine.step(batch, self._sampler.draw, [seat.number for seat in seats]))
        for seat in seats:
            seat.position += 1
        return flight

    def _seat(self, sequence: Sequence) -> _Seat:
        """Return the seat of a sequence, up to date; one that was drawn for elsewhere meanwhile sits down again."""
        seat = self._seats.get(sequence)
        if seat is None:
            seat = self._seats[sequence] = _Seat(self._free.pop(), -1)
        position = sequence.num_output_tokens + sequence.num_pending
        if seat.position != position:
            assert not sequence.num_pending, "a token that has not been read cannot be told to the sampler"
            self._sampler.seat(seat.number, cast(SamplerRow, sequence))
            seat.position = position
        return seat

    def forget(self, sequence: Sequence) -> None:
        """Free what was kept for a sequence that has ended."""
        if (seat := self._seats.pop(sequence, None)) is not None:
            self._free.append(seat.number)

    def reset(self) -> None:
        """Free what was kept for all sequences, also where an exception came in the middle of a call."""
        self._seats.clear()
        self._free = list(reversed(range(self._sampler.num_seats)))


def run_ahead(engine: Engine, vocab_size: int, device: torch.device) -> Ahead | None:
    """Return what launches steps ahead of the host, or None where nothing can (said in the log).

    Args:
        engine: may be `RunsAhead`.
        vocab_size: tokens that may be drawn.
        device: the engine's.
    """
    if device.type != "cuda" or not hasattr(engine, "step"):
        return None  # on a CPU there is nothing to run ahead of
    from nanoinfer.sampling import fused

    if (why_not := fused.why_unavailable()) is not None:
        log.warning("every token is waited for: the sampler on the device cannot run: %s", why_not)
        return None
    sampler = fused.FusedSampler(engine.limits.max_num_seqs, vocab_size, device)
    return Ahead(cast(RunsAhead, engine), sampler)


def _forked(request: Request) -> bool:
    """Return whether all of a request's samples have a past of their own."""
    return all(s.handle is not None or s.finish_reason is not None for s in request.sequences)
