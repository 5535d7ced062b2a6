"""The formats of quantized tensors in GGUF files, and their values in float32.

A row of a tensor is a sequence of blocks; a block has scales (float16) and small integers. The layout of each format is
that of the structs in ggml (ggml-common.h), and the values are those of its `dequantize_row_*` (ggml-quants.c).
https://github.com/ggml-org/ggml/tree/master/src

A code of a block of IQ2_S, IQ3_XXS and IQ3_S stands for 4 or 8 magnitudes, each one of a few levels; further bits are
their signs. The codebooks are those of ggml (iq2s_grid, iq3xxs_grid, iq3s_grid): their entries, read as numbers whose
first digit is the lowest, ascend, so that their differences are stored here.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Blocks, or a field of each block: (num_blocks, bytes)."""
Floats = NDArray[np.float32]

_CHUNK = 1 << 20  # values that are computed at a time, which limits the memory of intermediate results
_K = 256  # values in a block of the K formats
_IQ4_NL = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)

_E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)


@dataclass(frozen=True)
class Format:
    """A way of storing values in blocks."""

    name: str
    block_size: int
    """Values in a block."""
    block_bytes: int
    """Bytes of a block."""
    compute: Callable[[Bytes], Floats] | None = None
    """Return the values of blocks, (num_blocks, block_size); None: the format is not quantized."""
    converted: tuple[str, Callable[[Bytes], Bytes]] | None = None
    """The format of the same values that engine native computes in, and what converts blocks; None: this one."""

    rounded: bool = False
    """Whether engine native has no such format, and rounds the values to Q8_0."""

    @property
    def native(self) -> bool:
        """Whether engine native computes in these blocks."""
        return self.compute is not None and self.converted is None and not self.rounded

    def dequantize(self, blocks: Bytes) -> Floats:
        """Return the values of the bytes of whole blocks, in any shape, as one dimension."""
        assert self.compute is not None
        blocks = blocks.reshape(-1, self.block_bytes)
        values = np.empty((len(blocks), self.block_size), np.float32)
        step = max(1, _CHUNK // self.block_size)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be infinite or NaN
            for start in range(0, len(blocks), step):
                values[start : start + step] = self.compute(blocks[start : start + step])
        return values.reshape(-1)


def _half(field: Bytes) -> Floats:
    """Return float16 fields of 2 bytes as (num_blocks, fields) float32."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def _bits(field: Bytes, width: int, group: int) -> Bytes:
    """Return integers of `width` bits: the lowest bits of `group` bytes, then their next bits, and so on.

    With width 4 and group 2, the bytes 0x21 0x43 are the integers 1, 3, 2, 4.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts: Bytes = field.reshape(len(field), -1, 1, group) >> shifts & np.uint8((1 << width) - 1)
    return parts.reshape(len(field), -1)


def _grouped(scales: Floats, values: NDArray[np.generic]) -> Floats:
    """Return values multiplied by the scales of their groups, which are equally large: (num_blocks, groups) each."""
    count = values.shape[1] // scales.shape[1]
    products: Floats = np.repeat(scales, count, axis=1) * values.astype(np.float32)
    return products


def _five_bits(high: Bytes, low: Bytes) -> Floats:
    """Return integers of 5 bits: the fifth bits are those of `high`, in order."""
    values: Bytes = _bits(low, 4, 16) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return values.astype(np.float32)


def _q2_k(b: Bytes) -> Floats:
    scales, values, d, minimum = b[:, :16], _bits(b[:, 16:80], 2, 32), _half(b[:, 80:82]), _half(b[:, 82:84])
    products = _grouped(d * (scales & 15).astype(np.float32), values)
    return products - np.repeat(minimum * (scales >> 4).astype(np.float32), 16, axis=1)


def _q3_k(b: Bytes) -> Floats:
    high, low = _bits(b[:, :32], 1, 32), _bits(b[:, 32:96], 2, 32)
    scales = _bits(b[:, 96:104], 4, 8) | _bits(b[:, 104:108], 2, 4) << np.uint8(4)
    values = low.astype(np.int8) - ((1 - high) << np.uint8(2)).astype(np.int8)  # minus 4 if the high bit is 0
    return _grouped(_half(b[:, 108:110]) * (scales.astype(np.float32) - 32), values)


def _scales_and_minima(b: Bytes) -> tuple[Floats, Floats]:
    """Return the 8 scales and the 8 minima of blocks of Q4_K and Q5_K, which begin with two factors, then 12 bytes.

    Of each, the first four are the low 6 bits of a byte; the last four have 4 bits in the last 4 bytes, and their 2
    highest bits are those of the first ones' bytes.
    """
    s, m, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([s & 63, last & 15 | s >> 6 << 4], axis=1).astype(np.float32)
    minima = np.concatenate([m & 63, last >> 4 | m >> 6 << 4], axis=1).astype(np.float32)
    return _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima


def _q4_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b)
    return _grouped(scales, _bits(b[:, 16:], 4, 32)) - np.repeat(minima, 32, axis=1)


