"""The command line as a user meets it: output, exit codes, one line for every error, Ctrl-C, pipes.

What goes into the command line and what comes out of it: prompts by line, sizes, escapes, failures, numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pty
import re
import shlex
import signal
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

from helpers.models import CHARS, TINY, Run, command, make_folder, make_model, one_thread, weights_of
from nanoinfer import LLM, SamplingParams, __version__
from nanoinfer.bench.run import Plan
from nanoinfer.checkpoints import huggingface
from nanoinfer.cli import app, help
from nanoinfer.cli.generate import StructuredFlags, split_lines
from nanoinfer.cli.options import NO_FLAGS, parse_size, unescape
from nanoinfer.cli.terminal import finite_json
from nanoinfer.config import EngineConfig
from nanoinfer.errors import ResultError
from nanoinfer.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from nanoinfer.tokenizers.tokenizer import char_to_json
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.checks import field_docs


def test_generate_prints_the_text_and_nothing_else(run: Run, tiny_folder: Path) -> None:
    code, out, err = run("generate", "Go", "-m", tiny_folder, "--max-tokens", 9, "--seed", 1)
    assert (code, err) == (0, "")
    assert len(out) == 10
    code, echoed, _ = run("generate", "Go", "-m", tiny_folder, "--max-tokens", 9, "--seed", 1, "--echo")
    assert (code, echoed) == (0, "Go" + out)


def test_prompts_come_from_arguments_files_and_stdin(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Go")
    flags = ("-m", tiny_folder, "--max-tokens", 9, "--temperature", 0)
    _, text, _ = run("generate", "Go", *flags)
    assert run("generate", "--file", prompt, *flags)[1] == text
    assert run("generate", *flags, stdin=b"Go")[1] == text
    ids = run("generate", "39 15", "--token-ids", *flags)
    assert ids[0] == 0
    assert len(ids[1]) == 10


def test_several_prompts_and_samples_come_in_order(run: Run, tiny_folder: Path) -> None:
    flags = ("-m", tiny_folder, "--max-tokens", 5, "--seed", 3)
    _, out, _ = run("generate", "Go", "Ho", "--n", 2, *flags)
    blocks = out.split("--- ")[1:]
    assert [b.split("\n")[0] for b in blocks] == [
        f"prompt {i} of 2, output {k} of 2: {p!r}" for i, p in ((1, "Go"), (2, "Ho")) for k in (1, 2)
    ]
    assert blocks[2].split("\n", 1)[1] == run("generate", "Ho", *flags)[1]


def test_json_has_tokens_reasons_and_metrics(run: Run, tiny_folder: Path) -> None:
    code, out, _ = run("generate", "Go", "Hi", "-m", tiny_folder, "--max-tokens", 5, "--json", "--logprobs", 1)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["prompt"] for line in lines] == ["Go", "Hi"]
    output = lines[0]["outputs"][0]
    assert len(output["token_ids"]) == len(output["logprobs"]) == len(output["text"]) == 5
    assert output["finish_reason"] == "length"
    assert lines[0]["metrics"]["num_output_tokens"] == 5


def test_eval_prints_what_score_says(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    from nanoinfer import LLM

    text = "To be, or not to be: that is. " * 3
    (tmp_path / "t.txt").write_text(text)
    code, out, _ = run("eval", tmp_path / "t.txt", "-m", tiny_folder, "--json")
    (score,) = LLM(str(tiny_folder)).perplexity(text)
    result = json.loads(out)
    assert code == 0
    assert result["perplexity"] == pytest.approx(score.perplexity)
    assert result["num_tokens"] == len(text) - 1
    assert result["bits_per_character"] == pytest.approx(-score.log_likelihood / math.log(2) / len(text))
    assert f"perplexity {score.perplexity:.3f}" in run("eval", tmp_path / "t.txt", "-m", tiny_folder)[1]


def test_engines_lists_every_rung(run: Run) -> None:
    code, out, _ = run("engines", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows) == ["recompute", "dynamic", "static", "paged", "compiled", "cuda_graph", "native", "triton"]
    assert rows["static"]["available"] is True
    assert "cpu" in rows["static"]["devices"]
    assert rows["static"]["dtypes"] == ["float32", "bfloat16", "float16"]
    code, table, _ = run("engines")
    assert code == 0
    assert all(name in table for name in rows)


BAD = {
    "unknown model": (["generate", "a", "-m", "no such model!"], "neither built in"),
    "missing path": (["generate", "a", "-m", "./no/such/dir"], "no such file or folder"),
    "missing preset": (["generate", "a", "-m", "random:gpt5"], "preset 'gpt5' is unknown"),
    "NaN temperature": (["generate", "a", "--temperature", "nan"], "temperature=nan"),
    "top_p of 2": (["generate", "a", "--top-p", "2"], "top_p=2.0 is not a finite number in (0, 1]"),
    "negative max_tokens": (["generate", "a", "--max-tokens", "-1"], "max_tokens=-1 is not an integer >= 1"),
    "no integer": (["generate", "a", "--max-tokens", "x"], "max-tokens"),
    "no such device": (["generate", "a", "-m", "{tiny}", "--device", "cuda:42"], "device='cuda:42'"),
    "no such engine": (["generate", "a", "-m", "{tiny}", "--engine", "warp"], "engine='warp' is unknown"),
    "unknown flag": (["generate", "a", "--temprature", "1"], "--temprature"),
    "abbreviated flag": (["generate", "a", "--temper", "1"], "--temper"),
    "prompts twice": (["generate", "Go", "-p", "Ho"], "'Go' (an argument) and 'Ho' (--prompt)"),
    "unknown command": (["generat"], "generat"),
    "missing file": (["generate", "-f", "no.txt"], "no.txt cannot be read"),
    "bad ids": (["generate", "1 x", "--token-ids"], "'1 x' is not a list of integers"),
    "bad bias": (["generate", "a", "--logit-bias", "5"], "'5' is not TOKEN_ID=BIAS"),
    "too long": (["generate", "a" * 33, "-m", "{tiny}"], "overflow='slide'"),
    "eval missing": (["eval", "no.txt"], "no.txt cannot be read"),
    "eval short": (["eval", "{one}", "-m", "{tiny}"], "cannot be scored"),
    "train no data": (["train", "--out", "{tmp}/o"], "--data"),
    "train missing data": (["train", "--data", "no.txt", "--out", "{tmp}/o"], "no.txt cannot be read"),
    "train short data": (["train", "--data", "{one}", "--out", "{tmp}/o"], "a window needs block_size + 1"),
    "train bad lr": (["train", "--data", "{one}", "--out", "{tmp}/o", "--learning-rate", "inf"], "learning_rate=inf"),
    "train distill nothing": (
        ["train", "--data", "{text}", "--out", "{tmp}/o", "--distill", "{tiny}", "--distill-tokens", "0"],
        "distill_tokens=0 is not an integer in [1, ",
    ),
    "train distill too far": (
        ["train", "--data", "{text}", "--out", "{tmp}/o", "--distill", "{tiny}", "--block-size", "64"],
        "block_size=64 is more than the 32 of distill=",
    ),
    "train unwritable": (["train", "--data", "{text}", "--out", "{one}/sub"], "cannot be written"),
    "train over a model": (
        ["train", "--data", "{text}", "--out", "{tiny}"],
        "contains config.json, but no training state",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, tiny_folder: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 100)
    names = {"tiny": tiny_folder, "tmp": tmp_path, "one": tmp_path / "one.txt", "text": tmp_path / "text.txt"}
    before = sorted(tmp_path.rglob("*"))
    arguments, message = BAD[case]
    code, out, err = run(*[a.format(**names) for a in arguments])
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("nanoinfer: error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written


def test_help_names_every_field_with_its_line(run: Run) -> None:
    for name, classes in (
        ("generate", (SamplingParams, EngineConfig, StructuredFlags)),
        ("train", (TrainConfig,)),
        ("eval", (EngineConfig,)),
        ("bench", (Plan,)),
    ):
        code, out, _ = run(name, "--help")
        assert code == 0
        words = " ".join(out.split())
        skipped = {"best_of", *NO_FLAGS} - {"logit_bias"}
        for cls in classes:
            docs = field_docs(cls)
            for field in (f for f in dataclasses.fields(cls) if f.name not in skipped):
                assert f"--{field.name.replace('_', '-')}" in out
                assert docs[field.name].split(".")[0][:20] in words, field.name


def test_help_has_topics_and_examples_in_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = {name: app.load_command(name) for name in app.COMMANDS}
    for name, known in commands.items():
        code, out, _ = run(name, "--help")
        assert code == 0
        assert all(len(line) <= 80 for line in out.splitlines()), name
        assert "..." not in re.sub(r"\[PROMPT\]\.\.\.|(PROMPT|FILE|MODEL)\.\.\.", "", out)  # nothing is cut
        assert f"\n  Examples:\n    nanoinfer {name}" in out
        titles = [line.removesuffix(":") for line in out.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
        assert set(titles) <= {"Arguments", "Options", *help.TOPICS.values()}
        assert all(p.opts[0] in out for p in known.params if p.opts[0].startswith("-")), name
    code, out, _ = run("--help")
    assert "..." not in out.replace("[ARGS]...", "")


def test_examples_are_command_lines_that_parse() -> None:
    commands = {name: app.load_command(name) for name in app.COMMANDS}
    for name, known in commands.items():
        for line in known.epilog.splitlines()[2:]:
            words = shlex.split(line.split("|")[-1 if "| nanoinfer" in line else 0], comments=True)
            assert words[:2] == ["nanoinfer", name]
            known.make_context(name, words[2:])


def test_defaults_give_readable_text(run: Run, tiny_folder: Path) -> None:
    from nanoinfer import LLM

    llm, flags = LLM(str(tiny_folder)), ("-m", tiny_folder, "--max-tokens", 30)
    assert (SamplingParams().temperature, SamplingParams().top_k) == (1.0, 0)  # vLLM's

    def same(*more: object, **params: Any) -> bool:
        (output,) = llm.generate("Go", SamplingParams(max_tokens=30, **params))
        return run("generate", "Go", *flags, *more)[1] == output.outputs[0].text + "\n"

    for seed in range(3):
        assert same("--seed", seed, seed=seed, temperature=0.8, top_k=50)
        assert same("--seed", seed, "--temp", 1, "--top-k", 0, seed=seed)
    assert same("--temperature", 0, temperature=0)
    assert same("--temp", 0, "--top-k", 1, temperature=0)


def test_flags_that_are_not_given_are_the_models(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from nanoinfer import LLM

    folder = make_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 2.0, "top_p": 0.9, "max_new_tokens": 7}')
    llm = LLM(str(folder))
    for flags, params in (
        ((), {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "max_tokens": 7}),
        (("--temp", "1", "--max-tokens", "4"), {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_tokens": 4}),
        (("--generation-config", "vllm"), {"temperature": 0.8, "top_k": 50, "max_tokens": 128}),
    ):
        (output,) = llm.generate("Go", SamplingParams(seed=3, **params))  # type: ignore[arg-type]
        code, out, err = run("generate", "Go", "-m", folder, "--seed", 3, *flags)
        assert (code, out) == (0, output.outputs[0].text + "\n")
        assert ("generation_config.json (temperature=2.0" in err + caplog.text) is (
            flags[:1] != ("--generation-config",)
        )
        caplog.clear()


def test_flags_of_text_and_exclusions(run: Run, tiny_folder: Path) -> None:
    from nanoinfer import LLM

    llm = LLM(str(tiny_folder))
    (whole,) = llm.generate("Go", SamplingParams(temperature=0, max_tokens=9))
    text = whole.outputs[0].text
    flags = ("generate", "Go", "-m", tiny_folder, "--temp", 0, "--max-tokens", 9)
    found = run(*flags, "--stop", text[2], "--include-stop-str-in-output")[1]
    assert found == text[: text.index(text[2]) + 1] + "\n"
    params = SamplingParams(temperature=0, max_tokens=9, bad_words=(text[0],), allowed_token_ids=(3, 9, 12))
    (expected,) = llm.generate("Go", params)
    words = ("--bad-words", text[0].replace("\n", r"\n"), "--allowed-token-ids", 3, "--allowed-token-ids", 9)
    assert run(*flags, *words, "--allowed-token-ids", 12)[1] == expected.outputs[0].text + "\n"
    (cut,) = llm.generate("o", SamplingParams(temperature=0, max_tokens=9))
    assert run(*flags, "--truncate-prompt-tokens", 1, "--no-skip-special-tokens")[1] == cut.outputs[0].text + "\n"


def test_aliases(run: Run, tiny_folder: Path) -> None:
    flags = ("-m", tiny_folder, "--max-tokens", 5, "--seed", 1)
    expected = run("generate", "Go", "Ho", "--n", 2, "--temperature", 0.5, *flags)
    assert expected[0] == 0
    assert run("generate", "-p", "Go", "--prompt", "Ho", "-n", 2, "--temp", 0.5, *flags) == expected


def test_version_and_no_arguments(run: Run) -> None:
    assert run("--version")[:2] == (0, f"{__version__}\n")
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out == run("--help")[1]
    assert out.startswith("Usage: nanoinfer ")


def test_the_line_of_a_command_is_that_of_its_docstring() -> None:
    for name, (_, line) in app.COMMANDS.items():
        assert app.load_command(name).help.split("\n")[0] == line, name


def test_help_is_instant_and_imports_nothing_but_click() -> None:
    code = (
        "import sys; from nanoinfer.cli.app import run; run(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stderr.split())
    assert "click" in modules
    assert not modules & {"torch", "numpy", "tokenizers", "huggingface_hub", "rich", "importlib.metadata"}
    assert not modules & {f"nanoinfer.cli.{entry.partition(':')[0]}" for entry, _ in app.COMMANDS.values()}


def test_ctrl_c_leaves_the_text_and_exits_130(tiny_folder: Path) -> None:
    arguments = ["-m", tiny_folder, "--max-tokens", 10**6, "--overflow", "slide", "--n", "2", "--seed", "1"]
    child = subprocess.Popen(
        command("generate", "Go", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=one_thread()
    )
    assert child.stdout is not None
    first = b""
    while len(first) < 100:  # both texts have begun
        first += os.read(child.stdout.fileno(), 100)
    child.send_signal(signal.SIGINT)
    rest, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == b""
    out = (first + rest).decode()
    assert out.startswith("--- output 1 of 2: 'Go'\n")
    assert len(out.split("--- output 2 of 2: 'Go'\n")[1]) > 1  # the second's text is not lost


def test_a_reader_that_goes_away_ends_it_quietly(tiny_folder: Path) -> None:
    child = subprocess.Popen(
        command("generate", "Go", "-m", tiny_folder, "--max-tokens", 10**6, "--overflow", "slide"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=one_thread(),
    )  # fmt: skip
    assert child.stdout is not None
    os.read(child.stdout.fileno(), 10)
    child.stdout.close()
    assert child.wait(timeout=60) == 0
    assert child.stderr is not None
    assert child.stderr.read() == b""


GREEDY = ("--max-tokens", 5, "--temperature", 0)


def prompts_of(out: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in out.splitlines()]


@pytest.mark.parametrize(
    "given, expected", [(b"Go\n", "Go"), (b"Go", "Go"), (b"Go\n\n", "Go\n"), (b"Go\r\n", "Go"), (b"\nGo", "\nGo")]
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
