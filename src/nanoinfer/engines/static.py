"""Rung 3, `static`: preallocate keys and values, write in place (docs/rungs/static.md).

One tensor of keys and one of values for all layers, sequences (slots) and positions. All sequences that decode one
token share one attention call, masked by length. In a step, open sequences occupy slots 0, 1, ... (kv/slots.py).
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import DEFAULTS, Handle, StepBatch
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.kv.slots import SlotCache
from nanoinfer.models.attention import AttentionSpec, Masking, masking, scaled_attention
from nanoinfer.models.transformer import Transformer


class _Step:
    """The new tokens of a step, one sequence after the other, and the slots of their sequences.

    Args:
        cache: keys and values; changed.
        slots: of the sequences.
        starts: number of tokens before the step, of each sequence.
        num_new: number of new tokens, of each sequence.
        device: of the cache.
    """

    def __init__(
        self, cache: SlotCache, slots: list[int], starts: list[int], num_new: list[int], device: torch.device
    ) -> None:
        rows = [end - n for end, n in zip(accumulate(num_new), num_new, strict=True)]  # of the first new tokens
        new = sorted(zip(slots, starts, num_new, rows, strict=True))
        self._cache, self._device = cache, device
        self._several = [one for one in new if one[2] > 1]
        # The sequences that decode, in the order of their slots.
        single = [(slot, start + 1, row) for slot, start, n, row in new if n == 1]
        self._slots, self._lengths, self._rows = ([one[i] for one in single] for i in range(3))
        self._in_order = self._rows == list(range(sum(num_new)))
        self._slot_index, self._row_index = (torch.tensor(x, device=device) for x in (self._slots, self._rows))
        by_row = sorted(new, key=lambda one: one[3])
        self._slot_of = torch.tensor([slot for slot, _, n, _ in by_row for _ in range(n)], device=device)  # (N,)
        self._pos_of = torch.tensor([p for _, s, n, _ in by_row for p in range(s, s + n)], device=device)  # (N,)
        self._masks: dict[int | None, Tensor | None] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write in place."""
        self._cache.k[layer][self._slot_of, :, self._pos_of] = k
        self._cache.v[layer][self._slot_of, :, self._pos_of] = v

    def attend(self, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Attend in one call for all sequences that decode, and in one call for each other."""
        keys, values = self._cache.k[spec.source], self._cache.v[spec.source]
        if self._in_order:
            return self._decode(spec, q, keys, values)
        y = torch.empty_like(q)
        if self._rows:
            y[self._row_index] = self._decode(spec, q[self._row_index], keys, values)
        for slot, start, n, row in self._several:
            masked = masking(n, start + n, spec.window, self._device)
            k, v = (x[slot : slot + 1, :, : start + n] for x in (keys, values))  # (1, K, S, D)
            out = scaled_attention(spec, q[row : row + n].transpose(0, 1)[None], k, v, masked)  # (1, H, n, D)
            y[row : row + n] = out[0].transpose(0, 1)
        return y

    def _decode(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of one query per sequence, (B, H, D), in one call."""
        B, S = len(self._slots), max(self._lengths)
        dense = self._slots == list(range(B))
        k, v = (x[:B, :, :S] if dense else x[self._slot_index, :, :S] for x in (k, v))  # (B, K, S, D)
        if spec.window not in self._masks:
            self._masks[spec.window] = self._mask(spec.window)
        return scaled_attention(spec, q[:, :, None], k, v, Masking(self._masks[spec.window]))[:, :, 0]

    def _mask(self, window: int | None) -> Tensor | None:
        """Return which keys each sequence that decodes attends to, (B, 1, 1, S); None: all."""
        S = max(self._lengths)
        if min(self._lengths) == S and (window is None or window >= S):
            return None
        limit, key = torch.tensor(self._lengths, device=self._device)[:, None], torch.arange(S, device=self._device)
        visible = key < limit if window is None else (key < limit) & (key >= limit - window)
        return visible[:, None, None]


class StaticEngine(TorchEngine):
    """Stores keys and values of each layer in two tensors, (slots, K, block_size, D)."""

    def __init__(self, model: Transformer, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._cache = SlotCache(self.config, limits.max_num_seqs, limits.block_size, self.dtype, self.device)

    def _begin(self, batch: StepBatch, starts: list[int]) -> _Step:
        self._cache.compact(self._lengths)
        return _Step(self._cache, [self._cache.slot(h) for h in batch.handles], starts, batch.num_new, self.device)

    def _open(self, handle: Handle) -> None:
        self._cache.open(handle)

    def _truncate(self, handle: Handle, length: int) -> None:
        self._cache.clear(self._cache.slot(handle), length, self._lengths[handle])

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._cache.copy(self._cache.slot(parent), self._cache.slot(child), self._lengths[parent])

    def _close(self, handle: Handle) -> None:
        self._cache.close(handle, self._lengths[handle])

    def _reset(self) -> None:
        self._cache.reset()
