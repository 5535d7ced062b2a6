"""Print the tables of families and presets that stand in the docs: `models` (docs/models.md) or `presets`
(docs/inference-math-families.md). tests/roofline/test_roofline.py checks that the pages have them.

`write_proofs` writes what `make test-published` has found into docs/models.md and docs/gguf.md.

    python benchmarks/model_tables.py models
    python benchmarks/model_tables.py presets
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanoinfer.models import families
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.parameters import num_parameters
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.formats import FORMATS

FORMAT = FORMATS["bfloat16"]
LENGTHS = (1024, 8192, 32768)
DOCS = Path(__file__).parents[1] / "docs"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DOCS / "results" / "published.json").read_text())
"""What tests/published found, by the names of models."""
COLUMN = "files of others: logits, text, end, chat"


def models() -> str:
    """Return the table of families: what each is, by the first sentence of its docstring, and its presets."""
    described: dict[Any, tuple[str, str]] = {}
    for path in Path(families.__path__[0]).glob("*.py"):
        for node, after in pairwise(ast.parse(path.read_text()).body):
            match node, after:
                case (
                    ast.Assign(value=ast.Call(args=args, keywords=keywords)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    types = [*args, *(keyword.value for keyword in keywords if keyword.arg == "model_type")]
                    sentence = re.split(r"\.(?:\s|$)", text)[0].replace("\n", " ")
                    described |= {t.value: (sentence, path.name) for t in types if isinstance(t, ast.Constant)}
    rows = [f"| `model_type` | models | presets | file | {COLUMN} |", "|---|---|---|---|---|"]
    for name, family in FAMILIES.items():
        what, file = described[family.model_type]
        presets = ", ".join(f"`{preset}`" for preset, config in PRESETS.items() if config.family == name)
        found = proof(row for row in PUBLISHED.values() if row["family"] == name)
        rows.append(f"| `{name}` | {what} | {presets} | `models/families/{file}` | {found} |")
    return "\n".join(rows)


def proof(rows: Iterable[dict[str, Any]]) -> str:
    """Return how many published models pass each check, of those that it was made for; a dash: of none."""
    rows, cells = list(rows), []
    for column in ("logits", "text", "end", "chat"):
        found = [row[column] for row in rows if row[column] != "–"]
        passed = [value for value in found if not value.startswith("no: ")]
        pieces = f" ({n} by pieces)" if (n := passed.count("pieces")) else ""
        cells.append(f"{len(passed)}/{len(found)}{pieces}" if found else "–")
    return ", ".join(cells) if rows else "–"


def architectures(page: str) -> str:
    """Return docs/gguf.md with the last column of its table of architectures."""
    before, title, after = page.partition("## Architectures\n\n")
    table, end, rest = after.partition("\n\n")
    lines = []
    for line in table.split("\n"):
        names, family, notes = (cell.strip() for cell in line.split("|")[1:4])
        found = proof(
            row
            for row in PUBLISHED.values()
            if f"`{row['architecture']}`" in names and (row["family"] == "mixtral") == names.endswith("with experts")
        )
        last = {"`general.architecture`": COLUMN, "---": "---"}.get(names, found)
        lines.append("|---|---|---|---|" if last == "---" else f"| {names} | {family} | {notes} | {last} |")
    return before + title + "\n".join(lines) + end + rest


def exceptions() -> str:
    """Return the published models that fail a check, with the reasons, and the families that none was tried of."""
    failed = [
        f"- {name}, {column}: {value.removeprefix('no: ')}"
        for name, row in PUBLISHED.items()
        for column, value in row.items()
        if value.startswith("no: ")
    ]
    tried = {row["family"] for row in PUBLISHED.values()}
    untried = ", ".join(f"`{name}`" for name in FAMILIES if name not in tried)
    return "\n".join(["Fail today:", "", *failed, "", f"Without a proof: {untried}."])


def write_proofs() -> None:
    """Write the columns of docs/models.md and docs/gguf.md, and what fails."""
    path = DOCS / "models.md"
    page = re.sub(r"(?s)\| `model_type`.*?\n\n", lambda _: models() + "\n\n", path.read_text(), count=1)
    path.write_text(re.sub(r"(?s)Fail today:.*?\nWithout a proof:[^\n]*", lambda _: exceptions(), page))
    path = DOCS / "gguf.md"
    path.write_text(architectures(path.read_text()))


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
