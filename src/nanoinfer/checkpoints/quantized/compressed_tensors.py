"""compressed-tensors, the format of llm-compressor: packed integers, int8, FP8, MXFP4.

The layers are known by what is stored: the number of bits and the groups follow from shapes, where the config lists
which it uses. Source: compressed_tensors/compressors (pack_quantized, naive_quantized, mxfp4) and
quantization/lifecycle/forward.py. The reference computes in the dtype of the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from nanoinfer.checkpoints.quantized.base import (
    FLOATS,
    Codec,
    Method,
    Numbers,
    Parts,
    Scaled,
    Scheme,
    groups_of,
    order_of,
    unpack,
)  # fmt: skip
from nanoinfer.checkpoints.quantized.floats import block_of, float8, mxfp4, scale_of
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.families.fields import Fields
from nanoinfer.utils.checks import show

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mixed-precision",
    "dense",
)  # fmt: skip


def _read(f: Fields) -> Scheme:
    f.known.update("ignore global_compression_ratio version quant_method".split())
    f.only("quantization_status", "compressed", "frozen", None)
    _check_format(f)
    sparsity = f.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in ("dense", None):
        raise f.error("sparsity_config", "is not supported: only dense tensors are")
    if f.get("transform_config"):
        raise f.error("transform_config", "is not supported: inputs would have to be transformed")
    groups = f.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise f.error("config_groups", "is not an object of groups of layers")
    bits, blocks, activations = set[int](), set[tuple[int, ...]](), f.get("kv_cache_scheme") is not None
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise NanoinferError(f"config_groups: {show(name)} does not say how weights are stored")
        with about(f"config_groups: {show(name)}"):
            own = Fields(group)
            _check_format(own)
            weights = Fields(group["weights"])
            bits.add(weights.integer("num_bits", 8))
            weights.only("type", "int", "float")
            if (block := block_of(weights, "block_structure")) is not None:
                blocks.add(tuple(block))
        activations = activations or any(group.get(part) for part in ("input_activations", "output_activations"))
    return Scheme(lambda parts: _open(parts, sorted(bits), next(iter(sorted(blocks)), None)), activations=activations)


def _check_format(f: Fields) -> None:
    if f.get("format") is not None and f.get("format") not in _FORMATS:
        raise f.error("format", f"is not supported: only {', '.join(_FORMATS)} are")


def _open(parts: Parts, bits: Sequence[int], block: Sequence[int] | None) -> Codec:
    if ".weight_packed" not in parts:
        weight = parts.take(".weight", ("int8", "float8_e4m3fn", "float8_e5m2"), (None, None))
        if weight.dtype != "int8":
            return float8(parts, ".weight_scale", block)
        scaled = Scaled(weight.file, weight.shape, lambda: weight.read().values, limits=(-128, 127))
        return _with_scales(parts, scaled, 8, block)
    packed = parts.take(".weight_packed", ("int32", "uint8"), (None, None))
    if packed.dtype == "uint8":
        if ".weight_global_scale" in parts:
            raise parts.error(".weight_global_scale", "is not supported: NVFP4 is not")
        return mxfp4(parts, ".weight_packed", ".weight_scale")
    rows, columns = parts.take(".weight_shape", ("int32", "int64"), (2,)).read().values.tolist()
    fitting = [n for n in bits if n <= 8 and -(-columns * n // 32) == packed.shape[1]]
    if rows != packed.shape[0] or columns < 1 or len(fitting) != 1:
        named = " or ".join(map(str, bits))
        raise parts.error(".weight_packed", f"is {list(packed.shape)}: not {[rows, columns]} numbers of {named} bits")
    width = fitting[0]
    half = np.full((1, 1), 1 << width - 1, np.int16)  # is added to integers, and to zero points, before they are packed
    scaled = Scaled(
        packed.file, (rows, columns), lambda: unpack(packed.read().values, width, columns), zeros=lambda: half,
        limits=(0, (1 << width) - 1),
    )  # fmt: skip
    return _with_scales(parts, scaled, width, block)


def _with_scales(parts: Parts, integers: Scaled, bits: int, block: Sequence[int] | None) -> Codec:
    """Return integers with their scales: one, one a row, or one for each group of columns or block."""
    rows, columns = integers.shape
    scale, order = parts.take(".weight_scale", FLOATS), None
    if len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 1:
        groups = scale.shape[1]
        order = order_of(parts, ".weight_g_idx", columns, groups)
        each = columns if order is not None else groups_of(parts, ".weight_scale", columns, groups)
        scales, rectangle = lambda: scale.read().float32(), (1, each)
    else:
        scales, rectangle = scale_of(parts, ".weight_scale", (rows, columns), block)
    zeros = integers.zeros
    if ".weight_zero_point" in parts:
        zeros = _zeros(parts, bits, scale.shape, int(zeros()[0, 0]))
    return replace(integers, scales=scales, block=rectangle, zeros=zeros, order=order)


def _zeros(parts: Parts, bits: int, shape: tuple[int, ...], offset: int) -> Callable[[], Numbers]:
    """Return how to read zero points plus an offset. They are packed along the rows if they are words."""
    rows, groups = shape if len(shape) == 2 else (prod(shape), 1)
    if parts.take(".weight_zero_point", ("int8", "int32")).dtype == "int8":
        plain = parts.take(".weight_zero_point", ("int8",), shape)
        return lambda: plain.read().values.reshape(rows, groups).astype(np.int16) + offset
    packed = parts.take(".weight_zero_point", ("int32",), (-(-rows * bits // 32), groups))
    return lambda: unpack(packed.read().values.T, bits, rows).T


COMPRESSED_TENSORS = Method(
    (".weight_scale",),
    (".weight", ".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
    _read,
)
