"""Widening by duplication: build a larger model that computes the same function.

Speed can be measured with random weights, but acceptance rates and the effect of quantization depend on trained
weights, and no trained model of GPT-2's size ships with this package. Widening gives a small trained model the size and
the cost of a GPT-2 without changing its function (Net2Net, Chen et al. 2016, arXiv:1511.05641).

    width    every value of the residual stream is repeated r times: x -> (x, x, ..., x). The mean and variance in a
             layer norm do not change. A linear layer sums r copies of each input, so its weights are divided by r.
    heads    whole attention heads are copied, so head_dim and the attention scale do not change. MLP units are copied.
    head     an untied output head is divided by r as well. A tied head is also the embedding and cannot be divided;
             the weight and bias of ln_f are divided by r instead, which gives the same logits.
    depth    the output projections (c_proj, weight and bias) of an added layer are zero, so it adds nothing to the
             residual. Its other weights are copied from a layer of the model, so that it costs as much as one.

In exact arithmetic the logits are equal; in float32 they differ by rounding. Figures that use a widened model must say
so: it is no more capable than its source. All copies of a weight are quantized alike, so quantization errors are the
source's and say nothing about a trained model of the larger size.
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
    """Return the config of a model after widening.

    widened(256 wide, 4 heads, 6 layers; n_embd=768, n_layer=12)  ->  768 wide, 12 heads, 12 layers

    Raises:
        NanoinferError: n_embd is not a multiple of the model's, or n_layer is less than the model's.
    """
    require_int("n_embd", n_embd, 1, 2**31 - 1)
    require_int("n_layer", n_layer, 1, 2**31 - 1)
    if n_embd % config.n_embd:
        raise NanoinferError(
            f"n_embd={n_embd} is not a multiple of the model's {config.n_embd}: widening copies whole channels"
        )
    if n_layer < config.n_layer:
        raise NanoinferError(f"n_layer={n_layer} is less than the model's {config.n_layer}: widening only adds layers")
    r = n_embd // config.n_embd
    inner = None if config.n_inner is None else r * config.n_inner
    return replace(config, n_embd=n_embd, n_layer=n_layer, n_head=r * config.n_head, n_inner=inner)


def widen(gpt: GPT, *, n_embd: int, n_layer: int) -> GPT:
    """Return a wider and deeper model that computes the same function.

    Args:
        gpt: the model; not changed. The result shares no memory with it.
        n_embd: the new width, r times the model's; the result has r times the heads and MLP units.
        n_layer: the new depth, at least the model's.

    Returns:
        a model in eval mode, on the device and in the dtype of `gpt`. Dividing by r rounds unless r is a power of two,
        so widen in float32 and convert afterwards.

    Raises:
        NanoinferError: n_embd is not a multiple of the model's, or n_layer is less than the model's.
    """
    return widen_weights(gpt, n_embd=n_embd, n_layer=n_layer).gpt(gpt.lm_head.weight.device)


def widen_weights(gpt: GPT, *, n_embd: int, n_layer: int) -> Weights:
    """Return the weights of `widen`'s model, computed one tensor at a time."""
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
    """Split a name at its layer index: "transformer.h.3.ln_1.bias" -> ("transformer.h.", 3, ".ln_1.bias")."""
    prefix = "transformer.h."
    if not name.startswith(prefix):
        return name, None, ""
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return prefix, int(layer), f".{rest}"


def _copy(name: str, w: Tensor, r: int, *, tied: bool) -> Tensor:
    """Repeat a parameter r times along each widened dimension; divide it by r where r copies are summed."""
    if "ln_" in name:
        return w.repeat(r) / (r if "ln_f" in name and tied else 1)
    if w.dim() == 1:  # a bias; c_attn's is q, k, v concatenated
        return w.view(3, -1).repeat(1, r).view(-1) if "c_attn" in name else w.repeat(r)
    if name.endswith(("wte.weight", "wpe.weight")):  # (V, C), (positions, C)
        return w.repeat(1, r)
    if name == "lm_head.weight":
        return w.repeat(1, r) / r
    if "c_attn" in name:  # (3 C, C)
        return w.view(3, -1, w.shape[1]).repeat(1, r, r).view(r * w.shape[0], -1) / r
    return w.repeat(r, r) / r
