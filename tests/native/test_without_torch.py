"""The native path imports no PyTorch where it is installed; `make test-small` runs it where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.models import TINY, make_folder

BLOCKED = ("torch", "transformers", "triton", "scipy")
# Runs before any program. It leaves sys.modules alone, which programs look into.
SITECUSTOMIZE = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {BLOCKED} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_a_nanogpt_checkpoint_needs_torch(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "ckpt.pt")
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    code = f"from nanoinfer import LLM\nLLM({str(tmp_path / 'ckpt.pt')!r})"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    line = done.stderr.splitlines()[-1]
    assert "ckpt.pt is read by PyTorch" in line
    assert "nanoinfer pack" in line


COMMANDS = {
    "help": ("--help",),
    "help of a command": ("generate", "--help"),
    "engines": ("engines",),
    "roofline": ("roofline", "gpt2", "--device", "t4", "--json"),
    "generate": ("generate", "Go", "-m", "{tiny}", "--max-tokens", "3", "--device", "cpu"),
    "draft": ("generate", "Go", "--max-tokens", "3", "--draft", "shakespeare-draft"),
    "eval": ("eval", "{text}", "-m", "{tiny}"),
}


def imported_by(code: str) -> set[str]:
    """Return the modules that a program has imported when it ends."""
    at_exit = "import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules, file=sys.stderr))\n"
    done = subprocess.run([sys.executable, "-c", at_exit + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stderr.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("case", COMMANDS)
@pytest.mark.slow_if(lambda case: case in ("draft", "eval", "engines", "roofline"))
def test_the_command_line_imports_no_torch(case: str, tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("To be, or not to be. ")
    names = {"tiny": make_folder(tmp_path / "tiny"), "text": tmp_path / "play.txt"}
    arguments = [a.format(**names) for a in COMMANDS[case]]
    code = f"import sys; sys.argv[1:] = {arguments!r}; from nanoinfer.cli import main; main()"
    modules = imported_by(code)
    assert "nanoinfer.cli.app" in modules
    assert modules & {*BLOCKED, "huggingface_hub", "rich"} == set()
    assert "help" not in case or "numpy" not in modules


def test_importing_and_generating_imports_no_torch(tmp_path: Path) -> None:
    code = f"from nanoinfer import LLM; print(LLM({str(make_folder(tmp_path / 'tiny'))!r}).generate('Go'))"
    assert imported_by("import nanoinfer") & {*BLOCKED, "numpy", "click"} == set()
    modules = imported_by(code)
    assert "nanoinfer._native" in modules
    assert modules & {*BLOCKED, "huggingface_hub", "rich", "click"} == set()


@pytest.mark.slow
def test_a_suite_runs_where_only_numpy_and_torch_are_installed(tmp_path: Path) -> None:
    """As on a machine of a first run (docs/gpu-first-run.md). GPT-2's vocabulary has a tokenizer on the Hub."""
    absent = ("tokenizers", "huggingface_hub", "click", "rich", "jinja2", "safetensors", "scipy", "transformers")
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.replace(str(BLOCKED), str(absent)))
    config = replace(TINY, vocab_size=50257, n_embd=4, n_layer=1, eos_token_ids=(50256,))
    folder = make_folder(tmp_path / "tiny", config, chars=None)
    code = f"""
from nanoinfer.bench.run import Plan, run
from nanoinfer.roofline import ceilings
ceilings.CPU_WORKLOAD = ceilings.Workload(num_bytes=1 << 22, matrix_size=64, num_rounds=1)
((made,), _) = run(Plan(model={str(folder)!r}, engine=("static",), prompt_tokens=(4,), output_tokens=(4,)), "test")
print([row.error for row in made.rows])
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[None]\n", done.stderr[-2000:]
