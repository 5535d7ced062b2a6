"""Bodies of responses, and the parts of them that a stream's chunks have too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoinfer.errors import ResultError
from nanoinfer.openai_protocol.requests import GenerationRequest
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput

Decode = Callable[[Sequence[int]], str]


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON. Half a surrogate pair becomes an escape.

    Raises:
        ResultError: a number in it is not finite.
    """
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise ResultError("a log-probability is not finite (nan or infinity): try --dtype float32") from None
    return text.encode(errors="backslashreplace")


def response_body(
    request: GenerationRequest,
    outputs: Sequence[RequestOutput],
    *,
    request_id: str,
    model: str,
    created: int,
    decode: Decode,
) -> dict[str, Any]:
    """Return the body of a successful response.

    Args:
        request: from `parse`.
        outputs: of each prompt; choice i * n + k is output k of prompt i.
        request_id: what follows "cmpl-" or "chatcmpl-" in the id.
        model: name of the model.
        created: time in seconds since 1970.
        decode: returns the text of token ids, for echo.
    """
    choices = [_choice(request, o, output, decode) for output in outputs for o in output.outputs]
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": i, **choice} for i, choice in enumerate(choices)],
        "usage": usage(outputs, request.prompt_only),
    }
    if request.chat and request.return_token_ids:
        body["prompt_token_ids"] = outputs[0].prompt_token_ids
    return body


def usage(outputs: Sequence[RequestOutput], prompt_only: bool = False) -> dict[str, int]:
    """Return the token counts of a response. `prompt_only`: see `GenerationRequest`."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = 0 if prompt_only else sum(len(o.token_ids) for output in outputs for o in output.outputs)
    return token_counts(num_prompt, num_output)


def token_counts(num_prompt: int, num_output: int) -> dict[str, int]:
    """Return OpenAI's usage."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def plain_logprobs(found: Sequence[Mapping[int, Logprob] | None]) -> list[dict[int, dict[str, Any]] | None]:
    """Return log-probabilities for JSON: for each position token id -> fields of `Logprob`."""
    return [None if step is None else {token: vars(entry) for token, entry in step.items()} for step in found]


def prompt_text(output: RequestOutput, decode: Decode) -> str:
    """Return the text of a prompt, for echo."""
    return decode(output.prompt_token_ids) if output.prompt is None else output.prompt


def token_fields(o: CompletionOutput) -> dict[str, Any]:
    """Return the tokens of an output, and with speculation which of them are accepted proposals."""
    accepted = getattr(o, "draft_accepted", None)
    return {"token_ids": o.token_ids, **({} if accepted is None else {"draft_accepted": accepted})}


def _choice(request: GenerationRequest, o: CompletionOutput, output: RequestOutput, decode: Decode) -> dict[str, Any]:
    text, found, finish_reason = o.text, o.logprobs, o.finish_reason
    steps: list[Mapping[int, Logprob] | None] | None = None if found is None else [*found]
    if request.prompt_only:
        text, steps, finish_reason = "", None if steps is None else [], "length"
    if request.echo:
        text = prompt_text(output, decode) + text
        if steps is not None:
            steps = [*(output.prompt_logprobs or ()), *steps]
    ids = output.prompt_token_ids if request.echo else []
    logprobs = None
    if steps is not None:
        top = request.params.logprobs or 0
        logprobs = chat_logprobs(steps, top) if request.chat else completion_logprobs(steps, top, ids, decode)
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
    choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
    if request.prompt_logprobs and output.prompt_logprobs is not None:  # as vLLM has it
        choice["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
    if request.return_token_ids:
        choice |= token_fields(o)
        if not request.chat:
            choice["prompt_token_ids"] = output.prompt_token_ids
    return choice


def completion_logprobs(
    found: Sequence[Mapping[int, Logprob] | None], top: int, ids: Sequence[int], decode: Decode, offset: int = 0
) -> dict[str, Any]:
    """Return the log-probabilities of a completion.

    Args:
        found: for each position the token first; None: a prompt's first token, which has no context.
        top: most likely tokens to return for each position.
        ids: the prompt's tokens, if `found` begins with them.
        decode: returns the text of the prompt's first token.
        offset: characters before the first position.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    most_likely: list[dict[str, float] | None] = []
    offsets = []
    for i, step in enumerate(found):
        offsets.append(offset)
        if step is None:
            tokens.append(decode(ids[i : i + 1]))
            values.append(None)
            most_likely.append(None)
        else:
            token, entry = next(iter(step.items()))
            tokens.append(_text(token, entry))
            values.append(entry.logprob)
            most_likely.append({_text(t, e): e.logprob for t, e in step.items() if t == token or e.rank <= top})
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": most_likely, "text_offset": offsets}


def chat_logprobs(found: Sequence[Mapping[int, Logprob] | None], num_top: int) -> dict[str, Any]:
    """Return the log-probabilities of a chat's message. Each item of `found` has the sampled token first."""
    content = []
    for step in filter(None, found):
        by_rank = sorted(step.items(), key=lambda item: item[1].rank)[:num_top]
        content.append({**_token(*next(iter(step.items()))), "top_logprobs": [_token(*item) for item in by_rank]})
    return {"content": content}


def _token(token: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token, entry)
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode(errors="replace"))}


def _text(token: int, entry: Logprob) -> str:
    """Return a token's text; without a tokenizer its id, as vLLM writes it."""
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token
