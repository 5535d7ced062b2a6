"""The general decoder, the reference of all families: a config describes it. The defaults are GPT-2 in nanoGPT's names.

Shapes in the comments of this project:

    B sequences   T positions   C = n_embd   H heads   D = head_dim, C / H in GPT-2   V = vocab_size
    K heads of keys and values, H in GPT-2   N tokens of a ragged batch

All layers except attention process tokens independently, so the model accepts tokens of any leading shape: (B, T) in
training and in the engine `recompute`, (N,) in the engines with a KV cache. The engines differ only in the keys and
values that a query attends to, so the cache is an argument (`attention.KeyValues`):

    store(layer, k, v)    attend(spec, q) -> y        q, y: (..., H, D)   k, v: (..., K, D)

`attention.WholePrefix` attends to the whole prefix; each engine with a cache passes its own. Positions are an argument
too: the engine advances them, not a layer.

The architecture is GPT-2 (Radford et al. 2019): learned positions, layer norm before each sub-layer, a final layer
norm, GELU in the MLP, and an output head that is usually tied to the token embedding. Names follow nanoGPT and the
Hugging Face checkpoints (`wte`, `wpe`, `c_attn`, `c_proj`, `ln_1`, ...). Norms, and what other families have in its
place, are in layers.py, other_attention.py, recurrent.py and experts.py; where a field selects it, one line here does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.models.attention import AttentionSpec, KeyValues, WholePrefix, soft_cap
from nanoinfer.models.experts import other_mlp
from nanoinfer.models.layers import (
    AfterBlock,
    MTPInput,
    PerLayerEmbedding,
    Rotation,
    make_mlp,
    make_norm,
    qk_norm,
    rotate,
    rotation,
    round_inputs,
)
from nanoinfer.models.other_attention import other_attention
from nanoinfer.models.recurrent import LayerRecur, Recurrent, recur_whole, recurrent_layer
from nanoinfer.models.rotary import frequencies

LayerAttend = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""(q, k, v) -> y: store and attend of one layer; without keys and values (other_attention.py), attend alone. Blocks do
not receive their layer index, so one compiled block serves all layers."""


def attend_through(cache: KeyValues, layer: int, spec: AttentionSpec) -> LayerAttend:
    """Return attention of a layer to the keys and values in a cache."""

    def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is not None and v is not None:
            cache.store(layer, k, v)
        return cache.attend(spec, q)

    return attend


