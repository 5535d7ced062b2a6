"""Drafter that runs a draft head on the target's hidden states (speculative/draft_head.py), without a KV cache.

After each step the core passes the hidden state from which each newest token was sampled (`update_hidden`). The drafter
stores only this row for a sequence, so it has no prefill, whatever the length of the prompt:

    sequence    [a b c d]        d was sampled from the hidden state h of c
    proposal    s_1 = f(h, d) -> e      s_2 = f(s_1, e) -> f      ...
    target      extends by d e f ..., accepts e, samples g instead of f; the new hidden state is that of e

The head samples with the target's parameters and with the same uniform for each position (verify.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from nanoinfer.sampling.sampler import Sampler, SamplerRow
from nanoinfer.speculative import numpy_ops
from nanoinfer.speculative.base import DraftRequest, Proposal, ProposalBuilder, sample_next
from nanoinfer.speculative.draft_head import DraftHead, TargetEmbeddings, next_state
from nanoinfer.speculative.step_costs import SIZES, StepTimes
from nanoinfer.utils.arrays import Array


class HeadDrafter:
    """Proposes the tokens that a draft head predicts from the target's last hidden state.

    Args:
        head: NumPy arrays in float32, or what `placement` of the operations makes of them: tensors on the target's
            device, or matrices of the native extension.
        embeddings: of the target; the same kind of array in the same dtype.
        vocab_size: number of tokens that may be sampled, as for the target.
        ops: operations on this kind of array: speculative/numpy_ops.py or torch_ops.py.
        max_num_seqs: maximum number of requests per call.
    """

    def __init__(
        self,
        name: str,
        head: DraftHead,
        embeddings: TargetEmbeddings,
        sampler: Sampler,
        vocab_size: int,
        *,
        ops: ModuleType = numpy_ops,
        max_num_seqs: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._head, self._scale, self._ops = head, embeddings.scale, ops
        self._wte, self._lm_head, self._vocab_size = embeddings.wte, embeddings.lm_head, vocab_size
        self._sampler = sampler
        self._hidden: dict[SamplerRow, Array] = {}
        self._times = self._measure(max_num_seqs, clock)

    def update_hidden(self, rows: Sequence[SamplerRow], hidden: Array) -> None:
        """Store the hidden states, (len(rows), n_embd), from which the newest tokens were sampled."""
        states = self._ops.like(hidden[:, : self._head.config.n_embd], self._wte) * self._scale
        self._hidden.update(zip(rows, states, strict=True))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the head's proposals; all requests run as one batch.

        A proposal is empty if the target has not processed a token of the sequence yet (a prompt of one token).
        """
        builders = [ProposalBuilder(request) for request in requests]
        known = [s for s in builders if s.request.row in self._hidden]
        active = sorted(known, key=lambda s: -s.request.num_tokens)  # finished proposals are then at the end
        if active:
            state = self._ops.stack([self._hidden[s.request.row] for s in active])  # (B, C)
        while active:
            newest = [s.token_ids[-1] if s.token_ids else s.request.token_ids[-1] for s in active]
            state, logits = self._step(state[: len(active)], newest)
            sample_next(active, logits, self._sampler)
            active = [s for s in active if len(s.token_ids) < s.request.num_tokens]
        return [s.finish() for s in builders]

    def _step(self, state: Array, token_ids: list[int]) -> tuple[Any, Any]:
        """Return the next state, (B, C), and the logits after `token_ids`, (B, V) float32."""
        # An overflow in the head must not end the sequence: the sampler raises an error on logits that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            state = next_state(self._ops, self._head.parameters, state, self._wte[token_ids])
            return state, self._ops.finite(self._ops.linear(state, self._lm_head)[:, : self._vocab_size])

    def num_behind(self, request: DraftRequest) -> int:
        """Return 0: the head has no prefill."""
        return 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the estimated seconds of `num_tokens` steps of the head."""
        return num_tokens * self._times(num_seqs)

    def forget(self, row: SamplerRow) -> None:
        """Drop a sequence's hidden state."""
        self._hidden.pop(row, None)

    def reset(self) -> None:
        """Drop all hidden states."""
        self._hidden.clear()

    def _measure(self, max_num_seqs: int, clock: Callable[[], float]) -> StepTimes:
        """Return the seconds of a step, including an argmax, by number of sequences: the best of four runs."""
        measured = {}
        for n in (n for n in SIZES if n == 1 or n <= max_num_seqs):
            state = self._wte[[0] * n]
            sec = []
            for _ in range(5):  # the first run is a warm-up
                start = clock()
                self._step(state, [0] * n)[1].argmax(-1).tolist()  # waits for the device
                sec.append(clock() - start)
            measured[n] = min(sec[1:])
        return StepTimes(measured)
