"""Models written as GGUF files: read back they are the same, and llama.cpp gives the same tokens."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from helpers.environment import ROOT
from helpers.errors import refuses
from helpers.models import TINY, make_folder, make_weights

transformers = pytest.importorskip("transformers")

from helpers.families import CASES, GGUF_CASES, YARN  # noqa: E402
from helpers.families import make_folder as make_family  # noqa: E402
from helpers.gguf_files import convert  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.checkpoints.gguf import export as gguf_export  # noqa: E402
from nanoinfer.checkpoints.gguf import model as gguf  # noqa: E402
from nanoinfer.checkpoints.gguf.file import read_gguf  # noqa: E402
from nanoinfer.checkpoints.gguf.formats import FORMATS  # noqa: E402
from nanoinfer.checkpoints.gguf.quantize import quantize  # noqa: E402
from nanoinfer.checkpoints.load import LoadedModel, load_model  # noqa: E402
from nanoinfer.checkpoints.weights import Weights  # noqa: E402
from nanoinfer.config import ModelConfig  # noqa: E402
from nanoinfer.models.parameters import shapes  # noqa: E402
from nanoinfer.utils.arrays import HostTensor  # noqa: E402

MSCALE = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
GRANITE = CASES["granite"][1]
EXTRA = GGUF_CASES | {
    "gpt_neox-tied": ("GPTNeoXConfig", {"num_key_value_heads": None, "hidden_size": 32, "tie_word_embeddings": True}),
    "olmo2-tied": ("Olmo2Config", {"tie_word_embeddings": True}),
    "ernie4_5-plain": ("Ernie4_5Config", {"head_dim": 10}),
    "seed_oss-plain": ("SeedOssConfig", {"head_dim": 8}),
    "cohere-plain": ("CohereConfig", {"logit_scale": 0.5}),
    "olmoe-all-heads": ("OlmoeConfig", CASES["olmoe"][1] | {"num_key_value_heads": 4}),
    "deepseek_v3-yarn": ("DeepseekV3Config", CASES["deepseek_v3"][1] | {"rope_parameters": MSCALE}),
    "deepseek_v2-27-layers": (  # llama.cpp takes a file for V2-Lite's, without a latent of queries, by its layers
        "DeepseekV2Config",
        CASES["deepseek_v2"][1] | {"rope_parameters": MSCALE, "v_head_dim": 12, "num_hidden_layers": 27},
    ),
    "deepseek_v2-latent-queries": ("DeepseekV2Config", CASES["deepseek_v2"][1] | {"q_lora_rank": 14}),
    "granite-plain": ("GraniteConfig", GRANITE | {"attention_bias": False, "mlp_bias": False}),
    "gpt_oss-64": ("GptOssConfig", CASES["gpt_oss"][1] | {"head_dim": 64, "rope_parameters": None}),
}  # fmt: skip
REFUSED = {
    "gemma3": "attention_scale=0.0625",
    "gemma3-scaled": "layers=",
    "smollm3-windows": "smollm3.attention.sliding_window=9",
    "llama3": "rope_freqs.weight",
    "nanochat": "family nanochat",
    "nanochat-all-heads": "family nanochat",
    "starcoder2-window": "starcoder2.attention.sliding_window=6",
    "llama-dynamic": "layers=",
    "llama-yarn": "layers=",
    "gemma2": "attention_scale=",
    "phi-norms": "16 tensors are not part of the model",
    "phi3": "family phi3",
    "phi3-short": "family phi3",
    "phi3-long": "family phi3",
    "ministral": "family ministral",
    "ministral-layers": "family ministral",
    "glm": "family glm",
    "glm4": "family glm4",
    "helium": "family helium",
    "gptj": "family gptj",
    "bitnet": "activation='relu2'",
    "bitnet-one-head": "activation='relu2'",
    "opt": "family opt",
    "opt-untied": "family opt",
    "qwen2_moe": "experts=Experts(count=5",
    "qwen2_moe-windows": "qwen2moe.attention.sliding_window_pattern=None",
    "qwen3_moe-mixed": "qwen3moe.attention.sliding_window_pattern=None",
    "deepseek_v3-plain": "layers=",
    "olmoe-normalized": "experts=Experts(count=4",
    "gpt_oss-plain": "layers=",
}
KEPT = [case for case in CASES if case not in REFUSED]


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
        shifted = case.startswith("gemma") and tensor.values.ndim == 1  # 1 is added to the weights of norms
        np.testing.assert_allclose(ours[name].float32(), tensor.float32(), rtol=0, atol=2e-7 if shifted else 0)
    for name in ours.keys() - expected.keys():
        assert not ours[name].float32().any() or name == "lm_head.weight"


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_experts_in_blocks_run_on_native_as_they_are(format: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The first token of the file's values; native rounds activations to 8 bits, which changes later ones."""
    size = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 4, "num_hidden_layers": 2}
    monkeypatch.setitem(CASES, "mixtral-wide", ("MixtralConfig", size | {"num_attention_heads": 4}))
    make_family("mixtral-wide", tmp_path / "hf")
    found = export(load_model(str(tmp_path / "hf")), tmp_path / "a.gguf", format)
    formats = {name.rpartition(".mlp.")[2]: parts for name, parts in found.weights.block_formats.items()}
    few = {"Q4_K_M": "q4_k"}.get(format, format.lower())
    assert formats["experts.c_gate.weight"] == ((few, 1024),)
    assert "router.weight" not in formats
    prompt, outputs = [{"prompt_token_ids": [5, 9, 11]}], []
    for engine in ("native", "static"):
        llm = LLM(str(tmp_path / "a.gguf"), engine=engine, dtype="float32")
        outputs.append(llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)))
    ours, theirs = (output[0].outputs[0] for output in outputs)
    assert ours.token_ids == theirs.token_ids


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
    export(make_weights(replace(TINY, n_embd=32)), tmp_path / "a.gguf", "Q4_0")
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


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M"])
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
            found = next(f for f in FORMATS.values() if f.name == kind)
            values = found.dequantize(quantize(kind, values)).reshape(values.shape)
        np.testing.assert_array_equal(tensor.read().float32(), values, err_msg=name)


