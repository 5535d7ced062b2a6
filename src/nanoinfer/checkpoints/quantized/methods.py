"""The quantized matrices of a folder: each method's config and tensors, and where they are among the stored ones.

What is stored decides which layers are quantized: one with a plain weight is plain, whatever the config has. Values
are those of the formula in exact arithmetic; references compute in float16 or in the dtype of the scales. Sources:

    fp8                 OCP 8-bit Floating Point (E4M3, E5M2) and Microscaling Formats (E8M0); DeepSeek-V3's
                        inference/kernel.py (weight_dequant: a scale for each 128 x 128 block)
    bitsandbytes        QLoRA (Dettmers et al. 2023, arXiv 2305.14314); functional.py (NF4, double quantization)
    mxfp4               Microscaling Formats (E2M1, E8M0); transformers' integrations/mxfp4.py (the blocks of gpt-oss)
    gptq                Frantar et al. 2022, arXiv 2210.17323; AutoGPTQ's auto_gptq/nn_modules/qlinear, GPTQModel's
                        gptqmodel/nn_modules/qlinear/torch.py: 2 to 8 bits in words of 32
    awq                 Lin et al. 2023, arXiv 2306.00978; AutoAWQ's awq/utils/packing_utils.py
    bitnet              transformers' integrations/bitnet.py: ternary matrices
    compressed-tensors  the format of llm-compressor: compressed_tensors/compressors (pack_quantized, naive_quantized,
                        mxfp4), quantization/lifecycle/forward.py. Bits and groups follow from shapes, where the config
                        lists which it uses
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.quantized.base import (
    E8M0,
    FLOATS,
    TABLES,
    Codec,
    Method,
    Mxfp4,
    Numbers,
    Parts,
    QuantizedTensor,
    Scaled,
    Scheme,
    groups_of,
    order_of,
    unpack,
)
from nanoinfer.errors import NanoinferError, about, escaped, show
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.checks import require_float
from nanoinfer.utils.files import parse_json

log = logging.getLogger("nanoinfer")


def floats(tensor: StoredTensor) -> NDArray[np.float32]:
    """Read scales as float32."""
    stored = tensor.read()
    return TABLES[E8M0][stored.values] if tensor.dtype == E8M0 else stored.float32()


def scale_of(
    parts: Parts, end: str, shape: tuple[int, int], block: Sequence[int] | None
) -> tuple[Callable[[], Numbers], tuple[int, int]]:
    """Check the scales of a matrix: one, one a row, or one a block. Return how to read them, and a block's size."""
    tensor = parts.take(end, (*FLOATS, E8M0))
    rows, columns = shape
    if prod(tensor.shape) == 1:
        return lambda: floats(tensor).reshape(1, 1), shape
    if tensor.shape in ((rows,), (rows, 1)):
        return lambda: floats(tensor).reshape(-1, 1), (1, columns)
    if block is not None and tensor.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return lambda: floats(tensor), (block[0], block[1])
    allowed = "one scale, or one a row" + ("" if block is None else f", or one for each {block[0]} x {block[1]} block")
    raise parts.error(end, f"is {list(tensor.shape)}, but a matrix of {list(shape)} has {allowed}")


def float8(parts: Parts, scale: str, block: Sequence[int] | None) -> Codec:
    """Return the codec of a matrix of FP8 numbers and their scales, which multiply them whatever their name is."""
    weight = parts.take(".weight", ("float8_e4m3fn", "float8_e5m2"), (None, None))
    rows, columns = weight.shape
    scales, rectangle = scale_of(parts, scale, (rows, columns), block)
    table = TABLES[weight.dtype]
    return Scaled(weight.file, weight.shape, lambda: weight.read().values, scales, rectangle, table=table)


def block_of(f: Fields, name: str) -> Sequence[int] | None:
    """Return the rows and columns of a block; None if there are no blocks."""
    value = f.get(name)
    if value is not None and not (
        isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value)
    ):
        raise f.error(name, "is not a list of rows and columns")
    return value


