"""The samplers on a GPU: microseconds to sample one token for each row of GPT-2's vocabulary, compared first.

    python benchmarks/triton_sampler.py [--rows 1 8 64 512] [--output rows.jsonl]

Exit code 2 without CUDA, 1 if a row has an error.

fused: `TritonSampler.sample_slots` in a CUDA graph, slots already assigned: its cost in a step on the device. call:
`Sample`, which uploads all parameters and waits for the tokens. reference: the sorting sampler, which copies the logits
to the host and takes up to ten seconds, so it is timed in three calls. Medians, by CUDA events.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from gpu_rows import captured, measure, microseconds, parser
from sampler import SAMPLERS as SETTINGS
from sampler import V, make_rows

from nanoinfer import SamplingParams
from nanoinfer.sampling import sampler
from nanoinfer.sampling import triton as triton_sampler


def sampler_row(name: str, B: int, rounds: int, device: str = "cuda") -> dict[str, Any]:
    """Compare the tokens of all samplers, and time them."""
    generator = torch.Generator().manual_seed(B)
    logits = (torch.randn(B, V, generator=generator) * 3).to(device)
    rows = make_rows(SamplingParams(**SETTINGS[name]), B, generator)
    call = triton_sampler.Sample()
    expected = [s.token_id for s in sampler.sample(logits, rows)]
    by_call = [s.token_id for s in call(logits, rows)]
    fused = triton_sampler.TritonSampler(B, V, device)
    slots, wanted = torch.arange(B, device=device), torch.ones(B, dtype=torch.bool, device=device)
    replay, tokens = captured(lambda: fused.sample_slots(logits, slots, wanted))
    for slot, row in enumerate(rows):
        fused.assign(slot, row)
    replay()
    by_graph = tokens.tolist()
    # The reference sums in another order on a GPU: a token in thousands may lie that close to a border.
    num_different = max(sum(a != b for a, b in zip(d, expected, strict=True)) for d in (by_call, by_graph))
    if num_different > max(1, B // 100):
        raise ValueError(f"{num_different} of {B} tokens are not the reference's: not timed")
    return {
        "num_different": num_different,
        "fused_usec": microseconds(replay, rounds),
        "call_usec": microseconds(lambda: call(logits, rows), rounds),
        "reference_usec": microseconds(lambda: sampler.sample(logits, rows), min(rounds, 3), warm_ups=0),
    }


def main() -> int:
    options = parser(__doc__ or "", "sampler")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], help="batch sizes")
    options.add_argument("--rounds", type=int, default=20, help="timed calls of each")
    args = options.parse_args()
    why_not = triton_sampler.why_unavailable() if torch.cuda.is_available() else "no CUDA device"
    if why_not:
        print(f"benchmarks/triton_sampler.py: {why_not}", file=sys.stderr)
        return 2
    cases = {f"{name}, {B} rows": partial(sampler_row, name, B, args.rounds) for B in args.rows for name in SETTINGS}
    return measure(cases, args)


if __name__ == "__main__":
    sys.exit(main())
