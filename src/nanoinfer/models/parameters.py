"""Names and shapes of a model's parameters, and their random initialization. This module does not import PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import Latent, ModelConfig
from nanoinfer.utils.arrays import HostTensor

LAYER = re.compile(r"transformer\.h\.([0-9]{1,9})\.")
"""Beginning of the name of a layer's parameter; the group is the layer's index."""
CORRECTION = "correction.bias"
"""End of the name of what is added to scores where experts are chosen. It stays in float32, as its values are close."""
SHARED = ("transformer.wte.weight", "lm_head.weight", "lm_head.bias")
"""What a block that predicts a further token has of its model: the embedding and the output head."""
OF_ASSISTANT = "assistant."
"""Beginning of the names of what follows an assistant's layers; no engine has it (speculative/assistant.py)."""
Shapes = dict[str, tuple[int, ...]]


def shapes(config: ModelConfig) -> Shapes:
    """Return the shape of each parameter by its name, in the order of `named_parameters`. A tied head has no entry.

    A matrix is (out, in), an embedding (rows, n_embd). The table of per-layer embeddings has a row for each token and
    layer, those of a token one after the other.
    """
    C, P = config.n_embd, config.per_layer_dim
    parameters: Shapes = {"transformer.wte.weight": (config.vocab_size, C)}
    if config.learned_positions:
        parameters["transformer.wpe.weight"] = (config.block_size, C)
    if config.embedding_norm:
        parameters |= _norm(config, "transformer.ln_e", C)
    if P:
        parameters["transformer.per_layer.wte.weight"] = (config.vocab_size * config.n_layer, P)
        parameters["transformer.per_layer.c_in.weight"] = (config.n_layer * P, C)
        parameters |= _norm(config, "transformer.per_layer.norm", P)
    if config.mtp:
        for norm in ("norm_e", "norm_h") if config.backbone is None else ():
            parameters |= _norm(config, f"transformer.mtp.{norm}", C)
        parameters["transformer.mtp.c_in.weight"] = (C, 2 * config.source_dim)
    if (backbone := config.backbone) is not None:
        parameters[f"{OF_ASSISTANT}c_out.weight"] = (backbone.width, C)
        if backbone.groups:
            parameters[f"{OF_ASSISTANT}groups.weight"] = (backbone.groups, C)
            parameters[f"{OF_ASSISTANT}order"] = (config.vocab_size,)
    for layer in range(config.n_layer):
        h = f"transformer.h.{layer}"
        norms = {part: _norm(config, f"{h}.{part}", C) for part in config.block_norms(config.layer(layer))}
        parameters |= norms.get("ln_1", {}) | _attention_shapes(config, layer, f"{h}.attn") | norms.get("post_1", {})
        if config.layer(layer).mlp:
            parameters |= norms.get("ln_2", {}) | _mlp_shapes(config, layer, f"{h}.mlp") | norms.get("post_2", {})
        if config.layer(layer).scaled:
            parameters[f"{h}.after.scale"] = (1,)
        if P:
            parameters |= {f"{h}.after.c_gate.weight": (P, C), f"{h}.after.c_proj.weight": (C, P)}
            parameters |= _norm(config, f"{h}.after.post", C)
    parameters |= _norm(config, "transformer.ln_f", C)
    if not config.tie_word_embeddings:
        parameters["lm_head.weight"] = (config.vocab_size, C)
        if config.head_bias:
            parameters["lm_head.bias"] = (config.vocab_size,)
    return parameters


def _linear(config: ModelConfig, name: str, out: int, inputs: int, part: str) -> Shapes:
    """Return the parameters of a linear layer in one of the places of BIASES."""
    bias: Shapes = {f"{name}.bias": (out,)} if part in config.biases else {}
    return {f"{name}.weight": (out, inputs), **bias}


def _norm(config: ModelConfig, name: str, width: int) -> Shapes:
    """Return the parameters of a norm: none, one or two."""
    has = {"weight": config.norm_weight != "none", "bias": "norm" in config.biases}
    return {f"{name}.{part}": (width,) for part, there in has.items() if there}


def _attention_shapes(config: ModelConfig, layer: int, name: str) -> Shapes:
    """Return the parameters of a layer's attention, whose names begin with `name`."""
    if config.layer(layer).recurrent:
        return _recurrent_shapes(config, layer, name)
    at, widths = config.at(layer), config.qkv_widths(layer)
    parameters: Shapes = {f"{name}.sinks": (at.n_head,)} if config.sinks else {}
    parameters |= _linear(config, f"{name}.c_attn", sum(widths), config.n_embd, "qkv")
    if (latent := config.latent) is not None:
        return parameters | _latent_shapes(config, latent, name)
    parameters |= _linear(config, f"{name}.c_proj", config.n_embd, at.attn_dim, "proj")
    for part, width in zip(("q_norm", "k_norm"), widths, strict=False):
        if config.qk_norm == "heads":
            parameters[f"{name}.{part}.weight"] = (width,)
        elif config.qk_norm != "none":
            parameters |= _norm(config, f"{name}.{part}", at.head_dim if config.qk_norm == "head" else width)
    return parameters | (_norm(config, f"{name}.sub_norm", at.attn_dim) if config.sub_norms else {})


