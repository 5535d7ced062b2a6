"""One Ray cluster for the tests that need one: the group `ray` of pytest-xdist runs in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.ray_cluster import cluster


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with one CPU each."""
    with cluster(1, 1) as made:
        yield made
