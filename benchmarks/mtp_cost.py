"""What multi-token prediction costs on engine `native`: a step that verifies k proposals, and the block's proposals.

    python benchmarks/mtp_cost.py --preset qwen3.5-0.8b --quantization int8

The weights are random, so nothing is accepted and only times are measured: medians of interleaved rounds, after a
context of --context tokens. "share" is the draft's time in that of draft and verification.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nanoinfer.checkpoints.weights import Weights, mtp_config
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.models.parameters import SHARED, initialize
from nanoinfer.models.presets import PRESETS

NUM_PROPOSALS = (1, 2, 3)


def main() -> None:
    """Measure, and print a row for each number of proposals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="qwen3.5-0.8b", choices=PRESETS)
    parser.add_argument("--quantization", default="int8", choices=("int8", "int4"))
    parser.add_argument("--draft-quantization", default="int8", choices=("int8", "int4"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    config = replace(PRESETS[options.preset], block_size=2 * options.context)
    limits = EngineLimits(1, config.block_size, config.block_size, num_states=4, num_pending=8)
    spec, block = registry.ENGINES["native"], mtp_config(config)
    target = registry.build(
        spec, Weights(config, "float32", lambda: initialize(config, 0)),
        EngineConfig(quantization=options.quantization), "cpu", limits,
    )  # fmt: skip
    draft = registry.build(
        spec, Weights(block, "float32", lambda: initialize(block, 1, without=SHARED)),
        EngineConfig(quantization=options.draft_quantization), "cpu", replace(limits, num_states=0), target,
    )  # fmt: skip
    step, proposal = prepared(target, options.context), prepared(draft, options.context)
    runs: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for k in (0, *NUM_PROPOSALS):
            runs.setdefault(f"step {k}", []).append(step(1 + k))
        before = draft.part_seconds()["output head"]
        runs.setdefault("draft", []).append(proposal(1))
        runs.setdefault("head", []).append(draft.part_seconds()["output head"] - before)
    ms = {name: 1e3 * statistics.median(seconds[1:]) for name, seconds in runs.items()}
    print(f"{options.preset} {options.quantization}, block {options.draft_quantization}, {target.isa}")  # type: ignore[attr-defined]
    print(f"step of 1 token {ms['step 0']:.2f} ms; a proposal {ms['draft']:.2f} ms, of it the head {ms['head']:.2f} ms")
    for k in NUM_PROPOSALS:
        verify, drafting = ms[f"step {k}"], k * ms["draft"]
        ratio, share = verify / ms["step 0"], drafting / (drafting + verify)
        best = (1 + k) * ms["step 0"] / (verify + drafting)
        times = f"verification {verify:.2f} ms, {ratio:.2f} of a step; share {share:.0%}"
        print(f"k={k}: {times}; {best:.2f} x if all are accepted")


def prepared(engine: Engine, context: int) -> Callable[[int], float]:
    """Return a function that measures a step of n tokens, with logits for all, after a context."""
    handle = engine.open()
    vocab, rng = engine.config.vocab_size, np.random.default_rng(0)

    def extend(n: int, num_logits: int) -> float:
        previous = rng.standard_normal((n, engine.config.n_embd), np.float32) if engine.config.mtp else None
        batch = StepBatch(previous=previous, all_hidden=not engine.config.mtp)
        batch.add(handle, rng.integers(0, vocab, n).tolist(), num_logits)
        start = time.perf_counter()
        engine.extend(batch)
        engine.hidden()
        return time.perf_counter() - start

    def measure(n: int) -> float:
        seconds = extend(n, n)
        engine.truncate(handle, context)
        return seconds

    extend(context, 0)
    return measure


if __name__ == "__main__":
    main()
