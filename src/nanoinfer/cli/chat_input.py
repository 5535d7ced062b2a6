"""Lines of a chat, from a terminal (with editing and history where readline is built in) or from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from nanoinfer.cli.terminal import drop, reading_stdin

QUOTES = '"""'
_MARKS = {True: "> ", False: "... "}  # before the first and the further lines of a message


def messages(read: Callable[[bool], str]) -> Iterator[str]:
    r"""Yield the messages that lines make; several lines are one message after a backslash or between triple quotes.

        Hello                      "Hello"
        one \                      "one \ntwo"
        two
        \"""def f():               "def f():\n    pass"
            pass\"""

    Args:
        read: returns the next line; the argument is whether a message begins with it. Raises EOFError at the end.
    """
    while True:
        try:
            line = read(True)
        except EOFError:
            return
        try:
            if line.startswith(QUOTES):
                line = line.removeprefix(QUOTES)
                while not line.endswith(QUOTES):
                    line += "\n" + read(False)
                line = line.removesuffix(QUOTES).removesuffix("\n")
            else:
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + read(False)
        except EOFError:  # in the middle of a message, which ends here
            line = line.removesuffix("\\")
        except KeyboardInterrupt:  # drops the lines so far
            print(file=sys.stderr)
            continue
        yield line.removeprefix("\n")


def reader() -> Callable[[bool], str]:
    """Return a function that reads a line of standard input."""
    if not sys.stdin.isatty():
        return _read_pipe
    with suppress(ImportError):  # with it, input() has history and editing
        import readline  # noqa: F401
    return _Terminal()


def _read_pipe(first: bool) -> str:
    with reading_stdin():
        line = sys.stdin.buffer.readline().decode("utf-8")
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


class _Terminal:
    """Reads lines after a prompt. Ctrl-C clears the line; twice in a row, it is the end."""

    def __init__(self) -> None:
        self._interrupted = False

    def __call__(self, first: bool) -> str:
        while True:
            try:
                with reading_stdin():
                    line = self._input(_MARKS[first])
            except EOFError:
                print(file=sys.stderr)
                raise
            except KeyboardInterrupt:
                if not first:
                    raise
                print("\n(Ctrl-C again, or /exit, ends the conversation)" if not self._interrupted else "",
                      file=sys.stderr)  # fmt: skip
                if self._interrupted:
                    raise EOFError from None
                self._interrupted = True
                continue
            self._interrupted = False
            return line

    @staticmethod
    def _input(mark: str) -> str:
        if sys.stdout.isatty():
            return input(mark)
        try:  # stdout is a file: no prompt in it
            print(mark, end="", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)
        return input()
