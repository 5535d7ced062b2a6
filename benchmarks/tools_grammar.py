"""Measure what a grammar beside tools costs while an answer is free text, at batch 1 and 64.

    python benchmarks/tools_grammar.py [MODEL] [--rounds N]

Both columns generate the same greedy tokens; one has the grammar of an answer that may call one of two tools. Ratios
are seconds without the grammar over those with it, medians of interleaved rounds. MODEL is shakespeare unless given.
"""

from __future__ import annotations

import argparse
import statistics
import time

from nanoinfer import LLM, SamplingParams
from nanoinfer.inputs.answers.format import JSON_IN_MARKERS
from nanoinfer.inputs.answers.grammar import to_grammar
from nanoinfer.inputs.messages import Tool

NUM_TOKENS = 200
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="shakespeare")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    grammar = to_grammar(JSON_IN_MARKERS, [Tool("weather", "", PARAMETERS), Tool("forecast", "", PARAMETERS)])
    llm = LLM(args.model, engine="native", draft=None, enable_prefix_caching=False)
    common = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    columns = [SamplingParams(**common), SamplingParams(**common, structured_outputs=grammar)]
    for batch in (1, 64):
        prompts, ratios = [f"{i} ROMEO:" for i in range(batch)], []
        for number in range(args.rounds + 1):
            seconds, texts = [], []
            for params in columns if number % 2 else columns[::-1]:
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
                texts.append([o.outputs[0].token_ids for o in outputs])
            if texts[0] != texts[1]:
                raise SystemExit("the grammar changed the tokens")
            plain, masked = seconds if number % 2 else seconds[::-1]
            ratios.append(plain / masked)
        spread = f"{statistics.median(ratios[1:]):.3f} ({min(ratios[1:]):.3f} to {max(ratios[1:]):.3f})"
        print(f"batch {batch:2}: {spread}; the last run without it had {batch * NUM_TOKENS / plain:,.0f} tokens/s")


if __name__ == "__main__":
    main()
