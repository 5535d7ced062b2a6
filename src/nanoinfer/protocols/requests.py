"""Read the bodies of requests to /v1/completions, /v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nanoinfer.errors import NanoinferError, show
from nanoinfer.protocols.errors import as_sent
from nanoinfer.protocols.fields import CHAT, MAX_PROMPTS, SAMPLING, TEMPLATE, FieldError, read_fields
from nanoinfer.sampling_params import KINDS, WHOLE_VOCABULARY, SamplingParams, StructuredOutputsParams

_OPTIONS = {f.name for f in fields(StructuredOutputsParams)} - {*KINDS}
_FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
"""The types of a response_format, and their further fields."""


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
    values = read_fields(url, body)
    sampling = {name: values[name] for name in SAMPLING if name in values}
    if (structured := _structured_outputs(values.get("response_format"))) is not None:
        sampling["structured_outputs"] = {**_only_options(values.get("structured_outputs", {})), **structured[0]}
    if url == CHAT:
        _convert_chat_fields(values, sampling)
    options = _options(values, streams)
    options["response_format"] = structured[1] if structured is not None else ""
    try:
        params = with_fields(defaults, sampling)
    except NanoinferError as e:
        raise as_sent(e, response_format=options["response_format"]) from None
    if options["stream"] and params.num_sequences > params.n:
        raise FieldError(
            f"best_of={params.best_of} is more than n={params.n}: the outputs are chosen at the end and cannot be"
            " streamed: leave stream or best_of out",
            "best_of",
        )
    if options["echo"]:
        params = replace(params, prompt_logprobs=params.logprobs)
    if url == CHAT:
        return GenerationRequest(params, messages=values["messages"], **options)
    return GenerationRequest(params, prompts("prompt", values["prompt"], MAX_PROMPTS), **options)


def num_top(count: int | None, steps: Sequence[Mapping[int, Any] | None] | None) -> int:
    """Return how many of the most likely tokens `logprobs=count` asks for at each position.

    Args:
        count: WHOLE_VOCABULARY is the number of tokens at a position of `found`.
        found: log-probabilities of positions.
    """
    if count != WHOLE_VOCABULARY:
        return count or 0
    return max((len(step) for step in steps or () if step is not None), default=0)


def with_fields(defaults: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with some fields replaced by JSON values. The keys of logit_bias may be strings.

    As other servers have it, stop="" is no stop string, seed=-1 a random one, and other seeds may be negative.

    Raises:
        NanoinferError: a value is out of range.
    """
    for name, kinds, what in (("stop", (str, list), "a string or a list"), ("stop_token_ids", list, "a list"),
                              ("bad_words", list, "a list"), ("allowed_token_ids", list, "a list"),
                              ("logit_bias", dict, "an object")):  # fmt: skip
        if values.get(name) is not None and not isinstance(values[name], kinds):
            raise NanoinferError(f"{name}={show(values[name])} is not {what}")
    if (bias := values.get("logit_bias")) is not None:
        values = {**values, "logit_bias": {_token_id(key): value for key, value in bias.items()}}
    if values.get("stop") == "":
        values = {**values, "stop": ()}
    if type(seed := values.get("seed")) is int and -(2**63) <= seed < 0:  # OpenAI's have 64 bits and a sign
        values = {**values, "seed": None if seed == -1 else seed + 2**64}
    return replace(defaults, **values)


def _options(values: Mapping[str, Any], streams: bool) -> dict[str, Any]:
    """Return the fields of GenerationRequest that are not about sampling."""
    stream, of_stream = values.get("stream", False), values.get("stream_options", {})
    if stream and not streams:
        raise FieldError("stream=True is not supported here: leave it out", "stream")
    if "stream_options" in values and not stream:
        raise FieldError("stream_options needs stream=true", "stream_options")
    counts = bool(of_stream.get("include_usage"))
    return {
        **{name: values.get(name, False) for name in ("echo", "stream", "return_token_ids")},
        "template": template_options(values),
        "model": values.get("model"),
        **queue_options(values),
        "include_usage": counts,
        "continuous_usage": counts and bool(of_stream.get("continuous_usage_stats")),
    }


