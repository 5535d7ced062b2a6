"""Make a drafter from the name of a draft; docs/speculative.md ("Drafts") lists the names.

On a CPU a draft model's weights are quantized for any format of the target, because errors of the draft affect only the
acceptance rate: to int4 if they are read from memory for every token, to int8 if the caches may hold them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from nanoinfer.checkpoints.load import LoadedModel, load_model
from nanoinfer.checkpoints.packed import PackedWeights
from nanoinfer.checkpoints.transforms import truncate_layers
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import MAX_K, EngineConfig, EngineLimits, ModelConfig, SpeculationConfig
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.models.parameters import num_parameters
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.speculative.assistant import Assistant, attached
from nanoinfer.speculative.base import Drafter
from nanoinfer.speculative.draft_model import DraftModel
from nanoinfer.speculative.mtp import NextTokens
from nanoinfer.speculative.prompt_lookup import POOL_TOKENS, PromptLookup
from nanoinfer.speculative.speculator import Speculator
from nanoinfer.speculative.step_costs import SIZES, StepCosts, measure_steps
from nanoinfer.tokenizers.tokenizer import Tokenizer, fingerprint

log = logging.getLogger("nanoinfer")

PROMPT_LOOKUP, MTP = "prompt-lookup", "mtp"
LOOKUPS = {PROMPT_LOOKUP: 0, "prompt-lookup:shared": POOL_TOKENS}  # name -> tokens of other requests
LARGE_DRAFT = 1 << 25  # parameters: more than the last-level caches of most CPUs hold in int8
PROMPT_SIZES = (16, 64, 256)  # tokens of the steps that are timed to estimate the prefill of a draft model
COMPANIONS = {  # target -> its draft; wide:<model>:<preset> uses the draft of the model
    "shakespeare": "shakespeare-draft",
    "gpt2-medium": "distilbert/distilgpt2",
    "gpt2-large": "distilbert/distilgpt2",
    "gpt2-xl": "gpt2",
}


class DraftFactory:
    """Makes and caches the drafters of one target. A drafter is made when it is first requested.

    Args:
        target: the model that the drafts must match.
        config: configuration of the target's engine; drafts use its number of threads.
    """

    def __init__(self, target: ModelInfo, config: EngineConfig) -> None:
        self._target, self._config = target, config
        self._engine: Engine | None = None
        self._loaded: dict[str, tuple[Weights, str | None]] = {}
        """Models that have no engine yet, with the quantization of their engine."""
        self._drafters: dict[str, Drafter] = {}
        self._speculators: dict[tuple[str, str, int | None], Speculator] = {}
        """Speculators by draft, rule and k. A speculator that is requested again keeps its costs and statistics."""
        self._costs: StepCosts | None = None

    def leave_room(self, speculation: SpeculationConfig) -> EngineConfig:
        """Return the target's configuration with kv_cache_memory less the draft's share, and room for its proposals.

        Raises:
            NanoinferError: the draft does not exist, or its vocabulary differs from the target's.
        """
        name, target, own = self._resolve(speculation.draft or ""), self._target, self._config
        config = replace(own, max_speculate_k=max(own.max_speculate_k, speculation.fixed_k or MAX_K))
        if name in LOOKUPS:
            return config
        self._loaded[name] = weights, _ = self._load(name)
        if config.kv_cache_memory is None:
            return config
        ours, its = (c.kv_bytes_per_token(1) for c in (target.config, weights.config))
        return replace(config, kv_cache_memory=max(1, config.kv_cache_memory * ours // (ours + its)))

    def speculator(self, config: SpeculationConfig, engine: Engine) -> Speculator:
        """Return the speculator for a configuration.

        Args:
            config: of the speculation.
            engine: the target's, whose limits the drafts' engines get.

        Raises:
            NanoinferError: the draft does not exist, its vocabulary differs from the target's, no engine supports it,
                or its KV cache does not fit in memory.
        """
        assert config.draft is not None
        self._engine = engine
        name, rule, k = self._resolve(config.draft), config.speculate_rule, config.fixed_k
        if engine.states is not None and (k or MAX_K) >= engine.limits.num_pending:
            raise NanoinferError(
                f"draft={name!r} proposes up to {k or MAX_K} tokens, the states of recurrent layers have room to reject"
                f" {engine.limits.num_pending - 1}: give max_speculate_k={k or MAX_K} to LLM"
            )
        if (name, rule, k) not in self._speculators:
            if name not in self._drafters:
                lookup = PromptLookup(LOOKUPS[name]) if name in LOOKUPS else None
                self._drafters[name] = lookup or self._build(name, engine.limits)
            if k is None and self._costs is None:
                self._costs = StepCosts(measure_steps(engine, 4 * engine.limits.max_num_seqs + MAX_K))
            costs = self._costs if k is None else None
            self._speculators[name, rule, k] = Speculator(self._drafters[name], rule=rule, speculate_k=k, costs=costs)
        return self._speculators[name, rule, k]

    def _build(self, name: str, limits: EngineLimits) -> Drafter:
        target = self._target
        weights, quantization = self._loaded.pop(name) if name in self._loaded else self._load(name)
        config = EngineConfig(quantization=quantization)
        assists = weights.config.backbone is not None
        if assists:
            config = replace(config, engine=target.engine)
        if name == MTP and not self._native_draft:
            config = replace(config, engine="static")  # the engines of static shapes take no hidden states
        spec = registry.resolve(config, target.device, target.dtype)
        if "threads" in spec.options:
            config = replace(config, threads=self._config.threads)
        block_size = weights.config.block_size
        if assists:
            assert self._engine is not None
            engine = registry.build(spec, weights, config, target.device, limits, self._engine)
            sampler = choose_sampler(target.device)
            return Assistant(name, engine, self._engine, weights, sampler, target.vocab_size)
        room = limits_of_draft(limits, weights.config)
        owner = self._engine if name == MTP and self._shares else None
        engine = registry.build(spec, weights, config, target.device, room, owner)
        log.info("draft: %s on engine %s", name, spec.name)
        sizes = sorted({*(n for n in SIZES if n <= limits.max_num_seqs), *PROMPT_SIZES})
        times = measure_steps(engine, block_size, sizes=sizes)
        reading = measure_steps(engine, block_size, sizes=(1, *PROMPT_SIZES), max_logits=1)
        kind = NextTokens if name == MTP else DraftModel
        return kind(name, engine, choose_sampler(target.device), target.vocab_size, times, reading)

    def _load(self, name: str) -> tuple[Weights, str | None]:
        """Return the weights of a draft, with the target's context length if that is shortened; and a quantization."""
        weights, quantization = self._open(name)
        longest = self._config.max_model_len
        return weights.shortened(longest and min(longest, weights.config.block_size)), quantization

    @property
    def _native_draft(self) -> bool:
        """Whether draft models run on engine `native`."""
        return self._target.device == "cpu" and registry.ENGINES["native"].unavailable() is None

    @property
    def _shares(self) -> bool:
        """Whether a block for multi-token prediction can have the embedding and the head of the target's engine."""
        target, native = self._target, self._native_draft
        return (target.engine == "native") == native and (native or target.quantization is None)

    def _open_mtp(self) -> tuple[Weights, str | None]:
        target = self._target
        mtp = load_model(target.source, dtype=target.dtype, seed=target.seed).take().mtp if target.has_mtp else None
        if mtp is None:
            raise NanoinferError(
                f"draft='mtp': {target.source!r} has no block that predicts a further token: use auto or another draft"
            )
        weights = mtp(self._shares)
        if isinstance(weights, PackedWeights):
            return weights, weights.quantization
        num_own = num_parameters(weights.config) - target.config.vocab_size * target.config.n_embd * (
            2 - target.config.tie_word_embeddings if self._shares else 0
        )
        quantized = self._native_draft and not weights.block_formats
        return weights, ("int4" if num_own > LARGE_DRAFT else "int8") if quantized else None

    def _open(self, name: str) -> tuple[Weights, str | None]:
        target, native = self._target, registry.ENGINES["native"]
        if name == MTP:
            return self._open_mtp()
        if not name.startswith("self:"):
            loaded = load_model(name, dtype=target.dtype, seed=target.seed)
            _check_vocabulary(loaded, target)
            weights = loaded.take()
            if isinstance(weights, PackedWeights):
                return weights, weights.quantization
            if weights.config.backbone is not None:
                if target.engine not in ("dynamic", "static", "paged", "native"):
                    raise NanoinferError(f"draft={name!r} reads keys: use engine dynamic, static, paged or native")
                weights = replace(weights, config=attached(weights.config, target.config, name))
            if not self._native_draft or (weights.config.backbone is not None and target.engine != "native"):
                return weights, None
            return weights, "int4" if num_parameters(weights.config) > LARGE_DRAFT else "int8"
        how = name.removeprefix("self:")
        if not how.isdecimal() and how not in native.quantizations:
            formats = ", ".join(f"self:{q}" for q in native.quantizations)
            raise NanoinferError(f"draft={name!r} is unknown: use {formats} or self:<number of layers>")
        weights = load_model(target.source, dtype=target.dtype, seed=target.seed).take()
        if not how.isdecimal():
            return weights, how
        try:
            return truncate_layers(weights, int(how)), None
        except NanoinferError as e:
            raise NanoinferError(f"draft={name!r}: {e}") from None

    def _resolve(self, draft: str) -> str:
        """Return the name of the draft that `auto` selects; any other name is returned unchanged."""
        if draft != "auto":
            return draft
        target = self._target.source
        source = target.split(":")[1] if target.startswith("wide:") else target
        own = MTP if self._target.has_mtp else PROMPT_LOOKUP
        chosen = COMPANIONS.get(source.removeprefix("openai-community/"), own)
        log.info("draft=auto: %s", chosen)
        return chosen


