"""Convert prompts in all supported forms to a list whose items are strings or lists of token ids.

as_list(["To be", {"prompt_token_ids": [39, 15]}])  ->  ["To be", [39, 15]]

Token ids may be integers of Python, NumPy or PyTorch, in a list, a tuple, an array or a tensor; a 2-D array is several
prompts. The dicts have vLLM's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from numbers import Number
from typing import Any

from nanoinfer.errors import NanoinferError, show
from nanoinfer.utils.checks import as_int, plain

Prompt = str | Sequence[int] | Mapping[str, Any]
_DICT_KEYS = ("prompt", "prompt_token_ids")
_SALT = "cache_salt"


def as_list(prompts: Prompt | Iterable[Prompt], salts: list[str | None] | None = None) -> list[str | list[int]]:
    """Return one prompt or several as a list of prompts.

    Args:
        prompts: in any supported form.
        salts: gets the `cache_salt` of each prompt; None: the key is refused.

    Raises:
        NanoinferError: a prompt has an unsupported form. With several prompts, the message has its number.
    """
    prompts = plain(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [as_prompt(prompts, salts)]
    many = _items(prompts)
    if many and (_are_ints(many) or all(isinstance(item, Number) for item in many)):
        if salts is not None:
            salts.append(None)
        return [_token_ids(many)]
    checked = []
    for i, item in enumerate(many):
        with numbered(i, len(many)):
            checked.append(as_prompt(item, salts))
    return checked


def as_prompt(prompt: Prompt, salts: list[str | None] | None = None) -> str | list[int]:
    """Return one prompt as a string or a list of token ids. Raises NanoinferError for any other form.

    `salts`: see `as_list`.
    """
    prompt = plain(prompt)
    if salts is not None:
        salts.append(_salt(prompt) if isinstance(prompt, Mapping) else None)
        if isinstance(prompt, Mapping):
            prompt = {key: value for key, value in prompt.items() if key != _SALT}
    if isinstance(prompt, Mapping):
        return _from_dict(prompt, _DICT_KEYS if salts is None else (*_DICT_KEYS, _SALT))
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as e:
            raise NanoinferError(
                f"the prompt's character {e.start}, {prompt[e.start]!r}, is half a surrogate pair: give UTF-8 text"
            ) from None
        return prompt
    return _token_ids(_items(prompt))


def for_each(values: Any, count: int, what: str) -> list[Any]:
    """Return a value for each of `count` prompts: `values` has them, or is one for all.

    Raises:
        NanoinferError: there are several, and not one for each; `what` names them.
    """
    each = list(values) if isinstance(values, (list, tuple)) else [values] * count
    if len(each) != count:
        raise NanoinferError(f"{count} prompts, but {len(each)} {what}: give one, or one for each prompt")
    return each


@contextmanager
def numbered(i: int, count: int, what: str = "prompt") -> Iterator[None]:
    """Prefix an error's message with the number of the prompt, if there are several: "prompt 17 of 52: ..."."""
    try:
        yield
    except NanoinferError as e:
        if count == 1:
            raise
        numbered_error = type(e).__new__(type(e))  # not the same object, which other requests may have
        numbered_error.__dict__.update(e.__dict__)
        numbered_error.args = (f"{what} {i + 1} of {count}: {e}",)
        raise numbered_error from None


def _items(value: Any) -> list[Any]:
    """Return the items of an ordered iterable as Python values."""
    if isinstance(value, (bytes, bytearray, memoryview, Set, Mapping)) or not isinstance(value, Iterable):
        raise NanoinferError(
            f"prompt={show(value)} is neither a string nor a list of token ids, nor a dict with one of"
            f" {' and '.join(_DICT_KEYS)}"
        )
    return list(value) if type(value) is list and _are_ints(value) else [plain(item) for item in value]


def _are_ints(items: list[Any]) -> bool:
    """Return whether all items are Python's integers, in a tenth of the time of a loop: there may be a million."""
    return set(map(type, items)) == {int}


def _from_dict(prompt: Mapping[str, Any], known: Sequence[str]) -> str | list[int]:
    for key in prompt:
        if key not in _DICT_KEYS:
            raise NanoinferError(f"prompt: the key {show(key)} is unknown: use one of {', '.join(known)}")
    if len(prompt) != 1:
        raise NanoinferError(f"prompt={show(dict(prompt))}: give exactly one of {' and '.join(_DICT_KEYS)}")
    ((key, value),) = prompt.items()
    value = plain(value)
    if isinstance(value, str) is not (key == "prompt") or isinstance(value, Mapping):
        raise NanoinferError(f"{key}={show(value)} is not {'a string' if key == 'prompt' else 'a list of token ids'}")
    return as_prompt(value)


def _salt(prompt: Mapping[str, Any]) -> str | None:
    salt = plain(prompt.get(_SALT))
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise NanoinferError(f"cache_salt={show(salt)} is not a string of one or more characters")
    return salt


def _token_ids(items: list[Any]) -> list[int]:
    if _are_ints(items):
        return items
    ids = []
    for item in items:
        if (token_id := as_int(item)) is None:
            raise NanoinferError(f"token id {show(item)} is not an integer")
        ids.append(token_id)
    return ids
