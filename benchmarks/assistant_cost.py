"""What an assistant of Gemma 4 costs on engine `native`: a step that verifies k proposals, and a proposal.

    python benchmarks/assistant_cost.py --quantization int8 --context 512

The target has 8 layers of 1,024, a quarter of them global, and a vocabulary of 262,144; the assistant has 4 layers of
256, and 2,048 groups of tokens or a plain head. The weights are random, so that only times are measured: medians of
interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import Backbone, EngineConfig, EngineLimits, LayerKind, ModelConfig, Rotary
from nanoinfer.engines import registry
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.models.parameters import OF_ASSISTANT, initialize
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.speculative.assistant import Assistant, attached
from nanoinfer.utils.arrays import HostTensor

NEAR = LayerKind(512, Rotary(256), scaled=True, value_norm=True)
FAR = LayerKind(None, Rotary(512, 1e6), head_size=512, scaled=True, value_norm=True)
TARGET = ModelConfig(
    vocab_size=262144, block_size=8192, n_layer=8, n_head=4, n_embd=1024, n_inner=4096, num_kv_heads=1, head_size=256,
    layers=(NEAR, NEAR, NEAR, FAR) * 2, bias=False, activation="gelu_new", norm="rms", norm_placement="both",
    qk_norm="head", gated_mlp=True, attention_scale=1.0, embedding_scale=32.0, learned_positions=False,
)  # fmt: skip


def assistant_weights(groups: int) -> Weights:
    """Return random weights of an assistant of TARGET."""
    kinds = tuple(replace(kind, value_norm=False, kv_layer=0) for kind in (NEAR, NEAR, NEAR, FAR))
    backbone = Backbone(TARGET.n_embd, groups, 32 if groups else 0)
    config = replace(TARGET, n_layer=4, n_embd=256, n_inner=2048, layers=kinds, mtp=True, backbone=backbone)
    order = HostTensor(np.random.default_rng(0).permutation(TARGET.vocab_size), "int64")
    read = lambda: ((n, order if n == f"{OF_ASSISTANT}order" else t) for n, t in initialize(config, 1))  # noqa: E731
    return Weights(attached(config, TARGET, "assistant"), "float32", read)


def main() -> None:
    """Measure, and print a row for each head."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quantization", default="int8", choices=("int8", "int4"))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    limits, spec = EngineLimits(4, TARGET.block_size, 4 * TARGET.block_size), registry.ENGINES["native"]
    config = EngineConfig(quantization=options.quantization)
    weights = Weights(TARGET, "float32", lambda: initialize(TARGET, 0))
    target = registry.build(spec, weights, config, "cpu", limits)
    drafts = {}
    for groups in (2048, 0):
        weights = assistant_weights(groups)
        engine = registry.build(spec, weights, EngineConfig(quantization="int8"), "cpu", limits, target)
        drafts[groups] = Assistant("assistant", engine, target, weights, choose_sampler("cpu"), TARGET.vocab_size)
    handle, rng = target.open(), np.random.default_rng(0)

    def step(handle: Handle, n: int) -> float:
        batch = StepBatch(all_hidden=True)
        batch.add(handle, rng.integers(0, TARGET.vocab_size, n).tolist(), min(n, 8))
        start = time.perf_counter()
        target.extend(batch)
        target.hidden()
        return time.perf_counter() - start

    step(handle, options.context)
    runs: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for k in (0, 1, 3):
            runs.setdefault(f"verification, k={k}", []).append(step(handle, 1 + k))
            target.truncate(handle, options.context)
        for groups, draft in drafts.items():
            previous = rng.standard_normal((1, TARGET.n_embd), np.float32)
            start = time.perf_counter()
            draft.step([handle], [1], previous)
            runs.setdefault(f"proposal, {groups} groups", []).append(time.perf_counter() - start)
    print(f"{options.quantization}, context {options.context}, {target.isa}")  # type: ignore[attr-defined]
    for name, seconds in runs.items():
        print(f"{name}: {1e3 * statistics.median(seconds[1:]):.2f} ms")


if __name__ == "__main__":
    main()
