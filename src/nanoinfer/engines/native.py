"""Rung 7, `native`: a C++ decoder for CPUs that reads packed weights at memory bandwidth (docs/rungs/native.md).

A step is one call into C++ (kernels/cpu/).

Exactness: the result of a row does not depend on the other rows, bit for bit (kernels/cpu/kernels/kernels.cpp).
With float32 weights, tokens are those of `recompute`. With bfloat16 weights, activations are rounded to bfloat16 before
a product; with int8, to 8 bits with one scale for every 64 activations, with int4 for every 32. With AMX, int8 has 16
bits and one scale, int4 one scale for every 256. Sums, layer norms, softmax and the residual stream are float32.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.adapters import Adapter
from nanoinfer.checkpoints.packed import PackedWeights
from nanoinfer.checkpoints.weights import Weights, parts
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import DEFAULTS, Engine, Handle, StepBatch
from nanoinfer.engines.devices import free_memory
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import resolve_cache_dtype
from nanoinfer.models.rotary import frequencies
from nanoinfer.utils import environment
from nanoinfer.utils.arrays import BlockMatrix, FileBlocks

log = logging.getLogger("nanoinfer")

SHAPE = (
    "vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "mlp_dim", "activation",
    "tie_word_embeddings", "norm", "norm_weight", "norm_placement", "norm_epsilon", "qk_norm", "embedding_norm",
    "learned_positions", "parallel_residual", "gated_mlp", "per_layer_dim", "sinks", "sub_norms", "rounded_inputs",
)  # fmt: skip
"""Attributes of ModelConfig that the decoder takes as they are."""


MTP_TOKENS = 1 << 15
"""First tokens of the vocabulary that a block for multi-token prediction proposes: those of the first merges, which are
the most frequent (FR-Spec: Zhao et al. 2025, arXiv 2502.14856). All rows of the head would take most of its time."""
_EXCLUDED = -1e30  # a logit


class NativeEngine(Engine):
    """Runs the model with the C++ decoder.

    Args:
        weights: each tensor is packed when it is loaded and then released; packed weights are used in place.
        limits: capacity of the engine.
        owner: engine whose embedding and output head this one has, too; None: its own.
        config: quantization, kv_cache_dtype and threads are used.

    Raises:
        NanoinferError: the forced instruction set is not supported by this CPU, or memory is insufficient.
    """

    def __init__(
        self, weights: Weights, limits: EngineLimits, config: EngineConfig = DEFAULTS, owner: NativeEngine | None = None
    ) -> None:
        from nanoinfer._native import Decoder

        super().__init__(weights.config, limits, config)
        try:
            options = decoder_options(weights, limits, config)
            self.decoder: Any = Decoder(options, None if owner is None else owner.decoder)
            self._decoder = self.decoder
            _warn_of_another_cpu(self.isa)
            self._load(replace(weights, block_formats=options.formats))
        except (ValueError, RuntimeError) as e:  # RuntimeError: threads cannot be created
            raise NanoinferError(f"engine=native: {e}") from None
        except MemoryError:
            raise NanoinferError(
                f"the weights and the KV cache of {limits.max_num_cached_tokens} tokens do not fit in memory:"
                " lower kv_cache_memory, or use quantization=int8"
            ) from None
        self._handles: dict[Handle, int] = {}
        if self.config.backbone is not None and owner is not None:
            self._handles = owner.decoder_handles
            self.borrow(owner)
        self._logits = np.empty((0, self._decoder.logits_stride), np.float32)
        self._num_hidden = 0  # rows that the last step keeps

    def _load(self, weights: Weights) -> None:
        if isinstance(weights, PackedWeights):
            for name, panels, scales in weights.matrices():
                self._decoder.load_packed(name, panels, scales)
            for name, values in weights.vectors():
                self._decoder.load(name, values)
            if _reads_from_disk(weights):
                self._decoder.read_experts_ahead()
        else:
            for name, tensor in weights.read():
                for place, part in parts(name, tensor, weights.block_formats.get(name)):
                    if isinstance(part, FileBlocks):
                        part.read_by(partial(self._decoder.load_blocks, place))
                    elif isinstance(part, BlockMatrix):
                        self._decoder.load_blocks(place, part.blocks())
                    else:
                        self._decoder.load(place, part.values, part.dtype)
                    del part
                del tensor  # before the next one is read
        self._decoder.check_loaded()

    @property
    def decoder_handles(self) -> dict[Handle, int]:
        """The decoder's handle of each open sequence. It follows the engine; do not modify."""
        return self._handles

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""
        return str(self._decoder.isa)

    def _extend(self, batch: StepBatch) -> NDArray[np.float32]:
        """Return a view of a buffer, which is valid until the next call."""
        count = 0 if batch.hidden_only else sum(batch.num_logits)
        if count > len(self._logits):  # reused: touching new pages takes longer than a small step
            self._logits = np.full((count, self._decoder.logits_stride), _EXCLUDED, np.float32)
        try:
            self._decoder.extend(
                handles=[self._handles[h] for h in batch.handles],
                token_ids=batch.token_ids,
                num_new=batch.num_new,
                num_logits=batch.num_logits,
                logits=self._logits[:count],
                all_hidden=batch.all_hidden,
                previous=batch.previous,
                **self._adapters_of(batch),
                **self._states_of(batch),
            )
        except IndexError as e:  # the pool has too few free blocks; `_check` has checked all else
            raise NanoinferError(str(e)) from None
        except RuntimeError as e:  # a forked child cannot create its threads, or the parent was forked during a step
            raise NanoinferError(f"engine=native: {e}") from None
        self._num_hidden = sum(batch.num_hidden)
        self._advance(batch)
        return self._logits[:count, : self.config.vocab_size]

    def _adapters_of(self, batch: StepBatch) -> dict[str, list[int]]:
        """Return the decoder's argument for the adapters of a step, none if no sequence has one."""
        numbers = [self._adapter_of[h] for h in batch.handles]
        return {"adapters": numbers} if any(numbers) else {}

    def _states_of(self, batch: StepBatch) -> dict[str, Any]:
        """Return the decoder's arguments for the states of a step, none if no layer is recurrent."""
        if self.states is None:
            return {}
        return dict(zip(("copies", "states"), self.states.step(batch.handles, batch.num_new), strict=True))

    def _load_adapter(self, number: int, adapter: Adapter) -> None:
        for name, updates in adapter.updates.items():
            for part in updates:
                self._decoder.load_adapter(adapter=number, name=name, first=part.first, a=part.a, b=part.b)

    def _unload_adapter(self, number: int) -> None:
        self._decoder.unload_adapter(number)

    def hidden(self) -> NDArray[np.float32]:
        """Return the final hidden states of the last step that are kept, (sum(num_hidden), C) float32."""
        hidden = np.empty((self._num_hidden, self.config.n_embd), np.float32)
        self._decoder.hidden(out=hidden)
        return hidden

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of all steps so far by part: matrix products, attention, output head, everything else."""
        return dict(self._decoder.part_seconds())

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the pool that no sequence uses."""
        return int(self._decoder.blocks_free)

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        """Return how many blocks extending a sequence by `num_new` tokens takes from the pool."""
        num_new = self.num_to_process(handle, num_new)
        return int(self._decoder.blocks_needed(self._handles[handle], num_new))

    @property
    def block_format(self) -> str:
        """What the bytes of a block depend on, beside the model."""
        return f"{self.block_bytes} bytes, {self.isa}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self._decoder.block_bytes)

    def read_blocks(self, handle: Handle, first: int, end: int) -> NDArray[np.uint8]:
        """Return copies of the blocks [first, end) of a sequence, (end - first, block_bytes)."""
        blocks = np.empty((end - first, self.block_bytes), np.uint8)
        self._decoder.read_blocks(self._handles[handle], first, blocks)
        return blocks

    def append_blocks(self, handle: Handle, num_tokens: int, blocks: NDArray[np.uint8]) -> None:
        """Append tokens to a sequence without computing them.

        Args:
            handle: the sequence.
            num_tokens: number of new tokens.
            blocks: (n, block_bytes): what `read_blocks` returned for a sequence with the same tokens, from the block of
                the first new token on.

        Raises:
            NanoinferError: the pool has too few free blocks, or the tokens exceed the context.
        """
        try:
            self._decoder.append_blocks(self._handles[handle], num_tokens, blocks)
        except IndexError as e:
            raise NanoinferError(str(e)) from None
        self._lengths[handle] += num_tokens

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
        except RuntimeError as e:  # the parent was forked during a step
            raise NanoinferError(f"engine=native: {e}") from None
        self._handles.clear()


