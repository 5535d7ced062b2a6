"""GGUF files against transformers: the same random models as files of both formats, and every format of tensors."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.gguf_files import Q4_0, Stored, as_f16, as_f32, as_q8_0, convert, metadata_of, rewritten, write_gguf
from helpers.models import load_gpt, refuses

transformers = pytest.importorskip("transformers")

from helpers.families import CASES, GGUF_CASES, SMALL, make_folder  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.checkpoints.gguf import model as gguf  # noqa: E402
from nanoinfer.checkpoints.gguf.file import BlockTensor, read_gguf  # noqa: E402
from nanoinfer.checkpoints.gguf.formats import FORMATS  # noqa: E402
from nanoinfer.checkpoints.huggingface import open_folder, save  # noqa: E402
from nanoinfer.checkpoints.load import load_model  # noqa: E402
from nanoinfer.config import Rotary  # noqa: E402
from nanoinfer.models.rotary import frequencies  # noqa: E402

# What llama.cpp's metadata cannot say; Llama 3's scaling has a test below.
LEFT_OUT = ("gemma3", "gemma3-scaled", "smollm3-windows", "llama3", "nanochat", "nanochat-all-heads",
            "starcoder2-window", "llama-dynamic", "llama-yarn", "ministral", "ministral-layers", "helium", "gptj",
            "phi-norms", "gemma2", "qwen2_moe", "qwen2_moe-windows", "qwen3_moe-mixed", "olmoe-normalized", "opt",
            "opt-untied", "bitnet", "bitnet-one-head", "gpt_oss-plain", "deepseek_v3-plain",
            "exaone", "minicpm", "minicpm-long", "granitemoehybrid", "gpt_neo", "qwen3_next", "granitemoehybrid-mamba",
            "granitemoehybrid-mamba-experts", "nemotron_h", "nemotron_h-experts", "falcon_h1",
            "falcon_h1-norm")  # fmt: skip
EXTRA = GGUF_CASES | {"llama-32": ("LlamaConfig", {"hidden_size": 32, "intermediate_size": 64})}
STORED = [case for case in CASES if case not in LEFT_OUT]


@pytest.fixture(autouse=True)
def _extra_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in EXTRA.items():
        monkeypatch.setitem(CASES, name, case)


def gpt2(folder: Path) -> Any:
    config = transformers.GPT2Config(vocab_size=61, n_positions=48, n_embd=24, n_layer=2, n_head=4)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("case", ["gpt2", "gemma2-10", "gemma3-7-layers", "qwen2_moe-plain", "bitnet-silu", *STORED])
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = gpt2(tmp_path / "hf") if case == "gpt2" else make_folder(case, tmp_path / "hf")
    weights, _ = gguf.open_file(convert(model, tmp_path / "model.gguf"))
    ours, theirs = weights.config, open_folder(tmp_path / "hf").config
    plain = [replace(kind, rotary=None) for kind in ours.layers]
    assert plain == [replace(kind, rotary=None) for kind in theirs.layers]
    assert (ours.n_kv_head, ours.biases) == (theirs.n_kv_head, theirs.biases)
    if "phi3-" not in case:  # whose divisors are rounded to float32
        assert ours.layers == theirs.layers
    assert ours.norm_epsilon == theirs.norm_epsilon
    assert ours.family == ("llama" if case == "mistral-no-window" else theirs.family)
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    bound = 5e-4 if case.startswith("qwen3_5") else 1e-4
    torch.testing.assert_close(load_gpt(weights)(idx), model(idx).logits, rtol=bound, atol=bound)


@pytest.mark.parametrize("case", ["llama", "gemma3-7-layers", "gpt_neox"])
def test_a_gguf_file_saved_as_a_folder_is_the_same_model(case: str, tmp_path: Path) -> None:
    model = make_folder(case, tmp_path / "hf")
    save(gguf.open_file(convert(model, tmp_path / "model.gguf"))[0], tmp_path / "saved")
    saved, original = (dict(open_folder(tmp_path / name).read()) for name in ("saved", "hf"))
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_allclose(saved[name].values, tensor.values, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_the_scaling_of_llama_3_is_recognised(tmp_path: Path) -> None:
    model = make_folder("llama3-8192", tmp_path / "hf")
    plain, scaled = Rotary(16), Rotary(16, 10000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    divisors = frequencies(plain) / frequencies(scaled)
    assert len(set(divisors.tolist())) == 3  # kept, blended, divided
    weights, _ = gguf.open_file(convert(model, tmp_path / "a.gguf", tensors={"rope_freqs.weight": as_f32(divisors)}))
    assert weights.config.layers[0].rotary == scaled
    idx = torch.randint(0, 61, (1, 90), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(load_gpt(weights)(idx), model(idx).logits, rtol=1e-4, atol=1e-4)
    ones = convert(model, tmp_path / "b.gguf", tensors={"rope_freqs.weight": as_f32(np.ones(8))})
    assert gguf.open_file(ones)[0].config.layers[0].rotary == plain
    for i, wrong in enumerate((divisors[::-1], divisors * 1.01, np.zeros(8), np.full(8, np.nan), np.ones(4))):
        path = convert(model, tmp_path / f"{i}.gguf", tensors={"rope_freqs.weight": as_f32(wrong)})
        refuses(lambda p=path: gguf.open_file(p), "rope_freqs.weight")


def test_tokens_are_equal_on_every_engine(tmp_path: Path) -> None:
    path = str(convert(make_folder("llama", tmp_path / "hf"), tmp_path / "model.gguf"))
    prompts, found = [[3, 5, 7], [11, 13, 17, 19, 23, 29]], []
    for name in ("recompute", "dynamic", "static", "paged", "native"):
        llm = LLM(path, engine=name, max_num_seqs=2, dtype="float32")
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        found.append([o.outputs[0].token_ids for o in outputs])
    assert all(tokens == found[0] for tokens in found)
    assert len({*found[0][0], *found[0][1]}) > 5


def test_float16_and_blocks_are_read_as_they_are(tmp_path: Path) -> None:
    model = make_folder("llama-32", tmp_path / "hf")
    original = dict(open_folder(tmp_path / "hf").read())
    halves = gguf.open_file(convert(model, tmp_path / "half.gguf", as_f16))[0]
    assert (halves.stored_dtype, open_folder(tmp_path / "hf").stored_dtype) == ("float16", "float32")
    for name, tensor in halves.read():
        np.testing.assert_array_equal(tensor.float32(), original[name].to(tensor.dtype).float32())
        assert tensor.dtype == ("float16" if tensor.values.ndim == 2 else "float32")
    blocks = gguf.open_file(convert(model, tmp_path / "q8.gguf", as_q8_0))[0]
    assert blocks.stored_dtype == "float32"
    for name, tensor in blocks.read():
        error = np.abs(tensor.float32() - original[name].values).max()
        assert tensor.dtype == ("q8_0" if len(tensor.shape) == 2 else "float32")
        assert tensor.shape == original[name].shape
        assert error <= np.abs(original[name].values).max() / 127 * 0.51, name


# Formats ---------------------------------------------------------------------------------------------------------

# Of pseudo-random blocks: the first 8 bytes of the SHA-256 of the values that gguf 0.19's `quants.dequantize` computes.
DIGESTS = {
    "Q4_0": "7a39e7e97e387d59", "Q4_1": "c60e8bfb88636f15", "Q5_0": "e3f3db838cda23b7", "Q5_1": "75f2b9ba3e1f6a14",
    "Q8_0": "f9eb333c064e213c", "Q2_K": "4aa5161533d7463c", "Q3_K": "244a127a7e648354", "Q4_K": "32575d58f6fd62c6",
    "Q5_K": "d3e2457817598d6c", "Q6_K": "baff438ee46773d2", "IQ4_NL": "0b7ecdac4aca0f17",
    "IQ4_XS": "6ec773cbdae4ef77", "MXFP4": "2ca8fb7b8615d458", "TQ1_0": "d76aca47d4e20fcb",
    "TQ2_0": "dd25d9052cd5e03b", "OLLAMA_MXFP4": "91f76bcfb4c775e4", "IQ3_XXS": "3917587a312533c9",
    "IQ3_S": "b8189a86b5668b36", "IQ2_S": "2581b561a6bfa21b", "NVFP4": "4d5b3e1e9fa05b40",
}  # fmt: skip
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
          "TQ1_0": [52], "TQ2_0": [64], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "NVFP4": [],
          "OLLAMA_MXFP4": []}  # fmt: skip
QUANTIZED = {kind: f for kind, f in FORMATS.items() if f.compute is not None}


def random_blocks(kind: int, count: int = 64) -> np.ndarray:
    """Return blocks of pseudo-random bytes whose scales are finite."""
    format = FORMATS[kind]
    numbers = np.arange(count * format.block_bytes, dtype=np.uint64) + np.uint64(1 + 1000 * kind)
    mixed = (numbers * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    blocks = (mixed & np.uint64(255)).astype(np.uint8).reshape(count, -1)
    if format.name.endswith("MXFP4"):
        blocks[:, 0] &= 0xBF  # 2^63 at most
    for at in SCALES[format.name]:
        blocks[:, at + 1] &= 0xBB  # an exponent of at most 14 of 31
    return blocks


@pytest.mark.parametrize("kind", QUANTIZED, ids=[f.name for f in QUANTIZED.values()])
def test_values_of_a_format(kind: int) -> None:
    format = FORMATS[kind]
    values = format.dequantize(random_blocks(kind))
    assert values.shape == (64 * format.block_size,)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == DIGESTS[format.name]


@pytest.mark.parametrize("kind", QUANTIZED, ids=[f.name for f in QUANTIZED.values()])
def test_values_of_a_format_are_those_of_the_gguf_package(kind: int) -> None:
    quants = pytest.importorskip("gguf.quants")
    if kind == 4:
        pytest.skip("a format of Ollama's")
    blocks = random_blocks(kind, 5000)  # more than are computed at a time
    expected = quants.dequantize(blocks.reshape(1, -1), quants.GGMLQuantizationType(kind))
    np.testing.assert_array_equal(FORMATS[kind].dequantize(blocks), expected.reshape(-1))


def test_the_sizes_of_formats_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    for kind, format in ((kind, format) for kind, format in FORMATS.items() if kind != 4):  # of Ollama's
        known = constants.GGMLQuantizationType(kind)
        assert (known.name, constants.GGML_QUANT_SIZES[known]) == (format.name, (format.block_size, format.block_bytes))


def test_a_tensor_of_blocks_is_read_row_by_row(tmp_path: Path) -> None:
    blocks = random_blocks(Q4_0, 6)
    stored = {"t": Stored((3, 64), Q4_0, blocks.tobytes())}
    tensor = read_gguf(write_gguf(tmp_path / "a.gguf", {}, stored)).tensors["t"]
    assert isinstance(tensor, BlockTensor)
    values = FORMATS[Q4_0].dequantize(blocks).reshape(3, 64)
    np.testing.assert_array_equal(tensor.read().float32(), values)
    np.testing.assert_array_equal(tensor.t().read().values, values.T)
    np.testing.assert_array_equal(tensor.read_blocks(), blocks)


@pytest.mark.parametrize("kind", QUANTIZED, ids=[f.name for f in QUANTIZED.values()])
def test_experts_in_every_format_are_matrices_of_its_blocks(kind: int, tmp_path: Path) -> None:
    """A stacked tensor, (experts, rows, columns), is one matrix of as many rows; a wrong first dimension is refused."""
    size = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 3}
    config = transformers.MixtralConfig(**SMALL | size)
    model = transformers.MixtralForCausalLM(config)
    blocks = random_blocks(kind, 3 * 32 * 256 // FORMATS[kind].block_size)
    name = "blk.0.ffn_up_exps.weight"
    stored = Stored((3, 32, 256), kind, blocks.tobytes())
    weights, _ = gguf.open_file(convert(model, tmp_path / "a.gguf", tensors={name: stored}))
    ours = "transformer.h.0.mlp.experts.c_fc.weight"
    own = ("Q8_0",) if FORMATS[kind].rounded else FORMATS[kind].converted or (FORMATS[kind].name,)
    assert weights.block_formats[ours] == ((own[0].lower(), 96),)
    assert weights.block_formats[ours.replace("c_fc", "c_gate")] == (("q8_0", 96),)  # they share their inputs
    values = FORMATS[kind].dequantize(blocks).reshape(96, 256)
    np.testing.assert_array_equal(dict(weights.read())[ours].float32(), values)
    wrong = convert(model, tmp_path / "b.gguf", tensors={name: stored._replace(shape=(2, 48, 256))})
    refuses(lambda: gguf.open_file(wrong), "blk.0.ffn_up_exps.weight is [2, 48, 256]")


@pytest.mark.parametrize("shape", [(100,), (20, 5), (5, 20, 1), (4, 25)])
def test_biases_of_experts_have_a_row_for_each(shape: tuple[int, ...], tmp_path: Path) -> None:
    model, name = make_folder("gpt_oss", tmp_path / "hf"), "blk.1.ffn_up_exps.bias"
    wrong = convert(model, tmp_path / "a.gguf", tensors={name: as_f32(np.zeros(shape))})
    refuses(lambda: gguf.open_file(wrong), f"a.gguf: tensor {name} is {list(shape)}, but the config requires [5, 20]")


@pytest.mark.parametrize("count", [2, 4])
def test_rows_of_blocks_are_unfolded(count: int, tmp_path: Path) -> None:
    """To rows of whole blocks, or to dense rows."""
    blocks = random_blocks(Q4_0, 6)
    tensor = read_gguf(write_gguf(tmp_path / "a.gguf", {}, {"t": Stored((3, 64), Q4_0, blocks.tobytes())})).tensors["t"]
    found = tensor.unfolded(count)
    assert (found.shape, found.block_format) == ((3 * count, 64 // count), "q4_0" if count == 2 else None)
    values = FORMATS[Q4_0].dequantize(blocks).reshape(found.shape)
    np.testing.assert_array_equal(found.read().float32(), values)


# Parts and keys of other programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        {"expert_count": 0, "expert_used_count": 0, "expert_gating_func": 2, "expert_group_count": 8},
        {"attention.sliding_window": 0, "attention.sliding_window_pattern": 4, "attention.clamp_kqv": 0.0},
        {"attention.sliding_window_pattern": np.zeros(4, bool), "tensor_data_layout": "Meta AI original pth"},
        {"rope.scaling.yarn_beta_fast": 32.0, "rope.dimension_sections": np.array([1, 1, 1, 0], np.int32)},
        {"attention.layer_norm_epsilon": 1e-5, "nextn_predict_layers": 0, "final_logit_softcapping": 0.0},
    ],
)
@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_keys_that_ask_for_nothing(case: str, key: dict[str, Any], tmp_path: Path) -> None:
    model = make_folder(case, tmp_path / "hf")
    arch = metadata_of(model.config)["general.architecture"]
    plain = gguf.open_file(convert(model, tmp_path / "a.gguf"))[0].config
    keys = {f"{arch}.{name}": value for name, value in key.items()}
    assert gguf.open_file(convert(model, tmp_path / "b.gguf", **keys))[0].config == plain


def test_a_granite_may_have_the_keys_of_its_hybrids(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them for Granite 4 without Mamba layers: a number of heads for each layer."""
    model = make_folder("granite", tmp_path / "hf")
    heads = "granite.attention.head_count_kv"
    keys = {"granite.ssm.conv_kernel": 4, "granite.rope.scaling.finetuned": True, heads: np.array([2] * 4, np.int32)}
    path = rewritten(convert(model, tmp_path / "a.gguf"), lambda tensors: None, **keys)
    same_logits(model, path)
    rewritten(path, lambda tensors: None, **{heads: np.array([2, 2, 1, 2], np.int32)})
    refuses(lambda: gguf.open_file(path), f"{heads}=[2, 2, 1, 2] is not an integer")


