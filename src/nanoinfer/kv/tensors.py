"""The memory of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError


class LayerTensors:
    """The keys, or the values, of all layers. Layers of equal sizes are parts of one tensor.

    Args:
        config: shape of the model. A layer that attends to the keys of another one has that one's tensor.
        shape_of: returns the shape for a layer of K heads of D values.
        dtype: of all of them.
        device: of all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape_of: Callable[[int, int], Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        of: dict[tuple[int, int], list[int]] = {}
        for i in range(config.n_layer):
            if config.kv_layer(i) == i:
                of.setdefault((config.at(i).n_kv_head, config.at(i).head_dim), []).append(i)
        self.whole = [
            torch.zeros(len(layers), *shape_of(*heads), dtype=dtype, device=device) for heads, layers in of.items()
        ]
        """Each (layers of these sizes, *shape)."""
        own: dict[int, Tensor] = dict(
            zip((i for layers in of.values() for i in layers), (x for t in self.whole for x in t), strict=True)
        )
        self._layers = [own[config.kv_layer(i)] for i in range(config.n_layer)]

    def __getitem__(self, layer: int) -> Tensor:
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.whole)


def allocate(
    config: ModelConfig,
    shape_of: Callable[[int, int], Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    what: str,
) -> tuple[LayerTensors, LayerTensors]:
    """Return tensors of zeros for keys and values.

    They are zero, because a masked value is still multiplied by 0, and 0 * NaN is NaN.

    Args:
        config: shape of the model.
        shape_of: of `LayerTensors`.
        dtype: of each of the two.
        device: of each of the two.
        what: what they hold, for the error message.

    Raises:
        NanoinferError: the device does not have enough memory.
    """
    try:
        return LayerTensors(config, shape_of, dtype, device), LayerTensors(config, shape_of, dtype, device)
    except RuntimeError:  # torch's out-of-memory errors, on CPU and CUDA
        of_heads = torch.empty(shape_of(1, 1), device="meta").numel()
        need = of_heads * config.kv_bytes_per_token(dtype.itemsize)
        raise NanoinferError(
            f"keys and values of {what} need {need:,} bytes, more than {device} has free: lower max_num_seqs or"
            " kv_cache_memory"
        ) from None
