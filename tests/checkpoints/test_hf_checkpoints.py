"""Hugging Face folders: the same logits as transformers in both directions, and no broken file that crashes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Model

from helpers.models import (
    CHARS,
    TINY,
    edit_config,
    load_folder,
    make_folder,
    make_model,
    make_weights,
    refuses,
    weights_of,
)
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.huggingface import open_folder, save
from nanoinfer.config import ModelConfig
from nanoinfer.models import stored
from nanoinfer.models.transformer import Transformer
from nanoinfer.tokenizers.tokenizer import char_to_json, from_json
from nanoinfer.training.data import train_bpe

CONFIGS = {
    "biases": TINY,
    "no-biases": replace(TINY, bias=False),
    "gelu": replace(TINY, activation="gelu"),
    "untied": replace(TINY, tie_word_embeddings=False),
    "n_inner": replace(TINY, n_inner=24),
    "epsilon": replace(TINY, norm_epsilon=3e-2),
    "one-wide-head": replace(TINY, n_head=1, n_layer=1, vocab_size=3),
}
IDS = torch.arange(24).view(2, 12) * 7 % 59


def tokens_for(config: ModelConfig) -> Tensor:
    return IDS % config.vocab_size


def same_parameters(ours: Transformer, theirs: Transformer) -> bool:
    """Not the logits: a folder's matrices are transposed in memory, and BLAS may round them otherwise."""
    expected = dict(theirs.named_parameters())
    return all(torch.equal(p, expected[name]) for name, p in ours.named_parameters()) and len(expected) > 20


def same_logits(ours: Transformer, theirs: GPT2LMHeadModel, idx: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(ours(idx), theirs(idx).logits, atol=1e-4, rtol=1e-4)


def random_gpt2(**changes: Any) -> GPT2LMHeadModel:
    """A transformers model with every weight drawn, biases and layer norms included."""
    torch.manual_seed(1)
    shape = {"vocab_size": 59, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**shape | {"bos_token_id": 0, "eos_token_id": None} | changes))
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.1, 0.3)
    return model.requires_grad_(False).eval()


# Parity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_transformers_reads_what_we_save(tmp_path: Path, config: ModelConfig) -> None:
    model = make_model(config)
    save(weights_of(model), tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    same_logits(model, theirs, tokens_for(config))
    again, _ = load_folder(tmp_path)
    same_logits(again, theirs, tokens_for(config))


def test_a_saved_config_reads_back_as_it_was(tmp_path: Path) -> None:
    config = replace(TINY, n_inner=24, activation="gelu", norm_epsilon=3e-2, tie_word_embeddings=False)
    save(make_weights(config), tmp_path)
    assert load_folder(tmp_path)[1] == config


def test_biases_that_a_model_lacks_are_saved_as_zeros(tmp_path: Path) -> None:
    save(make_weights(replace(TINY, bias=False)), tmp_path)
    biases = {k: t for k, t in load_file(tmp_path / "model.safetensors").items() if k.endswith(".bias")}
    assert len(biases) == TINY.n_layer * 6 + 1
    assert all(torch.equal(t, torch.zeros_like(t)) for t in biases.values())
    assert biases["transformer.h.0.attn.c_attn.bias"].shape == (3 * TINY.n_embd,)


@pytest.mark.parametrize("config", [TINY, CONFIGS["no-biases"], CONFIGS["untied"]], ids=["tied", "no-biases", "untied"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, config: ModelConfig) -> None:
    save(make_weights(config), tmp_path)
    prompt = [5, 9, 2, 33, 7]
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    idx = torch.tensor([prompt])
    expected = theirs.generate(
        idx, attention_mask=torch.ones_like(idx), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0, len(prompt) :].tolist()
    llm = LLM(str(tmp_path), engine="static", device="cpu", max_num_seqs=2)
    (out,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0))
    assert out.outputs[0].token_ids == expected
    assert len(set(expected)) > 1


SAVED_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "default": {},
    "gelu": {"activation_function": "gelu"},
    "gelu_pytorch_tanh": {"activation_function": "gelu_pytorch_tanh"},
    "untied": {"tie_word_embeddings": False},
    "n_inner": {"n_inner": 20},
    "epsilon": {"layer_norm_epsilon": 1e-2},
}


