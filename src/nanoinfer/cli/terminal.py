"""Make the standard streams usable, and escape untrusted text so that it cannot control the terminal.

A stream may be closed, full, a pipe whose reader has gone, or unable to show a character. Generated text goes to
stdout as it is; messages go to stderr with control characters escaped, one line each.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from nanoinfer.errors import NanoinferError, ResultError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_MESSAGE = 1000  # characters; of a longer message the middle is left out
# For each standard stream the mode of its stand-in. Reading a closed stdin and writing a closed stdout fail, as in
# other programs; messages for a closed stderr are lost. The stand-in holds the descriptor, so that no file gets it.
_STREAMS = (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_STREAM_ERRORS = (errno.EBADF, errno.EIO, errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def prepare() -> None:
    """Make stdin, stdout and stderr usable, and leave the log to this package's warnings and to errors."""
    for name, mode, flags in _STREAMS:
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("nanoinfer: %(message)s"))
    handler.addFilter(lambda r: r.name.partition(".")[0] == "nanoinfer" or r.levelno >= logging.ERROR)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_LOGS", "-all")  # errors only; read when torch is imported
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


class _OneLine(logging.Formatter):
    """Escapes control characters and newlines in a record's message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


@contextmanager
def reading_stdin(remedy: str = "") -> Iterator[None]:
    """Turn errors of reading standard input as UTF-8 into one line, of which `remedy` is the end."""
    try:
        yield
    except UnicodeDecodeError as e:
        raise NanoinferError(f"stdin is not UTF-8 text: {e}") from None
    except OSError as e:
        raise NanoinferError(f"stdin cannot be read: {e.strerror}{remedy}") from None


def visible(text: str) -> str:
    """Escape control characters in generated text, except newlines and tabs, and changes of direction."""
    hidden = {c for c in text if c in _DIRECTIONS or unicodedata.category(c) in ("Cc", "Cs")} - {*"\n\t"}
    return "".join(c.encode("unicode_escape").decode("ascii") if c in hidden else c for c in text)


def complain(message: str, *more: str) -> None:
    """Print an error on stderr, in one line, and further lines."""
    message = printable(message)
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"
    try:
        print(f"nanoinfer: error: {message}", *map(printable, more), sep="\n", file=sys.stderr, flush=True)
    except OSError:  # a full or closed stderr: the exit code still shows the failure
        drop(sys.stderr)


def describe(error: OSError) -> str:
    """Return one line for an error of the operating system that no command has named: most are of stdout."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        name = error.filename
        return f"{os.fsdecode(name) if isinstance(name, (str, bytes)) else name}: {reason}"
    return f"standard output cannot be written: {reason}" if error.errno in _STREAM_ERRORS else reason


def drop(stream: TextIO) -> None:
    """Discard what is left in a stream's buffer: Python would write it again at exit, and fail with exit code 120."""
    with suppress(OSError):  # a captured stream has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def report_console() -> Console:
    """Return a console that prints text of 80 columns as it is."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=80, legacy_windows=False)


def report_table() -> Table:
    """Return a table without a frame."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE, pad_edge=False, show_edge=False, padding=(0, 1))


def print_json(document: Any, *, indent: int | None = None) -> None:
    """Print a JSON document on stdout. Raises ResultError as `finite_json` does; nothing is printed then."""
    print(finite_json(document, indent=indent), flush=True)


def finite_json(document: Any, *, indent: int | None = None) -> str:
    """Return a document as JSON.

    Raises:
        ResultError: a number in it is not finite: JSON has no name for it, and it is no result.
    """
    try:
        return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ResultError(
            "a number in the result is not finite (nan or infinity), so the result is not printed: the model's"
            " weights or its dtype overflow; try --dtype float32"
        ) from None
