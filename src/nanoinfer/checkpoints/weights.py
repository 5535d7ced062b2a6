"""Checked weights of a model, which an engine reads one tensor at a time."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.families.base import MTP_NAMES, Family, Recipe
from nanoinfer.models.parameters import LAYER, SHARED, shapes
from nanoinfer.models.stored import ChangedTensor, JoinedTensor, StoredTensor
from nanoinfer.utils.arrays import ITEM_BYTES, BlockFormats, HostTensor, JoinedBlocks

log = logging.getLogger("nanoinfer")


@dataclass(frozen=True)
class Weights:
    """Weights of a model that are not in memory yet: loaders create them, engines read them.

    Engine `native` packs each tensor as it is read, so memory never holds two copies of the model. The engines in
    PyTorch load all of them into a Transformer (gpt_loading.py).
    """

    config: ModelConfig
    dtype: str
    """Dtype to compute in."""
    read: Callable[[], Iterator[tuple[str, HostTensor]]]
    """Return an iterator over the names and tensors of `parameters.shapes`, in its order and in any dtype. A tensor is
    read when it is yielded: release it before taking the next one."""
    stored_dtype: str = field(default="float32", kw_only=True)
    """Dtype of most values in the checkpoint, in a quantized folder of those that are not quantized; float32 for GGUF's
    blocks and where there is no checkpoint."""

    has_head: bool = field(default=True, kw_only=True)
    """Whether the checkpoint has an output head. The embedding of a model without one stands in for it."""
    block_formats: Mapping[str, BlockFormats] = field(default_factory=dict, kw_only=True)
    """Matrices that are stored in blocks of quantized values -> the formats of GGUF files to compute in."""

    method: str | None = field(default=None, kw_only=True)
    """Method by which a folder's weights are quantized: "gptq", for example. docs/quantized-folders.md"""
    file_bytes: int = field(default=0, kw_only=True)
    """Size of the checkpoint's files; 0: not known."""
    mtp: Callable[[bool], Weights] | None = field(default=None, kw_only=True)
    """Return the block of the files that predicts a further token; with True, without the tensors SHARED, which are the
    model's. None: there is no such block."""

    def formats(self, quantization: str | None) -> Mapping[str, BlockFormats]:
        """Return the matrices that engine `native` has in formats of GGUF files, and their formats."""
        if quantization is None:
            return self.block_formats
        return int4_formats(self.config) if quantization == "int4" else {}

    def watched(self, update: Callable[[int, int], None]) -> Weights:
        """Return the same weights; `update(layer, n_layer)` is called as each tensor of a layer is read."""

        def read() -> Iterator[tuple[str, HostTensor]]:
            for name, tensor in self.read():
                yield name, tensor
                if layer := LAYER.match(name):
                    update(int(layer[1]), self.config.n_layer)

        return replace(self, read=read)

    def shortened(self, max_model_len: int | None) -> Weights:
        """Return the same weights with a shorter context length; None: unchanged.

        Raises:
            NanoinferError: max_model_len is more than the context length.
        """
        if max_model_len is None:
            return self
        if max_model_len > self.config.block_size:
            raise NanoinferError(
                f"max_model_len={max_model_len} is more than the model's context length of {self.config.block_size}"
                " tokens: lower it, or leave it out"
            )

        def read() -> Iterator[tuple[str, HostTensor]]:
            for name, tensor in self.read():
                yield name, replace(tensor, values=tensor.values[:max_model_len]) if name == POSITIONS else tensor

        return replace(self, config=replace(self.config, block_size=max_model_len), read=read)


POSITIONS = "transformer.wpe.weight"


