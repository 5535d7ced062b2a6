"""The methods of `AsyncLLM` that embed and score (pooling.py makes their requests)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

from nanoinfer.entrypoints.async_requests import FINAL_ONLY
from nanoinfer.entrypoints.async_streams import AsyncOutputStream, MergedStreams, Observe
from nanoinfer.entrypoints.pooling import PoolingWork, Reading
from nanoinfer.entrypoints.pooling_methods import Params
from nanoinfer.inputs.prompts import Prompt
from nanoinfer.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    from nanoinfer.entrypoints.llm import LLM

T = TypeVar("T")
Making = Generator[Workers, None, Request]
"""Makes a request; yields the workers that run the next part."""


class AsyncPoolingMethods:
    """`embed` and `score` of `AsyncLLM`. If the task is cancelled, so are its requests."""

    llm: LLM

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
