"""nanoGPT's ckpt.pt and meta.pkl: the model that was trained, and no pickle that runs code or ends the process."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import Evil, make_model, refuses
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.load import load_model
from nanoinfer.checkpoints.nanogpt import MAX_META_BYTES, find_meta, load_meta, open_checkpoint
from nanoinfer.config import ModelConfig
from nanoinfer.models.transformer import Transformer
from nanoinfer.tokenizers.tokenizer import decode

CONFIG = ModelConfig(vocab_size=11, block_size=17, n_layer=2, n_head=2, n_embd=8, activation="gelu")
IDS = torch.arange(17)[None] * 5 % 11
META: dict[str, Any] = {
    "vocab_size": 11,
    "itos": dict(enumerate("\n abcdefghi")),
    "stoi": {c: i for i, c in enumerate("\n abcdefghi")},
}


def load_checkpoint(path: Path, dtype: str = "float32") -> tuple[Transformer, ModelConfig, str | None]:
    """Return the model in a checkpoint, its config and the name of its data set."""
    weights, dataset = open_checkpoint(path, dtype)
    return load_gpt(weights), weights.config, dataset


def checkpoint(config: ModelConfig = CONFIG, prefix: str = "", dataset: object = "shakespeare_char") -> dict[str, Any]:
    """What nanoGPT's train.py saves: a tied head stored twice, AdamW's state, and the run's globals."""
    model = make_model(config)
    trained = make_model(config).requires_grad_()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, betas=(0.9, 0.95))
    trained(IDS).sum().backward()
    optimizer.step()
    return {
        "model": OrderedDict((prefix + name, p) for name, p in model.state_dict().items()),
        "optimizer": optimizer.state_dict(),
        "model_args": {
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "block_size": config.block_size,
            "bias": config.bias,
            "vocab_size": config.vocab_size,
            "dropout": 0.0,
        },
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "dataset": dataset, "learning_rate": 1e-3, "compile": True, "dtype": "bfloat16"},
    }


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def write_meta(path: Path, meta: object = META) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(meta))
    return path


# Parity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_logits_are_those_of_the_trained_model(tmp_path: Path, prefix: str, bias: bool) -> None:
    config = replace(CONFIG, bias=bias)
    model, found, dataset = load_checkpoint(write(tmp_path / "ckpt.pt", checkpoint(config, prefix)))
    assert torch.equal(model(IDS), make_model(config)(IDS))
    assert (found, dataset) == (config, "shakespeare_char")


def test_the_gelu_is_the_exact_one(tmp_path: Path) -> None:
    model, _, _ = load_checkpoint(write(tmp_path / "ckpt.pt", checkpoint()))
    tanh = make_model(replace(CONFIG, activation="gelu_new"))
    assert 1e-5 < (model(IDS) - tanh(IDS)).abs().max() < 1e-1


def test_the_padded_gpt2_vocabulary(tmp_path: Path) -> None:
    config = replace(CONFIG, vocab_size=50304, n_layer=1, bos_token_id=50256, eos_token_ids=(50256,))
    model, found, _ = load_checkpoint(write(tmp_path / "ckpt.pt", checkpoint(config)))
    assert found == config
    idx = torch.tensor([[0, 50256, 50303]])
    assert torch.equal(model(idx), make_model(config)(idx))


def test_old_checkpoints_without_bias_field_and_with_masks(tmp_path: Path) -> None:
    content = checkpoint()
    del content["model_args"]["bias"]
    content["model"]["transformer.h.0.attn.bias"] = torch.ones(1, 1, 17, 17).tril()
    model, config, _ = load_checkpoint(write(tmp_path / "ckpt.pt", content))
    assert config.bias
    assert torch.equal(model(IDS), make_model(CONFIG)(IDS))


def test_weights_load_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model, _, _ = load_checkpoint(write(tmp_path / "ckpt.pt", checkpoint()), "bfloat16")
    expected = make_model(CONFIG).state_dict()
    for name, p in model.state_dict().items():
        assert torch.equal(p, expected[name].bfloat16())


