r"""Values that are written differently on a command line than in Python: sizes with units, strings with escapes.

parse_size("512MB") -> 512000000      unescape(r"\n\n") -> two newlines
"""

from __future__ import annotations

import re
from fractions import Fraction

import click

from nanoinfer.utils.checks import show

UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")}
UNITS |= {f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([nrt\\])|)")


def parse_size(text: str) -> int:
    """ "1GiB" -> 1073741824; "1.5 kB" -> 1500; a plain number is bytes."""
    found = re.fullmatch(r"(-?\d{1,30}(?:\.\d{1,9})?) *([a-zA-Z]*)", text.strip(), re.ASCII)
    if found is None or (unit := UNITS.get(found[2].lower())) is None:
        raise click.BadParameter(f"{show(text)} is not a size: give bytes, or a number with {size_units()}")
    size = Fraction(found[1]) * unit
    if size.denominator != 1:
        raise click.BadParameter(f"{show(text)} is not a whole number of bytes")
    return int(size)


def size_units() -> str:
    """Return the units that a size may have, for messages."""
    return "kB, MB, GB, TB, KiB, MiB, GiB or TiB"


def unescape(text: str) -> str:
    r"""Replace \n, \r, \t, \\, \xNN and \uNNNN by their characters; another backslash is an error."""

    def character(found: re.Match[str]) -> str:
        if code := found[1] or found[2]:
            return chr(int(code, 16))
        if found[3] is None:
            raise click.BadParameter(
                rf"{show(text)}: a backslash begins \n, \r, \t, \\, \xNN or \uNNNN; write \\ for itself"
            )
        return _CONTROLS[found[3]]

    return _ESCAPE.sub(character, text)
