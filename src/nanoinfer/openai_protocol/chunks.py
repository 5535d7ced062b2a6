"""The chunks of a streamed response, as server-sent events.

A chunk has the new text of one choice. What does not change is encoded once for each response, so a token costs one
encoding of its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from nanoinfer.openai_protocol.requests import GenerationRequest
from nanoinfer.openai_protocol.responses import (
    Decode,
    chat_logprobs,
    completion_logprobs,
    prompt_text,
    token_counts,
    token_fields,
)
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


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
        head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._head = f'data: {_encode(head)[:-1]},"choices":['
        self._detailed = request.params.logprobs is not None or request.return_token_ids
        self._num_prompt: dict[int, int] = {}  # tokens of each prompt whose first output has come
        self._num_output = 0
        self._offsets: dict[int, int] = {}  # characters of the tokens of each choice, with logprobs

    def write(self, found: Sequence[tuple[int, RequestOutput]]) -> bytes:
        """Return the chunks of new outputs: pairs of a prompt's index and what was generated for it."""
        chunks: list[str] = []
        for i, output in found:
            if i not in self._num_prompt:
                self._num_prompt[i] = len(output.prompt_token_ids)
                self._begin(chunks, i, output)
            for o in output.outputs:
                if not self._request.prompt_only:
                    self._num_output += len(o.token_ids)
                    self._add(chunks, i * self._request.params.n + o.index, o)
                elif o.finish_reason is not None:
                    self._put(chunks, i * self._request.params.n + o.index, '""', "null", '"length"')
        return "".join(chunks).encode(errors="backslashreplace")

    def end(self) -> bytes:
        """Return the chunk of the token counts, if it was asked for, and the end of the stream."""
        if not self._request.include_usage:
            return DONE
        return f'{self._head}],"usage":{self._counts()}}}\n\n'.encode() + DONE

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of tokens in the prompts, and generated."""
        return sum(self._num_prompt.values()), self._num_output

    def _begin(self, chunks: list[str], i: int, output: RequestOutput) -> None:
        """Add the first chunks of a prompt's choices: the role of a chat; with echo or token ids, the prompt."""
        request = self._request
        ids = f',"prompt_token_ids":{_encode(output.prompt_token_ids)}' if request.return_token_ids else ""
        for index in range(i * request.params.n, (i + 1) * request.params.n):
            if request.chat:
                self._put(chunks, index, '{"role":"assistant","content":""}', "null", "null", after=ids)
            elif request.echo or ids:
                text, logprobs = "", "null"
                if request.echo:
                    text = prompt_text(output, self._decode)
                    if output.prompt_logprobs is not None:
                        logprobs = self._completion_logprobs(index, output.prompt_logprobs, output.prompt_token_ids)
                own = ',"token_ids":[]' if ids else ""
                self._put(chunks, index, _encode(text), logprobs, "null", own + ids)

    def _add(self, chunks: list[str], index: int, o: CompletionOutput) -> None:
        """Add the chunk of an output, unless it has nothing new."""
        if not (o.text or o.finish_reason or self._detailed):
            return  # a part of a character, or of what may become a stop string
        logprobs, extra = "null", ""
        if self._detailed:
            if o.logprobs is not None:
                top = self._request.params.logprobs or 0
                chat = self._request.chat
                logprobs = (
                    _encode(chat_logprobs(o.logprobs, top)) if chat else self._completion_logprobs(index, o.logprobs)
                )
            if self._request.return_token_ids:
                extra = f",{_encode(token_fields(o))[1:-1]}"
        text = _encode(o.text)
        if self._request.chat:
            text = f'{{"content":{text}}}'
        self._put(chunks, index, text, logprobs, f'"{o.finish_reason}"' if o.finish_reason else "null", extra)

    def _completion_logprobs(
        self, index: int, steps: Sequence[Mapping[int, Logprob] | None], ids: Sequence[int] = ()
    ) -> str:
        """Return the log-probabilities of a completion's tokens, whose offsets follow those of the tokens before."""
        found = completion_logprobs(
            steps, self._request.params.logprobs or 0, ids, self._decode, self._offsets.get(index, 0)
        )
        if found["tokens"]:
            self._offsets[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return _encode(found)

    def _put(
        self,
        chunks: list[str],
        index: int,
        text: str,
        logprobs: str,
        finish_reason: str,
        extra: str = "",
        after: str = "",
    ) -> None:
        """Add a chunk. All strings are JSON.

        Args:
            chunks: where to add it.
            index: of the choice.
            text: the text of a completion, or the delta of a chat.
            logprobs, finish_reason: of the choice.
            extra: further fields of the choice, each after a comma.
            after: further fields of the chunk.
        """
        name = "delta" if self._request.chat else "text"
        if self._request.continuous_usage:
            after += f',"usage":{self._counts()}'
        elif self._request.include_usage:
            after += ',"usage":null'
        chunks.append(
            f'{self._head}{{"index":{index},"{name}":{text},"logprobs":{logprobs},"finish_reason":{finish_reason}{extra}}}]'
            f"{after}}}\n\n"
        )

    def _counts(self) -> str:
        return _encode(token_counts(*self.num_tokens))