def has_format(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix in one of engine native's formats: routers and convolutions are float32."""
    others = (".router.weight", ".shared_gate.weight", ".attn.conv")
    return len(shape) == 2 and name != POSITIONS and not name.endswith(others)


_NOT_WEIGHTS = re.compile(
    r"(^|\.)(mtp\..*|(attn|attention)\.(masked_)?bias|attn\.embed_positions|position_ids|[kv]_scale"
    r"|rotary_emb\.(inv_freq|cos_cached|sin_cached))$"
)
"""Tensors that files have beside weights, and transformers leaves out: masks and tables of its older versions, scales
of a cache in 8 bits, layers that predict further tokens (of families without `Family.mtp`)."""

Tensors = dict[str, StoredTensor | JoinedTensor]


def check(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    source: str,
    dtype: str,
    family: Family | None = None,
    unread: tuple[str, ...] = (),
) -> Weights:
    """Check names, shapes and dtypes of stored tensors and return the weights of a model.

    Shapes are compared before any tensor is read, so that memory is allocated only for data that the file contains.

    Args:
        config: the model's shape.
        stored: the tensors by their names in the file.
        source: the file or folder, for error messages.
        dtype: dtype to compute in.
        family: how the model's tensors are stored; None: that of `config.family`.
        unread: our names of tensors that `Weights.read` leaves out.

    Raises:
        NanoinferError: a tensor is missing or unexpected, or has a wrong shape or an unsupported dtype.
    """
    family, original = FAMILIES[config.family] if family is None else family, stored
    mtp = family.mtp_names(config, stored)
    stored = {name: tensor for name, tensor in stored.items() if name not in mtp and not _NOT_WEIGHTS.search(name)}
    if left_out := sorted(original.keys() - stored.keys() - mtp.keys()):
        log.info(
            "%s: %d tensors that are not weights are left out: %s, ...", source, len(left_out), escaped(left_out[0])
        )
    stored = family.from_stored(config, _with_parts(stored, config, family))
    _check_layers(config, stored, source, family)
    unused, rows = family.unread(config), config.vocab_size
    stored = {name: tensor for name, tensor in stored.items() if name not in unused}
    embedding, head_name = (family.recipe(config, name, rows).parts[0][0] for name in SHARED[:2])
    if config.tie_word_embeddings and head_name in stored and embedding not in stored:
        stored[embedding] = stored.pop(head_name)  # as in transformers
    tensors: Tensors = {}
    used: set[str] = set()
    for name, shape in shapes(config).items():
        recipe = family.recipe(config, name, shape[0])
        tensors[name] = _assemble(recipe, shape, stored, source)
        used.update(theirs for theirs, _ in recipe.parts)
    head = stored.get(head_name) if config.tie_word_embeddings else None
    _check_tensors(stored, used | ({head_name} if head else set()), source)
    if head is not None and not _equal(head, tensors["transformer.wte.weight"]):
        log.warning("%s: tie_word_embeddings is true, but %s differs from the embedding: it is used", source, head_name)
        untied = replace(config, tie_word_embeddings=False)
        return check(untied, original, source, dtype, family, unread)  # as in transformers
    read = lambda: ((name, tensor.read()) for name, tensor in tensors.items() if name not in unread)  # noqa: E731
    formats = {name: tensor.block_formats for name, tensor in tensors.items() if has_format(name, tensor.shape)}
    blocks = {name: kind for name, kind in formats.items() if kind is not None}
    blocks = _with_shared_inputs(_in_one_format(blocks, tensors, source), config)
    sizes = {tensor.file.path: tensor.file.size for tensor in stored.values()}
    ours = {name: name for name in (embedding, head_name) if name in original} | mtp
    block = partial(_check_mtp, config, {ours[name]: original[name] for name in ours}, source, dtype, family)
    return Weights(
        config, dtype, read, stored_dtype=main_dtype(stored), block_formats=blocks, file_bytes=sum(sizes.values()),
        mtp=block if mtp else None,
    )  # fmt: skip


def _check_mtp(
    config: ModelConfig, stored: Mapping[str, StoredTensor], source: str, dtype: str, family: Family, shared: bool
) -> Weights:
    """Return the block that predicts a further token (`Weights.mtp`). Raises NanoinferError as `check`."""
    family = replace(family, names=dict(family.names) | MTP_NAMES, mtp={})
    with about("draft='mtp'"):
        named = {name: tensor for name, tensor in stored.items() if name}  # the others are copies
        return check(mtp_config(config), named, source, dtype, family, SHARED if shared else ())


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the config of a model's block that predicts a further token."""
    kind = next((kind for kind in reversed(config.layers) if not kind.recurrent), None)
    return replace(config, n_layer=1, layers=() if kind is None else (kind,), recurrence=None, mtp=True)


def _check_tensors(stored: Mapping[str, StoredTensor], used: set[str], source: str) -> None:
    """Raise NanoinferError if a tensor is not used, or has a dtype that weights do not have."""
    if extra := sorted(stored.keys() - used):
        names = ", ".join(f"{name!r:.80}" for name in extra[:3])
        raise NanoinferError(f"{source}: {len(extra)} tensors are not part of the model: {names}")
    for name, tensor in stored.items():
        if tensor.dtype not in ITEM_BYTES:
            kind = escaped(tensor.dtype, 40)
            where = escaped(tensor.file.path)
            raise NanoinferError(f"{where}: tensor {name} is {kind}: weights must be one of {', '.join(ITEM_BYTES)}")


def _with_parts(stored: Mapping[str, StoredTensor], config: ModelConfig, family: Family) -> dict[str, StoredTensor]:
    """Return the tensors, those that the family stores as one split into the parts that it names."""
    tensors: dict[str, StoredTensor] = {}
    num_experts = 0 if config.experts is None else config.experts.count
    for name, tensor in stored.items():
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):  # experts of transformers 5
            base, suffix = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        whole = next((w for w in family.fused if base.endswith(f".{w}")), "")
        parts = family.fused.get(whole, ())
        if parts and "{}" in parts[0]:
            split = _of_experts(tensor, num_experts, len(parts), family.alternating)
            parts = tuple(part.format(expert) for expert in range(num_experts) for part in parts)
        else:
            fits = bool(parts) and bool(tensor.shape) and not tensor.shape[0] % len(parts)
            split = tensor.equal_parts(len(parts)) if fits else []
        if not split:
            tensors[name] = tensor
            continue
        for part, values in zip(parts, split, strict=True):
            tensors[f"{base.removesuffix(whole)}{part}.{suffix}"] = values
    return tensors


