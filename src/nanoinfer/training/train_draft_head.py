"""Train a draft head (speculative/draft_head.py) to predict a target's next tokens from its hidden states.

The target processes the data, and sequences that it generated, once before training (distill.py). A training step takes
windows of them. From every position the head runs for STEPS tokens with the window's tokens as input, and its logits
are compared with the target's. The loss is that of distillation. The target is not changed.

    tokens                  x_0   x_1   x_2   x_3   x_4   x_5
    target's hidden states  h_0   h_1   h_2   h_3   h_4   h_5     lm_head(h_t): logits after x_t
    from h_0, x_1 .. x_4          s_1   s_2   s_3   s_4           lm_head(s_i) is compared with lm_head(h_i)
    from h_1, x_2 .. x_5                s_1   s_2   s_3   s_4
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoints.gpt_loading import init_weights
from nanoinfer.checkpoints.load import LoadedModel
from nanoinfer.errors import NanoinferError
from nanoinfer.speculative import draft_head, torch_ops
from nanoinfer.speculative.draft_head import DraftHead, DraftHeadConfig
from nanoinfer.tokenizers.tokenizer import fingerprint
from nanoinfer.training import distill
from nanoinfer.training.run import TrainRun
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.arrays import to_numpy

STEPS = 4  # tokens that the head predicts from one hidden state in training


class RecurrentHead(nn.Module):
    """A head whose parameters can be trained. They are uninitialized: see `of`, and gpt_loading.py."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        C = config.n_embd
        self.ln_s, self.ln_e = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_fc, self.c_proj = nn.Linear(2 * C, config.n_hidden), nn.Linear(config.n_hidden, C)

    @classmethod
    def of(cls, head: DraftHead) -> RecurrentHead:
        """Return a module with a head's parameters, which are copied."""
        module = cls(head.config)
        module.load_state_dict({n: torch.from_numpy(to_numpy(array)) for n, array in head.parameters.items()})
        return module

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the next state, (..., C); see `draft_head.next_state`."""
        after: Tensor = draft_head.next_state(torch_ops, dict(self.named_parameters()), state, embedded)
        return after

    def to_head(self) -> DraftHead:
        """Return the head with the current parameters in float32, on the CPU."""
        return DraftHead(self.config, {name: to_numpy(p.float()) for name, p in self.named_parameters()})


@dataclass
class HeadRun(TrainRun):
    """A run that trains a head; `train` and `val` are `distill.TargetBatches`."""

    wte: Tensor | None = None
    """The target's embedding, (V, C), on the device."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over all positions and steps, nats per token; in validation, the KL divergence alone.

        Args:
            x: token ids, (B, T).
            y: the target's final hidden states, (B, T, C).
        """
        assert isinstance(self.train, distill.TargetBatches)
        assert self.wte is not None
        x, y, lm_head = x.to(self.device), y.to(self.device), self.train.head
        n = x.shape[1] - STEPS
        total = torch.zeros((), device=self.device)
        with self.autocast():
            state = y[:, :n].to(self.wte.dtype)
            expected = self.train.logits(y)  # (B, T, V)
            for k in range(1, STEPS + 1):
                state = self.model(state, self.wte[x[:, k : k + n]])  # (B, n, C)
                kl, distance = distill.divergences(F.linear(state, lm_head), expected[:, k : k + n])
                total = total + (kl + distance if self.model.training else kl)
        return total / STEPS

    def write(self) -> None:
        """Write the current head to `out`."""
        assert isinstance(self.model, RecurrentHead)
        draft_head.save(self.model.to_head(), Path(self.config.out), self.config.save_dtype)

    def read(self) -> torch.nn.Module:
        """Load the head in `out`."""
        return RecurrentHead.of(draft_head.load(Path(self.config.out)))

    def files(self) -> dict[str, str]:
        """Return an empty dict: a head is stored without a tokenizer."""
        return {}


def new_head(config: TrainConfig, target: LoadedModel) -> RecurrentHead:
    """Return a head for a target, initialized by the run's seed. Raises NanoinferError if block_size is too short."""
    if config.block_size <= STEPS:
        raise NanoinferError(f"block_size={config.block_size} is too short for a draft head: use {STEPS + 1} or more")
    assert target.tokenizer is not None
    shape, key = target.config, fingerprint(target.tokenizer)
    head = RecurrentHead(DraftHeadConfig(target.name, shape.vocab_size, shape.n_embd, config.head_hidden, key))
    init_weights(head, 1, config.seed)
    return head
