"""Create the requests of a core from users' prompts and sampling parameters."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.core import beam_search as beams
from nanoinfer.core.core import Core
from nanoinfer.entrypoints import scoring
from nanoinfer.entrypoints.vllm_names import model_defaults
from nanoinfer.errors import NanoinferError, show, too_long
from nanoinfer.inputs.prompts import Prompt, as_list, as_prompt, for_each, numbered
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.sampling_params import BadWords, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.tokenizers.tokenizer import LONG_TEXT
from nanoinfer.utils.checks import require_int

if TYPE_CHECKING:
    from nanoinfer.structured.grammars import Grammar, Grammars

Params = SamplingParams | BeamSearchParams
Lora = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or of each; None: none."""
log = logging.getLogger("nanoinfer")


class RequestFactory:
    """Creates requests after checking prompts and parameters against the model."""

    def __init__(self, core: Core, model: ModelInfo) -> None:
        self._core = core
        self._model = model
        self._compiler: Grammars | None = None
        self._defaults: SamplingParams | None = None

    @property
    def _grammars(self) -> Grammars:
        if self._compiler is None:
            from nanoinfer.structured.grammars import Grammars

            self._compiler = Grammars(self._model)
        return self._compiler

    @property
    def defaults(self) -> SamplingParams:
        """The parameters of requests that have none: those of the model's generation_config.json.

        They are logged at the first use.

        Raises:
            NanoinferError: one of them is invalid.
        """
        if self._defaults is None:
            self._defaults = model_defaults(from_model := self._model.sampling_defaults)
            if from_model:
                log.warning(
                    "sampling parameters that are not given are those of the model's generation_config.json (%s);"
                    " generation_config='vllm' (--generation-config vllm) leaves them out",
                    ", ".join(f"{name}={value}" for name, value in from_model.items()),
                )
        return self._defaults

    def merge(self, params: SamplingParams, explicit: Collection[str]) -> SamplingParams:
        """Return parameters with those of the model's generation_config.json where their field is not in `explicit`."""
        fields = ["max_tokens" if name == "max_new_tokens" else name for name in self._model.sampling_defaults]
        return replace(params, **{name: getattr(self.defaults, name) for name in fields if name not in explicit})

    def per_prompt(self, params: Params | Sequence[Params] | None, count: int) -> list[Params]:
        """Return the parameters of each of `count` prompts. Raises NanoinferError for another number of them."""
        return for_each(self.defaults if params is None else params, count, "SamplingParams")

    def make_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        priority: Sequence[int] | None = None,
        lora: Lora = None,
    ) -> list[Request]:
        """Check and return all requests, without queueing them.

        Args:
            prompts: in all supported forms, with or without `cache_salt`.
            params: for all prompts, or one for each; None: the defaults.
            priority: of each prompt; None: 0.
            lora: the adapter of all prompts, or of each; None: none.
        """
        salts: list[str | None] = []
        many = as_list(prompts, salts)
        each = self.per_prompt(params, len(many))
        ranks = for_each(0 if priority is None else priority, len(many), "priorities")
        loras = for_each(lora, len(many), "lora_requests")
        requests = []
        for i, (prompt, p, salt, rank, adapter) in enumerate(zip(many, each, salts, ranks, loras, strict=True)):
            with numbered(i, len(many)):
                requests.append(self.make(prompt, p, salt=salt, priority=rank, lora=adapter))
        return requests

    def make(
        self,
        prompt: str | list[int],
        params: Params,
        *,
        salt: str | None = None,
        priority: int = 0,
        lora: LoRARequest | None = None,
    ) -> Request:
        """Check and return one request without queueing it.

        Args:
            prompt, params: of the request.
            salt, priority: see `Core.make`.
            lora: its adapter; None: none.
        """
        priority = require_int("priority", priority, -(2**31), 2**31 - 1)
        self._model.require_head()
        search = None
        if isinstance(params, BeamSearchParams):
            beams.check(params, self._model.vocab_size, self._model.end_token_ids)
            search, params = params, params.sampling_params
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"sampling_params={params!r} is not a SamplingParams")
        token_ids = self.fit(prompt, params)
        self._check_params(params)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(4), "little")
        text = prompt if isinstance(prompt, str) else None
        request = self._core.make(text, token_ids, params, seed, self._model.end_token_ids, salt, priority, search)
        if params.bad_words:
            request.bad_words = BadWords(self._bad_word_ids(params.bad_words))
        if (count := params.prompt_logprobs) is not None:
            tokenizer = self._model.tokenizer if params.detokenize else None
            scoring.read_prompt_logprobs(request, count, tokenizer, self._model.vocab_size)
        if params.structured_outputs is not None:
            from nanoinfer.structured.masks import OutputGrammar

            compiled = self.compile(params.structured_outputs)
            for s in request.sequences:
                s.grammar = OutputGrammar(compiled, request.end_token_ids)
        self._core.adapt(request, lora)
        if request.num_dropped_tokens:
            log.warning(
                "the prompt has %d tokens, the context length is %d: the first %d tokens are dropped (overflow=slide)",
                len(token_ids), self._model.config.block_size, request.num_dropped_tokens,
            )  # fmt: skip
        return request

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a grammar, which `make` then has already. Raises NanoinferError as `Grammars.compile`."""
        return self._grammars.compile(params)

    def fit(self, prompt: str | list[int], params: Params, *, rendered: bool = False) -> list[int]:
        """Return the token ids of a prompt that is to be continued, after truncate_prompt_tokens.

        As in vLLM, a text keeps the start token that the tokenizer adds.

        Args:
            prompt: a text, or token ids.
            params: of its request.
            rendered: whether a chat template has made the text, which has added the start token.

        Raises:
            NanoinferError: as `LLM.tokenize` and `check_fits`.
        """
        if isinstance(prompt, str):
            self.check_fits(prompt, params)
        encode = self._model.require_tokenizer().encode if isinstance(prompt, str) and rendered else self.token_ids
        token_ids = self._or_start(encode(prompt))  # type: ignore[arg-type]
        limit = getattr(params, "truncate_prompt_tokens", None) or len(token_ids)
        limit = self._core.engine.limits.block_size if limit == -1 else limit
        if len(token_ids) <= limit:
            return token_ids
        start = None if rendered or not isinstance(prompt, str) else self._model.require_tokenizer().bos_token_id
        return token_ids[-limit:] if start is None else [start, *token_ids[len(token_ids) - limit + 1 :]]

    def check_fits(self, text: str, params: Params | None) -> None:
        """Raise NanoinferError if a long prompt has too many tokens for the context, however it is tokenized.

        `params`: None for an input of an embedding or a score.
        """
        shortened = isinstance(params, SamplingParams) and (
            params.overflow == "slide" or params.truncate_prompt_tokens is not None
        )
        if len(text) < LONG_TEXT or shortened:
            return
        block_size = self._core.engine.limits.block_size
        if (least := self._model.require_tokenizer().least_tokens(text)) > block_size:
            raise too_long(f"at least {least}", block_size, "input" if params is None else "prompt")

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

    def hides_any(self, token_ids: Sequence[int], params: SamplingParams) -> bool:
        """Return whether one of the tokens of an output is a special token that its text does not show."""
        special = self._model.require_tokenizer().special_tokens
        return params.skip_special_tokens and any(token_id in special for token_id in token_ids)

    def pair(self, context: str | list[int], continuation: str | list[int]) -> tuple[list[int], list[int]]:
        """Return the token ids of a context and its continuation, at least one for each: see `LLM.loglikelihood`."""
        if isinstance(context, str) and isinstance(continuation, str):
            context_ids, token_ids = scoring.split_pair(self.token_ids, context, continuation)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise NanoinferError(
                f"context={show(context)}, continuation={show(continuation)}: give both as text, or both as token ids"
            )
        else:
            context_ids, token_ids = self.token_ids(context), self.token_ids(continuation)
        if not token_ids:
            raise NanoinferError(f"continuation={show(continuation)} adds no token to its context: make it longer")
        if len(token_ids) > (block_size := self._core.engine.limits.block_size):
            raise NanoinferError(
                f"the continuation has {len(token_ids)} tokens, but the context length is {block_size}: shorten it, or"
                " use perplexity"
            )
        return context_ids or self.tokenize([]), token_ids

    def _check_params(self, params: SamplingParams) -> None:
        """Check the parameters that depend on the model: token ids, min_tokens and stop strings."""
        vocab_size = self._model.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise NanoinferError(f"{name}: token id {show(token_id)} is not less than vocab_size={vocab_size}")
        if params.min_tokens and len({*params.stop_token_ids, *self._model.end_token_ids}) >= vocab_size:
            raise NanoinferError(
                f"min_tokens={params.min_tokens} excludes every token: all {vocab_size} are in stop_token_ids"
            )
        for name in ("stop", "bad_words"):
            if (words := getattr(params, name)) and self._model.tokenizer is None:
                raise NanoinferError(f"{name}={show(words)} requires a tokenizer: {self._model.no_tokenizer_reason}")

    def _bad_word_ids(self, words: Sequence[str]) -> Iterator[list[int]]:
        """Yield the token sequences of words, at the beginning of a text and after a space.

        vLLM's rule (sampling_params.py, `update_from_tokenizer`): the one after a space counts if it has as many tokens
        and begins with another one; else it is the word after a token of the space alone.
        """
        encode = self._model.require_tokenizer().encode
        for word in words:
            bare = word.lstrip() or word
            sequences = [encode(bare)]
            with suppress(NanoinferError):  # a vocabulary of characters without the space
                spaced = encode(f" {bare}")
                if len(spaced) == len(sequences[0]) and spaced[:1] != sequences[0][:1]:
                    sequences.append(spaced)
            yield from (ids for ids in sequences if ids and max(ids) < self._model.vocab_size)
