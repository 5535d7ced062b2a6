"""Rung 3, `static`: preallocate keys and values, write in place (docs/rungs/static.md).

One tensor of keys and one of values for all layers, sequences (slots) and positions. All sequences that decode one
token share one attention call, masked by length. In a step, open sequences occupy slots 0, 1, ... (kv/slots.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.kv.slots import SlotCache
from nanoinfer.models.attention import Masking, masking, scaled_attention
from nanoinfer.models.gpt import GPT, Attend


class StaticEngine(TorchEngine):
    """Stores keys and values of each layer in two tensors, (slots, K, block_size, D)."""

    def __init__(self, model: GPT, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._cache = SlotCache(self.config, limits.max_num_seqs, limits.block_size, self.dtype, self.device)

    def _attend(self, batch: StepBatch, starts: list[int]) -> Attend:
        self._cache.compact(self._lengths)
        slots = [self._cache.slot(h) for h in batch.handles]
        rows = [end - n for end, n in zip(accumulate(batch.num_new), batch.num_new, strict=True)]
        new = list(zip(slots, starts, batch.num_new, rows, strict=True))
        slot_of = torch.tensor([slot for slot, _, n, _ in new for _ in range(n)], device=self.device)  # (N,)
        pos_of = torch.tensor([p for _, s, n, _ in new for p in range(s, s + n)], device=self.device)  # (N,)
        single = sorted((slot, start + 1, row) for slot, start, n, row in new if n == 1)
        slots_of_single, lengths = [slot for slot, _, _ in single], [length for _, length, _ in single]
        decoders = {w: self._decode(slots_of_single, lengths, w) for w in self.config.windows}
        single_rows = [row for _, _, row in single]
        index = torch.tensor(single_rows, device=self.device)
        several = {
            w: [self._one(slot, start, n, row, w) for slot, start, n, row in new if n > 1] for w in self.config.windows
        }
        in_order = single_rows == list(range(len(batch.token_ids)))

        def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            keys, values, window = self._cache.k[layer], self._cache.v[layer], self.config.layer(layer).window
            decode, sinks = decoders[window], self.model.sinks(layer)
            if k is not None and v is not None:
                keys[slot_of, :, pos_of] = k
                values[slot_of, :, pos_of] = v
            if in_order:
                return decode(q, keys, values, sinks)
            y = torch.empty_like(q)
            if single:
                y[index] = decode(q[index], keys, values, sinks)
            for read in several[window]:
                read(y, q, keys, values, sinks)
            return y

        return attend

    def _decode(
        self, slots: list[int], lengths: list[int], window: int | None
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
        """Return attention of one query per sequence, (B, H, D), in one call; slots are in ascending order."""
        B, S = len(slots), max(lengths, default=0)
        dense = slots == list(range(B))
        index = torch.tensor(slots, device=self.device)
        mask = None
        if any(length < S for length in lengths) or (window is not None and window < S):
            limit = torch.tensor(lengths, device=self.device)[:, None]
            key = torch.arange(S, device=self.device)
            visible = key < limit if window is None else (key < limit) & (key >= limit - window)
            mask = visible[:, None, None]  # (B, 1, 1, S)

        def read(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            k, v = (x[:B, :, :S] if dense else x[index, :, :S] for x in (k, v))  # (B, K, S, D)
            return scaled_attention(self.config, q[:, :, None], k, v, Masking(mask), sinks)[:, :, 0]

        return read

    def _one(
        self, slot: int, start: int, n: int, row: int, window: int | None
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]:
        """Return attention of one sequence's n new tokens, which are at y[row : row + n] of the flat step."""
        masked = masking(n, start + n, window, self.device)

        def read(y: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
            q = q[row : row + n].transpose(0, 1)[None]  # (1, H, n, D)
            k, v = (x[slot : slot + 1, :, : start + n] for x in (k, v))  # (1, K, S, D)
            out = scaled_attention(self.config, q, k, v, masked, sinks)
            y[row : row + n] = out[0].transpose(0, 1)

        return read

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
