"""Which replica a request goes to: the one that holds the longest prefix of its prompt, unless that one is overloaded.

The front has no tokenizer and does not know the content of a replica's cache, so it estimates it: the text of a request
is divided into blocks, and the hash of a block covers those before it. A table for each replica has the blocks of its
requests, as many as its cache has room for; the least recently used are dropped first. This is the idea of SGLang's
cache-aware router and of Ray Serve's PrefixCacheAffinityRouter, with hashes in the place of a tree.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

BLOCK_CHARS = 64  # about as many as 16 tokens have, a block of the KV cache
MAX_BLOCKS = 512  # of a prompt: 32,768 characters tell the prompts of a server apart
TOKENS_PER_BLOCK = 16
_BEFORE = ("cache_salt", "tools", "instructions", "system")
_PROMPTS = ("messages", "prompt", "input", "query")


class PrefixTable:
    """The blocks of the prompts that went to a replica.

    Args:
        max_blocks: that it remembers.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_matched(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are there."""
        for i, block in enumerate(blocks):
            if block not in self._blocks:
                return i
        return len(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt that goes to the replica."""
        for block in reversed(blocks):  # the last is dropped first: without those before it, a block is not found
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class Routed(Protocol):
    """A replica, for `choose`."""

    prefixes: PrefixTable
    max_num_seqs: int
    num_in_flight: int


R = TypeVar("R", bound=Routed)


def prefix_blocks(document: Mapping[str, Any], salt: str | None) -> list[int]:
    """Return the hashes of the blocks of a request's prompt; each covers those before it.

    Args:
        document: the body of the request. What is not a prompt of a known form has no blocks.
        salt: of the request's API key: prompts of different keys share nothing.
    """
    prompt = next((document[name] for name in _PROMPTS if name in document), None)
    if prompt is None:
        return []
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False)
    before = [document.get(name) for name in _BEFORE]
    blocks, last = [], hash((salt, json.dumps(before) if any(before) else "", repr(document.get("model"))))
    for at in range(0, min(len(prompt), MAX_BLOCKS * BLOCK_CHARS), BLOCK_CHARS):
        last = hash((last, prompt[at : at + BLOCK_CHARS]))
        blocks.append(last)
    return blocks


def choose(replicas: Sequence[R], blocks: Sequence[int]) -> R:
    """Return the replica for a request, and remember the request's blocks for it.

    It is the replica with the longest match, unless that one answers more requests than the least loaded one by a
    quarter of the sequences that it can run; then, and without a match, it is the least loaded one.

    Args:
        replicas: one or more.
        blocks: from `prefix_blocks`.
    """
    chosen = min(replicas, key=lambda r: (r.num_in_flight, len(r.prefixes)))
    best = max(replicas, key=lambda r: (r.prefixes.num_matched(blocks), -r.num_in_flight))
    is_overloaded = best.num_in_flight > chosen.num_in_flight + max(1, best.max_num_seqs // 4)
    if best.prefixes.num_matched(blocks) and not is_overloaded:
        chosen = best
    chosen.prefixes.add(blocks)
    return chosen
