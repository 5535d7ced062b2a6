"""quantization="int4" of engine native: the formats of the matrices, their quantizers, and what is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.models import TINY, make_limits, make_weights
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.weights import Weights, int4_formats
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.errors import NanoinferError
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline import report
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.ceilings import DEVICES
from nanoinfer.roofline.formats import int4
from nanoinfer.utils.arrays import to_numpy

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

WIDE = replace(TINY, n_layer=3, n_embd=256, n_head=4)
SMOL = PRESETS["smollm2-135m"]
ODD = replace(  # with shared heads, and widths that are not multiples of 256
    SMOL, vocab_size=59, block_size=32, n_layer=3, layers=SMOL.layers[:3], n_embd=96, n_head=2, num_kv_heads=1,
    head_size=64, n_inner=160, tie_word_embeddings=False,
)  # fmt: skip
INT4 = EngineConfig(quantization="int4")
TEXT = [1, 2, 3, 4, 5, 6]


def logits(model: Weights) -> NDArray[np.float32]:
    engine = NativeEngine(model, make_limits(model.config), INT4)
    step = StepBatch(handles=[engine.open()], token_ids=TEXT, num_new=[len(TEXT)], num_logits=[len(TEXT)])
    return to_numpy(engine.extend(step)).copy()


def random(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return (np.random.default_rng(0).standard_normal(shape) ** 3).astype(np.float32)  # heavy tails


def squared_error(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.square(a - b, dtype=np.float64).sum())


# Quantizers ------------------------------------------------------------------------------------------------------


def plain_error(name: str, values: NDArray[np.float32]) -> float:
    """Return the squared error where each group has the scale, and in q4_k the minimum, of its extreme values."""
    groups = values.reshape(-1, 16 if name == "q6_k" else 32).astype(np.float64)
    if name == "q4_k":
        low = np.minimum(groups.min(1, keepdims=True), 0)
        scales = (groups.max(1, keepdims=True) - low) / 15
        scales, low = (
            (np.round(part / (top := np.repeat(part.reshape(-1, 8).max(1), 8)[:, None] / 63)) * top)
            for part in (scales, -low + 1e-30)
        )
        return float(((np.clip(np.round((groups + low) / scales), 0, 15) * scales - low - groups) ** 2).sum())
    scales = np.abs(groups).max(1, keepdims=True) / ({"q5_0": 16, "q6_k": 32}[name] - 1)
    return float(((np.round(groups / scales) * scales - groups) ** 2).sum())


@pytest.mark.parametrize("name", ["q5_0", "q4_k", "q6_k"])
def test_searched_scales_have_a_smaller_error_than_those_of_extremes(name: str) -> None:
    values = random((40, 768))
    assert squared_error(_native.unpack(weights=values, format=name), values) < 0.97 * plain_error(name, values)


@pytest.mark.parametrize("name", ["q5_0", "q4_k", "q6_k"])
def test_zeros_and_constants_are_kept_and_a_nan_stays_in_its_block(name: str) -> None:
    values = np.zeros((3, 512), np.float32)
    values[1] = -0.5
    values[2, 300] = np.inf
    got = _native.unpack(weights=values, format=name)
    assert np.array_equal(got[0], values[0])
    assert np.allclose(got[1], -0.5, rtol=2e-3)
    size = 32 if name == "q5_0" else 256
    bad = slice(300 // size * size, (300 // size + 1) * size)
    assert np.isnan(got[2, bad]).all()
    assert np.array_equal(np.delete(got[2], np.r_[bad]), np.zeros(512 - size, np.float32))


# Models ----------------------------------------------------------------------------------------------------------


def test_formats_are_those_of_q4_k_m() -> None:
    gpt2 = int4_formats(PRESETS["gpt2"])
    assert gpt2["transformer.wte.weight"] == (("q6_k", 50257),)
    few = [i for i in range(12) if gpt2[f"transformer.h.{i}.mlp.c_proj.weight"] == (("q4_k", 768),)]
    assert few == [1, 2, 4, 5, 7, 8]
    for i in range(12):
        assert gpt2[f"transformer.h.{i}.mlp.c_fc.weight"] == (("q4_k", 3072),)
        assert gpt2[f"transformer.h.{i}.attn.c_attn.weight"] == (("q4_k" if i in few else "q6_k", 2304),)
    odd = int4_formats(ODD)
    assert odd["transformer.wte.weight"] == (("q5_0", ODD.vocab_size),)
    assert odd["lm_head.weight"] == (("q8_0", ODD.vocab_size),)
    assert odd["transformer.h.2.attn.c_attn.weight"] == (("q5_0", 192), ("q8_0", 64))
    tiny = int4_formats(TINY)
    assert tiny.pop("transformer.h.0.mlp.c_proj.weight") == (("q5_0", 16),)
    assert {parts[0][0] for parts in tiny.values()} == {"q8_0"}  # 16 wide: padded


@pytest.mark.parametrize("config", [TINY, WIDE, ODD], ids=["tiny", "wide", "odd"])
def test_a_packed_folder_is_the_same_model(config: ModelConfig, tmp_path: Path) -> None:
    model = make_weights(config, std=0.05)
    packed.write_folder(model, tmp_path / "p", "int4", None, 1)
    found = packed.open_folder(tmp_path / "p")
    assert (found.quantization, found.block_formats) == ("int4", int4_formats(config))
    assert np.array_equal(logits(found), logits(model))


def test_folders_without_blocks_are_refused(tmp_path: Path) -> None:
    packed.write_folder(make_weights(TINY), tmp_path / "p", "int4", None, 1)
    path = tmp_path / "p" / packed.FILE
    path.write_bytes(path.read_bytes().replace(b'"version": "2"', b'"version": "1"'))
    with pytest.raises(NanoinferError, match=r"h\.0\..* is in int4 without blocks: pack the original model"):
        packed.open_folder(tmp_path / "p")


def test_the_roofline_reads_the_bytes_of_the_decoder() -> None:
    config = PRESETS["gpt2"]
    sizes = [_native.packed_size(format=f, rows=rows, columns=768)[0] for f, rows in (("q4_k", 32), ("q6_k", 32))]
    assert [
        int4(config).of(f"transformer.{name}").matrix_bytes(32, 768) for name in ("h.0.mlp.c_fc.weight", "wte.weight")
    ] == sizes
    assert decode(config, int4(config)).model.bytes(1, 1) == pytest.approx(86.3e6, rel=0.01)


def test_the_report_counts_the_mix_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_device", lambda name, local: replace(DEVICES["t4"], name=name))
    sizes = [
        report.answer("gpt2", report.Question(device=name, dtype="int4"))["memory"]["weight_bytes"]
        for name in ("measured", "t4")
    ]
    assert sizes == [pytest.approx(89.5e6, rel=0.01), pytest.approx(71.2e6, rel=0.01)]
