"""All GPU measurements, in the order of their worth, continued where they were stopped (docs/gpu-first-run.md).

    PYTHONPATH=src python3 benchmarks/gpu_check.py --minutes 8.5                   on a machine with torch and triton
    PYTHONPATH=src python3 benchmarks/gpu_check.py --minutes 8.5 --continue DONE   with the files of earlier commands
    make gpu-check                                                                 in .venv, to the end

Results go to the folder that OUT names, or --output: rows.jsonl (tests, steps, sampler, kernels, variants), bench.json
(quick, full: suite gpu of `nanoinfer bench`) and summary.txt. --continue begins with the files of another folder.

Exit codes: 0 all parts passed, 1 a part failed or is unfinished (a missed goal is a result, not a failure), 2 bad
arguments or no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]  # also without an installation
START = time.monotonic()  # --minutes include the imports, which take seconds

from gpu_rows import LIMIT_SEC, Rows, run_command, run_until_done  # noqa: E402
from gpu_targets import judge  # noqa: E402

from nanoinfer.bench import machine, results  # noqa: E402
from nanoinfer.bench.case import Case, Row  # noqa: E402
from nanoinfer.bench.suites import SUITES  # noqa: E402
from nanoinfer.engines.devices import free_memory  # noqa: E402
from nanoinfer.errors import NanoinferError  # noqa: E402
from nanoinfer.roofline.formats import find_shape  # noqa: E402
from nanoinfer.utils.files import write_atomically  # noqa: E402

TESTS = ROOT / "tests"
ROWS, BENCH = "rows.jsonl", "bench.json"
PARTS = {
    "tests": 5.0, "steps": 3.0, "quick": math.inf, "sampler": 2.5, "full": math.inf, "kernels": math.inf,
    "variants": math.inf,
}  # fmt: skip
"""Part -> the most minutes that it takes of a command: what comes after it is worth more than its rest."""
SCRIPTS = {
    "steps": ("triton_kernels.py", "--only", "steps"),
    "sampler": ("triton_sampler.py",),
    "kernels": ("triton_kernels.py", "--only", "products", "--only", "attention"),
    "variants": ("triton_kernels.py", "--only", "variants", "--only", "variants-int4"),
}
SHARDS = {"test_triton_kernels.py": 4, "test_engines.py": 4, "test_triton_sampler.py": 2}
"""Processes for the tests of the longest files; the others have one."""
NEEDED = {
    "triton": "parts steps, sampler, kernels, variants and the rows of triton",
    "pytest": "part tests",
    "hypothesis": "tests of engines and samplers",
    "scipy": "tests of samplers",
    "tokenizers": "tests that load a model",
    "transformers": "its rows, and tests of beam search",
}
"""Package -> what is skipped without it."""
RESERVE_SEC = 10.0  # of --minutes, to end processes and to write the summary
CASE_SEC = 30.0  # of a case of the suite: one that begins later would be lost


def run_tests(args: argparse.Namespace, deadline: float) -> str | None:
    """Run the files with GPU tests, each in processes of its own; return what went wrong, or None."""
    gpu = re.compile(r"mark\.gpu|from helpers\.engines import [\w\s,()]*\bDEVICES\b")
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if gpu.search(file.read_text())]
    shards = [(f, i, SHARDS.get(f.name, 1)) for f in files for i in range(SHARDS.get(f.name, 1))]
    shards.sort(key=lambda shard: -shard[2])  # the longest first
    path = args.output / ROWS

    def run(shard: tuple[Path, int, int]) -> str | None:
        file, i, count = shard
        command = [sys.executable, "-m", "pytest", "-m", "gpu", str(file), "-p", "gpu_tests", "-p", "no:cacheprovider"]
        command += ["-s", "--continue-on-collection-errors", "--rows", str(path), "--shard", f"{i}/{count}"]
        command += ["--limit", str(args.limit)]
        problem = run_until_done(command, Rows(path, f"tests {file.name} {i}/{count}"), deadline)
        return problem and f"{file.name}: {problem}"

    pool = ThreadPoolExecutor(args.jobs)
    try:
        return next(filter(None, list(pool.map(run, shards))), None)
    finally:
        pool.shutdown(cancel_futures=True)  # also at Ctrl-C, which ends those that run


def run_script(args: argparse.Namespace, part: str, deadline: float) -> str | None:
    """Run a part of the benchmarks of kernels and sampler."""
    name, *options = SCRIPTS[part]
    path = args.output / ROWS
    command = [sys.executable, f"benchmarks/{name}", *options, "--by", part, "--output", str(path)]
    return run_until_done([*command, "--limit", str(args.limit)], Rows(path, part), deadline)


def run_bench(args: argparse.Namespace, part: str, deadline: float) -> str | None:
    """Run the remaining cases of suite gpu, without the command line, which needs click and rich."""
    path = args.output / BENCH
    if not cases_left(args, part, args.retry):
        return None
    given = [f"quick={part == 'quick'}", f"retry={args.retry}"]
    given.append(f"{'resume' if path.exists() else 'output'}=Path({str(path)!r})")
    if args.models is not None:
        given.append(f"models=Path({str(args.models)!r})")
    if deadline < math.inf:
        given.append(f"minutes={max(0.01, (deadline - time.monotonic() - CASE_SEC) / 60)}")
    code = "from pathlib import Path; from nanoinfer.bench.run import Plan, run; "
    code += f"run(Plan(suite=('gpu',), {', '.join(given)}), 'benchmarks/gpu_check.py')"
    exit_code, said = run_command([sys.executable, "-c", code], deadline)
    return f"exit code {exit_code}: {said}" if exit_code else None


def cases_of(part: str) -> list[Case]:
    """Return the cases of the suite that belong to part quick, or to part full alone."""
    suite = SUITES["gpu"]
    quick, every = (suite.cases(suite.model, find_shape(suite.model), [], few) for few in (True, False))
    return quick if part == "quick" else [case for case in every if case not in quick]


def cases_left(args: argparse.Namespace, part: str, retry: bool = False) -> list[Case]:
    """Return the cases of a part of the suite that have no row; with `retry`, those that failed too."""
    rows = bench_rows(args)
    return [case for case in cases_of(part) if case not in rows or (retry and rows[case].error is not None)]


def bench_rows(args: argparse.Namespace) -> dict[Case, Row]:
    """Return the suite's finished rows."""
    rows = results.read(args.output / BENCH).rows if (args.output / BENCH).exists() else []
    return {replace(row.case, device="cpu"): row for row in rows if not row.unfinished}


