"""The errors that nanoinfer raises on purpose.

Every message is one line that names the thing, its value, the limit and the remedy. The command line
prints it without a traceback and exits with code 2, or with 1 for a ResultError.
"""

from __future__ import annotations


class NanoinferError(ValueError):
    """Bad input, a missing or broken file, or something that this machine cannot do."""


class ResultError(NanoinferError):
    """The input was good, and what was computed from it is not: numbers that are not finite."""


def missing_extra(package: str, extra: str) -> str:
    """Return the sentence for a package that is missing: how to install the extra of nanoinfer that contains it.

    Args:
        package: the module that cannot be imported.
        extra: a name under [project.optional-dependencies] in pyproject.toml.
    """
    return f"{package} is not installed: pip install 'nanoinfer[{extra}]' (from a checkout: pip install '.[{extra}]')"


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line, its type before it where it is not one of ours."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, NanoinferError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
