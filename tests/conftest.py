"""Small models and helpers of the tests. Models are created in the process: no network and no external files."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nanoinfer.config import EngineLimits, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints import huggingface
from nanoinfer.models.checkpoints.weights import Weights
from nanoinfer.models.parameters import shapes
from nanoinfer.models.tokenizers import char_to_json
from nanoinfer.utils.arrays import HostTensor

if TYPE_CHECKING:  # the core imports the extension, which must be chosen before
    from nanoinfer.core.core import Core
    from nanoinfer.models.gpt import GPT
    from nanoinfer.scheduling.sequence import Request

HAS_TORCH = importlib.util.find_spec("torch") is not None
INTERPRETED = False  # whether Triton's kernels run in its interpreter, which is slow
if HAS_TORCH:
    import torch

    if INTERPRETED := not torch.cuda.is_available():  # set before triton is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # the tests of the rungs in PyTorch, and those that compare with it
    uses_torch = re.compile(r"^(import|from) (torch|transformers|nanoinfer\.training)\b", re.MULTILINE)
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if uses_torch.search(p.read_text())]

if importlib.util.find_spec("hypothesis") is not None:  # a failure is one of the change; test-nightly draws at random
    from hypothesis import settings

    settings.register_profile("random")
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; child processes would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

if folder := os.environ.get("NANOINFER_TEST_EXTENSION"):  # make asan: use this build of the extension
    (library,) = Path(folder).glob("_native*.so")
    spec = importlib.util.spec_from_file_location("nanoinfer._native", library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["nanoinfer._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nanoinfer._native"])

CHARS = "\n !,.:?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TINY = ModelConfig(vocab_size=len(CHARS), block_size=32, n_layer=2, n_head=2, n_embd=16, bos_token_id=0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow_if(condition)`: mark the cases of a matrix as slow whose parameters meet the condition; so `nightly_if`."""
    for item in items:
        for marker in ("slow", "nightly"):
            for mark in item.iter_markers(f"{marker}_if"):
                (condition,) = mark.args
                parameters = item.callspec.params  # type: ignore[attr-defined]
                if condition(**{name: parameters[name] for name in inspect.signature(condition).parameters}):
                    item.add_marker(marker)


@pytest.fixture
def quick_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks in this process measure the machine's ceiling in milliseconds instead of six seconds."""
    from nanoinfer.roofline import measure

    monkeypatch.setattr(measure, "CPU_WORKLOAD", measure.Workload(num_bytes=1 << 22, matrix_size=64, num_rounds=1))


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    if HAS_TORCH:
        torch.set_num_threads(min(2, torch.get_num_threads()))


def make_weights(config: ModelConfig = TINY, seed: int = 0, std: float = 0.3) -> Weights:
    """Return random weights in float32. Weights and biases are large enough to produce different tokens."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        center = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        tensors[name] = HostTensor(generator.normal(center, std, shape).astype(np.float32), "float32")
    return Weights(config, "float32", lambda: iter(tensors.items()))


def make_model(config: ModelConfig = TINY, seed: int = 0, std: float = 0.3) -> GPT:
    """Return the reference model with `make_weights`' weights."""
    return load_gpt(make_weights(config, seed, std))


def load_gpt(weights: Weights) -> GPT:
    from nanoinfer.models import gpt_loading  # only if a test needs the reference model: it imports torch

    return gpt_loading.load_gpt(weights)


def load_folder(folder: Path, dtype: str = "float32") -> tuple[GPT, ModelConfig]:
    """Return the reference model of a Hugging Face folder, and its config."""
    weights = huggingface.open_folder(folder, dtype)
    return load_gpt(weights), weights.config


def weights_of(gpt: GPT) -> Weights:
    """Return a model's weights in the form that engines take."""
    from nanoinfer.models import gpt_loading

    return gpt_loading.weights_of(gpt)


def make_limits(config: ModelConfig = TINY, max_num_seqs: int = 4) -> EngineLimits:
    return EngineLimits(max_num_seqs, config.block_size, max_num_seqs * config.block_size)


def make_folder(path: Path, config: ModelConfig = TINY, seed: int = 0, chars: str | None = CHARS) -> Path:
    """Write a random model and a character-level tokenizer to a Hugging Face folder and return it."""
    huggingface.save(make_weights(config, seed), path, char_to_json(chars) if chars else None)
    return path


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refuses(call: Callable[[], object], *words: str) -> None:
    """Assert that `call` raises a NanoinferError whose message is one line and contains all `words`."""
    with pytest.raises(NanoinferError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "tiny")


def submit(core: Core, *arguments: Any, **options: Any) -> Request:
    """Make a request (see `Core.make`), queue it and return it."""
    request = core.make(*arguments, **options)
    core.submit([request])
    return request
