"""benchmarks/model_tables.py, and the pages that show its tables."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

from helpers.environment import ROOT
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.presets import PRESETS

DOCS = ROOT / "docs"


@pytest.mark.parametrize("table, page", [("models", "models.md"), ("presets", "inference-math-families.md")])
def test_a_page_shows_what_the_command_prints(table: str, page: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "model_tables.py"), table]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"\n\n{printed}\n" in (DOCS / page).read_text()
    assert f"python benchmarks/model_tables.py {table}" in (DOCS / page).read_text()


def test_the_pages_show_what_was_found_about_files_of_others() -> None:
    """docs/results/published.json is written by tests/published."""
    tables = runpy.run_path(str(ROOT / "benchmarks" / "model_tables.py"))
    assert f"\n{tables['exceptions']()}\n" in (DOCS / "models.md").read_text()
    page = (DOCS / "gguf.md").read_text()
    assert tables["architectures"](page) == page


def test_the_table_lists_exactly_the_families() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "models.md").read_text(), re.M)
    assert rows == ["model_type", *FAMILIES]
    shown = re.findall(r"^\| `([\w.-]+)` \| [\d,]+ M \|", (DOCS / "inference-math-families.md").read_text(), re.M)
    assert shown == list(PRESETS)


def test_the_worked_example_is_the_file() -> None:
    page = (DOCS / "adding-a-family.md").read_text()
    source = (ROOT / "src" / "nanoinfer" / "models" / "families" / "mistral.py").read_text()
    (shown,) = re.findall(r"```python\n(STARCODER2 = .*?)```", page, re.S)
    without = re.sub(r" +#.*", "", shown)
    assert "".join(without.split()) in "".join(source.split())
    (lines,) = re.findall(r"in (\d+) lines", page)
    assert int(lines) == len(shown.splitlines())
    cases = re.findall(r"```text\n(\"starcoder2\".*?)```", page, re.S)[0].splitlines()
    assert all(line in (ROOT / "tests" / "helpers" / "families.py").read_text() for line in cases)
