"""Compare engine native with llama.cpp on GGUF files: speed, share of the memory's speed, memory, time to load, KL.

    python benchmarks/gguf_files.py FILE.gguf ... [--rounds 5] [--kl 2048] [--llama-bench PATH] [--output FILE.json]

Rounds of all systems are interleaved, after one that warms up; figures are medians. Prompts are random tokens. Shares
are those of a plain read of as many bytes as a step reads, in the same rounds. `gguf_shapes.py` writes files in the
shapes of published models. With --kl, files with a tokenizer are compared with float32 on this many tokens, as
quality.py does. --llama-bench is that program of ik_llama.cpp, which is run once in each round and repacks the weights.
It needs llama-cpp-python (pip install '.[peers]').
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nanoinfer._native import ReadBuffer
from vs_llamacpp import LlamaCpp, Native

from nanoinfer import LLM
from nanoinfer.roofline.arithmetic import decode as decode_cost
from nanoinfer.roofline.formats import FORMATS, find_model
from nanoinfer.utils.environment import num_cpus

PROMPT, LONG, STEPS = 1000, 4000, 32
LENGTH = 72
"""Context of the short cases: a prompt of 32 tokens, and 32 steps."""
SYSTEMS = ("native", "llama.cpp")
Times = defaultdict[tuple[str, str], list[float]]
"""(system, case) -> tokens/s, or milliseconds of the prompt."""


def decode(system: Native | LlamaCpp, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Return the milliseconds of prompts of `context` tokens, and the tokens/s of the steps after them."""
    system.clear()
    tokens = np.random.default_rng(0).integers(0, 32000, (batch, context)).tolist()
    start = time.perf_counter()
    for at in range(0, context, PROMPT):
        part = [(i, row[at : at + PROMPT], False) for i, row in enumerate(tokens)]
        best = system.run(part).argmax(1).tolist()
    prompt = time.perf_counter() - start
    return 1e3 * prompt, rate(system, best, steps)


def rate(system: Native | LlamaCpp, best: list[int], steps: int) -> float:
    """Return the tokens/s of steps after the tokens `best`, one of each sequence."""
    start, batch = time.perf_counter(), len(best)
    for _ in range(steps):
        best = system.run([(i, [token], False) for i, token in enumerate(best)]).argmax(1).tolist()
    return batch * steps / (time.perf_counter() - start)


