"""GPTQ and AWQ: 2 to 8 bits in words of 32, groups of columns with scales and zero points.

Sources: GPTQ (Frantar et al. 2022, arXiv 2210.17323), the layout of AutoGPTQ (auto_gptq/nn_modules/qlinear) and
GPTQModel (gptqmodel/nn_modules/qlinear/torch.py); AWQ (Lin et al. 2023, arXiv 2306.00978), the layout of AutoAWQ
(awq/utils/packing_utils.py). The references compute in float16; here the same formula is rounded once to float32.
"""

from __future__ import annotations

import numpy as np

from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.quantized.base import (
    FLOATS,
    Codec,
    Numbers,
    Parts,
    Scaled,
    groups_of,
    order_of,
    unpack,
)
from nanoinfer.models.checkpoints.quantized.scheme import Method, Scheme
from nanoinfer.models.families.fields import Fields
from nanoinfer.utils.checks import show

_GPTQ_BITS = (2, 3, 4, 8)
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


def _check_group(parts: Parts, end: str, columns: int, groups: int, group_size: int) -> None:
    """Raise NanoinferError if the scales are not those of the config's groups."""
    wanted = -(-columns // group_size) if group_size > 0 else 1
    if groups != wanted:
        raise parts.error(end, f"has {groups} groups, but group_size={group_size} needs {wanted} of {columns} columns")


def _gptq(f: Fields) -> Scheme:
    bits, group_size = _common(f, _GPTQ_BITS)
    format = f.get("checkpoint_format", f.get("format")) or "gptq"
    f.get("format")
    if format not in ("gptq", "gptq_v2"):
        raise NanoinferError(f"checkpoint_format={show(format)} is not supported: only gptq and gptq_v2 are")
    if f.get("dynamic"):
        raise f.error("dynamic", "is not supported: bits that differ between matrices are not")

    def open(parts: Parts) -> Codec:
        words = parts.take(".qweight", ("int32",), (None, None))
        if words.shape[0] * 32 % bits:
            raise parts.error(".qweight", f"is {list(words.shape)}, which are no words of {bits}-bit integers")
        columns, rows = words.shape[0] * 32 // bits, words.shape[1]
        scale = parts.take(".scales", FLOATS, (None, rows))
        groups = scale.shape[0]
        _check_group(parts, ".scales", columns, groups, group_size)
        order = order_of(parts, ".g_idx", columns, groups)
        size = columns if order is not None else groups_of(parts, ".scales", columns, groups)
        zero = parts.take(".qzeros", ("int32",), (groups, -(-rows * bits // 32)))

        def zeros() -> Numbers:
            stored: Numbers = unpack(zero.read().values, bits, rows).T
            return stored if format == "gptq_v2" else stored + np.uint8(1) & np.uint8((1 << bits) - 1)

        return Scaled(
            words.file, (rows, columns), lambda: unpack(words.read().values.T, bits, columns),
            lambda: scale.read().float32().T, (1, size), zeros, (0, (1 << bits) - 1), order=order,
        )  # fmt: skip

    return Scheme(open)


def _awq(f: Fields) -> Scheme:
    _, group_size = _common(f, (4,))
    version = f.get("version", f.get("format")) or "gemm"
    f.get("format")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise NanoinferError(f"version={show(version)} is not supported: only gemm is")
    f.only("zero_point", True)

    def in_order(values: Numbers) -> Numbers:
        return np.ascontiguousarray(values.T.reshape(-1, 8, len(values))[:, _AWQ_ORDER].reshape(-1, len(values)))

    def open(parts: Parts) -> Codec:
        words = parts.take(".qweight", ("int32",), (None, None))
        columns, rows = words.shape[0], words.shape[1] * 8
        scale = parts.take(".scales", FLOATS, (None, rows))
        groups = scale.shape[0]
        _check_group(parts, ".scales", columns, groups, group_size)
        size = groups_of(parts, ".scales", columns, groups)
        zero = parts.take(".qzeros", ("int32",), (groups, words.shape[1]))
        return Scaled(
            words.file, (rows, columns), lambda: in_order(unpack(words.read().values, 4, rows)),
            lambda: scale.read().float32().T, (1, size), lambda: in_order(unpack(zero.read().values, 4, rows)), (0, 15),
        )  # fmt: skip

    return Scheme(open)


GPTQ = Method((".qweight",), (".qzeros", ".scales", ".g_idx"), _gptq)
AWQ = Method((".qweight",), (".qzeros", ".scales"), _awq)