def test_formats_of_tensors_are_those_of_llama_cpps_quantizer(tmp_path: Path) -> None:
    export(make_weights(WIDE), tmp_path / "a.gguf", "Q4_K_M")
    found = formats_of(tmp_path / "a.gguf")
    assert (found["token_embd.weight"], found["output.weight"]) == ("Q4_K", "Q6_K")
    assert found["position_embd.weight"] == found["blk.0.attn_norm.weight"] == found["blk.0.ffn_up.bias"] == "float32"
    better = [layer for layer in range(8) if found[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    assert better == [layer for layer in range(8) if found[f"blk.{layer}.attn_qkv.weight"] == "Q6_K"] == [0, 3, 6, 7]
    assert {found[f"blk.{layer}.ffn_up.weight"] for layer in range(8)} == {"Q4_K"}
    tied = replace(WIDE, tie_word_embeddings=True)
    choices = {
        ("token_embd.weight", (60, 256), "Q4_K_M"): "Q6_K",
        ("token_embd.weight", (60, 96), "Q4_K_M"): "Q8_0",
        ("token_embd.weight", (60, 256), "Q4_0"): "Q6_K",
        ("token_embd.weight", (60, 256), "Q8_0"): "Q8_0",
        ("blk.1.attn_v.weight", (64, 96), "Q4_K_M"): "Q5_0",
        ("blk.0.attn_v.weight", (64, 96), "Q4_K_M"): "Q8_0",
        ("blk.0.ffn_down.weight", (64, 512), "Q4_0"): "Q4_0",
        ("blk.0.ffn_down.weight", (64, 20), "Q4_0"): "float16",
        ("blk.0.ffn_down.weight", (64, 20), "BF16"): "bfloat16",
        ("blk.0.ffn_gate_inp.weight", (8, 256), "Q4_K_M"): "F32",
        ("blk.0.ffn_gate_inp_shexp.weight", (256,), "Q4_0"): "F32",
        ("blk.0.ffn_gate_exps.weight", (8, 64, 256), "Q4_K_M"): "Q4_K",
        ("blk.0.ffn_down_exps.weight", (8, 64, 512), "Q4_K_M"): "Q6_K",
        ("blk.1.ffn_down_exps.weight", (8, 64, 512), "Q4_K_M"): "Q4_K",
        ("blk.0.ffn_down_shexp.weight", (64, 96), "Q4_K_M"): "Q8_0",
        ("blk.0.ffn_down_exps.weight", (8, 64, 96), "MXFP4_MOE"): "MXFP4",
        ("blk.0.ffn_down_exps.weight", (8, 64, 40), "MXFP4_MOE"): "float16",
        ("blk.0.ffn_down_exps.bias", (8, 64), "MXFP4_MOE"): "F32",
        ("blk.0.attn_q.weight", (64, 96), "MXFP4_MOE"): "Q8_0",
    }
    names = {"F16": "float16", "BF16": "bfloat16"}
    for (name, shape, format), expected in choices.items():
        chosen = gguf_export.format_of(name, shape, format, tied)
        assert names.get(chosen, chosen) == expected, (name, shape, format)


VALUES = {
    "normal": lambda g: g.standard_normal((64, 512)) * 0.02,
    "heavy tails": lambda g: g.standard_t(3, (64, 512)) * 0.02,
    "positive": lambda g: np.abs(g.standard_normal((64, 512))),
}


def plain_error(name: str, values: np.ndarray) -> float:
    """Return the squared error where each group has the scale, and in Q4_K the minimum, of its extreme values."""
    groups = values.reshape(-1, 16 if name == "Q6_K" else 32).astype(np.float64)
    if name == "Q4_K":
        low = np.minimum(groups.min(1, keepdims=True), 0)
        scales = (groups.max(1, keepdims=True) - low) / 15
        scales, low = (
            (np.round(part / (top := np.repeat(part.reshape(-1, 8).max(1), 8)[:, None] / 63)) * top)
            for part in (scales, -low + 1e-30)
        )
        return float(((np.clip(np.round((groups + low) / scales), 0, 15) * scales - low - groups) ** 2).sum())
    levels = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q8_0": 127}[name]
    scales = np.abs(groups).max(1, keepdims=True) / (levels - 1 if levels < 127 else levels)
    return float(((np.round(groups / scales) * scales - groups) ** 2).sum())


def error_of(name: str, blocks: np.ndarray, values: np.ndarray) -> float:
    found = next(f for f in FORMATS.values() if f.name == name).dequantize(blocks)
    return float(((found.reshape(values.shape).astype(np.float64) - values) ** 2).sum())


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q4_K", "Q6_K"])
def test_searched_scales_have_a_smaller_error_than_those_of_extremes(name: str, kind: str) -> None:
    values = VALUES[kind](np.random.default_rng(0)).astype(np.float32)
    assert error_of(name, quantize(name, values), values) < 0.97 * plain_error(name, values)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K"])
def test_blocks_that_are_special(name: str) -> None:
    format = next(f for f in FORMATS.values() if f.name == name)
    zeros = np.zeros((3, 256), np.float32)
    assert not format.dequantize(quantize(name, zeros)).any()
    for value in (1.0, -1.0, 1e-42, 6e4):  # all values of a block are equal
        found = format.dequantize(quantize(name, zeros + np.float32(value)))
        np.testing.assert_allclose(found, value, rtol=0.01, atol=1e-7)
    one = zeros.copy()
    one[1, 77] = -3.0
    np.testing.assert_allclose(format.dequantize(quantize(name, one)).reshape(one.shape), one, rtol=0, atol=0.01)
    random = np.random.default_rng(0).standard_normal((700, 512)).astype(np.float32)  # more than a chunk
    blocks = quantize(name, random)
    np.testing.assert_array_equal(blocks[-8:], quantize(name, random.reshape(-1)[-8 * format.block_size :]))
    again = quantize(name, format.dequantize(blocks))
    assert error_of(name, again, format.dequantize(blocks)) < 0.05 * error_of(name, blocks, random)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    ("number", "name"), [(8, "Q8_0"), (2, "Q4_0"), (6, "Q5_0"), (12, "Q4_K"), (14, "Q6_K"), (39, "MXFP4")]
)
def test_the_error_is_about_that_of_ggml(number: int, name: str, kind: str) -> None:
    package = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python: the peer of this test")
    import ctypes

    library = ctypes.CDLL(str(next((Path(package.__file__).parent / "lib").glob("libggml-base.so*"))))
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    values = VALUES[kind](np.random.default_rng(0)).astype(np.float32)
    ours = quantize(name, values)
    theirs = np.empty_like(ours)
    library.ggml_quantize_chunk(number, values.ctypes.data, theirs.ctypes.data, 0, *values.shape, None)
    assert error_of(name, ours, values) < 1.02 * error_of(name, theirs, values)


# Writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["F16", "Q8_0", "Q4_K_M"])
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


@pytest.mark.parametrize("format", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_llama_cpp_continues_a_text_as_the_model_does(format: str, peer: ModuleType, tmp_path: Path) -> None:
    model = export(load_model("shakespeare"), tmp_path / "a.gguf", format)
    assert model.tokenizer is not None
    prompt, rounding = model.tokenizer.encode("O Romeo, Romeo!"), 0.1 if format.startswith("F") else 0.5
    equal = num_equal(peer, tmp_path / "a.gguf", prompt, rounding, 40, 128)
    assert equal >= (40 if format == "F32" else 10)


@pytest.mark.parametrize("case", ["gpt_neox", "llama", "llama3-8192", "qwen2", "qwen3", "gemma3-7-layers", "olmo2-tied",
                                  "smollm3", "gemma", "gemma2-10", "phi", "granite-plain", "olmo", "stablelm",
                                  "stablelm-parallel", "stablelm-norms", "cohere-plain", "cohere-norms", "cohere2",
                                  "exaone4-no-window",
                                  "ernie4_5-plain", "seed_oss-plain", "arcee", "mixtral-all", "qwen2_moe-plain",
                                  "qwen3_moe", "olmoe-all-heads", "granitemoe", "gpt_oss", "gpt_oss-64",
                                  "deepseek_v2-27-layers", "deepseek_v2-latent-queries", "deepseek_v3",
                                  "deepseek_v3-yarn", "gemma4", "gemma4-two-shared", "gemma4-experts"])  # fmt: skip
def test_llama_cpp_computes_the_same_logits(case: str, peer: ModuleType, tmp_path: Path) -> None:
    """llama.cpp stores keys and values in float16. It rounds the range that the yarn of gpt_oss-64 blends."""
    from nanoinfer.checkpoints.gpt_loading import load_gpt

    make_family(case, tmp_path / "hf")
    model = load_model(str(tmp_path / "hf"))
    export(model, tmp_path / "a.gguf")
    ids = np.random.default_rng(0).integers(0, 61, 30).tolist()
    with torch.inference_mode():
        ours = load_gpt(model.weights)(torch.tensor([ids]))[0].numpy()
    theirs = peer.LlamaCpp(str(tmp_path / "a.gguf"), 1, 64, threads=1).run([(0, ids, True)])
    assert np.median(np.abs(ours - theirs)) < 0.01
    best = ours.argmax(1)
    differ = best != theirs.argmax(1)
    assert differ.sum() <= 1
    assert np.abs(ours - theirs).max() < 0.2


@pytest.mark.parametrize("case", ["phi3", "phi3-long", "glm4", "gemma4-two-shared"])
def test_llama_cpp_computes_the_same_logits_of_files_that_are_not_exported(
    case: str, peer: ModuleType, tmp_path: Path
) -> None:
    """As the converter writes them: with joined matrices."""
    from nanoinfer.checkpoints.gpt_loading import load_gpt

    model = make_family(case, tmp_path / "hf")
    path = convert(model, tmp_path / "a.gguf", **{"tokenizer.ggml.model": "no_vocab"})
    ids = np.random.default_rng(0).integers(0, 61, 30).tolist()
    with torch.inference_mode():
        ours = load_gpt(gguf.open_file(path)[0])(torch.tensor([ids]))[0].numpy()
    theirs = peer.LlamaCpp(str(path), 1, 64, threads=1).run([(0, ids, True)])
    assert np.median(np.abs(ours - theirs)) < 0.01
    assert np.abs(ours - theirs).max() < 0.2


def test_a_folder_of_characters_is_a_vocabulary_of_bytes(peer: ModuleType, tmp_path: Path) -> None:
    model = export(load_model(str(make_folder(tmp_path / "m"))), tmp_path / "a.gguf")
    assert model.tokenizer is not None
    assert num_equal(peer, tmp_path / "a.gguf", model.tokenizer.encode("To be"), 0.1, 20, 32) == 20
