"""Mixtures of experts: fields, shapes, routing, and the three forms of the sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.engines import GREEDY
from helpers.models import CHARS, TINY, make_model, make_weights, refuses
from nanoinfer import LLM
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.transforms import truncate_layers
from nanoinfer.config import Experts, LayerKind, ModelConfig, Rotary
from nanoinfer.models import experts as experts_module
from nanoinfer.models.experts import ExpertMLP, route
from nanoinfer.models.layers import gate as gated
from nanoinfer.models.parameters import initialize, num_parameters, shapes
from nanoinfer.tokenizers.tokenizer import char_to_json

EXPERTS = Experts(count=5, per_token=2, width=12, normalize=True, scale=1.5, shared_width=7, shared_gate=True)
MIXED = replace(
    TINY, gated_mlp=True, activation="silu", n_inner=20, experts=EXPERTS, layers=(LayerKind(), LayerKind(experts=True))
)
"""A layer with a usual MLP, and one with experts."""
ALL = replace(MIXED, layers=(LayerKind(experts=True),) * 2, experts=Experts(7, 3, 10, normalize=False))
BIASED = replace(ALL, experts=Experts(7, 3, 10, normalize=True, bias=True), activation="clamped_silu", sinks=True)
BESIDE = replace(
    ALL, layers=(LayerKind(experts=True), LayerKind(experts=True, n_inner=28)), norm="rms", norm_placement="both",
    bias=False, experts=Experts(7, 3, 10, normalize=True, beside=True),
)  # fmt: skip
"""Experts beside MLPs of two widths."""


def mlp_of(config: ModelConfig = MIXED) -> ExpertMLP:
    mlp = make_model(config).blocks[-1].mlp
    assert isinstance(mlp, ExpertMLP)
    return mlp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "experts=0 is not an integer in [1, 4096]"),
        ({"per_token": 6}, "experts per token=6 is not an integer in [1, 5]"),
        ({"per_token": 0}, "experts per token=0 is not an integer in [1, 5]"),
        ({"width": 2**30}, f"width of an expert={2**30} is not an integer in [1, {(2**31 - 1) // 5}]"),
        ({"normalize": 1}, "normalize=1 is not a bool"),
        ({"scale": float("nan")}, "scale of experts=nan"),
        ({"shared_width": -1}, "width of the shared expert=-1"),
        ({"bias": 1}, "bias of experts=1 is not a bool"),
        ({"scoring": "tanh"}, "scoring='tanh' is unknown: use one of softmax, sigmoid"),
        ({"correction": 1}, "correction=1 is not a bool"),
        ({"groups": 2}, "experts=5 is not a multiple of groups of experts=2"),
        ({"groups": 5, "groups_per_token": 1}, "experts per token=2 is not an integer in [1, 1]"),
        ({"group_top": 6}, "experts that score a group=6 is not an integer in [1, 5]"),
        ({"beside": 1}, "experts beside an MLP=1 is not a bool"),
        ({"beside": True}, "experts beside an MLP have no shared expert and no biases: leave both out"),
        ({"shared_width": 0}, "shared_gate=True needs a shared expert: set shared_width"),
    ],
)
def test_fields_are_checked(changes: dict[str, Any], message: str) -> None:
    refuses(lambda: replace(EXPERTS, **changes), message)


def test_a_config_needs_experts_and_gated_mlps() -> None:
    refuses(lambda: replace(MIXED, experts=None), "a layer has experts, but the config does not describe them")
    refuses(lambda: replace(MIXED, gated_mlp=False), "experts need gated_mlp=True")
    refuses(lambda: replace(MIXED, n_embd=2**30, n_head=2, head_size=8), f"experts * n_embd={5 * 2**30}")
    refuses(lambda: ModelConfig(activation="clamped_silu"), "activation=clamped_silu needs gated_mlp=True")
    for changes in ({"norm": "layer"}, {"norm_placement": "before"}, {"layers": MIXED.layers}):
        refuses(lambda changes=changes: replace(BESIDE, **changes), "experts beside an MLP need norm=rms")
    assert BESIDE.differing == "experts beside an MLP"
    assert not MIXED.is_gpt2
    assert not ModelConfig(sinks=True).is_gpt2


def test_parameters_in_their_order() -> None:
    found = {n.removeprefix("transformer.h.1.mlp."): s for n, s in shapes(MIXED).items() if ".1.mlp." in n}
    assert list(found.items()) == [
        ("router.weight", (5, 16)),
        ("experts.c_gate.weight", (60, 16)),
        ("experts.c_fc.weight", (60, 16)),
        ("experts.c_proj.weight", (80, 12)),
        ("shared.c_gate.weight", (7, 16)),
        ("shared.c_fc.weight", (7, 16)),
        ("shared.c_proj.weight", (16, 7)),
        ("shared_gate.weight", (1, 16)),
    ]
    for config in (MIXED, ALL, BIASED, BESIDE):
        gpt = make_model(config)
        assert [(n, tuple(p.shape)) for n, p in gpt.named_parameters()] == list(shapes(config).items())
        assert gpt.num_parameters() == num_parameters(config)
        assert {name: t.shape for name, t in initialize(config, 0)} == shapes(config)


def test_fewer_layers_may_have_no_experts() -> None:
    """A draft of the first layers, before any with experts."""
    first = truncate_layers(make_weights(MIXED), 1)
    assert "transformer.h.0.mlp.c_fc.weight" in dict(first.read())


def test_of_equal_logits_the_lower_index_is_chosen() -> None:
    logits = torch.zeros(3, 64)
    logits[1, [9, 40, 63]] = 1.0
    logits[2] = torch.arange(64.0)
    chosen, weights = route(logits, Experts(64, 2, 1, normalize=True))
    assert chosen.tolist() == [[0, 1], [9, 40], [62, 63]]
    torch.testing.assert_close(
        weights, torch.tensor([[0.5, 0.5], [0.5, 0.5], [1 / (1 + torch.e), 1 / (1 + 1 / torch.e)]])
    )


def test_weights_are_normalized_or_those_of_all_experts_and_scaled() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    chosen, weights = route(logits, Experts(4, 2, 1, normalize=False, scale=3.0))
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, 3 * logits.softmax(-1)[:, [0, 2]])
    torch.testing.assert_close(
        route(logits, Experts(4, 2, 1, normalize=True, scale=3.0))[1], 3 * logits[:, [0, 2]].softmax(-1)
    )
    assert route(logits.bfloat16(), EXPERTS)[1].dtype == torch.float32


def test_clamped_silu_clamps_the_gate_above_and_what_it_multiplies_on_both_sides() -> None:
    x = torch.tensor([-20.0, -7.5, -1.0, 0.0, 3.0, 7.0, 9.0], dtype=torch.float64)
    limited = torch.tensor([-20.0, -7.5, -1.0, 0.0, 3.0, 7.0, 7.0], dtype=torch.float64)
    for fc, factor in ((-9.0, -6.0), (8.0, 8.0), (2.0, 3.0)):
        expected = factor * limited / (1 + torch.exp(-1.702 * limited))
        torch.testing.assert_close(gated("clamped_silu", x, torch.full_like(x, fc)), expected)


def direct(mlp: ExpertMLP, x: torch.Tensor) -> torch.Tensor:
    """Return the mixture of one token, written out."""
    e = mlp.config
    logits = mlp.router(x).tolist()
    chosen = sorted(range(e.count), key=lambda i: (-logits[i], i))[: e.per_token]
    shares = torch.tensor(logits).softmax(0)
    total = sum(shares[i] for i in chosen) if e.normalize else 1.0
    y = torch.zeros_like(x)
    for i in chosen:
        gate, fc, proj = (stack.weight.view(e.count, -1, stack.weight.shape[1])[i] for stack in mlp.experts.values())
        b = [s.bias.view(e.count, -1)[i] if e.bias else torch.zeros(1) for s in mlp.experts.values()]
        hidden = gated(mlp.activation, gate @ x + b[0], fc @ x + b[1])
        y += shares[i] / total * e.scale * (proj @ hidden + b[2])
    if e.shared_width:
        y += mlp.shared(x) * (torch.sigmoid(mlp.shared_gate(x)) if e.shared_gate else 1.0)
    return y


@torch.inference_mode()
@pytest.mark.parametrize("config", [MIXED, ALL, BIASED, replace(MIXED, experts=replace(EXPERTS, shared_gate=False))])
def test_the_three_forms_are_the_sum_of_the_chosen_experts(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_module, "CHUNK", 8)
    mlp = mlp_of(config)
    x = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([direct(mlp, row) for row in x.view(-1, 16)]).view_as(x)
    for static in (False, True):
        mlp.static_shapes = static
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
        for rows in (0, 1, 2):
            torch.testing.assert_close(mlp(x[0, :rows]), expected[0, :rows], rtol=1e-5, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        assert mlp.to(dtype)(x.to(dtype)).dtype == dtype


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
def test_experts_beside_an_mlp_have_norms_of_their_own(static: bool) -> None:
    mlp = mlp_of(BESIDE)
    mlp.static_shapes = static
    for i, p in enumerate(mlp.parameters()):
        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3 + float(p.dim() == 1))
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    norms = {name: p for name, p in mlp.named_parameters() if p.dim() == 1}

    def rms(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean() + BESIDE.norm_epsilon).sqrt() * weight

    shares = (mlp.router.weight @ rms(x, norms["router_scale"]) / 4).softmax(0)
    chosen = shares.topk(3).indices.tolist()
    stacks = [stack.weight.view(7, -1, stack.weight.shape[1]) for stack in mlp.experts.values()]
    routed, mixed = rms(x, norms["ln_2.weight"]), torch.zeros(16)
    for i in chosen:
        gate, fc, proj = (stack[i] for stack in stacks)
        share = shares[i] / shares[chosen].sum() * norms["expert_scale"][i]
        mixed += share * (proj @ gated("silu", gate @ routed, fc @ routed))
    dense = mlp.shared(rms(x, norms["ln_1.weight"]))
    expected = rms(dense, norms["post_1.weight"]) + rms(mixed, norms["post_2.weight"])
    torch.testing.assert_close(mlp(x.expand(2, 3, 16)), expected.expand(2, 3, 16), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
def test_what_is_not_chosen_has_no_influence(static: bool) -> None:
    """An expert whose weights are NaN changes only the tokens that chose it."""
    mlp = mlp_of()
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    chosen, _ = route(mlp.router(x), EXPERTS)
    mlp.static_shapes = static
    before = mlp(x)
    mlp.experts["c_fc"].weight[12:24] = torch.nan  # expert 1
    after, hit = mlp(x), (chosen == 1).any(1)
    assert 0 < hit.sum() < 40
    assert after[hit].isnan().all()
    assert torch.equal(after[~hit], before[~hit])


@torch.inference_mode()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_router_that_is_not_finite_gives_what_is_not_finite(value: float, static: bool) -> None:
    mlp = mlp_of()
    mlp.static_shapes = static
    mlp.router.weight[3, 2] = value
    for x in (torch.randn(1, 16), torch.randn(20, 16)):
        x[:, 2] = 1.0
        assert mlp(x).isnan().all()


@pytest.mark.parametrize("engine", ["static", "native"])
def test_a_router_that_is_not_finite_ends_the_sequence_with_an_error(engine: str, tmp_path: Path) -> None:
    layers = (LayerKind(rotary=Rotary(8), experts=True),) * 2
    config = replace(
        ALL, family="mixtral", norm="rms", bias=False, learned_positions=False, tie_word_embeddings=False,
        layers=layers, experts=Experts(5, 2, 12, normalize=True),
    )  # fmt: skip
    weights = make_weights(config)
    tensors = dict(weights.read())
    tensors["transformer.h.1.mlp.router.weight"].values[3] = np.nan
    huggingface.save(replace(weights, read=lambda: iter(tensors.items())), tmp_path, char_to_json(CHARS))
    (output,) = LLM(str(tmp_path), engine=engine, dtype="float32").generate(["ab"], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert "the model's largest logit is nan" in str(output.outputs[0].error)
