"""The choice of a sampler for a device."""

from __future__ import annotations

import logging

from nanoinfer.config import SAMPLERS
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling import native
from nanoinfer.sampling import sampler as reference
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.utils.checks import require_choice

log = logging.getLogger("nanoinfer")


def choose_sampler(device: str, prefer: str = "auto") -> Sampler:
    """Return the sampler for logits on `device`.

    Args:
        device: device of the logits: cpu, cuda:0.
        prefer: "auto" (the native sampler on a CPU, the fused one on CUDA, the reference if those are unavailable),
            "reference", or "flashinfer" (FlashInfer's kernels, whose tokens differ from the reference's).

    Raises:
        NanoinferError: prefer is none of these, or the sampler is not available.
    """
    require_choice("sampler", prefer, SAMPLERS)
    if prefer == "flashinfer":
        if device == "cpu":
            raise NanoinferError(
                "sampler='flashinfer' cannot run: the logits are on cpu, but it needs a CUDA device: use sampler=auto"
            )
        from nanoinfer.sampling import flashinfer

        return flashinfer.choose(device)
    if prefer == "reference":
        why_not: str | None = "requested"
    elif device != "cpu":
        from nanoinfer.sampling import triton

        if (why_not := triton.why_unavailable()) is None:
            log.debug("sampler: fused (the logits are on %s)", device)
            return triton.Sample()
    elif not native.available():
        why_not = "built without the native extension"
    else:
        log.debug("sampler: native")
        return native.sample
    log.debug("sampler: reference (%s)", why_not)
    return reference.sample
