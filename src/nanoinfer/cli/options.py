"""Command-line flags from dataclasses: names, types, defaults and help are read from the fields.

A field `max_tokens: int = 128` followed by the string "Most tokens ..." becomes
`--max-tokens INT  Most tokens ... [default: 128]`, so that flags and Python names never drift apart.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.cli.values import parse_size, size_units, unescape
from nanoinfer.config import GENERATION_CONFIGS, LLMConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.field_docs import field_docs

if TYPE_CHECKING:
    from nanoinfer.entrypoints.llm import LLM

PATH: Any = click.Path(path_type=Path)
# Type of a field -> type of its flag, and what stands for the value in the help.
_TYPES: dict[Any, tuple[Any, str | None]] = {
    bool: (bool, None), int: (int, "INT"), float: (float, "NUMBER"), str: (str, "TEXT"), Path: (PATH, "PATH"),
}  # fmt: skip
# Fields whose flags are written differently than in Python: how to read one, its metavar, what to add to the help.
_WRITTEN: dict[str, tuple[Any, str | None, str]] = {
    "kv_cache_memory": (parse_size, "SIZE", f"Units: {size_units()}."),
    "graph_memory": (parse_size, "SIZE", "Units as above."),
    "stop": (unescape, "TEXT", r"Escapes: \n, \r, \t, \\, \xNN, \uNNNN. May be repeated."),
    "bad_words": (unescape, "TEXT", "Escapes as for stop. May be repeated."),
}
# Second names of flags.
_ALIASES = {"model": "-m", "n": "-n", "output": "-o", "temperature": "--temp"}
_OF_MODEL = (
    "model",
    "tokenizer",
    "generation_config",
    "generic_tools",
)  # fields of LLMConfig that are flags of their own
_Command = Callable[..., Any]

model_flag = click.option(
    "--model", "-m", metavar="NAME", default="shakespeare", show_default=True,
    help="A built-in model, a folder, a GGUF file, a ckpt.pt, a Hub repository, random:PRESET, wide:MODEL:PRESET.",
)  # fmt: skip
tokenizer_flag = click.option(
    "--tokenizer", metavar="NAME", help="Model whose tokenizer to use, instead of the model's own."
)
chat_template_flag = click.option(
    "--chat-template", metavar="FILE", type=PATH, help="Jinja template to use instead of the model's own."
)

generic_tools_flag = click.option("--generic-tools", is_flag=True, help=field_docs(LLMConfig)["generic_tools"])
generation_config_flag = click.option(
    "--generation-config", metavar="NAME", type=click.Choice(GENERATION_CONFIGS), default="auto", show_default=True,
    help=field_docs(LLMConfig)["generation_config"],
)  # fmt: skip
NO_FLAGS = (
    "logit_bias", "structured_outputs", "spaces_between_special_tokens", "detokenize", "output_kind",
    "output_token_ids",
)  # fmt: skip
"""Fields of SamplingParams that are no flags: they are written otherwise, or have no effect on what is printed."""


def are_given(names: Iterable[str]) -> list[str]:
    """Return those of some parameters of the running command that its user has given."""
    source, default = click.get_current_context().get_parameter_source, click.core.ParameterSource.DEFAULT
    return [name for name in names if source(name) is not default]


def of_model(params: SamplingParams, llm: LLM) -> SamplingParams:
    """Return the parameters of a command with those of the model's generation_config.json where no flag is given."""
    return llm.requests.merge(params, are_given(f.name for f in dataclasses.fields(params)))


def json_flag(help: str) -> Callable[[_Command], _Command]:
    """Return the decorator that adds --json, which a command gets as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def flags(
    cls: type, argument: str, *, skip: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[_Command], _Command]:
    """Decorate a command so that it gets an instance of dataclass `cls` as keyword `argument`.

    Args:
        cls: a dataclass; each of its fields becomes a flag.
        argument: the keyword under which the command gets the instance.
        skip: fields that keep their default.
        defaults: field -> the flag's default, where it is not the field's.
    """
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in skip]
    own_defaults = {f.name: f.default for f in fields} | dict(defaults or {})

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {f.name: values.pop(f.name) for f in fields}
            return command(**values, **{argument: cls(**given)})

        for f in reversed(fields):  # as of decorators, the last one applied is the first one shown
            _option(f.name, hints[f.name], docs.get(f.name, ""), own_defaults[f.name])(run)
        return run

    return decorate


def llm_config(*parts: str) -> Callable[[_Command], _Command]:
    """Decorate a command so that it gets an `LLMConfig` as keyword `config`, instead of what the config has.

    That is the model, the tokenizer and the generation config, where the command has flags of them, and the parts.

    Args:
        parts: fields of LLMConfig, such as "engine", whose fields become flags.
    """
    kinds = typing.get_type_hints(LLMConfig)

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {name: values.pop(name) for name in (*_OF_MODEL, *parts) if name in values}
            return command(**values, config=LLMConfig(**{"model": "", **given}))

        made: _Command = run
        for part in reversed(parts):
            made = flags(kinds[part], part)(made)
        return made

    return decorate


def _option(name: str, hint: Any, doc: str, default: Any) -> Callable[[_Command], _Command]:
    """Return the decorator that adds the flag of one field."""
    hint = next((t for t in typing.get_args(hint) if typing.get_origin(t) is tuple), hint)  # of tuple | None, tuple
    kind = next(t for t in (hint, *typing.get_args(hint)) if t in _TYPES)  # of int | str | None, int
    parse, metavar, note = _WRITTEN.get(name, (*_TYPES[kind], ""))
    flag = f"--{name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}" if kind is bool and default else flag]
    if name in _ALIASES:
        names.append(_ALIASES[name])
    settings: dict[str, Any] = {"help": f"{doc} {note}".strip(), "type": parse, "metavar": metavar}
    settings |= {"is_flag": True} if kind is bool else {"multiple": typing.get_origin(hint) is tuple}
    if default is dataclasses.MISSING:
        return click.option(*names, name, required=True, **settings)
    shown = default not in (None, ()) and default is not False
    return click.option(*names, name, default=default, show_default=shown, **settings)
