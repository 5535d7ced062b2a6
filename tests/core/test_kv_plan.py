"""What an engine states about its memory: the plan, the free blocks, and the blocks that a step takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.models import TINY, make_limits, make_weights, refuses
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import BLOCKS, KV_BLOCK, LAYOUTS, MAX_IDLE_SEQS, SLOTS, kv_block_bytes, plan_limits
from nanoinfer.speculative.draft_factory import limits_of_draft

MODEL = replace(TINY, block_size=100)  # 7 blocks of 16, the last one for 4 tokens
FULL = 7
BLOCK_BYTES = kv_block_bytes(MODEL, "float32")


def plan(layout: str = "padded blocks", free_bytes: int = 0, **options: Any) -> EngineLimits:
    return plan_limits(MODEL, EngineConfig(**options), layout, "float32", free_bytes)


def extend(engine: Engine, *parts: tuple[Handle, int]) -> None:
    batch = StepBatch()
    for handle, count in parts:
        batch.add(handle, [1] * count)
    engine.extend(batch)


@pytest.mark.parametrize("num_blocks", [FULL, FULL + 1, 50, 2000])
def test_a_pool_is_what_the_memory_pays_for(num_blocks: int) -> None:
    for rest in (0, BLOCK_BYTES - 1):
        limits = plan(kv_cache_memory=num_blocks * BLOCK_BYTES + rest, max_num_seqs=3)
        assert limits == EngineLimits(3, 100, num_blocks * KV_BLOCK, MAX_IDLE_SEQS)
    assert plan(kv_cache_memory=num_blocks * BLOCK_BYTES).max_num_seqs == min(64, num_blocks)


def test_blocks_without_padding_are_exactly_their_tokens() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        config = EngineConfig(kv_cache_memory=9 * KV_BLOCK * MODEL.kv_bytes_per_token(size))
        assert plan_limits(MODEL, config, "blocks", dtype, 0).max_num_cached_tokens == 9 * KV_BLOCK


def test_a_pool_holds_a_full_sequence() -> None:
    refuses(
        lambda: plan(kv_cache_memory=FULL * BLOCK_BYTES - 1),
        f"kv_cache_memory={FULL * BLOCK_BYTES - 1:,} bytes is too little for 1 sequence of 100 tokens",
        f"({FULL * BLOCK_BYTES:,} bytes)",
    )
    assert plan(free_bytes=0).max_num_cached_tokens == FULL * KV_BLOCK


def test_the_default_pool_is_at_most_full_sequences() -> None:
    assert plan(free_bytes=4 * 20 * BLOCK_BYTES).max_num_cached_tokens == 20 * KV_BLOCK
    assert plan(free_bytes=1 << 40).max_num_cached_tokens == 64 * FULL * KV_BLOCK
    assert plan(free_bytes=1 << 40, max_num_seqs=2).max_num_cached_tokens == 2 * FULL * KV_BLOCK


def test_a_pool_has_no_blocks_that_cannot_be_used() -> None:
    limits = plan(kv_cache_memory=1 << 60, max_num_seqs=2)
    assert limits.max_num_cached_tokens == (2 + MAX_IDLE_SEQS) * FULL * KV_BLOCK


def test_sequences_may_be_kept_where_they_reserve_nothing() -> None:
    kept = {layout: plan(layout, free_bytes=1 << 30).max_idle_seqs for layout in LAYOUTS}
    assert kept == {layout: 0 if layout in SLOTS else MAX_IDLE_SEQS for layout in LAYOUTS}


def test_kept_sequences_are_open_beside_the_running_ones() -> None:
    class Bare(Engine):
        def _open(self, handle: Handle) -> None:
            pass

        def _fork(self, parent: Handle, child: Handle) -> None:
            pass

    engine = Bare(TINY, EngineLimits(2, 32, 64, 3))
    first, *_ = [engine.open() for _ in range(4)]
    engine.fork(first)
    for more in (engine.open, lambda: engine.fork(first)):
        refuses(more, "5 sequences are open; the limit is max_num_seqs=2 and 3 idle ones: close one, or raise")
    engine = Bare(TINY, EngineLimits(1, 32, 64))
    engine.open()
    refuses(engine.open, "1 sequences are open; the limit is max_num_seqs=1: close one")


def test_an_engine_without_blocks_counts_tokens() -> None:
    pytest.importorskip("torch")
    from helpers.models import load_gpt
    from nanoinfer.engines.dynamic import DynamicEngine

    engine = DynamicEngine(load_gpt(make_weights()), make_limits())
    assert engine.num_free_blocks == 4 * 32
    a = engine.open()
    assert engine.blocks_needed(a, 7) == 7
    extend(engine, (a, 7))
    assert engine.num_free_blocks == 4 * 32 - 7
    b = engine.fork(a)
    assert engine.num_free_blocks == 4 * 32 - 14  # a copy may be needed at any time
    engine.truncate(b, 2)
    assert engine.num_free_blocks == 4 * 32 - 9
    engine.close(a)
    assert engine.num_free_blocks == 4 * 32 - 2
    refuses(lambda: engine.blocks_needed(a, 1), "is not an open sequence")


def make_pool(name: str, num_blocks: int) -> Any:
    """Return an engine with a pool of blocks."""
    spec = ENGINES[name]
    if (reason := spec.unavailable()) is not None:
        pytest.skip(f"engine {name}: {reason}")
    from nanoinfer.engines import registry

    limits = EngineLimits(4, MODEL.block_size, num_blocks * KV_BLOCK, 8)
    return registry.build(spec, make_weights(MODEL), EngineConfig(), "cpu", limits)


@pytest.mark.parametrize("name", [name for name, spec in ENGINES.items() if spec.memory in BLOCKS])
class TestPool:
    def test_a_step_takes_the_blocks_that_it_needs(self, name: str) -> None:
        engine = make_pool(name, 10)
        assert engine.num_free_blocks == 10
        a = engine.open()
        assert [engine.blocks_needed(a, n) for n in (0, 1, 16, 17, 100)] == [0, 1, 1, 2, 7]
        extend(engine, (a, 20))
        assert engine.num_free_blocks == 8
        assert [engine.blocks_needed(a, n) for n in (0, 1, 12, 13)] == [0, 0, 0, 1]
        b = engine.fork(a)
        assert engine.num_free_blocks == 8
        assert [engine.blocks_needed(h, n) for h in (a, b) for n in (1, 12, 13)] == [1, 1, 2] * 2  # a copy of the last
        extend(engine, (b, 1))
        assert engine.num_free_blocks == 7
        assert [engine.blocks_needed(h, 1) for h in (a, b)] == [0, 0]
        engine.truncate(b, 16)
        assert (engine.num_free_blocks, engine.blocks_needed(b, 1)) == (8, 1)
        engine.close(a)
        assert engine.num_free_blocks == 9
        engine.reset()
        assert engine.num_free_blocks == 10
        refuses(lambda: engine.blocks_needed(b, 1), "is not an open sequence")

    def test_a_step_without_room_is_refused_and_changes_nothing(self, name: str) -> None:
        engine = make_pool(name, 7)
        a, b = engine.open(), engine.open()
        extend(engine, (a, 70), (b, 20))
        c = engine.fork(b)
        for parts in ([(a, 11)], [(a, 1), (b, 1)], [(b, 13), (c, 1)], [(engine.open(), 1)]):
            needed = sum(engine.blocks_needed(h, n) for h, n in parts)
            if needed == 0:
                continue
            refuses(
                lambda parts=parts: extend(engine, *parts),  # type: ignore[misc]
                f"the KV cache is full: {needed} more blocks of 16 tokens are needed, 0 of 7 are free",
                "raise kv_cache_memory, or close sequences",
            )
            assert (engine.num_free_blocks, [engine.length(h) for h in (a, b, c)]) == (0, [70, 20, 20])
        extend(engine, (a, 10))  # fills its last block
        engine.close(b)
        extend(engine, (c, 12))
        assert (engine.num_free_blocks, [engine.length(h) for h in (a, c)]) == (0, [80, 32])


def test_a_step_of_paged_that_is_interrupted_keeps_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_pool("paged", 7)
    a = engine.open()
    extend(engine, (a, 20))
    b = engine.fork(a)

    def interrupted(*args: object, **options: object) -> None:
        assert engine.num_free_blocks == 2  # of 7: two of a, and of b a copy and two new ones
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(engine.model, "hidden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extend(engine, (b, 40))
    assert (engine.length(b), engine.num_free_blocks) == (20, 4)  # the copy is b's own
    batch = StepBatch()
    batch.add(a, [3])
    batch.add(b, [3])
    of_a, of_b = engine.extend(batch)
    assert of_a.tolist() == pytest.approx(of_b.tolist(), abs=1e-6)
    assert engine.num_free_blocks == 4


def test_a_draft_has_whole_blocks_for_the_targets_tokens() -> None:
    target, short, long = EngineLimits(4, 1024, 2000, 1024), *(replace(TINY, block_size=n) for n in (100, 1024))
    assert limits_of_draft(target, short) == EngineLimits(4, 100, 4 * FULL * KV_BLOCK)
    assert limits_of_draft(target, long) == EngineLimits(4, 1024, 2000)
    assert limits_of_draft(replace(target, max_num_cached_tokens=2001), long).max_num_cached_tokens == 2016
    assert limits_of_draft(EngineLimits(1, 50, 50), short).max_num_cached_tokens == FULL * KV_BLOCK
