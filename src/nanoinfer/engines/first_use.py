"""The first use of an engine on a device: `auto` compares its logits with those of `static` before it relies on them.

An engine that has never run with this driver, PyTorch, Triton and kind of model may compute other numbers, end its
process or never end. So a child process runs both engines on a random model with the first layers of the model's
config. The result is kept for this combination in first-use.json, in `$XDG_CACHE_HOME/nanoinfer` or ~/.cache/nanoinfer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines import registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES, EngineSpec
from nanoinfer.models.parameters import initialize
from nanoinfer.utils.arrays import to_numpy

log = logging.getLogger("nanoinfer")

REFERENCE = "static"
LIMIT_SEC = 120.0
"""Of the child: kernels and graphs of two layers, and the start of PyTorch."""
MAX_ERROR = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference of a logit, as a share of the standard deviation of the reference's logits."""
PROMPT_TOKENS, NUM_STEPS = (5, 24), 3
_DRIVER = Path("/proc/driver/nvidia/version")


def checked(spec: EngineSpec, model: ModelConfig, config: EngineConfig, device: str, dtype: str) -> EngineSpec:
    """Return the engine that `auto` chose, or `static` if the two differ on this device; the log says why.

    Args:
        spec: the engine that `registry.resolve` chose.
        model: config of the model.
        config: the configuration that `resolve` accepted.
        device: "cuda:0", for example; engines on a CPU are not compared, the tests run them.
        dtype: in which the engine computes.
    """
    if config.engine != "auto" or config.quantization or device == "cpu" or spec.name == REFERENCE:
        return spec
    reason = difference(spec, _first_layers(model), device, dtype)
    if reason is None:
        return spec
    log.warning(
        "engine=auto: using %s, not %s, which failed its first use on %s: %s", REFERENCE, spec.name, device, reason
    )
    return ENGINES[REFERENCE]


def difference(
    spec: EngineSpec, model: ModelConfig, device: str, dtype: str, limit_sec: float = LIMIT_SEC
) -> str | None:
    """Return what is wrong with an engine on a device, in one line, or None. Earlier results are read from the file.

    That a child did not end in time, as beside other programs, is not kept: the next use tries again.
    """
    key, path = _key(spec, model, device, dtype), _path()
    results = _read(path)
    if key in results:
        return results[key]
    import subprocess  # like PyTorch, not at each start

    request = pickle.dumps((spec, model, device, dtype))  # for this program's own child
    command = [sys.executable, "-m", "nanoinfer.engines.first_use"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=limit_sec, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {limit_sec:g} s"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason: str | None = f"its process ended with {done.returncode}: {lines[-1] if lines else 'no message'}"
    else:
        reason = json.loads(done.stdout.splitlines()[-1])
    with suppress(OSError):  # a folder that cannot be written: compared again at the next use
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps({**_read(path), key: reason}, indent=1))
        new.replace(path)
    return reason


def compare(spec: EngineSpec, model: ModelConfig, device: str, dtype: str) -> str | None:
    """Return how the logits of an engine differ from the reference's on two prompts and three tokens more, or None."""
    logits, expected = (_logits(s, model, device, dtype) for s in (spec, ENGINES[REFERENCE]))
    if not np.isfinite(logits).all():
        return "its logits are not finite"
    error, limit = float(np.abs(logits - expected).max() / expected.std()), MAX_ERROR[dtype]
    return (
        None
        if error <= limit
        else f"logits differ by {error:.2g} of their standard deviation, at most {limit:g} in {dtype}"
    )


def _logits(spec: EngineSpec, model: ModelConfig, device: str, dtype: str) -> NDArray[np.float32]:
    """Return the logits of all steps, (prompts x steps, V)."""
    weights = Weights(model, dtype, partial(initialize, model, 0))
    limits = EngineLimits(len(PROMPT_TOKENS), model.block_size, len(PROMPT_TOKENS) * model.block_size)
    engine = registry.build(spec, weights, EngineConfig(engine=spec.name, device=device), device, limits)
    handles, rows = [engine.open() for _ in PROMPT_TOKENS], []
    for step in range(1 + NUM_STEPS):
        batch = StepBatch()
        for row, (handle, count) in enumerate(zip(handles, PROMPT_TOKENS, strict=True)):
            ids = range(1, 1 + count) if step == 0 else [step]
            batch.add(handle, [(31 * i + row) % model.vocab_size for i in ids])
        rows.append(np.array(to_numpy(engine.extend(batch)), np.float32))
    return np.concatenate(rows)


def _first_layers(model: ModelConfig) -> ModelConfig:
    """Return the config with as few layers as have one of each kind, two at least, and a short context."""
    count = next((n for n in range(1, len(model.layers)) if {*model.layers[:n]} == {*model.layers}), model.n_layer)
    n_layer = min(model.n_layer, max(2, count if model.layers else 2))
    size = min(model.block_size, max(PROMPT_TOKENS) + NUM_STEPS)
    return replace(model, n_layer=n_layer, layers=model.layers[:n_layer], block_size=size)


def _key(spec: EngineSpec, model: ModelConfig, device: str, dtype: str) -> str:
    parts = [repr(spec), repr(model), device, dtype, *map(_version, ("nanoinfer", "torch", "triton"))]
    with suppress(OSError):
        parts.append(_DRIVER.read_text())
    if device.startswith("cuda"):
        import torch

        parts.append(torch.cuda.get_device_name(device))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _path() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "nanoinfer" / "first-use.json"


def _read(path: Path) -> dict[str, str | None]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and all(isinstance(value, str | None) for value in found.values()):
            return found
    return {}


if __name__ == "__main__":
    print(json.dumps(compare(*pickle.loads(sys.stdin.buffer.read()))))
