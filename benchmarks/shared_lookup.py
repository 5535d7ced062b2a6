"""Measure prompt lookup with and without the texts of other requests, on requests as an agent sends them.

    python benchmarks/shared_lookup.py [MODEL] [--rounds N]

Each request of a round asks for a call of the same tool with other arguments, so answers repeat each other and not
their prompts. The requests run one after the other, greedy, with the same tokens in all columns; ratios are seconds of
a round without a draft over those with one, medians of interleaved rounds. MODEL is smollm2 unless given.
"""

from __future__ import annotations

import argparse
import statistics
import time

from nanoinfer import LLM, SamplingParams

DRAFTS = (None, "prompt-lookup", "prompt-lookup:shared")
CITIES = "Paris Rome Oslo Cairo Lima Delhi Tokyo Quito Bern Accra Dublin Havana Kyiv Lagos Madrid Osaka".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def prompts(seed: int) -> list[str]:
    """Return the prompts of a round."""
    asked = "Write only a JSON object with the keys tool, city, day, unit and reason that asks for the weather in"
    return [f"{asked} {city} on {DAYS[(i + seed) % len(DAYS)]}." for i, city in enumerate(CITIES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options = {"sampling_params": SamplingParams(temperature=0, max_tokens=80), "use_tqdm": False}
    models = [LLM(args.model, engine="native", draft=draft) for draft in DRAFTS]
    seconds: list[list[float]] = [[] for _ in DRAFTS]
    accepted = [0] * len(DRAFTS)
    for seed in range(args.rounds + 1):  # the first one is not counted: it fills the pool
        texts = []
        for i, llm in enumerate(models):
            start = time.perf_counter()
            outputs = [llm.chat([{"role": "user", "content": text}], **options)[0] for text in prompts(seed)]
            seconds[i].append(time.perf_counter() - start)
            texts.append([o.outputs[0].token_ids for o in outputs])
            accepted[i] += sum(o.metrics.speculation.num_accepted for o in outputs if o.metrics.speculation)
        if texts[1:] != texts[:-1]:
            raise SystemExit("the drafts changed the tokens")
    for draft, sec, count in zip(DRAFTS, seconds, accepted, strict=True):
        ratios = [plain / own for plain, own in zip(seconds[0][1:], sec[1:], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{draft or 'no draft':22} {spread}, {count} proposals accepted")


if __name__ == "__main__":
    main()
