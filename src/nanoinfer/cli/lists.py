"""`nanoinfer engines` and `nanoinfer models`: what this installation has, and what of it runs on this machine."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.help import command
from nanoinfer.cli.options import option
from nanoinfer.cli.terminal import print_json
from nanoinfer.errors import NanoinferError, printable
from nanoinfer.utils import environment
from nanoinfer.utils.arrays import format_names

if TYPE_CHECKING:
    from nanoinfer.checkpoints.hub import LocalModel


@command("engines")
@option("as_json", "Print one JSON document.")
def engines(as_json: bool) -> None:
    """List the engines and what each supports on this machine.

    Examples:
        nanoinfer engines
        nanoinfer engines --json | jq '.[] | select(.available) | .name'
    """
    from nanoinfer.bench.machine import describe_versions
    from nanoinfer.engines.devices import num_cuda_devices, supported_dtypes
    from nanoinfer.engines.registry import ENGINES

    devices = {"cpu": "cpu", "cuda": "cuda:0"} if num_cuda_devices() else {"cpu": "cpu"}
    rows: list[dict[str, Any]] = []
    for spec in ENGINES.values():
        reason = spec.unavailable()
        usable = [d for d in spec.devices if d in devices] if reason is None else []
        here = {t for d in usable for t in supported_dtypes(devices[d])}
        rows.append({
            "name": spec.name, "idea": spec.idea, "available": reason is None, "why_not": reason, "devices": usable,
            "missing_devices": [d for d in spec.devices if d not in usable],
            "dtypes": [t for t in spec.dtypes if t in here], "quantizations": list(spec.quantizations),
        })  # fmt: skip
    if as_json:
        print_json(rows, indent=2)
        return
    for row in rows:
        can = _abilities(row) if row["available"] else f"not here: {row['why_not']}"
        for text in (f"{row['name']:<11} {can}", f"{'':<11} {row['idea']}"):
            print(textwrap.fill(text, 80, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False))
    version = describe_versions()["torch"] or "not installed"
    print(f"torch {version}, CPU threads: {environment.num_cpus()}, {_gpu(devices)}")
    print(f"native extension: {_native()}")


def _abilities(row: dict[str, Any]) -> str:
    """Return where an engine runs on this machine, and its types of weights: "cpu: float32 bfloat16, int8"."""
    types = " ".join([*row["dtypes"], *row["quantizations"]])
    missing = f" (not here: {', '.join(row['missing_devices'])})" if row["missing_devices"] else ""
    return f"{', '.join(row['devices'])}: {types}{missing}"


def _gpu(devices: dict[str, str]) -> str:
    """Return the name of the first CUDA device."""
    if "cuda" not in devices:
        return "no CUDA device"
    import torch

    return f"CUDA: {torch.cuda.get_device_name(devices['cuda'])}"


def _native() -> str:
    """Return whether the C++ extension is built, and its instruction sets for this CPU, in lines of 80 columns."""
    try:
        from nanoinfer._native import fastest_isa, instruction_sets
    except ImportError:
        return "not built (installed with NANOINFER_NO_NATIVE=1)"
    sets = instruction_sets()
    here = [name for name, missing in sets if not missing]
    chosen = environment.isa() or here[-1]
    lacking, named = list[str](), set[str]()
    for name, missing in sets:
        if more := [feature for feature in missing.split(", ") if feature and feature not in named]:
            lacking.append(f"{name} ({', '.join(more)})")
            named.update(more)
    how = "forced by NANOINFER_ISA" if environment.isa() else "the fastest here"
    if (fastest := fastest_isa()) not in [name for name, _ in sets]:
        how = f"built without {fastest}, the fastest of this CPU: install with NANOINFER_ISA=all"
    text = f"  not here, for what this CPU lacks: {', '.join(lacking)}"
    others = "\n" + textwrap.fill(text, 80, subsequent_indent=" " * 4, break_on_hyphens=False) if lacking else ""
    return f"{', '.join(here)}{others}\n  uses {chosen}, {how}"


@command("models")
@option("as_json", "Print one JSON document.")
def models(as_json: bool) -> None:
    """List the built-in models and those in the Hub's cache, and whether they run here.

    Examples:
        nanoinfer models
        nanoinfer models --json | jq '.[] | select(.why_not == null) | .name'
    """
    from nanoinfer.checkpoints.hub import LocalModel, cached_models
    from nanoinfer.checkpoints.load import BUILTIN, builtin_names

    sizes = {name: sum(path.stat().st_size for path in (BUILTIN / name).iterdir()) for name in builtin_names()}
    built_in = [LocalModel(name, BUILTIN / name, num_bytes) for name, num_bytes in sizes.items()]
    rows = [_describe(model) for model in [*built_in, *cached_models()]]
    if as_json:
        print_json(rows, indent=2)
        return
    for row in rows:
        runs = "runs" if row["why_not"] is None else f"does not run: {row['why_not']}"
        text = f"  {_size(row['num_bytes'])}, {row['format'] or 'unknown format'}: {runs}"
        print(printable(row["name"]))
        print(textwrap.fill(text, 80, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False))


def _describe(model: LocalModel) -> dict[str, Any]:
    """Return the fields of a row. The files' headers are read, as when the model is loaded."""
    from nanoinfer.checkpoints.load import open_weights
    from nanoinfer.engines.devices import free_memory

    row = {"name": model.name, "path": str(model.path), "num_bytes": model.num_bytes, "format": None, "why_not": None}
    try:
        weights = open_weights(model.path)
    except NanoinferError as e:
        return row | {"why_not": str(e).removeprefix(f"{model.path}: ")}
    row["format"] = " ".join(format_names(weights.block_formats)) or weights.stored_dtype
    if weights.method is not None:
        row["format"] = f"{weights.method} as {row['format']}"
    if model.num_bytes > (free := free_memory("cpu")):
        row["why_not"] = f"{_size(model.num_bytes)} of weights, but {_size(free)} of memory are free"
    return row


def _size(num_bytes: int) -> str:
    """Return a size in MB or GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
