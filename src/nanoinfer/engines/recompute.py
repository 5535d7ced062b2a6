"""Rung 1, `recompute`: run the whole prefix again for every token, as nanoGPT's `generate` does.

It stores token ids only, so no cached state can be wrong: it is the reference that all other engines are tested against
(docs/rungs/recompute.md).

Sequences of unequal length are padded on the right; causal attention never reads the padding. The padding repeats the
sequence's own last token: a masked value is still multiplied by 0, and 0 times a NaN of another token would be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import DEFAULTS, Handle, StepBatch
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.models.transformer import Transformer


class RecomputeEngine(TorchEngine):
    """Stores token ids only and recomputes everything else."""

    has_states = False

    def __init__(self, model: Transformer, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._token_ids: dict[Handle, list[int]] = {}

    def _rows(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        num_seqs = len(batch.handles)  # a row of the padded batch for each
        return list(range(1, num_seqs + 1)), [1] * num_seqs

    def _run(self, batch: StepBatch) -> Tensor:
        new = iter(batch.token_ids)
        rows = [
            self._token_ids[h] + [next(new) for _ in range(n)]
            for h, n in zip(batch.handles, batch.num_new, strict=True)
        ]
        T = max(map(len, rows))
        idx = torch.tensor([row + row[-1:] * (T - len(row)) for row in rows], device=self.device)  # (B, T)
        x = self.model.hidden(idx, torch.arange(T, device=self.device))  # (B, T, C)
        wanted = [
            i * T + t
            for i, (row, n) in enumerate(zip(rows, batch.num_hidden, strict=True))
            for t in range(len(row) - n, len(row))
        ]
        self._token_ids.update(zip(batch.handles, rows, strict=True))
        return x.flatten(0, 1)[wanted]

    def _open(self, handle: Handle) -> None:
        self._token_ids[handle] = []

    def _truncate(self, handle: Handle, length: int) -> None:
        del self._token_ids[handle][length:]

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._token_ids[child] = self._token_ids[parent].copy()

    def _close(self, handle: Handle) -> None:
        del self._token_ids[handle]

    def _reset(self) -> None:
        self._token_ids.clear()