def test_a_model_outlives_its_file(tmp_path: Path) -> None:
    """nanoGPT writes its next checkpoint over the last one while somebody generates from it."""
    path = write(tmp_path / "ckpt.pt", checkpoint())
    model, _, _ = load_checkpoint(path)
    with path.open("r+b") as f:
        f.write(bytes(path.stat().st_size))
    assert torch.equal(model(IDS), make_model(CONFIG)(IDS))


# Hostile ckpt.pt -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["raw", "model", "config"])
def test_a_checkpoint_runs_no_code(tmp_path: Path, where: str) -> None:
    """PyTorch refuses it, which is one line here."""
    path, evil = tmp_path / "ckpt.pt", Evil(tmp_path / "marker")
    if where == "raw":
        path.write_bytes(pickle.dumps(evil))
    else:
        torch.save(checkpoint() | {where: evil}, path)
    refuses(lambda: load_checkpoint(path), "ckpt.pt cannot be read", "system" if where != "raw" else "")
    assert not (tmp_path / "marker").exists()
    assert pickle.loads(pickle.dumps(evil)) == 0
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_truncated_checkpoints(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "ckpt.pt", checkpoint())
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    refuses(lambda: load_checkpoint(path), "ckpt.pt")


@pytest.mark.parametrize(
    "content",
    [[1, 2], 3, None, torch.zeros(3), {}, {"model": {}}, {"a\nb": 1}, {"model_args": {}}],
    ids=lambda v: repr(v)[:20],
)
def test_a_checkpoint_of_something_else(tmp_path: Path, content: object) -> None:
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), "not a nanoGPT checkpoint")


@pytest.mark.parametrize(
    "name,value",
    [
        ("n_layer", 10**9),
        ("n_layer", "2"),
        ("n_head", 3),
        ("n_embd", float("nan")),
        ("block_size", -17),
        ("vocab_size", torch.zeros(200)),
        ("bias", "yes"),
        ("bias", torch.zeros(3, 3)),
        ("n_kv_head", 2),
        ("a\nb", 2),
    ],
    ids=lambda v: repr(v)[:16],
)
def test_model_args_that_are_refused(tmp_path: Path, name: str, value: object) -> None:
    content = checkpoint()
    content["model_args"][name] = value
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), "ckpt.pt", repr(name)[1:-1])


@pytest.mark.parametrize("name,tensor", [("block_size", "wpe"), ("vocab_size", "wte")])
def test_model_args_that_claim_more_than_the_file_holds(tmp_path: Path, name: str, tensor: str) -> None:
    content = checkpoint()
    content["model_args"][name] = 2**31 - 1
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), tensor, str(2**31 - 1))


@pytest.mark.parametrize("args", [None, [], {}, {"n_layer": torch.zeros(3, 3)}], ids=lambda v: repr(v)[:12])
def test_model_args_that_are_incomplete(tmp_path: Path, args: object) -> None:
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", checkpoint() | {"model_args": args})), "model_args")


WPE = "transformer.wpe.weight"


@pytest.mark.parametrize(
    "name,tensor",
    [
        (WPE, torch.zeros(16, 8)),
        (WPE, torch.zeros(17, 8, dtype=torch.int64)),
        (WPE, torch.zeros(17, 8).to_sparse()),
        (WPE, torch.zeros(17, 8, device="meta")),
        (WPE, "zeros"),
        ("transformer.h.0.attn.c_attn.weight", torch.zeros(8, 24)),  # not Conv1D: (out, in)
        ("transformer.h.2.ln_1.weight", torch.zeros(8)),
        ("_orig_mod." + WPE, torch.zeros(17, 8)),
        ("lm_head.weight", torch.zeros(1).expand(2**31 - 1, 8)),  # the one that may share its bytes
        ("lm_head.weight", torch.zeros(12, 8)),
        ("a\nb", torch.zeros(8)),
        (5, torch.zeros(8)),
    ],
    ids=lambda v: repr(v)[:24],
)
def test_tensors_that_are_not_the_model(tmp_path: Path, name: object, tensor: object) -> None:
    content = checkpoint()
    content["model"][name] = tensor
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), "ckpt.pt")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    content = checkpoint()
    del content["model"]["transformer.ln_f.weight"]
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), "transformer.ln_f.weight", "missing")


