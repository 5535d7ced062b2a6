"""Distillation: a small model (the draft) learns the probabilities of a larger one (the target) of one vocabulary.

What a draft is for decides what it learns. Speculative decoding keeps a proposed token with probability
sum(min(p, q)), so the draft must be near the target where the target's own texts go, not where the data goes:

    what is read    the data, and texts that the target wrote, greedy and sampled (Kim and Rush 2016, "Sequence-level
                    knowledge distillation"; Zhou et al. 2024, "DistillSpec"). Each starts with a piece of the data.
    the loss        KL(target || draft) over the whole vocabulary at every position (Hinton et al. 2015), and
                    sum(|p - q|), which is twice the rate of rejection itself. Validation reports the KL alone.

The target reads every window once, before the first step: its final hidden states are kept, C numbers a token, and
the logits, V numbers, are made from them batch by batch. So a step costs no pass through the target's layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.errors import NanoinferError
from nanoinfer.models import tokenizers
from nanoinfer.models.checkpoints.load import LoadedModel, load_model
from nanoinfer.models.gpt import GPT, causal_attention
from nanoinfer.models.tokenizers import Tokenizer
from nanoinfer.training.data import evenly_spread

Complete = Callable[[list[list[int]], list[float], int], list[list[int]]]
"""(texts as token ids, a temperature for each, n) -> the texts with n more tokens, drawn from the target."""

MIX = ((1.0, 0.0), (0.0, 1.0), (0.8, 0.0), (0.0, 0.8))  # temperatures of a text's first and second half, in turn
READ_BATCH = 4  # windows that the target reads at a time


def load_target(name: str, block_size: int, option: str = "distill") -> LoadedModel:
    """Return the target in float32; `option` is what named it.

    Raises:
        NanoinferError: no such model, one without a tokenizer, or its context is shorter than block_size tokens.
    """
    target = load_model(name, dtype=torch.float32)
    if target.tokenizer is None:
        raise NanoinferError(f"{option}={name!r}: {target.no_tokenizer_reason}")
    if block_size > target.config.block_size:
        raise NanoinferError(
            f"block_size={block_size} is more than the {target.config.block_size} of {option}={name!r}"
        )
    return target


def check_vocabularies(target: LoadedModel, tokenizer: Tokenizer, source: str) -> None:
    """Raise NanoinferError unless `tokenizer`, the draft's, has the target's tokens; `source` says where it is from."""
    assert target.tokenizer is not None
    if _tokens(target.tokenizer) != _tokens(tokenizer):
        raise NanoinferError(
            f"distill={target.name!r} has a vocabulary of {target.tokenizer.vocab_size} tokens, {source} another one"
            f" of {tokenizer.vocab_size}: probabilities of different tokens cannot be compared; leave --tokenizer out,"
            " or start from a model with the target's tokenizer"
        )


def _tokens(tokenizer: Tokenizer) -> object:
    """Return what decides a tokenizer's tokens and their ids, as far as JSON says it."""
    model = json.loads(tokenizers.to_json(tokenizer))["model"]
    return model["vocab"], model.get("merges")


def generate_windows(tokens: Tensor, num_tokens: int, length: int, seed: int, complete: Complete) -> Tensor:
    """Return texts that the target wrote, (N, length) int64, `num_tokens` tokens of it at least, and of no one else's.

    An eighth of each text is its prompt, a random piece of `tokens`; then the target goes on, half of the way at
    one temperature and half at another (MIX): greedy text after data, after sampled text, and the reverse.
    """
    prompt = max(1, length // 8)
    if length == prompt:
        raise NanoinferError(f"block_size={length} leaves no room for the target's words: use 2 or more with distill")
    count = -(-num_tokens // (length - prompt))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - prompt + 1, (count, 1), generator=generator)
    texts: list[list[int]] = tokens[starts + torch.arange(prompt)].tolist()
    for half, end in enumerate(((prompt + length) // 2, length)):
        if more := end - len(texts[0]):
            texts = complete(texts, [MIX[i % len(MIX)][half] for i in range(count)], more)
    return torch.tensor(texts)


def windows(tokens: Tensor, block_size: int) -> Tensor:
    """Cut (n,) tokens into (N, block_size) windows that do not overlap; what is left over is dropped."""
    return tokens[: len(tokens) // block_size * block_size].view(-1, block_size)


@dataclass(frozen=True)
class TargetBatches:
    """Windows of tokens with what the target thinks of each position. Drop-in for data.Batches."""

    tokens: Tensor
    """(N, T) int64."""
    hidden: Tensor
    """The target's final hidden states, (N, T, C)."""
    head: Tensor
    """The target's output head, (V, C), on the device of the training."""
    seed: int

    def draw(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return inputs, (B, T) int64, and the target's logits, (B, T, V), of one step: a function of (seed, step)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return self._batch(torch.randint(len(self.tokens), (batch_size,), generator=generator))

    def sweep(self, max_tokens: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of windows, evenly spread: `max_tokens` tokens at most, one window at least."""
        count, length = self.tokens.shape
        for rows in torch.split(evenly_spread(count, length, max_tokens), batch_size):
            yield self._batch(rows)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens[rows], F.linear(self.hidden[rows].to(self.head.device), self.head)


@torch.no_grad()
def run_target(target: GPT, tokens: Tensor, num_draft_tokens: int, seed: int, dtype: torch.dtype) -> TargetBatches:
    """Let the target read windows, (N, T), once.

    Args:
        target: on the device of the training; unchanged.
        tokens: (N, T) int64, T <= the target's block_size.
        num_draft_tokens: the draft's vocabulary; ids above it (padding of the target's) are left out.
        seed: of the batches.
        dtype: of the target's matrix products and of what is kept: float32 or bfloat16.
    """
    device = target.lm_head.weight.device
    positions = torch.arange(tokens.shape[1], device=device)
    hidden = torch.empty(*tokens.shape, target.config.n_embd, dtype=dtype)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        for at in range(0, len(tokens), READ_BATCH):
            rows = slice(at, at + READ_BATCH)
            hidden[rows] = target.hidden(tokens[rows].to(device), positions, causal_attention).to("cpu", dtype)
    return TargetBatches(tokens, hidden, target.lm_head.weight[:num_draft_tokens].to(dtype), seed)


def divergences(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the draft's and the target's logits, (B, T, V); both means over the B * T positions.

    Returns:
        KL(target || draft), nats per token; and sum(|p - q|) = 2 - 2 sum(min(p, q)), twice the total variation.
    """
    draft, wanted = (x.float().flatten(0, 1).log_softmax(-1) for x in (logits, target))
    kl = F.kl_div(draft, wanted, log_target=True, reduction="batchmean")
    return kl, (draft.exp() - wanted.exp()).abs().sum(-1).mean()