def run_part(args: argparse.Namespace, part: str, deadline: float) -> str | None:
    """Run what is left of a part until a time; return what went wrong, or None."""
    if part in ("quick", "full"):
        return run_bench(args, part, deadline)
    if importlib.util.find_spec(needed := "pytest" if part == "tests" else "triton") is None:
        return f"{needed} is not installed"
    if args.retry:
        Rows(args.output / ROWS, part).forget_failures()
    return run_tests(args, deadline) if part == "tests" else run_script(args, part, deadline)


def summarize(part: str, args: argparse.Namespace, problem: str | None) -> tuple[bool, list[str]]:
    """Return whether a part passed, and its lines of the summary."""
    found = Rows(args.output / ROWS, part).results()
    if part in ("quick", "full"):
        done = bench_rows(args)
        rows = [done[case] for case in cases_of(part) if case in done]
        if left := len(cases_of(part)) - len(rows):
            problem = problem or f"{left} cases are left"
        found = {f"{r.case.label} {r.case.model} batch {r.case.batch}": {"error": r.error} for r in rows}
    errors = {case: row["error"] for case, row in found.items() if row.get("error") is not None}
    skipped = [row["skipped"] for row in found.values() if "skipped" in row]
    skipped += [error for error in errors.values() if "is not installed" in error]
    failed = {case: error for case, error in errors.items() if error not in skipped}
    passed = len(found) - len(failed) - len(skipped)
    counts = f"{part:8} {passed:5} passed {len(failed):4} failed {len(skipped):4} skipped"
    lines = [": ".join(filter(None, (counts, problem))), *(f"    {case}: {error}" for case, error in failed.items())]
    lines += [f"    {count} skipped: {why}" for why, count in Counter(skipped).items()]
    for case, row in found.items():
        if "predicted_usec" in row:
            usec, predicted = row["usec"], row["predicted_usec"]
            times = f"{predicted:9,.1f} us predicted {usec:9,.1f} us measured, {usec / predicted:.2f} times"
            kernels = f", {row['usec_per_kernel']:.2f} us a kernel" if "usec_per_kernel" in row else ""
            lines.append(f"    {case:32} {times}{kernels}")
    return not failed and passed > 0 and problem is None, lines


