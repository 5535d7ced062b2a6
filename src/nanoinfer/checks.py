"""Range checks for every number that comes from outside, with one-line messages.

require_int("max_tokens", -3, 1)  ->  NanoinferError: max_tokens=-3 is not an integer >= 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoinfer.errors import NanoinferError


def show(value: Any) -> str:
    """Return a value for an error message: its repr on one line, cut where it is very long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # integers of more than 4,300 digits; containers nested 1,000 deep
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise NanoinferError unless `value` is an int (not a bool) in [low, high]."""
    limit = f">= {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise NanoinferError(f"{name}={show(value)} is not an integer {limit}")


def require_float(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    """Raise NanoinferError unless `value` is a finite number in the interval; `*_open` excludes an end."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok = ok and (low < value if low_open else low <= value)  # False for NaN
    ok = ok and (value < high if high_open else value <= high)
    if not ok:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise NanoinferError(f"{name}={show(value)} is not a finite number in {interval}")


def require_bool(name: str, value: Any) -> None:
    """Raise NanoinferError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise NanoinferError(f"{name}={show(value)} is not a bool: use True or False")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise NanoinferError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise NanoinferError(f"{name}={show(value)} is unknown: use one of {', '.join(choices)}")
