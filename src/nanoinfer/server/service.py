"""What the routes share: the model, its names, and how a request's prompts become requests of `AsyncLLM`."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoinfer.checkpoints.load import builtin_names
from nanoinfer.entrypoints.async_llm import AsyncLLM
from nanoinfer.entrypoints.async_streams import AsyncOutputStream
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.errors import NanoinferError
from nanoinfer.protocols import messages, output, responses
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES, unknown_model
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.protocols.shared import Reply
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.config import ServerConfig
from nanoinfer.server.http import Bodies
from nanoinfer.server.limits import Quotas, check_logprobs
from nanoinfer.server.metrics import Metrics
from nanoinfer.utils.workers import Workers

log = logging.getLogger("nanoinfer.server")
SHAPES = {**output.SHAPES, RESPONSES: responses.SHAPE, MESSAGES: messages.SHAPE}
"""Of the routes that generate."""
MAX_LEFT_OUT = 64
"""Kinds of things that requests have and the model is not told, each of which a line of the log names once."""
MAX_TOKENS = 16
"""OpenAI's default of max_tokens for completions. A chat's is the model's max_new_tokens, else the context length."""


class Service:
    """A served model.

    Args:
        llm: generates.
        config: of the server.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.names = served_names(llm.llm, config)
        """Names of the model and its adapters; responses have the first, or that of their adapter."""
        self.adapters = config.adapters
        self.created = int(time.time())
        self.sizes = llm.llm.config.block_size, llm.llm.model.vocab_size
        """The context length, and the number of tokens that may be sampled."""
        self.bodies = Bodies()
        self._left_out: set[str] = set()  # what a line of the log has named
        self.quotas = Quotas(config)
        self.recording = Workers("nanoinfer-record", 1)
        self.metrics = Metrics(llm, self.names[0])
        chosen, of_model = config.default_max_tokens, llm.llm.requests.defaults
        of_chats = of_model.max_tokens if "max_new_tokens" in llm.llm.model.sampling_defaults else None
        self.defaults: dict[str, SamplingParams] = {
            COMPLETIONS: replace(of_model, max_tokens=chosen or MAX_TOKENS),
            **dict.fromkeys((CHAT, RESPONSES), replace(of_model, max_tokens=chosen or of_chats)),
        }
        self.openapi: Callable[[], bytes] = bytes
        """Returns the OpenAPI document; set by `build_app`, which has the routes."""

    def check_model(self, name: object) -> None:
        """Raise FieldError, which is a 404, for a model that is not served. None is the served one."""
        if name is not None and name not in self.names:
            raise unknown_model(name, self.names)

    def parse(self, url: str, body: Mapping[str, Any]) -> GenerationRequest:
        """Read the body of a request to generate. Raises as `requests.parse`, and for an unknown model."""
        check_logprobs(body, self.config)
        request = SHAPES[url].parse(body, self.defaults.get(url, self.defaults[CHAT]))
        self.check_model(request.model)
        params = request.params
        if params.overflow == "slide" and params.truncate_prompt_tokens is None:  # each output has a copy of its prompt
            request = replace(request, params=replace(params, truncate_prompt_tokens=-1))
        for what in set(request.left_out) - self._left_out if len(self._left_out) < MAX_LEFT_OUT else ():
            self._left_out.add(what)
            log.warning("%s: left out, because this server cannot run it: %s", url, what)
        return request

    def start(
        self, request: GenerationRequest, request_id: str, salt: str | None, check: Callable[[int], None]
    ) -> list[AsyncOutputStream]:
        """Return a stream of outputs for each prompt. They are queued when they are read.

        Args:
            request: from `parse`.
            request_id: of the response.
            salt: only requests of the same salt share the keys and values of prefixes.
            check: is called with the number of tokens of each prompt, as in `AsyncLLM.generate`.
        """
        kind = "delta" if request.stream else "final_only"
        options: dict[str, Any] = {"priority": request.priority, "output_kind": kind, "check": check}
        options["lora_request"] = self.adapters.get(request.model or "")
        if request.chat:
            options |= {**request.template, "cache_salt": salt}
            return [self.llm.chat(request.messages, request.params, request_id, **options)]
        salted = {} if salt is None else {"cache_salt": salt}
        return [
            self.llm.generate({**prompt, **salted}, request.params, f"{request_id}-{i}", **options)
            for i, prompt in enumerate(request.prompts)
        ]

    def reply(self, request_id: str, model: str | None) -> Reply:
        """Return what all responses have. `model`: of the request."""
        return Reply(request_id, self.name_of(model), int(time.time()), self.decode)

    def name_of(self, model: str | None) -> str:
        """Return the name that responses have: that of the request's adapter, or the first name of the model."""
        return model if model is not None and model in self.adapters else self.names[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; empty without a tokenizer."""
        return self.llm.llm.decode(token_ids) if self.llm.llm.tokenizer is not None else ""


def served_names(llm: LLM, config: ServerConfig) -> tuple[str, ...]:
    """Return the names that requests may have as their model, after reading the adapters among them.

    Raises:
        NanoinferError: an adapter is malformed or of another base, or has a name of the model.
    """
    names, adapters = config.served_model_name or names_of(llm.model_name), config.adapters
    for name, lora in adapters.items():
        if name in names:
            raise NanoinferError(f"lora_modules: {name!r} is a name of the model: give the adapter another one")
        assert llm.core.adapters is not None
        llm.core.adapters.read(lora)
    return (*names, *adapters)


def names_of(model: str) -> tuple[str, ...]:
    """Return the names of a model in requests: of a file its stem, name and path; of a folder its name and path.

    models/a.Q8_0.gguf -> ("a.Q8_0", "a.Q8_0.gguf", "models/a.Q8_0.gguf")
    models/a-1.5b/ -> ("a-1.5b", "models/a-1.5b/")
    gpt2, owner/repository, random:gpt2 -> itself
    """
    path = Path(model).expanduser()
    if model in builtin_names() or not path.exists():
        return (model,)
    name = Path(os.path.abspath(path)).name  # of ".": not resolved, since a link has the name that its user gave it
    names = (Path(name).stem, name, model) if path.is_file() else (name, model)
    return tuple(name for name in dict.fromkeys(names) if name)


def new_id() -> str:
    """Return what follows "cmpl-" in the id of a response."""
    return secrets.token_hex(16)
