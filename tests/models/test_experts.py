"""Mixtures of experts: fields, shapes, routing, and the three forms of the sum.

Latent attention in folders: keys and values in one matrix, quantized or not; further layers; the correction."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import families
from helpers.engines import GREEDY
from helpers.models import CHARS, TINY, edit_config, make_model, make_weights, refuses
from helpers.quantized import CASES, base_folder, quantized_folders
from nanoinfer import LLM
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.checkpoints.transforms import truncate_layers
from nanoinfer.config import EngineConfig, Experts, Latent, LayerKind, ModelConfig, Rotary
from nanoinfer.engines import registry
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
PLAIN_SHARED = replace(EXPERTS, shared_gate=False)
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
        ({"bias": 1}, "bias=1 is not a bool"),
        ({"scoring": "tanh"}, "scoring='tanh' is unknown: use one of softmax, sigmoid"),
        ({"correction": 1}, "correction=1 is not a bool"),
        ({"groups": 2}, "experts=5 is not a multiple of groups of experts=2"),
        ({"groups": 5, "groups_per_token": 1}, "experts per token=2 is not an integer in [1, 1]"),
        ({"group_top": 6}, "experts that score a group=6 is not an integer in [1, 5]"),
        ({"beside": 1}, "beside=1 is not a bool"),
        ({"beside": True}, "experts beside an MLP have no shared expert and no biases: leave both out"),
        ({"shared_width": 0}, "shared_gate=True needs a shared expert: set shared_width"),
    ],
)
def test_fields_are_checked(changes: dict[str, Any], message: str) -> None:
    refuses(lambda: replace(EXPERTS, **changes), message)


def test_a_config_needs_experts_and_gates() -> None:
    refuses(lambda: replace(MIXED, experts=None), "a layer has experts, but the config does not describe them")
    refuses(lambda: replace(MIXED, n_embd=2**30, n_head=2, head_size=8), f"experts * n_embd={5 * 2**30}")
    refuses(lambda: ModelConfig(activation="clamped_silu"), "activation=clamped_silu needs gated_mlp=True")
    for changes in ({"norm": "layer"}, {"norm_placement": "before"}, {"layers": MIXED.layers}, {"gated_mlp": False}):
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
        *first, proj = (stack.weight.view(e.count, -1, stack.weight.shape[1])[i] for stack in mlp.experts.values())
        b = [s.bias.view(e.count, -1)[i] if e.bias else torch.zeros(1) for s in mlp.experts.values()]
        sums = [matrix @ x + bias for matrix, bias in zip(first, b, strict=False)]
        hidden = gated(mlp.activation, *sums) if len(sums) == 2 else sums[0].relu().square()
        y += shares[i] / total * e.scale * (proj @ hidden + b[-1])
    if e.shared_width:
        y += mlp.shared(x) * (torch.sigmoid(mlp.shared_gate(x)) if e.shared_gate else 1.0)
    return y


@torch.inference_mode()
@pytest.mark.parametrize(
    "config", [MIXED, ALL, BIASED, replace(MIXED, gated_mlp=False, activation="relu2", experts=PLAIN_SHARED)]
)
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


WIDE = families.LATENT | {
    "kv_lora_rank": 64, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
KV = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("case", ["fp8-blocks", "gptq"])
def test_a_quantized_folder_has_the_values_of_its_formula(case: str, tmp_path: Path) -> None:
    """Keys are transposed for each head, so that their groups are no rows: they are dequantized."""
    base = base_folder(tmp_path / "base", "DeepseekV3Config", **WIDE)
    quantized, exact = quantized_folders(base, tmp_path, CASES[case], keep=lambda name: "mlp.gate." in name)
    found, expected = dict(open_folder(quantized).read()), dict(open_folder(exact).read())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].float32(), tensor.float32(), err_msg=name)
    formats = open_folder(quantized).block_formats
    assert ("transformer.h.1.attn.q_b.weight" in formats) == (case == "gptq")
    assert "transformer.h.1.attn.k_b.weight" not in formats


def changed(folder: Path, **tensors: Any) -> None:
    """Replace or add tensors; None removes one."""
    stored = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in tensors.items()}
    kept = {name: t for name, t in stored.items() if t is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    families.make_folder("deepseek_v3", tmp_path)
    before = dict(open_folder(tmp_path).read())
    further = {f"model__layers__4__{name}__weight": torch.ones(24, 24) for name in ("eh_proj", "enorm")}
    changed(tmp_path, **further)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    refuses(lambda: open_folder(tmp_path), "n_layer=4, but the weights have 5 layers")
    edit_config(tmp_path, num_nextn_predict_layers="1")
    refuses(lambda: open_folder(tmp_path), "num_nextn_predict_layers='1' is not an integer")
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert open_folder(tmp_path).config.n_layer == 4
    assert dict(open_folder(tmp_path).read()).keys() == before.keys()
    edit_config(tmp_path, num_hidden_layers=2)
    refuses(lambda: open_folder(tmp_path), "n_layer=2, but the weights have 4 layers")
    edit_config(tmp_path, num_hidden_layers=4)
    changed(tmp_path, model__layers__x__weight=torch.ones(3))
    refuses(lambda: open_folder(tmp_path), "1 tensors are not part of the model: 'model.layers.x.weight'")


def test_a_matrix_of_keys_and_values_that_does_not_fit_is_named(tmp_path: Path) -> None:
    families.make_folder("deepseek_v3", tmp_path)
    kv = load_file(tmp_path / "model.safetensors")[KV]
    changed(tmp_path, **{KV.replace(".", "__"): kv[:-1].clone()})
    refuses(lambda: open_folder(tmp_path), f"tensor {KV} is [67, 10], but the config requires [68, 10]")
    changed(tmp_path, **{KV.replace(".", "__"): None})
    refuses(lambda: open_folder(tmp_path), "tensor model.layers.1.self_attn.kv_b_proj.keys.weight [40, 10] is missing")
    edit_config(tmp_path, kv_lora_rank=2**15 + 2)
    refuses(lambda: open_folder(tmp_path), "latent rank=32770 is not an integer in [1, 32768]")


def test_the_correction_keeps_its_bits_in_16_bits(tmp_path: Path) -> None:
    families.make_folder("deepseek_v3", tmp_path)
    weights = open_folder(tmp_path, "bfloat16")
    name = "transformer.h.1.mlp.correction.bias"
    expected = dict(weights.read())[name].float32()
    found = load_gpt(weights).state_dict()[name]
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)


def test_quantized_weights_have_a_cache_of_16_bits(tmp_path: Path) -> None:
    pytest.importorskip("nanoinfer._native")
    families.make_folder("deepseek_v3", tmp_path)
    sizes = {}
    for quantization, cache in (("int8", "auto"), ("int8", "bfloat16"), ("int8", "int8"), (None, "auto")):
        config = EngineConfig(quantization=quantization, kv_cache_dtype=cache, max_num_seqs=1)
        engine: Any = registry.build(registry.ENGINES["native"], open_folder(tmp_path), config, "cpu")
        sizes[quantization, cache] = engine._decoder.cache_bytes // engine._decoder.blocks_total
    assert sizes["int8", "auto"] == sizes["int8", "bfloat16"] > sizes["int8", "int8"]
    assert sizes[None, "auto"] > sizes["int8", "auto"]


def test_fields_that_do_not_fit_are_named() -> None:
    fields: dict[str, Any] = {"latent": Latent(8, 4, 6, 5), "norm": "rms", "num_kv_heads": 1, "head_size": 12}
    assert ModelConfig(**fields).qkv_widths(0) == (12 * 10, 0, 12)
    for wrong in ({"head_size": 11}, {"num_kv_heads": 2}, {"norm": "layer"}):
        refuses(lambda w=wrong: ModelConfig(**fields | w), "latent attention needs head_size=12, num_kv_heads=1")
    for name in ("sinks", "rounded_inputs"):
        refuses(lambda n=name: ModelConfig(**fields | {n: True}), f"latent attention is not supported with {name}=True")
    refuses(lambda: ModelConfig(**fields, qk_norm="head"), "latent attention is not supported with qk_norm=head")
    layers = (LayerKind(value_norm=True),) * ModelConfig().n_layer
    refuses(
        lambda: ModelConfig(**fields, layers=layers), "latent attention is not supported with layers with value_norm"
    )
    refuses(lambda: Latent(0, 4, 6, 5), "latent rank=0 is not an integer in [1, 32768]")
    assert not TINY.latent


@pytest.mark.parametrize("case", ["opt", "deepseek_v3"])
def test_sizes_are_compared_before_rows_are_listed(case: str, tmp_path: Path) -> None:
    families.make_folder(case, tmp_path)
    edit_config(tmp_path, **{"max_position_embeddings" if case == "opt" else "num_attention_heads": 2**24})
    if case != "opt":  # whose heads are compared first
        changed(tmp_path, **{KV.replace("1", str(i)).replace(".", "__"): None for i in range(4)})
    tracemalloc.start()
    refuses(lambda: open_folder(tmp_path), f"requires [{2**24 + 2 if case == 'opt' else 2**28}, ")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_rotary_parameters_that_are_empty_are_missing(tmp_path: Path) -> None:
    families.make_folder("deepseek_v3", tmp_path)
    yarn = families.YARN | {"mscale_all_dim": 0.5}
    edit_config(tmp_path, rope_parameters=yarn)
    expected = open_folder(tmp_path).config
    edit_config(tmp_path, rope_parameters={}, rope_scaling=yarn)
    assert open_folder(tmp_path).config == expected
    edit_config(tmp_path, rope_scaling="yarn")
    refuses(lambda: open_folder(tmp_path), "rope_scaling='yarn' is not an object")
