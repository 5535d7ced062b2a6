"""The operations of a draft head on tensors; numpy_ops.py has the same functions for NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def placement(device: str, dtype: str) -> Callable[[Any], Tensor]:
    """Return a function that copies a NumPy array to a device, in a dtype."""
    return lambda array: torch.from_numpy(array).to(torch.device(device), getattr(torch, dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias."""
    return F.linear(x, weight, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalize the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias)


def gelu(x: Tensor) -> Tensor:
    """Return GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def concatenate(arrays: Sequence[Tensor]) -> Tensor:
    """Concatenate along the last dimension."""
    return torch.cat([*arrays], -1)


def like(x: Tensor, other: Tensor) -> Tensor:
    """Return x in the dtype of `other`."""
    return x.to(other.dtype)


def stack(rows: Sequence[Tensor]) -> Tensor:
    """Stack along a new first dimension."""
    return torch.stack([*rows])


def finite(x: Tensor) -> Tensor:
    """Return float32, with 0 for NaN and the largest numbers for infinities."""
    return x.float().nan_to_num()
