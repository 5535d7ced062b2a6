"""nanoinfer: inference of small language models on every rung of the optimisation ladder.

    from nanoinfer import LLM, SamplingParams
    llm = LLM("shakespeare")
    print(llm.generate("O Romeo,", SamplingParams(max_tokens=60))[0].outputs[0].text)

Importing this package imports neither PyTorch nor NumPy. Each name is imported from its module on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.utils import processes  # noqa: F401  (registers handlers for forks and for the exit)

if TYPE_CHECKING:
    from nanoinfer.entrypoints.async_llm import AsyncLLM
    from nanoinfer.entrypoints.async_streams import AsyncOutputStream
    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.entrypoints.streams import OutputStream, TextStream
    from nanoinfer.errors import NanoinferError, ResultError
    from nanoinfer.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Delta,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        LoglikelihoodOutput,
        Logprob,
        PerplexityOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        SpeculationMetrics,
    )
    from nanoinfer.sampling_params import (
        BeamSearchParams,
        LoRARequest,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    __version__: str

__all__ = [
    "LLM", "AsyncLLM", "AsyncOutputStream", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence",
    "CompletionOutput", "Delta", "EmbeddingOutput", "EmbeddingRequestOutput", "LoRARequest", "LoglikelihoodOutput",
    "Logprob", "NanoinferError", "OutputStream", "PerplexityOutput", "PoolingParams", "RequestMetrics", "RequestOutput",
    "RequestOutputKind", "ResultError", "SamplingParams", "ScoringOutput", "ScoringRequestOutput", "SpeculationMetrics",
    "StructuredOutputsParams", "TextStream",
]  # fmt: skip

_PARAMS = (
    "BeamSearchParams", "LoRARequest", "PoolingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"
)  # fmt: skip
_MODULES = dict.fromkeys(_PARAMS, "sampling_params") | {
    "AsyncLLM": "entrypoints.async_llm", "AsyncOutputStream": "entrypoints.async_streams", "LLM": "entrypoints.llm",
    "OutputStream": "entrypoints.streams", "TextStream": "entrypoints.streams", "NanoinferError": "errors",
    "ResultError": "errors",
}  # fmt: skip
"""Name -> the module to import it from; the names that are not here are in `outputs`."""


def __getattr__(name: str) -> Any:
    """Import an exported name, or read the version, on first access."""
    if name in __all__:
        from importlib import import_module

        value = getattr(import_module(f"nanoinfer.{_MODULES.get(name, 'outputs')}"), name)
        globals()[name] = value  # the next access does not come here
        return value
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
