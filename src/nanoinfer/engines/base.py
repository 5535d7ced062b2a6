"""The interface of all engines, and what they share: handles, lengths, and the validation of batches.

Generation, speculation and scoring all call `engine.extend(batch)`:

    prefill                  extend by the whole prompt
    chunked prefill          extend by part of it
    decode                   extend by 1 token
    speculative verification extend by k + 1 tokens, truncate what was rejected
    n samples, beam search   fork, then extend the forks
    sliding window           truncate to 0, extend by the tokens that are kept
    scoring                  extend, requesting logits at every position

This module does not import PyTorch. A batch consists of plain integers, so that the scheduler can build one, and an
engine without PyTorch can run one.

Sequences of recurrent layers can be cut at some positions only (kv/states.py). `truncate` cuts at the last of them, and
the tokens from there on are processed again before the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NewType

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.states import StatePool
from nanoinfer.utils import processes
from nanoinfer.utils.arrays import to_numpy

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.checkpoints.adapters import Adapter

DEFAULTS = EngineConfig()
Handle = NewType("Handle", int)
"""Identifies one open sequence of one engine. Handles are not reused."""

PENDING = -1
"""Placeholder for the last token id of a sequence in `StaticShapeEngine.step`: the token that the previous step sampled
for the sequence, which is still on the device."""

SampleSlots = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Samples tokens on the device: logits (R, V) float32, sampler_slots (R,) int64, wanted (R,) int64, last, owners (R,)
int64 -> tokens (R,) int64. sampler_slots holds the sampler's slot index of each row. Rows with wanted == 0 are padding
and do not change the state of any slot. A wanted row's token, or 0 if it is < 0, is also stored in last[owners[row]];
the last element of `last` belongs to no row and may be overwritten. The function does not synchronize with the host, so
that a CUDA graph can capture it. A token < 0 means that the row's logits were not finite."""

MIN_KEPT = 64
"""New tokens of a sequence after which its state is kept."""
MIN_SPLIT = 256
"""New tokens of a sequence from which on they are split, so that a state of a prefix is kept. It costs a step."""


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
    """(len(token_ids), source_dim), of a model with `mtp`: for each new token the hidden state after that before it."""
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