def queue_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return priority and cache_salt of a request."""
    return {"priority": values.get("priority", 0), "cache_salt": values.get("cache_salt")}


def template_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of TEMPLATE that are given. Raises FieldError."""
    options = {name: values[name] for name in TEMPLATE if name in values}
    choice = options.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("none", "auto", "required"):
        options["tool_choice"] = choice["type"]
    return options


def _structured_outputs(response_format: Any) -> tuple[dict[str, Any], str] | None:
    """Return the structured_outputs that a response_format stands for, and its field that has them; None for text."""
    if response_format is None:
        return None
    kind, where = response_format["type"], "response_format"
    if others := [name for name in response_format if name != "type" and name not in _FORMATS[kind]]:
        raise FieldError(f"{where}: the field {show(others[0])} is not supported for {kind}: leave it out", where)
    if kind != "json_schema":
        schema = response_format.get("schema")
        return None if kind == "text" else ({"json_object": True} if schema is None else {"json": schema}, where)
    if (described := response_format.get(kind)) is None:
        raise FieldError(f"{where} has no json_schema: give {{'name': ..., 'schema': {{...}}}}", where)
    return {"json": described["schema"]}, f"{where}.{kind}"


def _only_options(structured: Any) -> Mapping[str, Any]:
    """Return structured_outputs that are given beside response_format. Raises FieldError if they say what to match."""
    if isinstance(structured, Mapping) and structured.keys() <= _OPTIONS:
        return structured
    raise FieldError(
        "response_format and structured_outputs are both given: give one; beside response_format, structured_outputs"
        f" may have {' and '.join(sorted(_OPTIONS))}", "response_format",
    )  # fmt: skip


def _convert_chat_fields(values: Mapping[str, Any], sampling: dict[str, Any]) -> None:
    """Add the fields that a chat request names differently to the sampling parameters."""
    if "max_completion_tokens" in values:
        if "max_tokens" in values:
            raise FieldError("max_tokens and max_completion_tokens are both given: give one", "max_completion_tokens")
        sampling["max_tokens"] = values["max_completion_tokens"]
    num_top = values.get("top_logprobs")
    if "logprobs" in values:
        sampling["logprobs"] = (num_top or 0) if values["logprobs"] else None
    if num_top not in (None, 0) and not values.get("logprobs"):
        raise FieldError(f"top_logprobs={show(num_top)} needs logprobs=true", "top_logprobs")


def prompts(name: str, values: Any, limit: int) -> list[dict[str, Any]]:
    """Return the prompts of a field, at most `most`: a string, a list of token ids, or a list of these."""
    items = values if isinstance(values, list) and any(isinstance(p, (str, list)) for p in values) else [values]
    if values == [] or len(items) > limit:
        raise FieldError(
            f"{name} has {len(values)} items: give a string, a list of token ids, or a list of 1 to {limit} of these",
            name,
        )
    for item in items:
        if not isinstance(item, (str, list)):
            raise FieldError(f"{name}={show(item)} is neither a text nor a list of token ids", name)
    return [{"prompt" if isinstance(item, str) else "prompt_token_ids": item} for item in items]


def _token_id(key: Any) -> Any:
    """ "50256" -> 50256. Other keys are left for SamplingParams to refuse."""
    return int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,10}", key) else key


@dataclass(frozen=True)
class TokenizeRequest:
    """What to tokenize: a text or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    """Not checked yet; None: a prompt is given."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """How to apply the chat template: the fields of TEMPLATE that are given."""
    add_special_tokens: bool = True


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Read the body of a request to /tokenize. Raises FieldError."""
    values = read_fields("/tokenize", body)
    if ("prompt" in values) == ("messages" in values):
        raise FieldError("give one of prompt and messages", "prompt")
    options = {name: value for name, value in values.items() if name not in TEMPLATE}
    return TokenizeRequest(**options, template=template_options(values))


def parse_detokenize(body: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """Return the model and the token ids of a request to /detokenize. Raises FieldError."""
    values = read_fields("/detokenize", body)
    if not all(type(token) is int for token in values["tokens"]):
        raise FieldError(f"tokens={show(values['tokens'])} is not a list of token ids", "tokens")
    return values.get("model"), values["tokens"]
