"""Adapters in the native decoder: the update of the weights in every format, and the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.adapters import make_adapter, merged
from helpers.models import TINY, load_gpt, make_weights, weights_of
from helpers.native import ISAS, engine_of, make_decoder
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine

WIDE = replace(
    TINY, family="llama", n_embd=96, n_head=6, num_kv_heads=2, n_inner=224, norm="rms", gated_mlp=True, bias=False,
    activation="silu", learned_positions=False, layers=(LayerKind(None, Rotary(16)),) * 2,
)  # fmt: skip
PARTS = replace(WIDE, n_embd=256, n_head=16, n_layer=8, layers=WIDE.layers * 4)
"""With int4, values of some layers have a format of their own: c_attn has two parts."""
CONFIGS = {"gated": WIDE, "parts": PARTS, "plain": replace(TINY, activation="gelu")}
FORMATS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")]


def small_weights(config: ModelConfig, dtype: str = "float32") -> Weights:
    return replace(make_weights(config, std=0.08), dtype=dtype)


def logits_of(engine: NativeEngine, parts: list[tuple[int, list[int]]]) -> np.ndarray:
    """Return the logits of every token of new sequences with these adapters, (tokens, V)."""
    batch = StepBatch()
    for adapter, ids in parts:
        batch.add(engine.open(adapter), ids, len(ids))
    logits = engine.extend(batch).copy()
    engine.reset()
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=lambda f: str(f))
@pytest.mark.parametrize("case", CONFIGS)
def test_an_adapter_is_the_update_of_the_weights(
    case: str, dtype: str, quantization: str | None, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In few bits, the base is rounded alone, so the error is that of the base without an adapter."""
    monkeypatch.setenv("NANOINFER_ISA", isa)
    config, ids = CONFIGS[case], list(range(3, 20))
    adapter = make_adapter(tmp_path / "a", config, 3, lora_alpha=0.5)
    weights = small_weights(config)
    exact = engine_of(weights)
    base = logits_of(exact, [(0, ids)])
    updated = logits_of(engine_of(weights_of(merged(load_gpt(weights), adapter))), [(0, ids)])
    engine = engine_of(replace(weights, dtype=dtype), quantization=quantization, enable_lora=True)
    number = engine.load_adapter(adapter)
    both = logits_of(engine, [(number, ids), (0, ids)])
    found, plain = both[: len(ids)], both[len(ids) :]
    change, rounding = np.abs(updated - base).max(), np.abs(plain - base).max()
    assert change > 0.5
    limit = 1e-4 if (dtype, quantization) == ("float32", None) else 2 * rounding + 0.02 * change
    assert np.abs(found - updated).max() < limit


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=lambda f: str(f))
def test_the_bits_of_a_sequence_do_not_depend_on_the_others(
    dtype: str, quantization: str | None, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOINFER_ISA", isa)
    engine = engine_of(small_weights(WIDE, dtype), quantization=quantization, enable_lora=True, threads=2)
    others = [make_adapter(tmp_path / "a", WIDE, 3), make_adapter(tmp_path / "b", WIDE, 4, r=7, targets=("mlp.c_fc",))]
    numbers = [0, *map(engine.load_adapter, others)]
    parts = [(numbers[i % 3], list(range(i, i + n))) for i, n in enumerate((5, 1, 9, 1, 1, 12))]
    alone = [logits_of(engine, [part]) for part in parts]
    assert len({a.tobytes() for a in alone}) == len(parts)
    assert np.array_equal(logits_of(engine, parts), np.concatenate(alone))
    plain = engine_of(small_weights(WIDE, dtype), quantization=quantization)
    assert np.array_equal(logits_of(plain, [parts[0]]), alone[0])  # a sequence without an adapter


def test_factors_and_adapters_are_checked() -> None:
    decoder = make_decoder()
    a, b = np.zeros((3, 16), np.float32), np.zeros((48, 3), np.float32)
    name, h = "transformer.h.0.attn.c_attn", decoder.open()
    good = {"adapter": 1, "name": name, "first": 0, "a": a, "b": b}
    for change in (
        {"adapter": 0}, {"name": "transformer.h.9.attn.c_attn"}, {"name": "transformer.h.0.ln_1"}, {"first": -1},
        {"first": 1}, {"b": b[:, :2].copy()}, {"a": a[:, :15].copy()}, {"a": a[:0], "b": b[:, :0].copy()}, {"b": b[:0]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            decoder.load_adapter(**good | change)
    step = {"handles": [h], "token_ids": [1], "num_new": [1], "num_logits": [1]}
    logits = np.zeros((1, decoder.logits_stride), np.float32)
    for adapters in ([1], [0, 0], [-1]):
        with pytest.raises(ValueError, match="is not loaded"):
            decoder.extend(**step, logits=logits, adapters=adapters)
    decoder.load_adapter(**good)
    decoder.extend(**step, logits=logits, adapters=[1])
    decoder.unload_adapter(1)
    with pytest.raises(ValueError, match="adapter 1 is not loaded"):
        decoder.extend(**step, logits=logits, adapters=[1])
