"""The fused sampler on the GPU (kernels/triton/sampler.py): the reference's tokens without its sort or the host.

The shapes and addresses of its launches do not depend on data, so that a CUDA graph can capture them, and the next step
can use the sampled tokens before the host has read them. docs/sampling.md lists what it does not cover.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.sampling import sampler as reference
from nanoinfer.sampling.sampler import Sampled, SamplerRow
from nanoinfer.utils.arrays import Array

MAX_COUNT = 2**15 - 1
"""Largest count of one token in one sequence: 15 bits."""
SCRATCH_ROWS = 128
"""Rows sampled in one launch: enough to fill a GPU, and few enough that their scratch stays in its cache."""
NUM_WARPS = {"weigh": 4, "sample": 8}
"""Warps of each kernel. With 16 warps, `sample` does not have enough registers."""
NOT_FINITE = -1
"""Token that `TritonSampler.sample_slots` returns for a row whose largest logit is not finite."""


def why_unavailable() -> str | None:
    """Return why the kernels cannot be used, or None."""
    return None if importlib.util.find_spec("triton") else missing_extra("triton", "gpu")


class TritonSampler:
    """Slots for sequences, and the kernels that sample their next tokens. Not thread-safe; use one stream at a time.

    All device memory (docs/sampling.md) is allocated in the constructor, so that captured graphs stay valid.

    Args:
        num_slots: number of sequences that are sampled at the same time.
        vocab_size: number of tokens that may be sampled: V.
        device: device of the logits. A CPU needs Triton's interpreter (TRITON_INTERPRET=1), for tests.

    Raises:
        NanoinferError: triton is not installed.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: str | torch.device) -> None:
        if why_not := why_unavailable():
            raise NanoinferError(f"the fused sampler cannot run: {why_not}; or use sampler=reference")
        from nanoinfer.kernels.triton import launch
        from nanoinfer.kernels.triton import sampler as kernels

        self._kernels, self._launch_options = kernels, launch.launch_options
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, torch.device(device)
        block, group = kernels.BLOCK.value, kernels.GROUP.value
        self._num_parts = -(-vocab_size // block)
        self._parts = max(2, 1 << (self._num_parts - 1).bit_length())  # allocated: a power of two, for the kernels
        rows, width = min(num_slots, SCRATCH_ROWS), self._parts * block

        def make(*shape: int, dtype: torch.dtype = torch.float64, fill: float = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        # Per slot.
        self._words = make(num_slots, kernels.NUM_WORDS.value, dtype=torch.int64)
        self._lists = make(num_slots, kernels.LIST_SIZE.value, dtype=torch.int64)
        self._state = make(num_slots, vocab_size, dtype=torch.int16)
        # Per row of a launch.
        self._rows = rows
        self._largest = make(rows, self._parts)
        self._best = make(rows, self._parts, dtype=torch.int32)
        self._sums = make(rows, self._parts)
        self._values = make(rows, width)
        self._weights = make(rows, width)
        self._nearest = make(rows, width // group)
        self._groups = make(rows, width // group, dtype=torch.int32)

    def covers(self, row: SamplerRow) -> str | None:
        """Return why the fused sampler does not support a row, or None."""
        if row.params.num_logprobs is not None:
            return f"logprobs={row.params.num_logprobs}: the fused sampler does not compute log-probabilities"
        return self.why_not_by_kernels(row)

    def why_not_by_kernels(self, row: SamplerRow) -> str | None:
        """Return why the kernels cannot sample the row's tokens, or None; log-probabilities are not considered."""
        p, bias, ends = row.params, row.params.logit_bias or {}, row.end_token_ids if row.params.min_tokens else ()
        if p.allowed_token_ids or p.bad_words:
            return "allowed_token_ids and bad_words: the fused sampler does not exclude tokens by them"
        max_bias, max_ends = self._kernels.MAX_BIAS.value, self._kernels.MAX_ENDS.value
        if len(bias) > max_bias:
            return f"logit_bias has {len(bias)} entries: the fused sampler supports up to {max_bias}"
        if len(ends) > max_ends:
            return f"min_tokens with {len(ends)} end tokens: the fused sampler supports up to {max_ends}"
        if max((*bias, *ends), default=0) >= self.vocab_size:
            return f"token {max((*bias, *ends))} of logit_bias or the end tokens is not below {self.vocab_size}"
        if _is_penalised(row) and max(p.max_tokens or 0, row.num_output_tokens) > MAX_COUNT:
            return f"max_tokens={p.max_tokens} with penalties: the fused sampler counts up to {MAX_COUNT} tokens"
        return None

    def assign(self, slot: int, row: SamplerRow) -> None:
        """Assign a slot to a row; it replaces the slot's previous state. The slot's next token is the row's next token.

        Uploads parameters, position and tokens without waiting for the device. The row is not kept.

        Raises:
            NanoinferError: there is no such slot, or the fused sampler does not support the row.
        """
        if not 0 <= slot < self.num_slots:
            raise NanoinferError(
                f"slot={slot} is out of range: the fused sampler has num_slots={self.num_slots}: create a larger one"
            )
        if why_not := self.covers(row):
            raise NanoinferError(f"{why_not}: use the reference sampler")
        self._assign_all([row], slot)

    def _assign_all(self, rows: Sequence[SamplerRow], first: int = 0) -> None:
        """Assign consecutive slots from `first` on to several rows, with one upload of their parameters."""
        _upload(self._words[first : first + len(rows)], np.stack([self._words_of(row) for row in rows]))
        for slot, row in enumerate(rows, start=first):
            if row.params.logit_bias or reference.excludes_end_tokens(row):
                _upload(self._lists[slot], self._lists_of(row))
            if _is_penalised(row):
                ids, counts = self._state_of(row)
                self._state[slot].zero_()
                self._state[slot].scatter_(0, _on(self.device, ids), _on(self.device, counts))

    def sample_slots(
        self, logits: Tensor, slots: Tensor, wanted: Tensor, last: Tensor | None = None, owners: Tensor | None = None
    ) -> Tensor:
        """Sample the next token of each wanted row, count it, and advance the position of its slot, in two launches.

        All arguments are on the device, and the host does not wait for it.

        Args:
            logits: (B, V') float32, V' >= vocab_size, rows contiguous; not changed. Columns from vocab_size on are
                never sampled.
            slots: (B,) int64, the slot of each row. Wanted rows must have different, assigned slots.
            wanted: (B,) bool or int64, with the stride of the slots; other rows do not change any slot.
            last: int64 contiguous; element owners[b] becomes the token of wanted row b, or 0 if that is -1.
            owners: (B,) int64; given if `last` is.

        Returns:
            (B,) int64 token ids; -1 for a row whose largest logit is not finite; undefined for rows not wanted.

        Raises:
            NanoinferError: the shapes, dtypes or strides are wrong.
        """
        B = logits.shape[0]
        if not slots.shape == wanted.shape == (B,) or slots.stride() != wanted.stride():
            raise NanoinferError(
                f"slots {tuple(slots.shape)}, wanted {tuple(wanted.shape)}, strides {slots.stride()} and"
                f" {wanted.stride()}: {B} rows need shape ({B},) and equal strides"
            )
        if logits.dtype != torch.float32 or logits.shape[-1] < self.vocab_size or logits.stride(-1) != 1:
            raise NanoinferError(
                f"logits of shape {tuple(logits.shape)}, {logits.dtype}, strides {logits.stride()}: the fused sampler"
                f" needs float32, at least {self.vocab_size} columns, and contiguous rows"
            )
        tokens = torch.empty(B, dtype=torch.int64, device=self.device)
        for begin in range(0, B, self._rows):
            part = slice(begin, begin + self._rows)
            with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches there
                owned = None if owners is None else owners[part]
                self._launch(logits[part], slots[part], wanted[part], tokens[part], last, owned)
        return tokens

    def _launch(
        self, logits: Tensor, slots: Tensor, wanted: Tensor, tokens: Tensor, last: Tensor | None, owners: Tensor | None
    ) -> None:
        k, B, V, num_parts = self._kernels, logits.shape[0], self.vocab_size, self._num_parts
        rows = (logits, logits.stride(0), slots, wanted, slots.stride(0), self._words)
        parts = (self._largest, self._best, self._sums)
        # No fused multiply-add: the reference rounds the product and the sum.
        exact: dict[str, Any] = {"PARTS": self._parts, "enable_fp_fusion": False, **self._launch_options(logits.device)}
        k.weigh[num_parts, B](
            *rows, self._lists, self._state, self._values, self._weights, self._nearest, *parts, V,
            **exact, num_warps=NUM_WARPS["weigh"],
        )  # fmt: skip
        k.sample[B,](
            *rows, self._state, self._values, self._weights, self._nearest, self._groups, *parts,
            tokens, last, owners, 0 if owners is None else owners.stride(0), V, num_parts,
            **exact, num_warps=NUM_WARPS["sample"],
        )  # fmt: skip

    def _words_of(self, row: SamplerRow) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a slot's 64-bit words, in the order of the constants in kernels/triton/sampler.py."""
        k, p = self._kernels, row.params
        words = np.zeros(k.NUM_WORDS.value, np.int64)
        for name, integer in (
            (k.SAMPLE, row.sample_index),
            (k.POSITION, row.num_output_tokens),
            (k.PENALISED, _is_penalised(row)),
            (k.TOP_K, min(p.top_k, self.vocab_size)),
            (k.MIN_TOKENS, p.min_tokens),
            (k.NUM_ENDS, len(row.end_token_ids) if p.min_tokens else 0),
            (k.NUM_BIAS, len(p.logit_bias or ())),
        ):
            words[name.value] = integer
        words.view(np.uint64)[k.SEED.value] = row.seed
        for name, value in (
            (k.TEMPERATURE, p.temperature),
            (k.TOP_P, p.top_p),
            (k.FARTHEST, abs(math.log(p.min_p)) if p.min_p else math.inf),
            (k.REPETITION, p.repetition_penalty),
            (k.PRESENCE, p.presence_penalty),
            (k.FREQUENCY, p.frequency_penalty),
        ):
            words.view(np.float64)[name.value] = value
        return words

    def _lists_of(self, row: SamplerRow) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a slot's end tokens, bias ids and bias values."""
        max_ends, max_bias = self._kernels.MAX_ENDS.value, self._kernels.MAX_BIAS.value
        lists, ends, bias = np.zeros(max_ends + 2 * max_bias, np.int64), row.end_token_ids, row.params.logit_bias or {}
        if row.params.min_tokens:
            lists[: len(ends)] = ends
        lists[max_ends : max_ends + len(bias)] = list(bias)
        values = max_ends + max_bias
        lists.view(np.float64)[values : values + len(bias)] = list(bias.values())
        return lists

    def _state_of(self, row: SamplerRow) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return a row's distinct tokens and the count of each in the output, minus 2**15 if the prompt contains it."""
        counts = Counter(i for i in row.output_token_ids if i < self.vocab_size)
        for token in {i for i in row.prompt_token_ids if i < self.vocab_size}:
            counts[token] -= MAX_COUNT + 1
        return np.array(list(counts.keys()), np.int64), np.array(list(counts.values()), np.int16)


def _is_penalised(row: SamplerRow) -> bool:
    p = row.params
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _on(device: torch.device, array: np.ndarray[Any, Any]) -> Tensor:
    """Copy an array to the device asynchronously; PyTorch keeps the pinned memory until the copy is complete."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _upload(to: Tensor, array: np.ndarray[Any, Any]) -> None:
    host = torch.from_numpy(array)
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


class Sample:
    """`sampler.sample` on the GPU: the same signature, results and errors. Parameters are uploaded at every call.

    It is used for steps whose tokens the host reads at once. The reference samples rows that the kernels do not
    support, and computes the log-probabilities.
    """

    def __init__(self) -> None:
        self._fused: TritonSampler | None = None

    def __call__(self, logits: Array, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """Sample the next token of each row."""
        if not rows:
            return []
        assert isinstance(logits, Tensor)
        B, V = logits.shape
        fused = self._fused_for(B, V, logits.device)
        by_reference = [i for i, row in enumerate(rows) if fused.why_not_by_kernels(row)]
        by_kernels = [i for i in range(B) if i not in {*by_reference}]

        def sample_part(part: Tensor, some: Sequence[SamplerRow]) -> list[int]:
            fused._assign_all(some)
            slots = torch.arange(len(some), device=part.device)
            wanted = torch.ones_like(slots, dtype=torch.bool)
            part = part if part.stride(-1) == 1 else part.contiguous()
            tokens: list[int] = fused.sample_slots(part, slots, wanted).tolist()
            return tokens if NOT_FINITE not in tokens else reference.sample_tokens(part, some)  # raises the error

        parts = ((by_kernels, sample_part), (by_reference, reference.sample_tokens))
        return reference.sample_parts(logits, rows, parts)

    def _fused_for(self, B: int, V: int, device: torch.device) -> TritonSampler:
        """Return a fused sampler of at least B slots; a new one if B, the vocabulary or the device requires it."""
        fused = self._fused
        if fused is None or (fused.vocab_size, fused.device) != (V, device) or fused.num_slots < B:
            fused = self._fused = TritonSampler(1 << (B - 1).bit_length(), V, device)
        return fused
