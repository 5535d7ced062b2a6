"""Rung 2, `dynamic`: keep keys and values, grow them by concatenation.

What changes from `recompute`: the keys and values of past tokens never change, so keep them, and feed only
the new tokens to the model. A step costs the same matrix products however long the text is; only attention
grows with it. This is the KV cache as it is first taught, one pair of tensors a layer and sequence.

Why it helps: O(T) instead of O(T^2) for a text of T tokens. When it does not pay: concatenation copies the
whole cache at every step and allocates anew, and each sequence has attention calls of its own; at batch 8
and 1,000 tokens that copying costs more than the attention itself (see `static`).

Tensors are never written in place, so a fork shares its parent's and truncation is a view.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.torch_engine import TorchEngine, causal_mask
from nanoinfer.models.gpt import GPT, Attend

LayerKV = tuple[Tensor, Tensor]  # keys and values of one layer, each (H, T, D)


class DynamicEngine(TorchEngine):
    """One list of (keys, values) per sequence, a pair for each layer."""

    def __init__(self, model: GPT, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._kv: dict[Handle, list[LayerKV]] = {}

    def _attend(self, batch: StepBatch, starts: list[int]) -> Attend:
        masks = [causal_mask(n, s + n, self.device) if s else None for s, n in zip(starts, batch.num_new, strict=True)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Each sequence's part of the flat tokens, as (H, n, D).
            parts = [torch.split(x.transpose(0, 1), batch.num_new, dim=1) for x in (q, k, v)]
            out = []
            for handle, start, mask, q_i, k_i, v_i in zip(batch.handles, starts, masks, *parts, strict=True):
                kv = self._kv[handle]
                past_k, past_v = kv[layer]
                keys = torch.cat([past_k[:, :start], k_i], dim=1)  # cut at start: a step that failed left more
                values = torch.cat([past_v[:, :start], v_i], dim=1)
                kv[layer] = keys, values
                first = start == 0 and q_i.shape[1] > 1
                y = F.scaled_dot_product_attention(q_i[None], keys[None], values[None], attn_mask=mask, is_causal=first)
                out.append(y[0].transpose(0, 1))  # (n, H, D)
            return torch.cat(out)

        return attend

    def _open(self, handle: Handle) -> None:
        empty = torch.empty(self.config.n_head, 0, self.config.head_dim, device=self.device, dtype=self.dtype)
        self._kv[handle] = [(empty, empty)] * self.config.n_layer

    def _truncate(self, handle: Handle, length: int) -> None:
        self._kv[handle] = [(k[:, :length], v[:, :length]) for k, v in self._kv[handle]]

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._kv[child] = self._kv[parent].copy()

    def _close(self, handle: Handle) -> None:
        del self._kv[handle]

    def _reset(self) -> None:
        self._kv.clear()
