"""What `LLM.get_tokenizer` returns: a model's tokenizer and chat template, with methods of transformers' tokenizers.

    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    num_tokens = len(tokenizer.encode(text))

Covered: text to ids and back, chat templates, the start and end tokens, the ids of tokens. Not covered: calling the
tokenizer, tensors, padding, truncation, saving and training: `AutoTokenizer` of transformers has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.chat import ChatFormatter, ChatOptions
from nanoinfer.inputs.messages import Message, as_conversations, is_list
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.tokenizers.tokenizer import ByteLevelTokenizer, CharTokenizer, GenericTokenizer, Tokenizer
from nanoinfer.utils.checks import as_int, plain, show

# Arguments of transformers' apply_chat_template that would change what is returned.
_REFUSED = (
    "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenizer_kwargs",
    "truncation",
)  # fmt: skip


class ModelTokenizer:
    """The tokenizer and the chat template of a model.

    Raises:
        NanoinferError: the model has no tokenizer.
    """

    def __init__(self, model: ModelInfo, formatter: ChatFormatter) -> None:
        self._tokenizer = model.require_tokenizer()
        self._model, self._formatter = model, formatter
        self.vocab_size = self._tokenizer.vocab_size
        """1 + the largest token id, with added tokens."""

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, as `LLM.generate` does: with the start token if the tokenizer adds one.

        Raises:
            NanoinferError: it is not a string, or cannot be tokenized.
        """
        if not isinstance(text, str):
            raise NanoinferError(f"text={show(text)} is not a string: encode takes one text")
        start = self._tokenizer.bos_token_id
        ids = self._tokenizer.encode(text)
        return [start, *ids] if add_special_tokens and start is not None else ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one or several token ids, with or without special tokens. Raises NanoinferError."""
        given = plain(token_ids)
        ids = [as_int(token_id) for token_id in (given if is_list(given) else [given])]
        if any(token_id is None or not 0 <= token_id < self.vocab_size for token_id in ids):
            raise NanoinferError(f"token_ids={show(given)} are not integers in [0, {self.vocab_size - 1}]")
        special = self._tokenizer.special_tokens if skip_special_tokens else ()
        return tokenizers.decode(self._tokenizer, [i for i in ids if i is not None and i not in special])

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Any:
        """Return the prompt of a conversation as token ids, or as text; of several conversations, a list of these.

        The text has the start token of templates that print it. `encode` and `generate` add one to a text in any case,
        as in vLLM: give them the ids, or use `LLM.chat`.

        Args:
            conversation: one or several, as for `LLM.chat`.
            tokenize: whether to return token ids.
            add_generation_prompt: whether to end with the beginning of the assistant's message.
            continue_final_message: whether to end inside the last message, which the output continues.
            chat_template: Jinja template to use instead of the model's own.
            variables: of the template, such as enable_thinking=False.

        Raises:
            NanoinferError: as `LLM.apply_chat_template`; or an argument of transformers is not supported.
        """
        for name in _REFUSED:
            if variables.pop(name, None) not in (None, False):
                raise NanoinferError(f"{name} is not supported: apply_chat_template returns a list of ids, or text")
        options = ChatOptions(chat_template, add_generation_prompt, variables, continue_final_message)
        made: list[Any] = [self._formatter.render(messages, options) for messages in as_conversations(conversation)]
        made = [self._formatter.encode(text) for text in made] if tokenize else made
        return made if is_list(conversation[0]) else made[0]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, such as "<|eot_id|>", None for a text that is none; of several, a list of these."""
        if isinstance(tokens, str):
            return _token_id(self._tokenizer, tokens)
        return [_token_id(self._tokenizer, token) for token in tokens]

    @property
    def bos_token(self) -> str | None:
        """The start token."""
        return self._special("bos_token", self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The end token; of a chat model, the one that ends a turn. `LLM.config.eos_token_ids` has all."""
        return self._special("eos_token", self.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the start token."""
        return self._special_id("bos_token", self._model.config.bos_token_id)

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`."""
        return self._special_id("eos_token", next(iter(self._model.end_token_ids), None))

    def _special_id(self, name: str, otherwise: int | None) -> int | None:
        """Return the id of a token that the tokenizer's files name, else that of config.json."""
        token = self._model.special_tokens.get(name)
        found = None if token is None else _token_id(self._tokenizer, token)
        return otherwise if found is None else found

    def _special(self, name: str, token_id: int | None) -> str | None:
        known = self._model.special_tokens.get(name)
        return known if known is not None or token_id is None else self.decode(token_id)


def _token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token that is spelled as in the vocabulary, such as "<|endoftext|>"; None if there is none."""
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.chars.index(token) if token in tokenizer.chars else None
    assert isinstance(tokenizer, (ByteLevelTokenizer, GenericTokenizer))
    found: int | None = tokenizer.core.token_to_id(token)
    return found
