"""Load the files of nanoGPT and of nanochat.

    nanoGPT     `ckpt.pt` (weights and config), `meta.pkl` (a character-level vocabulary)
    nanochat    `model_000650.pt` (weights), `meta_000650.json` (config), `tokenizer.pkl`

Pickles are untrusted, and none executes code (torch_file.py): PyTorch reads the weights.

Covered of nanochat: versions of October 2025 to January 2026. An error names what later versions add (`resid_lambdas`,
`x0_lambdas`, value embeddings). Source: github.com/karpathy/nanochat at 3a5e0bc, nanochat/checkpoint_manager.py, gpt.py
and tokenizer.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoinfer.checkpoints.torch_file import PlainUnpickler, read_checkpoint, stored_tensors
from nanoinfer.checkpoints.weights import Weights, check
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped, reason
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import StoredTensor
from nanoinfer.tokenizers.tokenizer import CharTokenizer, Tokenizer, explained, from_core, in_order, ranked, surround
from nanoinfer.utils.files import read_limited, read_object

MAX_META_BYTES = 4 << 20  # nanoGPT's Shakespeare meta.pkl has 700 bytes


def open_checkpoint(path: Path, dtype: str = "float32") -> tuple[Weights, str | None]:
    """Return the checked weights of a nanoGPT `ckpt.pt`, and the name of the data set it was trained on.

    The file stays open as long as the weights exist, and tensors are read one at a time.

    Args:
        path: the file.
        dtype: dtype to compute in.

    Raises:
        NanoinferError: the file is malformed, is not a nanoGPT checkpoint, or contains anything but plain data.
    """
    checkpoint, where = read_checkpoint(path), escaped(path)
    if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
        keys = list(checkpoint)[:6] if isinstance(checkpoint, dict) else []
        has = ", ".join(f"{str(k)!r:.40}" for k in keys) or f"a {type(checkpoint).__name__}"
        raise NanoinferError(f"{where} is not a nanoGPT checkpoint: it must have model and model_args, but has {has}")
    config = _config(checkpoint["model_args"], where)
    weights = check(config, _state(checkpoint["model"], path, ": model"), where, dtype, _LAYOUT)
    data = checkpoint.get("config")
    dataset = data.get("dataset") if isinstance(data, dict) else None
    return weights, dataset if isinstance(dataset, str) else None


def _state(state_dict: Any, path: Path, what: str = "") -> dict[str, StoredTensor]:
    """Return the checked tensors under their names in a model that is not compiled."""
    tensors = stored_tensors(state_dict, path, what)
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    if len(state) != len(tensors):
        raise NanoinferError(
            f"{escaped(path)} has tensors both with and without the prefix _orig_mod.: keep one of each"
        )
    return state


_LAYOUT = replace(FAMILIES["gpt2"], transposed=frozenset())
"""nanoGPT stores linear layers as (out, in)."""


def _config(args: Any, where: str) -> ModelConfig:
    """Return the config for a checkpoint's model_args."""
    fields = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    if not isinstance(args, dict):
        raise NanoinferError(f"{where}: model_args is a {type(args).__name__}, not a dict")
    if missing := [name for name in fields if args.get(name) is None]:
        raise NanoinferError(f"{where}: model_args must have {', '.join(fields)}; missing: {', '.join(missing)}")
    if unknown := sorted(f"{str(k)!r:.40}" for k in args.keys() - {*fields, "bias", "dropout"}):
        raise NanoinferError(f"{where}: model_args has {', '.join(unknown)}, which is not supported")
    for name in (*fields, "bias"):
        if not isinstance(args.get(name, True), (int, float, str)):  # a tensor has no truth value and no one-line text
            raise NanoinferError(f"{where}: model_args: {name} is a {type(args[name]).__name__}, not a number")
    eot = (50256,) if args["vocab_size"] in (50257, 50304) else ()
    with about(f"{where}: model_args"):
        return ModelConfig(
            **{name: args[name] for name in fields},
            bias=args.get("bias", True),
            activation="gelu",
            bos_token_id=eot[0] if eot else None,
            eos_token_ids=eot,
        )


