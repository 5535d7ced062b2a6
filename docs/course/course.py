"""Make what the lessons have from the ladder: figures, pictures, tables, notebooks.

    python docs/course/course.py measure [11]       # figures.json: the speed of each rung on this machine (10 minutes)
    python docs/course/course.py pictures [01 02]   # pictures/NN.png, by draw.py
    python docs/course/course.py pages [--check]    # status line and figures of each lesson, list of lessons
    python docs/course/course.py notebooks FOLDER   # FOLDER/NN-name.ipynb

`pages` replaces what stands after `<!-- status -->`, and between `<!-- figures -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import ast
import base64
import difflib
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

COURSE = Path(__file__).resolve().parent
ROOT = COURSE.parents[1]
FIGURES = COURSE / "figures.json"
ROUNDS = 5
FOUR = '--prompt "O Romeo," --prompt "To be" --prompt "My lord" --prompt "First Citizen:"'
# Further options with which a lesson's rung is measured. Without options, all rungs continue "O Romeo," by 100 tokens.
OPTIONS = {
    "01": ["--max-new-tokens 400"], "02": ["--max-new-tokens 400"], "03": ["--max-new-tokens 400"],
    "04": [FOUR], "05": [FOUR], "07": ["--bits 4"], "09": [FOUR], "10": ["--by eager"],
    "08": ["--draft shakespeare", '--prompt "To be, or not to be, that is" --max-new-tokens 24'], "11": ["--k 0"],
}  # fmt: skip
BEFORE = {
    "01": "",
    "07": "04",
    "08": "04",
    "09": "04",
    "10": "04",
    "11": "",
}  # whose speed a lesson compares with, if not the rung before
PRINTED = r"s: (\S+) tokens/s\nlimit: (\S+) tokens/s at (\S+) GB/s and (\S+) GFLOP/s\nreached: (\S+)%"
FENCE = re.compile(r"^```(\S+)[ ]?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)  # language, argument, body


def lessons() -> list[Path]:
    """Return the pages of the lessons in their order."""
    return sorted(COURSE.glob("[0-9][0-9]-*.md"))


def rung(number: str) -> Path:
    """Return the file of the ladder with a number of two digits."""
    (path,) = ROOT.glob(f"ladder/{number}_*.py")
    return path


def commands(number: str) -> list[str]:
    """Return the commands that are measured of a rung."""
    plain = f"python {rung(number).relative_to(ROOT)}"
    return [plain, *(f"{plain} {option}" for option in OPTIONS.get(number, []))]


def shown(number: str) -> list[str]:
    """Return the commands of a lesson's table: of the rung it compares with, and its own, by options."""
    before = BEFORE.get(number, f"{int(number) - 1:02}")
    others = commands(before) if before else []
    own = commands(number)
    rest = [c for c in others[1:] if c.partition(".py")[2] in {o.partition(".py")[2] for o in own}]
    return [*others[:1], own[0], *rest, *own[1:]]


def measure(numbers: list[str]) -> None:
    """Run the commands of some lessons, or of all, in rounds; write the medians and all rates of tokens."""
    from nanoinfer.bench.machine import commit, describe_machine, describe_versions

    every = numbers or [page.name[:2] for page in lessons()]
    rounds: dict[str, list[list[float]]] = {c: [] for number in every for c in shown(number)}
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for _ in range(ROUNDS):
        for command in rounds:
            print(command, flush=True)
            done = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
            numbers_of = re.search(PRINTED, done.stdout)
            assert numbers_of is not None, done.stdout
            rounds[command].append([float(number.replace(",", "")) for number in numbers_of.groups()])
    names = ("tokens_per_sec", "limit_tokens_per_sec", "bandwidth_gb_per_sec", "gflop_per_sec", "share_percent")
    machine, versions = describe_machine(), describe_versions()
    figures = {
        "date": date.today().isoformat(), "commit": commit(), "rounds": ROUNDS,
        **{name: machine[name] for name in ("cpu", "isa", "cores")},
        "versions": {name: versions[name] for name in ("python", "torch", "numpy")},
        "runs": {
            command: {name: round(statistics.median(row[i] for row in rows), 1) for i, name in enumerate(names)}
            | {"rounds_tokens_per_sec": [row[0] for row in rows]}
            for command, rows in rounds.items()
        },
    }  # fmt: skip
    if numbers:
        old = json.loads(FIGURES.read_text())
        figures = old | {"alone": old.get("alone", {}) | dict.fromkeys(numbers, figures)}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


