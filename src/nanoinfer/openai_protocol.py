"""OpenAI's shapes of requests and responses, for batch files and for an HTTP server.

`parse` reads the body of a request to /v1/completions or /v1/chat/completions. `response_body` and `error_body` return
the body of its response. Besides OpenAI's own fields, a request may have all fields of `SamplingParams` (vLLM's extra
fields: top_k, min_p, ...). A field that is null has its default. A field that is not supported is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nanoinfer.checks import require_bool, require_int, show
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_PROMPTS = 128
"""Prompts of one request to /v1/completions."""
SAMPLING = tuple(f.name for f in fields(SamplingParams))
IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that clients send and that have no effect on the output."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
"""Fields that are supported with these values only."""
_COMPLETION_ONLY = ("prompt", "best_of", "echo", "suffix")
_CHAT_ONLY = (
    "messages", "chat_template_kwargs", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "modalities",
)  # fmt: skip


class FieldError(NanoinferError):
    """A field of a request is unknown, missing or not supported, or has a bad value.

    Args:
        message: one line.
        param: name of the field.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class GenerationRequest:
    """What a request asks for: prompts in the forms of `LLM.generate`, or the messages of a chat."""

    params: SamplingParams
    prompts: Sequence[Mapping[str, Any]] = ()
    messages: Any = None
    """Not checked yet; None: prompts are given."""
    chat_template_kwargs: Mapping[str, Any] | None = None


def parse(url: str, body: Mapping[str, Any], defaults: SamplingParams) -> GenerationRequest:
    """Read the body of a request.

    Args:
        url: COMPLETIONS or CHAT.
        body: the JSON object.
        defaults: sampling parameters that the body does not have.

    Raises:
        FieldError: a field is unknown or not supported; or there is no prompt.
        NanoinferError: a sampling parameter is out of range; its message begins with its name.
    """
    chat = url == CHAT
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given, url)
    sampling = {name: given[name] for name in SAMPLING if name in given}
    if (structured := _structured_outputs(given.get("response_format"))) is not None:
        if "structured_outputs" in given:
            raise FieldError("response_format and structured_outputs are both given: give one", "response_format")
        sampling["structured_outputs"] = structured
    if chat:
        _convert_chat_fields(given, sampling)
        params = with_fields(defaults, sampling)
        if "messages" not in given:
            raise FieldError("messages is missing: give a list of {'role': ..., 'content': ...}", "messages")
        return GenerationRequest(params, (), given["messages"], given.get("chat_template_kwargs"))
    params = with_fields(defaults, sampling)
    if given.get("best_of", params.n) != params.n:
        raise FieldError(f"best_of={show(given['best_of'])} is not supported unless it is n={params.n}", "best_of")
    return GenerationRequest(params, _prompts(given.get("prompt")))