class Attention(nn.Module):
    """Multi-head self-attention: project to q, k, v, call `attend`, project back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        widths = self.widths = [config.attn_dim, config.kv_dim, config.kv_dim]
        self.c_attn = nn.Linear(config.n_embd, sum(widths), bias="qkv" in config.biases)
        self.c_proj = nn.Linear(config.attn_dim, config.n_embd, bias="proj" in config.biases)
        self.sinks = nn.Parameter(torch.empty(config.n_head)) if config.sinks else None  # attention.py
        self.qk_norm = config.qk_norm
        if config.qk_norm != "none":
            self.q_norm, self.k_norm = (qk_norm(config, heads) for heads in (self.n_head, self.n_kv_head))
        self.sub_norm = make_norm(config, config.attn_dim) if config.sub_norms else nn.Identity()

    def forward(self, x: Tensor, attend: LayerAttend, rotation: Rotation | None = None) -> Tensor:
        """Return the attention output of x, (..., C), same shape. Queries and keys are rotated before `attend`."""
        q, k, v = self.c_attn(x).split(self.widths, dim=-1)
        if self.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.n_head, self.head_dim))  # (..., H, D)
        k, v = (y.unflatten(-1, (self.n_kv_head, self.head_dim)) for y in (k, v))  # (..., K, D)
        if self.qk_norm in ("head", "heads"):
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(torch.cat((q, k), -2), rotation).tensor_split((self.n_head,), -2)
        return self.c_proj(self.sub_norm(attend(q, k, v).flatten(-2)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer block: x + attention(ln_1(x)), then x + MLP(ln_2(x)).

    Other families also have norms after attention and MLP (post_1, post_2), in place of those before them or beside
    them; or attention and MLP read the same x (parallel residual), normalised once if they share the norm.
    """

    def __init__(self, config: ModelConfig, dropout: float, kind: LayerKind) -> None:
        super().__init__()

        def norm(name: str) -> nn.Module:
            return make_norm(config) if name in config.block_norms(kind) else nn.Identity()

        self.ln_1 = norm("ln_1")
        self.attn = recurrent_layer(config, kind) or other_attention(config, kind) or Attention(config)
        self.post_1 = norm("post_1")
        self.ln_2 = norm("ln_2")
        self.mlp = None
        if kind.mlp:
            self.mlp = other_mlp(config, kind) or make_mlp(config)
        self.post_2 = norm("post_2")
        self.after = AfterBlock(config, kind) if config.per_layer_dim or kind.scaled else None
        self.parallel, self.shared = config.parallel_residual, config.norm_placement == "shared"
        self.scale = config.residual_scale
        self.dropout = dropout
        if config.rounded_inputs:
            round_inputs(self)

    def forward(self, x: Tensor, attend: LayerAttend, rotation: Rotation | None = None) -> Tensor:
        """Return the block's output of x, (..., C), same shape."""
        normed = self.ln_1(x)
        y = x + self._branch(self.post_1(self.attn(normed, attend, rotation)))
        if self.mlp is None:
            return y
        mlp = self.post_2(self.mlp(normed if self.shared else self.ln_2(x if self.parallel else y)))
        return y + self._branch(mlp)

    def _branch(self, y: Tensor) -> Tensor:
        """Return what is added to the residual stream, for the output of attention or MLP."""
        return F.dropout(y if self.scale is None else y * self.scale, self.dropout, self.training)


def _embedding(rows: int, columns: int) -> nn.Embedding:
    """Return an embedding with uninitialized weights.

    nn.Embedding's default initialization on the meta device, where models are built, imports torch's compiler (1.3 s).
    """
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns))


RunBlock = Callable[[int, Block, Tensor, Rotation | None], Tensor]
"""(layer, block, x, rotation) -> the block's output, (..., C)."""


