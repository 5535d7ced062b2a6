"""Roofline report for a model on a device: a JSON document whose keys include units."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.arithmetic import Cost, StepCost, kv_cache_layer, state_layer
from nanoinfer.roofline.formats import FORMATS, int4
from nanoinfer.roofline.measure import DEVICES, MEASURE, find_device
from nanoinfer.roofline.predict import Setting, generation, prompt_length
from nanoinfer.roofline.shapes import find_model
from nanoinfer.utils.checks import bounded, keep_fields, require_choice

MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class Question:
    """Parameters of a report, except the model's name."""

    device: str = MEASURE
    """t4, l40s, rtx4090, a100, h100, h200, or measure (this machine, its caches included)."""
    batch: int = bounded(1, 1, MAX_BATCH)
    """Sequences per step (B)."""
    context: int | None = bounded(None, 1)
    """Tokens that the newest token attends to, including itself (N; default: the model's context length)."""
    dtype: str = "auto"
    """Format of the weights: float32, bfloat16, float16, int8, int4, or one of GGUF files (Q4_K); auto is that of the
    file, or the usual one on the device."""
    new_tokens: int | None = bounded(None, 1)
    """Tokens to generate in the comparison with and without a KV cache (default: half of context)."""

    def __post_init__(self) -> None:
        keep_fields(self)
        require_choice("dtype", self.dtype, ("auto", *FORMATS))


def answer(model: str, question: Question, local_device: str = "cpu") -> dict[str, Any]:
    """Return the report as a JSON-serializable dict.

    Args:
        model: see `shapes.find_shape`.
        question: the parameters.
        local_device: what device="measure" measures: cpu or cuda:N.

    Raises:
        NanoinferError: the model, device or dtype is unknown, or the context is longer than a model's.
    """
    config, stored = find_model(model)  # check the names first, because measuring takes seconds
    N = _context(model, config, question.context or config.block_size)
    num_new = question.new_tokens or max(1, N // 2)
    prompt_length(N, num_new)
    ceiling = find_device(question.device, local_device)
    fmt = ceiling.resolve_format(question.dtype, stored)
    if fmt is FORMATS["int4"] and ceiling.name not in DEVICES and local_device == "cpu":  # that of `triton` is as it is
        fmt = int4(config)
    setting = Setting(config, fmt, ceiling, question.batch, N)
    return {
        "model": model,
        "shape": asdict(config),
        "device": asdict(ceiling),
        "dtype": setting.fmt.name,
        "compute_dtype": ceiling.compute_dtype(setting.fmt),
        "ridge_flops_per_byte": ceiling.ridge(setting.fmt, math.inf),
        "batch": question.batch,
        "context_tokens": N,
        "prefill": _step(setting, setting.prefill, question.batch * N),
        "decode": _step(setting, setting.decode, question.batch),
        "memory": _memory(setting),
        "generation": _generation(setting, num_new),
    }


def _context(name: str, config: ModelConfig, context: int) -> int:
    """Return `context`. Raises NanoinferError if it exceeds the model's context length."""
    if context > config.block_size:
        raise NanoinferError(
            f"context={context} exceeds the context length of {name}, block_size={config.block_size}: use at most"
            f" {config.block_size}"
        )
    return context


def _step(setting: Setting, cost: StepCost, num_tokens: int) -> dict[str, Any]:
    """Return the costs of a step by part of the model, and its prediction."""

    def part(c: Cost) -> dict[str, Any]:
        flops, num_bytes = c.flops(setting.B, setting.N), c.bytes(setting.B, setting.N)
        return {"flops": flops, "bytes": num_bytes, "flops_formula": str(c.flops), "bytes_formula": str(c.bytes)}

    p = setting.predict(cost)
    parts = {name: part(getattr(cost, name)) for name in ("attention", "mlp", "layer", "head", "model")}
    return parts | {
        "intensity_flops_per_byte": p.intensity,
        "bound": p.bound,
        "bound_ratio": p.bound_ratio,
        "bandwidth_bytes_per_sec": setting.ceiling.bandwidth(p.bytes),
        "ridge_flops_per_byte": setting.ceiling.ridge(setting.fmt, p.bytes),
        "memory_sec": p.memory_sec,
        "compute_sec": p.compute_sec,
        "step_sec": p.seconds,
        "tokens_per_sec": num_tokens / p.seconds,
    }


def _memory(setting: Setting) -> dict[str, Any]:
    """Return the sizes of weights and KV cache, and whether they fit in the device's memory."""
    config, fmt = setting.config, setting.fmt
    own = [config.at(i) for i in config.kv_layers]  # with keys and values of their own
    layer, *others = (kv_cache_layer(of_layer, fmt) for of_layer in own)
    total = sum(others, layer)
    for _ in config.recurrent_layers:
        total += state_layer(config)
    weights = setting.decode.weight_bytes
    # In memory but not read by a step: the lookup tables wpe, per-layer embeddings and, with an untied head, wte.
    if config.learned_positions:
        weights += config.block_size * config.n_embd * fmt.vector_bytes
    if config.per_layer_dim:
        weights += fmt.of("transformer.per_layer.wte.weight").matrix_bytes(
            config.vocab_size * config.n_layer, config.per_layer_dim
        )
    if not config.tie_word_embeddings:
        values = config.vocab_size * config.n_embd
        blocks = fmt.matrices.get("transformer.wte.weight")
        weights += blocks.matrix_bytes(config.vocab_size, config.n_embd) if blocks else values * fmt.vector_bytes
    cache = total(setting.B, setting.N)
    limit = setting.ceiling.memory_bytes
    return {
        "weight_bytes": weights,
        "kv_cache_layer_formula": str(layer),
        "kv_cache_layer_bytes": layer(setting.B, setting.N),
        "kv_cache_formula": str(total),
        "kv_cache_bytes": cache,
        "fits": None if limit is None else weights + cache <= limit,
    }


def _generation(setting: Setting, num_new: int) -> dict[str, Any]:
    """Return the speed-up by the KV cache: of the step at the context, and of a whole generation."""
    g = generation(setting, num_new)
    naive, cached = (setting.predict(cost).seconds for cost in (setting.prefill, setting.decode))
    return asdict(g) | {"cached_over_naive": g.naive_sec / g.cached_sec, "cached_over_naive_last_step": naive / cached}
