"""`static` against transformers' generate: same weights, same dtype, same tokens, side by side in one run.

Run: python benchmarks/vs_transformers.py [--preset gpt2] [--dtype float32 ...] [--batch 1 8] [--rounds 5]

Greedy tokens are compared first, in float32; nothing is timed if they differ. Rounds are interleaved; the
ratio is the median of the ratios round by round. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from nanoinfer import LLM, SamplingParams
from nanoinfer.models.checkpoints import huggingface
from nanoinfer.models.checkpoints.load import load_model

PROMPT_TOKENS = 32


class Contestants:
    """Ours and theirs, on the same weights in the same dtype."""

    def __init__(self, folder: str, preset: str, dtype: str, batch: int, max_tokens: int) -> None:
        options = {"max_num_seqs": batch, "enable_prefix_caching": False}  # rounds repeat their prompts
        self.ours = LLM(folder, engine="static", dtype=dtype, **options)
        self.theirs: Any = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        generator = torch.Generator().manual_seed(0)
        size = (batch, PROMPT_TOKENS)
        self.prompts = torch.randint(self.ours.config.vocab_size - 1, size, generator=generator)
        self.max_tokens = max_tokens
        self.params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)

    def run_ours(self) -> list[list[int]]:
        outputs = self.ours.generate(self.prompts.tolist(), self.params)
        return [o.outputs[0].token_ids for o in outputs]

    @torch.inference_mode()
    def run_theirs(self) -> list[list[int]]:
        out = self.theirs.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            do_sample=False,
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.max_tokens,
            pad_token_id=0,
        )
        return out[:, PROMPT_TOKENS:].tolist()


def measure(c: Contestants, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for name, run in (("ours", c.run_ours), ("theirs", c.run_theirs)):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    tokens = len(c.prompts) * c.max_tokens
    ratios = [t / o for o, t in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {
        "static_tokens_per_sec": round(tokens / statistics.median(seconds["ours"]), 1),
        "transformers_tokens_per_sec": round(tokens / statistics.median(seconds["theirs"]), 1),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save(load_model(f"random:{args.preset}").weights, Path(folder))
        for dtype in args.dtype:
            for batch in args.batch:
                c = Contestants(folder, args.preset, dtype, batch, args.max_tokens)
                same = c.run_ours() == c.run_theirs()  # also the warm-up
                row: dict[str, Any] = {"dtype": dtype, "batch": batch, "same_tokens": same}
                if dtype == "float32" and not same:
                    row["error"], failed = "greedy tokens differ in float32: not timed", True
                else:
                    row |= measure(c, args.rounds)
                print(json.dumps(row), file=sys.stderr)
                rows.append(row)
    about = {
        "model": f"random:{args.preset}",
        "prompt_tokens": PROMPT_TOKENS,
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    print(json.dumps(about | {"rows": rows}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
