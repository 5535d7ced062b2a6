"""Every kernel on every instruction set of this machine, against numpy in double precision.

The reference multiplies what the packed format stores (`unpack`) with what the format's activations are rounded to:
float32 and float16: not at all; bfloat16: to bfloat16; int8: to 8 bits, a scale of largest / 127 for every
64 inputs. A kernel may then differ by the rounding of a float32 sum: RTOL of the sum of the magnitudes.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

ISAS = [name for name, missing in _native.instruction_sets() if not missing]
FORMATS = ["float32", "float16", "bfloat16", "int8"]
CACHES = ["float32", "bfloat16", "int8", "int4"]
SIZES = [1, 2, 7, 16, 31, 32, 33, 63, 64, 65, 100, 129, 768]
QUICK = "NANOINFER_TEST_EXTENSION" in os.environ  # make asan: every access is checked, so fewer will do
EXAMPLES = 15 if QUICK else 60
RTOL, ATOL = 2e-6, 1e-37  # of the sum of |w x|: float32 sums of up to 768 products, and what underflows
GROUP = 64

Array = Any  # of numpy; shapes are in the comments


def bf16(x: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def integers(x: Array, group: int, integer: int) -> Array:
    """What rows of activations are as integers up to `integer`, a scale for each group: (rows, in), in float64."""
    out = np.zeros(x.shape)
    for at in range(0, x.shape[1], group):
        part = x[:, at : at + group]
        most = np.abs(part).max(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.where(most > 1e-30, np.float32(integer) / most, np.float32(0))
        q = np.rint((part * inverse).astype(np.float32))
        out[:, at : at + group] = q * (most / np.float32(integer)).astype(np.float64)
    return out


def activations(x: Array, fmt: str, isa: str) -> Array:
    if fmt in ("float32", "float16"):
        return x.astype(np.float64)
    if fmt == "bfloat16":
        return bf16(x).astype(np.float64)
    if fmt == "int8" and isa == "amx":  # 16 bits, one scale of a row
        return integers(x, x.shape[1], 127 << 8)
    return integers(x, GROUP, 127)


def gelu(x: Array, epilogue: str) -> Array:
    if epilogue == "gelu_erf":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def multiply(weights: Array, x: Array, fmt: str, isa: str, bias: Array = None, **more: Any) -> Array:
    result: Array = _native.multiply(weights=weights, bias=bias, x=x, format=fmt, isa=isa, **more)
    return result


def random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def test_more_inputs_than_sums_of_int8_can_hold() -> None:
    weights = np.full((1, 131_073), 127, np.float32)
    for isa in ISAS:
        with pytest.raises(ValueError, match="a matrix of 131073 inputs in int8: the limit is 131072; use bfloat16"):
            multiply(weights, weights, "int8", isa)
        most = multiply(weights[:, 1:], weights[:, 1:], "int8", isa)
        assert most[0, 0] == pytest.approx(131_072 * 127**2, rel=1e-4)


def check_product(weights: Array, x: Array, fmt: str, isa: str, bias: Array = None) -> None:
    w = _native.unpack(weights=weights, format=fmt).astype(np.float64)
    a = activations(x, fmt, isa)
    b = np.zeros(len(w)) if bias is None else bias.astype(np.float64)
    expected, magnitude = a @ w.T + b, np.abs(a) @ np.abs(w).T + np.abs(b)
    got = multiply(weights, x, fmt, isa, bias)
    excess = np.abs(got - expected) - (ATOL * x.shape[1] + RTOL * magnitude)
    assert np.isfinite(got).all()
    assert excess.max() <= 0, (excess.max(), fmt, isa, weights.shape, len(x))


# Matrix products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_product_equals_the_reference(isa: str, fmt: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.integers(1, 30), st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 99), st.booleans())
    def check(rows: int, n_out: int, n_in: int, seed: int, with_bias: bool) -> None:
        bias = random((n_out,), seed + 2) if with_bias else None
        check_product(random((n_out, n_in), seed, 0.1), random((rows, n_in), seed + 1), fmt, isa, bias)

    check()


EXTREMES = {
    "zeros": lambda x: x * 0,
    "tiny": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e15,
    "all equal": lambda x: x * 0 + np.float32(0.37),
    "one outlier": lambda x: np.where(np.arange(x.shape[1]) == x.shape[1] // 2, np.float32(3e4), x),
    "negative": lambda x: -np.abs(x),
}


@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda s: s.replace(" ", "-"))
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_product_of_extreme_values(isa: str, fmt: str, extreme: str) -> None:
    w, x = random((33, 130), 0, 0.1), random((5, 130), 1)
    check_product(w, np.float32(EXTREMES[extreme](x)), fmt, isa)
    if fmt != "float16" or extreme != "large":  # 1e15 is infinity as a float16
        check_product(np.float32(EXTREMES[extreme](w)), x, fmt, isa)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_epilogues(isa: str, fmt: str) -> None:
    w, x, b, y = random((40, 65), 0, 0.3), random((7, 65), 1), random((40,), 2), random((7, 40), 3)
    plain = multiply(w, x, fmt, isa, b)
    assert np.array_equal(multiply(w, x, fmt, isa, b, y=y, epilogue="add"), y + plain)
    for name in ("gelu_tanh", "gelu_erf"):
        got = multiply(w, x, fmt, isa, b, epilogue=name)
        np.testing.assert_allclose(got, gelu(plain.astype(np.float64), name), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_epilogues_of_other_families(isa: str, fmt: str) -> None:
    w, x, b, y = random((40, 65), 0, 0.3), random((7, 65), 1), random((40,), 2), random((7, 40), 3)
    plain = multiply(w, x, fmt, isa, b)
    wide = plain.astype(np.float64)
    for name, expected in {
        "silu": wide / (1 + np.exp(-wide)),
        "relu": np.maximum(wide, 0),
        "relu2": np.maximum(wide, 0) ** 2,
        "clamped_silu": np.minimum(wide, 7) / (1 + np.exp(-1.702 * np.minimum(wide, 7))),
        "multiply": y * wide,
        "clamped_multiply": y * (1 + np.clip(wide, -7, 7)),
        "soft_cap": 2 * np.tanh(wide / 2),  # the binding's cap is 2
    }.items():
        got = multiply(w, x, fmt, isa, b, y=y, epilogue=name)
        np.testing.assert_allclose(got, expected, atol=2e-6, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("isa", ISAS)
def test_epilogues_over_their_whole_range(isa: str) -> None:
    x = np.concatenate([np.linspace(-100, 100, 4001), [1e-30, -1e-30, 1e4, -1e4, 1e30, -1e30]]).astype(np.float32)
    one = np.ones((1, 1), np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        for name, expected in {
            "silu": wide / (1 + np.exp(-wide)),
            "relu": np.maximum(wide, 0),
            "relu2": np.float32(np.maximum(wide, 0) ** 2),
            "clamped_silu": np.minimum(wide, 7) / (1 + np.exp(-1.702 * np.minimum(wide, 7))),
            "soft_cap": 2 * np.tanh(wide / 2),
        }.items():
            got = multiply(one, x[:, None], "float32", isa, epilogue=name)[:, 0]
            np.testing.assert_allclose(got, expected, atol=1e-6, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_reach_the_output(isa: str, fmt: str, bad: float) -> None:
    w, x = random((35, 70), 0), random((20, 70), 1)
    for at in (0, 15, 63, 64, 69):
        poisoned = x.copy()
        poisoned[2, at] = bad
        got = multiply(w, poisoned, fmt, isa)
        assert not np.isfinite(got[2]).any()
        assert np.isfinite(np.delete(got, 2, axis=0)).all()
        poisoned = w.copy()
        poisoned[33, at] = bad
        got = multiply(poisoned, x, fmt, isa)
        assert not np.isfinite(got[:, 33]).any()
        assert np.isfinite(np.delete(got, 33, axis=1)).all()
        for name in ("gelu_tanh", "gelu_erf") if not bad < 0 else ():  # gelu(-infinity) is 0 or NaN
            assert not np.isfinite(multiply(poisoned, np.abs(x), fmt, isa, epilogue=name)[:, 33]).any()


# Packing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_packing_rounds_as_torch_does(fmt: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    near = rng.integers(0x3300_0000, 0x4800_0000, 200_000, dtype=np.uint32)  # where float16 begins and ends
    ties = (rng.integers(0, 2**16, 50_000, dtype=np.uint32) << 16) | 0x8000
    halves = (rng.integers(0, 2**19, 50_000, dtype=np.uint32) << 13) | 0x1000
    special = np.array([0, 2**31, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0x7F7F_FFFF, 1, 0x477F_F000, 0x477F_EFFF])
    x = np.concatenate([bits, near, near | 2**31, ties, halves, special.astype(np.uint32)]).view(np.float32)[None]
    expected = torch.from_numpy(x).to(getattr(torch, fmt)).float().numpy()
    got = _native.unpack(weights=x, format=fmt)
    nan = np.isnan(x)
    assert np.isnan(got[nan]).all()
    assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_int8_error_is_half_a_step() -> None:
    w = random((40, 300), 4)
    error = np.abs(_native.unpack(weights=w, format="int8") - w).max(1)
    assert (error <= np.abs(w).max(1) / 127 * 0.5001).all()


# Layer norm and attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 16, 17, 768])
@pytest.mark.parametrize("isa", ISAS)
def test_rms_norm(isa: str, n: int) -> None:
    x, w, b = random((6, n), 0, 3.0), random((n,), 1), random((n,), 2)
    x[1], x[2] = 5.0, 1e-4  # all the same; small against eps
    x[4] *= 1e15
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w + b
    got = _native.norm(kind="rms", x=x, weight=w, bias=b, eps=1e-5, isa=isa)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    x[3, 0] = math.nan
    got = _native.norm(kind="rms", x=x, weight=w, bias=b, eps=1e-5, isa=isa)
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.parametrize("half, n", [(1, 2), (1, 5), (4, 8), (8, 24), (16, 32), (17, 40), (32, 64), (64, 128)])
@pytest.mark.parametrize("isa", ISAS)
def test_rotate(isa: str, half: int, n: int) -> None:
    x, angles = random((3, n), 0), random((half,), 1, 3.0)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b, rest = np.split(x, [half, 2 * half], axis=1)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)
    got = _native.rotate(x=x, cos=cos, sin=sin, isa=isa)
    np.testing.assert_allclose(got, expected, atol=1e-6, rtol=1e-6)
    assert np.array_equal(got[:, 2 * half :], rest)


@pytest.mark.parametrize("n", [1, 2, 6, 8, 16, 80, 96, 128, 512])
@pytest.mark.parametrize("isa", ISAS)
def test_hadamard(isa: str, n: int) -> None:
    p = n & -n  # the largest power of two that divides n
    signs = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(p)] for i in range(p)])
    x = random((5, n), 0)
    got = _native.hadamard(x, isa=isa)
    np.testing.assert_allclose(got, x @ np.kron(np.eye(n // p), signs) / math.sqrt(p), atol=1e-5)
    assert np.array_equal(got, _native.hadamard(x, isa="scalar"))


def rounded(x: Array, cache: str, most: int) -> Array:
    """Rows (T, D) in the type of a cache; int8: integers of at most `most`, with a float32 scale for each row."""
    if cache == "float32":
        return x.astype(np.float64)
    if cache == "bfloat16":
        return bf16(x).astype(np.float64)
    top = np.abs(x).max(1, keepdims=True)
    return np.rint(x * (np.float32(most) / top)) * (top / np.float32(most)).astype(np.float64)


def cached(x: Array, cache: str, few: int = 6) -> Array:
    """What the cache stores of rows (T, D); int4: integers of `few` bits, 6 of keys and 4 of values."""
    if cache != "int4":
        return rounded(x, cache, 127)
    half, high, low = 2 ** (few - 1), x.max(1, keepdims=True), x.min(1, keepdims=True)
    step = bf16((high - low + np.maximum(high, -low) / 256) / np.float32(2 * half - 1))
    offset = bf16((high + low + step) / 2)
    integers = np.rint(np.clip((x - offset) * (1 / np.maximum(step, np.float32(1e-30))), -half, half - 1))
    return offset + integers * step.astype(np.float64)


def queries(x: Array, cache: str) -> Array:
    """What scores are computed with, of rows (T, D)."""
    return rounded(x, cache, 127 * 256)


def weight_error(v: Array, cache: str) -> float:
    """How much results change by the rounding of weights.

    bfloat16: at most 2^-9 of each, of which the results are means. int8: at most 2^-16 of a span's largest for each of
    its 64 positions, whose errors are independent: 8 times, and the largest of many results.
    """
    relative = {"bfloat16": 2**-8, "int8": 2**-13, "int4": 2**-13}
    return relative.get(cache, 0.0) * float(np.abs(v).max())


@pytest.mark.parametrize("D", [1, 8, 16, 24, 64, 80, 128])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("isa", ISAS)
def test_attention(isa: str, cache: str, D: int) -> None:
    for T in (1, 15, 16, 17, 33, 100):
        q, k, v = random((T, D), 1, 2.0), random((T, D), 2), random((T, D), 3)
        q[-1] *= 50  # a sharp softmax
        got = _native.attention(q=q, k=k, v=v, start=0, cache=cache, isa=isa)
        scores = queries(q, cache) @ cached(k, cache).T / math.sqrt(D)
        scores[np.triu_indices(T, 1)] = -math.inf
        share = np.exp(scores - scores.max(1, keepdims=True))
        expected = share / share.sum(1, keepdims=True) @ cached(v, cache, 4)
        atol = 2e-4 + weight_error(v, cache)  # 1e-6 of a score of 100
        np.testing.assert_allclose(got, expected, atol=atol, rtol=1e-4)
        for start in range(T):  # one at a time, and chunks: bit for bit
            one = _native.attention(q=q[start : start + 1], k=k, v=v, start=start, cache=cache, isa=isa)
            assert np.array_equal(one[0], got[start]), (T, start)
        for start, end in ((T // 3, T), (0, T // 2), (T // 2, T // 2 + 5)):
            if start < end <= T:
                part = _native.attention(q=q[start:end], k=k, v=v, start=start, cache=cache, isa=isa)
                assert np.array_equal(part, got[start:end]), (T, start, end)


@pytest.mark.parametrize("D", [1, 10, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.slow_if(lambda group, D: group != 3 or D == 10)
@pytest.mark.nightly_if(lambda group, D: (group, D) not in ((3, 1), (3, 64), (1, 10), (8, 10), (2, 64), (8, 1)))
def test_attention_with_groups_windows_scale_and_soft_cap(isa: str, cache: str, group: int, D: int) -> None:
    """Keys before a query's window are NaN in the blocks, so reading one shows."""
    T = 53
    q, k, v = random((T, group * D), 1, 2.0), random((T, D), 2), random((T, D), 3)
    ks, vs, qs = cached(k, cache), cached(v, cache, 4), queries(q.reshape(T * group, D), cache).reshape(T, group, D)
    for window, scale, softcap in (
        (0, 0.0, 0.0),
        (1, 0.3, 0.0),
        (7, 0.0, 1.5),
        (16, 2.0, 0.0),
        (17, 0.1, 0.5),
        (99, 1.0, 4.0),
    ):
        options = {"k": k, "v": v, "cache": cache, "group": group, "window": window, "scale": scale, "softcap": softcap}
        scores = np.einsum("tgd,sd->gts", qs, ks) * (scale or D**-0.5)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        behind = np.arange(T)[:, None] - np.arange(T)
        scores[:, (behind < 0) | (behind >= (window or T))] = -math.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("gts,sd->tgd", share / share.sum(-1, keepdims=True), vs).reshape(T, group * D)
        for start, end in ((0, T), (0, 1), (5, 6), (20, 21), (52, 53), (15, 40), (33, 53)):
            got = _native.attention(q=q[start:end], start=start, isa=isa, **options)
            atol = 1e-4 + weight_error(v, cache)
            np.testing.assert_allclose(got, expected[start:end], atol=atol, rtol=1e-4, err_msg=str((options, start)))


