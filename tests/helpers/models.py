"""What most tests need: small models, made in the process, without network and external files; what is asserted of
errors that users see; commands of the command line as processes (fixture `run` of conftest.py runs them in this)."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import EngineLimits, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.models.parameters import shapes
from nanoinfer.tokenizers.tokenizer import Tokenizer, char_to_json
from nanoinfer.utils.arrays import HostTensor

if TYPE_CHECKING:  # the core imports the extension, which conftest.py must choose before
    from nanoinfer.core.core import Core
    from nanoinfer.models.transformer import Transformer
    from nanoinfer.scheduling.sequence import Request

CHARS = "\n !,.:?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TINY = ModelConfig(vocab_size=len(CHARS), block_size=32, n_layer=2, n_head=2, n_embd=16, bos_token_id=0)


def make_weights(config: ModelConfig = TINY, seed: int = 0, std: float = 0.3) -> Weights:
    """Return random weights in float32. Weights and biases are large enough to produce different tokens."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        center = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        tensors[name] = HostTensor(generator.normal(center, std, shape).astype(np.float32), "float32")
    return Weights(config, "float32", lambda: iter(tensors.items()))


def make_model(config: ModelConfig = TINY, seed: int = 0, std: float = 0.3) -> Transformer:
    """Return the reference model with `make_weights`' weights."""
    return load_gpt(make_weights(config, seed, std))


def load_gpt(weights: Weights) -> Transformer:
    from nanoinfer.checkpoints import gpt_loading  # only if a test needs the reference model: it imports torch

    return gpt_loading.load_gpt(weights)


def load_folder(folder: Path, dtype: str = "float32") -> tuple[Transformer, ModelConfig]:
    """Return the reference model of a Hugging Face folder, and its config."""
    weights = huggingface.open_folder(folder, dtype)
    return load_gpt(weights), weights.config


def weights_of(gpt: Transformer) -> Weights:
    """Return a model's weights in the form that engines take."""
    from nanoinfer.checkpoints import gpt_loading

    return gpt_loading.weights_of(gpt)


def make_limits(config: ModelConfig = TINY, max_num_seqs: int = 4) -> EngineLimits:
    num_states = 3 * max_num_seqs if config.recurrence else 0
    num_tokens = max_num_seqs * config.block_size
    return EngineLimits(max_num_seqs, config.block_size, num_tokens, num_states=num_states, num_pending=8)


def make_folder(path: Path, config: ModelConfig = TINY, seed: int = 0, chars: str | None = CHARS) -> Path:
    """Write a random model and a character-level tokenizer to a Hugging Face folder and return it."""
    huggingface.save(make_weights(config, seed), path, char_to_json(chars) if chars else None)
    return path


def info(tokenizer: Tokenizer) -> ModelInfo:
    size, made = tokenizer.vocab_size, {"engine": "native", "device": "cpu", "dtype": "float32"}
    return ModelInfo("tiny", replace(TINY, vocab_size=size), tokenizer, source="tiny", vocab_size=size, seed=0, **made)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def submit(core: Core, *arguments: Any, **options: Any) -> Request:
    """Make a request (see `Core.make`), queue it and return it."""
    request = core.make(*arguments, **options)
    core.submit([request])
    return request


def refuses(call: Callable[[], object], *words: str) -> None:
    """Assert that `call` raises a NanoinferError whose message is one line and contains all `words`."""
    with pytest.raises(NanoinferError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def check_messages(err: str) -> None:
    """Every line is one of ours, without a traceback or a character that a terminal obeys."""
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    lines = err.removesuffix("\n").split("\n") if err else []
    for line in lines:
        assert line.isprintable(), line[:300]
        assert len(line) <= 1100


Run = Callable[..., tuple[int, str, str]]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from nanoinfer.cli import main; main()", *map(str, arguments)]


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


class Evil:
    """Unpickling it runs a command that leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)
