"""Fixtures of the tests of engines with all families.

They import what needs transformers: tests/engines is also collected where only torch and triton are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nanoinfer.models.transformer import Transformer


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a case, which is written once."""
    from helpers import families

    @functools.cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp("families") / case
        families.make_folder(case, folder)
        return folder

    return make


@pytest.fixture(scope="session")
def gpt_of(folder_of: Callable[[str], Path]) -> Callable[[str], Transformer]:
    """Return the reference model of a case, which test_families.py compares with the one of transformers."""
    from nanoinfer.checkpoints.gpt_loading import load_gpt
    from nanoinfer.checkpoints.huggingface import open_folder

    return functools.cache(lambda case: load_gpt(open_folder(folder_of(case))))
