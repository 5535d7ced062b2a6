"""Scoring: log-probabilities of given tokens.

Perplexity, log-likelihoods of continuations and `prompt_logprobs` use one operation: open a sequence, extend it by the
tokens, and read the logits at the required positions, SCORE_CHUNK positions at a time. Each sequence is scored between
two steps of the running requests (`Core.use_engine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanoinfer.arrays import to_numpy
from nanoinfer.core import Core
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import LoglikelihoodOutput, Logprob
from nanoinfer.request_outputs import describe
from nanoinfer.sampling.sampler import find_logprobs, not_finite

if TYPE_CHECKING:
    from nanoinfer.models.tokenizers import Tokenizer
    from nanoinfer.scheduling.sequence import Request

SCORE_CHUNK = 128  # positions whose logits are in memory at a time: 26 MB with GPT-2's vocabulary
Logits = NDArray[np.float32]
T = TypeVar("T")


def log_likelihood(core: Core, ids: list[int], stride: int, progress: Callable[[int, int], None] | None) -> float:
    """Return the sum of the log-probabilities of ids[1:], in nats, in overlapping windows (see `windows`).

    Args:
        core: of the model.
        ids: at least two tokens.
        stride: tokens by which a window advances.
        progress: called after each window with the number of scored tokens and of all tokens.

    Raises:
        ResultError: the logits are not finite.
    """
    total = 0.0
    for start, first, end in windows(len(ids), core.engine.limits.block_size, stride):
        found = _use(core, ids[start:end], partial(_token_logprobs, first=first - start))
        total += sum(logprob for logprob, _ in found)
        if not math.isfinite(total):
            raise _overflowed(f"the log-likelihood of its first {end} tokens is {total}")
        if progress is not None:
            progress(end, len(ids))
    return total


def loglikelihood(core: Core, context_ids: list[int], token_ids: list[int]) -> LoglikelihoodOutput:
    """Return the log-likelihood of `token_ids` given a context of at least one token.

    Raises:
        NanoinferError: the continuation is longer than the context length.
        ResultError: the logits are not finite.
    """
    block_size = core.engine.limits.block_size
    if len(token_ids) > block_size:
        raise NanoinferError(
            f"the continuation has {len(token_ids)} tokens, but the context length is {block_size}: shorten it, or use"
            " perplexity"
        )
    ids = context_ids + token_ids
    dropped = max(0, len(ids) - (block_size + 1))
    first = len(context_ids) - dropped
    found = _use(core, ids[dropped:], partial(_token_logprobs, first=first))
    values = [logprob for logprob, _ in found]
    if not math.isfinite(total := sum(values)):
        raise _overflowed(f"the log-likelihood of the continuation is {total}")
    greedy = all(is_greedy for _, is_greedy in found)
    return LoglikelihoodOutput(token_ids, values, total, greedy, len(token_ids), dropped)


def add_prompt_logprobs(core: Core, request: Request, count: int, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Set a request's `prompt_logprobs` by an additional prefill, before the request is queued.

    The log-probabilities are normalized over the tokens that may be sampled, as in `logprobs`. If logits are not
    finite, the request ends with an error.

    Raises:
        NanoinferError: the prompt contains a token that may not be sampled.
    """
    ids = request.prompt_token_ids
    if (largest := max(ids)) >= vocab_size:
        raise NanoinferError(f"prompt_logprobs: token id {largest} is not less than vocab_size={vocab_size}")
    block_size = core.engine.limits.block_size
    read = partial(_described, count=count, tokenizer=tokenizer, vocab_size=vocab_size)
    request.prompt_logprobs = [None]
    try:
        for start, first, end in windows(len(ids), block_size, max(1, block_size // 2)):
            request.prompt_logprobs += _use(core, ids[start:end], partial(read, first=first - start))
    except ResultError as e:
        request.prompt_logprobs = None
        for sequence in request.sequences:
            sequence.abort(str(e))


def windows(num_tokens: int, block_size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield windows (start, first, end): tokens [first, end) are scored with tokens [start, end - 1) as input.

    Every token except the first is scored once, with a context of at least block_size - stride tokens, or of all tokens
    before it.

        10 tokens, block_size 4, stride 2:   (0, 1, 5)  (2, 5, 7)  (4, 7, 9)  (5, 9, 10)
    """
    scored = 1
    while scored < num_tokens:
        end = min(num_tokens, scored + stride if scored > 1 else block_size + 1)
        yield max(0, end - 1 - block_size), scored, end
        scored = end


def split_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation, split as in lm-evaluation-harness.

    Spaces at the end of the context move to the continuation. Both are tokenized together; the tokens after the
    context's are the continuation's.

        "The cat ", "sat"  ->  the ids of "The cat", and those of " sat"
    """
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    context_ids = encode(bare)
    return context_ids, encode(bare + continuation)[len(context_ids) :]


def _use(core: Core, ids: list[int], read: Callable[[Engine, list[int]], T]) -> T:
    """Call `read` with the engine between two steps, when the KV cache has room for a sequence of these tokens."""
    return core.use_engine(len(ids), lambda engine: read(engine, ids))


def _read_logits(engine: Engine, ids: list[int], first: int, read: Callable[[Logits, list[int]], list[T]]) -> list[T]:
    """Call `read` with chunks of the tokens ids[first:] and the logits that predict them; return its results."""
    handle = engine.open()
    try:
        found: list[T] = []
        for at in range(0, len(ids) - 1, SCORE_CHUNK):
            inputs = ids[at : min(at + SCORE_CHUNK, len(ids) - 1)]
            targets = ids[at + 1 : at + 1 + len(inputs)]
            num_logits = min(len(inputs), max(0, at + 1 + len(inputs) - first))
            batch = StepBatch()
            batch.add(handle, inputs, num_logits)
            logits = engine.extend(batch)
            if num_logits:
                found += read(to_numpy(logits), targets[-num_logits:])
        return found
    finally:
        engine.close(handle)


def _token_logprobs(engine: Engine, ids: list[int], first: int) -> list[tuple[float, bool]]:
    """Return, for each of ids[first:], its log-probability and whether it is a token of the largest probability."""

    def read(logits: Logits, targets: list[int]) -> list[tuple[float, bool]]:
        return [_logprob(row, target) for row, target in zip(logits, targets, strict=True)]

    return _read_logits(engine, ids, first, read)


def _logprob(logits: Logits, target: int) -> tuple[float, bool]:
    """Return a token's log-probability under the logits (V,), and whether its logit is the largest.

    Exponentials are float32, which is several times as fast, and their sum is float64. The error is below 1e-6: a value
    that matters is within 16 of the largest, so its difference is rounded by less than 5e-7.
    """
    largest = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite logit gives NaN
        total = np.exp(logits - largest).sum(dtype=np.float64)
        value = float(logits[target]) - float(largest) - math.log(total)
    return value, bool(logits[target] == largest)


def _described(
    engine: Engine, ids: list[int], first: int, *, count: int, tokenizer: Tokenizer | None, vocab_size: int
) -> list[dict[int, Logprob] | None]:
    """Return the entries of `prompt_logprobs` for ids[first:].

    Raises:
        ResultError: the logits are not finite.
    """

    def read(logits: Logits, targets: list[int]) -> list[dict[int, Logprob] | None]:
        found: list[dict[int, Logprob] | None] = []
        for row, target in zip(logits[:, :vocab_size], targets, strict=True):
            logprobs = find_logprobs(row, target, count) or {}
            if not math.isfinite(logprobs[target][0]):
                raise ResultError(not_finite())
            found.append(describe(tokenizer, logprobs))
        return found

    return _read_logits(engine, ids, first, read)


def _overflowed(what: str) -> ResultError:
    return ResultError(f"{what}: the model's arithmetic overflowed: use dtype=float32, and check the weights")
