"""Streams that continue when their replica ends: another replica continues after the tokens that were sent.

A token depends only on the seed, its position and the tokens before it. So the front requests the ids of the tokens in
each event, and when the replica ends, it sends the request again with these as `output_token_ids`. The client receives
one stream, with the same text as without the failure. It requests this with the header `X-Continue-Stream: 1`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from nanoinfer.protocols.fields import CHAT, COMPLETIONS, FieldError
from nanoinfer.utils.checks import show

HEADER = b"x-continue-stream"


class ContinuedStream:
    """A stream of events that may come from several replicas.

    Args:
        document: the body of the request.

    Raises:
        FieldError: its output_token_ids are no list.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        seed = document.get("seed")
        self._document = {**document, "return_token_ids": True, "seed": secrets.randbits(31) if seed is None else seed}
        given = document.get("output_token_ids") or []
        if not isinstance(given, list):
            raise FieldError(f"output_token_ids={show(given)} is not a list", "output_token_ids")
        self._token_ids = list(given)
        self._rest = b""
        self._held: list[bytes] = []
        self._id: bytes | None = None
        self._has_finished = False
        self.has_begun = False
        """Whether the status was sent."""
        self.num_events = 0
        """Events that were passed on."""

    def body(self) -> bytes:
        """Return the body of a request that continues the stream."""
        self._rest = b""  # a part of an event, which comes again, as those do that are held
        self._held.clear()
        return json.dumps({**self._document, "output_token_ids": self._token_ids}).encode()

    def receive(self, part: bytes) -> bytes:
        """Return the events that can be passed on of what was received, with one id, and note their tokens.

        A token may come as several events, of which the last has its id: they are passed on together.
        """
        *events, self._rest = (self._rest + part).split(b"\n\n")
        passed: list[bytes] = []
        for event in events:
            if self._add(event + b"\n\n"):
                passed += self._held
                self._held.clear()
        self.num_events += len(passed)
        return b"".join(passed)

    def _add(self, event: bytes) -> bool:
        """Hold an event; return whether those that are held can be passed on."""
        data = event.removeprefix(b"data: ")
        if not data.startswith(b"{"):  # [DONE]
            self._held.append(event)
            return True
        found = json.loads(data)
        token_ids: list[int] = []
        for choice in found.get("choices", ()):
            if self._has_finished:
                return False  # the replica ended after this, and before the end of the stream
            token_ids += choice.get("token_ids") or ()
            self._has_finished = choice.get("finish_reason") is not None
        self._token_ids += token_ids
        own = json.dumps(found.get("id")).encode()
        self._id = self._id or own
        self._held.append(event.replace(own, self._id, 1))
        return bool(token_ids) or self._has_finished or "error" in found


def continued_stream(scope: Scope, document: Mapping[str, Any]) -> ContinuedStream | None:
    """Return the stream of a request that has the header; None if it has not.

    Raises:
        FieldError: the request is not one for a stream of one output, or as for ContinuedStream.
    """
    if all(name != HEADER or value == b"0" for name, value in scope["headers"]):
        return None
    several = [name for name in ("n", "best_of") if document.get(name) not in (None, 1)]
    several += [name for name in ("echo", "prompt_logprobs") if document.get(name) not in (None, False)]
    prompt = document.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        several.append("prompt")
    if scope["path"] not in (COMPLETIONS, CHAT) or document.get("stream") is not True or several:
        raise FieldError(
            f"X-Continue-Stream is for streams of one output, without the prompt, of {COMPLETIONS}, {CHAT}: leave out"
            f" the header{f', or {several[0]}' if several else ''}",
            several[0] if several else "stream",
        )
    return ContinuedStream(document)