def decoder_options(weights: Weights, limits: EngineLimits, config: EngineConfig) -> Any:
    """Return the options of the C++ decoder. Setting an attribute that they do not have is an AttributeError."""
    from nanoinfer._native import DecoderOptions

    options, dtype, model = DecoderOptions(), weights.dtype, weights.config
    kinds = [model.layer(i) for i in range(model.n_layer)]
    for name in SHAPE:
        setattr(options, name, getattr(model, name))
    options.attention_scale = model.attention_scale or 0.0  # 0: head_dim**-0.5
    options.attention_softcap, options.logits_softcap = model.attention_softcap or 0.0, model.logits_softcap or 0.0
    for name in ("embedding_scale", "residual_scale", "final_scale"):
        setattr(options, name, getattr(model, name) or 1.0)
    options.windows = [kind.window or 0 for kind in kinds]
    rotaries = list(dict.fromkeys(kind.rotary for kind in kinds if kind.rotary is not None))
    options.rotary = [-1 if kind.rotary is None else rotaries.index(kind.rotary) for kind in kinds]
    options.frequencies = [frequencies(rotary, model.block_size).tolist() for rotary in rotaries]
    options.rotary_factors = [rotary.attention_factor for rotary in rotaries]
    if growing := [rotary for rotary in rotaries if rotary.query_growth]:
        options.query_growth, options.query_context = growing[0].query_growth, growing[0].original_context
    if (experts := model.experts) is not None:
        options.num_experts, options.experts_per_token, options.expert_dim = (
            experts.count,
            experts.per_token,
            experts.width,
        )
        options.normalize_experts, options.expert_scale = experts.normalize, experts.scale
        options.shared_dim, options.shared_gate = experts.shared_width, experts.shared_gate
        options.sigmoid_experts, options.corrected_experts = experts.scoring == "sigmoid", experts.correction
        options.expert_groups, options.groups_per_token = experts.groups, experts.groups_per_token
        options.group_top, options.experts_beside = experts.group_top, experts.beside
        options.sparse = [int(kind.experts) for kind in kinds]
    if model.differing is not None:
        options.layers = [_layer_shape(model, i) for i in range(model.n_layer)]
    if (latent := model.latent) is not None:
        options.latent_rank, options.latent_turned, options.latent_plain, options.latent_value = (
            latent.rank, latent.rotary_dim, latent.plain_dim, latent.value_dim,
        )  # fmt: skip
        options.latent_query_rank, options.latent_epsilon = latent.query_rank, latent.norm_epsilon
    options.attention_gate, options.mtp = model.attention_gate, model.mtp
    options.head_rows = MTP_TOKENS if model.mtp and model.backbone is None else 0
    options.backbone = 0 if model.backbone is None else model.backbone.width
    if model.recurrence is not None:
        options.rule, options.num_states = model.recurrence.rule, limits.num_states
        options.recurrence = _state_shape(model, limits.num_pending)
    quantization = config.quantization
    if isinstance(weights, PackedWeights):
        if quantization not in (None, weights.quantization):
            raise NanoinferError(
                f"{weights.folder} is packed as {weights.format}:"
                f" quantization={quantization!r} needs the original model"
            )
        quantization, options.packed = weights.quantization, True
    format = weights.format if isinstance(weights, PackedWeights) else quantization or dtype
    options.weights = "q8_0" if format == "int4" else format  # with int4, each matrix has a format of its own
    options.formats = dict(weights.formats(quantization))
    options.cache = resolve_cache_dtype(config.kv_cache_dtype, dtype, quantization)
    options.max_num_cached_tokens = limits.max_num_cached_tokens
    options.threads, options.isa = config.threads or environment.num_cpus(), environment.isa()
    return options


