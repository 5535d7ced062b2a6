"""Quantize weights to the formats of GGUF files: the inverse of formats.py.

Scales are searched: for each group of values, several are tried, and the one with the smallest squared error is kept.
The idea is that of `make_qx_quants` and `make_qkx2_quants` in ggml (ggml-quants.c). Covered: Q8_0, Q4_0, Q5_0, Q4_K,
Q6_K and MXFP4, of which the files of export.py consist. Not covered: other formats. Errors can be weighted by the
importance of inputs (`weights.Calibration`); kernels/cpu/quantize.h explains the formula.

Values are stored as (values in a group, groups), so that sums over groups are sums of rows, which NumPy vectorizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.gguf.formats import BY_NAME, Bytes, Floats, Format

_CHUNK = 1 << 15  # values at a time: all intermediate results stay in the processor's cache
_TINY = np.float32(1e-30)  # smaller scales are 0: float16 has none of them
OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0, "TQ2_0": 1}
"""What is added to the integers of a format before they are stored."""
_BETWEEN = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
"""The middles between the magnitudes of MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
_SYMMETRIC_STEPS = np.arange(-9, 10, 3, dtype=np.float32) / 10
"""What is added to the largest integer in the tries of `_symmetric`; ggml tries all from -0.9 to 0.9 by 0.1."""
_AFFINE_STEPS = np.arange(-10, 11, dtype=np.float32) / 10
"""The same of `_affine`, as in ggml."""


def quantize(name: str, values: Floats, importance: Floats | None = None) -> Bytes:
    """Return the blocks of values, (num_blocks, bytes of a block).

    Args:
        name: a format of `QUANTIZERS`.
        values: at most 65,504, float16's largest; the size of the last dimension is a multiple of the format's block.
        importance: of each value of a row, above 0; None: all count alike. Q8_0 and MXFP4 have one choice of scales for
            both.
    """
    format = BY_NAME[name]
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, format.block_size)
    blocks = np.empty((len(rows), format.block_bytes), np.uint8)
    step = _CHUNK // format.block_size
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        blocks[start : start + step] = QUANTIZERS[name](some, None)
        if importance is not None and name not in ("Q8_0", "MXFP4"):
            parts = importance.reshape(-1, format.block_size)
            weights = parts[np.arange(start, start + len(some)) % len(parts)]
            _keep_better(format, some, weights, blocks[start : start + step], QUANTIZERS[name](some, weights))
    return blocks


def _keep_better(format: Format, rows: Floats, weights: Floats, blocks: Bytes, others: Bytes) -> None:
    """Replace the blocks whose weighted squared error is larger than the others', in place.

    The scales of a block are rounded together after the search, so that those found with weights can be worse.
    """
    errors = [(weights * np.square(format.dequantize(b).reshape(rows.shape) - rows)).sum(1) for b in (blocks, others)]
    better = errors[1] < errors[0]
    blocks[better] = others[better]


