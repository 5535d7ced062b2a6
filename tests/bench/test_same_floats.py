"""benchmarks/same_floats.py: the permuted model computes the same function."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.environment import ROOT
from helpers.models import TINY, load_gpt, make_weights
from nanoinfer.config import ModelConfig
from nanoinfer.models.presets import PRESETS

SMOL = PRESETS["smollm2-135m"]
GATED = replace(
    SMOL, vocab_size=61, block_size=32, n_layer=2, layers=SMOL.layers[:2], n_embd=96, n_head=4, num_kv_heads=2,
    head_size=64, n_inner=160,
)  # fmt: skip


@pytest.mark.parametrize("config", [TINY, GATED, replace(GATED, qk_norm="head", tie_word_embeddings=False)])
def test_a_permuted_model_is_the_same_function(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pytest.importorskip("llama_cpp")
    same_floats = importlib.import_module("same_floats")
    weights = make_weights(config, std=0.1)
    changed = same_floats.permuted(weights)
    tokens = torch.tensor([[5, 1, 7, 30, 2, 9, 44]])
    expected, found = (load_gpt(w)(tokens).numpy() for w in (weights, changed))
    assert np.allclose(found, expected, atol=1e-4)
    values = dict(changed.read())["transformer.h.0.mlp.c_proj.weight"].float32()
    assert not np.array_equal(values, dict(weights.read())["transformer.h.0.mlp.c_proj.weight"].float32())
