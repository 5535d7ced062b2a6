"""What goes into the command line and what comes out of it: prompts by line, sizes, escapes, failures, numbers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from helpers.models import CHARS, TINY, Run, make_folder, make_model, weights_of
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import huggingface
from nanoinfer.cli.generate import split_lines
from nanoinfer.cli.options import parse_size, unescape
from nanoinfer.cli.terminal import finite_json
from nanoinfer.errors import ResultError
from nanoinfer.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from nanoinfer.tokenizers.tokenizer import char_to_json

GREEDY = ("--max-tokens", 5, "--temperature", 0)


def prompts_of(out: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in out.splitlines()]


@pytest.mark.parametrize(
    "given, expected",
    [(b"Go\n", "Go"), (b"Go", "Go"), (b"Go\n\n", "Go\n"), (b"Go\r\n", "Go"), (b"\nGo", "\nGo")],
)
def test_stdin_loses_one_newline(run: Run, tiny_folder: Path, given: bytes, expected: str) -> None:
    code, out, err = run("generate", "-m", tiny_folder, *GREEDY, "--json", stdin=given)
    assert (code, err) == (0, "")
    assert prompts_of(out) == [expected]


def test_a_file_is_a_prompt_as_it_is(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Go\n")
    assert prompts_of(run("generate", "-f", tmp_path / "p.txt", "-m", tiny_folder, *GREEDY, "--json")[1]) == ["Go\n"]


def test_lines_makes_a_prompt_of_each_line(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    flags = ("--lines", "-m", tiny_folder, *GREEDY, "--json")
    assert prompts_of(run("generate", *flags, stdin=b"Go\n\nHo\r\nNo")[1]) == ["Go", "", "Ho", "No"]
    (tmp_path / "p.txt").write_text("Go\nHo\n")
    assert prompts_of(run("generate", "As it is", "-f", tmp_path / "p.txt", *flags)[1]) == ["As it is", "Go", "Ho"]
    assert "--lines needs --file or prompts on stdin" in run("generate", "Go", *flags)[2]
    assert "there is no line" in run("generate", *flags, stdin=b"")[2]
    code, out, err = run("generate", *flags, stdin=b"Go\n" * 16 + b"a" * 33 + b"\n" + b"Go\n" * 35)
    assert (code, out) == (2, "")
    assert err.startswith("nanoinfer: error: prompt 17 of 52: ")


def test_only_newlines_end_a_line() -> None:
    assert split_lines("a\x0bb\u2028c\rd\n\ne\r\n") == ["a\x0bb\u2028c\rd", "", "e"]
    assert split_lines("") == []
    assert split_lines("\n") == [""]


@pytest.mark.parametrize(
    "text, size",
    [("512", 512), ("512MB", 512_000_000), ("1GiB", 1 << 30), ("1.5 kB", 1500), ("0.5kib", 512), ("2tb", 2 * 10**12),
     ("7B", 7), ("-1", -1)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1 apple", "1G", "1e9", "nan", "1.0000001kB", "\u0661MB", "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a"):
        parse_size(text)


def test_sizes_reach_the_engine(run: Run, tiny_folder: Path) -> None:
    flags = ("-m", tiny_folder, "--engine", "static", *GREEDY)
    code, out, _ = run("generate", "Go", *flags, "--kv-cache-memory", "1MiB")
    assert (code, out) == run("generate", "Go", *flags, "--kv-cache-memory", 1 << 20)[:2]
    code, _, err = run("generate", "Go", *flags, "--kv-cache-memory", "0.001MB")
    assert code == 2
    assert "kv_cache_memory=1,000 bytes is too little" in err
    assert "'5 apples' is not a size: give bytes, or" in run("generate", "Go", "--graph-memory", "5 apples")[2]


def test_escapes() -> None:
    assert unescape(r"\n\r\t\\n\x41\u4e2d") == "\n\r\t\\nA\u4e2d"
    assert unescape("plain") == "plain"
    for bad in (r"\d", r"\x4", r"\u12", "end\\"):
        with pytest.raises(click.BadParameter, match="a backslash begins"):
            unescape(bad)


def test_stop_understands_escapes(run: Run, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", replace(TINY, vocab_size=2), chars="\na")
    code, out, _ = run("generate", "a", "-m", folder, "--stop", r"\n", "--seed", 1, "--json", "--max-tokens", 30)
    assert code == 0
    output = json.loads(out)["outputs"][0]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", "\n")


# Numbers that are not finite ------------------------------------------------------------------------------------


@pytest.fixture
def overflowing(tmp_path: Path) -> Path:
    gpt = make_model()
    gpt.transformer.wte.weight.data.fill_(torch.finfo(torch.float32).max)  # type: ignore[union-attr]
    huggingface.save(weights_of(gpt), tmp_path / "overflow", char_to_json(CHARS))
    return tmp_path / "overflow"


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_eval_prints_no_nan(run: Run, overflowing: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "t.txt").write_text("To be, or not to be")
    code, out, err = run("eval", tmp_path / "t.txt", "-m", overflowing, "--engine", "static", *flags)
    assert (code, out) == (1, "")
    assert err.startswith("nanoinfer: error: ")
    assert err.count("\n") == 1
    assert "t.txt" in err


def test_json_has_no_name_for_nan() -> None:
    assert finite_json({"a": [1.5, None]}) == '{"a": [1.5, null]}'
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ResultError, match="is not finite"):
            finite_json([{"a": bad}])


def test_a_roofline_or_profile_or_bench_that_is_not_finite_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("nanoinfer.cli.measure.answer", lambda model, question, device: {"step_sec": float("inf")})
    for flags in ((), ("--json",)):
        code, out, err = run("roofline", "gpt2", "--device", "t4", *flags)
        assert (code, out) == (1, "")
        assert "is not finite" in err


def test_a_training_that_diverges_fails(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("To be, or not to be. " * 100)
    sizes = "--n-layer 1 --n-head 1 --n-embd 4 --block-size 8 --batch-size 1 --eval-interval 1 --max-steps 4"
    flags = ("--learning-rate", 999, "--grad-clip", "1e6", "--warmup-steps", 0, "--weight-decay", 1000)
    code, out, err = run("train", "--data", tmp_path / "t.txt", "--out", tmp_path / "o", *sizes.split(), *flags)
    assert (code, out) == (2, "")
    assert "loss is nan at step 2: use a lower learning_rate" in err


# Requests that failed ------------------------------------------------------------------------------------------


class OneFails:
    """An LLM whose second prompt fails after a character."""

    tokenizer = SimpleNamespace()
    model, requests = SimpleNamespace(), SimpleNamespace(merge=lambda params, given: params)

    @classmethod
    def from_config(cls, config: Any) -> OneFails:
        return cls()

    def stream_outputs(self, prompts: list[str], params: SamplingParams) -> tuple[list[int], Iterator[Any]]:
        return [7, 8, 9], iter(self._items(prompts))

    @staticmethod
    def _items(prompts: list[str]) -> Iterator[Any]:
        for i, prompt in enumerate(prompts):
            bad = i == 1
            error = "logits are not finite at token 1:\n\x1b[31m" if bad else None
            reason = "error" if bad else "length"
            yield Delta(7 + i, 0, f"<{prompt}>", reason, error=error)
            completion = CompletionOutput(0, f"<{prompt}>", [1], reason, error=error)
            yield RequestOutput(7 + i, prompt, [1], [completion], 0, 0, RequestMetrics(1, 1, 0.1, None, 0.1))


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_failed_request_is_a_line_on_stderr(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:  # fmt: skip
    monkeypatch.setattr("nanoinfer.entrypoints.llm.LLM", OneFails)
    code, out, err = run("generate", "a", "b", "c", *flags)
    assert code == 1
    assert err == "nanoinfer: error: prompt 2 of 3: logits are not finite at token 1:\\n\\x1b[31m\n"
    if flags:
        assert [json.loads(line)["outputs"][0]["finish_reason"] for line in out.splitlines()] == [
            "length", "error", "length",
        ]  # fmt: skip
    else:
        assert [line for line in out.splitlines() if not line.startswith("---")] == ["<a>", "<b>", "<c>"]


# The terminal ----------------------------------------------------------------------------------------------------


def test_engines_fits_a_terminal(run: Run) -> None:
    lines = run("engines")[1].splitlines()
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80


def test_perplexity_tells_how_far_it_is(tiny_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    LLM(str(tiny_folder), engine="static").perplexity("a" * 60, stride=16, progress=lambda *at: seen.append(at))
    assert seen == [(33, 60), (49, 60), (60, 60)]


def test_eval_draws_a_bar_on_a_terminal_alone(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("To be, or not to be. " * 40)
    at_once = "from nanoinfer import cli; from nanoinfer.utils import progress; progress.DELAY_SEC = 0; cli.main()"
    arguments = [sys.executable, "-c", at_once, "eval", str(tmp_path / "t.txt"), "-m", str(tiny_folder)]
    master, slave = pty.openpty()
    env = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=slave, env=env)
    os.close(slave)
    drawn = b""
    while True:
        try:
            drawn += (piece := os.read(master, 4096))
        except OSError:  # the other end is closed
            break
        if not piece:
            break
    os.close(master)
    assert child.communicate(timeout=60)[0].startswith(b"perplexity ")
    assert b" of 840" in drawn
    done = subprocess.run(arguments, capture_output=True, env=env, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("values", "expected"),
    [(["a"], ["A", "A"]), (["m2=b", "a"], ["A", "B"]), (["m1=a"], ["A", None]), ([], [None] * 2)],
)
def test_chat_templates_of_models(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], expected: list[Any]
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("nanoinfer.cluster.front.serve", lambda configs, *rest: served.extend(configs))
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).write_text(name.upper())
    flags = [flag for value in values for flag in ("--chat-template", value)]
    assert run("serve", "m1", "m2", "--port", 0, *flags)[0] == 0
    assert [config.chat_template for config in served] == expected
    code, _, err = run("serve", "m1", "m2", "--port", 0, "--chat-template", "m3=a")
    assert (code, "m3=a" in err) == (2, True)
