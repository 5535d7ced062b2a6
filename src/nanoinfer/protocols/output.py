"""Bodies of responses of /v1/completions and /v1/chat/completions, chunks of streams.

A chunk has the new text of one choice. What does not change is encoded once for each response, so a token costs one
encoding of its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import AnswerDelta, CallDelta, CompletionOutput, Logprob, ReasoningDelta, RequestOutput
from nanoinfer.protocols.errors import as_sent, error_body, renamed
from nanoinfer.protocols.fields import CHAT, COMPLETIONS
from nanoinfer.protocols.requests import GenerationRequest, num_top, parse
from nanoinfer.protocols.shared import Decode, Outputs, Reply, Shape, StreamWriter
from nanoinfer.utils.json_pieces import encode, encode_text, json_bytes, json_strings

Steps = Sequence[Mapping[int, Logprob] | None]
"""Log-probabilities of positions, for each the token first; None: a prompt's first token, which has no context."""


def response_body(request: GenerationRequest, outputs: Sequence[RequestOutput], reply: Reply) -> dict[str, Any]:
    """Return the body of a successful response, for `json_strings`.

    Args:
        request: from `parse`.
        outputs: of each prompt; choice i * n + k is output k of prompt i.
        reply: what responses of all kinds have.
    """
    choices = []
    for output in outputs:
        prompt = _echoed(request, output, reply.decode)
        choices += [_choice(request, output, o, *prompt) for o in output.outputs]
    body = head(request, reply) | {
        "choices": tuple({"index": i, **choice} for i, choice in enumerate(choices)),
        "usage": usage(outputs) | prompt_details(sum(o.num_cached_tokens for o in outputs)),
    }
    if request.chat and request.return_token_ids:
        body["prompt_token_ids"] = outputs[0].prompt_token_ids
    return body


def head(request: GenerationRequest, reply: Reply, suffix: str = "") -> dict[str, Any]:
    """Return the fields that describe a response, or with `suffix` a chunk of a chat's. Args as for `response_body`."""
    id_, kind = ("chatcmpl", f"chat.completion{suffix}") if request.chat else ("cmpl", "text_completion")
    return {"id": f"{id_}-{reply.request_id}", "object": kind, "created": reply.created, "model": reply.model}


def num_values(
    request: GenerationRequest, outputs: Sequence[RequestOutput], prompts: Sequence[RequestOutput] | None = None
) -> int:
    """Return about how many numbers and strings a response, or a part of a stream, has.

    Args:
        request: from `parse`.
        outputs: what is written.
        prompts: those of them whose prompts are written, too; None: all.
    """
    params = request.params
    total = sum(
        len(o.token_ids) * (1 + num_top(params.logprobs, o.logprobs)) for output in outputs for o in output.outputs
    )
    if in_prompt := request.echo + request.return_token_ids:
        for output in outputs if prompts is None else prompts:
            top = num_top(params.prompt_logprobs, output.prompt_logprobs)
            total += params.n * in_prompt * len(output.prompt_token_ids) * (1 + top)
    return total


def check_finite(outputs: Sequence[RequestOutput]) -> None:
    """Check that the log-probabilities can be written as JSON. Raises ResultError."""
    for output in outputs:
        for steps in (output.prompt_logprobs, *(o.logprobs for o in output.outputs)):
            for step in steps or ():
                if step is not None and not all(math.isfinite(entry.logprob) for entry in step.values()):
                    raise ResultError("a log-probability is not finite (nan or infinity): try --dtype float32")


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the token counts of a response."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    counts = [o.num_reasoning_tokens for output in outputs for o in output.outputs]
    reasoning = [count for count in counts if count is not None]
    return token_counts(num_prompt, num_output, sum(reasoning) if reasoning else None)


