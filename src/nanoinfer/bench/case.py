"""A configuration that is measured (backend, model and shape), its requests, their times, and the row of figures.

Statistics need no tensor library and no clock: tests use plain numbers.

    a sequence's arrival times (seconds since the run began)   [0.50, 0.60, 0.70]
    ->  TTFT 0.50    token gaps [0.10, 0.10]
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nanoinfer.config import DTYPES, SchedulerConfig, SpeculationConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import chosen, keep_fields, require_int

SAMPLERS: dict[str, dict[str, Any]] = {  # name -> fields of SamplingParams
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 50},
    "hot": {"temperature": 3.0},  # nearly unpredictable: about 1 of 15 proposals is accepted
    "controls": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    },
}  # fmt: skip
# Bits of a weight in each format.
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}
WORKLOADS = ("uniform", "mixed", "prefix", "arrival", "text", "copy")
IRREGULAR = ("mixed", "prefix", "arrival")  # workloads whose steps differ too much for the arithmetic of one step
MIXED_LOW, MIXED_HIGH = 16, 256  # tokens in and out of each request of the mixed workload
OWN_TOKENS = 20  # tokens of a prompt of the prefix workload after those that all prompts share
BUSY = "the machine was busy"
"""Beginning of the note that threads waited for cores."""
SHARE_REPEATED = 4 / 7  # of a repeating prompt: the passage itself; the rest is its beginning again, edited
EDIT_EVERY = 15
DECODING_PROMPT = 32  # tokens of the prompts that are decoding when the long one arrives
DASH = "–"  # unknown
Passages = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Case:
    """Which backend runs which model in which shape."""

    backend: str
    """An engine of ours (`static`), or a peer (`transformers-dynamic`, `llama.cpp`, ...)."""
    model: str
    """Any model that loads."""
    dtype: str = chosen("float32", DTYPES)
    """float32, bfloat16 or float16."""
    quantization: str | None = None
    """Weight format below 16 bits, in the backend's own name for it (int8, Q4_0, ...)."""
    sampler: str = chosen("greedy", tuple(SAMPLERS))
    """greedy, sampled (temperature and top-k), hot (a high temperature) or controls (everything on)."""
    batch: int = 1
    """Sequences at a time."""
    prompt_tokens: int = 32
    """Tokens of each prompt; of mixed requests, the most."""
    output_tokens: int = 64
    """Tokens generated for each prompt; of mixed requests, the most."""
    workload: str = chosen("uniform", WORKLOADS)
    """uniform: `batch` requests of random tokens; mixed: the same, of 16 to 256 tokens in and out; prefix: all but the
    last 20 tokens of the prompts are equal; arrival: one prompt, of prompt_tokens, arrives while the others decode;
    text: passages of natural text; copy: passages that repeat themselves."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    draft: str | None = None
    """Draft source; None: plain decoding."""
    speculate_k: str | int = "auto"
    """Tokens proposed at a time."""
    speculate_rule: str = "reproduce"
    """reproduce or reject."""
    prefix_caching: bool = False
    """Whether requests of one run share the keys and values of common prefixes (our engines)."""
    max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens
    """Most tokens of a step (our engines)."""
    target_step_ms: int | None = None
    """Time of a step that limits its prompt tokens while streamed requests decode (our engines). None: no limit, as in
    `LLM.generate`; the tokens are streamed here to be timed."""

    def __post_init__(self) -> None:
        keep_fields(self)
        checked = SpeculationConfig(self.draft, self.speculate_k, self.speculate_rule)
        object.__setattr__(self, "speculate_k", checked.speculate_k)  # "4" is 4
        for name in ("batch", "prompt_tokens", "output_tokens", "max_num_batched_tokens"):
            require_int(name, getattr(self, name), 2 if (name, self.workload) == ("batch", "arrival") else 1, 1 << 20)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The fields that two cases must share to be run round by round beside each other."""
        return self.model, self.sampler, self.batch, self.prompt_tokens, self.output_tokens, self.workload

    @property
    def format(self) -> str:
        """The weight format: the quantization, or the dtype without one."""
        return self.quantization or self.dtype

    @property
    def bits(self) -> int:
        """Bits of a weight; 0 for an unknown format."""
        return BITS.get(self.format, 0)

    @property
    def label(self) -> str:
        """The backend with its weight format and what is set beside: "static float32", "native int8 + gpt2 k=4"."""
        parts = [f"{self.backend} {self.format}"]
        if self.draft is not None:
            rule = " reject" if self.speculate_rule == "reject" else ""
            parts.append(f"{self.draft} k={self.speculate_k}{rule}")
        parts += ["prefix cache"] * self.prefix_caching
        if self.max_num_batched_tokens != Case.max_num_batched_tokens:
            parts.append(f"steps of {self.max_num_batched_tokens}")
        parts += [f"steps of {self.target_step_ms} ms"] * bool(self.target_step_ms)
        return " + ".join(parts)

    @property
    def loaded(self) -> Case:
        """The same without speculation: what a process loads."""
        return replace(self, draft=None, speculate_k="auto", speculate_rule="reproduce")

    @property
    def plain(self) -> Case:
        """The same with nothing set beside: what its tokens and its speed are compared with."""
        sizes = {name: getattr(Case, name) for name in ("max_num_batched_tokens", "target_step_ms")}
        return replace(self.loaded, prefix_caching=False, **sizes)

    def params(self, output_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one request of this case; past the context length the window slides."""
        chosen = SAMPLERS[self.sampler]
        return SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=0, overflow="slide", **chosen)

    def mean_length(self, block_size: int) -> int:
        """Return the tokens of a sequence halfway through its output, `block_size` at most."""
        return min(block_size, self.prompt_tokens + max(1, self.output_tokens // 2))


@dataclass(frozen=True)
class Requests:
    """The requests of one run: prompts as token ids, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_tokens: list[int]
    num_late: int = 0
    """Number of requests, the last ones, that arrive when all others have their first token."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.output_tokens, strict=True))


def make_requests(case: Case, vocab_size: int, seed: int = 0, passages: Passages = ()) -> Requests:
    """Return the requests of a case, the same for every backend: random token ids below vocab_size, or `passages`.

    Another seed gives other prompts of the same lengths; of passages the next ones.
    """
    sizes = [(case.prompt_tokens, case.output_tokens)] * case.batch
    if case.workload == "mixed":
        lengths = random.Random(0)
        pairs = [(lengths.randint(MIXED_LOW, MIXED_HIGH), lengths.randint(MIXED_LOW, MIXED_HIGH)) for _ in sizes]
        sizes = [(min(n, case.prompt_tokens), min(m, case.output_tokens)) for n, m in pairs]
    if case.workload == "arrival":
        sizes = [(min(DECODING_PROMPT, n), m) for n, m in sizes[1:]] + [(case.prompt_tokens, 1)]
    if case.workload in ("text", "copy"):
        make = cut_prompt if case.workload == "text" else repeat_prompt
        prompts = [make(passages, i, n) for i, (n, _) in enumerate(sizes, seed * case.batch)]
    else:
        tokens = random.Random(seed)
        prompts = [[tokens.randrange(vocab_size) for _ in range(n)] for n, _ in sizes]
    if case.workload == "prefix":
        prompts = [[*prompts[0][:-OWN_TOKENS], *prompt[-OWN_TOKENS:]] for prompt in prompts]
    return Requests(prompts, [m for _, m in sizes], num_late=int(case.workload == "arrival"))


def cut_prompt(passages: Passages, i: int, num_tokens: int) -> list[int]:
    """Return the first tokens of passage i."""
    return list(passages[i % len(passages)][:num_tokens])


def repeat_prompt(passages: Passages, i: int, num_tokens: int) -> list[int]:
    """Return a passage and its beginning again, with every 15th token replaced: what follows occurred before."""
    whole = list(passages[i % len(passages)])
    first = whole[: int(num_tokens * SHARE_REPEATED)]
    again = [whole[(7 * at) % len(whole)] if at % EDIT_EVERY == EDIT_EVERY - 1 else t for at, t in enumerate(first)]
    return [*first, *again][:num_tokens]


@dataclass
class Row:
    """One case and what came of it."""

    case: Case
    figures: Figures | None = None
    """Medians over the rounds; None when the case failed."""
    same_tokens: bool | None = None
    """Whether its greedy tokens were the reference's; None where that is not required (reduced precision)."""
    peak_memory_bytes: int | None = None
    """Peak memory of the backend's own process (on a GPU: torch.cuda's peak of the memory in use)."""
    weight_bytes: int | None = None
    """Bytes of weights that one decoding step reads."""
    bytes_per_token: float | None = None
    """Bytes that decoding one token reads, weights shared by the batch, keys and values at the mean length."""
    flops_per_token: float | None = None
    """FLOPs of the matrix products for one decoded token."""
    mbu_percent: float | None = None
    """Share of the bandwidth that was measured with as many bytes as a step reads: bytes_per_token * tokens/s of it."""
    kernels_per_step: float | None = None
    """Kernels that a decode step runs on the GPU, replayed ones included; at batch 1 a step is a token."""
    kernels_per_layer: int | None = None
    """Kernels of one layer."""
    launches_per_step: float | None = None
    """Launches by the host in a decode step, of kernels and of graphs."""
    verify_ratio: float | None = None
    """Time of a step that verifies 5 tokens, over that of a step that decodes 1."""
    predicted_tokens_per_sec: float | None = None
    """The roofline's limit, all sequences together."""
    speedup: float | None = None
    """Output tokens/s over the baseline's in the same shape."""
    speedup_min: float | None = None
    """Smallest ratio to plain decoding in the same round, of a case with a draft."""
    speedup_max: float | None = None
    """Largest ratio to plain decoding in the same round."""
    acceptance_percent: float | None = None
    """Share of the verified proposals that were accepted (cases with a draft)."""
    mean_accepted_length: float | None = None
    """Proposals accepted in a verify step, which gives one token more."""
    draft_share_percent: float | None = None
    """Time in the drafter, of the time in drafter, engine and sampler."""
    round_sec: list[float] | None = None
    """Time of each round."""
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

    @property
    def ceiling(self) -> float | None:
        """The limit of the hardware in decoded tokens/s; None for a case without figures or with unequal steps."""
        return self.predicted_tokens_per_sec if self.figures and self.case.workload not in IRREGULAR else None

    def number(self, name: str, scale: float = 1.0) -> float | None:
        """Return a field of the row or of its figures, scaled; None if it is unknown or not finite."""
        value = getattr(self, name) if hasattr(self, name) else getattr(self.figures, name, None)
        return value * scale if value is not None and math.isfinite(value * scale) else None


def digits(value: float | None) -> str:
    """Return a number with 3 significant digits, thousands separated; a dash for None.

    digits(1234.56) -> "1,235"      digits(0.01234) -> "0.0123"      digits(None) -> "–"
    """
    if not value:
        return DASH if value is None else "0"
    places = 2 - int(f"{value:.2e}".partition("e")[2])
    return f"{value:,.{min(max(places, 0), 12)}f}" if abs(value) < 1e15 else f"{value:.3g}"


@dataclass(frozen=True)
class RunTimes:
    """One timed run: when each token of each sequence arrived, in seconds since the run began."""

    num_prompt_tokens: int
    """Prompt tokens of all sequences together."""
    arrivals: list[list[float]]
    """For each sequence, the arrival time of each of its tokens; not empty."""
    waited_sec: float | None = None
    """Time that the threads of the backend's process waited for cores, in total; None: not known."""

    @property
    def ttft_sec(self) -> float:
        """Median time to first token over the sequences."""
        return statistics.median(times[0] for times in self.arrivals)

    @property
    def total_sec(self) -> float:
        """When the last token arrived."""
        return max(times[-1] for times in self.arrivals)

    @property
    def gaps_sec(self) -> list[float]:
        """Times between consecutive tokens of a sequence, all sequences pooled."""
        return [b - a for times in self.arrivals for a, b in pairwise(times)]

    @property
    def worst_gap_sec(self) -> float | None:
        """The longest time between consecutive tokens of a sequence."""
        return max(self.gaps_sec, default=None)

    @property
    def output_tokens_per_sec(self) -> float:
        """Tokens of all sequences by wall time, prefill included."""
        return sum(map(len, self.arrivals)) / self.total_sec

    @property
    def decode_tokens_per_sec(self) -> float | None:
        """Tokens per second of all sequences together while all of them decode; None if they never do.

        From the last sequence's first token to the first sequence's end: before, prompts of others share the steps;
        after, the batch is smaller.
        """
        start = max(times[0] for times in self.arrivals)
        end = min(times[-1] for times in self.arrivals)
        if end <= start:
            return None
        return sum(_tokens_by(times, end) - _tokens_by(times, start) for times in self.arrivals) / (end - start)

    @property
    def prefill_tokens_per_sec(self) -> float:
        """Prompt tokens per second until every sequence had its first token."""
        return self.num_prompt_tokens / max(times[0] for times in self.arrivals)


def _tokens_by(times: Sequence[float], now: float) -> float:
    """Return how many tokens had arrived, in fractions between two: _tokens_by([1.0, 2.0, 4.0], 3.0) -> 2.5.

    The sequences of a step arrive microseconds apart: whole tokens would count up to a step too much or too little.
    """
    import numpy as np  # here and below: `nanoinfer --help` imports this module

    return float(np.interp(now, times, range(1, len(times) + 1), left=0.0))


@dataclass(frozen=True)
class Figures:
    """The figures of a case: medians over its rounds of what `RunTimes` computes, and their spread."""

    rounds: int
    ttft_sec: float
    tpot_sec: float | None
    """Median time per output token; with p90 and p99 over all gaps of all rounds. None for one token."""
    tpot_p90_sec: float | None
    tpot_p99_sec: float | None
    decode_tokens_per_sec: float | None
    prefill_tokens_per_sec: float
    output_tokens_per_sec: float
    total_sec: float
    spread_percent: float
    """(max - min) / median of the rounds' total time."""
    worst_gap_sec: float | None = None


def summarize(runs: Sequence[RunTimes]) -> Figures:
    """Return the figures of a case's rounds, at least one."""
    import numpy as np

    gaps = [gap for run in runs for gap in run.gaps_sec]
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99)).tolist() if gaps else (None, None, None)
    medians: dict[str, Any] = {}
    rates = (f"{kind}_tokens_per_sec" for kind in ("decode", "prefill", "output"))
    for name in ("ttft_sec", "worst_gap_sec", *rates, "total_sec"):
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        medians[name] = statistics.median(values) if values else None
    totals = [run.total_sec for run in runs]
    spread = 100 * (max(totals) - min(totals)) / medians["total_sec"]
    return Figures(len(runs), tpot_sec=p50, tpot_p90_sec=p90, tpot_p99_sec=p99, spread_percent=spread, **medians)


def is_steady(seconds: Sequence[float], tolerance: float = 0.1) -> bool:
    """Return whether the last two of some warm-up times differ by at most `tolerance`: [3.0, 1.1, 1.0] -> True."""
    return len(seconds) >= 2 and abs(seconds[-1] - seconds[-2]) <= tolerance * seconds[-2]


def naive_token_times(
    step_sec: Callable[[int], float], prompt_tokens: int, output_tokens: int, block_size: int, num_lengths: int
) -> list[float]:
    """Return the time of each token of a generation without a cache, from measurements at a few lengths.

    The token after p tokens takes step_sec(p), the time to first token of a prompt of p tokens. It is measured at
    num_lengths lengths, and linear between them; beyond block_size, to which contexts are cropped, it is constant.
    """
    import numpy as np

    lengths = [min(prompt_tokens + i, block_size) for i in range(output_tokens)]
    first, last = lengths[0], lengths[-1]
    measured = sorted({round(n) for n in np.linspace(first, last, min(num_lengths, last - first + 1))})
    return [float(sec) for sec in np.interp(lengths, measured, [step_sec(n) for n in measured])]
