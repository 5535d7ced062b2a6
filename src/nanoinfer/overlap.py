"""Overlap scheduling: the next step is launched before the tokens of this one are read.

    device   | step 1 | step 2 | step 3 |
    host       launch 2, read 1   launch 3, read 2

A device that draws its own tokens does not wait for the host to read them. What the host decides from a token (that
the sequence ends) comes one step late: the sequence has then drawn one token too many, which is dropped when it is
read. What is known beforehand (max_tokens, a full context, a window that slides) comes in time.

Covered: engines that are `OverlapEngine`, with a sampler on the device. Not covered, so that steps are read at once:
speculation, and requests that the sampler refuses or whose samples have not forked yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from nanoinfer.engines.base import Engine, OverlapEngine, StepBatch, TokenFuture
from nanoinfer.sampling.sampler import SamplerRow
from nanoinfer.scheduling.scheduler import Work, drawing
from nanoinfer.scheduling.sequence import Request, Sequence

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger("nanoinfer")


class DeviceSampler(Protocol):
    """Draws tokens on the device. Each sequence has a slot: its parameters, token counts and position."""

    num_slots: int

    def covers(self, row: SamplerRow) -> str | None:
        """Return why it cannot draw for such a row, or None."""
        ...

    def assign(self, slot: int, row: SamplerRow) -> None:
        """Upload the state of a row to a slot: parameters, and the tokens so far."""
        ...

    def draw(self, logits: Tensor, sampler_slots: Tensor, wanted: Tensor) -> Tensor:
        """Draw a token for each row that is wanted, and update its slot: see `engines.base.Draw`."""
        ...


@dataclass(frozen=True)
class InFlightStep:
    """A step whose tokens have not been read."""

    work: list[Work]
    tokens: TokenFuture

    def read(self) -> list[tuple[Sequence, int]]:
        """Wait for the tokens; return them with their sequences. A token < 0: the logits were not finite."""
        return list(zip(drawing(self.work), self.tokens.read(), strict=True))


@dataclass
class SamplerSlot:
    """The slot of a sequence in the device's sampler."""

    number: int
    position: int
    """Output tokens that the sampler knows of."""


class OverlapScheduler:
    """Launches steps that draw on the device.

    Args:
        engine: keeps drawn tokens on its device.
        sampler: draws there.
    """

    def __init__(self, engine: OverlapEngine, sampler: DeviceSampler) -> None:
        self._engine = engine
        self._sampler = sampler
        self._slots: dict[Sequence, SamplerSlot] = {}
        self._free = list(reversed(range(sampler.num_slots)))
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
        return self._sampler.covers(request.sequences[0]) is not None

    def launch(self, work: list[Work], batch: StepBatch) -> InFlightStep:
        """Start a step.

        Args:
            work: from the scheduler, without forks.
            batch: the same for the engine.
        """
        slots = [self._slot(s) for s in drawing(work)]
        in_flight = InFlightStep(work, self._engine.step(batch, self._sampler.draw, [slot.number for slot in slots]))
        for slot in slots:
            slot.position += 1
        return in_flight

    def _slot(self, sequence: Sequence) -> SamplerSlot:
        """Return a sequence's slot, its state uploaded again if tokens were sampled on the host since."""
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._slots[sequence] = SamplerSlot(self._free.pop(), -1)
        position = sequence.num_output_tokens + sequence.num_inflight_tokens
        if slot.position != position:
            assert not sequence.num_inflight_tokens, "a token that has not been read cannot be told to the sampler"
            self._sampler.assign(slot.number, sequence)
            slot.position = position
        return slot

    def forget(self, sequence: Sequence) -> None:
        """Free what was kept for a sequence that has ended."""
        if (slot := self._slots.pop(sequence, None)) is not None:
            self._free.append(slot.number)

    def reset(self) -> None:
        """Free what was kept for all sequences, also where an exception came in the middle of a call."""
        self._slots.clear()
        self._free = list(reversed(range(self._sampler.num_slots)))


def overlap_scheduler(engine: Engine, vocab_size: int, device: torch.device) -> OverlapScheduler | None:
    """Return what launches steps ahead of the host, or None where nothing can (said in the log).

    Args:
        engine: may be `OverlapEngine`.
        vocab_size: tokens that may be drawn.
        device: the engine's.
    """
    if device.type != "cuda" or not engine.can_overlap:
        return None  # on a CPU a step is computed when it is called: there is nothing to overlap
    from nanoinfer.sampling import triton

    if (why_not := triton.why_unavailable()) is not None:
        log.warning("every token is waited for: the sampler on the device cannot run: %s", why_not)
        return None
    sampler = triton.TritonSampler(engine.limits.max_num_seqs, vocab_size, device)
    return OverlapScheduler(cast(OverlapEngine, engine), sampler)


def _forked(request: Request) -> bool:
    """Return whether all of a request's samples have a past of their own."""
    return all(s.handle is not None or s.finish_reason is not None for s in request.sequences)
