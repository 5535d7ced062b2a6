"""No traceback reaches a user: hostile command lines, streams, environments and interrupts.

Every option of every sub-command meets every hostile value, in this process; streams, environments and interrupts need
processes of their own. The nightly cases are all pairs and 200 interrupts; the others a sample of them.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.models import TINY, Run, check_messages, make_folder
from nanoinfer.cli import app

DIGITS = "9" * 5000
VALUES = (
    "", " ", "-1", "0", "1", "nan", "-inf", "1e999", "9" * 400, DIGITS, "0x10", "\u0661", "\x1b[31mred\x07\n\x9b2J",
    "\udcff\udc80", "a" * 100_000, "../" * 2000, "/dev/null", "-", "--", "=", "None", "random:" + "\u202egpt2",
    "wide:" * 3000 + "shakespeare:gpt2", "cuda:" + DIGITS, "1" + "e" * 3000, "9GiB" * 500, "\\x", "{}", "%s%n",
)  # fmt: skip
PAIRS = [
    (command, option, value)
    for command in app.COMMANDS
    for option in [
        *(max(p.opts, key=len) for p in app.load_command(command).params if p.opts[0].startswith("-")),
        "<argument>",
    ]
    for value in VALUES
]
SHARED = 24  # groups: a failure names one of them and the case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile")
    make_folder(path / "tiny")
    (path / "text.txt").write_text("To be, or not to be. " * 100)
    (path / "prompts.jsonl").write_text('{"prompt": "Go"}\n{"prompt": 1}\n')
    (path / "turns.jinja").write_text("{{ messages[-1].content }}")
    return path


def base(command: str, folder: Path, out: Path) -> list[str]:
    """The cheapest command line of each sub-command, before a hostile option overrides a part of it."""
    tiny, text = str(folder / "tiny"), str(folder / "text.txt")
    train = "--max-steps 1 --n-layer 1 --n-head 1 --n-embd 4 --block-size 8 --batch-size 1 --eval-tokens 8".split()
    return {
        "generate": ["Go", "--model", tiny, "--max-tokens", "2"],
        "chat": [tiny, "--chat-template", str(folder / "turns.jinja"), "--max-tokens", "2"],
        "batch": [str(folder / "prompts.jsonl"), "-o", f"{out}.jsonl", "--model", tiny, "--max-tokens", "2"],
        "pack": [tiny, "--quantization", "int8", "--output", str(out / "packed")],
        "export": [tiny, f"{out}.gguf", "--no-tokenizer"],
        "models": [],
        "engines": [],
        "eval": [text, "--model", tiny, "--stride", "32"],
        "bench": ["--batch", "1"],
        "serve": [tiny, "--port", "0"],
        "profile": ["Go", "--model", tiny, "--max-tokens", "2"],
        "explain": ["Go", "--model", tiny, "-o", f"{out}.html", "--max-tokens", "2", "--device-limits", "t4"],
        "roofline": ["gpt2", "--device", "t4"],
        "train": ["--data", text, "--out", str(out / "model"), *train],
    }[command]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return partial(run, stdin=b"Go")


@pytest.mark.parametrize("num_pairs", [16, pytest.param(len(PAIRS), marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("group", range(SHARED))
def test_hostile_options(
    group: int, num_pairs: int, call: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from nanoinfer.checkpoints import hub

    def offline(name: str) -> Path:
        raise app.NanoinferError(f"model {name[:50]!r} is not on the Hub")

    monkeypatch.setattr(hub, "find", offline)
    monkeypatch.setattr("nanoinfer.cli.measure.run_plan", lambda plan, command: ([], False))  # measuring takes seconds
    monkeypatch.setattr("nanoinfer.server.run.serve", lambda llm, config, bound: llm.shutdown())
    monkeypatch.setattr("nanoinfer.cluster.front.serve", lambda *_: None)  # --idle-unload 1e9 would serve for ever
    mine = PAIRS[group::SHARED]
    mine = random.Random(group).sample(mine, min(num_pairs, len(mine)))
    for i, (command, option, value) in enumerate(mine):
        if option in ("--engine", "--trace", "--sampler") and command in ("profile", "explain"):
            continue
        hostile = ["--", value] if option == "<argument>" else [f"{option}={value}"]
        arguments = [command, *base(command, folder, tmp_path / str(i)), *hostile]
        try:
            code, _, err = call(*arguments)
        except BaseException as e:
            raise AssertionError(f"{command} {option}={value[:60]!r} (of {len(value)} characters)") from e
        assert code in (0, 1, 2), (command, option, value[:60])
        check_messages(err)
        if code:
            assert err.count("nanoinfer: error: ") == 1, (command, option, value[:60], err)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seed", DIGITS], "--seed"),
        (["--logit-bias", f"{DIGITS}=1"], "is not TOKEN_ID=BIAS"),
        (["--logit-bias", f"1={DIGITS}"], "logit_bias[1]=inf"),
        (["--kv-cache-memory", DIGITS], "is not a size"),
        (["--speculate-k", DIGITS], "is neither auto nor an integer in [1, 64]"),
        (["--token-ids", DIGITS], "is not a list of integers"),
        (["--model", "wide:" * 3000 + "shakespeare" + ":gpt2" * 3000], "widened at most twice"),
    ],
)
def test_numbers_and_names_without_end(call: Callable[..., Any], folder: Path, arguments: Any, message: str) -> None:
    code, out, err = call("generate", *(() if "--token-ids" in arguments else ("Go",)), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    check_messages(err)


def test_what_comes_from_outside_is_escaped_in_messages(call: Callable[..., Any], tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\nnanoinfer: done\r\x9b31m\u202e"
    for arguments in (
        ["generate", "Go", "--model", evil],
        ["generate", "--file", evil],
        ["generate", "Go", "--device", evil],
        ["generate", f"--{evil}"],
        [evil],
        ["eval", evil],
        ["roofline", evil],
    ):
        code, _, err = call(*arguments)
        assert code == 2
        assert err.count("\n") == 1
        assert "\\x1b" in err
        check_messages(err)
    folder = make_folder(tmp_path / "m")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"\\u001b[31m\\nfield": 1,', 1))
    code, _, err = call("generate", "Go", "--model", str(folder), "--max-tokens", "1")
    check_messages(err)


@pytest.mark.slow
def test_logs_are_escaped_and_other_packages_warnings_are_silent() -> None:
    code = (
        "import logging, warnings; from nanoinfer.cli import terminal; terminal.prepare();"
        "import torch, torch.utils.cpp_extension;"
        "logging.getLogger('torch.utils.cpp_extension').warning('CUDA_HOME');"
        "logging.getLogger('huggingface_hub').warning('token'); warnings.warn('deprecated');"
        "logging.getLogger('nanoinfer').warning('dropped %s', '\\x1b[31m\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), check=True)
    assert done.stderr == b"nanoinfer: dropped \\x1b[31m\\n\n"


# Streams ------------------------------------------------------------------------------------------------------


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | changes


def shell(line: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Run `nanoinfer ARGUMENTS` with the redirections in `line`."""
    script = f'"$0" -m nanoinfer "$@" {line}'
    return subprocess.run(
        ["sh", "-c", script, sys.executable, *arguments],
        capture_output=True, env=environment(**changes), timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


ROOFLINE = ("roofline", "gpt2", "--device", "t4")


@pytest.mark.parametrize(
    "line, arguments, code, message",
    [
        ("<&-", ("generate",), 2, "stdin cannot be read: Bad file descriptor"),
        (">&-", ROOFLINE, 1, "standard output cannot be written: Bad file descriptor"),
        (">&-", (*ROOFLINE, "--json"), 1, "standard output cannot be written: Bad file descriptor"),
        (">&-", ("--help",), 1, "standard output cannot be written: Bad file descriptor"),
        (">/dev/full", ROOFLINE, 1, "standard output cannot be written: No space left on device"),
        (">/dev/full", ("--version",), 1, "standard output cannot be written: No space left on device"),
        (">/dev/full", ("generate", "Go", "--max-tokens", "2"), 1, "No space left on device"),
        ("2>&-", ("eval", "no such"), 2, ""),
        ("2>/dev/full", ("eval", "no such"), 2, ""),
        ("2>&-", ROOFLINE, 0, ""),
        ("<&- >&- 2>&-", ROOFLINE, 1, ""),
    ],
)
@pytest.mark.slow_if(lambda line, arguments: line[0] == "2" or "--json" in arguments or " " in line)
def test_streams(line: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = shell(line, *arguments)
    err = done.stderr.decode()
    assert done.returncode == code, err
    assert err == (err and f"nanoinfer: error: {err.partition('error: ')[2]}")
    assert err.count("\n") == bool(message)
    assert message in err
    check_messages(err)


ASCII = ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})


