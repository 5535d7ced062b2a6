"""An assistant (Gemma 4's): a small model that proposes tokens, and attends to the keys and values of its model.

Its layers have queries only. It has no cache, reads no prompt, and shares the model's embedding; its inputs are the
embedding of a token and a hidden state of the model's width. A round begins with the model's hidden state after the
last token in its cache:

    model        t0 t1 t2 | t3         keys of t0 t1 t2, hidden state h2; t3 is the newest token
    assistant               t3, h2  -> x4, with a hidden state of its own -> x5, ...

All proposals of a round have the position of t3 and the same keys, those before it, of the model's last layer of the
same kind, local or global, that has some. The source is transformers (gemma4_assistant), where the key of a rejected
token may stay in reach. Small assistants score some groups of tokens only (`config.Backbone`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from timeit import repeat
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import ModelConfig
from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.models.parameters import OF_ASSISTANT, SHARED
from nanoinfer.sampling.sampler import Sampler, SamplerRow
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal, ProposalBuilder, sample_next
from nanoinfer.speculative.step_costs import SIZES, StepTimes
from nanoinfer.utils.arrays import Array, to_numpy

MAX_KEPT = 65  # hidden states of a sequence: those of the newest token and 64 proposals
MAX_MEASURED = 16  # sequences
Rows = NDArray[np.float32]


def attached(config: ModelConfig, target: ModelConfig, name: str) -> ModelConfig:
    """Return an assistant's config with the layers of the target that it reads. Raises NanoinferError if none fit."""
    backbone, layers = config.backbone, []
    assert backbone is not None
    sizes: dict[str, tuple[Any, Any]] = {"vocab_size": (config.vocab_size, target.vocab_size)}
    sizes |= {"hidden_size": (backbone.width, target.n_embd), "tie_word_embeddings": (config.tie_word_embeddings, True)}
    for i, kind in enumerate(config.layers):
        of = next((j for j in target.kv_layers[::-1] if (target.layer(j).window is None) == (kind.window is None)), 0)
        heads = [(c.at(layer).n_kv_head, c.at(layer).head_dim) for c, layer in ((config, i), (target, of))]
        sizes[f"(heads, width) of the keys of layer {i}"] = heads[0], heads[1]
        layers.append(replace(kind, kv_layer=of))
    if wrong := [f"{what}={ours}, not {theirs}" for what, (ours, theirs) in sizes.items() if ours != theirs]:
        raise NanoinferError(f"draft={name!r} is for a model with {wrong[0]}: use an assistant of this model")
    return replace(config, layers=tuple(layers), block_size=target.block_size)


