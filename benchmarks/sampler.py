"""The samplers on GPT-2's vocabulary: microseconds to sample one token for each row, after checking that they agree.

Run: OMP_NUM_THREADS=1 python benchmarks/sampler.py [ROUNDS]        (default: 15; the reference: 3)
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from nanoinfer import SamplingParams
from nanoinfer.sampling import native, sampler
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText

V = 50257
BATCHES = (1, 64)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 100, 50
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-p, flat": {"temperature": 3.0, "top_p": 0.95},
    "all controls": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, **PENALTIES},
}
REFERENCE_ROUNDS = 3  # it takes a second where the native sampler takes 20 ms
IMPLEMENTATIONS = {"reference": sampler.sample, "native": native.sample}


def make_rows(params: SamplingParams, B: int, generator: torch.Generator) -> list[Sequence]:
    rows = []
    for i in range(B):
        ids = torch.randint(V, (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS,), generator=generator).tolist()
        request = Request(i, None, ids[:NUM_PROMPT_TOKENS], params, seed=i)
        rows.append(Sequence(request, 0, OutputText(None, ()), 1024, ids))
    return rows


def main(rounds: int) -> int:
    if not native.available():
        print("the native sampler is not built: pip install without NANOINFER_NO_NATIVE", file=sys.stderr)
        return 2
    from rich import box  # not where this module is imported: a GPU's machine may lack it
    from rich.console import Console
    from rich.table import Table

    generator = torch.Generator().manual_seed(0)
    table = Table(box=box.SIMPLE, title=f"{V:,} logits a row, normal(0, 3), {torch.get_num_threads()} torch thread(s)")
    for column in ("sampler", "rows", "reference us", "native us", "us a row", "faster", "same"):
        table.add_column(column, justify="left" if column in ("sampler", "same") else "right")
    all_same = True
    for name, settings in SAMPLERS.items():
        for B in BATCHES:
            logits = torch.randn(B, V, generator=generator) * 3
            rows = make_rows(SamplingParams(**settings), B, generator)
            tokens = {which: sample(logits, rows) for which, sample in IMPLEMENTATIONS.items()}
            same = tokens["reference"] == tokens["native"]
            all_same = all_same and same
            seconds: dict[str, list[float]] = {which: [] for which in IMPLEMENTATIONS}
            for i in range(rounds):  # interleaved, so that a noisy minute hits both
                for which, sample in IMPLEMENTATIONS.items():
                    if which == "reference" and i >= REFERENCE_ROUNDS:
                        continue
                    began = time.perf_counter()
                    sample(logits, rows)
                    seconds[which].append(time.perf_counter() - began)
            slow, fast = (statistics.median(seconds[which]) * 1e6 for which in IMPLEMENTATIONS)
            ratio = f"{slow / fast:.1f}x"
            table.add_row(
                name, str(B), f"{slow:,.0f}", f"{fast:,.0f}", f"{fast / B:,.1f}", ratio, "yes" if same else "NO"
            )
    Console().print(table)
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
