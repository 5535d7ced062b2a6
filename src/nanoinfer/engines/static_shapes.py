"""The step that engines `compiled`, `cuda_graph` and `triton` share: a function of tensors with static shapes.

`static` prepares each step on the host: masks, indices and lengths are new tensors at every step, so a step cannot be
compiled or captured once and reused. Here, all values that change from step to step are in tensors at fixed addresses
(`StepInputs`), and their shapes are rounded up to a small number of buckets (buckets.py):

    given (R, n)   token ids; PENDING for the token that the previous step sampled for the row
    state_row, num_pending (R,)  row of the states of recurrent layers, and the inputs to apply to it (kv/states.py)
    start (R,)     length of the row's sequence; the step adds count to it.   pos = start + 0..n-1
    count (R,)     number of new tokens of the row; the others are padding.   pos of padding = block_size, never read
    slots (R,)     slot of the row's sequence in the KV cache
    wanted (R,)    whether to sample a token for the row
    sampler_slots (R,)  slot of the row's sequence in the sampler

Consecutive decode steps need no upload from the host: the sampled tokens are already on the device, and the step itself
advances the positions. The host keeps a copy of the tensors' contents and uploads them only if they must change. Masks
are computed on the device: token i of a row attends to the positions up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nanoinfer.checkpoints.adapters import TARGETS
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines import buckets
from nanoinfer.engines.base import DEFAULTS, PENDING, Handle, SampleSlots, StepBatch
from nanoinfer.engines.buckets import Bucket, BucketLimits, SubBatch
from nanoinfer.engines.torch_engine import ModelEngine
from nanoinfer.engines.transfers import PendingTokens, StepInputs, select
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import slot_tokens
from nanoinfer.kv.slots import SlotCache
from nanoinfer.models.adapters import StepAdapters, adapt
from nanoinfer.models.attention import AttentionSpec, Masking, attention_backends, scaled_attention
from nanoinfer.models.experts import ExpertMLP
from nanoinfer.models.layers import Rotation
from nanoinfer.models.recurrent import Recurrent
from nanoinfer.models.transformer import Block, LayerAttend, Transformer

EMPTY: Mapping[int, int] = MappingProxyType({})
HEAD_TOKENS = 16
"""A sub-batch of at most this many tokens a row computes logits for all tokens inside the step. For longer rows
(prompts), `extend` computes the requested logits only."""


@dataclass(frozen=True)
class StepTensors:
    """The inputs of the model in one step, on the device: R rows of n tokens, padding included."""

    idx: Tensor
    """(R, n) int64 token ids."""
    pos: Tensor
    """(R, n) int64 position of each token; block_size for padding."""
    slots: Tensor
    """(R,) int64: row r reads and writes the keys and values of slot slots[r]."""
    context: int
    """Upper bound of the positions, padding excluded."""
    dense: bool
    """Row i is slot i."""
    inputs: StepInputs
    """The tensors of the step."""


class StepOutput(NamedTuple):
    """The results of running one sub-batch; the next one may overwrite them."""

    hidden: Tensor
    """(R, n, C) after the final layer norm; undefined if the step sampled tokens."""
    logits: Tensor | None
    """(R * n, V) float32; None if the step sampled tokens or a row has more than HEAD_TOKENS tokens."""
    tokens: Tensor | None
    """(R,) int64 sampled tokens; None if the step sampled none."""


class _Gathered:
    """Rows of the results of sub-batches, in the order of the batch.

    Args:
        counts: of each sequence's new tokens, how many of the last ones have a row.
        num_new: number of new tokens of each sequence.
        device: of the results.
    """

    def __init__(self, counts: list[int], num_new: list[int], device: torch.device) -> None:
        self._counts, self._num_new, self._device = counts, num_new, device
        self._firsts = [0, *accumulate(counts)]
        self._places: list[int] = []  # in the result, of each row so far

    def rows(self, part: SubBatch) -> slice | Tensor:
        """Return the index of the rows of a sub-batch in its results, (R * n, ...). Call it once for each of them."""
        rows: list[int] = []
        for i, row in zip(part.members, part.rows, strict=True):
            end = row * part.bucket.tokens + self._num_new[i]
            rows += range(end - self._counts[i], end)
            self._places += range(self._firsts[i], self._firsts[i + 1])
        return select(rows, self._device)

    def result(self, pieces: list[Tensor], nothing: Tensor) -> Tensor:
        """Return the pieces, which are rows of the sub-batches, as one tensor; `nothing` if there are none."""
        if not pieces:
            return nothing
        back = select(sorted(range(len(self._places)), key=self._places.__getitem__), self._device)
        return (torch.cat(pieces) if len(pieces) > 1 else pieces[0])[back]


class StaticShapeEngine(ModelEngine):
    """Base class of the engines with static shapes. Arguments: see `ModelEngine`.

    Raises:
        NanoinferError: the KV cache does not fit in the device's memory.
    """

    can_overlap = True
    min_context = 64
    """Smallest context bucket, in tokens."""

    def __init__(self, model: Transformer, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model, limits, config)
        columns = slot_tokens("padded slots", limits.block_size)
        self._cache = SlotCache(self.config, limits.max_num_seqs, columns, self.dtype, self.device)
        self._last = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=self.device)
        """The token sampled last for each slot; the last element takes the tokens of rows that sample none."""
        self._slot_adapters = torch.zeros_like(self._last)
        """The adapter of the sequence in each slot; 0: none."""
        self._range = torch.arange(max(columns, buckets.MAX_TOKENS), device=self.device)
        self._masked = torch.tensor([float("-inf"), 0.0], dtype=self.dtype, device=self.device)
        self._on_device = torch.cuda.device_of(self._last)  # type: ignore[no-untyped-call]
        self._has_adapters = False  # whether a sequence of the running sub-batch has one
        self._sampled: set[Handle] = set()
        """The sequences whose last step sampled a token."""
        self._bucket_limits = BucketLimits(limits.max_num_seqs, limits.block_size, self.min_context)
        self._inputs: dict[tuple[int, int], StepInputs] = {}
        for module in model.modules():
            if isinstance(module, ExpertMLP):
                module.static_shapes = True

    def _adapt(self, config: EngineConfig) -> StepAdapters:
        return adapt(self.model, TARGETS, stack=(config.max_loras, config.max_lora_rank))

    # The step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _extend(self, batch: StepBatch) -> Tensor:
        kept = wanted = _Gathered(batch.num_hidden, batch.num_new, self.device)
        if batch.num_logits != batch.num_hidden:
            wanted = _Gathered(batch.num_logits, batch.num_new, self.device)
        sub_batches, states, logits = self._plan(batch), list[Tensor](), list[Tensor]()
        for part in sub_batches:
            out = self._run(part, batch)
            hidden = out.hidden.flatten(0, 1)
            states.append(hidden[rows := kept.rows(part)])
            if not batch.hidden_only:
                chosen = rows if wanted is kept else wanted.rows(part)
                logits.append(self._head(hidden[chosen]) if out.logits is None else out.logits[chosen])
            if len(sub_batches) > 1:  # the next sub-batch may overwrite these results
                for pieces in (states, logits):
                    pieces[-1:] = [piece.clone() for piece in pieces[-1:]]
        self._sampled.difference_update(batch.handles)
        self._advance(batch)
        self._hidden = kept.result(states, self._hidden[:0])
        return wanted.result(logits, torch.empty(0, self.config.vocab_size, device=self.device))

    @torch.inference_mode()
    def step(self, batch: StepBatch, sample: SampleSlots, sampler_slots: list[int]) -> PendingTokens:
        """Append new tokens to open sequences and sample the next token of each sequence with num_logits 1.

        Args:
            batch: as for `extend`, with num_logits 0 or 1. A sequence's last token may be PENDING.
            sample: samples the tokens; must be the same function at every call.
            sampler_slots: the sampler's slot of each sequence with num_logits 1, in the batch's order.

        Returns:
            the sampled tokens, in the batch's order.

        Raises:
            NanoinferError: as `extend`; or a token is PENDING, but the sequence's last step sampled none.
        """
        self._check_step(batch, sampler_slots)
        with self._stepping(batch) as rest:
            return self._step(rest, sample, sampler_slots)

    def _step(self, batch: StepBatch, sample: SampleSlots, sampler_slots: list[int]) -> PendingTokens:
        sampling = [i for i, n in enumerate(batch.num_logits) if n]
        index = {i: at for at, i in enumerate(sampling)}  # in the step's tokens
        slot_of = dict(zip(sampling, sampler_slots, strict=True))
        pending = PendingTokens(len(sampler_slots))
        for part in self._plan(batch):
            tokens = self._run(part, batch, sample, slot_of).tokens
            rows = zip(part.members, part.rows, strict=True)
            pending.add(cast(Tensor, tokens), [(index[i], row) for i, row in rows if i in index])
        self._sampled.difference_update(batch.handles)
        self._sampled.update(batch.handles[i] for i in sampling)
        self._advance(batch)
        return pending

    def _plan(self, batch: StepBatch) -> list[SubBatch]:
        for source, target in self._cache.compact(self._lengths):
            self._last[target] = self._last[source]
            self._slot_adapters[target] = self._slot_adapters[source]
        slots = [self._cache.slot(h) for h in batch.handles]
        starts = [self._lengths[h] for h in batch.handles]
        if self.states is not None:
            copies, self._state_steps = self.states.step(batch.handles, batch.num_new)
            self._state_tensors.copy(copies)
        return buckets.plan(slots, starts, batch.num_new, self._bucket_limits)

    def _run(
        self,
        part: SubBatch,
        batch: StepBatch,
        sample: SampleSlots | None = None,
        sampler_slots: Mapping[int, int] = EMPTY,
    ) -> StepOutput:
        """Upload the inputs of one sub-batch if they changed, then run it. `sampler_slots`: of members that sample."""
        shape = part.bucket
        inputs = self._inputs.get((shape.rows, shape.tokens))
        if inputs is None:
            inputs = self._inputs[shape.rows, shape.tokens] = StepInputs(shape.rows, shape.tokens, self.device)
        inputs.put(self._rows(part, batch, sampler_slots))
        self._has_adapters = any(self._adapter_of[batch.handles[i]] for i in part.members)
        try:
            with self._on_device:  # Triton launches there
                key = shape, sample is not None, self._has_adapters
                out = self._execute(key, lambda: self._compute(inputs, shape, sample))
        except BaseException:
            inputs.invalidate()
            raise
        inputs.advance()
        return out

    def _rows(self, part: SubBatch, batch: StepBatch, sampler_slots: Mapping[int, int]) -> list[list[int]]:
        """Return the input table of one sub-batch; rows of padding have count 0."""
        n, ends = part.bucket.tokens, list(accumulate(batch.num_new))
        nothing = [self.limits.num_states + 1, 0]  # of the states; padding writes the last row
        rows = [[PENDING] * n + nothing + [0, 0, r if part.bucket.dense else 0, 0, 0] for r in range(part.bucket.rows)]
        for i, r in zip(part.members, part.rows, strict=True):
            handle, new = batch.handles[i], batch.num_new[i]
            rows[r][:new] = batch.token_ids[ends[i] - new : ends[i]]
            rows[r][n:] = (
                *(nothing if self.states is None else self._state_steps[i]),
                self._lengths[handle],
                new,
                self._cache.slot(handle),
                int(i in sampler_slots),
                sampler_slots.get(i, 0),
            )
        return rows

    def _execute(self, key: tuple[Bucket, bool, bool], compute: Callable[[], StepOutput]) -> StepOutput:
        """Run `compute`. For equal keys it is the same function of the same tensors."""
        return compute()

    def _compute(self, inputs: StepInputs, shape: Bucket, sample: SampleSlots | None) -> StepOutput:
        """Compute a step from tensors alone: the host reads no value, and no shape depends on one."""
        with attention_backends(self.device):
            hidden = self._forward(self._prologue(inputs, shape))
        return self._epilogue(inputs, shape, hidden, sample)

    # Overridden by derived engines ----------------------------------------------------------------------

    def _prologue(self, inputs: StepInputs, shape: Bucket) -> StepTensors:
        """Return the model's inputs, with the tokens that the previous step sampled."""
        i = self._range[: shape.tokens]
        # masked_fill, not where: `where` copies a Python number to the device and waits for the copy
        pos = (inputs.start[:, None] + i).masked_fill(i >= inputs.count[:, None], self.limits.block_size)  # (R, n)
        idx = torch.where(inputs.given < 0, self._last[inputs.slots][:, None], inputs.given)
        return StepTensors(idx, pos, inputs.slots, shape.context, shape.dense, inputs)

    def _epilogue(self, inputs: StepInputs, shape: Bucket, hidden: Tensor, sample: SampleSlots | None) -> StepOutput:
        """Sample the next tokens or compute the logits of final hidden states, (R, n, C), and advance the positions."""
        logits = tokens = None
        if sample is not None:
            final = hidden[:, 0]  # (R, C)
            if shape.tokens > 1:
                final = hidden[self._range[: shape.rows], (inputs.count - 1).clamp(min=0)]
            tokens = sample(self._head(final), inputs.sampler_slots, inputs.wanted, self._last, inputs.slots)
        elif shape.tokens <= HEAD_TOKENS:
            logits = self._head(hidden.flatten(0, 1))
        inputs.start.add_(inputs.count)
        return StepOutput(hidden, logits, tokens)

    def _forward(self, step: StepTensors) -> Tensor:
        """Store the new keys and values, and return the final hidden states, (R, n, C)."""
        self._step_adapters.index = self._slot_adapters[step.slots] if self._has_adapters else None
        masks = {window: self._mask(step, window) for window in self.config.windows}

        def run_block(layer: int, block: Block, x: Tensor, rotation: Rotation | None) -> Tensor:
            kind, recur = (
                self.config.layer(layer),
                partial(self._recur, step.inputs, layer, cast(Recurrent, block.attn)),
            )
            if not kind.attends:
                return block(x, recur)  # type: ignore[no-any-return]
            k, v, mask = self._cache.k[layer], self._cache.v[layer], masks[kind.window]
            if not kind.beside:
                return self._block(block, x, rotation, k, v, step, mask)
            attend = slot_attention(self.config, block, k, v, step.slots, step.pos, mask, step.dense)
            return block(x, (attend, recur), rotation)  # type: ignore[no-any-return]

        return self.model.hidden(step.idx, step.pos.clamp(max=self.limits.block_size - 1), run_block=run_block)

    def _recur(self, inputs: StepInputs, layer: int, cell: Recurrent, x: Tensor) -> Tensor:
        """Return the outputs of a recurrent layer, (R, n, H Dv), for inputs (R, n, W)."""
        rows, num_pending = inputs.state_row, inputs.num_pending
        return self._state_tensors.step(layer, cell, rows, num_pending, x, inputs.count)

    def _mask(self, step: StepTensors, window: int | None) -> Tensor:
        """Return what is added to the scores of all heads of the layers with this window, (R, 1, n, context)."""
        key, query = self._range[: step.context], step.pos[..., None]
        unseen = key > query  # (R, n, context)
        if window is not None:
            unseen |= key <= query - window
        return torch.where(unseen, self._masked[0], self._masked[1])[:, None]

    def _block(
        self, block: Block, x: Tensor, rotation: Rotation | None, k: Tensor, v: Tensor, step: StepTensors, mask: Tensor
    ) -> Tensor:
        """Return one block's output, (R, n, C)."""
        return run_block(self.config, block, x, rotation, k, v, step.slots, step.pos, mask, step.dense)

    def _head(self, hidden: Tensor) -> Tensor:
        """Return the logits, (M, V) float32, of hidden states, (M, C)."""
        return self.model.logits(hidden)

    # Sequences -------------------------------------------------------------------------------------------

    def _check_step(self, batch: StepBatch, sampler_slots: list[int]) -> None:
        """Raise NanoinferError if `step` cannot run the batch. Called before the engine's state changes."""
        ids, end = list(batch.token_ids), 0
        for handle, new in zip(batch.handles, batch.num_new, strict=False):
            end += new
            if 0 < end <= len(ids) and ids[end - 1] == PENDING:
                if handle not in self._sampled:
                    raise NanoinferError(
                        f"sequence {handle}: token id {PENDING} stands for the token that the last step sampled, but"
                        " that step sampled none: pass the token itself"
                    )
                ids[end - 1] = 0
        self._check(replace(batch, token_ids=ids))
        if any(n > 1 for n in batch.num_logits) or sum(batch.num_logits) != len(sampler_slots):
            raise NanoinferError(
                f"num_logits={batch.num_logits} with {len(sampler_slots)} sampler slots: a step samples 0 or 1 token"
                " for each sequence, and each sequence with num_logits=1 needs one sampler slot"
            )

    def _open(self, handle: Handle) -> None:
        slot = self._cache.open(handle)
        if self._max_loras:
            self._slot_adapters[slot] = self._adapter_of[handle]

    def _truncate(self, handle: Handle, length: int) -> None:
        self._cache.clear(self._cache.slot(handle), length, self._lengths[handle])

    @torch.inference_mode()
    def _fork(self, parent: Handle, child: Handle) -> None:
        source, target = self._cache.slot(parent), self._cache.slot(child)
        self._cache.copy(source, target, self._lengths[parent])
        self._last[target] = self._last[source]
        if parent in self._sampled:
            self._sampled.add(child)

    def _close(self, handle: Handle) -> None:
        self._cache.close(handle, self._lengths[handle])
        self._sampled.discard(handle)

    def _reset(self) -> None:
        self._cache.reset()
        self._sampled.clear()
        for inputs in self._inputs.values():
            inputs.invalidate()


