"""`nanoinfer models`: the models that ship with nanoinfer or are in the Hugging Face Hub's cache.

Examples:
    nanoinfer models
    nanoinfer models --json | jq '.[] | select(.why_not == null) | .name'
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.help import command
from nanoinfer.cli.options import json_flag
from nanoinfer.cli.terminal import print_json
from nanoinfer.errors import NanoinferError, printable
from nanoinfer.utils.arrays import format_names

if TYPE_CHECKING:
    from nanoinfer.checkpoints.hub import LocalModel


@command("models")
@json_flag("Print one JSON document.")
def models(as_json: bool) -> None:
    """List the built-in models and those in the Hub's cache, and whether they run here."""
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
