"""Conversion between weights and the reference model in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.checkpoints.weights import Weights
from nanoinfer.models.parameters import CORRECTION, SHARED, initial
from nanoinfer.models.transformer import Transformer
from nanoinfer.utils.arrays import HostTensor


def load_gpt(weights: Weights, device: torch.device | str = "cpu", owner: Transformer | None = None) -> Transformer:
    """Return a model in eval mode with these weights on a device, in their dtype. Strides of the tensors are kept.

    The embedding and the output head are those of `owner`, if it is given.
    """
    dtype = torch_dtype(weights.dtype)
    with torch.device("meta"):  # names and shapes, but no memory for weights
        model = Transformer(weights.config)
    state = {
        name: to_torch(tensor).to(device, torch.float32 if name.endswith(CORRECTION) else dtype)
        for name, tensor in weights.read()
    }
    if owner is not None:
        state |= {name: p for name, p in owner.named_parameters() if name in SHARED}
    if weights.config.tie_word_embeddings:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def init_weights(module: nn.Module, n_layer: int, seed: int) -> None:
    """Initialize the parameters of a network of `n_layer` layers in place; see `parameters.initial`."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.from_numpy(initial(name, tuple(p.shape), n_layer, seed)))


def weights_of(gpt: Transformer) -> Weights:
    """Return a model's weights. They share the memory of a model on the CPU."""
    dtype = str(gpt.lm_head.weight.dtype).removeprefix("torch.")
    return Weights(gpt.config, dtype, lambda: ((name, from_torch(p)) for name, p in gpt.named_parameters()))


def torch_dtype(name: str) -> torch.dtype:
    """Return PyTorch's dtype for a name: "float32" -> torch.float32."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def to_torch(tensor: HostTensor) -> Tensor:
    """Return a tensor with the same memory."""
    tensor = tensor.dense()
    if tensor.dtype == "bfloat16":  # PyTorch's uint16 has no view as bfloat16 before 2.3
        return torch.from_numpy(tensor.values.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(tensor.values)


def from_torch(tensor: Tensor) -> HostTensor:
    """Return a host tensor with the same memory, or a copy from a GPU."""
    tensor, dtype = tensor.detach().cpu(), str(tensor.dtype).removeprefix("torch.")
    if dtype == "bfloat16":
        return HostTensor(tensor.view(torch.int16).numpy().view("uint16"), dtype)
    return HostTensor(tensor.numpy(), dtype)
