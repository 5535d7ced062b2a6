"""The course is true: pages are up to date, name what exists, and their exercises can be solved."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import course
import pytest

COURSE, ROOT = course.COURSE, course.ROOT
LESSONS = course.lessons()
PARTS = ["Picture", "The change", "Predict", "Run", "Expect", "In the engines", "Exercises", "Literature"]
INCLUDE = re.compile(r"^```\{literalinclude\} (\S+)\n((?::.*\n)*)```$", re.MULTILINE)
OPTIONS = {"diff", "pyobject", "start-at", "end-before", "language"}  # that course.included knows
of_each_lesson = pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)


def section(page: Path, title: str) -> str:
    return page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_pages_are_up_to_date() -> None:
    assert [str(page) for page in course.out_of_date()] == [], "run python docs/course/course.py pages"


@of_each_lesson
def test_a_lesson_has_the_parts_in_order(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
    assert re.match(rf"# {int(page.name[:2])}\. .*\n\n<!-- status -->\n\*.*\*\n\n[`\w]", text)
    assert len(text.splitlines()) <= 100
    assert page.stem == course.rung(page.name[:2]).stem.replace("_", "-")
    assert text.count("<details>") == text.count("</details>") == 1
    assert "<!-- figures -->\n| command" in section(page, "Expect")
    assert 2 <= len(re.findall(r"^- ", section(page, "Literature"), re.MULTILINE)) <= 4
    assert re.search(r"^python ladder/\S+ --check$", section(page, "Run"), re.MULTILINE)


@of_each_lesson
def test_what_a_lesson_names_exists(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:src|docs|ladder|tests|benchmarks|examples)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    assert text.count("{literalinclude}") == len(INCLUDE.findall(text))
    shown = 0
    for path, options in INCLUDE.findall(section(page, "In the engines") + section(page, "The change")):
        assert set(re.findall(r"^:([\w-]+):", options, re.MULTILINE)) <= OPTIONS
        language, lines = course.included(path, options)  # raises if the file or the object does not exist
        assert lines
        shown += 0 if language == "diff" or "ladder/" in path else len(lines.splitlines())
    assert 0 < shown <= 60
    picture = COURSE / "pictures" / f"{page.name[:2]}.png"
    assert re.search(rf"!\[[^\]]{{20,}}\]\(pictures/{picture.name}\)", section(page, "Picture"))
    assert picture.stat().st_size <= 80_000


@of_each_lesson
def test_exercises_are_to_be_written_and_each_has_its_test(page: Path) -> None:
    number, exercises = page.name[:2], COURSE / "exercises"
    todo = set()
    for node in ast.parse((exercises / f"ex{number}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert ast.get_docstring(node), node.name
            assert "raise NotImplementedError" in ast.unparse(node), node.name
            todo.add(node.name)
    assert len(todo) == 3
    assert todo == set(re.findall(r"^\d\. `(\w+)`", section(page, "Exercises"), re.MULTILINE))
    used = set(re.findall(r"exercise\.(\w+)", (exercises / f"test_{number}.py").read_text()))
    assert todo <= used


def run(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"NANOINFER_SOLUTIONS": "1", "PATH": path}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_solutions_pass() -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(COURSE / "exercises")])
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nightly
def test_pictures_are_drawn_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = importlib.import_module("draw")
    monkeypatch.setattr(draw, "FOLDER", tmp_path)
    draw.pictures([])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (COURSE / "pictures").iterdir()}
    for path in tmp_path.iterdir():  # bytes 16 to 24 are width and height; fonts may differ
        assert path.read_bytes()[16:24] == (COURSE / "pictures" / path.name).read_bytes()[16:24], path.name


@pytest.mark.nightly
def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the course, because a notebook writes the files of its exercises; with the solutions."""
    import nbformat
    from nbclient import NotebookClient

    for folder in ("docs/course", "ladder"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "build").mkdir()
    done = run([sys.executable, "docs/course/course.py", "notebooks", "notebooks"], tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("NANOINFER_SOLUTIONS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # A command that fails is no error of a cell: make it one, but for the one that needs a CUDA device.
    checked = (
        "from subprocess import run\nget_ipython().system = lambda c: run(c, shell=True, check='--by graph' not in c)"
    )

    def execute(path: Path) -> None:
        notebook: Any = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(checked))
        for cell in notebook.cells:  # ladder/test_ladder.py runs all checks
            cell.source = re.sub(r"^!python ladder/\w+\.py --check$", "", cell.source, flags=re.MULTILINE)
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()

    notebooks = sorted((tmp_path / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == [page.stem for page in LESSONS]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(execute, notebooks))
