"""From prompts and parameters, as users give them, to requests of a core."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from nanoinfer import scoring
from nanoinfer.checks import show
from nanoinfer.core import Core
from nanoinfer.errors import NanoinferError
from nanoinfer.model_info import ModelInfo
from nanoinfer.prompts import Prompt, as_list, as_prompt, numbered
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request

log = logging.getLogger("nanoinfer")


class RequestFactory:
    """Makes requests: checks prompts and parameters against the model.

    Args:
        core: runs them.
        model: the core's.
    """

    def __init__(self, core: Core, model: ModelInfo) -> None:
        self._core = core
        self._model = model

    def make_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Check all requests and return them with their prompt_logprobs; they are not queued yet."""
        many = as_list(prompts)
        if isinstance(params, SamplingParams) or params is None:
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params)
        if len(each) != len(many):
            raise NanoinferError(f"{len(many)} prompts, but {len(each)} SamplingParams: give one, or one for each")
        requests = []
        for i, (prompt, p) in enumerate(zip(many, each, strict=True)):
            with numbered(i, len(many)):
                requests.append(self.make(prompt, p))
        for i, (request, p) in enumerate(zip(requests, each, strict=True)):
            if p.prompt_logprobs is not None:
                with numbered(i, len(many)):
                    scoring.add_prompt_logprobs(
                        self._core, request, p.prompt_logprobs, self._model.tokenizer, self._model.vocab_size
                    )
        return requests

    def make(self, prompt: str | list[int], params: SamplingParams) -> Request:
        """Check one request and return it; it is not queued yet."""
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"sampling_params={params!r} is not a SamplingParams")
        token_ids = self.tokenize(prompt)
        self._check_params(params)
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        text = prompt if isinstance(prompt, str) else None
        request = self._core.make(text, token_ids, params, seed, self._model.end_token_ids)
        if request.num_dropped_tokens:
            log.warning(
                "the prompt has %d tokens, the context length is %d: its first %d are dropped (overflow=slide)",
                len(token_ids), self._model.config.block_size, request.num_dropped_tokens,
            )  # fmt: skip
        return request

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; an empty one is the model's start token.

        Raises:
            NanoinferError: text without a tokenizer, ids outside the vocabulary, or an empty prompt for a
                model with no start token.
        """
        token_ids = self.token_ids(as_prompt(prompt))
        if not token_ids:
            if self._model.config.bos_token_id is None:
                raise NanoinferError(
                    f"the prompt is empty, and model {self._model.name!r} has no start token: give at least one"
                    " character"
                )
            token_ids = [self._model.config.bos_token_id]
        return token_ids

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a text, without a start token; or the ids given, in range."""
        if isinstance(prompt, str):
            prompt = self._model.require_tokenizer().encode(prompt)
        for t in prompt:
            if not 0 <= t < self._model.config.vocab_size:
                raise NanoinferError(
                    f"token id {show(t)} is not an integer in [0, {self._model.config.vocab_size - 1}]"
                )
        return prompt

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model: token ids against the vocabulary, stop strings against the tokenizer."""
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias or ())),
        ):
            for token_id in ids:
                if token_id >= self._model.vocab_size:
                    raise NanoinferError(
                        f"{name}: token id {show(token_id)} is not below the vocabulary's {self._model.vocab_size}"
                    )
        vocab_size = self._model.vocab_size
        if params.min_tokens and len({*params.stop_token_ids, *self._model.end_token_ids}) >= vocab_size:
            raise NanoinferError(
                f"min_tokens={params.min_tokens} excludes every token: all {vocab_size} are in stop_token_ids"
            )
        if params.stop and self._model.tokenizer is None:
            raise NanoinferError(f"stop={params.stop!r} needs text: {self._model.no_tokenizer_reason}")
