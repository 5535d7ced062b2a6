"""Rung 2, `dynamic`: a KV cache that grows by concatenation, the textbook KV cache (docs/rungs/dynamic.md).

Each sequence has one pair of tensors for each layer, and the model runs on the new tokens only. Tensors are never
written in place, so a fork shares its parent's tensors, and truncation is a view.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import DEFAULTS, Handle, StepBatch
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.models.attention import AttentionSpec, masking, scaled_attention
from nanoinfer.models.transformer import Transformer

LayerKV = tuple[Tensor, Tensor]  # keys and values of one layer, each (K, T, D)


class _Step:
    """The new tokens of a step, one sequence after the other, and the tensors of their sequences.

    Args:
        kv: of each sequence; changed.
        starts: number of tokens before the step, of each sequence.
        num_new: number of new tokens, of each sequence.
        device: of the tensors.
    """

    def __init__(self, kv: list[list[LayerKV]], starts: list[int], num_new: list[int], device: torch.device) -> None:
        self._kv, self._starts, self._num_new = kv, starts, num_new
        self._masking = cache(partial(masking, device=device))  # most layers have the same

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Replace the tensors of a layer by longer ones."""
        new = (torch.split(x.transpose(0, 1), self._num_new, dim=1) for x in (k, v))  # (K, n, D) of each sequence
        for kv, start, new_k, new_v in zip(self._kv, self._starts, *new, strict=True):
            past_k, past_v = kv[layer]  # an interrupted step leaves more than `start` tokens
            kv[layer] = torch.cat([past_k[:, :start], new_k], dim=1), torch.cat([past_v[:, :start], new_v], dim=1)

    def attend(self, spec: AttentionSpec, q: Tensor) -> Tensor:
        """Attend in one sequence after the other."""
        out = []
        for q_i, kv, start in zip(torch.split(q, self._num_new), self._kv, self._starts, strict=True):
            (keys, values), n = kv[spec.source], len(q_i)
            masked = self._masking(n, start + n, spec.window)
            y = scaled_attention(spec, q_i.transpose(0, 1)[None], keys[None], values[None], masked)
            out.append(y[0].transpose(0, 1))  # (n, H, D)
        return torch.cat(out)


class DynamicEngine(TorchEngine):
    """Stores a list of (keys, values) pairs for each sequence, one pair for each layer."""

    def __init__(self, model: Transformer, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._kv: dict[Handle, list[LayerKV]] = {}
        layers = [self.config.at(i) for i in range(self.config.n_layer)]  # a recurrent layer leaves its pair empty
        shapes = [(layer.n_kv_head, 0, layer.head_dim) for layer in layers]
        self._empty = [(torch.empty(s, device=self.device, dtype=self.dtype),) * 2 for s in shapes]

    def _begin(self, batch: StepBatch, starts: list[int]) -> _Step:
        return _Step([self._kv[handle] for handle in batch.handles], starts, batch.num_new, self.device)

    def _open(self, handle: Handle) -> None:
        self._kv[handle] = self._empty.copy()

    def _truncate(self, handle: Handle, length: int) -> None:
        self._kv[handle] = [(k[:, :length], v[:, :length]) for k, v in self._kv[handle]]

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._kv[child] = self._kv[parent].copy()

    def _close(self, handle: Handle) -> None:
        del self._kv[handle]

    def _reset(self) -> None:
        self._kv.clear()
