"""Widening by duplication: a larger model, the same function."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.models import CHARS, TINY, load_gpt, make_folder, make_model, refuses, weights_of
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.load import load_model
from nanoinfer.checkpoints.transforms import widen as widen_weights
from nanoinfer.checkpoints.transforms import widened
from nanoinfer.config import ModelConfig
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.transformer import Transformer
from nanoinfer.roofline.formats import find_shape

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