def _of_experts(tensor: StoredTensor, num_experts: int, count: int, alternating: bool) -> list[StoredTensor]:
    """Return the parts of a tensor that all experts share, `count` of each expert; none if it does not fit.

    They are equal parts of its rows, (experts, rows, in); or they alternate in its columns, (experts, in, rows), or in
    biases, (experts, rows).
    """
    if not tensor.shape or tensor.shape[0] != num_experts:
        return []
    if not alternating:
        fits = len(tensor.shape) == 3 and not tensor.shape[1] % count
        return [part for one in tensor.each() for part in one.equal_parts(count)] if fits else []
    is_matrix = len(tensor.shape) == 3
    if tensor.shape[-1] % count or not (is_matrix or (len(tensor.shape) == 2 and type(tensor) is StoredTensor)):
        return []
    return [part for one in tensor.each() for part in (one.t() if is_matrix else one).alternate(count)]


def _in_one_format(formats: Mapping[str, BlockFormats], tensors: Tensors, source: str) -> dict[str, BlockFormats]:
    """Return the formats with Q8_0 for stacks of experts that are stored in several: engine `native` takes one."""
    mixed = {
        name: (("q8_0", tensors[name].shape[0]),)
        for name in formats
        if len({part.block_format for part in getattr(tensors[name], "parts", ())}) > 1
        and not name.endswith("attn.c_attn.weight")  # whose projections may differ
    }
    if mixed:
        log.warning(
            "%s: matrices that have experts in several formats: %d, such as %s: engine native rounds them to Q8_0",
            source, len(mixed), next(iter(mixed)),
        )  # fmt: skip
    return dict(formats) | mixed


def _with_shared_inputs(formats: Mapping[str, BlockFormats], config: ModelConfig) -> dict[str, BlockFormats]:
    """Return the formats with both of c_gate and c_fc, which share their inputs, in blocks if one of them is."""
    other = {"c_gate": "c_fc", "c_fc": "c_gate"}
    pairs = [re.sub("c_gate|c_fc", lambda m: other[m[0]], name) for name in formats if ".mlp." in name]
    rows = {name: shape[0] for name, shape in shapes(config).items()}
    return dict(formats) | {name: (("q8_0", rows[name]),) for name in pairs if name in rows and name not in formats}


def parts(name: str, tensor: HostTensor, formats: BlockFormats | None) -> Iterator[tuple[str, HostTensor]]:
    """Yield the parts of a tensor that have formats of their own, under the names that the decoder has for them.

    A part is a `BlockMatrix` if it is stored in the format that is wanted, else dense.
    """
    sizes = [tensor.shape[0]] if formats is None else [rows for _, rows in formats]
    pieces: Iterable[HostTensor] = (tensor,)
    if isinstance(tensor, JoinedBlocks) and [part.shape[0] for part in tensor.parts] == sizes:
        pieces = tensor.parts
    elif len(sizes) > 1:
        dense, ends = tensor.dense(), accumulate(sizes, initial=0)
        pieces = (replace(dense, values=dense.values[start:end]) for start, end in pairwise(ends))
    for i, part in enumerate(pieces):
        yield part_name(name, i), part if formats and part.dtype == formats[i][0] else part.dense()