@pytest.mark.parametrize("changes", SAVED_BY_TRANSFORMERS.values(), ids=SAVED_BY_TRANSFORMERS)
def test_we_read_what_transformers_saves(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = random_gpt2(**changes)
    theirs.save_pretrained(tmp_path)
    same_logits(load_folder(tmp_path)[0], theirs, IDS)


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    theirs = random_gpt2()
    theirs.save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same_logits(load_folder(tmp_path)[0], theirs, IDS)
    (tmp_path / "model.safetensors.index.json").unlink()  # all shards say how many they are
    same_logits(load_folder(tmp_path)[0], theirs, IDS)
    max(tmp_path.glob("model-*")).unlink()
    refuses(lambda: load_folder(tmp_path), "has no model.safetensors", "model-00001-of-0000")


def test_the_layout_of_other_code_is_named(tmp_path: Path) -> None:
    for name in ("params.json", "consolidated.safetensors"):
        (tmp_path / name).write_text("{}")
    refuses(lambda: load_folder(tmp_path), "params.json and no config.json", "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_dtype_load_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = random_gpt2().to(dtype)
    theirs.save_pretrained(tmp_path)
    ours, _ = load_folder(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    same_logits(ours, theirs.float(), IDS)


def test_weights_load_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model = make_model()
    save(weights_of(model), tmp_path, dtype="bfloat16")
    ours, _ = load_folder(tmp_path, "bfloat16")
    expected = model.state_dict()
    for name, p in ours.state_dict().items():
        assert torch.equal(p, expected[name].bfloat16())


def test_a_bare_gpt2_model_without_prefix_loads(tmp_path: Path) -> None:
    theirs = random_gpt2()
    GPT2Model.save_pretrained(theirs.transformer, tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    same_logits(load_folder(tmp_path)[0], theirs, IDS)


def test_names_and_buffers_of_the_original_gpt2_load(tiny_folder: Path) -> None:
    mask = torch.ones(1, 1, 32, 32).tril()

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        buffers = {"h.0.attn.bias": mask, "h.1.attn.bias": mask.clone(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        return old | buffers

    edit_tensors(tiny_folder, rename)
    assert same_parameters(load_folder(tiny_folder)[0], make_model())


def test_a_tied_head_that_is_stored_as_well_loads(tiny_folder: Path) -> None:
    edit_tensors(tiny_folder, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()})
    assert same_parameters(load_folder(tiny_folder)[0], make_model())


def test_a_model_outlives_its_file(tiny_folder: Path) -> None:
    """A trainer may rewrite the file in place: weights that are views of it would change, or end the process."""
    model, _ = load_folder(tiny_folder)
    path = tiny_folder / "model.safetensors"
    with path.open("r+b") as f:
        f.write(bytes(path.stat().st_size))
    assert same_parameters(model, make_model())


# Configs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,value",
    [
        ("model_type", "mamba"),
        ("model_type", ["gpt2"]),
        ("activation_function", "tanh"),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("quantization_config", {"bits": 4}),
        ("pruned_heads", {"0": [1]}),
        ("n_head", 3),
        ("n_embd", "16"),
        ("n_layer", True),
        ("n_layer", math.nan),
        ("vocab_size", -59),
        ("n_positions", None),
        ("n_inner", [64]),
        ("layer_norm_epsilon", math.nan),
        ("tie_word_embeddings", "yes"),
        ("bos_token_id", -1),
        ("eos_token_id", [1.5]),
    ],
)
def test_a_config_that_asks_for_something_else_names_the_field(tiny_folder: Path, name: str, value: object) -> None:
    edit_config(tiny_folder, **{name: value})
    refuses(lambda: load_folder(tiny_folder), "config.json", name)


def test_a_config_without_model_type_is_refused(tiny_folder: Path) -> None:
    path = tiny_folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "model_type"}))
    refuses(lambda: load_folder(tiny_folder), "model_type")


END_TOKENS: list[tuple[object, tuple[int, ...]]] = [
    (3, (3,)),
    ([5, 4, 5], (5, 4)),
    ([], ()),
    (None, ()),
    (50256, ()),  # GPT2Config's default, outside this vocabulary
    ([50256, 7], (7,)),
]


@pytest.mark.parametrize("value,expected", END_TOKENS)
def test_all_end_tokens_are_kept(tiny_folder: Path, value: object, expected: tuple[int, ...]) -> None:
    edit_config(tiny_folder, eos_token_id=value)
    assert load_folder(tiny_folder)[1].eos_token_ids == expected


@pytest.mark.parametrize(
    "content,expected",
    [({"eos_token_id": [8, 3]}, (8, 3)), ({"eos_token_id": 8}, (8, 3)), ({"eos_token_id": None}, (3,)), ({}, (3,))],
)
def test_generation_config_says_which_tokens_end(tiny_folder: Path, content: object, expected: object) -> None:
    edit_config(tiny_folder, eos_token_id=3)
    (tiny_folder / "generation_config.json").write_text(json.dumps(content))
    assert load_folder(tiny_folder)[1].eos_token_ids == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "a"}', '{"eos_token_id": [-1]}', "[" * 10**6])
