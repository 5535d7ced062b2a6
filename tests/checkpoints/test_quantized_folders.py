"""Quantized folders: the values that each format defines, the formats of engine native, and bad folders.

Quantized folders against the packages that define them, where these are installed: values equal theirs."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.families import CASES as FAMILY_CASES
from helpers.families import make_folder
from helpers.models import edit_config, load_gpt, refuses
from helpers.quantized import CASES, E2M1, Case, Stored, base_folder, gptq, group, quantized_folders
from helpers.quantized import packed as packed_integers
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import huggingface, packed
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.checkpoints.quantized.base import TABLES, QuantizedTensor
from nanoinfer.checkpoints.quantized.methods import dequantized
from nanoinfer.errors import NanoinferError
from nanoinfer.models.stored import StoredTensor, read_safetensors
from nanoinfer.roofline.formats import find_model

OWN = [name for name, case in CASES.items() if case.format]
IDS = [3, 9, 27, 14, 50, 6]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("llama"))


def same_values(quantized: Path, exact: Path) -> None:
    expected = dict(open_folder(exact).read())
    for name, tensor in open_folder(quantized).read():
        np.testing.assert_array_equal(tensor.float32(), expected[name].float32(), err_msg=name)


def formats_of(folder: Path) -> set[str]:
    return {format for parts in open_folder(folder).block_formats.values() for format, _ in parts}


# Values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_format_rounded_once(name: str, llama: Path, tmp_path: Path) -> None:
    quantized, exact = quantized_folders(llama, tmp_path, CASES[name])
    same_values(quantized, exact)
    assert formats_of(quantized) == ({CASES[name].format} if CASES[name].format else set())


@pytest.mark.parametrize(
    "config, case",
    [("GPT2Config", "gptq"), ("Phi3Config", "packed-int4"), ("Phi3Config", "fp8-blocks"), ("HeliumConfig", "awq")],
)
def test_families_that_store_matrices_otherwise(config: str, case: str, tmp_path: Path) -> None:
    """GPT-2 has plain matrices as (in, out), Phi-3 gate and up projection as one, Helium another order of rows."""
    gpt2 = config == "GPT2Config"
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32} if gpt2 else {"head_dim": 16}
    base = base_folder(tmp_path / "base", config, **shape)
    quantized, exact = quantized_folders(base, tmp_path, CASES[case], transposed=gpt2)
    same_values(quantized, exact)
    assert formats_of(quantized) == ({CASES[case].format} if CASES[case].format else set())
    packed.write_folder(open_folder(quantized), tmp_path / "packed", "float32", None, threads=1)
    assert dict(packed.open_folder(tmp_path / "packed").block_formats) == dict(open_folder(quantized).block_formats)


def test_bitsandbytes_nf4_with_nested_scales(tmp_path: Path, llama: Path) -> None:
    """The first of a pair is in the high bits."""
    rng = np.random.default_rng(0)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    nested_table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)

    def pack(w: np.ndarray, rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
        codes, count = rng.integers(0, 16, w.size), w.size // 32
        absmax = rng.integers(0, 256, count).astype(np.uint8)
        nested = rng.uniform(0.1, 0.2, -(-count // 32)).astype(np.float32)
        largest = nested_table.astype(np.float64)[absmax] * np.repeat(nested.astype(np.float64), 32)[:count] + 0.25
        state = f'{{"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": {list(w.shape)},' \
                ' "nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.25}'  # fmt: skip
        stored = {
            ".weight": torch.tensor(codes[::2] << 4 | codes[1::2], dtype=torch.uint8).reshape(-1, 1),
            ".weight.absmax": torch.tensor(absmax),
            ".weight.quant_map": torch.tensor(table),
            ".weight.nested_absmax": torch.tensor(nested),
            ".weight.nested_quant_map": torch.tensor(nested_table),
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
        }
        return stored, (table.astype(np.float64)[codes] * np.repeat(largest, 32)).reshape(w.shape)

    case = replace(CASES["gptq"], config={"quant_method": "bitsandbytes", "load_in_4bit": True}, pack=pack)
    same_values(*quantized_folders(llama, tmp_path, case))


def test_mxfp4_of_several_matrices(tmp_path: Path) -> None:
    """As gpt-oss stores its experts: a name without ".weight", (experts, out, in / 32, 16)."""
    rng = np.random.default_rng(1)
    codes, exponents = rng.integers(0, 16, (3, 5, 64)), rng.integers(100, 140, (3, 5, 2))
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(3, 5, 2, 16)
    path = tmp_path / "experts.safetensors"
    save_file(
        {
            "e.up_blocks": torch.tensor(pairs, dtype=torch.uint8),
            "e.up_scales": torch.tensor(exponents, dtype=torch.uint8),
        },
        path,
    )
    found = dequantized(read_safetensors(path), {"quant_method": "mxfp4"}, "here", ())[0]
    assert list(found) == ["e.up"]
    numbers = np.array(E2M1 + [-n for n in E2M1])[codes]
    np.testing.assert_array_equal(
        found["e.up"].read().values, numbers * np.repeat(2.0 ** (exponents - 127), 32, axis=2)
    )


def test_a_mixture_whose_experts_are_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of transformers 5: rows of gate and up projection follow each other, (experts, out, in)."""
    size = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "head_dim": 16, "num_hidden_layers": 2}
    monkeypatch.setitem(FAMILY_CASES, "mixtral-64", ("MixtralConfig", size))
    model, rng = make_folder("mixtral-64", tmp_path), np.random.default_rng(0)
    stored, expected = {name: p for name, p in model.state_dict().items() if ".experts." not in name}, {}
    for name, p in model.state_dict().items():
        if ".experts." not in name:
            continue
        experts, rows, columns = p.shape
        codes = rng.integers(0, 16, p.shape)
        exponents = rng.integers(122, 126, (experts, rows, columns // 32))
        pairs = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(experts, rows, -1, 16)
        stored[f"{name}_scales"] = torch.tensor(exponents, dtype=torch.uint8)
        stored[f"{name}_blocks"] = torch.tensor(pairs, dtype=torch.uint8)
        numbers = np.array(E2M1 + [-n for n in E2M1])[codes] * np.repeat(2.0 ** (exponents - 127), 32, axis=2)
        start = f"transformer.h.{name.split('.')[2]}.mlp.experts."
        if name.endswith("down_proj"):
            expected[f"{start}c_proj.weight"] = numbers.reshape(-1, columns)
        else:
            for part, half in zip(("c_gate", "c_fc"), np.split(numbers, 2, axis=1), strict=True):
                expected[f"{start}{part}.weight"] = half.reshape(-1, columns)
    save_file(stored, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    weights = open_folder(tmp_path)
    found = dict(weights.read())
    assert weights.block_formats == {name: (("mxfp4", len(values)),) for name, values in expected.items()}
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].float32(), values)


def test_a_quantized_table_of_per_layer_embeddings(tmp_path: Path) -> None:
    """A row of FP8 has a scale, and makes one of our rows for each layer."""
    make_folder("gemma4", tmp_path)
    name, stored = "model.embed_tokens_per_layer.weight", load_file(tmp_path / "model.safetensors")
    codes = torch.randn(stored[name].shape).to(torch.float8_e4m3fn)
    scales = torch.rand(len(codes)) + 1
    stored |= {name: codes, name.replace("weight", "weight_scale"): scales}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    found = dict(open_folder(tmp_path).read())["transformer.per_layer.wte.weight"]
    assert found.shape == (61 * 4, 19)
    expected = codes.double() * scales.double()[:, None]
    np.testing.assert_allclose(found.float32(), expected.reshape(-1, 19), rtol=1e-6)


@torch.inference_mode()
def test_a_gpt_oss_whose_experts_are_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of gate and up projection alternate. Plain experts are (in, out), quantized ones (out, in)."""
    size = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
        "head_dim": 16,
    }
    monkeypatch.setitem(FAMILY_CASES, "gpt_oss-64", ("GptOssConfig", size | {"num_hidden_layers": 2}))
    model, rng, stored = make_folder("gpt_oss-64", tmp_path / "model"), np.random.default_rng(0), {}
    for name, p in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = p.clone()
            continue
        experts, columns, rows = p.shape
        codes, exponents = (
            rng.integers(0, 16, (experts, rows, columns)),
            rng.integers(122, 126, (experts, rows, columns // 32)),
        )
        stored[f"{name}_scales"] = torch.tensor(exponents, dtype=torch.uint8)
        pairs = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(experts, rows, -1, 16)
        stored[f"{name}_blocks"] = torch.tensor(pairs, dtype=torch.uint8)
        numbers = np.array(E2M1 + [-n for n in E2M1])[codes] * np.repeat(2.0 ** (exponents - 127), 32, axis=2)
        p.copy_(torch.tensor(numbers).mT)
    save_file(stored, tmp_path / "model" / "model.safetensors")
    edit_config(tmp_path / "model", quantization_config={"quant_method": "mxfp4"})
    weights, idx = open_folder(tmp_path / "model"), torch.arange(30)[None]
    expected = model(idx).logits
    torch.testing.assert_close(load_gpt(weights)(idx), expected, rtol=1e-4, atol=1e-4)
    assert {name.rpartition(".mlp.")[2]: parts for name, parts in weights.block_formats.items()} == {
        "experts.c_gate.weight": (("mxfp4", 96),),
        "experts.c_fc.weight": (("mxfp4", 96),),
        "experts.c_proj.weight": (("mxfp4", 192),),
    }
    packed.write_folder(weights, tmp_path / "packed", "float32", None, threads=1)
    prompt = {"prompt_token_ids": [3, 9, 27]}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5)
    found = [
        LLM(str(tmp_path / name), engine="native").generate(prompt, params)[0].outputs[0]
        for name in ("model", "packed")
    ]
    assert found[0] == found[1]
    assert found[0].token_ids[0] == int(model(torch.tensor([[3, 9, 27]])).logits[0, -1].argmax())


@pytest.mark.parametrize("kind", TABLES)
def test_all_codes_of_8_bits(kind: str) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind)).float().numpy()
    np.testing.assert_array_equal(TABLES[kind], expected)


# Engines ---------------------------------------------------------------------------------------------------


def logits(folder: Path, **options: Any) -> np.ndarray:
    """Return the log-probabilities of all tokens after some, greedily."""
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=61)
    (out,) = LLM(str(folder), device="cpu", **options).generate([IDS], params)
    steps = out.outputs[0].logprobs
    assert steps is not None
    return np.array([[step[i].logprob for i in range(61)] for step in steps])


@pytest.mark.parametrize("name", OWN)
def test_native_computes_in_the_folders_own_bits(name: str, llama: Path, tmp_path: Path) -> None:
    """A packed folder has the same bits; activations of 8 bits are the only difference from exact logits."""
    quantized, exact = quantized_folders(llama, tmp_path, CASES[name])
    own = logits(quantized, engine="native")
    packed.write_folder(open_folder(quantized), tmp_path / "packed", "float32", None, threads=1)
    np.testing.assert_array_equal(logits(tmp_path / "packed"), own)
    reference = logits(exact, engine="native", dtype="float32")
    assert 0 < np.abs(own - reference).max() < 0.2
    np.testing.assert_array_equal(logits(quantized, engine="native", dtype="float32"), reference)


def small_scales(w: np.ndarray, rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
    """Give a group of some matrices a scale that is below the range of float16."""
    stored, exact = packed_integers(dtype=torch.bfloat16)(w, rng)
    if rng.random() < 0.5:
        exact[0, :32] *= 2.0**-30 / stored[".weight_scale"][0, 0].item()
        stored[".weight_scale"][0, 0] = 2.0**-30
    return stored, exact


def of_4_or_8_bits(w: np.ndarray, rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
    return packed_integers(4 if rng.random() < 0.5 else 8)(w, rng)


@pytest.mark.parametrize(
    "pack, keep",
    [(packed_integers(), "experts.1."), (small_scales, "none"), (of_4_or_8_bits, "none")],
    ids=["an expert that is not quantized", "a small scale", "mixed precision"],
)
def test_experts_in_several_formats(pack: Any, keep: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a matrix have one format in engine native; the values that are read stay as they are."""
    base = base_folder(tmp_path / "base", "MixtralConfig", num_local_experts=3)
    config = group(4, format="mixed-precision")
    config["config_groups"]["group_1"] = group(8)["config_groups"]["group_0"]
    case = Case(config, pack, skipped=("lm_head", "gate.weight"))
    quantized, exact = quantized_folders(base, tmp_path, case, lambda name: keep in name)
    same_values(quantized, exact)
    formats = {name: parts for name, parts in open_folder(quantized).block_formats.items() if "experts" in name}
    assert {parts[0][0] for parts in formats.values()} >= {"q8_0"}
    assert {(len(parts), parts[0][1]) for parts in formats.values()} == {(1, 3 * 96), (1, 3 * 64)}
    assert "matrices that have experts in several formats: " in caplog.text
    own = logits(quantized, engine="native")
    packed.write_folder(open_folder(quantized), tmp_path / "packed", "float32", None, threads=1)
    np.testing.assert_array_equal(logits(tmp_path / "packed"), own)
    assert 0 < np.abs(own - logits(exact, engine="native", dtype="float32")).max() < 0.2


def test_engines_in_pytorch_and_a_saved_folder_have_the_exact_values(llama: Path, tmp_path: Path) -> None:
    quantized, exact = quantized_folders(llama, tmp_path, CASES["awq"])
    np.testing.assert_array_equal(logits(quantized, engine="static"), logits(exact, engine="static"))
    huggingface.save(open_folder(quantized), tmp_path / "saved", dtype="float32")
    same_values(tmp_path / "saved", exact)


def test_what_is_stored_decides_which_matrices_are_quantized(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = lambda name: "layers.0" in name or "o_proj" in name  # noqa: E731
    quantized, exact = quantized_folders(llama, tmp_path, CASES["gptq-float32-scales"], keep)
    with caplog.at_level(logging.INFO):
        same_values(quantized, exact)
    assert "quantized by gptq; of its matrices 6 are dequantized: scales are not float16" in caplog.text
    quantized, exact = quantized_folders(llama, tmp_path / "own", CASES["gptq"], keep)
    same_values(quantized, exact)
    assert len(open_folder(quantized).block_formats) == 4  # queries with keys and values, gate, up, down


@pytest.mark.parametrize("case", ["gptq", "fp8-blocks"])
def test_auto_is_the_dtype_of_the_tensors_that_are_not_quantized(case: str, llama: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folders(llama, tmp_path, CASES[case])
    assert open_folder(folder).stored_dtype == "float32"
    tensors = load_file(folder / "model.safetensors")
    plain = [name for name in tensors if any(part in name for part in ("norm", "embed", "lm_head"))]
    save_file(tensors | {name: tensors[name].bfloat16() for name in plain}, folder / "model.safetensors")
    weights = open_folder(folder)
    assert (weights.stored_dtype, weights.method) == ("bfloat16", CASES[case].config["quant_method"])


def test_the_roofline_counts_the_folders_own_bits(llama: Path, tmp_path: Path) -> None:
    quantized, exact = quantized_folders(llama, tmp_path, CASES["awq"])
    config, format = find_model(str(quantized))
    assert config == find_model(str(exact))[0]
    assert format is not None
    assert format.name == "Q5_0"


def test_an_unknown_field_is_a_warning(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized, _ = quantized_folders(llama, tmp_path, CASES["gptq"])
    edit_config(quantized, quantization_config=CASES["gptq"].config | {"colour": 1})
    open_folder(quantized)
    assert "quantization_config: unknown fields are ignored: colour" in caplog.text


def test_activations_that_the_config_quantizes_are_logged(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, exact = quantized_folders(llama, tmp_path, CASES["fp8-tensor"])
    path = quantized / "model.safetensors"
    tensors = load_file(path)
    tensors |= {
        name.replace("weight_scale", "input_scale"): t.clone() for name, t in tensors.items() if "scale" in name
    }
    save_file(tensors, path)
    with caplog.at_level(logging.INFO):
        same_values(quantized, exact)
    assert "its config quantizes activations too, which is not done" in caplog.text


def test_zero_points_of_version_1_wrap(llama: Path, tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15."""

    def pack(w: np.ndarray, rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
        stored, _ = gptq()(w, rng)
        stored[".qzeros"] = torch.full_like(stored[".qzeros"], -1)
        scale = np.repeat(stored[".scales"].double().numpy().T, 32, axis=1)
        each = stored[".qweight"].numpy().view(np.uint32)[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None]
        return stored, (each & 15).reshape(w.shape[::-1]).T * scale

    same_values(*quantized_folders(llama, tmp_path, replace(CASES["gptq-zero-points"], pack=pack)))


# Bad folders -----------------------------------------------------------------------------------------------


CONFIGS: list[tuple[Any, str]] = [
    ([], "quantization_config: is [], not an object"),
    ({}, "quant_method=None is not supported: only gptq, awq, compressed-tensors"),
    ({"quant_method": "hqq"}, "quant_method='hqq' is not supported: only gptq"),
    ({"quant_method": ["gptq"]}, "quant_method=['gptq'] is not supported"),
    ({"quant_method": "gptq", "bits": 5}, "bits=5 is not supported: only 2, 3, 4, 8 are"),
    ({"quant_method": "gptq", "bits": "4"}, "bits='4' is not an integer"),
    ({"quant_method": "gptq", "group_size": 1.5}, "group_size=1.5 is not an integer"),
    ({"quant_method": "gptq", "group_size": 16}, "has 3 groups, but group_size=16 needs 6 of 96 columns"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    ({"quant_method": "gptq", "dynamic": {"x": {}}}, "dynamic={'x': {}} is not supported"),
    ({"quant_method": "gptq", "pack_dtype": "int16"}, "pack_dtype='int16' is not supported"),
    ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format=True is not supported"),
    ({"quant_method": "awq", "version": "gemv"}, "version='gemv' is not supported: only gemm is"),
    ({"quant_method": "awq", "backend": "llm-awq"}, "backend='llm-awq' is not supported: only the layout of autoawq"),
    ({"quant_method": "gptq", "group_size": 0}, "group_size=0 is neither positive nor -1"),
    ({"quant_method": "awq", "zero_point": False}, "zero_point=False is not supported"),
    ({"quant_method": "awq", "bits": 8}, "bits=8 is not supported: only 4 are"),
    ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size=[0, 1] is not a list of rows"),
    ({"quant_method": "fp8"}, "no tensor ends with .weight_scale_inv or .weight_scale"),
    ({"quant_method": "mxfp4"}, "no tensor ends with _blocks: its weights are not quantized: remove the field"),
    ({"quant_method": "compressed-tensors"}, "config_groups=None is not an object"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "config_groups: 'a' has no object `weights`"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format='marlin-24' is not supported"),
    ({"quant_method": "compressed-tensors", "quantization_status": "calibration"}, "quantization_status='calibration'"),
    ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transform_config={'a': 1} is not"),
    (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config={'format': 'sparse-24-bitmask'} is not supported: only dense tensors are",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "x"}}}},
        "config_groups: 'a': num_bits='x' is not an integer",
    ),
]  # fmt: skip


@pytest.mark.parametrize("config, message", CONFIGS, ids=[str(i) for i in range(len(CONFIGS))])
def test_a_config_that_is_not_supported_is_named(config: Any, message: str, llama: Path, tmp_path: Path) -> None:
    quantized, _ = quantized_folders(llama, tmp_path, CASES["gptq"])
    edit_config(quantized, quantization_config=config)
    refuses(lambda: open_folder(quantized), message, str(quantized))


DOWN = "model.layers.0.mlp.down_proj"
Change = Callable[[torch.Tensor], torch.Tensor | None]
TENSORS: list[tuple[str, str, Change, str]] = [
    ("gptq", ".qzeros", lambda t: None, ".qzeros is missing"),
    ("gptq", ".scales", lambda t: t.T, ".scales is [64, 3], but must be [any, 64]"),
    ("gptq", ".qweight", lambda t: t.short(), ".qweight is int16, but must be int32"),
    ("gptq", ".qweight", lambda t: t[:0], ".qweight is [0, 64], but must be [any, any], without empty dimensions"),
    ("gptq", ".qweight", lambda t: t[:-1], ".g_idx is [96], but must be [88]"),
    ("gptq-ordered", ".g_idx", lambda t: None, ".g_idx is missing, which desc_act=true needs"),
    ("gptq", ".g_idx", lambda t: t + 1, ".g_idx names the group 3, but there are 3"),
    ("gptq", ".g_idx", lambda t: t - 1, ".g_idx names the group -1, but there are 3"),
    ("gptq-3-bits", ".qweight", lambda t: t[:-1], ".qweight is [8, 64], which are no words of 3-bit integers"),
    ("gptq-without-g_idx", ".qweight", lambda t: t[:-4], ".scales has 3 groups, but group_size=32 needs 2 of 64"),
    ("gptq-one-group", ".qweight", lambda t: t[:-4], ".g_idx is [96], but must be [64]"),
    ("awq", ".qzeros", lambda t: t[:-1], ".qzeros is [2, 8], but must be [3, 8]"),
    ("awq", ".qweight", lambda t: t[:-2], ".scales has 3 groups, which do not divide 94 columns"),
    ("packed-int4", ".weight_shape", lambda t: t * 2, ".weight_packed is [64, 12]: not [128, 192] numbers of 4 bits"),
    ("packed-int4", ".weight_shape", lambda t: -t, ".weight_packed is [64, 12]: not [-64, -96] numbers of 4 bits"),
    ("packed-int4", ".weight_scale", lambda t: torch.cat([t, t[:, :2]], 1), "has 5 groups, which do not divide 96"),
    ("packed-int4", ".weight_scale", lambda t: t[:-1], "but a matrix of [64, 96] has one scale, or one a row"),
    ("packed-int4-zero-points", ".weight_zero_point", lambda t: t.T, "is [3, 8], but must be [8, 3]"),
    ("int8-channel", ".weight", lambda t: t.short(), ".weight is int16, but must be int8 or float8_e4m3fn"),
    ("compressed-mxfp4", ".weight_scale", lambda t: t[:, :-1], ".weight_packed is [64, 48], but must be [64, 32]"),
    ("fp8-blocks", ".weight_scale_inv", lambda t: t[:-1], "or one a row, or one for each 40 x 40 block"),
    ("fp8-blocks", ".weight", lambda t: t.float(), ".weight is float32, but must be float8_e4m3fn or float8_e5m2"),
]  # fmt: skip


def changed(folder: Path, end: str, change: Change) -> Path:
    """Change or remove the tensor of the first layer's down projection whose name ends so."""
    tensors = load_file(folder / "model.safetensors")
    if (tensor := change(tensors.pop(DOWN + end))) is not None:
        tensors[DOWN + end] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case, end, change, message", TENSORS, ids=[f"{i}-{t[0]}" for i, t in enumerate(TENSORS)])
def test_tensors_that_do_not_fit_are_one_line(
    case: str, end: str, change: Change, message: str, llama: Path, tmp_path: Path
) -> None:
    folder = changed(quantized_folders(llama, tmp_path, CASES[case])[0], end, change)
    refuses(lambda: open_folder(folder), f"{folder}: tensor {DOWN}.", message)


@pytest.mark.parametrize(
    "case, name, message",
    [
        ("fp8-blocks", ".weight_scale", f"{DOWN}.weight_scale is not supported beside {DOWN}.weight"),
        ("gptq", ".weight", f"contains '{DOWN}.weight' twice: plain and quantized"),
    ],
)
def test_tensors_that_should_not_be_there(case: str, name: str, message: str, llama: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folders(llama, tmp_path, CASES[case])
    tensors = load_file(folder / "model.safetensors") | {DOWN + name: torch.ones(64, 96)}
    save_file(tensors, folder / "model.safetensors")
    refuses(lambda: open_folder(folder), message)


ODD = [
    None, True, -1, 0, 1, 3, 1.5, 2**31, 10**400, float("nan"), "x", "", [], {}, [[1]], [3, -1],
    {"a": {"weights": {}}},
]  # fmt: skip
DTYPES = [
    torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16, torch.float32, torch.float8_e4m3fn, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("name", ["gptq-3-bits", "packed-int4-zero-points", "compressed-mxfp4", "fp8-blocks"])
def test_changed_folders_load_or_are_refused_in_one_line(name: str, llama: Path, tmp_path: Path) -> None:
    rng = random.Random(name)
    folder, _ = quantized_folders(llama, tmp_path, CASES[name])
    original = load_file(folder / "model.safetensors")
    names = [key for key in original if key.startswith(DOWN)]
    messages = []
    for _ in range(40):
        config, tensors = dict(CASES[name].config), dict(original)
        if rng.random() < 0.3:
            config[rng.choice([*config, "format", "dynamic", "weight_block_size"])] = rng.choice(ODD)
        else:
            key = rng.choice(names)
            shape = [rng.choice([0, 1, 2, 3, 8, 12, 64, 96, n]) for n in tensors[key].shape][: rng.choice([1, 2, 2, 2])]
            shape += [1] * (rng.random() < 0.1)
            tensors[key] = torch.randint(0, 2, shape).to(rng.choice([tensors[key].dtype, *DTYPES]))
        edit_config(folder, quantization_config=config)
        save_file(tensors, folder / "model.safetensors")
        try:
            list(open_folder(folder).read())
        except NanoinferError as e:
            messages.append(str(e))
    assert 20 < len(messages) <= 40
    assert not [message for message in messages if len(message) > 700 or "\n" in message]


BAD_STATES = [
    ("x", "is not JSON"),
    ('{"shape": [2, 2.5]}', "shape=[2, 2.5] is not that of a matrix"),
    ('{"shape": [64, 96], "blocksize": 0}', "blocksize=0 "),
    ('{"shape": [64, 96], "blocksize": 64}', "blocksize=64 does not divide the 96 columns"),
    ('{"shape": [64, 128], "blocksize": 32}', "weight is [3072, 1], but must be [4096, 1]"),
    ('{"shape": [64, 96], "blocksize": 32}', "absmax is [96], but must be [192]"),
]  # fmt: skip


@pytest.mark.parametrize("state, message", BAD_STATES, ids=[str(i) for i in range(len(BAD_STATES))])
def test_bad_states_of_bitsandbytes(state: str, message: str, tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(3072, 1, dtype=torch.uint8),
        "a.weight.absmax": torch.zeros(96),
        "a.weight.quant_map": torch.zeros(16),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "t.safetensors")
    stored = read_safetensors(tmp_path / "t.safetensors")
    refuses(lambda: dequantized(stored, {"quant_method": "bitsandbytes"}, "here", ()), "here: tensor a.weight", message)


def test_quantized_weights_in_a_pickle_are_refused(llama: Path, tmp_path: Path) -> None:
    quantized, _ = quantized_folders(llama, tmp_path, CASES["gptq"])
    torch.save(load_file(quantized / "model.safetensors"), quantized / "pytorch_model.bin")
    (quantized / "model.safetensors").unlink()
    refuses(lambda: open_folder(quantized), "has quantized weights in pytorch_model.bin: save them as safetensors")


def test_a_file_that_changes_before_a_matrix_is_read(llama: Path, tmp_path: Path) -> None:
    quantized, _ = quantized_folders(llama, tmp_path, CASES["gptq"])
    weights = open_folder(quantized)
    (quantized / "model.safetensors").write_bytes(b"")
    refuses(lambda: list(weights.read()), "model.safetensors was changed while it was read: load it again")


def test_scales_that_are_not_finite_are_read_as_they_are(llama: Path, tmp_path: Path) -> None:
    quantized, _ = quantized_folders(llama, tmp_path, CASES["gptq"])
    changed(quantized, ".scales", lambda t: t * float("nan"))
    weights = dict(open_folder(quantized).read())
    assert np.isnan(weights["transformer.h.0.mlp.c_proj.weight"].float32()).all()
    assert "transformer.h.0.mlp.c_proj.weight" not in open_folder(quantized).block_formats


def test_a_quantized_tensor_stands_for_a_stored_one(llama: Path, tmp_path: Path) -> None:
    quantized, _ = quantized_folders(llama, tmp_path, CASES["fp8-blocks"])
    stored = read_safetensors(quantized / "model.safetensors")
    found = dequantized(stored, CASES["fp8-blocks"].config, "here", ())[0]
    tensor = found[f"{DOWN}.weight"]
    assert isinstance(tensor, QuantizedTensor)
    whole = tensor.read().values
    np.testing.assert_array_equal(tensor.t().read().values, whole.T)
    np.testing.assert_array_equal(np.concatenate([part.read().values for part in tensor.equal_parts(2)]), whole)
    assert type(found["model.norm.weight"]) is StoredTensor


NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 40, 96


def matrix(columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(3)) * 0.1


def values(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> np.ndarray:
    """Return what is read of the tensors, whose names are the ends after NAME."""
    save_file({f"{NAME}.{end}": tensor.contiguous() for end, tensor in tensors.items()}, path / "t.safetensors")
    found = dequantized(read_safetensors(path / "t.safetensors"), config, str(path), ())[0]
    assert list(found) == [f"{NAME}.weight"]
    return found[f"{NAME}.weight"].read().dense().values


SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 5, "strategy": "channel", "symmetric": False}),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize("format, options", SCHEMES, ids=[f"{i}-{f}" for i, (f, _) in enumerate(SCHEMES)])
def test_compressed_tensors(format: str, options: dict[str, Any], tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(**options)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    rows = {"tensor": 1, "block": 2}.get(options["strategy"], ROWS)
    columns = {"group": COLUMNS // 32, "block": 2}.get(options["strategy"], 1)
    state = {"weight": matrix(), "weight_scale": torch.rand(rows, columns) * 0.02 + 0.01}
    if format.startswith("mxfp4"):
        state["weight_scale"] = torch.full((rows, columns), 2.0**-4)
    if options["strategy"] == "tensor":
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if not options.get("symmetric", True):
        half = 1 << options["num_bits"] - 1
        state["weight_zero_point"] = torch.randint(-half, half, (rows, columns), dtype=torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.model_dump()}},
    }
    np.testing.assert_array_equal(values(tmp_path, compressed, config), expected.float().numpy())


@pytest.mark.parametrize("kind", ["nf4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_bitsandbytes(kind: str, nested: bool, tmp_path: Path) -> None:
    """Its sums of nested scales are float32; ours are exact, so that values differ in their last bits.

    Rows are whole blocks: bitsandbytes 0.50.2 dequantizes others wrongly on a CPU with AVX-512.
    """
    logging.disable(logging.WARNING)  # the package warns that others are missing
    try:
        functional = pytest.importorskip("bitsandbytes.functional")
    finally:
        logging.disable(logging.NOTSET)
    packed, state = functional.quantize_4bit(matrix(128), blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": packed} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    found = values(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    expected = functional.dequantize_4bit(packed, state).numpy()
    if nested:
        np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("columns", [COLUMNS, 64])
def test_mxfp4_of_transformers(columns: int, tmp_path: Path) -> None:
    """As gpt-oss stores its experts; the reference returns (experts, in, out)."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, ROWS, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, ROWS, columns // 32), dtype=torch.uint8)
    save_file({"e_blocks": blocks, "e_scales": scales}, tmp_path / "t.safetensors")
    found = dequantized(read_safetensors(tmp_path / "t.safetensors"), {"quant_method": "mxfp4"}, "here", ())[0]["e"]
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(found.read().values, expected.transpose(1, 2).numpy())
