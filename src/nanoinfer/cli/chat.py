"""`nanoinfer chat`: a conversation in the terminal."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, config_flag, flags, llm_config, of_model, option
from nanoinfer.cli.terminal import complain, drop, reading_stdin, visible
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, escaped, reason
from nanoinfer.outputs import ContentDelta, ReasoningDelta
from nanoinfer.sampling_params import CHAT_MAX_TOKENS, COMMAND_DEFAULTS, SamplingParams
from nanoinfer.utils.files import parse_json, read_text

if TYPE_CHECKING:
    from nanoinfer.entrypoints.chat import AnswerStream, Conversation

_SKIPPED = ("best_of", "n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", *NO_FLAGS)
QUOTES = '"""'
_MARKS = {True: "> ", False: "... "}  # before the first and the further lines of a message
HELP = r"""/system TEXT   set the system message (without TEXT: show it)
/regenerate    generate the last answer again
/reset         remove all messages except the system message
/save FILE     write the messages, one JSON object a line; FILE must not exist
/load FILE     replace the messages by those of such a file
/help          this list
/exit          end the conversation, as Ctrl-D does
A line that ends with a backslash continues on the next line. Lines between
triple quotes are one message. A line that begins with a space is not a
command. Ctrl-C ends an answer and keeps its text so far; at the prompt it
clears the line."""


@command("chat")
@argument("model", metavar="MODEL", help="A model with a chat template: as for `generate`.")
@config_flag("tokenizer")
@option("system", "System message.")
@config_flag("chat_template")
@option(
    "enable_thinking",
    "Whether the model shall reason; for templates that have the variable. [default: as the template has it]",
)
@option("reasoning_effort", "none, low, medium or high; for templates that have it.")
@option("thinking_token_budget", "Most tokens of the reasoning, after which its end is forced. [default: any]")
@config_flag("generation_config")
@flags(SamplingParams, "params", skip=_SKIPPED, defaults={**COMMAND_DEFAULTS, "max_tokens": CHAT_MAX_TOKENS})
@llm_config("speculation", "engine")
def chat(
    system: str | None,
    chat_template: Path | None,
    enable_thinking: bool | None,
    reasoning_effort: str | None,
    thinking_token_budget: int | None,
    config: LLMConfig,
    params: SamplingParams,
) -> None:
    """Hold a conversation with a model that has a chat template.

    Examples:
        nanoinfer chat smollm2                  # /help lists the commands
        nanoinfer chat path/to/model --system "Be brief." --temp 0.5
        nanoinfer chat shakespeare --chat-template turns.jinja --engine native
        cat questions.txt | nanoinfer chat path/to/model    # one turn a line
    """
    options: dict[str, Any] = {
        "enable_thinking": enable_thinking, "reasoning_effort": reasoning_effort,
        "thinking_token_budget": thinking_token_budget,
    }  # fmt: skip
    if chat_template is not None:
        options["chat_template"] = read_text(chat_template, "a chat template")

    from nanoinfer.entrypoints.llm import LLM

    llm = LLM.from_config(config)
    params = of_model(params, llm)
    conversation = llm.conversation(system, **options)
    session = Session(conversation, params)
    if sys.stdin.isatty():
        print(
            f"{escaped(llm.model_name)} on {llm.engine_name}, {llm.model.weight_format}. /help lists the commands.\n"
            f"Answers end after at most {_bound(params, llm.config.block_size)}.",
            file=sys.stderr,
        )
    if not session.run():
        raise click.exceptions.Exit(1)


def _bound(params: SamplingParams, block_size: int) -> str:
    """Return what bounds the length of an answer."""
    assert params.max_tokens is not None  # the flag has a default
    if params.overflow == "stop" and block_size < params.max_tokens:
        return f"{block_size} tokens (the context length; --max-tokens ends them earlier)"
    return f"{params.max_tokens} tokens (--max-tokens changes it)"


