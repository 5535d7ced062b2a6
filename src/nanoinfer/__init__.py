"""nanoinfer: inference of GPT-2-family models on every rung of the optimisation ladder.

    from nanoinfer import LLM, SamplingParams
    llm = LLM("shakespeare")
    print(llm.generate("O Romeo,", SamplingParams(max_tokens=60))[0].outputs[0].text)

Importing this package does not import torch; the first use of `LLM` or of a stream class does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer import processes  # noqa: F401  (registers handlers for forks and for the exit)
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import (
    CompletionOutput,
    Delta,
    LoglikelihoodOutput,
    Logprob,
    PerplexityOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM
    from nanoinfer.streams import OutputStream, TextStream

    __version__: str

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "LoglikelihoodOutput",
    "Logprob",
    "NanoinferError",
    "OutputStream",
    "PerplexityOutput",
    "RequestMetrics",
    "RequestOutput",
    "ResultError",
    "SamplingParams",
    "SpeculationMetrics",
    "TextStream",
]

_LAZY = {"LLM": "nanoinfer.llm", "OutputStream": "nanoinfer.streams", "TextStream": "nanoinfer.streams"}
"""Name -> its module, whose import of torch takes about a second."""


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY`, or read the version, on first access."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("nanoinfer")
        except PackageNotFoundError:  # a source tree that was never installed
            return "unknown"
    raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names for completion, including those imported on first access."""
    return sorted({*globals(), *__all__, "__version__"})
