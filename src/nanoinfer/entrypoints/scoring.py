"""Scoring: log-probabilities of given tokens.

Perplexity and log-likelihoods of continuations are requests that generate nothing: their logits are read
(`PromptReads`). The scheduler runs them beside other requests: in the same steps, in chunks, sharing prefixes. So many
continuations of one context process it once. `prompt_logprobs` are read in the same way while the prompt of a request
is processed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from nanoinfer.core.core import Core
from nanoinfer.core.output_processor import describe
from nanoinfer.entrypoints.streams import Ownership, all_finished
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import LoglikelihoodOutput, Logprob
from nanoinfer.sampling.sampler import find_logprobs, not_finite
from nanoinfer.sampling_params import LoRARequest, SamplingParams
from nanoinfer.scheduling.sequence import PromptReads, Request
from nanoinfer.tokenizers.tokenizer import Tokenizer
from nanoinfer.utils.arrays import Array, to_numpy

PRIORITY = 1
"""Priority of the requests: others, which have 0 by default, are admitted first, however many texts wait."""
Logits = NDArray[np.float32]
Scored = tuple[list[int], int]
"""Token ids, and the index of the first one that is scored, given those before it."""


def log_likelihood(
    core: Core,
    ids: list[int],
    stride: int,
    progress: Callable[[int, int], None] | None,
    lora: LoRARequest | None = None,
) -> float:
    """Return the sum of the log-probabilities of ids[1:], in nats, in overlapping windows (see `windows`).

    Args:
        core: of the model.
        ids: at least two tokens.
        stride: tokens by which a window advances.
        progress: called after each window with the number of scored tokens and of all tokens.
        lora: the adapter; None: none.

    Raises:
        ResultError: the logits are not finite.
    """
    total = 0.0
    parts = list(windows(len(ids), core.engine.limits.block_size, stride))
    texts = ((ids[start:end], first - start) for start, first, end in parts)
    for (_, _, end), values in zip(parts, score(core, texts, lora), strict=True):
        total += sum(logprob for logprob, _ in values)
        if not math.isfinite(total):
            raise _overflowed(f"the log-likelihood of its first {end} tokens is {total}")
        if progress is not None:
            progress(end, len(ids))
    return total


def loglikelihoods(
    core: Core, pairs: list[tuple[list[int], list[int]]], lora: LoRARequest | None = None
) -> Iterator[LoglikelihoodOutput]:
    """Yield the log-likelihood of the second item of each pair given the first. Both have at least one token.

    `lora`: the adapter; None: none.

    Raises:
        ResultError: the logits are not finite.
    """
    block_size = core.engine.limits.block_size

    def texts() -> Iterator[Scored]:
        for context_ids, token_ids in pairs:
            ids = [*context_ids, *token_ids][-(block_size + 1) :]
            yield ids, len(ids) - len(token_ids)

    for (context_ids, token_ids), scored in zip(pairs, score(core, texts(), lora), strict=True):
        dropped = max(0, len(context_ids) + len(token_ids) - (block_size + 1))
        values = [logprob for logprob, _ in scored]
        if not math.isfinite(total := sum(values)):
            raise _overflowed(f"the log-likelihood of the continuation is {total}")
        greedy = all(is_greedy for _, is_greedy in scored)
        yield LoglikelihoodOutput(token_ids, values, total, greedy, len(token_ids), dropped)


def read_prompt_logprobs(request: Request, count: int, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Let a request read the log-probabilities of its prompt's tokens while the prompt is processed.

    They are normalized over the tokens that may be sampled, as in `logprobs`. If logits are not finite, the request
    ends with an error.

    Args:
        request: not queued yet.
        count: number of most likely tokens at each position.
        tokenizer: decodes them.
        vocab_size: number of tokens that may be sampled.

    Raises:
        NanoinferError: the prompt is longer than the context, or contains a token that may not be sampled.
    """
    ids = request.prompt_token_ids
    if request.num_dropped_tokens:
        raise NanoinferError(
            f"prompt_logprobs: {request.num_dropped_tokens} of the prompt's {len(ids)} tokens are outside the context"
            " length: shorten the prompt, or use perplexity"
        )
    if (largest := max(ids)) >= vocab_size:
        raise NanoinferError(f"prompt_logprobs: token id {largest} is not less than vocab_size={vocab_size}")
    logprobs: list[dict[int, Logprob] | None] = [None]

    def append(logits: Array, target_ids: list[int]) -> None:
        logprobs.extend(
            _described(to_numpy(logits), target_ids, count=count, tokenizer=tokenizer, vocab_size=vocab_size)
        )

    request.prompt_logprobs = logprobs
    if len(ids) > 1:
        request.prompt_reads = PromptReads(ids[1:], 0, append)


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


def score(core: Core, texts: Iterable[Scored], lora: LoRARequest | None = None) -> Iterator[list[tuple[float, bool]]]:
    """Yield, in order, what `_logprob` returns for each scored token of each text.

    Steps run until the texts are scored; other requests go on in them.

    Args:
        core: of the model.
        texts: at most block_size + 1 tokens each, of which the last at least is scored.
        lora: the adapter; None: none.

    Raises:
        NanoinferError: a text can never be processed (see `Request.check`), or more than max_num_queued would wait.
        ResultError: the engine has failed, or an interrupt in another thread ended the request.
    """
    pending = [_request(core, text, lora) for text in texts]
    with Ownership(core, requests := [request for request, _ in pending]):
        core.submit(requests)
        for request, values in pending:
            finished = all_finished([request])
            while not finished():
                core.step(until=finished)
            (sequence,) = request.sequences
            if sequence.finish_reason != "stop":
                raise ResultError(sequence.error or "the text was not scored: another call was interrupted")
            yield values


def _request(core: Core, text: Scored, lora: LoRARequest | None) -> tuple[Request, list[tuple[float, bool]]]:
    """Return a request that scores a text, and the list that its values are appended to."""
    ids, first = text
    values: list[tuple[float, bool]] = []

    def append(logits: Array, target_ids: list[int]) -> None:
        values.extend(map(_logprob, to_numpy(logits), target_ids))

    request = core.make(None, ids[:-1], SamplingParams(max_tokens=1), 0, priority=PRIORITY)
    core.adapt(request, lora)
    request.prompt_reads = PromptReads(ids[1:], first - 1, append)
    return request, values


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
    logits: Logits, target_ids: list[int], *, count: int, tokenizer: Tokenizer | None, vocab_size: int
) -> list[dict[int, Logprob] | None]:
    """Return the entries of `prompt_logprobs`.

    Raises:
        ResultError: the logits are not finite.
    """
    entries: list[dict[int, Logprob] | None] = []
    for row, target in zip(logits[:, :vocab_size], target_ids, strict=True):
        logprobs = find_logprobs(row, target, count) or {}
        if not math.isfinite(logprobs[target][0]):
            raise ResultError(not_finite())
        entries.append(describe(tokenizer, logprobs))
    return entries


def _overflowed(what: str) -> ResultError:
    return ResultError(f"{what}: the model's arithmetic overflowed: use dtype=float32, and check the weights")
