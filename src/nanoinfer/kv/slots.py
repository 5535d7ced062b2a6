"""The memory of keys and values, and a KV cache in slots: two tensors with one full-length slot for each sequence.

Closing a sequence leaves a hole, which the next opened sequence takes. `compact` fills the remaining holes before a
step: open sequences then occupy slots 0, 1, ..., so that a batch of all of them is a view of the cache and not a
gathered copy. Closing many sequences at once copies nothing.

    slot 0  [k k k k k . . . .]   5 tokens
    slot 1  [x x . . . . . . .]   a hole; `compact` moves slot 2 here
    slot 2  [k k k . . . . . .]   3 tokens; the rest is masked, and zeroed so that it holds no NaN
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError


class LayerTensors:
    """The keys, or the values, of all layers. Layers of equal sizes are parts of one tensor.

    Args:
        config: shape of the model. A layer that attends to the keys of another one has that one's tensor.
        shape_of: returns the shape for a layer of K heads of D values.
        dtype: of all of them.
        device: of all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape_of: Callable[[int, int], Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        of: dict[tuple[int, int], list[int]] = {}
        for i in config.kv_layers:
            of.setdefault((config.at(i).n_kv_head, config.at(i).head_dim), []).append(i)
        self.whole = [
            torch.zeros(len(layers), *shape_of(*heads), dtype=dtype, device=device) for heads, layers in of.items()
        ]
        """Each (layers of these sizes, *shape)."""
        own: dict[int, Tensor] = dict(
            zip((i for layers in of.values() for i in layers), (x for t in self.whole for x in t), strict=True)
        )
        self._layers = {i: own[at] for i in range(config.n_layer) if (at := config.kv_layer(i)) in own}

    def __getitem__(self, layer: int) -> Tensor:
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.whole)


def allocate(
    config: ModelConfig,
    shape_of: Callable[[int, int], Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    what: str,
) -> tuple[LayerTensors, LayerTensors]:
    """Return tensors of zeros for keys and values.

    They are zero, because a masked value is still multiplied by 0, and 0 * NaN is NaN.

    Args:
        config: shape of the model.
        shape_of: of `LayerTensors`.
        dtype: of each of the two.
        device: of each of the two.
        what: what they hold, for the error message.

    Raises:
        NanoinferError: the device does not have enough memory.
    """
    try:
        return LayerTensors(config, shape_of, dtype, device), LayerTensors(config, shape_of, dtype, device)
    except RuntimeError:  # torch's out-of-memory errors, on CPU and CUDA
        of_heads = torch.empty(shape_of(1, 1), device="meta").numel()
        need = of_heads * config.kv_bytes_per_token(dtype.itemsize)
        raise NanoinferError(
            f"keys and values of {what} need {need:,} bytes, more than {device} has free: lower max_num_seqs or"
            " kv_cache_memory"
        ) from None


class SlotCache:
    """The keys and values of all layers, `k` and `v`, each (slots, K, columns, D) with K = n_kv_head.

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
        self.k, self.v = allocate(
            config, lambda heads, width: (num_slots, heads, columns, width), dtype, device, f"{num_slots} sequences"
        )
        self._tensors = (*self.k.whole, *self.v.whole)
        self._slots: dict[int, int] = {}
        self._holes: list[int] = []
        """A heap of the free slots below the highest slot in use so far."""
        self._used: dict[int, int] = {}
        """For each hole, the number of positions that its last sequence wrote."""

    def slot(self, handle: int) -> int:
        """Return the current slot of a sequence. `compact` may change it."""
        return self._slots[handle]

    def open(self, handle: int) -> int:
        """Assign a free slot to a sequence and return it."""
        slot = heappop(self._holes) if self._holes else len(self._slots)
        self.clear(slot, 0, self._used.pop(slot, 0))
        self._slots[handle] = slot
        return slot

    def close(self, handle: int, length: int) -> None:
        """Free the slot of a sequence of `length` tokens."""
        slot = self._slots.pop(handle)
        self._used[slot] = length
        heappush(self._holes, slot)

    def compact(self, lengths: Mapping[Any, int]) -> list[tuple[int, int]]:
        """Move sequences so that n open ones occupy slots 0 to n - 1.

        Args:
            lengths: length of each open sequence in tokens.

        Returns:
            (from, to) of each slot that was moved.
        """
        if not self._holes:
            return []
        count, moves = len(self._slots), []
        holes = [slot for slot in self._holes if slot < count]
        for handle, slot in [item for item in self._slots.items() if item[1] >= count] if holes else ():
            hole, length = holes.pop(), lengths[handle]
            self.copy(slot, hole, length)
            self.clear(hole, length, self._used.pop(hole))
            self._slots[handle], self._used[slot] = hole, length
            moves.append((slot, hole))
        self._holes.clear()  # the free slots are now those from `count` on
        return moves

    @torch.inference_mode()
    def reset(self) -> None:
        """Free all slots."""
        for state in (self._slots, self._holes, self._used):
            state.clear()
        for tensor in self._tensors:
            tensor.zero_()

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another slot."""
        for cache in self._tensors:
            cache[:, target, :, :length] = cache[:, source, :, :length]

    @torch.inference_mode()
    def clear(self, slot: int, start: int, stop: int) -> None:
        """Zero the positions [start, stop) of a slot, so that its next sequence does not read a masked NaN."""
        if start >= stop:
            return
        for cache in self._tensors:
            cache[:, slot, :, start:stop] = 0
