"""One call of `nanoinfer bench`: from what was asked for to results files."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.bench import results as files
from nanoinfer.bench.backends import PEERS
from nanoinfer.bench.case import Case
from nanoinfer.bench.derived_metrics import add_speedups, fill_in
from nanoinfer.bench.model_folders import Models
from nanoinfer.bench.results import Results, Row
from nanoinfer.bench.suites import SUITES
from nanoinfer.checks import require_float, require_int
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.files import write_atomically
from nanoinfer.roofline.ceilings import Ceiling

if TYPE_CHECKING:
    import torch

CUSTOM = "custom"


@dataclass(frozen=True)
class Plan:
    """What the user asked for; empty means "the default"."""

    suite: tuple[str, ...] = ()
    """ladder, kv-cache, long, throughput, peers, speculative or gpu; may be repeated. Without: a run of your own."""
    model: str | None = None
    """Any model that loads; None is the suite's own: random:gpt2, or for speculative wide:shakespeare:gpt2-large."""
    engine: tuple[str, ...] = ()
    """Backends of a run of your own: engines and peers; may be repeated."""
    dtype: tuple[str, ...] = ()
    """float32, bfloat16, float16; may be repeated."""
    quantization: tuple[str, ...] = ()
    """Weight formats below 16 bits, in the backend's own names; may be repeated."""
    sampler: tuple[str, ...] = ()
    """greedy, sampled (temperature and top-k) or controls (everything on); may be repeated."""
    batch: tuple[int, ...] = ()
    """Sequences at a time; may be repeated."""
    prompt_tokens: tuple[int, ...] = ()
    """Prompt lengths; may be repeated."""
    output_tokens: tuple[int, ...] = ()
    """Output lengths; may be repeated."""
    baseline: str | None = None
    """Backend that speed-ups are over; None is the suite's own, or the first."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    draft: str | None = None
    """Also measure a run of your own with this draft, beside plain decoding."""
    speculate_k: tuple[str, ...] = ()
    """Tokens proposed at a time: auto, or 1 to 64; may be repeated."""
    workload: str = "uniform"
    """Prompts of a run of your own: uniform (random tokens), mixed, text or copy."""
    text: Path | None = None
    """Text whose passages are the prompts of text and copy; None: the model makes them up."""
    rounds: int | None = None
    """Timed runs of each case; None is the suite's own number."""
    quick: bool = False
    """Fewer and smaller cases, one round."""
    minutes: float | None = None
    """Begin nothing new after so many minutes; --resume goes on with the rest."""
    output: Path | None = None
    """Write the JSON document here, after every shape."""
    csv: Path | None = None
    """Write the rows as CSV here."""
    resume: Path | None = None
    """Go on with this JSON document: cases in it are not run again."""
    load: tuple[Path, ...] = ()
    """Measure nothing: show and report on these JSON documents; may be repeated."""
    report: Path | None = None
    """Write an HTML page and figures into this folder."""

    def __post_init__(self) -> None:
        own: tuple[object, ...] = (
            self.engine, self.dtype, self.quantization, self.sampler, self.batch, self.prompt_tokens
        )  # fmt: skip
        for name in self.suite:
            if name not in SUITES:
                raise NanoinferError(f"suite={name!r} is unknown: use one of {', '.join(SUITES)}")
        own += (self.speculate_k, self.draft is not None, self.workload != "uniform")
        if self.suite and (any(own) or self.output_tokens):
            raise NanoinferError("--suite fixes its own cases: leave out --engine, --batch and the like, or --suite")
        if self.rounds is not None:
            require_int("rounds", self.rounds, 1, 1000)
        if self.minutes is not None:
            require_float("minutes", self.minutes, 0.01, 10_000)
        if len({self.model_of(name) for name in self.suite}) > 1:
            raise NanoinferError(
                "--suite speculative has a model of its own: run it apart from the others, or give --model for all"
            )
        if self.text is not None and not self.text.is_file():
            raise NanoinferError(f"--text {self.text}: there is no such file")
        if len(self.suite) > 1 and (self.output or self.csv or self.resume):
            raise NanoinferError(f"--output, --csv and --resume hold one suite, and {len(self.suite)} are asked for")

    def model_of(self, suite: str) -> str:
        """Return the model that a suite measures."""
        return self.model or (SUITES[suite].model if suite in SUITES else "random:gpt2")


