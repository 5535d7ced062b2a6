"""What the rungs written in PyTorch share: handles and lengths, boundary checks, and the flat step.

A rung says where keys and values live and how a query finds them (`_attend`, and what to do on fork,
truncate and close). The flat step is the same for all that keep a cache: the new tokens of all sequences
in one row of N tokens, so that matrix products see no padding, and attention per sequence.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from nanoinfer.engines.base import EngineLimits, Handle, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.models.gpt import GPT, Attend


class TorchEngine:
    """Base of the PyTorch rungs.

    Args:
        model: the weights, on the device and in the dtype to compute in.
        limits: what the engine may hold.
    """

    def __init__(self, model: GPT, limits: EngineLimits) -> None:
        self.model = model
        self.config = model.config
        self.limits = limits
        self.device = model.lm_head.weight.device
        self.dtype = model.lm_head.weight.dtype
        self._lengths: dict[Handle, int] = {}
        self._next_handle = 0
        _lay_out(model)

    # Sequences -------------------------------------------------------------------------------------------

    def open(self) -> Handle:
        """Return an empty sequence."""
        if len(self._lengths) >= self.limits.max_num_seqs:
            raise NanoinferError(
                f"{len(self._lengths)} sequences are open, the limit is max_num_seqs={self.limits.max_num_seqs}:"
                " close one, or raise max_num_seqs"
            )
        handle = Handle(self._next_handle)
        self._open(handle)
        self._next_handle += 1
        self._lengths[handle] = 0
        return handle

    def length(self, handle: Handle) -> int:
        """Return the number of tokens in a sequence."""
        try:
            return self._lengths[handle]
        except (KeyError, TypeError):
            raise NanoinferError(f"handle {handle!r} is not an open sequence") from None

    def truncate(self, handle: Handle, length: int) -> None:
        """Forget the tokens from position `length` on."""
        have = self.length(handle)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= have:
            raise NanoinferError(f"truncate to {length!r}: sequence {handle} has {have} tokens")
        self._truncate(handle, length)
        self._lengths[handle] = length

    def fork(self, handle: Handle) -> Handle:
        """Return a new sequence with the same past."""
        length = self.length(handle)
        child = self.open()
        self._fork(handle, child)
        self._lengths[child] = length
        return child

    def close(self, handle: Handle) -> None:
        """Free a sequence."""
        self.length(handle)
        self._close(handle)
        del self._lengths[handle]

    # The step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def extend(self, batch: StepBatch) -> Tensor:
        """Append new tokens to open sequences and return logits, (sum(num_logits), V) float32."""
        self._check(batch)
        if not batch.handles:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        hidden = self._run(batch)  # (sum(num_logits), C)
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            self._lengths[handle] += num_new  # the one place where positions advance
        return self.model.lm_head(hidden).float()  # type: ignore[no-any-return]

    def _run(self, batch: StepBatch) -> Tensor:
        """Return the hidden states that logits are wanted for, (sum(num_logits), C)."""
        starts = [self._lengths[h] for h in batch.handles]
        idx = torch.tensor(batch.token_ids, device=self.device)
        pos = torch.tensor(
            [p for s, n in zip(starts, batch.num_new, strict=True) for p in range(s, s + n)],
            device=self.device,
        )
        hidden = self.model.hidden(idx, pos, self._attend(batch, starts))  # (N, C)
        if batch.num_logits == batch.num_new:
            return hidden
        ends = accumulate(batch.num_new)
        rows = [r for end, n in zip(ends, batch.num_logits, strict=True) for r in range(end - n, end)]
        return hidden[rows]

    def _check(self, batch: StepBatch) -> None:
        """Raise NanoinferError unless the batch makes sense, before anything is changed."""
        handles, num_new, num_logits = batch.handles, batch.num_new, batch.num_logits
        if not len(handles) == len(num_new) == len(num_logits) or len(set(handles)) != len(handles):
            raise NanoinferError(
                f"batch of {len(handles)} handles ({len(set(handles))} different), {len(num_new)} num_new and"
                f" {len(num_logits)} num_logits: give one of each per sequence, each sequence once"
            )
        for handle, new, wanted in zip(handles, num_new, num_logits, strict=True):
            have = self.length(handle)
            if new < 1 or not 0 <= wanted <= new:
                raise NanoinferError(
                    f"sequence {handle}: num_new={new}, num_logits={wanted}: need num_new >= 1 and"
                    " 0 <= num_logits <= num_new"
                )
            if have + new > self.limits.block_size:
                raise NanoinferError(
                    f"sequence {handle}: {have} tokens and {new} more exceed the context length"
                    f" {self.limits.block_size}: truncate it first"
                )
        if sum(num_new) != len(batch.token_ids):
            raise NanoinferError(f"num_new adds up to {sum(num_new)}, but there are {len(batch.token_ids)} token_ids")
        if batch.token_ids and not (min(batch.token_ids) >= 0 and max(batch.token_ids) < self.config.vocab_size):
            bad = next(t for t in batch.token_ids if not 0 <= t < self.config.vocab_size)
            raise NanoinferError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    # What a rung brings ----------------------------------------------------------------------------------

    def _attend(self, batch: StepBatch, starts: list[int]) -> Attend:
        """Return attention for one step over flat (N, H, D) queries; it also stores the new keys and values."""
        raise NotImplementedError

    def _open(self, handle: Handle) -> None:
        raise NotImplementedError

    def _truncate(self, handle: Handle, length: int) -> None:
        raise NotImplementedError

    def _fork(self, parent: Handle, child: Handle) -> None:
        raise NotImplementedError

    def _close(self, handle: Handle) -> None:
        raise NotImplementedError


def _lay_out(model: GPT) -> None:
    """Put linear weights in the order in memory that this device's kernels read fastest; values stay.

    float32 on a CPU: inputs outermost, as GPT-2's own checkpoints are. One row times GPT-2's weights then
    takes 20.5 ms instead of 26.1 (2 threads), 8 rows the same. Elsewhere: outputs outermost.
    """
    inputs_outermost = model.lm_head.weight.device.type == "cpu" and model.lm_head.weight.dtype == torch.float32
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            w = module.weight.data
            module.weight.data = w.t().contiguous().t() if inputs_outermost else w.contiguous()


def causal_mask(num_new: int, length: int, device: torch.device) -> Tensor | None:
    """Return which of `length` keys the last `num_new` queries may see, (num_new, length) bool.

    None means "all of them", which the attention kernels do fastest: one query sees every key.

        causal_mask(2, 4, device) -> [[1, 1, 1, 0],
                                      [1, 1, 1, 1]]
    """
    if num_new == 1:
        return None
    query = torch.arange(length - num_new, length, device=device)
    return torch.arange(length, device=device) <= query[:, None]
