"""Generate for many requests from event loops: `LLM` with an asynchronous interface.

    async with AsyncLLM("shakespeare") as llm:
        async for output in llm.generate("O Romeo,", SamplingParams(max_tokens=60)):
            print(output.outputs[0].text)

One engine thread runs the steps (async_engine.py). Preparing a request (the chat template, tokenization, checks) takes
milliseconds for a long prompt, so it runs neither in the event loop, nor in the engine thread, where it would delay the
next token of every running request, but in a few worker threads. What takes longer (long texts, grammars, scores, to
read a long answer) has a thread of its own, so that short requests need not wait for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints import async_engine
from nanoinfer.entrypoints.async_streams import AsyncOutputStream, MergedStreams, Observe
from nanoinfer.entrypoints.chat import AnswerReader, ChatPrompt, chat_prompt
from nanoinfer.entrypoints.input_processor import Params
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.entrypoints.pooling import Reading, pairs, scores
from nanoinfer.entrypoints.vllm_names import llm_signature
from nanoinfer.errors import NanoinferError, show
from nanoinfer.inputs.chat import ChatOptions
from nanoinfer.inputs.messages import Message, as_conversation
from nanoinfer.inputs.prompts import Prompt, as_list
from nanoinfer.outputs import (
    EmbeddingRequestOutput,
    LoglikelihoodOutput,
    PerplexityOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from nanoinfer.sampling_params import LoRARequest, PoolingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils import processes
from nanoinfer.utils.checks import require_choice
from nanoinfer.utils.workers import Workers

NUM_PREPARING = 4  # threads that prepare requests: a chat template that takes seconds delays no other request
LONG_TEXT = 1 << 15  # characters of a text that is tokenized apart from the others, one at a time: up to 450 bytes each
_Self = TypeVar("_Self", bound="AsyncLLM")


class _Threads:
    """The threads of an AsyncLLM in one process."""

    def __init__(self, llm: LLM) -> None:
        self.generation = processes.generation()
        self.engine = async_engine.AsyncEngine(llm.core)
        # A tokenizer must not run while the interpreter exits.
        self.preparing = Workers("nanoinfer-prepare", NUM_PREPARING, around=processes.computing)
        self.tokenizing = Workers("nanoinfer-tokenize", 1, around=processes.computing)  # long texts
        self.compiling = Workers("nanoinfer-compile", 1, around=processes.computing)  # seconds for some grammars
        self.scoring = Workers("nanoinfer-score", 1)  # its calls run steps, which have the core's lock
        self.reading = Workers("nanoinfer-answers", 1, around=processes.computing)  # long answers; one child process

    def close(self) -> None:
        self.engine.close()
        for workers in (self.preparing, self.tokenizing, self.compiling, self.scoring, self.reading):
            workers.stop()


class AsyncLLM:
    """A loaded model whose requests are awaited in event loops. Several loops, each in its own thread, may use it.

    Args:
        model, tokenizer, seed, options: as for `LLM`. Loading blocks: call it before the loop runs, or in a thread.

    Raises:
        NanoinferError, TypeError: as `LLM`.
    """

    llm: LLM
    """The model. Its own methods may be called in other threads at the same time; in an event loop they block."""
    _threads: _Threads | None = None  # until _start has set it

    def __init__(self, model: str, *, tokenizer: str | None = None, seed: int = 0, **options: Any) -> None:
        self._start(LLM(model, tokenizer=tokenizer, seed=seed, **options))

    __init__.__signature__ = llm_signature()  # type: ignore[attr-defined]  # for help() and editors

    @classmethod
    def from_llm(cls: type[_Self], llm: LLM) -> _Self:
        """Return an AsyncLLM for a model that is loaded. `close` leaves the model usable."""
        self = cls.__new__(cls)
        self._start(llm)
        return self

    @classmethod
    def from_config(cls: type[_Self], config: LLMConfig) -> _Self:
        """Return an AsyncLLM for a configuration. Raises the errors of the constructor."""
        return cls.from_llm(LLM.from_config(config))

    def _start(self, llm: LLM) -> None:
        self.llm = llm
        self._closed = False
        self._threads = _Threads(llm)

    # Generating ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        output_kind: str | None = None,
        check: Callable[[int], None] | None = None,
    ) -> AsyncOutputStream:
        """Generate for one prompt. Return an asynchronous iterator over the outputs.

        The request is queued at the first iteration. Leaving the iterator (`aclose`, an exception, cancellation of the
        task that waits for it, deletion) cancels the request before the next step and frees its memory. A reader that
        is slower than the engine gets the tokens of several steps in one output.

        Args:
            prompt: in the forms of `LLM.generate`, with or without a cache_salt. Do not change it before the first
                output.
            sampling_params: SamplingParams or BeamSearchParams; None: those of the model's generation_config.json. With
                best_of, and for a beam search, there is one output, at the end.
            request_id: for `abort`, and in the outputs. None: a random one.
            lora_request: its adapter; the model has enable_lora=True.
            priority: requests of smaller priority are admitted first.
            output_kind: cumulative: each output has all tokens so far. delta: each output has the tokens since the one
                before, and only those of the n outputs that have some. final_only: one output at the end. None: that of
                the sampling_params.
            check: is called with the number of tokens of the prompt, in a worker thread, before the request
                is queued; an exception of it is one of the iterator.

        Returns:
            an iterator over RequestOutputs. The last one is `finished` and has the metrics of the whole request.

        Raises:
            NanoinferError: request_id or output_kind is invalid. From the iterator: the prompt or a parameter is
                invalid, the id is that of an unfinished request, the queue is full (`errors.QueueFull`), or `close` was
                called.
            ResultError: from the iterator: the request has failed, for example because logits are not finite.
        """
        making = self._make(lambda: prompt, sampling_params, priority, check, lora=lora_request)
        return self._stream(making, request_id, output_kind, sampling_params)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        output_kind: str | None = None,
        check: Callable[[int], None] | None = None,
        **options: Any,
    ) -> AsyncOutputStream:
        """Generate the next message of one conversation. Return an asynchronous iterator over the outputs.

        Each output has the `message` so far; with output_kind="delta", `message_deltas`, and the message at the end.

        Args:
            messages, options: as for `LLM.chat`.
            cache_salt: only conversations and prompts of the same salt share their prefixes.
            sampling_params, request_id, lora_request, priority, output_kind, check: as for `generate`.

        Raises:
            NanoinferError: as `generate`. From the iterator: a message or a tool is malformed, the model has no chat
                template, or the template refuses the messages or exceeds a limit (docs/chat.md).
            TypeError: an option is unknown.
        """
        if output_kind is None:
            output_kind = getattr(sampling_params, "output_kind", async_engine.CUMULATIVE)
        chat_options, reader = ChatOptions(**options), AnswerReader(deltas=output_kind == async_engine.DELTA)

        def prompt() -> ChatPrompt:
            params = self.llm.requests.defaults if sampling_params is None else sampling_params
            rendered = chat_prompt(self.llm.formatter, as_conversation(messages), chat_options, params)
            reader.answers = rendered.answers
            return rendered

        making = self._make(prompt, sampling_params, priority, check, salt=cache_salt, lora=lora_request)
        return self._stream(making, request_id, output_kind, sampling_params, reader)

    def _make(
        self,
        prompt: Callable[[], Prompt | ChatPrompt],
        params: Params | None,
        priority: int,
        check: Callable[[int], None] | None,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
    ) -> Generator[Workers, None, Request]:
        """Make a request; yield the workers that run the next part. `salt`: of a chat; `lora`: its adapter."""
        threads, factory = self._running(), self.llm.requests
        yield threads.preparing
        params = factory.defaults if params is None else params
        source, chat = prompt(), None
        if isinstance(source, ChatPrompt):
            chat, params = source, source.params
            source = {"prompt": chat.text, "cache_salt": salt}
        salts: list[str | None] = []
        (content,) = as_list([source], salts)
        text = content if isinstance(content, str) else None
        if text is not None:
            factory.check_fits(text, params)
        if len(text or "") > LONG_TEXT:
            yield threads.tokenizing
        content = factory.fit(content, params, rendered=chat is not None)
        if check is not None:
            check(len(content))
        if getattr(params, "structured_outputs", None) is not None:
            yield threads.compiling
            if chat is not None:
                params = chat.compiled(factory).params
        request = factory.make(content, params, salt=salts[0], priority=priority, lora=lora)
        request.prompt = text
        return request

    def _stream(
        self,
        making: Generator[Workers, None, Request],
        request_id: str | None,
        output_kind: str | None,
        params: Params | None = None,
        reader: AnswerReader | None = None,
    ) -> AsyncOutputStream:
        if output_kind is None:
            output_kind = getattr(params, "output_kind", async_engine.CUMULATIVE)
        require_choice("output_kind", output_kind, async_engine.OUTPUT_KINDS)
        if request_id is None:
            request_id = secrets.token_hex(8)
        elif not isinstance(request_id, str) or not request_id:
            raise NanoinferError(f"request_id={show(request_id)} is not a string of one or more characters")
        request = async_engine.AsyncRequest(request_id, output_kind)
        return AsyncOutputStream(
            request, lambda: self._running().engine, making, reader, lambda: self._running().reading
        )

    async def abort(self, request_id: str) -> None:
        """End a request before the next step. Its iterator returns the output so far, with finish_reason "abort".

        Does nothing if no unfinished request has this id.
        """
        self._running().engine.abort(request_id)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests that are prepared, waiting or running."""
        return 0 if self._closed else self._running().engine.num_unfinished

    @property
    def is_running(self) -> bool:
        """Whether requests can be made: `close` was not called, and the engine thread has not ended."""
        return not self._closed and not self._running().engine.ended.done()

    # Embeddings and scores -------------------------------------------------------------------------------

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, as `LLM.embed`. A task that is cancelled ends its requests.

        Requests of smaller priority are admitted first.
        """
        return await self.pool(lambda: self.llm.pooler.embed(prompts, pooling_params, lora_request, priority=priority))

    async def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each document, as `LLM.score`. See `embed`."""
        inputs, num_queries = pairs(queries, documents)
        return scores(await self.embed(inputs, pooling_params, priority=priority), num_queries)

    async def pool(
        self, plan: Callable[[], list[Reading]], observe: Observe | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Run the requests of some inputs, and return their embeddings.

        Args:
            plan: returns the inputs; it runs in a worker thread.
            observe: as of `MergedStreams`.
        """
        readings = await self._workers(0).run(plan)

        def making(reading: Reading) -> Generator[Workers, None, Request]:
            yield self._workers(reading.num_chars)
            return reading.make()

        streams = [self._stream(making(reading), None, async_engine.FINAL_ONLY) for reading in readings]
        merged = MergedStreams(streams, observe)
        outputs: dict[int, RequestOutput] = {}
        try:
            async for arrived in merged:
                outputs.update(arrived)
        finally:
            merged.close()
        return await self._workers(0).run(lambda: [reading.result(outputs[i]) for i, reading in enumerate(readings)])

    # Other calls -----------------------------------------------------------------------------------------

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids. Raises as `LLM.tokenize`."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        workers = self._workers(len(text) if isinstance(text, str) else 0)
        return await workers.run(lambda: self.llm.tokenize(prompt))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises as `LLM.decode`."""
        return await self._workers(4 * len(token_ids)).run(lambda: self.llm.decode(token_ids))

    async def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of the prompt of a conversation. Arguments and errors: see `LLM.apply_chat_template`."""
        chat_options = ChatOptions(**options)
        render = self.llm.formatter.render
        text = await self._running().preparing.run(lambda: render(as_conversation(messages), chat_options))
        return await self._workers(len(text)).run(lambda: self.llm.formatter.encode(text))

    def _workers(self, size: int) -> Workers:
        """Return the threads that convert a text of `size` characters."""
        return self._running().tokenizing if size > LONG_TEXT else self._running().preparing

    async def loglikelihood(
        self, contexts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]
    ) -> list[LoglikelihoodOutput]:
        """Return the log-likelihood of each continuation given its context, as `LLM.loglikelihood`.

        It runs between the steps of the requests. A call that has begun is not cancelled with the task.
        """
        return await self._running().scoring.run(lambda: self.llm.loglikelihood(contexts, continuations))

    async def perplexity(
        self, texts: Prompt | Sequence[Prompt], *, stride: int | None = None
    ) -> list[PerplexityOutput]:
        """Return log-likelihood and perplexity of each text, as `LLM.perplexity`. See `loglikelihood`."""
        return await self._running().scoring.run(lambda: self.llm.perplexity(texts, stride=stride))

    # The end ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all requests, whose iterators raise, and the threads, without waiting for them."""
        if not self._closed and self._threads is not None:
            self._closed = True
            if self._threads.generation == processes.generation():
                self._threads.close()

    async def close(self) -> None:
        """End all requests, whose iterators raise, and wait until the engine thread has ended: one step at most."""
        self.shutdown()
        assert self._threads is not None
        if self._threads.generation == processes.generation():
            await asyncio.wrap_future(self._threads.engine.ended)

    async def __aenter__(self: _Self) -> _Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._threads is not None:
            self.shutdown()

    def _running(self) -> _Threads:
        """Return the threads of this process. Raises NanoinferError after `close`."""
        if self._closed:
            raise NanoinferError(async_engine.CLOSED)
        assert self._threads is not None
        if self._threads.generation != processes.generation():  # a forked child has none of the parent's threads
            self._threads.engine.cancel_all()
            self._threads = _Threads(self.llm)
        return self._threads
