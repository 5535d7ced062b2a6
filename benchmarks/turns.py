"""Measure when a further turn of a conversation starts, beside a prompt of its new tokens alone.

    python benchmarks/turns.py MODEL [--shared 4000] [--new 200] [--rounds 7]

A first turn has `shared` tokens. Rounds measure in turn the time to the first token of the next turn (what there was,
one generated token, and `new` others), of a step that appends the same tokens to an open sequence, and of as many new
tokens as a prompt. Tokens are random; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from nanoinfer import LLM, SamplingParams
from nanoinfer.engines.base import StepBatch


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Return the milliseconds until a prompt's first token, the tokens that were not computed again, and the token."""
    start = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1))
    return 1e3 * (time.perf_counter() - start), output.num_cached_tokens, output.outputs[0].token_ids[0]


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shared", type=int, default=4000)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    room = given.shared + (given.rounds + 1) * (given.new + 1)
    llm = LLM(given.model, engine="native", max_num_seqs=4, max_model_len=room, kv_cache_memory=2 << 30)
    generator = np.random.default_rng(0)
    turn = generator.integers(10, 30000, given.shared).tolist()
    turn.append(first_token(llm, turn)[2])
    open_one = llm.engine.open()
    llm.engine.extend(StepBatch([open_one], turn[:-1], [given.shared], [0]))
    times: dict[str, list[float]] = {"next turn": [], "the same step": [], "new tokens alone": []}
    for _ in range(given.rounds):
        turn += generator.integers(10, 30000, given.new).tolist()
        milliseconds, cached, token = first_token(llm, turn)
        times["next turn"].append(milliseconds)
        start, new = time.perf_counter(), turn[-given.new - 1 :]
        llm.engine.extend(StepBatch([open_one], new, [len(new)], [1]))
        times["the same step"].append(1e3 * (time.perf_counter() - start))
        times["new tokens alone"].append(first_token(llm, generator.integers(10, 30000, given.new).tolist())[0])
        print(f"{len(turn) - cached} of {len(turn):,} tokens were computed")
        turn.append(token)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name}: {medians[name]:.0f} ms ({min(values):.0f} to {max(values):.0f})")
    for name in ("the same step", "new tokens alone"):
        print(f"next turn / {name}: {medians['next turn'] / medians[name]:.3f}")


if __name__ == "__main__":
    main()
