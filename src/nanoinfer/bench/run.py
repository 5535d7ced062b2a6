"""One call of `nanoinfer bench`: from the user's options to results files."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path

from nanoinfer.bench import machine
from nanoinfer.bench import results as files
from nanoinfer.bench.backends import PEERS
from nanoinfer.bench.case import Case, Row
from nanoinfer.bench.harness import Harness
from nanoinfer.bench.model_folders import ModelFolders
from nanoinfer.bench.results import Results, add_speedups, fill_in
from nanoinfer.bench.suites import SUITES, Options, by_shape
from nanoinfer.checkpoints.load import fit_engine
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engines.devices import resolve_device
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import find_shape
from nanoinfer.utils.checks import bounded, keep_fields, require_choice
from nanoinfer.utils.files import require_writable, write_atomically
from nanoinfer.utils.progress import ProgressBar

CUSTOM = "custom"


@dataclass(frozen=True)
class Plan:
    """The user's options; empty means the default."""

    suite: tuple[str, ...] = ()
    """ladder, peers, serving, speculative or gpu; may be repeated."""
    model: str | None = None
    """Model (default: random:gpt2; of suite speculative: wide:shakespeare:gpt2-large)."""
    engine: tuple[str, ...] = ()
    """Backends, engines or peers; may be repeated."""
    dtype: tuple[str, ...] = ()
    """float32, bfloat16, float16; may be repeated."""
    quantization: tuple[str, ...] = ()
    """Weight formats below 16 bits, in the backend's names; may be repeated."""
    sampler: tuple[str, ...] = ()
    """greedy, sampled (temperature and top-k) or controls (all controls); may be repeated."""
    batch: tuple[int, ...] = ()
    """Batch sizes; may be repeated."""
    prompt_tokens: tuple[int, ...] = ()
    """Prompt lengths; may be repeated."""
    output_tokens: tuple[int, ...] = ()
    """Output lengths; may be repeated."""
    baseline: str | None = None
    """Backend that speed-ups are relative to (default: that of the suite, or the first)."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    peer_python: tuple[str, ...] = ()
    """NAME=PATH: a peer's own Python interpreter, in whose environment nanoinfer is installed too; may be repeated."""
    draft: str | None = None
    """Also measure with this draft, next to plain decoding."""
    speculate_k: tuple[str, ...] = ()
    """Tokens proposed per step: auto, or 1 to 64; may be repeated."""
    workload: str = "uniform"
    """Prompts: uniform (random tokens), mixed, prefix, arrival, text or copy."""
    text: Path | None = None
    """Text file for the prompts of text and copy (default: the model generates them)."""
    rounds: int | None = bounded(None, 1, 1000)
    """Timed runs of each case (default: that of the suite)."""
    quick: bool = False
    """Fewer and smaller cases, one round (suite gpu: only fewer cases)."""
    minutes: float | None = bounded(None, 0.01, 10_000)
    """Start no case after this many minutes; --resume continues."""
    output: Path | None = None
    """Write the JSON document here, after each shape."""
    resume: Path | None = None
    """Continue this JSON document: cases in it are not run again."""
    retry: bool = False
    """With --resume, run the cases again that failed."""
    models: Path | None = None
    """Keep the random models in this folder for other calls (default: a temporary folder)."""
    load: tuple[Path, ...] = ()
    """Show these JSON documents instead of measuring; may be repeated."""
    report: Path | None = None
    """Draw figures of the results into this folder (SVG)."""

    def __post_init__(self) -> None:
        for name in self.suite:
            require_choice("suite", name, tuple(SUITES))
        own = ("engine", "dtype", "quantization", "sampler", "batch", "prompt_tokens", "output_tokens", "speculate_k")
        if self.suite and (any(getattr(self, f) for f in own) or self.draft is not None or self.workload != "uniform"):
            raise NanoinferError("--suite fixes its own cases: leave out --engine, --batch and the like, or --suite")
        for entry in self.peer_python:
            name, equals, path = entry.partition("=")
            if name not in PEERS or not equals or not Path(path).is_file():
                raise NanoinferError(f"--peer-python {entry}: give NAME=PATH, a peer ({', '.join(PEERS)}) and a file")
        keep_fields(self)
        if len({self.model_of(name) for name in self.suite}) > 1:
            raise NanoinferError("--suite speculative has its own model: run it apart from others, or give --model")
        if self.text is not None and not self.text.is_file():
            raise NanoinferError(f"--text {self.text}: there is no such file")
        if len(self.suite) > 1 and (self.output or self.resume):
            raise NanoinferError(f"--output and --resume hold one suite, and {len(self.suite)} are given")

    @property
    def pythons(self) -> dict[str, Path]:
        """Peer -> its interpreter."""
        return {name: Path(path) for name, _, path in (entry.partition("=") for entry in self.peer_python)}

    def model_of(self, suite: str) -> str:
        """Return the model that a suite measures."""
        return self.model or (SUITES[suite].model if suite in SUITES else "random:gpt2")


