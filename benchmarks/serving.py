"""Measure what serving costs on engine native: a chat's turns, a prefix cache without hits, time outside the engine,
and the gaps between the tokens of streams beside long prompts, with and without a target of a step's time.

    python benchmarks/serving.py [MODEL] [--rounds N] [--quantization FORMAT] [--only MEASUREMENT]

MODEL is random:gpt2 unless given, FORMAT int8. Prompts are random tokens. `nanoinfer bench --suite serving` measures
mixed lengths, common prefixes, a long prompt that arrives, and steady decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nanoinfer import LLM, SamplingParams
from nanoinfer.core.step import ENGINE, Observer

TURNS, TURN_TOKENS = 20, 16
NUM_STREAMS, STREAM_TOKENS, LATE_TOKENS = 8, 256, 16
ARRIVALS = (16, 16, 96, 96)  # a long prompt arrives when the streams have this many tokens


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Measurement:
    """Prompts and models of one run."""

    def __init__(self, model: str, rounds: int, quantization: str | None) -> None:
        self.model, self.rounds, self.quantization = model, rounds, quantization
        self.rng = np.random.default_rng(0)

    def llm(self, max_num_seqs: int = 64, **options: Any) -> LLM:
        return LLM(
            self.model, engine="native", dtype="float32", quantization=self.quantization, max_num_seqs=max_num_seqs,
            **options,
        )  # fmt: skip

    def tokens(self, count: int, vocab_size: int = 50000) -> list[int]:
        return self.rng.integers(0, vocab_size, count).tolist()  # type: ignore[no-any-return]

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


class EngineClock(Observer):
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


def stream_beside(llm: LLM, streams: list[list[int]], late: list[list[int]]) -> tuple[list[float], float]:
    """Decode streams while long prompts arrive; return the gaps of the streams and the time of everything, in sec."""
    llm.reset_prefix_cache()
    requests = llm.requests.make_all(
        streams, greedy(min(STREAM_TOKENS, llm.engine.limits.block_size - len(streams[0])))
    )
    waiting = list(zip(ARRIVALS, llm.requests.make_all(late, greedy(LATE_TOKENS)), strict=True))
    for request in requests:
        request.queue = deque()  # it is streamed
    llm.core.submit(requests)
    last: dict[int, float] = {}
    gaps: list[float] = []
    start = time.perf_counter()
    while llm.core.unfinished:
        deltas = llm.core.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id <= requests[-1].request_id:
                gaps += [now - last[delta.request_id]] if delta.request_id in last else []
                last[delta.request_id] = now
        while waiting and requests[-1].sequences[0].num_output_tokens >= waiting[0][0]:
            llm.core.submit([waiting.pop(0)[1]])
    return gaps, time.perf_counter() - start


def gaps(m: Measurement) -> None:
    """The gaps between the tokens of 8 streams beside prompts of 1,000 tokens."""
    llms = {ms: m.llm(max_num_seqs=NUM_STREAMS + len(ARRIVALS), target_step_ms=ms) for ms in (0, 80)}
    found: dict[int, list[tuple[list[float], float]]] = {ms: [] for ms in llms}
    for _ in range(m.rounds + 1):
        for ms, llm in llms.items():
            long, size = min(1000, llm.engine.limits.block_size - LATE_TOKENS), llm.config.vocab_size
            streams, late = (
                [m.tokens(n, size) for _ in range(k)] for n, k in ((32, NUM_STREAMS), (long, len(ARRIVALS)))
            )
            found[ms].append(stream_beside(llm, streams, late))
    for ms, runs in found.items():
        runs = runs[1:]  # without the first round
        p50, p99 = np.percentile([1e3 * gap for times, _ in runs for gap in times], (50, 99))
        worst = ", ".join(f"{1e3 * max(times):.0f}" for times, _ in runs)
        seconds = ", ".join(f"{sec:.2f}" for _, sec in runs)
        print(f"{NUM_STREAMS} streams beside {len(ARRIVALS)} prompts, target_step_ms={ms}: gaps of {p50:.1f} ms (p50),"
              f" {p99:.0f} (p99); longest of each round {worst}; {seconds} s")  # fmt: skip
    ratios = [limited / plain for (_, plain), (_, limited) in zip(found[0][1:], found[80][1:], strict=True)]
    print(f"time with the target: {statistics.median(ratios):.3f} times the time without"
          f" (rounds: {min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", default="int8", help="int8, int4 or none")
    measurements = {f.__name__: f for f in (chat, no_hits, overhead, gaps)}
    parser.add_argument("--only", choices=list(measurements), help="one measurement")
    given = parser.parse_args()
    m = Measurement(given.model, given.rounds, None if given.quantization == "none" else given.quantization)
    for measure in [measurements[given.only]] if given.only else measurements.values():
        measure(m)


if __name__ == "__main__":
    main()
