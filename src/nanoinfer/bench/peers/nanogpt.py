"""nanoGPT's loop, the naive backend: it computes the whole prefix of the whole batch again for every token.

The loop of `GPT.generate` (karpathy/nanoGPT: model.py), on our reference model: crop to block_size, run everything,
keep the logits of the last position, sample greedily, append. Weights are in nanoGPT's layout, (out, in) row by row. A
batch needs equal lengths, as it does there: unequal ones run one after the other.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch

from nanoinfer.bench.case import Case, Requests
from nanoinfer.bench.peers import require_case
from nanoinfer.bench.stats import RunTimes
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import DTYPES
from nanoinfer.engines.devices import resolve_device, resolve_dtype
from nanoinfer.models.attention import causal_attention
from nanoinfer.profiling.verify_cost import synchronize


class NanoGPT:
    """The reference model, and the loop."""

    def __init__(self, case: Case, weights: Path) -> None:
        require_case(case, dtypes=DTYPES)
        self._device = resolve_device(case.device)
        opened = open_folder(weights, resolve_dtype(case.dtype, self._device))
        model, self._config = load_gpt(opened), opened.config
        for p in model.parameters():
            p.data = p.data.contiguous()
        self._model = model.to(self._device)

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token has arrived when it is on the CPU."""
        synchronize(self._device)  # nothing of the previous run is still running
        start = time.perf_counter()
        tokens: list[list[int]] = []
        arrivals: list[list[float]] = []
        sizes = {(len(p), n) for p, n in zip(requests.prompts, requests.output_tokens, strict=True)}
        group = len(requests.prompts) if len(sizes) == 1 else 1
        for i in range(0, len(requests.prompts), group):
            steps, times = self._generate(requests.prompts[i : i + group], requests.output_tokens[i], start)
            tokens += [list(row) for row in zip(*steps, strict=True)]
            arrivals += [list(times) for _ in range(group)]
        return tokens, RunTimes(sum(map(len, requests.prompts)), arrivals)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], num_tokens: int, start: float) -> tuple[list[list[int]], list[float]]:
        """Return the tokens of each step, and when each step ended."""
        idx = torch.tensor(prompts, device=self._device)  # (B, T)
        attend = partial(causal_attention, self._config, self._model.sinks, kept={})
        steps, times = [], []
        for _ in range(num_tokens):
            window = idx[:, -self._config.block_size :]
            pos = torch.arange(window.shape[1], device=self._device)
            x = self._model.hidden(window, pos, attend)[:, -1]  # (B, C)
            new = self._model.lm_head(x).argmax(-1, keepdim=True)  # (B, 1)
            idx = torch.cat((idx, new), dim=1)
            steps.append(new[:, 0].tolist())
            times.append(time.perf_counter() - start)
        return steps, times
