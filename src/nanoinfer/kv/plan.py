"""How many sequences and tokens fit in the memory of the KV cache. It does not import PyTorch."""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.errors import NanoinferError

DEFAULT_MAX_NUM_SEQS = 64
KV_BLOCK = 16
"""Tokens in a block (kBlock in kernels/cpu/kernels/kernels.h)."""
MAX_IDLE_SEQS = 1024
"""Idle sequences that may stay open beside the running ones in layouts where an open sequence costs only its tokens."""
_MIN_KEPT = 4
"""States beside those of the running sequences, of idle sequences and of prefixes."""
SLOTS = ("slots", "padded slots")
BLOCKS = ("blocks", "padded blocks")
LAYOUTS = ("none", "tokens", *SLOTS, *BLOCKS)
"""Layouts of the KV cache: none, exactly the cached tokens, a full-length slot for each sequence (padded slots have
extra columns for padding), or blocks of KV_BLOCK tokens from one pool (padded blocks: those of the engine native)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def slot_tokens(layout: str, block_size: int) -> int:
    """Return the number of tokens that a slot has memory for.

    With padding it is a multiple of 16, and column block_size takes the keys and values of padding.
    """
    return -(-(block_size + 1) // 16) * 16 if layout == "padded slots" else block_size


def plan_limits(model: ModelConfig, config: EngineConfig, layout: str, dtype: str, free_bytes: int) -> EngineLimits:
    """Return how many sequences and tokens an engine can hold.

    kv_cache_memory is a hard limit if it is set. Otherwise, the limit is a quarter of the free memory, or one
    full-length sequence if that is more, and at most max_num_seqs full-length sequences. An engine with slots reserves
    a full-length slot for each sequence; in other layouts, all sequences share the tokens.

    Args:
        model: shape of the model.
        config: max_num_seqs, kv_cache_memory, kv_cache_dtype, quantization and max_speculate_k are used.
        layout: layout of the engine's KV cache, one of LAYOUTS.
        dtype: dtype of the weights; also of keys and values, except in padded blocks.
        free_bytes: free memory on the device.

    Raises:
        NanoinferError: kv_cache_memory is too small for max_num_seqs sequences, or for one if it is None.
    """
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    if layout == "none":
        return EngineLimits(max_num_seqs, model.block_size, max_num_seqs * model.block_size, MAX_IDLE_SEQS)
    budget = config.kv_cache_memory if config.kv_cache_memory is not None else free_bytes // 4
    plan = _plan_kv if model.recurrence is None else _plan_states
    return replace(plan(model, config, layout, dtype, budget), num_pending=config.max_speculate_k + 1)


def _plan_states(model: ModelConfig, config: EngineConfig, layout: str, dtype: str, budget: int) -> EngineLimits:
    """Return the limits of an engine with states: at most half of the budget is theirs, the rest keys and values."""
    per_row, most = state_bytes(model, config.max_speculate_k + 1), config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    num_rows = budget // 2 // per_row
    if layout in SLOTS:  # a sequence reserves the keys and values of its whole context
        full = model.kv_bytes_per_token(BYTES[dtype]) * slot_tokens(layout, model.block_size)
        most = min(most, budget // 2 // max(1, full))
    num_seqs = config.max_num_seqs or max(1, min(most, num_rows // 2))
    num_kept = max(_MIN_KEPT, min(MAX_IDLE_SEQS, num_rows - num_seqs))
    rest = budget - (num_seqs + num_kept) * per_row
    if config.kv_cache_memory is not None and rest <= 0:
        raise NanoinferError(
            f"kv_cache_memory={budget:,} bytes is too little for {num_seqs} sequences, whose states alone have"
            f" {(num_seqs + num_kept) * per_row:,} bytes: raise it, or lower max_num_seqs"
        )
    limits = _plan_kv(model, replace(config, max_num_seqs=num_seqs), layout, dtype, max(0, rest))
    num_idle = 0 if layout in SLOTS else num_kept // 2  # the others are for prefixes
    return replace(limits, max_idle_seqs=num_idle, num_states=num_seqs + num_kept)


def state_bytes(model: ModelConfig, num_pending: int) -> int:
    """Return the bytes of a row of states (kv/states.py) with the inputs of `num_pending` tokens, in float32."""
    shape = model.recurrence
    assert shape is not None
    return 4 * len(model.recurrent_layers) * (shape.num_state + num_pending * shape.num_inputs)


def _plan_kv(model: ModelConfig, config: EngineConfig, layout: str, dtype: str, budget: int) -> EngineLimits:
    """Return the limits of an engine whose keys and values may take `budget` bytes; see `plan_limits`."""
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    if layout in BLOCKS:
        cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype, config.quantization)
        padded = layout == "padded blocks"
        per_block = kv_block_bytes(model, cache_dtype) if padded else KV_BLOCK * model.kv_bytes_per_token(BYTES[dtype])
        return _plan_blocks(model, config, max(1, per_block), budget)
    per_token = max(1, model.kv_bytes_per_token(BYTES[dtype]))
    full = per_token * slot_tokens(layout, model.block_size)
    fitting = budget // full  # full-length sequences
    needed = config.max_num_seqs or 1 if layout in SLOTS else 1
    if config.kv_cache_memory is not None and fitting < needed:
        raise NanoinferError(
            f"kv_cache_memory={config.kv_cache_memory:,} bytes is too little for {needed} sequences of"
            f" {model.block_size} tokens ({needed * full:,} bytes): raise it, or lower max_num_seqs"
        )
    if layout in SLOTS:
        count = config.max_num_seqs or max(1, min(max_num_seqs, fitting))
        return EngineLimits(count, model.block_size, count * model.block_size)
    tokens = min(max_num_seqs * model.block_size, max(model.block_size, budget // per_token))
    return EngineLimits(max_num_seqs, model.block_size, tokens, MAX_IDLE_SEQS)


def _plan_blocks(model: ModelConfig, config: EngineConfig, per_block: int, budget: int) -> EngineLimits:
    """Return the limits of a pool of blocks: as many as the budget allows, and at least those of one full sequence."""
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    full, num_blocks = -(-model.block_size // KV_BLOCK), budget // per_block
    if config.kv_cache_memory is None:
        num_blocks = max(full, min(num_blocks, max_num_seqs * full))
    elif num_blocks < full:
        raise NanoinferError(
            f"kv_cache_memory={config.kv_cache_memory:,} bytes is too little for 1 sequence of {model.block_size}"
            f" tokens ({full * per_block:,} bytes): raise it, or lower max_model_len"
        )
    num_seqs = config.max_num_seqs or min(max_num_seqs, num_blocks)
    num_blocks = min(num_blocks, (num_seqs + MAX_IDLE_SEQS) * full)  # more can never be used
    return EngineLimits(num_seqs, model.block_size, num_blocks * KV_BLOCK, MAX_IDLE_SEQS)


def kv_block_bytes(model: ModelConfig, cache_dtype: str) -> int:
    """Return the bytes of one block of the native engine's cache (kernels/cpu/model/cache.cpp)."""
    size = BYTES.get(cache_dtype, 1)
    unit = 4 // size  # keys are padded to units of 4 bytes, values to a vector

    def of_head(width: int) -> int:
        if cache_dtype == "int4":  # keys of 6 bits, by 16 dimensions, values of 4, by 32, and two float32 scales
            return KV_BLOCK * (-(-width // 16) * 12 + -(-width // 32) * 16 + 8)
        numbers = -(-width // unit) * unit + -(-width // 16) * 16
        part = (numbers * size + (8 if cache_dtype == "int8" else 0)) * KV_BLOCK  # int8: two float32 scales a position
        return -(-part // 64) * 64

    layers = (model.at(i) for i in model.kv_layers)
    return sum(layer.n_kv_head * of_head(layer.head_dim) for layer in layers)


def resolve_cache_dtype(kv_cache_dtype: str, dtype: str, quantization: str | None) -> str:
    """Return the type of keys and values: the requested one; for auto, one of the same width as the weights.

    With int4 weights it is int8 too: keys and values in 8 bits change the built-in model's perplexity no more than 16
    bits do (docs/quality.md), and with large batches or long contexts they are more bytes than the weights.
    """
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    if quantization is not None:
        return "int8"
    return "float32" if dtype == "float32" else "bfloat16"
