"""Rung 4, `paged`: keys and values in fixed-size blocks of one pool, shared by reference (docs/rungs/paged.md).

This is PagedAttention (Kwon et al. 2023, arXiv 2309.06180). Each sequence has a table of the blocks that hold its
tokens, in any order; a block that several sequences use is copied before one of them writes to it. Each layer of a step
gathers every sequence's blocks into a copy, because PyTorch's attention reads contiguous keys.

`native` has the same pool (kernels/cpu/cache.cpp), block for block; this engine is the reference for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.pool import BlockPool
from nanoinfer.kv.slots import allocate
from nanoinfer.models.attention import masking, scaled_attention
from nanoinfer.models.gpt import GPT, Attend


class PagedEngine(TorchEngine):
    """Stores keys and values of each layer in two tensors, (blocks, KV_BLOCK, K, D); `BlockPool` has the tables."""

    def __init__(self, model: GPT, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        num_blocks = -(-limits.max_num_cached_tokens // KV_BLOCK)
        self._pool = BlockPool(num_blocks)
        self._k, self._v = allocate(
            self.config, lambda heads, width: (num_blocks, KV_BLOCK, heads, width), self.dtype, self.device,
            f"{num_blocks} blocks of {KV_BLOCK} tokens",
        )  # fmt: skip

    def _attend(self, batch: StepBatch, starts: list[int]) -> Attend:
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            if (copy := self._pool.append(handle, num_new)) is not None:
                shared, own = copy
                for cache in (*self._k.whole, *self._v.whole):
                    cache[:, own] = cache[:, shared]
        counts = list(zip(starts, batch.num_new, strict=True))
        tables = [torch.tensor(self._pool.table(h), device=self.device) for h in batch.handles]
        positions = [torch.arange(s, s + n, device=self.device) for s, n in counts]
        blocks = torch.cat([table[p // KV_BLOCK] for table, p in zip(tables, positions, strict=True)])  # (N,)
        places = torch.cat(positions) % KV_BLOCK  # (N,), of the new tokens in their blocks
        maskings = {w: [masking(n, s + n, w, self.device) for s, n in counts] for w in self.config.windows}

        def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            cached_k, cached_v = self._k[layer], self._v[layer]  # (blocks, KV_BLOCK, K, D)
            if k is not None and v is not None:
                cached_k[blocks, places] = k
                cached_v[blocks, places] = v
            out, sinks = [], self.model.sinks(layer)
            for q_i, table, (start, n), masked in zip(
                torch.split(q, batch.num_new), tables, counts, maskings[self.config.layer(layer).window], strict=True
            ):
                # The gathered blocks in the order of the sequence, without the unused places: (1, K, S, D).
                keys, values = (x[table].flatten(0, 1)[: start + n].transpose(0, 1)[None] for x in (cached_k, cached_v))
                y = scaled_attention(self.config, q_i.transpose(0, 1)[None], keys, values, masked, sinks)
                out.append(y[0].transpose(0, 1))  # (n, H, D)
            return torch.cat(out)

        return attend

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the pool that no sequence uses."""
        return self._pool.num_free_blocks

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        """Return how many blocks extending a sequence by `num_new` tokens takes from the pool."""
        self.length(handle)
        return self._pool.blocks_needed(handle, num_new)

    def _check(self, batch: StepBatch) -> None:
        super()._check(batch)
        self._pool.check(sum(map(self._pool.blocks_needed, batch.handles, batch.num_new)))

    def _undo(self, batch: StepBatch) -> None:
        for handle in batch.handles:
            self._pool.truncate(handle, self._lengths[handle])

    def _open(self, handle: Handle) -> None:
        self._pool.open(handle)

    def _truncate(self, handle: Handle, length: int) -> None:
        self._pool.truncate(handle, length)

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._pool.fork(parent, child)

    def _close(self, handle: Handle) -> None:
        self._pool.close(handle)

    def _reset(self) -> None:
        self._pool.clear()