def summary(args: argparse.Namespace, about: Sequence[str], problems: dict[str, str | None]) -> tuple[bool, str]:
    """Return whether all parts of this call passed; and what the files of all parts contain, beside the goals."""
    parts = {part: summarize(part, args, problems.get(part)) for part in PARTS}
    lines = [*about, "", *(line for _, shown in parts.values() for line in shown), ""]
    goals = judge(list(bench_rows(args).values()))
    return all(parts[part][0] for part in problems), "\n".join([*lines, *map(str, goals)])


def first_lines(args: argparse.Namespace) -> list[str]:
    """Return what is here, and what is skipped because something is not."""
    import torch

    here = machine.describe_machine("cuda:0")
    found = [f"{name} {version}" for name, version in machine.describe_versions().items() if version is not None]
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    disk = args.models if args.models is not None and args.models.exists() else Path(tempfile.gettempdir())
    free = [f"{n / 1e9:.0f} GB" for n in (*map(free_memory, ("cuda:0", "cpu")), shutil.disk_usage(disk).free)]
    lines = [
        f"{here['gpu']}, commit {args.commit or machine.commit()}, {', '.join(found)}, CUDA {torch.version.cuda}",
        f"compiler {compiler}; free: {free[0]} of the GPU's memory, {free[1]} of the main memory, {free[2]} of {disk}",
        str(here),
    ]
    if compiler is None or not header.exists():
        lines.append(f"missing: {header if compiler else 'a C compiler'}: without it Triton's kernels fail")
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return lines + [f"missing: {name}: skipped: {NEEDED[name]}" for name in absent]


def begin(args: argparse.Namespace) -> None:
    """Copy the results of earlier commands to the output."""
    source, files = args.continued, [args.output / name for name in (ROWS, BENCH)]
    if source is not None and not any((source / file.name).exists() for file in files):
        raise NanoinferError(f"--continue {source}: it has neither {ROWS} nor {BENCH}")
    args.output.mkdir(parents=True, exist_ok=True)
    if source is not None and args.output.samefile(source):
        return
    if there := [str(file) for file in files if file.exists()]:
        raise NanoinferError(f"{there[0]} is there: continue it with --continue {args.output}, or empty that folder")
    for file in files if source is not None else ():
        if (source / file.name).exists():
            write_atomically(file, (source / file.name).read_bytes())
    files[0].touch()  # a command that ends before its first result can be continued, too


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="A part to run; may be repeated. Default: all.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Time of the whole command.")
    parser.add_argument("--continue", type=Path, dest="continued", help="Folder of earlier results, or the output's.")
    parser.add_argument("--retry", action="store_true", help="With --continue: run again what failed.")
    output = Path(os.environ.get("OUT") or ROOT / "docs" / "results" / "gpu")
    parser.add_argument("--output", type=Path, default=output, help="Folder of the results, default $OUT.")
    parser.add_argument("--models", type=Path, help="Folder that keeps the suite's models, 7 GB, for the next command.")
    parser.add_argument("--jobs", type=int, default=6, help="Processes that run tests at the same time, default 6.")
    parser.add_argument("--limit", type=float, default=LIMIT_SEC, help="Seconds of a test or a kernel's case.")
    parser.add_argument("--commit", help="Commit to name in the summary, where the checkout has no git.")
    args = parser.parse_args(arguments)
    if not args.minutes > 0 or args.jobs < 1:
        parser.error(f"--minutes {args.minutes:g} --jobs {args.jobs}: neither may be 0 or less")
    args.output = args.output.absolute()
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    end = START + 60 * args.minutes - RESERVE_SEC
    problems: dict[str, str | None] = {}
    passed, text = True, ""
    try:
        import torch

        if not torch.cuda.is_available():
            raise NanoinferError("no CUDA device: run it on a machine with one")
        begin(args)
        about = first_lines(args)
        print(*about, sep="\n", flush=True)
        for part in args.only or PARTS:
            now = time.monotonic()
            problems[part] = run_part(args, part, min(end, now + 60 * PARTS[part]))
            passed, text = summary(args, about, problems)
            write_atomically(args.output / "summary.txt", text.encode() + b"\n")
            print(f"{part}: {time.monotonic() - now:.0f} s", problems[part] or "", flush=True)
    except (ModuleNotFoundError, NanoinferError, OSError) as e:
        print(f"gpu_check: error: {e}", file=sys.stderr)
        return 2
    print(text)
    return int(not passed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the files hold what is done
        sys.exit(130)
