"""The limit of a served model's speed, which the page shows beside the speed of an output."""

from __future__ import annotations

from nanoinfer.errors import NanoinferError
from nanoinfer.models.model_info import ModelInfo


def tokens_per_sec(model: ModelInfo) -> float | None:
    """Measure this machine, and return the most tokens/s of one sequence that it allows; None if that is unknown.

    The sequence has half the context length. A measurement takes seconds, and all cores.
    """
    from nanoinfer.roofline.arithmetic import decode
    from nanoinfer.roofline.formats import FORMATS, mixed
    from nanoinfer.roofline.measure import MEASURE, find_device
    from nanoinfer.roofline.predict import predict

    name = model.quantization or model.dtype
    fmt = mixed(model.config, model.block_formats, name) or FORMATS[name]
    context = max(1, model.config.block_size // 2)
    try:
        return 1 / predict(decode(model.config, fmt), find_device(MEASURE, model.device), fmt, 1, context).seconds
    except NanoinferError:
        return None
