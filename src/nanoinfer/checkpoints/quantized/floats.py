"""FP8, and the 4-bit number formats of bitsandbytes and of the Open Compute Project (MXFP4).

Sources: OCP 8-bit Floating Point (E4M3, E5M2) and Microscaling Formats (E2M1, E8M0); DeepSeek-V3's inference/kernel.py
(weight_dequant: a scale for each 128 x 128 block); QLoRA (Dettmers et al. 2023, arXiv 2305.14314) and bitsandbytes'
functional.py (NF4, FP4, double quantization); transformers' integrations/mxfp4.py (the blocks of gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.formats import FORMATS
from nanoinfer.checkpoints.quantized.base import FLOATS, Codec, Method, Numbers, Parts, Scaled, Scheme, unpack
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.checks import require_float, show
from nanoinfer.utils.files import RegularFile, parse_json

E8M0 = "float8_e8m0fnu"
_MXFP4 = next(format for format in FORMATS.values() if format.name == "MXFP4")
_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
"""Ends of the name of the tensor that has the JSON of a matrix of bitsandbytes."""
_MAX_STATE_BYTES = 1 << 16  # it has about 200


def _float8(exponent_bits: int, mantissa_bits: int) -> NDArray[np.float32]:
    """Return the values of the 256 codes of a format with sign, exponent and mantissa, without those of infinity."""
    codes = np.arange(256)
    exponent, mantissa = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    fraction = (mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)).astype(np.float32)
    bias = (1 << exponent_bits - 1) - 1 + mantissa_bits
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    signed: NDArray[np.float32] = np.where(codes & 128, -values, values)
    return signed


def _tables() -> dict[str, NDArray[np.float32]]:
    e4m3, e5m2 = _float8(4, 3), (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    e4m3[[0x7F, 0xFF]] = np.nan
    e8m0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    return {"float8_e4m3fn": e4m3, "float8_e5m2": e5m2, E8M0: e8m0}


TABLES = _tables()
"""The values of the codes of each format of 8 bits."""


def floats(tensor: StoredTensor) -> NDArray[np.float32]:
    """Read scales as float32."""
    stored = tensor.read()
    return TABLES[E8M0][stored.values] if tensor.dtype == E8M0 else stored.float32()


def scale_of(
    parts: Parts, end: str, shape: tuple[int, int], block: Sequence[int] | None
) -> tuple[Callable[[], Numbers], tuple[int, int]]:
    """Check the scales of a matrix: one, one a row, or one a block. Return how to read them, and a block's size."""
    tensor = parts.take(end, (*FLOATS, E8M0))
    rows, columns = shape
    if prod(tensor.shape) == 1:
        return lambda: floats(tensor).reshape(1, 1), shape
    if tensor.shape in ((rows,), (rows, 1)):
        return lambda: floats(tensor).reshape(-1, 1), (1, columns)
    if block is not None and tensor.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return lambda: floats(tensor), (block[0], block[1])
    wanted = "one scale, or one a row" + ("" if block is None else f", or one for each {block[0]} x {block[1]} block")
    raise parts.error(end, f"is {list(tensor.shape)}, but a matrix of {list(shape)} has {wanted}")


def float8(parts: Parts, scale: str, block: Sequence[int] | None) -> Codec:
    """Return the codec of a matrix of FP8 numbers and their scales, which multiply them whatever their name says."""
    weight = parts.take(".weight", ("float8_e4m3fn", "float8_e5m2"), (None, None))
    rows, columns = weight.shape
    scales, rectangle = scale_of(parts, scale, (rows, columns), block)
    table = TABLES[weight.dtype]
    return Scaled(weight.file, weight.shape, lambda: weight.read().values, scales, rectangle, table=table)


def block_of(f: Fields, name: str) -> Sequence[int] | None:
    """Return the rows and columns of a block; None if there are no blocks."""
    value = f.get(name)
    if value is not None and not (
        isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value)
    ):
        raise f.error(name, "is not a list of rows and columns")
    return value


