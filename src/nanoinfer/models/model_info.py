"""Description of a loaded model, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models.pooling import Pooling
from nanoinfer.tokenizers.tokenizer import Tokenizer
from nanoinfer.utils.arrays import BlockFormats, format_names


@dataclass
class Description:
    """What a model is, and how it takes and gives text."""

    name: str
    """Name for messages: shakespeare, random:gpt2, a folder's name."""
    config: ModelConfig
    tokenizer: Tokenizer | None = None
    no_tokenizer_reason: str = ""
    """Why there is no tokenizer, with the remedy; empty if there is one."""
    chat_template: str | None = None
    """The Jinja template of chats."""
    tool_template: str | None = None
    """Another one for chats with tools; None: there is none."""
    no_chat_template_reason: str = ""
    """Why `chat_template` could not be read; empty if there is none."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables of the template: {"bos_token": "<s>", ...}."""
    response_template: Any = None
    """The description of the model's answers in tokenizer_config.json, not checked."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of generation_config.json for requests without their own, not checked; empty: there are none."""
    pooling: Pooling = field(default_factory=Pooling)
    """The pooling of embeddings."""


@dataclass(eq=False)
class ModelInfo(Description):
    """A model that was loaded for an engine."""

    _: KW_ONLY
    source: str
    """Name to load the model again with `load_model`."""
    vocab_size: int
    """Number of tokens that may be sampled: those of the tokenizer."""
    engine: str
    device: str
    """"cpu" or "cuda:N"."""
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    seed: int
    """Seed of random weights."""
    quantization: str | None = None
    """"int8" or "int4"; None: the dtype, or `block_formats`."""
    block_formats: Mapping[str, BlockFormats] = field(default_factory=dict)
    """Matrices of a GGUF file that are computed with in their own blocks -> q8_0, q4_0 or q4_1."""
    has_head: bool = True
    """Whether it has an output head, and so generates text."""
    has_mtp: bool = False
    """Whether its files have a block that predicts a further token."""

    @property
    def weight_format(self) -> str:
        """The format in which matrices are computed with: "q4_k + q6_k", "int8" or "bfloat16"."""
        return self.quantization or " + ".join(format_names(self.block_formats)) or self.dtype

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-text tokens that may be sampled."""
        return tuple(t for t in self.config.eos_token_ids if t < self.vocab_size)

    def require_head(self) -> None:
        """Raise NanoinferError if the model has no output head."""
        if not self.has_head:
            raise NanoinferError(f"model {self.name!r} has no output head: it makes embeddings only: use embed")

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises NanoinferError without one."""
        if self.tokenizer is None:
            raise NanoinferError(self.no_tokenizer_reason)
        return self.tokenizer
