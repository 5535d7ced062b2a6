"""A batch that is killed, interrupted or out of disk space, and started again, gives the undisturbed run's bytes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.models import make_folder, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.batch import files as batch_output
from nanoinfer.batch.files import FileOutput, LineReader
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.utils.progress import ProgressBar

Run = Callable[..., tuple[int, str]]
OUT, STATE = Path("out.jsonl"), Path("out.jsonl.state")
SETTINGS = {"model": "tiny", "stop": ("a",)}


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> Run:
    """Run `nanoinfer batch ARGUMENTS` on the tiny model in an empty folder: exit code and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, model: object = folder) -> tuple[int, str]:
        return run("batch", *arguments, "-m", model)[::2]

    return call


def write_lines(path: Path, num_lines: int) -> None:
    """Write lines of several lengths, some of them bad, with blank lines between."""
    rng = random.Random(0)
    lines = []
    for i in range(num_lines):
        line = json.dumps(
            {"prompt": "To be or not"[: rng.randint(1, 12)], "max_tokens": rng.choice([1, 5, 20]), "id": i}
        )
        lines.append("{" if i % 7 == 3 else f"\n{line}" if i % 5 == 1 else line)
    path.write_text("\n".join(lines))  # the last one without a newline


def generate(llm: LLM, out: Path, source: Path) -> None:
    """Run a batch to its end, continuing what is there, on a model that is loaded already."""
    reader, output = LineReader([str(source)]), FileOutput(out, SETTINGS, overwrite=False)
    try:
        output.skip(reader)
        output.start()
        options = BatchOptions(SamplingParams(max_tokens=3, temperature=0.9), seed=7)
        runner = BatchRunner(llm, options)
        runner.run(reader, output, ProgressBar("batch", False))
    finally:
        output.close()


# Killed -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_moments(folder: Path, tmp_path: Path) -> None:
    """SIGKILL, 10 times while records are written and twice before."""
    write_lines(tmp_path / "in.jsonl", 700)
    command = [sys.executable, "-m", "nanoinfer", "batch", "-m", str(folder), "--seed", "3", str(tmp_path / "in.jsonl")]
    done = subprocess.run([*command, str(tmp_path / "whole.jsonl")], capture_output=True, check=False, timeout=100)
    assert done.returncode == 1
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert whole.count(b"\n") == 700
    out, rng = tmp_path / "out.jsonl", random.Random(1)
    slowly = [*command, "--max-num-seqs", "1"]  # the same records: none of these may end before it is killed
    targets = sorted(rng.randrange(1, int(0.6 * len(whole))) for _ in range(10))
    num_killed = 0
    for target in [0, *targets[:5], 0, *targets[5:]]:
        child = subprocess.Popen([*slowly, str(out)], stderr=subprocess.DEVNULL)
        while target and child.poll() is None and (not out.exists() or out.stat().st_size < target):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01 if target else 0.6))
        child.kill()
        num_killed += child.wait() == -signal.SIGKILL
    assert num_killed >= 10
    assert out.read_bytes() != whole
    done = subprocess.run([*command, str(out)], capture_output=True, check=False, timeout=100)
    assert done.returncode == 1
    assert out.read_bytes() == whole
    assert done.stderr.decode().splitlines()[-1].startswith("nanoinfer: error: 100 of 700 lines failed")


class Killed(BaseException):
    """The process is gone: nothing that would write to the disk has an effect from here on."""