def run(plan: Plan, command: str, *, log: Callable[[str], None] | None = None) -> tuple[list[Results], bool]:
    """Measure what the plan requests; return one result for each suite, and whether the user interrupted.

    Raises NanoinferError, before anything is measured, if something does not exist or cannot be written.
    """
    done, interrupted = [files.read(path) for path in plan.load], False
    if plan.report is not None:
        require_writable(plan.report)
    if not plan.load:
        interrupted = _measure(plan, command, done, log or (lambda line: print(line, file=sys.stderr)))
    if plan.report is not None and (with_rows := [r for r in done if r.rows]):
        from nanoinfer.bench.figures import write_figures

        write_figures(with_rows, plan.report)
    return done, interrupted


def _measure(plan: Plan, command: str, done: list[Results], log: Callable[[str], None]) -> bool:
    """Measure each suite and append its results to `done`; return whether the user interrupted."""
    from nanoinfer.roofline.ceilings import measure

    started = time.monotonic()
    device = resolve_device(plan.device)
    kind = device.partition(":")[0]
    # On a CPU `compiled` gains nothing and takes minutes to compile (docs/log/2026-11.md): measured only where named.
    usable = (s for s in ENGINES.values() if s.unavailable() is None and kind in s.devices)
    engines = [spec.name for spec in usable if spec.preferred or device != "cpu"]
    jobs = _jobs(plan, engines, device)
    old = files.read(plan.resume) if plan.resume is not None else None
    here = machine.describe_machine(device)
    if old is not None and old.machine | {"gpu_details": None} == here | {"gpu_details": None}:
        ceiling = Ceiling.from_results(old.ceiling)
    else:
        log("measuring the ceiling of this machine ...")
        ceiling = measure(device=device)
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    empty = Results(
        suite="", baseline="", created=created, commit=machine.commit(), command=command,
        machine=here, versions=machine.describe_versions(plan.pythons.values()),
        ceiling=ceiling.to_results(),
    )  # fmt: skip
    log(files.headline(empty))
    with ModelFolders(plan.text, log, plan.models) as folders:
        for name, cases in jobs:
            usual = SUITES[name].baseline if name in SUITES else (*plan.engine, *engines)[0]
            done.append(replace(empty, suite=name, baseline=plan.baseline or usual, rows=[]))
            done[-1].rows = [row for row in old.rows if row.case in cases] if old is not None else []
            try:
                _measure_suite(plan, done[-1], cases, folders, ceiling, started)
            except KeyboardInterrupt:
                return True
            num_finished = sum(not row.unfinished for row in done[-1].rows)
            if num_finished < len(cases):
                number = f"{len(cases) - num_finished} of {len(cases)}"
                log(f"suite {name}: {number} cases are left after {plan.minutes:g} minutes: use --resume")
    return False


