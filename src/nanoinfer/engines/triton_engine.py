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

from math import inf
from typing import cast

import torch
from torch import Tensor, nn

from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import SampleSlots
from nanoinfer.engines.buckets import Bucket
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.graphs import Recorder
from nanoinfer.engines.sequences import DEFAULTS
from nanoinfer.engines.static_shapes import HEAD_TOKENS, StepOutput
from nanoinfer.engines.transfers import StepInputs
from nanoinfer.kernels.triton.attention import attention
from nanoinfer.kernels.triton.products import GELU_ERF, GELU_TANH, Epilogue, Pages, product
from nanoinfer.kernels.triton.quantize import Weight, dense, pack_int4, pack_int8, stack
from nanoinfer.kernels.triton.rows import Norm, layer_norm
from nanoinfer.kernels.triton.step import begin
from nanoinfer.kernels.triton.tiles import FUSED_TOKENS
from nanoinfer.models.gpt import GPT, MLP, LayerNorm

PACK = {None: dense, "int8": pack_int8, "int4": pack_int4}


class TritonEngine(CudaGraphEngine):
    """Runs steps with fused Triton kernels. Other arguments: see `CudaGraphEngine`.

    Args:
        model: quantized weights are removed from it.
        config: graph_memory and quantization are used. Quantization applies to the weights of the layers and to the
            output head, not to the embeddings.

    Raises:
        NanoinferError: the KV cache does not fit in the device's memory.
        ValueError: a weight to be quantized is infinite or NaN.
    """

    def __init__(
        self,
        model: GPT,
        limits: EngineLimits,
        config: EngineConfig = DEFAULTS,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, limits, config, recorder=recorder)
        quantization, pack = config.quantization, PACK[config.quantization]
        self._gelu = GELU_TANH if self.config.activation == "gelu_new" else GELU_ERF
        self._weights: dict[str, Weight] = {}
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            linears = [cast(nn.Linear, block.get_submodule(name)) for block in model.blocks]
            self._weights[name] = whole = stack([pack(linear.weight) for linear in linears])
            for layer, linear in enumerate(linears):  # a view of the packed weights, or empty if quantized
                linear.weight = _frozen(whole.data[layer] if quantization is None else whole.data.new_empty(0))
        tables = [cast(nn.Embedding, model.transformer[name]) for name in ("wte", "wpe")]
        for table in tables:
            table.weight = _frozen(table.weight.contiguous())
        self._wte, self._wpe = (table.weight for table in tables)
        model.tie_weights()
        self._head_weight = pack(model.lm_head.weight)
        self._fused_tokens = FUSED_TOKENS[self.dtype] if quantization is None else inf

    # The step --------------------------------------------------------------------------------------------

    def _compute(self, inputs: StepInputs, shape: Bucket, sample: SampleSlots | None) -> StepOutput:
        R, n, C = shape.rows, shape.tokens, self.config.n_embd
        if R * n > self._fused_tokens:
            return super()._compute(inputs, shape, sample)
        x = torch.empty(R * n, C, device=self.device)
        pos = torch.empty(R, n, dtype=torch.int64, device=self.device)
        begin(
            inputs.given, inputs.start, inputs.count, inputs.slots, self._last, self._wte, self._wpe,
            self.limits.block_size, pos, x,
        )  # fmt: skip
        self._run_layers(x, pos, inputs.slots, shape.context)
        norm, hidden = norm_of(self.model.transformer["ln_f"]), x
        if sample is None or R * n > 1:  # one row: the head normalises it
            hidden = torch.empty(R * n if sample is None else R, C, dtype=self.dtype, device=self.device)
            layer_norm(x, norm, hidden, None if sample is None else inputs.count)
        if sample is None and n > HEAD_TOKENS:
            return StepOutput(hidden.view(R, n, C), None, None)
        logits = self._head(x, norm) if R * n == 1 else self._head(hidden)
        if sample is None:
            return StepOutput(hidden.view(R, n, C), logits, None)
        return StepOutput(hidden, None, sample(logits, inputs.sampler_slots, inputs.wanted, self._last, inputs.slots))

    def _run_layers(self, x: Tensor, pos: Tensor, slots: Tensor, context: int) -> None:
        """Run all layers on the residual stream x, (M, C) float32, in place. pos: (R, n); slots: (R,)."""
        M, C = x.shape
        q, y = (torch.empty(M, C, dtype=self.dtype, device=self.device) for _ in range(2))
        h = torch.empty(M, self.config.mlp_dim, dtype=self.dtype, device=self.device)
        for layer, block in enumerate(self.model.blocks):
            pages = Pages(self._cache.k[layer], self._cache.v[layer], slots[:, None], pos)
            c_attn, attn_proj, c_fc, mlp_proj = (w.layer(layer) for w in self._weights.values())
            attn, mlp = block.attn, cast(MLP, block.mlp)
            product(x, c_attn, q, norm_of(block.ln_1), Epilogue(attn.c_attn.bias, store=pages))
            attention(q, pages, context, y, ahead=c_fc.data)
            product(y, attn_proj, x, None, Epilogue(attn.c_proj.bias, residual=x))
            product(x, c_fc, h, norm_of(block.ln_2), Epilogue(mlp.c_fc.bias, gelu=self._gelu))
            product(h, mlp_proj, x, None, Epilogue(mlp.c_proj.bias, residual=x))

    def _head(self, hidden: Tensor, norm: Norm | None = None) -> Tensor:
        """Return the logits, (M, V) float32, of hidden states, (M, C). norm: applied to them first."""
        if len(hidden) > self._fused_tokens:
            return super()._head(hidden)
        logits = torch.empty(len(hidden), self.config.vocab_size, device=self.device)
        if len(hidden) > 0:
            with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
                product(hidden.contiguous(), self._head_weight, logits, norm)
        return logits


def norm_of(module: nn.Module) -> Norm:
    """Return a layer norm's parameters in the form that the kernels take."""
    assert isinstance(module, LayerNorm)
    assert module.weight is not None
    return Norm(module.weight, module.bias, module.eps)


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
