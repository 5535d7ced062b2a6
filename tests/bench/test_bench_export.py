"""Exporters: complete or not there, made once, made again for other weights, and clear about what they cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.models import make_folder, refuses
from nanoinfer.bench.backends import export_once, prepare
from nanoinfer.bench.backends.llamacpp import QUANT_BLOCK, export_gguf
from nanoinfer.bench.case import Case
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.models.presets import PRESETS

SMALL = ModelConfig(vocab_size=96, block_size=64, n_layer=2, n_head=2, n_embd=64)
GGUF = "gguf is an optional peer: pip install gguf"
LLAMA_CPP = "llama.cpp is an optional peer: pip install llama-cpp-python"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "small", SMALL, chars=None)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# The frame -------------------------------------------------------------------------------------------


def test_an_export_is_made_once(tmp_path: Path) -> None:
    written: list[Path] = []

    def write(partial: Path) -> None:
        written.append(partial)
        (partial / "model").write_text(f"version {len(written)}")

    target = tmp_path / "exports" / "peer"
    for _ in range(2):
        assert export_once(target, write) == target
    assert len(written) == 1
    assert (target / "model").read_text() == "version 1"
    assert names(target.parent) == {"peer"}


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        (partial / "model").write_text("half")
        raise OSError(28, "No space left on device")

    refuses(lambda: export_once(tmp_path / "exports" / "peer", write), "exports/peer", "No space left")
    assert names(tmp_path / "exports") == set()


def test_backends_that_load_the_folder_itself_need_no_export(small: Path) -> None:
    for name in ("static", "transformers-dynamic"):
        assert prepare(Case(name, str(small)), small) is None
    assert not (small / "exports").exists()


# GGUF ------------------------------------------------------------------------------------------------


def shrunk(preset: str) -> ModelConfig:
    """Return a published model with small sizes."""
    shape = {
        "vocab_size": 96,
        "block_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "num_kv_heads": 2,
        "n_embd": 64,
        "n_inner": 96,
    }
    layers = (LayerKind(None, Rotary(32, 1e5)),) * 2
    return replace(PRESETS[preset], **shape, head_size=32, layers=layers, bos_token_id=0, eos_token_ids=(0,))


def types_of(path: Path) -> dict[str, str]:
    package = pytest.importorskip("gguf", reason=GGUF)
    return {t.name: t.tensor_type.name for t in package.GGUFReader(str(path)).tensors}


def test_gguf_float32_holds_the_weights(small: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("gguf", reason=GGUF)
    path = export_gguf(small, tmp_path, "F32")
    reader = package.GGUFReader(str(path))
    assert set(types_of(path).values()) == {"F32"}
    assert sum(int(t.n_elements) for t in reader.tensors) == 12 * 64 * 64 * 2 + 13 * 64 * 2 + (96 + 64 + 2) * 64
    assert reader.get_field("gpt2.context_length").contents() == 64
    assert reader.get_field("gpt2.feed_forward_length").contents() == 256


def test_gguf_stores_an_untied_head(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=GGUF)
    untied = make_folder(tmp_path / "untied", replace(SMALL, tie_word_embeddings=False), chars=None)
    assert "output.weight" in types_of(export_gguf(untied, tmp_path, "F32"))


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen3-0.6b"])
def test_gguf_of_another_family_is_the_same_model(preset: str, tmp_path: Path) -> None:
    config = shrunk(preset)
    weights = open_folder(make_folder(tmp_path / "small", config, chars=None))
    found, _ = gguf.open_file(export_gguf(tmp_path / "small", tmp_path, "F32"))
    assert found.config == config
    for (name, ours), (theirs_name, theirs) in zip(weights.read(), found.read(), strict=True):
        assert name == theirs_name
        np.testing.assert_array_equal(ours.float32(), theirs.float32())


@pytest.mark.parametrize("file_type", ["BF16", "Q8_0", "Q4_0"])
def test_gguf_types(small: Path, tmp_path: Path, file_type: str) -> None:
    pytest.importorskip("gguf", reason=GGUF)
    pytest.importorskip("llama_cpp", reason=LLAMA_CPP)
    types = types_of(export_gguf(small, tmp_path, file_type))
    assert types["blk.1.ffn_up.weight"] == types["blk.0.attn_qkv.weight"] == file_type
    assert types["blk.1.attn_norm.weight"] == types["position_embd.weight"] == "F32"
    assert names(tmp_path) >= {"gguf-F32", f"gguf-{file_type}"}


def test_gguf_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    exact = make_folder(tmp_path / "exact", replace(SMALL, activation="gelu"), chars=None)
    refuses(lambda: export_gguf(exact, tmp_path, "F32"), "activation='gelu'", "gelu_new")
    odd = make_folder(tmp_path / "odd", replace(SMALL, n_embd=48), chars=None)
    refuses(lambda: export_gguf(odd, tmp_path, "Q8_0"), "a width of 48 in Q8_0", str(QUANT_BLOCK))
    pythia = make_folder(tmp_path / "pythia", replace(shrunk("pythia-160m"), num_kv_heads=4), chars=None)
    refuses(lambda: export_gguf(pythia, tmp_path, "F32"), "gpt_neox is not exported", "qwen3")
    refuses(lambda: prepare(Case("llama.cpp", "m", quantization="Q3_K"), odd), "quantization='Q3_K'", "Q4_0")