def test_experts_with_normalized_weights_are_chosen_by_sigmoids(tmp_path: Path) -> None:
    """llama.cpp's converter writes no function for GLM-4.7-Flash."""
    model = make_folder("deepseek_v3", tmp_path / "hf")
    path = convert(model, tmp_path / "a.gguf")
    file = rewritten(path, lambda tensors: None, **{"deepseek2.expert_gating_func": None})
    assert gguf.open_file(file)[0].config.family == "deepseek_v3"
    same_logits(model, file)


def make_folder_of(name: str, fields: dict[str, Any], folder: Path) -> Any:
    CASES["here"] = (name, fields)
    return make_folder("here", folder)


def same_logits(model: Any, path: Path) -> None:
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(load_gpt(gguf.open_file(path)[0])(idx), model(idx).logits, rtol=1e-4, atol=1e-4)


def join(tensors: dict[str, Stored], parts: tuple[str, ...], whole: str) -> None:
    """Replace tensors of each layer by one, the parts below each other."""
    for first in [name for name in tensors if f".{parts[0]}." in name]:
        each = [tensors.pop(first.replace(parts[0], part)) for part in parts]
        rows = sum(part.shape[0] for part in each)
        content = b"".join(part.content for part in each)
        tensors[first.replace(parts[0], whole)] = Stored((rows, *each[0].shape[1:]), each[0].kind, content)