class Session:
    """A conversation with a user.

    Args:
        conversation: without an answer that is being generated.
        params: of each answer.
    """

    def __init__(self, conversation: Conversation, params: SamplingParams) -> None:
        self._conversation, self._params = conversation, params
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/regenerate": self._regenerate,
            "/reset": lambda rest: conversation.reset(),
            "/save": self._save,
            "/load": self._load,
            "/help": lambda rest: print(HELP, file=sys.stderr),
        }

    def run(self) -> bool:
        """Answer until the input ends or /exit; return whether nothing failed."""
        succeeded = True
        for message in messages(reader()):
            name, _, rest = message.partition(" ")
            if name == "/exit":
                break
            try:
                if name.startswith("/"):
                    self._command(name, rest.strip())
                elif message.strip():
                    self._print(self._conversation.send(message, self._params))
            except NanoinferError as e:
                complain(str(e))
                succeeded = False
        return succeeded

    def _command(self, name: str, rest: str) -> None:
        if (command := self._commands.get(name)) is None:
            raise NanoinferError(
                f"{name[:40]} is not a command: /help lists them; begin the line with a space to send it as it is"
            )
        command(rest)

    def _shown(self, answer: AnswerStream) -> Iterator[str]:
        """Yield what is printed of an answer, in pieces."""
        if answer.answers.plain:
            yield from map(visible, answer)
            return
        between = ""
        for delta in answer.deltas():
            if isinstance(delta, ContentDelta):
                yield between + visible(delta.text)
                between = ""
            elif isinstance(delta, ReasoningDelta) and sys.stdout.isatty():
                yield f"\x1b[2m{visible(delta.text)}\x1b[0m"
                between = "\n"

    def _print(self, answer: AnswerStream) -> None:
        """Print an answer as it is generated, and its tokens per second on stderr."""
        try:
            with _deferred_interrupts() as interrupted:
                for piece in self._shown(answer):
                    print(piece, end="", flush=True)
                    if interrupted():
                        break
        except KeyboardInterrupt:  # the second one, before the first was noticed
            pass
        finally:
            print(flush=True)
        self._conversation.stop()
        output = self._conversation.output
        assert output is not None
        metrics = output.metrics
        num, num_prompt = metrics.num_output_tokens, metrics.num_prompt_tokens
        speed = f", {1 / metrics.tpot_sec:.1f} tokens/s" if metrics.tpot_sec else ""
        new = num_prompt - output.num_cached_tokens
        note = f"[{num} tokens{speed}; prompt: {new} new of {num_prompt} tokens, {metrics.ttft_sec:.2f} s]"
        print(f"\x1b[2m{note}\x1b[0m" if sys.stderr.isatty() else note, file=sys.stderr, flush=True)

    def _regenerate(self, rest: str) -> None:
        params = self._params
        if params.seed is not None:  # the same seed would give the same answer
            params = self._params = dataclasses.replace(params, seed=(params.seed + 1) % 2**64)
        self._print(self._conversation.regenerate(params))

    def _system(self, text: str) -> None:
        messages = self._conversation.messages
        system = messages[:1] if messages and messages[0]["role"] == "system" else []
        if text:
            self._conversation.messages = [{"role": "system", "content": text}, *messages[len(system) :]]
        else:
            print(visible(system[0]["content"] if system else "(no system message)"), file=sys.stderr)

    def _save(self, name: str) -> None:
        lines = [json.dumps(m, ensure_ascii=False) for m in self._conversation.messages]
        try:
            with open(_path(name), "x", encoding="utf-8", errors="surrogatepass") as f:
                f.write("".join(f"{line}\n" for line in lines))
        except (OSError, ValueError) as e:  # ValueError: a null byte
            raise NanoinferError(f"{name} cannot be written: {reason(e)}: give the name of a new file") from None
        print(f"{visible(name)}: {len(lines)} messages", file=sys.stderr)

    def _load(self, name: str) -> None:
        text = read_text(_path(name), "a list of messages")
        lines = [line for line in text.split("\n") if line.strip()]
        self._conversation.messages = [parse_json(line, f"{name} is not one JSON object a line") for line in lines]
        print(f"{visible(name)}: {len(lines)} messages", file=sys.stderr)


def _path(name: str) -> Path:
    if not name:
        raise NanoinferError("a file name is missing: /save FILE or /load FILE")
    return Path(name).expanduser()


@contextmanager
def _deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """In this context the first Ctrl-C only sets what the yielded function returns; the second one raises.

    An answer that ends between two steps leaves its tokens in the KV cache. An interrupt inside a step resets it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = threading.Event()

    def note(signum: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def messages(read: Callable[[bool], str]) -> Iterator[str]:
    r"""Yield the messages that lines make; several lines are one message after a backslash or between triple quotes.

        Hello                      "Hello"
        one \                      "one \ntwo"
        two
        \"""def f():               "def f():\n    pass"
            pass\"""

    Args:
        read: returns the next line; the argument is whether a message begins with it. Raises EOFError at the end.
    """
    while True:
        try:
            line = read(True)
        except EOFError:
            return
        try:
            if line.startswith(QUOTES):
                line = line.removeprefix(QUOTES)
                while not line.endswith(QUOTES):
                    line += "\n" + read(False)
                line = line.removesuffix(QUOTES).removesuffix("\n")
            else:
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + read(False)
        except EOFError:  # in the middle of a message, which ends here
            line = line.removesuffix("\\")
        except KeyboardInterrupt:  # drops the lines so far
            print(file=sys.stderr)
            continue
        yield line.removeprefix("\n")


def reader() -> Callable[[bool], str]:
    """Return a function that reads a line of standard input."""
    if not sys.stdin.isatty():
        return _read_pipe
    with suppress(ImportError):  # with it, input() has history and editing
        import readline  # noqa: F401
    return _Terminal()


def _read_pipe(first: bool) -> str:
    with reading_stdin():
        line = sys.stdin.buffer.readline().decode("utf-8")
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


class _Terminal:
    """Reads lines after a prompt. Ctrl-C clears the line; twice in a row, it is the end."""

    def __init__(self) -> None:
        self._interrupted = False

    def __call__(self, first: bool) -> str:
        while True:
            try:
                with reading_stdin():
                    line = self._input(_MARKS[first])
            except EOFError:
                print(file=sys.stderr)
                raise
            except KeyboardInterrupt:
                if not first:
                    raise
                print("\n(Ctrl-C again, or /exit, ends the conversation)" if not self._interrupted else "",
                      file=sys.stderr)  # fmt: skip
                if self._interrupted:
                    raise EOFError from None
                self._interrupted = True
                continue
            self._interrupted = False
            return line

    @staticmethod
    def _input(mark: str) -> str:
        if sys.stdout.isatty():
            return input(mark)
        try:  # stdout is a file: no prompt in it
            print(mark, end="", file=sys.stderr, flush=True)
        except OSError:
            drop(sys.stderr)
        return input()
