"""FlashInfer's sampling kernels, for those who ask for them: `LLM(..., sampler="flashinfer")`.

They draw from the same distribution by rejection, without a sort, with random numbers of their own: their tokens are
not the reference's, and a request's text depends on what was drawn before it. So they are never chosen unasked.
tests/test_triton_sampler.py holds them to the distribution where they are installed. Two things differ from the
reference in the last float32 digits: probabilities are float32, and tokens tied with the k-th may be dropped.

Penalties, logit_bias and min_tokens are the reference's; greedy rows are drawn by it.
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


def why_unavailable(device: torch.device) -> str | None:
    """Return why FlashInfer cannot sample logits on `device`, or None."""
    if device.type != "cuda":
        return f"the logits are on {device}, it needs a CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return missing_extra("flashinfer", "gpu")
    return None


def choose(device: torch.device, seed: int = 0) -> FlashInferSample:
    """Return the sampler.

    Raises:
        NanoinferError: it cannot be had here.
    """
    if why_not := why_unavailable(device):
        raise NanoinferError(f"sampler='flashinfer' cannot run: {why_not}; or use sampler=auto")
    return FlashInferSample(importlib.import_module("flashinfer.sampling"), device, seed)


class FlashInferSample:
    """`sampler.sample` by FlashInfer: the same signature and errors, the same distribution, other tokens.

    Args:
        kernels: the module flashinfer.sampling.
        device: where the logits are.
        seed: of the random numbers of all rows together; requests' seeds do not count here.
    """

    def __init__(self, kernels: Any, device: torch.device, seed: int) -> None:
        self._kernels = kernels
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """Draw the next token of each row.

        Args:
            logits: (B, V) float32 on the sampler's device; not changed.
            rows: B rows.

        Raises:
            NanoinferError: a row's logits are not finite (the model overflowed).
        """
        if not rows:
            return []
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        greedy = [i for i, row in enumerate(rows) if row.params.greedy]
        tokens = [-1] * len(rows)
        if greedy:
            for i, drawn in zip(greedy, reference.sample(logits[greedy], [rows[i] for i in greedy]), strict=True):
                tokens[i] = drawn.token_id
        if random:
            for i, token in zip(random, self._draw(logits[random], [rows[i] for i in random]), strict=True):
                tokens[i] = token
        return [
            Sampled(token, reference.find_logprobs(logits[i], token, row.params.logprobs))
            for i, (token, row) in enumerate(zip(tokens, rows, strict=True))
        ]

    def _draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
        probs = reference.probabilities(logits, rows).float().contiguous()  # before the filters
        V, params, k = logits.shape[-1], [row.params for row in rows], self._kernels

        def each(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        top_k = each([min(p.top_k, V) or V for p in params], torch.int32)
        top_p = each([p.top_p for p in params])
        if any(p.min_p for p in params):
            kept = k.top_p_renorm_probs(k.top_k_renorm_probs(probs, top_k), top_p)
            drawn = k.min_p_sampling_from_probs(kept, each([p.min_p for p in params]), generator=self._generator)
        else:
            drawn = k.top_k_top_p_sampling_from_probs(
                probs, top_k, top_p, filter_apply_order="top_k_first", generator=self._generator
            )
        tokens: list[int] = drawn.tolist()
        return tokens
