"""The Python API: load a model, generate, stream, score.

llm = LLM("shakespeare")
llm.generate(["O Romeo,", "To be"], SamplingParams(max_tokens=100, temperature=0.8))
for piece in llm.stream("O Romeo,"): ...
llm.perplexity(["To be, or not to be"])
llm.loglikelihood("To be, or", [" not to be", " to bee"])
llm.chat([{"role": "user", "content": "Hi"}])                # a model with a chat template
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.config import LLMConfig, SpeculationConfig
from nanoinfer.core.beam_search import beam_search_output
from nanoinfer.core.build import build_core
from nanoinfer.entrypoints import scoring
from nanoinfer.entrypoints.input_processor import Lora, Params, RequestFactory
from nanoinfer.entrypoints.pooling import Pooler, make_all, pairs, scores
from nanoinfer.entrypoints.streams import OutputStream, Ownership, TextStream, all_finished
from nanoinfer.entrypoints.vllm_names import llm_config, llm_signature, model_defaults
from nanoinfer.errors import NanoinferError, ResultError, show
from nanoinfer.inputs.prompts import Prompt, as_list, numbered
from nanoinfer.outputs import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    LoglikelihoodOutput,
    PerplexityOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from nanoinfer.sampling_params import BeamSearchParams, LoRARequest, PoolingParams, SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.tokenizers.tokenizer import Tokenizer, decode
from nanoinfer.utils.checks import require_bool
from nanoinfer.utils.processes import computing
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from nanoinfer.entrypoints.chat import Conversation
    from nanoinfer.inputs.chat import ChatFormatter
    from nanoinfer.inputs.messages import Message


class LLM:
    """A loaded model on an engine. Thread-safe: a lock serializes the steps of several threads.

    Args:
        model: a built-in model (shakespeare), random:<preset>, a Hugging Face folder, a GGUF file, a nanoGPT ckpt.pt, a
            Hub repository (gpt2, gpt2-xl, name/repo), or wide:<model>:<preset>, the model widened to a preset's size.
        tokenizer: where to load the tokenizer from, if not from the model.
        seed: of random:<preset> weights.
        options: fields of `EngineConfig` (engine, device, dtype, quantization, max_num_seqs, kv_cache_memory, threads,
            ...), of `SpeculationConfig` (draft, speculate_k, speculate_rule) and of `SchedulerConfig`
            (max_num_batched_tokens, target_step_ms, max_num_queued, enable_prefix_caching, prefix_cache_file); see
            config.py. Further arguments of vLLM are accepted where they have no effect: docs/from-vllm.md.

    Raises:
        NanoinferError: the model, engine, device or draft does not exist, a file is malformed, or memory is
            insufficient; or an argument of vLLM asks for what is not here.
        TypeError: an option is unknown.
    """

    formatter: ChatFormatter
    """Of chats: imported and made when it is first used."""

    def __init__(self, model: str, *, tokenizer: str | None = None, seed: int = 0, **options: Any) -> None:
        self._start(llm_config(model, {"tokenizer": tokenizer, "seed": seed, **options}))

    __init__.__signature__ = llm_signature()  # type: ignore[attr-defined]  # for help() and editors

    @classmethod
    def from_config(cls, config: LLMConfig) -> LLM:
        """Return an LLM for a configuration. Raises the errors of the constructor."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @computing()
    def _start(self, config: LLMConfig) -> None:
        built = build_core(config)
        self.core, self.model, self._drafts = built.core, built.model, built.drafts
        self.requests, self.engine = RequestFactory(self.core, self.model), self.core.engine
        self.pooler = Pooler(self.core, self.model, self.requests)
        self.model_name, self.engine_name = self.model.name, self.model.engine
        self.config, self.tokenizer = self.model.config, self.model.tokenizer
        self.device, self.dtype = self.model.device, self.model.dtype

    def __getattr__(self, name: str) -> Any:
        if name != "formatter":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        from nanoinfer.inputs.chat import ChatFormatter

        return self.__dict__.setdefault(name, ChatFormatter(self.model))

    def set_draft(
        self, draft: str | None, *, speculate_k: str | int = "auto", speculate_rule: str = "reproduce"
    ) -> None:
        """Set the draft from the next step on, or None for plain decoding.

        A draft that was used before is not loaded again. kv_cache_memory limits the KV caches of the model and of the
        draft given to the constructor; drafts set later allocate additional KV memory. The states of recurrent layers
        have room for max_speculate_k proposals, or those of the constructor's draft.

        Raises:
            NanoinferError: as the constructor.
        """
        config = SpeculationConfig(draft, speculate_k, speculate_rule)
        speculator = None
        if draft is not None:  # between two steps, because the durations of the engine's steps are measured
            speculator = self.core.use_engine(
                self.config.block_size, lambda engine: self._drafts().speculator(config, engine)
            )
        self.core.set_speculator(speculator)

    # Generating ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: Lora = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or several prompts and return their outputs in order.

        An error in one request (such as logits that are not finite) ends only that request: its output has
        finish_reason "error" and the message in `error`.

        Args:
            prompts: a string, a list of token ids, or a dict {"prompt": ...} or {"prompt_token_ids": ...}; or a
                list of these. A dict may have a "cache_salt": only prompts of the same salt share their prefixes.
            sampling_params: for all prompts, or one for each; None: those of the model's generation_config.json. With
                BeamSearchParams the outputs are those of a beam search, the best first.
            use_tqdm: whether to show a progress bar (rich's) on stderr; None: on a terminal, after two seconds.
            lora_request: a LoRARequest for all prompts, or one or None for each; the model has enable_lora=True.
            priority: an integer for each prompt; those of smaller priority are admitted first. None: all have 0.

        Raises:
            NanoinferError: a prompt or parameter is invalid, or more than max_num_queued requests would wait. It is
                raised before anything is generated.
        """
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        requests = self.requests.make_all(prompts, sampling_params, priority, lora_request)
        return self._run(requests, "generate", use_tqdm)

    def _run(self, requests: Sequence[Request], what: str, use_tqdm: bool | None) -> list[RequestOutput]:
        """Run requests beside others, and return their outputs. Args: what: names the progress bar."""
        with Ownership(self.core, requests), ProgressBar(what, use_tqdm) as bar:
            self.core.submit(requests)
            finished = all_finished(requests)
            while not finished():
                self.core.step(until=finished)
                if bar.due():
                    bar.update(sum(r.finished for r in requests), len(requests))
        return [self.core.output(r) for r in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: Lora = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the beam_width outputs with the highest scores that a beam search finds for each prompt.

        All searches run at once, beside other requests. A search needs beam_width of the engine's max_num_seqs. A
        search that fails (such as by logits that are not finite) has no sequences, and the message in `error`.

        Args:
            prompts, lora_request, use_tqdm: as for `generate`.
            params: of all searches. See docs/beam-search.md.

        Raises:
            NanoinferError: as `generate`; or beam_width is more than max_num_seqs.
        """
        if not isinstance(params, BeamSearchParams):
            raise NanoinferError(f"params={show(params)} is not a BeamSearchParams")
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        return [beam_search_output(output, params, lambda token: self.decode([token])) for output in outputs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> TextStream:
        """Generate for one prompt (n=1) and yield the output text in pieces of whole characters.

        The call checks the arguments, before the first iteration. Closing or dropping the iterator ends the request.
        Any number of iterators may be open and may be read in any order.

        Raises:
            NanoinferError: the prompt or a parameter is invalid, n is not 1, or the model has no tokenizer; from the
                iterator: the request has failed.
        """
        params = self.requests.defaults if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise NanoinferError(f"sampling_params={show(params)} is not a SamplingParams")
        if params.n != 1 or not params.detokenize:
            raise NanoinferError(
                f"n={params.n}, detokenize={params.detokenize}: stream yields the text of one output; use generate or"
                " stream_outputs"
            )
        self.model.require_tokenizer()
        return TextStream(OutputStream(self.core, self.requests.make_all([prompt], params, lora=lora_request)))

    def stream_outputs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        lora_request: Lora = None,
    ) -> tuple[list[int], OutputStream]:
        """Generate for any number of prompts; yield the deltas of each step, and the output of each finished request.

        An output of a beam search is one delta at the end of the search.

        Returns:
            the request ids in the order of the prompts, and the iterator. Closing, dropping or interrupting the
            iterator ends the unfinished requests.
        """
        requests = self.requests.make_all(prompts, sampling_params, lora=lora_request)
        return [r.request_id for r in requests], OutputStream(self.core, requests)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; for an empty prompt, the model's start token.

        A text begins with the start token if the tokenizer says so (`tokenizer.bos_token_id`).

        Raises:
            NanoinferError: the prompt is text and the model has no tokenizer, an id is outside the vocabulary, or the
                prompt is empty and the model has no start token.
        """
        return self.requests.tokenize(prompt)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises NanoinferError if the model has none."""
        return self.model.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json, which are used where none are given.

        Without that file, and with generation_config="vllm", they are SamplingParams().

        Raises:
            NanoinferError: one of them is invalid.
        """
        return model_defaults(self.model.sampling_defaults)

    def reset_prefix_cache(self) -> None:
        """Free the keys and values of ended requests, which later ones could share."""
        self.core.reset_prefix_cache()

    def save_prefix_cache(self) -> int:
        """Write the keys and values of ended requests to `prefix_cache_file`, as at the exit of the process.

        Returns:
            the number of sequences that the file has.

        Raises:
            NanoinferError: there is no such option, or the file cannot be written.
        """
        return self.core.save_prefix_cache()

    # Chat ------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: Lora = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one or several conversations, and return the outputs in order.

        The prompt is what the model's chat template makes of the messages. See `conversation` for several turns.

        Args:
            messages: a conversation, or a list of conversations. A conversation is a list of {"role": ..., "content":
                ...}; a content is a string or a list of {"type": "text", "text": ...}. Other keys go to the template.
            sampling_params, use_tqdm, lora_request: as for `generate`.
            options: fields of `ChatOptions`: tools, tool_choice, enable_thinking, chat_template, ...; docs/chat.md.

        Returns:
            the outputs; each of `outputs` has a `message`: content, reasoning and calls of tools.

        Raises:
            NanoinferError: as `generate`; or the model has no chat template, a message or a tool is malformed, or the
                template refuses the messages or exceeds a limit (docs/chat.md).
            TypeError: an option is unknown.
        """
        from nanoinfer.entrypoints.chat import AnswerReader, chat_prompt
        from nanoinfer.inputs.chat import ChatOptions
        from nanoinfer.inputs.messages import as_conversations

        chat_options, many = ChatOptions(**options), as_conversations(messages)
        each = self.requests.per_prompt(sampling_params, len(many))
        prompts, tokens = [], []
        for i, (conversation, params) in enumerate(zip(many, each, strict=True)):
            with numbered(i, len(many), "conversation"):
                prompt = chat_prompt(self.formatter, conversation, chat_options, params)
                tokens.append({"prompt_token_ids": self.requests.fit(prompt.text, params, rendered=True)})
                prompts.append(prompt.compiled(self.requests))
        of_prompts = [prompt.params for prompt in prompts]
        outputs = self.generate(tokens, of_prompts, use_tqdm=use_tqdm, lora_request=lora_request)
        return [
            replace(AnswerReader(prompt.answers).read(output), prompt=prompt.text)
            for output, prompt in zip(outputs, prompts, strict=True)
        ]

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of the prompt that `chat` makes of a conversation: for `stream` and `generate`.

        Args:
            messages: one conversation.
            options: as for `chat`.

        Raises:
            NanoinferError: as `chat`.
            TypeError: an option is unknown.
        """
        from nanoinfer.inputs.chat import ChatOptions
        from nanoinfer.inputs.messages import as_conversation

        return self.formatter.encode(self.formatter.render(as_conversation(messages), ChatOptions(**options)))

    def conversation(
        self, system: str | None = None, *, lora_request: LoRARequest | None = None, **options: Any
    ) -> Conversation:
        """Return an empty conversation: it keeps the messages, and each turn processes its new tokens only.

        Args:
            system: content of the system message; None: no such message.
            lora_request: the adapter of all answers.
            options: as for `chat`, of all turns.

        Raises:
            NanoinferError: the model has no chat template or no tokenizer.
            TypeError: an option is unknown.
        """
        from nanoinfer.entrypoints.chat import Conversation
        from nanoinfer.inputs.chat import ChatOptions

        self.model.require_tokenizer()
        return Conversation(self.core, self.requests, self.formatter, ChatOptions(**options), system, lora_request)

    # Embeddings and scores -------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: `output.outputs.embedding`. See docs/embeddings.md.

        Args:
            prompts: in the forms of `generate`. A text gets the start and end tokens of the tokenizer's files.
            pooling_params: for all prompts, or one for each.
            use_tqdm: as for `generate`.
            lora_request: the adapter of all prompts.

        Raises:
            NanoinferError: a prompt or parameter is invalid, a prompt is longer than the context length, the model's
                files ask for a pooling that is not supported, or more than max_num_queued requests would wait.
            ResultError: hidden states are not finite.
        """
        readings = self.pooler.embed(prompts, pooling_params, lora_request)
        outputs = self._run(requests := make_all(readings), "embed", use_tqdm)
        for i, request in enumerate(requests):
            (sequence,) = request.sequences
            if sequence.finish_reason != "stop":
                with numbered(i, len(requests)):
                    raise ResultError(sequence.error or "another call was interrupted, and ended the request")
        return [reading.result(output) for reading, output in zip(readings, outputs, strict=True)]

    def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of the embeddings of each document and its query: `output.outputs.score`.

        Args:
            queries: one for all documents, or one for each.
            documents, pooling_params, use_tqdm: as for `embed`.

        Raises:
            NanoinferError, ResultError: as `embed`; or the numbers of queries and documents differ.
        """
        inputs, num_queries = pairs(queries, documents)
        return scores(self.embed(inputs, pooling_params, use_tqdm=use_tqdm), num_queries)

    # Scoring ---------------------------------------------------------------------------------------------

    def loglikelihood(
        self,
        contexts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[LoglikelihoodOutput]:
        """Return the log-likelihood of each continuation given its context: a value for each token, and their sum.

        For multiple choice, give one context and several continuations. Text is tokenized as in lm-evaluation-harness:
        spaces at the end of a context move to the continuation, and context and continuation are tokenized together. An
        empty context is the model's start token. If the context is too long, its first tokens are dropped
        (`num_dropped_tokens`).

        Args:
            contexts: one for all continuations, or one for each; in the forms of `generate`'s prompts.
            continuations: text if the context is text, token ids if it is token ids.
            lora_request: the adapter of all of them.

        Raises:
            NanoinferError: a continuation has no tokens or is longer than the context length, or a context is empty and
                the model has no start token.
        """
        self.model.require_head()
        before, after = as_list(contexts), as_list(continuations)
        if len(before) == 1:
            before *= len(after)
        if len(before) != len(after):
            raise NanoinferError(
                f"{len(before)} contexts, but {len(after)} continuations: give one context, or one per continuation"
            )
        pairs = []
        for i, (context, continuation) in enumerate(zip(before, after, strict=True)):
            with numbered(i, len(after), "continuation"):
                pairs.append(self.requests.pair(context, continuation))
        scored = scoring.loglikelihoods(self.core, pairs, lora_request)
        outputs = []
        for i in range(len(pairs)):
            with numbered(i, len(pairs), "continuation"):
                outputs.append(next(scored))
        return outputs

    def perplexity(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PerplexityOutput]:
        """Return log-likelihood and perplexity of each text.

        The first token has no context and is not scored. A text longer than the context length is scored in overlapping
        windows that advance by `stride` tokens. Each window scores the tokens that no earlier window scored, so every
        token has at least block_size - stride tokens of context.

        Args:
            texts: in the forms of `generate`'s prompts.
            stride: 1 to block_size tokens; None is half the context length.
            progress: called after each window with the number of scored tokens and of tokens in the text.
            lora_request: the adapter of all texts.

        Raises:
            NanoinferError: a text has fewer than two tokens, or the stride is invalid.
        """
        self.model.require_head()
        block_size = self.config.block_size
        stride = max(1, block_size // 2) if stride is None else stride
        if isinstance(stride, bool) or not isinstance(stride, int) or not 1 <= stride <= block_size:
            raise NanoinferError(f"stride={show(stride)} is not an integer in [1, {block_size}] (the context length)")
        outputs = []
        for i, text in enumerate(many := as_list(texts)):
            with numbered(i, len(many), "text"):
                ids = self.tokenize(text)
                if (count := len(ids) - 1) < 1:
                    raise NanoinferError("a text of 1 token cannot be scored: give two or more tokens")
                total = scoring.log_likelihood(self.core, ids, stride, progress, lora_request)
                characters = len(text) if isinstance(text, str) else None
                outputs.append(PerplexityOutput(count, characters, total, math.exp(min(-total / count, 700.0))))
        return outputs

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises NanoinferError without a tokenizer."""
        return decode(self.model.require_tokenizer(), token_ids)
