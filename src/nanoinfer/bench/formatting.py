"""Numbers and names as tables and the report show them: thousands separated, without characters that break markup."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

DASH = "–"  # unknown
# What XML and HTML forbid: control characters, lone surrogates, and two non-characters.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(value: Any) -> Any:
    """Return results whose strings may stand in any document: "a\\x00b" -> "a\\ufffdb". Other values are kept."""
    if isinstance(value, str):
        return _FORBIDDEN.sub("\ufffd", value)
    if isinstance(value, list):
        return [clean(own) for own in value]
    if isinstance(value, dict):
        return {clean(name): clean(own) for name, own in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: clean(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **own)
    return value


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def positive(value: Any) -> float | None:
    """Return a finite number above 0, which a logarithmic axis can show; None for everything else."""
    found = number(value)
    return found if found is not None and found > 0 else None


def digits(value: Any) -> str:
    """Return a number with 3 significant digits, thousands separated; a dash for everything else.

    digits(1234.56) -> "1,235"      digits(0.01234) -> "0.0123"      digits(None) -> "–"
    """
    found = number(value)
    if found is None:
        return DASH
    if found == 0:
        return "0"
    places = 2 - int(f"{found:.2e}".partition("e")[2])
    return f"{found:,.{min(max(places, 0), 12)}f}" if abs(found) < 1e15 else f"{found:.3g}"


def slug(value: Any) -> str:
    """Return a name as part of a file name: slug("Ladder / GPT-2") -> "ladder-gpt-2"."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].rstrip("-") or "suite"
