"""Commands of the command line as processes; fixture `run` (conftest.py) runs them in this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from nanoinfer.cli import main; main()", *map(str, arguments)]


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
