"""Experts and latent attention on engine native: logits of the reference, the same bits in any company, all formats,
NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import families
from helpers.gguf_files import as_q8_0, convert
from helpers.models import TINY, load_gpt, make_weights, weights_of
from helpers.native import all_logits, engine_of
from nanoinfer.checkpoints import huggingface, packed
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.config import EngineConfig, EngineLimits, Experts, Latent, LayerKind, ModelConfig, Rotary
from nanoinfer.engines import native
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine

MIXED = replace(
    TINY, n_embd=64, n_layer=3, gated_mlp=True, activation="silu", norm="rms", bias=False, n_inner=96,
    layers=(LayerKind(experts=True), LayerKind(), LayerKind(experts=True)), experts=Experts(8, 2, 32, True),
)  # fmt: skip


def shape(latent: Latent, **fields: object) -> ModelConfig:
    config = replace(TINY, n_embd=64, n_layer=2, n_head=4, gated_mlp=True, activation="silu", norm="rms", bias=False)
    layers = (LayerKind(None, Rotary(latent.rotary_dim)),) * 2
    sizes = {"head_size": latent.head_dim, "num_kv_heads": 1, "attention_scale": 0.2}
    return replace(config, n_inner=96, layers=layers, latent=latent, learned_positions=False, **sizes, **fields)


SHAPES = {
    "whole panels": MIXED,
    "odd widths": replace(MIXED, n_embd=48, experts=Experts(7, 3, 33, False, scale=2.5)),
    "shared": replace(MIXED, experts=Experts(5, 2, 40, True, shared_width=24, shared_gate=True), norm_placement="both"),
    "shared, no gate": replace(MIXED, experts=Experts(5, 5, 7, True, shared_width=33), residual_scale=0.5),
    "one": replace(MIXED, experts=Experts(1, 1, 32, True)),
    "sigmoids, corrected, in groups": replace(
        MIXED,
        experts=Experts(12, 3, 16, True, scoring="sigmoid", correction=True, groups=4, groups_per_token=2, group_top=2),
    ),
    "groups of a softmax": replace(MIXED, experts=Experts(6, 2, 16, False, groups=3, groups_per_token=2)),
    "sums of a softmax": replace(
        MIXED, experts=Experts(6, 2, 16, False, groups=2, groups_per_token=1, group_top=3, correction=True)
    ),
    "no gates": replace(
        MIXED, experts=Experts(6, 2, 20, False, scoring="sigmoid", shared_width=33), gated_mlp=False, activation="relu2"
    ),
    "many": replace(MIXED, experts=Experts(60, 8, 16, True)),
    "biased": replace(
        MIXED, n_embd=48, experts=Experts(7, 3, 33, True, bias=True), activation="clamped_silu", sinks=True
    ),
    "beside an MLP": replace(
        MIXED,
        n_embd=48,
        norm_placement="both",
        experts=Experts(7, 3, 33, True, beside=True),
        residual_scale=0.5,
        layers=(LayerKind(experts=True), LayerKind(experts=True, n_inner=80), LayerKind(experts=True)),
    ),
    "latent": shape(Latent(64, 32, 32, 32, query_rank=64)),
    "latent, odd widths": shape(Latent(33, 6, 7, 5, query_rank=19, norm_epsilon=1e-2)),
    "latent, plain queries": shape(Latent(24, 10, 3, 45)),
    "latent, wide values": shape(Latent(8, 2, 4, 70), residual_scale=0.5),
    "latent, biases": replace(shape(Latent(40, 8, 16, 16, query_rank=12), norm_placement="both"), bias=("qkv", "proj")),
}
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (4, 20))
CACHES = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.1, "int4": 0.4}


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def check_alone(engine: NativeEngine, tokens: list[int], found: np.ndarray) -> None:
    """A sequence that is processed token by token has the same bits."""
    alone = engine.open()
    for i, token in enumerate(tokens):
        assert np.array_equal(engine.extend(StepBatch([alone], [token], [1], [1]))[0], found[i])


@pytest.mark.parametrize(
    ("name", "cache"), [(n, c) for n in SHAPES for c in CACHES if c == "float32" or n.startswith("latent")]
)
def test_logits_are_those_of_the_reference_and_the_same_alone(name: str, cache: str) -> None:
    weights = make_weights(SHAPES[name])
    expected = load_gpt(weights).eval()(torch.tensor(TOKENS)).detach().numpy()
    engine = engine_of(weights, threads=2, kv_cache_dtype=cache)
    found = all_logits(engine, TOKENS)
    assert error_of(found, expected) < CACHES[cache]
    check_alone(engine, TOKENS[2].tolist(), found[2])


@pytest.mark.parametrize("name", ["shared", "beside an MLP", "latent", "latent, odd widths"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_packed_folder_gives_the_same_bits(
    quantization: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 4 bits the experts have formats of GGUF files; routers are float32 in every folder."""
    weights = make_weights(SHAPES[name])
    monkeypatch.setattr(huggingface, "read_config", lambda path: weights.config)  # no family has all of this
    monkeypatch.setattr(huggingface, "config_to_dict", lambda config, dtype: {})
    packed.write_folder(weights, tmp_path / "packed", quantization or "float32", None, threads=1)
    expected = all_logits(engine_of(weights, quantization=quantization), TOKENS)
    assert np.array_equal(all_logits(engine_of(packed.open_folder(tmp_path / "packed")), TOKENS), expected)
    error = error_of(expected, all_logits(engine_of(weights), TOKENS))
    assert (error == 0) if quantization is None else (0 < error < 0.3)


