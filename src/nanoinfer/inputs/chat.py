"""Prompts of chats: a model's chat template applied to messages, as text and as token ids."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.messages import Message, is_list
from nanoinfer.models.chat_template import ChatTemplate
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.models.tokenizers import decode
from nanoinfer.utils.checks import require_bool, show

_ARGUMENTS = ("messages", "add_generation_prompt")  # of a template, with parameters of their own


@dataclass(frozen=True)
class ChatOptions:
    """How to apply a chat template."""

    chat_template: str | None = None
    """Jinja template to use instead of the model's own."""
    add_generation_prompt: bool = True
    """Whether to end the prompt with the beginning of the assistant's answer."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further variables of the template, such as {"enable_thinking": False}."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, which the output continues."""
    documents: Sequence[Mapping[str, Any]] | None = None
    """Documents for templates that have a place for them, such as [{"title": ..., "text": ...}]."""

    def __post_init__(self) -> None:
        require_bool("add_generation_prompt", self.add_generation_prompt)
        require_bool("continue_final_message", self.continue_final_message)
        if self.continue_final_message and self.add_generation_prompt:
            raise NanoinferError(
                "continue_final_message=True continues the last message, add_generation_prompt=True begins another one:"
                " set add_generation_prompt=False"
            )
        documents = self.documents
        if documents is not None and not (is_list(documents) and all(isinstance(d, Mapping) for d in documents)):
            raise NanoinferError(f"documents={show(documents)} is not a list of dicts, such as {{'text': ...}}")
        given = self.chat_template_kwargs
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
            raise NanoinferError(f"chat_template_kwargs={show(given)} is not a dict of names to values")
        if clash := [name for name in _ARGUMENTS if name in (given or {})]:
            raise NanoinferError(f"chat_template_kwargs: {clash[0]} is a parameter of its own: give it there")


class ChatFormatter:
    """Applies the chat template of a model, or another one."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._template: ChatTemplate | None = None  # the one used last, whose process is still there

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Return the text of the prompt for checked messages.

        Raises:
            NanoinferError: as `ChatTemplate.render` and `template`; or the last message cannot be continued.
        """
        given = {**(options.chat_template_kwargs or {}), "add_generation_prompt": options.add_generation_prompt}
        if options.documents is not None:
            given["documents"] = options.documents
        template = self.template(options.chat_template)
        if options.continue_final_message:
            return _up_to_end(template, messages, given)
        return template.render(messages, **given)

    def template(self, source: str | None) -> ChatTemplate:
        """Return a template, or the model's own. Raises NanoinferError if the model has none, or it is too large."""
        model = self._model
        if source is None and (source := model.chat_template) is None:
            raise NanoinferError(
                f"{model.no_chat_template_reason or f'model {model.name!r} has no chat template'}: give one by"
                " chat_template= (--chat-template FILE), or use generate"
            )
        template = self._template
        if template is None or template.source != source:  # another thread may set another one meanwhile
            self._template = template = ChatTemplate(source, model.special_tokens)
        return template

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt; the template, not the tokenizer, has added its start token."""
        return self._model.require_tokenizer().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; empty without a tokenizer."""
        return decode(self._model.tokenizer, token_ids) if self._model.tokenizer else ""


def _up_to_end(template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Return the text of the messages up to the end of the last one's content.

    As in transformers (`apply_chat_template`), a mark after the content is rendered with it. White space at the end of
    the content is kept if the template keeps it.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise NanoinferError("continue_final_message=True: the last message has no content to continue")
    mark = f"mark{secrets.token_hex(8)}"
    text = template.render([*messages[:-1], {**messages[-1], "content": f"{content}{mark} "}], **variables)
    before, found, after = text.rpartition(mark)
    if not found:
        raise NanoinferError(
            "continue_final_message=True: the chat template leaves the content of the last message out: give another"
            " message, or another chat_template"
        )
    return before if after.startswith(" ") else before.rstrip()
