"""A trained head on the target's own hidden state (models/draft_head.py): no model of its own, no cache.

The core shows it each step's hidden state of the newest token (`see`); of a sequence it keeps that one row and
nothing else. So there is nothing to read before it can propose, whatever the length of the prompt:

    the text       [a b c d]        d was drawn from the hidden state h of c
    it proposes    s_1 = f(h, d) -> e      s_2 = f(s_1, e) -> f      ...
    the target     extends by d e f ..., keeps e, says g for f: shows the hidden state of e

It draws as the target does, with the same parameters and the same uniform of each position (verify.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.models.draft_head import RecurrentHead, TargetEmbeddings
from nanoinfer.sampling.sampler import Sampler, SamplerRow
from nanoinfer.speculative.base import DraftRequest, Proposal
from nanoinfer.speculative.proposal_builder import ProposalBuilder, draw_next
from nanoinfer.speculative.step_costs import SIZES, StepTimes


class HeadDrafter:
    """Proposes what a head makes of the target's last hidden state.

    Args:
        name: of the head, for people.
        head: on the target's device.
        frame: the embedding and the output head that it borrows, on the same device and of the same dtype.
        sampler: draws its tokens.
        vocab_size: tokens that may be drawn; the target's.
        max_num_seqs: most sequences asked for at a time.
        clock: seconds; used to measure what a step costs.
    """

    def __init__(
        self,
        name: str,
        head: RecurrentHead,
        frame: TargetEmbeddings,
        sampler: Sampler,
        vocab_size: int,
        *,
        max_num_seqs: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._head, self._scale = head, frame.scale
        self._wte, self._lm_head = frame.wte, frame.lm_head[:vocab_size]
        self._sampler = sampler
        self._hidden: dict[SamplerRow, Tensor] = {}
        self._times = self._measure(max_num_seqs, clock)

    def update_hidden(self, rows: Sequence[SamplerRow], hidden: Tensor) -> None:
        """Keep the hidden state of each sequence's newest token, (len(rows), n_embd)."""
        C = self._head.config.n_embd
        hidden = hidden[:, :C].to(self._wte.dtype) * self._scale
        self._hidden.update(zip(rows, hidden.unbind(), strict=True))

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return what the head guesses for each request, all requests together, token by token.

        Nothing for a prompt of one token, of which the target has seen nothing yet.
        """
        builders = [ProposalBuilder(request) for request in requests]
        known = [s for s in builders if s.request.row in self._hidden]
        active = sorted(known, key=lambda s: -s.request.num_tokens)  # so that those that are done are at the end
        if active:
            state = torch.stack([self._hidden[s.request.row] for s in active])  # (B, C)
        while active:
            newest = [s.token_ids[-1] if s.token_ids else s.request.token_ids[-1] for s in active]
            state, logits = self._step(state[: len(active)], newest)
            draw_next(active, logits, self._sampler)
            active = [s for s in active if len(s.token_ids) < s.request.num_tokens]
        return [s.finish() for s in builders]

    def _step(self, state: Tensor, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return the next state, (B, C), and the logits after `token_ids`, (B, V) float32."""
        state = self._head(state, self._wte[torch.tensor(token_ids, device=state.device)])
        # An overflow in the head is a bad guess and no more: the sampler would call infinite logits an error.
        return state, F.linear(state, self._lm_head).float().nan_to_num()

    def num_behind(self, request: DraftRequest) -> int:
        """Return 0: there is nothing to read."""
        return 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the time of `num_tokens` steps of the head."""
        return num_tokens * self._times(num_seqs)

    def forget(self, row: SamplerRow) -> None:
        """Drop a sequence's hidden state."""
        self._hidden.pop(row, None)

    def reset(self) -> None:
        """Drop all hidden states."""
        self._hidden.clear()

    @torch.inference_mode()
    def _measure(self, max_num_seqs: int, clock: Callable[[], float]) -> StepTimes:
        """Return what steps cost by the number of sequences, with the largest logit found: the best of four."""
        measured = {}
        for n in (n for n in SIZES if n == 1 or n <= max_num_seqs):
            state = self._wte[:1].expand(n, -1)
            sec = []
            for _ in range(5):  # the very first one warms up
                start = clock()
                self._step(state, [0] * n)[1].argmax(-1).tolist()  # waits for a device
                sec.append(clock() - start)
            measured[n] = min(sec[1:])
        return StepTimes(measured)
