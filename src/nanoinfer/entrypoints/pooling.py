"""Embeddings and scores: requests that generate nothing and whose final hidden states are read.

They run beside other requests: in the same steps, in chunks, and share prefixes (scheduling/). On engine `native`,
where rows do not depend on each other, results are the same in any company, bit for bit: sums are made token by token.

A score is the cosine of two embeddings.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.core.core import Core
from nanoinfer.entrypoints.input_processor import RequestFactory
from nanoinfer.errors import NanoinferError, ResultError, show, too_long
from nanoinfer.inputs.prompts import Prompt, as_list, for_each, numbered
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanoinfer.sampling_params import LoRARequest, PoolingParams, SamplingParams
from nanoinfer.scheduling.sequence import PromptReads, Request
from nanoinfer.utils.arrays import Array, to_numpy

NOTHING = SamplingParams(max_tokens=1)
"""Parameters of the requests: what is only read samples no token."""
Values = NDArray[np.float64]


@dataclass(eq=False)
class Reading:
    """One input: its request, and the sum of the hidden states that are read of it."""

    pooler: Pooler
    prompt: str | list[int]
    params: PoolingParams
    options: Mapping[str, Any]
    """Options passed to `Core.make` (salt, priority)."""
    lora: LoRARequest | None = None
    """Its adapter; None: none."""
    ids: list[int] = field(default_factory=list)
    """The tokens of the input, when the request is made."""
    total: Values = field(default_factory=lambda: np.zeros(1))
    count: int = 0

    @property
    def num_chars(self) -> int:
        """Number of characters of a text; 0 for token ids."""
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    def make(self) -> Request:
        """Return the request, not queued. Raises NanoinferError if it is refused."""
        self.ids = self.pooler.token_ids(self.prompt, self.params)
        text = self.prompt if isinstance(self.prompt, str) else None
        request = self.pooler.core.make(text, self.ids, NOTHING, 0, **self.options)
        self.pooler.core.adapt(request, self.lora)
        first = 0 if self.pooler.model.pooling.kind == "mean" else len(self.ids) - 1
        request.prompt_reads = PromptReads(self.ids, first, self._add, hidden=True)
        return request

    def _add(self, rows: Array, _: list[int]) -> None:
        """Add rows of hidden states. Raises ResultError if they are not finite."""
        values = to_numpy(rows)
        if not np.isfinite(values).all():
            raise ResultError("the model's outputs are not finite: use dtype=float32, and check the weights")
        for row in values:  # one by one: the order, and so the result, does not depend on the chunks
            self.total = self.total + row
        self.count += len(values)

    def result(self, output: RequestOutput) -> EmbeddingRequestOutput:
        """Return the embedding. Args: output: of the request, which has succeeded."""
        values, params = (self.total / self.count)[: self.params.dimensions], self.params
        if self.pooler.model.pooling.normalize if params.use_activation is None else params.use_activation:
            values = _normalized(values)
        embedding = EmbeddingOutput(array("f", values.astype(np.float32).tobytes()))
        return EmbeddingRequestOutput(output.request_id, embedding, self.ids, output.num_cached_tokens)


def make_all(readings: Sequence[Reading]) -> list[Request]:
    """Return the requests, not queued. Raises NanoinferError if one of them is refused."""
    requests = []
    for i, reading in enumerate(readings):
        with numbered(i, len(readings)):
            requests.append(reading.make())
    return requests


class Pooler:
    """Checks the inputs of embeddings.

    Args:
        core, model: as of `LLM`.
        requests: checks token ids.
    """

    def __init__(self, core: Core, model: ModelInfo, requests: RequestFactory) -> None:
        self.core, self.model, self._requests = core, model, requests
        self._block_size = core.engine.limits.block_size

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        lora: LoRARequest | None = None,
        **options: Any,
    ) -> list[Reading]:
        """Return the inputs to embed.

        Args:
            prompts: in all supported forms, with or without `cache_salt`.
            params: of all prompts, or of each.
            lora: the adapter of all prompts; None: none.
            options: of `Core.make`: salt, for prompts that have none of their own, and priority.

        Raises:
            NanoinferError: a prompt has an unsupported form, a parameter is out of range, or the model's files ask for
                a pooling that is not supported. What depends on the tokens is raised when a request is made.
        """
        salts: list[str | None] = []
        inputs = as_list(prompts, salts)
        each = for_each(PoolingParams() if params is None else params, len(inputs), "PoolingParams")
        for p in each:
            self._check(p)
        return [
            Reading(self, prompt, p, {**options, "salt": salt or options.get("salt")}, lora)
            for prompt, p, salt in zip(inputs, each, salts, strict=True)
        ]

    def _check(self, params: PoolingParams) -> None:
        width = self.model.config.n_embd
        if not isinstance(params, PoolingParams):
            raise NanoinferError(f"pooling_params={show(params)} is not a PoolingParams")
        if params.dimensions is not None and params.dimensions > width:
            raise NanoinferError(f"dimensions={params.dimensions} is more than the model's {width}: lower it")
        if (limit := params.truncate_prompt_tokens) is not None and limit > self._block_size:
            raise NanoinferError(
                f"truncate_prompt_tokens={limit} is more than the context length {self._block_size}: lower it, or use"
                " -1"
            )
        if self.model.pooling.unsupported:
            raise NanoinferError(self.model.pooling.unsupported)

    def token_ids(self, prompt: str | list[int], params: PoolingParams) -> list[int]:
        """Return the tokens of an input. A text gets the start and end tokens that the tokenizer's files ask for."""
        first: list[int] = []
        last: list[int] = []
        if isinstance(prompt, str):
            tokenizer = self.model.require_tokenizer()
            if params.truncate_prompt_tokens is None:
                self._requests.check_fits(prompt, None)
            prompt, last = tokenizer.encode(prompt), [*tokenizer.suffix]
            first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = self._requests.token_ids([*first, *prompt, *last])
        if not ids:
            raise NanoinferError("the input has no tokens: give one or more characters")
        limit = params.truncate_prompt_tokens or -1
        if len(ids) <= (limit := self._block_size if limit == -1 else limit):
            return ids
        if params.truncate_prompt_tokens is None:
            raise too_long(str(len(ids)), self._block_size, "input")
        kept = limit - len(first) - len(last)
        return [*first, *prompt[len(prompt) - kept :], *last] if kept > 0 else ids[-limit:]


