"""LoRA adapters: updates of low rank of a model's matrices (Hu et al. 2021, arXiv 2106.09685).

    W x   becomes   W x + scale * B (A x)        W: (out, in)   A: (r, in)   B: (out, r)   r: the rank

Covered: folders of peft and GGUF files; the matrices of attention and of MLPs; ranks and scales that differ between
matrices; rslora. Refused, in one line: DoRA, biases, whole modules and embeddings in the adapter, experts, and
initializations that change the base.

A file names the matrices as the base's own files do, so the tables of the families (`Recipe`) map them to ours: an
update of one of several matrices that are one here is one of some of its rows, in our order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.huggingface import ADAPTER, MAX_CONFIG_BYTES, read_tensors, text_part
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped, show
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.base import Family, Recipe, row_factors, split_name
from nanoinfer.models.parameters import shapes
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.arrays import ITEM_BYTES, HostTensor
from nanoinfer.utils.checks import require_float, require_int
from nanoinfer.utils.files import read_object

TARGETS = ("attn.c_attn", "attn.c_proj", "mlp.c_gate", "mlp.c_fc", "mlp.c_proj")
"""The modules of a layer that an adapter may update."""
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_KEY = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_GGUF_KEY = re.compile(r"(.+)\.weight\.lora_([ab])")
_REFUSED = {
    "use_dora": "DoRA layers", "modules_to_save": "whole modules in the adapter", "lora_bias": "biases",
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
    """Return an adapter.

    Args:
        path: a folder of peft, with adapter_config.json and adapter_model.safetensors or adapter_model.bin; or a GGUF
            file that llama.cpp's convert_lora_to_gguf.py has written.
        config: of the base.
        max_rank: the greatest rank that is accepted.

    Raises:
        NanoinferError: a file is missing or malformed, the adapter is of another base or has a greater rank, or it
            uses what is not supported.
    """
    path = Path(path).expanduser()
    with about(escaped(path)):
        if config.rounded_inputs:
            raise NanoinferError("models whose inputs are rounded take no adapters: merge it into the model")
        if path.is_file() and path.name not in _FILES:
            return _read_gguf(path, config, max_rank)
        folder = path.parent if path.is_file() else path
        if not (folder / ADAPTER).is_file():
            raise NanoinferError(f"is not an adapter: give a folder with {ADAPTER}, as peft writes it, or a GGUF file")
        file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
        if file is None:
            raise NanoinferError(f"has no {' or '.join(_FILES)}")
        scale_of = _scales(read_object(folder / ADAPTER, MAX_CONFIG_BYTES, "the config of an adapter"), max_rank)
        tensors = {key.removeprefix("base_model.model."): tensor for key, tensor in read_tensors(file).items()}
        updates, start = _updates(text_part(tensors), _KEY, scale_of), FAMILIES[config.family].layer.partition(".")[0]
        if not any(module.startswith(f"{start}.") for module in updates):  # models without a head leave it out
            updates = {f"{start}.{module}": update for module, update in updates.items()}
        return _of_order(place(updates, config, FAMILIES[config.family]), config, tiled=False)


def _read_gguf(path: Path, config: ModelConfig, max_rank: int) -> Adapter:
    """Return the adapter in a GGUF file, whose rows have llama.cpp's order."""
    from nanoinfer.checkpoints.gguf.architectures import ARCHITECTURES
    from nanoinfer.checkpoints.gguf.file import read_gguf
    from nanoinfer.checkpoints.gguf.model import stored_family

    file = read_gguf(path)
    arch, alpha = (file.metadata.get(key) for key in ("general.architecture", "adapter.lora.alpha"))
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (value := file.metadata.get(key)) != expected:
            raise NanoinferError(f"{key}={show(value)}: only {key}={expected!r} is a LoRA adapter")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise NanoinferError("adapters of some tokens are not supported")
    layout = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
    if layout is None or layout.family != config.family:
        raise NanoinferError(f"general.architecture={show(arch)} is not that of the base, a {config.family}")

    def scale(module: str, rank: int) -> float:
        _check_rank(module, rank, max_rank)
        given = require_float("adapter.lora.alpha", alpha, -1e6, 1e6)
        return given / rank if given else 1.0  # as in llama.cpp

    updates = _updates(file.tensors, _GGUF_KEY, scale)
    family = stored_family(config, layout, [f"{module}.weight" for module in updates])
    return _of_order(place(updates, config, family), config, layout.tiled)


def _of_order(adapter: Adapter, config: ModelConfig, tiled: bool) -> Adapter:
    """Return the adapter. Raise NanoinferError if it updates states whose heads the base has in another order."""
    state, names = config.recurrence, [split_name(name) for name in adapter.updates]
    recurrent = any(part.startswith("attn.") and config.layer(layer or 0).recurrent for layer, part, _ in names)
    if recurrent and state and state.num_heads > state.num_key_heads and state.tiled != tiled:
        forms = ("a folder of peft", "a GGUF file")
        raise NanoinferError(
            f"{forms[tiled]} has the heads of recurrent layers in another order than the base: give {forms[not tiled]}"
        )
    return adapter


def _check_rank(module: str, rank: int, limit: int) -> None:
    """Raise NanoinferError if a rank exceeds the limit."""
    if rank > limit:
        raise NanoinferError(f"module {module}: rank {rank} is more than max_lora_rank={limit}: raise it")


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
        _check_rank(module, r, max_rank)
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


def _updates(
    tensors: Mapping[str, StoredTensor], pattern: re.Pattern[str], scale_of: Callable[[str, int], float]
) -> Updates:
    """Return the updates in the tensors of a file. The groups of the pattern are the module, and A or B."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in tensors.items():
        if (match := pattern.fullmatch(key)) is None or len(tensor.shape) != 2 or tensor.dtype not in ITEM_BYTES:
            raise NanoinferError(f"tensor {show(key)} is not lora_A or lora_B of a matrix: merge the adapter by peft")
        found.setdefault(match[1], {})[match[2].upper()] = tensor
    updates: Updates = {}
    for module, pair in found.items():
        if len(pair) != 2:
            raise NanoinferError(f"module {show(module)} has lora_{next(iter(pair))} alone")
        a, b = (pair[letter].read().dense().to("float32").values for letter in "AB")
        updates[module] = a, b * np.float32(scale_of(module, len(a)))
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
    for stored, factors in config.weight_factors:  # as of the weights that they update
        for module in [module for module in updates if module.endswith(f".{stored}")]:
            updates[module] = updates[module][0], updates[module][1] * row_factors(factors)
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
            for run in np.split(own, np.flatnonzero(np.diff(own) != 1) + 1):  # one, or queries and their gates
                parts.append(LowRank(np.ascontiguousarray(a), b[places[run] - start], int(run[0])))
        start += rows
    return tuple(parts)


def merge(weights: Weights, adapter: Adapter) -> Weights:
    """Return the weights of a base with an adapter's updates added to them, in float32, as they are read.

    Matrices that are stored in blocks of quantized values are no longer in blocks.
    """

    def read() -> Iterator[tuple[str, HostTensor]]:
        for name, tensor in weights.read():
            if (module := name.removesuffix(".weight")) in adapter.updates:
                values = tensor.dense().to("float32").values.copy()
                for part in adapter.updates[module]:
                    values[part.first : part.first + len(part.b)] += part.b @ part.a
                tensor = HostTensor(values, "float32")
            yield name, tensor

    return replace(weights, read=read, block_formats={})
