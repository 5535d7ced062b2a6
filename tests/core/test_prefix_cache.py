"""Shared prefixes and preemption: the radix tree against a plain search, and the tokens of every engine.

Prefixes in a file: what a process that starts again shares, files that are damaged or of another model, bounds."""

from __future__ import annotations

import functools
import json
import re
import signal
import stat
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines import GREEDY, V, make_engine, naive_greedy, nightly_if_interpreted, prompt
from helpers.models import TINY, make_folder, make_model, refuses, weights_of
from helpers.scheduling import Pretended, World, check_integrity, make_request, summary
from helpers.server_process import serving, wait_until
from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.config import EngineConfig, EngineLimits, SchedulerConfig
from nanoinfer.core import prefix_file
from nanoinfer.core.core import Core
from nanoinfer.core.prefix_file import KeptPrefix, PrefixFile
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, Handle
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError, QueueFull
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.prefix_cache import PrefixCache
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request, Sequence

# The tree ----------------------------------------------------------------------------------------------------


def new_sequence(token_ids: list[int], salt: str | None = None) -> Sequence:
    request = make_request(1, SamplingParams(), 64)
    request.salt = salt
    set_prompt(request, token_ids)
    return request.sequences[0]


def set_prompt(request: Request, token_ids: list[int]) -> None:
    request.prompt_token_ids = token_ids
    for sequence in request.sequences:
        sequence.token_ids = list(token_ids)
        sequence.__post_init__()  # it has copies of the request's values


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_longest_prefix_is_found(data: st.DataObject) -> None:
    """Against a search of everything that is open; handles are those of the entries, and nothing else is open."""
    limits = EngineLimits(4, 64, 1 << 20, data.draw(st.sampled_from([0, 2, 50])))
    engine = Pretended(limits)
    cache = PrefixCache(engine)
    running: list[Sequence] = []
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    salts = st.sampled_from([None, "a"])
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["open", "open", "extend", "keep", "close"]))
        if action == "open" and len(running) < limits.max_num_seqs:
            sequence = new_sequence(data.draw(tokens), data.draw(salts))
            entry, length = cache.find(sequence.token_ids, sequence.request.cache_key)
            length = min(length, entry.num_cached) if entry is not None else 0
            cache.open(sequence, list(sequence.token_ids), entry, length)
            sequence.num_cached = length
            assert engine.held[Handle(sequence.handle or 0)] == sequence.token_ids[:length]
            running.append(sequence)
        elif action == "extend" and running:
            sequence = data.draw(st.sampled_from(running))
            if sequence.num_cached == len(sequence.token_ids):
                sequence.token_ids.append(data.draw(st.integers(0, 2)))
            count = data.draw(st.integers(1, len(sequence.token_ids) - sequence.num_cached))
            new = sequence.token_ids[sequence.num_cached : sequence.num_cached + count]
            engine.append(Handle(sequence.handle or 0), new)
            sequence.num_cached += count
        elif action == "keep" and running:
            sequence = running.pop(data.draw(st.integers(0, len(running) - 1)))
            cache.retire(sequence)
        elif action == "close":
            cache.close_oldest()
        handles = {s.handle for s in running} | set(cache.idle)
        assert set(engine.handles) == handles
        wanted, salt = data.draw(tokens), data.draw(salts)
        entries = [(s.prompt_token_ids, s.num_cached) for s in running if s.request.salt == salt]
        idle = [e for e in cache._idle if e.key == (salt, 0)]
        assert all(engine.held[e.handle] == e.token_ids for e in idle)
        entries += [(e.token_ids, len(e.token_ids)) for e in idle]
        longest = max([num_common(ids, wanted[:-1]) for ids, _ in entries], default=0)
        found, length = cache.find(wanted, (salt, 0))
        assert length == longest
        if found is not None:
            assert found.token_ids[:length] == wanted[:length]
            ready = [min(n, length) for ids, n in entries if num_common(ids, wanted[:-1]) == length]
            assert min(found.num_cached, length) == max(ready)
    for sequence in running:
        cache.retire(sequence)
    while cache.close_oldest():
        pass
    assert len(engine.handles) == 0
    assert cache._roots == {}


def test_a_sequence_whose_tokens_another_one_has_is_not_kept() -> None:
    engine = Pretended(EngineLimits(4, 64, 1000, 10))
    cache = PrefixCache(engine)
    for ids in ([1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 5]):
        sequence = new_sequence(ids)
        cache.open(sequence, ids, None, 0)
        engine.append(Handle(sequence.handle or 0), ids)
        cache.retire(sequence)
    assert [engine.held[handle] for handle in cache.idle] == [[1, 2, 3], [1, 2, 3, 4], [1, 5]]


