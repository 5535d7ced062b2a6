"""Models written as GGUF files: read back they are the same, and llama.cpp gives the same tokens."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.environment import ROOT
from helpers.models import TINY, make_weights, refuses

transformers = pytest.importorskip("transformers")

from helpers.families import CASES, RECURRENT  # noqa: E402
from helpers.families import make_folder as make_family  # noqa: E402
from nanoinfer.checkpoints import packed  # noqa: E402
from nanoinfer.checkpoints.gguf import export as gguf_export  # noqa: E402
from nanoinfer.checkpoints.gguf.file import read_gguf  # noqa: E402
from nanoinfer.checkpoints.load import LoadedModel, load_model  # noqa: E402
from nanoinfer.checkpoints.weights import Weights  # noqa: E402
from nanoinfer.config import LayerKind, ModelConfig, Rotary  # noqa: E402
from nanoinfer.models.parameters import shapes  # noqa: E402
from nanoinfer.utils.arrays import HostTensor  # noqa: E402

GRANITE = CASES["granite"][1]
EXTRA = {
    "gpt_neox-tied": ("GPTNeoXConfig", {"num_key_value_heads": None, "hidden_size": 32, "tie_word_embeddings": True}),
    "olmo2-tied": ("Olmo2Config", {"tie_word_embeddings": True}),
    "ernie4_5-plain": ("Ernie4_5Config", {"head_dim": 10}),
    "seed_oss-plain": ("SeedOssConfig", {"head_dim": 8}),
    "cohere-plain": ("CohereConfig", {"logit_scale": 0.5}),
    "granite-plain": ("GraniteConfig", GRANITE | {"attention_bias": False, "mlp_bias": False}),
}  # fmt: skip
NO_ARCHITECTURE = (
    "nanochat nanochat-all-heads phi3 phi3-short phi3-long ministral ministral-layers glm glm4 helium mixtral"
    " deepseek_v2 gptj bitnet bitnet-one-head exaone minicpm minicpm-long granitemoehybrid gpt_neo opt opt-untied"
)
REFUSED = {
    "gemma3": "attention_scale=0.0625", "gemma3-scaled": "layers=", "gemma2": "attention_scale=",
    "gemma4": "family gemma4_text", "smollm3-windows": "smollm3.attention.sliding_window=9",
    "starcoder2-window": "starcoder2.attention.sliding_window=6", "llama3": "rope_freqs.weight",
    "llama-dynamic": "layers=", "llama-yarn": "layers=", "phi-norms": "16 tensors are not part of the model",
    **{case: f"family {case.partition('-')[0]}" for case in NO_ARCHITECTURE.split()},
}  # fmt: skip
UNWRITTEN = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek", "gemma4", "gpt_oss")
KEPT = [case for case in CASES if case not in (*REFUSED, *RECURRENT) and not case.startswith(UNWRITTEN)]


@pytest.fixture(autouse=True)
def _extra_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in EXTRA.items():
        monkeypatch.setitem(CASES, name, case)


def export(model: LoadedModel | Weights, path: Path, format: str = "F32") -> LoadedModel:
    """Write a model and read it back."""
    text = gguf_export.describe_text(model) if isinstance(model, LoadedModel) else {}
    gguf_export.write_file(model.weights if isinstance(model, LoadedModel) else model, path, format, text, "m")
    return load_model(str(path))


def same_config(found: ModelConfig, expected: ModelConfig) -> None:
    plain = gguf_export.comparable(expected)
    if expected.family in ("gpt2", "gpt_neox"):  # biases that a model lacks are zeros in the file
        plain["bias"] = True
    if expected.family in ("gpt_neox", "olmo2"):
        plain["tie_word_embeddings"] = False
    assert gguf_export.comparable(found) == plain


# Tensors and config --------------------------------------------------------------------------------------------------


@pytest.mark.nightly_if(lambda case: "-" in case)
@pytest.mark.parametrize("case", ["gpt2", *KEPT, *EXTRA])
def test_a_file_in_float32_is_the_same_model(case: str, tmp_path: Path) -> None:
    if case == "gpt2":
        weights = make_weights(replace(TINY, n_inner=24, tie_word_embeddings=False))
    else:
        make_family(case, tmp_path / "hf")
        weights = load_model(str(tmp_path / "hf")).weights
    found = export(weights, tmp_path / "a.gguf")
    same_config(found.config, weights.config)
    expected, ours = dict(weights.read()), dict(found.weights.read())
    for name, tensor in expected.items():
        shifted = tensor.values.ndim == 1 and case.startswith(("gemma", "nemotron"))  # 1 is added to weights of norms
        np.testing.assert_allclose(ours[name].float32(), tensor.float32(), rtol=0, atol=2e-7 if shifted else 0)
    for name in ours.keys() - expected.keys():
        assert not ours[name].float32().any() or name == "lm_head.weight"


@pytest.mark.nightly_if(lambda case: "-" in case)
@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_express_is_named(case: str, tmp_path: Path) -> None:
    make_family(case, tmp_path / "hf")
    weights = load_model(str(tmp_path / "hf")).weights
    refuses(lambda: export(weights, tmp_path / "a.gguf"), REFUSED[case])
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(TINY, activation="relu2"), ("gpt2", "activation='relu2'")),
        (replace(TINY, norm_placement="after"), ("gpt2", "tensor")),
        (replace(TINY, logits_softcap=3.0), ("gpt2", "logits_softcap=3.0")),
    ],
)
def test_a_changed_config_is_refused(config: ModelConfig, words: tuple[str, ...], tmp_path: Path) -> None:
    refuses(lambda: export(make_weights(config), tmp_path / "a.gguf"), *words)
    assert os.listdir(tmp_path) == []


def test_what_llama_cpp_computes_otherwise_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = make_weights(replace(TINY, activation="gelu", bias=False))  # nanoGPT's
    found = export(weights, tmp_path / "a.gguf")
    assert "tanh approximation" in caplog.text
    same_config(found.config, weights.config)
    make_family("mistral", tmp_path / "hf")
    assert export(load_model(str(tmp_path / "hf")).weights, tmp_path / "b.gguf").config.family == "mistral"
    assert "ignores the window of 7 tokens" in caplog.text


def test_a_gguf_file_can_be_written_again(tmp_path: Path) -> None:
    export(make_weights(replace(TINY, n_embd=32)), tmp_path / "a.gguf", "Q8_0")
    first, again = (
        load_model(str(tmp_path / "a.gguf")),
        export(load_model(str(tmp_path / "a.gguf")), tmp_path / "b.gguf"),
    )
    for (name, a), (_, b) in zip(first.weights.read(), again.weights.read(), strict=True):
        np.testing.assert_array_equal(a.float32(), b.float32(), err_msg=name)


# Formats -------------------------------------------------------------------------------------------------------------


def formats_of(path: Path) -> dict[str, str]:
    return {
        name: tensor.format.name if hasattr(tensor, "format") else tensor.dtype
        for name, tensor in read_gguf(path).tensors.items()
    }


WIDE = replace(TINY, n_embd=256, n_layer=8, n_head=4, n_inner=512, tie_word_embeddings=False)


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0"])
def test_values_are_those_of_the_format(format: str, tmp_path: Path) -> None:
    weights = make_weights(replace(WIDE, n_layer=2))
    export(weights, tmp_path / "a.gguf", format)
    plain, ours = tmp_path / "plain.gguf", formats_of(tmp_path / "a.gguf")
    export(weights, plain)
    stored = read_gguf(plain).tensors
    for name, tensor in read_gguf(tmp_path / "a.gguf").tensors.items():
        values, kind = stored[name].read().float32(), ours[name]
        if kind in ("float16", "bfloat16"):
            values = HostTensor(values, "float32").to(kind).float32()
        elif kind != "float32":
            scales = np.abs(values.reshape(-1, 32)).max(1) / 127
            rounding = np.repeat(scales * 0.57, 32).reshape(values.shape)
            assert (kind, (np.abs(tensor.read().float32() - values) <= rounding).all()) == ("Q8_0", True), name
            continue
        np.testing.assert_array_equal(tensor.read().float32(), values, err_msg=name)


LLAMA = replace(
    WIDE, family="llama", bias=False, activation="silu", norm="rms", gated_mlp=True, learned_positions=False,
    num_kv_heads=2, layers=(LayerKind(rotary=Rotary(64)),) * 8,
)  # fmt: skip


@pytest.mark.parametrize("config", [WIDE, replace(LLAMA, tie_word_embeddings=True), replace(LLAMA, n_inner=96)])
def test_a_file_in_q4_k_m_is_packed_to_the_bytes_of_int4(config: ModelConfig, tmp_path: Path) -> None:
    """Queries, keys and values in one tensor and in three of two formats; a head of its own; rows of 96: Q5_0."""
    weights = make_weights(config)
    found = export(weights, tmp_path / "a.gguf", "Q4_K_M").weights
    packed.write_folder(found, tmp_path / "found", "float32", None, 2)
    packed.write_folder(weights, tmp_path / "expected", "int4", None, 2)
    assert set(formats_of(tmp_path / "a.gguf").values()) >= {"Q4_K", "Q6_K", "float32"}
    ours = {name: panels for name, panels, _ in packed.open_folder(tmp_path / "found").matrices()}
    for name, panels, _ in packed.open_folder(tmp_path / "expected").matrices():
        np.testing.assert_array_equal(ours.pop(name), panels, err_msg=name)
    assert ours == {}


def test_formats_of_the_extension_are_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanoinfer._native", None)
    monkeypatch.delattr("nanoinfer._native", raising=False)
    missing = "engine native, but nanoinfer was built without it: install a C++ compiler and reinstall nanoinfer"
    for format in ("Q8_0", "Q4_K_M"):
        refuses(
            lambda f=format: gguf_export.check_target(tmp_path / "a.gguf", f),
            f"format={format} needs {missing}, or choose F16",
        )
    gguf_export.check_target(tmp_path / "a.gguf", "F16")


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["F16", "Q4_K_M"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 65520.0])
def test_values_that_the_format_has_not_are_refused(value: float, format: str, tmp_path: Path) -> None:
    tensors = dict(make_weights().read())
    tensors["transformer.h.1.mlp.c_fc.weight"].values[3, 2] = value
    weights = Weights(TINY, "float32", lambda: iter(tensors.items()))
    refuses(lambda: export(weights, tmp_path / "a.gguf", format), "blk.1.ffn_up.weight", "65,504", format)
    assert os.listdir(tmp_path) == []
    export(weights, tmp_path / "a.gguf", "BF16")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
def test_nothing_is_left_if_writing_fails(fault: Any, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("old")

    def stop(done: int, total: int) -> None:
        assert done <= total
        if done > total // 2:
            raise fault

    with pytest.raises(BaseException, match="No space left" if isinstance(fault, OSError) else None):
        gguf_export.write_file(make_weights(), tmp_path / "a.gguf", "F16", {}, "m", stop)
    assert os.listdir(tmp_path) == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_text() == "old"


def test_a_full_disk_is_an_error_before_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    def read() -> Iterator[tuple[str, HostTensor]]:
        raise AssertionError

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    weights = Weights(TINY, "float32", read)
    refuses(lambda: export(weights, tmp_path / "a.gguf"), "a.gguf cannot be written", "No space left", "another place")
    assert os.listdir(tmp_path) == []


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights = make_weights(replace(TINY, bias=False))
    gguf_export.write_file(weights, tmp_path / "a.gguf", "F16", {}, "m", lambda *count: seen.append(count))
    assert seen == sorted(seen)
    assert len(seen) == len(shapes(TINY))
    done, total = seen[-1]
    assert total - 32 * len(seen) < done <= total < (tmp_path / "a.gguf").stat().st_size


# llama.cpp -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python: the peer of these tests")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("vs_llamacpp")


def num_equal(peer: ModuleType, path: Path, prompt: list[int], rounding: float, length: int, context: int) -> int:
    """Return the number of equal tokens. Where the next ones differ, their logits are closer than the rounding."""
    ours, theirs = peer.Native(str(path), 1, context), peer.LlamaCpp(str(path), 1, context, threads=1)
    new = prompt
    for count in range(length):
        a, b = (np.array(system.run([(0, new, False)])[0]) for system in (ours, theirs))
        assert np.abs(a - b).max() < rounding
        new = [int(a.argmax())]
        if new != [int(b.argmax())]:
            assert a.max() - a[b.argmax()] < rounding
            return count
    return length


@pytest.mark.parametrize("format", ["F32", "Q8_0", "Q4_K_M"])
def test_llama_cpp_continues_a_text_as_the_model_does(format: str, peer: ModuleType, tmp_path: Path) -> None:
    model = export(load_model("shakespeare"), tmp_path / "a.gguf", format)
    assert model.tokenizer is not None
    prompt, rounding = model.tokenizer.encode("O Romeo, Romeo!"), 0.1 if format.startswith("F") else 0.5
    equal = num_equal(peer, tmp_path / "a.gguf", prompt, rounding, 40, 128)
    assert equal >= (40 if format == "F32" else 10)
