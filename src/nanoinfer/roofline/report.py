"""Predicted times of a model on a device, and the report of them: a JSON document whose keys include units.

The roofline model (Williams, Waterman and Patterson 2009) assumes that memory traffic and arithmetic overlap fully:

    seconds = max(bytes / bandwidth, FLOPs / throughput)

The larger term determines whether the step is memory-bound or compute-bound. The result is a lower bound: kernel
launches, thread synchronization, sampling and load imbalance add to it. With published peaks no step can be faster;
with `measure` the bound holds for the measured peaks, of which the bandwidth depends on the bytes: a step whose weights
and KV cache fit in a CPU's caches finds them there again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.arithmetic import Cost, StepCost, decode, kv_cache_layer, prefill, state_layer
from nanoinfer.roofline.ceilings import DEVICES, MEASURE, Ceiling, find_device
from nanoinfer.roofline.formats import FORMATS, WeightFormat, find_model, int4
from nanoinfer.utils.checks import bounded, keep_fields, require_choice, require_int

MAX_BATCH = 1 << 20
MAX_NEW_TOKENS = 1 << 20


@dataclass(frozen=True)
class Prediction:
    """Lower bound of a step's time, and its terms."""

    flops: int
    bytes: int
    memory_sec: float
    """Seconds to read the bytes."""
    compute_sec: float
    """Seconds for the FLOPs."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return max(self.memory_sec, self.compute_sec)

    @property
    def bound(self) -> str:
        """What limits the step: "memory" or "compute"."""
        return "memory" if self.memory_sec >= self.compute_sec else "compute"

    @property
    def bound_ratio(self) -> float:
        """Ratio of the larger to the smaller term, >= 1."""
        return self.seconds / min(self.memory_sec, self.compute_sec)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte read."""
        return self.flops / self.bytes


def predict(cost: Cost, ceiling: Ceiling, fmt: WeightFormat, B: int, N: int) -> Prediction:
    """Return the prediction for a step of B sequences whose newest token attends to N tokens.

    `cost` is from `arithmetic`, for weights in the format `fmt`, which determines the dtype of the arithmetic. Raises
    NanoinferError if the device has no throughput for it.
    """
    flops, num_bytes = cost.flops(B, N), cost.bytes(B, N)
    return Prediction(flops, num_bytes, num_bytes / ceiling.bandwidth(num_bytes), flops / ceiling.throughput(fmt))


@dataclass(frozen=True)
class Setting:
    """A model on a device, for B sequences of N tokens."""

    config: ModelConfig
    fmt: WeightFormat
    ceiling: Ceiling
    B: int
    N: int

    def predict(self, cost: StepCost) -> Prediction:
        """Return the prediction for a step."""
        return predict(cost.model, self.ceiling, self.fmt, self.B, self.N)


def prompt_length(num_tokens: int, num_new: int) -> int:
    """Return the prompt length for which the last of `num_new` tokens is sampled after `num_tokens` tokens.

    prompt_length(100, 10)  ->  91

    Raises:
        NanoinferError: num_new is not in [1, num_tokens], or above MAX_NEW_TOKENS.
    """
    require_int("new_tokens", num_new, 1, MAX_NEW_TOKENS)
    if num_new > num_tokens:
        raise NanoinferError(
            f"new_tokens={num_new} is more than context={num_tokens}, the tokens before the last new token:"
            f" use at most {num_tokens}"
        )
    return num_tokens - num_new + 1


def generation(setting: Setting, num_new: int) -> dict[str, float]:
    """Return the seconds to generate `num_new` tokens of each of B sequences, the last one after N tokens.

    The prompt has P = N - num_new + 1 tokens. Without a cache there are num_new prefills, of P, P + 1, ... tokens. With
    a cache there is one prefill of P tokens, which gives the first new token, and num_new - 1 steps of one token. The
    times of the last step alone are compared, too.

    Raises:
        NanoinferError: num_new is not in [1, N], or above MAX_NEW_TOKENS.
    """
    first, fmt = prompt_length(setting.N, num_new), setting.fmt

    def seconds(cost: StepCost, start: int) -> list[float]:
        model, lengths = cost.model, range(start, setting.N + 1)
        return [predict(model, setting.ceiling, fmt, setting.B, n).seconds for n in lengths]

    naive, cached = seconds(prefill(setting.config, fmt), first), seconds(decode(setting.config, fmt), first)
    naive_sec, cached_sec = sum(naive), naive[0] + sum(cached[1:])
    return {
        "num_prompt_tokens": first,
        "num_new_tokens": num_new,
        "cached_sec": cached_sec,
        "naive_sec": naive_sec,
        "cached_over_naive": naive_sec / cached_sec,
        "cached_over_naive_last_step": naive[-1] / cached[-1],
    }


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
        model: see `find_model`.
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
        "model": model, "shape": asdict(config), "device": asdict(ceiling), "dtype": fmt.name,
        "compute_dtype": ceiling.compute_dtype(fmt), "ridge_flops_per_byte": ceiling.ridge(fmt, math.inf),
        "batch": question.batch, "context_tokens": N,
        "prefill": _step(setting, prefill(config, fmt), question.batch * N),
        "decode": _step(setting, step := decode(config, fmt), question.batch),
        "memory": _memory(setting, step.weight_bytes), "generation": generation(setting, num_new),
    }  # fmt: skip


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
        "intensity_flops_per_byte": p.intensity, "bound": p.bound, "bound_ratio": p.bound_ratio,
        "bandwidth_bytes_per_sec": setting.ceiling.bandwidth(p.bytes),
        "ridge_flops_per_byte": setting.ceiling.ridge(setting.fmt, p.bytes), "memory_sec": p.memory_sec,
        "compute_sec": p.compute_sec, "step_sec": p.seconds, "tokens_per_sec": num_tokens / p.seconds,
    }  # fmt: skip


def _memory(setting: Setting, weights: int) -> dict[str, Any]:
    """Return the sizes of weights, of which steps read `weights`, and KV cache, and whether they fit in the memory."""
    config, fmt = setting.config, setting.fmt
    own = [config.at(i) for i in config.kv_layers]  # with keys and values of their own
    layer, *others = (kv_cache_layer(of_layer, fmt) for of_layer in own)
    total = sum(others, layer)
    for _ in config.recurrent_layers:
        total += state_layer(config)
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
