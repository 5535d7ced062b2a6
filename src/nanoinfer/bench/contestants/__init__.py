"""Contestants: our engines and what people would use instead, behind one interface.

Each runs in a process of its own (`bench/worker.py`), on the same weights in a folder that the exporters of
`bench/export/` made, and answers a run with the tokens and the arrival time of each.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Protocol

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
    if (need := INSTALL.get(case.contestant)) is not None and importlib.util.find_spec(need[0]) is None:
        raise NanoinferError(f"{case.contestant} is not installed: {need[1]}")
    module, _, function = PEERS[case.contestant].partition(":")
    contestant: Contestant = getattr(importlib.import_module(module), function)(case, weights)
    return contestant