def token_counts(num_prompt: int, num_output: int, num_reasoning: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage. `num_reasoning` of the output's tokens are those of reasoning; None: it has none."""
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
    details = {"reasoning_tokens": num_reasoning}
    return counts if num_reasoning is None else {**counts, "completion_tokens_details": details}


def prompt_details(num_cached: int) -> dict[str, Any]:
    """Return what a usage has about the prompts. Args: num_cached: their tokens that were in the KV cache."""
    return {"prompt_tokens_details": {"cached_tokens": num_cached}}


def message_fields(o: CompletionOutput) -> dict[str, Any]:
    """Return the message of a chat's output."""
    if (message := o.message) is None:
        return {"role": "assistant", "content": o.text}
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning is not None:
        fields |= reasoning_fields(message.reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def reasoning_fields(text: str) -> dict[str, str]:
    """Return reasoning by its two names: DeepSeek's, which most clients read, and the one of newer servers."""
    return {"reasoning_content": text, "reasoning": text}


def finish_reason_of(o: CompletionOutput) -> str | None:
    """Return OpenAI's finish_reason. An answer that a stop string ended within a call has stop."""
    calls = o.message is not None and bool(o.message.tool_calls) and not o.message.ends_in_call
    return "tool_calls" if calls and o.finish_reason == "stop" else o.finish_reason


def plain_logprobs(steps: Steps) -> list[dict[int, dict[str, Any]] | None]:
    """Return log-probabilities for batch files: for each position token id -> fields of `Logprob`."""
    return [None if step is None else {token: _fields(entry) for token, entry in step.items()} for step in steps]


def _fields(entry: Logprob) -> dict[str, Any]:
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}


def token_fields(o: CompletionOutput) -> dict[str, Any]:
    """Return the tokens of an output, and with speculation which of them are accepted proposals."""
    accepted = getattr(o, "draft_accepted", None)
    return {"token_ids": o.token_ids, **({} if accepted is None else {"draft_accepted": accepted})}


def _echoed(request: GenerationRequest, output: RequestOutput, decode: Decode) -> tuple[str, dict[str, list[Any]]]:
    """Return what echo puts before each output of a prompt: its text, and if they are computed its log-probabilities.

    Args:
        request: from `parse`.
        output: an output of the prompt.
        decode: returns the text of token ids.
    """
    if not request.echo:
        return "", {}
    text, ids = output.prompt, output.prompt_token_ids
    if text is None or request.params.truncate_prompt_tokens is not None:
        text = decode(ids)
    if (steps := output.prompt_logprobs) is None:
        return text, {}
    return text, completion_logprobs(steps, num_top(request.params.logprobs, steps), 0, decode(ids[:1]))


def _choice(
    request: GenerationRequest,
    output: RequestOutput,
    o: CompletionOutput,
    prompt: str,
    prompt_logprobs: Mapping[str, list[Any]],
) -> dict[str, Any]:
    logprobs: Mapping[str, list[Any]] | None = None
    if (steps := o.logprobs) is not None:
        top = num_top(request.params.logprobs, steps)
        if request.chat:
            logprobs = {"content": chat_logprobs(steps, top)}
        else:
            before = sum(map(len, prompt_logprobs.get("tokens", ())))
            logprobs = completion_logprobs(steps, top, before)
            logprobs = {name: [*prompt_logprobs.get(name, ()), *items] for name, items in logprobs.items()}
    choice: dict[str, Any] = {"message": message_fields(o)} if request.chat else {"text": prompt + o.text}
    choice |= {"logprobs": logprobs, "finish_reason": finish_reason_of(o)}
    if request.return_token_ids:
        choice |= token_fields(o)
        if not request.chat:
            choice["prompt_token_ids"] = output.prompt_token_ids
    return choice


def completion_logprobs(steps: Steps, top: int, before: int, first: str = "") -> dict[str, list[Any]]:
    """Return the log-probabilities of a completion.

    Args:
        steps: of the positions.
        top: most likely tokens to return for each position.
        before: number of characters before the first position.
        first: text of the token without log-probabilities.
    """
    texts = [first if step is None else _text(*next(iter(step.items()))) for step in steps]
    return {
        "tokens": texts,
        "token_logprobs": [None if step is None else next(iter(step.values())).logprob for step in steps],
        "top_logprobs": [None if step is None else _most_likely(step, top) for step in steps],
        "text_offset": [*accumulate(map(len, texts), initial=before)][:-1],
    }


def _most_likely(step: Mapping[int, Logprob], top: int) -> dict[str, float]:
    """Return the log-probabilities of a position's token and of the most likely ones, by their texts."""
    sampled, values = next(iter(step)), dict[str, float]()
    for token, entry in step.items():
        if token == sampled or entry.rank <= top:  # parts of characters may have the same text
            text = _text(token, entry)
            values[f"token_id:{token}" if text in values else text] = entry.logprob
    return values


def chat_logprobs(steps: Steps, num_top: int) -> list[dict[str, Any]]:
    """Return the log-probabilities of a chat's message. Each item of `steps` has the sampled token first."""
    content = []
    for step in filter(None, steps):
        by_rank = sorted(step.items(), key=lambda item: item[1].rank)[:num_top]
        content.append({**_token(*next(iter(step.items()))), "top_logprobs": [_token(*item) for item in by_rank]})
    return content


def _token(token: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token, entry)
    data = text.encode(errors="replace") if entry.token_bytes is None else entry.token_bytes
    return {"token": text, "logprob": entry.logprob, "bytes": list(data)}


def _text(token: int, entry: Logprob) -> str:
    """Return a token's text; without a tokenizer its id, as vLLM writes it."""
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


DONE = b"data: [DONE]\n\n"


class ChunkWriter(StreamWriter):
    """Encodes the chunks of one response. Args as for `StreamWriter`."""

    def __init__(self, request: GenerationRequest, reply: Reply) -> None:
        self._request, self._decode = request, reply.decode
        begin = encode(head(request, reply, ".chunk"))
        self._head = f'data: {begin[:-1]},"choices":['
        self._name, before, after = ("delta", '{"content":', "}") if request.chat else ("text", "", "")
        # what is between the index, the text and the finish reason of a choice without log-probabilities
        self._around = f',"{self._name}":{before}', f'{after},"logprobs":null,"finish_reason":'
        self._end = ',"usage":null}\n\n' if request.include_usage else "}\n\n"  # of a chunk without token counts
        self._num_prompts = 1 if request.chat else len(request.prompts)
        self._begins = request.chat or request.echo or request.return_token_ids
        self._num_prompt: dict[int, int] = {}  # tokens of each prompt whose first output has come
        self._num_output = self._num_cached = 0
        self._num_reasoning: int | None = None
        self._offsets: dict[int, int] = {}  # characters of the tokens of each choice, with logprobs

    def num_values(self, new: Outputs) -> int:
        """Return about how many numbers and strings the chunks of new outputs have; 0 if a token has few."""
        if self._request.params.logprobs is None and len(self._num_prompt) == self._num_prompts:
            return 0
        begun = [output for i, output in new if i not in self._num_prompt]
        return num_values(self._request, [output for _, output in new], begun)

    def events(self, new: Outputs) -> Iterator[str]:
        """Yield the chunks of new outputs. Raises as `StreamWriter.events`."""
        request = self._request
        for i, output in new:
            if i not in self._num_prompt:
                self._num_prompt[i] = len(output.prompt_token_ids)
                self._num_cached += output.num_cached_tokens
                if self._begins:
                    yield from self._first(i, output)
            for o in output.outputs:
                index = i * request.params.n + o.index
                self._num_output += len(o.token_ids)
                if o.message_deltas is not None or o.logprobs is not None:
                    for choice in self._choices(index, o):
                        yield from self._chunk((encode(choice),) if o.logprobs is None else json_strings(choice))
                elif o.text or o.finish_reason or request.return_token_ids:
                    # else a part of a character, or of what may become a stop string
                    before, after = self._around
                    reason = f'"{o.finish_reason}"' if o.finish_reason else "null"
                    more = _token_json(o) if request.return_token_ids else ""
                    end = self._counted() if request.continuous_usage else self._end
                    yield f'{self._head}{{"index":{index}{before}{encode_text(o.text)}{after}{reason}{more}}}]{end}'

    def end(self) -> bytes:
        """Return the chunk of the token counts, if it was asked for, and the end of the stream."""
        if not self._request.include_usage:
            return DONE
        return f'{self._head}],"usage":{self._counts()}}}\n\n'.encode() + DONE

    def error(self, error: NanoinferError) -> bytes:
        """Return the last event of a stream that has failed."""
        return b"data: " + json_bytes(error_body(error)) + b"\n\n"

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of tokens in the prompts, and generated."""
        return sum(self._num_prompt.values()), self._num_output

    def _first(self, i: int, output: RequestOutput) -> Iterator[str]:
        """Yield the first chunks of a prompt's choices: the role of a chat; with echo or token ids, the prompt."""
        request = self._request
        prompt, logprobs = _echoed(request, output, self._decode)
        choice: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}} if request.chat else {"text": prompt}
        choice |= {"logprobs": logprobs or None, "finish_reason": None}
        ids = output.prompt_token_ids if request.return_token_ids else None
        if ids is not None and not request.chat:
            choice |= {"token_ids": [], "prompt_token_ids": ids}
        for index in range(i * request.params.n, (i + 1) * request.params.n):
            yield from self._chunk(json_strings({"index": index, **choice}), ids if request.chat else None)
            self._offsets[index] = sum(map(len, logprobs.get("tokens", ())))

    def _choices(self, index: int, o: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the choices of an output's chunks: of a message one for each delta, and one for its end."""
        request, deltas = self._request, o.message_deltas
        texts: list[Any] = [{"content": o.text} if request.chat else o.text]
        if deltas is not None:
            texts = [_delta_fields(delta) for delta in deltas]
            if o.finish_reason is not None or (not texts and (request.return_token_ids or o.logprobs is not None)):
                texts.append({})
            if o.num_reasoning_tokens is not None:
                self._num_reasoning = (self._num_reasoning or 0) + o.num_reasoning_tokens
        for i, text in enumerate(texts):
            choice = {"index": index, self._name: text, "logprobs": None, "finish_reason": None}
            if i == 0 and o.logprobs is not None:
                choice["logprobs"] = self._logprobs(index, o.logprobs)
            if i == len(texts) - 1:
                choice["finish_reason"] = finish_reason_of(o)
                if request.return_token_ids:  # a client that has a token has all text that it releases
                    choice |= token_fields(o)
            yield choice

    def _logprobs(self, index: int, steps: Sequence[Mapping[int, Logprob]]) -> dict[str, list[Any]]:
        request, top = self._request, num_top(self._request.params.logprobs, steps)
        if request.chat:
            return {"content": chat_logprobs(steps, top)}
        offset = self._offsets.get(index, 0)
        logprobs = completion_logprobs(steps, top, offset)
        self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return logprobs

    def _chunk(self, choice: Iterable[str], ids: list[int] | None = None) -> Iterator[str]:
        """Yield a chunk: the JSON of its choice, and the tokens of a chat's prompt."""
        yield self._head
        yield from choice
        yield "]"
        if ids is not None:
            yield ',"prompt_token_ids":'
            yield from json_strings(ids)
        yield self._counted() if self._request.continuous_usage else self._end

    def _counted(self) -> str:
        """Return the end of a chunk with the token counts so far."""
        return f',"usage":{self._counts()}}}\n\n'

    def _counts(self) -> str:
        return encode(token_counts(*self.num_tokens, self._num_reasoning) | prompt_details(self._num_cached))


def _token_json(o: CompletionOutput) -> str:
    """Return the tokens of an output as further fields. A list of integers is JSON: no encoder is called."""
    plain = o.draft_accepted is None
    return f',"token_ids":{o.token_ids}'.replace(" ", "") if plain else f",{encode(token_fields(o))[1:-1]}"


def _delta_fields(delta: AnswerDelta) -> dict[str, Any]:
    """Return the delta of a chunk."""
    if isinstance(delta, CallDelta):
        begin = {} if delta.id is None else {"id": delta.id, "type": "function"}
        function = {"arguments": delta.arguments} if delta.name is None else {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, **begin, "function": function}]}
    return reasoning_fields(delta.text) if isinstance(delta, ReasoningDelta) else {"content": delta.text}


def _as_sent(error: NanoinferError, request: GenerationRequest) -> NanoinferError:
    error = as_sent(error, response_format=request.response_format)
    return renamed(error, {"prompt": "messages"} if request.chat else {})


SHAPES = {
    url: Shape(partial(parse, url, streams=True), response_body, ChunkWriter, _as_sent) for url in (COMPLETIONS, CHAT)
}