def limits_of_draft(target: EngineLimits, model: ModelConfig) -> EngineLimits:
    """Return the limits of a draft's engine: the target's tokens, at most those of full sequences, in whole blocks."""
    num_seqs = target.max_num_seqs
    full, num_blocks = (-(-n // KV_BLOCK) for n in (model.block_size, target.max_num_cached_tokens))
    num_states = (target.num_states or 2 * num_seqs) if model.recurrence else 0
    tokens = max(full, min(num_blocks, num_seqs * full)) * KV_BLOCK
    return EngineLimits(num_seqs, model.block_size, tokens, num_states=num_states, num_pending=target.num_pending)


def _check_vocabulary(draft: LoadedModel, target: ModelInfo) -> None:
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is not None and theirs is not None:
        same = fingerprint(ours) == fingerprint(theirs)
    else:  # without tokenizers, only the sizes can be compared
        same = draft.config.vocab_size == target.config.vocab_size
    if not same:
        raise NanoinferError(
            f"draft {draft.name!r} ({_describe(theirs, draft.config)}) does not share the vocabulary of"
            f" {target.source!r} ({_describe(ours, target.config)}): use a draft with the same tokenizer"
        )


def _describe(tokenizer: Tokenizer | None, config: ModelConfig) -> str:
    """ "2,048 tokens, ByteLevelTokenizer"; "50,257 tokens, no tokenizer"."""
    if tokenizer is None:
        return f"{config.vocab_size:,} tokens, no tokenizer"
    return f"{tokenizer.vocab_size:,} tokens, {type(tokenizer).__name__}"
