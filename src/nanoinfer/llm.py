"""The front door: load a model, generate, stream, score.

llm = LLM("shakespeare")
llm.generate(["O Romeo,", "To be"], SamplingParams(max_tokens=100, temperature=0.8))
for piece in llm.stream("O Romeo,"): ...
llm.perplexity(["To be, or not to be"])
llm.loglikelihood("To be, or", [" not to be", " to bee"])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nanoinfer import scoring
from nanoinfer.build import build_core
from nanoinfer.checks import require_bool, show
from nanoinfer.config import LLMConfig, SpeculationConfig, llm_signature
from nanoinfer.errors import NanoinferError
from nanoinfer.models.tokenizers import decode
from nanoinfer.outputs import LoglikelihoodOutput, PerplexityOutput, RequestOutput
from nanoinfer.processes import computing
from nanoinfer.progress import ProgressBar
from nanoinfer.prompts import Prompt, as_list, numbered
from nanoinfer.requests import RequestFactory
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.streams import OutputStream, Ownership, TextStream


class LLM:
    """A loaded model on an engine. Several threads may use it at the same time: each step is one thread's.

    Args:
        model: a built-in model (shakespeare), random:<preset>, a Hugging Face folder, a nanoGPT ckpt.pt, a Hub
            repository (gpt2, gpt2-xl, name/repo), or wide:<model>:<preset>: the model, widened to a preset's size.
        tokenizer: where to take the tokenizer from instead of the model's own place.
        seed: for random:<preset> weights.
        options: every field of `EngineConfig` (engine, device, dtype, quantization, max_num_seqs, kv_cache_memory,
            threads, ...) and of `SpeculationConfig` (draft, speculate_k, speculate_rule), by its name; config.py
            describes each.

    Raises:
        NanoinferError: no such model, engine, device or draft, a broken file, or not enough memory.
        TypeError: an option that does not exist.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, seed: int = 0, **options: Any) -> None:
        self._start(LLMConfig.from_options(model, tokenizer, seed, options))

    __init__.__signature__ = llm_signature()  # type: ignore[attr-defined]  # help() and editors show every option

    @classmethod
    def from_config(cls, config: LLMConfig) -> LLM:
        """Return the LLM of a configuration. Raises as the class does."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @computing()
    def _start(self, config: LLMConfig) -> None:
        built = build_core(config)
        self.core, self._model, self._drafts = built.core, built.model, built.drafts
        self._requests = RequestFactory(self.core, self._model)
        self.engine = self.core.engine
        self.model_name, self.engine_name = self._model.name, self._model.engine
        self.config, self.tokenizer = self._model.config, self._model.tokenizer
        self.device, self.dtype = self._model.device, self._model.dtype

    def set_draft(
        self, draft: str | None, *, speculate_k: str | int = "auto", speculate_rule: str = "reproduce"
    ) -> None:
        """Decode the requests that come from now on with another draft, or None. Unfinished ones keep theirs.

        A draft that was used before is not loaded again. kv_cache_memory bounds the model's cache and that of the draft
        given when the class was made; drafts set later allocate additional KV memory.

        Raises:
            NanoinferError: as the class does.
        """
        config = SpeculationConfig(draft, speculate_k, speculate_rule)
        if draft is None:
            self.core.speculator = None
        else:  # between two steps: the costs of steps of the engine are measured
            self.core.speculator = self.core.use_engine(
                self.config.block_size, lambda engine: self._drafts.speculator(config)
            )

    # Generating ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; return their outputs in the order given.

        A fault of one request (its logits are not finite, ...) ends that request alone: its output has finish_reason
        "error" and says why in `error`.

        Args:
            prompts: a string, a list of token ids, or a dict {"prompt": ...} or {"prompt_token_ids": ...}; or a
                list of such.
            sampling_params: for all prompts, or one for each; None is SamplingParams(). prompt_logprobs take a
                prefill of their own before the request is queued.
            use_tqdm: whether to show a progress bar (rich's) on stderr; None: on a terminal, after two seconds.

        Raises:
            NanoinferError: a prompt or parameter is not usable; nothing has been generated then.
        """
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        requests = self._requests.make_all(prompts, sampling_params)
        with Ownership(self.core, requests), ProgressBar("generate", use_tqdm) as bar:
            self.core.submit(requests)
            while not all(r.finished for r in requests):
                self.core.step()
                if bar.due():
                    bar.update(sum(r.finished for r in requests), len(requests))
        return [self.core.output(r) for r in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> TextStream:
        """Generate for one prompt (n=1) and yield its text as it is made, whole characters only.

        Checks happen at the call, before the first piece is asked for. Closing or dropping the iterator ends the
        request. Any number of iterators may be open and read in any order.

        Raises:
            NanoinferError: the prompt or a parameter is not usable, n is not 1, or the model has no tokenizer; from the
                iterator: the request has failed.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise NanoinferError(f"n={params.n}: stream makes one text; use generate, or stream_outputs")
        self._model.require_tokenizer()
        return TextStream(OutputStream(self.core, self._requests.make_all([prompt], params)))

    def stream_outputs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> tuple[list[int], OutputStream]:
        """Generate for any number of prompts; yield each step's deltas, and each request's output when it ends.

        Returns:
            the requests' ids in the order of the prompts, and the iterator. Closing, dropping or interrupting it ends
            the requests that are unfinished.
        """
        requests = self._requests.make_all(prompts, sampling_params)
        return [r.request_id for r in requests], OutputStream(self.core, requests)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; an empty one is the model's start token.

        Raises:
            NanoinferError: text without a tokenizer, ids outside the vocabulary, or an empty prompt for a
                model with no start token.
        """
        return self._requests.tokenize(prompt)

    # Scoring ---------------------------------------------------------------------------------------------

    def loglikelihood(
        self, contexts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]
    ) -> list[LoglikelihoodOutput]:
        """Return how likely the model finds each continuation after its context: a value for each token, and their sum.

        One context may have several continuations: that is multiple choice. Text is split into tokens as
        lm-evaluation-harness does: spaces at a context's end belong to the continuation, whose tokens are those of the
        whole after the context's. An empty context is the model's start token. A context too long loses its first
        tokens (`num_dropped_tokens`).

        Args:
            contexts: one for all continuations, or one for each; as the prompts of `generate`.
            continuations: text where the context is text, token ids where it is token ids.

        Raises:
            NanoinferError: a continuation without tokens or longer than the context length, or a context with none.
        """
        before, after = as_list(contexts), as_list(continuations)
        if len(before) == 1:
            before *= len(after)
        if len(before) != len(after):
            raise NanoinferError(f"{len(before)} contexts, but {len(after)} continuations: give one, or one for each")
        pairs = []
        for i, (context, continuation) in enumerate(zip(before, after, strict=True)):
            with numbered(i, len(after), "continuation"):
                pairs.append(self._pair(context, continuation))
        outputs = []
        for i, pair in enumerate(pairs):
            with numbered(i, len(after), "continuation"):
                outputs.append(scoring.loglikelihood(self.core, *pair))
        return outputs

    def _pair(self, context: str | list[int], continuation: str | list[int]) -> tuple[list[int], list[int]]:
        """Return the token ids of a context and its continuation, at least one each."""
        if isinstance(context, str) and isinstance(continuation, str):
            context_ids, token_ids = scoring.split_pair(self._requests.token_ids, context, continuation)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise NanoinferError(
                f"context={show(context)}, continuation={show(continuation)}: give both as text, or both as token ids"
            )
        else:
            context_ids, token_ids = self._requests.token_ids(context), self._requests.token_ids(continuation)
        if not token_ids:
            raise NanoinferError(f"continuation={show(continuation)} adds no token to its context: make it longer")
        return context_ids or self.tokenize([]), token_ids

    def perplexity(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[PerplexityOutput]:
        """Return how likely the model finds each text: log-likelihood and perplexity.

        The first token has no context and is not scored. A text longer than the context length is scored in
        overlapping windows: each moves on by `stride` tokens and scores only those that no earlier window did,
        so that every token sees at least block_size - stride tokens of context.

        Args:
            texts: as the prompts of `generate`.
            stride: 1 to block_size tokens; None is half the context length.
            progress: called after each window with the tokens scored and the tokens of the text.

        Raises:
            NanoinferError: a text of fewer than two tokens, or a bad stride.
        """
        block_size = self.config.block_size
        stride = max(1, block_size // 2) if stride is None else stride
        if isinstance(stride, bool) or not isinstance(stride, int) or not 1 <= stride <= block_size:
            raise NanoinferError(f"stride={show(stride)} is not an integer in [1, {block_size}] (the context length)")
        outputs = []
        for i, text in enumerate(many := as_list(texts)):
            with numbered(i, len(many), "text"):
                ids = self.tokenize(text)
                if (count := len(ids) - 1) < 1:
                    raise NanoinferError("a text of 1 token cannot be scored: the first has no context; give two")
                total = scoring.log_likelihood(self.core, ids, stride, progress)
                characters = len(text) if isinstance(text, str) else None
                outputs.append(PerplexityOutput(count, characters, total, math.exp(min(-total / count, 700.0))))
        return outputs

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises NanoinferError without a tokenizer."""
        return decode(self._model.require_tokenizer(), token_ids)
