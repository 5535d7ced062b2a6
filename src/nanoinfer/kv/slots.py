"""A KV cache in slots: two tensors with one full-length slot for each sequence.

Open sequences always occupy slots 0, 1, ..., so that a batch of all of them is a view of the cache and not a gathered
copy. Closing a sequence moves the last slot into the freed one.

    slot 0  [k k k k k . . . .]   5 tokens
    slot 1  [k k k . . . . . .]   3 tokens; the rest is masked, and zeroed so that it holds no NaN
    slot 2  [. . . . . . . . .]   free
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanoinfer.config import ModelConfig
from nanoinfer.kv.tensors import allocate


class SlotCache:
    """The keys and values of all layers, `k` and `v`, each (L, slots, K, columns, D) with K = n_kv_head.

    Args:
        config: shape of the model.
        num_slots: number of sequences.
        columns: tokens of each sequence, block_size or more.
        dtype: dtype of keys and values.
        device: device of keys and values.

    Raises:
        NanoinferError: the device does not have enough memory.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.n_layer, num_slots, config.n_kv_head, columns, config.head_dim)
        self.k, self.v = allocate(shape, dtype, device, f"{num_slots} sequences")
        self._slots: dict[int, int] = {}

    def slot(self, handle: int) -> int:
        """Return the current slot of a sequence. Closing another sequence may change it."""
        return self._slots[handle]

    def open(self, handle: int) -> int:
        """Assign the next slot to a sequence and return it."""
        self._slots[handle] = len(self._slots)
        return self._slots[handle]

    def close(self, handle: int, lengths: Mapping[Any, int]) -> tuple[int, int]:
        """Free a sequence's slot and move the last slot there.

        Args:
            handle: the sequence.
            lengths: length of each open sequence in tokens, this one included.

        Returns:
            (from, to): the slot that was moved, and its new place; equal if the freed slot was the last.
        """
        hole, length = self._slots.pop(handle), lengths[handle]
        last = len(self._slots)
        moved = next((h for h, slot in self._slots.items() if slot == last), None)
        if moved is not None:
            self.clear(hole, 0, length)
            length = lengths[moved]
            self.copy(last, hole, length)
            self._slots[moved] = hole
        self.clear(last, 0, length)
        return last, hole

    @torch.inference_mode()
    def reset(self) -> None:
        """Free all slots."""
        self._slots.clear()
        self.k.zero_()
        self.v.zero_()

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another slot."""
        for cache in (self.k, self.v):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    @torch.inference_mode()
    def clear(self, slot: int, start: int, stop: int) -> None:
        """Zero the positions [start, stop) of a slot, so that its next sequence does not read a masked NaN."""
        for cache in (self.k, self.v):
            cache[:, slot, :, start:stop] = 0
