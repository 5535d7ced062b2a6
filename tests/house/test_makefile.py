"""An installation by make says what it does and for how long, shows pip's errors, and ends with Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.environment import ROOT

WAIT_SEC = 120.0  # for what takes half a second on an idle machine
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Ends when the second line of progress is there: the test asserts no time.
PIP = """#!/bin/sh
echo "$@" > arguments
until grep -q 'after 2 s' log; do sleep 0.1; done
"""


class Make:
    """`make .venv/installed` in a folder of its own, with a command in place of pip."""

    def __init__(self, folder: Path, pip: str) -> None:
        for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
            (folder / name).touch()
        (folder / ".venv" / "bin").mkdir(parents=True)
        texts = {
            ".venv/bin/python": "#!/bin/sh\n",
            "pip": pip,
            "sleep": f"#!/bin/sh\nexec {shutil.which('sleep')} 0.1\n",
        }
        for path, text in ((folder / name, text) for name, text in texts.items()):
            path.write_text(text)
            path.chmod(0o755)
        self.folder, self.log = folder, folder / "log"
        # This may be a recipe of make, which tells the makes that it starts.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"  # each of its seconds takes a tenth of one
        command = ["make", "-f", str(ROOT / "Makefile"), "PIP=./pip", "TICK=1", ".venv/installed"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
            )  # fmt: skip

    def wait(self) -> int:
        code = self.process.wait(WAIT_SEC)
        until(lambda: not self.group_exists())  # nothing is left behind
        return code

    def group_exists(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SEC
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Make]]:
    made: list[Make] = []

    def start(pip: str) -> Make:
        made.append(Make(tmp_path, pip))
        return made[-1]

    yield start
    for each in made:
        if each.group_exists():
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()


def test_what_it_does_and_for_how_long(make: Callable[[str], Make]) -> None:
    running = make(PIP)
    assert running.wait() == 0
    says, *progress = running.log.read_text().splitlines()
    assert says.startswith("== installing nanoinfer into .venv: ")
    assert "about two minutes on 2 cores" in says
    assert progress[:2] == ["   still at work after 1 s", "   still at work after 2 s"]
    assert (running.folder / "arguments").read_text() == "--no-build-isolation --editable .\n"
    assert (running.folder / ".venv" / "installed").exists()


def test_an_error_of_pip_is_shown_and_ends_it(make: Callable[[str], Make]) -> None:
    running = make("#!/bin/sh\necho 'pip: it is broken' >&2; exit 3\n")
    assert running.wait() == 2
    assert "\npip: it is broken\n" in running.log.read_text()
    assert not (running.folder / ".venv" / "installed").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_pip_and_the_lines(make: Callable[[str], Make], number: signal.Signals) -> None:
    running = make("#!/bin/sh\necho $$ > pid\nwhile sleep 0.1; do :; done\n")
    until(lambda: (running.folder / "pid").exists() and "after 1 s" in running.log.read_text())
    os.killpg(running.process.pid, number)  # as a terminal sends Ctrl-C to all processes in the foreground
    assert running.wait() != 0
    assert not (running.folder / ".venv" / "installed").exists()
