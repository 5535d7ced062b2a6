"""Loading of the native decoder: stored values of every form are packed alike; packed matrices are used in place."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from helpers.models import make_model
from helpers.native import FORMATS, ISAS, V, _native, extend, make_decoder, new_decoder, tokens
from nanoinfer.utils.arrays import HostTensor

Array = Any  # of numpy


def random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


DTYPES = ["float32", "float16", "bfloat16"]
LAYOUTS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: np.asfortranarray(a),
    "every second column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
    "transposed backwards": lambda a: np.asfortranarray(a[::-1, ::-1])[::-1, ::-1],
    "misaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


def stored_as(x: Array, dtype: str) -> HostTensor:
    return HostTensor(np.ascontiguousarray(x), "float32").to(dtype)


def is_chosen(fmt: str, dtype: str, layout: str) -> bool:
    """Return whether a case is one of those in which each two of the parameters' values meet."""
    return (3 * FORMATS.index(fmt) + DTYPES.index(dtype) - list(LAYOUTS).index(layout)) % 4 == 0


@pytest.mark.nightly_if(lambda fmt, dtype, layout: not is_chosen(fmt, dtype, layout))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda s: s.replace(" ", "-"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_values_are_packed_as_if_they_were_float32(fmt: str, dtype: str, layout: str) -> None:
    for shape in ((70, 130), (32, 16), (33, 17), (1, 5), (5, 1), (64, 200)):
        given = stored_as(random(shape, sum(shape), 0.1), dtype)
        values = LAYOUTS[layout](given.values)
        assert np.array_equal(values, given.values)
        for threads in (1, 3):
            panels, scales = _native.pack(values=values, dtype=dtype, format=fmt, threads=threads)
            expected = _native.pack(values=given.float32(), dtype="float32", format=fmt, threads=1)
            assert np.array_equal(panels, expected[0])
            assert np.array_equal(scales, expected[1])
        assert (panels.size, scales.size) == _native.packed_size(format=fmt, rows=shape[0], columns=shape[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value_is_read(dtype: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    given = HostTensor(bits if dtype == "bfloat16" else bits.view(np.float16), dtype)
    expected = given.float32()
    nan = np.isnan(expected)
    for values in (given.values, np.asfortranarray(given.values)):
        got = _native.unpack(weights=values, dtype=dtype, format="float32")
        assert np.isnan(got[nan]).all()
        assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))
        got = _native.unpack(weights=values, dtype=dtype, format=dtype)  # neither loses anything
        assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_int8_rounds_to_nearest_even() -> None:
    row = np.array([127.0, *np.arange(-126.5, 127), 0.49999997, -0.49999997, 1e-30, 126.99999], np.float32)[None]
    assert np.array_equal(_native.unpack(weights=row, format="int8"), np.rint(row))


BAD_VALUES: list[tuple[Any, str]] = [
    (np.zeros((3, 4)), "float32"), (np.zeros((3, 4), np.int32), "float32"), (np.zeros((3, 4), np.float16), "float32"),
    (np.zeros((3, 4), np.float32), "float16"), (np.zeros((3, 4), np.float32), "bfloat16"),
    (np.zeros((3, 4), np.int16), "bfloat16"), (np.zeros((3, 4), np.uint16), "float16"),
    (np.zeros((3, 4), np.float32), "float64"), (np.zeros((3, 4), np.float32), ""),
    (np.zeros((), np.float32), "float32"),
    (np.zeros((2, 3, 4), np.float32), "float32"), (np.zeros((0, 4), np.float32), "float32"),
    (np.zeros((4, 0), np.float32), "float32"), (np.broadcast_to(np.float32(0), (2**30, 2)), "float32"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(BAD_VALUES)))
def test_bad_values_are_refused_in_one_line(case: int) -> None:
    values, dtype = BAD_VALUES[case]
    with pytest.raises(ValueError) as caught:
        _native.pack(values=values, dtype=dtype, format="int8", threads=1)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def load_packed(decoder: Any, fmt: str, change: Any = lambda panels: panels) -> None:
    """Load the tiny model with its matrices packed; `change` replaces their panels."""
    for name, tensor in make_model().named_parameters():
        values = tensor.numpy()
        if values.ndim == 1 or "wpe" in name:
            decoder.load(name, values)
            continue
        panels, scales = _native.pack(values=values, dtype="float32", format=fmt, threads=1)
        decoder.load_packed(name, change(aligned(panels)), scales)
    decoder.check_loaded()


def aligned(panels: Any, offset: int = 0) -> Any:
    """Return a copy at a multiple of 64 bytes plus `offset`."""
    buffer = np.empty(panels.size + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    buffer[start : start + panels.size] = panels
    return buffer[start : start + panels.size]


@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_matrices_are_used_in_place(fmt: str) -> None:
    decoder, plain = new_decoder(weights=fmt, packed=True), make_decoder(weights=fmt)
    load_packed(decoder, fmt)
    gc.collect()
    text = tokens(20, 0)
    expected = extend(plain, [(plain.open(), text)])
    assert np.array_equal(extend(decoder, [(decoder.open(), text)]), expected)
    assert decoder.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_bytes_as_panels_are_only_numbers(fmt: str) -> None:
    """Scales, zero points and weights from a file can make logits wrong, but no access out of bounds."""
    rng = np.random.default_rng(0)
    for isa in ISAS:
        for value in (0, 0x7F, 0x80, 0xFF, None):
            decoder = new_decoder(weights=fmt, isa=isa, packed=True)
            low, high = (0, 256) if value is None else (value, value + 1)
            load_packed(decoder, fmt, lambda p, low=low, high=high: aligned(rng.integers(low, high, p.size, np.uint8)))
            assert extend(decoder, [(decoder.open(), tokens(20, 0))]).shape == (20, V)


def test_packed_matrices_are_checked() -> None:
    name, wte = "transformer.wte.weight", make_model().transformer.wte.weight.numpy()
    panels, scales = _native.pack(values=wte, dtype="float32", format="int8", threads=1)
    panels, none = aligned(panels), np.zeros(0, np.float32)
    decoder = new_decoder(weights="int8", packed=True)
    for arguments in (
        ("wte", panels, scales), ("transformer.ln_f.weight", panels, scales),
        ("transformer.wpe.weight", panels, scales),
        ("lm_head.weight", panels, scales), (name, panels[:-1], scales), (name, panels[:0], scales),
        (name, aligned(np.append(panels, 0)), scales), (name, panels, scales[:-1]), (name, panels, none),
        (name, aligned(panels, 32), scales), (name, aligned(panels, 1), scales),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            decoder.load_packed(*arguments)
    for arguments in (
        (name, panels.astype(np.int8), scales), (name, panels, scales.astype(np.float64)), (name, None, scales),
        (name, np.repeat(panels, 2)[::2], scales), (name, panels[None], scales),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            decoder.load_packed(*arguments)
    with pytest.raises(ValueError, match="load_packed"):
        decoder.load(name, wte)
    with pytest.raises(ValueError, match="not loaded"):
        decoder.check_loaded()
    decoder.load_packed(name, panels, scales)
    with pytest.raises(ValueError, match="cannot be packed"):
        new_decoder(weights="int8").load_packed(name, panels, scales)
    with pytest.raises(ValueError, match="scales"):
        new_decoder(weights="float32", packed=True).load_packed(name, panels, scales)


def test_packed_sizes_are_checked() -> None:
    assert _native.packed_size(format="int8", rows=V, columns=16) == (2 * 32 * 64, 64)
    assert _native.packed_size(format="mxfp4", rows=1, columns=32) == (17 * 32 + 32, 0)  # padded to 64 bytes
    for rows, columns in ((0, 1), (1, 0), (-1, 5), (2**26 + 1, 1), (1, 2**62)):
        with pytest.raises(ValueError, match=r"2\*\*26"):
            _native.packed_size(format="int8", rows=rows, columns=columns)
    with pytest.raises(ValueError, match="int3"):
        _native.packed_size(format="int3", rows=1, columns=1)