def test_a_tensor_that_repeats_one_number_claims_no_memory(tmp_path: Path) -> None:
    """Strides of 0 make 64 GB of four bytes: a copy would allocate them."""
    content = checkpoint()
    content["model_args"]["vocab_size"] = 2**31 - 1
    content["model"]["transformer.wte.weight"] = torch.zeros(1).expand(2**31 - 1, 8)
    del content["model"]["lm_head.weight"]
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), "ckpt.pt", "bytes")


def test_tensors_that_share_their_bytes_claim_no_memory(tmp_path: Path) -> None:
    content = checkpoint() | {"optimizer": {}}
    content["model_args"]["n_layer"] = 1000
    layer = {n[len("transformer.h.0") :]: t for n, t in content["model"].items() if n.startswith("transformer.h.0.")}
    layer[".mlp.c_fc.weight"] = torch.zeros(1).expand(32, 8)
    content["model"] |= {f"transformer.h.{i}{n}": t for i in range(1000) for n, t in layer.items()}
    refuses(lambda: load_checkpoint(write(tmp_path / "ckpt.pt", content)), "bytes")


def test_compressed_records_are_not_mapped(tmp_path: Path) -> None:
    """Mapped, they would be garbage in silence."""
    write(tmp_path / "whole.pt", checkpoint())
    with zipfile.ZipFile(tmp_path / "whole.pt") as old, zipfile.ZipFile(tmp_path / "ckpt.pt", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert torch.equal(load_checkpoint(tmp_path / "ckpt.pt")[0](IDS), make_model(CONFIG)(IDS))


def test_tensors_of_any_layout(tmp_path: Path) -> None:
    """Transposed, and parts of a larger storage: torch.save keeps strides and offsets."""
    content = checkpoint()
    content["model"] = {
        name: torch.cat([torch.ones(1, *t.shape[1:]), t]).t().contiguous().t()[1:] if t.dim() == 2 else t
        for name, t in content["model"].items()
    }
    assert not content["model"][WPE].is_contiguous()
    content["model"]["lm_head.weight"] = content["model"]["transformer.wte.weight"].clone()
    model, _, _ = load_checkpoint(write(tmp_path / "ckpt.pt", content))
    expected = dict(make_model(CONFIG).named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


# meta.pkl --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_meta_pkl_of_any_protocol(tmp_path: Path, protocol: int) -> None:
    chars = sorted({*map(chr, range(32, 600)), "\n", "日", "🎉"})
    meta = {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {c: i for i, c in enumerate(chars)},
        "notes": [True, False, None, 1 << 40, -1],
    }
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    tokenizer = load_meta(tmp_path / "meta.pkl")
    assert tokenizer.vocab_size == len(chars)
    assert tokenizer.encode("a🎉\n") == [chars.index("a"), chars.index("🎉"), chars.index("\n")]
    assert decode(tokenizer, tokenizer.encode("Wörld, 日!")) == "Wörld, 日!"


def test_a_meta_pkl_runs_no_code(tmp_path: Path) -> None:
    write_meta(tmp_path / "meta.pkl", META | {"x": Evil(tmp_path / "marker")})
    refuses(lambda: load_meta(tmp_path / "meta.pkl"), "meta.pkl", "system")
    assert not (tmp_path / "marker").exists()


PROTO = b"\x80\x05"


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps(META | {"x": Fraction(1, 2)}),
        pickle.dumps(OrderedDict(META)),
        pickle.dumps(META)[:40],
        b"",
        b"garbage",
        PROTO + b"}r\xff\xff\xff\xff.",  # LONG_BINPUT: a memo of 2**32 entries
        PROTO + b"\x96" + (2**62).to_bytes(8, "little") + b".",  # BYTEARRAY8: a buffer of 2**62 bytes
        PROTO + b"\x82\x01.",  # EXT1: an object registered by number
        PROTO + b"K\x01Q.",  # a persistent object
    ],
    ids=lambda v: repr(v[:16]),
)
def test_hostile_meta_pkl(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "meta.pkl").write_bytes(raw)
    refuses(lambda: load_meta(tmp_path / "meta.pkl"), "meta.pkl")


