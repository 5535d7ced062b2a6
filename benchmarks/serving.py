"""Measure what serving costs on engine native: a chat's turns, a prefix cache without hits, time outside the engine.

    python benchmarks/serving.py [MODEL] [--rounds N]

MODEL is random:gpt2 unless given, in int8. Prompts are random tokens. `nanoinfer bench --suite serving` measures mixed
lengths, common prefixes, a long prompt that arrives, and steady decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nanoinfer import LLM, SamplingParams
from nanoinfer.core.observer import ENGINE

TURNS, TURN_TOKENS = 20, 16


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Measurement:
    """Prompts and models of one run."""

    def __init__(self, model: str, rounds: int) -> None:
        self.model, self.rounds = model, rounds
        self.rng = np.random.default_rng(0)

    def llm(self, max_num_seqs: int = 64, **options: Any) -> LLM:
        return LLM(
            self.model, engine="native", dtype="float32", quantization="int8", max_num_seqs=max_num_seqs, **options
        )

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 50000, count).tolist()  # type: ignore[no-any-return]

    def median(self, run: Callable[[], float]) -> float:
        return statistics.median(run() for _ in range(self.rounds))


def no_hits(m: Measurement) -> None:
    """What the prefix cache costs where nothing is shared: 256 short requests."""
    llms = [m.llm(enable_prefix_caching=on) for on in (True, False)]
    seconds: list[list[float]] = [[], []]
    for _ in range(2 * m.rounds):
        prompts = [m.tokens(32) for _ in range(256)]
        for llm, times in zip(llms, seconds, strict=True):
            start = time.perf_counter()
            llm.generate(prompts, greedy(16), use_tqdm=False)
            times.append(time.perf_counter() - start)
    ratios = [on / off for on, off in zip(*seconds, strict=True)]
    print(f"256 requests that share nothing, 32 + 16 tokens: with the cache {statistics.median(ratios):.3f} times the"
          f" time without (rounds: {min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


def chat(m: Measurement) -> None:
    """A conversation of 20 turns: the tokens that are processed, and those of its prompts."""
    llm = m.llm(max_num_seqs=1)
    history: list[int] = []
    new = 0
    for _ in range(TURNS):
        history = history + m.tokens(TURN_TOKENS)
        (output,) = llm.generate({"prompt_token_ids": history}, greedy(TURN_TOKENS), use_tqdm=False)
        new += len(history) - output.num_cached_tokens
        history = history + output.check().outputs[0].token_ids
    prompts = sum(TURN_TOKENS * (2 * turn + 1) for turn in range(TURNS))
    print(
        f"chat of {TURNS} turns of {TURN_TOKENS} + {TURN_TOKENS} tokens: {new:,} prompt tokens processed of {prompts:,}"
    )


@contextmanager
def steady(llm: LLM, batch: int, m: Measurement) -> Iterator[Callable[[], Any]]:
    """Yield a function that runs a step in which `batch` sequences decode one token each."""
    requests = llm.requests.make_all([m.tokens(32) for _ in range(batch)], greedy(64))
    llm.core.submit(requests)
    while any(s.num_output_tokens < 2 for r in requests for s in r.sequences):
        llm.core.step()
    yield llm.core.step
    llm.core.abort(*requests)


class EngineClock:
    """Adds up the time inside the engine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if name == ENGINE:
            self.seconds += time.perf_counter() - start


def overhead(m: Measurement) -> None:
    """The share of a step's time outside the engine: scheduler, sampler, text and queues."""
    for batch in (1, 64):
        llm = m.llm(max_num_seqs=batch)

        def run(llm: LLM = llm, batch: int = batch) -> float:
            with steady(llm, batch, m) as step:
                clock, before = EngineClock(), llm.core.observer
                llm.core.observer = clock
                start = time.perf_counter()
                for _ in range(40):
                    step()
                total = time.perf_counter() - start
                llm.core.observer = before
                return 100 * (1 - clock.seconds / total)

        print(f"batch {batch}: {m.median(run):.1f}% of a step is outside the engine")


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    m = Measurement(given.model, given.rounds)
    for measure in (chat, no_hits, overhead):
        measure(m)


if __name__ == "__main__":
    main()
