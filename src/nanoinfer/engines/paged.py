"""Rung 4, `paged`: keys and values in fixed-size blocks of one pool, shared by reference (docs/rungs/paged.md).

This is PagedAttention (Kwon et al. 2023, arXiv 2309.06180). Each sequence has a table of the blocks that hold its
tokens, in any order; a block that several sequences use is copied before one of them writes to it. Each layer of a step
gathers every sequence's blocks into a copy, because PyTorch's attention reads contiguous keys.

`native` has the same pool (kernels/cpu/model/cache.cpp), block for block; this engine is the reference for it.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import DEFAULTS, Handle, StepBatch
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.pool import BlockPool
from nanoinfer.kv.slots import LayerTensors, allocate
from nanoinfer.models.attention import AttentionSpec, masking, scaled_attention
from nanoinfer.models.transformer import Transformer


class _Step:
    """The new tokens of a step, one sequence after the other, and where the pool has those of their sequences.

    Args:
        k, v: (blocks, KV_BLOCK, K, D) of each layer; changed.
        tables: blocks of each sequence, those of the new tokens included.
        starts: number of tokens before the step, of each sequence.
        num_new: number of new tokens, of each sequence.
    """

    def __init__(
        self, k: LayerTensors, v: LayerTensors, tables: list[Tensor], starts: list[int], num_new: list[int]
    ) -> None:
        device = tables[0].device
        self._k, self._v, self._tables, self._starts, self._num_new = k, v, tables, starts, num_new
        positions = [torch.arange(s, s + n, device=device) for s, n in zip(starts, num_new, strict=True)]
        self._blocks = torch.cat([table[p // KV_BLOCK] for table, p in zip(tables, positions, strict=True)])  # (N,)
        self._places = torch.cat(positions) % KV_BLOCK  # (N,), of the new tokens in their blocks
        self._masking = cache(partial(masking, device=device))  # most layers have the same

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write to the blocks."""
        self._k[layer][self._blocks, self._places] = k
        self._v[layer][self._blocks, self._places] = v

    def attend(self, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Attend in one sequence after the other."""
        out = []
        for q_i, table, start in zip(torch.split(q, self._num_new), self._tables, self._starts, strict=True):
            length = start + len(q_i)
            # The gathered blocks in the order of the sequence, without the unused places: (1, K, S, D).
            keys, values = (
                x[spec.source][table].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (self._k, self._v)
            )
            masked = self._masking(len(q_i), length, spec.window)
            y = scaled_attention(spec, q_i.transpose(0, 1)[None], keys, values, masked)
            out.append(y[0].transpose(0, 1))  # (n, H, D)
        return torch.cat(out)


class PagedEngine(TorchEngine):
    """Stores keys and values of each layer in two tensors, (blocks, KV_BLOCK, K, D); `BlockPool` has the tables."""

    def __init__(self, model: Transformer, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        num_blocks = -(-limits.max_num_cached_tokens // KV_BLOCK)
        self._pool = BlockPool(num_blocks)
        self._k, self._v = allocate(
            self.config, lambda heads, width: (num_blocks, KV_BLOCK, heads, width), self.dtype, self.device,
            f"{num_blocks} blocks of {KV_BLOCK} tokens",
        )  # fmt: skip

    def _begin(self, batch: StepBatch, starts: list[int]) -> _Step:
        for handle, start, num_new in zip(batch.handles, starts, batch.num_new, strict=True):
            more = start + num_new - self._lengths[handle]  # none for an assistant
            if more and (copy := self._pool.append(handle, more)) is not None:
                shared, own = copy
                for blocks in (*self._k.whole, *self._v.whole):
                    blocks[:, own] = blocks[:, shared]
        tables = [torch.tensor(self._pool.table(handle), device=self.device) for handle in batch.handles]
        return _Step(self._k, self._v, tables, starts, batch.num_new)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the pool that no sequence uses."""
        return self._pool.num_free_blocks

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        """Return how many blocks extending a sequence by `num_new` tokens takes from the pool."""
        return self._pool.blocks_needed(handle, self.num_to_process(handle, num_new))

    def _check(self, batch: StepBatch) -> None:
        super()._check(batch)
        self._pool.check(sum(map(self.blocks_needed, batch.handles, batch.num_new)))

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
