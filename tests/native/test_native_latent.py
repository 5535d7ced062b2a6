"""Latent attention on engine native: logits of the reference, the same bits in any company, all formats, NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import families
from helpers.gguf_files import as_q8_0, convert
from helpers.models import TINY, load_gpt, make_weights
from helpers.native import all_logits, engine_of
from nanoinfer.checkpoints import huggingface, packed
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.config import Latent, LayerKind, ModelConfig, Rotary
from nanoinfer.engines.base import StepBatch


def shape(latent: Latent, **fields: object) -> ModelConfig:
    config = replace(TINY, n_embd=64, n_layer=2, n_head=4, gated_mlp=True, activation="silu", norm="rms", bias=False)
    layers = (LayerKind(None, Rotary(latent.rotary_dim)),) * 2
    sizes = {"head_size": latent.head_dim, "num_kv_heads": 1, "attention_scale": 0.2}
    return replace(config, n_inner=96, layers=layers, latent=latent, learned_positions=False, **sizes, **fields)


SHAPES = {
    "whole panels": shape(Latent(64, 32, 32, 32, query_rank=64)),
    "odd widths": shape(Latent(33, 6, 7, 5, query_rank=19, norm_epsilon=1e-2)),
    "plain queries": shape(Latent(24, 10, 3, 45)),
    "wide values": shape(Latent(8, 2, 4, 70), residual_scale=0.5),
    "biases": shape(Latent(40, 8, 16, 16, query_rank=12), norm_placement="both"),
}
SHAPES["biases"] = replace(SHAPES["biases"], bias=("qkv", "proj"))
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (4, 20))


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_the_reference_and_the_same_alone(config: ModelConfig, cache: str) -> None:
    weights = make_weights(config)
    expected = load_gpt(weights).eval()(torch.tensor(TOKENS)).detach().numpy()
    engine = engine_of(weights, threads=2, kv_cache_dtype=cache)
    found = all_logits(engine, TOKENS)
    error = np.sqrt(np.mean((found - expected) ** 2)) / expected.std()
    assert error < {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.1}[cache]
    alone = engine.open()
    for i, token in enumerate(TOKENS[2].tolist()):
        assert np.array_equal(engine.extend(StepBatch([alone], [token], [1], [1]))[0], found[2, i])


@pytest.mark.parametrize("name", ["whole panels", "odd widths"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_packed_folder_gives_the_same_bits(
    quantization: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weights(SHAPES[name])
    monkeypatch.setattr(huggingface, "read_config", lambda path: weights.config)  # no family has all of this
    monkeypatch.setattr(huggingface, "config_to_dict", lambda config, dtype: {})
    packed.write_folder(weights, tmp_path / "packed", quantization or "float32", None, threads=1)
    expected = all_logits(engine_of(weights, quantization=quantization), TOKENS)
    assert np.array_equal(all_logits(engine_of(packed.open_folder(tmp_path / "packed")), TOKENS), expected)
    full = all_logits(engine_of(weights), TOKENS)
    error = np.sqrt(np.mean((expected - full) ** 2)) / full.std()
    assert (error == 0) if quantization is None else (0 < error < 0.3)


def test_a_token_that_is_not_finite_spoils_only_its_sequence() -> None:
    weights = make_weights(SHAPES["odd widths"])
    tensors = dict(weights.read())
    tensors["transformer.wte.weight"].values[TOKENS[1, 5]] = np.float32(np.nan)
    with_it = [i for i in range(4) if TOKENS[1, 5] in TOKENS[i, :]]
    found = all_logits(engine_of(replace(weights, read=lambda: iter(tensors.items()))), TOKENS)
    assert np.isnan(found[1, 5:]).all()
    others = [i for i in range(4) if i not in with_it]
    assert others
    known = [t for t in range(weights.config.vocab_size) if t != TOKENS[1, 5]]  # the head is tied
    assert np.isfinite(found[others][..., known]).all()


WIDE = {
    "hidden_size": 64, "intermediate_size": 64, "kv_lora_rank": 64, "q_lora_rank": 32, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize("stored", ["keys and values of each head", "of all heads"])
def test_matrices_in_blocks_of_a_gguf_file(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of heads are multiplied in their blocks, unless keys have to be transposed."""
    monkeypatch.setitem(families.CASES, "wide", ("DeepseekV3Config", families.CASES["deepseek_v3"][1] | WIDE))
    model = families.make_folder("wide", tmp_path / "hf")
    convert(model, tmp_path / "a.gguf", as_q8_0, split_heads=stored != "of all heads")
    weights, _ = gguf.open_file(tmp_path / "a.gguf")
    tokens = TOKENS % 61
    expected = load_gpt(weights).eval()(torch.tensor(tokens)).detach().numpy()
    blocks = {name for name in weights.block_formats if ".h.1.attn." in name}
    names = ("c_attn", "q_b", "c_proj", *(() if stored == "of all heads" else ("k_b", "v_b")))
    assert blocks == {f"transformer.h.1.attn.{name}.weight" for name in names}
    engine = engine_of(weights, threads=2, kv_cache_dtype="float32")
    found = all_logits(engine, tokens)
    assert np.sqrt(np.median((found - expected) ** 2)) / expected.std() < 0.1
    alone = engine.open()
    for i, token in enumerate(tokens[2].tolist()):
        assert np.array_equal(engine.extend(StepBatch([alone], [token], [1], [1]))[0], found[2, i])
