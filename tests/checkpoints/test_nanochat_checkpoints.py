"""nanochat's own checkpoints: model_000650.pt, meta_000650.json, and tokenizer.pkl of tiktoken."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch
import torch.nn.functional as F

from helpers.models import Evil, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.huggingface import save
from nanoinfer.checkpoints.load import find_nanochat, load_model, load_tokenizer
from nanoinfer.checkpoints.nanogpt import MAX_TOKENIZER_BYTES
from nanoinfer.roofline.formats import find_shape
from nanoinfer.tokenizers.tokenizer import Tokenizer, decode, to_json

SPECIAL = [
    "<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|python_start|>",
    "<|python_end|>", "<|output_start|>", "<|output_end|>",
]  # fmt: skip
WORDS = [*b"th the in ing an and 12 's er".split(), b" the", b" and", b"  ", b"\n\n", "é".encode()]
RANKS = {token: i for i, token in enumerate([bytes([i]) for i in range(256)] + WORDS)}
VOCAB = len(RANKS) + len(SPECIAL)
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
CONFIG = {"sequence_len": 40, "vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 24}


def encoding(**changes: Any) -> tiktoken.Encoding:
    """The tokenizer that nanochat pickles."""
    special = {name: len(RANKS) + i for i, name in enumerate(SPECIAL)}
    fields: dict[str, Any] = {"pat_str": PATTERN, "mergeable_ranks": RANKS, "special_tokens": special}
    return tiktoken.Encoding("rustbpe", **(fields | changes))


def state(config: dict[str, Any] = CONFIG, rows: int = VOCAB, prefix: str = "") -> dict[str, torch.Tensor]:
    """What nanochat saves: the embedding in bfloat16, no norms."""
    generator = torch.Generator().manual_seed(1)
    c, kv = config["n_embd"], config["n_kv_head"] * config["n_embd"] // config["n_head"]
    found = {"transformer.wte.weight": (rows, c), "lm_head.weight": (rows, c)}
    for i in range(config["n_layer"]):
        layer = f"transformer.h.{i}."
        found |= {f"{layer}attn.{n}.weight": (m, c) for n, m in (("c_q", c), ("c_k", kv), ("c_v", kv), ("c_proj", c))}
        found |= {f"{layer}mlp.c_fc.weight": (4 * c, c), f"{layer}mlp.c_proj.weight": (c, 4 * c)}
    made = {prefix + name: 0.5 * torch.randn(shape, generator=generator) for name, shape in found.items()}
    wte = prefix + "transformer.wte.weight"
    return made | {wte: made[wte].bfloat16()}


def logits(weights: dict[str, torch.Tensor], ids: list[int], config: dict[str, Any] = CONFIG) -> torch.Tensor:
    """nanochat's forward pass, written from its gpt.py, with the sines in float32."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    n_head, groups = config["n_head"], config["n_head"] // config["n_kv_head"]
    half = config["n_embd"] // n_head // 2
    angles = torch.arange(len(ids))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ weights[name].T).view(len(ids), -1, 2 * half).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., :half], x[..., half:]
        return norm(torch.cat((a * cos + b * sin, b * cos - a * sin), -1))

    x = norm(weights["transformer.wte.weight"].float()[ids])
    for i in range(config["n_layer"]):
        layer, y = f"transformer.h.{i}.", norm(x)
        q, k, v = (heads(y, f"{layer}attn.c_{n}.weight") for n in "qkv")
        k, v = (z.repeat_interleave(groups, 0) for z in (turned(k), v))
        y = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True).transpose(0, 1).reshape(len(ids), -1)
        x = x + y @ weights[f"{layer}attn.c_proj.weight"].T
        y = (norm(x) @ weights[f"{layer}mlp.c_fc.weight"].T).relu().square()
        x = x + y @ weights[f"{layer}mlp.c_proj.weight"].T
    return 15 * torch.tanh(norm(x) @ weights["lm_head.weight"].T / 15)[:, : config["vocab_size"]]