def load_meta(path: Path) -> CharTokenizer:
    """Return the character-level tokenizer of a nanoGPT `meta.pkl`.

    Raises:
        NanoinferError: the file is malformed or too large, contains code, or is not a vocabulary of characters.
    """
    raw, where = read_limited(path, MAX_META_BYTES, "a meta.pkl"), escaped(path)
    try:
        meta = PlainUnpickler(raw).load()
        stoi, itos = meta["stoi"], meta["itos"]
        chars = [itos[i] for i in range(len(itos))]
    except Exception as e:  # a hostile pickle can raise any exception
        why = f"{type(e).__name__}: {reason(e)}"
        raise NanoinferError(f"{where} is not a meta.pkl of dicts, lists, strings and integers ({why})") from None
    plain = all(isinstance(c, str) and c for c in chars)
    if not plain or not isinstance(stoi, dict) or stoi != {c: i for i, c in enumerate(chars)}:
        raise NanoinferError(f"{where}: stoi is not the inverse of itos over the ids 0, 1, 2, ...")
    with about(where):
        return CharTokenizer(chars)


def find_meta(checkpoint: Path, dataset: str | None) -> Path | None:
    """Return the meta.pkl of a checkpoint, or None: in its folder, or in the data folder of nanoGPT's source tree.

    nanoGPT stores `out-x/ckpt.pt` and `data/<dataset>/meta.pkl` under one root.
    """
    places = [checkpoint.parent / "meta.pkl"]
    if dataset and re.fullmatch(r"\w[\w.-]*", dataset):
        places.append(checkpoint.resolve().parent.parent / "data" / dataset / "meta.pkl")
    return next((p for p in places if p.is_file()), None)


MAX_CONFIG_BYTES = 1 << 20  # nanochat's meta has 3 KB
MAX_TOKENIZER_BYTES = 8 << 20  # with 65,536 tokens, nanochat's has 0.9 MB
TOKENIZER = "tokenizer.pkl"
_PADDED_TO = 64  # rows of the embedding and of the head, since December 2025

