"""Predicted time of a step from its FLOPs and bytes, and of a generation with and without a KV cache.

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
from nanoinfer.roofline.arithmetic import StepCost, decode, extend, prefill
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import WeightFormat
from nanoinfer.roofline.speculative_speedup import Speculation, best_speculation
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
    """Return the prediction for a step of the whole model.

    Args:
        cost: from `arithmetic`, for weights in the format `fmt`.
        ceiling: the device.
        fmt: weight format, which determines the dtype of the arithmetic.
        B: sequences.
        N: tokens that the newest token of each sequence attends to.

    Raises:
        NanoinferError: the device has no throughput for the format.
    """
    flops, num_bytes = cost.model.flops(B, N), cost.model.bytes(B, N)
    return Prediction(flops, num_bytes, num_bytes / ceiling.bandwidth(num_bytes), flops / ceiling.throughput(fmt))


@dataclass(frozen=True)
class Setting:
    """A model on a device, for B sequences of N tokens."""

    config: ModelConfig
    fmt: WeightFormat
    ceiling: Ceiling
    B: int
    N: int
    causal: bool = False

    @property
    def prefill(self) -> StepCost:
        """Cost of a prefill."""
        return prefill(self.config, self.fmt, causal=self.causal)

    @property
    def decode(self) -> StepCost:
        """Cost of decoding one token of each sequence."""
        return decode(self.config, self.fmt)

    def predict(self, cost: StepCost) -> Prediction:
        """Return the prediction for a step."""
        return predict(cost, self.ceiling, self.fmt, self.B, self.N)

    def verify_sec(self, num_tokens: int) -> float:
        """Return the seconds of a step that extends each sequence by `num_tokens` tokens."""
        return self.predict(extend(self.config, self.fmt, num_tokens, causal=self.causal)).seconds

    def best_speculation(self, acceptance: float, draft_sec: float, *, bonus: bool = True, max_k: int) -> Speculation:
        """Return `speculative_speedup.best_speculation` with a draft whose step takes `draft_sec`."""
        one = self.verify_sec(1)
        return best_speculation(
            acceptance, draft_sec / one, lambda n: self.verify_sec(n) / one, bonus=bonus, max_k=max_k
        )  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """Seconds to generate sequences, with and without a KV cache."""

    num_prompt_tokens: int
    num_new_tokens: int
    cached_sec: float
    """With a cache: one prefill, then one token per step."""
    naive_sec: float
    """Without a cache: every step processes the whole prefix."""

    @property
    def speedup(self) -> float:
        """Speed-up by the cache."""
        return self.naive_sec / self.cached_sec


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


def generation(
    costs: tuple[StepCost, StepCost], ceiling: Ceiling, fmt: WeightFormat, B: int, num_tokens: int, num_new: int
) -> Generation:
    """Return the time to generate `num_new` tokens of each of B sequences, the last one after `num_tokens` tokens.

    The prompt has P = num_tokens - num_new + 1 tokens. Without a cache there are num_new prefills, of P, P + 1, ...
    tokens. With a cache there is one prefill of P tokens, which gives the first new token, and num_new - 1 steps of one
    token.

    Args:
        costs: of prefill and of cached decoding.
        ceiling: the device.
        fmt: weight format.
        B: sequences.
        num_tokens: tokens before the last new token.
        num_new: tokens to generate.

    Raises:
        NanoinferError: num_new is not in [1, num_tokens], or above MAX_NEW_TOKENS.
    """
    first = prompt_length(num_tokens, num_new)
    whole, one = costs
    naive = [predict(whole, ceiling, fmt, B, n).seconds for n in range(first, num_tokens + 1)]
    steps = [predict(one, ceiling, fmt, B, n).seconds for n in range(first + 1, num_tokens + 1)]
    return Generation(first, num_new, naive[0] + sum(steps), sum(naive))
