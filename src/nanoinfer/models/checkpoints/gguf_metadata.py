"""The metadata of an architecture in a GGUF file: keys are checked as they are read, and all must be known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.gguf_file import Value
from nanoinfer.models.checkpoints.stored import StoredTensor
from nanoinfer.models.families.fields import Fields
from nanoinfer.utils.checks import plain, require_int, show
from nanoinfer.utils.files import escaped

_MAX_LENGTH = 4096  # of a value: no architecture has more layers


class Metadata(Fields):
    """The metadata of one architecture; the prefix of its keys is added here."""

    def __init__(self, raw: Mapping[str, Value], arch: str, tensors: Mapping[str, StoredTensor]) -> None:
        ours = {k: v for k, v in raw.items() if k.startswith(f"{arch}.")}
        for key, value in ours.items():
            if isinstance(value, (str, list, np.ndarray)) and len(value) > _MAX_LENGTH:
                raise NanoinferError(f"{show(key)} has more than {_MAX_LENGTH} values")
        super().__init__({key: plain(value) for key, value in ours.items()})
        self.arch, self.tensors = arch, tensors

    def key(self, name: str) -> str:
        """Return a key of this architecture: "block_count" -> "llama.block_count"."""
        return f"{self.arch}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.raw

    def int_(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        if default is None:
            self.required(self.key(name))
        return self.integer(self.key(name), default or 1)

    def ints(self, name: str, count: int) -> list[int]:
        """Return `count` positive integers, one for each layer, or a number that stands for all of them."""
        value = self.required(self.key(name))
        if not isinstance(value, list):
            return [self.int_(name)] * count
        if len(value) != count:
            raise self.error(self.key(name), f"is not a list of {count} numbers, one for each layer")
        return [require_int(self.key(name), one, 1, 2**31 - 1) for one in value]

    def float_(self, name: str, default: float | None) -> float | None:
        """Return a positive number."""
        return default if self.get(self.key(name)) is None else self.number(self.key(name), 1.0)

    def check_known(self) -> None:
        """Raise NanoinferError if the architecture has a key that was not read."""
        if unknown := sorted(self.raw.keys() - self.known):
            value = show(self.raw[unknown[0]])
            raise NanoinferError(
                f"{escaped(unknown[0])}={value} is not supported: the model needs something that is not implemented"
            )
