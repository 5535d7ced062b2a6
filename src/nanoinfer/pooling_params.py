"""Parameters of embeddings and scores with vLLM's names: PoolingParams of a request, PoolingConfig of a model."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.utils.checks import bounded, keep_fields, keep_int, require_choice

POOLING_TYPES = ("last", "mean")
"""The tokens whose hidden states make an embedding: the last one, or all (their mean)."""


@dataclass(frozen=True)
class PoolingParams:
    """What a request for an embedding or a score asks for.

    Raises:
        NanoinferError: a value is out of range.
    """

    dimensions: int | None = bounded(None, 1)
    """Number of values of an embedding, the first ones; None: all."""
    use_activation: bool | None = None
    """Whether an embedding is divided by its Euclidean norm; None: as the model's files say, else true."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens, of which the last are kept; -1: the context length; None: longer inputs are refused."""

    def __post_init__(self) -> None:
        keep_fields(self)
        if self.truncate_prompt_tokens != -1:
            keep_int(self, "truncate_prompt_tokens", 1, optional=True)


@dataclass(frozen=True)
class PoolingConfig:
    """How a model makes embeddings."""

    pooling_type: str = "auto"
    """Tokens that make an embedding: last or mean; auto: as the model's files say, else last."""

    def __post_init__(self) -> None:
        require_choice("pooling_type", self.pooling_type, ("auto", *POOLING_TYPES))
