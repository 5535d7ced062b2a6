"""The programs of examples/ run with the built-in model, and print what they promise."""

from __future__ import annotations

import ast
import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.environment import ROOT
from helpers.smollm2 import FILES, needs_smollm2

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))


class Done(NamedTuple):
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a program as `python examples/NAME.py ARGUMENTS` does, in this process."""

    def call(name: str, *arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as e:
            if e.code:
                raise
        return Done(*capsys.readouterr())

    return call


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_programs_are_short_and_have_help(run: Run, path: Path) -> None:
    text = path.read_text()
    assert 20 <= len(text.splitlines()) <= (60 if path.stem == "agent" else 40)
    summary = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    assert summary in run(path.stem, "--help").stdout


def test_there_are_seven() -> None:
    names = [p.stem for p in PROGRAMS]
    assert names == [
        "agent",
        "complete_jsonl",
        "concurrent_prompts",
        "conversation",
        "file_perplexity",
        "multiple_choice",
        "stream_until",
    ]


def test_complete_jsonl_keeps_keys_and_order(run: Run, tmp_path: Path) -> None:
    given = [{"prompt": "O Romeo,", "id": 7}, {"id": 8, "prompt": "To be"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, given)) + "\n\n")
    made = [json.loads(line) for line in run("complete_jsonl", path, "--max-tokens", 5).stdout.splitlines()]
    for before, after in zip(given, made, strict=True):
        completion = after.pop("completion")
        assert completion
        assert after.pop("finish_reason") == "length"
        assert after == before


def test_concurrent_prompts_ends_each_in_time(run: Run) -> None:
    arguments = ("concurrent_prompts", "O Romeo,", "To be", "--max-tokens")
    out = run(*arguments, 6).stdout
    assert sorted(re.findall(r"^--- '(.*)' ended by length$", out, re.M)) == ["O Romeo,", "To be"]
    assert re.search(r"^To be.", out, re.M)
    assert run(*arguments, 400, "--seconds", 0.01).stdout.count("ended by time limit") == 2


def test_conversation_answers_each_line_and_ends_at_an_empty_one(run: Run) -> None:
    arguments = ("--you", "NURSE", "--other", "PETER", "--max-tokens", 12, "--seed", 1)
    out = run("conversation", *arguments, stdin="Good morrow.\nWhat news?\n\nnever read\n").stdout
    answers = re.findall(r"PETER: (.*(?:\n(?!NURSE).*)*)", out)
    assert len(answers) == 2
    assert all(answer.strip() for answer in answers)
    assert out.count("NURSE: ") == 3
    assert run("conversation", *arguments, stdin="Good morrow.\nWhat news?\n").stdout == out


def test_file_perplexity_names_the_least_likely_line(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("To be, or not to be\nqqqqzzzz xx\nGood morrow, cousin.\n")
    paths[1].write_text("My lord, I am a man\n")
    lines = run("file_perplexity", *paths).stdout.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("  least likely line: 'qqqqzzzz xx' (perplexity ")
    figures = [float(re.search(r": perplexity ([\d.]+), ", line).group(1)) for line in (lines[0], lines[2])]  # type: ignore[union-attr]
    assert figures[0] > figures[1] > 1


def test_multiple_choice_counts_what_is_right(run: Run, tmp_path: Path) -> None:
    assert run("multiple_choice").stdout.endswith("acc 1.000, acc_norm 1.000, 1 questions\n")
    path = tmp_path / "questions.jsonl"
    item = {"question": "O Romeo, Romeo! wherefore art thou", "choices": [" Romeo?", " zebra?"]}
    path.write_text("".join(json.dumps(item | {"answer": answer}) + "\n" for answer in (0, 1)))
    lines = run("multiple_choice", path).stdout.splitlines()
    assert ["-> ' Romeo?'" in line for line in lines[:2]] == [True, True]
    assert lines[2] == "acc 0.500, acc_norm 0.500, 2 questions"


@needs_smollm2
def test_agent_calls_a_tool_whose_arguments_match_its_schema(run: Run) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    out = run("agent", "What is 17 times 23?", "--model", FILES[0], "--turns", 2).stdout
    called = re.match(r"calculate\(operation='(add|subtract|multiply)', a=(\d+), b=(\d+)\) -> (-?\d+)\n", out)
    assert called or re.match(r"clock\(\) -> \d{4}-\d\d-\d\dT", out)
    assert out.count("\n") >= 2


def test_stream_until_ends_before_the_stop_string(run: Run) -> None:
    done = run("stream_until", "My lord", "--stop", " ", "--max-tokens", 30)
    assert done.stdout.startswith("My lord")
    assert " " not in done.stdout[len("My lord") :]
    assert re.search(r"^\d+ tokens; ended by (stop  |length)", done.stderr, re.M)
