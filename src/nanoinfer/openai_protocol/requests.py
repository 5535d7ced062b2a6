"""Read the body of a request to /v1/completions or /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.openai_protocol.errors import as_sent
from nanoinfer.openai_protocol.fields import CHAT, FIELDS, MAX_PROMPTS, SAMPLING, TEMPLATE, FieldError, check_names
from nanoinfer.sampling_params import KINDS, RANGES, WHOLE_VOCABULARY, SamplingParams, StructuredOutputsParams
from nanoinfer.utils.checks import require_bool, require_int, show

INTEGERS = {*(name for name, (low, _) in RANGES.items() if isinstance(low, int)),
            "max_completion_tokens", "top_logprobs", "priority", "thinking_token_budget", "dimensions",
            "top_n"}  # fmt: skip
"""Fields that may be written as 10.0: in JSON Schema, and for vLLM, that is an integer."""
_OPTIONS = {f.name for f in fields(StructuredOutputsParams)} - {*KINDS}
_FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
"""The types of a response_format, and their further fields."""
JSON_SCHEMA = ("name", "description", "schema", "strict")


@dataclass(frozen=True)
class GenerationRequest:
    """What a request asks for: prompts in the forms of `LLM.generate`, or the messages of a chat."""

    params: SamplingParams
    """With echo and logprobs, they ask for prompt_logprobs too."""
    prompts: Sequence[Mapping[str, Any]] = ()
    messages: Any = None
    """Not checked yet; None: prompts are given."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """How to apply the chat template: the fields of TEMPLATE that are given."""
    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    """Only requests of the same salt share the keys and values of prefixes."""
    echo: bool = False
    """Whether the prompt is returned before the output."""
    prompt_only: bool = False
    """Whether max_tokens is 0. One token is generated, and not returned."""
    prompt_logprobs: bool = False
    """Whether prompt_logprobs are returned in vLLM's shape."""
    return_token_ids: bool = False
    response_format: str = ""
    """Its field that params.structured_outputs are made from; empty: it is not given, or text."""
    stream: bool = False
    include_usage: bool = False
    """Whether the last chunk of a stream has the token counts."""
    continuous_usage: bool = False
    """Whether every chunk has them."""
    left_out: Collection[str] = ()
    """What of the request the model is not told, because it is about tools that this server cannot run."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """What a response of /v1/responses has of the request."""

    @property
    def chat(self) -> bool:
        """Whether this is a chat."""
        return self.messages is not None


def parse(url: str, body: Mapping[str, Any], defaults: SamplingParams, *, streams: bool = False) -> GenerationRequest:
    """Read the body of a request.

    Args:
        url: COMPLETIONS or CHAT.
        body: the JSON object.
        defaults: sampling parameters that the body does not have.
        streams: whether stream=true is supported.

    Raises:
        FieldError: a field is unknown or not supported; or there is no prompt.
        NanoinferError: a sampling parameter is out of range; its message begins with its name.
    """
    given = given_fields(url, body)
    sampling = {name: given[name] for name in SAMPLING if name in given}
    if (structured := _structured_outputs(given.get("response_format"))) is not None:
        sampling["structured_outputs"] = {**_only_options(given.get("structured_outputs", {})), **structured[0]}
    if url == CHAT:
        _convert_chat_fields(given, sampling)
    options: dict[str, Any] = _options(given, streams)
    if options["echo"] and type(given.get("max_tokens")) is int and given["max_tokens"] == 0:
        options["prompt_only"], sampling["max_tokens"] = True, 1
    options["response_format"] = structured[1] if structured is not None else ""
    try:
        params = with_fields(defaults, sampling)
    except NanoinferError as e:
        raise as_sent(e, response_format=options["response_format"]) from None
    options["prompt_logprobs"] = params.prompt_logprobs is not None
    if options["stream"]:
        _check_stream(params, options)
    if options["echo"] and params.output_token_ids:
        raise FieldError("echo returns the prompt before the output, which output_token_ids continues: leave it out",
                         "echo")  # fmt: skip
    if options["echo"] and params.logprobs is not None:
        counts = (params.logprobs, params.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=WHOLE_VOCABULARY if WHOLE_VOCABULARY in counts else max(counts))
    if url == CHAT:
        if "messages" not in given:
            raise FieldError("messages is missing: give a list of {'role': ..., 'content': ...}", "messages")
        return GenerationRequest(params, messages=given["messages"], **options)
    found = prompts("prompt", given.get("prompt"), MAX_PROMPTS)
    if params.output_token_ids and len(found) > 1:
        raise FieldError(f"output_token_ids continues one output, prompt has {len(found)} items: give one", "prompt")
    return GenerationRequest(params, found, **options)


def given_fields(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that are given. Raises FieldError if one of them is not of the route."""
    given = {name: _whole(value) if name in INTEGERS else value for name, value in body.items() if value is not None}
    check_names(given, url)
    return given


