"""Devices: a table of published peaks, and the choice between it and a measurement."""

from __future__ import annotations

from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.measure import MEASURE, measure
from nanoinfer.utils.checks import require_choice

GB = 10**9
TERA = 10**12


def _gpu(name: str, gb_per_sec: float, fp32: float, half: float, memory_gb: int, source: str) -> Ceiling:
    """Return the ceiling of a GPU whose bfloat16 and float16 throughput is `half` TFLOP/s."""
    flops = {"float32": fp32 * TERA, "bfloat16": half * TERA, "float16": half * TERA}
    return Ceiling(name, gb_per_sec * GB, flops, source, memory_gb * GB)


DEVICES: dict[str, Ceiling] = {
    "t4": Ceiling(
        "t4", 300 * GB, {"float32": 8.1 * TERA, "float16": 65 * TERA},  # no bfloat16 before Ampere
        "NVIDIA T4 Tensor Core GPU datasheet", 16 * GB, default_dtype="float16",
    ),
    "l40s": _gpu("l40s", 864, 91.6, 362.05, 48, "NVIDIA L40S datasheet"),
    "rtx4090": _gpu("rtx4090", 1008, 82.6, 165.2, 24, "NVIDIA Ada GPU architecture whitepaper, RTX 4090"),
    "a100": _gpu("a100", 2039, 19.5, 312, 80, "NVIDIA A100 datasheet (80 GB, SXM)"),
    "h100": _gpu("h100", 3350, 67, 989.4, 80, "NVIDIA H100 datasheet (SXM) and architecture whitepaper"),
    "h200": _gpu("h200", 4800, 67, 989.4, 141, "NVIDIA H200 datasheet (SXM); it computes as an H100"),
}  # fmt: skip


def find_device(name: str, local_device: str = "cpu") -> Ceiling:
    """Return a device's ceiling; "measure" measures `local_device` of this machine, cpu or cuda:N.

    Case, spaces, hyphens and underscores are ignored: "RTX 4090" is "rtx4090".

    Raises:
        NanoinferError: an unknown device.
    """
    key = "".join(c for c in name.lower() if c not in " -_") if isinstance(name, str) else ""
    if key == MEASURE:
        return measure(device=local_device)
    if key not in DEVICES:
        require_choice("device", name, (*DEVICES, MEASURE))
    return DEVICES[key]
