"""Sampling with FlashInfer's kernels: `LLM(..., sampler="flashinfer")`.

The kernels sample from the same distribution by rejection, with their own random numbers. Their tokens differ from the
reference's, and a request's output depends on the tokens sampled before it; `auto` therefore never chooses them. They
differ from the reference in two details: probabilities are float32, and tokens equal to the k-th may be dropped.

Penalties, logit_bias, excluded tokens and greedy rows are computed by the reference, on the host.
Source: Ye et al., "Sorting-Free GPU Kernels for LLM Sampling", 2025; API of flashinfer-python 0.6.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.sampling import sampler as reference
from nanoinfer.sampling.sampler import Sampled, SamplerRow
from nanoinfer.utils.arrays import Array


def why_unavailable() -> str | None:
    """Return why FlashInfer cannot be used on a CUDA device, or None."""
    return None if importlib.util.find_spec("flashinfer") else missing_extra("flashinfer", "gpu")


def choose(device: str, seed: int = 0) -> FlashInferSample:
    """Return the sampler for logits on a CUDA device.

    Raises:
        NanoinferError: FlashInfer is not installed.
    """
    if why_not := why_unavailable():
        raise NanoinferError(f"sampler='flashinfer' cannot run: {why_not}; or use sampler=auto")
    return FlashInferSample(importlib.import_module("flashinfer.sampling"), device, seed)


class FlashInferSample:
    """`sampler.sample` with FlashInfer's kernels: the same signature, errors and distribution, but other tokens.

    Args:
        kernels: the module flashinfer.sampling.
        device: device of the logits.
        seed: seed of the random numbers of all rows; the seeds of requests are not used.
    """

    def __init__(self, kernels: Any, device: str, seed: int) -> None:
        self._kernels = kernels
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Array, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """Sample the next token of each row."""
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        greedy = [i for i, row in enumerate(rows) if row.params.greedy]
        return reference.sample_parts(logits, rows, ((greedy, reference.sample_tokens), (random, self._sample_random)))

    def _sample_random(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
        probs = _probabilities(logits, rows).float().contiguous()
        V, params, k = logits.shape[-1], [row.params for row in rows], self._kernels

        def each(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        top_k = each([min(p.top_k, V) or V for p in params], torch.int32)
        top_p = each([p.top_p for p in params])
        if any(p.min_p for p in params):
            kept = k.top_p_renorm_probs(k.top_k_renorm_probs(probs, top_k), top_p)
            found = k.min_p_sampling_from_probs(kept, each([p.min_p for p in params]), generator=self._generator)
        else:
            found = k.top_k_top_p_sampling_from_probs(
                probs, top_k, top_p, filter_apply_order="top_k_first", generator=self._generator
            )
        tokens: list[int] = found.tolist()
        return tokens


def _probabilities(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return each row's probabilities at its temperature, before top-k, top-p and min-p: (B, V) float64."""
    adjusted = logits.double()
    if changed := [i for i, row in enumerate(rows) if reference.changes_logits(row)]:
        on_host = reference.adjust(logits[changed], [rows[i] for i in changed])
        adjusted[changed] = torch.from_numpy(on_host).to(logits.device)
    largest = adjusted.amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise NanoinferError(reference.not_finite())
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64, device=logits.device)
    return ((adjusted - largest) / temperatures[:, None]).softmax(-1)