# The scheduler -----------------------------------------------------------------------------------------------


def sharing_world(capacity: int = 1000, max_num_seqs: int = 8, kept: int = 100, M: int = 64) -> World:
    return World(EngineLimits(max_num_seqs, 64, capacity, kept), SchedulerConfig(M))


def test_requests_wait_for_the_one_that_processes_their_prefix() -> None:
    """40 tokens in common. After 32 of them, the others share these: the rest is not worth waiting for."""
    world = sharing_world(M=32)
    for n in (41, 42, 43, 5):
        world.scheduler.add(make_request(n, SamplingParams(max_tokens=4), 64))
    assert [summary(world.step()) for _ in range(3)] == [
        [(41, 32, False)],
        [(41, 9, True), (5, 5, True), (42, 10, True), (43, 8, False)],
        [(41, 1, True), (42, 1, True), (5, 1, True), (43, 3, True)],
    ]


def test_a_common_prefix_is_processed_once() -> None:
    world = sharing_world(M=2048)
    requests = [make_request(50, SamplingParams(max_tokens=1), 64) for _ in range(20)]
    for i, request in enumerate(requests):
        set_prompt(request, [*range(40), *[100 + i] * 10])
        world.scheduler.add(request)
    world.run_all()
    assert world.num_processed == 40 + 20 * 10
    assert [r.num_cached_tokens for r in requests] == [0, *[40] * 19]
    assert world.scheduler.stats.num_shared_tokens == 19 * 40


def test_other_salts_share_nothing() -> None:
    world = sharing_world()
    for salt in (None, "a", "b", "a"):
        request = make_request(30, SamplingParams(max_tokens=1), 64)
        request.salt = salt
        world.scheduler.add(request)
        world.run_all()
        assert request.num_cached_tokens == (29 if salt == "a" and world.num_processed > 90 else 0)


def test_the_last_to_arrive_is_preempted_and_goes_on() -> None:
    world = sharing_world(capacity=30, M=64)
    requests = [make_request(n, SamplingParams(max_tokens=12), 64) for n in (8, 9, 3)]
    for i, request in enumerate(requests):
        set_prompt(request, [50 * i + t for t in range(7 + i)])
        world.scheduler.add(request)
    world.run_all()
    assert world.scheduler.stats.num_preempted > 0
    assert [r.sequences[0].num_output_tokens for r in requests] == [12, 12, 12]


def test_a_smaller_priority_is_admitted_first_and_preempts() -> None:
    world = sharing_world(capacity=40, max_num_seqs=1, kept=0)
    low, first, second = (make_request(n, SamplingParams(max_tokens=3), 64) for n in (10, 11, 12))
    low.priority, first.priority, second.priority = 5, 1, 1
    world.scheduler.add(low)
    assert summary(world.step()) == [(10, 10, True)]
    world.scheduler.add(second)
    world.scheduler.add(first)  # the same priority: by their ids
    assert [summary(world.step())[0][0] for _ in range(8)] == [11, 11, 11, 12, 12, 12, 10, 10]
    assert world.scheduler.stats.num_preempted == 1
    assert not world.scheduler.unfinished


def test_the_queue_is_bounded() -> None:
    world = World(EngineLimits(1, 64, 64), SchedulerConfig(max_num_queued=2))
    requests = [make_request(3, SamplingParams(max_tokens=2), 64) for _ in range(5)]
    world.scheduler.add(*requests[:2])  # one of them will have the place
    with pytest.raises(QueueFull, match="2 requests wait for 1 places, and 2 more would exceed max_num_queued=2: "):
        world.scheduler.add(*requests[2:4])
    world.step()
    world.scheduler.add(requests[2])
    with pytest.raises(QueueFull, match="2 requests wait for 0 places, and 1 more"):
        world.scheduler.add(requests[3])
    world.run_all()
    assert [r.finished for r in requests] == [True, True, True, False, False]
    world.scheduler.add(*requests[3:])
    world.run_all()


def test_a_sequence_is_admitted_beside_windows_that_are_full() -> None:
    """Three sequences whose windows slide: they need no further block, and a fourth must not wait for their end."""
    world = World(EngineLimits(4, 16, 52), SchedulerConfig(enable_prefix_caching=False))
    for _ in range(3):
        world.scheduler.add(make_request(16, SamplingParams(max_tokens=100, overflow="slide"), 16))
    for _ in range(3):
        world.step()
    last = make_request(3, SamplingParams(max_tokens=2), 16)
    world.scheduler.add(last)
    for _ in range(10):
        world.step()
    assert last.finished


