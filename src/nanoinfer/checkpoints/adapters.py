"""LoRA adapters: updates of low rank of a model's matrices (Hu et al. 2021, arXiv 2106.09685), as peft writes them.

    W x   becomes   W x + scale * B (A x)        W: (out, in)   A: (r, in)   B: (out, r)   r: the rank

Covered: the matrices of attention and of MLPs; ranks and scales that differ between matrices; rslora. Refused, in one
line: DoRA, biases, whole modules and embeddings in the adapter, experts, and initializations that change the base.

A file names the matrices as the base's own files do, so the tables of the families (`Recipe`) map them to ours: an
update of one of several matrices that are one here is one of some of its rows, in our order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.huggingface import ADAPTER, MAX_CONFIG_BYTES, read_tensors, text_part
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.base import Family, Recipe, split_name
from nanoinfer.models.parameters import shapes
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.checks import require_float, require_int, show
from nanoinfer.utils.files import escaped, read_object

TARGETS = ("attn.c_attn", "attn.c_proj", "mlp.c_gate", "mlp.c_fc", "mlp.c_proj")
"""The modules of a layer that an adapter may update."""
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_KEY = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED = {
    "use_dora": "DoRA", "modules_to_save": "whole modules in the adapter", "lora_bias": "biases",
    "layer_replication": "replicated layers", "target_parameters": "updates of experts",
    "trainable_token_indices": "trained tokens", "megatron_config": "Megatron's layers",
    "alora_invocation_tokens": "adapters of some tokens",
}  # fmt: skip
"""Fields of adapter_config.json that must be missing or false, and what they would add."""
_SAME_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is."""


