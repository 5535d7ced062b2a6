"""Rung 1, `recompute`: run the whole prefix again for every token.

The idea: keep nothing but the token ids. Each step feeds every sequence from its first token to the
reference model. This is nanoGPT's `generate`, and the definition of correct for every other rung.

Why it stays: there is no state that could be wrong. When it does not pay: always, past a few tokens; the
work of token t grows with t, so a text of T tokens costs O(T^2) instead of O(T).

Sequences of unequal length are padded on the right: with causal attention no token sees the padding. It repeats the
sequence's own last token, because a masked value is still multiplied by 0, and 0 times a NaN of another token is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.torch_engine import TorchEngine
from nanoinfer.models.gpt import GPT, causal_attention


class RecomputeEngine(TorchEngine):
    """Keeps token ids only."""

    def __init__(self, model: GPT, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        self._tokens: dict[Handle, list[int]] = {}

    def _run(self, batch: StepBatch) -> Tensor:
        new = iter(batch.token_ids)
        rows = [
            self._tokens[h] + [next(new) for _ in range(n)] for h, n in zip(batch.handles, batch.num_new, strict=True)
        ]
        T = max(map(len, rows))
        idx = torch.tensor([row + row[-1:] * (T - len(row)) for row in rows], device=self.device)  # (B, T)
        x = self.model.hidden(idx, torch.arange(T, device=self.device), causal_attention)  # (B, T, C)
        wanted = [
            i * T + t
            for i, (row, n) in enumerate(zip(rows, batch.num_logits, strict=True))
            for t in range(len(row) - n, len(row))
        ]
        self._tokens.update(zip(batch.handles, rows, strict=True))
        return x.flatten(0, 1)[wanted]

    def _open(self, handle: Handle) -> None:
        self._tokens[handle] = []

    def _truncate(self, handle: Handle, length: int) -> None:
        del self._tokens[handle][length:]

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._tokens[child] = self._tokens[parent].copy()

    def _close(self, handle: Handle) -> None:
        del self._tokens[handle]

    def _reset(self) -> None:
        self._tokens.clear()
