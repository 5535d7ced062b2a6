"""Build a generation core from a configuration, for `LLM` and for servers."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.config import LLMConfig, SchedulerConfig
from nanoinfer.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.devices import resolve_device, resolve_dtype
from nanoinfer.model_info import ModelInfo
from nanoinfer.models.checkpoints.load import fit_engine, load_model
from nanoinfer.overlap import overlap_scheduler
from nanoinfer.sampling.choose import choose_sampler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.speculative.draft_factory import DraftFactory


@dataclass(frozen=True)
class BuiltCore:
    """A core with its model and its factory of drafts."""

    core: Core
    model: ModelInfo
    drafts: DraftFactory
    """Makes the values of `Core.speculator`."""


def build_core(config: LLMConfig) -> BuiltCore:
    """Load a model, start its engine and return a core without requests, with the draft of the configuration.

    Raises:
        NanoinferError: the model, engine, device or draft does not exist, a file is malformed, or memory is
            insufficient.
    """
    options, speculation = fit_engine(config.model, config.engine), config.speculation
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    spec = registry.resolve(options, device, dtype)
    sampler = choose_sampler(device, options.sampler)
    loaded = load_model(config.model, dtype=dtype, seed=config.seed, tokenizer=config.tokenizer)
    vocab_size = loaded.config.vocab_size
    if loaded.tokenizer is not None:
        vocab_size = min(vocab_size, loaded.tokenizer.vocab_size)
    model = ModelInfo(
        name=loaded.name,
        source=config.model,
        config=loaded.config,
        tokenizer=loaded.tokenizer,
        no_tokenizer_reason=loaded.no_tokenizer_reason,
        vocab_size=vocab_size,
        engine=spec.name,
        device=device,
        dtype=dtype,
        seed=config.seed,
        chat_template=loaded.chat_template,
        no_chat_template_reason=loaded.no_chat_template_reason,
        special_tokens=loaded.special_tokens,
    )
    drafts = DraftFactory(model, options)
    if speculation.draft is not None:
        options = drafts.leave_room(speculation.draft)
    engine = registry.build(spec, loaded.take(), options, device)
    limits = engine.limits
    scheduler = Scheduler(SchedulerConfig(limits.max_num_seqs, limits.block_size, limits.max_num_cached_tokens))
    overlap = overlap_scheduler(engine, vocab_size, device) if options.sampler == "auto" else None
    core = Core(engine, scheduler, sampler, model.tokenizer, vocab_size, overlap=overlap)
    drafts.start(engine)
    if speculation.draft is not None:
        core.speculator = drafts.speculator(speculation)
    return BuiltCore(core, model, drafts)
