"""Predicted time of a step, and of a generation with and without a KV cache.

The roofline model (Williams, Waterman and Patterson 2009) assumes that memory traffic and arithmetic overlap fully:

    seconds = max(bytes / bandwidth, FLOPs / throughput)

The larger term determines whether the step is memory-bound or compute-bound. The result is a lower bound: kernel
launches, thread synchronization, sampling and load imbalance add to it. With published peaks no step can be faster;
with `measure` the bound holds for the measured peaks, of which the bandwidth depends on the bytes: a step whose weights
and KV cache fit in a CPU's caches finds them there again.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.arithmetic import Cost, StepCost, decode, prefill
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import WeightFormat
from nanoinfer.utils.checks import require_int

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


def predict(cost: StepCost, ceiling: Ceiling, fmt: WeightFormat, B: int, N: int) -> Prediction:
    """Return the prediction for a step of the whole model, of B sequences whose newest token attends to N tokens.

    `cost` is from `arithmetic`, for weights in the format `fmt`, which determines the dtype of the arithmetic. Raises
    NanoinferError if the device has no throughput for it.
    """
    return _predict(cost.model, ceiling, fmt, B, N)


def _predict(cost: Cost, ceiling: Ceiling, fmt: WeightFormat, B: int, N: int) -> Prediction:
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

    @property
    def prefill(self) -> StepCost:
        """Cost of a prefill."""
        return prefill(self.config, self.fmt)

    @property
    def decode(self) -> StepCost:
        """Cost of decoding one token of each sequence."""
        return decode(self.config, self.fmt)

    def predict(self, cost: StepCost) -> Prediction:
        """Return the prediction for a step."""
        return predict(cost, self.ceiling, self.fmt, self.B, self.N)


@dataclass(frozen=True)
class Generation:
    """Seconds to generate sequences, with and without a KV cache."""

    num_prompt_tokens: int
    num_new_tokens: int
    cached_sec: float
    """With a cache: one prefill, then one token per step."""
    naive_sec: float
    """Without a cache: every step processes the whole prefix."""


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


def generation(setting: Setting, num_new: int) -> Generation:
    """Return the time to generate `num_new` tokens of each of B sequences, the last one after N tokens.

    The prompt has P = N - num_new + 1 tokens. Without a cache there are num_new prefills, of P, P + 1, ... tokens. With
    a cache there is one prefill of P tokens, which gives the first new token, and num_new - 1 steps of one token.

    Raises:
        NanoinferError: num_new is not in [1, N], or above MAX_NEW_TOKENS.
    """
    first = prompt_length(setting.N, num_new)

    def seconds(cost: StepCost, start: int) -> list[float]:
        model, lengths = cost.model, range(start, setting.N + 1)
        return [_predict(model, setting.ceiling, setting.fmt, setting.B, n).seconds for n in lengths]

    naive = seconds(setting.prefill, first)
    return Generation(first, num_new, naive[0] + sum(seconds(setting.decode, first + 1)), sum(naive))
