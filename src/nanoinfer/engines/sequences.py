"""The base class of all engines: handles, lengths, and the validation of batches. It does not import PyTorch.

Sequences of recurrent layers can be cut at some positions only (kv/states.py). `truncate` cuts at the last of them, and
the tokens from there on are processed again before the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.adapters import Adapter
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import DEFAULTS, PENDING, Handle, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.states import StatePool
from nanoinfer.utils import processes
from nanoinfer.utils.arrays import to_numpy

MIN_KEPT = 64
"""New tokens of a sequence after which its state is kept."""
MIN_SPLIT = 256
"""New tokens of a sequence from which on they are split, so that a state of a prefix is kept. It costs a step."""


class Sequences:
    """The open sequences of an engine. An engine derives from this class and manages its own KV cache."""

    survives_fork = True
    """Whether a forked child process can use the parent's engine; False for engines on a GPU."""
    can_overlap = False
    model: Any = None
    has_states = True
    """Whether the engine stores the states of recurrent layers, and does not compute them in each step."""

    def __init__(self, config: ModelConfig, limits: EngineLimits, options: EngineConfig = DEFAULTS) -> None:
        self.config = config
        self.limits = limits
        self._max_loras = options.max_loras if options.enable_lora else 0
        self.states = StatePool(limits.num_states) if config.recurrence and self.has_states else None
        self._tokens: dict[Handle, list[int]] = {}  # of sequences with states
        self._lengths: dict[Handle, int] = {}
        self._adapters: set[int] = set()
        self._adapter_of: dict[Handle, int] = {}  # 0: none
        self._next_handle = 0
        self._generation = processes.generation()
        self._before: dict[Handle, NDArray[np.float32]] = {}
        """Hidden states of the last step's tokens that were processed before the others of their sequences."""

    def open(self, adapter: int = 0) -> Handle:
        """Return an empty sequence."""
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
        """Append new tokens to open sequences and return logits, (sum(num_logits), V) float32."""
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
        """Return the greatest length, at most `length`, to which truncating a sequence computes no token again."""
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
        """Return the final hidden states of all new tokens of each sequence of the last step, with all_hidden."""
        rows, parts = to_numpy(self.hidden()), []
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            before = self._before.get(handle)
            own, rows = np.split(rows, [num_new - (0 if before is None else len(before))])
            parts.append(own if before is None else np.concatenate((before, own)))
        return parts

    def truncate(self, handle: Handle, length: int) -> None:
        """Remove the tokens from position `length` on."""
        have = self.length(handle)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= have:
            raise NanoinferError(f"truncate to {length!r}: sequence {handle} has {have} tokens")
        self._cut(handle, min(length, self._lengths[handle]))
        if self.states is not None:
            del self._tokens[handle][length:]

    def fork(self, handle: Handle) -> Handle:
        """Return a new sequence with the same tokens."""
        self.length(handle)
        child = self.open(self._adapter_of[handle])
        self._fork(handle, child)
        self._lengths[child] = self._lengths[handle]
        if self.states is not None:
            self.states.fork(handle, child)
            self._tokens[child] = self._tokens[handle].copy()
        return child

    def close(self, handle: Handle) -> None:
        """Free a sequence."""
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
        """Free blocks of the KV cache. Without a pool of blocks, every token counts as one."""
        return self.limits.max_num_cached_tokens - sum(self._lengths.values())

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        """Return how many free blocks extending a sequence by `num_new` tokens takes."""
        return self.num_to_process(handle, num_new)

    def num_to_process(self, handle: Handle, num_new: int) -> int:
        """Return how many tokens extending a sequence by `num_new` processes: those after a cut are among them."""
        return num_new + self.length(handle) - self._lengths[handle]

    def part_seconds(self) -> Mapping[str, float]:
        """Return an empty mapping: this engine does not measure its parts."""
        return {}

    def reset(self) -> None:
        """Close all sequences, also after an exception in the middle of a call."""
        self._reset()
        self._lengths.clear()
        self._adapter_of.clear()
        self._tokens.clear()
        if self.states is not None:
            self.states.clear()

    def load_adapter(self, adapter: Adapter) -> int:
        """Return the number of an adapter for `open`, from 1 on."""
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
        """Free an adapter."""
        if number not in self._adapters or number in self._adapter_of.values():
            why = "has open sequences: close them first" if number in self._adapters else "is not loaded"
            raise NanoinferError(f"adapter {number!r} {why}")
        self._adapters.remove(number)
        self._unload_adapter(number)

    def _advance(self, batch: StepBatch) -> None:
        """Add a step's tokens to the lengths. Beside `append_blocks`, no other code advances them."""
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            self._lengths[handle] += num_new

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
        if shape != ((len(batch.token_ids), self.config.n_embd) if self.config.mtp else None):
            raise NanoinferError(f"hidden states {shape} for {len(batch.token_ids)} tokens: only mtp blocks need them")
        if batch.token_ids and not (min(batch.token_ids) >= 0 and max(batch.token_ids) < self.config.vocab_size):
            bad = next(t for t in batch.token_ids if not 0 <= t < self.config.vocab_size)
            raise NanoinferError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    # Defined by derived engines -------------------------------------------------------------------------------

    def hidden(self) -> Any:
        """Return the final hidden states of the last step's logits; with all_hidden, of all its new tokens."""
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