def int4_formats(config: ModelConfig) -> dict[str, BlockFormats]:
    """Return the formats of the matrices with quantization="int4" on engine `native`: the mix of llama.cpp's Q4_K_M.

    The output head has more bits, and in half of the layers the MLP's second matrix and values (with queries and keys
    where these have as many heads). Rows that are not whole blocks of 32 are padded, in Q8_0.
    """
    head = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    formats: dict[str, BlockFormats] = {}
    for name, shape in shapes(config).items():
        if not has_format(name, shape):
            continue
        rows, columns = shape
        few, more = ("q4_k", "q6_k") if columns % 256 == 0 else ("q5_0" if columns % 32 == 0 else "q8_0", "q8_0")
        layer = LAYER.match(name)
        better = layer is not None and more_bits(int(layer[1]), config.n_layer)
        better = better and (
            name.endswith("attn.c_attn.weight") or (".mlp." in name and name.endswith("c_proj.weight"))
        )
        split, of_values = 0, 0
        if layer is not None and name.endswith("c_attn.weight"):
            widths = config.qkv_widths(int(layer[1]))
            of_values = widths[2] if len(widths) == 3 and widths[2] < widths[0] else 0
            split = rows - of_values if of_values else 0
        if name != head and better and split and split % 32 == 0 and few != more:
            formats[name] = ((few, split), (more, of_values))
        else:
            formats[name] = ((more if better or name == head else few, rows),)
    return formats


def more_bits(layer: int, n_layer: int) -> bool:
    """Return whether a layer is in the first or the last eighth, or the third of three between them (llama.cpp)."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def part_name(name: str, i: int) -> str:
    """Return the decoder's name of part `i` of a matrix."""
    return f"{name}:{i}" if i else name


def main_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of most values, as float32 if it is float64, which is read as float32."""
    counts: Counter[str] = Counter()
    for tensor in stored.values():
        counts[tensor.dtype] += math.prod(tensor.shape)
    dtype = max(counts, key=lambda name: counts[name], default="float32")
    return "float32" if dtype == "float64" else dtype


def _assemble(
    recipe: Recipe, shape: tuple[int, ...], stored: Mapping[str, StoredTensor], source: str
) -> StoredTensor | JoinedTensor:
    """Return one of our tensors, made of the stored ones. Shapes are compared, and nothing is read."""
    parts = []
    for name, rows in recipe.parts:
        expected = (rows, *shape[1:]) if recipe.folded == 1 else (rows, math.prod(shape[1:]) * recipe.folded)
        expected = expected[::-1] if recipe.transposed else expected
        if name not in stored:
            raise NanoinferError(f"{source}: tensor {name} {list(expected)} is missing")
        if stored[name].shape != expected:
            raise NanoinferError(
                f"{source}: tensor {name} is {list(stored[name].shape)}, but the config requires {list(expected)}"
            )
        part = stored[name]
        if recipe.folded > 1 and len(shape) == 1:
            part = ChangedTensor.of(part, shape, lambda values: values.reshape(-1))
        elif recipe.folded > 1:
            part = part.unfolded(recipe.folded)
        parts.append(part.t() if recipe.transposed else part)
    order = recipe.order()
    return parts[0] if len(parts) == 1 and order is None else JoinedTensor(tuple(parts), order)


def _equal(a: StoredTensor, b: StoredTensor | JoinedTensor) -> bool:
    """Return whether two tensors have equal values; torch.save stores a tied head once, under both names."""
    if a == b or a.shape != b.shape:
        return a == b
    values = b.read()
    return np.array_equal(a.read().to(values.dtype).dense().values, values.dense().values)


def _check_layers(config: ModelConfig, stored: Mapping[str, StoredTensor], source: str, family: Family) -> None:
    """Compare the config's number of layers with the file's, before the shapes of as many layers are listed."""
    pattern = re.compile(re.escape(family.layer).replace(r"\{\}", r"([0-9]{1,9})"))
    layers = {int(m.group(1)) for name in stored if (m := pattern.match(name))}
    if len(layers) != config.n_layer:
        raise NanoinferError(f"{source}: n_layer={config.n_layer}, but the weights have {len(layers)} layers")
