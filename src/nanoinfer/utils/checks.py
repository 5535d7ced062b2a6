"""Validation of all values that users pass, with one-line error messages.

require_int("max_tokens", -3, 1)  ->  NanoinferError: max_tokens=-3 is not an integer >= 1
require_int("max_tokens", numpy.int64(3), 1)  ->  3
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Sequence
from dataclasses import field, fields
from functools import cache
from itertools import pairwise
from typing import Any

from nanoinfer.errors import NanoinferError, show


def plain(value: Any) -> Any:
    """Return the Python value of a NumPy scalar or array, or of a tensor. Other values are returned unchanged."""
    if isinstance(value, memoryview) or not callable(tolist := getattr(value, "tolist", None)):
        return value
    return tolist()


def as_int(value: Any) -> int | None:
    """Return an integer of any integer type as an int; None for a bool and for other types."""
    value = plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int. Raise NanoinferError if it is not an integer (a bool is not) in [low, high]."""
    number = as_int(value)
    if number is None or number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise NanoinferError(f"{name}={show(value)} is not an integer {limit}")
    return number


def require_float(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> float:
    """Return `value` as an int or a float. Raise NanoinferError if it is not finite or not in the interval.

    `low_open` and `high_open` exclude that end of the interval.
    """
    number = plain(value)
    ok = isinstance(number, (int, float)) and not isinstance(number, bool)
    ok = ok and (low < number if low_open else low <= number)  # False for NaN
    ok = ok and (number < high if high_open else number <= high)
    if not ok:
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise NanoinferError(f"{name}={show(value)} is not a finite number in {interval}")
    result: float = number
    return result


def keep_int(config: Any, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """Check an integer field of a frozen dataclass and store it as an int. `optional` allows None."""
    if (value := getattr(config, name)) is not None or not optional:
        object.__setattr__(config, name, require_int(name, value, low, high))


def require_bool(name: str, value: Any) -> None:
    """Raise NanoinferError if `value` is not True or False."""
    if not isinstance(value, bool):
        raise NanoinferError(f"{name}={show(value)} is not a bool: use True or False")


def bounded(
    default: Any, low: float, high: float | None = None, *, low_open: bool = False, name: str | None = None
) -> Any:
    """Return a field of a dataclass that is a number from `low` to `high`, which `keep_fields` checks.

    `low_open` excludes `low`; without `high`, the field is an integer of any size. `name`: in messages.
    """
    return field(default=default, metadata={"bounds": (low, high), "low_open": low_open, "name": name})


def chosen(default: str, choices: Sequence[str], name: str | None = None) -> Any:
    """Return a field of a dataclass that is one of several names, which `keep_fields` checks. `name`: in messages."""
    return field(default=default, metadata={"choices": choices, "name": name})


def keep_fields(config: Any, prefix: str = "") -> None:
    """Check the fields of a frozen dataclass that are bools, `bounded` or `chosen`, and store numbers as Python's.

    Fields whose type ends with "| None" may be None. The prefix is that of the names in messages.
    """
    for name, kind, optional, metadata in _checked(config.__class__):
        value, shown = getattr(config, name), prefix + (metadata.get("name") or name)
        if value is None and optional:
            continue
        if "choices" in metadata:
            require_choice(shown, value, metadata["choices"])
        elif "bounds" not in metadata:
            require_bool(shown, value)
        elif kind == "int":
            object.__setattr__(config, name, require_int(shown, value, *metadata["bounds"]))
        else:
            number = require_float(shown, value, *metadata["bounds"], low_open=metadata["low_open"])
            object.__setattr__(config, name, number)


@cache
def _checked(cls: Any) -> list[tuple[str, str, bool, Any]]:
    """Return name, type, whether None is permitted, and metadata of the fields that `keep_fields` checks."""
    checked = []
    for f in fields(cls):
        kind, _, rest = str(f.type).partition(" | ")
        if rest in ("", "None") and (kind == "bool" or f.metadata):
            checked.append((f.name, kind, bool(rest), f.metadata))
    return checked


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise NanoinferError if `value` is not one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise NanoinferError(f"{name}={show(value)} is unknown: use one of {', '.join(choices)}")


def field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass: {"max_tokens": "Most tokens to generate."}."""
    body = _classes(cls.__module__)[cls.__name__].body
    docs = {}
    for annotated, text in pairwise(body):
        if isinstance(annotated, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(annotated.target, ast.Name)
            docs[annotated.target.id] = " ".join(str(text.value.value).split())
    return docs


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax of a module's classes by name; faster than inspect.getsource(cls), which tokenizes each."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
