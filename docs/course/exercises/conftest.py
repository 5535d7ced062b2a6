"""Fixtures of the exercises: a student's file, or with NANOINFER_SOLUTIONS=1 the solution; a small model."""

import importlib.util
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "solutions" if os.environ.get("NANOINFER_SOLUTIONS") == "1" else HERE
sys.path.insert(0, str(HERE.parents[2] / "ladder"))


@pytest.fixture
def exercise(request):
    """The module ex03 in test_03.py."""
    name = request.path.stem.replace("test_", "ex")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")  # both folders have one of this name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def draft():
    """(model, encode, decode) of the smaller built-in model: 2 layers."""
    return import_module("model").load("shakespeare-draft")
