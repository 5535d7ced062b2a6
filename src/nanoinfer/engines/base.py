"""The interface of all engines. Generation, speculation and scoring all call `engine.extend(batch)`:

    prefill                  extend by the whole prompt
    chunked prefill          extend by part of it
    decode                   extend by 1 token
    speculative verification extend by k + 1 tokens, truncate what was rejected
    n samples, beam search   fork, then extend the forks
    sliding window           truncate to 0, extend by the tokens that are kept
    scoring                  extend, requesting logits at every position

This module does not import PyTorch. A batch consists of plain integers, so that the scheduler can build one, and an
engine without PyTorch can run one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType, Protocol

from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from nanoinfer.checkpoints.adapters import Adapter
    from nanoinfer.engines.transfers import PendingTokens
    from nanoinfer.utils.arrays import Array

DEFAULTS = EngineConfig()
Handle = NewType("Handle", int)
"""Identifies one open sequence of one engine. Handles are not reused."""

PENDING = -1
"""Placeholder for the last token id of a sequence in `OverlapEngine.step`: the token that the previous step sampled for
the sequence, which is still on the device."""


@dataclass
class StepBatch:
    """New tokens for some open sequences. The batch is ragged; the order is free; each sequence appears at most once.

    Example: two tokens for sequence 0 and one for sequence 4, logits after each last token:

        StepBatch(handles=[0, 4], token_ids=[17, 5, 99], num_new=[2, 1], num_logits=[1, 1])
    """

    handles: list[Handle] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """New tokens of handles[0], then of handles[1], and so on. Length sum(num_new)."""
    num_new: list[int] = field(default_factory=list)
    """Number of new tokens of each sequence, >= 1."""
    num_logits: list[int] = field(default_factory=list)
    """Number of last new tokens of each sequence to return logits for, 0 <= num_logits[i] <= num_new[i]."""
    hidden_only: bool = False
    """Whether only `Engine.hidden` is read: `extend` then returns no logits, (0, vocab_size), and may omit the head."""
    previous: NDArray[np.float32] | None = None
    """(len(token_ids), n_embd), of a model with `mtp`: for each new token the hidden state after the one before it."""
    all_hidden: bool = False
    """Whether `Engine.new_hidden` is read: hidden states are kept of all new tokens, not only of those with logits."""

    def add(self, handle: Handle, token_ids: list[int], num_logits: int = 1) -> None:
        """Append one sequence's new tokens."""
        self.handles.append(handle)
        self.token_ids += token_ids
        self.num_new.append(len(token_ids))
        self.num_logits.append(num_logits)

    @property
    def num_hidden(self) -> list[int]:
        """Number of last new tokens of each sequence whose hidden states are kept."""
        return self.num_new if self.all_hidden else self.num_logits