@pytest.mark.parametrize("changes", ASCII, ids=["PYTHONIOENCODING", "LC_ALL"])
@pytest.mark.slow_if(lambda changes: "LC_ALL" in changes)
def test_characters_that_stdout_cannot_show_are_escaped(changes: dict[str, str], tmp_path: Path) -> None:
    chars = "\u00e9\u4e2d\U0001f600"
    folder = make_folder(tmp_path / "m", replace(TINY, vocab_size=3), chars=chars)
    (tmp_path / "prompt.txt").write_text(chars, encoding="utf-8")
    done = shell("", "generate", "-f", str(tmp_path / "prompt.txt"), "-m", str(folder), "--max-tokens", "5", **changes)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rb"(\\xe9|\\u4e2d|\\U0001f600){5}\n", done.stdout)
    assert done.stderr == b""


@pytest.mark.parametrize(
    "changes",
    [
        {"NANOINFER_ISA": DIGITS},
        {"NANOINFER_ISA": "\x1b[31m\n"},
        {
            "TERM": "dumb",
            "COLUMNS": "1",
            "HOME": "/nonexistent",
            "XDG_CACHE_HOME": "/dev/full",
            "TMPDIR": "/nonexistent",
        },
        {"COLUMNS": DIGITS, "TERM": "\x1b[31m", "PYTHONIOENCODING": "utf-16", "NO_COLOR": "1", "FORCE_COLOR": "1"},
    ],
    ids=lambda c: "_".join(c),
)
@pytest.mark.slow_if(lambda changes: changes.get("NANOINFER_ISA") == DIGITS or "NO_COLOR" in changes)
def test_environments(changes: dict[str, str], folder: Path) -> None:
    done = shell("", "generate", "Go", "-m", str(folder / "tiny"), "--max-tokens", "2", **changes)
    assert done.returncode in (0, 2)
    check_messages(done.stderr.decode())
    if "NANOINFER_ISA" not in changes:
        assert done.returncode == 0, done.stderr


