"""Everything that a GPU has to say, in one results file: tests, kernels, and the rungs beside their targets.

    make gpu-check                                                     all parts (minutes; needs a CUDA device)
    PYTHONPATH=src python3 benchmarks/gpu_check.py --quick             without an installation: torch, triton, pytest,
                                                                       typer and rich must be there, transformers may
    ... gpu_check.py --minutes 9 --resume                              one piece after another, 9 minutes each
    ... gpu_check.py --only tests --only bench --output results.json

Parts, in this order: `tests` (pytest -m gpu), `sampler` and `kernels` (benchmarks/triton_sampler.py and
triton_kernels.py), `bench` (suite gpu of `nanoinfer bench`). A part that fails or runs out of time is recorded with
its error, and the rest goes on. The file (--output, docs/results/gpu.json; a readable .txt beside it) is written
after every part. --resume keeps the parts that were finished, failed ones too unless --only names them, and goes on
with the cases of the suite that are left.

Exit codes: 0 all parts passed, 1 something failed or is unfinished (targets that are missed are results, no
failures), 2 bad arguments or no CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_parts import ROOT, Part, Runner, run_bench, run_command, run_script, run_tests

SCHEMA = "nanoinfer-gpu-check/1"
PARTS = ("tests", "sampler", "kernels", "bench")
LIMITS_SEC = {"tests": 420.0, "sampler": 180.0, "kernels": 240.0, "bench": 1800.0}  # of a part, where time allows
SPARE_SEC = 5.0  # of the time that is left, kept for writing the file
SCRIPTS = {"sampler": "triton_sampler.py", "kernels": "triton_kernels.py"}
NEEDS = {  # part -> modules without which it cannot begin
    "tests": ("pytest", "triton"),
    "sampler": ("triton",),
    "kernels": ("triton",),
    "bench": ("typer", "rich", "safetensors", "tokenizers", "huggingface_hub"),
}


# The document ----------------------------------------------------------------------------------------------


def new_document(commit: str | None, quick: bool) -> dict[str, Any]:
    """Return a document without results: when, where and with what."""
    import torch

    from nanoinfer.bench import machine

    return {
        "schema": SCHEMA,
        "created": now(),
        "commit": commit or machine.commit(),
        "earlier_commits": [],
        "quick": quick,
        "machine": machine.describe_machine(torch.device("cuda", 0)),
        "versions": machine.describe_versions(),
        "copy_bytes_per_sec": None,
        "parts": {name: asdict(Part()) for name in PARTS},
        "targets": [],
        "bench": None,
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def read_document(path: Path) -> dict[str, Any]:
    """Return an older document. Raises ValueError with one line if it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"--resume: {path} cannot be read: {e.strerror}") from None
    except ValueError:
        raise ValueError(f"--resume: {path} is no JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"--resume: {path} does not have schema {SCHEMA!r}: leave --resume out to begin anew")
    return document


def add_targets(document: dict[str, Any]) -> None:
    """Judge the suite's rows; and take over the copy bandwidth that their shares are of."""
    from gpu_targets import judge

    from nanoinfer.bench import results

    rows = []
    if document["bench"] is not None:
        measured = results.from_json(json.dumps(document["bench"]), "the suite's document")
        rows = measured.rows
        document["copy_bytes_per_sec"] = measured.ceiling["read_bytes_per_sec"]
    document["targets"] = [asdict(t) | {"met": t.met} for t in judge(rows)]


def write(document: dict[str, Any], path: Path) -> None:
    """Write the document, and the same to read beside it; both whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((path, json.dumps(document, indent=1)), (path.with_suffix(".txt"), as_text(document))):
        partial = target.with_name(f".{target.name}.tmp")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)


def as_text(document: dict[str, Any]) -> str:
    """Return the document to read: where it was made, its parts, and the targets."""
    m, details = document["machine"], document["machine"].get("gpu_details") or {}
    bandwidth = document["copy_bytes_per_sec"]
    earlier = "".join(f" (some parts: {commit})" for commit in document["earlier_commits"])
    speed = "unknown" if bandwidth is None else f"{bandwidth / 1e12:.2f} TB/s, read and written"
    lines = [
        f"{m['gpu']}, driver {details.get('driver')}, CUDA {details.get('cuda')}, SM clock"
        f" {details.get('sm_clock_mhz')} of {details.get('max_sm_clock_mhz')} MHz",
        f"commit {document['commit']}{earlier}, {document['created']}, "
        + ", ".join(
            f"{name} {document['versions'].get(name)}" for name in ("python", "torch", "triton", "transformers")
        ),
        f"measured copy bandwidth: {speed}",
        "",
    ]
    for name, part in document["parts"].items():
        counts = {k: v for k, v in part["data"].items() if isinstance(v, int) and not isinstance(v, bool)}
        said = ", ".join(f"{value} {key}" for key, value in counts.items())
        lines.append(
            ": ".join(filter(None, (f"{name:8} {part['status']:10} {part['seconds']:6.0f} s", said, part["error"])))
        )
        lines += [f"    {f['test']}: {f['message']}" for f in part["data"].get("failures", [])]
        lines += [f"    {case}" for case in part["data"].get("failed_cases", [])]
    lines += ["", f"{'target':58} {'wanted':>12} {'reached':>10}"]
    for t in document["targets"]:
        wanted = f"{'<=' if t['at_most'] else '>='} {t['wanted']:,g}"
        reached = "unknown" if t["value"] is None else f"{t['value']:,.2f}"
        met = "" if t["value"] is None else "met" if t["met"] else "MISSED"
        lines.append(f"{t['name']:58} {wanted:>12} {reached:>10} {t['unit']:9} {met:7} {t['who'] or ''}".rstrip())
    return "\n".join(lines)


# The check -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """What is asked for, and the clock and runner that tests replace."""

    output: Path
    only: tuple[str, ...] = PARTS
    minutes: float | None = None
    quick: bool = False
    redo_failed: bool = True
    """Whether a part of an older document that failed is run again; one that is unfinished always is."""
    run: Runner = run_command
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def __call__(self, document: dict[str, Any]) -> int:
        """Run the parts that are asked for and not finished, filling the document in; return the exit code."""
        started = self.clock()
        finished = ("passed",) if self.redo_failed else ("passed", "failed")
        for name in (p for p in PARTS if p in self.only):
            if document["parts"][name]["status"] in finished:
                continue
            left = None if self.minutes is None else 60 * self.minutes - (self.clock() - started) - SPARE_SEC
            limit = LIMITS_SEC[name] if left is None else min(left, LIMITS_SEC[name])
            if limit <= 0:
                self.say(f"{name}: no time is left")
                if document["parts"][name]["status"] == "not run":
                    document["parts"][name] = asdict(Part("unfinished", error="no time was left: --resume goes on"))
                continue
            self.say(f"{name} ...")
            begun = self.clock()
            part = self._one(name, limit, document)
            document["parts"][name] = asdict(replace(part, seconds=round(self.clock() - begun, 1)))
            self.say(f"{name}: {part.status}{'' if part.error is None else f': {part.error}'}")
            add_targets(document)
            write(document, self.output)
        add_targets(document)
        write(document, self.output)
        return int(any(document["parts"][name]["status"] != "passed" for name in self.only))

    def _one(self, name: str, limit_sec: float, document: dict[str, Any]) -> Part:
        """Run one part; whatever goes wrong is its error."""
        missing = [m for m in NEEDS[name] if importlib.util.find_spec(m) is None]
        if missing:
            return Part("failed", error=f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
        try:
            if name == "tests":
                return run_tests(self.run, limit_sec)
            if name != "bench":
                return run_script(f"benchmarks/{SCRIPTS[name]}", self.run, limit_sec)
            part, made = run_bench(self.run, limit_sec, document["bench"], self.quick)
            document["bench"] = made or document["bench"]
            return part
        except (OSError, ValueError, KeyError, ET.ParseError) as e:
            return Part("failed", error=f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="A part to run; may be repeated. Default: all.")
    parser.add_argument("--quick", action="store_true", help="The suite with fewer cases and one round.")
    parser.add_argument("--minutes", type=float, help="Time for all of it; what does not fit is left for --resume.")
    parser.add_argument("--resume", nargs="?", const=True, default=None, metavar="FILE",
                        help="Go on with FILE; without a name: with --output. Begin if it is not there.")  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "gpu.json")
    parser.add_argument("--commit", help="Commit to record, where the checkout has no git.")
    args = parser.parse_args(arguments)
    if args.minutes is not None and not 0 < args.minutes <= 10_000:
        parser.error(f"--minutes {args.minutes:g} is not in (0, 10000]")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        import torch
    except ModuleNotFoundError:
        print("gpu_check: error: torch is not installed: pip install torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("gpu_check: error: no CUDA device: run it on a machine with one", file=sys.stderr)
        return 2
    old = args.output if args.resume is True else Path(args.resume) if args.resume is not None else None
    document = new_document(args.commit, args.quick)
    if old is not None and old.exists():
        try:
            before = read_document(old)
        except ValueError as e:
            print(f"gpu_check: error: {e}", file=sys.stderr)
            return 2
        if before["quick"] != args.quick:
            other = "with" if before["quick"] else "without"
            print(f"gpu_check: error: --resume: {old} is of a run {other} --quick", file=sys.stderr)
            return 2
        document |= {"parts": before["parts"], "bench": before["bench"]}
        if before["commit"] != document["commit"]:
            document["earlier_commits"] = [*before["earlier_commits"], before["commit"]]
    code = Check(args.output, tuple(args.only or PARTS), args.minutes, args.quick, bool(args.only))(document)
    print(as_text(document))
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))  # also without PYTHONPATH
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # what has finished is in the file
        sys.exit(130)
