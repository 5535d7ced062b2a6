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

from nanoinfer.cli.chat_input import messages, reader
from nanoinfer.cli.terminal import complain, visible
from nanoinfer.entrypoints.conversation import Conversation
from nanoinfer.entrypoints.streams import TextStream
from nanoinfer.errors import NanoinferError
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
clears the line."""


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

    def _print(self, answer: TextStream) -> None:
        """Print an answer as it is generated, and its tokens per second on stderr."""
        try:
            with _deferred_interrupts() as interrupted:
                for piece in answer:
                    print(visible(piece), end="", flush=True)
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