@contextmanager
def dying(at: int) -> Iterator[list[str]]:
    """Let the `at`-th operation on a file fail, a write after half of its bytes, and all later ones."""
    done: list[str] = []
    operations = {name: getattr(os, name) for name in ("write", "fsync", "ftruncate", "replace")}

    def failing(name: str) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            done.append(name)
            if len(done) == at and name == "write":
                operations[name](arguments[0], arguments[1][: len(arguments[1]) // 2])
            if len(done) >= at:
                raise Killed
            return operations[name](*arguments)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in operations:
            patch.setattr(os, name, failing(name))
        yield done


def test_killed_at_each_operation_on_a_file(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_output, "CHECKPOINT_SEC", 0.0)
    write_lines(source := tmp_path / "in.jsonl", 10)
    with dying(10**9) as operations:
        generate(llm, tmp_path / "whole.jsonl", source)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert {"write", "fsync", "ftruncate", "replace"} == set(operations)
    assert whole.count(b"\n") == operations.count("write") == 10
    for at in range(1, len(operations) + 1):
        out = tmp_path / f"{at}.jsonl"
        for again in (at, 1 + at // 2):  # killed twice
            with suppress(Killed), dying(again):
                generate(llm, out, source)
        generate(llm, out, source)
        assert out.read_bytes() == whole, (at, operations[at - 1])
        assert not out.with_name(f"{out.name}.state.tmp").exists()


def test_what_a_loss_of_power_leaves_is_removed(llm: LLM, tmp_path: Path) -> None:
    write_lines(source := tmp_path / "in.jsonl", 12)
    generate(llm, tmp_path / "whole.jsonl", source)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for rest in (b"\0" * 5000, b'{"line": 1', b'{"line": 99, "id": null}\n{"line"', b'{"id": "batch_req_1', b"{"):
        (out := tmp_path / "out.jsonl").write_bytes(whole + rest)
        (tmp_path / "out.jsonl.state").write_bytes((tmp_path / "whole.jsonl.state").read_bytes())
        generate(llm, out, source)
        assert out.read_bytes() == whole


def test_a_full_disk_ends_it_and_it_continues(llm: LLM, tmp_path: Path) -> None:
    write_lines(source := tmp_path / "in.jsonl", 12)
    generate(llm, tmp_path / "whole.jsonl", source)
    out, write, num_writes = tmp_path / "out.jsonl", os.write, 0

    def full(fd: int, content: Any) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 6:
            return write(fd, content[:10])  # a short write, then the error
        if num_writes > 6:
            raise OSError(28, "No space left on device")
        return write(fd, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        refuses(lambda: generate(llm, out, source), "out.jsonl cannot be written: No space left on device")
    assert out.read_bytes().count(b"\n") == 5
    assert out.read_bytes().endswith(b"}\n")
    generate(llm, out, source)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_written_and_says_how_to_continue(folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 300)
    command = [sys.executable, "-m", "nanoinfer", "batch", "-m", str(folder)]
    for name, how in (
        ("out.jsonl", "run the same command again to continue"),
        ("-", "this output cannot be continued"),
    ):
        child = subprocess.Popen(
            [*command, "--max-num-seqs", "1", "in.jsonl", name],  # slow, so that it does not end before the signal
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out = tmp_path / "out.jsonl"
        assert child.stdout is not None
        if name == "-":
            child.stdout.readline()
        while name != "-" and (not out.exists() or out.stat().st_size < 10_000):
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 130
        found, _, rest = err.decode().partition(" lines: ")
        assert (found.rstrip("0123456789,"), rest) == ("nanoinfer: interrupted after ", f"{how}\n")
    num_lines = json.loads((tmp_path / "out.jsonl.state").read_text())["checkpoint"]["num_records"]
    assert out.read_bytes().count(b"\n") == num_lines < 300
    done = subprocess.run([*command, "in.jsonl", "out.jsonl"], cwd=tmp_path, capture_output=True, check=False)
    assert done.stderr.decode().startswith(f"nanoinfer: out.jsonl continues after {num_lines:,} lines\n")
    assert out.read_bytes().count(b"\n") == 300


# What is continued is checked ---------------------------------------------------------------------------------


@pytest.fixture
def made(run: Run) -> bytes:
    """Write in.jsonl and its complete out.jsonl; return the latter's content."""
    Path("in.jsonl").write_text('{"prompt": "Go"}\n{"prompt": "Ho"}\n[]\n')
    assert run("in.jsonl", OUT, "--max-tokens", 2)[0] == 1
    return OUT.read_bytes()


def test_a_complete_batch_loads_no_model_and_a_longer_input_continues_it(
    run: Run, made: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("nanoinfer.core.build.build_core", None)
        code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert (code, OUT.read_bytes()) == (1, made)
    assert err.startswith(
        "nanoinfer: out.jsonl is complete after 3 lines\nnanoinfer: error: 1 of 3 lines failed: see error in their"
        " records; first in.jsonl, line 3: the line []"
    )
    with open("in.jsonl", "a") as f:
        f.write('{"prompt": "Hi"}\n')
    code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert err.startswith("nanoinfer: out.jsonl continues after 3 lines\n")
    longer = OUT.read_bytes()
    assert longer.startswith(made)
    assert longer.count(b"\n") == 4
    assert run("in.jsonl", "new.jsonl", "--max-tokens", 2)[0] == 1
    assert Path("new.jsonl").read_bytes() == longer


def test_options_that_do_not_change_the_records_may_change(run: Run, made: bytes) -> None:
    more = ("--threads", 1, "--max-num-seqs", 3, "--kv-cache-memory", "64MB")
    assert run("in.jsonl", OUT, "--max-tokens", 2, *more)[1].startswith("nanoinfer: out.jsonl is complete")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-tokens", "3"], "was made with max_tokens=2, not 3"),
        (["--max-tokens", "2", "--seed", "1"], "was made with seed=0, not 1"),
        (["--max-tokens", "2", "--stop", "a"], "was made with stop=[], not ['a']"),
        (["--max-tokens", "2", "--quantization", "int8"], "was made with quantization=None, not 'int8'"),
        (["--max-tokens", "2", "--draft", "self:1"], "was made with draft=None, not 'self:1'"),
        (["--max-tokens", "2", "--tokenizer", "shakespeare"], "was made with tokenizer=None, not 'shakespeare'"),
    ],
)
def test_other_options_are_refused(run: Run, made: bytes, arguments: list[str], message: str) -> None:
    code, err = run("in.jsonl", OUT, *arguments)
    assert (code, OUT.read_bytes()) == (2, made)
    remedy = "give another output, or replace it by --overwrite"
    assert err == f"nanoinfer: error: out.jsonl {message}: {remedy}\n"


def test_another_model_is_refused_and_overwrite_replaces(run: Run, made: bytes, tmp_path: Path) -> None:
    other = make_folder(tmp_path / "other" / "tiny", seed=1)  # of the same name and size
    code, err = run("in.jsonl", OUT, "--max-tokens", 2, model=other)
    assert (code, OUT.read_bytes()) == (2, made)
    assert err.startswith("nanoinfer: error: out.jsonl was made with model='tiny (")
    assert "--overwrite" in err
    assert run("in.jsonl", OUT, "--max-tokens", 2, "--overwrite", model=other)[0] == 1
    replaced = OUT.read_bytes()
    assert replaced != made
    assert replaced.count(b"\n") == 3
    assert "is complete" in run("in.jsonl", OUT, "--max-tokens", 2, model=other)[1]


@pytest.mark.parametrize("content", ['{"prompt": "Gr"}\n{"prompt": "Ho"}\n[]\n', '{"prompt": "Go"}\n', ""])
def test_another_input_is_refused(run: Run, made: bytes, content: str) -> None:
    Path("in.jsonl").write_text(content)
    code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert (code, OUT.read_bytes()) == (2, made)
    assert "out.jsonl was made from another input: its first 3 lines have changed: give another output" in err


@pytest.mark.parametrize("change", ["foreign tail", "another byte", "shorter", "a foreign file"])
def test_a_changed_output_is_refused(run: Run, made: bytes, change: str) -> None:
    OUT.write_bytes(
        {
            "foreign tail": made + b"my notes\n",
            "another byte": made.replace(b'"line": 2', b'"line": 3'),
            "shorter": made[:-1],
            "a foreign file": b"x" * len(made) * 2,
        }[change]
    )
    before = OUT.read_bytes()
    code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert (code, OUT.read_bytes()) == (2, before)
    assert err.startswith("nanoinfer: error: out.jsonl was changed by another program: ")


@pytest.mark.parametrize(
    "state",
    [
        "",
        "[]",
        "{}",
        "[" * 10_000,
        '{"format": "nanoinfer-batch/1", "settings": {}, "checkpoint": {"num_records": "1"}}',
    ],
)
def test_a_malformed_state_is_refused(run: Run, made: bytes, state: str) -> None:
    STATE.write_text(state)
    code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert (code, OUT.read_bytes(), err.count("\n")) == (2, made, 1)
    assert "out.jsonl.state" in err


def test_an_output_without_a_state_is_replaced_with_overwrite_only(run: Run, made: bytes) -> None:
    STATE.unlink()
    code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert (code, OUT.read_bytes()) == (2, made)
    assert "out.jsonl exists and was not written by this command: give another output, or replace it by" in err
    assert run("in.jsonl", OUT, "--max-tokens", 2, "--overwrite")[0] == 1
    assert OUT.read_bytes() == made
    OUT.write_bytes(b"")  # an empty file is no loss, whatever batch has the state beside it
    assert run("in.jsonl", OUT, "--max-tokens", 2, "--seed", 4)[0] == 1
    assert OUT.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("out", [None, b""])
@pytest.mark.parametrize("state", [b"mine", b'{"format": "mine"}'])
def test_a_file_at_the_place_of_the_state_is_replaced_with_overwrite_only(
    run: Run, made: bytes, out: bytes | None, state: bytes
) -> None:
    OUT.unlink()
    if out is not None:
        OUT.write_bytes(out)
    STATE.write_bytes(state)
    code, err = run("in.jsonl", OUT, "--max-tokens", 2)
    assert (code, STATE.read_bytes(), OUT.exists() and OUT.read_bytes()) == (2, state, out is not None and out)
    remedy = "give another output, or replace it by --overwrite"
    assert err == f"nanoinfer: error: out.jsonl.state exists and was not written by this command: {remedy}\n"
    assert run("in.jsonl", OUT, "--max-tokens", 2, "--overwrite")[0] == 1
    assert OUT.read_bytes() == made


def test_two_runs_at_once_are_refused(run: Run, made: bytes) -> None:
    with open(OUT, "rb+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for more in ((), ("--overwrite",)):
            code, err = run("in.jsonl", OUT, "--max-tokens", 2, *more)
            assert (code, err.count("\n")) == (2, 1)
            assert "out.jsonl is being written by another process" in err
    assert OUT.read_bytes() == made


def test_standard_input_continues_when_it_is_given_again(
    run: Run, made: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path("in.jsonl").read_bytes()
    for lines, code in ((content, 1), (b"", 2), (content + b'{"prompt": "Hi"}', 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        assert run("-", OUT, "--max-tokens", 2)[0] == code
    assert OUT.read_bytes().startswith(made)
    assert OUT.read_bytes().count(b"\n") == 4
