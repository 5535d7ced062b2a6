"""Calibration: the importance of inputs, and quantizers that weight errors by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.errors import refuses
from helpers.models import CHARS, TINY, load_gpt, make_weights
from nanoinfer.checkpoints.gguf.formats import FORMATS
from nanoinfer.config import ModelConfig
from nanoinfer.engines.calibrate import calibrate
from nanoinfer.models.parameters import shapes
from nanoinfer.models.presets import PRESETS
from nanoinfer.tokenizers.tokenizer import CharTokenizer
from nanoinfer.utils.arrays import HostTensor

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

SMOL = PRESETS["smollm2-135m"]
GATED = replace(  # shared heads, RMS norm, a gated MLP, a head of its own
    SMOL, vocab_size=TINY.vocab_size, block_size=32, n_layer=2, layers=SMOL.layers[:2], n_embd=64, n_head=2,
    num_kv_heads=1, head_size=64, n_inner=96, tie_word_embeddings=False,
)  # fmt: skip
PER_LAYER = replace(GATED, layers=tuple(replace(kind, scaled=True) for kind in GATED.layers), per_layer_dim=20)
TOKENIZER = CharTokenizer(list(CHARS))
TEXT = "".join(np.random.default_rng(0).choice(list(CHARS), 200))


# Importance ------------------------------------------------------------------------------------------------------


def squares_in_torch(config: ModelConfig, windows: list[list[int]]) -> dict[str, NDArray[np.float64]]:
    """Return the sums of the squares of the inputs of each linear layer of the reference model."""
    model, found = load_gpt(make_weights(config)), {}

    def observer(name: str) -> Callable[..., None]:
        def observe(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            squares = inputs[0].double().square().reshape(-1, inputs[0].shape[-1]).sum(0).numpy()
            found[name] = found.get(name, 0) + squares

        return observe

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(observer(f"{name}.weight"))
    for window in windows:
        model(torch.tensor([window]))
    return found


@pytest.mark.parametrize("config", [TINY, GATED, PER_LAYER])
@pytest.mark.parametrize("threads", [1, 3])
def test_importance_is_that_of_the_reference_model(config: ModelConfig, threads: int) -> None:
    size = config.block_size
    found = calibrate(make_weights(config), TEXT, TOKENIZER, num_tokens=2 * size, threads=threads)
    assert (found.num_tokens, found.sha256) == (2 * size, hashlib.sha256(TEXT.encode()).hexdigest())
    ids, count = TOKENIZER.encode(TEXT), len(TEXT) // size
    windows = [ids[at : at + size] for at in (0, count // 2 * size)]
    matrices = {name for name, shape in shapes(config).items() if len(shape) == 2 and "wpe" not in name}
    matrices -= {"transformer.per_layer.wte.weight"}  # no product reads it
    head = {"lm_head.weight"} if config.tie_word_embeddings else {"transformer.wte.weight"}
    assert found.importance.keys() == matrices ^ head  # a tied head has two names; an embedding alone has no products
    for name, squares in squares_in_torch(config, windows).items():
        expected = squares / squares.mean() + 0.01
        assert np.allclose(found.importance[name], expected, rtol=1e-4, atol=1e-4), name
    if config.tie_word_embeddings:
        assert np.array_equal(found.importance["transformer.wte.weight"], found.importance["lm_head.weight"])


def test_windows_begin_with_the_start_token() -> None:
    def run(start: int | None, text: str) -> NDArray[np.float32]:
        tokenizer = CharTokenizer(list(CHARS))
        tokenizer.bos_token_id = start
        return calibrate(make_weights(), text, tokenizer, 1).importance["lm_head.weight"]

    text = TEXT[: TINY.block_size]
    assert np.array_equal(run(7, text[1:]), run(None, CHARS[7] + text[1:]))


def test_short_texts_and_overflows_are_errors() -> None:
    weights = make_weights()
    size = TINY.block_size
    refuses(lambda: calibrate(weights, TEXT[: size - 1], TOKENIZER, 999), f"has {size - 1} tokens", f"at least {size}")
    refuses(lambda: calibrate(weights, TEXT, TOKENIZER, 0), "calibrate_tokens=0")
    huge = [(name, HostTensor(t.values * np.float32(1e30), t.dtype)) for name, t in weights.read()]
    refuses(lambda: calibrate(replace(weights, read=lambda: iter(huge)), TEXT, TOKENIZER, 99), "are not finite")


# Quantizers ------------------------------------------------------------------------------------------------------


def quantize(values: NDArray[np.float32], name: str, importance: NDArray[np.float32] | None) -> NDArray[np.float32]:
    found: NDArray[np.float32] = _native.unpack(weights=values, format=name.lower(), importance=importance)
    return found


@pytest.mark.parametrize("name", ["Q5_0", "Q4_K", "Q6_K"])
def test_the_weighted_error_of_no_block_grows(name: str) -> None:
    generator = np.random.default_rng(0)
    values = (generator.standard_normal((48, 768)) ** 3).astype(np.float32)
    importance = generator.lognormal(0, 2, 768).astype(np.float32)
    size = next(f.block_size for f in FORMATS.values() if f.name == name)

    def errors(found: NDArray[np.float32]) -> NDArray[np.float64]:
        weighted = importance * np.square(found - values, dtype=np.float64)
        return weighted.reshape(-1, size).sum(1)  # type: ignore[no-any-return]

    plain, calibrated = (errors(quantize(values, name, h)) for h in (None, importance))
    assert (calibrated <= plain * (1 + 1e-5)).all()
    assert calibrated.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("name", ["Q5_0", "Q4_K", "Q6_K", "Q8_0"])
def test_equal_importance_changes_nothing(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    equal = np.full(512, 2.0, np.float32)
    assert np.array_equal(quantize(values, name, equal), quantize(values, name, None))


def test_importance_is_checked_by_the_extension() -> None:
    values = np.ones((4, 256), np.float32)
    for wrong in (np.ones(255), np.zeros(256), np.full(256, np.nan), np.full(256, np.inf)):
        with pytest.raises(ValueError, match="importance"):
            _native.pack(values=values, dtype="float32", format="q4_k", threads=1, importance=wrong.astype(np.float32))
