"""Decode bytes into choices, for targets that make calls instead of reading a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]
NUMBERS: list[Any] = [
    0, 1, 2, 3, 5, 16, 64, -1, 0.5, 1.0, 0.9, -0.0, 1e-320, 1e300, math.nan, math.inf, -math.inf, 2**31 - 1, 2**31,
    2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**5000, True,
]  # fmt: skip
ANY: list[Any] = [
    *NUMBERS, None, "", "a", "auto", "float32", "int8", "9" * 5000, "\ud800", "\x1b[31m\n", "a" * 5000, b"x", [], [1], [None],
    (0, 1), ["a", ""], {}, {1: 2.0}, {"a": 1}, {0: math.nan}, {10**9: 1}, {-1: 1}, {1: "x"}, np.int64(1), np.float32(0.5),
    np.array([1, 2]), 1j, object(), DEEP, range(3), {1, 2}, [2**70], "slide", "stop", "reject", "greedy", "mixed",
]  # fmt: skip


class Choices:
    """Reads choices from bytes. After the last byte, every choice is the first option.

    Choices(b"\\x03").pick("abcd")  ->  "d"
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        """Whether bytes are left."""
        return self._at < len(self._data)

    def number(self, below: int) -> int:
        """Return a number in [0, below), of one or two bytes."""
        width = 1 if below <= 256 else 2
        raw = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(raw, "little") % below

    def pick(self, options: Sequence[Any]) -> Any:
        """Return one of the options."""
        return options[self.number(len(options))]

    def odd(self, one_in: int) -> bool:
        """Return True about once in `one_in` calls, and False after the last byte."""
        return self.number(one_in) == one_in - 1
