"""Per-layer embeddings: a second embedding gives each token an input for each layer (Gemma 3n and 4).

    L layers   P = per_layer_dim   x: the residual stream, (..., C)

Before the first block, the input of layer l is made of a row of the table and of a product with the embedded token e:

    u_l = (norm(W_in e / sqrt(C))_l + sqrt(P) * table[token, l]) / sqrt(2)         P values each

After each block, what a gate lets through of it is added to the residual stream, which is then scaled:

    x = (x + norm(W_proj (activation(W_gate x) * u_l))) * scale

A step reads one row of the table for each token and layer, so the table takes memory, and next to no time. Some models
have the scale alone.

Whoever reads GPT-2 can leave this file out: gpt.py selects it by one line.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.layers import ACTIVATIONS, MakeNorm


class PerLayerEmbedding(nn.Module):
    """The inputs of all layers.

    Args:
        config: of the model.
        make_norm: returns a norm of the config's kind over so many values.
    """

    def __init__(self, config: ModelConfig, make_norm: MakeNorm) -> None:
        super().__init__()
        self.n_layer, self.width = config.n_layer, config.per_layer_dim
        rows = config.vocab_size * config.n_layer  # row token * L + l is that of layer l
        self.wte = nn.Embedding(rows, self.width, _weight=torch.empty(rows, self.width))
        self.c_in = nn.Linear(config.n_embd, config.n_layer * self.width, bias=False)
        self.norm = make_norm(config, self.width)

    def forward(self, idx: Tensor, x: Tensor) -> Tensor:
        """Return the inputs, (..., L, P), of tokens idx, (...), whose embeddings are x, (..., C)."""
        rows = idx[..., None] * self.n_layer + torch.arange(self.n_layer, device=idx.device)
        scale = torch.tensor(self.width**0.5, dtype=x.dtype).item()  # rounded to the dtype, as in transformers
        projected = self.c_in(x) * x.shape[-1] ** -0.5
        made: Tensor = self.norm(projected.view(*idx.shape, self.n_layer, self.width))
        table: Tensor = self.wte(rows)
        mixed: Tensor = (made + table * scale) * 2.0**-0.5
        return mixed


class AfterBlock(nn.Module):
    """What follows a block: its layer's input is added, if the model has such inputs, and the sum is scaled.

    Args:
        config: of the model.
        kind: of the layer.
        make_norm: returns a norm of the config's kind over so many values.
    """

    def __init__(self, config: ModelConfig, kind: LayerKind, make_norm: MakeNorm) -> None:
        super().__init__()
        if config.per_layer_dim:
            self.c_gate = nn.Linear(config.n_embd, config.per_layer_dim, bias=False)
            self.c_proj = nn.Linear(config.per_layer_dim, config.n_embd, bias=False)
            self.post = make_norm(config, config.n_embd)
        self.scale = nn.Parameter(torch.ones(1)) if kind.scaled else None
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, given: Tensor | None) -> Tensor:
        """Return the input of the next block for x, (..., C), and the layer's own input, (..., P)."""
        if given is not None:
            x = x + self.post(self.c_proj(self.activation(self.c_gate(x)) * given))
        return x if self.scale is None else x * self.scale