def test_a_broken_generation_config_is_named(tiny_folder: Path, content: str) -> None:
    (tiny_folder / "generation_config.json").write_text(content)
    refuses(lambda: load_folder(tiny_folder), "generation_config.json")


@pytest.mark.parametrize("ids", [(), (3,), (3, 5)])
def test_end_tokens_are_saved_and_read_back(tmp_path: Path, ids: tuple[int, ...]) -> None:
    save(make_weights(replace(TINY, eos_token_ids=ids)), tmp_path)
    assert load_folder(tmp_path)[1].eos_token_ids == ids
    theirs = GPT2Config.from_pretrained(tmp_path).eos_token_id
    assert theirs == {0: None, 1: 3, 2: [3, 5]}[len(ids)]


def test_each_end_token_ends_a_sequence(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    free = LLM(str(make_folder(tmp_path / "free"))).generate([[5, 9, 2]], params)[0].outputs[0].token_ids
    for ids in ((free[3], 58), (58, free[3])):
        config = replace(TINY, eos_token_ids=ids)
        out = LLM(str(make_folder(tmp_path / "two", config))).generate([[5, 9, 2]], params)[0].outputs[0]
        assert out.finish_reason == "stop"
        assert out.token_ids == free[: free.index(free[3]) + 1]


def test_weights_of_modelopt_are_named(tiny_folder: Path) -> None:
    (tiny_folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    refuses(lambda: load_folder(tiny_folder), "hf_quant_config.json", "modelopt", "compressed-tensors")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tiny_folder: Path, content: bytes) -> None:
    (tiny_folder / "config.json").write_bytes(content)
    refuses(lambda: load_folder(tiny_folder), "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_larger_than_its_limit_is_not_parsed(tiny_folder: Path, name: str) -> None:
    path = tiny_folder / name
    path.write_text("{}")
    os.truncate(path, 93 << 20)
    refuses(
        lambda: load_folder(tiny_folder), name, f"{93 << 20} bytes", f"limit for a {'gen' if 'gen' in name else ''}"
    )


def test_a_config_that_is_a_pipe_is_refused_at_once(tiny_folder: Path) -> None:
    (tiny_folder / "config.json").unlink()
    os.mkfifo(tiny_folder / "config.json")
    refuses(lambda: load_folder(tiny_folder), "config.json is a pipe")


@pytest.mark.parametrize(
    "content,words",
    [
        ('{"model_type": "gpt2", "n_layer": 1, "n_layer": 2}', "'n_layer' is duplicated"),
        ('{"model_type": "gpt2", "n_layer": ' + "1" * 5000 + "}", "5000 characters"),
        ('{"model_type": "gpt2", "n_layer": ' + "1" * 900 + "}", "n_layer=111"),
        ('{"model_type": "gpt2", "layer_norm_epsilon": NaN}', "layer_norm_epsilon=nan"),
        ('{"model_type": "gpt2", "eos_token_id": Infinity}', "eos_token_id=inf"),
        ('{"model_type": "gpt2", "n_layer": ' + "[" * 900 + "]" * 900 + "}", "n_layer="),
        ('{"model_type": "gpt2", "pruned_heads": ' + '{"a":' * 900 + "1" + "}" * 900 + "}", "pruned_heads="),
        ('{"model_type": "\\u001b[31m\\n"}', r"model_type='\x1b[31m\n'"),
    ],
    ids=lambda v: v[-20:],
)
def test_a_hostile_config_is_one_line(tiny_folder: Path, content: str, words: str) -> None:
    (tiny_folder / "config.json").write_text(content)
    refuses(lambda: load_folder(tiny_folder), "config.json", words)


def test_unknown_fields_are_logged_without_control_characters(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(tiny_folder, **{"a\x1b[31m\nb": 1, "c" * 1000: 2})
    load_folder(tiny_folder)
    (message,) = caplog.messages
    assert message.isprintable()
    assert r"a\x1b[31m\nb" in message
    assert len(message) < 700


@pytest.mark.parametrize(
    "name,value", [("n_layer", 10**9), ("vocab_size", 2**31 - 1), ("n_positions", 2**31 - 1), ("n_inner", 2**31 - 1)]
)
def test_a_config_that_claims_more_than_the_file_holds(tiny_folder: Path, name: str, value: int) -> None:
    """Building the model first would need gigabytes and hours."""
    edit_config(tiny_folder, **{name: value})
    refuses(lambda: load_folder(tiny_folder), str(value))


# Hostile weights -------------------------------------------------------------------------------------


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header in place: what it says and what follows it then disagree."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[end:])


@pytest.mark.parametrize("keep", [0, 8, 100, 0.999], ids=str)
def test_truncated_weights(tiny_folder: Path, keep: float) -> None:
    path = tiny_folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: keep if isinstance(keep, int) else int(len(raw) * keep)])
    refuses(lambda: load_folder(tiny_folder), "model.safetensors")


def test_a_file_that_is_replaced_while_it_is_read(tiny_folder: Path) -> None:
    """Opened anew from tensor to tensor, it would be half of one model and half of another."""
    weights = open_folder(tiny_folder).read()
    assert np.array_equal(next(weights)[1].values, make_model().transformer["wte"].weight.numpy())
    save(make_weights(seed=1), tiny_folder)
    wanted = dict(make_weights().read())
    assert all(np.array_equal(tensor.values, wanted[name].values) for name, tensor in weights)


@pytest.mark.parametrize("size", [0, 100, 2000])
def test_a_file_cut_short_while_it_is_read(tiny_folder: Path, size: int) -> None:
    """Mapped, it would end the process with SIGBUS."""
    weights = open_folder(tiny_folder).read()
    next(weights)
    os.truncate(tiny_folder / "model.safetensors", size)
    refuses(lambda: list(weights), "model.safetensors", "was changed while it was read")


def test_a_file_written_over_while_it_is_read(tiny_folder: Path) -> None:
    path = tiny_folder / "model.safetensors"
    os.utime(path, (0, 0))  # the clock of a file system may stand still for 4 ms
    weights = open_folder(tiny_folder).read()
    next(weights)
    with path.open("r+b") as f:
        f.write(bytes(path.stat().st_size))
    refuses(lambda: list(weights), "model.safetensors", "was changed while it was read")


@pytest.mark.parametrize("size", [2**20, 2**64 - 1])
def test_a_header_longer_than_the_file(tiny_folder: Path, size: int) -> None:
    path = tiny_folder / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    refuses(lambda: load_folder(tiny_folder), "model.safetensors")


@pytest.mark.parametrize("header", [b"{" * 64, b"\xff" * 64, b"[]", b"null", b'{"a":{"dtype":"F32"}}', b'{"a\nb":1}'])
def test_a_header_of_garbage(tiny_folder: Path, header: bytes) -> None:
    (tiny_folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    refuses(lambda: load_folder(tiny_folder), "model.safetensors")


def test_a_header_of_many_tensors_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_TENSORS", 3)
    refuses(lambda: load_folder(tiny_folder), "model.safetensors", " tensors; the limit is 3")


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 2**40]},
        {"data_offsets": [64, 0]},
        {"data_offsets": [-1, 3]},
        {"shape": [2**31, 2**31, 2**31]},
        {"shape": [-59, -16]},
        {"shape": [59, 17]},
        {"dtype": "F64"},
        {"dtype": "X\nY"},
    ],
    ids=str,
)
def test_a_header_that_lies_about_a_tensor(tiny_folder: Path, entry: dict[str, Any]) -> None:
    edit_header(tiny_folder, lambda header: header["transformer.wte.weight"].update(entry))
    refuses(lambda: load_folder(tiny_folder), "model.safetensors")


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {k: t for k, t in tensors.items() if k != name}


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: tensor}


