"""The callable class for `Dataset.map_batches`, in each of whose actors it loads a model.

Rows of a dataset become lines of a batch file, and records become columns. A row has the fields of a line as columns;
null means that the line does not have the field. Bytes are UTF-8 text. Other columns stay as they are. Since Arrow's
columns have one type, what has no fixed form is JSON text: `response`, `logprobs`, `message`; and `messages` and `body`
may be.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoinfer.batch.files import Line, Place
from nanoinfer.batch.records import OPENAI_KEYS, OWN_KEYS
from nanoinfer.batch.run import BatchOptions, LineService
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError, missing_extra, show
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.files import parse_json

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


_JSON_FIELDS = ("messages", "body")


def to_lines(table: pa.Table, number: str | None) -> list[Line]:
    """Return the lines of a table's rows.

    Args:
        table: the rows.
        number: the column with the lines' numbers, from which seeds are derived; None: a hash of the line's fields.

    Raises:
        NanoinferError: there is no such column, or it has something else than integers; a field is two columns, or has
            values that JSON does not have.
    """
    known = OPENAI_KEYS if _is_openai(table) else OWN_KEYS
    if number is not None and number not in table.column_names:
        raise NanoinferError(f"number={number!r} is no column: the columns are {', '.join(table.column_names)}")
    names = [name for name in table.column_names if name in known]
    for name in {*names, number} - {None}:
        if (count := table.column_names.count(name)) > 1:
            raise NanoinferError(f"{count} columns are named {name!r}: rename all but one of them")
    fields = table.select(names).to_pylist()
    numbers = [None] * len(fields) if number is None else table[number].to_pylist()
    try:
        return [_line(*row) for row in zip(fields, numbers, range(len(fields)), strict=True)]
    except TypeError as e:  # a decimal, a timestamp, an object of Python
        raise NanoinferError(
            f"a line cannot contain all values of {', '.join(names)}: {e}: cast them to text, numbers, lists or structs"
        ) from None


def add_records(table: pa.Table, records: Sequence[bytes]) -> pa.Table:
    """Return the rows with the columns of their records, which replace columns of the same names."""
    import pyarrow as pa

    columns = [_columns(json.loads(record)) for record in records]
    kinds = _kinds(pa)
    names = ("response", "error") if _is_openai(table) else tuple(name for name in kinds if name != "response")
    table = table.select([i for i, name in enumerate(table.column_names) if name not in names])
    for name in names:
        table = table.append_column(name, pa.array([record.get(name) for record in columns], kinds[name]))
    return table


def _line(fields: Mapping[str, Any], number: Any, index: int) -> Line:
    fields = {name: _value(value) for name, value in _plain(fields).items() if value == value}  # NaN: a null
    for name in _JSON_FIELDS:
        if isinstance(fields.get(name), str):
            with suppress(NanoinferError):  # the line's error is then that the field is text
                fields[name] = parse_json(fields[name], "it is not JSON")
    content = json.dumps(fields, ensure_ascii=False).encode(errors="surrogatepass")  # of no UTF-8: the line's error
    if number is None:
        number = int.from_bytes(hashlib.sha256(content).digest()[:6], "big")
    elif not isinstance(number, int) or isinstance(number, bool):
        raise NanoinferError(f"the number of a row, {show(number)}, is not an integer")
    return Line(Place(number, "row", index + 1, 0, ""), content, len(content))


def _value(value: Any) -> Any:
    """Undo the conversion to floats of integers in a column that has nulls, which NumPy lacks."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    """Return what JSON has for a value, without the fields of objects that are null.

    In a column of Arrow, each object has the fields of all. Ray's tensors are arrays.
    """
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items() if v is not None}
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _columns(record: dict[str, Any]) -> dict[str, Any]:
    for output in record.get("outputs", ()):
        for name in ("stop_reason", "logprobs", "message"):
            output[name] = _as_text(output.get(name))
    return record | {name: _as_text(record.get(name)) for name in ("prompt_logprobs", "response")}


def _as_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _is_openai(table: pa.Table) -> bool:
    return any(name in table.column_names for name in ("method", "url", "body"))


def _kinds(pa: Any) -> dict[str, Any]:
    """Return the columns of records with their types, the same in every block of a dataset."""
    text, ids = pa.string(), pa.list_(pa.int64())
    output = {"index": pa.int64(), "text": text, "token_ids": ids, "finish_reason": text, "stop_reason": text,
              "cumulative_logprob": pa.float64(), "logprobs": text, "message": text}  # fmt: skip
    usage = {name: pa.int64() for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {
        "outputs": pa.list_(pa.struct(output)), "usage": pa.struct(usage), "seed": pa.uint64(), "error": text,
        "prompt_logprobs": text, "num_dropped_tokens": pa.int64(), "response": text,
    }  # fmt: skip
