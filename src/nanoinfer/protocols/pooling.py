"""Bodies of requests to /v1/embeddings (OpenAI's) and /v1/rerank (Jina's and Cohere's)."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.outputs import EmbeddingRequestOutput, ScoringRequestOutput
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.protocols.fields import EMBEDDINGS, MAX_INPUTS, FieldError, read_fields
from nanoinfer.protocols.requests import prompts, queue_options
from nanoinfer.utils.checks import show

_PARAMS = ("dimensions", "use_activation", "truncate_prompt_tokens")


@dataclass(frozen=True)
class PoolingRequest:
    """What a request to embed or to score asks for."""

    url: str
    params: PoolingParams
    inputs: Sequence[Any]
    """The prompts of embeddings in the forms of `LLM.embed`; else the query."""
    documents: Sequence[str] = ()
    model: Any = None
    priority: int = 0
    cache_salt: str | None = None
    base64: bool = False
    top_n: int = 0
    """Number of documents to return; 0: all."""
    return_documents: bool = True

    @property
    def num_results(self) -> int:
        """Number of embeddings or scores."""
        return len(self.documents) if self.url != EMBEDDINGS else len(self.inputs)


def parse_pooling(url: str, body: Mapping[str, Any]) -> PoolingRequest:
    """Read the body of a request to EMBEDDINGS or RERANK.

    Raises:
        FieldError: a field is unknown, missing, or has a bad value.
        NanoinferError: a parameter is out of range; its message begins with its name.
    """
    given = read_fields(url, body)
    params = PoolingParams(**{name: given[name] for name in _PARAMS if name in given})
    common = {"model": given.get("model"), **queue_options(given)}
    if url == EMBEDDINGS:
        as_base64 = given.get("encoding_format") == "base64"
        return PoolingRequest(url, params, _inputs(given["input"]), base64=as_base64, **common)
    documents = [
        item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in given["documents"]
    ]
    common |= {name: given[name] for name in ("top_n", "return_documents") if name in given}
    return PoolingRequest(url, params, [given["query"]], _texts(documents, "documents"), **common)


def _inputs(given: Any) -> list[dict[str, Any]]:
    """Return the prompts of embeddings."""
    inputs = prompts("input", given, MAX_INPUTS)
    for item in (value for prompt in inputs for value in prompt.values() if not value):
        raise FieldError(f"input={show(item)} is neither a text nor a list of token ids", "input")
    return inputs


def _texts(given: Any, name: str) -> list[str]:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        what = f"has {len(given)} items" if isinstance(given, list) else f"{show(given)} is not a list"
        raise FieldError(f"{name} {what}: give 1 to {MAX_INPUTS} texts", name)
    for item in given:
        if not isinstance(item, str):
            raise FieldError(f"{name}: {show(item)} is not a text", name)
    return given


def pooling_body(
    request: PoolingRequest,
    outputs: Sequence[EmbeddingRequestOutput] | Sequence[ScoringRequestOutput],
    *,
    request_id: str,
    model: str,
    created: int,
) -> dict[str, Any]:
    """Return the body of a successful response, for `json_strings`.

    Args:
        request: from `parse_pooling`.
        outputs: of its inputs, or of its documents.
        request_id, model, created: as for `response_body`.
    """
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    if request.url != EMBEDDINGS:
        scores = [output.outputs.score for output in outputs if isinstance(output, ScoringRequestOutput)]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])  # of equal scores the first
        shown = [{"document": {"text": text}} if request.return_documents else {} for text in request.documents]
        results = tuple({"index": i, **shown[i], "relevance_score": scores[i]} for i in best[: request.top_n or None])
        return {"id": f"rerank-{request_id}", "model": model, "usage": usage, "results": results}
    vectors = [_values(o.outputs.values, request.base64) for o in outputs if isinstance(o, EmbeddingRequestOutput)]
    data = tuple({"index": i, "object": "embedding", "embedding": values} for i, values in enumerate(vectors))
    head = {"id": f"embd-{request_id}", "object": "list", "created": created, "model": model}
    return {**head, "data": data, "usage": usage}


def _values(values: array[float], as_base64: bool) -> list[float] | str:
    """Return the values of an embedding: a list, or the base64 of float32 in little endian."""
    if not as_base64:
        return values.tolist()
    little = array("f", values)
    if sys.byteorder == "big":
        little.byteswap()
    return base64.b64encode(little.tobytes()).decode()
