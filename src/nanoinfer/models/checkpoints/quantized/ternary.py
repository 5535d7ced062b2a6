"""BitNet's ternary matrices: four codes in a byte, and one scale of the matrix.

Code i of byte (r, c), bits 2 i and 2 i + 1, is row i R + r of the matrix, where the packed one has R rows; its value is
code - 1. The scale divides values with the linear class `bitlinear`, and multiplies them with `autobitlinear`. Inputs
of 8 bits are a part of the model (`ModelConfig.rounded_inputs`). Source: transformers, integrations/bitnet.py.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from nanoinfer.models.checkpoints.quantized.base import FLOATS, Codec, Method, Numbers, Parts, Scaled, Scheme
from nanoinfer.models.families.fields import Fields


def _ternary(divides: bool, parts: Parts) -> Codec:
    """Return the codec of a matrix."""
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


BITNET = Method((".weight_scale",), (".weight",), _bitnet)
