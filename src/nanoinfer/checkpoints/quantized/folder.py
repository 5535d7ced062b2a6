"""Find the quantized matrices of a folder: from its stored tensors to those that a family names.

What is stored decides which layers are quantized: one with a plain weight is plain, whatever the config says.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from nanoinfer.checkpoints.quantized.base import Method, Parts, QuantizedTensor, Scheme
from nanoinfer.checkpoints.quantized.compressed_tensors import COMPRESSED_TENSORS
from nanoinfer.checkpoints.quantized.floats import BITSANDBYTES, FBGEMM_FP8, FP8, MXFP4
from nanoinfer.checkpoints.quantized.integers import AWQ, BITNET, GPTQ
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.checks import show
from nanoinfer.utils.files import escaped

log = logging.getLogger("nanoinfer")

METHODS: dict[str, Method] = {
    "gptq": GPTQ, "awq": AWQ, "compressed-tensors": COMPRESSED_TENSORS, "fp8": FP8, "fbgemm_fp8": FBGEMM_FP8,
    "bitsandbytes": BITSANDBYTES, "mxfp4": MXFP4, "bitnet": BITNET,
}  # fmt: skip
"""By quant_method in quantization_config."""
_ACTIVATIONS = tuple(
    f".{name}" for name in "input_scale output_scale k_scale v_scale q_scale input_zero_point output_zero_point"
    " input_global_scale input_scale_ub activation_scale".split()
)  # fmt: skip
"""Ends of the names of tensors about activations, which are not quantized here."""


def dequantized(
    stored: Mapping[str, StoredTensor], given: Any, where: str, transposed: Collection[str]
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
        name, method, scheme = _scheme(given)
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
            if left := parts.left:
                raise parts.error(left[0], f"is not supported beside {show(stem + min(tensors))[1:-1]}")
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


def _scheme(given: Any) -> tuple[str, Method, Scheme]:
    """Return the method's name, the method, and what it says of this folder."""
    if not isinstance(given, dict):
        raise NanoinferError(f"is {show(given)}, not an object")
    f = Fields(given)
    name = f.get("quant_method")
    if name is None and (f.get("load_in_4bit") or f.get("load_in_8bit")):  # before transformers 4.33
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
