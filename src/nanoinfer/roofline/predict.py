"""Predicted time of a step, of a generation with and without a KV cache, and speed-up by speculative decoding.

The roofline model (Williams, Waterman and Patterson 2009) assumes that memory traffic and arithmetic overlap fully:

    seconds = max(bytes / bandwidth, FLOPs / throughput)

The larger term determines whether the step is memory-bound or compute-bound. The result is a lower bound: kernel
launches, thread synchronization, sampling and load imbalance add to it. With published peaks no step can be faster;
with `measure` the bound holds for the measured peaks, of which the bandwidth depends on the bytes: a step whose weights
and KV cache fit in a CPU's caches finds them there again.

Speculative decoding (part 8): a round proposes k tokens with a draft, and the target verifies them in one step. The
acceptance rate a is the probability that a proposal is accepted, given that those before it were; it is assumed
constant. Without the bonus token, a round in which all are accepted has k tokens; with it (Leviathan et al. 2023,
equation 1; Chen et al. 2023, algorithm 2), k + 1:

    E = 1 + a + ... + a^(k-1)       or, with the bonus token,       E = 1 + a + ... + a^k

Let c be the time of a draft step and v that of the verifying step, in steps of the target:

    speed-up(k) = E / (k c + v)                                 (Leviathan et al., theorem 3.8, has v = 1)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.arithmetic import StepCost, decode, extend, prefill
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import WeightFormat
from nanoinfer.utils.checks import require_float, require_int

MAX_NEW_TOKENS = 1 << 20
MAX_SPECULATE_K = 64


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
    flops, num_bytes = cost.model.flops(B, N), cost.model.bytes(B, N)
    return Prediction(flops, num_bytes, num_bytes / ceiling.bandwidth(num_bytes), flops / ceiling.throughput(fmt))


@dataclass(frozen=True)
class Speculation:
    """A number of proposed tokens and its expected speed-up."""

    speculate_k: int
    """Tokens proposed per round; 0: plain decoding, because no k is faster."""
    tokens_per_round: float
    """Expected tokens per round."""
    speedup: float
    """Speed-up over plain decoding."""


def expected_tokens(acceptance: float, speculate_k: int, *, bonus: bool = True) -> float:
    """Return the expected tokens per round with `speculate_k` proposals; 1 for plain decoding (0 proposals).

    expected_tokens(0.5, 2)  ->  1.75      expected_tokens(0.5, 2, bonus=False)  ->  1.5

    Raises NanoinferError if acceptance is not in [0, 1], or speculate_k is negative.
    """
    require_float("acceptance", acceptance, 0.0, 1.0)
    require_int("speculate_k", speculate_k, 0, 1 << 16)
    # a sum, because (1 - a^n) / (1 - a) loses precision near a = 1
    return float(sum(acceptance**j for j in range(verified_tokens(speculate_k, bonus=bonus))))


def verified_tokens(speculate_k: int, *, bonus: bool = True) -> int:
    """Return the number of tokens by which the target extends a sequence to verify `speculate_k` proposals.

    They are the newest token and all proposals; without the bonus token, the last proposal is not needed.
    """
    return speculate_k + 1 if bonus or speculate_k == 0 else speculate_k


def speedup(
    acceptance: float, speculate_k: int, draft_cost: float, verify_cost: float = 1.0, *, bonus: bool = True
) -> float:
    """Return the speed-up over plain decoding (0 proposals); less than 1 is slower.

    `draft_cost`, >= 0, and `verify_cost`, > 0, are times of a draft step and of the verifying step over that of a
    target step. Raises NanoinferError if an argument is out of range or NaN.
    """
    require_float("draft_cost", draft_cost, 0.0, 1e9)
    require_float("verify_cost", verify_cost, 0.0, 1e9, low_open=True)
    if speculate_k == 0:
        verify_cost = 1.0
    return expected_tokens(acceptance, speculate_k, bonus=bonus) / (speculate_k * draft_cost + verify_cost)


def best_speculation(
    acceptance: float,
    draft_cost: float,
    verify_cost: Callable[[int], float] = lambda num_tokens: 1.0,
    *,
    bonus: bool = True,
    max_k: int = MAX_SPECULATE_K,
) -> Speculation:
    """Return the smallest number of proposals, `max_k` at most, with the largest speed-up; 0 if none exceeds 1.

    `verify_cost` is a function of the number of verified tokens; otherwise as `speedup`.
    """
    best = Speculation(0, 1.0, 1.0)
    for k in range(1, max_k + 1):
        gain = speedup(acceptance, k, draft_cost, verify_cost(verified_tokens(k, bonus=bonus)), bonus=bonus)
        if gain > best.speedup * (1 + 1e-12):  # rounding must not make a larger k win a tie
            best = Speculation(k, expected_tokens(acceptance, k, bonus=bonus), gain)
    return best


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

    def verify_sec(self, num_tokens: int) -> float:
        """Return the seconds of a step that extends each sequence by `num_tokens` tokens."""
        return self.predict(extend(self.config, self.fmt, num_tokens)).seconds

    def best_speculation(self, acceptance: float, draft_sec: float, *, bonus: bool = True, max_k: int) -> Speculation:
        """Return `best_speculation` with a draft whose step takes `draft_sec`."""
        one = self.verify_sec(1)
        return best_speculation(
            acceptance, draft_sec / one, lambda n: self.verify_sec(n) / one, bonus=bonus, max_k=max_k
        )


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
        return [predict(cost, setting.ceiling, setting.fmt, setting.B, n).seconds for n in range(start, setting.N + 1)]

    naive = seconds(setting.prefill, first)
    return Generation(first, num_new, naive[0] + sum(seconds(setting.decode, first + 1)), sum(naive))
