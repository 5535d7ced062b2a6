"""All GPU measurements: tests, suite gpu of `nanoinfer bench` and its goals, kernels, sampler (docs/gpu-first-run.md).

    make gpu-check                                                     all parts (minutes; needs a CUDA device)
    PYTHONPATH=src python3 benchmarks/gpu_check.py --quick             without an installation: needs torch, triton,
                                                                       pytest, typer and rich; uses transformers
    ... gpu_check.py --only tests --minutes 9 --resume                 in pieces of 9 minutes

Each part writes a file in --output as it goes: tests.jsonl, bench.json, kernels.jsonl, sampler.jsonl. summary.txt shows
them all. --resume continues what is unfinished, and --retry also runs again what failed.

Exit codes: 0 all parts passed, 1 a part failed or is unfinished (a missed goal is a result, not a failure), 2 bad
arguments or no CUDA device.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]  # also without an installation

from gpu_rows import LIMIT_SEC, Rows, run_command, run_until_done  # noqa: E402
from gpu_targets import judge  # noqa: E402

from nanoinfer.bench import machine, results  # noqa: E402
from nanoinfer.bench.suites import SUITES  # noqa: E402
from nanoinfer.errors import NanoinferError  # noqa: E402
from nanoinfer.roofline.shapes import find_shape  # noqa: E402

FILES = {"tests": "tests.jsonl", "bench": "bench.json", "kernels": "kernels.jsonl", "sampler": "sampler.jsonl"}
SHARDS = {"test_triton_kernels.py": 4, "test_engines.py": 4, "test_triton_sampler.py": 2}
"""Processes for the tests of the longest files; the others have one."""
LOADING_SHARE = 0.75  # of the suite's time, after which it loads no further backend


def run_tests(args: argparse.Namespace, path: Path, deadline: float) -> str | None:
    """Run the files with GPU tests, each in processes of its own; return what went wrong, or None."""
    files = [f for f in sorted(args.tests.glob("test_*.py")) if re.search(r"mark\.gpu|\bGPU\b", f.read_text())]
    shards = [(f, i, SHARDS.get(f.name, 1)) for f in files for i in range(SHARDS.get(f.name, 1))]
    shards.sort(key=lambda shard: -shard[2])  # the longest first

    def run(shard: tuple[Path, int, int]) -> str | None:
        file, i, count = shard
        command = [sys.executable, "-m", "pytest", "-m", "gpu", str(file), "-p", "gpu_tests", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", "--rows", str(path), "--shard", f"{i}/{count}"]
        command += ["--limit", str(args.limit)]
        problem = run_until_done(command, Rows(path, f"{file.name} {i}/{count}"), deadline)
        return problem and f"{file.name}: {problem}"

    pool = ThreadPoolExecutor(args.jobs)
    try:
        return next(filter(None, list(pool.map(run, shards))), None)
    finally:
        pool.shutdown(cancel_futures=True)  # also at Ctrl-C, which ends those that run


def run_script(args: argparse.Namespace, path: Path, deadline: float) -> str | None:
    """Run the benchmark of a part's kernels."""
    command = [sys.executable, f"benchmarks/triton_{path.stem}.py", "--output", str(path), "--resume"]
    command += ["--limit", str(args.limit)]
    return run_until_done(command, Rows(path, path.stem), deadline)


def run_bench(args: argparse.Namespace, path: Path, deadline: float) -> str | None:
    """Run the remaining cases of suite gpu."""
    command = [sys.executable, "-m", "nanoinfer", "bench", "--suite", "gpu", *["--quick"] * args.quick]
    command += ["--resume" if path.exists() else "--output", str(path), *["--retry"] * args.retry]
    if args.models is not None:
        command += ["--models", str(args.models)]
    if deadline < math.inf:
        command += ["--minutes", f"{max(0.01, (deadline - time.monotonic()) * LOADING_SHARE / 60):.2f}"]
    code, said = run_command(command, deadline)
    if code not in (0, 1, None):
        return f"exit code {code}: {said}"
    suite = SUITES["gpu"]
    done = {replace(row.case, device="cpu") for row in rows_of(path) if not row.unfinished}
    left = sum(case not in done for case in suite.cases(suite.model, find_shape(suite.model), [], args.quick))
    return f"{left} cases are left: continue with --resume" if left else None


