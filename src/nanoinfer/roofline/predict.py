"""Time of a step from its FLOPs and bytes, and of a whole text with and without a cache.

A step cannot be faster than reading its bytes, nor than doing its FLOPs; at best both happen at once
(Williams, Waterman and Patterson 2009):

    seconds = max(bytes / bandwidth, FLOPs / throughput)

The larger of the two is what the step is bound by. This is a limit, not a forecast of an engine: launches,
fork and join, sampling and uneven kernels come on top. With published peaks it is a limit nothing passes;
with `measure` it is what plain PyTorch kernels allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.checks import require_int
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.arithmetic import StepCost
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import WeightFormat

MAX_NEW_TOKENS = 1 << 20


@dataclass(frozen=True)
class Prediction:
    """The fastest that a step can be, and why."""

    flops: int
    bytes: int
    memory_sec: float
    """Seconds to read the bytes."""
    compute_sec: float
    """Seconds to do the FLOPs."""

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return max(self.memory_sec, self.compute_sec)

    @property
    def bound(self) -> str:
        """What the time is spent on: "memory" or "compute"."""
        return "memory" if self.memory_sec >= self.compute_sec else "compute"

    @property
    def bound_ratio(self) -> float:
        """How many times longer the bound side takes than the other, >= 1."""
        return self.seconds / min(self.memory_sec, self.compute_sec)

    @property
    def intensity(self) -> float:
        """FLOPs done for each byte read."""
        return self.flops / self.bytes


def predict(cost: StepCost, ceiling: Ceiling, fmt: WeightFormat, B: int, N: int) -> Prediction:
    """Return the fastest that a step of the whole model can be.

    Args:
        cost: from `arithmetic`, for weights in the format `fmt`.
        ceiling: the device.
        fmt: how weights are stored; says what they are computed in.
        B: sequences.
        N: tokens that the newest token of each sequence sees.

    Raises:
        NanoinferError: the device does not compute in the format.
    """
    flops, num_bytes = cost.model.flops(B, N), cost.model.bytes(B, N)
    return Prediction(flops, num_bytes, num_bytes / ceiling.bandwidth_bytes_per_sec, flops / ceiling.throughput(fmt))


@dataclass(frozen=True)
class Generation:
    """Seconds to generate texts, with a cache and without."""

    num_prompt_tokens: int
    num_new_tokens: int
    cached_sec: float
    """Prefill once, then one token a step."""
    naive_sec: float
    """The whole prefix again for every token."""

    @property
    def speedup(self) -> float:
        """How many times faster the cache makes it."""
        return self.naive_sec / self.cached_sec


def prompt_length(num_tokens: int, num_new: int) -> int:
    """Return the length of the prompt from which the last of `num_new` tokens is drawn after `num_tokens`.

    prompt_length(100, 10) -> 91

    Raises:
        NanoinferError: there is no such prompt, or too many tokens to add up.
    """
    require_int("new_tokens", num_new, 1, MAX_NEW_TOKENS)
    if num_new > num_tokens:
        raise NanoinferError(
            f"new_tokens={num_new} is more than context={num_tokens}, after which the last of them is drawn:"
            f" use at most {num_tokens}"
        )
    return num_tokens - num_new + 1


def generation(
    costs: tuple[StepCost, StepCost], ceiling: Ceiling, fmt: WeightFormat, B: int, num_tokens: int, num_new: int
) -> Generation:
    """Return the time to generate `num_new` tokens of each of B sequences, the last drawn after `num_tokens`.

    Token i = 0, 1, ... is drawn after P + i tokens, P + num_new - 1 = num_tokens: the prompt has P. Naive is
    num_new prefills, of P, P + 1, ... tokens. Cached is one prefill of P, which gives the first token, and
    num_new - 1 steps of one token.

    Args:
        costs: of prefill and of cached decoding.
        ceiling: the device.
        fmt: how weights are stored.
        B: sequences.
        num_tokens: tokens that the last new token is drawn after.
        num_new: tokens to generate.

    Raises:
        NanoinferError: num_new is not in [1, num_tokens], or above MAX_NEW_TOKENS.
    """
    first = prompt_length(num_tokens, num_new)
    whole, one = costs
    naive = [predict(whole, ceiling, fmt, B, n).seconds for n in range(first, num_tokens + 1)]
    steps = [predict(one, ceiling, fmt, B, n).seconds for n in range(first + 1, num_tokens + 1)]
    return Generation(first, num_new, naive[0] + sum(steps), sum(naive))
