"""The errors that nanoinfer raises on purpose.

Every message is one line that names the thing, its value, the limit and the remedy. The command line
prints it without a traceback and exits with code 2.
"""

from __future__ import annotations


class NanoinferError(ValueError):
    """Bad input, a missing or broken file, or something that this machine cannot do."""


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line, its type before it where it is not one of ours."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, NanoinferError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
