"""Build a generation core from a configuration, for `LLM` and for servers."""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

from nanoinfer.checkpoints.load import fit_engine, load_model
from nanoinfer.config import EngineConfig, LLMConfig
from nanoinfer.core.adapters import Adapters
from nanoinfer.core.core import Core
from nanoinfer.core.overlap import overlap_scheduler
from nanoinfer.engines import first_use, registry
from nanoinfer.engines.devices import resolve_device, resolve_dtype
from nanoinfer.engines.native import NativeEngine
from nanoinfer.errors import NanoinferError
from nanoinfer.models.model_info import Description, ModelInfo
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.utils import processes

if TYPE_CHECKING:
    from nanoinfer.speculative.draft_factory import DraftFactory

log = logging.getLogger("nanoinfer")


def _log_dtype(model: ModelInfo, stored: str) -> None:
    """Log what dtype=auto has chosen for a checkpoint of dtype `stored`."""
    if formats := Counter(name for parts in model.block_formats.values() for name, _ in parts):
        named = ", ".join(f"{count} in {name}" for name, count in formats.most_common())
        log.info("dtype=auto: computing with the file's own blocks (matrices: %s)", named)
    else:
        other = f" (the checkpoint is {stored})" if stored != model.dtype else ""
        log.info("dtype=auto: using %s%s", model.dtype, other)


def _store_prefixes(core: Core, path: str, model: ModelInfo) -> None:
    """Let a core share the prefixes of a file, and write it at exit. Raises NanoinferError as `StoredPrefixes`."""
    if not isinstance(core.engine, NativeEngine) or model.config.recurrence is not None:
        raise NanoinferError(
            f"prefix_cache_file={path!r} needs engine native and a model without recurrent layers: leave it out"
        )
    from nanoinfer.core.prefix_file import StoredPrefixes

    core.stored = StoredPrefixes(Path(path), core.engine, core.scheduler.cache)
    atexit.register(_save_at_exit, ref(core))


def _save_at_exit(core: ref[Core]) -> None:
    """Write the prefix cache of a core that still exists, in the process that built it."""
    if (built := core()) is not None and not processes.generation():
        try:
            built.save_prefix_cache()
        except NanoinferError as e:
            log.error("%s", e)


def _drafts(model: ModelInfo, options: EngineConfig) -> DraftFactory:
    from nanoinfer.speculative.draft_factory import DraftFactory

    return DraftFactory(model, options)


@dataclass(frozen=True)
class BuiltCore:
    """A core with its model and its factory of drafts."""

    core: Core
    model: ModelInfo
    drafts: Callable[[], DraftFactory]
    """Returns what makes the values of `Core.speculator`."""


def build_core(config: LLMConfig) -> BuiltCore:
    """Load a model, start its engine and return a core without requests, with the draft of the configuration.

    Raises:
        NanoinferError: the model, engine, device or draft does not exist, a file is malformed, or memory is
            insufficient.
    """
    options, speculation = fit_engine(config.model, config.engine), config.speculation
    device = resolve_device(options.device)
    sampler = choose_sampler(device, options.sampler)
    if options.engine != "auto":  # a wrong option is refused before a model is fetched
        registry.resolve(options, device, resolve_dtype(options.dtype, device))
    loaded = load_model(config.model, seed=config.seed, tokenizer=config.tokenizer, max_model_len=options.max_model_len)
    dtype = resolve_dtype(options.dtype, device, loaded.weights.stored_dtype)
    spec = first_use.checked(registry.resolve(options, device, dtype), loaded.config, options, device, dtype)
    if options.dtype != "auto" and options.quantization is None:  # a dtype is asked for instead of the file's blocks
        loaded.weights = replace(loaded.weights, block_formats={})
    vocab_size = loaded.config.vocab_size
    if loaded.tokenizer is not None:
        vocab_size = min(vocab_size, loaded.tokenizer.vocab_size)
    described = {each.name: getattr(loaded, each.name) for each in fields(Description)}
    described["pooling"] = loaded.pooling.with_options(config.pooling)
    if config.generation_config != "auto":
        described["sampling_defaults"] = {}
    if config.chat_template:  # the others are about the model's own template
        described |= {"chat_template": config.chat_template, "tool_template": None, "response_template": None}
    model = ModelInfo(
        **described,
        source=config.model,
        vocab_size=vocab_size,
        engine=spec.name,
        device=device,
        dtype=dtype,
        seed=config.seed,
        quantization=options.quantization or getattr(loaded.weights, "quantization", None),  # of packed weights
        block_formats=loaded.weights.formats(options.quantization) if spec.native else {},
        has_head=loaded.weights.has_head,
        has_mtp=loaded.weights.mtp is not None,
    )
    if options.dtype == "auto" and options.quantization is None:
        _log_dtype(model, loaded.weights.stored_dtype)
    drafts = lru_cache(1)(partial(_drafts, model, options))
    options = options if speculation.draft is None else drafts().leave_room(speculation)
    engine = registry.build(spec, replace(loaded.take(), dtype=dtype), options, device)
    scheduler = Scheduler(engine, config.scheduler)
    overlap = overlap_scheduler(engine, vocab_size, device) if options.sampler == "auto" else None
    adapters = Adapters(scheduler, model.config, options)
    core = Core(engine, scheduler, sampler, model.tokenizer, vocab_size, overlap=overlap, adapters=adapters)
    if (path := config.scheduler.prefix_cache_file) is not None:
        _store_prefixes(core, path, model)
    if speculation.draft is not None:
        core.speculator = drafts().speculator(speculation, engine)
    return BuiltCore(core, model, drafts)
