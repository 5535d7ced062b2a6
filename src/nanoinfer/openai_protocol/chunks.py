"""The chunks of a streamed response, as server-sent events.

A chunk has the new text of one choice. What does not change is encoded once for each response, so a token costs one
encoding of its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.openai_protocol.errors import error_body
from nanoinfer.openai_protocol.requests import GenerationRequest, num_top
from nanoinfer.openai_protocol.responses import (
    Decode,
    PromptPart,
    chat_logprobs,
    completion_logprobs,
    finish_reason_of,
    head,
    num_chars,
    num_values,
    prompt_details,
    reasoning_fields,
    token_counts,
    token_fields,
)
from nanoinfer.outputs import AnswerDelta, CallDelta, CompletionOutput, Logprob, ReasoningDelta, RequestOutput
from nanoinfer.utils.json_pieces import Items, Text, encode, json_bytes, json_strings

Outputs = Sequence[tuple[int, RequestOutput]]
"""Pairs of a prompt's index and what was generated for it."""
DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Encodes the chunks of one response.

    Args:
        request: from `parse`, with stream=true.
        request_id, model, created, decode: as for `response_body`.
    """

    def __init__(
        self, request: GenerationRequest, *, request_id: str, model: str, created: int, decode: Decode
    ) -> None:
        self._request, self._decode = request, decode
        begin = encode(head(request, request_id, model, created, ".chunk"))
        self._head = f'data: {begin[:-1]},"choices":['
        self._name = "delta" if request.chat else "text"
        self._end = ',"usage":null}\n\n' if request.include_usage else "}\n\n"  # of a chunk without token counts
        given = request.params.output_token_ids  # what comes before the tokens after these was sent before
        self._begins = not given and (request.chat or request.echo or request.return_token_ids)
        self._num_prompt: dict[int, int] = {}  # tokens of each prompt whose first output has come
        self._num_output, self._num_cached = len(given), 0
        self._num_reasoning: int | None = None
        self._offsets: dict[int, int] = {}  # characters of the tokens of each choice, with logprobs

    def num_values(self, found: Outputs) -> int:
        """Return about how many numbers and strings the chunks of new outputs have; 0 if a token has few."""
        num_prompts = 1 if self._request.chat else len(self._request.prompts)
        if self._request.params.logprobs is None and len(self._num_prompt) == num_prompts:
            return 0
        new = [output for i, output in found if i not in self._num_prompt]
        return num_values(self._request, [output for _, output in found], new)

    def write(self, found: Outputs) -> bytes:
        """Return the chunks of new outputs: pairs of a prompt's index and what was generated for it.

        Raises:
            ResultError: a log-probability is not finite.
        """
        return "".join(self._chunks(found, lambda document: (encode(document),))).encode(errors="backslashreplace")

    def strings(self, found: Outputs) -> Iterator[str]:
        """Yield the chunks of new outputs, which are large, in short strings. Raises as `write`."""
        return self._chunks(found, json_strings)

    def _chunks(self, found: Outputs, write: Callable[[Any], Iterable[str]]) -> Iterator[str]:
        request = self._request
        for i, output in found:
            if i not in self._num_prompt:
                self._num_prompt[i] = len(output.prompt_token_ids)
                self._num_cached += output.num_cached_tokens
                if self._begins:
                    yield from self._first(i, output, write)
            for o in output.outputs:
                index = i * request.params.n + o.index
                if request.prompt_only:
                    if o.finish_reason is not None:
                        yield self._plain(index, '""', '"length"')
                    continue
                self._num_output += len(o.token_ids)
                if o.message_deltas is not None:
                    yield from self._message(index, o, o.message_deltas, write)
                elif o.logprobs is not None:
                    yield from self._chunk(self._details(index, o, o.logprobs), write)
                elif o.text or o.finish_reason or request.return_token_ids:
                    # else a part of a character, or of what may become a stop string
                    text = f'{{"content":{encode(o.text)}}}' if request.chat else encode(o.text)
                    more = f",{encode(token_fields(o))[1:-1]}" if request.return_token_ids else ""
                    yield self._plain(index, text, f'"{o.finish_reason}"' if o.finish_reason else "null", more)

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

    def _first(self, i: int, output: RequestOutput, write: Callable[[Any], Iterable[str]]) -> Iterator[str]:
        """Yield the first chunks of a prompt's choices: the role of a chat; with echo or token ids, the prompt."""
        request = self._request
        prompt = PromptPart(request, output, self._decode)
        ids = prompt.token_ids if request.return_token_ids else None
        choice: dict[str, Any] = {"text": Text(prompt.text) if request.echo else ""}
        if request.chat:
            choice = {"delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": prompt.logprobs or None, "finish_reason": None}
        if ids is not None and not request.chat:
            choice |= {"token_ids": [], "prompt_token_ids": ids}
        offset = prompt.num_chars()
        for index in range(i * request.params.n, (i + 1) * request.params.n):
            yield from self._chunk({"index": index, **choice}, write, ids if request.chat else None)
            self._offsets[index] = offset

    def _details(self, index: int, o: CompletionOutput, steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        """Return the choice of an output with its log-probabilities, and its tokens if they were asked for."""
        request, top = self._request, num_top(self._request.params.logprobs, steps)
        if request.chat:
            logprobs = chat_logprobs(steps, top)
        else:
            if (offset := self._offsets.get(index)) is None:  # it follows those of the tokens before
                offset = num_chars(request.params.output_token_ids, self._decode)
            logprobs = completion_logprobs(steps, top, lambda: offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"].plain()))
        text: Any = {"content": o.text} if request.chat else o.text
        choice = {"index": index, self._name: text, "logprobs": logprobs, "finish_reason": o.finish_reason}
        return choice | token_fields(o) if request.return_token_ids else choice

    def _message(
        self, index: int, o: CompletionOutput, deltas: Sequence[AnswerDelta], write: Callable[[Any], Iterable[str]]
    ) -> Iterator[str]:
        """Yield the chunks of an output that has reasoning or calls: one for each delta, and one for its end."""
        parts = [_delta_fields(delta) for delta in deltas]
        details = self._request.return_token_ids or o.logprobs is not None
        if o.finish_reason is not None or (details and not parts):
            parts.append({})
        if o.num_reasoning_tokens is not None:
            self._num_reasoning = (self._num_reasoning or 0) + o.num_reasoning_tokens
        finish_reason = finish_reason_of(o)
        for i, part in enumerate(parts):
            choice = {"index": index, "delta": part, "logprobs": None, "finish_reason": None}
            if i == 0 and o.logprobs is not None:
                choice["logprobs"] = chat_logprobs(o.logprobs, self._request.params.logprobs or 0)
            if i == len(parts) - 1:
                choice["finish_reason"] = finish_reason
                if self._request.return_token_ids:  # a client that has a token has all text that it releases
                    choice |= token_fields(o)
            yield from self._chunk(choice, write)

    def _chunk(
        self, choice: Mapping[str, Any], write: Callable[[Any], Iterable[str]], ids: Items | None = None
    ) -> Iterator[str]:
        """Yield a chunk: its choice, and the tokens of a chat's prompt."""
        yield self._head
        yield from write(choice)
        yield "]"
        if ids is not None:
            yield ',"prompt_token_ids":'
            yield from write(ids)
        yield self._counted() if self._request.continuous_usage else self._end

    def _plain(self, index: int, text: str, finish_reason: str, more: str = "") -> str:
        """Return a chunk without log-probabilities. All strings are JSON; `more` is further fields, after a comma."""
        end = self._counted() if self._request.continuous_usage else self._end
        return (
            f'{self._head}{{"index":{index},"{self._name}":{text},"logprobs":null,"finish_reason":{finish_reason}{more}}}]'
            f"{end}"
        )

    def _counted(self) -> str:
        """Return the end of a chunk with the token counts so far."""
        return f',"usage":{self._counts()}}}\n\n'

    def _counts(self) -> str:
        return encode(token_counts(*self.num_tokens, self._num_reasoning) | prompt_details(self._num_cached))


def _delta_fields(delta: AnswerDelta) -> dict[str, Any]:
    """Return the delta of a chunk."""
    if isinstance(delta, CallDelta):
        begin = {} if delta.id is None else {"id": delta.id, "type": "function"}
        function = {"arguments": delta.arguments} if delta.name is None else {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, **begin, "function": function}]}
    return reasoning_fields(delta.text) if isinstance(delta, ReasoningDelta) else {"content": delta.text}
