"""From the name of a draft to a drafter.

    prompt-lookup        what the text itself said before
    a model              any name that `load_model` takes: shakespeare-draft, gpt2, a folder, a ckpt.pt
    self:int8 self:int4  the target itself in fewer bits
    self:6               the target's first 6 layers under its own final norm and head (early exit)
    auto                 the companion of a model that has one, else prompt-lookup

A draft need not be right, so on a CPU its weights are packed in 8 bits whatever the target's are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanoinfer.config import EngineConfig, ModelConfig, SpeculationConfig
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, EngineLimits
from nanoinfer.errors import NanoinferError
from nanoinfer.models import tokenizers
from nanoinfer.models.checkpoints.load import LoadedModel, load_model
from nanoinfer.models.cut import cut
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.speculative.costs import measure_steps
from nanoinfer.speculative.draft_model import DraftModel
from nanoinfer.speculative.pace import MAX_K
from nanoinfer.speculative.prompt_lookup import PromptLookup
from nanoinfer.speculative.speculator import Speculator

if TYPE_CHECKING:
    import torch

    from nanoinfer.models.gpt import GPT
    from nanoinfer.models.tokenizers import Tokenizer

log = logging.getLogger("nanoinfer")

PROMPT_LOOKUP = "prompt-lookup"
COMPANIONS = {  # target -> its draft; wide:shakespeare:<preset> has shakespeare's
    "shakespeare": "shakespeare-draft",
    "gpt2-medium": "distilbert/distilgpt2",
    "gpt2-large": "distilbert/distilgpt2",
    "gpt2-xl": "gpt2",
}


@dataclass(frozen=True)
class Target:
    """What a drafter must fit."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None
    vocab_size: int
    """Of tokens that may be drawn."""
    device: torch.device
    dtype: torch.dtype
    seed: int
    """Of random weights."""


class Draft:
    """A draft that is loaded and has no engine yet: what its cache takes is settled with the target's.

    Args:
        config: which draft.
        target: what it must fit.

    Raises:
        NanoinferError: there is no such draft, or its vocabulary is not the target's.
    """

    def __init__(self, config: SpeculationConfig, target: Target) -> None:
        assert config.draft is not None
        self._config, self._target = config, target
        self.name = _resolve(config.draft, target.name)
        self._quantization: str | None = None
        self._gpt: GPT | None = None if self.name == PROMPT_LOOKUP else self._load()

    def _load(self) -> GPT:
        target = self._target
        if not self.name.startswith("self:"):
            loaded = load_model(self.name, dtype=target.dtype, seed=target.seed)
            _check_vocabulary(loaded, target)
            if target.device.type == "cpu" and registry.ENGINES["native"].unavailable() is None:
                self._quantization = "int8"
            return loaded.take()
        how = self.name.removeprefix("self:")
        gpt = load_model(target.name, dtype=target.dtype, seed=target.seed).take()
        if how.isdecimal():
            return cut(gpt, int(how))
        if how not in registry.ENGINES["native"].quantizations:
            formats = ", ".join(f"self:{q}" for q in registry.ENGINES["native"].quantizations)
            raise NanoinferError(f"draft={self.name!r} is unknown: use {formats} or self:<number of layers>")
        self._quantization = how
        return gpt

    def leave_room(self, config: EngineConfig) -> EngineConfig:
        """Return the target's configuration with the draft's share taken off a kv_cache_memory that was asked for."""
        if config.kv_cache_memory is None or self._gpt is None:
            return config
        ours = self._target.config.kv_bytes_per_token(1)
        share = ours / (ours + self._gpt.config.kv_bytes_per_token(1))
        return replace(config, kv_cache_memory=max(1, int(config.kv_cache_memory * share)))

    def build(self, config: EngineConfig, engine: Engine) -> Speculator:
        """Return a speculator with this drafter.

        Args:
            config: of the target's engine; the draft takes its threads.
            engine: the target's; the draft holds as many sequences and tokens.

        Raises:
            NanoinferError: no engine runs the draft, or its keys and values do not fit the memory.
        """
        limits, k = engine.limits, self._config.fixed_k
        drafter = PromptLookup() if self._gpt is None else self._build_model(config, limits)
        times = measure_steps(engine, 4 * limits.max_num_seqs + MAX_K) if k is None else None
        return Speculator(drafter, rule=self._config.speculate_rule, speculate_k=k, times=times)

    def _build_model(self, config: EngineConfig, limits: EngineLimits) -> DraftModel:
        assert self._gpt is not None
        target = self._target
        gpt, self._gpt = self._gpt, None
        own = EngineConfig(quantization=self._quantization)
        spec = registry.resolve(own, target.device, target.dtype)
        if "threads" in spec.options:
            own = replace(own, threads=config.threads)
        block_size = gpt.config.block_size
        tokens = min(limits.max_num_cached_tokens, limits.max_num_seqs * block_size)
        room = EngineLimits(limits.max_num_seqs, block_size, tokens)
        engine = registry.build(spec, gpt.to(target.device), own, room)
        log.info("draft: %s on engine %s", self.name, spec.name)
        times = measure_steps(engine, limits.max_num_seqs)
        sampler = choose_sampler(target.device)
        reject = self._config.speculate_rule == "reject"
        return DraftModel(self.name, engine, sampler, target.vocab_size, times, keep_weights=reject)


def _resolve(draft: str, target: str) -> str:
    """Return the draft that `auto` stands for; other names are themselves."""
    if draft != "auto":
        return draft
    source = target.split(":")[1] if target.startswith("wide:") else target
    chosen = COMPANIONS.get(source.removeprefix("openai-community/"), PROMPT_LOOKUP)
    log.info("draft=auto: %s", chosen)
    return chosen


def _check_vocabulary(draft: LoadedModel, target: Target) -> None:
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is not None and theirs is not None:
        same = tokenizers.same_vocabulary(ours, theirs)
    else:  # token ids only: all that can be compared is how many there are
        same = draft.config.vocab_size == target.config.vocab_size
    if not same:
        raise NanoinferError(
            f"draft {draft.name!r} ({_describe(theirs, draft.config)}) does not share the vocabulary of"
            f" {target.name!r} ({_describe(ours, target.config)}): use a draft with the same tokenizer"
        )


def _describe(tokenizer: Tokenizer | None, config: ModelConfig) -> str:
    """ "2,048 tokens, ByteLevelTokenizer"; "50,257 tokens, no tokenizer"."""
    if tokenizer is None:
        return f"{config.vocab_size:,} tokens, no tokenizer"
    return f"{tokenizer.vocab_size:,} tokens, {type(tokenizer).__name__}"
