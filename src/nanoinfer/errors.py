"""The exceptions of nanoinfer, and how the values in their messages are written.

Each message is one line that names the input, its value, the limit and the remedy. The command line prints it without a
traceback and exits with code 2, or with 1 for a ResultError. Control characters in it are escaped: it may quote a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def printable(text: str) -> str:
    """Escape control characters and newlines for a terminal: "\\x1b[31m" -> the eight characters \\x1b[31m."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escaped(text: object, limit: int = 300) -> str:
    r"""Escape untrusted text for a one-line message: 'a\nb\x1b[1m' -> 'a\\nb\\x1b[1m'.

    Control characters could move a terminal's cursor or begin a second line. Text longer than `limit` is truncated.
    """
    shown = str(text)
    return printable(shown if len(shown) <= limit else f"{shown[:limit]}...")


def reason(error: BaseException) -> str:
    """Return an exception's message on one line, escaped."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return escaped(" ".join(text.split()))


_SHOWN = 200  # characters of a value in a message


def show(value: Any) -> str:
    """Return a value for an error message: its repr on one line, truncated after 200 characters.

    Only the beginning of a long value is converted: the repr of a megabyte stops all other threads for 0.1 s.
    """
    try:
        beginning = _beginning(value, 2 * _SHOWN)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits; containers nested 1,000 deep
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    text = " ".join(beginning.split())
    return text if len(beginning) < 2 * _SHOWN and len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _beginning(value: Any, size: int) -> str:
    """Return the repr of a value, or at least `size` characters of it."""
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value[:size])
    if kind not in (list, tuple, dict) or not value:
        return repr(value)
    shown, closing = ("[", "]") if kind is list else ("(", ")") if kind is tuple else ("{", "}")
    for item in value.items() if kind is dict else value:
        if len(shown) >= size:
            return shown
        for part in item if kind is dict else (item,):  # no generator, whose frames would halve the possible depth
            shown += _beginning(part, size - len(shown)) + ": "
        shown = shown[:-2] + ", "
    return shown[: -1 if kind is tuple and len(value) == 1 else -2] + closing


class NanoinferError(ValueError):
    """Invalid input, a missing or malformed file, or a feature that this machine does not support.

    Args:
        message: what is not printable in it is escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ResultError(NanoinferError):
    """The input is valid, but the computed result is not: it contains values that are not finite."""


class TokensExcluded(ResultError):
    """The parameters of a request exclude every token."""

    MESSAGE = (
        "the largest logit is -inf: the parameters exclude every token: check bad_words, allowed_token_ids, logit_bias,"
        " structured outputs and the weights"
    )

    def __init__(self, message: str = MESSAGE) -> None:
        super().__init__(message)


class QueueFull(NanoinferError):
    """As many requests wait as may wait. The same request can succeed later."""


CONTEXT_LENGTH = "the maximum context length is"
"""In the errors about prompts that exceed it, and by these words clients know them."""


_TO_SHORTEN = {
    "prompt": "overflow='slide', which keeps the last tokens",
    "input": "truncate_prompt_tokens=-1, which shortens it",
}


def too_long(num_tokens: str, block_size: int, what: str = "prompt") -> NanoinferError:
    """Return the error about a prompt, or the "input" of an embedding or a score, that exceeds the context length.

    `num_tokens`: "600", or "at least 600".
    """
    remedy = _TO_SHORTEN[what]
    return NanoinferError(
        f"the {what} has {num_tokens} tokens, {CONTEXT_LENGTH} {block_size} tokens: shorten it, or use {remedy}"
    )


def only_text(part: object) -> str:
    """Return the end of the error about a part of a content that is no text: an image, or a malformed part."""
    kind = part.get("type") if isinstance(part, dict) else None
    media = ("image", "audio", "video", "file", "document")
    if isinstance(kind, str) and any(name in kind for name in media):
        return f"models here read text only: leave out the {kind}, or describe it in a text"
    return "give the text as a string, or in such parts"


def text_instead_of(kind: object) -> str:
    """Return the text that stands for an image or a file in the result of a tool, which the user has not seen."""
    return f"[{kind}: left out, because this model reads text only]"


def result_error(error: str) -> ResultError:
    """Return the exception for the error of an output, which is text: steps keep no exceptions, which hold frames."""
    return TokensExcluded() if error == TokensExcluded.MESSAGE else ResultError(error)


@contextmanager
def about(what: str) -> Iterator[None]:
    """Begin the messages of the errors that the block raises with what they are about: a file, an option."""
    try:
        yield
    except NanoinferError as e:
        raise NanoinferError(str(e) if str(e).startswith(what) else f"{what}: {e}") from None


def missing_extra(package: str, extra: str) -> str:
    """Return the error message for a missing package: how to install the extra of nanoinfer that contains it.

    Args:
        package: the module that cannot be imported.
        extra: a name under [project.optional-dependencies] in pyproject.toml.
    """
    return f"{package} is not installed: pip install '.[{extra}]' in the folder of nanoinfer's source"


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line, after the name of its type if it is not a NanoinferError."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, NanoinferError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
