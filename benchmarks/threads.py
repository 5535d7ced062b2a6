"""How a step of engine native divides over many threads, and how fast this machine is with each number of them.

    python benchmarks/threads.py plan                         # counts: on any machine
    python benchmarks/threads.py measure --output knee.json   # rates with 1, 2, 4, ... threads of this machine

A step is a list of phases, between which all threads wait. A phase has items (32 outputs of a matrix, a head of a
sequence, a row of activations) that a thread takes whole. So the busiest thread of a phase with n items on T threads
has ceil(n / T) of them, where n / T would be ideal. `bound` is the speed-up over one thread that this allows, weighted
by the bytes of the matrices; memory bandwidth and waiting are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nanoinfer import LLM, SamplingParams

THREADS = (2, 8, 16, 64)
PRODUCTS = ("matrix products", "output head")


class Phase(NamedTuple):
    part: str
    items: int
    num_bytes: int
    """Of the weights that it reads."""


def phases(llm: LLM, batch: int) -> list[Phase]:
    """Return the phases of a step that decodes `batch` sequences of a dense model."""
    llm.generate([[1 + i] for i in range(batch)], SamplingParams(max_tokens=3, ignore_eos=True))
    config, engine = llm.model.config, llm.core.engine
    width = sum(config.qkv_widths(0)), config.attn_dim, config.mlp_dim * (1 + config.gated_mlp), config.mlp_dim
    outputs = config.n_embd * width[0], width[1] * config.n_embd, config.n_embd * width[2], width[3] * config.n_embd
    head = config.vocab_size * config.n_embd
    weights, index, found = sum(outputs) * config.n_layer + head, 0, list[Phase]()
    per_weight = engine._decoder.weight_bytes / weights
    for part, items in engine._decoder.phase_items():
        count = 0
        if part == "matrix products":
            count, index = outputs[index % 4], index + 1
        found.append(Phase(part, items, round((head if part == "output head" else count) * per_weight)))
    return found


def largest(items: int, threads: int) -> float:
    """Return the share of the items that the busiest thread has."""
    return -(-items // threads) / items


def bound(plan: Sequence[Phase], threads: int) -> float:
    """Return the speed-up over one thread that the items of the products allow."""
    total = sum(phase.num_bytes for phase in plan)
    return total / sum(phase.num_bytes * largest(phase.items, threads) for phase in plan)


def show_plan(model: str, quantization: str | None, batches: Sequence[int]) -> None:
    llm = LLM(model, engine="native", quantization=quantization, max_num_seqs=max(batches), max_model_len=64)
    for batch in batches:
        plan = phases(llm, batch)
        print(f"\n{model}, {quantization or 'float32'}, {batch} sequences: {len(plan)} phases a step\n")
        print(f"| part | items | phases |{''.join(f' busiest of {t} |' for t in THREADS)}")
        print(f"|---|--:|--:|{'--:|' * len(THREADS)}")
        for (part, items), count in Counter((p.part, p.items) for p in plan).items():
            cells = "".join(f" {100 * largest(items, t):.1f}% |" for t in THREADS)
            print(f"| {part} | {items} | {count} |{cells}")
        print(f"| ideal | | |{''.join(f' {100 / t:.1f}% |' for t in THREADS)}")
        print(f"| bound of the products | | |{''.join(f' {bound(plan, t):.1f} x |' for t in THREADS)}")


def rates(llm: LLM, batch: int, rounds: int) -> list[float]:
    """Return tokens/s of each round."""
    params, found = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0), []
    for _ in range(rounds + 1):  # the first one warms up
        at = time.perf_counter()
        llm.generate([[1 + i] for i in range(batch)], params)
        found.append(batch * 64 / (time.perf_counter() - at))
    return found[1:]


def measure(model: str, quantization: str | None, batches: Sequence[int], rounds: int) -> dict[str, object]:
    available = len(os.sched_getaffinity(0))
    counts = sorted({available, *(2**i for i in range(available.bit_length()))})
    results = []
    for threads in counts:
        llm = LLM(
            model, engine="native", quantization=quantization, threads=threads, max_num_seqs=max(batches),
            max_model_len=128, enable_prefix_caching=False,
        )  # fmt: skip
        for batch in batches:
            speed, plan = rates(llm, batch, rounds), phases(llm, batch)
            results.append(
                {"threads": threads, "batch": batch, "tokens_per_sec": statistics.median(speed), "rounds": speed,
                 "phases": len(plan), "bound": round(bound(plan, threads), 2)}
            )  # fmt: skip
            print(f"{threads:4d} threads, {batch:3d} sequences: {statistics.median(speed):8.0f} tokens/s", flush=True)
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    return {"model": model, "quantization": quantization, "cpu": cpu.partition(":")[2].strip(),
            "system": platform.platform(), "isa": llm.core.engine.isa, "results": results}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("plan", "measure"))
    parser.add_argument("--model", default="random:gpt2", help="a dense model")
    parser.add_argument("--quantization", default="int8", help="int8, int4 or none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for the measurement, as JSON")
    args = parser.parse_args()
    quantization = None if args.quantization == "none" else args.quantization
    if args.command == "plan":
        return show_plan(args.model, quantization, args.batch)
    text = json.dumps(measure(args.model, quantization, args.batch, args.rounds))
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
