"""Errors about keyword arguments that a function has not.

SamplingParams(max_new_tokens=9)  ->  TypeError: an unexpected keyword ...: did you mean max_tokens?
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")
_MEANT = {
    "max_length": "max_tokens", "n_predict": "max_tokens", "num_return_sequences": "n", "do_sample": "temperature",
    "stop_strings": "stop", "stop_sequences": "stop", "guided_decoding": "structured_outputs",
    "json_schema": "json", "num_beams": "beam_width", "n_ctx": "max_model_len", "n_threads": "threads",
    "load_in_8bit": "quantization",
}  # fmt: skip
"""Names of other libraries for an argument, where its own name is not similar."""


def unknown_argument(function: str, name: str, known: Iterable[str], remedy: str = "") -> TypeError:
    """Return the error about a keyword that a function does not have, with the one that may be meant, and a remedy."""
    known = tuple(known)
    close = (_MEANT[name],) if _MEANT.get(name) in known else difflib.get_close_matches(name, known, 1)
    hints = [f"did you mean {meant}?" for meant in close] + [remedy] * bool(remedy)
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}" + ": " * bool(hints) + " ".join(hints))


def explains_arguments(cls: type[T]) -> type[T]:
    """Let a dataclass raise `unknown_argument` for keywords that are no fields. A decorator."""
    create: Any = cls.__init__
    known = inspect.signature(cls).parameters

    @functools.wraps(create)
    def init(self: T, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise unknown_argument(cls.__name__, name, known)
        create(self, *args, **options)

    setattr(cls, "__init__", init)  # noqa: B010  (mypy refuses the assignment)
    return cls
