"""`nanoinfer chat`: answers to a pipe, commands, multi-line input, and a terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.chat import chat_folder
from helpers.models import Run, check_messages
from helpers.tools import tools_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.cli.chat import _bound, messages
from nanoinfer.cli.terminal import visible

Call = Callable[..., tuple[int, str, str]]
OPTIONS = ("--temperature", "0", "--max-tokens", "6")
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("command") / "tiny")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path, folder: Path) -> Call:
    """Run `nanoinfer chat FOLDER ARGUMENTS` with lines on standard input."""
    monkeypatch.chdir(tmp_path)

    def chat(*arguments: str, stdin: str | bytes = "", model: str = str(folder)) -> tuple[int, str, str]:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        return run("chat", model, *OPTIONS, *arguments, stdin=raw)

    return chat


def answers(folder: Path, *contents: str, system: str | None = None) -> str:
    conversation = LLM(str(folder)).conversation(system)
    return "".join(visible("".join(conversation.send(content, PARAMS))) + "\n" for content in contents)


def test_a_pipe_is_one_turn_a_line(call: Call, folder: Path) -> None:
    code, out, err = call(stdin="Hi\n\nagain\r\n")
    assert (code, out) == (0, answers(folder, "Hi", "again"))
    notes = err.splitlines()
    assert len(notes) == 2
    pattern = r"\[6 tokens, [\d.]+ tokens/s; prompt: (\d+) new of (\d+) tokens, \d+\.\d\d s\]"
    (first, second) = (re.fullmatch(pattern, note) for note in notes)
    assert first
    assert first[1] == first[2]
    assert second
    assert int(second[1]) < int(second[2]) - int(first[2])


def test_system_and_template(call: Call, folder: Path, tmp_path: Path) -> None:
    assert call("--system", "Be kind.", stdin="Hi")[1] == answers(folder, "Hi", system="Be kind.")
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}")
    expected = LLM(str(folder)).generate("Hi", PARAMS)[0].outputs[0].text
    assert call("--chat-template", "own.jinja", stdin="Hi\n")[1] == visible(expected) + "\n"


def test_options_of_reasoning(call: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }} {{ reasoning_effort }} {{ enable_thinking }}")
    options = ("--chat-template", "own.jinja", "--reasoning-effort", "low")
    for given, rendered in (((), "True"), (("--no-enable-thinking",), "False")):
        expected = LLM(str(folder)).generate(f"Hi low {rendered}", PARAMS)[0].outputs[0].text
        assert call(*options, *given, stdin="Hi")[1] == visible(expected) + "\n"
    (tmp_path / "own.jinja").write_text("{{ raise_exception('no') }}")  # which does not tell what it reads
    assert "no" in call("--chat-template", "own.jinja", "--no-enable-thinking", stdin="Hi")[2]
    assert call("--thinking-token-budget", "-1")[0] == 2


def test_a_budget_ends_the_reasoning(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    model = str(tools_folder(tmp_path / "tools"))
    options = ("--enable-thinking", "--thinking-token-budget", "3", "--max-tokens", "20")
    assert call(*options, stdin="Hi\n/save a.jsonl\n", model=model)[0] == 0
    conversation = LLM(model).conversation(enable_thinking=True, thinking_token_budget=3)
    list(conversation.send("Hi", SamplingParams(temperature=0, max_tokens=20)))
    saved = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert saved == conversation.messages
    assert saved[1]["content"]


def test_commands(call: Call, folder: Path, tmp_path: Path) -> None:
    lines = ["/system Be kind.", "/system", "Hi", "/regenerate", "again", "/save a.jsonl", "/reset", "Hi", "/help",
             "/load a.jsonl", "/regenerate", "/exit", "never read"]  # fmt: skip
    code, out, err = call(stdin="\n".join(lines))
    assert code == 0
    hi, again = answers(folder, "Hi", system="Be kind."), answers(folder, "Hi", "again", system="Be kind.")
    assert out.startswith(hi + hi + again.removeprefix(hi) + hi)
    saved = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [m["role"] for m in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[1] == {"role": "user", "content": "Hi"}
    assert "a.jsonl: 5 messages" in err
    assert "Be kind.\n" in err
    for command in ("/system", "/regenerate", "/reset", "/save", "/load", "/help", "/exit", '"""', "backslash"):
        assert command in err or command == '"""'
    check_messages(err)
    assert all(len(line) <= 80 for line in err.splitlines())


def test_regenerate_with_a_seed_gives_another_answer(call: Call) -> None:
    out = call("--temperature", "1.5", "--seed", "3", stdin="Hi\n/regenerate\n/regenerate\n")[1].splitlines()
    assert len(set(out)) > 1