@pytest.mark.parametrize(
    "meta",
    [
        "stoi",
        {},
        {"stoi": 3, "itos": {0: "a"}},
        {"stoi": {"a": 0}, "itos": {0: "b"}},
        {"stoi": {"a": 0, "b": 0}, "itos": {0: "a"}},
        {"stoi": {"a": 0, "b": 1}, "itos": {0: "a", 1: "a"}},
        {"stoi": {"": 0}, "itos": {0: ""}},
        {"stoi": {1: 0}, "itos": {0: 1}},
        {"stoi": {"\ud800": 0}, "itos": {0: "\ud800"}},  # no text can hold it, no terminal can print it
        {"stoi": {}, "itos": {}},
    ],
    ids=repr,
)
def test_a_meta_pkl_that_is_no_vocabulary(tmp_path: Path, meta: object) -> None:
    refuses(lambda: load_meta(write_meta(tmp_path / "meta.pkl", meta)), "meta.pkl")


def test_a_meta_pkl_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = write_meta(tmp_path / "meta.pkl")
    os.truncate(path, MAX_META_BYTES + 1)
    refuses(lambda: load_meta(path), str(MAX_META_BYTES + 1), str(MAX_META_BYTES))


# Where the tokenizer is found ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["out/meta.pkl", "data/shakespeare_char/meta.pkl"])
def test_the_tokenizer_is_found(tmp_path: Path, place: str) -> None:
    write_meta(tmp_path / place)
    loaded = load_model(str(write(tmp_path / "out" / "ckpt.pt", checkpoint())))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("bad\n") == [3, 2, 5, 0]
    assert torch.equal(loaded.gpt(IDS), make_model(CONFIG)(IDS))


def test_a_relative_path_finds_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_meta(tmp_path / "data" / "shakespeare_char" / "meta.pkl")
    write(tmp_path / "out" / "ckpt.pt", checkpoint())
    monkeypatch.chdir(tmp_path / "out")
    assert load_model("ckpt.pt").tokenizer is not None


def test_the_tokenizer_beside_the_checkpoint_comes_first(tmp_path: Path) -> None:
    beside = write_meta(tmp_path / "out" / "meta.pkl")
    write_meta(tmp_path / "data" / "shakespeare_char" / "meta.pkl")
    assert find_meta(tmp_path / "out" / "ckpt.pt", "shakespeare_char") == beside


@pytest.mark.parametrize("dataset", ["../../x", "..", "x/../../x", "", "/x", None, 3], ids=repr)
def test_a_data_set_name_does_not_lead_elsewhere(tmp_path: Path, dataset: object) -> None:
    for place in ("x", "run/x", "run", "run/data", "run/data/3"):
        write_meta(tmp_path / place / "meta.pkl")
    loaded = load_model(str(write(tmp_path / "run" / "out" / "ckpt.pt", checkpoint(dataset=dataset))))
    assert loaded.tokenizer is None
    assert "no tokenizer" in loaded.no_tokenizer_reason


def test_a_broken_meta_pkl_leaves_the_model_usable(tmp_path: Path) -> None:
    path = write(tmp_path / "ckpt.pt", checkpoint())
    (tmp_path / "meta.pkl").write_bytes(b"garbage")
    loaded = load_model(str(path))
    assert loaded.tokenizer is None
    assert "meta.pkl" in loaded.no_tokenizer_reason
    assert torch.equal(loaded.gpt(IDS), make_model(CONFIG)(IDS))


def test_a_meta_pkl_of_another_model_is_refused(tmp_path: Path) -> None:
    chars = [chr(97 + i) for i in range(12)]
    write_meta(tmp_path / "meta.pkl", {"stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))})
    path = write(tmp_path / "ckpt.pt", checkpoint())
    refuses(lambda: load_model(str(path)), "12", "11", "use the tokenizer that the model was trained with")
