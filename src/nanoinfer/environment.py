"""The environment variables that nanoinfer reads: all of them, here.

NANOINFER_ISA         instruction set of the native engine (`nanoinfer engines` lists them); unset: the fastest
NANOINFER_NO_NATIVE   when installing: 1 leaves the native extension out (see pyproject.toml)
"""

from __future__ import annotations

import os


def isa() -> str:
    """Return the instruction set asked for, "" for the fastest. The native engine refuses what it does not have."""
    return os.environ.get("NANOINFER_ISA", "")
