"""The front door: load a model, generate, stream, score.

llm = LLM("shakespeare")
llm.generate(["O Romeo,", "To be"], SamplingParams(max_tokens=100, temperature=0.8))
for piece in llm.stream("O Romeo,"): ...
llm.perplexity(["To be, or not to be"])
llm.loglikelihood("To be, or", [" not to be", " to bee"])
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence

from nanoinfer import scoring
from nanoinfer.checks import require_bool, show
from nanoinfer.config import EngineConfig, SchedulerConfig, SpeculationConfig
from nanoinfer.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.devices import resolve_device, resolve_dtype
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoints.load import load_model
from nanoinfer.models.tokenizers import decode
from nanoinfer.outputs import LoglikelihoodOutput, PerplexityOutput, RequestOutput
from nanoinfer.overlap import overlap_scheduler
from nanoinfer.processes import computing
from nanoinfer.progress import ProgressBar
from nanoinfer.prompts import Prompt, as_list, as_prompt, numbered
from nanoinfer.sampling.choose import choose_sampler
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request
from nanoinfer.speculative.build import DraftFactory, TargetModel
from nanoinfer.streams import OutputStream, Ownership, TextStream

log = logging.getLogger("nanoinfer")


class LLM:
    """A loaded model on an engine. Several threads may use it at the same time: each step is one thread's.

    Args:
        model: a built-in model (shakespeare), random:<preset>, a Hugging Face folder, a nanoGPT ckpt.pt, a Hub
            repository (gpt2, gpt2-xl, name/repo), or wide:<model>:<preset>: the model, widened to a preset's size.
        engine: a rung of the ladder, or auto for the fastest that fits.
        device: cpu, cuda, cuda:N or auto.
        dtype: float32, bfloat16, float16 or auto.
        quantization: weight format below 16 bits, where the engine has one.
        tokenizer: where to take the tokenizer from instead of the model's own place.
        max_num_seqs: sequences open at a time; None: as many as kv_cache_memory holds, up to 64.
        kv_cache_memory: bytes for keys and values; None: a quarter of the free memory.
        kv_cache_dtype: float32, bfloat16, int8 or auto, where the engine offers a choice.
        threads: CPU threads of the native engine; None: as many as this process may use.
        graph_memory: bytes that captured CUDA graphs may take; None: an eighth of the free memory.
        sampler: auto; reference (PyTorch, float64, with a sort: the definition of the others); or flashinfer, whose
            kernels draw from the same distribution with random numbers of their own (CUDA only, if installed).
        seed: for random:<preset> weights.
        draft: who proposes tokens that the model verifies several at a time: prompt-lookup, a model with the same
            tokenizer (shakespeare-draft), a draft head (shakespeare-head), self:int8, self:int4, self:<layers>, or
            auto; None: plain decoding.
        speculate_k: tokens proposed at a time; auto decides as it goes, none included.
        speculate_rule: reproduce (the very text of plain decoding) or reject (the same distribution).

    Raises:
        NanoinferError: no such model, engine, device or draft, a broken file, or not enough memory.
    """

    @computing()
    def __init__(
        self,
        model: str,
        *,
        engine: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        tokenizer: str | None = None,
        max_num_seqs: int | None = None,
        kv_cache_memory: int | None = None,
        kv_cache_dtype: str = "auto",
        threads: int | None = None,
        graph_memory: int | None = None,
        sampler: str = "auto",
        seed: int = 0,
        draft: str | None = None,
        speculate_k: str | int = "auto",
        speculate_rule: str = "reproduce",
    ) -> None:
        speculation = SpeculationConfig(draft, speculate_k, speculate_rule)
        config = EngineConfig(
            engine, device, dtype, quantization, max_num_seqs, kv_cache_memory, kv_cache_dtype, threads, graph_memory,
            sampler,
        )  # fmt: skip
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        spec = registry.resolve(config, self.device, self.dtype)
        draw = choose_sampler(self.device, config.sampler)
        loaded = load_model(model, dtype=self.dtype, seed=seed, tokenizer=tokenizer)
        self.model_name = loaded.name
        self.config = loaded.config
        self.engine_name = spec.name
        self.tokenizer = loaded.tokenizer
        self._no_tokenizer_reason = loaded.no_tokenizer_reason
        self._vocab_size = loaded.config.vocab_size  # of tokens that may be drawn
        if loaded.tokenizer is not None:
            self._vocab_size = min(self._vocab_size, loaded.tokenizer.vocab_size)
        target = TargetModel(model, loaded.config, self.tokenizer, self._vocab_size, self.device, self.dtype, seed)
        self._drafts = DraftFactory(target, config)
        if speculation.draft is not None:
            config = self._drafts.leave_room(speculation.draft)
        self.engine = registry.build(spec, loaded.take(), config, self.device)
        limits = self.engine.limits
        scheduler = Scheduler(SchedulerConfig(limits.max_num_seqs, limits.block_size, limits.max_num_cached_tokens))
        ahead = overlap_scheduler(self.engine, self._vocab_size, self.device) if config.sampler == "auto" else None
        self.core = Core(self.engine, scheduler, draw, self.tokenizer, self._vocab_size, ahead=ahead)
        self._drafts.start(self.engine)
        self.set_draft(draft, speculate_k=speculate_k, speculate_rule=speculate_rule)

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
        requests = self._make_all(prompts, sampling_params)
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
        if self.tokenizer is None:
            raise NanoinferError(self._no_tokenizer_reason)
        return TextStream(OutputStream(self.core, self._make_all([prompt], params)))

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
        requests = self._make_all(prompts, sampling_params)
        return [r.request_id for r in requests], OutputStream(self.core, requests)

    # Requests --------------------------------------------------------------------------------------------

    def _make_all(
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
                requests.append(self._make(prompt, p))
        for i, (request, p) in enumerate(zip(requests, each, strict=True)):
            if p.prompt_logprobs is not None:
                with numbered(i, len(many)):
                    scoring.add_prompt_logprobs(self.core, request, p.prompt_logprobs, self.tokenizer, self._vocab_size)
        return requests

    def _make(self, prompt: str | list[int], params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"sampling_params={params!r} is not a SamplingParams")
        token_ids = self.tokenize(prompt)
        self._check_params(params)
        seed = params.seed if params.seed is not None else secrets.randbits(32)
        text = prompt if isinstance(prompt, str) else None
        request = self.core.make(text, token_ids, params, seed, self._end_token_ids)
        if request.num_dropped_tokens:
            log.warning(
                "the prompt has %d tokens, the context length is %d: its first %d are dropped (overflow=slide)",
                len(token_ids), self.config.block_size, request.num_dropped_tokens,
            )  # fmt: skip
        return request

    @property
    def _end_token_ids(self) -> tuple[int, ...]:
        return tuple(t for t in self.config.eos_token_ids if t < self._vocab_size)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; an empty one is the model's start token.

        Raises:
            NanoinferError: text without a tokenizer, ids outside the vocabulary, or an empty prompt for a
                model with no start token.
        """
        token_ids = self._token_ids(as_prompt(prompt))
        if not token_ids:
            if self.config.bos_token_id is None:
                raise NanoinferError(
                    f"the prompt is empty, and model {self.model_name!r} has no start token: give at least one"
                    " character"
                )
            token_ids = [self.config.bos_token_id]
        return token_ids

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a text, without a start token; or the ids given, in range."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise NanoinferError(self._no_tokenizer_reason)
            prompt = self.tokenizer.encode(prompt)
        for t in prompt:
            if not 0 <= t < self.config.vocab_size:
                raise NanoinferError(f"token id {show(t)} is not an integer in [0, {self.config.vocab_size - 1}]")
        return prompt

    def _check_params(self, params: SamplingParams) -> None:
        """Check what depends on the model: token ids against the vocabulary, stop strings against the tokenizer."""
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias or ())),
        ):
            for token_id in ids:
                if token_id >= self._vocab_size:
                    raise NanoinferError(
                        f"{name}: token id {show(token_id)} is not below the vocabulary's {self._vocab_size}"
                    )
        if params.min_tokens and len({*params.stop_token_ids, *self._end_token_ids}) >= self._vocab_size:
            raise NanoinferError(
                f"min_tokens={params.min_tokens} excludes every token: all {self._vocab_size} are in stop_token_ids"
            )
        if params.stop and self.tokenizer is None:
            raise NanoinferError(f"stop={params.stop!r} needs text: {self._no_tokenizer_reason}")

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
            context_ids, token_ids = scoring.split_pair(self._token_ids, context, continuation)
        elif isinstance(context, str) or isinstance(continuation, str):
            raise NanoinferError(
                f"context={show(context)}, continuation={show(continuation)}: give both as text, or both as token ids"
            )
        else:
            context_ids, token_ids = self._token_ids(context), self._token_ids(continuation)
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
        if self.tokenizer is None:
            raise NanoinferError(self._no_tokenizer_reason)
        return decode(self.tokenizer, token_ids)
