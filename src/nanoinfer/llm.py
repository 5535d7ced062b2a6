"""The front door: load a model, generate, stream, score.

llm = LLM("shakespeare")
llm.generate(["O Romeo,", "To be"], SamplingParams(max_tokens=100, temperature=0.8))
for piece in llm.stream("O Romeo,"): ...
llm.score(["To be, or not to be"])
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from nanoinfer.checks import show
from nanoinfer.config import EngineConfig, SchedulerConfig, SpeculationConfig
from nanoinfer.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.engines.devices import resolve_device, resolve_dtype
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.models.checkpoints.load import load_model
from nanoinfer.models.tokenizers import decode
from nanoinfer.outputs import RequestOutput, Score
from nanoinfer.overlap import overlap_scheduler
from nanoinfer.processes import computing
from nanoinfer.prompts import Prompt, as_list, as_prompt, numbered
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request
from nanoinfer.speculative.build import DraftFactory, TargetModel
from nanoinfer.streams import OutputStream, Ownership, TextStream

log = logging.getLogger("nanoinfer")

SCORE_CHUNK = 128  # positions whose logits are held at a time: 26 MB at GPT-2's vocabulary


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
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; return their outputs in the order given.

        A fault of one request (its logits are not finite, ...) ends that request alone: its output has finish_reason
        "error" and says why in `error`.

        Args:
            prompts: a string, a list of token ids, or a dict {"prompt": ...} or {"prompt_token_ids": ...}; or a
                list of such.
            params: for all prompts, or one for each; None is SamplingParams().

        Raises:
            NanoinferError: a prompt or parameter is not usable; nothing has been generated then.
        """
        requests = self._make_all(prompts, params)
        with Ownership(self.core, requests):
            self.core.submit(requests)
            while not all(r.finished for r in requests):
                self.core.step()
        return [self.core.output(r) for r in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TextStream:
        """Generate for one prompt (n=1) and yield its text as it is made, whole characters only.

        Checks happen at the call, before the first piece is asked for. Closing or dropping the iterator ends the
        request. Any number of iterators may be open and read in any order.

        Raises:
            NanoinferError: the prompt or a parameter is not usable, n is not 1, or the model has no tokenizer; from the
                iterator: the request has failed.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise NanoinferError(f"n={params.n}: stream makes one text; use generate, or stream_outputs")
        if self.tokenizer is None:
            raise NanoinferError(self._no_tokenizer_reason)
        return TextStream(OutputStream(self.core, self._make_all([prompt], params)))

    def stream_outputs(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> tuple[list[int], OutputStream]:
        """Generate for any number of prompts; yield each step's deltas, and each request's output when it ends.

        Returns:
            the requests' ids in the order of the prompts, and the iterator. Closing, dropping or interrupting it ends
            the requests that are unfinished.
        """
        requests = self._make_all(prompts, params)
        return [r.request_id for r in requests], OutputStream(self.core, requests)

    # Requests --------------------------------------------------------------------------------------------

    def _make_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Check all requests and return them; they are not queued yet."""
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
        return requests

    def _make(self, prompt: str | list[int], params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"params={params!r} is not a SamplingParams")
        token_ids = self.encode(prompt)
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

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; an empty one is the model's start token.

        Raises:
            NanoinferError: text without a tokenizer, ids outside the vocabulary, or an empty prompt for a
                model with no start token.
        """
        token_ids = as_prompt(prompt)
        if isinstance(token_ids, str):
            if self.tokenizer is None:
                raise NanoinferError(self._no_tokenizer_reason)
            token_ids = self.tokenizer.encode(token_ids)
        for t in token_ids:
            if not 0 <= t < self.config.vocab_size:
                raise NanoinferError(f"token id {show(t)} is not an integer in [0, {self.config.vocab_size - 1}]")
        if not token_ids:
            if self.config.bos_token_id is None:
                raise NanoinferError(
                    f"the prompt is empty, and model {self.model_name!r} has no start token: give at least one"
                    " character"
                )
            token_ids = [self.config.bos_token_id]
        return token_ids

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

    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Score]:
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
        scores = []
        for i, text in enumerate(many := as_list(texts)):
            with numbered(i, len(many)):
                scores.append(self._score(text, stride, progress))
        return scores

    def _score(self, text: str | list[int], stride: int, progress: Callable[[int, int], None] | None) -> Score:
        ids = self.encode(text)
        if len(ids) < 2:
            raise NanoinferError(f"a text of {len(ids)} tokens cannot be scored: the first has no context; give two")
        total, scored = 0.0, 1  # ids[:scored] need no more scoring
        while scored < len(ids):
            # The window that scores ids[scored:end] begins as early as the context length allows.
            end = min(len(ids), scored + stride if scored > 1 else self.config.block_size + 1)
            start = max(0, end - 1 - self.config.block_size)
            window, first = ids[start:end], scored - start
            total += self.core.use_engine(len(window), partial(_log_likelihood, ids=window, first=first))
            if not math.isfinite(total):
                raise ResultError(
                    f"the log-likelihood of its first {end} tokens is {total}: the model's arithmetic overflowed; use"
                    " dtype=float32, and check the weights"
                )
            scored = end
            if progress is not None:
                progress(scored, len(ids))
        characters = len(text) if isinstance(text, str) else None
        return Score(len(ids) - 1, characters, total, math.exp(min(-total / (len(ids) - 1), 700.0)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises NanoinferError without a tokenizer."""
        if self.tokenizer is None:
            raise NanoinferError(self._no_tokenizer_reason)
        return decode(self.tokenizer, token_ids)


def _log_likelihood(engine: Engine, ids: list[int], first: int) -> float:
    """Return the log-likelihood of ids[first:] given what is before each, in nats."""
    import torch

    handle = engine.open()
    try:
        total = 0.0
        for at in range(0, len(ids) - 1, SCORE_CHUNK):
            inputs = ids[at : min(at + SCORE_CHUNK, len(ids) - 1)]
            targets = ids[at + 1 : at + 1 + len(inputs)]
            num_logits = min(len(inputs), max(0, at + 1 + len(inputs) - first))
            batch = StepBatch()
            batch.add(handle, inputs, num_logits)
            logits = engine.extend(batch)
            if num_logits:
                picked = torch.tensor(targets[-num_logits:], device=logits.device)[:, None]
                total += logits.double().log_softmax(-1).gather(-1, picked).sum().item()
        return total
    finally:
        engine.close(handle)
