"""What the engines in PyTorch share, and the step of `recompute`, `dynamic`, `static` and `paged`.

The new tokens of all sequences form one row of N tokens, so that matrix products process no padding; attention runs
per sequence. A derived engine defines where keys and values are stored and how a query reads them (`_begin`), and how
the cache changes on fork, truncate and close.
"""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from nanoinfer.checkpoints.adapters import TARGETS, Adapter
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import DEFAULTS, Engine, StepBatch
from nanoinfer.engines.rounded_cache import round_cache
from nanoinfer.engines.states import StateTensors, StepStates
from nanoinfer.models.adapters import AdaptedLinear, StepAdapters, adapt
from nanoinfer.models.attention import KeyValues, attention_backends
from nanoinfer.models.recurrent import LayerRecur, recur_whole
from nanoinfer.models.transformer import Transformer


class ModelEngine(Engine):
    """Base class of the engines that run the reference model in PyTorch.

    Args:
        model: the weights, on the device and in the dtype to compute in.
        limits: capacity of the engine.
        config: options of derived engines (EngineSpec.options).
    """

    model: Transformer

    def __init__(self, model: Transformer, limits: EngineLimits, config: EngineConfig = DEFAULTS) -> None:
        super().__init__(model.config, limits, config)
        self.model = model
        self.device = model.lm_head.weight.device
        self.dtype = model.lm_head.weight.dtype
        self.survives_fork = self.device.type == "cpu"
        self._hidden = torch.empty(0, model.config.n_embd, device=self.device, dtype=self.dtype)  # of the last step
        if self.states is not None:
            self._state_tensors = StateTensors(self.config, limits.num_states, limits.num_pending, self.device)
        if config.kv_cache_dtype != "auto":
            round_cache(model, config.kv_cache_dtype)
        lay_out(model)
        self._step_adapters = self._adapt(config) if config.enable_lora else StepAdapters()

    def _adapt(self, config: EngineConfig) -> StepAdapters:
        """Replace the layers of the model that adapters may update."""
        return adapt(self.model, TARGETS)

    @torch.inference_mode()
    def _load_adapter(self, number: int, adapter: Adapter) -> None:
        for name in adapter.updates:
            layer = cast(AdaptedLinear, self.model.get_submodule(name))
            a, b = (torch.from_numpy(x) for x in adapter.joined(name, layer.out_features))
            layer.load(number, a.to(self.device, self.dtype), b.to(self.device, self.dtype))

    @torch.inference_mode()
    def _unload_adapter(self, number: int) -> None:
        for layer in self.model.modules():
            if isinstance(layer, AdaptedLinear):
                layer.unload(number)

    @staticmethod
    def check(config: ModelConfig) -> None:
        """Raise NanoinferError if the engine does not run a model: called before its weights are read."""

    def hidden(self) -> Tensor:
        """Return the final hidden states of the last step's logits, (sum(num_logits), C) float32."""
        return self._hidden.float()


class TorchEngine(ModelEngine):
    """Base class of the engines that run the reference model on flat batches. Arguments: see `ModelEngine`."""

    # The step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _extend(self, batch: StepBatch) -> Tensor:
        if not batch.handles:
            self._hidden = self._hidden[:0]
            return torch.empty(0, self.config.vocab_size, device=self.device)
        self._step_adapters.groups = self._groups(batch)
        with attention_backends(self.device):
            try:
                self._hidden = self._run(batch)  # (sum(num_hidden), C)
            except BaseException:
                self._undo(batch)
                raise
        self._advance(batch)
        if batch.hidden_only:
            return self.model.logits(self._hidden[:0])
        if batch.num_logits == batch.num_hidden:
            return self.model.logits(self._hidden)
        return self.model.logits(self._hidden[last_rows(batch.num_hidden, batch.num_logits)])

    def _groups(self, batch: StepBatch) -> list[tuple[int, Tensor]]:
        """Return the adapters of a step, and the rows of each."""
        rows: dict[int, list[int]] = {}
        for handle, end, n in zip(batch.handles, *self._rows(batch), strict=True):
            if adapter := self._adapter_of[handle]:
                rows.setdefault(adapter, []).extend(range(end - n, end))
        return [(adapter, torch.tensor(some, device=self.device)) for adapter, some in rows.items()]

    def _rows(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        """Return the end of each sequence's rows in the first dimension of the layers' inputs, and their number."""
        return list(accumulate(batch.num_new)), batch.num_new

    def _run(self, batch: StepBatch) -> Tensor:
        """Return the hidden states that are kept, (sum(num_hidden), C)."""
        starts = [self._lengths[h] for h in batch.handles]
        idx = torch.tensor(batch.token_ids, device=self.device)
        pos = torch.tensor(
            [p for s, n in zip(starts, batch.num_new, strict=True) for p in range(s, s + n)], device=self.device
        )
        cache = self._begin(batch, starts)
        recur: LayerRecur = recur_whole
        if self.states is not None:
            copies, steps = self.states.step(batch.handles, batch.num_new)
            self._state_tensors.copy(copies)
            recur = StepStates(self._state_tensors, steps, batch.num_new).recur
        previous = None if batch.previous is None else torch.from_numpy(batch.previous).to(self.device, self.dtype)
        hidden = self.model.hidden(idx, pos, cache, recur, previous=previous)  # (N, C)
        if batch.num_hidden == batch.num_new:
            return hidden
        return hidden[last_rows(batch.num_new, batch.num_hidden)]

    # Defined by derived engines ----------------------------------------------------------------------------------

    def _undo(self, batch: StepBatch) -> None:
        """Restore the cache after a step that an exception interrupted."""

    def _begin(self, batch: StepBatch, starts: list[int]) -> KeyValues:
        """Return the cache as one step sees it: keys and values are (N, K, D), queries (N, H, D)."""
        raise NotImplementedError


class AssistantEngine(TorchEngine):
    """Runs an assistant (`config.Backbone`), with the sequences and the embedding of its model's engine, `owner`."""

    def __init__(self, model: Transformer, owner: TorchEngine) -> None:
        super().__init__(model, owner.limits)
        model.transformer["wte"] = owner.model.transformer["wte"]  # its own remains the head
        self._owner = owner
        self.borrow(owner)

    def _begin(self, batch: StepBatch, starts: list[int]) -> KeyValues:
        return self._owner._begin(batch, [start - 1 for start in starts])  # a query's last key is the token before


def last_rows(num_rows: list[int], num_last: list[int]) -> list[int]:
    """Return the indices of the last `num_last` of each sequence's `num_rows` rows."""
    return [r for end, n in zip(accumulate(num_rows), num_last, strict=True) for r in range(end - n, end)]


def lay_out(model: Transformer) -> None:
    """Store linear weights in the memory layout that this device's kernels read fastest. Values do not change.

    For float32 on a CPU, the input dimension is outermost, as in GPT-2's checkpoints: one row times GPT-2's weights
    takes 20.5 ms instead of 26.1 (2 threads); 8 rows take the same time. Otherwise, the output dimension is outermost.
    """
    inputs_outermost = model.lm_head.weight.device.type == "cpu" and model.lm_head.weight.dtype == torch.float32
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            w = module.weight.data
            module.weight.data = w.t().contiguous().t() if inputs_outermost else w.contiguous()
