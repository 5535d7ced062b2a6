"""Print the tables of families and presets that stand in the docs: `models` (docs/models.md) or `presets`
(docs/inference-math.md). tests/roofline/test_model_tables.py checks that the pages have them.

    python benchmarks/model_tables.py models
    python benchmarks/model_tables.py presets
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from dataclasses import replace

from nanoinfer.models.families import FAMILIES
from nanoinfer.models.parameters import num_parameters
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.formats import FORMATS

FORMAT = FORMATS["bfloat16"]
LENGTHS = (1024, 8192, 32768)


def models() -> str:
    """Return the table of families: what each is, by the first sentence of its file, and its presets."""
    rows = ["| `model_type` | models | presets | file |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        file = name.removesuffix("_text")
        module = importlib.import_module(f"nanoinfer.models.families.{file}")
        (what, *_) = (inspect.getdoc(module) or "").replace("\n", " ").split(". ")
        presets = ", ".join(f"`{preset}`" for preset, config in PRESETS.items() if config.family == name)
        assert family.model_type == name
        rows.append(f"| `{name}` | {what.removesuffix('.')} | {presets} | `models/families/{file}.py` |")
    return "\n".join(rows)


def presets() -> str:
    """Return the table of presets: what a decoding step reads in bfloat16."""
    lengths = " | ".join(f"N = {n:,}" for n in LENGTHS)
    rows = [
        f"| preset | parameters | weights read | cache a token | with all heads | {lengths} |",
        "|---|" + "---:|" * (4 + len(LENGTHS)),
    ]
    for name, config in PRESETS.items():
        cost = decode(config, FORMAT).model
        weights, every = cost.bytes(1, 0), replace(config, num_kv_heads=None)
        cache = [cost.bytes(1, n) - weights if n <= config.block_size else None for n in LENGTHS]
        cells = [
            f"{num_parameters(config) / 1e6:,.0f} M",
            f"{weights / 1e6:,.0f} MB",
            *(f"{c.kv_bytes_per_token(FORMAT.vector_bytes) / 1e3:,.1f} KB" for c in (config, every)),
            *("-" if c is None else f"{c / 1e6:,.0f} MB" for c in cache),
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


TABLES = {"models": models, "presets": presets}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    print(TABLES[parser.parse_args().table]())