class Assistant(Drafter):
    """Proposes the tokens that an assistant generates.

    Args:
        engine: of the assistant, with the sequences of `owner`, the target's engine.
        weights: of the assistant. Those of OF_ASSISTANT are used here, in float32.
        vocab_size: number of tokens that may be sampled.
    """

    def __init__(
        self, name: str, engine: Engine, owner: Engine, weights: Weights, sampler: Sampler, vocab_size: int
    ) -> None:
        self.name, self.engine, self._owner, self._sampler, self._vocab_size = name, engine, owner, sampler, vocab_size
        assert weights.config.backbone is not None
        self._scored = weights.config.backbone.scored_groups
        own = {name: tensor for name, tensor in weights.read() if name.startswith((OF_ASSISTANT, SHARED[0]))}
        self._c_out = own[f"{OF_ASSISTANT}c_out.weight"].float32()  # (width, C)
        if self._scored:
            self._vectors = own[f"{OF_ASSISTANT}groups.weight"].float32()  # (groups, C)
            self._tokens = own[f"{OF_ASSISTANT}order"].values.reshape(len(self._vectors), -1)
            if not np.array_equal(np.sort(self._tokens, None), np.arange(self._tokens.size)):
                raise NanoinferError(f"draft={self.name!r}: its token_ordering does not have each token once")
            self._embedding = own[SHARED[0]].float32()[self._tokens]  # (groups, tokens of a group, C)
        self._kept: dict[SamplerRow, tuple[int, Rows]] = {}
        """The target's hidden states after the last tokens of a sequence, and the index of the first of these."""
        self._times = self._measured()

    def observe(self, sequences: Sequence[SamplerRow], first: int, rows: Rows) -> None:
        """Keep the hidden states of the last tokens, the newest of which may be rejected proposals."""
        last = rows[-MAX_KEPT:].copy()
        self._kept |= dict.fromkeys(sequences, (first + len(rows) - len(last), last))

    def _hidden(self, request: DraftRequest) -> Rows | None:
        """Return the target's hidden state before the newest token, (n_embd); None: it is not there."""
        first, rows = self._kept.get(request.row, (0, ()))
        at = len(request.token_ids) - 2 - first
        return rows[at] if 0 <= at < len(rows) and len(request.token_ids) - request.start > 1 else None

    def num_behind(self, request: DraftRequest) -> int | None:
        """Return 0; None without a hidden state of the target."""
        return None if self._hidden(request) is None else 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the estimated seconds of the steps."""
        return num_tokens * self._times(num_seqs)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the assistant's next tokens of each sequence; each step processes one token of all sequences."""
        builders = [ProposalBuilder(request) for request in requests]
        hidden = {id(b): row for b in builders if (row := self._hidden(b.request)) is not None}
        while active := [b for b in builders if id(b) in hidden and len(b.token_ids) < b.request.num_tokens]:
            tokens = [(b.token_ids or b.request.token_ids)[-1] for b in active]
            handles = [cast(Handle, b.request.handle) for b in active]
            logits, rows = self.step(handles, tokens, np.stack([hidden[id(b)] for b in active]))
            sample_next(active, logits, self._sampler)
            hidden = dict(zip(map(id, active), rows, strict=True))
        return [b.finish() for b in builders]

    def step(self, handles: Sequence[Handle], tokens: Sequence[int], previous: Rows) -> tuple[Array, Rows]:
        """Return logits, (N, V), and the next hidden states, (N, width), for one new token of each of N sequences.

        previous: the hidden states before the tokens, (N, width).
        """
        num = len(handles)
        batch = StepBatch([*handles], [*tokens], [1] * num, [1] * num, hidden_only=self._scored > 0, previous=previous)
        logits, hidden = self.engine.extend(batch), to_numpy(self.engine.hidden())
        logits = self._scores(hidden) if self._scored else logits
        return logits[:, : self._vocab_size], hidden @ self._c_out.T

    def _scores(self, hidden: Rows) -> Rows:
        """Return logits, (N, V), in which tokens that are not scored have the least one of those that are, minus 1."""
        groups = np.argpartition(hidden @ self._vectors.T, -self._scored)[:, -self._scored :]
        logits = np.empty((len(hidden), self._tokens.size), np.float32)
        for row, h, chosen in zip(logits, hidden, groups, strict=True):
            scores = self._embedding[chosen].reshape(-1, len(h)) @ h  # one product of a matrix: faster than several
            row.fill(scores.min() - 1.0)
            row[self._tokens[chosen].reshape(-1)] = scores
        return logits

    def _measured(self) -> StepTimes:
        """Return the seconds of steps of several sequences."""
        owner = self._owner
        num = max(1, min(owner.limits.max_num_seqs - len(owner.handles), owner.num_free_blocks, MAX_MEASURED))
        handles, rows = [owner.open() for _ in range(num)], np.zeros((num, len(self._c_out)), np.float32)
        try:
            owner.extend(StepBatch(handles, [0] * num, [1] * num, [0] * num))
            steps = {n: partial(self.step, handles[:n], [0] * n, rows[:n]) for n in SIZES if n <= num}
            return StepTimes({n: float(np.median(repeat(step, number=1))) for n, step in steps.items()})
        finally:
            for handle in handles:
                owner.close(handle)

    def forget(self, row: SamplerRow) -> None:
        """Drop the hidden states of a sequence."""
        self._kept.pop(row, None)

    def reset(self) -> None:
        """Drop the hidden states of all sequences."""
        self._kept.clear()
