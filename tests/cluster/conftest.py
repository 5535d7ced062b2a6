"""One Ray cluster for the tests that need one: one process runs them (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.ray_cluster import cluster


@pytest.fixture(scope="package")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each; it ends with the folder's tests: idle, it needs a fifth of a core."""
    with cluster(1, 1) as made:
        yield made
