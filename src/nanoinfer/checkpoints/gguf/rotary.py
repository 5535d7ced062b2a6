"""Scaled rotary positions and windows in the metadata of GGUF files, as fields of config.json.

Source: llama.cpp, conversion/base.py and src/llama-context.cpp; Ollama, convert/convert_gptoss.go.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.checkpoints.gguf.metadata import Metadata

LONG = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""Tensors with the divisors of longrope."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def scaling(m: Metadata) -> dict[str, Any] | None:
    """Return rope_scaling. llama.cpp stores Llama 3's as a divisor of each frequency, computed when converting."""
    kind = m.get(m.key("rope.scaling.type"), "yarn" if m.arch == "gptoss" else "none")  # Ollama's gptoss has none
    factor = m.float_("rope.scaling.factor", m.float_("rope.scale_linear", 1.0))
    m.get(m.key("rope.scaling.finetuned"))
    if m.arch == "phi3" and any(name in m.tensors for name in LONG.values()):  # gguf_architectures.py reads them
        m.get(m.key("rope.scaling.original_context_length"))
        return None
    m.only(m.key("rope.scaling.attn_factor"), 1.0)
    if kind == "yarn":
        return _yarn(m, factor)
    if kind not in ("none", "linear"):
        raise m.error(m.key("rope.scaling.type"), "is not supported: only none, linear and yarn are")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _yarn(m: Metadata, factor: float | None) -> dict[str, Any]:
    """Return rope_scaling of type yarn.

    The range of pairs that it blends is not rounded to whole numbers in gpt-oss: as in the model, other than in
    llama.cpp. In deepseek2, the multiplier is a tenth of DeepSeek's two `mscale`, which must be equal.
    """
    m.only(m.key("rope.scaling.yarn_ext_factor"), 1.0)
    share = m.float_("rope.scaling.yarn_log_multiplier", None) or 0.0
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": m.int_("rope.scaling.original_context_length"),
        "beta_fast": m.float_("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": m.float_("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": m.arch not in ("gpt-oss", "gptoss"),
    }
    if m.arch == "deepseek2":
        return found | {"attention_factor": 1.0, "mscale_all_dim": round(share / 0.1, 6)}
    if (attention := m.float_("rope.scaling.yarn_attn_factor", None)) is not None:
        found["attention_factor"] = attention
    return found | {"mscale": 1.0, "mscale_all_dim": share}


def windows(m: Metadata, num_layers: int, step: int | None = None) -> dict[str, Any]:
    """Return the fields of the layers' windows; an empty dict if no layer has one.

    Args:
        m: the metadata.
        num_layers: number of layers.
        step: every how many layers one has no window if the file does not say it; None: it must.
    """
    if "attention.sliding_window" not in m:
        return {}
    pattern = m.get(key := m.key("attention.sliding_window_pattern"), step)
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(num_layers)]
    if not (isinstance(pattern, list) and len(pattern) == num_layers and all(type(one) is bool for one in pattern)):
        raise m.error(key, f"must be a number or a list of {num_layers} booleans, one for each layer")
    types = [_LAYER_TYPES[local] for local in pattern]
    return {"sliding_window": m.int_("attention.sliding_window"), "use_sliding_window": True, "layer_types": types}