@pytest.mark.parametrize("case", ["llama-all-heads", "qwen2", "qwen3", "gemma3-7-layers", "glm"])
def test_queries_keys_and_values_may_be_joined(case: str, tmp_path: Path) -> None:
    model = make_folder(case, tmp_path / "hf")
    path = convert(model, tmp_path / "a.gguf")
    same_logits(model, rewritten(path, lambda tensors: join(tensors, ("attn_q", "attn_k", "attn_v"), "attn_qkv")))


@pytest.mark.parametrize("case", ["mixtral-all", "qwen2_moe-plain"])
def test_experts_may_be_stored_one_by_one(case: str, tmp_path: Path) -> None:
    def split(tensors: dict[str, Stored]) -> None:
        for name in [name for name in tensors if "_exps." in name]:
            (count, *shape), kind, content = tensors.pop(name)
            size = len(content) // count
            for i in range(count):
                part = Stored(tuple(shape), kind, content[i * size : (i + 1) * size])
                tensors[name.replace("_exps.", f".{i}.")] = part

    model = make_folder(case, tmp_path / "hf")
    same_logits(model, rewritten(convert(model, tmp_path / "a.gguf"), split))


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        ("qwen2", "qwen2vl"),
        ("qwen3", "qwen3vl"),
        ("qwen3_moe", "qwen3vlmoe"),
        ("granite", "minicpm"),
        ("minicpm-long", "minicpm"),
    ],
)
def test_architectures_that_are_others_by_another_name(case: str, arch: str, tmp_path: Path) -> None:
    model = make_folder(case, tmp_path / "hf")
    path = convert(model, tmp_path / "a.gguf")
    old = read_gguf(path).metadata
    named = {key.replace(f"{old['general.architecture']}.", f"{arch}."): value for key, value in old.items()}
    same_logits(
        model, rewritten(path, lambda tensors: None, **dict.fromkeys(old) | named | {"general.architecture": arch})
    )


