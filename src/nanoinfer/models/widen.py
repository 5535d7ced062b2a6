"""Widening by duplication: a larger model that says exactly the same words.

Speed can be measured on random weights; what depends on the text (acceptance rates, the quality of quantized
weights) cannot, and a trained model of GPT-2's size does not ship with this package. So a small trained model is
made as large and as slow as a GPT-2 without a change to its function (Net2Net, Chen et al. 2016, arXiv:1511.05641).

    width    every value of the residual stream is there r times: x -> (x, x, ..., x). Layer norm's mean and
             variance do not change. A linear layer reads r copies of each input, so its weights are divided by r.
    heads    whole heads are copied: head_dim and with it the attention's scale stay. So are the MLP's units.
    head     an untied output head is divided by r as well. A tied one cannot be: it is the embedding too. There
             ln_f's weight and bias are divided by r instead, which is the same sum.
    depth    layers are added whose two output projections (c_proj, weight and bias) are zero: they add nothing
             to the residual. The rest of each is a copy of one of the model's layers, so the work is real.

In real arithmetic the logits are the same; in float32 they differ by rounding. A widened model has learned no more
than its source: call it what it is wherever a figure uses it. Copies are rounded alike, so quantization does to it
what it does to the source, and it says nothing about how a trained model of that size takes quantization.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.checks import require_int
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.weights import Weights, empty_gpt

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.models.gpt import GPT


def widened(config: ModelConfig, *, n_embd: int, n_layer: int) -> ModelConfig:
    """Return the shape of a model after widening.

    widened(256 wide, 4 heads, 6 layers; n_embd=768, n_layer=12)  ->  768 wide, 12 heads, 12 layers

    Raises:
        NanoinferError: n_embd is not a multiple of the model's, or n_layer is below the model's.
    """
    require_int("n_embd", n_embd, 1, 2**31 - 1)
    require_int("n_layer", n_layer, 1, 2**31 - 1)
    if n_embd % config.n_embd:
        raise NanoinferError(
            f"n_embd={n_embd} is not a multiple of the model's {config.n_embd}: widening copies whole channels"
        )
    if n_layer < config.n_layer:
        raise NanoinferError(f"n_layer={n_layer} is below the model's {config.n_layer}: widening only adds layers")
    r = n_embd // config.n_embd
    inner = None if config.n_inner is None else r * config.n_inner
    return replace(config, n_embd=n_embd, n_layer=n_layer, n_head=r * config.n_head, n_inner=inner)


def widen(gpt: GPT, *, n_embd: int, n_layer: int) -> GPT:
    """Return a wider and deeper model with the same function.

    Args:
        gpt: the model; it is not changed, and shares no memory with the result.
        n_embd: the new width, a multiple r of the model's; it has r times the heads and MLP units.
        n_layer: the new depth, the model's or more.

    Returns:
        a model in eval mode, on the device and in the dtype of `gpt`. The division by r rounds unless r is a power
        of two, so widen in float32 and convert afterwards.

    Raises:
        NanoinferError: n_embd is not a multiple of the model's, or n_layer is below the model's.
    """
    return widen_weights(gpt, n_embd=n_embd, n_layer=n_layer).gpt(gpt.lm_head.weight.device)


def widen_weights(gpt: GPT, *, n_embd: int, n_layer: int) -> Weights:
    """Return the weights of `widen`'s model, made one at a time."""
    config = widened(gpt.config, n_embd=n_embd, n_layer=n_layer)
    r, layers = n_embd // gpt.config.n_embd, gpt.config.n_layer
    source = gpt.state_dict()

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, _ in empty_gpt(config).named_parameters():
            prefix, layer, rest = _split(name)
            added = layer is not None and layer >= layers
            origin = source[name if layer is None else f"{prefix}{layer % layers}{rest}"]
            tensor = _copy(name, origin, r, tied=config.tie_word_embeddings)
            yield name, tensor.zero_() if added and ".c_proj." in name else tensor

    return Weights(config, gpt.lm_head.weight.dtype, read)


def _split(name: str) -> tuple[str, int | None, str]:
    """Split off the layer: "transformer.h.3.ln_1.bias" -> ("transformer.h.", 3, ".ln_1.bias"); others have none."""
    prefix = "transformer.h."
    if not name.startswith(prefix):
        return name, None, ""
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return prefix, int(layer), f".{rest}"


def _copy(name: str, w: Tensor, r: int, *, tied: bool) -> Tensor:
    """Return r copies of a parameter along each dimension that grows, divided by r where the sum would grow."""
    if "ln_" in name:
        return w.repeat(r) / (r if "ln_f" in name and tied else 1)
    if w.dim() == 1:  # a bias; that of c_attn is q, k, v one after the other
        return w.view(3, -1).repeat(1, r).view(-1) if "c_attn" in name else w.repeat(r)
    if name.endswith(("wte.weight", "wpe.weight")):  # (V, C), (positions, C)
        return w.repeat(1, r)
    if name == "lm_head.weight":
        return w.repeat(1, r) / r
    if "c_attn" in name:  # (3 C, C)
        return w.view(3, -1, w.shape[1]).repeat(1, r, r).view(r * w.shape[0], -1) / r
    return w.repeat(r, r) / r
