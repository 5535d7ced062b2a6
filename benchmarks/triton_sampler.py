"""The samplers on a GPU: microseconds to sample one token for each row of GPT-2's vocabulary, compared first.

Run: python benchmarks/triton_sampler.py [--json] [--rows 1 8 64 512]    (exit code 2 without CUDA, 1 if tokens differ)

fused: `TritonSampler.draw` in a CUDA graph, slots already assigned: its cost in a step on the device. call: `Sample`,
which uploads all parameters and waits for the tokens. reference: the sorting sampler on the same device, likewise.
flashinfer: where it is installed; its tokens are others, so it is timed unchecked. Medians, by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sampler import SAMPLERS as SETTINGS
from sampler import V

from nanoinfer import SamplingParams
from nanoinfer.sampling import flashinfer, sampler
from nanoinfer.sampling import triton as triton_sampler
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.text import OutputText


def make_rows(params: SamplingParams, B: int, generator: torch.Generator) -> list[Sequence]:
    rows = []
    for i in range(B):
        ids = torch.randint(V, (150,), generator=generator).tolist()
        request = Request(i, None, ids[:100], params, seed=i)
        rows.append(Sequence(request, 0, OutputText(None, ()), 1024, ids))
    return rows


def microseconds(run: Callable[[], object], rounds: int) -> float:
    """The median time of a call on the device's clock, after three that are not timed."""
    times = []
    for i in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(slots: triton_sampler.TritonSampler, logits: torch.Tensor) -> torch.cuda.CUDAGraph:
    """One draw of all slots, ready to replay; the kernels have been compiled by a draw before."""
    B = len(logits)
    which = torch.arange(B, device=logits.device)
    wanted = torch.ones(B, dtype=torch.bool, device=logits.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.tokens = slots.draw(logits, which, wanted)  # type: ignore[attr-defined]  # kept as long as the graph
    graph.inputs = which, wanted  # type: ignore[attr-defined]
    return graph


def measure(name: str, B: int, rounds: int) -> dict[str, Any]:
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(B)
    logits = (torch.randn(B, V, generator=generator) * 3).to(device)
    rows = make_rows(SamplingParams(**SETTINGS[name]), B, generator)
    call = triton_sampler.Sample()
    expected = [s.token_id for s in sampler.sample(logits, rows)]
    by_call = [s.token_id for s in call(logits, rows)]
    slots = triton_sampler.TritonSampler(B, V, device)
    graph = captured(slots, logits)
    for slot, row in enumerate(rows):
        slots.slot(slot, row)
    graph.replay()
    by_graph = graph.tokens.tolist()  # type: ignore[attr-defined]
    # The reference sums in another order on a GPU: a token in thousands may lie that close to a border.
    num_different = max(sum(a != b for a, b in zip(d, expected, strict=True)) for d in (by_call, by_graph))
    found: dict[str, Any] = {
        "sampler": name,
        "rows": B,
        "num_different": num_different,
        "fused_usec": microseconds(graph.replay, rounds),
        "call_usec": microseconds(lambda: call(logits, rows), rounds),
        "reference_usec": microseconds(lambda: sampler.sample(logits, rows), rounds),
        "flashinfer_usec": None,
    }
    if flashinfer.why_unavailable(device) is None and name != "greedy":
        draw = flashinfer.choose(device)
        found["flashinfer_usec"] = microseconds(lambda: draw(logits, rows), rounds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of a table")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], help="batch sizes")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each")
    args = parser.parse_args()
    why_not = triton_sampler.why_unavailable() if torch.cuda.is_available() else "no CUDA device"
    if why_not:
        print(f"benchmarks/triton_sampler.py: {why_not}", file=sys.stderr)
        return 2
    results = [measure(name, B, args.rounds) for name in SETTINGS for B in args.rows]
    wrong = [r for r in results if r["num_different"] > max(1, r["rows"] // 100)]
    if args.json:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        print(json.dumps({"vocab_size": V, **versions, "results": results, "ok": not wrong}))
    else:
        table = Table(box=box.SIMPLE, title=f"{V:,} logits a row, normal(0, 3), {torch.cuda.get_device_name()}")
        for column in results[0]:
            table.add_column(column.replace("_usec", " us").replace("num_", ""), justify="right")
        for r in results:
            table.add_row(*("-" if v is None else f"{v:,.1f}" if isinstance(v, float) else str(v) for v in r.values()))
        Console().print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
