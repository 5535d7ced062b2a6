"""Chats: from messages and tools to a prompt and its sampling parameters, and from an output to a message.

    messages, ChatOptions, SamplingParams  ->  ChatPrompt: text, SamplingParams with the grammar of the answer
    RequestOutput                          ->  the same with reasoning, content and tool calls (AnswerReader)

The core generates text. What the parts of an answer are, only this file and inputs/answers/ know.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, cast

from nanoinfer.entrypoints.input_processor import Params, RequestFactory
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.inputs.answers.format import AnswerFormat
from nanoinfer.inputs.answers.grammar import RepeatableCalls, to_grammar
from nanoinfer.inputs.answers.lark import ANY_OBJECT
from nanoinfer.inputs.answers.parser import AnswerParser
from nanoinfer.inputs.answers.response_template import ResponseTemplate, ResponseTemplateParser
from nanoinfer.inputs.chat import ChatFormatter, ChatOptions, ends_in_reasoning
from nanoinfer.inputs.messages import Message, Tool
from nanoinfer.outputs import ChatMessage, CompletionOutput, RequestOutput
from nanoinfer.sampling_params import SamplingParams, StructuredOutputsParams
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
    ends_repeated: bool = False
    """Whether a call that repeats an earlier one ends an answer."""
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
            self.format,
            self.tools,
            starts_in_reasoning=starts,
            constrained=self.constrained,
            special_tokens=special,
            ends_repeated=self.ends_repeated,
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
        lenient, loose, faulty = answers.formatter.lenient_tools, [], []
        for tool, made in zip(answers.tools, lenient.of(answers.tools, answers.format), strict=True):
            if tool.strict or made.parameters != ANY_OBJECT:
                loose += [] if tool.strict else [(tool, error)]
                try:
                    if time.monotonic() < until:
                        requests.compile(cast(Any, to_grammar(answers.format, [made], tool.name)))
                except NanoinferError as e:
                    if tool.strict:
                        raise NanoinferError(f"tools: tool {tool.name!r}: {_without_field(e)}") from None
                    faulty.append((tool, e))
        for tool, why in faulty or loose:
            lenient.release(tool, answers.format, _without_field(why))
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
    if not text.endswith(format.opened):  # it continues a message, or begins none
        format = replace(format, opened="")
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
            formatter.lenient_tools.of(tools, format) if choice != "none" else tools,
            choice,
            parallel=options.parallel_tool_calls,
            answer=answer,
            in_reasoning=in_reasoning,
            thinking_budget=budget,
            special_tokens=formatter.special_tokens,
        )

    grammar = make_grammar()
    free = choice in ("none", "auto") and answer is None and budget is None
    if grammar is not None and grammar is not answer and free and find_spec("llguidance") is None:
        log.warning("tools: calls may be malformed, because %s", missing_extra("llguidance", "structured"))
        grammar = None
    callable_tools = tuple(tool for tool in tools if choice in ("auto", "required", tool.name))
    template = formatter.response_template(options.chat_template)
    constrained, repeats = bool(callable_tools) and grammar is not None, isinstance(grammar, RepeatableCalls)
    answers = Answers(formatter, format, callable_tools, in_reasoning, constrained, repeats, template, text)
    if isinstance(params, SamplingParams):
        shows = not answers.plain and (answers.template is not None or _is_special(format, formatter.special_tokens))
        hides = params.skip_special_tokens and not shows
        params = replace(params, structured_outputs=grammar, skip_special_tokens=hides)
    elif grammar is not None:
        raise NanoinferError("a beam search cannot call tools, or end reasoning: give SamplingParams")
    return ChatPrompt(text, params, answers, make_grammar, answer)


def _is_special(format: AnswerFormat, special_tokens: Collection[str]) -> bool:
    """Return whether special tokens are a part of how answers are written, so that their text is needed."""
    written = "\n".join([*(str(v) for v in vars(format).values()), *(text for _, text in format.also)])
    return any(token in written for token in special_tokens)


class AnswerReader:
    """Reads the outputs of one request, as they come.

    Args:
        answers: to its prompt; may be set later, before the first output.
        deltas: whether each output has only what is new.
    """

    def __init__(self, answers: Answers | None = None, *, deltas: bool = False) -> None:
        self.answers, self._deltas = answers, deltas
        self._states: dict[int, _State] = {}

    def begin(self, request: Request) -> None:
        """Read what a request gives of its output: deltas have what comes after. It may take long."""
        assert self.answers is not None
        s = request.sequences[0]
        if not s.num_given_tokens or self.answers.plain or not self._deltas:
            return
        state = self._states[s.sample_index] = _State(self.answers.parser(), ended=s.finish_reason is not None)
        state.parser.feed(s.text.text[: s.num_given_chars])
        state.token_ids += s.output_token_ids

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
        made = state.parser.feed(o.text if self._deltas else o.text[state.num_chars :])
        state.num_chars = len(o.text)
        message, num_reasoning = None, None
        if self._deltas:
            state.token_ids += o.token_ids
        if o.finish_reason is not None:
            rest = state.parser.finish(is_cut=o.finish_reason != "stop" or isinstance(o.stop_reason, str))
            made += [] if state.ended else rest
            message = state.parser.message()
            token_ids = state.token_ids if self._deltas else o.token_ids
            num_reasoning = self.answers.num_reasoning_tokens(message, token_ids)
        elif not self._deltas:
            message = state.parser.message()
        return replace(
            o, message=message, message_deltas=made if self._deltas else None, num_reasoning_tokens=num_reasoning
        )


@dataclass
class _State:
    """What was read of one output."""

    parser: AnswerParser | ResponseTemplateParser
    num_chars: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Of deltas."""
    ended: bool = False
    """Whether the tokens that the request gives end the output: no delta has anything of it."""


def _without_field(error: NanoinferError) -> str:
    """Return a message without the name of the field that the user has not given."""
    return str(error).removeprefix("structured_outputs.grammar: ")
