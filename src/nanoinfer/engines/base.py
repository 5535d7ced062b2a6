"""The one interface: everything that generates text calls `engine.extend(batch)`.

    prefill                  extend by the whole prompt
    chunked prefill          extend by part of it
    decode                   extend by 1 token
    speculative verification extend by k + 1 tokens, truncate what was rejected
    n samples, beam search   fork, then extend the forks
    sliding window           truncate to 0, extend by the tokens that are kept
    scoring                  extend, asking for logits at every position

No tensor library is imported here: a batch is plain integers, so that policy can build one and an engine
without torch can take one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType, Protocol

from nanoinfer.config import EngineLimits, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

Handle = NewType("Handle", int)
"""Names one open sequence of one engine. Never reused."""

PENDING = -1
"""In the token ids of `OverlapEngine.step`, last of its sequence: the token that the last step drew for the sequence,
still on the device."""


@dataclass
class StepBatch:
    """New tokens for some open sequences: ragged, in any order, each sequence at most once.

    Example: two tokens for sequence 0 and one for sequence 4, logits after each last token:

        StepBatch(handles=[0, 4], token_ids=[17, 5, 99], num_new=[2, 1], num_logits=[1, 1])
    """

    handles: list[Handle] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Flat: the new tokens of handles[0], then of handles[1], ... Length sum(num_new)."""
    num_new: list[int] = field(default_factory=list)
    """New tokens of each sequence, >= 1."""
    num_logits: list[int] = field(default_factory=list)
    """For how many of its last new tokens each sequence wants logits, 0 <= num_logits[i] <= num_new[i]."""

    def add(self, handle: Handle, token_ids: list[int], num_logits: int = 1) -> None:
        """Append one sequence's new tokens."""
        self.handles.append(handle)
        self.token_ids += token_ids
        self.num_new.append(len(token_ids))
        self.num_logits.append(num_logits)


class Engine(Protocol):
    """A rung of the ladder. Not thread-safe: one caller at a time."""

    config: ModelConfig
    limits: EngineLimits
    can_overlap: bool
    """Whether it is an `OverlapEngine`."""
    model: nn.Module | None
    """The reference model that the steps run, module by module; None where they do not."""

    def open(self) -> Handle:
        """Return an empty sequence. Raises NanoinferError when max_num_seqs are open."""
        ...

    def extend(self, batch: StepBatch) -> Tensor:
        """Append new tokens to open sequences and return logits.

        Returns:
            (sum(num_logits), vocab_size) float32 on the engine's device, rows in the batch's order. The
            tensor is the caller's until the next call of `extend`.

        Raises:
            NanoinferError: an unknown or repeated handle, a token outside the vocabulary, counts that do not
                add up, or a sequence past `block_size`. Nothing has changed then.
        """
        ...

    def part_seconds(self) -> Mapping[str, float]:
        """Return where the time of all steps so far went, by part of the model; empty where it is not measured."""
        ...

    def hidden(self) -> Tensor:
        """Return what the logits of the last `extend` were made from: the outputs of the final layer norm.

        Returns:
            (sum(num_logits), n_embd) float32 on the engine's device, the rows of `extend`'s logits: they are the
            output head times these, but for the rounding of a head in fewer bits. The caller's until the next
            call of `extend`.
        """
        ...

    def truncate(self, handle: Handle, length: int) -> None:
        """Forget the tokens from position `length` on, 0 <= length <= self.length(handle)."""
        ...

    def fork(self, handle: Handle) -> Handle:
        """Return a new sequence with the same past. Raises NanoinferError when max_num_seqs are open."""
        ...

    def close(self, handle: Handle) -> None:
        """Free a sequence; its handle is unknown afterwards."""
        ...

    def length(self, handle: Handle) -> int:
        """Return the number of tokens in a sequence."""
        ...

    @property
    def handles(self) -> Collection[Handle]:
        """The open sequences."""
        ...

    def reset(self) -> None:
        """Close all sequences. Unlike the other calls it also works after an exception in the middle of one of them."""
        ...


Draw = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""Draws tokens on the device: logits (R, V) float32, sampler_slots (R,) int64 and wanted (R,) bool -> (R,) int64.
sampler_slots has the sampler's slot index of each row. Rows that are not wanted are padding: their slots stay as they
are. It does not synchronize with the host, so that a CUDA graph can capture it. A token < 0: the row's logits were not
finite."""


class TokenFuture(Protocol):
    """Tokens that are being drawn."""

    def read(self) -> list[int]:
        """Wait for the tokens of a step and return them."""
        ...


class OverlapEngine(Engine, Protocol):
    """An engine that keeps the drawn tokens on its device, so that the next step can start before they are read."""

    def step(self, batch: StepBatch, draw: Draw, sampler_slots: list[int]) -> TokenFuture:
        """Append new tokens to open sequences and draw the next one of each sequence that wants logits.

        Args:
            batch: as for `extend`; num_logits 0 or 1, and a sequence's last token may be PENDING.
            draw: the same function at every call.
            sampler_slots: of the sequences that draw, in the batch's order.

        Returns:
            the tokens drawn, in the batch's order, to be read when they are needed.

        Raises:
            NanoinferError: as `extend`; or PENDING where the sequence's last step drew nothing.
        """
        ...