def _recurrent_shapes(config: ModelConfig, layer: int, name: str) -> Shapes:
    """Return the parameters of a recurrent layer, whose names begin with `name`."""
    state = config.recurrence
    assert state is not None
    vectors: Shapes = {"conv": (state.num_channels, state.taps)}
    if state.bias:
        vectors["conv_bias"] = (state.num_channels,)
    if state.rule != "conv":
        vectors |= dict.fromkeys(("a_log", "dt_bias"), (state.num_heads,))
    if state.rule == "mamba2":
        vectors["skip_scale"] = (state.num_heads,)
    if state.rule != "conv" and state.norm_groups:
        vectors["norm_scale"] = (state.value_dim if state.rule == "delta" else state.inner_dim,)
    parameters = {f"{name}.{part}": shape for part, shape in vectors.items()}
    matrices = {"c_attn": (sum(config.qkv_widths(layer)), config.n_embd), "c_proj": (config.n_embd, state.inner_dim)}
    if config.layer(layer).beside:
        matrices |= {"c_proj": (config.n_embd, config.attn_dim), "state_proj": matrices["c_proj"]}
    for part, shape in matrices.items():
        parameters[f"{name}.{part}.weight"] = shape
        if state.projection_bias:
            parameters[f"{name}.{part}.bias"] = shape[:1]
    return parameters


def _latent_shapes(config: ModelConfig, latent: Latent, name: str) -> Shapes:
    """Return the parameters of latent attention but c_attn's."""
    H, parameters = config.n_head, Shapes()
    if latent.query_rank:
        parameters |= _norm(config, f"{name}.q_norm", latent.query_rank)
        parameters[f"{name}.q_b.weight"] = (H * latent.query_dim, latent.query_rank)
    parameters |= _norm(config, f"{name}.kv_norm", latent.rank)
    parameters[f"{name}.k_b.weight"] = (H * latent.rank, latent.plain_dim)
    parameters[f"{name}.v_b.weight"] = (H * latent.value_dim, latent.rank)
    return parameters | _linear(config, f"{name}.c_proj", config.n_embd, H * latent.value_dim, "proj")


def _mlp_shapes(config: ModelConfig, layer: int, name: str) -> Shapes:
    """Return the parameters of a layer's MLP or mixture of experts, whose names begin with `name`."""
    if config.layer(layer).experts:
        return {f"{name}.{part}": shape for part, shape in _expert_shapes(config, config.at(layer).mlp_dim)}
    C, width, parameters = config.n_embd, config.at(layer).mlp_dim, Shapes()
    for part in config.mlp_inputs:
        parameters |= _linear(config, f"{name}.{part}", width, C, "mlp")
    parameters |= _linear(config, f"{name}.c_proj", C, width, "mlp")
    return parameters | (_norm(config, f"{name}.sub_norm", width) if config.sub_norms else {})


def _expert_shapes(config: ModelConfig, mlp_dim: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parameters of a mixture of experts. Rows of expert e follow those of expert e - 1.

    mlp_dim is the width of the layer's MLP, which is there if the experts stand beside it.
    """
    C, experts = config.n_embd, config.experts
    assert experts is not None
    E, F, S = experts.count, experts.width, mlp_dim if experts.beside else experts.shared_width
    parameters: list[tuple[str, tuple[int, ...]]] = []
    if experts.beside:
        parameters += [("router_scale", (C,)), ("expert_scale", (E,))]
    sizes = {"router": (E, C)} | {f"experts.{part}": (E * F, C) for part in config.mlp_inputs}
    sizes["experts.c_proj"] = (E * C, F)
    for name, shape in sizes.items():
        parameters.append((f"{name}.weight", shape))
        if experts.bias:
            parameters.append((f"{name}.bias", shape[:1]))
        if name == "router" and experts.correction:
            parameters.append(("correction.bias", (E,)))
    if S:
        shared = dict.fromkeys(config.mlp_inputs, (S, C)) | {"c_proj": (C, S)}
        parameters += [(f"shared.{part}.weight", shape) for part, shape in shared.items()]
    if experts.shared_gate:
        parameters.append(("shared_gate.weight", (1, C)))
    for norm in ("ln_1", "post_1", "ln_2", "post_2") if experts.beside else ():
        parameters += _norm(config, norm, C).items()
    return parameters


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(int(np.prod(shape)) for shape in shapes(config).values())


def initialize(config: ModelConfig, seed: int, without: tuple[str, ...] = ()) -> Iterator[tuple[str, HostTensor]]:
    """Yield the parameters of an untrained model in float32. A parameter depends on the seed and its name alone."""
    for name, shape in shapes(config).items():
        if name in without:
            continue
        values = initial(name, shape, config.n_layer, seed)
        if len(shape) == 1 and name.endswith(".weight") and config.norm_weight == "one_plus":
            values -= 1
        yield name, HostTensor(values, "float32")


def initial(name: str, shape: tuple[int, ...], n_layer: int, seed: int) -> NDArray[np.float32]:
    """Return the initial values of one parameter of a network of `n_layer` layers, as GPT-2's (Radford et al. 2019).

    Weights are normal(0, 0.02). 2 * n_layer projections are added to the residual; their weights are scaled by
    (2 * n_layer)**-0.5, which keeps its variance. Biases are 0, weights of layer norms 1.
    """
    if len(shape) < 2:
        return np.full(shape, 1.0 if name.endswith(("weight", "scale")) else 0.0, dtype=np.float32)
    std = 0.02 * ((2 * n_layer) ** -0.5 if "c_proj" in name else 1.0)
    generator = np.random.Generator(np.random.SFC64([seed, *name.encode()]))
    values: NDArray[np.float32] = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return values