def num_top(count: int | None, found: Sequence[Mapping[int, Any] | None] | None) -> int:
    """Return how many of the most likely tokens `logprobs=count` asks for at each position.

    Args:
        count: WHOLE_VOCABULARY is the number of tokens at a position of `found`.
        found: log-probabilities of positions.
    """
    if count != WHOLE_VOCABULARY:
        return count or 0
    return max((len(step) for step in found or () if step is not None), default=0)


def with_fields(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with some fields replaced by JSON values. The keys of logit_bias may be strings.

    As other servers have it, stop="" is no stop string, seed=-1 a random one, and other seeds may be negative.

    Raises:
        NanoinferError: a value is out of range.
    """
    for name, kinds, what in (("stop", (str, list), "a string or a list"), ("stop_token_ids", list, "a list"),
                              ("bad_words", list, "a list"), ("allowed_token_ids", list, "a list"),
                              ("output_token_ids", list, "a list"), ("logit_bias", dict, "an object")):  # fmt: skip
        if given.get(name) is not None and not isinstance(given[name], kinds):
            raise NanoinferError(f"{name}={show(given[name])} is not {what}")
    if (bias := given.get("logit_bias")) is not None:
        given = {**given, "logit_bias": {_token_id(key): value for key, value in bias.items()}}
    if given.get("stop") == "":
        given = {**given, "stop": ()}
    if type(seed := given.get("seed")) is int and -(2**63) <= seed < 0:  # OpenAI's have 64 bits and a sign
        given = {**given, "seed": None if seed == -1 else seed + 2**64}
    return replace(defaults, **given)


def _options(given: Mapping[str, Any], streams: bool) -> dict[str, Any]:
    """Return the fields of GenerationRequest that are not about sampling."""
    found: dict[str, Any] = {}
    for name in ("echo", "stream", "return_token_ids"):
        found[name] = given.get(name, False)
        require_bool(name, found[name])
    found["template"] = template_options(given)
    if found["stream"] and not streams:
        raise FieldError("stream=True is not supported here: leave it out", "stream")
    found["model"] = given.get("model")
    if found["model"] is not None and not isinstance(found["model"], str):
        raise FieldError(f"model={show(found['model'])} is not a string", "model")
    return found | queue_options(given) | _stream_options(given.get("stream_options"), found["stream"])


def queue_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return priority and cache_salt of a request. Raises NanoinferError."""
    priority = require_int("priority", given.get("priority", 0), -(2**31), 2**31 - 1)
    salt = given.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise FieldError(f"cache_salt={show(salt)} is not a string of one or more characters", "cache_salt")
    return {"priority": priority, "cache_salt": salt}


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of TEMPLATE that are given. Raises NanoinferError."""
    found = {name: given[name] for name in TEMPLATE if name in given}
    for name in ("add_generation_prompt", "continue_final_message"):
        require_bool(name, found.get(name, True))
    for name, kind, what in (("chat_template_kwargs", dict, "an object"), ("documents", list, "a list")):
        if not isinstance(found.get(name, kind()), kind):
            raise FieldError(f"{name}={show(found[name])} is not {what}", name)
    return found | _tool_choice(found.get("tool_choice"), found.get("tools"))


def _tool_choice(choice: Any, tools: Any) -> dict[str, Any]:
    """Return tools and tool_choice for the forms that `LLM.chat` does not have: {"type": "auto"}, and allowed_tools."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("none", "auto", "required"):
        return {"tool_choice": kind}
    if kind != "allowed_tools":
        return {}
    allowed = choice.get(kind)
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list):
        raise FieldError(
            f"tool_choice={show(choice)} is not {{'type': 'allowed_tools', 'allowed_tools': {{'mode': 'auto' or"
            " 'required', 'tools': [...]}}", "tool_choice",
        )  # fmt: skip
    names, given = [*map(_tool_name, named)], tools if isinstance(tools, list) else []
    known = [*map(_tool_name, given)]
    if unknown := [name for name in names if name not in known]:
        raise FieldError(
            f"tool_choice: {show(unknown[0])} is the name of none of the {len(given)} tools", "tool_choice"
        )
    return {"tools": [tool for tool, name in zip(given, known, strict=True) if name in names], "tool_choice": mode}


