"""Chat templates: turn a list of messages into the text of a prompt, by the Jinja template that comes with a model.

A template is a program from an untrusted file. Jinja's sandbox hides Python's internals from it, but bounds neither
time nor memory: one filter or one multiplication can take any amount of both inside a single call, where no hook of
the interpreter runs. So a child process renders it (chat_template_worker.py), under limits of the operating system. It
is started at the first rendering (about 60 ms), keeps the compiled template, and is replaced if a limit ended it.

Covered: what `apply_chat_template` of transformers gives a template (docs/chat.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError, escaped, reason, show

MAX_TEMPLATE = 1 << 20  # characters; those of today have up to 30,000
MAX_OUTPUT = 4 << 20  # characters
MEMORY_BYTES = 512 << 20
CPU_SEC = 2.0
_WORKER = Path(__file__).with_name("chat_template_worker.py")


class ChatTemplate:
    """A chat template. Thread-safe: one rendering at a time.

    Args:
        source: the Jinja template.
        special_tokens: variables of each rendering: {"bos_token": "<s>", ...}.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if not isinstance(source, str) or not source:
            raise NanoinferError(f"chat_template={show(source)} is not a Jinja template")
        if len(source) > MAX_TEMPLATE:
            raise NanoinferError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE}")
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.shown: dict[Any, bool] = {}  # what it shows of some messages, kept for `inputs.chat`
        setup = {"template": source, "max_output": MAX_OUTPUT, "memory_bytes": MEMORY_BYTES, "cpu_sec": CPU_SEC}
        from nanoinfer.utils.limited_process import LimitedProcess  # which imports subprocess

        self._worker = LimitedProcess(_WORKER, ("jinja2", "markupsafe"), setup, "the chat template cannot be rendered")

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text of a conversation.

        Args:
            messages: for the template.
            variables: of the template, such as add_generation_prompt; they replace special tokens of the same name.

        Raises:
            NanoinferError: the template refuses the messages, has an error, or exceeds a limit; or a value cannot be
                given to a template.
        """
        names = {"messages": messages, "tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            request = json.dumps(names, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as e:
            raise NanoinferError(f"the messages cannot be given to the chat template: {reason(e)}") from None
        answer = self._worker.ask(request)
        if (text := answer.get("text")) is not None:
            return str(text)
        what = "refuses the messages" if answer["refused"] else "cannot be rendered"
        raise NanoinferError(f"the chat template {what}: {escaped(answer['error'])}")
