"""Mixtures of experts on engine native: logits of the reference, the same bits in any company, all formats, NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.models import TINY, load_gpt, make_weights
from helpers.native import all_logits, engine_of
from nanoinfer.checkpoints import huggingface, packed
from nanoinfer.config import EngineConfig, EngineLimits, Experts, LayerKind, ModelConfig
from nanoinfer.engines import native
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine

MIXED = replace(
    TINY, n_embd=64, n_layer=3, gated_mlp=True, activation="silu", norm="rms", bias=False, n_inner=96,
    layers=(LayerKind(experts=True), LayerKind(), LayerKind(experts=True)), experts=Experts(8, 2, 32, True),
)  # fmt: skip
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
    "sigmoids": replace(MIXED, experts=Experts(6, 2, 16, False, scoring="sigmoid")),
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
}
TOKENS = np.random.default_rng(0).integers(0, MIXED.vocab_size, (4, 20))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_the_reference_and_the_same_alone(config: ModelConfig) -> None:
    weights = make_weights(config)
    expected = load_gpt(weights).eval()(torch.tensor(TOKENS)).detach().numpy()
    engine = engine_of(weights, threads=2)
    found = all_logits(engine, TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    alone = engine.open()
    for i, token in enumerate(TOKENS[2].tolist()):
        assert np.array_equal(engine.extend(StepBatch([alone], [token], [1], [1]))[0], found[2, i])


@pytest.mark.parametrize("shape", ["shared", "beside an MLP"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_packed_folder_gives_the_same_bits(
    quantization: str | None, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 4 bits the experts have formats of GGUF files; routers are float32 in every folder."""
    weights = make_weights(SHAPES[shape])
    monkeypatch.setattr(huggingface, "read_config", lambda path: weights.config)  # no family has all of this
    packed.write_folder(weights, tmp_path / "packed", quantization or "float32", None, threads=1)
    mapped = packed.open_folder(tmp_path / "packed")
    expected = all_logits(engine_of(weights, quantization=quantization), TOKENS)
    assert np.array_equal(all_logits(engine_of(mapped), TOKENS), expected)
    full = all_logits(engine_of(weights), TOKENS)
    error = np.abs(expected - full).max() / np.abs(full).max()
    assert (error == 0) if quantization is None else (0 < error < 0.5)


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
