"""Rung `native`: a decoder in C++ that reads packed weights at the speed of memory.

What changes from `static`: a step is one call into C++ (kernels/cpu/). Weights are packed once, in the order in
which they are read, on huge pages, in 32, 16, 8 or 4 bits; one pool of threads runs a whole step, with
barriers instead of a start for each operation; keys and values are in blocks that forks share.

Why it helps: one token of one text reads every weight once and computes little, so the speed of memory decides,
and the bytes of a weight. When it does not pay: never yet on a CPU; a GPU has memory that is fifty times faster.

What is exact: the result of a row does not depend on the other rows, bit for bit (kernels.cpp says why). float32
weights say what `recompute` says. With bfloat16 weights, activations are rounded to bfloat16 before a product; with
int8 and int4 to 8 bits, a scale for every 64 of them; sums, layer norms, softmax and the residual are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoinfer import environment
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.sequences import DEFAULTS, Sequences
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import resolve_cache_dtype
from nanoinfer.models.checkpoints.weights import Weights

SHAPE = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "mlp_dim", "activation", "tie_word_embeddings",
    "layer_norm_epsilon",
)  # fmt: skip


class NativeEngine(Sequences):
    """A decoder in C++.

    Args:
        weights: each is packed as it comes, and not kept.
        limits: what the engine may hold.
        config: quantization, kv_cache_dtype and threads are used.

    Raises:
        NanoinferError: an instruction set that this CPU lacks is forced, or the memory does not suffice.
    """

    def __init__(self, weights: Weights, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        from nanoinfer._native import Decoder

        super().__init__(weights.config, limits)
        try:
            self._decoder = Decoder(decoder_options(weights, limits, config))
        except (ValueError, RuntimeError) as e:  # RuntimeError: threads cannot be created
            raise NanoinferError(f"engine=native: {e}") from None
        except MemoryError:
            raise NanoinferError(
                f"the weights and {limits.max_num_cached_tokens} tokens of keys and values do not fit the memory:"
                " use a smaller kv_cache_memory, or quantization=int8"
            ) from None
        for name, tensor in weights:
            self._decoder.load(name, tensor.float().contiguous().numpy())
        self._decoder.check_loaded()
        self._handles: dict[Handle, int] = {}
        self._logits = torch.empty(0, self._decoder.logits_stride)
        self._num_logits = 0  # of the last step

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""
        return str(self._decoder.isa)

    def extend(self, batch: StepBatch) -> Tensor:
        """Append new tokens to open sequences and return logits, (sum(num_logits), V) float32."""
        self._check(batch)
        count = sum(batch.num_logits)
        if count > len(self._logits):  # kept from step to step: fresh pages cost more than a small step
            self._logits = torch.empty(count, self._decoder.logits_stride)
        try:
            self._decoder.extend(
                handles=[self._handles[h] for h in batch.handles],
                token_ids=batch.token_ids,
                num_new=batch.num_new,
                num_logits=batch.num_logits,
                logits=self._logits[:count],
            )
        except RuntimeError as e:  # a forked child cannot create the threads, or the parent was in a step
            raise NanoinferError(f"engine=native: {e}") from None
        self._num_logits = count
        self._advance(batch)
        return self._logits[:count, : self.config.vocab_size]

    def hidden(self) -> Tensor:
        """Return what the last step's logits were made from, (sum(num_logits), C) float32."""
        hidden = torch.empty(self._num_logits, self.config.n_embd)
        self._decoder.hidden(out=hidden)
        return hidden

    def part_seconds(self) -> dict[str, float]:
        """Return where the time of all steps so far went: matrix products, attention, output head, everything else."""
        return dict(self._decoder.part_seconds())

    def _open(self, handle: Handle) -> None:
        self._handles[handle] = self._decoder.open()

    def _truncate(self, handle: Handle, length: int) -> None:
        self._decoder.truncate(self._handles[handle], length)

    def _fork(self, parent: Handle, child: Handle) -> None:
        self._decoder.close(self._handles[child])
        self._handles[child] = self._decoder.fork(self._handles[parent])

    def _close(self, handle: Handle) -> None:
        self._decoder.close(self._handles.pop(handle))

    def _reset(self) -> None:
        try:
            self._decoder.clear()
        except RuntimeError as e:  # a forked child, and the parent was in a step
            raise NanoinferError(f"engine=native: {e}") from None
        self._handles.clear()


def decoder_options(weights: Weights, limits: EngineLimits, config: EngineConfig) -> Any:
    """Return what the decoder in C++ is made from. An attribute that it does not have is an AttributeError."""
    from nanoinfer._native import DecoderOptions

    options, dtype = DecoderOptions(), str(weights.dtype).removeprefix("torch.")
    for name in SHAPE:
        setattr(options, name, getattr(weights.config, name))
    options.weights = config.quantization or dtype
    options.cache = resolve_cache_dtype(config.kv_cache_dtype, dtype, config.quantization)
    options.max_num_seqs, options.max_num_cached_tokens = limits.max_num_seqs, limits.max_num_cached_tokens
    options.threads, options.isa = config.threads or environment.num_cpus(), environment.isa()
    return options
