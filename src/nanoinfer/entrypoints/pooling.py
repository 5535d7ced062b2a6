"""Embeddings and scores: requests that generate nothing and whose final hidden states or logits are read.

They run beside other requests: in the same steps, in chunks, and share prefixes (scheduling/). On engine `native`,
where rows do not depend on each other, results are the same in any company, bit for bit: sums are made token by token.

`PoolingMethods` and `AsyncPoolingMethods` are the methods of `LLM` and `AsyncLLM`, with vLLM's names.

A score is the probability of a reranker's answer to a prompt of query and document, or for other models the cosine of
their embeddings.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanoinfer.core.core import Core
from nanoinfer.entrypoints.input_processor import RequestFactory
from nanoinfer.entrypoints.streams import Ownership, all_finished
from nanoinfer.errors import NanoinferError, ResultError, input_too_long
from nanoinfer.inputs.chat import ChatFormatter, ChatOptions
from nanoinfer.inputs.prompts import Prompt, as_list, numbered
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import PromptReads, Request
from nanoinfer.tokenizers.tokenizer import Tokenizer, decode
from nanoinfer.utils.arrays import Array, to_numpy
from nanoinfer.utils.checks import show
from nanoinfer.utils.progress import ProgressBar
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    from nanoinfer.entrypoints.async_streams import AsyncOutputStream, Observe

Params = PoolingParams | Sequence[PoolingParams] | None
Making = Generator[Workers, None, Request]
"""Makes a request; yields the workers that run the next part."""
T = TypeVar("T", bound=PoolingRequestOutput[Any])
NOTHING = SamplingParams(max_tokens=1)
"""Of the requests: what is only scored samples no token."""
_ROLES = ("query", "document")
Values = NDArray[np.float64]


@dataclass(eq=False)
class Reading:
    """A request that generates nothing, and the sum of the rows that are read of it."""

    core: Core
    tokens: Callable[[], tuple[str | None, list[int]]]
    """Returns the text of the request, if it has one, and its tokens."""
    num_chars: int
    """Of the texts that it is made of."""
    kind: str
    """The tokens whose rows are read, one of POOLING_TYPES."""
    options: Mapping[str, Any]
    """Of `Core.make`: salt and priority."""
    columns: list[int] | None = None
    """Of the logits that are read; None: hidden states are."""
    ids: list[int] = field(default_factory=list)
    """The tokens of the input, when the request is made."""
    total: Values = field(default_factory=lambda: np.zeros(1))
    count: int = 0

    def make(self) -> Request:
        """Return the request, not queued. Raises NanoinferError if it is refused."""
        text, self.ids = self.tokens()
        ids = self.ids[:1] if self.kind == "cls" else self.ids  # the first token attends to no other
        request = self.core.make(text, ids, NOTHING, 0, **self.options)
        first = len(ids) - 1 if self.kind == "last" else 0
        request.prompt_reads = PromptReads(ids, first, self._add, hidden=self.columns is None)
        return request

    def _add(self, rows: Array, _: list[int]) -> None:
        """Add rows of hidden states or logits. Raises ResultError if they are not finite."""
        values = to_numpy(rows)
        values = values if self.columns is None else values[:, self.columns]
        if not np.isfinite(values).all():
            raise ResultError("the model's outputs are not finite: use dtype=float32, and check the weights")
        for row in values:  # one by one: the order, and so the result, does not depend on the chunks
            self.total = self.total + row
        self.count += len(values)

    @property
    def mean(self) -> Values:
        """The mean of the rows."""
        return self.total / self.count


@dataclass(frozen=True)
class PoolingWork(Generic[T]):
    """Requests to run, and what they result in."""

    readings: Sequence[Reading]
    result: type[T]
    values: Sequence[tuple[Callable[..., Any], Sequence[int]]]
    """For each result a function of some readings, and their indices."""

    def make(self) -> list[Request]:
        """Return the requests, not queued. Raises NanoinferError if one of them is refused."""
        requests = []
        for i, reading in enumerate(self.readings):
            with numbered(i, len(self.readings)):
                requests.append(reading.make())
        return requests

    def finish(self, outputs: Sequence[RequestOutput]) -> list[T]:
        """Return the results. Args: outputs: of the requests, all of which have succeeded."""
        results = []
        for value, indices in self.values:
            found, of = [self.readings[i] for i in indices], [outputs[i] for i in indices]
            ids = [token for reading in found for token in reading.ids]
            cached = sum(output.num_cached_tokens for output in of)
            results.append(self.result(of[-1].request_id, value(*found), ids, cached))
        return results


class Pooler:
    """Makes the requests of embeddings and scores.

    Their `options` are those of `Core.make`: salt, for prompts that have none of their own, and priority.

    Args:
        core, model: as of `LLM`.
        requests: checks token ids.
    """

    def __init__(self, core: Core, model: ModelInfo, requests: RequestFactory) -> None:
        self._core, self._model, self._factory = core, model, requests
        self._formatter = ChatFormatter(model)  # of its own: chats have another template
        self._block_size = core.engine.limits.block_size

    @property
    def reranks(self) -> bool:
        """Whether scores are those of a reranker, not cosines of embeddings."""
        return self._model.pooling.true_id is not None

    def plan(
        self, inputs: Any, documents: Sequence[str], params: PoolingParams, **options: Any
    ) -> PoolingWork[EmbeddingRequestOutput] | PoolingWork[ScoringRequestOutput]:
        """Return the work that scores documents for queries, or without documents embeds the inputs."""
        if documents:
            return self.score(inputs, documents, params, **options)
        return self.embed(inputs, params, **options)

    # Embeddings ------------------------------------------------------------------------------------------

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None, **options: Any
    ) -> PoolingWork[EmbeddingRequestOutput]:
        """Return the work that embeds prompts.

        Args:
            prompts: in all supported forms, with or without `cache_salt`.
            params: of all prompts, or of each.
            options: of `Core.make`.

        Raises:
            NanoinferError: a prompt has an unsupported form, a parameter is out of range, or the model's files ask for
                a pooling that is not supported. What depends on the tokens is raised when a request is made.
        """
        salts: list[str | None] = []
        many = as_list(prompts, salts)
        each = [*params] if isinstance(params, Sequence) else [params or PoolingParams()] * len(many)
        if len(each) != len(many):
            raise NanoinferError(f"{len(many)} prompts, but {len(each)} PoolingParams: give one, or one for each")
        for p in each:
            self._check(p)
        readings = [
            self._reading(prompt, p, {**options, "salt": salt or options.get("salt")})
            for prompt, p, salt in zip(many, each, salts, strict=True)
        ]
        values = [(partial(self._embedding, params=p), (i,)) for i, p in enumerate(each)]
        return PoolingWork(readings, EmbeddingRequestOutput, values)

    def _check(self, params: PoolingParams) -> None:
        width = self._model.config.n_embd
        if not isinstance(params, PoolingParams):
            raise NanoinferError(f"pooling_params={show(params)} is not a PoolingParams")
        if params.dimensions is not None and params.dimensions > width:
            raise NanoinferError(f"dimensions={params.dimensions} is more than the model's {width}: lower it")
        if (most := params.truncate_prompt_tokens) is not None and most > self._block_size:
            raise NanoinferError(
                f"truncate_prompt_tokens={most} is more than the context length {self._block_size}: lower it, or use -1"
            )
        if self._model.pooling.unsupported:
            raise NanoinferError(self._model.pooling.unsupported)

    def _reading(self, prompt: str | list[int], params: PoolingParams, options: Mapping[str, Any]) -> Reading:
        """Return the request of one embedding."""
        text = prompt if isinstance(prompt, str) else None
        kind = self._model.pooling.kind
        return Reading(self._core, lambda: (text, self._token_ids(prompt, params)), len(text or ""), kind, options)

    def _token_ids(self, prompt: str | list[int], params: PoolingParams) -> list[int]:
        """Return the tokens of an input. A text gets the start and end tokens that the tokenizer's files ask for."""
        first: list[int] = []
        last: list[int] = []
        if isinstance(prompt, str):
            tokenizer = self._model.require_tokenizer()
            if params.truncate_prompt_tokens is None:
                self._factory.check_fits(prompt, None)
            prompt, last = tokenizer.encode(prompt), [*tokenizer.suffix]
            first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = self._factory.token_ids([*first, *prompt, *last])
        if not ids:
            raise NanoinferError("the input has no tokens: give one or more characters")
        if (most := self._most(params)) >= len(ids):
            return ids
        if params.truncate_prompt_tokens is None:
            raise input_too_long(str(len(ids)), self._block_size)
        kept = most - len(first) - len(last)
        return [*first, *prompt[len(prompt) - kept :], *last] if kept > 0 else ids[-most:]

    def _most(self, params: PoolingParams) -> int:
        """Return the number of tokens that an input may have."""
        given = params.truncate_prompt_tokens
        return self._block_size if given in (None, -1) else int(given or 0)

    def _embedding(self, reading: Reading, params: PoolingParams) -> EmbeddingOutput:
        values = reading.mean[: params.dimensions]
        if self._model.pooling.normalize if params.normalizes is None else params.normalizes:
            values = _normalized(values)
        return EmbeddingOutput(array("f", values.astype(np.float32).tobytes()))

    # Scores ----------------------------------------------------------------------------------------------

    def score(
        self,
        queries: Any,
        documents: Any,
        params: PoolingParams | None,
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> PoolingWork[ScoringRequestOutput]:
        """Return the work that scores documents: all for one query, or each for its own.

        Raises:
            NanoinferError: as `embed`; or the numbers of queries and documents differ, or the model is a reranker and
                has no template.
        """
        params = PoolingParams() if params is None else params
        self._check(params)
        if params.dimensions is not None or params.normalize is not None:
            raise NanoinferError("dimensions and normalize are of embeddings: leave them out of scores")
        before, after = as_list(queries), as_list(documents)
        if len(before) not in (1, len(after)) or not after:
            raise NanoinferError(
                f"{len(before)} queries, but {len(after)} documents: give one query, or one for each document"
            )
        one_query = len(before) == 1
        if self.reranks:
            pairs = [*zip(before * (len(after) if one_query else 1), after, strict=True)]
            readings = self._pairs(pairs, params, self._template(chat_template), options)
            values = [(partial(_score, params=params), (i,)) for i in range(len(pairs))]
            return PoolingWork(readings, ScoringRequestOutput, values)
        if chat_template is not None:
            raise NanoinferError("chat_template is of rerankers: give classifier_from_token= to LLM, or leave it out")
        readings = [self._reading(prompt, params, options) for prompt in (*before, *after)]
        each = [(_cosine, (0 if one_query else i, len(before) + i)) for i in range(len(after))]
        return PoolingWork(readings, ScoringRequestOutput, each)

    def _pairs(
        self, pairs: Sequence[tuple[Any, Any]], params: PoolingParams, template: ChatOptions, options: Mapping[str, Any]
    ) -> list[Reading]:
        """Return the requests of a reranker."""
        pooling, readings = self._model.pooling, []
        columns = [token for token in (pooling.true_id, pooling.false_id) if token is not None]
        for i, (query, document) in enumerate(pairs):
            with numbered(i, len(pairs), "document"):
                if not (isinstance(query, str) and isinstance(document, str)):
                    raise NanoinferError("a reranker's query and document are token ids: give text")
            tokens = partial(self._pair, query, document, params, template)
            readings.append(Reading(self._core, tokens, len(query) + len(document), "last", options, columns))
        return readings

    def _template(self, given: str | None) -> ChatOptions:
        """Return how a reranker's prompts are made."""
        model = self._model
        model.require_head()
        for token in (model.pooling.true_id, model.pooling.false_id):
            if token is not None and token >= model.config.vocab_size:
                raise NanoinferError(f"the reranker's token id {token} is not less than {model.config.vocab_size}")
        source = given or model.pooling.template
        own = model.chat_template or ""
        if source is None and not all(re.search(rf"['\"]{role}['\"]", own) for role in _ROLES):
            raise NanoinferError(
                f"model {model.name!r} has no template with the roles {' and '.join(_ROLES)}: give score_template="
                " (--score-template FILE)"
            )
        return ChatOptions(source)

    def _pair(self, query: str, document: str, params: PoolingParams, template: ChatOptions) -> tuple[str, list[int]]:
        """Return the prompt of a query and a document. The document loses its end if the prompt is to be shortened."""
        tokenizer, most = self._model.require_tokenizer(), self._most(params)
        shortens = params.truncate_prompt_tokens is not None
        if not shortens:
            self._factory.check_fits(query, None)
            self._factory.check_fits(document, None)
        text, ids = self._render(query, document, template, tokenizer)
        kept: list[int] | None = None
        while shortens and len(ids) > most and kept != []:
            kept = tokenizer.encode(document) if kept is None else kept
            kept = kept[: max(0, len(kept) - (len(ids) - most))]
            text, ids = self._render(query, decode(tokenizer, kept), template, tokenizer)
        if len(ids) > most:
            raise input_too_long(str(len(ids)), self._block_size)
        return text, ids

    def _render(self, query: str, document: str, template: ChatOptions, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        messages = [{"role": role, "content": content} for role, content in zip(_ROLES, (query, document), strict=True)]
        text = self._formatter.render(messages, template)
        return text, tokenizer.encode(text)


def _normalized(values: Values) -> Values:
    return values / max(float(np.sqrt(np.square(values).sum())), 1e-12)


def _cosine(query: Reading, document: Reading) -> ScoringOutput:
    return ScoringOutput(float((_normalized(query.mean) * _normalized(document.mean)).sum()))


def _score(reading: Reading, params: PoolingParams) -> ScoringOutput:
    """Return the score of the logits after a prompt: p(true) against p(false), or the difference of the logits."""
    logits = reading.total
    value = float(logits[0] - (logits[1] if len(logits) == 2 else 0.0))
    if params.use_activation is not False:
        value = 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
    return ScoringOutput(value)


# The methods of LLM and AsyncLLM ---------------------------------------------------------------------------


class PoolingMethods:
    """`embed` and `score` of `LLM`."""

    core: Core
    pooler: Pooler
    """Makes the requests."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: `output.outputs.embedding`. See docs/embeddings.md.

        Args:
            prompts: in the forms of `generate`. A text gets the start and end tokens of the tokenizer's files.
            pooling_params: for all prompts, or one for each.
            truncate_prompt_tokens: in place of that of all `pooling_params`.
            use_tqdm: as for `generate`.

        Raises:
            NanoinferError: a prompt or parameter is invalid, a prompt is longer than the context length, the model's
                files ask for a pooling that is not supported, or more than max_num_queued requests would wait.
            ResultError: hidden states are not finite.
        """
        given = with_limit(pooling_params, truncate_prompt_tokens)
        return self.pool(self.pooler.embed(prompts, given), "embed", use_tqdm)

    def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each document, for one query or for its own: `output.outputs.score`.

        The score of a reranker is the probability of the token that stands for a relevant document. That of other
        models is the cosine of the embeddings.

        Args:
            queries: one for all documents, or one for each.
            documents: texts; for the cosine of embeddings in all forms of prompts.
            pooling_params, truncate_prompt_tokens, use_tqdm: as for `embed`. A reranker's document is
                shortened at its end.
            chat_template: a reranker's Jinja template to use instead of the model's own.

        Raises:
            NanoinferError: as `embed`; or the numbers of queries and documents differ, or a reranker has no template.
            ResultError: logits are not finite.
        """
        given = with_limit(pooling_params, truncate_prompt_tokens)
        assert not isinstance(given, Sequence)
        work = self.pooler.score(queries, documents, given, chat_template=chat_template)
        return self.pool(work, "score", use_tqdm)

    def pool(self, work: PoolingWork[T], what: str = "embed", use_tqdm: bool | None = None) -> list[T]:
        """Run the requests of some work beside others, and return its results. `what`: names the progress bar."""
        requests = work.make()
        with Ownership(self.core, requests), ProgressBar(what, use_tqdm) as bar:
            self.core.submit(requests)
            finished = all_finished(requests)
            while not finished():
                self.core.step(until=finished)
                if bar.due():
                    bar.update(sum(r.finished for r in requests), len(requests))
        for i, request in enumerate(requests):
            (sequence,) = request.sequences
            if sequence.finish_reason != "stop":
                with numbered(i, len(requests)):
                    raise ResultError(sequence.error or "another call was interrupted, and ended the request")
        return work.finish([self.core.output(request) for request in requests])


class AsyncPoolingMethods:
    """`embed` and `score` of `AsyncLLM`. If the task is cancelled, so are its requests."""

    llm: PoolingMethods

    def _workers(self, size: int) -> Workers:
        raise NotImplementedError

    def _stream(self, making: Making, request_id: str | None, output_kind: str) -> AsyncOutputStream:
        raise NotImplementedError

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: Params = None, *, priority: int = 0
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, as `LLM.embed`. Requests of smaller priority are admitted first."""
        return await self.pool(lambda: self.llm.pooler.embed(prompts, pooling_params, priority=priority))

    async def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each document, as `LLM.score`. Requests of smaller priority are admitted first."""
        pooler = self.llm.pooler
        return await self.pool(
            lambda: pooler.score(queries, documents, pooling_params, chat_template=chat_template, priority=priority)
        )

    async def pool(self, plan: Callable[[], PoolingWork[T]], observe: Observe | None = None) -> list[T]:
        """Run the requests of some work, and return its results.

        Args:
            plan: returns the work; it runs in a worker thread.
            observe: as of `MergedStreams`.
        """
        from nanoinfer.entrypoints.async_engine import FINAL_ONLY  # asyncio: not in all programs
        from nanoinfer.entrypoints.async_streams import MergedStreams

        work = await self._workers(0).run(plan)

        def making(reading: Reading) -> Making:
            yield self._workers(reading.num_chars)
            return reading.make()

        streams = [self._stream(making(reading), None, FINAL_ONLY) for reading in work.readings]
        merged = MergedStreams(streams, observe)
        outputs: dict[int, RequestOutput] = {}
        try:
            async for found in merged:
                outputs.update(found)
        finally:
            merged.close()
        return await self._workers(0).run(lambda: work.finish([outputs[i] for i in range(len(outputs))]))


def with_limit(params: Params, most: int | None) -> Params:
    """Return parameters with truncate_prompt_tokens, if it is given."""
    if most is None:
        return params
    if params is None or isinstance(params, PoolingParams):
        return replace(params or PoolingParams(), truncate_prompt_tokens=most)
    return [replace(p, truncate_prompt_tokens=most) for p in params]
