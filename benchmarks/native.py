"""What a step of the native engine costs: by weight format, length of the context, and number of tokens.

    python benchmarks/native.py [MODEL]              random:gpt2 unless given
    python benchmarks/native.py [MODEL] --busy       what remains of the rate beside one busy process, at batch 1 and 64
    NANOINFER_ISA=avx2 python benchmarks/native.py   on another instruction set

For each format: a decode step of one sequence at 32 and at 900 tokens of context, the share of its speed that the long
context keeps, verifying 5 tokens in one step over decoding 1, a prompt of 900 tokens, and where the time of a step
goes. Medians; the formats take turns, so that a noisy minute hits all of them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable

from nanoinfer import LLM
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.engines.native import NativeEngine

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
SHORT, LONG, VERIFY = 32, 900, 5
ROUNDS, STEPS = 5, 16
BUSY_FORMATS, BUSY_BATCHES, BUSY_ROUNDS, BUSY_SEC = ("bfloat16", "int8"), (1, 64), 10, 0.5


class Measured:
    """One format's engine with one open sequence, and its times in seconds."""

    def __init__(self, model: str, options: dict[str, str]) -> None:
        engine = LLM(model, engine="native", max_num_seqs=1, **options).engine  # type: ignore[arg-type]
        assert isinstance(engine, NativeEngine)
        self._engine = engine
        self._handle = engine.open()
        self.isa = engine.isa
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def round(self) -> None:
        """Time everything once."""
        self._time("prefill", lambda: self._extend(LONG), steps=1)
        for context, name in ((LONG, "long"), (SHORT, "short")):
            self._engine.truncate(self._handle, context)
            self._time(name, lambda: self._extend(1), STEPS)
        self._engine.truncate(self._handle, SHORT)
        self._time("verify", lambda: self._extend(VERIFY, num_logits=VERIFY), STEPS)
        self._engine.truncate(self._handle, 0)

    def parts_percent(self) -> str:
        """Return where the time of a decode step goes."""
        self._extend(SHORT)
        before = self._engine.part_seconds()
        for _ in range(STEPS):
            self._extend(1)
        spent = {part: after - before[part] for part, after in self._engine.part_seconds().items()}
        self._engine.truncate(self._handle, 0)
        return ", ".join(f"{part} {100 * sec / sum(spent.values()):.0f}%" for part, sec in spent.items())

    def _extend(self, count: int, num_logits: int = 1) -> None:
        vocab_size = self._engine.config.vocab_size
        self._engine.extend(StepBatch([self._handle], [i % vocab_size for i in range(count)], [count], [num_logits]))

    def _time(self, name: str, call: Callable[[], None], steps: int) -> None:
        for _ in range(steps):
            start = time.perf_counter()
            call()
            self.times[name].append(time.perf_counter() - start)


def tokens_per_sec(engine: Engine, batch: int) -> float:
    """Return the rate of decode steps from SHORT tokens of context on, measured for BUSY_SEC."""
    handles = [engine.open() for _ in range(batch)]
    engine.extend(StepBatch(handles, [1] * SHORT * batch, [SHORT] * batch, [1] * batch))
    step = StepBatch(handles, [1] * batch, [1] * batch, [1] * batch)
    start, steps = time.perf_counter(), 0
    while (sec := time.perf_counter() - start) < BUSY_SEC:
        engine.extend(step)
        steps += 1
        if engine.length(handles[0]) == LONG:
            for handle in handles:
                engine.truncate(handle, SHORT)
    for handle in handles:
        engine.close(handle)
    return steps * batch / sec


def busy(model: str) -> None:
    """Measure with and without a busy process, in turns, and print a table."""
    print(f"{model}, native, tokens/s: medians of {BUSY_ROUNDS} rounds\n")
    print("| weights | batch | idle machine | beside one busy process | kept |")
    print("|---|---|---|---|---|")
    for name in BUSY_FORMATS:
        options = FORMATS[name]
        engine = LLM(model, engine="native", max_num_seqs=max(BUSY_BATCHES), **options).engine  # type: ignore[arg-type]
        for batch in BUSY_BATCHES:
            rates: list[tuple[float, float]] = []
            for _ in range(BUSY_ROUNDS):
                idle = tokens_per_sec(engine, batch)
                with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
                    try:
                        rates.append((idle, tokens_per_sec(engine, batch)))
                    finally:
                        other.kill()
            idle, beside = (statistics.median(values) for values in zip(*rates, strict=True))
            kept = statistics.median(beside / idle for idle, beside in rates)
            print(f"| {name} | {batch} | {idle:.0f} | {beside:.0f} | {kept:.2f} |", flush=True)


def main() -> None:
    """Measure, and print a table."""
    models = [argument for argument in sys.argv[1:] if argument != "--busy"]
    model = models[0] if models else "random:gpt2"
    if "--busy" in sys.argv:
        return busy(model)
    measured = {name: Measured(model, options) for name, options in FORMATS.items()}
    for _ in range(ROUNDS):
        for one in measured.values():
            one.round()
    print(f"{model}, native on {measured['float32'].isa}\n")
    print(f"| weights | step ms | tokens/s | at {LONG} tokens | kept | verify {VERIFY} | {LONG}-token prompt ms |")
    print("|---|---|---|---|---|---|---|")
    for name, one in measured.items():
        median = {key: statistics.median(values) for key, values in one.times.items()}
        short, long = median["short"], median["long"]
        print(
            f"| {name} | {1e3 * short:.2f} | {1 / short:.0f} | {1 / long:.0f} | {100 * short / long:.0f}% "
            f"| {median['verify'] / short:.2f}x | {1e3 * median['prefill']:.0f} |"
        )
    print()
    for name, one in measured.items():
        print(f"{name}: {one.parts_percent()}")


if __name__ == "__main__":
    main()
