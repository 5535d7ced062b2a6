r"""Command-line flags from dataclasses and signatures: names, types, defaults and help are read from them.

A field `max_tokens: int = 128` followed by the string "Most tokens ..." becomes
`--max-tokens INT  Most tokens ... [default: 128]`, so that flags and Python names never drift apart. A parameter of a
command that is in no dataclass becomes a flag by `option`. Some values are written differently than in Python:
parse_size("512MB") -> 512000000      unescape(r"\n\n") -> two newlines
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.cli.help import TOPICS, Flag
from nanoinfer.config import LLMConfig
from nanoinfer.errors import show
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import field_docs

if TYPE_CHECKING:
    from nanoinfer.entrypoints.llm import LLM

UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")}
UNITS |= {f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([nrt\\])|)")
# Type of a field -> type of its flag, and what stands for the value in the help.
_TYPES: dict[Any, tuple[Any, str | None]] = {
    bool: (bool, None), int: (int, "INT"), float: (float, "NUMBER"), str: (str, "TEXT"),
    Path: (click.Path(path_type=Path), "PATH"),
}  # fmt: skip


def parse_size(text: str) -> int:
    """ "1GiB" -> 1073741824; "1.5 kB" -> 1500; a plain number is bytes."""
    match = re.fullmatch(r"(-?\d{1,30}(?:\.\d{1,9})?) *([a-zA-Z]*)", text.strip(), re.ASCII)
    if match is None or (unit := UNITS.get(match[2].lower())) is None:
        raise click.BadParameter(f"{show(text)} is not a size: give bytes, or a number with {size_units()}")
    from fractions import Fraction

    size = Fraction(match[1]) * unit
    if size.denominator != 1:
        raise click.BadParameter(f"{show(text)} is not a whole number of bytes")
    return int(size)


def size_units() -> str:
    """Return the units that a size may have, for messages."""
    return "kB, MB, GB, TB, KiB, MiB, GiB or TiB"


def unescape(text: str) -> str:
    r"""Replace \n, \r, \t, \\, \xNN and \uNNNN by their characters; another backslash is an error."""

    def character(match: re.Match[str]) -> str:
        if code := match[1] or match[2]:
            return chr(int(code, 16))
        if match[3] is None:
            raise click.BadParameter(
                rf"{show(text)}: a backslash begins \n, \r, \t, \\, \xNN or \uNNNN; write \\ for itself"
            )
        return _CONTROLS[match[3]]

    return _ESCAPE.sub(character, text)


# Flags that are written differently than in Python: how to read one, its metavar, what to add to the help.
_WRITTEN: dict[str, tuple[Any, str | None, str]] = {
    "kv_cache_memory": (parse_size, "SIZE", f"Units: {size_units()}."),
    "graph_memory": (parse_size, "SIZE", "Units as above."),
    "stop": (unescape, "TEXT", r"Escapes: \n, \r, \t, \\, \xNN, \uNNNN. May be repeated."),
    "bad_words": (unescape, "TEXT", "Escapes as for stop. May be repeated."),
}
# Second names of flags, and names that are not the parameter's.
_ALIASES = {"model": "-m", "n": "-n", "output": "-o", "temperature": "--temp", "prompt": "-p", "file": "-f"}
_NAMES = {"as_json": "json"}
_OF_MODEL = ("model", "tokenizer", "generation_config")  # fields of LLMConfig that are flags
_HELP = {
    "model": "A built-in model, a folder, a GGUF file, a ckpt.pt, a Hub repository, random:PRESET, wide:MODEL:PRESET.",
    "tokenizer": "Model whose tokenizer to use, instead of the model's own.",
    "chat_template": "Jinja template to use instead of the model's own.",
}
_Command = Callable[..., Any]
NO_FLAGS = ("logit_bias", "structured_outputs", "spaces_between_special_tokens", "detokenize", "output_kind")
"""Fields of SamplingParams that are no flags: they are written otherwise, or have no effect on what is printed."""


def are_given(names: Iterable[str]) -> list[str]:
    """Return those of some parameters of the running command that its user has given."""
    source, default = click.get_current_context().get_parameter_source, click.core.ParameterSource.DEFAULT
    return [name for name in names if source(name) is not default]


def of_model(params: SamplingParams, llm: LLM) -> SamplingParams:
    """Return the parameters of a command with those of the model's generation_config.json where no flag is given."""
    return llm.requests.merge(params, are_given(f.name for f in dataclasses.fields(params)))


