"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.cluster.link import BLOCK_CHARS, MAX_BLOCKS, PrefixTable, choose, prefix_blocks

SHARED = "You are a helpful assistant of the library of Alexandria. " * 4


@dataclass
class Replica:
    num_in_flight: int = 0
    max_num_seqs: int = 8
    prefixes: PrefixTable = field(default_factory=lambda: PrefixTable(1000))


def blocks(prompt: Any, salt: str | None = None, **fields: Any) -> list[int]:
    return prefix_blocks({"prompt": prompt, **fields}, salt)


def num_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_share_the_blocks_of_their_common_prefix() -> None:
    first, second = blocks(SHARED + "What is a papyrus?"), blocks(SHARED + "Who was Hypatia?")
    assert num_shared(first, second) == len(SHARED) // BLOCK_CHARS == 3
    assert blocks(SHARED) == blocks(SHARED)


def test_what_comes_before_the_prompt_separates() -> None:
    plain = blocks(SHARED)
    for other in (blocks(SHARED, "key"), blocks(SHARED, cache_salt="a"), blocks(SHARED, tools=[{"x": 1}]),
                  blocks(SHARED, model="b"), blocks("x" + SHARED)):  # fmt: skip
        assert num_shared(plain, other) == 0


def test_messages_token_ids_and_long_prompts() -> None:
    chat = [{"role": "system", "content": SHARED}]
    a, b = ({"messages": [*chat, {"role": "user", "content": c}]} for c in "ab")
    assert num_shared(prefix_blocks(a, None), prefix_blocks(b, None)) == 4  # the last block has both questions
    ids = list(range(100))
    assert num_shared(blocks(ids), blocks([*ids, 1, 2])) == len(str(ids)) // BLOCK_CHARS
    assert len(blocks("x" * 10**6)) == MAX_BLOCKS
    assert prefix_blocks({"documents": ["a"]}, None) == []


def test_a_table_forgets_what_was_used_least_recently() -> None:
    table = PrefixTable(4)
    table.add([1, 2, 3])
    table.add([7, 8])
    assert [table.num_matched(b) for b in ([1, 2, 3], [7, 8], [9])] == [2, 2, 0]
    table.add([1, 2])
    table.add([5, 6])
    assert [table.num_matched(b) for b in ([1, 2], [7, 8], [5, 6])] == [2, 0, 2]


def test_the_longest_prefix_is_chosen() -> None:
    replicas = [Replica(), Replica()]
    assert choose(replicas, [1, 2]) is replicas[0]
    assert choose(replicas, [7, 8]) is replicas[1]  # has seen less
    assert choose(replicas, [1, 2, 3]) is replicas[0]
    assert choose(replicas, [7, 9]) is replicas[1]


def test_an_overloaded_replica_is_left_out() -> None:
    replicas = [Replica(), Replica()]
    choose(replicas, [1, 2])
    replicas[0].num_in_flight = 2  # a quarter of 8 above the other
    assert choose(replicas, [1, 2]) is replicas[0]
    replicas[0].num_in_flight = 3
    assert choose(replicas, [1, 2]) is replicas[1]
    replicas[1].num_in_flight = 3  # both have the prefix now
    replicas[0].num_in_flight = 2
    assert choose(replicas, [1, 2]) is replicas[0]


def test_without_a_match_the_least_loaded_one_is_chosen() -> None:
    replicas = [Replica(3), Replica(1), Replica(2)]
    assert choose(replicas, []) is replicas[1]
    assert choose(replicas, [5]) is replicas[1]


def test_prompts_are_spread_and_each_stays() -> None:
    replicas = [Replica() for _ in range(4)]
    first = {i: replicas.index(choose(replicas, [i, -i])) for i in range(1, 41)}
    assert Counter(first.values()) == dict.fromkeys(range(4), 10)
    assert {i: replicas.index(choose(replicas, [i, -i, 99])) for i in first} == first
