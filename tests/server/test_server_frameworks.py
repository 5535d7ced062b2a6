"""Unmodified clients hold a conversation with the server: a call, its result, the answer, a stream, structured answers.

Each is a program of clients/; `clients/common.py` says what it prints. The programs of LlamaIndex and instructor run in
an environment of their own, `.venv-clients`: these need an older openai package than the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from helpers.environment import ROOT

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.chat_templates import TOOLS
from helpers.server_process import ServerProcess, serving
from helpers.tools import ADD, matches, tool, tools_folder

PROGRAMS = sorted(p for p in Path(__file__).with_name("clients").glob("*.*") if p.stem != "common")
NPM, NODE = ROOT / "build" / "npm", which("node")
OTHER_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
OTHERS = ("instructor_client", "llama_index_client")
KEY = "secret"
# Without reasoning, which a random model would not end. A call begins with the token 0. After the question comes the
# result of a call.
TEMPLATE = (
    "{%- set enable_thinking = false %}"
    "{%- if messages[0].content == 'What is 2 + 3?' and messages | length > 1 and messages[-1].role != 'tool' %}"
    "{{- raise_exception('the result is missing') }}{%- endif %}" + TOOLS.replace("\\n<tool_call>\\n", "<pad>")
)
ORDER = tool("Order", {"size": {"enum": ["small", "large"]}, "number": ADD["a"]})["function"]["parameters"]
ADDS = tool("add", {"a": {"enum": [2, 3, 5]}, "b": ADD["b"]})["function"]["parameters"]
SCHEMAS = {"add": ADDS, "Twice": ORDER}
"""Of the calls of each name."""


def why_not(program: Path) -> str | None:
    """Return why a program cannot run here."""
    if program.suffix == ".mjs":
        if NODE is None:
            return "node is not installed"
        found = (NPM / "node_modules" / "openai").exists()
    elif program.stem in OTHERS:
        found = OTHER_PYTHON.exists()
    else:
        found = find_spec(program.stem.removesuffix("_client")) is not None
    return None if found else "its packages are not installed: make test-clients"


def run(program: Path, server: ServerProcess, folder: Path) -> dict[str, Any]:
    """Return what a program printed. It reaches no other machine, and has none of the user's settings."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
        "CLIENT_BASE_URL": f"{server.url}/v1", "CLIENT_KEY": KEY,
        "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LLM_USER_PATH": str(folder),
    }  # fmt: skip
    if program.suffix == ".mjs":  # a program on standard input finds the packages of its folder
        command, cwd = [str(NODE), "--input-type=module", "-"], NPM
    else:
        command, cwd = [str(OTHER_PYTHON) if program.stem in OTHERS else sys.executable, str(program)], folder
    with program.open() as source:
        done = subprocess.run(
            command, stdin=source, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(tools_folder(folder / "tiny", TEMPLATE), "--served-model-name", "tiny", "--api-key", KEY) as made:
        yield made


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_conversation(server: ServerProcess, folder: Path, program: Path) -> None:
    if reason := why_not(program):
        pytest.skip(reason)
    found = run(program, server, folder)
    assert found["refused"] == 401
    assert len(found["calls"]) > 1
    for name, arguments in found["calls"]:
        assert matches(arguments, SCHEMAS[name]), arguments
    assert found["answer"]
    assert found["stream"][-1] == found["answer"]
    assert len(found["stream"]) > 2
    assert found["structured"]
    for order in found["structured"]:
        assert matches(order, ORDER), order