def run_block(
    config: ModelConfig,
    block: Block,
    x: Tensor,
    rotation: Rotation | None,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    pos: Tensor,
    mask: Tensor,
    dense: bool,
) -> Tensor:
    """Store a block's new keys and values in k and v, (slots, K, T, D), and return its output for x, (R, n, C)."""
    return block(x, slot_attention(config, block, k, v, slots, pos, mask, dense), rotation)  # type: ignore[no-any-return]


def slot_attention(
    config: ModelConfig, block: Block, k: Tensor, v: Tensor, slots: Tensor, pos: Tensor, mask: Tensor, dense: bool
) -> LayerAttend:
    """Return the function by which a block stores its new keys and values and attends. Arguments: see `run_block`."""

    def attend(q: Tensor, new_k: Tensor | None, new_v: Tensor | None) -> Tensor:  # (R, n, H, D)
        if new_k is not None and new_v is not None:
            k[slots[:, None], :, pos] = new_k
            v[slots[:, None], :, pos] = new_v
        context = mask.shape[-1]
        keys, values = (c[: len(slots), :, :context] if dense else c[:, :, :context][slots] for c in (k, v))
        spec = AttentionSpec(0, None, config.attention_scale, config.attention_softcap, block.attn.sinks)
        y = scaled_attention(spec, q.transpose(1, 2), keys, values, Masking(mask))
        return y.transpose(1, 2)

    return attend
