"""nanoinfer: text from GPT-2-family models, on every rung of the optimisation ladder.

    from nanoinfer import LLM, SamplingParams
    llm = LLM("shakespeare")
    print(llm.generate("O Romeo,", SamplingParams(max_tokens=60))[0].outputs[0].text)

Importing this package imports no tensor library; `LLM` does, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer import processes  # noqa: F401  (what happens at a fork and at exit)
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

__all__ = ["LLM", "NanoinferError", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is first asked for: it needs torch, which takes a second to import."""
    if name == "LLM":
        from nanoinfer.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
