"""The house rules that a machine can check: levels, sizes, and how far it is from generate to the matmul."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
MAX_FUNCTION_LINES = 60

# Level -> what it may not import, at any depth of its own code.
FORBIDDEN = {
    "scheduling": ("torch", "numpy", "nanoinfer.engines", "nanoinfer.models", "nanoinfer.sampling", "nanoinfer.core"),
    "kv": ("nanoinfer.engines", "nanoinfer.models", "nanoinfer.sampling", "nanoinfer.scheduling", "nanoinfer.core"),
    "engines": ("nanoinfer.sampling", "nanoinfer.scheduling", "nanoinfer.core", "nanoinfer.llm"),
    "sampling": ("nanoinfer.engines", "nanoinfer.scheduling", "nanoinfer.models", "nanoinfer.core"),
    "models": ("nanoinfer.engines", "nanoinfer.sampling", "nanoinfer.scheduling", "nanoinfer.core", "nanoinfer.llm"),
    "training": ("nanoinfer.sampling", "nanoinfer.scheduling", "nanoinfer.core", "nanoinfer.llm"),
    "speculative": ("nanoinfer.core", "nanoinfer.llm", "nanoinfer.bench"),
    "roofline": ("nanoinfer.engines", "nanoinfer.sampling", "nanoinfer.scheduling", "nanoinfer.core", "nanoinfer.llm"),
    "kernels": ("nanoinfer",),
    "": ("nanoinfer.cli",),  # nothing imports the command line
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_lock_outlives_a_fork() -> None:
    """Before Python 3.12, all instances share the lock of a cached_property: a forked child waits for it for ever."""
    assert not [str(p) for p in FILES if "functools.cached_property" in {*imports(p)}]


@pytest.mark.parametrize("level", FORBIDDEN)
def test_levels_do_not_leak(level: str) -> None:
    parts = {p: p.relative_to(PACKAGE.parent).parts for p in FILES}  # the checkout's folder may have any name
    files = [p for p in FILES if (level or "nanoinfer") in parts[p] and "cli" not in parts[p]]
    files = [p for p in files if p != PACKAGE / "__main__.py"]
    assert files or level == "kernels"
    for path in files:
        for name in imports(path):
            bad = [f for f in FORBIDDEN[level] if name == f or name.startswith(f + ".")]
            bad = bad if not name.startswith("nanoinfer.engines.base") else []  # the interface alone
            assert not bad, f"{path.relative_to(PACKAGE)} imports {name}"


# What may import PyTorch when it is imported: the rungs in PyTorch, samplers and kernels for GPUs, training, and what
# is only imported where one of them runs. Everything else imports it inside a function, where a GPU or a rung needs it.
TORCH = {
    "bench/peers", "engines/compiled.py", "engines/dynamic.py", "engines/graphs.py", "engines/paged.py",
    "engines/recompute.py", "engines/static.py", "engines/static_shapes.py", "engines/torch_engine.py",
    "engines/transfers.py", "engines/triton_engine.py", "kernels/triton", "kv/slots.py", "kv/tensors.py",
    "models/attention.py", "models/gpt.py", "models/gpt_loading.py", "models/layers.py", "models/torch_ops.py",
    "sampling/flashinfer.py", "sampling/triton.py", "training",
}  # fmt: skip


def test_only_the_rungs_in_pytorch_import_it() -> None:
    found = set()
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.parse(path.read_text()).body:  # not in functions
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                if any(m.split(".")[0] == "torch" for m in modules):
                    found.add(next((t for t in TORCH if name == t or name.startswith(f"{t}/")), name))
    assert found == TORCH


def test_files_and_functions_are_small() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {lines} lines"


def test_the_table_of_faults_names_tests_that_are_there() -> None:
    table = (Path(__file__).parent / "README.md").read_text()
    sources = {p.name: p.read_text() for p in Path(__file__).parent.glob("test_*.py")}
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
