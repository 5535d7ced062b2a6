"""Bodies of requests to /v1/embeddings (OpenAI's), /v1/rerank (Jina's and Cohere's) and /v1/score (vLLM's)."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.outputs import EmbeddingRequestOutput, ScoringRequestOutput
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.protocols.fields import EMBEDDINGS, MAX_INPUTS, RERANK, SCORE, FieldError, read_fields
from nanoinfer.protocols.requests import prompts, queue_options
from nanoinfer.utils.checks import show
from nanoinfer.utils.json_pieces import Items, Text

_PARAMS = ("dimensions", "use_activation", "truncate_prompt_tokens")
_QUERIES, _DOCUMENTS = ("queries", "text_1", "data_1"), ("documents", "text_2", "data_2", "items")


@dataclass(frozen=True)
class PoolingRequest:
    """What a request to embed or to score asks for."""

    url: str
    params: PoolingParams
    inputs: Sequence[Any]
    """The prompts of embeddings in the forms of `LLM.embed`; else the queries, one or as many as documents."""
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
    """Read the body of a request to EMBEDDINGS, RERANK or SCORE.

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
    if url == SCORE:
        queries, documents = _one_of(given, _QUERIES), _one_of(given, _DOCUMENTS)
        if len(queries) not in (1, len(documents)):
            raise FieldError(
                f"{len(queries)} queries, but {len(documents)} documents: give one query, or one for each", "queries"
            )
        return PoolingRequest(url, params, queries, documents, **common)
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


def _one_of(given: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the texts that a request has under one of several names."""
    found = [name for name in names if name in given]
    if len(found) != 1:
        what = "is missing" if not found else f"is given as {' and '.join(found)}"
        raise FieldError(f"{names[0]} {what}: give one of {', '.join(names)}", names[0])
    texts = given[found[0]]
    return _texts([texts] if isinstance(texts, str) else texts, found[0])


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
    """Return the body of a successful response, for `json_strings`: what is large is made when it is written.

    Args:
        request: from `parse_pooling`.
        outputs: of its inputs, or of its documents.
        request_id, model, created: as for `response_body`.
    """
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    scores = [output.outputs.score for output in outputs if isinstance(output, ScoringRequestOutput)]
    if request.url == RERANK:
        best = sorted(range(len(scores)), key=lambda i: -scores[i])  # of equal scores the first
        shown = [{"document": {"text": text}} if request.return_documents else {} for text in request.documents]
        results = tuple({"index": i, **shown[i], "relevance_score": scores[i]} for i in best[: request.top_n or None])
        return {"id": f"rerank-{request_id}", "model": model, "usage": usage, "results": results}
    name, data = "score", [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    if request.url == EMBEDDINGS:
        found = [_values(o.outputs.values, request.base64) for o in outputs if isinstance(o, EmbeddingRequestOutput)]
        name, data = "embd", [{"index": i, "object": "embedding", "embedding": v} for i, v in enumerate(found)]
    head = {"id": f"{name}-{request_id}", "object": "list", "created": created, "model": model}
    return {**head, "data": tuple(data), "usage": usage}


def _values(values: array[float], as_base64: bool) -> Items | Text:
    """Return the values of an embedding: a list, or the base64 of float32 in little endian."""

    def encoded() -> str:
        little = array("f", values)
        if sys.byteorder == "big":
            little.byteswap()
        return base64.b64encode(little.tobytes()).decode()

    return Text(encoded) if as_base64 else Items(values.tolist)