def _state_shape(model: ModelConfig, num_pending: int) -> Any:
    """Return the sizes of a layer's state for the C++ decoder."""
    from nanoinfer._native import StateShape

    shape = StateShape()
    shape.num_pending = num_pending
    for name in ("taps", "num_heads", "value_dim", "num_key_heads", "key_dim", "norm_groups", "tiled"):
        setattr(shape, name, getattr(model.recurrence, name))
    return shape


def _reads_from_disk(weights: PackedWeights) -> bool:
    """Return whether a mapped file has more weights than fit in memory, and log a warning if so."""
    size, free = sum(array.nbytes for array in weights.arrays.values()), free_memory("cpu")
    if size > free:
        log.warning(
            "%s has %.1f GiB of weights, but %.1f GiB of memory are free: steps read the others from disk, at its"
            " speed", weights.folder, size / 2**30, free / 2**30,
        )  # fmt: skip
    return size > free


def _warn_of_another_cpu(isa: str) -> None:
    """Log a warning if the build lacks the kernels of this CPU: it has those of the machine that compiled it."""
    from nanoinfer._native import fastest_isa, instruction_sets

    names = [name for name, _ in instruction_sets()]
    if (fastest := fastest_isa()) not in names and not environment.isa():
        log.warning(
            "the native kernels were built for %s, this CPU has %s: they run as %s. In nanoinfer's source, `pip install"
            " --force-reinstall --no-deps .` builds them for this CPU, with NANOINFER_ISA=all for every CPU",
            ", ".join(names), fastest, isa,
        )  # fmt: skip


def _layer_shape(model: ModelConfig, layer: int) -> Any:
    """Return the sizes of a layer for the C++ decoder."""
    from nanoinfer._native import LayerShape

    shape, kind = LayerShape(), model.layer(layer)
    for name in ("n_head", "n_kv_head", "head_dim", "mlp_dim"):
        setattr(shape, name, getattr(model.at(layer), name))
    shape.kv_layer = -1 if kind.kv_layer is None else kind.kv_layer
    shape.num_projections, shape.value_norm, shape.scaled = kind.num_projections, kind.value_norm, kind.scaled
    for name in ("recurrent", "beside", "mlp"):
        setattr(shape, name, getattr(kind, name))
    return shape