def run(plan: Plan, command: str, *, log: Callable[[str], None] | None = None) -> tuple[list[Results], bool]:
    """Measure what the plan asks for.

    Results are written after every shape, so that an interruption loses one shape at most.

    Returns:
        one result for each suite, and whether the user interrupted.

    Raises:
        NanoinferError: something does not exist, or cannot be written; nothing has been measured then.
    """
    from nanoinfer.bench.table import headline
    from nanoinfer.engines.devices import resolve_device
    from nanoinfer.engines.registry import ENGINES
    from nanoinfer.roofline.measure import measure
    from nanoinfer.roofline.shapes import find_shape

    if plan.load:
        loaded = [files.read(path) for path in plan.load]
        if plan.report is not None:
            _check_writable(plan.report)
        _report(plan, loaded)
        return loaded, False
    started = time.monotonic()
    device = resolve_device(plan.device)
    # On a CPU `compiled` gains nothing and takes minutes to compile (docs/log.md): it is measured where it is named.
    here = (s for s in ENGINES.values() if s.unavailable() is None and device.type in s.devices)
    engines = [spec.name for spec in here if spec.preferred or device.type != "cpu"]
    config = find_shape(plan.model_of(plan.suite[0] if plan.suite else CUSTOM))
    jobs = _check(plan, config, engines, device)
    old = files.read(plan.resume) if plan.resume is not None else None
    say = log or (lambda text: print(text, file=sys.stderr))
    say("measuring the ceiling of this machine ...")
    ceiling = measure(device=device)
    made = _empty_results(ceiling, command, device)
    say(headline(made))
    done, interrupted = [], False
    with Models(plan.text, say) as models:
        for name, cases in jobs:
            results = replace(made, suite=name, baseline=_baseline(plan, name, engines), rows=[])
            done.append(results)
            known = {r.case.key: r for r in old.rows if r.error is None} if old else {}
            try:
                _measure(plan, results, cases, known, models, ceiling, started)
            except KeyboardInterrupt:
                interrupted = True
                break
            if left := len(cases) - len(results.rows):
                say(f"suite {name}: {left} of {len(cases)} cases are left after {plan.minutes:g} minutes: use --resume")
    _report(plan, done)
    return done, interrupted


def _report(plan: Plan, results: list[Results]) -> None:
    """Write the report, where one is asked for and there is anything to report."""
    with_rows = [r for r in results if r.rows]
    if plan.report is not None and with_rows:
        from nanoinfer.bench.report import write_report

        write_report(with_rows, plan.report)


def _check(plan: Plan, config: ModelConfig, engines: list[str], device: torch.device) -> list[tuple[str, list[Case]]]:
    """Return the cases of each suite, after refusing what does not exist or cannot be written."""
    from nanoinfer.engines.registry import ENGINES

    for name in plan.suite:
        if SUITES[name].device not in (None, device.type):
            raise NanoinferError(
                f"suite={name!r} measures a CUDA device, and this run is on device={device.type!r}: run it where there"
                " is one"
            )

    for name in (*plan.engine, *([plan.baseline] if plan.baseline else [])):
        if name not in ENGINES and name not in PEERS:
            raise NanoinferError(f"engine={name!r} is unknown: use one of {', '.join([*ENGINES, *PEERS])}")
    jobs = [(name, _cases(plan, name, config, engines, str(device))) for name in plan.suite or (CUSTOM,)]
    for path in (plan.output or plan.resume, plan.csv):
        if path is not None:
            _check_writable(path.parent, path.name)
    if plan.report is not None:
        _check_writable(plan.report)
    return jobs


def _empty_results(ceiling: Ceiling, command: str, device: torch.device) -> Results:
    """Return results without rows: when, where and with what."""
    from nanoinfer.bench import machine

    return Results(
        suite="",
        baseline="",
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=machine.commit(),
        command=command,
        machine=machine.describe_machine(device),
        versions=machine.describe_versions(),
        ceiling={
            "read_bytes_per_sec": ceiling.bandwidth_bytes_per_sec,
            "flops_per_sec": dict(ceiling.flops_per_sec),
            "source": ceiling.source,
        },
    )


