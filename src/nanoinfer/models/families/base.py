"""What a family of models says: how its config.json is read and written, and the names of its tensors.

A family is one file in this folder and one line in `FAMILIES` (registry.py). docs/adding-a-family.md goes through one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checks import require_float, require_int, show
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.errors import NanoinferError

# Fields of any config.json that do not change the logits of a plain forward pass.
HARMLESS = frozenset(
    "architectures torch_dtype dtype transformers_version _name_or_path name_or_path initializer_range use_cache"
    " return_dict output_hidden_states output_attentions gradient_checkpointing id2label label2id problem_type"
    " num_labels is_decoder pad_token_id tokenizer_class prefix finetuning_task torchscript use_bfloat16 tf_legacy_loss"
    " bos_token_id eos_token_id cross_attention_hidden_size task_specific_params chunk_size_feed_forward"
    " attention_dropout model_type _attn_implementation auto_map cache_implementation".split()
)
ACTIVATIONS = {
    "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu", "silu": "silu", "swish": "silu",
    "relu2": "relu2",
}  # fmt: skip


class Fields:
    """The fields of a config.json. Reading one checks it, so an error names the field as the file does.

    Args:
        raw: the content of the file.
        where: the file's name, for error messages.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.known: set[str] = set(HARMLESS)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field without checking it; the default if it is missing."""
        self.known.add(name)
        return self.raw.get(name, default)

    def error(self, name: str, reason: str) -> NanoinferError:
        """Return an error about a field."""
        return NanoinferError(f"{self.where}: {name}={show(self.raw.get(name))} {reason}")

    def integer(self, name: str, default: int | None = None, low: int = 1, *, nullable: bool = False) -> int:
        """Return an integer of at least `low`. A field without a default must be there.

        Args:
            name: the field.
            default: value if the field is missing.
            low: lowest value.
            nullable: whether null stands for the default.
        """
        value = self.get(name, default)
        if value is None and default is None and name not in self.raw:
            raise NanoinferError(f"{self.where} has no {name}: add it, an integer >= {low}")
        if value is None and nullable and default is not None:
            return default
        try:
            return require_int(name, value, low, 2**31 - 1)
        except NanoinferError as e:
            raise NanoinferError(f"{self.where}: {e}") from None

    def number(self, name: str, default: float | None, low: float = 1e-12, high: float = 1e12) -> float | None:
        """Return a number in [low, high]; the default if the field is missing. Null is allowed if that is None."""
        if (value := self.get(name, default)) is None and default is None:
            return None
        try:
            return require_float(name, value, low, high)
        except NanoinferError as e:
            raise NanoinferError(f"{self.where}: {e}") from None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; the default if the field is missing."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "is neither true nor false")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Raise NanoinferError if a field is there and has none of these values."""
        if self.get(name, values[0]) not in values:
            raise self.error(name, f"is not supported: only {show(values[0])} is")

    def activation(self, name: str, default: str) -> str:
        """Return our name of an activation."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(name, f"is not supported: use one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def rotary(
        self,
        head_dim: int,
        theta: float = 10000.0,
        *,
        partial: float = 1.0,
        kind: str | None = None,
        theta_field: str = "rope_theta",
        scaled: bool = True,
    ) -> Rotary:
        """Return the rotary embedding that `rope_parameters`, or `rope_theta` and `rope_scaling`, describe.

        Args:
            head_dim: width of a head.
            theta: default of the base.
            partial: default of the share of a head that is rotated.
            kind: key of `rope_parameters` if it has one entry for each type of layer.
            theta_field: field of the base in configs without `rope_parameters`.
            scaled: whether `rope_scaling` applies to these layers.
        """
        given = self.get("rope_parameters")
        if isinstance(given, dict) and kind is not None and isinstance(given.get(kind), dict):
            given = given[kind]
        old, base = self.get("rope_scaling"), self.number(theta_field, theta)
        if given is None:
            given = old if scaled and old is not None else {}
        if not isinstance(given, dict):
            raise self.error("rope_parameters" if self.raw.get("rope_parameters") else "rope_scaling", "is no object")
        allowed = {
            "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings",
        }  # fmt: skip
        if unknown := sorted(given.keys() - allowed - {"full_attention", "sliding_attention"}):
            raise NanoinferError(f"{self.where}: the rotary parameter {show(unknown[0])} is not supported")
        scaling = given.get("rope_type", given.get("type", "default"))
        if scaling not in ("default", "linear", "llama3"):
            raise NanoinferError(
                f"{self.where}: rope_type={show(scaling)} is not supported: use default, linear or llama3"
            )
        share = given.get("partial_rotary_factor", self.number("partial_rotary_factor", partial))
        values: dict[str, Any] = {"base": given.get("rope_theta", base)}
        if scaling != "default":
            values |= {"scaling": scaling, "factor": given.get("factor")}
        if scaling == "llama3":
            values |= {ours: given.get(theirs) for ours, theirs in _LLAMA3.items()}
        try:
            return Rotary(int(head_dim * require_float("partial_rotary_factor", share, 1e-6, 1.0)), **values)
        except NanoinferError as e:
            raise NanoinferError(f"{self.where}: {e}") from None

    def windows(self, n_layer: int, window: int | None, sliding: Callable[[int], bool]) -> list[int | None]:
        """Return the window of each layer from `layer_types`, or from a rule for configs without it.

        Args:
            n_layer: number of layers.
            window: width of the windows; None: no layer has one.
            sliding: whether layer i has a window.
        """
        types = self.get("layer_types")
        if types is None:
            types = ["sliding_attention" if sliding(i) else "full_attention" for i in range(n_layer)]
        if not isinstance(types, list) or len(types) != n_layer:
            raise self.error("layer_types", f"is not a list of {n_layer} types, one for each layer")
        for found in types:
            if found not in ("full_attention", "sliding_attention"):
                raise NanoinferError(
                    f"{self.where}: layer_types has {show(found)}: only full_attention and sliding_attention are"
                    " supported"
                )
        return [window if found == "sliding_attention" else None for found in types]


_LLAMA3 = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


@dataclass(frozen=True)
class Recipe:
    """How one of our tensors is made of stored ones: joined along the outputs, then its rows are reordered."""

    parts: tuple[tuple[str, int], ...]
    """Name and number of rows of each stored tensor."""
    order: NDArray[np.intp] | None = None
    """Row i of ours is row order[i] of the joined ones; None: the same order."""
    transposed: bool = False
    """Whether the stored matrix is (in, out)."""


@dataclass(frozen=True)
class Family:
    """How the models of one family are stored."""

    model_type: str
    """model_type in config.json."""
    architecture: str
    """Class of transformers that loads a model that `save` wrote."""
    read: Callable[[Fields], ModelConfig]
    """Return the config for the fields of a config.json, without special tokens."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Return the fields of a config.json that `read` and transformers read, without special tokens."""
    names: Mapping[str, str | tuple[str, ...]]
    """Our part of a model, or of a layer -> theirs; several are joined along the outputs."""
    layer: str = "model.layers.{}."
    """Prefix of the names in a layer."""
    order: Callable[[ModelConfig, str], NDArray[np.intp] | None] = lambda config, part: None
    """Order of the rows of one of our parts (`Recipe.order`)."""
    transposed: frozenset[str] = frozenset()
    """Our parts whose matrix is stored as (in, out)."""
    ignored: tuple[str, ...] = field(default=())
    """Suffixes of stored tensors that are not weights."""

    def recipe(self, config: ModelConfig, name: str, rows: int) -> Recipe:
        """Return how one of our tensors, with this number of rows, is stored."""
        layer, part, suffix = split_name(name)
        theirs = self.names[part]
        prefix = "" if layer is None else self.layer.format(layer)
        order = self.order(config, part)
        if isinstance(theirs, str):
            matrix = part in self.transposed and suffix == ".weight"
            return Recipe(((f"{prefix}{theirs}{suffix}", rows),), order, transposed=matrix)
        sizes = (config.attn_dim, config.kv_dim, config.kv_dim) if part == "attn.c_attn" else (rows // len(theirs),) * 9
        return Recipe(
            tuple((f"{prefix}{their}{suffix}", size) for their, size in zip(theirs, sizes, strict=False)), order
        )


_NAME = re.compile(r"(?:transformer\.h\.(\d{1,9})\.)?(?:transformer\.)?(.*)(\.weight|\.bias)")


def split_name(name: str) -> tuple[int | None, str, str]:
    """Split one of our names: transformer.h.3.attn.c_attn.bias -> (3, "attn.c_attn", ".bias")."""
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return None if found[1] is None else int(found[1]), found[2], found[3]


def rope_fields(rotary: Rotary) -> dict[str, Any]:
    """Return the fields of a config.json for a rotary embedding, as all versions of transformers read them."""
    scaling: dict[str, Any] | None = None
    if rotary.scaling != "none":
        scaling = {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling == "llama3" and scaling is not None:
        scaling |= {theirs: getattr(rotary, ours) for ours, theirs in _LLAMA3.items()}
    return {"rope_theta": rotary.base, "rope_scaling": scaling}


def kinds(windows: list[int | None], rotary: Rotary) -> tuple[LayerKind, ...]:
    """Return the layers of a model whose layers all have the same rotary embedding."""
    return tuple(LayerKind(window, rotary) for window in windows)
