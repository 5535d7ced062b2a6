"""Rung 8, `triton`: few fused kernels for each layer (kernels/triton/, docs/rungs/triton.md).

Each matrix product is one kernel with the operations around it, so a step of one token launches five kernels for each
layer, or six where a long context is split:

    norm, qkv, bias, store of k and v  |  attention (and the merge of its splits)  |  product, bias, residual
    norm, product, bias, GELU          |  product, bias, residual

and four others, sampling included (norms of several tokens are launches of their own):

    positions, last tokens, embeddings  |  norm, head  |  weights of all tokens  |  sampled token, state of the sampler

Steps of many tokens (prompts, large batches: FUSED_TOKENS in tiles.py) are bound by arithmetic. Weights that are not
quantized then take the unfused path of static_shapes.py, on PyTorch's libraries; quantized ones take the same kernels
in any step.

The residual stream of a fused step is float32; the inputs of a product are in the weight's dtype.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import cast

import torch
from torch import Tensor, nn

from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import DEFAULTS, SampleSlots
from nanoinfer.engines.buckets import Bucket
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.graphs import CudaRecorder
from nanoinfer.engines.static_shapes import HEAD_TOKENS, StepOutput
from nanoinfer.engines.transfers import StepInputs
from nanoinfer.engines.triton_layers import ACTIVATIONS, Layer, describe, frozen, fuse, norm_of
from nanoinfer.errors import NanoinferError
from nanoinfer.kernels.triton.attention import attention
from nanoinfer.kernels.triton.epilogue import Epilogue, Places
from nanoinfer.kernels.triton.heads import store_heads
from nanoinfer.kernels.triton.products import product
from nanoinfer.kernels.triton.quantize import Weight, dense, pack_int4, pack_int8
from nanoinfer.kernels.triton.rows import Norm, layer_norm
from nanoinfer.kernels.triton.step import begin
from nanoinfer.kernels.triton.tiles import FUSED_TOKENS
from nanoinfer.models.attention import soft_cap
from nanoinfer.models.experts import ExpertMLP
from nanoinfer.models.layers import MLP, GatedMLP, Rotation, rounded
from nanoinfer.models.other_attention import SharedAttention
from nanoinfer.models.recurrent import Recurrent
from nanoinfer.models.transformer import Attention, Transformer

PACK = {None: dense, "int8": pack_int8, "int4": pack_int4}


class TritonEngine(CudaGraphEngine):
    """Runs steps with fused Triton kernels. Other arguments: see `CudaGraphEngine`.

    Args:
        model: quantized weights are removed from it.
        config: graph_memory and quantization are used. Quantization applies to the weights of the layers and to the
            output head, not to the embeddings.

    Raises:
        NanoinferError: the model has what no kernel does, or the KV cache does not fit in the device's memory.
        ValueError: a weight to be quantized is infinite or NaN.
    """

    def __init__(
        self,
        model: Transformer,
        limits: EngineLimits,
        config: EngineConfig = DEFAULTS,
        *,
        recorder: CudaRecorder | None = None,
    ) -> None:
        self.check(model.config)
        quantization, pack = config.quantization, PACK[config.quantization]
        super().__init__(model, limits, config, recorder=recorder)
        self._fused_tokens = FUSED_TOKENS[self.dtype] if quantization is None else inf
        self._layers = describe(model, pack, keep=quantization is None)
        fuse(model, pack, self._fused_tokens)
        self._activation = ACTIVATIONS.get(self.config.activation, 0)  # of experts, PyTorch's modules apply it
        self._scale = 1.0 if self.config.residual_scale is None else self.config.residual_scale
        tables = [cast(nn.Embedding, model.transformer[name]) for name in ("wte", "wpe") if name in model.transformer]
        for table in tables:
            table.weight = frozen(table.weight.contiguous())
        self._wte, self._wpe = tables[0].weight, tables[1].weight if self.config.learned_positions else None
        model.tie_weights()
        self._head_weight = pack(model.lm_head.weight)
        ones = torch.ones(self.config.n_embd, dtype=self.dtype, device=self.device)
        self._ln_f = cast(Norm, norm_of(model.transformer["ln_f"], ones, self.config.final_scale))
        self._ln_e = norm_of(model.transformer["ln_e"], ones) if self.config.embedding_norm else None

    @staticmethod
    def check(config: ModelConfig) -> None:
        """Raise NanoinferError if a model has what no kernel does."""
        missing = ["latent attention"] * (config.latent is not None)
        missing += ["per-layer embeddings"] * bool(config.per_layer_dim)
        if config.activation not in ACTIVATIONS and not all(config.layer(i).experts for i in range(config.n_layer)):
            missing.append(f"activation={config.activation}")
        missing += ["experts without a gate"] * (config.experts is not None and not config.gated_mlp)
        missing += ["layers without an MLP"] * any(not kind.mlp for kind in config.layers)
        missing += ["attention beside a state"] * any(kind.beside for kind in config.layers)
        if missing:
            raise NanoinferError(f"engine triton has no kernel for {', '.join(missing)}: use engine=cuda_graph")

    # The step --------------------------------------------------------------------------------------------

    def _compute(self, inputs: StepInputs, shape: Bucket, sample: SampleSlots | None) -> StepOutput:
        R, n, C = shape.rows, shape.tokens, self.config.n_embd
        if R * n > self._fused_tokens:
            return super()._compute(inputs, shape, sample)
        x = torch.empty(R * n, C, device=self.device)
        pos = torch.empty(R, n, dtype=torch.int64, device=self.device)
        begin(
            inputs.given, inputs.start, inputs.count, inputs.slots, self._last, self._wte, self._wpe,
            self.limits.block_size, pos, x, self.config.embedding_scale,
        )  # fmt: skip
        if self._ln_e is not None:
            layer_norm(x, self._ln_e, x)
        self._run_layers(x, pos, inputs, shape)
        norm, hidden = self._ln_f, x
        if sample is None or R * n > 1:  # one row: the head normalises it
            hidden = torch.empty(R * n if sample is None else R, C, dtype=self.dtype, device=self.device)
            layer_norm(x, norm, hidden, None if sample is None else inputs.count)
        if sample is None and n > HEAD_TOKENS:
            return StepOutput(hidden.view(R, n, C), None, None)
        logits = self._head(x, norm) if R * n == 1 else self._head(hidden)
        if sample is None:
            return StepOutput(hidden.view(R, n, C), logits, None)
        return StepOutput(hidden, None, sample(logits, inputs.sampler_slots, inputs.wanted, self._last, inputs.slots))

    def _run_layers(self, x: Tensor, pos: Tensor, inputs: StepInputs, shape: Bucket) -> None:
        """Run all layers on the residual stream x, (M, C) float32, in place. pos: (R, n)."""
        rotations = self.model.rotations(pos, torch.float32)
        for index, layer in enumerate(self._layers):
            block, rotation = layer.block, None if layer.rotary is None else rotations[layer.rotary]
            if layer.kind.recurrent:
                y = self._recurrent(index, layer, x, inputs, shape)
            else:
                places = Places(self._cache.k[index], self._cache.v[index], inputs.slots, pos)
                q, y = (self._empty(len(x), layer.config.attn_dim) for _ in range(2))
                gate = self._project(layer, x, q, places, rotation)
                attention(q, places, shape.context, y, scores=layer.scores)
                if gate is not None:
                    y.mul_(gate.sigmoid())
            hidden = self._begin_mlp(layer, x) if block.parallel else None  # of x before attention is added to it
            if layer.kind.recurrent:
                self._add_to(x, y, layer.post_1)
            else:
                attn_proj = layer.weights["attn.c_proj"]
                self._add(x, y, attn_proj, block.attn.c_proj.bias, layer.attn_sub, layer.post_1)
            hidden = self._begin_mlp(layer, x) if hidden is None else hidden
            if layer.experts:
                self._add_to(x, hidden, layer.post_2)
            else:
                mlp_proj = layer.weights["mlp.c_proj"]
                self._add(x, hidden, mlp_proj, cast(MLP, block.mlp).c_proj.bias, layer.mlp_sub, layer.post_2)
            if block.after is not None and (scale := block.after.scale) is not None:
                x.mul_(scale)

    def _recurrent(self, index: int, layer: Layer, x: Tensor, inputs: StepInputs, shape: Bucket) -> Tensor:
        """Return the output, (M, C), of a recurrent layer: PyTorch's module, whose matrix products are kernels."""
        if layer.ln_1 is not None:
            normed = self._empty(*x.shape)
            layer_norm(x, layer.ln_1, normed)
            x = normed
        cell = cast(Recurrent, layer.block.attn)
        y = cell(x.view(shape.rows, shape.tokens, -1).to(self.dtype), partial(self._recur, inputs, index, cell))
        return cast(Tensor, y).flatten(0, 1)

    def _project(self, layer: Layer, x: Tensor, q: Tensor, places: Places, rotation: Rotation | None) -> Tensor | None:
        """Write a layer's queries to q, (M, H * D), its keys and values to the cache; return its gate, (M, H * D)."""
        weight, attn = layer.weights["attn.c_attn"], cast(Attention | SharedAttention, layer.block.attn)
        x, norm = self._input(x, layer.ln_1)
        if layer.stores:
            product(x, weight, q, norm, Epilogue(attn.c_attn.bias, store=places))
            return None
        qkv, gate = self._empty(len(x), weight.num_outputs), None
        product(x, weight, qkv, norm, Epilogue(attn.c_attn.bias))
        if self.config.attention_gate:
            qkv, gate = qkv.tensor_split((weight.num_outputs - q.shape[1],), 1)
            qkv = qkv.contiguous()
        if attn.qk_norm == "whole":
            if layer.kind.keys_as_values:  # as they are before their norm
                qkv = torch.cat((qkv, qkv[:, attn.widths[0] :]), 1)
            start = 0
            for name, width in zip(("q_norm", "k_norm"), attn.widths, strict=False):
                part = qkv[:, start : start + width]
                part.copy_(attn.get_submodule(name)(part))
                start += width
        store_heads(qkv, q, places, layer.heads, rotation, layer.value_eps)
        return gate

    def _begin_mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the hidden layer of the MLP, (M, mlp_dim); of a mixture of experts, its output, (M, C)."""
        norm = layer.ln_2
        if norm is not None and (layer.experts or (self.config.gated_mlp and len(x) > 1)):
            normed = self._empty(*x.shape)  # once for both products
            layer_norm(x, norm, normed)
            x, norm = normed, None
        if layer.experts:
            return cast(ExpertMLP, layer.block.mlp)(x.to(self.dtype))  # type: ignore[no-any-return]
        x, norm = self._input(x, norm)
        h = self._empty(len(x), layer.config.mlp_dim)
        mlp, c_fc = cast(MLP, layer.block.mlp), layer.weights["mlp.c_fc"]
        if not self.config.gated_mlp:
            product(x, c_fc, h, norm, Epilogue(mlp.c_fc.bias, self._activation))
            return h
        gate = cast(GatedMLP, mlp).c_gate
        product(x, layer.weights["mlp.c_gate"], h, norm, Epilogue(gate.bias, self._activation))
        product(x, c_fc, h, norm, Epilogue(mlp.c_fc.bias, residual=h, gates=True))
        return h

    def _input(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return the inputs of a product for x, (M, K), and its norm if the product is to apply it."""
        if not self.config.rounded_inputs:
            return x, norm
        if norm is not None:  # a row is rounded by its largest value after the norm
            normed = self._empty(*x.shape)
            layer_norm(x, norm, normed)
            x = normed
        return rounded(x), None

    def _add(
        self, x: Tensor, y: Tensor, weight: Weight, bias: Tensor | None, sub: Norm | None, post: Norm | None
    ) -> None:
        """Add the norm `post` of a product of the norm `sub` of y to the residual stream x, (M, C)."""
        if sub is not None:
            layer_norm(y, sub, y)
        y, _ = self._input(y, None)
        if post is None:
            product(y, weight, x, None, Epilogue(bias, residual=x, scale=self._scale))
        else:
            out = torch.empty_like(x)
            product(y, weight, out, None, Epilogue(bias))
            self._add_to(x, out, post)

    def _add_to(self, x: Tensor, y: Tensor, post: Norm | None) -> None:
        """Add the norm of y to the residual stream x, (M, C)."""
        if post is not None:
            normed = torch.empty_like(x)
            layer_norm(y.contiguous(), post, normed)
            y = normed
        x.add_(y, alpha=self._scale)

    def _head(self, hidden: Tensor, norm: Norm | None = None) -> Tensor:
        """Return the logits, (M, V) float32, of hidden states, (M, C). norm: applied to them first."""
        if len(hidden) > self._fused_tokens:
            return super()._head(hidden)
        logits = torch.empty(len(hidden), self.config.vocab_size, device=self.device)
        if len(hidden) > 0:
            with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
                product(hidden.contiguous(), self._head_weight, logits, norm, Epilogue(self.model.lm_head.bias))
        return logits if self.config.logits_softcap is None else soft_cap(logits, self.config.logits_softcap)

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device)
