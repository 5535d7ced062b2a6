"""A family of models: the fields of its config.json, read and written, and the names of its tensors.

A family is a constant in the file of its lineage, with a docstring; `FAMILIES` (__init__.py) has those of all files.
docs/adding-a-family.md goes through one. The source of each is transformers, models/MODEL_TYPE (without "_text").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families.fields import ACTIVATIONS, Fields, rope_fields, rotated
from nanoinfer.utils.arrays import HostTensor

Table = dict[str, str | tuple[str, Any]]
"""Field of config.json -> field of ModelConfig; in a tuple with the value that stands for a missing field."""
Biases = dict[str, tuple[tuple[str, ...], bool]]
"""Flag of config.json -> the parts of a model (some of config.BIASES) that it gives biases, and the flag's default."""


@dataclass(frozen=True)
class Recipe:
    """The stored tensors that make one of ours: joined along the outputs, then its rows are reordered."""

    parts: tuple[tuple[str, int], ...]
    """Name and number of rows of each stored tensor."""
    order: Callable[[], NDArray[np.intp] | None] = lambda: None
    """Return an array `order`: row i of ours is row order[i] of the joined ones, some of which may be left out; None:
    the same order. Shapes are compared before, as a config may have any sizes."""
    transposed: bool = False
    """Whether the stored matrix is (in, out)."""
    folded: int = 1
    """Number of our rows, or of the values of our vector, in a row of the stored matrix."""

    def stored(self, tensor: HostTensor) -> Iterator[tuple[str, HostTensor]]:
        """Yield the names and values of the stored tensors that make ours: the inverse of reading them."""
        values = tensor.values
        if (order := self.order()) is not None:
            values = np.zeros((sum(rows for _, rows in self.parts) * self.folded, *values.shape[1:]), values.dtype)
            values[order] = tensor.values
        if self.folded > 1:
            values = values.reshape(len(values) // self.folded, -1)
        start = 0
        for name, rows in self.parts:
            part = HostTensor(values[start : start + rows], tensor.dtype)
            yield name, part.t() if self.transposed else part
            start += rows


@dataclass(frozen=True)
class Family:
    """The storage of the models of one family."""

    model_type: str
    """model_type in config.json."""
    architecture: str
    """Class of transformers that loads a model that `save` wrote."""
    fields: Table
    """The fields of config.json that are fields of ModelConfig under other names."""
    names: Mapping[str, str | tuple[str, ...]]
    """Our part of a model, or of a layer -> theirs; several are joined along the outputs. A name with {} is that of
    each expert."""
    fixed: Mapping[str, Any]
    """Fields of ModelConfig that all models of the family have."""
    biased: tuple[str, ...] = ()
    """Parts that always have biases: some of config.BIASES."""
    biases: Biases = field(default_factory=dict)
    """Parts that have biases if a flag is true."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of config.json that may only have these values, the first if missing."""
    harmless: tuple[str, ...] = ()
    """Further fields of config.json that do not change the logits."""
    read_layers: Callable[[Fields, ModelConfig], dict[str, Any]] = rotated
    """(fields, the model so far) -> `layers`, and other fields of ModelConfig that the table cannot express."""
    write_layers: Callable[[ModelConfig], dict[str, Any]] = rope_fields
    """Return the fields of config.json that `read_layers` and transformers read."""
    layer: str = "model.layers.{}."
    """Prefix of the names in a layer."""
    order: Callable[[ModelConfig, str], NDArray[np.intp] | None] = lambda config, part: None
    """Order of the rows of one of our parts (`Recipe.order`)."""
    first_row: Mapping[str, int] = field(default_factory=dict)
    """Our parts that are the rows from this one on of a stored tensor, whose rows before mean nothing."""
    transposed: frozenset[str] = frozenset()
    """Our parts, or `fused` tensors, whose matrices are stored as (in, out)."""
    folded: Mapping[str, Callable[[ModelConfig], int]] = field(default_factory=dict)
    """Our parts of which a stored row has several, and how many (`Recipe.folded`)."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Stored tensor of a layer -> those of `names` that are its equal parts, one below the other. If they are of each
    expert, the tensor has three dimensions, the experts first. A file may have the parts in its place."""
    written: bool = True
    """Whether `huggingface.save` writes models of the family."""
    alternating: bool = False
    """Whether the parts of `fused` tensors alternate row by row, and biases of the experts' end with "_bias"."""
    recurrent: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """`names` of the parts that differ in recurrent layers."""
    recurrent_order: Callable[[ModelConfig, str], NDArray[np.intp] | None] = lambda config, part: None
    """`order` of recurrent layers."""
    mtp: Mapping[str, str] = field(default_factory=dict)
    """Beginning of the names of tensors of the block that predicts a further token ({}: the number of layers) -> that
    in a model with one layer and MTP_NAMES; empty: of a copy of embedding or head. The first that fits counts."""
    from_stored: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]] = lambda config, stored: stored
    """Return a model's stored tensors with those that `names` has in place of others. Raises NanoinferError."""

    def derive(
        self,
        model_type: str,
        architecture: str,
        fields: Table | None = None,
        names: Mapping[str, str | tuple[str, ...]] | None = None,
        fixed: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        without: tuple[str, ...] = (),
        **others: Any,
    ) -> Family:
        """Return a family with the tables of this one, changed and extended by those here.

        Its other fields are this one's, too, but for those that list fields of config.json or single tensors.

        Args:
            model_type, architecture, fields, names, fixed: as those of `Family`.
            defaults: this one's fields of config.json -> the values that stand for missing ones.
            without: keys of this one's tables that the family does not have.
            others: further fields of `Family`.
        """

        def changed(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> dict[str, Any]:
            return {key: value for key, value in old.items() if key not in without} | dict(new or {})

        ours = dict(self._table())
        changes = {theirs: (ours[theirs][0], value) for theirs, value in (defaults or {}).items()} | (fields or {})
        own: dict[str, Any] = {"fields": changed(self.fields, changes), "names": changed(self.names, names)}
        own |= {"biased": (), "biases": {}, "only": {}, "harmless": (), "first_row": {}, "transposed": frozenset()}
        own |= {"fixed": changed(self.fixed, fixed)} | others
        return replace(self, model_type=model_type, architecture=architecture, **own)

    def read(self, f: Fields) -> ModelConfig:
        """Return the config for the fields of a config.json, without special tokens.

        Raises:
            NanoinferError: a field is missing, malformed or not supported; the message names it as the file does.
        """
        try:
            return self._read(f)
        except NanoinferError as e:
            names = {ours: theirs for theirs, (ours, *_) in self._table()}
            message = re.sub(r"\b(\w+)(?==)", lambda m: names.get(m[1], m[1]), str(e))
            raise NanoinferError(message) from None

    def _read(self, f: Fields) -> ModelConfig:
        for name in self.harmless:
            f.get(name)
        for name, values in self.only.items():
            f.only(name, *values)
        config_fields: dict[str, Any] = {}
        for theirs, (ours, *default) in self._table():
            if ours == "activation":
                config_fields[ours] = f.activation(theirs, default[0])
            else:
                config_fields[ours] = f.get(theirs, default[0]) if default else f.required(theirs)
        parts = self.biased + tuple(p for name, (parts, on) in self.biases.items() if f.flag(name, on) for p in parts)
        config = ModelConfig(family=self.model_type, bias=parts, **self.fixed, **config_fields)
        return replace(config, **self.read_layers(f, config))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields of a config.json that `read` and transformers read, without special tokens."""
        fields: dict[str, Any] = {}
        for theirs, (ours, *default) in self._table():
            value = getattr(config, ours)
            if ours == "activation" and ACTIVATIONS[default[0]] == value:
                value = default[0]
            if value is not None or default != [None]:  # a field whose default is null is left out
                fields[theirs] = value
        flags = {name: parts[0] in config.biases for name, (parts, _) in self.biases.items()}
        return fields | flags | self.write_layers(config)

    def unread(self, config: ModelConfig) -> set[str]:
        """Return the names of tensors of keys and values that a file may have for layers without them."""
        layers = [i for i in range(config.n_layer) if config.layer(i).kv_layer is not None]
        parts = (*self.names["attn.c_attn"][1:], self.names.get("attn.k_norm")) if layers else ()
        return {f"{self.layer.format(i)}{part}{end}" for i in layers for part in parts for end in (".weight", ".bias")}

    def mtp_names(self, config: ModelConfig, stored: Iterable[str]) -> dict[str, str]:
        """Return the stored names of the block that predicts a further token, and those in a model of its own."""
        if config.latent is not None and not config.latent.further_layers:
            return {}
        starts = {theirs.format(config.n_layer): ours for theirs, ours in self.mtp.items()}
        found = ((name, next((start for start in starts if name.startswith(start)), None)) for name in stored)
        return {n: starts[start] and starts[start] + n[len(start) :] for n, start in found if start is not None}

    def _table(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [(theirs, (ours,) if isinstance(ours, str) else ours) for theirs, ours in self.fields.items()]

    def recipe(self, config: ModelConfig, name: str, rows: int) -> Recipe:
        """Return how one of our tensors, with this number of rows, is stored."""
        layer, part, suffix = split_name(name)
        recurrent = layer is not None and config.layer(layer).recurrent
        theirs = (self.recurrent if recurrent and part in self.recurrent else self.names)[part]
        prefix = "" if layer is None else self.layer.format(layer)
        order = partial(self.recurrent_order if recurrent else self.order, config, part)
        if isinstance(theirs, str) and "{}" in theirs:
            counts = {"attn.q_norm": config.n_head, "attn.k_norm": config.n_kv_head}
            count = config.experts.count if config.experts is not None else counts[part]
            return Recipe(tuple((f"{prefix}{theirs.format(e)}{suffix}", rows // count) for e in range(count)))
        if (first := self.first_row.get(part)) is not None:
            return Recipe(((f"{prefix}{theirs}{suffix}", first + rows),), partial(np.arange, first, first + rows))
        if isinstance(theirs, str):
            if (folded := self.folded.get(part)) is not None:
                count = folded(config)
                return Recipe(((f"{prefix}{theirs}{suffix}", rows // count),), order, folded=count)
            matrix = part in self.transposed and suffix == ".weight"
            return Recipe(((f"{prefix}{theirs}{suffix}", rows),), order, transposed=matrix)
        widths = config.qkv_widths(layer or 0)
        if config.attention_gate and not recurrent:  # the gate's rows are beside those of the queries
            widths = (widths[0] + widths[-1], *widths[1:-1])
        if recurrent and (pairs := len(widths) - len(theirs)) > 0:  # the last of theirs are two of ours each
            alone = len(theirs) - pairs
            widths = (*widths[:alone], *(widths[i] + widths[i + 1] for i in range(alone, len(widths), 2)))
        sizes = zip(theirs, widths, strict=False)  # only c_attn is made of several
        return Recipe(tuple((f"{prefix}{their}{suffix}", size) for their, size in sizes if size), order)


MTP_NAMES = {"mtp.c_in": "mtp_in", "mtp.norm_e": "mtp_norm_e", "mtp.norm_h": "mtp_norm_h"}
"""`Family.names` of the input of a block that predicts a further token."""
FOLDED_HEADS: dict[str, Callable[[ModelConfig], int]] = {
    "attn.q_norm": lambda config: config.head_dim,
    "attn.k_norm": lambda config: config.head_dim,
}
"""`Family.folded` of models that store the norms of heads as matrices, a row a head."""


def interleaved(config: ModelConfig, part: str) -> NDArray[np.intp] | None:
    """`Family.order` of models that rotate adjacent dimensions (2 i, 2 i + 1): ours are i and i + dim / 2."""
    rotary = next((kind.rotary for kind in config.layers if kind.rotary is not None), None)
    if rotary is None:
        return None
    turned = np.arange(rotary.dim).reshape(-1, 2).T.reshape(-1)
    dims = np.concatenate((turned, np.arange(rotary.dim, config.head_dim)))
    heads = {"attn.q_norm": config.n_head, "attn.k_norm": config.n_kv_head} if config.qk_norm == "heads" else {}
    if part in heads:
        return np.arange(heads[part] * config.head_dim).reshape(-1, config.head_dim)[:, dims].reshape(-1)
    return within_heads(config, dims) if part == "attn.c_attn" else None


def within_heads(config: ModelConfig, dims: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the order of the rows of c_attn in which dimension i of each head of queries and keys is dims[i]."""
    turned = config.attn_dim + config.kv_dim
    rows = np.arange(turned + config.kv_dim)
    return np.concatenate((rows[:turned].reshape(-1, config.head_dim)[:, dims].reshape(-1), rows[turned:]))


def row_factors(parts: tuple[tuple[float, int], ...]) -> NDArray[np.float32]:
    """Return `ModelConfig.weight_factors` of a matrix as (rows, 1), or (1, 1): of any row."""
    factors, counts = zip(*parts, strict=True)
    return np.repeat(np.array(factors, np.float32), counts)[:, None]


_NAME = re.compile(r"(?:transformer\.h\.(\d{1,9})\.)?(?:transformer\.)?(.*?)(\.weight|\.bias|)")


def split_name(name: str) -> tuple[int | None, str, str]:
    """Split one of our names: transformer.h.3.attn.c_attn.bias -> (3, "attn.c_attn", ".bias"). Not all have an end."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return None if match[1] is None else int(match[1]), match[2], match[3]