@pytest.mark.parametrize(
    "change,words",
    [
        (without("transformer.wte.weight"), ["wte.weight", "missing"]),
        (without("transformer.h.1.mlp.c_fc.bias"), ["h.1.mlp.c_fc.bias", "missing"]),
        (lambda tensors: {}, ["n_layer=2", "0 layers"]),
        (with_tensor("transformer.wpe.weight", torch.zeros(31, 16)), ["wpe.weight", "[31, 16]", "[32, 16]"]),
        (with_tensor("transformer.ln_f.bias", torch.zeros(1, 16)), ["ln_f.bias", "[1, 16]"]),
        (with_tensor("transformer.ln_f.bias", torch.tensor(0.0)), ["ln_f.bias", "[]"]),
        # Conv1D is stored (in, out): a linear layer's (out, in) is the wrong way round.
        (with_tensor("transformer.h.0.attn.c_attn.weight", torch.zeros(48, 16)), ["c_attn.weight", "[16, 48]"]),
        (with_tensor("transformer.h.2.ln_1.bias", torch.zeros(16)), ["n_layer=2", "3 layers"]),
        (with_tensor(f"transformer.h.{'9' * 5000}.ln_1.bias", torch.zeros(16)), ["not part of the model"]),
        (with_tensor("score.weight", torch.zeros(2)), ["score.weight", "not part of the model"]),
        (with_tensor("a\nb", torch.zeros(2)), ["not part of the model"]),
        (with_tensor("wte.weight", torch.zeros(59, 16)), ["wte.weight", "twice"]),
        (with_tensor("lm_head.weight", torch.zeros(59, 16).to(torch.float8_e4m3fn)), ["lm_head.weight", "float8"]),
        (with_tensor("lm_head.weight", torch.zeros(58, 16)), ["lm_head.weight is [58, 16]", "requires [59, 16]"]),
        (with_tensor("transformer.wte.weight", torch.zeros(59, 16, dtype=torch.int32)), ["wte.weight", "int32"]),
        (with_tensor("transformer.ln_f.weight", torch.zeros(16, dtype=torch.bool)), ["ln_f.weight", "bool"]),
        (with_tensor("transformer.ln_f.weight", torch.zeros(16, dtype=torch.complex64)), ["complex64"]),
        # Eight bits without the scales that belong to them are not the model's weights.
        (with_tensor("transformer.ln_f.weight", torch.zeros(16).to(torch.float8_e4m3fn)), ["float8_e4m3fn"]),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)
def test_tensors_that_are_not_the_model(tiny_folder: Path, change: Callable[..., Any], words: list[str]) -> None:
    edit_tensors(tiny_folder, change)
    refuses(lambda: load_folder(tiny_folder), *words)


# Which files -----------------------------------------------------------------------------------------


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name",
    ["../folder/part.safetensors", "/etc/passwd", "", "missing.safetensors", "a\0b", 7],
    ids=lambda v: repr(v)[:20],
)
def test_an_index_names_only_files_of_its_folder(tiny_folder: Path, name: object) -> None:
    write_index(tiny_folder, {"weight_map": {"wte.weight": "part.safetensors", "wpe.weight": name}})
    refuses(lambda: load_folder(tiny_folder), "index.json")


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": [1]}}], ids=str)
def test_an_index_of_garbage(tiny_folder: Path, content: object) -> None:
    write_index(tiny_folder, content)
    refuses(lambda: load_folder(tiny_folder), "index.json")


