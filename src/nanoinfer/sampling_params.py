"""What one request asks of the sampler and of the scheduler: one frozen dataclass, in vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.checks import keep_float, keep_int, require_bool, require_choice, require_float, require_int, show
from nanoinfer.errors import NanoinferError

MAX_LOGPROBS = 1000
OVERFLOWS = ("stop", "slide")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, and when it ends.

    The order in which logits are changed: repetition, presence and frequency penalties; logit_bias;
    min_tokens; then, unless temperature is 0: temperature, top_k, top_p, min_p.

    Raises:
        NanoinferError: a field is out of range (named), or two contradict each other.
    """

    max_tokens: int | None = 128
    """Most tokens to generate; None: up to the context length."""
    temperature: float = 1.0
    """0 is greedy: always the most likely token. Higher is more random."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, once for each time."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, if negative) the logits of tokens in prompt and output; 1 is off."""
    seed: int | None = None
    """Seed of this request; None draws one, which the output reports."""
    n: int = 1
    """Texts to generate from the same prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text; their text is not part of it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""
    min_tokens: int = 0
    """Tokens before which no stop token or stop string ends the text."""
    logprobs: int | None = None
    """Return the model's log-probability of each token and of this many most likely ones."""
    prompt_logprobs: int | None = None
    """Return the model's log-probability of each prompt token and of this many most likely ones."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    overflow: str = "stop"
    """Past the context length: stop (finish_reason length), or slide (forget the oldest tokens)."""
    slide_stride: int | None = None
    """Tokens forgotten at a time when sliding; 1 is nanoGPT's crop, None is half the context length."""

    def __post_init__(self) -> None:
        self._accept_bare_values()
        keep_int(self, "max_tokens", 1, optional=True)
        keep_float(self, "temperature", 0.0, 1e6)
        keep_int(self, "top_k", -1)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        keep_float(self, "top_p", 0.0, 1.0, low_open=True)
        keep_float(self, "min_p", 0.0, 1.0)
        keep_float(self, "presence_penalty", -1e3, 1e3)
        keep_float(self, "frequency_penalty", -1e3, 1e3)
        keep_float(self, "repetition_penalty", 1e-3, 1e3)  # no logit overflows
        keep_int(self, "seed", 0, 2**64 - 1, optional=True)
        keep_int(self, "n", 1, 65536)
        require_bool("ignore_eos", self.ignore_eos)
        keep_int(self, "min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise NanoinferError(
                f"min_tokens={show(self.min_tokens)} is more than max_tokens={show(self.max_tokens)}: raise max_tokens"
            )
        keep_int(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        keep_int(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        require_choice("overflow", self.overflow, OVERFLOWS)
        if self.max_tokens is None and self.overflow == "slide":
            raise NanoinferError("max_tokens=None has no end with overflow='slide': give a number")
        keep_int(self, "slide_stride", 1, optional=True)
        if self.slide_stride is not None and self.overflow != "slide":
            raise NanoinferError(
                f"slide_stride={show(self.slide_stride)} needs overflow='slide', not {self.overflow!r}"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise NanoinferError(f"stop={show(text)} is not a non-empty string")
        ids = tuple(require_int("stop_token_ids", token_id, 0) for token_id in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        if self.logit_bias is not None:
            biases = {
                require_int("logit_bias token id", token_id, 0): require_float(
                    f"logit_bias[{show(token_id)}]", bias, -1e6, 1e6
                )
                for token_id, bias in self.logit_bias.items()
            }
            object.__setattr__(self, "logit_bias", biases)

    def _accept_bare_values(self) -> None:
        """Take what vLLM takes: stop="x" for stop=["x"], lists for tuples, None for "none"."""
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else given
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            try:
                object.__setattr__(self, name, () if value is None else tuple(value))
            except TypeError:
                raise NanoinferError(f"{name}={show(value)} is not a list") from None
        if self.logit_bias is not None:
            try:
                object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            except (TypeError, ValueError):
                raise NanoinferError(f"logit_bias={show(self.logit_bias)} is not a dict of token id to bias") from None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0
