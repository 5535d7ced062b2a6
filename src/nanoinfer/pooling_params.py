"""Parameters of embeddings and scores with vLLM's names: PoolingParams of a request, PoolingConfig of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.arguments import explains_arguments
from nanoinfer.utils.checks import bounded, keep_fields, keep_int, require_choice, require_int, show

POOLING_TYPES = ("last", "mean", "cls")
"""The tokens whose hidden states make an embedding: the last one, all (their mean), or the first one."""
MAX_CLASSIFIER_CHARS = 1000


@explains_arguments
@dataclass(frozen=True)
class PoolingParams:
    """What a request for an embedding or a score asks for.

    Raises:
        NanoinferError: a value is out of range, or normalize and use_activation contradict each other.
    """

    dimensions: int | None = bounded(None, 1)
    """Number of values of an embedding, the first ones; None: all."""
    normalize: bool | None = None
    """Whether an embedding is divided by its Euclidean norm; None: as the model's files say, else true."""
    use_activation: bool | None = None
    """Of an embedding: the same as normalize. Of a score by logits: whether it is a probability; None: it is."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens, of which the last are kept; -1: the context length; None: longer inputs are refused."""

    def __post_init__(self) -> None:
        keep_fields(self)
        if None not in (self.normalize, self.use_activation) and self.normalize is not self.use_activation:
            raise NanoinferError(
                f"normalize={self.normalize} and use_activation={self.use_activation} contradict each other: give one"
            )
        if self.truncate_prompt_tokens != -1:
            keep_int(self, "truncate_prompt_tokens", 1, optional=True)

    @property
    def normalizes(self) -> bool | None:
        """Whether an embedding is normalized; None: as the model's files say."""
        return self.use_activation if self.normalize is None else self.normalize


@dataclass(frozen=True)
class PoolingConfig:
    """How a model makes embeddings and scores."""

    pooling_type: str = "auto"
    """Tokens that make an embedding: last, mean or cls; auto: as the model's files say, else last."""
    classifier_from_token: str | None = None
    """Tokens whose logits score a document, as no,yes: of an irrelevant and a relevant one (default: the files')."""
    score_template: str | None = None
    """File of a reranker's Jinja template, whose messages have the roles query and document (default: the model's)."""

    def __post_init__(self) -> None:
        require_choice("pooling_type", self.pooling_type, ("auto", *POOLING_TYPES))
        if self.classifier_from_token is not None:
            self._check_classifier()

    def _check_classifier(self) -> None:
        given: Any = self.classifier_from_token
        if isinstance(given, (list, tuple)) and all(isinstance(token, str) for token in given):
            object.__setattr__(self, "classifier_from_token", ",".join(given))
        if not isinstance(self.classifier_from_token, str) or not 1 <= len(self.classifiers) <= 2:
            raise NanoinferError(f"classifier_from_token={show(given)} is not one or two tokens, as no,yes")
        require_int("the length of classifier_from_token", len(self.classifier_from_token), 1, MAX_CLASSIFIER_CHARS)

    @property
    def classifiers(self) -> list[str]:
        """The tokens of `classifier_from_token`: the last one is that of a relevant document. Empty: none are given."""
        return [token for token in (self.classifier_from_token or "").split(",") if token]