@pytest.mark.parametrize("window", [0, 65, 600])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("isa", ISAS)
def test_attention_over_several_spans_and_pieces_is_the_same_in_any_company(isa: str, cache: str, window: int) -> None:
    """Spans of 64 positions share a scale of int8 weights, pieces of 512 a softmax: no other row changes them."""
    T, D = 1100, 24
    q, k, v = random((T, D), 1, 3.0), random((T, D), 2), random((T, D), 3)
    options = {"k": k, "v": v, "cache": cache, "window": window, "isa": isa}
    scores = queries(q, cache) @ cached(k, cache).T / math.sqrt(D)
    behind = np.arange(T)[:, None] - np.arange(T)
    scores[(behind < 0) | (behind >= (window or T))] = -math.inf
    share = np.exp(scores - scores.max(1, keepdims=True))
    got = _native.attention(q=q, start=0, **options)
    atol = 1e-4 + weight_error(v, cache)
    np.testing.assert_allclose(got, share / share.sum(1, keepdims=True) @ cached(v, cache, 4), atol=atol, rtol=1e-4)
    several = [(60, 66), (100, 210), (127, 131), (507, 517), (1023, 1026), (900, T)]
    for start, end in [(t, t + 1) for t in range(0, T, 37)] + several:
        assert np.array_equal(_native.attention(q=q[start:end], start=start, **options), got[start:end]), (start, end)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("isa", ISAS)