def _cases(plan: Plan, name: str, config: ModelConfig, engines: list[str], device: str) -> list[Case]:
    """Return the cases of a suite, or of the user's own lists, those of one shape together."""
    if name != CUSTOM:
        cases = SUITES[name].cases(plan.model_of(name), config, engines, plan.quick)
    else:
        shapes = product(
            plan.sampler or ("greedy",), plan.batch or (1,), plan.prompt_tokens or (32,), plan.output_tokens or (32,)
        )
        formats = [(d, None) for d in plan.dtype or ("float32",)] + [("float32", q) for q in plan.quantization]
        cases = [
            Case(who, plan.model_of(name), d, q, s, b, p, o, plan.workload)
            for s, b, p, o in shapes
            for who in plan.engine or tuple(engines)
            for d, q in formats
        ]
        if plan.draft is not None:
            ks = plan.speculate_k or ("auto",)
            drafted = [[replace(c, draft=plan.draft, speculate_k=k) for k in ks] for c in cases]
            cases = [c for plain, some in zip(cases, drafted, strict=True) for c in (plain, *some)]
    for case in cases:
        if case.model == plan.model_of(name) and case.prompt_tokens > config.block_size:
            raise NanoinferError(
                f"prompt_tokens={case.prompt_tokens} is more than the context length of {case.model},"
                f" {config.block_size}"
            )
    return [replace(c, device=device) for c in cases]


def _baseline(plan: Plan, name: str, engines: list[str]) -> str:
    if plan.baseline is not None:
        return plan.baseline
    return SUITES[name].baseline if name != CUSTOM else (plan.engine or tuple(engines))[0]


def _measure(
    plan: Plan,
    results: Results,
    cases: list[Case],
    known: dict[str, Row],
    models: Models,
    ceiling: Ceiling,
    started: float,
) -> None:
    """Run the cases that are not known yet, keeping the results file up to date."""
    from nanoinfer.bench.harness import NAIVE, Harness, Options
    from nanoinfer.bench.progress import Progress

    suite = SUITES.get(results.suite)
    rounds = plan.rounds or (1 if plan.quick else suite.rounds if suite else 3)
    order = {case.key: i for i, case in enumerate(cases)}
    results.rows = [known[c.key] for c in cases if c.key in known]
    for row in results.rows:  # their shares are of this run's ceiling now
        fill_in(row, models.config(row.case.model), ceiling, naive=row.case.backend in NAIVE)

    def keep(rows: list[Row]) -> None:
        results.rows = sorted([*results.rows, *rows], key=lambda r: order[r.case.key])
        add_speedups(results.rows, results.baseline)
        _write(plan, results)

    options = Options(
        rounds=rounds,
        max_warmups=2 if plan.quick else 3,
        max_case_sec=suite.max_case_sec if suite else Options.max_case_sec,
        vary_prompts=bool(suite and suite.vary_prompts),
        breakdown=bool(suite and suite.breakdown),
        verify=bool(suite and suite.verify),
    )
    todo = [c for c in cases if c.key not in known]
    if results.rows:
        keep([])  # what --resume brought, also if nothing is added
    for model, some in groupby(todo, key=lambda c: c.model):
        if plan.minutes is not None:
            left = 60 * plan.minutes - (time.monotonic() - started)
            if left <= 0:
                break
            options = replace(options, budget_sec=left)
        same = list(some)
        with Progress(results.suite) as progress:
            Harness(models.folder(same), models.config(model), ceiling, options, progress.show).run(same, keep)


def _write(plan: Plan, results: Results) -> None:
    target = plan.output or plan.resume
    if target is not None:
        write_atomically(target, files.to_json(results).encode() + b"\n")
    if plan.csv is not None:
        write_atomically(plan.csv, files.to_csv(results).encode())


def _check_writable(folder: Path, name: str | None = None) -> None:
    """Fail before anything is measured, where a folder, or a file of this name in it, cannot be written."""
    path = folder if name is None else folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{name or ''}."):  # not one without a name
            pass
    except OSError as e:
        raise NanoinferError(f"{path} cannot be written: {e.strerror}: choose another place") from None
    if name is not None and os.path.exists(path) and not os.path.isfile(path):
        raise NanoinferError(f"{path} cannot be written: it is a folder or a device; name a file")
