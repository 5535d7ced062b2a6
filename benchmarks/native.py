"""What a step of the native engine costs: by weight format, length of the context, and number of tokens.

    python benchmarks/native.py [MODEL]              random:gpt2 unless given
    NANOINFER_ISA=avx2 python benchmarks/native.py   on another instruction set

For each format: a decode step of one sequence at 32 and at 900 tokens of context, the share of its speed that the long
context keeps, verifying 5 tokens in one step over decoding 1, a prompt of 900 tokens, and where the time of a step
goes. Medians; the formats take turns, so that a noisy minute hits all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable

from nanoinfer import LLM
from nanoinfer.engines.base import StepBatch
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


def main() -> None:
    """Measure, and print a table."""
    model = sys.argv[1] if len(sys.argv) > 1 else "random:gpt2"
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