class Transformer(nn.Module):
    """A decoder-only language model, GPT-2 or another one that its config describes.

    Weights are uninitialized: gpt_loading.py loads or initializes them.

    Args:
        config: the shape.
        dropout: probability of dropping residual and embedding values in training mode. Attention weights are not
            dropped: dropping them prevents the fused attention kernels and made a training step of the built-in
            model 3.4 times slower on a CPU.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self._kinds = [config.layer(i) for i in range(config.n_layer)]
        self._frequencies: dict[tuple[Rotary, torch.device], Tensor] = {}
        self.dropout = dropout
        parts = {
            "wte": _embedding(config.vocab_size, config.n_embd),
            "wpe": _embedding(config.block_size, config.n_embd) if config.learned_positions else None,
            "ln_e": make_norm(config) if config.embedding_norm else None,
            "per_layer": PerLayerEmbedding(config) if config.per_layer_dim else None,
            "mtp": MTPInput(config) if config.mtp else None,
            "h": nn.ModuleList(Block(config.at(i), dropout, kind) for i, kind in enumerate(self._kinds)),
            "ln_f": make_norm(config),
        }
        self.transformer = nn.ModuleDict({name: part for name, part in parts.items() if part is not None})
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head_bias)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the output head to the token embedding if the config ties them; call it again after loading weights."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    @property
    def blocks(self) -> list[Block]:
        """The blocks, in layer order."""
        return list(cast("nn.ModuleList", self.transformer["h"]))  # type: ignore[arg-type]

    def _attention(self, cache: KeyValues, recur: LayerRecur, layer: int, block: Block) -> Any:
        """Return what a layer's module calls: attention, what a state gives, or both."""
        c, kind = self.config, self._kinds[layer]
        spec = AttentionSpec(c.kv_layer(layer), kind.window, c.attention_scale, c.attention_softcap, block.attn.sinks)
        attend = attend_through(cache, layer, spec)
        if not isinstance(block.attn, Recurrent):
            return attend
        of_cell = partial(recur, layer, block.attn)
        return (attend, of_cell) if kind.beside else of_cell

    def hidden(
        self,
        idx: Tensor,
        pos: Tensor,
        cache: KeyValues | None = None,
        recur: LayerRecur = recur_whole,
        *,
        run_block: RunBlock | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states, (..., C), in the weights' dtype.

        Args:
            idx: token ids, int64, any shape.
            pos: position of each token in its window, less than block_size; broadcastable to idx.
            cache: of keys and values; None: idx, (B, T), are whole sequences (`WholePrefix`).
            recur: runs a recurrent layer.
            run_block: runs a whole block including attention; for engines that compile or replace blocks.
            previous: hidden states for `MTPInput`, (..., C); None: the model has no such input.
        """
        parts = self.transformer
        x = F.dropout(self._embed(idx, pos), self.dropout, self.training)
        if previous is not None:
            x = parts["mtp"](x, previous)
        rotations = self.rotations(pos, x.dtype)
        inputs = parts["per_layer"](idx, x) if self.config.per_layer_dim else None  # of the layers, (..., L, P)
        cache = WholePrefix(self.config) if cache is None else cache
        for layer, (block, kind) in enumerate(zip(self.blocks, self._kinds, strict=True)):
            by = None if kind.rotary is None else rotations[kind.rotary]
            if run_block is not None:
                x = run_block(layer, block, x, by)
            else:
                x = block(x, self._attention(cache, recur, layer, block), by)
            if block.after is not None:
                x = block.after(x, None if inputs is None else inputs[..., layer, :])
        x = parts["ln_f"](x)
        return x if self.config.final_scale is None else x * self.config.final_scale  # type: ignore[no-any-return]

    def rotations(self, pos: Tensor, dtype: torch.dtype) -> dict[Rotary, Rotation]:
        """Return the rotations of tokens at positions `pos`, int64 of any shape, for all layers that have one."""
        rotaries = {kind.rotary for kind in self._kinds if kind.rotary is not None}
        return {rotary: self._rotation(rotary, pos, dtype) for rotary in rotaries}

    def _rotation(self, rotary: Rotary, pos: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of tokens at positions `pos`. What multiplies queries is part of their rotation."""
        scale: Tensor | float = rotary.attention_factor
        if rotary.query_growth:
            growth = rotary.query_growth * torch.log1p((pos // rotary.original_context).float())[..., None, None]
            heads = growth.expand(*pos.shape, self.config.n_head, 1)
            scale = scale * torch.cat((1.0 + heads, torch.ones_like(heads[..., : self.config.n_kv_head, :])), -2)
        return rotation(self._frequency(rotary, pos.device), pos, dtype, scale)

    def _frequency(self, rotary: Rotary, device: torch.device) -> Tensor:
        """Return the frequencies of a rotary embedding, kept on the device: a CUDA graph cannot capture their copy."""
        if (rotary, device) not in self._frequencies:
            values = frequencies(rotary, self.config.block_size)
            self._frequencies[rotary, device] = torch.from_numpy(values).to(device)
        return self._frequencies[rotary, device]

    def _embed(self, idx: Tensor, pos: Tensor) -> Tensor:
        x: Tensor = self.transformer["wte"](idx)
        if self.config.embedding_scale is not None:  # rounded to the dtype, as in transformers
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()
        if self.config.learned_positions:
            x = x + self.transformer["wpe"](pos)
        return self.transformer["ln_e"](x) if self.config.embedding_norm else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, (..., V) float32, of final hidden states, (..., C)."""
        logits: Tensor = self.lm_head(hidden)
        if self.config.logits_softcap is not None:
            logits = soft_cap(logits.float(), self.config.logits_softcap)
        return logits.float()

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits, (B, T, V), of whole sequences idx, (B, T), T <= block_size."""
        pos = torch.arange(idx.shape[-1], device=idx.device)
        return self.logits(self.hidden(idx, pos))

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())