def _normalized(values: Values) -> Values:
    return values / max(float(np.sqrt(np.square(values).sum())), 1e-12)


def pairs(queries: Any, documents: Any) -> tuple[list[Any], int]:
    """Return queries and documents as inputs, and the number of queries. Raises NanoinferError if they do not pair."""
    before, after = as_list(queries), as_list(documents)
    if len(before) not in (1, len(after)) or not after:
        raise NanoinferError(
            f"{len(before)} queries, but {len(after)} documents: give one query, or one for each document"
        )
    return [*before, *after], len(before)


def scores(embeddings: list[EmbeddingRequestOutput], num_queries: int) -> list[ScoringRequestOutput]:
    """Return the cosine of each document with its query, or with the only one. The queries are the first embeddings."""
    units = [_normalized(np.array(e.outputs.values, np.float64)) for e in embeddings]
    outputs = []
    for i in range(num_queries, len(embeddings)):
        q = 0 if num_queries == 1 else i - num_queries
        query, document, score = embeddings[q], embeddings[i], float((units[q] * units[i]).sum())
        ids, num_cached = query.prompt_token_ids + document.prompt_token_ids, query.num_cached_tokens
        num_cached += document.num_cached_tokens
        outputs.append(ScoringRequestOutput(document.request_id, ScoringOutput(score), ids, num_cached))
    return outputs
