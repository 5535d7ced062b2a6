"""Contestants: our engines and what people would use instead, behind one interface.

Each runs in a process of its own (`bench/worker.py`), on the same weights in a folder that the exporters of
`bench/export/` made, and answers a run with the tokens and the arrival time of each.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

from nanoinfer.bench.case import Case, Work
from nanoinfer.bench.stats import RunTimes
from nanoinfer.errors import NanoinferError


class Contestant(Protocol):
    """Generates text for a case. Made with `open_contestant`, in the process that measures it."""

    def run(self, work: Work) -> tuple[list[list[int]], RunTimes]:
        """Generate exactly the tokens asked for; return them, and when each arrived.

        No end token ends a text early. Times are on `time.perf_counter`, from the call.
        """
        ...


# Contestant -> module:function(case, weights folder) -> Contestant. Engines of ours are not listed: any engine's
# name is a contestant.
PEERS: dict[str, str] = {
    "nanogpt": "nanoinfer.bench.contestants.nanogpt:open_nanogpt",
    "transformers-dynamic": "nanoinfer.bench.contestants.transformers:open_dynamic",
    "transformers-static": "nanoinfer.bench.contestants.transformers:open_static",
    "ctranslate2": "nanoinfer.bench.contestants.ctranslate2:open_ctranslate2",
    "llama.cpp": "nanoinfer.bench.contestants.llamacpp:open_llamacpp",
}
INSTALL = {  # contestant -> (module it needs, how to get it)
    "transformers-dynamic": ("transformers", "pip install transformers"),
    "transformers-static": ("transformers", "pip install transformers"),
    "ctranslate2": ("ctranslate2", "pip install ctranslate2"),
    "llama.cpp": ("llama_cpp", "pip install llama-cpp-python gguf"),
}


EXPORTS = {  # contestant -> module:function that makes its own files from the weights
    "ctranslate2": "nanoinfer.bench.contestants.ctranslate2:export",
    "llama.cpp": "nanoinfer.bench.contestants.llamacpp:export",
}


def prepare(case: Case, weights: Path) -> Path | None:
    """Make what a case's contestant needs, unless it is there; not in the process that is measured.

    Exporting holds the float32 weights, which would count in the peak memory.

    Args:
        case: its contestant, dtype and quantization decide on the export.
        weights: Hugging Face folder; exports go to a sub-folder.

    Returns:
        The file or folder that the contestant loads; None for contestants that load `weights` itself.

    Raises:
        NanoinferError: it is not installed, cannot do what the case asks for, or the export fails.
    """
    if case.contestant not in EXPORTS:
        return None
    _require_installed(case.contestant)
    path: Path = _load(EXPORTS[case.contestant])(case, weights)
    return path


def open_contestant(case: Case, weights: Path) -> Contestant:
    """Load a case's contestant.

    Args:
        case: who, in which dtype and shape.
        weights: Hugging Face folder with the model's weights; a contestant exports from it what it needs.

    Raises:
        NanoinferError: it is not installed (said how to), or cannot do what the case asks for.
    """
    if case.contestant not in PEERS:
        from nanoinfer.bench.contestants.ours import open_ours

        return open_ours(case, weights)
    _require_installed(case.contestant)
    contestant: Contestant = _load(PEERS[case.contestant])(case, weights)
    return contestant


def _require_installed(name: str) -> None:
    if (need := INSTALL.get(name)) is not None and importlib.util.find_spec(need[0]) is None:
        raise NanoinferError(f"{name} is not installed: {need[1]}")


def _load(target: str) -> Any:
    """Return the function that "module:function" names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
