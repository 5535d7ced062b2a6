"""The reference model: GPT-2 in one file, with the checkpoint's names.

Shapes in the comments of this project:

    B sequences   T positions   C = n_embd   H heads   D = C / H   V = vocab_size   N tokens of a ragged batch

All layers except attention process tokens independently, so the model accepts tokens of any leading shape: (B, T) in
training and in the engine `recompute`, (N,) in the engines with a KV cache. The engines differ only in the keys and
values that a query attends to, so attention is an argument:

    attend(layer, q, k, v) -> y        q, k, v, y: (..., H, D)

`causal_attention` below attends to the whole prefix; each engine with a cache passes its own function. Positions are an
argument too: the engine advances them, not a layer.

The architecture is GPT-2 (Radford et al. 2019): learned positions, layer norm before each sub-layer, a final layer
norm, GELU in the MLP, and an output head that is usually tied to the token embedding. Names follow nanoGPT and the
Hugging Face checkpoints (`wte`, `wpe`, `c_attn`, `c_proj`, `ln_1`, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
LayerAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Attend` for one layer. Blocks do not receive their layer index, so one compiled block serves all layers."""


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from (B, T, H, D) queries to their own and all earlier positions of the same sequence."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)  # (B, T, H, D)


class LayerNorm(nn.Module):
    """Layer norm with an optional bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None
        self.eps = config.layer_norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, (..., C), over its last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Multi-head self-attention: project to q, k, v, call `attend`, project back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.head_dim = config.n_head, config.head_dim

    def forward(self, x: Tensor, attend: LayerAttend) -> Tensor:
        """Return the attention output of x, (..., C), same shape."""
        qkv = self.c_attn(x).view(*x.shape[:-1], 3, self.n_head, self.head_dim)  # (..., 3, H, D)
        q, k, v = qkv.unbind(-3)
        return self.c_proj(attend(q, k, v).reshape(x.shape))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_dim, config.n_embd, bias=config.bias)
        self.approximate = "tanh" if config.activation == "gelu_new" else "none"

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP output of x, (..., C), same shape."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer block: x + attention(ln_1(x)), then x + MLP(ln_2(x))."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)
        self.dropout = dropout

    def forward(self, x: Tensor, attend: LayerAttend) -> Tensor:
        """Return the block's output of x, (..., C), same shape."""
        x = x + F.dropout(self.attn(self.ln_1(x), attend), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


def _embedding(rows: int, columns: int) -> nn.Embedding:
    """Return an embedding with uninitialized weights.

    nn.Embedding's default initialization on the meta device, where models are built, imports torch's compiler (1.3 s).
    """
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns))


RunBlock = Callable[[int, Block, Tensor], Tensor]
"""(layer, block, x) -> the block's output, (..., C)."""


class GPT(nn.Module):
    """A GPT-2-family language model. Weights are uninitialized: gpt_loading.py loads or initializes them.

    Args:
        config: the shape.
        dropout: probability of dropping residual and embedding values in training mode. Attention weights are not
            dropped: dropping them prevents the fused attention kernels and made a training step of the built-in
            model 3.4 times slower on a CPU.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.transformer = nn.ModuleDict(
            {
                "wte": _embedding(config.vocab_size, config.n_embd),
                "wpe": _embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config, dropout) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the output head to the token embedding if the config says so; call it again after loading weights."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    @property
    def blocks(self) -> list[Block]:
        """The blocks, in layer order."""
        return list(cast("nn.ModuleList", self.transformer["h"]))  # type: ignore[arg-type]

    def hidden(
        self, idx: Tensor, pos: Tensor, attend: Attend | None = None, *, run_block: RunBlock | None = None
    ) -> Tensor:
        """Return the final hidden states, (..., C), in the weights' dtype. Pass either `attend` or `run_block`.

        Args:
            idx: token ids, int64, any shape.
            pos: position of each token in its window, less than block_size; broadcastable to idx.
            attend: attention of each layer.
            run_block: runs a whole block including attention; for engines that compile or replace blocks.
        """
        parts = self.transformer
        x = F.dropout(parts["wte"](idx) + parts["wpe"](pos), self.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            x = run_block(layer, block, x) if run_block is not None else block(x, partial(cast(Attend, attend), layer))
        return parts["ln_f"](x)  # type: ignore[no-any-return]

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits, (B, T, V), of whole sequences idx, (B, T), T <= block_size."""
        pos = torch.arange(idx.shape[-1], device=idx.device)
        return self.lm_head(self.hidden(idx, pos, causal_attention))  # type: ignore[no-any-return]

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())
