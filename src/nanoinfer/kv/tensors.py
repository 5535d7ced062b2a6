"""The memory of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.errors import NanoinferError


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: str) -> tuple[Tensor, Tensor]:
    """Return tensors of zeros for keys and values.

    They are zero, because a masked value is still multiplied by 0, and 0 * NaN is NaN.

    Args:
        shape: of each of the two.
        dtype: of each of the two.
        device: of each of the two.
        what: what they hold, for the error message.

    Raises:
        NanoinferError: the device does not have enough memory.
    """
    try:
        return torch.zeros(*shape, dtype=dtype, device=device), torch.zeros(*shape, dtype=dtype, device=device)
    except RuntimeError:  # torch's out-of-memory errors, on CPU and CUDA
        need = 2 * math.prod(shape) * dtype.itemsize
        raise NanoinferError(
            f"keys and values of {what} need {need:,} bytes, more than {device} has free: lower max_num_seqs or"
            " kv_cache_memory"
        ) from None