def with_fields(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with some fields replaced by JSON values. The keys of logit_bias may be strings.

    Raises:
        NanoinferError: a value is out of range.
    """
    bias = given.get("logit_bias")
    if isinstance(bias, Mapping):
        given = {**given, "logit_bias": {_token_id(key): value for key, value in bias.items()}}
    return replace(defaults, **given)


def response_body(
    request: GenerationRequest, outputs: Sequence[RequestOutput], *, request_id: str, model: str, created: int
) -> dict[str, Any]:
    """Return the body of a successful response.

    Args:
        request: from `parse`.
        outputs: of each prompt; choice i * n + k is output k of prompt i.
        request_id: what follows "cmpl-" or "chatcmpl-" in the id.
        model: name of the model.
        created: time in seconds since 1970.
    """
    chat = request.messages is not None
    choices = [_choice(o, chat, request.params.logprobs or 0, output) for output in outputs for o in output.outputs]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": i, **choice} for i, choice in enumerate(choices)],
        "usage": usage(outputs),
    }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Return the token counts of a response."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def status_code(error: NanoinferError) -> int:
    """Return the HTTP status: 500 for a request that failed while it ran, 400 for one that was refused."""
    return 500 if isinstance(error, ResultError) else 400


def error_body(error: NanoinferError) -> dict[str, Any]:
    """Return the body of a response to a request that failed or was refused."""
    kind = "server_error" if isinstance(error, ResultError) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": _param(error), "code": None}}


def _param(error: NanoinferError) -> str | None:
    """Return the name of the field that an error is about, if it is known."""
    if isinstance(error, FieldError):
        return error.param
    found = re.match(r"\w+", str(error))
    return found[0] if found and found[0] in (*SAMPLING, *_COMPLETION_ONLY, *_CHAT_ONLY) else None


def _check_names(given: Mapping[str, Any], url: str) -> None:
    foreign = _COMPLETION_ONLY if url == CHAT else _CHAT_ONLY
    known = {*SAMPLING, *IGNORED, *_NEUTRAL, *_COMPLETION_ONLY, *_CHAT_ONLY, "response_format"} - set(foreign)
    for name, value in given.items():
        if name not in known:
            raise FieldError(f"the field {show(name)} is not supported for {url}: leave it out", name)
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise FieldError(f"{name}={show(value)} is not supported: leave it out", name)


def _structured_outputs(response_format: Any) -> dict[str, Any] | None:
    """Return the structured_outputs that OpenAI's response_format stands for; None for plain text."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise FieldError(
            f"response_format={show(response_format)} is not supported: give an object whose type is text, json_object"
            " or json_schema", "response_format",
        )  # fmt: skip
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise FieldError(
            f"response_format.json_schema={show(described)} has no schema: give {{'name': ..., 'schema': {{...}}}}",
            "response_format",
        )
    return {"json": schema}


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
    if num_top is not None and not given.get("logprobs"):
        raise FieldError(f"top_logprobs={show(num_top)} needs logprobs=true", "top_logprobs")


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    """Return the prompts of a completion: a string, a list of token ids, or a list of these."""
    items = prompt if isinstance(prompt, list) and any(isinstance(p, (str, list)) for p in prompt) else [prompt]
    if prompt is None or prompt == [] or len(items) > MAX_PROMPTS:
        what = "is missing" if prompt is None else f"has {len(prompt)} items"
        raise FieldError(
            f"prompt {what}: give a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these", "prompt"
        )
    for item in items:
        if not isinstance(item, (str, list)):
            raise FieldError(f"prompt={show(item)} is neither a string nor a list of token ids", "prompt")
    return [{"prompt" if isinstance(item, str) else "prompt_token_ids": item} for item in items]


def _token_id(key: Any) -> Any:
    """ "50256" -> 50256. Other keys are left for SamplingParams to refuse."""
    return int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,10}", key) else key


def plain_logprobs(found: Sequence[Mapping[int, Logprob] | None]) -> list[dict[int, dict[str, Any]] | None]:
    """Return log-probabilities for JSON: for each position token id -> fields of `Logprob`."""
    return [None if step is None else {token: vars(entry) for token, entry in step.items()} for step in found]


def _choice(o: CompletionOutput, chat: bool, num_top: int, output: RequestOutput) -> dict[str, Any]:
    text: dict[str, Any] = {"message": {"role": "assistant", "content": o.text}} if chat else {"text": o.text}
    logprobs = None
    if o.logprobs is not None:
        logprobs = _chat_logprobs(o.logprobs, num_top) if chat else _logprobs(o.logprobs)
    choice = {**text, "logprobs": logprobs, "finish_reason": o.finish_reason}
    if output.prompt_logprobs is not None:  # as vLLM has it
        choice["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
    return choice


def _logprobs(found: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
    """Return the log-probabilities of a completion. Each item of `found` has the sampled token first."""
    sampled = [next(iter(step.items())) for step in found]
    tokens = [_text(token, entry) for token, entry in sampled]
    offsets = [0]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for _, entry in sampled],
        "top_logprobs": [{_text(token, entry): entry.logprob for token, entry in step.items()} for step in found],
        "text_offset": offsets[:-1],
    }


def _chat_logprobs(found: Sequence[Mapping[int, Logprob]], num_top: int) -> dict[str, Any]:
    """Return the log-probabilities of a chat's message. Each item of `found` has the sampled token first."""
    content = []
    for step in found:
        by_rank = sorted(step.items(), key=lambda item: item[1].rank)[:num_top]
        content.append({**_token(*next(iter(step.items()))), "top_logprobs": [_token(*item) for item in by_rank]})
    return {"content": content}


def _token(token: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token, entry)
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode(errors="replace"))}


def _text(token: int, entry: Logprob) -> str:
    """Return a token's text; without a tokenizer its id, as vLLM writes it."""
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
