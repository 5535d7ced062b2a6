"""The families of models, one file each, and the table of them."""

from __future__ import annotations

from nanoinfer.models.families import (
    arcee,
    bitnet,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    helium,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    nanochat,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)  # fmt: skip
from nanoinfer.models.families.base import Family

_MODULES = (
    gpt2, gpt_neox, llama, mistral, qwen2, qwen3, gemma3, gemma4, olmo2, smollm3, nanochat, starcoder2, gemma, gemma2,
    phi, phi3, granite, olmo, olmo3, ministral, ministral3, stablelm, glm, glm4, cohere, cohere2, exaone4, ernie4_5,
    seed_oss, arcee, helium, gptj, mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, deepseek_v2, deepseek_v3,
    opt, bitnet, gpt_oss,
)  # fmt: skip
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""By model_type."""
