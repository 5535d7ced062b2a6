"""The families of models, one file for each lineage, and the table of them."""

from __future__ import annotations

from nanoinfer.models.families import deepseek, gemma, gpt2, granite, hybrid, llama, mamba, mistral, olmo, qwen
from nanoinfer.models.families.base import Family

_FILES = (llama, gpt2, mistral, qwen, gemma, olmo, granite, deepseek, hybrid, mamba)
FAMILIES: dict[str, Family] = {
    family.model_type: family for file in _FILES for family in vars(file).values() if isinstance(family, Family)
}
"""By model_type: the families that are constants of these files."""
