"""Backends: our engines and other systems, behind one interface.

A backend is made by `open_backend` in a process of its own (`bench/worker.py`), on the same weights as all others. Its
`run(requests)` generates exactly the number of tokens requested, which no end token changes, and returns the tokens and
their arrival times by `time.perf_counter`, from the call. Peers with a file format of their own also have `export`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from nanoinfer.bench.case import Case
from nanoinfer.errors import NanoinferError, missing_extra

# Peer -> its class(case, weights folder), in this package. Every other name is an engine of ours.
PEERS = {
    "nanogpt": "peers.nanogpt:NanoGPT",
    "transformers-dynamic": "peers.transformers:Transformers",
    "transformers-static": "peers.transformers:Transformers",
    "ctranslate2": "peers.ctranslate2:CTranslate2",
    "llama.cpp": "peers.llamacpp:LlamaCpp",
    "ik_llama.cpp": "peers.ik_llamacpp:IkLlamaCpp",
    "openvino": "peers.openvino:OpenVINO",
    "vllm": "peers.vllm:VLLM",
}
EXPORTED = ("ctranslate2", "llama.cpp", "ik_llama.cpp", "openvino", "vllm")


def prepare(case: Case, weights: Path) -> Path | None:
    """Export the weights to the file format of a case's backend, if it has one; return the exported file, or None."""
    return _class_of(case).export(case, weights) if case.backend in EXPORTED else None


def open_backend(case: Case, weights: Path) -> Any:
    """Load a case's backend from a Hugging Face folder. Raises NanoinferError if it is missing or lacks the case."""
    return _class_of(case)(case, weights)


def _class_of(case: Case) -> Any:
    """Return the class of a case's backend."""
    module, _, name = PEERS.get(case.backend, "backends.nanoinfer:NanoinferBackend").partition(":")
    try:
        return getattr(importlib.import_module(f"nanoinfer.bench.{module}"), name)
    except ModuleNotFoundError as e:
        raise NanoinferError(f"{case.backend} cannot run: {missing_extra(e.name or module, 'torch')}") from None
