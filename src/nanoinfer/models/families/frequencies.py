"""Scaled rotary embeddings as config.json describes them. Source: transformers, modeling_rope_utils.py."""

from __future__ import annotations

import math
from typing import Any

from nanoinfer.config import Rotary
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import require_float, require_int, show

_CONTEXT = "original_max_position_embeddings"
_LLAMA3 = {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
_YARN = {"low_freq_factor": ("beta_slow", 1.0), "high_freq_factor": ("beta_fast", 32.0)}
KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", _CONTEXT},
    "proportional": {"factor"},
    "llama3": {"factor", _CONTEXT, *_LLAMA3.values()},
    "yarn": {
        "factor", _CONTEXT, "beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate",
        "llama_4_scaling_beta", "max_position_embeddings",
    },
    "longrope": {"factor", _CONTEXT, "short_factor", "long_factor", "attention_factor"},
}  # fmt: skip
"""rope_type -> the fields of rope_parameters that it reads, beside those of all types."""


def read(kind: str, given: dict[str, Any], original: Any, block_size: int) -> dict[str, Any]:
    """Return the fields of `Rotary` that describe a scaling.

    Args:
        kind: rope_type; one of KEYS.
        given: the object with the parameters.
        original: the context length before the frequencies were scaled.
        block_size: the context length.

    Raises:
        NanoinferError: a parameter is missing or malformed.
    """
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"scaling": kind, "factor": given.get("factor")}
    if kind == "proportional":
        return {"scaling": kind, "factor": given.get("factor", 1.0)}
    found: dict[str, Any] = {"scaling": kind, "original_context": require_int(_CONTEXT, original, 1, 2**24)}
    if kind == "llama3":
        return found | {"factor": given.get("factor")} | {o: given.get(theirs) for o, theirs in _LLAMA3.items()}
    factor = given.get("factor")
    factor = block_size / original if factor is None else require_float("rope factor", factor, 1.0, 1e6)
    attention = given.get("attention_factor")
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if not isinstance(given.get(name), list):
                raise NanoinferError(f"{name}={show(given.get(name))} is not a list of numbers")
            found[f"{name}s"] = tuple(given[name])
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
        return found | {"attention_factor": attention}
    if attention is None:
        scales = [given.get("mscale"), given.get("mscale_all_dim")]
        above, below = (require_float("mscale", s, 0.0, 1e3) for s in scales) if all(scales) else (1.0, 0.0)
        attention = magnitude(factor, above) / magnitude(factor, below)
    found |= {"factor": factor, "attention_factor": attention, "truncate": given.get("truncate", True)}
    found |= {ours: given.get(theirs) or default for ours, (theirs, default) in _YARN.items()}
    return found | {"query_growth": given.get("llama_4_scaling_beta") or 0.0}


def magnitude(factor: float, scale: float) -> float:
    """Return by what yarn multiplies queries and keys for a longer context (Peng et al. 2023, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0


def write(rotary: Rotary) -> dict[str, Any] | None:
    """Return the object that `read` reads; None if the frequencies are not scaled."""
    if rotary.scaling == "none":
        return None
    found: dict[str, Any] = {"rope_type": rotary.scaling}
    if rotary.scaling != "longrope":
        found["factor"] = rotary.factor
    if rotary.scaling == "proportional":
        share = 2 * rotary.num_turning / rotary.dim  # half a pair more where the quotient was rounded down
        exact = int(share * rotary.dim // 2) == rotary.num_turning
        return found | {"partial_rotary_factor": share if exact else share + 1 / rotary.dim}
    if rotary.scaling not in ("linear", "dynamic"):
        found[_CONTEXT] = rotary.original_context
    if rotary.scaling == "llama3":
        found |= {theirs: getattr(rotary, ours) for ours, theirs in _LLAMA3.items()}
    if rotary.scaling in ("yarn", "longrope"):
        found["attention_factor"] = rotary.attention_factor
    if rotary.scaling == "yarn":
        found |= {theirs: getattr(rotary, ours) for ours, (theirs, _) in _YARN.items()}
        found["truncate"] = rotary.truncate
    if rotary.scaling == "longrope":
        found |= {"short_factor": list(rotary.short_factors), "long_factor": list(rotary.long_factors)}
    return found | ({"llama_4_scaling_beta": rotary.query_growth} if rotary.query_growth else {})