# Interrupts ---------------------------------------------------------------------------------------------------

MARKED = "import sys, os; from nanoinfer.cli import program; sys.argv[0] = 'nanoinfer'; os.write(1, b'.'); program()"


def interrupt(delay: float, *arguments: str) -> tuple[int, str]:
    """Send Ctrl-C `delay` seconds after the call of `program`; return the exit code and stderr."""
    child = subprocess.Popen(
        [sys.executable, "-c", MARKED, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.read(1) == b"."
    time.sleep(delay)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    return child.returncode, err.decode()


@pytest.mark.parametrize("i", range(200))
@pytest.mark.slow_if(lambda i: i >= 2)
@pytest.mark.nightly_if(lambda i: i >= 6)
def test_an_early_interrupt_is_quiet(i: int, folder: Path) -> None:
    arguments = ROOFLINE if i % 3 else ("generate", "Go", "-m", str(folder / "tiny"), "--max-tokens", "2")
    code, err = interrupt(random.Random(i).uniform(0.02, 0.4 if i % 3 else 2.0), *arguments)
    assert code in (130, -signal.SIGINT, 0), err  # by a signal while Python shuts down; or done before it came
    assert err == ""


SWALLOWED = {
    "import": """
    try: signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt: raise ImportError('cannot load module more than once per process') from None""",
    "importlib": """
    class Finder:
        def find_spec(*_):
            try: signal.getsignal(signal.SIGINT)(signal.SIGINT, sys._getframe(1))
            except KeyboardInterrupt: print("printed by an extension", file=sys.stderr)
    sys.meta_path.insert(0, Finder)
    try: import nothing
    except ImportError: time.sleep(30)""",
    "callback": """
    ref = weakref.ref(object_ := type('A', (), {})(), lambda _: signal.raise_signal(signal.SIGINT))
    del object_
    time.sleep(30)
    return 0""",
}


@pytest.mark.parametrize("where", SWALLOWED)
def test_an_interrupt_that_others_swallow_is_quiet_too(where: str) -> None:
    code = "import signal, sys, time, weakref; from nanoinfer.cli import app, main\ndef run(arguments):"
    done = subprocess.run(
        [sys.executable, "-c", code + SWALLOWED[where] + "\napp.run = run; main()"],
        capture_output=True,
        timeout=25,  # before the call that it interrupts has ended
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"")