def to_pickle(folder: Path, state: object, **options: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin", **options)


def test_a_folder_with_only_a_pickle_loads(tmp_path: Path) -> None:
    theirs = random_gpt2()
    theirs.save_pretrained(tmp_path)
    to_pickle(tmp_path, theirs.state_dict())  # as transformers did before safetensors
    same_logits(load_folder(tmp_path)[0], theirs, IDS)


def test_safetensors_come_before_a_pickle(tiny_folder: Path) -> None:
    (tiny_folder / "pytorch_model.bin").write_bytes(b"broken")
    assert same_parameters(load_folder(tiny_folder)[0], make_model())


def test_a_pickle_of_old_says_what_to_do(tiny_folder: Path) -> None:
    to_pickle(tiny_folder, make_model().state_dict(), _use_new_zipfile_serialization=False)
    refuses(lambda: load_folder(tiny_folder), "pytorch_model.bin", "save it again with PyTorch 1.6 or later")


@pytest.mark.parametrize("state", [[1], {"model": {}}, {"wte.weight": [1]}, torch.zeros(3)], ids=lambda v: repr(v)[:12])
def test_a_pickle_of_something_else(tiny_folder: Path, state: object) -> None:
    to_pickle(tiny_folder, state)
    refuses(lambda: load_folder(tiny_folder), "pytorch_model.bin", "not a dict of names to dense tensors")


def test_an_empty_folder(tmp_path: Path) -> None:
    refuses(lambda: load_folder(tmp_path), "config.json")


def test_a_folder_without_weights_lists_what_it_holds(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    refuses(lambda: load_folder(tiny_folder), "model.safetensors", "config.json, tokenizer.json")


# Saving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_saving_where_no_folder_can_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    refuses(lambda: save(make_weights(), tmp_path / place), "cannot be written")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", ["characters", "byte-level"])
def test_transformers_reads_our_tokenizers(tmp_path: Path, kind: str) -> None:
    texts = ["To be, or not: that is the question?", "  Two  spaces\n\nand lines", "Ends "]
    tokens = char_to_json(CHARS) if kind == "characters" else train_bpe(texts * 3, 300)
    ours = from_json(tokens, "ours")
    save(make_weights(replace(TINY, vocab_size=ours.vocab_size)), tmp_path, tokens)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text


def test_a_failed_save_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refuses(lambda: save(make_weights(), tmp_path), "cannot be written")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "model.safetensors").keys() >= {"transformer.wte.weight"}


def test_saving_again_replaces_the_files(tmp_path: Path) -> None:
    save(make_weights(seed=0), tmp_path)
    save(make_weights(seed=1), tmp_path)
    assert same_parameters(load_folder(tmp_path)[0], make_model(seed=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
