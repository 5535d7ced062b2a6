"""Calibration of quantization: run a text through a model and sum the squares of the inputs of each matrix.

The error that a rounded weight causes in an output is the weight's error times its input. Weights whose inputs are
large should therefore have smaller errors, and the quantizers weight squared errors by the mean of the squares of each
input (kernels/cpu/kernels/quantize.h has the formula). The idea is that of llama.cpp's importance matrix.

Engine `native` computes, because packing needs it and not PyTorch, and because it packs the weights as they are read.
Covered: all matrices that products read, with statistics of each input alone. Not covered: correlations of inputs
(GPTQ, Frantar et al. 2023), and embeddings without an output head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.weights import Calibration, Weights
from nanoinfer.config import DTYPES, EngineConfig, EngineLimits
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.errors import NanoinferError
from nanoinfer.tokenizers.tokenizer import Tokenizer
from nanoinfer.utils.checks import require_int

WINDOW = 512
"""Tokens that are processed as one sequence, at most."""
_LEAST = 0.01
"""Part of the mean importance that is added to each: an input that this text does not use counts for other texts."""


def calibrate(
    weights: Weights, text: str, tokenizer: Tokenizer, num_tokens: int, threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:  # fmt: skip
    """Return the importance of the inputs of each matrix for a text.

    Args:
        weights: computed with in their stored dtype, or in float32 if that is none of the engine's.
        text: windows of it are used that are spread evenly and do not overlap. Each begins with the start token if the
            tokenizer has one.
        tokenizer: the model's.
        num_tokens: to use at most; whole windows, at least one.
        threads: that compute; None: as many as the process may use.
        progress: called with the number of windows that are done, and their number.

    Raises:
        NanoinferError: the text has less than a window, which is 512 tokens or the context length; num_tokens is below
            1; the engine is not available; activations are not finite.
    """
    require_int("calibrate_tokens", num_tokens, 1)
    size = min(WINDOW, weights.config.block_size)
    windows = list(_windows(tokenizer.encode(text), tokenizer.bos_token_id, size, num_tokens))
    dtype = weights.stored_dtype if weights.stored_dtype in DTYPES else "float32"
    short = replace(weights, dtype=dtype).shortened(size)
    engine = NativeEngine(short, EngineLimits(1, size, size), EngineConfig(engine="native", threads=threads))
    engine.observe_inputs()
    for i, window in enumerate(windows):
        handle, batch = engine.open(), StepBatch(hidden_only=True)
        batch.add(handle, window, len(window))  # the output head's inputs are observed where logits are requested
        engine.extend(batch)
        engine.close(handle)
        progress(i + 1, len(windows))
    found = {name: _importance(name, squares) for name, squares in engine.input_squares().items()}
    if weights.config.tie_word_embeddings:
        found["transformer.wte.weight"] = found["lm_head.weight"]
    return Calibration(found, sum(map(len, windows)), hashlib.sha256(text.encode()).hexdigest())


def _windows(ids: list[int], start: int | None, size: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield windows of `size` tokens, evenly spread: ([1, 2, 3, 4, 5, 6], None, 2, 4) -> [1, 2], [3, 4]."""
    first = [] if start is None else [start]
    step = size - len(first)
    if (count := len(ids) // step if step else 0) == 0:
        raise NanoinferError(
            f"the calibration text has {len(ids)} tokens, must have at least {size}: use a longer text"
        )
    keep = max(1, min(count, num_tokens // size))
    for i in range(keep):
        at = i * count // keep * step
        yield first + ids[at : at + step]


def _importance(name: str, squares: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the importance of the inputs of a matrix, whose mean is 1 + _LEAST, from the sums of their squares."""
    mean = squares.mean()
    if not np.isfinite(mean):
        raise NanoinferError(f"calibration: the inputs of {name} are not finite: the weights or their dtype overflow")
    importance: NDArray[np.float64] = squares / mean if mean > 0 else np.ones_like(squares)
    return (importance + _LEAST).astype(np.float32)
