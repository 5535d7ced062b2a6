"""Command-line flags from dataclasses: names, types, defaults and help are read from the fields.

A field `max_tokens: int = 128` followed by the string "Most tokens ..." becomes
`--max-tokens INTEGER  Most tokens ... [default: 128]`, so that flags and Python names never drift apart.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nanoinfer.cli.values import parse_size, size_units, unescape
from nanoinfer.utils.field_docs import field_docs

# Fields whose flags are written differently than in Python: how to read one, its metavar, what to add to the help.
_WRITTEN: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "kv_cache_memory": (parse_size, "SIZE", f"Units: {size_units()}."),
    "graph_memory": (parse_size, "SIZE", "Units as above."),
    "stop": (unescape, "TEXT", r"Escapes: \n, \r, \t, \\, \xNN, \uNNNN. May be repeated."),
}
# Second names of flags.
_ALIASES = {"model": "-m", "n": "-n", "output": "-o", "temperature": "--temp"}
_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}


def flags(
    cls: type, argument: str, *, skip: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command so that it gets an instance of dataclass `cls` as keyword `argument`.

    Args:
        cls: a dataclass; each of its fields becomes a flag.
        argument: the keyword under which the command gets the instance.
        skip: fields that keep their default.
        defaults: field -> the flag's default, where it is not the field's.
    """
    hints = typing.get_type_hints(cls)
    docs = field_docs(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in skip]
    own_defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} | dict(defaults or {})

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command)
        own_hints = typing.get_type_hints(command, include_extras=True)

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {f.name: values.pop(f.name) for f in fields}
            given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
            return command(**values, **{argument: cls(**given)})

        parameters = [
            p.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in own.parameters.items()
            if name != argument
        ]
        parameters += [
            _parameter(f.name, hints[f.name], docs.get(f.name, ""), own_defaults.get(f.name, inspect.Parameter.empty))
            for f in fields
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer would look through it, at the undecorated signature
        return run

    return decorate


def _parameter(name: str, hint: Any, doc: str, default: Any) -> inspect.Parameter:
    """Return the command parameter of one field."""
    names = [f"--{name.replace('_', '-')}"]
    if hint is bool and default:
        names[0] += f"/--no-{name.replace('_', '-')}"
    if name in _ALIASES:
        names.append(_ALIASES[name])
    kind = _flag_type(hint)
    parser, metavar, note = _WRITTEN.get(name, (None, metavar_of(kind), ""))
    option = typer.Option(
        *names,
        help=f"{doc} {note}".strip(),
        show_default=not (default in (inspect.Parameter.empty, None, ()) or default is False),
        parser=parser,
        metavar=metavar,
    )
    if typing.get_origin(kind) is list and default is not inspect.Parameter.empty:
        default = list(default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def metavar_of(kind: Any) -> str | None:
    """Return what stands for a flag's value in the help: list[int] -> "INT"; a switch has none."""
    members = [kind, *typing.get_args(kind)]
    return next((_METAVARS[m] for m in members if m in _METAVARS), None)


def _flag_type(hint: Any) -> Any:
    """Return the type of a flag: tuple[str, ...] -> list[str]; int | str | None -> its first member, optional."""
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [_flag_type(a) for a in typing.get_args(hint) if a is not type(None)]
        return members[0] | None
    return hint
