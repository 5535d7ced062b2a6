"""Overlap scheduling: the next step is launched before the tokens of this one are read.

    device   | step 1 | step 2 | step 3 |
    host       launch 2, read 1   launch 3, read 2

If tokens are sampled on the device, the device does not wait for the host to read them. A decision that depends on a
token's value (an end token, a stop string) takes effect one step late: the sequence samples one token too many, which
is discarded when it is read. Conditions known in advance (max_tokens, a full context, a sliding window) take effect in
the right step.

Covered: engines that derive from `CudaGraphEngine`, with a sampler on the device. Not covered, and run without overlap:
speculation, beam search, structured outputs, requests whose logits are read (until they are), those with parameters
that the device sampler does not support, and requests whose samples have not been forked yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from nanoinfer.core.step import batch_of
from nanoinfer.engines.base import Engine
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.work import ScheduledSequence, sampling_sequences

if TYPE_CHECKING:
    from nanoinfer.engines.cuda_graph import CudaGraphEngine
    from nanoinfer.engines.transfers import PendingTokens
    from nanoinfer.sampling.triton import TritonSampler

log = logging.getLogger("nanoinfer")


@dataclass
class InFlightStep:
    """A launched step whose tokens have not been read. A token < 0 means that logits were not finite."""

    work: list[ScheduledSequence]
    sequences: list[Sequence]
    """Those that sample, in the order of `tokens`."""
    tokens: PendingTokens
    since: float = 0.0
    """Time when the device began it: its launch, or the end of the step before. In seconds, on the core's clock."""


@dataclass(slots=True)
class SamplerSlot:
    """The slot of a sequence in the device's sampler."""

    number: int
    position: int
    """Number of output tokens in the sampler's state."""


class OverlapScheduler:
    """Launches steps that sample on the device. Engine and sampler are on the same device."""

    def __init__(self, engine: CudaGraphEngine, sampler: TritonSampler) -> None:
        self._engine = engine
        self._sampler = sampler
        self._slots: dict[Sequence, SamplerSlot] = {}
        self._free = list(reversed(range(sampler.num_slots)))
        self._host_sampled: set[Request] = set()
        """Requests that the device sampler does not support, or whose samples have not been forked."""

    def add(self, request: Request) -> None:
        """Register a request."""
        if len(request.sequences) > 1 or self._unsupported(request):
            self._host_sampled.add(request)

    def may_run(self) -> bool:
        """Return whether the device sampler can sample for all unfinished requests."""
        if self._host_sampled:
            self._host_sampled = {
                r for r in self._host_sampled if not r.finished and (self._unsupported(r) or not _forked(r))
            }
        return not self._host_sampled

    def _unsupported(self, request: Request) -> bool:
        first = request.sequences[0]
        reads = not request.samples or (request.prompt_reads is not None and request.prompt_reads.num_unread > 0)
        return reads or first.grammar is not None or self._sampler.covers(first) is not None

    def launch(self, work: list[ScheduledSequence]) -> InFlightStep:
        """Launch a step. `work` is from the scheduler, without forks. The sampled tokens count as in flight."""
        sequences = sampling_sequences(work)
        slots = [self._slot(s) for s in sequences]
        tokens = self._engine.step(batch_of(work), self._sampler.sample_slots, [slot.number for slot in slots])
        for s, slot in zip(sequences, slots, strict=True):
            slot.position += 1
            s.num_inflight_tokens += 1
        return InFlightStep(work, sequences, tokens)

    def _slot(self, sequence: Sequence) -> SamplerSlot:
        """Return a sequence's slot. Re-upload its state if tokens were sampled on the host since it was last used."""
        slot = self._slots.get(sequence)
        if slot is None:
            slot = self._slots[sequence] = SamplerSlot(self._free.pop(), -1)
        position = sequence.num_output_tokens + sequence.num_inflight_tokens
        if slot.position != position:
            assert not sequence.num_inflight_tokens, "an in-flight token cannot be uploaded to the sampler"
            self._sampler.assign(slot.number, sequence)
            slot.position = position
        return slot

    def forget(self, sequence: Sequence) -> None:
        """Free the slot of a finished sequence."""
        if (slot := self._slots.pop(sequence, None)) is not None:
            self._free.append(slot.number)

    def reset(self) -> None:
        """Free all slots, also after an exception in the middle of a call."""
        self._slots.clear()
        self._free = list(reversed(range(self._sampler.num_slots)))


def overlap_scheduler(engine: Engine, vocab_size: int, device: str) -> OverlapScheduler | None:
    """Return an overlap scheduler for the engine, which is warmed up, or None if it cannot overlap steps.

    The reason is logged.
    """
    if device == "cpu" or not engine.can_overlap:
        return None  # a step on a CPU is synchronous: there is nothing to overlap
    import torch

    from nanoinfer.sampling import triton

    if (why_not := triton.why_unavailable()) is not None:
        log.warning("overlap scheduling is disabled: the device sampler cannot run: %s", why_not)
        return None
    sampler = triton.TritonSampler(engine.limits.max_num_seqs, vocab_size, torch.device(device))
    ahead = cast("CudaGraphEngine", engine)
    ahead.warm_up(sampler.sample_slots)
    return OverlapScheduler(ahead, sampler)


def _forked(request: Request) -> bool:
    """Return whether all samples of a request have been forked or have finished."""
    return all(s.handle is not None or s.finish_reason is not None for s in request.sequences)