def test_attention_with_sinks(isa: str, cache: str, group: int) -> None:
    """A sink below all scores, among them, and so far above that nothing of the values is left."""
    T, D = 53, 10
    q, k, v = random((T, group * D), 1, 2.0), random((T, D), 2), random((T, D), 3)
    ks, vs, qs = cached(k, cache), cached(v, cache, 4), queries(q.reshape(T * group, D), cache).reshape(T, group, D)
    for window, sinks in ((0, np.linspace(-2, 4, group)), (7, np.linspace(3, 200, group)), (0, np.full(group, -500.0))):
        options = {"k": k, "v": v, "cache": cache, "group": group, "window": window, "isa": isa}
        options["sinks"] = sinks.astype(np.float32)
        scores = np.einsum("tgd,sd->gts", qs, ks) / math.sqrt(D)
        behind = np.arange(T)[:, None] - np.arange(T)
        scores[:, (behind < 0) | (behind >= (window or T))] = -math.inf
        most = np.maximum(scores.max(-1, keepdims=True), options["sinks"][:, None, None])
        share = np.exp(scores - most)
        whole = share.sum(-1, keepdims=True) + np.exp(options["sinks"].astype(np.float64)[:, None, None] - most)
        expected = np.einsum("gts,sd->tgd", share / whole, vs).reshape(T, group * D)
        got = _native.attention(q=q, start=0, **options)
        np.testing.assert_allclose(got, expected, atol=1e-4 + weight_error(v, cache), rtol=1e-4)
        for start, end in ((5, 6), (20, 21), (15, 40), (33, 53)):
            assert np.array_equal(_native.attention(q=q[start:end], start=start, **options), got[start:end])
    options["sinks"] = np.full(group, np.nan, np.float32)
    assert np.isnan(_native.attention(q=q, start=0, **options)).all()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("isa", ISAS)