def _packed(values: NDArray[np.generic], width: int, group: int) -> Bytes:
    """Pack integers of `width` bits into bytes: the inverse of `formats._bits`."""
    parts = values.astype(np.uint8).reshape(len(values), -1, 8 // width, group)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    joined: Bytes = np.bitwise_or.reduce(parts << shifts, axis=2)
    return joined.reshape(len(values), -1)


def _half(values: Floats) -> Floats:
    """Round to float16."""
    return values.astype(np.float16).astype(np.float32)


def _bytes(values: Floats) -> Bytes:
    """Return the float16 bytes of one value for each block."""
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _groups(rows: Floats, size: int) -> Floats:
    """Return (values of blocks, in order) as (values in a group, groups)."""
    return np.ascontiguousarray(rows.reshape(-1, size).T)


def _weights(importance: Floats | None, size: int) -> Floats | None:
    return None if importance is None else _groups(importance, size)


def _inverse(scales: Floats) -> Floats:
    """Return 1 / scales, and 0 where a scale is 0 or nearly so."""
    used = np.abs(scales) > _TINY
    inverse: Floats = np.where(used, 1 / np.where(used, scales, np.float32(1)), np.float32(0))
    return inverse


def _integers(x: Floats, scales: Floats, low: int, high: int) -> Floats:
    """Return the integers whose products with the scales are nearest to the values."""
    q = x * _inverse(scales)
    np.rint(q, out=q)
    return np.clip(q, low, high, out=q)


def _symmetric(x: Floats, h: Floats | None, levels: int) -> Floats:
    """Return the scale of each group for integers in [-levels, levels - 1].

    The largest magnitude becomes about -levels. For the integers q of a try, the best scale is sum(q x) / sum(q q), and
    the squared error is then sum(x x) - sum(q x)**2 / sum(q q). Each term counts h times, 1 if that is None.
    """
    largest = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    best, scales = np.zeros(x.shape[1], np.float32), np.zeros(x.shape[1], np.float32)
    inverse, q = _inverse(-largest), np.empty_like(x)
    for extra in _SYMMETRIC_STEPS:
        np.multiply(x, (levels + extra) * inverse, out=q)
        np.rint(q, out=q)
        np.clip(q, -levels, levels - 1, out=q)
        hq = q if h is None else h * q
        qx, qq = np.einsum("ij,ij->j", hq, x), np.maximum(np.einsum("ij,ij->j", hq, q), _TINY)
        gain = qx * qx / qq
        better = gain > best
        best, scales = np.where(better, gain, best), np.where(better, qx / qq, scales)
    return scales


def _affine(x: Floats, h: Floats | None, highest: int) -> tuple[Floats, Floats]:
    """Return the scale and the minimum, which is not positive, of each group for integers in [0, highest].

    For the integers of a try, scale and minimum are those of a linear regression. Values count h times; None: once.
    """
    hx = x if h is None else h * x
    n, sum_x, sum_xx = len(x) if h is None else h.sum(0), hx.sum(0), np.einsum("ij,ij->j", hx, x)
    low = np.minimum(x.min(0), 0)
    width, above = np.maximum(x.max(0), 0) - low, x - low
    inverse, q = _inverse(width), np.empty_like(x)
    scales, minima, best = width / highest, low, np.full(x.shape[1], np.inf, np.float32)
    for extra in _AFFINE_STEPS:
        np.multiply(above, (highest + extra) * inverse, out=q)
        np.rint(q, out=q)
        np.minimum(q, highest, out=q)
        hq = q if h is None else h * q
        sum_q, qq, qx = hq.sum(0), np.einsum("ij,ij->j", hq, q), np.einsum("ij,ij->j", hq, x)
        spread = n * qq - sum_q * sum_q
        solvable = spread > 1e-5 * n * qq  # less than that is a rounding error of the difference
        divisor = np.where(solvable, spread, 1)
        minimum = np.minimum((qq * sum_x - sum_q * qx) / divisor, 0)
        scale = np.where(minimum < 0, (n * qx - sum_x * sum_q) / divisor, qx / np.maximum(qq, _TINY))
        error = sum_xx + scale * (scale * qq + 2 * (minimum * sum_q - qx)) + minimum * (n * minimum - 2 * sum_x)
        better = (error < best) & solvable
        scales, minima = np.where(better, scale, scales), np.where(better, minimum, minima)
        best = np.where(better, error, best)
    return scales, minima


def assemble(name: str, scales: Floats, u: Bytes) -> Bytes:
    """Return blocks of one of `OFFSETS`.

    Args:
        name: the format.
        scales: float16 numbers, (num_blocks).
        u: integers plus 8, 16, 0 or 1 (`OFFSETS`), as the formats store them, (num_blocks, values of a block).
    """
    if name == "Q8_0":
        return np.concatenate([_bytes(scales), u], axis=1)
    if name == "TQ2_0":
        return np.concatenate([_packed(u, 2, 32), _bytes(scales)], axis=1)
    high = [np.packbits(u >> 4, axis=1, bitorder="little")] if name == "Q5_0" else []
    return np.concatenate([_bytes(scales), *high, u[:, :16] & 15 | u[:, 16:] << 4], axis=1)


def _q8_0(rows: Floats, importance: Floats | None) -> Bytes:
    x = _groups(rows, 32)
    scales = np.abs(x).max(0) / 127
    return assemble("Q8_0", scales, _integers(x, scales, -127, 127).T.astype(np.int8).view(np.uint8))


def _by_32(name: str, rows: Floats, importance: Floats | None) -> Bytes:
    """Return blocks of Q4_0 or Q5_0."""
    x, levels = _groups(rows, 32), OFFSETS[name]
    scales = _half(_symmetric(x, _weights(importance, 32), levels))
    return assemble(name, scales, (_integers(x, scales, -levels, levels - 1) + levels).T.astype(np.uint8))


def _mxfp4(rows: Floats, importance: Floats | None) -> Bytes:
    """The scale makes the largest magnitude 4 to 8, of which 6 is the most, as in ggml: MXFP4 values do not change."""
    exponent = np.frexp(np.abs(rows).max(1, keepdims=True))[1] - 3
    scale = np.clip(exponent + 127, 0, 254)
    codes = np.digitize(np.ldexp(np.abs(rows), 127 - scale), _BETWEEN).astype(np.uint8) | (rows < 0) * np.uint8(8)
    return np.concatenate([scale.astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _q6_k(rows: Floats, importance: Floats | None) -> Bytes:
    x = _groups(rows, 16)
    scales = _symmetric(x, _weights(importance, 16), 32).reshape(-1, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    d = _half(largest / np.float32(-128))
    steps = _integers(scales, d, -128, 127)
    q = (_integers(x, (d * steps).reshape(-1), -32, 31) + 32).T.reshape(-1, 256).astype(np.uint8)
    low, high = _packed(q & 15, 4, 64), _packed(q >> 4, 2, 32)
    return np.concatenate([low, high, steps.astype(np.int8).view(np.uint8), _bytes(d)], axis=1)


def _q4_k(rows: Floats, importance: Floats | None) -> Bytes:
    x = _groups(rows, 32)
    scales, minima = (part.reshape(-1, 8) for part in _affine(x, _weights(importance, 32), 15))
    d, below = _half(scales.max(1, keepdims=True) / 63), _half(-minima.min(1, keepdims=True) / 63)
    s, m = _integers(scales, d, 0, 63), _integers(-minima, below, 0, 63)
    q = _integers(x + (below * m).reshape(-1), (d * s).reshape(-1), 0, 15).T.reshape(-1, 256)
    a, b = s.astype(np.uint8), m.astype(np.uint8)
    head = [a[:, :4] | a[:, 4:] >> 4 << 6, b[:, :4] | b[:, 4:] >> 4 << 6, a[:, 4:] & 15 | b[:, 4:] << 4]
    return np.concatenate([_bytes(d), _bytes(below), *head, _packed(q, 4, 32)], axis=1)


QUANTIZERS: dict[str, Callable[[Floats, Floats | None], Bytes]] = {
    "Q8_0": _q8_0, "Q4_0": partial(_by_32, "Q4_0"), "Q5_0": partial(_by_32, "Q5_0"), "Q4_K": _q4_k, "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}  # fmt: skip
"""By the format's name: (num_blocks, block_size) and as much importance or None -> (num_blocks, block_bytes)."""