def test_a_mapped_file_that_memory_cannot_hold_is_said_to_be_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed.write_folder(make_weights(), tmp_path / "packed", "float32", None, threads=1)
    mapped = packed.open_folder(tmp_path / "packed")
    expected = all_logits(engine_of(mapped), TOKENS)
    assert "from disk" not in caplog.text
    monkeypatch.setattr(native, "free_memory", lambda device: 100)
    assert np.array_equal(all_logits(engine_of(mapped), TOKENS), expected)
    assert "has 0.0 GiB of weights, but 0.0 GiB of memory are free: steps read the others from disk" in caplog.text


def test_a_router_that_is_not_finite_spoils_only_its_token() -> None:
    """The embedding of one token makes its router overflow."""
    weights = make_weights(MIXED)
    tensors = dict(weights.read())
    tensors["transformer.h.0.mlp.router.weight"].values[3, :] = np.float32(np.nan)
    engine = engine_of(replace(weights, read=lambda: iter(tensors.items())))
    assert np.isnan(all_logits(engine, TOKENS)).all()
    tensors["transformer.h.0.mlp.router.weight"].values[3, :] = 0
    tensors["transformer.wte.weight"].values[TOKENS[1, -1]] = np.float32(np.nan)
    others = [i for i in range(4) if TOKENS[1, -1] not in TOKENS[i, :]]
    found = all_logits(engine_of(replace(weights, read=lambda: iter(tensors.items()))), TOKENS)
    assert np.isnan(found[1, -1]).all()
    assert others
    assert np.isfinite(found[others][..., [t for t in range(MIXED.vocab_size) if t != TOKENS[1, -1]]]).all()


def test_a_correction_that_is_not_finite_reaches_the_logits() -> None:
    weights = make_weights(SHAPES["sigmoids, corrected, in groups"])
    tensors = dict(weights.read())
    tensors["transformer.h.0.mlp.correction.bias"].values[5] = np.float32(np.nan)
    broken = replace(weights, read=lambda: iter(tensors.items()))
    assert np.isnan(all_logits(engine_of(broken), TOKENS)).all()
    assert load_gpt(broken).eval()(torch.tensor(TOKENS)).isnan().all()


def test_rows_of_few_inputs_fit_their_memory() -> None:
    """In 8 bits they are padded to 64 inputs, which take more bytes than so few in float32."""
    config = replace(MIXED, block_size=256, n_embd=16, n_inner=16, experts=Experts(256, 256, 16, True))
    limits = EngineLimits(max_num_seqs=1, block_size=256, max_num_cached_tokens=256)
    engine = NativeEngine(make_weights(config), limits, EngineConfig(engine="native", quantization="int8"))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 256).tolist()
    whole = engine.extend(StepBatch([engine.open()], tokens, [256], [256])).copy()
    engine.truncate(0, 0)
    for i in range(3):
        assert np.array_equal(engine.extend(StepBatch([0], tokens[i : i + 1], [1], [1]))[0], whole[i])
    assert np.isfinite(whole).all()


def test_a_token_that_is_not_finite_spoils_only_its_sequence() -> None:
    weights = make_weights(SHAPES["latent, odd widths"])
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
    check_alone(engine, tokens[2].tolist(), found[2])


def test_a_large_dimension_of_keys_and_values_leaves_the_others_their_bits() -> None:
    """One scale for each head: without the rotation the error is 0.024."""
    gpt = load_gpt(make_weights(replace(TINY, n_embd=64, n_head=1)))
    with torch.no_grad():
        for block in gpt.blocks:
            block.attn.c_attn.bias[67::64] += 40  # a dimension of keys and of values
    expected = gpt(torch.tensor(TOKENS)).detach().numpy()
    engine = engine_of(weights_of(gpt), threads=2, kv_cache_dtype="int8")
    assert error_of(all_logits(engine, TOKENS), expected) < 0.012