_NANOCHAT = replace(
    FAMILIES["nanochat"],
    fields={
        "sequence_len": "block_size", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
        "n_kv_head": "num_kv_heads", "n_embd": "n_embd",
    },
    names={
        "wte": "transformer.wte", "lm_head": "lm_head", "attn.c_attn": ("attn.c_q", "attn.c_k", "attn.c_v"),
        "attn.c_proj": "attn.c_proj", "mlp.c_fc": "mlp.c_fc", "mlp.c_proj": "mlp.c_proj",
    },
    fixed={
        **FAMILIES["nanochat"].fixed, "activation": "relu2", "logits_softcap": 15.0, "norm_epsilon": 1e-6,
        "tie_word_embeddings": False,
    },
    biases={},
    only={"window_pattern": ("L",)},
    layer="transformer.h.{}.",
)  # fmt: skip

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""How nanochat splits text before BPE."""
_BOS = "<|bos|>"
_ENDS = ("<|assistant_end|>", _BOS)
CHAT_TEMPLATE = """\
{%- set start = 1 if messages[0]['role'] == 'system' else 0 -%}
<|bos|>
{%- for message in messages[start:] -%}
{%- if message['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
{{ raise_exception('roles must be user, assistant, user, ... after an optional system message') }}
{%- endif -%}
{{ '<|' + message['role'] + '_start|>' }}
{{- messages[0]['content'] + '\\n\\n' if start and loop.first else '' }}
{{- message['content'] + '<|' + message['role'] + '_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif -%}
"""
"""The format of nanochat's `render_conversation`: a system message is the beginning of the first user message."""


def open_nanochat(path: Path, dtype: str = "float32") -> Weights:
    """Return the checked weights of a checkpoint. The file stays open as long as they exist.

    Args:
        path: the file `model_<step>.pt`, beside which there is a `meta_<step>.json`.
        dtype: dtype to compute in.

    Raises:
        NanoinferError: a file is missing or malformed, or is of a version of nanochat that is not supported.
    """
    config = _nanochat_config(path.with_name(f"meta_{path.stem.removeprefix('model_')}.json"))
    shape = config.vocab_size, config.n_embd  # without the rows by which processes can share the vocabulary evenly
    padded = -(-config.vocab_size // _PADDED_TO) * _PADDED_TO, config.n_embd
    stored = _state(read_checkpoint(path), path).items()
    state = {name: replace(t, shape=shape) if t.shape == padded else t for name, t in stored}
    return check(config, state, escaped(path), dtype, _NANOCHAT)


def _nanochat_config(path: Path) -> ModelConfig:
    """Return the config in a meta_<step>.json."""
    where = escaped(path)
    raw = read_object(path, MAX_CONFIG_BYTES, "the config of a nanochat checkpoint").get("model_config")
    if not isinstance(raw, dict):
        raise NanoinferError(f"{where} has no model_config: nanochat writes it beside each checkpoint")
    fields = Fields(raw)
    with about(f"{where}: model_config"):
        config = _NANOCHAT.read(fields)
    if unknown := sorted(raw.keys() - fields.known):
        names = escaped(", ".join(unknown))
        raise NanoinferError(f"{where}: model_config has {names}, which is not supported: a later version of nanochat")
    return replace(config, n_inner=config.mlp_dim)  # transformers' config names the width


def find_tokenizer(checkpoint: Path) -> Path | None:
    """Return the tokenizer of a checkpoint: in its folder, or where nanochat keeps it; None: there is none.

    nanochat stores `base_checkpoints/d20/model_000650.pt` and `tokenizer/tokenizer.pkl` under one root.
    """
    places = [checkpoint.parent / TOKENIZER, checkpoint.resolve().parent.parent.parent / "tokenizer" / TOKENIZER]
    return next((p for p in places if p.is_file()), None)


class _Encoding:
    """Stands for tiktoken's Encoding: pickle creates it without arguments, and then sets its state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_nanochat_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a `tokenizer.pkl`, a byte-level BPE.

    Raises:
        NanoinferError: the file is malformed or too large, contains code, or splits text as nanochat does not.
    """
    raw, where = read_limited(path, MAX_TOKENIZER_BYTES, "a tokenizer.pkl"), escaped(path)
    try:
        state = PlainUnpickler(raw, {"tiktoken.core.Encoding": _Encoding}).load().state
        ranks, special, pattern = state["mergeable_ranks"], state["special_tokens"], state["pat_str"]
        tokens = in_order(ranks, 0, bytes)
        names = in_order(special, len(tokens))
    except Exception as e:  # a hostile pickle can raise any exception
        why = f"{type(e).__name__}: {reason(e)}"
        raise NanoinferError(f"{where} is not a tokenizer of tiktoken, as nanochat writes it ({why})") from None
    if pattern not in (PATTERN, PATTERN.replace("{1,2}", "{1,3}")):
        raise NanoinferError(f"{where}: pat_str={escaped(pattern, 60)!r} is not supported: only nanochat's is")
    with explained(f"{where}: the tokenizer cannot be built"):
        return _build_tokenizer(tokens, names, pattern)


def _build_tokenizer(tokens: list[bytes], names: list[str], pattern: str) -> Tokenizer:
    """Return the tokenizer with these tokens, in order of their ranks, and these special tokens after them."""
    special = {name: len(tokens) + i for i, name in enumerate(names)}
    core = ranked(tokens, special, (pattern,))
    core.add_special_tokens(names)
    if _BOS in special:
        surround(core, (_BOS, special[_BOS]))
    return from_core(core)


def with_special_tokens(weights: Weights, tokenizer: Tokenizer) -> tuple[Weights, str | None]:
    """Return the weights with the start and end tokens of a tokenizer, and the chat template if it has its tokens."""
    core = getattr(tokenizer, "core", None)
    if core is None or any(core.token_to_id(name) is None for name in _ENDS):
        return weights, None
    ends = tuple(core.token_to_id(name) for name in _ENDS)
    return replace(weights, config=replace(weights.config, bos_token_id=ends[1], eos_token_ids=ends)), CHAT_TEMPLATE