def _q5_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b)
    values = _bits(b[:, 48:], 4, 32) | _bits(b[:, 16:48], 1, 32) << np.uint8(4)
    return _grouped(scales, values) - np.repeat(minima, 32, axis=1)


def _q6_k(b: Bytes) -> Floats:
    values = _bits(b[:, :128], 4, 64) | _bits(b[:, 128:192], 2, 32) << np.uint8(4)
    scales = _half(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(np.float32)
    return _grouped(scales, values.astype(np.float32) - 32)


def _iq4_xs(b: Bytes) -> Floats:
    high = _bits(b[:, 2:4], 2, 1)  # the high bits of scale i are bits 2 i and 2 i + 1 of 16
    scales = (_bits(b[:, 4:8], 4, 1) | high << np.uint8(4)).astype(np.float32) - 32
    return _grouped(_half(b[:, :2]) * scales, _IQ4_NL[_bits(b[:, 8:], 4, 16)])


def _mxfp4(b: Bytes) -> Floats:
    scales = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)  # half of the scale: _E2M1 has twice the values
    products: Floats = scales * _E2M1[_bits(b[:, 1:], 4, 16)]
    return products


def _ollama_mxfp4_to_mxfp4(b: Bytes) -> Bytes:
    """Return blocks with values i and i + 16 in a byte, of blocks with values 2 i and 2 i + 1 in one."""
    codes = _bits(b[:, 1:], 4, 1)
    return np.concatenate([b[:, :1], codes[:, :16] | codes[:, 16:] << np.uint8(4)], axis=1)


def _nvfp4(b: Bytes) -> Floats:
    exponent, fraction = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    scales = np.where(exponent == 0, np.ldexp(fraction, -10), np.ldexp(1 + fraction / 8, exponent - 8))  # halves
    scales[b[:, :4] == 127] = 0.0
    return _grouped(scales.astype(np.float32), _E2M1[_bits(b[:, 4:], 4, 8)])


def _signs(field: Bytes) -> Bytes:
    return np.unpackbits(np.ascontiguousarray(field), axis=1, bitorder="little")


def _iq2_s(b: Bytes) -> Floats:
    codes = b[:, 2:34] | _bits(b[:, 66:74], 2, 1).astype(np.uint16) << 8
    scales = _half(b[:, :2]) * (np.float32(0.5) + _bits(b[:, 74:], 4, 1)) * np.float32(0.25)
    return _grouped(scales, IQ2_S.values(codes, _signs(b[:, 34:66])))


def _iq3_xxs(b: Bytes) -> Floats:
    words = np.ascontiguousarray(b[:, 66:]).view("<u4")  # 4 bits of a scale, and 7 signs of each 8 values
    signs = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127).astype(np.uint8).reshape(len(b), -1)
    signs = _signs(signs)
    signs[:, 7::8] = signs.reshape(len(b), -1, 8).sum(axis=2) % 2  # an even number of them is negative
    scales = _half(b[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _grouped(scales, IQ3_XXS.values(b[:, 2:66], signs))


def _iq3_s(b: Bytes) -> Floats:
    codes = b[:, 2:66] | _bits(b[:, 66:74], 1, 1).astype(np.uint16) << 8
    scales = _half(b[:, :2]) * (1 + 2 * _bits(b[:, 106:], 4, 1)).astype(np.float32)
    return _grouped(scales, IQ3_S.values(codes, _signs(b[:, 74:106])))


def _trits(field: Bytes, count: int) -> Bytes:
    """Return `count` digits of base 3 of each byte: the first ones of all bytes, then the second ones, and so on.

    A byte is 256 / 3^5 times a number of five digits, rounded up: its product with 3 has the first digit above 8 bits.
    """
    rest = field[:, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]  # modulo 256
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(field), -1)


def _tq1_0_to_tq2_0(b: Bytes) -> Bytes:
    codes = np.concatenate([_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], axis=1)
    fields = codes.reshape(len(b), 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.concatenate([np.bitwise_or.reduce(fields, axis=2).reshape(len(b), 64), b[:, 52:]], axis=1)


def _tq2_0(b: Bytes) -> Floats:
    products: Floats = _half(b[:, 64:]) * (_bits(b[:, :64], 2, 32).astype(np.float32) - 1)
    return products


FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18, lambda b: _half(b[:, :2]) * (_bits(b[:, 2:], 4, 16).astype(np.float32) - 8)),
    3: Format("Q4_1", 32, 20, lambda b: _half(b[:, :2]) * _bits(b[:, 4:], 4, 16).astype(np.float32) + _half(b[:, 2:4])),
    4: Format("OLLAMA_MXFP4", 32, 17, lambda b: _mxfp4(_ollama_mxfp4_to_mxfp4(b)), ("MXFP4", _ollama_mxfp4_to_mxfp4)),
    6: Format("Q5_0", 32, 22, lambda b: _half(b[:, :2]) * (_five_bits(b[:, 2:6], b[:, 6:]) - 16)),
    7: Format("Q5_1", 32, 24, lambda b: _half(b[:, :2]) * _five_bits(b[:, 4:8], b[:, 8:]) + _half(b[:, 2:4])),
    8: Format("Q8_0", 32, 34, lambda b: _half(b[:, :2]) * b[:, 2:].view(np.int8).astype(np.float32)),
    10: Format("Q2_K", _K, 84, _q2_k),
    11: Format("Q3_K", _K, 110, _q3_k),
    12: Format("Q4_K", _K, 144, _q4_k),
    13: Format("Q5_K", _K, 176, _q5_k),
    14: Format("Q6_K", _K, 210, _q6_k),
    18: Format("IQ3_XXS", _K, 98, _iq3_xxs, rounded=True),
    20: Format("IQ4_NL", 32, 18, lambda b: _half(b[:, :2]) * _IQ4_NL[_bits(b[:, 2:], 4, 16)]),
    21: Format("IQ3_S", _K, 110, _iq3_s, rounded=True),
    22: Format("IQ2_S", _K, 82, _iq2_s, rounded=True),
    23: Format("IQ4_XS", _K, 136, _iq4_xs),
    28: Format("F64", 1, 8),
    30: Format("BF16", 1, 2),
    34: Format("TQ1_0", _K, 54, lambda b: _tq2_0(_tq1_0_to_tq2_0(b)), ("TQ2_0", _tq1_0_to_tq2_0)),
    35: Format("TQ2_0", _K, 66, _tq2_0),
    39: Format("MXFP4", 32, 17, _mxfp4),
    40: Format("NVFP4", 64, 36, _nvfp4, rounded=True),
}
"""By ggml's number of the type."""
BY_NAME = {format.name: format for format in FORMATS.values()}

OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0, "TQ2_0": 1}
"""Format -> the number that is added to its integers before they are stored."""


def assemble(name: str, scales: Floats, u: Bytes) -> Bytes:
    """Return blocks of one of `OFFSETS`.

    Args:
        name: the format.
        scales: float16 numbers, (num_blocks).
        u: integers plus 8, 16, 0 or 1 (`OFFSETS`), as the formats store them, (num_blocks, values of a block).
    """
    halves = scales.astype("<f2").reshape(-1, 1).view(np.uint8)
    if name == "Q8_0":
        return np.concatenate([halves, u], axis=1)
    if name == "TQ2_0":  # the lowest bits of 32 bytes, then their next bits, and so on
        fields = u.reshape(len(u), 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return np.concatenate([np.bitwise_or.reduce(fields, axis=2).reshape(len(u), 64), halves], axis=1)
    high = [np.packbits(u >> 4, axis=1, bitorder="little")] if name == "Q5_0" else []
    return np.concatenate([halves, *high, u[:, :16] & 15 | u[:, 16:] << 4], axis=1)


UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 19: "IQ1_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    29: "IQ1_M",
}  # fmt: skip
"""Names of other types, for messages."""


class Codebook:
    """The magnitudes of each code.

    Args:
        levels: the values that a magnitude may have.
        count: magnitudes of a code.
        packed: the differences of the entries' numbers, one byte each, compressed, in base 85.
    """

    def __init__(self, levels: tuple[int, ...], count: int, packed: str) -> None:
        numbers = np.cumsum(np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8), dtype=np.int64)
        digits = numbers[:, None] // len(levels) ** np.arange(count) % len(levels)
        self._magnitudes = np.array(levels, np.float32)[digits]

    def values(self, codes: NDArray[Any], negative: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the values of blocks: codes (num_blocks, codes), and a bit for each value (num_blocks, values)."""
        magnitudes: NDArray[np.float32] = self._magnitudes[codes].reshape(negative.shape)
        return np.where(negative == 1, -magnitudes, magnitudes)


IQ2_S = Codebook((8, 25, 43), 8, (
    "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s(v1b{Ofw;)l5ecGzfFpcr"
    "Gw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%|3YF+P4b"
    "09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?"
    "4mZ#z^>~y*k+!9GT;z*5_&T)VvnXa8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH"
))  # fmt: skip
IQ3_XXS = Codebook((4, 12, 20, 28, 36, 44, 52, 62), 4, (
    "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtUZJ2G"
    "E2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU"
    "1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE"
))  # fmt: skip
IQ3_S = Codebook((1, 3, 5, 7, 9, 11, 13, 15), 4, (
    "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<ZksOlW"
    "I2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_"
    "#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8"
    "*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W"
))  # fmt: skip
