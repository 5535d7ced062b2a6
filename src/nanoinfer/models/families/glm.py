"""GLM-4 of 2024 and GLM-Edge: Llama with half of each head rotated, adjacent dimensions in pairs.

Source: transformers, models/glm.
"""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.models.families import glm4, llama

FAMILY = replace(glm4.FAMILY, model_type="glm", architecture="GlmForCausalLM", names=llama.NAMES, fixed=llama.FIXED)
