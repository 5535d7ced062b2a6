"""What a peer can do, and its installation, checked before anything is loaded; used by all backends that are peers.

A backend that cannot do what a case asks for says so in one line: no field of a case is ignored.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from nanoinfer.bench.case import SAMPLERS, Case, Work
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams

_PACKAGES = {"llama_cpp": "llama-cpp-python"}  # module -> its name on the package index, where they differ


def require_module(name: str) -> Any:
    """Return a peer's module. Raises NanoinferError with what to install if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as e:  # the last two: a shared library that does not load
        reason = " ".join(str(e).split())[:160]
        raise NanoinferError(f"{name} cannot be imported ({reason}): pip install {_PACKAGES.get(name, name)}") from None


@functools.cache  # llama.cpp keeps the pointer: the callback must live as long as the process
def silence_llama_cpp() -> Any:
    """Drop llama.cpp's log, which goes to stderr otherwise; return the callback. Errors come back as codes anyway."""
    llama_cpp = require_module("llama_cpp").llama_cpp
    callback = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def require_case(
    case: Case,
    *,
    sampling: Sequence[str],
    dtypes: Sequence[str],
    quantizations: Sequence[str] = (),
    devices: Sequence[str] = ("cpu", "cuda"),
) -> None:
    """Raise NanoinferError unless a backend can do what a case asks for.

    Args:
        case: the case.
        sampling: the fields of SamplingParams that the backend has, beside greedy.
        dtypes: the dtypes it computes in.
        quantizations: the names it has for weight formats below 16 bits.
        devices: the kinds of device it runs on.
    """
    who = case.backend
    if case.dtype not in dtypes:
        raise NanoinferError(f"{who} does not run in dtype={case.dtype!r} here: use one of {', '.join(dtypes)}")
    if case.quantization is not None and case.quantization not in quantizations:
        names = ", ".join(quantizations) or "none"
        raise NanoinferError(f"{who} has no quantization={case.quantization!r}: it has {names}")
    if (kind := case.device.partition(":")[0]) not in devices:
        raise NanoinferError(f"{who} does not run on device={kind!r}: use {' or '.join(devices)}")
    neutral = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    asked = [name for name, value in SAMPLERS[case.sampler].items() if value not in (neutral[name], 0)]
    if missing := [name for name in asked if name not in sampling]:
        raise NanoinferError(
            f"{who} has no {', '.join(missing)}, which sampler={case.sampler!r} asks for: use another sampler"
        )


def require_room(who: str, num_tokens: int, limit: int) -> None:
    """Raise NanoinferError if a sequence of prompt and output would be longer than a backend holds."""
    if num_tokens > limit:
        raise NanoinferError(f"{who}: {num_tokens} tokens of prompt and output are more than the {limit} it holds")


def longest(work: Work) -> int:
    """Return the tokens of the longest sequence, prompt and output together."""
    return max(len(prompt) + n for prompt, n in zip(work.prompts, work.output_tokens, strict=True))
