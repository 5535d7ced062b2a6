"""The methods of `LLM` and `AsyncLLM` that embed and score, with vLLM's names (pooling.py makes their requests)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.core.core import Core
from nanoinfer.entrypoints.pooling import Pooler, PoolingWork, Reading, T
from nanoinfer.entrypoints.streams import Ownership, all_finished
from nanoinfer.errors import ResultError
from nanoinfer.inputs.prompts import Prompt, numbered
from nanoinfer.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.progress import ProgressBar
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    from nanoinfer.entrypoints.async_streams import AsyncOutputStream, Observe

Params = PoolingParams | Sequence[PoolingParams] | None
Making = Generator[Workers, None, Request]
"""Makes a request; yields the workers that run the next part."""


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
        from nanoinfer.entrypoints.async_streams import FINAL_ONLY, MergedStreams

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
