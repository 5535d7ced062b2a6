"""Products of experts in Triton against float64, and the module of engine `triton` that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from nanoinfer.engines.triton_layers import FusedStack
from nanoinfer.kernels.triton import products
from nanoinfer.kernels.triton.experts import expert_product
from nanoinfer.kernels.triton.quantize import Weight, dense, dequantize, pack_int4, pack_int8

DEVICE = "cpu" if products.INTERPRETED else "cuda"
pytestmark = [] if products.INTERPRETED else [pytest.mark.gpu]
FORMATS: dict[str, Any] = {"dense": dense, "int8": pack_int8, "int4": pack_int4}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def on_device(weight: Weight) -> Weight:
    scale, zero = (None if t is None else t.to(DEVICE) for t in (weight.scale, weight.zero))
    return replace(weight, data=weight.data.to(DEVICE), scale=scale, zero=zero)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_products_of_a_stack_are_those_of_its_matrices(name: str, bias: bool) -> None:
    """Inputs of whole tokens and of each expert; experts chosen for each token, and all: 21 rows are two blocks."""
    E, N, K, k = 5, 19, 101, 3
    weight, shift = FORMATS[name](draw(E * N, K)), draw(E * N, seed=1) if bias else None
    matrices = dequantize(weight).view(E, N, K).double()
    added = torch.zeros(E, N) if shift is None else shift.view(E, N)
    stack = FusedStack(E, on_device(weight), None if shift is None else shift.to(DEVICE))
    x, each = draw(21, K), draw(E, 21, K, seed=2)
    chosen = (torch.arange(4)[:, None] + torch.tensor([0, 1, 3])) % E  # (4, k)
    for columns in (x[:4, None, :, None], draw(4, k, K, 1)):
        expected = matrices[chosen] @ columns.double() + added[chosen][..., None]
        found = stack.gathered(chosen.to(DEVICE), columns.to(DEVICE))
        torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=1e-4)
    for rows in (x, each):
        expected = rows.double() @ matrices.mT + added[:, None]
        torch.testing.assert_close(stack.all(rows.to(DEVICE)).cpu().double(), expected, rtol=0, atol=1e-4)


def test_an_expert_that_is_not_chosen_has_no_influence() -> None:
    weight = draw(3 * 16, 64)
    weight[16:32] = torch.nan
    stack = FusedStack(3, on_device(dense(weight)), None)
    chosen = torch.tensor([[0, 2]], device=DEVICE)
    found = stack.gathered(chosen, draw(1, 1, 64, 1).to(DEVICE)).cpu()
    assert found.isfinite().all()


def test_products_of_experts_refuse_what_does_not_fit() -> None:
    weight, experts = dense(torch.zeros(24, 16)), torch.zeros(4, dtype=torch.int64)
    places = torch.zeros(4, 16, dtype=torch.int64)
    for x, out, chosen, rows, words in (
        (torch.zeros(2, 15), torch.zeros(4, 8), experts, None, "x of shape (2, 15)"),
        (torch.zeros(2, 16), torch.zeros(4, 9), experts, None, "out of (4, 9)"),
        (torch.zeros(3, 16), torch.zeros(4, 8), experts, None, "a multiple of those of x"),
        (torch.zeros(2, 16), torch.zeros(4, 8), experts[:3], None, "3 experts chosen"),
        (torch.zeros(2, 16), torch.zeros(4, 8), experts, places[:, :8], "places is not contiguous"),
        (torch.zeros(2, 16), torch.zeros(4, 8), experts, places[:, :8].contiguous(), "need (4, 16)"),
        (torch.zeros(16, 2).T, torch.zeros(4, 8), experts, None, "x is not contiguous"),
    ):
        with pytest.raises(ValueError, match=r"need|contiguous") as caught:
            expert_product(x, weight, 3, chosen, rows, out)
        assert words in str(caught.value)