@pytest.mark.parametrize("kind", [39, 4])
def test_files_of_gpt_oss_by_ollama(kind: int, tmp_path: Path) -> None:
    """Names of its own; the rows of the experts' gates and first matrices alternate. Its MXFP4 has another order."""
    case = CASES["gpt_oss"][1] | {"hidden_size": 32, "intermediate_size": 32}
    model = make_folder_of("GptOssConfig", case, tmp_path / "hf")
    blocks = random_blocks(kind, 5 * 64)
    blocks[:, 0] = 122  # a scale of 1 / 32
    values = FORMATS[kind].dequantize(blocks).reshape(5, 64, 32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.copy_(torch.from_numpy(values).transpose(1, 2))

    def change(tensors: dict[str, Stored]) -> None:
        for name in list(tensors):
            theirs = name.replace("attn_output", "attn_out").replace("attn_sinks.weight", "attn_sinks")
            tensors[theirs.replace("post_attention_norm", "ffn_norm")] = tensors.pop(name)
        for i in range(4):
            gate, up = (tensors.pop(f"blk.{i}.ffn_{part}_exps.bias") for part in ("gate", "up"))
            pair = [np.frombuffer(part.content, np.float32).reshape(5, -1) for part in (gate, up)]
            tensors[f"blk.{i}.ffn_gate_up_exps.bias"] = as_f32(np.stack(pair, 2).reshape(5, -1))
            for part in ("gate", "up"):
                del tensors[f"blk.{i}.ffn_{part}_exps.weight"]
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = Stored((5, 64, 32), kind, blocks.tobytes())

    path = convert(model, tmp_path / "a.gguf")
    keys = dict.fromkeys(read_gguf(path).metadata)
    own = {
        key.replace("gpt-oss", "gptoss"): v for key, v in read_gguf(path).metadata.items() if "scaling.type" not in key
    }
    rewritten(path, change, **keys | own | {"general.architecture": "gptoss"})
    same_logits(model, path)
    formats = gguf.open_file(path)[0].block_formats
    assert {formats[f"transformer.h.0.mlp.experts.{name}.weight"] for name in ("c_gate", "c_fc")} == {(("mxfp4", 160),)}
    prompts, tokens = [[3, 5, 7, 11]], []
    for engine in ("native", "paged"):
        outputs = LLM(str(path), engine=engine, dtype="float32").generate(
            prompts, SamplingParams(max_tokens=8, temperature=0)
        )
        tokens.append(outputs[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_factors_of_nvfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A number beside a matrix, or one for each expert; numbers of activations are left out."""
    size = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 3}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL | size))
    more = {}
    for name, shape, factors in (("attn_output", (64, 64), [0.5]), ("ffn_up_exps", (3, 32, 64), [1.0, 2.0, 4.0])):
        more[f"blk.0.{name}.weight"] = Stored(shape, 40, random_blocks(40, int(np.prod(shape)) // 64).tobytes())
        more[f"blk.0.{name}.scale"] = as_f32(np.array(factors))
        more[f"blk.0.{name}.input_scale"] = as_f32(np.array([3.0]))
    weights, _ = gguf.open_file(convert(model, tmp_path / "a.gguf", tensors=more))
    found = dict(weights.read())
    for ours, shape, factors in (("attn.c_proj", (64, 64), [0.5]), ("mlp.experts.c_fc", (96, 64), [1.0, 2.0, 4.0])):
        values = FORMATS[40].dequantize(random_blocks(40, int(np.prod(shape)) // 64)).reshape(len(factors), -1)
        expected = (values * np.array(factors, np.float32)[:, None]).reshape(shape)
        np.testing.assert_array_equal(found[f"transformer.h.0.{ours}.weight"].float32(), expected)
        assert weights.block_formats[f"transformer.h.0.{ours}.weight"] == (("q8_0", shape[0]),)
    assert "a.gguf: engine native rounds the values of its formats NVFP4 to Q8_0" in caplog.text


def test_parts_that_do_not_run_are_left_out_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A vision part, as in Ollama's files of Gemma 3, and the second layer that predicts further tokens."""
    model = make_folder("gemma3-7-layers", tmp_path / "hf")
    more = {"v.blk.0.attn_q.weight": as_f32(np.ones((4, 4))), "mm.input_projection.weight": as_f32(np.ones((4, 4)))}
    keys = {"gemma3.vision.block_count": 1, "gemma3.mm.tokens_per_image": 256, "gemma3.rope.freq_base": None}
    keys |= {"gemma3.rope.global.freq_base": 1e6, "gemma3.rope.local.freq_base": 10000.0}
    same_logits(model, rewritten(convert(model, tmp_path / "a.gguf"), lambda t: t.update(more), **keys))
    assert "a.gguf: 2 tensors for images are not used: the text model runs without them" in caplog.text
    model = make_folder("deepseek_v3", tmp_path / "hf2")
    more = {"blk.4.nextn.eh_proj.weight": as_f32(np.ones((24, 48))), "blk.5.attn_norm.weight": as_f32(np.ones(24))}
    keys = {"deepseek2.block_count": 6, "deepseek2.nextn_predict_layers": 2}
    same_logits(model, rewritten(convert(model, tmp_path / "b.gguf"), lambda t: t.update(more), **keys))
    assert "b.gguf: 1 tensors for the prediction of further tokens are not used" in caplog.text


def test_the_scaling_that_ollama_leaves_out_of_gemma_3(tmp_path: Path) -> None:
    """Its files of 4B, 12B and 27B have a vision part, and no factor of the global layers' positions."""
    model = make_folder("gemma3-7-layers", tmp_path / "hf")
    keys = {"gemma3.block_count": 34, "gemma3.vision.block_count": 1, "gemma3.rope.scaling.factor": None}

    def deeper(tensors: dict[str, Stored]) -> None:
        tensors |= {
            name.replace("blk.0.", f"blk.{i}."): tensors[name]
            for i in range(7, 34)
            for name in [n for n in tensors if n.startswith("blk.0.")]
        }

    config = gguf.open_file(rewritten(convert(model, tmp_path / "a.gguf"), deeper, **keys))[0].config
    assert [(kind.window, kind.rotary.factor) for kind in config.layers[4:6]] == [(6, 1.0), (None, 8.0)]


# What is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_folder("llama", tmp_path_factory.mktemp("llama"))


UNSUPPORTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "architecture": ({"general.architecture": "bloom"}, ["general.architecture='bloom'", "llama, qwen2"]),
    "no architecture": ({"general.architecture": 7}, ["general.architecture=7"]),
    "experts": ({"llama.expert_count": 8}, ["llama.expert_used_count is missing"]),
    "experts without tensors": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2},
        ["blk.0.ffn_gate_inp.weight [8, 24] is missing"],
    ),
    "experts without a number": ({"llama.expert_used_count": 2}, ["llama.expert_used_count=2"]),
    "negative experts": ({"llama.expert_count": np.int32(-1)}, ["llama.expert_count=-1"]),
    "too many of a token": (
        {"llama.expert_count": 8, "llama.expert_used_count": 9},
        ["experts per token=9 is not an integer in [1, 8]"],
    ),
    "unknown key": ({"llama.attention.clamp_kqv": 3.0}, ["llama.attention.clamp_kqv=3.0"]),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, ["llama.rope.scaling.type='longrope'", "yarn"]),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.original_context_length is missing"]),
    "partial rotation": ({"llama.rope.dimension_count": 4}, ["llama.rope.dimension_count=4", "6"]),
    "other values": ({"llama.attention.value_length": 4}, ["llama.attention.value_length=4"]),
    "heads of each layer": (
        {"llama.attention.head_count": np.array([4, 2], np.int32)},
        ["llama.attention.head_count=[4, 2]"],
    ),
    "not a number": ({"llama.rope.freq_base": float("nan")}, ["llama.rope.freq_base=nan"]),
    "a string": ({"llama.block_count": "2"}, ["llama.block_count='2'"]),
    "a bool": ({"llama.block_count": True}, ["llama.block_count=True"]),
    "zero": ({"llama.embedding_length": 0}, ["llama.embedding_length=0"]),
    "huge": ({"llama.block_count": 2**31}, ["llama.block_count=2147483648"]),
    "more layers": ({"llama.block_count": 2**30}, ["llama.block_count=1073741824", "4"]),
    "further layers": (
        {"llama.block_count": 2**31 - 1, "llama.nextn_predict_layers": 2**30},
        ["llama.block_count=2147483647 is not the number of layers that the file has: 4"],
    ),
    "only further layers": ({"llama.nextn_predict_layers": 4}, ["llama.block_count=4"]),
    "further layers as text": ({"llama.nextn_predict_layers": "1"}, ["llama.nextn_predict_layers='1'"]),
    "pattern of other layers": (
        {"llama.attention.sliding_window": 5, "llama.attention.sliding_window_pattern": np.ones(3, bool)},
        ["llama.attention.sliding_window_pattern=[True, True, True]"],
    ),
    "bidirectional": ({"llama.attention.causal": False}, ["llama.attention.causal=False"]),
    "long list": ({"llama.x": np.zeros(10**6, np.uint8)}, ["llama.x", "4096"]),
    "start token": ({"tokenizer.ggml.bos_token_id": 61}, ["tokenizer.ggml.bos_token_id=61", "60"]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_named(name: str, llama: Any, tmp_path: Path) -> None:
    extra, words = UNSUPPORTED[name]
    path = convert(llama, tmp_path / "model.gguf", **extra)
    refuses(lambda: gguf.open_file(path), str(path), *words)


def test_a_missing_key_or_tensor_is_named(llama: Any, tmp_path: Path) -> None:
    metadata = metadata_of(llama.config)
    del metadata["llama.embedding_length"]
    refuses(lambda: gguf.open_file(write_gguf(tmp_path / "a.gguf", metadata, {})), "llama.embedding_length")
    whole = convert(llama, tmp_path / "b.gguf").read_bytes()
    broken = whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xy.weight")
    (tmp_path / "c.gguf").write_bytes(broken)
    refuses(lambda: gguf.open_file(tmp_path / "c.gguf"), "blk.1.ffn_up.weight")
    refuses(lambda: gguf.open_file(write_gguf(tmp_path / "d.gguf", metadata_of(llama.config), {})), "token_embd.weight")
    extra = convert(llama, tmp_path / "e.gguf", tensors={"blk.0.ffn_gate_exps.weight": as_f32(np.ones((2, 3, 4)))})
    refuses(lambda: gguf.open_file(extra), "blk.0.ffn_gate_exps.weight")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refuses(lambda: load_model(str(tmp_path / "x.gguf")), "x.gguf", "no such file")
    (tmp_path / "y.gguf").write_bytes(b"not one")
    refuses(lambda: load_model(str(tmp_path / "y.gguf")), "y.gguf is not a valid GGUF file", "begin with GGUF")