@pytest.mark.parametrize(
    "lines, message",
    [
        ("/nothing", "/nothing is not a command: /help lists them"),
        ("/regenerate", "there is no answer to generate again"),
        ("/save", "a file name is missing"),
        ("/save old.jsonl", "old.jsonl cannot be written: File exists"),
        ("/save no/such/folder.jsonl", "cannot be written"),
        ("/save \0", "cannot be written"),
        ("/load missing.jsonl", "missing.jsonl cannot be read"),
        ("/load old.jsonl", "old.jsonl is not one JSON object a line"),
        ("/load odd.jsonl", "message=3 is not a dict"),
        ("x" * 400, "the maximum context length is 256"),
        ("/system \x1b[2J\n/\x1b[2J", "is not a command"),
    ],
)
def test_what_fails_is_one_line_and_the_conversation_goes_on(
    call: Call, folder: Path, tmp_path: Path, lines: str, message: str
) -> None:
    (tmp_path / "old.jsonl").write_text("{")
    (tmp_path / "odd.jsonl").write_text("3\n")
    code, out, err = call(stdin=lines + "\nHi\n")
    assert code == 1
    assert out.count("\n") == 1
    assert out == answers(folder, "Hi") or "system" in lines
    assert message in err
    assert err.count("nanoinfer: error: ") == 1
    check_messages(err)
    assert (tmp_path / "old.jsonl").read_text() == "{"


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((), {"model": "shakespeare"}, "model 'shakespeare' has no chat template: give one by chat_template="),
        (("--chat-template", "missing.jinja"), {}, "missing.jinja cannot be read as a chat template"),
        (("--chat-template", "/dev/null"), {}, "is a pipe or a device"),
        ((), {"stdin": b"\xff\n"}, "stdin is not UTF-8 text"),
        (("--overflow", "slide", "--slide-stride", "0"), {}, "slide_stride"),
        (("--n", "2"), {}, "No such option '--n'"),
    ],
)
def test_errors_before_the_first_answer(call: Call, arguments: Any, options: Any, message: str) -> None:
    code, out, err = call(*arguments, **options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_several_lines() -> None:
    def read(text: str) -> list[str]:
        lines = iter(text.split("\n"))

        def next_line(first: bool) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        return list(messages(next_line))

    assert read("a\nb") == ["a", "b"]
    assert read("a \\\nb\\\n\nc") == ["a \nb\n", "c"]
    assert read('"""def f():\n    pass"""\nb') == ["def f():\n    pass", "b"]
    assert read('"""\na\\\n"""') == ["a\\"]
    assert read('"""one line"""') == ["one line"]
    assert read('"""\nno end') == ["no end"]
    assert read("no end\\") == ["no end"]


def test_generated_text_cannot_command_the_terminal() -> None:
    kept = (
        "a\tb\n\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u0627\u0644\u200f \u05d0\ufe0f \u3000 \ue000 \ufffd"
    )
    assert visible(kept) == kept
    evil = "\x1b[2J\x07\x08\r\x9b31m\x00\x7f\u202e\ud800"
    assert visible(evil) == r"\x1b[2J\x07\x08\r\x9b31m\x00\x7f\u202e\ud800"


# A terminal --------------------------------------------------------------------------------------------------


class Terminal:
    """`nanoinfer chat` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "80"}
            os.execve(sys.executable, [sys.executable, "-m", "nanoinfer", "chat", *arguments], environment)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C, once the program waits: readline does not see a signal between its prompt and its wait."""
        time.sleep(0.5)
        self.type("\x03")

    def wait_for(self, pattern: str) -> str:
        """Return what is printed up to a match, which is searched in what is new since the last call."""
        end = time.monotonic() + 60
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self._fd], [], [], 1)[0]:
                try:
                    self.seen += os.read(self._fd, 1 << 16).decode(errors="replace")
                except OSError:  # the program has ended
                    found = re.search(pattern, self.seen)
                    assert found, self.seen
                    break
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def end(self) -> int:
        """Wait for the end and return the exit code."""
        end = time.monotonic() + 30
        while (status := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < end
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self._fd, 1 << 16).decode(errors="replace")
                except OSError:
                    time.sleep(0.05)
        self.pid = 0
        return os.waitstatus_to_exitcode(status[1])

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Callable[..., Terminal]]:
    opened = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(str(folder), "--temperature", "0", *arguments))
        opened[-1].wait_for("> ")
        return opened[-1]

    yield start
    for t in opened:
        t.close()


def test_a_terminal(terminal: Callable[..., Terminal], folder: Path) -> None:
    t = terminal("--max-tokens", "6")
    t.type("Hi\r")
    shown = t.wait_for(r"tokens/s; prompt: \d+ new of \d+ tokens, [\d.]+ s\]\x1b\[0m\s+> ")
    assert "\x1b[2m[6 tokens, " in shown
    assert "Traceback" not in shown
    t.type("again \\\r")
    t.wait_for(r"\.\.\. ")
    t.type("and again\r")
    t.wait_for(r"tokens/s.*\s+> ")
    t.type("\x04")  # Ctrl-D
    assert t.end() == 0


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ({"max_tokens": 1024}, "256 tokens (the context length; --max-tokens ends them earlier)"),
        ({"max_tokens": 256}, "256 tokens (--max-tokens changes it)"),
        ({"max_tokens": 1024, "overflow": "slide"}, "1024 tokens (--max-tokens changes it)"),
    ],
)
def test_what_bounds_an_answer(arguments: dict[str, Any], bound: str) -> None:
    assert _bound(SamplingParams(**arguments), 256) == bound


def test_interrupts_at_the_prompt(terminal: Callable[..., Terminal]) -> None:
    t = terminal("--max-tokens", "4")
    t.type("half a line")
    t.wait_for("half a line")
    t.interrupt()
    t.wait_for(r"Ctrl-C again.*\s+> ")
    t.type("Hi\r")
    t.wait_for(r"tokens/s.*\s+> ")
    t.interrupt()
    t.wait_for(r"Ctrl-C again.*\s+> ")
    t.interrupt()
    assert t.end() == 0
    assert "Traceback" not in t.seen


def test_an_interrupt_ends_the_answer_and_keeps_it(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    t = terminal("--max-tokens", "100000", "--overflow", "slide", "--ignore-eos")
    t.type("Hi\r")
    t.wait_for(r"Hi\s+\S+")
    time.sleep(0.3)
    t.type("\x03")
    t.wait_for(r"tokens/s.*\s+> ")
    t.type(f"/save {tmp_path}/said.jsonl\r")
    t.wait_for(r"2 messages\s+> ")
    t.type("/exit\r")
    assert t.end() == 0
    assert "Traceback" not in t.seen
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert said[0] == {"role": "user", "content": "Hi"}
    assert len(said[1]["content"]) > 0
