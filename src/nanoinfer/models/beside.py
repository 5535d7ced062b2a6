"""A mixture of experts beside a block's MLP, not in its place (Gemma 4 26B-A4B).

Both read the residual stream x after attention, each through a norm of its own, and their outputs have norms of their
own, so that neither drowns the other. The block's last norm is that of the sum:

    a = post_1(mlp(ln_1(x)))
    b = post_2(experts(ln_2(x)))        logits of the router = W (rms(x) * router_scale) / sqrt(C)
    y = a + b                           weights of the chosen experts: their softmax, times expert_scale of each

Source: transformers, models/gemma4. Whoever reads GPT-2 can leave this file out: gpt.py selects it by one line.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.experts import ExpertMLP
from nanoinfer.models.layers import GatedMLP, RMSNorm


class ExpertsBesideMLP(ExpertMLP):
    """An MLP and a mixture of experts. The parameters of the MLP have the names of a shared expert's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.router_scale = nn.Parameter(torch.ones(config.n_embd))
        self.expert_scale = nn.Parameter(torch.ones(self.config.count))
        self.shared = GatedMLP(replace(config, bias=False))
        self.ln_1, self.post_1, self.ln_2, self.post_2 = (RMSNorm(config, config.n_embd) for _ in range(4))
        self.eps = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both for the residual stream x, (..., C), same shape."""
        routed = F.rms_norm(x, x.shape[-1:], self.router_scale, self.eps) * x.shape[-1] ** -0.5
        mixed = self.mixture(self.ln_2(x), self.router(routed), self.expert_scale)
        total: Tensor = self.post_1(self.shared(self.ln_1(x))) + self.post_2(mixed)
        return total


def other_mlp(config: ModelConfig, kind: LayerKind) -> ExpertMLP | None:
    """Return the MLP of a layer with experts, or None if it has none."""
    if not kind.experts or config.experts is None:
        return None
    return ExpertsBesideMLP(config) if config.experts.beside else ExpertMLP(config)
