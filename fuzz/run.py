"""Fuzz every parser and the extension's interface: `make fuzz MINUTES=10`, or

    python fuzz/run.py --minutes 10 [--only gguf ...] [--seed 1] [--jobs 2]

Each target runs in its own process (worker.py) for an equal share of the time. Prints a table and writes minimised
findings to build/fuzz. The exit code is 1 if there are findings, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BOUNDARY = ("decoder", "sampler", "kernels")
SANITIZED = (*BOUNDARY, "packed", "gguf-native")
TARGETS = ("safetensors", "packed", "config", "index", "generation", "gguf",
           "quantized-gptq", "quantized-packed", "quantized-fp8", "quantized-nf4", "quantized-gptq-config",
           "quantized-packed-config", "quantized-fp8-config", "quantized-nf4-config", "quantized-ternary",
           "quantized-ternary-config",
           "gguf-native", "gguf-part-1", "gguf-part-2", "export-config", "export-tokenizer", "meta", "tiktoken",
           "tokenizer", "vocab", "merges", "added-tokens", "tekken", "tokenizer-config", "state",
           "results", "kinds", "names", "params", "streams", "answers", "chat-templates", "response-templates", "tools",
           "requests", "lines", *BOUNDARY)  # fmt: skip
ROUNDS = 3  # processes per target, which limits the memory that one process accumulates


def environment(target: str) -> dict[str, str]:
    """Return a worker's environment: offline, one thread, and the sanitized extension if it was built."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    asan = HERE.parent / "build" / "asan"
    env.pop("NANOINFER_TEST_EXTENSION", None)
    if target in SANITIZED and any(asan.glob("_native*.so")):
        libraries = [f"lib{name}.so" for name in ("asan", "ubsan", "stdc++")]
        paths = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in libraries]
        env |= {
            "NANOINFER_TEST_EXTENSION": str(asan),
            "LD_PRELOAD": " ".join(paths),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        }
    return env


def run_worker(target: str, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    """Fuzz one target for `seconds`; return its counts."""
    command = [
        sys.executable,
        str(HERE / "worker.py"),
        target,
        "--seconds",
        str(seconds),
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, env=environment(target), stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        counts: dict[str, Any] = json.loads(lines[-1])
        return counts
    return {"target": target, "cases": 0, "seconds": seconds, "lines": 0, "corpus": 0, "sanitized": False,
            "findings": [{"signature": "worker", "kind": "worker", "file": "", "bytes": 0, "again": True,
                          "detail": f"the worker ended with {done.returncode}"}]}  # fmt: skip


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of a target over its rounds."""
    found = {f["signature"]: f for part in parts for f in part["findings"]}
    most = {name: max(part[name] for part in parts) for name in ("lines", "corpus", "sanitized")}
    total = {name: sum(part[name] for part in parts) for name in ("cases", "seconds")}
    return {"target": parts[0]["target"]} | total | most | {"findings": list(found.values())}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, then each finding."""
    print(f"{'target':14}{'cases':>10}{'cases/s':>9}{'lines':>7}{'corpus':>8}{'findings':>10}")
    for row in rows:
        speed = row["cases"] / max(row["seconds"], 1e-9)
        print(f"{row['target']:14}{row['cases']:>10,}{speed:>9.1f}{row['lines']:>7}{row['corpus']:>8}{len(row['findings']):>10}"
              f"{'   (sanitized)' if row['sanitized'] else ''}")  # fmt: skip
    total = sum(len(row["findings"]) for row in rows)
    print(f"{sum(row['cases'] for row in rows):,} cases, {total} findings")
    for row in rows:
        for f in row["findings"]:
            again = " (not reproduced when run alone)" if f["again"] is False else ""
            print(
                f"\n{row['target']}: {f['signature']}{again}\n  {f['detail']!r:.400}\n  {f['file']} ({f['bytes']} bytes)"
            )


def main() -> int:
    """Run the workers and print their findings; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all targets together (10)")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS, help="targets (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (one a CPU)")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "build" / "fuzz", help="folder of findings (build/fuzz)"
    )
    options = parser.parse_args()
    seconds = 60 * options.minutes * options.jobs / len(options.only)
    rounds = min(ROUNDS, max(1, round(seconds / 60)))
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())  # workers receive it too and print their counts
    parts: dict[str, list[dict[str, Any]]] = {}

    def work(task: tuple[int, str]) -> None:
        number, target = task
        if not interrupted.is_set():
            made = run_worker(target, seconds / rounds, options.seed + number, options.out)
            parts.setdefault(target, []).append(made)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, [(number, target) for number in range(rounds) for target in options.only]))
    rows = [merge(parts[target]) for target in options.only if target in parts]
    show(rows)
    if interrupted.is_set():
        return 130
    return 1 if any(row["findings"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
