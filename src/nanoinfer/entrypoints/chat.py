"""Chats: from messages and tools to a prompt and its sampling parameters, and from an output to a message.

    messages, ChatOptions, SamplingParams  ->  ChatPrompt: text, SamplingParams with the grammar of the answer
    RequestOutput                          ->  the same with reasoning, content and tool calls (AnswerReader)
    Conversation                               its messages; a turn costs its new tokens only

The core generates text. What the parts of an answer are, only this file and inputs/answers/ know.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, cast

from nanoinfer.core.core import Core
from nanoinfer.entrypoints.input_processor import Params, RequestFactory
from nanoinfer.entrypoints.streams import OutputStream, TextStream
from nanoinfer.errors import NanoinferError, missing_extra, show
from nanoinfer.inputs.answers.format import AnswerFormat
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.answers.parser import AnswerParser
from nanoinfer.inputs.answers.response_template import ResponseTemplate, ResponseTemplateParser
from nanoinfer.inputs.chat import ChatFormatter, ChatOptions, ends_in_reasoning
from nanoinfer.inputs.messages import Message, Tool, as_conversation, is_list
from nanoinfer.outputs import AnswerDelta, ChatMessage, CompletionOutput, RequestOutput
from nanoinfer.sampling_params import LoRARequest, SamplingParams, StructuredOutputsParams
from nanoinfer.scheduling.sequence import Request

QUICK_SIZE = 1 << 12
"""Most characters and tokens of an output that is read in an event loop: up to 10 ms."""
EXPLAIN_SEC = 2.0
"""Time after which no further tool is tried, to find out which of them cannot be compiled."""
log = logging.getLogger("nanoinfer")


@dataclass(frozen=True)
class Answers:
    """What the answers to a prompt are made of."""

    formatter: ChatFormatter
    format: AnswerFormat
    tools: tuple[Tool, ...] = ()
    """That may be called."""
    in_reasoning: bool | None = False
    """See `AnswerFormat.reasoning_of`."""
    constrained: bool = False
    """Whether a grammar holds the calls to their format."""
    template: ResponseTemplate | None = None
    """What the model itself says about its answers; None: the format says it."""
    prompt: str = ""
    """Text of the prompt."""

    @property
    def plain(self) -> bool:
        """Whether the text of an answer is its content."""
        return not (self.tools or self.format.reasoning_end or self.template)

    def parser(self) -> AnswerParser | ResponseTemplateParser:
        """Return a parser for one answer."""
        if self.template is not None:
            return ResponseTemplateParser(self.template, self.tools, prompt=self.prompt)
        starts, special = self.in_reasoning is True, self.formatter.special_tokens
        return AnswerParser(
            self.format, self.tools, starts_in_reasoning=starts, constrained=self.constrained, special_tokens=special
        )

    def num_reasoning_tokens(self, message: ChatMessage, token_ids: Sequence[int]) -> int | None:
        """Return the tokens of the reasoning, with its markers. Args: token_ids: of the answer, or its beginning."""
        if not self.format.reasoning_end:
            return None
        if message.reasoning is None:
            return 0
        text, end = self.formatter.decode(token_ids), self.format.reasoning_end.strip()
        size = at + len(end) if (at := text.find(end)) >= 0 else -1
        if size < 0 and message.tool_calls:  # a call has ended it
            size = text.find(self.format.trigger)
        if size < 0:
            return len(token_ids)
        decode = self.formatter.decode
        return bisect_left(range(len(token_ids)), size, key=lambda n: len(decode(token_ids[:n])))


@dataclass(frozen=True)
class ChatPrompt:
    """What a chat asks the core for."""

    text: str
    params: Params
    answers: Answers
    make_grammar: Callable[[], StructuredOutputsParams | None] = lambda: None
    """Returns the grammar of `params`, with the tools as they are constrained now."""
    content: StructuredOutputsParams | None = None
    """What the content must match."""

    def compiled(self, requests: RequestFactory) -> ChatPrompt:
        """Compile the grammar of calls; return the chat with the grammar that is used.

        Tools whose grammar cannot be compiled are no longer constrained, but for those with `strict`.

        Raises:
            NanoinferError: a tool with `strict`, or the content's grammar, cannot be compiled.
        """
        chat = self
        while self.answers.constrained:
            try:
                requests.compile(cast(Any, chat.params).structured_outputs)
                break
            except NanoinferError as e:
                if self.content is not None:
                    requests.compile(self.content)
                if not self._release(requests, e):
                    raise NanoinferError(f"tools: {_without_field(e)}") from None
                params = replace(cast(SamplingParams, chat.params), structured_outputs=self.make_grammar())
                chat = replace(chat, params=params)
        return chat

    def _release(self, requests: RequestFactory, error: NanoinferError) -> bool:
        """Release the tools whose grammar cannot be compiled alone, else all; return whether there are any."""
        answers, until = self.answers, time.monotonic() + EXPLAIN_SEC
        released, loose, faulty = answers.formatter.released_tools, [], []
        for tool in answers.tools:
            if tool not in released:
                loose += [] if tool.strict else [(tool, error)]
                try:
                    if time.monotonic() < until:
                        requests.compile(cast(Any, to_grammar(answers.format, [tool], tool.name)))
                except NanoinferError as e:
                    if tool.strict:
                        raise NanoinferError(f"tools: tool {tool.name!r}: {_without_field(e)}") from None
                    faulty.append((tool, e))
        for tool, why in faulty or loose:
            released.add(tool, _without_field(why))
        return bool(loose)


def chat_prompt(
    formatter: ChatFormatter, messages: Sequence[Message] | str, options: ChatOptions, params: Params | None
) -> ChatPrompt:
    """Return the prompt for checked messages, or a rendered one, and parameters with what its answers must match.

    Raises:
        NanoinferError: as `LLM.chat`.
    """
    params = params or SamplingParams()
    text = messages if isinstance(messages, str) else formatter.render(messages, options)
    tools, choice = options.checked_tools, options.choice
    format = formatter.format(formatter.source(options))
    in_reasoning = format.reasoning_of(text)
    if in_reasoning is None and options.continue_final_message:
        in_reasoning = not isinstance(messages, str) and ends_in_reasoning(messages[-1])
    budget = options.thinking_token_budget
    if budget is not None and not format.reasoning_end:
        if not options.optional_thinking:
            raise NanoinferError(f"thinking_token_budget={budget}: the chat template has no reasoning: leave it out")
        budget = None
    answer = params.structured_outputs if isinstance(params, SamplingParams) else None

    def make_grammar() -> StructuredOutputsParams | None:
        return to_grammar(
            format,
            tools,
            choice,
            parallel=options.parallel_tool_calls,
            answer=answer,
            in_reasoning=in_reasoning,
            thinking_budget=budget,
            special_tokens=formatter.special_tokens,
            released=formatter.released_tools,
        )

    grammar = make_grammar()
    free = choice in ("none", "auto") and answer is None and budget is None
    if grammar is not None and grammar is not answer and free and find_spec("llguidance") is None:
        log.warning("tools: calls may be malformed, because %s", missing_extra("llguidance", "structured"))
        grammar = None
    callable_tools = tuple(tool for tool in tools if choice in ("auto", "required", tool.name))
    template = formatter.response_template(options.chat_template)
    constrained = bool(callable_tools) and grammar is not None
    answers = Answers(formatter, format, callable_tools, in_reasoning, constrained, template, text)
    if isinstance(params, SamplingParams):
        shows = not answers.plain and (answers.template is not None or _is_special(format, formatter.special_tokens))
        hides = params.skip_special_tokens and not shows
        params = replace(params, structured_outputs=grammar, skip_special_tokens=hides)
    elif grammar is not None:
        raise NanoinferError("a beam search cannot call tools, or end reasoning: give SamplingParams")
    return ChatPrompt(text, params, answers, make_grammar, answer)


def _is_special(format: AnswerFormat, special_tokens: Collection[str]) -> bool:
    """Return whether special tokens are a part of how answers are written, so that their text is needed."""
    return any(token in "\n".join(map(str, vars(format).values())) for token in special_tokens)


class AnswerReader:
    """Reads the outputs of one request, as they come.

    Args:
        answers: to its prompt; may be set later, before the first output.
        deltas: whether each output has only what is new.
    """

    def __init__(self, answers: Answers | None = None, *, deltas: bool = False) -> None:
        self.answers, self._deltas = answers, deltas
        self._states: dict[int, _State] = {}

    def is_quick(self, output: RequestOutput) -> bool:
        """Return whether `read` takes a few milliseconds at most: event loops run what takes longer in a thread."""
        assert self.answers is not None
        answers = self.answers
        if answers.plain:
            return True
        size = 0
        if answers.template is not None:
            if answers.template.has_patterns:
                return False
            size = 0 if self._states else len(answers.prompt)  # which the template reads first
        for o in output.outputs:
            state = self._states.get(o.index)
            size += len(o.text) - (0 if self._deltas or state is None else state.num_chars)
            if o.finish_reason is not None and answers.format.reasoning_end:  # its tokens are counted
                size += len(o.token_ids) + (0 if state is None else len(state.token_ids))
        return size <= QUICK_SIZE

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output with messages. Outputs are read one after the other, in any thread."""
        assert self.answers is not None
        if self.answers.plain and self._deltas:
            return output
        return replace(output, outputs=[self._read(o) for o in output.outputs])

    def _read(self, o: CompletionOutput) -> CompletionOutput:
        assert self.answers is not None
        if self.answers.plain:
            return replace(o, message=ChatMessage(o.text))
        if (state := self._states.get(o.index)) is None:
            state = self._states[o.index] = _State(self.answers.parser())
        deltas = state.parser.feed(o.text if self._deltas else o.text[state.num_chars :])
        state.num_chars = len(o.text)
        message, num_reasoning = None, None
        if self._deltas:
            state.token_ids += o.token_ids
        if o.finish_reason is not None:
            deltas += state.parser.finish(is_cut=o.finish_reason != "stop" or isinstance(o.stop_reason, str))
            message = state.parser.message()
            token_ids = state.token_ids if self._deltas else o.token_ids
            num_reasoning = self.answers.num_reasoning_tokens(message, token_ids)
        elif not self._deltas:
            message = state.parser.message()
        return replace(
            o, message=message, message_deltas=deltas if self._deltas else None, num_reasoning_tokens=num_reasoning
        )


