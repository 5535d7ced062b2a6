"""The Triton kernels against float64: on the CPU under Triton's interpreter, on a GPU where there is one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from nanoinfer.kernels.triton import launch, products, tiles
from nanoinfer.kernels.triton.attention import Scores, attention
from nanoinfer.kernels.triton.epilogue import GELU_ERF, GELU_TANH, RELU, RELU2, SILU, Epilogue, Places
from nanoinfer.kernels.triton.heads import store_heads
from nanoinfer.kernels.triton.products import product
from nanoinfer.kernels.triton.quantize import Weight, dense, dequantize, pack_int4, pack_int8
from nanoinfer.kernels.triton.rows import Norm, layer_norm
from nanoinfer.kernels.triton.tiles import Tile, attention_splits, product_tile, square_blocks

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp of what is large: meant

FORMATS: dict[str, Any] = {
    "float32": dense,
    "bfloat16": lambda w: dense(w.bfloat16()),
    "float16": lambda w: dense(w.half()),
    "int8": pack_int8,
    "int8 in bfloat16": lambda w: pack_int8(w.bfloat16()),
    "int4": pack_int4,
    "int4 in groups of 32": lambda w: pack_int4(w, group=32),
    "int4 in bfloat16": lambda w: pack_int4(w.bfloat16()),
}
UNIT = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative error allowed to an operand: the interpreter cuts bits off where a GPU rounds."""


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=pytest.mark.skipif(not products.INTERPRETED, reason="kernels run on the CUDA device here")
        ),
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def on(device: str, weight: Weight) -> Weight:
    scale, zero = (None if t is None else t.to(device) for t in (weight.scale, weight.zero))
    return replace(weight, data=weight.data.to(device), scale=scale, zero=zero)


def check(out: Tensor, expected: Tensor, magnitude: Tensor, unit: float) -> None:
    """Assert |out - expected| <= unit * magnitude, where magnitude is the sum of what was added, in absolute values."""
    assert out.shape == expected.shape
    wrong = ~((out.cpu().double() - expected).abs() <= unit * magnitude + 1e-30)  # what is not a number is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, worst {(out.cpu() - expected).abs().max():.3g}"


# Products ------------------------------------------------------------------------------------------------


