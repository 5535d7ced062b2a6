"""OLMo 3: OLMo 2 whose layers are local but for every fourth, which alone has scaled rotary positions.

Source: transformers, models/olmo3.
"""

from __future__ import annotations

from typing import Any

from nanoinfer.config import LayerKind, ModelConfig
from nanoinfer.models.families import olmo2
from nanoinfer.models.families.base import Family
from nanoinfer.models.families.fields import Fields, window_fields


def _read_layers(f: Fields, config: ModelConfig) -> dict[str, Any]:
    windows = f.windows(config.n_layer, f.window("sliding_window", 4096), lambda i: (i + 1) % 4 != 0)
    everywhere = f.rotary(config, 500000.0, kind="full_attention")
    nearby = f.rotary(config, 500000.0, kind="sliding_attention", scaled=False)
    return {"layers": tuple(LayerKind(w, everywhere if w is None else nearby) for w in windows)}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    fields = window_fields(config)
    old = {"rope_type": "default"} if fields["rope_scaling"] is None else fields["rope_scaling"]
    nearby = next((kind.rotary for kind in config.layers if kind.window is not None), None)
    base = fields["rope_theta"] if nearby is None else nearby.base
    return fields | {
        "rope_parameters": {
            "full_attention": old | {"rope_theta": fields["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        }
    }


FAMILY = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    olmo2.FAMILY.fields,
    olmo2.FAMILY.names,
    olmo2.FAMILY.fixed,
    biases=olmo2.FAMILY.biases,
    read_layers=_read_layers,
    write_layers=_write_layers,
)
