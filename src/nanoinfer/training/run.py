"""What a training run consists of: the model, its data, the optimizer, and how far it is."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gpt_loading import load_gpt, weights_of
from nanoinfer.models.gpt import GPT
from nanoinfer.training import data, distill
from nanoinfer.training.train_config import TrainConfig


@dataclass
class TrainRun:
    """State of a training run; created by `prepare`."""

    config: TrainConfig
    device: torch.device
    model: torch.nn.Module
    tokenizer_json: str
    train: data.Batches | distill.TargetBatches
    val: data.Batches | distill.TargetBatches
    val_chars_per_token: float
    step: int = 0
    best_val_loss: float = math.inf
    optimizer: torch.optim.Optimizer | None = None
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the data and, if there is one, of the target's weights. A resumed run must have the same digests."""
    saved_weights: str = ""
    """Digest of the weights last saved."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, nats per token, of inputs x, (B, T).

        Args:
            x: token ids.
            y: the next token ids, (B, T), for cross-entropy; or the target's logits, (B, T, V), for the distillation
                loss, which in validation is the KL divergence alone.
        """
        x, y = x.to(self.device), y.to(self.device)
        with self.autocast():
            logits = self.model(x)
        if y.is_floating_point():
            kl, distance = distill.divergences(logits[..., : y.shape[-1]], y)
            return kl + distance if self.model.training else kl
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for the dtype of the config."""
        if self.config.autocast == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def write(self) -> None:
        """Write the current model to `out`."""
        assert isinstance(self.model, GPT)
        huggingface.save(weights_of(self.model), Path(self.config.out), self.tokenizer_json, self.config.save_dtype)

    def read(self) -> torch.nn.Module:
        """Load the model in `out`."""
        return load_gpt(huggingface.open_folder(Path(self.config.out)))

    def files(self) -> dict[str, str]:
        """Return the names and contents of the text files that belong to the model in `out`."""
        return {"tokenizer.json": self.tokenizer_json}