def option(name: str, help: str, metavar: str | None = None) -> Callable[[_Command], _Command]:
    """Decorate a command so that its parameter `name` becomes a flag, of the type and with the default that it has.

    Without a default, the value is None, False or empty where the type allows it, and must be given elsewhere.
    """

    def decorate(command: _Command) -> _Command:
        hint = typing.get_type_hints(command)[name]
        default = inspect.signature(command).parameters[name].default
        if default is inspect.Parameter.empty:
            empty = False if hint is bool else () if typing.get_origin(hint) is tuple else dataclasses.MISSING
            default = None if type(None) in typing.get_args(hint) else empty
        return _option(name, hint, lambda: help, default, metavar)(command)

    return decorate


def config_flag(name: str, default: Any = None) -> Callable[[_Command], _Command]:
    """Return the decorator that adds the flag of a field of LLMConfig that is in none of its parts."""
    hint, doc = typing.get_type_hints(LLMConfig)[name], functools.partial(_doc, LLMConfig, name)
    own_default = getattr(LLMConfig, name, None) if default is None else default
    hint = Path if name == "chat_template" else hint
    return _option(name, hint, doc, own_default, {Path: "FILE", bool: None}.get(hint, "NAME"))


def flags(
    cls: type, argument: str, *, skip: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[_Command], _Command]:
    """Decorate a command so that it is called with an instance of dataclass `cls` as keyword `argument`.

    Args:
        cls: a dataclass; each of its fields becomes a flag.
        argument: the keyword of the instance.
        skip: fields that keep their default.
        defaults: field -> the flag's default, where it is not the field's.
    """
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in skip]
    own_defaults = {f.name: f.default for f in fields} | dict(defaults or {})

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            options = {f.name: values.pop(f.name) for f in fields}
            return command(**values, **{argument: cls(**options)})

        for f in reversed(fields):  # as of decorators, the last one applied is the first one shown
            doc, topic = functools.partial(_doc, cls, f.name), TOPICS.get(argument, "Options")
            _option(f.name, hints[f.name], doc, own_defaults[f.name], topic=topic)(run)
        return run

    return decorate


def llm_config(*parts: str) -> Callable[[_Command], _Command]:
    """Decorate a command so that it is called with an `LLMConfig` as keyword `config`, instead of what the config has.

    That is the model, the tokenizer and the generation config, where the command has flags of them, and the parts.

    Args:
        parts: fields of LLMConfig, such as "engine", whose fields become flags.
    """
    kinds = typing.get_type_hints(LLMConfig)

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            options = {name: values.pop(name) for name in (*_OF_MODEL, *parts) if name in values}
            return command(**values, config=LLMConfig(**{"model": "", **options}))

        decorated: _Command = run
        for part in reversed(parts):
            decorated = flags(kinds[part], part)(decorated)
        return decorated

    return decorate


def _doc(cls: type, name: str) -> str:
    return (cls is LLMConfig and _HELP.get(name)) or field_docs(cls).get(name, "")


def _option(
    name: str, hint: Any, doc: Callable[[], str], default: Any, metavar: str | None = None, topic: str = "Options"
) -> Callable[[_Command], _Command]:
    """Return the decorator that adds one flag."""
    hint = next((t for t in typing.get_args(hint) if typing.get_origin(t) is tuple), hint)  # of tuple | None, tuple
    kind = next(t for t in (hint, *typing.get_args(hint)) if t in _TYPES)  # of int | str | None, int
    parse, usual_metavar, note = _WRITTEN.get(name, (*_TYPES[kind], ""))
    flag = f"--{_NAMES.get(name, name).replace('_', '-')}"
    has_negation = kind is bool and (default or hint is not bool)  # None of bool | None is neither
    names = [f"{flag}/--no-{flag[2:]}" if has_negation else flag]
    if name in _ALIASES:
        names.append(_ALIASES[name])
    settings: dict[str, Any] = {"cls": Flag, "topic": topic, "type": parse, "metavar": metavar or usual_metavar}
    settings["doc"] = lambda: f"{doc()} {note}".strip()
    settings |= {"is_flag": True} if kind is bool else {"multiple": typing.get_origin(hint) is tuple}
    if default is dataclasses.MISSING:
        return click.option(*names, name, required=True, **settings)
    shown = default not in (None, ()) and default is not False
    return click.option(*names, name, default=default, show_default=shown, **settings)
