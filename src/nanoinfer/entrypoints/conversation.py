"""A conversation with a model that has a chat template. A turn costs its new tokens only.

The prefix cache keeps the sequence of an answer (scheduling/prefix_cache.py), and the prompt of the next turn begins
with the tokens that were generated, not with a second tokenization of their text:

    turn 1   prompt  <user> Hi <assistant>                          answer  Hello! <end>
    turn 2   prompt  <user> Hi <assistant> Hello! <end> <user> Bye <assistant>
                     ------- in the KV cache ---- | ---- processed ----------
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.core.core import Core
from nanoinfer.entrypoints.chat import AnswerReader, Answers, chat_prompt
from nanoinfer.entrypoints.input_processor import RequestFactory
from nanoinfer.entrypoints.streams import OutputStream, TextStream
from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.chat import ChatFormatter, ChatOptions
from nanoinfer.inputs.messages import Message, as_conversation, is_list
from nanoinfer.outputs import AnswerDelta, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.checks import show

log = logging.getLogger("nanoinfer")


class AnswerStream(TextStream):
    """Yields the text of an answer, as the model writes it; `deltas` yields its parts instead."""

    def __init__(self, outputs: OutputStream, answers: Answers) -> None:
        super().__init__(outputs)
        self.answers = answers

    def deltas(self) -> Iterator[AnswerDelta]:
        """Yield new content, reasoning and calls of tools. Raises as the iterator."""
        parser = self.answers.parser()
        for text in self:
            yield from parser.feed(text)
        yield from parser.finish()


class Conversation:
    """The messages of a chat. Use it from one thread at a time.

    When the conversation no longer fits into the context, its oldest turns are left out of the prompt until it takes at
    most half of the context; the system message stays. A warning is logged, and `num_dropped_messages` counts them.

    Args:
        system: content of the system message; None: no such message.
    """

    def __init__(
        self,
        core: Core,
        requests: RequestFactory,
        formatter: ChatFormatter,
        options: ChatOptions,
        system: str | None = None,
    ) -> None:
        formatter.template(options.chat_template)  # raises: the model has none
        self._core, self._requests, self._formatter, self._options = core, requests, formatter, options
        self._request: Request | None = None  # of the answer that is being generated
        self._output: RequestOutput | None = None
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, as a copy. Reading them ends an answer that is being generated, as `stop` does."""
        self.stop()
        return [dict(message) for message in self._messages]

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        self.stop()
        self._messages = as_conversation(messages) if messages else []
        self._before = self._messages
        self._first = self._num_system
        self._known: list[tuple[str, list[int]]] = []  # texts whose tokens are known, from the last turn

    @property
    def num_dropped_messages(self) -> int:
        """Number of messages after the system message that are left out of the prompt."""
        return self._first - self._num_system

    @property
    def output(self) -> RequestOutput | None:
        """The output of the last answer; None before the first. Reading it ends an answer, as `stop` does."""
        self.stop()
        return self._output

    def send(
        self, content: str | Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> AnswerStream:
        """Add a message of the user, and return the answer as a stream of text, in pieces of whole characters.

        The answer becomes a message when it has ended. If the stream is closed or dropped before, the message is what
        was generated so far. If the request fails, this turn is taken back.

        Args:
            content: of the user's message; or a list of messages to add, such as the results of calls.
            sampling_params: of the answer; None is SamplingParams().
            options: as for `LLM.conversation`, such as tools; for this answer only.

        Raises:
            NanoinferError: the template refuses the messages, a parameter is invalid, or the message does not fit into
                the context. The conversation is then unchanged.
            TypeError: an option is unknown.
        """
        self.stop()
        added = content if is_list(content) else [{"role": "user", "content": content}]
        messages = as_conversation([*self._messages, *added])
        return self._answer(messages, sampling_params, replace(self._options, **options))

    def regenerate(self, sampling_params: SamplingParams | None = None) -> AnswerStream:
        """Generate the last answer again, as `send` does. Raises NanoinferError if there is none."""
        self.stop()
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise NanoinferError("there is no answer to generate again: send a message first")
        return self._answer(self._messages[:-1], sampling_params, self._options)

    def stop(self) -> None:
        """End the answer that is being generated, and add what was generated to the messages."""
        if (request := self._request) is None:
            return
        if not request.finished:
            self._core.abort(request)
        self._output = AnswerReader(self._answers).read(self._core.output(request))
        answer = self._output.outputs[0]
        if answer.error is not None:
            self._messages = self._before
        else:
            assert answer.message is not None
            self._messages = [*self._asked, answer.message.as_message()]
            text, token_ids = self._known[0]
            params, reason = request.params, answer.stop_reason
            ended = isinstance(reason, int) and not params.include_stop_str_in_output
            made = answer.token_ids[:-1] if ended else answer.token_ids
            # The tokens of a stop string are not in the text, and special tokens may not be.
            if not isinstance(reason, str) and not self._requests.hides_any(made, params):
                self._known = [(text, token_ids), (text + answer.text, token_ids + made)]
        self._request = None

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.stop()
        self.messages = self._messages[: self._num_system]

    def unread_options(self) -> list[str]:
        """Return the options of reasoning that are given and change nothing, because the chat template has none."""
        options = self._options
        probes: dict[str, tuple[Any, ...]] = {"enable_thinking": (True, False), "reasoning_effort": ("none", "low")}
        given = [name for name in probes if getattr(options, name) is not None]
        found = [name for name in given if len({self._probe(name, value) for value in probes[name]}) == 1]
        budget = options.thinking_token_budget
        if budget is not None and not self._formatter.format(options.chat_template).reasoning_end:
            found.append("thinking_token_budget")
        return found

    def _probe(self, option: str, value: Any) -> str:
        """Return the prompt of a short message with a value of an option; where it has none, the value."""
        options: Any = {option: value, "tools": None, "tool_choice": None}
        try:
            return self._formatter.render([{"role": "user", "content": "a"}], replace(self._options, **options))
        except NanoinferError:
            return str(value)

    @property
    def _num_system(self) -> int:
        return int(bool(self._messages) and self._messages[0]["role"] == "system")

    def _answer(
        self, messages: list[dict[str, Any]], params: SamplingParams | None, options: ChatOptions
    ) -> AnswerStream:
        """Return the stream of the answer to `messages`, which become the conversation's."""
        params = self._requests.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"sampling_params={show(params)} is not a SamplingParams")
        other = params.prompt_logprobs is not None or params.truncate_prompt_tokens is not None
        if params.num_sequences != 1 or other or not params.detokenize or params.output_token_ids:
            raise NanoinferError(
                "a conversation has one answer, in text, to all its messages, and no prompt_logprobs: use chat for n,"
                " best_of, prompt_logprobs, truncate_prompt_tokens, output_token_ids and detokenize=False"
            )
        first, text, token_ids = self._fit(messages, params, options)
        prompt = chat_prompt(self._formatter, text, options, params)
        prompt = prompt.compiled(self._requests)
        request = self._requests.make(token_ids, prompt.params)
        if first > self._first:
            log.warning(
                "the conversation exceeds the context length of %d tokens: its oldest %d messages are left out",
                self._core.engine.limits.block_size, first - self._num_system,
            )  # fmt: skip
        stream = AnswerStream(OutputStream(self._core, [request]), prompt.answers)
        self._before, self._asked, self._first = self._messages, messages, first
        self._known = [(text, token_ids)]
        self._request, self._answers = request, prompt.answers
        return stream

    def _fit(
        self, messages: list[dict[str, Any]], params: SamplingParams, options: ChatOptions
    ) -> tuple[int, str, list[int]]:
        """Return the first message after the system message that fits, and the prompt as text and token ids."""
        block_size = self._core.engine.limits.block_size
        limit = block_size - min(params.max_tokens or block_size, block_size // 4)
        first, system = min(self._first, len(messages) - 1), messages[: self._num_system]
        turns = [i for i, m in enumerate(messages) if m["role"] == "user" and i > first]
        while True:
            text = self._formatter.render([*system, *messages[first:]], options)
            token_ids = self._token_ids(text)
            if len(token_ids) <= limit or not turns:
                break
            first, limit = turns.pop(0), min(limit, block_size // 2)
        return first, text, token_ids

    def _token_ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt; where it begins with a text whose tokens are known, with these."""
        token_ids = self._formatter.encode(text)
        for known, tokens in reversed(self._known):
            if not text.startswith(known) or token_ids[: len(tokens)] == tokens:
                continue
            begin = self._formatter.encode(known)
            if token_ids[: len(begin)] == begin:  # a token ends where the known text ends
                return tokens + token_ids[len(begin) :]
        return token_ids
