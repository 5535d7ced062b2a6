"""Backends: our engines and other systems, behind one interface.

Each runs in a process of its own (`bench/worker.py`), on the same weights, and returns the tokens of a run and the
arrival time of each.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from nanoinfer.bench.case import Case, Requests
from nanoinfer.bench.stats import RunTimes

# Peer -> module in `bench/peers` and class(case, weights folder), a Backend. Every other name is an engine of ours.
PEERS = {
    "nanogpt": ("nanogpt", "NanoGPT"),
    "transformers-dynamic": ("transformers", "Transformers"),
    "transformers-static": ("transformers", "Transformers"),
    "ctranslate2": ("ctranslate2", "CTranslate2"),
    "llama.cpp": ("llamacpp", "LlamaCpp"),
}


class Backend(Protocol):
    """Generates tokens for a case. Made with `open_backend`, in the process that measures it."""

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate exactly the number of tokens requested; return them and their arrival times.

        No end token ends a sequence early. Times are on `time.perf_counter`, from the call.
        """
        ...


def prepare(case: Case, weights: Path) -> Path | None:
    """Export the weights to the file format of a case's backend, unless that is done; return the exported file.

    This runs outside the measured process: an export holds the float32 weights, which would count as peak memory.

    Args:
        case: its backend, dtype and quantization choose the format.
        weights: Hugging Face folder; exports go to a sub-folder.

    Returns:
        None for backends that load `weights` itself.

    Raises:
        NanoinferError: the backend is not installed, does not support the case, or the export fails.
    """
    path: Path | None = _peer(case).export(case, weights) if hasattr(_peer(case), "export") else None
    return path


def open_backend(case: Case, weights: Path) -> Backend:
    """Load a case's backend from a Hugging Face folder.

    Raises:
        NanoinferError: the backend is not installed (the message names the command), or does not support the case.
    """
    if case.backend not in PEERS:
        from nanoinfer.bench.backends.nanoinfer import NanoinferBackend

        return NanoinferBackend(case, weights)
    backend: Backend = _peer(case)(case, weights)
    return backend


def _peer(case: Case) -> Any:
    """Return the class of a peer, None for our engines."""
    if case.backend not in PEERS:
        return None
    module, name = PEERS[case.backend]
    return getattr(importlib.import_module(f"nanoinfer.bench.peers.{module}"), name)
