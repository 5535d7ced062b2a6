"""The families of models, one file each, and the table of them."""

from __future__ import annotations

from nanoinfer.models.families import (
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    nanochat,
    olmo2,
    qwen2,
    qwen3,
    smollm3,
    starcoder2,
)  # fmt: skip
from nanoinfer.models.families.base import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (gpt2, gpt_neox, llama, mistral, qwen2, qwen3, gemma3, olmo2, smollm3, nanochat, starcoder2)
}
"""By model_type."""