def write(
    folder: Path, weights: dict[str, Any] | None = None, step: int = 650, tokenizer: object = None, **changes: Any
) -> Path:
    """A folder of nanochat's; changes are of model_config."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state() if weights is None else weights, folder / f"model_{step:06d}.pt")
    meta = {"step": step, "val_bpb": 0.8, "model_config": CONFIG | changes, "user_config": {"depth": 20}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta, indent=2))
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding() if tokenizer is None else tokenizer))
    return folder


IDS = [VOCAB - 9, 3, 17, 200, 260, 5, 5, 269, 100, 31, 1]


@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
@pytest.mark.parametrize("rows", [VOCAB, 320], ids=["exact", "padded"])
def test_logits_are_those_of_nanochat(tmp_path: Path, prefix: str, rows: int) -> None:
    loaded = load_model(str(write(tmp_path, state(rows=rows, prefix=prefix)) / "model_000650.pt"))
    expected = logits(state(rows=rows), IDS)
    assert expected.std() > 1
    assert torch.allclose(loaded.gpt(torch.tensor([IDS]))[0], expected, atol=1e-4)
    assert (loaded.config.vocab_size, loaded.config.block_size, loaded.config.n_kv_head) == (VOCAB, 40, 2)
    assert (loaded.config.bos_token_id, loaded.config.eos_token_ids) == (VOCAB - 9, (VOCAB - 5, VOCAB - 9))
    assert loaded.weights.stored_dtype == "float32"


@pytest.mark.parametrize("engine", ["recompute", "static", "paged", "native"])
def test_a_folder_runs_on_every_engine(tmp_path: Path, engine: str) -> None:
    if engine == "native":
        pytest.importorskip("nanoinfer._native")
    llm = LLM(str(write(tmp_path)), engine=engine, dtype="float32", device="cpu", max_num_seqs=2)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (out,) = llm.generate("the thing", params)
    assert out.prompt_token_ids == [VOCAB - 9, *encoding().encode_ordinary("the thing")]  # as nanochat: <|bos|> first
    ids = list(out.prompt_token_ids)
    for _ in range(12):
        ids.append(int(logits(state(), ids)[-1].argmax()))
    assert out.outputs[0].token_ids == ids[-12:]


def as_transformers(folder: Path, to: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.tokenizer is not None
    save(loaded.weights, to, to_json(loaded.tokenizer))


def test_a_saved_model_is_one_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    as_transformers(write(tmp_path / "a"), tmp_path / "b")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(theirs(torch.tensor([IDS])).logits[0], logits(state(), IDS), atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b")("the 1234")["input_ids"] == [
        VOCAB - 9, *encoding().encode_ordinary("the 1234"),
    ]  # fmt: skip


def test_the_last_step_of_a_folder_is_taken(tmp_path: Path) -> None:
    for step in (650, 70, 1000000):
        write(tmp_path, step=step)
    (tmp_path / "model_9999999_rank0.pt").write_bytes(b"")
    assert find_nanochat(tmp_path) == tmp_path / "model_1000000.pt"
    assert find_nanochat(tmp_path / "model_000070.pt") == tmp_path / "model_000070.pt"
    assert find_nanochat(tmp_path / "optim_000070.pt") is None
    assert find_shape(str(tmp_path)).n_kv_head == 2
    (tmp_path / "config.json").write_text("{}")  # a folder of transformers that also has nanochat's files
    assert find_nanochat(tmp_path) is None


# What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"window_pattern": "SSSL"}, ("window_pattern='SSSL'", "not supported")),
        ({"n_experts": 4}, ("n_experts", "later version")),
        ({"n_layer": None}, ("n_layer", "missing")),
        ({"n_head": 5}, ("n_head",)),
        ({"sequence_len": 0}, ("sequence_len",)),
        ({"vocab_size": 2**31 - 1}, ("transformer.wte.weight", str(2**31 - 1))),
    ],
    ids=repr,
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refuses(lambda: load_model(str(write(tmp_path, **changes))), "_000650.", *words)


@pytest.mark.parametrize("meta", [None, b"[]", b"{}", b'{"model_config": 3}', b"garbage"], ids=repr)
def test_a_checkpoint_without_its_config(tmp_path: Path, meta: bytes | None) -> None:
    path = write(tmp_path) / "meta_000650.json"
    path.unlink() if meta is None else path.write_bytes(meta)
    refuses(lambda: load_model(str(tmp_path)), "meta_000650.json")


@pytest.mark.parametrize("name", ["resid_lambdas", "x0_lambdas", "value_embeds.1.weight", "smear_gate.weight"])
def test_tensors_of_later_versions_are_named(tmp_path: Path, name: str) -> None:
    refuses(lambda: load_model(str(write(tmp_path, state() | {name: torch.ones(2)}))), name, "not part of the model")


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": Evil(tmp_path / "marker")})
    refuses(lambda: load_model(str(folder)), "system")
    assert not (tmp_path / "marker").exists()


# tokenizer.pkl ---------------------------------------------------------------------------------------

AWKWARD = [
    "", " ", "\n\n \n", "the thing and  the\tother's 1234567 it'LL 12", "naïve é 東京 🙂 e\u0301", "  leading   runs  ",
    "def f(x):\r\n    return x**2 # ...!?\n\n\n", "\x00\x7f\u3000\u200b", "a" * 300, "thethethe   !!!\n\nand",
]  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(str(write(tmp_path) / "tokenizer.pkl"))


@pytest.mark.parametrize("text", AWKWARD)
def test_token_ids_are_those_of_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == encoding().encode_ordinary(text)
    assert decode(tokenizer, ids) == text


def test_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (VOCAB, VOCAB - 9)
    assert tokenizer.encode("".join(SPECIAL)) == list(range(VOCAB - 9, VOCAB))


@pytest.mark.parametrize("protocol", [3, pickle.HIGHEST_PROTOCOL])
def test_any_protocol_of_pickle_with_bytes(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding(), protocol))
    assert load_tokenizer(str(tmp_path / "tokenizer.pkl")).encode("the") == [RANKS[b"the"]]


def test_the_tokenizer_is_found_where_nanochat_keeps_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "base_checkpoints" / "d20")
    (tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer.pkl").rename(tmp_path / "tokenizer" / "tokenizer.pkl")
    loaded = load_model(str(folder))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.vocab_size == VOCAB
    (tmp_path / "tokenizer" / "tokenizer.pkl").unlink()
    loaded = load_model(str(folder))
    assert "tokenizer.pkl" in loaded.no_tokenizer_reason
    assert loaded.config.eos_token_ids == ()


def test_a_tokenizer_json_beside_the_checkpoint(tmp_path: Path) -> None:
    as_transformers(write(tmp_path / "a"), tmp_path / "b")
    folder = write(tmp_path / "c")
    (folder / "tokenizer.pkl").unlink()
    (tmp_path / "b" / "tokenizer.json").rename(folder / "tokenizer.json")
    loaded = load_model(str(folder))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("the 12") == encoding().encode_ordinary("the 12")
    assert loaded.config.eos_token_ids == (VOCAB - 5, VOCAB - 9)


class Other:
    """A pickled object of another class, or with another state."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        pickle.dumps("cl100k_base"),  # how tiktoken pickles its own encodings: they are on the network
        pickle.dumps(Other(os.system, "touch marker")),
        pickle.dumps(encoding())[:-100],
        b"\x80\x04ctiktoken.core\nEncoding\n.",  # the class itself
        b"\x80\x04ctiktoken.core\nEncoding\n}(\x8c\x05statejub.",  # BUILD on the class
        b"\x80\x04ctiktoken.core\nEncoding\nK\x01\x85\x81.",  # with an argument
        b"\x80\x04ctiktoken.core\nEncoding\n)\x81K\x01b.",  # a state that is a number
        b"\x80\x04ctiktoken.core\nEncoding\n)\x81.",  # no state
    ],
    ids=lambda v: repr(v[:24]),
)
def test_hostile_tokenizers(tmp_path: Path, raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.pkl").write_bytes(raw)
    refuses(lambda: load_tokenizer("tokenizer.pkl"), "tokenizer.pkl is not a tokenizer of tiktoken")
    assert not (tmp_path / "marker").exists()


def pickled(**changes: Any) -> bytes:
    """An Encoding with any state, which tiktoken itself would refuse."""
    made = encoding()
    made.__class__ = type("Encoding", (tiktoken.Encoding,), {"__getstate__": lambda self: fields})
    made.__class__.__module__, made.__class__.__qualname__ = "tiktoken.core", "Encoding"
    special = {name: len(RANKS) + i for i, name in enumerate(SPECIAL)}
    fields = {"name": "a", "pat_str": PATTERN, "mergeable_ranks": RANKS, "special_tokens": special} | changes
    tiktoken.core.Encoding, original = made.__class__, tiktoken.core.Encoding
    try:
        return pickle.dumps(made)
    finally:
        tiktoken.core.Encoding = original


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"mergeable_ranks": {}}, "not a tokenizer"),
        ({"mergeable_ranks": RANKS | {b"xy": 5000}}, "without gaps"),
        ({"mergeable_ranks": RANKS | {"xy": 270}}, "without gaps"),
        ({"mergeable_ranks": RANKS | {b"xy": 2**70}}, "without gaps"),
        ({"mergeable_ranks": {t: i for i, t in enumerate([*WORDS, *map(bytes, [[x] for x in range(200)])])}}, "gaps"),
        ({"mergeable_ranks": {t: i for i, t in enumerate(WORDS)}, "special_tokens": {}}, "no token for the byte 0"),
        ({"mergeable_ranks": RANKS | {b"x" * 40_000: len(RANKS)}, "special_tokens": {}}, "too long"),
        ({"special_tokens": {"<|bos|>": 3}}, "without gaps"),
        ({"special_tokens": {"a": len(RANKS)}}, "also a token of text"),
        ({"pat_str": r"(a+)+b"}, "pat_str='(a+)+b' is not supported"),
        ({"pat_str": 3}, "pat_str"),
    ],
    ids=lambda v: repr(v)[:60],
)
def test_states_that_are_no_tokenizer(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(pickled(**changes))
    refuses(lambda: load_tokenizer(str(tmp_path / "tokenizer.pkl")), "tokenizer.pkl", words)


def test_a_tokenizer_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path) / "tokenizer.pkl"
    os.truncate(path, MAX_TOKENIZER_BYTES + 1)
    refuses(lambda: load_tokenizer(str(path)), str(MAX_TOKENIZER_BYTES))