def _fp8(f: Fields) -> Scheme:
    f.known.update(
        "modules_to_not_convert ignored_layers modules_to_convert scale_fmt dequantize activation_scheme fmt".split()
    )
    f.only("expert_dtype", "fp8", None)
    block = block_of(f, "weight_block_size")
    ends = (".weight_scale_inv", ".weight_scale")
    return Scheme(lambda parts: float8(parts, next(e for e in ends if e in parts), block), activations=True)


_STATE, _NESTED = ".weight.quant_state.bitsandbytes__nf4", ".weight.nested_absmax"


def _nf4(parts: Parts) -> Codec:
    """Return the codec of a matrix in NF4: code of 4 bits -> a number, times the largest magnitude of a block."""
    with about(f"tensor {show(parts.stem + _STATE)[1:-1]}"):
        state = parse_json(parts.take(_STATE, ("uint8",), (None,)).read().values.tobytes(), "it is not JSON")
        f = Fields(state if isinstance(state, dict) else {})
        shape, size = f.get("shape"), f.integer("blocksize", 64)
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**31 for n in shape)):
            raise f.error("shape", "is not that of a matrix")
        if shape[1] % size:
            raise f.error("blocksize", f"does not divide the {shape[1]} columns, which is not supported")
    rows, blocks = shape[0], shape[1] // size
    packed = parts.take(".weight", ("uint8",), (rows * shape[1] // 2, 1))
    table = parts.take(".weight.quant_map", ("float32",), (16,)).read().float32()
    absmax = parts.take(".weight.absmax", ("uint8" if _NESTED in parts else "float32",), (rows * blocks,))

    def codes() -> Numbers:  # the first of a pair is in the high bits
        pairs = packed.read().values
        both: Numbers = np.concatenate([pairs >> 4, pairs & 15], axis=1).reshape(shape)
        return both

    scales = lambda: absmax.read().float32().reshape(rows, blocks)  # noqa: E731
    if _NESTED in parts:
        nested_size = f.integer("nested_blocksize", 256)
        largest = parts.take(_NESTED, ("float32",), (-(-rows * blocks // nested_size),))
        nested_table = parts.take(".weight.nested_quant_map", ("float32",), (256,))
        offset = require_float("nested_offset", f.get("nested_offset"), -1e30, 1e30)

        def scales() -> Numbers:
            of_block = np.repeat(largest.read().float32().astype(np.float64), nested_size)[: rows * blocks]
            exact = nested_table.read().float32().astype(np.float64)[absmax.read().values]
            values: Numbers = exact * of_block + offset
            return values.reshape(rows, blocks)

    return Scaled(packed.file, (rows, shape[1]), codes, scales, (1, size), table=table)


def _bitsandbytes(f: Fields) -> Scheme:
    f.known.update(
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type"
        " bnb_4bit_use_double_quant bnb_4bit_quant_storage llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
        " llm_int8_skip_modules llm_int8_threshold".split()
    )
    return Scheme(_nf4)


def mxfp4(parts: Parts, packed: str, scale: str) -> Codec:
    """Return the codec of a matrix, or of several, with blocks of 32 along the last dimension."""
    scales = parts.take(scale, ("uint8", E8M0))
    if len(scales.shape) < 2 or not all(scales.shape):
        raise parts.error(scale, f"is {list(scales.shape)}, but must be (..., out, in / 32)")
    *front, groups = scales.shape
    by_group = parts.take(packed, ("uint8",), (*front, groups, 16) if packed == "_blocks" else (*front, groups * 16))
    return Mxfp4(by_group, scales, (*front, groups * 32))


def _mxfp4(f: Fields) -> Scheme:
    f.known.update("modules_to_not_convert dequantize".split())
    return Scheme(lambda parts: mxfp4(parts, "_blocks", "_scales"))


_AWQ_ORDER = np.array((0, 4, 1, 5, 2, 6, 3, 7))
"""Position in a word of AWQ's of each of 8 consecutive columns."""
_TOOLS = (
    "sym damp_percent damp_auto_increment true_sequential static_groups model_name_or_path model_file_base_name"
    " meta dataset tokenizer batch_size block_name_to_quantize module_name_preceding_first_block"
    " modules_in_block_to_quantize modules_to_not_convert max_input_length use_cuda_fp16 use_exllama"
    " exllama_config disable_exllama cache_block_outputs model_seqlen pad_token_id backend lm_head mse desc_act"
    " act_group_aware quant_method do_fuse fuse_max_seq_len modules_to_fuse is_quantized"
).split()
"""Fields about making a folder, or that the stored tensors repeat."""


def _common(f: Fields, bits: tuple[int, ...]) -> tuple[int, int]:
    """Return bits and group size; -1: one group."""
    f.known.update(_TOOLS)
    f.only("is_marlin_format", False, None)
    f.only("pack_dtype", "int32", None)
    if (width := f.integer("bits", 4)) not in bits:
        raise f.error("bits", f"is not supported: only {', '.join(map(str, bits))} are")
    if (group_size := f.integer("group_size", 128, -1)) == 0:
        raise f.error("group_size", "is neither positive nor -1")
    return width, group_size


def _matrix(
    parts: Parts, words: StoredTensor, shape: tuple[int, int], bits: int, group_size: int,
    codes: Callable[[Numbers], Numbers], zeros: Callable[[Numbers], Numbers],
) -> Codec:  # fmt: skip
    """Check the other tensors of a matrix and return its codec.

    Args:
        parts: scales (groups, out), qzeros (groups, words of a row), and g_idx (in), which may be missing.
        words: the tensor of the integers.
        shape: (out, in).
        bits: of an integer.
        group_size: columns that share a scale; -1: all.
        codes: words -> (out, in).
        zeros: qzeros -> (out, groups).
    """
    rows, columns = shape
    scale = parts.take(".scales", FLOATS, (None, rows))
    groups, expected = scale.shape[0], -(-columns // group_size) if group_size > 0 else 1
    if groups != expected:
        what = f"has {groups} groups, but group_size={group_size} needs {expected} of {columns} columns"
        raise parts.error(".scales", what)
    order = order_of(parts, ".g_idx", columns, groups)
    each = columns if order is not None else groups_of(parts, ".scales", columns, groups)
    zero = parts.take(".qzeros", ("int32",), (groups, -(-rows * bits // 32)))
    return Scaled(
        words.file, shape, lambda: codes(words.read().values), lambda: scale.read().float32().T, (1, each),
        lambda: zeros(zero.read().values), (0, (1 << bits) - 1), order=order,
    )  # fmt: skip


def _gptq(f: Fields) -> Scheme:
    bits, group_size = _common(f, (2, 3, 4, 8))
    format = f.get("checkpoint_format", f.get("format")) or "gptq"
    f.get("format")
    if format not in ("gptq", "gptq_v2"):
        raise NanoinferError(f"checkpoint_format={show(format)} is not supported: only gptq and gptq_v2 are")
    if f.get("dynamic"):
        raise f.error("dynamic", "is not supported: bits that differ between matrices are not")
    ordered = bool(f.get("desc_act"))

    def open(parts: Parts) -> Codec:
        words = parts.take(".qweight", ("int32",), (None, None))
        if words.shape[0] * 32 % bits:
            raise parts.error(".qweight", f"is {list(words.shape)}, which are no words of {bits}-bit integers")
        if ordered and ".g_idx" not in parts:
            raise parts.error(".g_idx", "is missing, which desc_act=true needs")
        columns, rows = words.shape[0] * 32 // bits, words.shape[1]

        def zeros(stored: Numbers) -> Numbers:
            points: Numbers = unpack(stored, bits, rows).T
            return points if format == "gptq_v2" else points + np.uint8(1) & np.uint8((1 << bits) - 1)

        return _matrix(parts, words, (rows, columns), bits, group_size, lambda w: unpack(w.T, bits, columns), zeros)

    return Scheme(open)


def _awq(f: Fields) -> Scheme:
    _, group_size = _common(f, (4,))
    version = f.get("version", f.get("format")) or "gemm"
    f.get("format")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise NanoinferError(f"version={show(version)} is not supported: only gemm is")
    f.only("zero_point", True)
    if f.get("backend") == "llm-awq":
        raise f.error("backend", "is not supported: only the layout of autoawq is")

    def integers(words: Numbers) -> Numbers:
        values = unpack(words, 4, 8 * words.shape[1]).T.reshape(-1, 8, len(words))
        return np.ascontiguousarray(values[:, _AWQ_ORDER].reshape(-1, len(words)))

    def open(parts: Parts) -> Codec:
        words = parts.take(".qweight", ("int32",), (None, None))
        return _matrix(parts, words, (8 * words.shape[1], words.shape[0]), 4, group_size, integers, integers)

    return Scheme(open)


def _ternary(divides: bool, parts: Parts) -> Codec:
    """Return the codec of a matrix: four codes in a byte, and one scale of the matrix.

    Code i of byte (r, c), bits 2 i and 2 i + 1, is row i R + r of the matrix, where the packed one has R rows; its
    value is code - 1. The scale divides values with the linear class `bitlinear`, and multiplies them with
    `autobitlinear`.
    Inputs of 8 bits are a part of the model (`ModelConfig.rounded_inputs`).
    """
    weight = parts.take(".weight", ("uint8",) if divides else ("uint8", *FLOATS), (None, None))
    scale = parts.take(".weight_scale", FLOATS, (1,))

    def scales() -> Numbers:
        factor = scale.read().float32().reshape(1, 1)
        with np.errstate(divide="ignore"):
            return 1.0 / factor.astype(np.float64) if divides else factor

    rows, columns = weight.shape
    if weight.dtype != "uint8":  # autobitlinear may store the values
        return Scaled(
            weight.file, (rows, columns), lambda: weight.read().float32(), scales, (rows, columns), whole=False
        )

    def codes() -> Numbers:
        packed = weight.read().values
        each = [(packed >> np.uint8(2 * i) & np.uint8(3)).view(np.int8) for i in range(4)]
        values: Numbers = np.concatenate(each) - np.int8(1)
        return values

    shape = (4 * rows, columns)
    return Scaled(weight.file, shape, codes, scales, shape, limits=(-1, 2))


def _bitnet(f: Fields) -> Scheme:
    f.only("linear_class", "bitlinear", "autobitlinear")
    f.only("quantization_mode", "offline")
    f.only("use_rms_norm", False, None)
    f.only("modules_to_not_convert", None, [], ["lm_head"])
    f.get("rms_norm_eps")
    return Scheme(partial(_ternary, f.raw.get("linear_class", "bitlinear") == "bitlinear"))


_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mixed-precision",
    "dense",
)  # fmt: skip


def _compressed_tensors(f: Fields) -> Scheme:
    f.known.update("ignore global_compression_ratio version quant_method".split())
    f.only("quantization_status", "compressed", "frozen", None)
    _check_format(f)
    sparsity = f.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in ("dense", None):
        raise f.error("sparsity_config", "is not supported: only dense tensors are")
    if f.get("transform_config"):
        raise f.error("transform_config", "is not supported: inputs would have to be transformed")
    groups = f.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise f.error("config_groups", "is not an object of groups of layers")
    bits, blocks, activations = set[int](), set[tuple[int, ...]](), f.get("kv_cache_scheme") is not None
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise NanoinferError(f"config_groups: {show(name)} has no object `weights`")
        with about(f"config_groups: {show(name)}"):
            own = Fields(group)
            _check_format(own)
            weights = Fields(group["weights"])
            bits.add(weights.integer("num_bits", 8))
            weights.only("type", "int", "float")
            if (block := block_of(weights, "block_structure")) is not None:
                blocks.add(tuple(block))
        activations = activations or any(group.get(part) for part in ("input_activations", "output_activations"))
    return Scheme(lambda parts: _open(parts, sorted(bits), next(iter(sorted(blocks)), None)), activations=activations)


def _check_format(f: Fields) -> None:
    if f.get("format") is not None and f.get("format") not in _FORMATS:
        raise f.error("format", f"is not supported: only {', '.join(_FORMATS)} are")


def _open(parts: Parts, bits: Sequence[int], block: Sequence[int] | None) -> Codec:
    if ".weight_packed" not in parts:
        weight = parts.take(".weight", ("int8", "float8_e4m3fn", "float8_e5m2"), (None, None))
        if weight.dtype != "int8":
            return float8(parts, ".weight_scale", block)
        scaled = Scaled(weight.file, weight.shape, lambda: weight.read().values, limits=(-128, 127))
        return _with_scales(parts, scaled, 8, block)
    packed = parts.take(".weight_packed", ("int32", "uint8"), (None, None))
    if packed.dtype == "uint8":
        if ".weight_global_scale" in parts:
            raise parts.error(".weight_global_scale", "is not supported: NVFP4 is not")
        return mxfp4(parts, ".weight_packed", ".weight_scale")
    rows, columns = parts.take(".weight_shape", ("int32", "int64"), (2,)).read().values.tolist()
    fitting = [n for n in bits if n <= 8 and -(-columns * n // 32) == packed.shape[1]]
    if rows != packed.shape[0] or columns < 1 or len(fitting) != 1:
        named = " or ".join(map(str, bits))
        raise parts.error(".weight_packed", f"is {list(packed.shape)}: not {[rows, columns]} numbers of {named} bits")
    width = fitting[0]
    half = np.full((1, 1), 1 << width - 1, np.int16)  # is added to integers, and to zero points, before they are packed
    scaled = Scaled(
        packed.file, (rows, columns), lambda: unpack(packed.read().values, width, columns), zeros=lambda: half,
        limits=(0, (1 << width) - 1),
    )  # fmt: skip
    return _with_scales(parts, scaled, width, block)


def _with_scales(parts: Parts, integers: Scaled, bits: int, block: Sequence[int] | None) -> Codec:
    """Return integers with their scales: one, one a row, or one for each group of columns or block."""
    rows, columns = integers.shape
    scale, order = parts.take(".weight_scale", FLOATS), None
    if len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 1:
        groups = scale.shape[1]
        order = order_of(parts, ".weight_g_idx", columns, groups)
        each = columns if order is not None else groups_of(parts, ".weight_scale", columns, groups)
        scales, rectangle = lambda: scale.read().float32(), (1, each)
    else:
        scales, rectangle = scale_of(parts, ".weight_scale", (rows, columns), block)
    zeros = integers.zeros
    if ".weight_zero_point" in parts:
        zeros = _zeros(parts, bits, scale.shape, int(zeros()[0, 0]))
    return replace(integers, scales=scales, block=rectangle, zeros=zeros, order=order)


def _zeros(parts: Parts, bits: int, shape: tuple[int, ...], offset: int) -> Callable[[], Numbers]:
    """Return how to read zero points plus an offset. They are packed along the rows if they are words."""
    rows, groups = shape if len(shape) == 2 else (prod(shape), 1)
    if parts.take(".weight_zero_point", ("int8", "int32")).dtype == "int8":
        plain = parts.take(".weight_zero_point", ("int8",), shape)
        return lambda: plain.read().values.reshape(rows, groups).astype(np.int16) + offset
    packed = parts.take(".weight_zero_point", ("int32",), (-(-rows * bits // 32), groups))
    return lambda: unpack(packed.read().values.T, bits, rows).T


METHODS: dict[str, Method] = {
    "gptq": Method((".qweight",), (".qzeros", ".scales", ".g_idx"), _gptq),
    "awq": Method((".qweight",), (".qzeros", ".scales"), _awq),
    "compressed-tensors": Method(
        (".weight_scale",),
        (".weight", ".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
        _compressed_tensors,
    ),
    "fp8": Method((".weight_scale_inv", ".weight_scale"), (".weight",), _fp8, linear=False),
    "bitsandbytes": Method(
        (".weight.absmax",),
        (".weight", ".weight.quant_map", _NESTED, ".weight.nested_quant_map", _STATE),
        _bitsandbytes,
    ),
    "mxfp4": Method(("_blocks",), ("_scales",), _mxfp4, result=""),
    "bitnet": Method((".weight_scale",), (".weight",), _bitnet),
}
"""By quant_method in quantization_config."""
_ACTIVATIONS = tuple(
    f".{name}" for name in "input_scale output_scale k_scale v_scale q_scale input_zero_point output_zero_point"
    " input_global_scale input_scale_ub activation_scale".split()
)  # fmt: skip
"""Ends of the names of tensors about activations, which are not quantized here."""


def dequantized(
    stored: Mapping[str, StoredTensor], quantization: Any, where: str, transposed: Collection[str]
) -> tuple[dict[str, StoredTensor], str]:
    """Return the tensors with a `QuantizedTensor` in the place of those that make a matrix, and the method's name.

    Shapes and dtypes are checked, and only what decides formats is read: scales, zero points and orders.

    Args:
        stored: the tensors by their names in the folder.
        given: quantization_config.
        where: the folder, for messages.
        transposed: parts of a layer whose plain matrix is stored as (in, out): `Family.transposed`.

    Raises:
        NanoinferError: the method or a field is not supported, or a tensor is missing or has a wrong shape or dtype.
    """
    with about(f"{where}/config.json: quantization_config"):
        name, method, scheme = _scheme(quantization)
    kept = {key: tensor for key, tensor in stored.items() if not key.endswith(_ACTIVATIONS)}
    groups = _groups(kept, method)
    if not groups:
        raise NanoinferError(
            f"{where}/config.json: quantization_config is that of {name}, but no tensor ends with"
            f" {' or '.join(method.marks)}: its weights are not quantized: remove the field"
        )
    chosen: Counter[str] = Counter()
    for stem, tensors in groups.items():
        with about(where):
            parts = Parts(stem, tensors)
            codec = scheme.open(parts)
            if untaken := parts.untaken:
                raise parts.error(untaken[0], f"is not supported beside {show(stem + min(tensors))[1:-1]}")
            format, reason = codec.exact()
            chosen[f"have the values of {format}" if format else f"are dequantized: {reason}"] += 1
        for end in tensors:
            del kept[stem + end]
        if stem + method.result in kept:
            raise NanoinferError(f"{where} contains {show(stem + method.result)} twice: plain and quantized")
        matrix: StoredTensor = QuantizedTensor.of(codec, format)
        if method.linear and stem.endswith(tuple(f".{part}" for part in transposed)):
            matrix = matrix.t()
        kept[stem + method.result] = matrix
    named = ", ".join(f"{count} {what}" for what, count in chosen.most_common())
    log.info("%s: quantized by %s; of its matrices %s", where, name, named)
    if scheme.activations:
        log.info("%s: its config quantizes activations too, which is not done: results are closer to exact ones", where)
    return kept, name


def _scheme(quantization: Any) -> tuple[str, Method, Scheme]:
    """Return the method's name, the method, and its scheme for this folder."""
    if not isinstance(quantization, dict):
        raise NanoinferError(f"is {show(quantization)}, not an object")
    f = Fields(quantization)
    name = f.get("quant_method")
    if name is None and f.get("load_in_4bit"):  # before transformers 4.33
        name = "bitsandbytes"
    if not isinstance(name, str) or (method := METHODS.get(name)) is None:
        raise NanoinferError(f"quant_method={show(name)} is not supported: only {', '.join(METHODS)} are")
    scheme = method.read(f)
    if unknown := sorted(f.raw.keys() - f.known):
        log.warning("quantization_config: unknown fields are ignored: %s", escaped(", ".join(unknown)))
    return name, method, scheme


def _groups(stored: Mapping[str, StoredTensor], method: Method) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of each quantized matrix: how their names begin -> the ends of the names -> the tensors."""
    ends = sorted((*method.marks, *method.others), key=len, reverse=True)
    groups: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        if (end := next((e for e in ends if name.endswith(e)), None)) is not None:
            groups[name.removesuffix(end)][end] = tensor
    return {stem: tensors for stem, tensors in groups.items() if any(mark in tensors for mark in method.marks)}