# Every engine ------------------------------------------------------------------------------------------------


def small_engine(name: str, gpt: Transformer) -> Engine:
    """Return an engine for four sequences, whose pool holds one and a half of them if it is shared."""
    if ENGINES[name].memory not in ("blocks", "tokens"):
        return make_engine(name, gpt)
    limits = EngineLimits(4, gpt.config.block_size, 48, 20)
    return registry.build(ENGINES[name], weights_of(gpt), EngineConfig(), "cpu", limits)


@functools.cache
def mixed_requests() -> tuple[list[list[int]], list[SamplingParams], list[list[list[int]]]]:
    """Return prompts with prefixes in common, their parameters, and what the naive loop generates for each alone."""
    gpt, common = make_model(), prompt(18)
    prompts = [common[:n] + prompt(m, seed=n) for n, m in ((18, 2), (18, 4), (10, 3), (0, 6), (18, 2), (18, 9))]
    params = [replace(GREEDY, max_tokens=8 - i % 3) for i in range(len(prompts))]
    expected = [[naive_greedy(gpt, p, q.max_tokens or 0)] for p, q in zip(prompts, params, strict=True)]
    slid = naive_greedy(gpt, common, 20, gpt.config.block_size // 2)
    prompts += [common, prompts[0]]
    params += [replace(GREEDY, max_tokens=20, overflow="slide"), replace(params[0], n=3)]
    return prompts, params, [*expected, [slid], expected[0] * 3]


@pytest.mark.parametrize("caching", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("chunk", [2048, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", ENGINES)
@nightly_if_interpreted
@pytest.mark.nightly_if(lambda name, chunk: name in ("compiled", "cuda_graph") and chunk == 2048)
@pytest.mark.slow_if(lambda name, caching: name in ("compiled", "cuda_graph") or not caching)
def test_tokens_do_not_depend_on_sharing_and_preemption(name: str, chunk: int, caching: bool) -> None:
    gpt, (prompts, params, expected) = make_model(), mixed_requests()
    engine = small_engine(name, gpt)
    core = Core(engine, Scheduler(engine, SchedulerConfig(chunk, None, caching)), sample, None, V)
    for again in range(2):
        requests = [core.make(None, p, q, 0) for p, q in zip(prompts, params, strict=True)]
        for i, request in enumerate(requests):
            request.priority = (i * again) % 3
        core.submit(requests[:4])
        core.step()
        core.step()
        core.submit(requests[4:])
        while core.unfinished:
            core.step()
            check_integrity(core.scheduler)
        assert [[list(s.output_token_ids) for s in r.sequences] for r in requests] == expected
    stats = core.scheduler.stats
    assert (stats.num_shared_tokens > 40) == caching
    assert (stats.num_preempted > 0) == (ENGINES[name].memory in ("blocks", "tokens") or stats.num_preempted > 0)


def test_the_public_settings(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "model"))
    llm = LLM(folder, max_num_queued=3, max_num_seqs=1, max_num_batched_tokens=16, engine="native")
    prompt_ids = list(range(1, 27))
    params = SamplingParams(temperature=0, max_tokens=3)
    first = llm.generate({"prompt_token_ids": prompt_ids}, params)[0]
    again = llm.generate({"prompt_token_ids": prompt_ids}, params)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 25)
    salted = llm.generate({"prompt_token_ids": prompt_ids, "cache_salt": "me"}, params, priority=[3])[0]
    assert salted.num_cached_tokens == 0
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == salted.outputs[0].token_ids
    refuses(lambda: llm.generate([[1]] * 5, params), "max_num_queued=3")
    refuses(lambda: llm.generate([[1]], params, priority=[1, 2]), "1 prompts, but 2 priorities")
    refuses(lambda: llm.generate([[1]], params, priority=["high"]), "priority='high'")  # type: ignore[list-item]
    refuses(lambda: llm.generate({"prompt_token_ids": [1], "cache_salt": 5}, params), "cache_salt=5")
    refuses(lambda: llm.generate({"prompt_token_ids": [1], "cache_salt": ""}, params), "cache_salt=''")
    refuses(lambda: llm.perplexity({"prompt_token_ids": [1, 2], "cache_salt": "a"}), "cache_salt")
    llm.reset_prefix_cache()
    assert len(llm.engine.handles) == 0
    unshared = LLM(folder, enable_prefix_caching=False, engine="native")
    for _ in range(2):
        assert unshared.generate({"prompt_token_ids": prompt_ids}, params)[0].num_cached_tokens == 0
    assert len(unshared.engine.handles) == 0


BYTES = 8
SHORT = SamplingParams(max_tokens=4, temperature=0)
NATIVE = {"engine": "native", "threads": 1, "max_num_seqs": 4}
PROMPT = list(range(1, 49))


def block_of(salt: str | None, token_ids: list[int], index: int) -> bytes:
    """The pretended contents of a block: a hash of all tokens up to its end."""
    return (hash((salt, *token_ids[: 16 * index + 16])) & (2**63 - 1)).to_bytes(BYTES, "little")


def kept(salt: str | None, token_ids: list[int]) -> KeptPrefix:
    def read(first: int, end: int) -> np.ndarray:
        return np.frombuffer(b"".join(block_of(salt, token_ids, i) for i in range(first, end)), np.uint8).reshape(
            -1, BYTES
        )

    return KeptPrefix(salt, token_ids, read)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, "a"]), st.lists(st.sampled_from([0, 7]), min_size=15, max_size=70))))
