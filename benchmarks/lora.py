"""Measure what LoRA adapters cost engine native: tokens/s without, with one, and with one of its own for each sequence.

    python benchmarks/lora.py --model random:gpt2 --quantization int8 [--rank 16] [--rounds 9]

The adapters are random and update all matrices of attention and MLPs. All cases alternate; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import numpy as np

from nanoinfer import LLM
from nanoinfer.checkpoints.adapters import TARGETS, Adapter, LowRank
from nanoinfer.config import ModelConfig
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.models.families.base import split_name
from nanoinfer.models.parameters import shapes

CONTEXT, STEPS, BATCHES = 32, 24, (1, 8)


def random_adapter(config: ModelConfig, rank: int, seed: int) -> Adapter:
    """Return an adapter of every matrix that one can update."""
    generator, updates = np.random.default_rng(seed), {}
    for name, (out, *rest) in shapes(config).items():
        _, part, suffix = split_name(name)
        if part in TARGETS and suffix == ".weight":
            a, b = (
                generator.standard_normal((rank, *rest), np.float32),
                generator.standard_normal((out, rank), np.float32),
            )
            updates[name.removesuffix(".weight")] = (LowRank(a, 0.01 * b),)
    return Adapter(updates)


def rate(engine: Engine, adapters: list[int]) -> float:
    """Return the tokens/s of decoding sequences with these adapters, 0: none."""
    handles, tokens = (
        [engine.open(adapter) for adapter in adapters],
        np.random.default_rng(0).integers(0, 40000, CONTEXT),
    )
    count = len(handles)
    engine.extend(StepBatch(handles, tokens.tolist() * count, [CONTEXT] * count, [1] * count))
    start = time.perf_counter()
    for step in range(STEPS):
        engine.extend(StepBatch(handles, [step] * count, [1] * count, [1] * count))
    seconds = time.perf_counter() - start
    for handle in handles:
        engine.close(handle)
    return count * STEPS / seconds


def main() -> None:
    """Print the rates, and their ratios to that without an adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:gpt2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    llm = LLM(
        given.model, engine="native", quantization=given.quantization, max_num_seqs=8, enable_lora=True, max_loras=8
    )
    engine, config = llm.engine, llm.config
    numbers = [engine.load_adapter(random_adapter(config, given.rank, seed)) for seed in range(8)]
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(given.rounds):
        for batch in BATCHES:
            for name, adapters in ("none", [0] * batch), ("one", numbers[:1] * batch), ("its own", numbers[:batch]):
                rates[f"batch {batch}, {name}"].append(rate(engine, adapters))
    for case, values in rates.items():
        without = rates[case.split(",")[0] + ", none"]
        ratio = statistics.median(values) / statistics.median(without)
        print(f"{case}: {statistics.median(values):.0f} tokens/s ({min(values):.0f} to {max(values):.0f}), {ratio:.3f}")


if __name__ == "__main__":
    main()
