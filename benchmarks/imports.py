"""Which rooms of the package import which: the picture in docs/architecture.md.

    python benchmarks/imports.py [FOLDER]     the picture as Mermaid, and numbers; FOLDER: another src/nanoinfer

A room is a folder or a file directly in the package. All imports count: at run time, in functions and for type checks.
An arrow that follows from others is left out: a -> c, where a -> b -> c.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "nanoinfer"


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the modules of the package: name -> file."""
    return {
        ".".join(p.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): p
        for p in sorted(package.rglob("*.py"))
    }


def room_of(module: str, package: Path = PACKAGE) -> str:
    """Return the room of a module or of a name in one: nanoinfer.kv.plan -> kv/, nanoinfer.LLM -> __init__."""
    name = module.split(".")[1] if "." in module else "__init__"
    if name == "_native":  # the extension is built from this room
        return "kernels/"
    if (package / name).is_dir():
        return f"{name}/"
    return name if (package / f"{name}.py").is_file() else "__init__"


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def imported_modules(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield what a file imports of the package: a module of `known`, and the line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "nanoinfer")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nanoinfer":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known or alias.name == "_native" else str(node.module), node.lineno


def imported_rooms(package: Path = PACKAGE) -> dict[str, dict[str, str]]:
    """Return the imports between rooms: room -> room -> one place."""
    found: dict[str, dict[str, str]] = {}
    known = modules(package)
    for module, path in known.items():
        room = room_of(module, package)
        own = found.setdefault(room, {})
        for name, line in imported_modules(path, known):
            if (other := room_of(name, package)) != room:
                own.setdefault(other, f"{module}, line {line}")
    return found


def picture(graph: Mapping[str, Mapping[str, str]]) -> str:
    """Return the rooms without circles as a Mermaid graph, the ones that import most at the top."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(graph[room]).union(*(below(other) for other in graph[room]))

    lines = ["graph TD"]
    for room in sorted(graph, key=lambda room: (-len(below(room)), room)):
        direct = [o for o in graph[room] if not any(o in below(between) for between in graph[room])]
        lines += [f"  {_name(room)} --> {_name(other)}" for other in sorted(direct)]
    return "\n".join(lines)


def _name(room: str) -> str:
    return f'{room.strip("_/").upper()}["{room}"]'


def numbers(graph: Mapping[str, Mapping[str, str]]) -> str:
    """Return how many rooms there are, imports between them, pairs that import each other, and levels."""
    pairs = sum(room in graph[other] for room in graph for other in graph[room]) // 2
    arrows = sum(map(len, graph.values()))
    found = f"{len(graph)} rooms, {arrows} imports between rooms, {pairs} pairs of rooms that import each other"
    levels: dict[str, int] = {}
    while len(levels) < len(graph):
        free = [r for r in graph if r not in levels and graph[r].keys() <= levels.keys()]
        if not free:
            return f"{found}, {len(graph) - len(levels)} rooms in a circle or above one"
        levels |= {r: 1 + max((levels[other] for other in graph[r]), default=0) for r in free}
    return f"{found}, {max(levels.values())} levels"


if __name__ == "__main__":
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    found = imported_rooms(package)
    told = numbers(found)
    if "circle" not in told:
        print(picture(found))
    print(told, file=sys.stderr)