def _jobs(plan: Plan, engines: list[str], device: str) -> list[tuple[str, list[Case]]]:
    """Return the cases of each suite, after refusing what does not exist or cannot be written."""
    config = find_shape(plan.model_of(plan.suite[0] if plan.suite else CUSTOM))
    for name in plan.suite:
        if SUITES[name].device not in (None, device.partition(":")[0]):
            raise NanoinferError(f"suite={name!r} measures a CUDA device, and this run is on device={device!r}")
    for name in filter(None, (*plan.engine, plan.baseline)):
        require_choice("engine", name, (*ENGINES, *PEERS))
    jobs = [(name, _cases(plan, name, config, engines, device)) for name in plan.suite or (CUSTOM,)]
    if path := plan.output or plan.resume:
        require_writable(path.parent, path.name)
    return jobs


def _cases(plan: Plan, name: str, config: ModelConfig, engines: list[str], device: str) -> list[Case]:
    """Return the cases of a suite, or of the user's own lists, those of one shape together."""
    model = plan.model_of(name)
    if name in SUITES:
        cases = SUITES[name].cases(model, config, engines, plan.quick)
    else:
        shapes = product(
            plan.sampler or ("greedy",), plan.batch or (1,), plan.prompt_tokens or (32,), plan.output_tokens or (32,)
        )
        asked = [EngineConfig(dtype=d) for d in plan.dtype or ("auto",)]
        asked += [EngineConfig(dtype="float32", quantization=q) for q in plan.quantization]
        fitted = [fit_engine(model, w) for w in asked]  # a packed folder determines its own format
        formats = list(dict.fromkeys(("float32" if f.dtype == "auto" else f.dtype, f.quantization) for f in fitted))
        backends = plan.engine or tuple(engines)
        cases = [
            Case(backend, model, dtype, quantization, *shape, plan.workload)
            for shape, backend, (dtype, quantization) in product(shapes, backends, formats)
        ]
        if plan.draft is not None:
            ks = plan.speculate_k or ("auto",)
            cases = [c for x in cases for c in (x, *(replace(x, draft=plan.draft, speculate_k=k) for k in ks))]
    for case in cases:
        if case.model == model and case.prompt_tokens > config.block_size:
            length = f"the context length of {model}, {config.block_size}"
            raise NanoinferError(f"prompt_tokens={case.prompt_tokens} is more than {length}")
    return [replace(c, device=device) for c in cases]


def _measure_suite(
    plan: Plan, results: Results, cases: list[Case], folders: ModelFolders, ceiling: Ceiling, started: float
) -> None:
    """Run the cases that have no finished row yet, keeping the results file up to date."""
    for row in results.rows:  # their shares are of this run's ceiling now
        fill_in(row, find_shape(row.case.model), ceiling)
    known = {row.case for row in results.rows if not row.unfinished and not (plan.retry and row.error is not None)}

    def keep(rows: list[Row]) -> None:
        kept = {row.case: row for row in (*results.rows, *rows)}
        results.rows = [kept[case] for case in by_shape(cases) if case in kept]
        add_speedups(results.rows, results.baseline)
        if target := plan.output or plan.resume:
            write_atomically(target, files.to_json(results).encode() + b"\n")

    if results.rows:
        keep([])  # what --resume brought, also if nothing is added
    options = SUITES[results.suite].options if results.suite in SUITES else Options()
    if plan.quick and results.suite != "gpu":  # there most time is loading
        options = replace(options, rounds=1, max_warmups=2)
    options = replace(options, rounds=plan.rounds or options.rounds)
    for model, some in groupby((c for c in cases if c not in known), key=lambda c: c.model):
        if plan.minutes is not None:
            remaining_sec = 60 * plan.minutes - (time.monotonic() - started)
            if remaining_sec <= 0:
                break
            options = replace(options, budget_sec=remaining_sec)
        same = list(some)
        with ProgressBar(results.suite) as bar:
            harness = Harness(folders.folder(same), find_shape(model), ceiling, options, bar, pythons=plan.pythons)
            harness.run(same, keep, cases)
