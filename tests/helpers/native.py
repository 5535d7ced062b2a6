"""Native decoders of the tests."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from helpers.models import TINY, make_model
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
ISAS = [name for name, missing in _native.instruction_sets() if not missing]
FORMATS = ["float32", "float16", "bfloat16", "int8", "q8_0"]
V, BLOCK = TINY.vocab_size, TINY.block_size
GOOD: dict[str, Any] = {
    "vocab_size": V, "block_size": BLOCK, "n_layer": 2, "n_head": 2, "n_embd": 16, "mlp_dim": 64,
    "activation": "gelu_new", "tie_word_embeddings": True, "norm_epsilon": 1e-5, "weights": "float32",
    "cache": "float32", "max_num_cached_tokens": 20 * BLOCK, "threads": 1,
}  # fmt: skip


def new_decoder(**changes: Any) -> Any:
    options = _native.DecoderOptions()
    for name, value in (GOOD | changes).items():
        setattr(options, name, value)
    return _native.Decoder(options)


def make_decoder(**changes: Any) -> Any:
    decoder = new_decoder(**changes)
    for name, tensor in make_model().named_parameters():
        decoder.load(name, tensor.float().contiguous().numpy())
    decoder.check_loaded()
    return decoder


def extend(decoder: Any, parts: list[tuple[int, list[int]]]) -> Any:
    """Append tokens to sequences; return the logits of every new position, (tokens, V)."""
    counts = [len(ids) for _, ids in parts]
    logits = np.full((sum(counts), decoder.logits_stride), math.nan, np.float32)
    tokens = [t for _, ids in parts for t in ids]
    decoder.extend(handles=[h for h, _ in parts], token_ids=tokens, num_new=counts, num_logits=counts, logits=logits)
    return logits[:, :V]


def tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(n)]


def engine_of(
    weights: Weights, max_num_cached_tokens: int = 8 * 32, num_states: int = 0, **options: object
) -> NativeEngine:
    limits = EngineLimits(8, weights.config.block_size, max_num_cached_tokens, num_states=num_states, num_pending=8)
    return NativeEngine(weights, limits, EngineConfig(engine="native", **options))  # type: ignore[arg-type]


def all_logits(engine: NativeEngine, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of all tokens of sequences, (B, T), in one step."""
    count, length = tokens.shape
    handles = [engine.open() for _ in range(count)]
    found = engine.extend(StepBatch(handles, tokens.reshape(-1).tolist(), [length] * count, [length] * count)).copy()
    for handle in handles:
        engine.close(handle)
    return found.reshape(count, length, -1)
