"""The callable class for `Dataset.map_batches`, in each of whose actors it loads a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.batch.run import BatchOptions
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.ray.rows import add_records, to_lines
from nanoinfer.ray.service import LineService
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pyarrow as pa


class Generator:
    """Generates for the rows of a Ray dataset; for chats, completions, embeddings and scores.

        ds.map_batches(nanoinfer.ray.Generator, fn_constructor_kwargs={"model": "shakespeare"}, concurrency=4)

    A row has the columns of a line of a batch file: `prompt`, `prompt_token_ids` or `messages`, and any field of
    SamplingParams; or `url`, `method` and `body`, OpenAI's form. Its result has the columns of the row and those of a
    record: `outputs`, `usage`, `seed` and `error` (the only one that an invalid row has); or `response` (JSON text) and
    `error`. An actor generates for the rows of all batches that it has at the same time.

    Args:
        model: as of `LLM`.
        sampling_params: defaults for the rows: SamplingParams, or a dict of its fields; None: the model's.
        seed: the seed of a row without one is derived from this and from its number, or from the row.
        number: column of integers from which these seeds are derived; None: from the row's fields, so that equal rows
            have equal outputs. Seeds never depend on the batch or the actor.
        chat_template: Jinja template to use instead of the model's own.
        options: of `LLM`; `threads` is the number of the actor's CPUs by default.

    Raises:
        NanoinferError, TypeError: as `LLM`. Calls: the column `number` does not exist or is none of integers; the
            engine has failed.
    """

    def __init__(
        self,
        model: str = "shakespeare",
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        seed: int = 0,
        number: str | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        llm = LLM(model, **{"threads": actor_cpus(), "target_step_ms": None, **options})
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = replace(llm.requests.defaults, **(sampling_params or {}))
        self._number = number
        self._service = LineService(llm, BatchOptions(sampling_params, seed, chat_template))

    async def __call__(self, batch: Any) -> pa.Table:
        """Return the rows of a batch with the columns of their records."""
        from ray.data.block import BlockAccessor

        table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        results = await asyncio.wrap_future(self._service.submit(to_lines(table, self._number)))
        return add_records(table, [result.record for result in results])


def actor_cpus() -> int | None:
    """Return how many CPUs this actor has, at least 1; None outside of actors."""
    try:
        import ray
    except ImportError:
        raise NanoinferError(missing_extra("ray", "cluster")) from None
    if not ray.is_initialized():
        return None
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
