"""Which sampler draws, by where the logits are."""

from __future__ import annotations

import logging

import torch

from nanoinfer.checks import require_choice
from nanoinfer.config import SAMPLERS
from nanoinfer.sampling import native, triton
from nanoinfer.sampling import sampler as reference
from nanoinfer.sampling.sampler import Sampler

log = logging.getLogger("nanoinfer")


def choose_sampler(device: torch.device, prefer: str = "auto") -> Sampler:
    """Return the sampler for logits on `device`.

    Args:
        device: where the logits are.
        prefer: "auto": the native sampler on CPUs, the fused one on CUDA, the reference where those cannot be;
            "reference"; or "flashinfer": FlashInfer's kernels, whose tokens are not the reference's.

    Raises:
        NanoinferError: prefer is none of these, or asks for what is not here.
    """
    require_choice("sampler", prefer, SAMPLERS)
    if prefer == "flashinfer":
        from nanoinfer.sampling import flashinfer

        return flashinfer.choose(device)
    if prefer == "reference":
        why_not: str | None = "asked for"
    elif device.type == "cuda":
        if (why_not := triton.why_unavailable()) is None:
            log.debug("sampler: fused (the logits are on %s)", device)
            return triton.Sample()
    elif device.type != "cpu":
        why_not = f"the logits are on {device}"
    elif not native.available():
        why_not = "built without the native extension"
    else:
        log.debug("sampler: native")
        return native.sample
    log.debug("sampler: reference (%s)", why_not)
    return reference.sample
