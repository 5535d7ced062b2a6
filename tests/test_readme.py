"""The README's commands run as written, in an empty folder with an empty home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines() if line]

# Words of the slow commands; the fixture `home` runs the one with tee in any case.
SLOW = (" bench ", " train ", " profile ", "out/play", " --draft ", " --quantization ", "| tee ", '"To be"')


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    return str(found)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder; README's own command has written play.txt into it, which others read."""
    folder = tmp_path_factory.mktemp("home")
    (writes,) = [line for line in COMMANDS if "tee play.txt" in line]
    subprocess.run(writes, shell=True, cwd=folder, env=environment(folder), capture_output=True, check=True)
    return folder


def environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"HOME": str(home), "PATH": path}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.split("#")[0].strip().replace(" ", "_")[:40])
@pytest.mark.slow_if(lambda command: any(word in command for word in SLOW))
def test_shell_command(command: str, home: Path) -> None:
    if "--model out/play" in command and not (home / "out" / "play").exists():  # the test that trains it is elsewhere
        (trains,) = [line for line in COMMANDS if " train " in line]
        subprocess.run(trains, shell=True, cwd=home, env=environment(home), capture_output=True, check=True)
    done = subprocess.run(
        command, shell=True, cwd=home, env=environment(home), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_python_block(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python")],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("O Romeo,")
    assert "\nMy lord," not in done.stdout  # stream yields the continuation only


def test_every_engine_has_its_page_and_its_row() -> None:
    from nanoinfer.engines.registry import ENGINES

    for name in ENGINES:
        assert f"| `{name}` |" in README
        assert (ROOT / "docs" / "rungs" / f"{name}.md").is_file()


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
