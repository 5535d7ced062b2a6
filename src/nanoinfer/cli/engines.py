"""`nanoinfer engines`: the rungs of the ladder, and what each can do on this machine.

Examples:
    nanoinfer engines
    nanoinfer engines --json | jq '.[] | select(.available) | .name'
"""

from __future__ import annotations

import textwrap
from typing import Any

from nanoinfer.cli.help import command
from nanoinfer.cli.options import json_flag
from nanoinfer.cli.terminal import print_json
from nanoinfer.utils import environment


@command("engines")
@json_flag("Print one JSON document.")
def engines(as_json: bool) -> None:
    """List the engines and what each supports on this machine."""
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
        from nanoinfer._native import instruction_sets
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
    text = f"  not here, for what this CPU lacks: {', '.join(lacking)}"
    others = "\n" + textwrap.fill(text, 80, subsequent_indent=" " * 4, break_on_hyphens=False) if lacking else ""
    return f"{', '.join(here)}{others}\n  uses {chosen}, {how}"