CHOSEN = ((16, 70), (1, 33), (5, 16), (37, 33))
"""Rows and outputs that the interpreter runs with each format but in `make test-nightly`."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 37])
@pytest.mark.parametrize("n, k", [(33, 64), (70, 200), (16, 101)])
@pytest.mark.nightly_if(lambda rows, n, device: device == "cpu" and (rows, n) not in CHOSEN)
@pytest.mark.slow_if(lambda rows, device: device == "cpu" and rows != 16)
def test_products_with_everything_around_them(name: str, rows: int, n: int, k: int, device: str) -> None:
    x, w, bias, gain, shift = draw(rows, k), draw(n, k, seed=1), draw(n), draw(k, seed=2), draw(k, seed=3)
    weight = FORMATS[name](w)
    normed = F.layer_norm(x.double(), (k,), gain.double(), shift.double(), 1e-5)
    values = dequantize(weight).double()
    sums = normed @ values.T + bias
    magnitude = normed.abs() @ values.abs().T + bias.abs() + normed.abs().amax(1, keepdim=True)
    out = torch.empty(rows, n, device=device)
    tile = Tile(block_n=64, block_k=64, num_warps=4, num_stages=2, block_m=32 if rows > 32 else 16)
    norm = Norm(gain.to(device), shift.to(device), 1e-5)
    for gelu, reference in ((0, sums), (GELU_TANH, F.gelu(sums, approximate="tanh")), (GELU_ERF, F.gelu(sums))):
        product(x.to(device), on(device, weight), out, norm, Epilogue(bias.to(device), gelu), tile)
        check(out, reference, 1.2 * magnitude, UNIT[torch.float32 if rows == 1 else weight.operand])


@pytest.mark.parametrize("rows, splits", [(1, 1), (3, 1), (3, 4)])
def test_rms_norm_and_the_epilogues_of_other_families(rows: int, splits: int, device: str) -> None:
    n, k = 33, 101
    x, w, bias, gain = draw(rows, k), draw(n, k, seed=1), draw(n), draw(k, seed=2)
    gate, weight, tile = draw(rows, n, seed=4), on(device, dense(w)), Tile(16, 64, 4, 2, splits)
    normed = F.rms_norm(x.double(), (k,), gain.double(), 1e-3)
    sums = normed @ w.double().T + bias
    magnitude = normed.abs() @ w.abs().double().T + bias.abs() + normed.abs().amax(1, keepdim=True)
    norm, unit = Norm(gain.to(device), None, 1e-3, rms=True), UNIT[torch.float32]
    out = torch.empty(rows, n, device=device)
    for activation, expected, size in (
        (SILU, F.silu(sums), magnitude),
        (RELU, F.relu(sums), magnitude),
        (RELU2, F.relu(sums).square(), 2 * magnitude.square()),
    ):
        product(x.to(device), weight, out, norm, Epilogue(bias.to(device), activation), tile)
        check(out, expected, 1.2 * size, unit)
    out = gate.clone().to(device)
    product(x.to(device), weight, out, norm, Epilogue(bias.to(device), residual=out, scale=0.3), tile)
    check(out, gate + 0.3 * sums, magnitude + gate.abs(), unit)
    out = gate.clone().to(device)
    product(x.to(device), weight, out, norm, Epilogue(bias.to(device), residual=out, gates=True), tile)
    check(out, gate * sums, magnitude * gate.abs(), unit)


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
@pytest.mark.parametrize("rows", [3, 16, 21])
@pytest.mark.slow_if(lambda rows, device: device == "cpu" and rows == 21)
def test_inputs_split_between_programs_add_up(name: str, rows: int, device: str) -> None:
    n, k = 40, 330
    x, weight, residual = draw(rows, k), FORMATS[name](draw(n, k, seed=1)), draw(rows, n)
    expected = x.double() @ dequantize(weight).double().T
    magnitude = x.abs().double() @ dequantize(weight).abs().double().T + residual.abs()
    for splits in (1, 2, 4, 8):  # of 8 parts of 64 inputs, the last 2 have nothing to do
        out = residual.clone().to(device)  # x + ..., written where it was read
        tile = Tile(64, 64, 4, 2, splits)
        product(x.to(device), on(device, weight), out, None, Epilogue(residual=out), tile)
        check(out, expected + residual, magnitude, UNIT[torch.float32])
        again = residual.clone().to(device)
        product(x.to(device), on(device, weight), again, None, Epilogue(residual=again), tile)
        assert torch.equal(out, again)  # parts are added in order: bit for bit the same


@pytest.mark.parametrize("name", ["float32", "int4"])
@pytest.mark.parametrize("spare", [1, 3])
def test_outputs_that_a_program_leaves_out_are_the_next_ones(name: str, spare: int, device: str) -> None:
    n, k = 33, 101
    x, weight, residual = draw(1, k), FORMATS[name](draw(n, k, seed=1)), draw(1, n)
    values, out = dequantize(weight).double(), residual.clone().to(device)
    product(x.to(device), on(device, weight), out, None, Epilogue(residual=out), Tile(8, 64, 4, 2, spare=spare))
    magnitude = x.abs().double() @ values.abs().T + residual.abs()
    check(out, x.double() @ values.T + residual, magnitude, UNIT[torch.float32])


def test_the_inputs_of_one_row_are_not_split(device: str) -> None:
    out = torch.empty(1, 16, device=device)
    with pytest.raises(ValueError, match="num_splits=2 for one row: only the inputs of several rows are split"):
        product(
            torch.ones(1, 64, device=device), dense(torch.ones(16, 64, device=device)), out, tile=Tile(8, 32, 4, 2, 2)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_and_results_in_16_bits(dtype: torch.dtype, device: str) -> None:
    x, w = draw(4, 96).to(dtype), draw(48, 96, seed=1).to(dtype)
    expected, magnitude = x.double() @ w.double().T, x.abs().double() @ w.abs().double().T
    out = torch.empty(4, 48, dtype=dtype, device=device)
    product(x.to(device), dense(w.to(device)), out)
    check(out, expected, magnitude, UNIT[dtype])


def test_a_bias_and_a_shift_may_be_missing(device: str) -> None:
    x, w, gain = draw(2, 48), draw(32, 48), draw(48)
    out = torch.empty(2, 32, device=device)
    product(x.to(device), dense(w.to(device)), out, Norm(gain.to(device), None, 1e-6))
    normed = F.layer_norm(x.double(), (48,), gain.double(), None, 1e-6)
    check(out, normed @ w.double().T, normed.abs() @ w.abs().double().T, UNIT[torch.float32])


@pytest.mark.parametrize("rows", [1, 3])
def test_extreme_values(rows: int, device: str) -> None:
    """A mean far from zero, large sums, GELU at both ends; a row that is not a number stays alone."""
    k, n = 130, 16
    x, w, gain = draw(rows, k) + 3e4, draw(n, k, scale=0.1), torch.ones(k)
    out = torch.empty(rows, n, device=device)
    product(x.to(device), dense(w.to(device)), out, Norm(gain.to(device), None, 1e-5))
    expected = F.layer_norm(x.double(), (k,), None, None, 1e-5) @ w.double().T
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-2)  # of x itself 3e4 * 2**-24 is lost

    big = draw(rows, k) * 1e30
    product(big.to(device), dense(w.to(device)), out)
    check(out, big.double() @ w.double().T, big.abs().double() @ w.abs().double().T, UNIT[torch.float32])

    ends = torch.tensor([1e4, -1e4, 50.0, -50.0, 1e20, -1e20, 0.0, -0.0]).repeat(2)
    for gelu in (GELU_TANH, GELU_ERF):
        epilogue = Epilogue(ends.to(device), gelu)
        product(torch.zeros(rows, k, device=device), dense(w.to(device)), out, None, epilogue)
        torch.testing.assert_close(out[0].cpu(), ends.clamp(min=0), rtol=1e-6, atol=1e-6)

    x[0, 5] = torch.nan
    product(x.to(device), dense(w.to(device)), out, Norm(gain.to(device), None, 1e-5))
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


def test_keys_and_values_go_to_their_slots(device: str) -> None:
    H, D, length, C = 2, 8, 12, 16
    slots, pos = torch.tensor([3, 1]), torch.tensor([[2, 3, 4], [9, 10, 11]])
    for rows, at in ((slice(0, 2), pos), (slice(1, 2), pos[1:, :1])):
        x, w, bias = draw(at.numel(), C), draw(3 * C, C, seed=1), draw(3 * C)
        keys, values = torch.full((2, 4, H, length, D), 7.0, device=device)
        q = torch.empty(at.numel(), C, device=device)
        places = Places(keys, values, slots[rows].to(device), at.to(device))
        product(x.to(device), dense(w.to(device)), q, None, Epilogue(bias.to(device), store=places))
        expected_q, k, v = (x.double() @ w.double().T + bias).split(C, dim=1)
        torch.testing.assert_close(q.cpu().double(), expected_q, rtol=0, atol=1e-4)
        want_k, want_v = torch.full((2, 4, H, length, D), 7.0)
        for m, p in enumerate(at.flatten().tolist()):
            slot = int(slots[rows][m // at.shape[1]])
            want_k[slot, :, p], want_v[slot, :, p] = k[m].view(H, D), v[m].view(H, D)
        torch.testing.assert_close(keys.cpu(), want_k, rtol=0, atol=1e-4)
        torch.testing.assert_close(values.cpu(), want_v, rtol=0, atol=1e-4)


def test_keys_and_values_have_the_same_strides() -> None:
    keys, pos = torch.zeros(1, 2, 8, 4), torch.zeros(1, 1, dtype=torch.int64)
    for k, v in ((keys, keys.transpose(1, 2)), (keys.mT, keys.mT)):
        with pytest.raises(ValueError, match=r"of the keys, .* of the values: need equal ones that end in 1"):
            Places(k, v, pos[0], pos)


def test_products_refuse_what_does_not_fit() -> None:
    weight, out = dense(torch.zeros(8, 16)), torch.zeros(2, 8)
    for x, o, words in (
        (torch.zeros(2, 15), out, "x of shape (2, 15): need (1 or more, 16)"),
        (torch.zeros(0, 16), torch.zeros(0, 8), "x of shape (0, 16)"),
        (torch.zeros(2, 16), torch.zeros(2, 9), "out of shape (2, 9): need (2, 8)"),
        (torch.zeros(16, 2).T, out, "x is not contiguous"),
    ):
        with pytest.raises(ValueError, match=r"need|contiguous") as caught:
            product(x, weight, o)
        assert words in str(caught.value)


# Heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("rotated, each", [(0, False), (6, False), (10, True)])
def test_heads_are_normalised_rotated_and_stored(norm: str, rotated: int, each: bool, device: str) -> None:
    """each: whether every head has angles of its own. Five heads of queries share two of keys and values."""
    H, K, D, R, n, length = 5, 2, 10, 2, 3, 12
    slots, pos = torch.tensor([3, 1]), torch.tensor([[2, 3, 4], [9, 10, 11]])
    qkv, gain, shift = draw(R * n, (H + 2 * K) * D), draw(H + K, D, seed=1), draw(H + K, D, seed=2)
    q, k, v = (y.unflatten(1, (-1, D)).double() for y in qkv.split((H * D, K * D, K * D), 1))
    of_heads = None
    if norm != "none":
        rms = norm == "rms"
        of_heads = Norm(gain.to(device), None if rms else shift.to(device), 1e-2, rms)
        g, s = gain.double(), shift.double()
        q, k = (F.rms_norm(y, (D,), None, 1e-2) * g[at] if rms else F.layer_norm(y, (D,), eps=1e-2) * g[at] + s[at]
                for y, at in ((q, slice(H)), (k, slice(H, None))))  # fmt: skip
    angles = None
    if rotated:
        cos, sin = (draw(R, n, H + K if each else 1, rotated, seed=seed) for seed in (3, 4))
        angles = cos.to(device), sin.to(device)
        c, s, half = cos.flatten(0, 1).double(), sin.flatten(0, 1).double(), rotated // 2
        both = torch.cat((q, k), 1)
        turned = torch.cat((both[..., half:rotated], both[..., :half]), -1)
        both = torch.cat((both[..., :rotated] * c + turned * s, both[..., rotated:]), -1)
        q, k = both[:, :H], both[:, H:]
    keys, values = torch.full((2, 4, K, length, D), 7.0, device=device)
    out = torch.empty(R * n, H * D, device=device)
    places = Places(keys, values, slots.to(device), pos.to(device))
    store_heads(qkv.to(device), out, places, of_heads, angles)
    torch.testing.assert_close(out.cpu().double(), q.flatten(1), rtol=0, atol=2e-5)
    want_k, want_v = torch.full((2, 4, K, length, D), 7.0)
    for m, p in enumerate(pos.flatten().tolist()):
        want_k[slots[m // n], :, p], want_v[slots[m // n], :, p] = k[m], v[m]
    torch.testing.assert_close(keys.cpu(), want_k, rtol=0, atol=2e-5)
    torch.testing.assert_close(values.cpu(), want_v, rtol=0, atol=0)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_heads_of_fewer_projections_and_a_norm_of_values(parts: int, device: str) -> None:
    """1: queries alone, which store nothing; 2: values are the keys before their norm."""
    H, K, D, M, length = 4, 2, 6, 3, 9
    qkv, pos = draw(M, (H + (parts - 1) * K) * D), torch.tensor([[2, 3, 4]])
    gain = draw(H + (parts > 1) * K, D, seed=1)
    keys, values = torch.full((2, 1, K, length, D), 7.0, device=device)
    want_k, want_v = torch.full((2, 1, K, length, D), 7.0)
    q, *rest = qkv.split([H * D] + [K * D] * (parts - 1), 1)
    if rest:
        k, v = rest[0].unflatten(1, (K, D)), rest[-1].unflatten(1, (K, D))
        want_k[0, :, 2:5] = (F.rms_norm(k, (D,), None, 1e-2) * gain[H:]).transpose(0, 1)
        want_v[0, :, 2:5] = F.rms_norm(v, (D,), None, 1e-3).transpose(0, 1)
    out, norm = torch.empty(M, H * D, device=device), Norm(gain.to(device), None, 1e-2, rms=True)
    places = Places(keys, values, torch.zeros(1, dtype=torch.int64, device=device), pos.to(device))
    store_heads(qkv.to(device), out, places, norm, None, 1e-3)
    expected = (F.rms_norm(q.unflatten(1, (H, D)), (D,), None, 1e-2) * gain[:H]).flatten(1)
    for found, wanted in ((out, expected), (keys, want_k), (values, want_v)):
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=2e-5)


def test_heads_refuse_what_does_not_fit() -> None:
    keys, pos = torch.zeros(1, 2, 8, 4), torch.zeros(1, 3, dtype=torch.int64)
    places, qkv, out = (
        Places(keys, keys, torch.zeros(1, dtype=torch.int64), pos),
        torch.zeros(3, 28),
        torch.zeros(3, 12),
    )
    angle = torch.zeros(1, 3, 1, 4)
    for bad, o, angles, words in (
        (torch.zeros(3, 27), out, None, "qkv of shape (3, 27)"),
        (torch.zeros(2, 28), torch.zeros(2, 12), None, "3 positions"),
        (torch.zeros(28, 3).T, out, None, "qkv is not contiguous"),
        (qkv, out, (angle[:, :2], angle[:, :2]), "cos of"),
        (qkv, out, (torch.zeros(1, 3, 1, 6), torch.zeros(1, 3, 1, 6)), "cos of"),
    ):
        with pytest.raises(ValueError, match=r"need|contiguous") as caught:
            store_heads(bad, o, places, None, angles)
        assert words in str(caught.value)
    with pytest.raises(ValueError, match=re.escape("weight of (2, 4): need 5 heads of 4 values")):
        store_heads(qkv, out, places, Norm(torch.ones(2, 4), None, 1e-5))


# Attention -----------------------------------------------------------------------------------------------


def attend_in_float64(q: Tensor, keys: Tensor, values: Tensor, pos: int) -> Tensor:
    """One token, (H, D), over the keys of its row, (H, T, D)."""
    k, v = keys[:, : pos + 1].double(), values[:, : pos + 1].double()
    scores = (q.double()[:, None] @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("R, n, splits", [(1, 1, 1), (3, 1, 4), (2, 5, 1), (2, 3, 4), (1, 16, 2), (2, 70, 2)])
@pytest.mark.parametrize("D", [16, 24])
@pytest.mark.nightly_if(lambda dtype, R, device: device == "cpu" and dtype != torch.float16 and R != 3)
@pytest.mark.slow_if(lambda dtype, splits, device: device == "cpu" and (dtype != torch.float16 or splits != 4))
@pytest.mark.nightly_if(lambda D, n, device: device == "cpu" and (D, n) == (24, 70))
def test_attention(dtype: torch.dtype, R: int, n: int, splits: int, D: int, device: str) -> None:
    """Rows of unequal length, the last token of each row padding where there are several; what is past them is NaN."""
    H, context, slots = 2, 145, torch.tensor([2, 0, 3][:R])
    keys, values = (torch.full((4, H, 150, D), torch.nan, dtype=dtype) for _ in range(2))
    starts = torch.tensor([0, 100, 37][:R]) if R > 1 else torch.tensor([120])
    pos = starts[:, None] + torch.arange(n)
    if n > 2:
        pos[:, -1] = 149
    rows_k, rows_v = draw(R, H, 150, D).to(dtype), draw(R, H, 150, D, seed=1).to(dtype)
    for r in range(R):
        length = int(pos[r][pos[r] < context].max()) + 1
        keys[slots[r], :, :length], values[slots[r], :, :length] = rows_k[r, :, :length], rows_v[r, :, :length]
    q = draw(R * n, H * D, scale=2.0).to(dtype)
    out = torch.empty(R * n, H * D, device=device)
    places = Places(keys.to(device), values.to(device), slots.to(device), pos.to(device))
    attention(q.to(device), places, context, out, splits)
    for m, p in enumerate(pos.flatten().tolist()):
        y = out[m].view(H, D).cpu().double()
        if p >= context:
            assert (y == 0).all()
            continue
        expected = attend_in_float64(q[m].view(H, D), rows_k[m // n], rows_v[m // n], p)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 if n == 1 else max(1e-5, 4 * UNIT[dtype]))
    again = torch.empty_like(out)
    attention(q.to(device), places, context, again, splits)
    assert torch.equal(out, again)


@pytest.mark.parametrize("n, splits", [(1, 1), (1, 4), (5, 2), (40, 2)])
@pytest.mark.parametrize(
    "scores",
    [
        Scores(window=7), Scores(window=100), Scores(0.11, 2.5), Scores(softcap=3.0, window=64),
        Scores(window=7, sinks=torch.tensor([-9.0, -1.0, 0.0, 0.5, 2.0, 30.0])),
    ],
)  # fmt: skip
@pytest.mark.slow_if(lambda n, scores, device: device == "cpu" and n > 1 and (scores.window, n) != (7, 5))
@pytest.mark.nightly_if(lambda n, scores, device: device == "cpu" and n == 40 and scores.sinks is None)
def test_attention_of_shared_heads_within_a_window(n: int, splits: int, scores: Scores, device: str) -> None:
    """Three heads of queries share each head of keys; rows of 9 and 300 positions before the new tokens."""
    H, K, D, R, length = 6, 2, 12, 2, 350
    keys, values = draw(R, K, length, D), draw(R, K, length, D, seed=1)
    pos = torch.tensor([[9], [300]]) + torch.arange(n)
    q = draw(R * n, H * D, scale=2.0)
    out = torch.empty(R * n, H * D, device=device)
    slots = torch.tensor([0, 1], device=device)
    sinks = torch.full((H,), -torch.inf) if scores.sinks is None else scores.sinks
    scores = replace(scores, sinks=None if scores.sinks is None else sinks.to(device))
    attention(q.to(device), Places(keys.to(device), values.to(device), slots, pos.to(device)), 345, out, splits,
              scores=scores)  # fmt: skip
    scale = D**-0.5 if scores.scale is None else scores.scale
    for m, p in enumerate(pos.flatten().tolist()):
        first = 0 if scores.window is None else max(0, p + 1 - scores.window)
        k, v = (y[m // n, :, first : p + 1].double().repeat_interleave(H // K, 0) for y in (keys, values))
        s = (q[m].view(H, 1, D).double() @ k.transpose(1, 2)) * scale
        if scores.softcap is not None:
            s = scores.softcap * torch.tanh(s / scores.softcap)
        weights = torch.cat((s, sinks.double().view(H, 1, 1)), -1).softmax(-1)[..., :-1]
        torch.testing.assert_close(out[m].view(H, D).cpu().double(), (weights @ v)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 20])
def test_attention_of_wide_heads(n: int, device: str) -> None:
    """Blocks are smaller: 300 values a head take 16 keys and 16 tokens."""
    keys, values, q = draw(1, 1, 40, 300), draw(1, 1, 40, 300, seed=1), draw(n, 300)
    pos, out = torch.tensor([[17]]) + torch.arange(n), torch.empty(n, 300, device=device)
    places = Places(keys.to(device), values.to(device), torch.zeros(1, dtype=torch.int64, device=device),
                  pos.to(device))  # fmt: skip
    attention(q.to(device), places, 40, out, 2)
    for i, p in enumerate(pos[0].tolist()):
        expected = attend_in_float64(q[i : i + 1], keys[0], values[0], p)
        torch.testing.assert_close(out[i : i + 1].cpu().double(), expected, rtol=0, atol=1e-5)
    assert tiles.attention_blocks(512, 16, n) == (16, 16, 3)
    assert tiles.attention_blocks(128, 16, n) == ((32, 32, 3) if n == 1 else (64, 64, 3))
    assert tiles.attention_blocks(64, 16, n) == (64, 64, 3)
    assert tiles.attention_blocks(512, 32, n) == (16, 16, 1)


def test_attention_survives_scores_without_end(device: str) -> None:
    """Scores of plus and minus 1e5: one key takes everything, and nothing overflows."""
    keys, values = draw(1, 1, 64, 16), draw(1, 1, 64, 16, seed=1)
    keys[0, 0, 20], keys[0, 0, 30] = 1e3, -1e3
    q, pos = torch.full((1, 16), 1e2), torch.tensor([[50]])
    out = torch.empty(1, 16, device=device)
    places = Places(keys.to(device), values.to(device), torch.tensor([0], device=device), pos.to(device))
    for splits in (1, 2):
        attention(q.to(device), places, 64, out, splits)
        torch.testing.assert_close(out[0].cpu(), values[0, 0, 20], rtol=0, atol=1e-6)


# The ends, and how the work is cut -----------------------------------------------------------------------


def test_final_norm(device: str) -> None:
    x, gain, shift = draw(6, 20), draw(20), draw(20, seed=5)
    expected = F.layer_norm(x, (20,), gain, shift, 1e-5)
    norm, out = Norm(gain.to(device), shift.to(device), 1e-5), torch.empty(6, 20, device=device)
    layer_norm(x.to(device), norm, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-5)
    count = torch.tensor([[9, 3], [9, 0]], device=device)[:, 1]  # two rows of three tokens; the second is padding
    last = torch.empty(2, 20, device=device)
    layer_norm(x.to(device), norm, last, count)
    assert torch.equal(last, out[[2, 3]])


def test_tiles_give_every_multiprocessor_a_program() -> None:
    for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50257, 768), (4800, 1600), (1600, 6400)):
        for rows in (1, 5, 16):
            for bits in (32, 16, 8, 4):
                tile = product_tile(n, k, rows, bits, 132)
                programs = -(-n // tile.block_n) * tile.num_splits
                assert programs >= 132 or tile.block_n == (4 if rows == 1 else 16), (n, k, rows, bits, tile)
                assert tile.num_splits == 1 or rows > 1
                loads = tile.block_n * tile.block_k * bits // 8  # of an iteration
                deep = (tile.num_stages - 1) * loads >= 24 << 10 or tile.num_stages == 8
                assert deep or tile.num_stages * tile.block_k >= k, (n, k, rows, bits, tile)
    assert product_tile(768, 768, 1, 16, 132).block_n == 4
    assert product_tile(768, 3072, 1, 16, 132).block_k == 4096  # all weights of a program, 24 KB, at once
    assert product_tile(1600, 6400, 1, 16, 132) == Tile(block_n=8, block_k=512, num_warps=4, num_stages=4, spare=1)
    assert product_tile(768, 3072, 16, 16, 132).num_splits == 4
    for context, splits in ((64, 1), (128, 1), (511, 1), (512, 2), (1024, 4), (1 << 20, 16)):
        assert attention_splits(12, context, 16, 132) == splits  # at least 4 iterations of 64 keys each
    assert attention_splits(12, 1024, 32, 132) == 8
    assert attention_splits(64 * 12, 1024, 16, 132) == 1


def test_tiles_of_many_rows_fit_the_shared_memory_and_fill_the_multiprocessors() -> None:
    for rows, block_m in ((17, 32), (64, 64), (200, 128), (4096, 128)):
        for bits, operand_bits in ((32, 32), (16, 16), (8, 16), (4, 16), (8, 32), (4, 32)):
            tile = product_tile(4800, 1600, rows, bits, 132, operand_bits)
            turn = tile.block_n * bits + tile.block_m * operand_bits
            assert tile.num_stages >= 2
            assert tile.num_stages * tile.block_k * turn // 8 <= 96 << 10, (rows, bits, tile)
            if operand_bits == 16 and bits > 4:
                assert tile.block_m == block_m, (rows, bits, tile)
    assert square_blocks(512, 768, (128, 128), 132) == (64, 64)
    assert square_blocks(4096, 6400, (128, 128), 132) == (128, 128)
    assert square_blocks(4096, 6400, (64, 64), 132) == (64, 64)
    assert product_tile(768, 3072, 200, 16, 132).block_m == 64


@pytest.mark.parametrize("capability, found", [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_kernels_overlap_from_compute_capability_9_on(
    capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch.is_available.cache_clear()
    wanted = {"PDL": True, "launch_pdl": True} if found else {"PDL": False}
    assert launch.launch_options(torch.device("cuda", 0)) == wanted
    assert launch.launch_options(torch.device("cpu")) == {"PDL": False}
    monkeypatch.setattr(tiles, "USE_PDL", False)
    assert launch.launch_options(torch.device("cuda", 0)) == {"PDL": False}
    launch.is_available.cache_clear()


# Weights in 8 and 4 bits ---------------------------------------------------------------------------------


def test_int8_is_within_half_a_step() -> None:
    w = draw(30, 77)
    w[3] = 0
    packed = pack_int8(w)
    step = w.abs().amax(1) / 127
    assert ((dequantize(packed) - w).abs() <= 0.5001 * step[:, None]).all()
    assert packed.data.abs().max() == 127
    assert packed.num_bytes() == 30 * 77 + 30 * 4


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("k", [64, 100, 192])
def test_int4_codes_are_what_dequantize_says(group: int, k: int) -> None:
    w = draw(9, k) + 0.3
    packed = pack_int4(w, group)
    assert packed.scale is not None
    assert packed.zero is not None
    G = -(-k // group)
    assert packed.data.shape == (9, G * group // 2)
    values = dequantize(packed)
    for n in (0, 8):
        for i in range(k):
            g, r = divmod(i, group)
            byte = int(packed.data[n, g * group // 2 + r % (group // 2)])
            code = byte >> 4 if r >= group // 2 else byte & 15
            assert values[n, i] == (code - int(packed.zero[n, g])) * packed.scale[n, g].float()


def test_int4_does_better_than_the_plain_range_and_keeps_zero() -> None:
    w = draw(64, 256)
    w[:, ::64] *= 4  # an outlier in every group: clipping helps
    w[:, 5] = 0
    parts = w.view(64, 4, 64)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = (((parts - low) / step).round() * step + low).view_as(w)
    packed = dequantize(pack_int4(w))
    assert (packed - w).square().sum() < 0.97 * (plain - w).square().sum()
    assert (packed[:, 5] == 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e20, 1e37])
def test_quantizing_extreme_weights(scale: float) -> None:
    w = draw(5, 96).clamp(-3, 3) * scale
    for pack, tolerance in ((pack_int8, 0.01), (pack_int4, 0.2)):
        values = dequantize(pack(w))
        assert values.isfinite().all()
        assert ((values - w).abs() <= tolerance * 3 * scale + 1e-37).all()


def test_quantizing_refuses_what_is_not_a_number() -> None:
    for pack in (pack_int8, pack_int4):
        for bad in (torch.nan, torch.inf):
            w = torch.ones(4, 64)
            w[2, 3] = bad
            with pytest.raises(ValueError, match="infinite or NaN"):
                pack(w)
    with pytest.raises(ValueError, match="group=16"):
        pack_int4(torch.ones(4, 64), group=16)
