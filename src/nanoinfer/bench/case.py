"""One configuration that is measured: who, what model, which shape. Frozen, and checked when it is made."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.bench.prompts import Passages, cut_prompt, repeat_prompt
from nanoinfer.checks import require_choice, require_int
from nanoinfer.config import DTYPES, SpeculationConfig
from nanoinfer.sampling_params import SamplingParams

SAMPLERS: dict[str, dict[str, Any]] = {  # what each named sampler asks for, as SamplingParams fields
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 50},
    "hot": {"temperature": 3.0},  # hardly predictable: drafts are right once in 15 times
    "controls": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
    },
}
WORKLOADS = ("uniform", "mixed", "text", "copy")
MIXED_LOW, MIXED_HIGH = 16, 256  # tokens in and out of each request of the mixed workload


@dataclass(frozen=True)
class Case:
    """Who runs which model in which shape."""

    backend: str
    """An engine of ours (`static`), or a peer (`transformers-dynamic`, `llama.cpp`, ...)."""
    model: str
    """Any model that loads."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    quantization: str | None = None
    """Weight format below 16 bits, in the backend's own name for it (int8, Q4_0, ...)."""
    sampler: str = "greedy"
    """greedy, sampled (temperature and top-k), hot (a high temperature) or controls (everything on)."""
    batch: int = 1
    """Sequences at a time."""
    prompt_tokens: int = 32
    """Tokens of each prompt."""
    output_tokens: int = 64
    """Tokens generated for each prompt; of mixed requests, the most."""
    workload: str = "uniform"
    """uniform: `batch` requests of random tokens; mixed: the same, of 16 to 256 tokens in and out; text: of passages
    of real text; copy: passages that repeat themselves."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    draft: str | None = None
    """Who proposes tokens to verify; None: plain decoding."""
    speculate_k: str | int = "auto"
    """Tokens proposed at a time."""
    speculate_rule: str = "reproduce"
    """reproduce or reject."""

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("sampler", self.sampler, tuple(SAMPLERS))
        require_choice("workload", self.workload, WORKLOADS)
        checked = SpeculationConfig(self.draft, self.speculate_k, self.speculate_rule)
        object.__setattr__(self, "speculate_k", checked.speculate_k)  # "4" is 4
        for name in ("batch", "prompt_tokens", "output_tokens"):
            require_int(name, getattr(self, name), 1, 1 << 20)

    @property
    def key(self) -> str:
        """Return what names this case in a results file: its fields as compact JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return what two cases must share to be run round by round beside each other."""
        return self.model, self.sampler, self.batch, self.prompt_tokens, self.output_tokens, self.workload

    @property
    def label(self) -> str:
        """Return the backend with its weight format: "static float32", "native int8 + gpt2 k=4"."""
        name = f"{self.backend} {self.quantization or self.dtype}"
        if self.draft is None:
            return name
        return f"{name} + {self.draft} k={self.speculate_k}{' reject' if self.speculate_rule == 'reject' else ''}"

    @property
    def plain(self) -> Case:
        """Return the same without speculation: what is loaded, and what speculation is measured against."""
        return replace(self, draft=None, speculate_k="auto", speculate_rule="reproduce")

    def params(self, output_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one request of this case; past the context length the window slides."""
        chosen = SAMPLERS[self.sampler]
        return SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=0, overflow="slide", **chosen)


@dataclass(frozen=True)
class Work:
    """The requests of one run: token ids in, and how many tokens out."""

    prompts: list[list[int]]
    output_tokens: list[int]


def make_work(case: Case, vocab_size: int, seed: int = 0, passages: Passages = ()) -> Work:
    """Return the requests of a case: the same for every backend and every round.

    Args:
        case: its shape decides the lengths.
        vocab_size: token ids are drawn below this.
        seed: another seed gives other prompts of the same lengths; of passages the next ones.
        passages: for the workloads text and copy.
    """
    import random

    lengths = random.Random(0)
    tokens = random.Random(seed)
    if case.workload == "mixed":
        bounds = (MIXED_LOW, MIXED_HIGH)
        drawn = [(lengths.randint(*bounds), lengths.randint(*bounds)) for _ in range(case.batch)]
        sizes = [(n, min(m, case.output_tokens)) for n, m in drawn]
    else:
        sizes = [(case.prompt_tokens, case.output_tokens)] * case.batch
    if case.workload in ("text", "copy"):
        prompts = [
            (cut_prompt if case.workload == "text" else repeat_prompt)(passages, i, n)
            for i, (n, _) in enumerate(sizes, seed * case.batch)
        ]
        return Work(prompts, [m for _, m in sizes])
    prompts = [[tokens.randrange(vocab_size) for _ in range(n)] for n, _ in sizes]
    return Work(prompts, [m for _, m in sizes])