def _tool_name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _stream_options(given: Any, stream: bool) -> dict[str, bool]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise FieldError(f"stream_options={show(given)} is not an object", "stream_options")
    if not stream:
        raise FieldError("stream_options needs stream=true", "stream_options")
    known: Mapping[str, Any] = FIELDS["stream_options"].schema["properties"]
    for name, value in given.items():
        if name not in known or not isinstance(value, (bool, type(None))):
            raise FieldError(f"stream_options.{name}={show(value)} is not supported: use {', '.join(known)}",
                             "stream_options")  # fmt: skip
    counts = bool(given.get("include_usage"))
    return {"include_usage": counts, "continuous_usage": counts and bool(given.get("continuous_usage_stats"))}


def _check_stream(params: SamplingParams, options: Mapping[str, Any]) -> None:
    if params.num_sequences > params.n:
        raise FieldError(
            f"best_of={params.best_of} is more than n={params.n}: the outputs are chosen at the end and cannot be"
            " streamed: leave stream or best_of out",
            "best_of",
        )
    if options["prompt_logprobs"]:
        raise FieldError("prompt_logprobs is not supported with stream=true: use echo and logprobs", "prompt_logprobs")


def _structured_outputs(response_format: Any) -> tuple[dict[str, Any], str] | None:
    """Return the structured_outputs that a response_format stands for, and its field that has them; None for text."""
    if response_format is None:
        return None
    given = dict(response_format) if isinstance(response_format, Mapping) else {}
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise FieldError(
            f"response_format={show(response_format)} is not supported: give an object whose type is text, json_object"
            " or json_schema", "response_format",
        )  # fmt: skip
    where, holder = "response_format", _known(given, "response_format", *_FORMATS[kind])
    if kind == "text":
        return None
    if kind == "json_object" and "schema" not in holder:
        return {"json_object": True}, where
    if kind == "json_schema":
        where, described = f"{where}.json_schema", given.get("json_schema")
        holder = _known(described if isinstance(described, Mapping) else {}, where, *JSON_SCHEMA)
    if not isinstance(schema := holder.get("schema"), Mapping):
        raise FieldError(f"{where}={show(holder)} has no schema: give {{'name': ..., 'schema': {{...}}}}",
                         "response_format")  # fmt: skip
    return {"json": schema}, where


def _known(given: Mapping[str, Any], where: str, *names: str) -> dict[str, Any]:
    """Return what is not null of an object within response_format. Raises FieldError for another name."""
    found = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in found if name not in names]:
        raise FieldError(f"{where}: the field {show(unknown[0])} is not supported: leave it out", "response_format")
    return found


def _only_options(structured: Any) -> Mapping[str, Any]:
    """Return structured_outputs that are given beside response_format. Raises FieldError if they say what to match."""
    if isinstance(structured, Mapping) and structured.keys() <= _OPTIONS:
        return structured
    raise FieldError(
        "response_format and structured_outputs are both given: give one; beside response_format, structured_outputs"
        f" may have {' and '.join(sorted(_OPTIONS))}", "response_format",
    )  # fmt: skip


def _convert_chat_fields(given: Mapping[str, Any], sampling: dict[str, Any]) -> None:
    """Add the fields that a chat request names differently to the sampling parameters."""
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise FieldError("max_tokens and max_completion_tokens are both given: give one", "max_completion_tokens")
        sampling["max_tokens"] = require_int("max_completion_tokens", given["max_completion_tokens"], 1)
    num_top = given.get("top_logprobs")
    if "logprobs" in given:
        require_bool("logprobs", given["logprobs"])
        sampling["logprobs"] = (num_top or 0) if given["logprobs"] else None
    if num_top not in (None, 0) and not given.get("logprobs"):
        raise FieldError(f"top_logprobs={show(num_top)} needs logprobs=true", "top_logprobs")


def prompts(name: str, given: Any, most: int) -> list[dict[str, Any]]:
    """Return the prompts of a field, at most `most`: a string, a list of token ids, or a list of these."""
    items = given if isinstance(given, list) and any(isinstance(p, (str, list)) for p in given) else [given]
    if given is None or given == [] or len(items) > most:
        what = "is missing" if given is None else f"has {len(given)} items"
        raise FieldError(f"{name} {what}: give a string, a list of token ids, or a list of 1 to {most} of these", name)
    for item in items:
        if not isinstance(item, (str, list)):
            raise FieldError(f"{name}={show(item)} is neither a text nor a list of token ids", name)
    return [{"prompt" if isinstance(item, str) else "prompt_token_ids": item} for item in items]


def _whole(value: Any) -> Any:
    """10.0 -> 10. Other values are left to be checked."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _token_id(key: Any) -> Any:
    """ "50256" -> 50256. Other keys are left for SamplingParams to refuse."""
    return int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,10}", key) else key
