"""Rung 2, `dynamic`: a KV cache that grows by concatenation, the textbook KV cache (docs/rungs/dynamic.md).

Each sequence has one pair of tensors for each layer, and the model runs on the new tokens only. Tensors are never
written in place, so a fork shares its parent's tensors, and truncation is a view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.models.attention import masking, scaled_attention
from nanoinfer.models.gpt import GPT, Attend

LayerKV = tuple[Tensor, Tensor]  # keys and values of one layer, each (K, T, D)


class DynamicEngine(TorchEngine):
    """Stores a list of (keys, values) pairs for each sequence, one pair for each layer."""

    def __init__(self, model: GPT, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._kv: dict[Handle, list[LayerKV]] = {}
        layers = [self.config.at(i) for i in range(self.config.n_layer)]
        shapes = [(layer.n_kv_head, 0, layer.head_dim) for layer in layers]
        self._empty = [(torch.empty(s, device=self.device, dtype=self.dtype),) * 2 for s in shapes]

    def _attend(self, batch: StepBatch, starts: list[int]) -> Attend:
        counts = list(zip(starts, batch.num_new, strict=True))
        maskings = {w: [masking(n, s + n, w, self.device) for s, n in counts] for w in self.config.windows}

        def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            # Each sequence's part of the flat tokens, as (heads, n, D).
            queries, *new = [torch.split(x.transpose(0, 1), batch.num_new, dim=1) for x in (q, k, v) if x is not None]
            out, source, sinks = [], self.config.kv_layer(layer), self.model.sinks(layer)
            for i, (handle, start, masked) in enumerate(
                zip(batch.handles, starts, maskings[self.config.layer(layer).window], strict=True)
            ):
                kv = self._kv[handle]
                if new:
                    past_k, past_v = kv[layer]
                    keys = torch.cat([past_k[:, :start], new[0][i]], dim=1)  # an interrupted step leaves more
                    values = torch.cat([past_v[:, :start], new[1][i]], dim=1)
                    kv[layer] = keys, values
                keys, values = kv[source]
                y = scaled_attention(self.config, queries[i][None], keys[None], values[None], masked, sinks)
                out.append(y[0].transpose(0, 1))  # (n, H, D)
            return torch.cat(out)

        return attend

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
