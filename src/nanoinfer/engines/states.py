"""The states of recurrent layers in PyTorch's engines.

The engines store a row of numbers for each sequence and layer (kv/states.py). What a layer makes of it is the layer's
own (models/recurrent.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.states import StateStep
from nanoinfer.models.recurrent import Recurrent


class StateTensors:
    """The rows of all recurrent layers.

    Args:
        config: shape of the model.
        num_rows: rows beside that of zeros.
        num_pending: tokens whose inputs a row keeps.
        device: of the tensors, which are float32.

    Raises:
        NanoinferError: the device does not have enough memory.
    """

    def __init__(self, config: ModelConfig, num_rows: int, num_pending: int, device: torch.device) -> None:
        shape, layers = config.recurrence, config.recurrent_layers
        assert shape is not None
        rows = num_rows + 2  # zeros first, and last one that padding writes
        try:
            self.states = torch.zeros(len(layers), rows, shape.num_state, device=device)
            self.pending = torch.zeros(len(layers), rows, num_pending, shape.num_inputs, device=device)
        except RuntimeError:  # torch's out-of-memory errors, on CPU and CUDA
            need = 4 * len(layers) * rows * (shape.num_state + num_pending * shape.num_inputs)
            raise NanoinferError(
                f"the states of {num_rows} sequences need {need:,} bytes, more than {device} has free: lower"
                " max_num_seqs"
            ) from None
        self._index = {layer: i for i, layer in enumerate(layers)}

    def copy(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy rows (from, to), one after the other."""
        for source, target in copies:
            self.states[:, target] = self.states[:, source]
            self.pending[:, target] = self.pending[:, source]

    def step(
        self, layer: int, cell: Recurrent, rows: Tensor, num_pending: Tensor, inputs: Tensor, count: Tensor | None
    ) -> Tensor:
        """Return the outputs of a layer for new tokens, (B, T, H Dv), and write the rows. The host reads no value.

        Args:
            layer: of the model.
            cell: the layer's module.
            rows, num_pending: (B,) int64, as in `StateStep`.
            inputs: (B, T, W) of the new tokens.
            count: (B,) int64 number of new tokens; those that follow are padding. None: T.
        """
        i, T = self._index[layer], inputs.shape[1]
        states, pending = self.states[i], self.pending[i]
        before = cell.scan(states[rows], pending[rows], num_pending)[1]
        y, after = cell.scan(before, inputs, count)
        few = min(T, pending.shape[1])
        if few < T and count is not None:  # of some sequences, the others are padding
            after = torch.where((count <= few)[:, None], before, after)
        states[rows] = before if few == T else after
        pending[rows, :few] = inputs[:, :few]  # not read of those whose state is that after the step
        return y


class StepStates:
    """The states of the sequences of a step in one row of N tokens.

    Args:
        tensors: of the states.
        steps: of each sequence.
        num_new: number of new tokens of each sequence.
    """

    def __init__(self, tensors: StateTensors, steps: Seq[StateStep], num_new: Seq[int]) -> None:
        self._tensors = tensors
        device = tensors.states.device
        firsts = [end - n for end, n in zip(accumulate(num_new), num_new, strict=True)]
        groups: dict[int, list[int]] = {}  # those with as many tokens run together
        for i, n in enumerate(num_new):
            groups.setdefault(n, []).append(i)
        self._groups: list[tuple[Tensor, Tensor, Tensor]] = []
        for n, members in groups.items():
            tokens = torch.tensor([[firsts[i] + t for t in range(n)] for i in members], device=device)  # (B, n)
            rows, num_pending = torch.tensor([steps[i] for i in members], device=device).T
            self._groups.append((tokens, rows, num_pending))

    def recur(self, layer: int, cell: Recurrent, inputs: Tensor) -> Tensor:
        """Return the outputs of a recurrent layer. Sequences with the same number of new tokens run in one call."""
        y = inputs.new_empty(len(inputs), cell.shape.inner_dim)
        for tokens, rows, num_pending in self._groups:
            y[tokens] = self._tensors.step(layer, cell, rows, num_pending, inputs[tokens], None)
        return y
