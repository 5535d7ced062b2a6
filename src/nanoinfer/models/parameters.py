"""Names and shapes of a model's parameters, and their random initialization. This module does not import PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.utils.arrays import HostTensor

LAYER = re.compile(r"transformer\.h\.([0-9]{1,9})\.")
"""Beginning of the name of a layer's parameter; the group is the layer's index."""


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name, in the order of `GPT.named_parameters`. A tied head has no entry.

    A matrix is (out, in), an embedding (rows, n_embd).
    """
    C, F, D = config.n_embd, config.mlp_dim, config.head_dim
    found: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (config.vocab_size, C)}

    def linear(name: str, out: int, inputs: int, part: str) -> None:
        found[f"{name}.weight"] = (out, inputs)
        if part in config.biases:
            found[f"{name}.bias"] = (out,)

    def norm(name: str, width: int = C) -> None:
        if config.norm_weight != "none":
            found[f"{name}.weight"] = (width,)
        if "norm" in config.biases:
            found[f"{name}.bias"] = (width,)

    if config.learned_positions:
        found["transformer.wpe.weight"] = (config.block_size, C)
    if config.embedding_norm:
        norm("transformer.ln_e")
    for layer in range(config.n_layer):
        h = f"transformer.h.{layer}"
        if "ln_1" in config.block_norms:
            norm(f"{h}.ln_1")
        linear(f"{h}.attn.c_attn", sum(config.attn_parts), C, "qkv")
        if (latent := config.latent) is not None:
            if latent.query_rank:
                norm(f"{h}.attn.q_norm", latent.query_rank)
                found[f"{h}.attn.q_b.weight"] = (config.n_head * latent.query_dim, latent.query_rank)
            norm(f"{h}.attn.kv_norm", latent.rank)
            found[f"{h}.attn.k_b.weight"] = (config.n_head * latent.rank, latent.plain_dim)
            found[f"{h}.attn.v_b.weight"] = (config.n_head * latent.value_dim, latent.rank)
        width = config.attn_dim if latent is None else config.n_head * latent.value_dim
        linear(f"{h}.attn.c_proj", C, width, "proj")
        if config.qk_norm != "none":
            norm(f"{h}.attn.q_norm", D if config.qk_norm == "head" else config.attn_dim)
            norm(f"{h}.attn.k_norm", D if config.qk_norm == "head" else config.kv_dim)
        if "post_1" in config.block_norms:
            norm(f"{h}.post_1")
        if "ln_2" in config.block_norms:
            norm(f"{h}.ln_2")
        if config.layer(layer).experts:
            found.update((f"{h}.mlp.{part}", shape) for part, shape in _expert_shapes(config))
        else:
            if config.gated_mlp:
                linear(f"{h}.mlp.c_gate", F, C, "mlp")
            linear(f"{h}.mlp.c_fc", F, C, "mlp")
            linear(f"{h}.mlp.c_proj", C, F, "mlp")
        if "post_2" in config.block_norms:
            norm(f"{h}.post_2")
    norm("transformer.ln_f")
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, C)
        if config.head_bias:
            found["lm_head.bias"] = (config.vocab_size,)
    return found


def _expert_shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parameters of a mixture of experts. Rows of expert e follow those of expert e - 1."""
    C, experts = config.n_embd, config.experts
    assert experts is not None
    E, F, S = experts.count, experts.width, experts.shared_width
    found: list[tuple[str, tuple[int, ...]]] = [
        ("router.weight", (E, C)),
        ("experts.c_gate.weight", (E * F, C)),
        ("experts.c_fc.weight", (E * F, C)),
        ("experts.c_proj.weight", (E * C, F)),
    ]
    if S:
        found += [("shared.c_gate.weight", (S, C)), ("shared.c_fc.weight", (S, C)), ("shared.c_proj.weight", (C, S))]
    if experts.shared_gate:
        found.append(("shared_gate.weight", (1, C)))
    if experts.correction:
        found.insert(1, ("correction.bias", (E,)))
    return found


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(int(np.prod(shape)) for shape in shapes(config).values())


def initialize(config: ModelConfig, seed: int) -> Iterator[tuple[str, HostTensor]]:
    """Yield the parameters of an untrained model in float32. A parameter depends on the seed and its name alone."""
    for name, shape in shapes(config).items():
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
        return np.full(shape, 1.0 if name.endswith("weight") else 0.0, dtype=np.float32)
    std = 0.02 * ((2 * n_layer) ** -0.5 if "c_proj" in name else 1.0)
    generator = np.random.Generator(np.random.SFC64([seed, *name.encode()]))
    values: NDArray[np.float32] = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return values