# Chat ------------------------------------------------------------------------------------------------

USER, ANSWER = {"role": "user", "content": "the thing"}, {"role": "assistant", "content": "and 12"}


@pytest.mark.parametrize("system", [False, True], ids=["plain", "system"])
def test_a_conversation_has_the_tokens_of_nanochat(tmp_path: Path, system: bool) -> None:
    llm = LLM(str(write(tmp_path)), engine="static", device="cpu")
    text = encoding().encode_ordinary
    bos, user, user_end, assistant, end = range(VOCAB - 9, VOCAB - 4)
    before = [{"role": "system", "content": "in"}] if system else []
    found = llm.apply_chat_template([*before, USER, ANSWER, USER])
    first = text("in\n\nthe thing" if system else "the thing")
    expected = [bos, user, *first, user_end, assistant, *text("and 12"), end, user, *text("the thing"), user_end]
    assert found == [*expected, assistant]
    assert llm.chat([USER], SamplingParams(max_tokens=2))[0].prompt_token_ids[-1] == assistant


def test_roles_alternate(tmp_path: Path) -> None:
    llm = LLM(str(write(tmp_path)), engine="static", device="cpu")
    refuses(lambda: llm.apply_chat_template([ANSWER]), "roles must be user, assistant")
    both = {"role": "user", "content": "the thing\n\nthe thing"}
    assert llm.apply_chat_template([USER, USER]) == llm.apply_chat_template([both])