def test_a_file_has_each_prefix_once(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[tuple[str | None, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("prefixes") / "file"
    num_written = prefix_file.write(path, "f", [kept(*s) for s in sequences], max_blocks=10**6)
    file = PrefixFile(path, "f", BYTES)
    found = [(r.salt, t) for r, t in zip(file.records, file.token_ids(), strict=True)]
    longest = {
        (s, tuple(t)) for s, t in sequences if not any(s == o and t == u[: len(t)] and t != u for o, u in sequences)
    }
    assert {(s, tuple(t)) for s, t in found} == longest
    assert len(found) == num_written == len(longest)
    for index, (salt, token_ids) in enumerate(found):
        for i in range(-(-len(token_ids) // 16)):
            assert file.read(index, i, i + 1).tobytes() == block_of(salt, token_ids, i)
    for (a, b), record in zip(pairwise(found), file.records[1:], strict=True):
        assert record.shared == (common(a[1], b[1]) if a[0] == b[0] else 0)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_most_recent_ones_are_written_if_not_all_may_be(tmp_path: Path) -> None:
    old, new = kept(None, [1] * 40), kept(None, [2] * 40)
    assert prefix_file.write(tmp_path / "file", "f", [new, old], max_blocks=5) == 1
    assert list(PrefixFile(tmp_path / "file", "f", BYTES).token_ids()) == [[2] * 40]


_RECORDS = (
    None, "abc", [[None, 0]], [[None, 20, 40]], [[None, 0, "x"]], [[None, 0, 41]], [[None, 0, float("inf")]],
    [[None, 0, 40], [None, 41, 41]], [[None, 0, 56], [None, -16, -16]],
)  # fmt: skip


@pytest.mark.parametrize("described", [[], {}, *({"fingerprint": "f", "records": records} for records in _RECORDS)])
def test_a_made_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: object) -> None:
    path, text = tmp_path / "file", json.dumps(described)
    monkeypatch.setattr(json, "dumps", lambda _: text)
    prefix_file.write(path, "f", [kept(None, [1] * 40)], max_blocks=9)
    refuses(lambda: PrefixFile(path, "f", BYTES), f"prefix_cache_file {path} is damaged: ", "delete it, or choose")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), replace(TINY, block_size=64))


def run(folder: Path, path: Path | None, *prompts: list[int], **options: object) -> list[RequestOutput]:
    llm = LLM(str(folder), prefix_cache_file=None if path is None else str(path), **(NATIVE | options))
    outputs = [llm.generate([p], SHORT)[0] for p in prompts]
    if path is not None:
        llm.save_prefix_cache()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_a_process_that_starts_again_shares_what_the_one_before_computed(folder: Path, tmp_path: Path) -> None:
    """The same prompt, one that parts inside a block, one that goes on, one that shares too little; then once more."""
    path = tmp_path / "file"
    run(folder, path, PROMPT)
    prompts = [PROMPT, [*PROMPT[:37], 3, 3], [*PROMPT, 5, 6, 7], [*PROMPT[:9], 3]]
    cold = run(folder, None, *prompts, enable_prefix_caching=False)
    warm = run(folder, path, *prompts)
    assert ([o.num_cached_tokens for o in warm], tokens(warm)) == ([47, 37, 48, 9], tokens(cold))
    warm = run(folder, path, *prompts[::-1])  # less than 16 tokens are not read for
    assert ([o.num_cached_tokens for o in warm], tokens(warm)) == ([0, 50, 37, 47], tokens(cold)[::-1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_was_not_used_is_written_again(folder: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "file", [9] * 32
    run(folder, path, PROMPT, other)
    run(folder, path, [7, 7])
    assert [o.num_cached_tokens for o in run(folder, path, PROMPT, other)] == [47, 31]
    llm = LLM(str(folder), prefix_cache_file=str(path), **NATIVE)
    llm.reset_prefix_cache()
    assert llm.generate([PROMPT], SHORT)[0].num_cached_tokens == 0
    assert llm.save_prefix_cache() == 1


def test_a_pool_without_room_computes_instead(folder: Path, tmp_path: Path) -> None:
    """Three requests run, and leave no block to read the prefix of the fourth into; later there are blocks."""
    path = tmp_path / "file"
    run(folder, path, PROMPT)
    small = {"kv_cache_memory": 10 * 6144, "max_num_seqs": 4}
    cold = tokens(run(folder, None, *[[i] * 40 for i in range(3)], PROMPT, **small))
    llm = LLM(str(folder), prefix_cache_file=str(path), **(NATIVE | small))
    outputs = llm.generate([*[[i] * 40 for i in range(3)], PROMPT], SHORT)
    assert tokens(outputs) == cold
    assert llm.core.engine.num_free_blocks >= 0
    assert llm.generate([PROMPT], SHORT)[0].num_cached_tokens == 47


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_its_prefixes_are_computed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "file"
    cold = run(folder, path, PROMPT)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        warm = tokens(run(folder, path, PROMPT))
    except NanoinferError as e:
        message, warm = str(e), tokens(cold)
        assert path.read_bytes() == content
    else:
        message = f"prefix_cache_file {path} is whole: delete it, or choose another name"
    assert warm == tokens(cold)
    assert re.fullmatch(rf"prefix_cache_file {path} is .*: delete it, or choose another name", message)


def test_a_damaged_block_is_named_once_and_its_file_replaced(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    run(folder, path, PROMPT)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert [o.num_cached_tokens for o in run(folder, path, PROMPT, PROMPT)] == [0, 47]
    (message,) = [r.message for r in caplog.records if "prefix_cache_file" in r.message]
    assert re.search(r"is damaged \(block [12]\): its prefixes are computed again, and it will be replaced$", message)
    assert [o.num_cached_tokens for o in run(folder, path, PROMPT)] == [47]


def test_wrong_options_are_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    run(folder, path, PROMPT)

    def start(**options: object) -> None:
        LLM(str(folder), **(NATIVE | {"prefix_cache_file": str(path)} | options))

    named = f"prefix_cache_file {path}"
    remedy = "delete it, or choose another name"
    other = f"was written for another model, max_model_len, kv_cache_dtype or instruction set: {remedy}"
    refuses(lambda: start(kv_cache_dtype="int8"), f"{named} {other}")
    refuses(lambda: start(max_model_len=32), f"{named} {other}")
    refuses(lambda: start(quantization="int8"), f"{named} {other}")
    refuses(
        lambda: start(prefix_cache_file=str(tmp_path)),
        f"prefix_cache_file {tmp_path} cannot be written: name one in a writable folder",
    )
    refuses(
        lambda: start(engine="static", threads=None),
        f"prefix_cache_file={str(path)!r} needs engine native and a model without recurrent layers: leave it out",
    )
    refuses(
        lambda: start(enable_prefix_caching=False),
        f"prefix_cache_file={str(path)!r}: give the name of a file, and enable_prefix_caching",
    )
    refuses(
        LLM(str(folder), **NATIVE).save_prefix_cache, "there is no prefix_cache_file: name one when the model is loaded"
    )


@pytest.mark.slow
def test_a_server_writes_its_file_at_a_signal_and_at_the_end(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"

    def num_cached(url: str, prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
        return int((usage.get("prompt_tokens_details") or {"cached_tokens": 0})["cached_tokens"])

    with serving(folder, "--engine", "native", "--prefix-cache-file", str(path)) as server:
        assert num_cached(server.url, PROMPT) == 0
        server.process.send_signal(signal.SIGHUP)
        wait_until(path.exists)
        size = path.stat().st_size
        assert num_cached(server.url, [9] * 32) == 0
    assert path.stat().st_size > size
    with serving(folder, "--engine", "native", "--prefix-cache-file", str(path)) as server:
        assert [num_cached(server.url, prompt) for prompt in (PROMPT, [9] * 32)] == [47, 31]
