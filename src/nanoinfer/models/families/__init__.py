"""The families of models, one file for each lineage, and the table of them."""

from __future__ import annotations

from nanoinfer.models.families import (
    cohere,
    deepseek,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    granite,
    hybrid,
    llama,
    mamba,
    mistral,
    olmo,
    phi,
    qwen,
)
from nanoinfer.models.families.base import Family

_FAMILIES = (
    gpt2.GPT2, gpt2.GPT_NEOX, llama.LLAMA, mistral.MISTRAL, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA3, gemma.GEMMA4,
    olmo.OLMO2, llama.SMOLLM3, llama.NANOCHAT, mistral.STARCODER2, gemma.GEMMA, gemma.GEMMA2, phi.PHI, phi.PHI3,
    granite.GRANITE, olmo.OLMO, olmo.OLMO3, mistral.MINISTRAL, mistral.MINISTRAL3, llama.STABLELM, glm.GLM, glm.GLM4,
    cohere.COHERE, cohere.COHERE2, olmo.EXAONE4, llama.ERNIE4_5, llama.SEED_OSS, llama.ARCEE, llama.HELIUM, gpt2.GPTJ,
    mistral.MIXTRAL, qwen.QWEN2_MOE, qwen.QWEN3_MOE, olmo.OLMOE, granite.GRANITEMOE, deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3, gpt2.OPT, llama.BITNET, gpt_oss.GPT_OSS, llama.NEMOTRON, llama.JAIS2, llama.EXAONE,
    granite.MINICPM, mamba.GRANITEMOEHYBRID, gpt2.GPT_NEO,
    hybrid.QWEN3_5, hybrid.QWEN3_5_MOE, hybrid.QWEN3_NEXT, hybrid.LFM2, hybrid.LFM2_MOE,
    mamba.NEMOTRON_H, mamba.FALCON_H1,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""By model_type."""
