"""Create the requests of a core from users' prompts and sampling parameters."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from nanoinfer.core import beam_search as beams
from nanoinfer.core.core import Core
from nanoinfer.entrypoints import scoring
from nanoinfer.errors import NanoinferError, too_long
from nanoinfer.inputs.prompts import Prompt, as_list, as_prompt, numbered
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.models.tokenizers import LONG_TEXT
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.structured.grammars import Grammars
from nanoinfer.structured.masks import OutputGrammar
from nanoinfer.utils.checks import require_int, show

Params = SamplingParams | BeamSearchParams
log = logging.getLogger("nanoinfer")


def per_prompt(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    """Return the parameters of each of `count` prompts. Raises NanoinferError for another number of them."""
    each = [params or SamplingParams()] * count if isinstance(params, Params) or params is None else list(params)
    if len(each) != count:
        raise NanoinferError(f"{count} prompts, but {len(each)} SamplingParams: give one, or one for each prompt")
    return each


class RequestFactory:
    """Creates requests after checking prompts and parameters against the model."""

    def __init__(self, core: Core, model: ModelInfo) -> None:
        self._core = core
        self._model = model
        self._grammars = Grammars(model)

    def make_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        priority: Sequence[int] | None = None,
    ) -> list[Request]:
        """Check and return all requests, without queueing them.

        Args:
            prompts: in all supported forms, with or without `cache_salt`.
            params: for all prompts, or one for each; None: the defaults.
            priority: of each prompt; None: 0.
        """
        salts: list[str | None] = []
        many = as_list(prompts, salts)
        each = per_prompt(params, len(many))
        ranks = [0] * len(many) if priority is None else list(priority)
        if len(ranks) != len(many):
            raise NanoinferError(f"{len(many)} prompts, but {len(ranks)} priorities: give one for each prompt")
        requests = []
        for i, (prompt, p, salt, rank) in enumerate(zip(many, each, salts, ranks, strict=True)):
            with numbered(i, len(many)):
                requests.append(self.make(prompt, p, salt=salt, priority=rank))
        return requests

    def make(self, prompt: str | list[int], params: Params, *, salt: str | None = None, priority: int = 0) -> Request:
        """Check and return one request without queueing it. `salt`, `priority`: see `Core.make`."""
        priority = require_int("priority", priority, -(2**31), 2**31 - 1)
        search = None
        if isinstance(params, BeamSearchParams):
            beams.check(params, self._model.vocab_size, self._model.end_token_ids)
            search, params = params, params.sampling_params
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"sampling_params={params!r} is not a SamplingParams")
        token_ids = self.fit(prompt, params) if isinstance(prompt, str) else self._or_start(self.token_ids(prompt))
        self._check_params(params)
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        text = prompt if isinstance(prompt, str) else None
        request = self._core.make(text, token_ids, params, seed, self._model.end_token_ids, salt, priority, search)
        if (count := params.prompt_logprobs) is not None:
            scoring.read_prompt_logprobs(request, count, self._model.tokenizer, self._model.vocab_size)
        if params.structured_outputs is not None:
            grammar = self._grammars.compile(params.structured_outputs)
            for s in request.sequences:
                s.grammar = OutputGrammar(grammar, request.end_token_ids)
        if request.num_dropped_tokens:
            log.warning(
                "the prompt has %d tokens, the context length is %d: the first %d tokens are dropped (overflow=slide)",
                len(token_ids), self._model.config.block_size, request.num_dropped_tokens,
            )  # fmt: skip
        return request

    def fit(self, text: str, params: Params | None, *, rendered: bool = False) -> list[int]:
        """Return the token ids of a prompt that is to be continued.

        Args:
            text: the prompt.
            params: of its request.
            rendered: whether a chat template has made it, which has added the start token.

        Raises:
            NanoinferError: as `LLM.tokenize` and `check_fits`.
        """
        self.check_fits(text, params)
        return self._or_start(self._model.require_tokenizer().encode(text) if rendered else self.token_ids(text))

    def check_fits(self, text: str, params: Params | None) -> None:
        """Raise NanoinferError if a long prompt has too many tokens for the context, however it is tokenized."""
        if len(text) < LONG_TEXT or (isinstance(params, SamplingParams) and params.overflow == "slide"):
            return
        block_size = self._core.engine.limits.block_size
        if (least := self._model.require_tokenizer().least_tokens(text)) > block_size:
            raise too_long(f"at least {least}", block_size)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; for an empty prompt, the model's start token. Raises as `LLM.tokenize`."""
        return self._or_start(self.token_ids(as_prompt(prompt)))

    def _or_start(self, token_ids: list[int]) -> list[int]:
        """Return a prompt's token ids, or for an empty prompt the model's start token."""
        if not token_ids:
            if self._model.config.bos_token_id is None:
                raise NanoinferError(
                    f"the prompt is empty and model {self._model.name!r} has no start token: give 1 or more characters"
                )
            return [self._model.config.bos_token_id]
        return token_ids

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a text, or the given ids. Checks that they are in range.

        A text begins with the start token if the tokenizer says so. Given ids are complete.
        """
        if isinstance(prompt, str):
            tokenizer = self._model.require_tokenizer()
            start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            prompt = start + tokenizer.encode(prompt)
        for t in prompt:
            if not 0 <= t < self._model.config.vocab_size:
                raise NanoinferError(
                    f"token id {show(t)} is not an integer in [0, {self._model.config.vocab_size - 1}]"
                )
        return prompt

    def _check_params(self, params: SamplingParams) -> None:
        """Check the parameters that depend on the model: token ids, min_tokens and stop strings."""
        vocab_size = self._model.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise NanoinferError(f"{name}: token id {show(token_id)} is not less than vocab_size={vocab_size}")
        if params.min_tokens and len({*params.stop_token_ids, *self._model.end_token_ids}) >= vocab_size:
            raise NanoinferError(
                f"min_tokens={params.min_tokens} excludes every token: all {vocab_size} are in stop_token_ids"
            )
        if params.stop and self._model.tokenizer is None:
            raise NanoinferError(f"stop={params.stop!r} requires a tokenizer: {self._model.no_tokenizer_reason}")
