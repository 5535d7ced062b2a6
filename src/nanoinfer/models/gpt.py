"""The reference model: GPT-2 in one file, with the checkpoint's names.

Shapes, used in every comment of this project:

    B sequences   T positions   C = n_embd   H heads   D = C / H   V = vocab_size   N tokens of a ragged batch

Everything but attention treats each token on its own, so the model takes tokens of any leading shape:
(B, T) in training and in `recompute`, flat (N,) in the engines that keep a cache. What differs from rung
to rung is only which keys and values a query sees, so attention is an argument:

    attend(layer, q, k, v) -> y        q, k, v, y: (..., H, D)

`causal_attention` below is the whole-prefix version; each engine with a cache brings its own. Positions
are an argument too: they advance in the engine, never in a layer.

The architecture is GPT-2's (Radford et al. 2019): learned positions, layer norm before each sub-layer, a
final layer norm, GELU in the MLP, and an output head that is usually the token embedding. Names follow
nanoGPT and the Hugging Face checkpoints (`wte`, `wpe`, `c_attn`, `c_proj`, `ln_1`, ...).
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
"""`Attend` of one layer: a block does not know which it is, so that one compiled block serves all layers."""


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from (B, T, H, D) queries to all earlier positions of their own sequence."""
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
    """Multi-head self-attention: project to q, k, v, let `attend` mix tokens, project back."""

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
    """One transformer block: x + attention, then x + MLP, each behind its layer norm."""

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
    """Return an embedding with empty weights.

    Drawing them on the meta device, where a checkpoint's model is made, would import torch's compiler (1.3 s).
    """
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns))


RunBlock = Callable[[int, Block, Tensor], Tensor]
"""(layer, block, x) -> the block's output, (..., C)."""


class GPT(nn.Module):
    """A GPT-2-family language model. Its weights are whatever was there: load them, or call `init_weights`.

    Args:
        config: the shape.
        dropout: probability of dropping residual and embedding values in training mode, never in eval mode.
            Attention weights are not dropped: that rules out the fused attention kernels, and made a
            training step of the built-in model 3.4 times slower on a CPU.
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
        """Make the output head the token embedding where the config says so (again after loading)."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights as GPT-2 does: normal(0, 0.02), smaller for the projections into the residual."""
        for name, p in self.named_parameters():
            init_weight(name, p, self.config, generator)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first layer first."""
        return list(cast("nn.ModuleList", self.transformer["h"]))  # type: ignore[arg-type]

    def hidden(
        self, idx: Tensor, pos: Tensor, attend: Attend | None = None, *, run_block: RunBlock | None = None
    ) -> Tensor:
        """Return the final hidden states, (..., C), in the weights' dtype. Give `attend` or `run_block`.

        Args:
            idx: token ids, int64, any shape.
            pos: position of each token in its own window, broadcastable to idx; below block_size.
            attend: which keys and values each query sees.
            run_block: runs a whole block, attention included: for engines that compile or replace blocks.
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
        """Return the number of weights, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())


def init_weight(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator | None) -> Tensor:
    """Fill one parameter as GPT-2 does and return it: see `GPT.init_weights`."""
    if p.dim() < 2:
        return nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)
    # 2 * n_layer projections add to the residual: keep its variance (Radford et al. 2019)
    std = 0.02 * ((2 * config.n_layer) ** -0.5 if "c_proj" in name else 1.0)
    return nn.init.normal_(p, 0.0, std, generator=generator)