def test_attention_shows_nan_only_to_later_queries(isa: str, cache: str, which: str) -> None:
    rows = {name: random((20, 24), i) for i, name in enumerate("qkv")}
    rows[which][9, 3] = math.nan
    got = _native.attention(**rows, start=0, cache=cache, isa=isa)
    assert np.isnan(got[9:]).any(1).all()
    assert np.isfinite(got[:9]).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00123, 0x7FFFFF80, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("isa", ISAS)
def test_every_nan_stays_nan(isa: str, bits: int) -> None:
    """A file may contain NaN with any bits; exp computes with the bits."""
    nan = np.array([bits], np.uint32).view(np.float32)
    one = np.ones((1, 1), np.float32)
    for epilogue in ("store", "gelu_tanh", "gelu_erf", "silu", "relu", "relu2", "clamped_silu", "soft_cap"):
        assert np.isnan(multiply(one, nan[None], "float32", isa, epilogue=epilogue)).all(), epilogue
        assert np.isnan(multiply(nan[None], one, "float32", isa, epilogue=epilogue)).all(), epilogue
    rows = {name: random((20, 24), i) for i, name in enumerate("qkv")}
    for which in "qkv":
        poisoned = rows[which].copy()
        poisoned[3, 5] = nan[0]
        got = _native.attention(**{**rows, which: poisoned}, start=0, cache="float32", isa=isa)
        assert np.isnan(got[3]).any(), which