class Engine(Protocol):
    """Runs the model on the open sequences. Not thread-safe: calls must not overlap."""

    config: ModelConfig
    limits: EngineLimits
    can_overlap: bool
    """Whether the engine is an `OverlapEngine`."""
    model: nn.Module | None
    """The reference model whose modules the steps run; None if the engine has its own kernels."""

    def open(self, adapter: int = 0) -> Handle:
        """Return an empty sequence, which an adapter that is loaded processes; 0: none does.

        Raises NanoinferError when max_num_seqs + max_idle_seqs are open, or if there is no such adapter."""

    def load_adapter(self, adapter: Adapter) -> int:
        """Return the number of an adapter for `open`, from 1 on.

        Raises NanoinferError when max_loras are loaded, or if the engine was built without enable_lora."""

    def unload_adapter(self, number: int) -> None:
        """Free an adapter. Its number may be that of another one afterwards. Raises NanoinferError if a sequence has
        it."""

    def extend(self, batch: StepBatch) -> Array:
        """Append new tokens to open sequences and return logits.

        Returns:
            (sum(num_logits), vocab_size) float32, rows in the batch's order: a NumPy array, or a tensor on the
            engine's device. It is valid until the next call of `extend`.

        Raises:
            NanoinferError: a handle is unknown or repeated, a token is outside the vocabulary, the counts do not
                add up, a sequence would exceed `block_size`, or the pool has too few free blocks. The engine's state
                is unchanged.
        """

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no open sequence uses. An engine without blocks counts tokens as blocks of 1."""

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        """Return how many free blocks extending a sequence by `num_new` tokens takes, >= 0.

        The copy of a partly filled last block that the sequence shares with a fork is included. A step fits if the sum
        over its sequences is at most `num_free_blocks`.
        """

    def part_seconds(self) -> Mapping[str, float]:
        """Return the seconds spent in each part of the model over all steps so far; empty if not measured."""

    def hidden(self) -> Array:
        """Return the final hidden states of the last `extend`: the outputs of the final layer norm.

        Returns:
            (sum(num_logits), n_embd) float32, one row for each row of the logits, in the same kind of array. The logits
            are the output head applied to these rows, up to the rounding of a quantized head. Valid until the next
            call of `extend`.
        """

    def new_hidden(self, batch: StepBatch) -> list[NDArray[np.float32]]:
        """Return the final hidden states of all new tokens of each sequence, (num_new, n_embd) each, on the host.

        Args:
            batch: of the last `extend`, with all_hidden.
        """

    def truncate(self, handle: Handle, length: int) -> None:
        """Remove the tokens from position `length` on, 0 <= length <= self.length(handle)."""

    def cut(self, handle: Handle, length: int) -> int:
        """Return the greatest length, at most `length`, to which truncating a sequence computes no token again.

        It is `length` itself but for recurrent layers, whose states are kept at some positions: if such a sequence is
        truncated elsewhere, its next step computes the tokens in between again.
        """

    def fork(self, handle: Handle) -> Handle:
        """Return a new sequence with the same tokens and adapter. Raises NanoinferError as `open`."""

    def close(self, handle: Handle) -> None:
        """Free a sequence. Its handle is invalid afterwards."""

    def length(self, handle: Handle) -> int:
        """Return the number of tokens in a sequence."""

    @property
    def handles(self) -> Collection[Handle]:
        """The open sequences."""

    def reset(self) -> None:
        """Close all sequences. This also restores an engine that an exception interrupted in the middle of a call."""


class BlockEngine(Engine, Protocol):
    """An engine whose blocks of keys and values can be copied to another process."""

    @property
    def block_format(self) -> str:
        """What the bytes of a block depend on, beside the model."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, of KV_BLOCK tokens."""

    def read_blocks(self, handle: Handle, first: int, end: int) -> NDArray[np.uint8]:
        """Return copies of the blocks [first, end) of a sequence, (end - first, block_bytes)."""

    def append_blocks(self, handle: Handle, num_tokens: int, blocks: NDArray[np.uint8]) -> None:
        """Append tokens to a sequence without computing them.

        Args:
            handle: the sequence.
            num_tokens: number of new tokens.
            blocks: (n, block_bytes): what `read_blocks` returned for a sequence with the same tokens, from the block of
                the first new token on.

        Raises:
            NanoinferError: the pool has too few free blocks, or the tokens exceed the context.
        """


SampleSlots = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Samples tokens on the device: logits (R, V) float32, sampler_slots (R,) int64, wanted (R,) int64, last, owners (R,)
int64 -> tokens (R,) int64. sampler_slots holds the sampler's slot index of each row. Rows with wanted == 0 are padding
and do not change the state of any slot. A wanted row's token, or 0 if it is < 0, is also stored in last[owners[row]];
the last element of `last` belongs to no row and may be overwritten. The function does not synchronize with the host, so
that a CUDA graph can capture it. A token < 0 means that the row's logits were not finite."""


class OverlapEngine(Engine, Protocol):
    """An engine that keeps sampled tokens on its device, so that the next step can start before the host reads them."""

    def step(self, batch: StepBatch, sample: SampleSlots, sampler_slots: list[int]) -> PendingTokens:
        """Append new tokens to open sequences and sample the next token of each sequence with num_logits 1.

        Args:
            batch: as for `extend`, with num_logits 0 or 1. A sequence's last token may be PENDING.
            sample: samples the tokens; must be the same function at every call.
            sampler_slots: the sampler's slot of each sequence with num_logits 1, in the batch's order.

        Returns:
            the sampled tokens, in the batch's order.

        Raises:
            NanoinferError: as `extend`; or a token is PENDING, but the sequence's last step sampled none.
        """

    def warm_up(self, sample: SampleSlots) -> None:
        """Prepare the steps that will sample with `sample`, so that none waits for a compilation or a capture later."""
