"""The adapter of a request with vLLM's name and fields: LoRARequest. docs/lora.md"""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import keep_int, show


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
    """A folder that peft has written, or a GGUF file of an adapter. It is read when a request names it first."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise NanoinferError(f"{name}={show(value)} is not a string of one or more characters")
        keep_int(self, "lora_int_id", 1, 2**31 - 1)
