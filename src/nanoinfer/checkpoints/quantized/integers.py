"""GPTQ and AWQ: 2 to 8 bits in words of 32, groups of columns with scales and zero points; BitNet's ternary matrices.

Sources: GPTQ (Frantar et al. 2022, arXiv 2210.17323), the layout of AutoGPTQ (auto_gptq/nn_modules/qlinear) and
GPTQModel (gptqmodel/nn_modules/qlinear/torch.py); AWQ (Lin et al. 2023, arXiv 2306.00978), the layout of AutoAWQ
(awq/utils/packing_utils.py); BitNet in transformers (integrations/bitnet.py). The references of GPTQ and AWQ compute in
float16; here the same formula is rounded once to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nanoinfer.checkpoints.quantized.base import (
    FLOATS,
    Codec,
    Method,
    Numbers,
    Parts,
    Scaled,
    Scheme,
    groups_of,
    order_of,
    unpack,
)  # fmt: skip
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.checks import show

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
    groups, wanted = scale.shape[0], -(-columns // group_size) if group_size > 0 else 1
    if groups != wanted:
        what = f"has {groups} groups, but group_size={group_size} needs {wanted} of {columns} columns"
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
        found = scale.read().float32().reshape(1, 1)
        with np.errstate(divide="ignore"):
            return 1.0 / found.astype(np.float64) if divides else found

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


GPTQ = Method((".qweight",), (".qzeros", ".scales", ".g_idx"), _gptq)
AWQ = Method((".qweight",), (".qzeros", ".scales"), _awq)
BITNET = Method((".weight_scale",), (".weight",), _bitnet)
