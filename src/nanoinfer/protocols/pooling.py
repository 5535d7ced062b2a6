"""Bodies of requests to /v1/embeddings, which is OpenAI's."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import show
from nanoinfer.outputs import EmbeddingRequestOutput
from nanoinfer.protocols.fields import EMBEDDINGS, MAX_INPUTS, FieldError, read_fields
from nanoinfer.protocols.requests import prompts, queue_options
from nanoinfer.protocols.shared import Reply
from nanoinfer.sampling_params import PoolingParams

_PARAMS = ("dimensions", "use_activation", "truncate_prompt_tokens")


@dataclass(frozen=True)
class PoolingRequest:
    """A request for embeddings."""

    params: PoolingParams
    inputs: Sequence[Any]
    """The prompts, in the forms of `LLM.embed`."""
    model: Any = None
    priority: int = 0
    cache_salt: str | None = None
    base64: bool = False


def parse_pooling(body: Mapping[str, Any]) -> PoolingRequest:
    """Read the body of a request to EMBEDDINGS.

    Raises:
        FieldError: a field is unknown, missing, or has a bad value.
        NanoinferError: a parameter is out of range; its message begins with its name.
    """
    fields = read_fields(EMBEDDINGS, body)
    params = PoolingParams(**{name: fields[name] for name in _PARAMS if name in fields})
    inputs = prompts("input", fields["input"], MAX_INPUTS)
    for item in (value for prompt in inputs for value in prompt.values() if not value):
        raise FieldError(f"input={show(item)} is neither a text nor a list of token ids", "input")
    as_base64 = fields.get("encoding_format") == "base64"
    return PoolingRequest(params, inputs, fields.get("model"), **queue_options(fields), base64=as_base64)


def pooling_body(request: PoolingRequest, outputs: Sequence[EmbeddingRequestOutput], reply: Reply) -> dict[str, Any]:
    """Return the body of a successful response, for `json_strings`.

    Args:
        request: from `parse_pooling`.
        outputs: of its inputs.
        reply: as for `response_body`.
    """
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    embeddings = [_values(output.outputs.values, request.base64) for output in outputs]
    return {
        "id": f"embd-{reply.request_id}",
        "object": "list",
        "created": reply.created,
        "model": reply.model,
        "data": tuple({"index": i, "object": "embedding", "embedding": v} for i, v in enumerate(embeddings)),
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _values(values: array[float], as_base64: bool) -> list[float] | str:
    """Return the values of an embedding: a list, or the base64 of float32 in little endian."""
    if not as_base64:
        return values.tolist()
    little = array("f", values)
    if sys.byteorder == "big":
        little.byteswap()
    return base64.b64encode(little.tobytes()).decode()