@dataclass
class _State:
    """What was read of one output."""

    parser: AnswerParser | ResponseTemplateParser
    num_chars: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Of deltas."""


def _without_field(error: NanoinferError) -> str:
    """Return a message without the name of the field that the user has not given."""
    return str(error).removeprefix("structured_outputs.grammar: ")


# Conversations -------------------------------------------------------------------------------------------


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
    """The messages of a chat. Use it from one thread at a time. A turn costs its new tokens only.

    The prefix cache keeps the sequence of an answer (scheduling/prefix_cache.py), and the prompt of the next turn
    begins with the tokens that were generated, not with a second tokenization of their text:

        turn 1   prompt  <user> Hi <assistant>                          answer  Hello! <end>
        turn 2   prompt  <user> Hi <assistant> Hello! <end> <user> Bye <assistant>
                         ------- in the KV cache ---- | ---- processed ----------

    When the conversation no longer fits into the context, its oldest turns are left out of the prompt until it takes at
    most half of the context; the system message stays. A warning is logged, and `num_dropped_messages` counts them.

    Args:
        system: content of the system message; None: no such message.
        lora: the adapter of all answers; None: none.
    """

    def __init__(
        self,
        core: Core,
        requests: RequestFactory,
        formatter: ChatFormatter,
        options: ChatOptions,
        system: str | None = None,
        lora: LoRARequest | None = None,
    ) -> None:
        formatter.template(options.chat_template)  # raises: the model has none
        self._core, self._requests, self._formatter, self._options = core, requests, formatter, options
        self._lora = lora
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
            answer_ids = answer.token_ids[:-1] if ended else answer.token_ids
            # The tokens of a stop string are not in the text, and special tokens may not be.
            if not isinstance(reason, str) and not self._requests.hides_any(answer_ids, params):
                self._known = [(text, token_ids), (text + answer.text, token_ids + answer_ids)]
        self._request = None

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.stop()
        self.messages = self._messages[: self._num_system]

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
        if params.num_sequences != 1 or other or not params.detokenize:
            raise NanoinferError(
                "a conversation has one answer, in text, to all its messages, and no prompt_logprobs: use chat for n,"
                " best_of, prompt_logprobs, truncate_prompt_tokens and detokenize=False"
            )
        first, text, token_ids = self._fit(messages, params, options)
        prompt = chat_prompt(self._formatter, text, options, params)
        prompt = prompt.compiled(self._requests)
        request = self._requests.make(token_ids, prompt.params, lora=self._lora)
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