def _fp8(f: Fields) -> Scheme:
    f.known.update(
        "modules_to_not_convert ignored_layers modules_to_convert scale_fmt dequantize activation_scheme fmt".split()
    )
    f.only("expert_dtype", "fp8", None)
    block = block_of(f, "weight_block_size")
    ends = (".weight_scale_inv", ".weight_scale")
    return Scheme(lambda parts: float8(parts, next(e for e in ends if e in parts), block), activations=True)


def _fbgemm(f: Fields) -> Scheme:
    f.known.update("modules_to_not_convert activation_scale_ub".split())
    return Scheme(lambda parts: float8(parts, ".weight_scale", None), activations=True)


# bitsandbytes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Bits4:
    """NF4 and FP4: code of 4 bits -> a number, times the largest magnitude of 64 consecutive values of the matrix."""

    file: RegularFile
    shape: tuple[int, ...]
    codes: Callable[[], Numbers]
    """Read the indices into the table, (num_values)."""
    table: Callable[[], Numbers]
    scales: Callable[[], NDArray[np.float64]]
    """Read the largest magnitude of each block."""
    block_size: int

    def exact(self) -> tuple[None, str]:
        """As `Codec.exact`."""
        return None, "codes are not integers"

    def dense(self) -> NDArray[np.float32]:
        """As `Codec.dense`."""
        codes, table, scales = self.codes(), self.table().astype(np.float64), self.scales()
        values, step = np.empty(len(codes), np.float32), self.block_size << 14
        for start in range(0, len(codes), step):
            some = table[codes[start : start + step]]
            of = np.repeat(scales[start // self.block_size :][: -(-len(some) // self.block_size)], self.block_size)
            values[start : start + step] = some * of[: len(some)]
        return values.reshape(self.shape)

    def blocks(self, format: str) -> NDArray[np.uint8]:
        """Not called: there is no format."""
        raise AssertionError


def _state(parts: Parts) -> tuple[dict[str, Any], str]:
    """Return the JSON of a matrix, and the name of its tensor's end."""
    nf4, fp4 = _STATES
    end = fp4 if fp4 in parts else nf4
    tensor = parts.take(end, ("uint8",), (None,))
    if tensor.shape[0] > _MAX_STATE_BYTES:
        raise parts.error(end, f"has {tensor.shape[0]} bytes; the limit is {_MAX_STATE_BYTES}")
    state = parse_json(tensor.read().values.tobytes(), f"tensor {show(parts.stem + end)[1:-1]} is not JSON")
    return state if isinstance(state, dict) else {}, end


def _size(parts: Parts, end: str, state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 < value <= 1 << 20:
        raise parts.error(end, f"has {name}={show(value)}, which is not a number of values")
    return value


def _bits4(parts: Parts) -> Codec:
    state, end = _state(parts)
    shape = state.get("shape")
    packed = parts.take(".weight", ("uint8",))
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**31 for n in shape)):
        raise parts.error(end, f"has shape={show(shape)}, which is not that of a matrix")
    count, size = prod(shape), _size(parts, end, state, "blocksize")
    if prod(packed.shape) != -(-count // 2):
        what = f"has {prod(packed.shape)} bytes, but {shape} values of 4 bits need {-(-count // 2)}"
        raise parts.error(".weight", what)
    num_blocks = -(-count // size)
    table = parts.take(".weight.quant_map", ("float32",), (16,))

    def codes() -> Numbers:
        pairs = packed.read().values.reshape(-1, 1)
        return np.concatenate([pairs >> 4, pairs & 15], axis=1).reshape(-1)[:count]

    if ".weight.nested_absmax" not in parts:
        absmax = parts.take(".weight.absmax", ("float32",), (num_blocks,))
        scales = lambda: absmax.read().float32().astype(np.float64)  # noqa: E731
    else:
        absmax = parts.take(".weight.absmax", ("uint8",), (num_blocks,))
        nested_size = _size(parts, end, state, "nested_blocksize")
        nested = parts.take(".weight.nested_absmax", ("float32",), (-(-num_blocks // nested_size),))
        nested_table = parts.take(".weight.nested_quant_map", ("float32",), (256,))
        offset = require_float("nested_offset", state.get("nested_offset"), -1e30, 1e30)

        def scales() -> NDArray[np.float64]:
            largest = np.repeat(nested.read().float32().astype(np.float64), nested_size)[:num_blocks]
            exact: NDArray[np.float64] = nested_table.read().float32().astype(np.float64)[absmax.read().values]
            exact *= largest
            exact += offset
            return exact

    return _Bits4(packed.file, tuple(shape), codes, lambda: table.read().float32(), scales, size)


def _bits8(parts: Parts) -> Codec:
    """LLM.int8: a row's largest magnitude is 127."""
    weight = parts.take(".weight", ("int8",), (None, None))
    largest = parts.take(".SCB", ("float32",), (weight.shape[0],))
    if ".weight_format" in parts and parts.take(".weight_format", ("uint8",)).read().values.any():
        raise parts.error(".weight_format", "is not 0: only row-major matrices are supported")
    scales = lambda: largest.read().float32().astype(np.float64).reshape(-1, 1) / 127  # noqa: E731
    return Scaled(
        weight.file, weight.shape, lambda: weight.read().values, scales, (1, weight.shape[1]), limits=(-128, 127)
    )


def _bitsandbytes(f: Fields) -> Scheme:
    f.known.update(
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type"
        " bnb_4bit_use_double_quant bnb_4bit_quant_storage llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
        " llm_int8_skip_modules llm_int8_threshold".split()
    )
    return Scheme(lambda parts: _bits8(parts) if ".SCB" in parts else _bits4(parts))


# MXFP4 ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """Numbers of 4 bits, the first of a pair in the low bits, and a power of 2 for each 32 of them."""

    packed: StoredTensor
    """(..., out, in / 2) or (..., out, in / 32, 16), uint8."""
    scale: StoredTensor
    """Exponent + 127: (..., out, in / 32), uint8."""
    shape: tuple[int, ...]

    @property
    def file(self) -> RegularFile:
        """As `Codec.file`."""
        return self.packed.file

    def exact(self) -> tuple[str | None, str]:
        """As `Codec.exact`."""
        return "mxfp4", ""

    def views(self, split: Callable[[StoredTensor], list[StoredTensor]]) -> list[Codec]:
        """As `Codec.views`."""
        pairs = zip(split(self.packed), split(self.scale), strict=True)
        return [Mxfp4(packed, scale, (*scale.shape[:-1], scale.shape[-1] * 32)) for packed, scale in pairs]

    def dense(self) -> NDArray[np.float32]:
        """As `Codec.dense`."""
        return _MXFP4.dequantize(self._blocks()).reshape(self.shape)

    def blocks(self, format: str) -> NDArray[np.uint8]:
        """As `Codec.blocks`."""
        return self._blocks().reshape(self.shape[0], -1)

    def _blocks(self) -> NDArray[np.uint8]:
        """Return (num_blocks, 17) bytes: the scale, then values i and i + 16 in the low and high bits of a byte."""
        codes = unpack(self.packed.read().values.reshape(-1, 16), 4, 32)
        return np.concatenate([self.scale.read().values.reshape(-1, 1), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def mxfp4(parts: Parts, packed: str, scale: str) -> Codec:
    """Return the codec of a matrix, or of several, with blocks of 32 along the last dimension."""
    scales = parts.take(scale, ("uint8", E8M0))
    if len(scales.shape) < 2 or not all(scales.shape):
        raise parts.error(scale, f"is {list(scales.shape)}, but must be (..., out, in / 32)")
    *front, groups = scales.shape
    by_group = parts.take(packed, ("uint8",), (*front, groups, 16) if packed == "_blocks" else (*front, groups * 16))
    return Mxfp4(by_group, scales, (*front, groups * 32))


def _mxfp4(f: Fields) -> Scheme:
    f.known.update("modules_to_not_convert dequantize".split())
    return Scheme(lambda parts: mxfp4(parts, "_blocks", "_scales"))


FP8 = Method((".weight_scale_inv", ".weight_scale"), (".weight",), _fp8, linear=False)
FBGEMM_FP8 = Method((".weight_scale",), (".weight",), _fbgemm, linear=False)
BITSANDBYTES = Method(
    (".weight.absmax", ".SCB"),
    (".weight", ".weight_format", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *_STATES),
    _bitsandbytes,
)
MXFP4 = Method(("_blocks",), ("_scales",), _mxfp4, result="")