class Engine:
    """Runs the model on the open sequences. Not thread-safe: calls must not overlap.

    Engines derive from this class, and manage their own KV cache: the methods at its end.
    """

    survives_fork = True
    """Whether a forked child process can use the parent's engine; False for engines on a GPU."""
    can_overlap = False
    """Whether it is a `CudaGraphEngine`, which keeps sampled tokens on its device."""
    model: Any = None
    """The reference model whose modules the steps run; None if the engine has its own kernels."""
    has_states = True
    """Whether the engine stores the states of recurrent layers, and does not compute them in each step."""

    def __init__(self, config: ModelConfig, limits: EngineLimits, options: EngineConfig = DEFAULTS) -> None:
        self.config = config
        self.limits = limits
        self._max_loras = options.max_loras if options.enable_lora else 0
        self.states = (
            StatePool(limits.num_states, limits.num_pending) if config.recurrence and self.has_states else None
        )
        self._tokens: dict[Handle, list[int]] = {}  # of sequences with states
        self._lengths: dict[Handle, int] = {}
        self._adapters: set[int] = set()
        self._adapter_of: dict[Handle, int] = {}  # 0: none
        self._next_handle = 0
        self._generation = processes.generation()
        self._before: dict[Handle, NDArray[np.float32]] = {}
        """Hidden states of the last step's tokens that were processed before the others of their sequences."""

    def open(self, adapter: int = 0) -> Handle:
        """Return an empty sequence, which an adapter that is loaded processes; 0: none does.

        Raises NanoinferError when max_num_seqs + max_idle_seqs are open, or if there is no such adapter."""
        if adapter and adapter not in self._adapters:
            raise NanoinferError(f"adapter {adapter!r} is not loaded: use a number that load_adapter returned")
        limit, idle = self.limits.max_num_seqs, self.limits.max_idle_seqs
        if len(self._lengths) >= limit + idle:
            beside = f" and {idle} idle ones" if idle else ""
            raise NanoinferError(
                f"{len(self._lengths)} sequences are open; the limit is max_num_seqs={limit}{beside}: close one, or"
                " raise max_num_seqs"
            )
        handle = Handle(self._next_handle)
        self._adapter_of[handle] = adapter
        self._open(handle)
        if self.states is not None:
            self.states.open(handle)
            self._tokens[handle] = []
        self._next_handle += 1
        self._lengths[handle] = 0
        return handle

    def extend(self, batch: StepBatch) -> Any:
        """Append new tokens to open sequences and return logits.

        Returns:
            (sum(num_logits), vocab_size) float32, rows in the batch's order: a NumPy array, or a tensor on the
            engine's device. It is valid until the next call of `extend`.

        Raises:
            NanoinferError: a handle is unknown or repeated, a token is outside the vocabulary, the counts do not
                add up, a sequence would exceed `block_size`, or the pool has too few free blocks. The engine's state
                is unchanged.
        """
        self._check(batch)
        if self.states is None:
            return self._extend(batch)
        with self._stepping(batch) as rest:
            return self._extend(rest)

    @contextmanager
    def _stepping(self, batch: StepBatch) -> Iterator[StepBatch]:
        """Yield the batch of a step. Of sequences with states, some tokens are processed before."""
        states = self.states
        if states is None:
            yield batch
            return
        first, rest = self._split(batch)
        self._before = {}
        try:
            for part in (first, rest):
                if part is first and part.handles:
                    self._extend(part)
                    if batch.all_hidden:
                        num_rest = dict(zip(rest.handles, rest.num_new, strict=True))
                        num_first = {h: n - num_rest[h] for h, n in zip(batch.handles, batch.num_new, strict=True)}
                        rows = zip(part.handles, self.new_hidden(part), strict=True)
                        self._before = {h: r[len(r) - num_first[h] :].copy() for h, r in rows}
                elif part is rest:
                    yield part
                for handle, num_new, num_logits in zip(part.handles, part.num_new, part.num_logits, strict=True):
                    if num_new >= MIN_KEPT:
                        states.keep(handle, inner=part is rest and not num_logits)
        except BaseException:  # what the states are is unknown: they are computed again
            for handle in batch.handles:
                self._cut(handle, 0)
            raise
        for handle, token_ids in _by_sequence(batch):
            self._tokens[handle] += token_ids

    def _split(self, batch: StepBatch) -> tuple[StepBatch, StepBatch]:
        """Return what is processed before a step, and the step: tokens after a cut, and prompts up to a border."""
        first, rest = (StepBatch(hidden_only=only, all_hidden=batch.all_hidden) for only in (True, batch.hidden_only))
        for (handle, token_ids), num_logits in zip(_by_sequence(batch), batch.num_logits, strict=True):
            again = self._tokens[handle][self._lengths[handle] :]
            if PENDING in again:
                raise NanoinferError(f"sequence {handle}: a token that was sampled on the device cannot be read again")
            split = _border(token_ids, self.config.eos_token_ids)
            if num_logits > len(token_ids) - split:
                split = 0
            if again or split:
                first.add(handle, again + token_ids[:split], 0)
            rest.add(handle, token_ids[split:], num_logits)
        return first, rest

    def cut(self, handle: Handle, length: int) -> int:
        """Return the greatest length, at most `length`, to which truncating a sequence computes no token again.

        It is `length` itself but for recurrent layers, whose states are kept at some positions: if such a sequence is
        truncated elsewhere, its next step computes the tokens in between again.
        """
        if self.states is None:
            return length
        return self.states.cut(handle, min(length, self._lengths[handle]))

    def _cut(self, handle: Handle, length: int) -> None:
        """Remove the tokens from position `length` on."""
        if self.states is not None:
            length = self.cut(handle, length)
            self.states.truncate(handle, length)
        self._truncate(handle, length)
        self._lengths[handle] = length

    def length(self, handle: Handle) -> int:
        """Return the number of tokens in a sequence."""
        try:
            return self._lengths[handle] if self.states is None else len(self._tokens[handle])
        except (KeyError, TypeError):
            raise NanoinferError(f"handle {handle!r} is not an open sequence") from None

    def new_hidden(self, batch: StepBatch) -> list[NDArray[np.float32]]:
        """Return the final hidden states of all new tokens of each sequence, (num_new, n_embd) each, on the host.

        Args:
            batch: of the last `extend`, with all_hidden.
        """
        rows, parts = to_numpy(self.hidden()), []
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            before = self._before.get(handle)
            own, rows = np.split(rows, [num_new - (0 if before is None else len(before))])
            parts.append(own if before is None else np.concatenate((before, own)))
        return parts

    def truncate(self, handle: Handle, length: int) -> None:
        """Remove the tokens from position `length` on, 0 <= length <= self.length(handle)."""
        have = self.length(handle)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= have:
            raise NanoinferError(f"truncate to {length!r}: sequence {handle} has {have} tokens")
        self._cut(handle, min(length, self._lengths[handle]))
        if self.states is not None:
            del self._tokens[handle][length:]

    def fork(self, handle: Handle) -> Handle:
        """Return a new sequence with the same tokens and adapter. Raises NanoinferError as `open`."""
        self.length(handle)
        child = self.open(self._adapter_of[handle])
        self._fork(handle, child)
        self._lengths[child] = self._lengths[handle]
        if self.states is not None:
            self.states.fork(handle, child)
            self._tokens[child] = self._tokens[handle].copy()
        return child

    def close(self, handle: Handle) -> None:
        """Free a sequence. Its handle is invalid afterwards."""
        self.length(handle)
        self._close(handle)
        if self.states is not None:
            self.states.close(handle)
            del self._tokens[handle]
        del self._lengths[handle], self._adapter_of[handle]

    @property
    def handles(self) -> Collection[Handle]:
        """The open sequences."""
        return self._lengths.keys()

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no open sequence uses. An engine without blocks counts tokens as blocks of 1."""
        return self.limits.max_num_cached_tokens - sum(self._lengths.values())

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        """Return how many free blocks extending a sequence by `num_new` tokens takes, >= 0.

        The copy of a partly filled last block that the sequence shares with a fork is included. A step fits if the sum
        over its sequences is at most `num_free_blocks`.
        """
        return self.num_to_process(handle, num_new)

    def num_to_process(self, handle: Handle, num_new: int) -> int:
        """Return how many tokens extending a sequence by `num_new` processes: those after a cut are among them."""
        return num_new + self.length(handle) - self._lengths[handle]

    def part_seconds(self) -> Mapping[str, float]:
        """Return the seconds spent in each part of the model over all steps so far; empty if not measured."""
        return {}

    def reset(self) -> None:
        """Close all sequences. This also restores an engine that an exception interrupted in the middle of a call."""
        self._reset()
        self._lengths.clear()
        self._adapter_of.clear()
        self._tokens.clear()
        if self.states is not None:
            self.states.clear()

    def load_adapter(self, adapter: Adapter) -> int:
        """Return the number of an adapter for `open`, from 1 on.

        Raises NanoinferError when max_loras are loaded, or if the engine was built without enable_lora."""
        free = [n for n in range(1, self._max_loras + 1) if n not in self._adapters]
        if not free:
            limit = f"max_loras={self._max_loras} are" if self._max_loras else "none may be, without enable_lora=True,"
            raise NanoinferError(f"{len(self._adapters)} adapters are loaded; {limit} the limit")
        try:
            self._load_adapter(free[0], adapter)
        except BaseException:
            self._unload_adapter(free[0])
            raise
        self._adapters.add(free[0])
        return free[0]

    def unload_adapter(self, number: int) -> None:
        """Free an adapter. Its number may be that of another one afterwards. Raises NanoinferError if a sequence has
        it."""
        if number not in self._adapters or number in self._adapter_of.values():
            why = "has open sequences: close them first" if number in self._adapters else "is not loaded"
            raise NanoinferError(f"adapter {number!r} {why}")
        self._adapters.remove(number)
        self._unload_adapter(number)

    def _advance(self, batch: StepBatch) -> None:
        """Add a step's tokens to the lengths. Beside `append_blocks`, no other code advances them."""
        if self.config.backbone is None:
            for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
                self._lengths[handle] += num_new

    @property
    def lengths(self) -> dict[Handle, int]:
        """The number of tokens in the cache of each open sequence. It follows the engine; do not modify."""
        return self._lengths

    def borrow(self, owner: Engine) -> None:
        """Let the engine of an assistant have the sequences of its model's: steps of one token each append nothing."""
        self._lengths, self._adapter_of = owner.lengths, defaultdict(int)  # no adapter is for an assistant

    def _check(self, batch: StepBatch) -> None:
        """Raise NanoinferError if the batch is invalid. Called before the engine's state changes."""
        if not self.survives_fork and self._generation != processes.generation():
            raise NanoinferError(
                "this process was forked from the one that created the engine and cannot use its GPU memory: load the"
                " model in the process that uses it, and start that process with multiprocessing's method spawn"
            )
        handles, num_new, num_logits = batch.handles, batch.num_new, batch.num_logits
        if not len(handles) == len(num_new) == len(num_logits) or len(set(handles)) != len(handles):
            raise NanoinferError(
                f"batch of {len(handles)} handles ({len(set(handles))} different), {len(num_new)} num_new and"
                f" {len(num_logits)} num_logits: pass one of each for every sequence, each sequence once"
            )
        for handle, new, wanted in zip(handles, num_new, num_logits, strict=True):
            have = self.length(handle)
            if new < 1 or not 0 <= wanted <= new:
                raise NanoinferError(
                    f"sequence {handle}: num_new={new}, num_logits={wanted}: num_new must be >= 1, and num_logits in"
                    f" [0, num_new]"
                )
            if have + new > self.limits.block_size:
                raise NanoinferError(
                    f"sequence {handle}: {have} tokens and {new} new ones exceed the context length"
                    f" {self.limits.block_size}: truncate the sequence first"
                )
        if sum(num_new) != len(batch.token_ids):
            raise NanoinferError(f"num_new adds up to {sum(num_new)}, but there are {len(batch.token_ids)} token_ids")
        shape = None if batch.previous is None else batch.previous.shape
        if shape != ((len(batch.token_ids), self.config.source_dim) if self.config.mtp else None):
            raise NanoinferError(f"hidden states {shape} for {len(batch.token_ids)} tokens: only mtp blocks need them")
        if batch.token_ids and not (min(batch.token_ids) >= 0 and max(batch.token_ids) < self.config.vocab_size):
            bad = next(t for t in batch.token_ids if not 0 <= t < self.config.vocab_size)
            raise NanoinferError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    # Defined by derived engines -------------------------------------------------------------------------------

    def hidden(self) -> Any:
        """Return the final hidden states of the last `extend`: the outputs of the final layer norm.

        Returns:
            (sum(num_logits), n_embd) float32, one row for each row of the logits, in the same kind of array; with
            all_hidden, one for each new token. The logits are the output head applied to these rows, up to the
            rounding of a quantized head. Valid until the next call of `extend`.
        """
        raise NotImplementedError

    def _extend(self, batch: StepBatch) -> Any:
        """`extend` for a batch that was checked."""
        raise NotImplementedError

    def _load_adapter(self, number: int, adapter: Adapter) -> None:
        raise NotImplementedError

    def _unload_adapter(self, number: int) -> None:
        raise NotImplementedError

    def _open(self, handle: Handle) -> None:
        raise NotImplementedError

    def _truncate(self, handle: Handle, length: int) -> None:
        raise NotImplementedError

    def _fork(self, parent: Handle, child: Handle) -> None:
        raise NotImplementedError

    def _close(self, handle: Handle) -> None:
        raise NotImplementedError

    def _reset(self) -> None:
        raise NotImplementedError


def _by_sequence(batch: StepBatch) -> Iterator[tuple[Handle, list[int]]]:
    """Yield the new tokens of each sequence."""
    for handle, count, end in zip(batch.handles, batch.num_new, accumulate(batch.num_new), strict=True):
        yield handle, batch.token_ids[end - count : end]


def _border(token_ids: list[int], ends: tuple[int, ...]) -> int:
    """Return after how many new tokens a state is to be kept, less than their number; 0: after none.

    It is where the next request of a conversation probably differs: after the last end of a message, or else at the
    last border of a block.
    """
    if len(token_ids) < MIN_SPLIT:
        return 0
    ended = (i for i in range(len(token_ids) - 1, 0, -1) if token_ids[i - 1] in ends)
    return next(ended, (len(token_ids) - 1) // KV_BLOCK * KV_BLOCK)
