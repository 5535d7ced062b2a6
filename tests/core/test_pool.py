"""The pool of blocks in Python and the one in C++: random calls on both at once, against a naive model.

NANOINFER_TEST_STEPS is the number of calls (default: 2,000).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.models import make_weights, refuses
from nanoinfer.config import EngineConfig, EngineLimits, ModelConfig
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.pool import BlockPool

STEPS = int(os.environ.get("NANOINFER_TEST_STEPS", "2000"))
STEPS_OF_EXAMPLE = 100
NUM_BLOCKS, MAX_SEQS, LONGEST = 16, 8, 100
MODEL = ModelConfig(vocab_size=7, block_size=LONGEST, n_layer=1, n_head=1, n_embd=8)


def make_native() -> Any:
    if (reason := ENGINES["native"].unavailable()) is not None:
        pytest.skip(reason)
    limits = EngineLimits(MAX_SEQS, LONGEST, NUM_BLOCKS * KV_BLOCK)
    return NativeEngine(make_weights(MODEL), limits, EngineConfig(threads=1))


class Pools(RuleBasedStateMachine):
    """The naive model is a list of tokens for each sequence; every token is another number.

    `memory` is what the blocks would contain if the caller of BlockPool did what it says. Each sequence must find its
    own tokens there: so sequences share a block only where their tokens are equal.
    """

    native: Any = None

    def __init__(self) -> None:
        super().__init__()
        cls = type(self)
        cls.native = cls.native or make_native()
        self.native.reset()  # a pool as new: the same blocks are taken first
        self.pool = BlockPool(NUM_BLOCKS)
        self.tokens: dict[Handle, list[int]] = {}
        self.memory: dict[int, list[int]] = {}
        self.num_tokens = 0

    def pick(self, data: st.DataObject) -> Handle:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @precondition(lambda self: len(self.tokens) < MAX_SEQS)
    @rule()
    def open(self) -> None:
        handle = self.native.open()
        self.pool.open(handle)
        self.tokens[handle] = []

    @precondition(lambda self: 0 < len(self.tokens) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        child = self.native.fork(parent)
        self.pool.fork(parent, child)
        self.tokens[child] = self.tokens[parent].copy()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        length = data.draw(st.integers(0, len(self.tokens[handle])))
        self.native.truncate(handle, length)
        self.pool.truncate(handle, length)
        del self.tokens[handle][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        self.native.close(handle)
        self.pool.close(handle)
        del self.tokens[handle]

    @precondition(lambda self: len(self.tokens) == MAX_SEQS)
    @rule()
    def reset(self) -> None:
        self.native.reset()
        self.pool.clear()
        self.tokens.clear()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), counts=st.lists(st.one_of(st.just(1), st.integers(1, 50)), min_size=1, max_size=4))
    def extend(self, data: st.DataObject, counts: list[int]) -> None:
        order = data.draw(st.permutations(sorted(self.tokens)))
        parts = [(h, min(n, LONGEST - len(self.tokens[h]))) for h, n in zip(order, counts, strict=False)]
        batch = StepBatch()
        for handle, count in (parts := [(h, n) for h, n in parts if n > 0]):
            batch.add(handle, [(self.num_tokens + i) % MODEL.vocab_size for i in range(count)], num_logits=0)
        needed = sum(self.pool.blocks_needed(h, n) for h, n in parts)
        if needed > (free := self.pool.num_free_blocks):
            message = f"{needed} more blocks of 16 tokens are needed, {free} of {NUM_BLOCKS} are free"
            refuses(lambda: self.native.extend(batch), message)
            refuses(lambda: self.pool.check(needed), message)
            return
        self.native.extend(batch)
        for handle, count in parts:
            if (copy := self.pool.append(handle, count)) is not None:
                shared, own = copy
                self.memory[own] = self.memory[shared].copy()
            for _ in range(count):
                position, tokens = len(self.tokens[handle]), self.tokens[handle]
                tokens.append(self.num_tokens)
                block = self.memory.setdefault(self.pool.table(handle)[position // KV_BLOCK], [-1] * KV_BLOCK)
                block[position % KV_BLOCK] = self.num_tokens
                self.num_tokens += 1
        assert free - needed <= self.pool.num_free_blocks <= free  # the last one of a block's users keeps it

    @invariant()
    def both_pools_are_the_same(self) -> None:
        assert self.native.num_free_blocks == self.pool.num_free_blocks
        for h in self.tokens:
            assert self.native._decoder.block_table(self.native._handles[h]) == self.pool.table(h)
            assert self.native.length(h) == self.native._decoder.length(self.native._handles[h]) == self.pool.length(h)
            for count in (0, 1, 16, 17):
                assert self.native.blocks_needed(h, count) == self.pool.blocks_needed(h, count) >= 0

    @invariant()
    def every_sequence_has_its_tokens(self) -> None:
        for h, tokens in self.tokens.items():
            assert self.pool.length(h) == len(tokens)
            assert len(self.pool.table(h)) == -(-len(tokens) // KV_BLOCK)
            assert [t for b in self.pool.table(h) for t in self.memory[b]][: len(tokens)] == tokens

    @invariant()
    def every_block_is_either_free_or_used(self) -> None:
        used = Counter(b for h in self.tokens for b in self.pool.table(h))
        assert max(Counter((h, b) for h in self.tokens for b in self.pool.table(h)).values(), default=1) == 1
        assert [used[b] for b in range(NUM_BLOCKS)] == self.pool._references
        assert sorted([*used, *self.pool._free]) == list(range(NUM_BLOCKS))


Pools.TestCase.settings = settings(
    max_examples=max(1, STEPS // STEPS_OF_EXAMPLE), stateful_step_count=STEPS_OF_EXAMPLE, deadline=None
)
TestPools = Pools.TestCase