def test_arguments_are_checked() -> None:
    w, x = random((3, 4), 0), random((2, 4), 0)
    good = {"weights": w, "bias": None, "x": x, "format": "float32"}
    bad: list[dict[str, Any]] = [
        {"format": "int3"}, {"isa": "mmx"}, {"epilogue": "tanh"}, {"x": random((2, 5), 0)}, {"bias": random((4,), 0)},
        {"y": random((1, 3), 0)}, {"x": x[:0]}, {"weights": w[:0]},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(ValueError):
            _native.multiply(**(good | change))
    for start in (-1, 1, 2**62):
        with pytest.raises(ValueError):
            _native.attention(q=x, k=x, v=x, start=start, cache="float32")
    for group in (0, 2, 2**63 - 1):
        with pytest.raises(ValueError, match="q must"):
            _native.attention(q=x, k=x, v=x, start=0, cache="float32", group=group)
    with pytest.raises(ValueError):
        _native.norm(x=x, weight=x[0, :3].copy(), bias=x[0], eps=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_the_loops_on_registers_count_what_a_tile_does(isa: str) -> None:
    one = {
        name: _native.compute(format=name, steps=10, threads=1, isa=isa)
        for name in ("float32", "bfloat16", "int8", "q4_k")
    }
    few = {"scalar": (2, 2, 16), "neon": (2, 2, 16), "avx2": (3, 4, 16), "avx2_vnni": (3, 6, 16)}
    rows, rows_int8, outputs_int8 = few.get(isa, (12, 12, 32))
    assert one["float32"] == 10 * rows * 32 * 2
    if isa == "amx":  # four tiles of 16 rows and 16 outputs, of 32 bfloat16 or 64 int8
        assert one["bfloat16"] == 10 * 4 * 16 * 16 * 32 * 2
        assert one["int8"] == one["q4_k"] == 2 * one["bfloat16"]
    else:
        assert one["bfloat16"] == 2 * one["float32"]
        assert one["int8"] == one["q4_k"] == 10 * rows_int8 * outputs_int8 * 4 * 2
    assert _native.compute(format="int8", steps=10, threads=3, isa=isa) == 3 * one["int8"]


def test_the_loops_on_registers_refuse_what_they_cannot_do() -> None:
    for wrong in ({"format": "int3"}, {"steps": 0}, {"threads": 0}, {"isa": "mmx"}):
        with pytest.raises(ValueError, match=r"int3|steps|threads|mmx"):
            _native.compute(**{"format": "int8", "steps": 1, "threads": 1, **wrong})  # type: ignore[arg-type]
