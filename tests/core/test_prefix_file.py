"""Prefixes in a file: what a process that starts again shares, files that are damaged or of another model, bounds."""

from __future__ import annotations

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

from helpers.models import TINY, make_folder, refuses
from helpers.server_process import serving, wait_until
from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.core import prefix_file
from nanoinfer.core.prefix_file import KeptPrefix, PrefixFile
from nanoinfer.errors import NanoinferError

BYTES = 8
GREEDY = SamplingParams(max_tokens=4, temperature=0)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), replace(TINY, block_size=64))


def run(folder: Path, path: Path | None, *prompts: list[int], **options: object) -> list[RequestOutput]:
    llm = LLM(str(folder), prefix_cache_file=None if path is None else str(path), **(NATIVE | options))
    outputs = [llm.generate([p], GREEDY)[0] for p in prompts]
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
    assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0
    assert llm.save_prefix_cache() == 1


def test_a_pool_without_room_computes_instead(folder: Path, tmp_path: Path) -> None:
    """Three requests run, and leave no block to read the prefix of the fourth into; later there are blocks."""
    path = tmp_path / "file"
    run(folder, path, PROMPT)
    small = {"kv_cache_memory": 10 * 6144, "max_num_seqs": 4}
    cold = tokens(run(folder, None, *[[i] * 40 for i in range(3)], PROMPT, **small))
    llm = LLM(str(folder), prefix_cache_file=str(path), **(NATIVE | small))
    outputs = llm.generate([*[[i] * 40 for i in range(3)], PROMPT], GREEDY)
    assert tokens(outputs) == cold
    assert llm.core.engine.num_free_blocks >= 0
    assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 47


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
    other = f"was written for another model, format of keys and values, or instruction set: {remedy}"
    refuses(lambda: start(kv_cache_dtype="int8"), f"{named} {other}")
    refuses(lambda: start(quantization="int8"), f"{named} {other}")
    refuses(
        lambda: start(prefix_cache_file=str(tmp_path)),
        f"prefix_cache_file {tmp_path} cannot be written: name a file in a folder that can be",
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
