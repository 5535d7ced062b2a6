"""A row of results: one case and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.bench.case import Case
from nanoinfer.bench.formatting import number
from nanoinfer.bench.stats import Figures

BUSY = "the machine was busy"
"""Beginning of the note that threads waited for cores."""


@dataclass
class Row:
    """One case and what came of it."""

    case: Case
    figures: Figures | None = None
    """Medians over the rounds; None when the case failed."""
    same_tokens: bool | None = None
    """Whether its greedy tokens were the reference's; None where that is not required (reduced precision)."""
    peak_memory_bytes: int | None = None
    """Of the backend's own process (on a GPU: torch.cuda's peak of what was in use)."""
    weight_bytes: int | None = None
    """Bytes of weights that one decoding step reads."""
    bytes_per_token: float | None = None
    """Bytes that decoding one token reads, weights shared by the batch, keys and values at the mean length."""
    flops_per_token: float | None = None
    """FLOPs of the matrix products for one decoded token."""
    mbu_percent: float | None = None
    """Share of the bandwidth that was measured with as many bytes as a step reads: bytes_per_token * tokens/s of it."""
    mfu_percent: float | None = None
    """Share of the measured matrix-product speed in this dtype."""
    kernels_per_step: float | None = None
    """Kernels that a decode step runs on the GPU, replayed ones included; at batch 1 a step is a token."""
    kernels_per_layer: int | None = None
    """Of them, what one layer takes."""
    launches_per_step: float | None = None
    """Launches by the host in a decode step, of kernels and of graphs."""
    verify_ratio: float | None = None
    """Time of a step that verifies 5 tokens, over that of a step that decodes 1."""
    predicted_tokens_per_sec: float | None = None
    """The roofline's limit, all sequences together."""
    speedup: float | None = None
    """Output tokens/s over the baseline's in the same shape."""
    speedup_min: float | None = None
    """Of cases with a draft: the smallest ratio to plain decoding of two runs in the same round."""
    speedup_max: float | None = None
    """The same, the largest."""
    acceptance_percent: float | None = None
    """Share of the verified proposals that were accepted (cases with a draft)."""
    mean_accepted_length: float | None = None
    """Proposals accepted in a verify step, which gives one token more."""
    draft_share_percent: float | None = None
    """Time in the drafter, of the time in drafter, engine and sampler."""
    predicted_speculation: str | None = None
    """The best k and its speed-up for this acceptance, by the roofline's costs of draft and target."""
    per_position_sec: list[list[float]] | None = None
    """[position, time of a token there], thinned to 32 positions at most (batch 1): `stats.by_position`."""
    round_sec: list[float] | None = None
    """Time of each round."""
    breakdown_percent: dict[str, float] | None = None
    """Where the time goes: part of the model -> share of the step."""
    note: str = ""
    """How the row was measured differently: extrapolated, not interleaved, ..."""
    error: str | None = None
    """Why there are no figures, on one line."""
    unfinished: bool = False
    """Whether the run ended before all rounds and counts of this case: --resume measures it again."""

    def update(self, fields: Mapping[str, Any]) -> None:
        """Set some fields."""
        for name, value in fields.items():
            setattr(self, name, value)

    def add_note(self, note: str) -> None:
        """Append a sentence to the note."""
        self.note = "; ".join(filter(None, (self.note, note)))

    def number(self, name: str, scale: float = 1.0) -> float | None:
        """Return a field of the row or of its figures, scaled; None if it is unknown or not a finite number."""
        found = number(getattr(self, name) if hasattr(self, name) else getattr(self.figures, name, None))
        return None if found is None else number(found * scale)
