"""The ladder on one model: tokens per second of every engine that runs here, after checking that all agree.

Run: python benchmarks/ladder.py [MODEL] [MAX_TOKENS]        (default: shakespeare 200)
"""

from __future__ import annotations

import statistics
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.load import load_tokenizer
from nanoinfer.engines.registry import ENGINES

ROUNDS = 3
PROMPT = "ROMEO:"
OPTIONS = {"max_num_seqs": 1, "enable_prefix_caching": False}  # rounds repeat their prompt


def main(model: str, max_tokens: int) -> int:
    llms = {
        name: LLM(model, engine=name, dtype="float32", tokenizer="shakespeare", **OPTIONS)
        for name, spec in ENGINES.items()
        if spec.unavailable() is None
    }
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    ids = load_tokenizer("shakespeare").encode(PROMPT)
    tokens = {name: llm.generate(ids, params)[0].check().outputs[0].token_ids for name, llm in llms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(ROUNDS):  # interleaved, so that a noisy minute hits all of them
        for name, llm in llms.items():
            seconds[name].append(llm.generate(ids, params)[0].metrics.total_sec)

    table = Table(box=box.SIMPLE, title=f"{model}, {max_tokens} tokens, batch 1, float32, greedy")
    for column in ("engine", "tokens/s", "against recompute", "same tokens", "the one idea"):
        table.add_column(column, justify="right" if column in ("tokens/s", "against recompute") else "left")
    slowest = statistics.median(seconds["recompute"])
    for name in llms:
        median = statistics.median(seconds[name])
        same = "yes" if tokens[name] == tokens["recompute"] else "NO"
        table.add_row(name, f"{max_tokens / median:,.0f}", f"{slowest / median:.1f}x", same, ENGINES[name].idea)
    Console().print(table)
    return 0 if all(found == tokens["recompute"] for found in tokens.values()) else 1


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "shakespeare"
    sys.exit(main(name, int(sys.argv[2]) if len(sys.argv) > 2 else 200))