def speeds(
    path: str, rounds: int, batches: list[int], llama_bench: str | None, long: int
) -> dict[str, dict[str, float]]:
    """Return medians: case -> system -> figure."""
    room = max(PROMPT, long) + (rounds + 2) * STEPS
    native, llama = Native(path, max(batches), room), LlamaCpp(path, 1, LENGTH)
    config, format = find_model(path)
    num_bytes = decode_cost(config, format or FORMATS["float32"]).model.bytes(1, LENGTH)
    buffer = ReadBuffer(num_bytes=num_bytes // 64 * 64, threads=num_cpus())
    times: Times = defaultdict(list)
    for batch in batches:
        llama.resize(batch, LENGTH)
        for round_ in range(rounds + 1):
            for name, system in zip(SYSTEMS, (native, llama), strict=True):
                found_rate = decode(system, batch, 32, max(8, STEPS // batch))[1]
                if round_:
                    times[name, f"batch {batch}"].append(found_rate)
            if batch == 1 and round_:
                times["read", "batch 1"].append(read_rate(buffer.read, STEPS // 2))
    llama.resize(1, room)
    for _ in range(max(1, rounds // 2)):
        for name, system in zip(SYSTEMS, (native, llama), strict=True):
            times[name, "prompt"].append(decode(system, 1, PROMPT, 1)[0])
    for system in (native, llama) if long else ():
        decode(system, 1, long, 1)
    for _ in range(rounds if long else 0):
        for name, system in zip(SYSTEMS, (native, llama), strict=True):
            times[name, "long"].append(rate(system, [1], STEPS // 2))
    del native, llama, buffer
    for _ in range(max(1, rounds // 2) if llama_bench else 0):
        run_ik(str(llama_bench), path, times)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, case), values in times.items():
        found[case][name] = statistics.median(values)
    found["batch 1"]["read share"] = found["batch 1"]["native"] / found["batch 1"]["read"]
    return dict(found)


def read_rate(read: Callable[[], object], reads: int) -> float:
    """Return how often a second the buffer is read."""
    start = time.perf_counter()
    for _ in range(reads):
        read()
    return reads / (time.perf_counter() - start)


def run_ik(program: str, path: str, times: Times) -> None:
    """Run llama-bench of ik_llama.cpp once, with its weights repacked as they are loaded."""
    command = [
        program,
        "-m",
        path,
        "-t",
        str(num_cpus()),
        "-p",
        str(PROMPT),
        "-n",
        str(STEPS),
        "-r",
        "1",
        "-rtr",
        "1",
        "-o",
        "json",
    ]
    made = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    for row in made:
        if row["n_gen"]:
            times["ik", "batch 1"].append(row["avg_ts"])
        else:
            times["ik", "prompt"].append(1e3 * PROMPT / row["avg_ts"])


def load(system: str, path: str) -> dict[str, float]:
    """Load a file in this process, run a step, and return the seconds to load and MiB of peak resident memory."""
    start = time.perf_counter()
    if system == "native":
        llm = LLM(path, engine="native", max_num_seqs=1, max_model_len=512)
        seconds = time.perf_counter() - start
        llm.generate([[1, 2, 3]])
    else:
        peer = LlamaCpp(path, 1, 512, use_mmap=False)
        seconds = time.perf_counter() - start
        peer.run([(0, [1, 2, 3], False)])
    status = Path("/proc/self/status").read_text()  # getrusage has the peak of the process before exec, too
    return {"sec": seconds, "mib": int(status.split("VmHWM:")[1].split()[0]) / 1024}


def loads(path: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of `load` in processes of their own, in turn."""
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for system in SYSTEMS:
            command = [sys.executable, __file__, "--load", system, path]
            found[system].append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    return {s: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for s, runs in found.items()}


def divergences(path: str, num_tokens: int) -> dict[str, float]:
    """Return KL to float32 with the file's values, nats a token, as quality.py measures it."""
    import quality

    llms = [LLM(path, max_num_seqs=1, **quality.REFERENCE), LLM(path, engine="native", max_num_seqs=1)]
    sources: dict[str, Any] = {
        name: partial(quality.distributions, llm.engine)
        for name, llm in zip(("reference", "native"), llms, strict=True)
    }
    sources["llama.cpp"] = partial(quality.of_llamacpp, LlamaCpp(path, 1, quality.WINDOW))
    texts = quality.windows(llms[0].tokenize(quality.read(None)), quality.WINDOW, num_tokens)
    totals = quality.compare(sources, texts)
    return {name: totals[name].divergence / totals[name].num_tokens for name in SYSTEMS}


def row(path: str, found: dict[str, Any]) -> str:
    """Return a file's line of the table."""

    def pair(case: str, digits: int = 0, *, inverse: bool = False) -> str:
        if case not in found:
            return ""
        ours, theirs = found[case]["native"], found[case]["llama.cpp"]
        ratio = theirs / ours if inverse else ours / theirs
        ik = found[case].get("ik")
        more = "" if ik is None else f"; ik {ik:,.{digits}f} ({(ik / ours if inverse else ours / ik):.2f})"
        return f"{ours:,.{digits}f} / {theirs:,.{digits}f} ({ratio:.2f}{more})"

    size = Path(path).stat().st_size / 2**20
    ours, theirs = found["load"]["native"], found["load"]["llama.cpp"]
    kl = found.get("kl")
    cells = [
        Path(path).name, f"{size:,.0f}", pair("batch 1", 1), f"{100 * found['batch 1']['read share']:.0f}%",
        pair("long", 1),
        pair("batch 8"), pair("batch 64"), pair("prompt", inverse=True),
        f"{ours['sec']:.2f} / {theirs['sec']:.2f}", f"{ours['mib']:,.0f} / {theirs['mib']:,.0f}",
        f"{kl['native']:.4f} / {kl['llama.cpp']:.4f}" if kl else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| file | MiB | batch 1, tokens/s | of a plain read | long context | batch 8 | batch 64 | 1,000-token prompt, ms"
    " | load, s | peak MiB | KL |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def main() -> None:
    """Print the table: native / llama.cpp (ratio)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="sequences; 1 is needed")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of a long context, 0: leave it out")
    parser.add_argument("--short", action="store_const", const=0, dest="long", help="as --long 0")
    parser.add_argument("--kl", type=int, help="tokens to compare the distributions on")
    parser.add_argument("--llama-bench", help="that program of ik_llama.cpp")
    parser.add_argument("--output", type=Path, help="JSON file of all figures")
    parser.add_argument("--load", choices=SYSTEMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        return print(json.dumps(load(given.load, given.files[0])))
    print(HEAD)
    results = {}
    for path in given.files:
        found: dict[str, Any] = speeds(path, given.rounds, given.batches, given.llama_bench, given.long)
        found["load"] = loads(path, max(1, given.rounds // 2))
        if given.kl:
            found["kl"] = divergences(path, given.kl)
        results[Path(path).name] = found
        print(row(path, found), flush=True)
        if given.output:
            given.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
