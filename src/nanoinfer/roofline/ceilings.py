"""The ceiling of a device: its peak bandwidth and throughput.

Covered: peak read bandwidth of the main memory, and throughput of dense matrix products with float32 accumulation at
boost clock. Kernels typically reach 80-95% of the bandwidth and 50-80% of the throughput. Not covered: kernel launches,
interconnects, and caches (a measured CPU has the speeds of its caches too). float32 means float32, PyTorch's default,
not TF32.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.formats import FORMATS, WeightFormat
from nanoinfer.utils.checks import require_choice, show


@dataclass(frozen=True)
class Ceiling:
    """Peak bandwidth and throughput of a device."""

    name: str
    bandwidth_bytes_per_sec: float
    """Bandwidth of the main memory."""
    flops_per_sec: Mapping[str, float]
    """Throughput by dtype; dtypes that the device does not support, or that were not measured, are missing. "int8":
    products of 8-bit or 4-bit weights with 8-bit activations."""
    source: str
    """Source of the figures."""
    memory_bytes: int | None = None
    """Size of the main memory; None if it is not fixed for the device."""
    default_dtype: str = "bfloat16"
    bandwidth_by_bytes: Mapping[int, float] = field(default_factory=dict)
    """Speed of reading a buffer again and again, by its size; a larger one is not faster, and the largest is read from
    the main memory. Empty: bandwidth_bytes_per_sec for all sizes."""

    def bandwidth(self, num_bytes: float) -> float:
        """Return the bytes/s at which a step reads `num_bytes`, which the next step reads again.

        Between two measured sizes, the time is interpolated; below the smallest, the speed is that of the smallest.
        """
        sizes = sorted(self.bandwidth_by_bytes)
        i = bisect_left(sizes, num_bytes)
        if i == len(sizes):
            return self.bandwidth_bytes_per_sec
        if i == 0:
            return self.bandwidth_by_bytes[sizes[0]]
        low, high = sizes[i - 1 : i + 1]
        low_sec, high_sec = (size / self.bandwidth_by_bytes[size] for size in (low, high))
        return num_bytes / (low_sec + (num_bytes - low) / (high - low) * (high_sec - low_sec))

    def compute_dtype(self, fmt: WeightFormat) -> str:
        """Return the dtype of the arithmetic for a weight format.

        A float format uses its own dtype; a quantized one uses int8 if the device has it, else the fastest dtype.

        Raises:
            NanoinferError: the device has no throughput for the dtype.
        """
        name = fmt.name if fmt.is_float else "int8"
        if not fmt.is_float and name not in self.flops_per_sec:
            name = max(self.flops_per_sec, key=lambda name: self.flops_per_sec[name], default=name)
        if not self.flops_per_sec.get(name):
            raise NanoinferError(
                f"dtype={fmt.name!r} has no throughput on {self.name}: use {', '.join(self.flops_per_sec)}, or a"
                " quantized format"
            )
        return name

    def throughput(self, fmt: WeightFormat) -> float:
        """Return the FLOP/s of matrix products with weights of a format."""
        return self.flops_per_sec[self.compute_dtype(fmt)]

    def ridge(self, fmt: WeightFormat, num_bytes: float) -> float:
        """Return the FLOPs per byte above which a step that reads `num_bytes` is compute-bound."""
        return self.throughput(fmt) / self.bandwidth(num_bytes)

    def resolve_format(self, dtype: str, stored: WeightFormat | None = None) -> WeightFormat:
        """Return the format for a name; "auto" is `stored`, the model's own, or else the device's default.

        Raises:
            NanoinferError: the name is unknown, or the device has no throughput for the format.
        """
        require_choice("dtype", dtype, ("auto", *FORMATS))
        fmt = stored if dtype == "auto" and stored else FORMATS[self.default_dtype if dtype == "auto" else dtype]
        self.compute_dtype(fmt)
        return fmt

    def to_results(self) -> dict[str, Any]:
        """Return the ceiling of a results file."""
        by_bytes = {str(size): speed for size, speed in self.bandwidth_by_bytes.items()}
        limits = {"read_bytes_per_sec": self.bandwidth_bytes_per_sec, "read_bytes_per_sec_by_size": by_bytes}
        return limits | {"flops_per_sec": dict(self.flops_per_sec), "source": self.source}

    @staticmethod
    def from_results(limits: Mapping[str, Any]) -> Ceiling:
        """Return the ceiling of a results file; that of an older one has the speed of the main memory only.

        Raises:
            KeyError, TypeError, ValueError: a value is missing, of another type or out of range.
        """
        memory, flops = limits["read_bytes_per_sec"], dict(limits["flops_per_sec"])
        by_bytes = {int(size): speed for size, speed in dict(limits.get("read_bytes_per_sec_by_size", {})).items()}
        for name, numbers in (("speed", (memory, *flops.values(), *by_bytes.values())), ("size", by_bytes)):
            if wrong := [number for number in numbers if not 1 <= number < 1e300]:
                raise ValueError(f"ceiling: a {name} is {show(wrong[0])}")
        return Ceiling("file", memory, flops, "", bandwidth_by_bytes=by_bytes)
