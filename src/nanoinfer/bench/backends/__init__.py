"""Backends: our engines and what people would use instead, behind one interface.

Each runs in a process of its own (`bench/worker.py`), on the same weights in a folder that the exporters of
`bench/peers/` made, and answers a run with the tokens and the arrival time of each.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

from nanoinfer.bench.case import Case, Work
from nanoinfer.bench.stats import RunTimes
from nanoinfer.errors import NanoinferError


class Backend(Protocol):
    """Generates text for a case. Made with `open_backend`, in the process that measures it."""

    def run(self, work: Work) -> tuple[list[list[int]], RunTimes]:
        """Generate exactly the tokens asked for; return them, and when each arrived.

        No end token ends a text early. Times are on `time.perf_counter`, from the call.
        """
        ...


# Backend -> module:function(case, weights folder) -> Backend. Engines of ours are not listed: any engine's
# name is a backend.
PEERS: dict[str, str] = {
    "nanogpt": "nanoinfer.bench.peers.nanogpt:open_nanogpt",
    "transformers-dynamic": "nanoinfer.bench.peers.transformers:open_dynamic",
    "transformers-static": "nanoinfer.bench.peers.transformers:open_static",
    "ctranslate2": "nanoinfer.bench.peers.ctranslate2:open_ctranslate2",
    "llama.cpp": "nanoinfer.bench.peers.llamacpp:open_llamacpp",
}
INSTALL = {  # backend -> (module it needs, how to get it)
    "transformers-dynamic": ("transformers", "pip install transformers"),
    "transformers-static": ("transformers", "pip install transformers"),
    "ctranslate2": ("ctranslate2", "pip install ctranslate2"),
    "llama.cpp": ("llama_cpp", "pip install llama-cpp-python gguf"),
}


EXPORTS = {  # backend -> module:function that makes its own files from the weights
    "ctranslate2": "nanoinfer.bench.peers.ctranslate2:export",
    "llama.cpp": "nanoinfer.bench.peers.llamacpp:export",
}


def prepare(case: Case, weights: Path) -> Path | None:
    """Make what a case's backend needs, unless it is there; not in the process that is measured.

    Exporting holds the float32 weights, which would count in the peak memory.

    Args:
        case: its backend, dtype and quantization decide on the export.
        weights: Hugging Face folder; exports go to a sub-folder.

    Returns:
        The file or folder that the backend loads; None for backends that load `weights` itself.

    Raises:
        NanoinferError: it is not installed, cannot do what the case asks for, or the export fails.
    """
    if case.backend not in EXPORTS:
        return None
    _require_installed(case.backend)
    path: Path = _load(EXPORTS[case.backend])(case, weights)
    return path


def open_backend(case: Case, weights: Path) -> Backend:
    """Load a case's backend.

    Args:
        case: who, in which dtype and shape.
        weights: Hugging Face folder with the model's weights; a backend exports from it what it needs.

    Raises:
        NanoinferError: it is not installed (said how to), or cannot do what the case asks for.
    """
    if case.backend not in PEERS:
        from nanoinfer.bench.backends.nanoinfer import open_nanoinfer

        return open_nanoinfer(case, weights)
    _require_installed(case.backend)
    backend: Backend = _load(PEERS[case.backend])(case, weights)
    return backend


def _require_installed(name: str) -> None:
    if (need := INSTALL.get(name)) is not None and importlib.util.find_spec(need[0]) is None:
        raise NanoinferError(f"{name} is not installed: {need[1]}")


def _load(target: str) -> Any:
    """Return the function that "module:function" names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