@dataclass(frozen=True)
class LowRank:
    """The update of consecutive rows of a matrix: B A x is added to them."""

    a: NDArray[np.float32]
    """(r, in)."""
    b: NDArray[np.float32]
    """(rows, r), times the scale."""
    first: int = 0
    """Index of the first of the rows."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in host memory, checked against its base."""

    updates: Mapping[str, tuple[LowRank, ...]]
    """Our module, "transformer.h.0.attn.c_attn" -> the updates of its matrix, none of which have rows in common."""

    def joined(self, name: str, out: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the updates of a matrix with `out` rows as one: A, (sum of r, in), and B, (out, sum of r)."""
        parts = self.updates[name]
        b, column = np.zeros((out, sum(part.a.shape[0] for part in parts)), np.float32), 0
        for part in parts:
            end = column + part.a.shape[0]
            b[part.first : part.first + len(part.b), column:end] = part.b
            column = end
        return np.concatenate([part.a for part in parts]), b


Updates = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Module, as the base's files name it -> A, (r, in), and B, (out, r), times the scale."""


def read_adapter(path: str | Path, config: ModelConfig, max_rank: int) -> Adapter:
    """Return the adapter in a folder of peft.

    Args:
        path: the folder: adapter_config.json, and adapter_model.safetensors or adapter_model.bin.
        config: of the base.
        max_rank: the greatest rank that is accepted.

    Raises:
        NanoinferError: a file is missing or malformed, the adapter is of another base or has a greater rank, or it
            uses what is not supported.
    """
    folder = Path(path).expanduser()
    with about(escaped(folder)):
        if config.rounded_inputs:
            raise NanoinferError("models whose inputs are rounded take no adapters: merge it into the model")
        if not (folder / ADAPTER).is_file():
            raise NanoinferError(f"is not an adapter: give a folder with {ADAPTER}, as peft writes it")
        file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if file is None:
            raise NanoinferError(f"has no {' or '.join(_FILES)}")
        scale_of = _scales(read_object(folder / ADAPTER, MAX_CONFIG_BYTES, "the config of an adapter"), max_rank)
        return place(_pairs(read_tensors(file), config, scale_of), config, FAMILIES[config.family])


def _scales(raw: dict[str, Any], max_rank: int) -> Callable[[str, int], float]:
    """Return a function (module, rank of its A) -> scale. Raises NanoinferError for what is not supported."""
    if (kind := raw.get("peft_type")) != "LORA":
        raise NanoinferError(f"peft_type={show(kind)} is not supported: only LORA is")
    for name, what in _REFUSED.items():
        if value := raw.get(name):
            raise NanoinferError(f"{name}={show(value)}: {what} are not supported: merge the adapter by peft")
    for name, accepted in (("bias", ("none", None)), ("init_lora_weights", (*_SAME_BASE, None))):
        if (value := raw.get(name)) not in accepted:
            raise NanoinferError(f"{name}={show(value)} is not supported: merge the adapter by peft")
    ranks, alphas = (_pattern(raw, name) for name in ("rank_pattern", "alpha_pattern"))
    rank, alpha, root = raw.get("r"), raw.get("lora_alpha"), bool(raw.get("use_rslora"))

    def scale(module: str, found: int) -> float:
        r = require_int("r", ranks(module, rank), 1)
        if r > max_rank:
            raise NanoinferError(f"module {module}: rank {r} is more than max_lora_rank={max_rank}: raise it")
        if r != found:
            raise NanoinferError(f"module {module}: lora_A has rank {found}, the config says {r}")
        return require_float("lora_alpha", alphas(module, alpha), -1e6, 1e6) / (math.sqrt(r) if root else r)

    return scale


def _pattern(raw: dict[str, Any], field: str) -> Callable[[str, Any], Any]:
    """Return a function (module, default) -> the value of the first key that the module's name ends with."""
    values = raw.get(field) or {}
    if not isinstance(values, dict) or not all(re.fullmatch(r"[\w.]+", key) for key in values):
        raise NanoinferError(f"{field}={show(values)} is not an object whose keys are names of modules")
    return lambda module, default: next(
        (value for key, value in values.items() if f".{module}".endswith(f".{key}")), default
    )


def _pairs(tensors: Mapping[str, StoredTensor], config: ModelConfig, scale_of: Callable[[str, int], float]) -> Updates:
    """Return the updates in the tensors of a folder."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in text_part({key.removeprefix("base_model.model."): t for key, t in tensors.items()}).items():
        if (match := _KEY.fullmatch(key)) is None or len(tensor.shape) != 2:
            raise NanoinferError(f"tensor {show(key)} is not lora_A or lora_B of a matrix: merge the adapter by peft")
        found.setdefault(match[1], {})[match[2]] = tensor
    start = FAMILIES[config.family].layer.partition(".")[0] + "."
    prefix = "" if any(module.startswith(start) for module in found) else start  # models without a head leave it out
    updates: Updates = {}
    for module, pair in found.items():
        if len(pair) != 2:
            raise NanoinferError(f"module {show(module)} has lora_{next(iter(pair))} alone")
        a, b = (pair[letter].read().to("float32").dense().values for letter in "AB")
        updates[prefix + module] = a, b * np.float32(scale_of(module, len(a)))
    return updates


def place(updates: Updates, config: ModelConfig, family: Family) -> Adapter:
    """Return the adapter that updates the matrices of a base.

    Args:
        updates: by the modules' names in the files of the family; they are removed.
        config: of the base.
        family: how the files name and order the base's tensors.

    Raises:
        NanoinferError: a module is not in the base, or has other sizes there, or cannot be updated.
    """
    _split_fused(updates, family)
    placed: dict[str, tuple[LowRank, ...]] = {}
    for name, shape in shapes(config).items():
        layer, part, suffix = split_name(name)
        if layer is None or part not in TARGETS or suffix != ".weight":
            continue
        recipe = family.recipe(config, name, shape[0])
        if parts := _parts(recipe, updates, shape):
            placed[name.removesuffix(suffix)] = parts
    unread = {name.removesuffix(".weight") for name in family.unread(config)}
    if left := sorted(updates.keys() - unread):
        raise NanoinferError(
            f"{len(left)} of its modules, such as {show(left[0])}, are no matrices of attention or of MLPs in the base"
        )
    if not placed:
        raise NanoinferError("the adapter has no updates of the base")
    return Adapter(placed)


def _split_fused(updates: Updates, family: Family) -> None:
    """Replace updates of tensors that the family names by their parts: these have A in common, and rows of B."""
    for fused, parts in family.fused.items():
        for module in [module for module in updates if module.endswith(f".{fused}") and "{}" not in "".join(parts)]:
            a, b = updates.pop(module)
            for part, rows in zip(parts, np.array_split(b, len(parts)), strict=True):
                updates[module.removesuffix(fused) + part] = a, rows


def _parts(recipe: Recipe, updates: Updates, shape: tuple[int, ...]) -> tuple[LowRank, ...]:
    """Return the updates of one of our matrices, (out, in), which are removed from those of the file."""
    parts, start = [], 0
    order = recipe.order() if any(name.removesuffix(".weight") in updates for name, _ in recipe.parts) else None
    places = np.arange(shape[0]) if order is None else order  # in the joined matrices of the file, of our rows
    for name, rows in recipe.parts:
        if (update := updates.pop(module := name.removesuffix(".weight"), None)) is not None:
            (a, b), inputs = update, shape[1]
            if (a.shape[1], b.shape) != (inputs, (rows, len(a))):
                raise NanoinferError(
                    f"module {show(module)}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, but the base's"
                    f" matrix is {[rows, inputs]}: is it an adapter of another base?"
                )
            own = np.flatnonzero((places >= start) & (places < start + rows))
            assert own[-1] - own[0] == len(own) - 1, name  # an order permutes rows within heads
            parts.append(LowRank(np.ascontiguousarray(a), b[places[own] - start], int(own[0])))
        start += rows
    return tuple(parts)
