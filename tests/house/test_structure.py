"""The house rules that a machine can check: levels, sizes, and how far it is from generate to the matmul."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import nanoinfer
from helpers.environment import ROOT, TESTS

sys.path.insert(0, str(ROOT / "benchmarks"))

from imports import imported_modules, imported_rooms, modules, numbers, picture, tree

PACKAGE = Path(nanoinfer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = modules(PACKAGE)
MAX_LINES = 600
MAX_FUNCTION_LINES = 60


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_lock_outlives_a_fork() -> None:
    """Before Python 3.12, all instances share the lock of a cached_property: a forked child waits for it for ever."""
    assert not [str(p) for p in FILES if "functools.cached_property" in {*imports(p)}]


def section_of_levels() -> str:
    text = (ROOT / "docs" / "architecture.md").read_text()
    return text.partition("## Levels, bottom to top")[2].partition("\n## ")[0]


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_rooms_are_within_their_budgets() -> None:
    """A change that needs more lines deletes others first: the numbers of docs/architecture.md are limits."""
    section = section_of_levels()
    limits = {room: int(n.replace(",", "")) for room, n in re.findall(r"^\| `([\w/]+)` \| ([\d,]+) \|", section, re.M)}
    sizes = {
        room: num_lines((PACKAGE / room).rglob("*.py") if room.endswith("/") else [PACKAGE / f"{room}.py"])
        for room in levels()
    }
    assert {room: n for room, n in sizes.items() if n > limits[room]} == {}
    totals = re.search(r"`src/` may have ([\d,]+), the tests ([\d,]+), and\n`kernels/cpu/` ([\d,]+) lines", section)
    assert totals is not None
    in_src, in_tests, in_cpp = (int(n.replace(",", "")) for n in totals.groups())
    assert num_lines(FILES) <= in_src
    assert num_lines(TESTS.rglob("*.py")) <= in_tests
    cpp = [p for p in (PACKAGE / "kernels" / "cpu").rglob("*") if p.suffix in (".cpp", ".h")]
    assert num_lines(cpp) <= in_cpp


def levels() -> dict[str, set[str]]:
    """Return the table of docs/architecture.md: room -> the rooms that it imports, bottom to top."""
    section = section_of_levels()
    rows = re.findall(r"^\| `([\w/]+)` \|.*\| ([^|]*) \|$", section, re.M)
    return {room: set(names.split(", ")) - {"–"} for room, names in rows}


def test_rooms_import_what_the_table_of_levels_says() -> None:
    table, found = levels(), imported_rooms(PACKAGE)
    order = list(table)
    assert set(order) == found.keys()
    for room, places in found.items():
        named = {name for name in order if name.rstrip("/") in table[room]}
        assert len(named) == len(table[room]), f"{room}: the table names a room that is not there"
        assert {other: where for other, where in places.items() if other not in named} == {}, room
        assert named == places.keys(), f"{room}: the table names rooms that are not imported"
        assert all(order.index(other) < order.index(room) for other in places), room


def test_the_numbers_of_the_levels_are_those_of_the_imports() -> None:
    text, graph = (ROOT / "docs" / "architecture.md").read_text(), imported_rooms(PACKAGE)
    assert picture(graph).count(" --> ") < sum(map(len, graph.values()))  # without transitive imports
    rooms, arrows, _, levels = re.findall(r"\d+", numbers(graph))
    assert f"{rooms} rooms on {levels} levels, with {arrows} imports between rooms" in text


def test_modules_do_not_import_in_circles() -> None:
    graph = {
        module: {name for name, _ in imported_modules(path, MODULES)} - {module} for module, path in MODULES.items()
    }
    graph["nanoinfer"] = set()  # it imports the public names on first access
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_the_scheduler_imports_the_interface_of_the_engines_alone() -> None:
    for path in (PACKAGE / "scheduling").rglob("*.py"):
        names = {name for name in imports(path) if name.split(".")[0] in ("torch", "numpy") or ".engines" in name}
        assert all(name.startswith("nanoinfer.engines.base") for name in names), path.name


# What may import PyTorch when it is imported: the rungs in PyTorch, samplers and kernels for GPUs, training, and what
# is only imported where one of them runs. Everything else imports it inside a function, where a GPU or a rung needs it.
TORCH = {
    "bench/backends/transformers.py", "checkpoints/gpt_loading.py",
    "engines/compiled.py", "engines/cuda_graph.py", "engines/dynamic.py", "engines/graphs.py",
    "engines/paged.py", "engines/recompute.py", "engines/rounded_cache.py", "engines/static.py",
    "engines/static_shapes.py", "engines/torch_engine.py", "engines/transfers.py", "engines/triton_engine.py",
    "engines/triton_layers.py", "kernels/triton", "kv/slots.py",
    "models/adapters.py", "models/attention.py", "models/experts.py", "models/transformer.py",
    "models/layers.py",
    "engines/states.py", "models/other_attention.py", "models/recurrent.py", "sampling/triton.py",
    "training",
}  # fmt: skip


def test_only_the_rungs_in_pytorch_import_it() -> None:
    found = set()
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        for node in tree(path).body:  # not in functions
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                if any(m.split(".")[0] == "torch" for m in modules):
                    found.add(next((t for t in TORCH if name == t or name.startswith(f"{t}/")), name))
    assert found == TORCH


def test_files_and_functions_are_small() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES, path.name
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {lines} lines"


def test_private_members_are_used_in_the_file_that_has_them() -> None:
    """By `self`, by a class that inherits them, or by another class of the same file."""
    for path in FILES:
        text = path.read_text()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
                owner = ast.unparse(node.value)
                inherits = owner in ("self", "cls", "super()") or owner.split(".")[0] in ("torch", "pickle", "os")
                where = f"{path.name}, line {node.lineno}: {owner}.{node.attr}"
                assert inherits or f"def {node.attr}(" in text, where


def test_the_table_of_faults_names_tests_that_are_there() -> None:
    table = (TESTS / "FAULTS.md").read_text()
    sources = {p.name: p.read_text() for p in TESTS.rglob("test_*.py")}
    files, names = set(re.findall(r"`(test_\w+\.py)`", table)), set(re.findall(r"`(test_\w+)(?:\[.*?\])?`", table))
    assert len(names) > 50
    assert files <= sources.keys()
    assert [name for name in sorted(names) if not any(f"def {name}(" in text for text in sources.values())] == []


def test_every_module_imports_and_says_what_it_is() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "nanoinfer."):
        if module.name.endswith("_native"):
            continue
        needs_triton = ".kernels.triton." in module.name or module.name == "nanoinfer.engines.triton_engine"
        if needs_triton and importlib.util.find_spec("triton") is None:  # it is not made for every platform
            continue
        assert importlib.import_module(module.name).__doc__, module.name
