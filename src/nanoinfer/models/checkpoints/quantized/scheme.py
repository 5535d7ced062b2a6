"""What a method of quantization says, and the fields of its part of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.models.checkpoints.quantized.base import Codec, Parts
from nanoinfer.models.families.fields import Fields


@dataclass(frozen=True)
class Scheme:
    """How the matrices of one folder are stored."""

    open: Callable[[Parts], Codec]
    """Check the tensors of a matrix and return its codec. Raises NanoinferError."""
    activations: bool = False
    """Whether the config quantizes activations too."""


@dataclass(frozen=True)
class Method:
    """A method of quantization: its tensors, and how its config is read."""

    marks: tuple[str, ...]
    """Ends of names by which a quantized matrix is known."""
    others: tuple[str, ...]
    """Ends of the names of its other tensors."""
    read: Callable[[Fields], Scheme]
    """Check the config's fields and return the scheme. Raises NanoinferError."""
    result: str = ".weight"
    """End of the name of the matrix."""
    linear: bool = True
    """Whether a matrix is (out, in) even where the family stores it transposed."""
