"""The native sampler (kernels/cpu/sampler/sampler.cpp): the reference's tokens without a sort; the choice of a sampler.

One call samples all rows, with float32 passes over the logits and float64 for the values that decide. `sample` has the
signature, the results and the errors of the reference `sampler.sample`; tests/sampling/test_native_sampler.py
compares the two.

Covered: float32 logits on the CPU, all sampling parameters. Not covered: other devices and dtypes, and installations
without the native extension (NANOINFER_NO_NATIVE=1), for which `choose_sampler` returns another one.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import SAMPLERS
from nanoinfer.sampling import filters
from nanoinfer.sampling import sampler as reference
from nanoinfer.sampling.rng import uniform
from nanoinfer.sampling.sampler import Sampled, Sampler, SamplerRow
from nanoinfer.utils.arrays import Array, to_numpy
from nanoinfer.utils.checks import require_choice

log = logging.getLogger("nanoinfer")

try:
    _native: Any = importlib.import_module("nanoinfer._native")
except ImportError:  # built with NANOINFER_NO_NATIVE=1
    _native = None


def available() -> bool:
    """Return whether the native extension is installed."""
    return _native is not None


def sample(logits: Array, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Sample the next token of each row, as `sampler.sample` does. Logits with contiguous rows are not copied."""
    if not rows:
        return []
    logits = to_numpy(logits)
    if logits.strides[-1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    if limited := [i for i, row in enumerate(rows) if row.params.allowed_token_ids is not None]:
        other = [i for i, row in enumerate(rows) if row.params.allowed_token_ids is None]
        return reference.sample_parts(logits, rows, ((limited, _sample_allowed), (other, _sample_tokens)))
    return reference.add_logprobs(logits, _sample_tokens(logits, rows), rows)


def _sample_allowed(logits: NDArray[np.float32], rows: Sequence[SamplerRow]) -> list[int]:
    """Return the next token of rows with allowed_token_ids, whose other tokens are excluded in a copy of the logits."""
    logits = logits.copy()
    for row, values in zip(rows, logits, strict=True):
        filters.only(values, row.params.allowed_token_ids or ())
    return _sample_tokens(logits, rows)


def _sample_tokens(logits: NDArray[np.float32], rows: Sequence[SamplerRow]) -> list[int]:
    options = [None if reference.is_plain(row) else _options(row, logits.shape[-1]) for row in rows]
    tokens: list[int] = _native.sample_rows(logits=logits, rows=options)
    if min(tokens) < 0:  # the largest logit of a row is not finite
        return reference.sample_tokens(logits, rows)  # raises the error
    return tokens


def _options(row: SamplerRow, V: int) -> Any:
    """Return a row's parameters for the native extension, with the token lists that they need."""
    p = row.params
    given: dict[str, Any] = {}
    if p.repetition_penalty != 1:
        given["prompt_ids"] = row.prompt_token_ids
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
        given["output_ids"] = row.output_token_ids
    if p.logit_bias:
        given["bias_ids"], given["bias_values"] = list(p.logit_bias), list(p.logit_bias.values())
    if excluded := reference.excluded_tokens(row):
        given["excluded_ids"] = excluded
    return _native.SampleOptions(
        uniform=uniform(seed=row.seed, sample=row.sample_index, position=row.num_output_tokens),
        temperature=p.temperature, top_k=min(p.top_k, V), top_p=p.top_p, min_p=p.min_p,
        repetition_penalty=p.repetition_penalty, presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty, **given,
    )  # fmt: skip


def choose_sampler(device: str, prefer: str = "auto") -> Sampler:
    """Return the sampler for logits on `device`.

    Args:
        device: device of the logits: cpu, cuda:0.
        prefer: "auto" (the native sampler on a CPU, the fused one on CUDA, the reference if those are unavailable),
            or "reference".

    Raises:
        NanoinferError: prefer is none of these.
    """
    require_choice("sampler", prefer, SAMPLERS)
    if prefer == "reference":
        why_not: str | None = "requested"
    elif device != "cpu":
        from nanoinfer.sampling import triton

        if (why_not := triton.why_unavailable()) is None:
            log.debug("sampler: fused (the logits are on %s)", device)
            return triton.Sample()
    elif not available():
        why_not = "built without the native extension"
    else:
        log.debug("sampler: native")
        return sample
    log.debug("sampler: reference (%s)", why_not)
    return reference.sample