def figures_of(number: str) -> dict[str, Any]:
    """Return the figures of a lesson: those of all, or of a measurement of this one alone."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text())
    return figures.get("alone", {}).get(number, figures)  # type: ignore[no-any-return]


def table(number: str, figures: dict[str, Any]) -> str:
    """Return the table of a lesson."""
    lines = ["| command | tokens/s | slowest to fastest round | limit | share of it |", "|---|--:|--:|--:|--:|"]
    for command in shown(number):
        run = figures["runs"][command]
        rates = run["rounds_tokens_per_sec"]
        speed = f"{run['tokens_per_sec']:,.0f} | {min(rates):,.0f} to {max(rates):,.0f}"
        lines.append(f"| `{command}` | {speed} | {run['limit_tokens_per_sec']:,.0f} | {run['share_percent']:.0f}% |")
    speeds = [figures["runs"][commands(number)[0]][name] for name in ("bandwidth_gb_per_sec", "gflop_per_sec")]
    note = (
        f"Medians of {figures['rounds']} rounds, PyTorch {figures['versions']['torch']}; the limits are those of about"
    )
    return "\n".join([*lines, "", f"{note} {speeds[0]:.0f} GB/s and {speeds[1]:.0f} GFLOP/s."])


def machine_name(figures: dict[str, Any]) -> str:
    """Return the CPU of the figures with its instruction set and cores."""
    isa = "AVX-512" if "avx512f" in figures["isa"] else "AVX2"
    return f"{figures['cpu']} ({figures['cores']} cores, {isa})"


def rewritten(page: Path) -> str:
    """Return the text of a lesson with its status line and its figures as they are now."""
    number, text, figures = page.name[:2], page.read_text(), figures_of(page.name[:2])
    num_tests = len(re.findall(r"^def test_", (COURSE / "exercises" / f"test_{number}.py").read_text(), re.MULTILINE))
    num_lines = len(rung(number).read_text().splitlines())
    code = f"`{rung(number).relative_to(ROOT)}` has {num_lines} lines, and its exercises {num_tests} tests."
    status = f"*{code} Figures of {figures['date']}, {machine_name(figures)}.*"
    text = re.sub(r"(<!-- status -->\n)(?:\*.*\*\n)?", lambda m: f"{m[1]}{status}\n", text)
    between = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)
    return between.sub(lambda m: f"{m[1]}{table(number, figures)}\n{m[2]}", text)


def index(page: Path) -> str:
    """Return the text of the README with the list of lessons."""
    items = ""
    for lesson in lessons():
        number, _, title = lesson.read_text().splitlines()[0][2:].partition(". ")
        docstring = ast.get_docstring(ast.parse(rung(lesson.name[:2]).read_text())) or ""
        items += f"{number}. [{title}]({lesson.name}): {docstring.splitlines()[0].partition(': ')[2]}\n"
    return re.sub(r"(<!-- lessons -->\n)(?:\d+\. .*\n)*", lambda m: m[1] + items, page.read_text())


def out_of_date() -> dict[Path, str]:
    """Return the new text of each page that differs from it."""
    texts = {**{page: rewritten(page) for page in lessons()}, COURSE / "README.md": index(COURSE / "README.md")}
    return {page: text for page, text in texts.items() if text != page.read_text()}


def included(path: str, options: str) -> tuple[str, str]:
    """Return language and text of a `literalinclude`: a diff, a function or class, or lines between two texts."""
    option = dict(re.findall(r"^:([\w-]+): (.*)$", options, re.MULTILINE))
    lines = (COURSE / path).read_text().splitlines()
    if "diff" in option:
        before = (COURSE / option["diff"]).read_text().splitlines()
        names = [name.removeprefix("../../") for name in (option["diff"], path)]
        return "diff", "\n".join(difflib.unified_diff(before, lines, *names, lineterm=""))
    if "pyobject" in option:
        body: list[Any] = ast.parse("\n".join(lines)).body
        for name in option["pyobject"].split("."):
            (node,) = [n for n in body if getattr(n, "name", None) == name]
            body = node.body
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        return "python", "\n".join(lines[first - 1 : node.end_lineno])
    start = next(i for i, line in enumerate(lines) if option.get("start-at", "") in line)
    end = option.get("end-before")
    stop = next(i for i, line in enumerate(lines) if i > start and end in line) if end else len(lines)
    return option.get("language", "python"), "\n".join(lines[start:stop]).rstrip()


def notebook(page: Path, folder: Path) -> Any:
    """Return the notebook of a lesson in a folder: text, what it includes, commands, the file of its exercises."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    cells = [new_code_cell(f"import os\n\nos.chdir({str(ROOT)!r})")]
    text, exercises = page.read_text(), f"docs/course/exercises/ex{page.name[:2]}.py"
    picture = f"pictures/{page.name[:2]}.png"
    attachments = {Path(picture).name: {"image/png": base64.b64encode((COURSE / picture).read_bytes()).decode()}}

    def add_text(part: str) -> None:
        part = part.replace(f"({picture})", f"(attachment:{Path(picture).name})")
        part = re.sub(r"\]\((\.\.?/[^)]+)\)", lambda m: f"]({os.path.relpath(COURSE / m[1], folder)})", part)
        cells.extend([new_markdown_cell(part.strip())] if part.strip() else [])
        if "(attachment:" in part:
            cells[-1].attachments = attachments

    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        first, *parts = FENCE.split(section)
        add_text(first)
        for language, argument, body, after in zip(*[iter(parts)] * 4, strict=True):
            if language == "bash":
                cells.append(new_code_cell("\n".join(f"!{line}" for line in body.splitlines() if line)))
            elif language == "{literalinclude}":
                add_text("```{}\n{}\n```".format(*included(argument, body)))
            else:
                add_text(f"```{language} {argument}\n{body}```")
            add_text(after)
        if section.startswith("## Exercises"):
            cells.append(new_code_cell(f"%%writefile {exercises}\n{(ROOT / exercises).read_text().rstrip()}"))
            cells.append(new_code_cell(f"!python -m pytest -q docs/course/exercises/test_{page.name[:2]}.py"))
    return new_notebook(cells=cells)


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["measure", "pictures", "pages", "notebooks"])
    parser.add_argument("names", nargs="*", help="lessons to measure or draw; folder of notebooks")
    parser.add_argument("--check", action="store_true", help="write no page: exit code 1 if one is out of date")
    args = parser.parse_args()
    if args.what == "pages":
        for page, text in (pages := out_of_date()).items():
            print(f"{page.relative_to(ROOT)} {'is out of date' if args.check else 'is written'}")
            if not args.check:
                page.write_text(text)
        return int(args.check and bool(pages))
    if args.what == "measure":
        measure(args.names)
    elif args.what == "pictures":
        importlib.import_module("draw").pictures(args.names)
    else:
        import nbformat

        for page in lessons():
            folder = Path(args.names[0]).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook(page, folder), folder / f"{page.stem}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())
