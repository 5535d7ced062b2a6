"""Where the repository lies, and what the machine of the tests has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
HAS_TORCH = importlib.util.find_spec("torch") is not None
INTERPRETED = False  # whether Triton's kernels run in its interpreter, which is slow
if HAS_TORCH:
    import torch

    INTERPRETED = not torch.cuda.is_available()
