"""The chat template of a Hugging Face folder, its special tokens, response template and default sampling parameters.

The template is in chat_template.jinja, else in tokenizer_config.json (a string, or a list of named templates, of which
"default" is taken), else in chat_template.json. The one for chats with tools, if there is another, is named "tool_use".
Special tokens are in tokenizer_config.json, else in special_tokens_map.json. The response template is in
tokenizer_config.json, sampling parameters are in generation_config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.tokenizers.chat_template import MAX_TEMPLATE
from nanoinfer.utils.checks import show
from nanoinfer.utils.files import decode_utf8, escaped, read_limited, read_object

FILES = (
    "chat_template.jinja", "tokenizer_config.json", "chat_template.json", "special_tokens_map.json",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
_ADDED = "added_tokens.json"
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
GENERATION_CONFIG = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of generation_config.json that are sampling parameters, as in vLLM."""
MAX_BYTES = 16 << 20  # of tokenizer_config.json, which may list thousands of added tokens
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Return the template of a folder, None if it has none, and its special tokens: {"bos_token": "<s>", ...}.

    Raises:
        NanoinferError: a file is too large or malformed.
    """
    tokenizer, tokens = _read_object(folder / FILES[1]), special_tokens(folder)
    if (template := _read_template(folder / FILES[0])) is not None:
        return template, tokens
    for path, found in ((folder / FILES[1], tokenizer), (folder / FILES[2], _read_object(folder / FILES[2]))):
        if (template := found.get("chat_template")) is not None:
            return _default(template, path), tokens
    return None, tokens


def tool_template(folder: Path) -> str | None:
    """Return the template of a folder for chats with tools; None if they have the same one as others.

    Raises:
        NanoinferError: a file is too large or malformed.
    """
    if (template := _read_template(folder / FILES[4])) is not None:
        return template
    return _text(_named(_read_object(folder / FILES[1]).get("chat_template")).get("tool_use"))


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens of a folder: {"bos_token": "<s>", ...}."""
    tokenizer, special = _read_object(folder / FILES[1]), _read_object(folder / FILES[3])
    return {name: text for name in SPECIAL_TOKENS if (text := _text(tokenizer.get(name, special.get(name))))}


def added_tokens(folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the tokens that are added to a vocabulary, by id, and the names of special tokens.

    They are in added_tokens.json and in `added_tokens_decoder` of tokenizer_config.json, which counts first:
    {151645: {"content": "<|im_end|>", "special": True, "lstrip": False}}.

    Raises:
        NanoinferError: a file is too large or malformed.
    """
    tokenizer, special = _read_object(folder / FILES[1]), _read_object(folder / FILES[3])
    further = [t for found in (special, tokenizer) if isinstance(t := found.get("additional_special_tokens"), list)]
    names = [*special_tokens(folder).values(), *(text for token in chain(*further) if (text := _text(token)))]
    listed = {str(i): {"content": text} for text, i in _read_object(folder / _ADDED).items()}
    decoder = tokenizer.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise NanoinferError(f"{escaped(folder / FILES[1])}: added_tokens_decoder={show(decoder)} is not an object")
    tokens: dict[int, dict[str, Any]] = {}
    for i, token in (listed | decoder).items():
        if not re.fullmatch("[0-9]{1,7}", i) or not isinstance(token, dict) or not _text(token):
            raise NanoinferError(f"{escaped(folder)} has the added token {show(token)} of the id {show(i)}: remove it")
        flags = {name: token[name] for name in _FLAGS if isinstance(token.get(name), bool)}
        tokens[int(i)] = {"content": token["content"], "special": token["content"] in names, **flags}
    return tokens, names


def tokenizer_field(folder: Path, name: str, default: Any) -> Any:
    """Return a field of tokenizer_config.json; the default if it is of another type."""
    found = _read_object(folder / FILES[1]).get(name)
    return found if isinstance(found, type(default)) else default


def response_template(folder: Path) -> Any:
    """Return the response template of a folder, which is not checked; None if it has none.

    Raises:
        NanoinferError: the file is too large or malformed.
    """
    return _read_object(folder / FILES[1]).get("response_template")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters of a folder, as generation_config.json has them: {"temperature": 0.7, ...}.

    Raises:
        NanoinferError: the file is too large or malformed.
    """
    found = _read_object(folder / GENERATION_CONFIG)
    return {name: found[name] for name in SAMPLING_FIELDS if found.get(name) is not None}


def to_files(
    template: str | None,
    special_tokens: Mapping[str, str],
    sampling_defaults: Mapping[str, Any],
    response_template: Any = None,
    tool_template: str | None = None,
) -> dict[str, bytes]:
    """Return the files that these are read from; none for what there is not."""
    files: dict[str, Any] = {GENERATION_CONFIG: sampling_defaults} if sampling_defaults else {}
    if response_template is not None:
        files[FILES[1]] = {"response_template": response_template}
    if tool_template is not None:
        named = {"default": template, "tool_use": tool_template}
        listed = [{"name": name, "template": source} for name, source in named.items()]
        files[FILES[1]] = {**files.get(FILES[1], {}), "chat_template": listed}
    if template is not None:
        files[FILES[3]] = special_tokens
    made = {name: json.dumps(dict(content), indent=2).encode() + b"\n" for name, content in files.items()}
    return made if template is None else {FILES[0]: template.encode(), **made}


def _read_object(path: Path) -> dict[str, Any]:
    return read_object(path, MAX_BYTES, "a JSON file") if path.is_file() else {}


def _text(token: Any) -> str | None:
    """Return the text of a special token: "<s>", or {"content": "<s>", ...}; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_template(path: Path) -> str | None:
    if not path.is_file():
        return None
    return decode_utf8(read_limited(path, 4 * MAX_TEMPLATE, "a chat template"), escaped(path))


def _named(templates: Any) -> dict[Any, Any]:
    """Return the templates of a list of {"name": ..., "template": ...} by their names; none for anything else."""
    listed = templates if isinstance(templates, list) else []
    return {t.get("name"): t.get("template") for t in listed if isinstance(t, dict) and _text(t.get("name"))}


def _default(template: Any, path: Path) -> str | None:
    """Return a template, or the one named "default" of a list of {"name": ..., "template": ...}."""
    if isinstance(template, list):
        if "default" not in (named := _named(template)):
            names = ", ".join(str(name) for name in named) or "none"
            raise NanoinferError(
                f"{escaped(path)} has no chat template named default (it has: {escaped(names)}): give chat_template="
            )
        template = named["default"]
    if not isinstance(template, str):
        raise NanoinferError(f"{escaped(path)}: chat_template is not a string")
    return template
