"""Help of a sub-command: options grouped by topic, then its examples, in 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])
NAME_WIDTH = 28  # of the column of options; a longer name has a line of its own

TOPICS = {
    "params": "Sampling",
    "structured_flags": "Structured outputs",
    "speculation": "Speculative decoding",
    "scheduler": "Scheduling",
    "pooling": "Embeddings and scores",
    "cluster": "Replicas and clusters",
    "server": "Server",
    "engine": "Engine and memory",
}
"""Keyword of a command that is a dataclass -> title of the section with its fields; others stand under "Options"."""


class _Argument(click.Argument):
    """A positional argument with a help text; click's own has one from 8.5 on."""

    def __init__(self, names: Sequence[str], *, text: str, **options: Any) -> None:
        super().__init__(names, **options)
        self.text = text


def argument(name: str, *, help: str, metavar: str, **options: Any) -> Callable[[_Function], _Function]:
    """Return the decorator that adds a positional argument."""
    return click.argument(name, cls=_Argument, text=help, metavar=metavar, **options)


class Flag(click.Option):
    """A flag. Args: doc: returns the help, when it is printed; topic: title of the section in which it stands."""

    def __init__(self, *args: Any, doc: Callable[[], str], topic: str = "Options", **options: Any) -> None:
        super().__init__(*args, **options)
        self.doc, self.topic = doc, topic

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the help."""
        self.help = self.doc()
        return super().get_help_record(ctx)


class Command(click.Command):
    """A sub-command whose help has topics."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each topic."""
        sections: dict[str, list[tuple[str, str]]] = {topic: [] for topic in ("Arguments", "Options", *TOPICS.values())}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, _Argument):
                sections["Arguments"].append((parameter.metavar or "", parameter.text))
            elif record := parameter.get_help_record(ctx):
                sections[parameter.topic if isinstance(parameter, Flag) else "Options"].append(record)
        names = [name for rows in sections.values() for name, _ in rows if len(name) <= NAME_WIDTH]
        width = max(map(len, names), default=0)  # the same in all sections
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


def command(name: str) -> Callable[[Callable[..., Any]], Command]:
    """Return the decorator that makes a function a sub-command.

    The help is the first line of the function's docstring, and its "Examples:", whose lines are kept ("\\b").
    """

    def decorate(function: Callable[..., Any]) -> Command:
        line, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
        epilog = "\n".join(["\b", "Examples:", *(f"  {line.strip()}" for line in examples.splitlines())])
        return click.command(name, Command, help=line, epilog=epilog)(function)

    return decorate
