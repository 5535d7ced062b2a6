"""Which backends are in memory together: as many as main memory and the GPU's hold, by a conservative estimate.

    room for 60 GB, static 22, cuda_graph 22, triton 22, nanogpt 4  ->  [static, cuda_graph], [triton, nanogpt]

No tensor library here: tests use plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoinfer.bench.case import Case
from nanoinfer.config import ModelConfig
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import SLOTS, slot_tokens

PROCESS_BYTES = 500 << 20  # a worker with its libraries, before any weights; one that drives a GPU takes twice that
CONTEXT_BYTES = 1 << 30  # of a GPU: what a process holds there before any weights (CUDA's context, cuBLAS' workspace)


def split(group: Sequence[Case], config: ModelConfig, weights: int, room: Sequence[int]) -> list[list[Case]]:
    """Return the backends of a shape in parts, in their order; a backend too large for any is a part of its own.

    Args:
        group: cases of one shape and device. Those that differ in their draft alone share a process.
        config: the model's shape.
        weights: bytes of the model in float32.
        room: bytes of the main memory, and on a GPU also of its memory, that a part may take.
    """
    used = [0] * len(room)
    parts: list[list[Case]] = [[]]
    for case in group:
        shared = any(c.plain == case.plain for c in parts[-1])  # it uses their process
        need = [0] * len(room) if shared else needs(case, config, weights)
        if parts[-1] and any(u + n > limit for u, n, limit in zip(used, need, room, strict=True)):
            parts.append([])
            used = [0] * len(room)
        parts[-1].append(case)
        used = [u + n for u, n in zip(used, need, strict=True)]
    return parts


def needs(case: Case, config: ModelConfig, weights: int) -> list[int]:
    """Return about how many bytes a backend takes of the main memory, and on a GPU of its memory.

    Args:
        case: the backend.
        config: the model's shape.
        weights: bytes of the model in float32.
    """
    tokens = case.batch * min(config.block_size, case.prompt_tokens + case.output_tokens)
    if case.device == "cpu":
        return [PROCESS_BYTES + 2 * weights + tokens * config.kv_bytes_per_token(4)]
    size = 4 if case.dtype == "float32" else 2
    if case.backend in ENGINES and (layout := ENGINES[case.backend].memory) in SLOTS:
        tokens = case.batch * slot_tokens(layout, config.block_size)  # reserved, used or not
    logits = 4 * case.batch * config.vocab_size * 4  # and what a sampler makes of them
    held = CONTEXT_BYTES + weights * size // 4 + tokens * config.kv_bytes_per_token(size) + logits
    return [2 * PROCESS_BYTES + 2 * weights, held]
