"""The loop of `nanoinfer chat`: messages and commands in, answers out."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoinfer.cli.chat_input import messages, reader
from nanoinfer.cli.terminal import complain, visible
from nanoinfer.entrypoints.conversation import AnswerStream, Conversation
from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import ContentDelta, ReasoningDelta
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.files import parse_json, read_text, reason

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
clears the line. After calls of tools, each message is the result of one."""


class Session:
    """A conversation with a user.

    Args:
        conversation: without an answer that is being generated.
        params: of each answer.
        hide_reasoning: whether reasoning is not shown on a terminal, either.
    """

    def __init__(self, conversation: Conversation, params: SamplingParams, *, hide_reasoning: bool = False) -> None:
        self._conversation, self._params = conversation, params
        self._dims_reasoning = not hide_reasoning and sys.stdout.isatty()
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
                    self._send(message)
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

    def _send(self, message: str) -> None:
        """Send a message of the user, or the result of the next call that has none; after the last one, answer."""
        found = self._conversation.messages
        if (call := _open_call(found)) is None:
            return self._print(self._conversation.send(message, self._params))
        result = {"role": "tool", "tool_call_id": call["id"], "content": message}
        if _open_call([*found, result]) is not None:
            self._conversation.messages = [*found, result]
        else:  # a choice that requires calls would never end them
            self._print(self._conversation.send([result], self._params, tool_choice=None))

    def _shown(self, answer: AnswerStream) -> Iterator[str]:
        """Yield what is printed of an answer, in pieces."""
        if answer.answers.plain:
            yield from map(visible, answer)
            return
        between, begun = "", False
        for delta in answer.deltas():
            if isinstance(delta, ReasoningDelta):
                if self._dims_reasoning:
                    yield f"\x1b[2m{visible(delta.text)}\x1b[0m"
                    between = "\n"
                continue
            if isinstance(delta, ContentDelta):
                yield between + visible(delta.text)
            elif delta.name is not None:
                yield f"{between if not begun else chr(10)}call {delta.name}: "
            else:
                yield visible(delta.arguments)
            between, begun = "", True

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
        self._note(note)
        if (call := _open_call(self._conversation.messages)) is not None:
            self._note(f"[give the result of each call, beginning with that of {call['function']['name']}]")

    @staticmethod
    def _note(note: str) -> None:
        print(f"\x1b[2m{note}\x1b[0m" if sys.stderr.isatty() else note, file=sys.stderr, flush=True)

    def _regenerate(self, rest: str) -> None:
        params = self._params
        if params.seed is not None:  # the same seed would give the same answer
            params = self._params = dataclasses.replace(params, seed=(params.seed + 1) % 2**64)
        self._print(self._conversation.regenerate(params))

    def _system(self, text: str) -> None:
        found = self._conversation.messages
        system = found[:1] if found and found[0]["role"] == "system" else []
        if text:
            self._conversation.messages = [{"role": "system", "content": text}, *found[len(system) :]]
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
        found = [parse_json(line, f"{name} is not one JSON object a line") for line in text.split("\n") if line.strip()]
        self._conversation.messages = found
        print(f"{visible(name)}: {len(found)} messages", file=sys.stderr)


def _open_call(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first call at the end of a conversation that has no result."""
    done = set()
    for message in reversed(messages):
        if message["role"] != "tool":
            open_calls = (call for call in message.get("tool_calls", ()) if call.get("id") not in done)
            return next(open_calls, None)
        done.add(message.get("tool_call_id"))
    return None


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
