"""Latent attention in folders: keys and values in one matrix, quantized or not; further layers; the correction."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import families
from helpers.models import TINY, edit_config, refuses
from helpers.quantized import CASES, base_folder, quantized_folders
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import EngineConfig, Latent, LayerKind, ModelConfig
from nanoinfer.engines import registry

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
