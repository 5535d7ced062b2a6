"""The adapter of a request with vLLM's name and fields: LoRARequest. docs/lora.md"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoinfer.errors import NanoinferError, show
from nanoinfer.utils.checks import keep_int


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter that a request is generated with.

    Raises:
        NanoinferError: a value is of a wrong type or out of range.
    """

    lora_name: str
    """Name of the adapter, for messages."""
    lora_int_id: int
    """Identifies the adapter: requests of the same number share it. At least 1."""
    lora_path: str
    """A folder of peft, or a GGUF file of an adapter. It is read when a request names it first."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise NanoinferError(f"{name}={show(value)} is not a string of one or more characters")
        keep_int(self, "lora_int_id", 1, 2**31 - 1)


def named_adapters(modules: Sequence[str]) -> dict[str, LoRARequest]:
    """Return adapters by their names: ["a=path"] -> {"a": LoRARequest("a", 1, "path")}.

    Raises:
        NanoinferError: a string is not of the form NAME=PATH, or a name is given twice.
    """
    adapters: dict[str, LoRARequest] = {}
    for i, module in enumerate(modules):
        name, separator, path = module.partition("=")
        if not separator or not name or not path or name in adapters:
            raise NanoinferError(f"lora_modules={show(module)} is not NAME=PATH with a name of its own")
        adapters[name] = LoRARequest(name, i + 1, path)
    return adapters