def rows_of(path: Path) -> list[results.Row]:
    """Return the suite's rows so far."""
    return results.read(path).rows if path.exists() else []


RUN = {"tests": run_tests, "bench": run_bench, "kernels": run_script, "sampler": run_script}


def summarize(part: str, path: Path, problem: str | None) -> tuple[bool, list[str]]:
    """Return whether a part passed, and its lines of the summary."""
    if part == "bench":
        found = {f"{r.case.label} {r.case.model} batch {r.case.batch}": {"error": r.error} for r in rows_of(path)}
    else:
        found = Rows(path, part).results()
    failed = {case: row["error"] for case, row in found.items() if row.get("error") is not None}
    skipped = sum("skipped" in row for row in found.values())
    passed = len(found) - len(failed) - skipped
    counts = f"{part:8} {passed:5} passed {len(failed):4} failed {skipped:4} skipped"
    lines = [": ".join(filter(None, (counts, problem))), *(f"    {case}: {error}" for case, error in failed.items())]
    return not failed and passed > 0 and problem is None, lines


def summary(args: argparse.Namespace, problems: dict[str, str | None]) -> tuple[bool, str]:
    """Return whether all parts of this call passed; and what the files of all parts contain, beside the goals."""
    about: dict[str, Any] = machine.describe_machine("cuda:0")
    packages = [f"{name} {version}" for name, version in machine.describe_versions().items() if version is not None]
    lines = [f"{about['gpu']}, commit {args.commit or machine.commit()}, {', '.join(packages)}", str(about), ""]
    all_passed = True
    for part, name in FILES.items():
        passed, shown = summarize(part, args.output / name, problems.get(part))
        lines += shown
        all_passed &= passed or part not in problems
    lines += ["", *(str(goal) for goal in judge(rows_of(args.output / FILES["bench"])))]
    return all_passed, "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=FILES, help="A part to run; may be repeated. Default: all.")
    parser.add_argument("--quick", action="store_true", help="The suite with fewer cases.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Time for all parts; --resume runs the rest.")
    parser.add_argument("--resume", action="store_true", help="Continue the files in --output.")
    parser.add_argument("--retry", action="store_true", help="With --resume: run again what failed.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "gpu", help="Folder of the results.")
    parser.add_argument("--models", type=Path, help="Folder that keeps the suite's models, 7 GB, for the next call.")
    parser.add_argument("--jobs", type=int, default=6, help="Processes that run tests at the same time, default 6.")
    parser.add_argument("--limit", type=float, default=LIMIT_SEC, help="Seconds of a test or a kernel's case.")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="Folder of the tests.")
    parser.add_argument("--commit", help="Commit to name in the summary, where the checkout has no git.")
    args = parser.parse_args(arguments)
    if not args.minutes > 0 or args.jobs < 1:
        parser.error(f"--minutes {args.minutes:g} --jobs {args.jobs}: neither may be 0 or less")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    try:
        import torch

        if not torch.cuda.is_available():
            raise NanoinferError("no CUDA device: run it on a machine with one")
        args.output.mkdir(parents=True, exist_ok=True)
        problems: dict[str, str | None] = {}
        for part in args.only or FILES:
            path = (args.output / FILES[part]).resolve()
            if not args.resume:
                path.unlink(missing_ok=True)
            elif args.retry and path.suffix == ".jsonl":
                Rows(path, part).forget_failures()
            problems[part] = RUN[part](args, path, deadline)
            passed, text = summary(args, problems)
            (args.output / "summary.txt").write_text(text + "\n")
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
