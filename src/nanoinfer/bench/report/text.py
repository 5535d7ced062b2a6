"""Numbers and names as the report shows them: units said, thousands separated, nothing that can break markup."""

from __future__ import annotations

import html
import math
import re
from typing import Any

DASH = "–"  # what is unknown
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))
# What XML and HTML forbid: control characters, lone surrogates, and two non-characters.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def clean(value: Any) -> str:
    """Return a value as text that any document may hold: "a\\x00b" -> "a\\ufffdb"."""
    return _FORBIDDEN.sub("\ufffd", str(value))


def escape(value: Any) -> str:
    """Return a value as HTML text, safe in an attribute too: "<b>" -> "&lt;b&gt;"."""
    return html.escape(clean(value), quote=True)


def short(value: Any, limit: int = 34) -> str:
    """Return a name for a figure, its middle cut out where it is too long: short("abcdefgh", 5) -> "ab…gh".

    What tells names apart is at both ends: the engine, and the number of tokens that a draft proposes.
    """
    text = " ".join(clean(value).split()).lstrip("_") or "?"  # matplotlib hides labels that begin with _
    front, back = (limit - 1) // 2, limit - 1 - (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:front]}…{text[-back:]}"


def number(value: Any) -> float | None:
    """Return a finite number as it is; None for everything else that a results file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def positive(value: Any) -> float | None:
    """Return a finite number above 0, what a logarithmic axis can show; None for everything else."""
    found = number(value)
    return found if found is not None and found > 0 else None


def digits(value: Any) -> str:
    """Return a number with 3 significant digits, thousands separated; a dash for what is none.

    digits(1234.56) -> "1,235"      digits(0.01234) -> "0.0123"      digits(None) -> "–"
    """
    found = number(value)
    if found is None:
        return DASH
    if found == 0:
        return "0"
    places = 2 - int(f"{found:.2e}".partition("e")[2])
    return f"{found:,.{min(max(places, 0), 12)}f}" if abs(found) < 1e15 else f"{found:.3g}"


def si(value: Any, unit: str) -> str:
    """Return a number with an SI prefix and its unit: si(32500000000, "B/s") -> "32.5 GB/s"."""
    found = number(value)
    if found is None:
        return DASH
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(found) >= s * 0.9995), _PREFIXES[-1])
    return f"{digits(found / scale)} {prefix}{unit}"


def slug(value: Any) -> str:
    """Return a name as part of a file name: slug("Ladder / GPT-2") -> "ladder-gpt-2"."""
    return re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].rstrip("-") or "suite"
