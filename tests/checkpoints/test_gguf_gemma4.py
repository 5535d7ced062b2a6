"""Gemma 4 in GGUF files: quantized experts in joined tensors, and keys that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.families import CASES, GGUF_CASES, make_folder
from helpers.gguf_files import as_f16, as_f32, as_q8_0, convert
from helpers.models import refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.gpt_loading import load_gpt

NAME, FIELDS = GGUF_CASES["gemma4-two-shared"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A random model whose matrices have rows of whole blocks, but for the table of per-layer embeddings."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 8}
    monkeypatch.setitem(CASES, "gemma4-blocks", (NAME, FIELDS | sizes | {"global_head_dim": 16}))
    return make_folder("gemma4-blocks", tmp_path / "hf")


def store(values: np.ndarray) -> Any:
    return as_q8_0(values) if values.shape[-1] % 32 == 0 else as_f16(values)


def test_joined_experts_keep_their_blocks(model: Any, tmp_path: Path) -> None:
    weights, _ = gguf.open_file(convert(model, tmp_path / "a.gguf", store))
    for part in ("c_gate", "c_fc", "c_proj"):
        assert weights.block_formats[f"transformer.h.1.mlp.experts.{part}.weight"][0][0] == "q8_0"
    ids = [(7 * i * i + 3 * i) % 61 for i in range(30)]
    with torch.inference_mode():
        expected = load_gpt(weights)(torch.tensor([ids]))[0, -1].log_softmax(-1)
    for dtype, error in (("float32", 1e-3), ("auto", 0.3)):  # with blocks, activations have 8 bits
        llm = LLM(str(tmp_path / "a.gguf"), engine="native", dtype=dtype, kv_cache_dtype="float32")
        (found,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0, logprobs=3))
        for token, one in found.outputs[0].logprobs[0].items():
            assert one.logprob == pytest.approx(float(expected[token]), abs=error)


def test_keys_that_do_not_fit_are_named(model: Any, tmp_path: Path) -> None:
    wrong: dict[str, tuple[Any, str]] = {
        "attention.sliding_window_pattern": (np.array([True, False]), "is not a list of 6 booleans"),
        "attention.head_count_kv": (np.array([2, 2], np.int32), "is not a list of 6 numbers"),
        "feed_forward_length": (np.array([64, 64, 64, 128, 128, 128], np.int32), "only layers without keys may"),
        "rope.dimension_count": (8, "gemma4.rope.dimension_count=8"),
        "attention.value_length_swa": (16, "gemma4.attention.value_length_swa=16"),
        "expert_count": (4, "ffn_gate_up_exps.weight is [5, 64, 32], which is not two matrices of 4"),
    }
    for key, (value, message) in wrong.items():
        path = convert(model, tmp_path / "a.gguf", **{f"gemma4.{key}": value})
        refuses(lambda path=path: gguf.open_file(path), message)
    for divisors, message in ((np.ones(4), "but the heads require [8]"), (np.full(8, 2.0), "divisors must be 1")):
        path = convert(model, tmp_path / "a.gguf", tensors={"rope_freqs.weight": as_f32(divisors)})
        refuses(lambda path=path: gguf.open_file(path), message)
