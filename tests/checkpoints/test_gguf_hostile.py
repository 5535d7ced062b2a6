"""GGUF files that are damaged or made to do harm: each is refused by one line, before memory is allocated for it."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gguf_files import (
    ARRAY,
    F32,
    Q4_0,
    STRING,
    Stored,
    as_f32,
    gguf_bytes,
    string,
    tiny_gguf,
    value,
    write_gguf,
)
from helpers.models import refuses
from nanoinfer.checkpoints.gguf import file as gguf_file
from nanoinfer.checkpoints.gguf import tokenizer as gguf_tokenizer
from nanoinfer.checkpoints.gguf.file import MAX_HEADER_BYTES, read_gguf
from nanoinfer.checkpoints.load import load_model, load_tokenizer

GOOD = gguf_bytes({"general.architecture": "llama", "a": 1}, {"t": as_f32(np.ones((2, 3))), "u": as_f32(np.ones(4))})


def header(num_tensors: int, num_entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + rest


def entry(name: str, dims: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def tensors(*entries: bytes, data: int = 256) -> bytes:
    out = header(len(entries), 0, b"".join(entries))
    return out + bytes(-len(out) % 32) + bytes(data)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + content


CASES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["magic"]),
    "no magic": (b"GGML" + GOOD[4:], ["does not begin with GGUF"]),
    "version 1": (header(0, 0, version=1), ["version is 1", "2 and 3"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
    "2**63 tensors": (header(2**63, 0), ["9223372036854775808 tensors"]),
    "more tensors than fit": (header(3, 0, bytes(48)), ["3 tensors", "do not fit"]),
    "a key of 2**63 bytes": (header(0, 1, struct.pack("<Q", 2**63) + bytes(99)), ["9223372036854775808 bytes"]),
    "a string of 2**63 bytes": (
        header(0, 1, string("k") + struct.pack("<IQ", STRING, 2**63) + bytes(99)),
        ["'k'", "9223372036854775808 bytes"],
    ),
    "a key that is not UTF-8": (header(0, 1, string(b"\xff\xfe") + value(1)), ["UTF-8"]),
    "a string that is not UTF-8": (header(0, 1, string("k") + struct.pack("<I", STRING) + string(b"a\xc3")), ["UTF-8"]),
    "an unknown type": (header(0, 1, string("k") + struct.pack("<I", 13) + bytes(9)), ["'k'", "unknown type 13"]),
    "an array of arrays": (header(0, 1, string("k") + array(ARRAY, 1) + array(4, 1)), ["'k'", "array of arrays"]),
    "2**61 numbers": (header(0, 1, string("k") + array(10, 2**61, bytes(64))), ["2305843009213693952 numbers"]),
    "a bool of 2": (header(0, 1, string("k") + struct.pack("<IB", 7, 2)), ["'k'", "neither 0 nor 1"]),
    "a key twice": (header(0, 2, (string("k") + value(1)) * 2), ["'k' is duplicated"]),
    "a tensor twice": (tensors(entry("t", (4,)), entry("t", (4,), offset=32)), ["'t' is duplicated"]),
    "no dimensions": (tensors(string("t") + struct.pack("<IIQ", 0, F32, 0), data=64), ["0 dimensions"]),
    "5 dimensions": (tensors(entry("t", (1,) * 5)), ["5 dimensions"]),
    "an empty tensor": (tensors(entry("t", (4, 0))), ["'t' is [0, 4]"]),
    "2**63 rows": (tensors(entry("t", (1, 2**63))), ["9223372036854775808"]),
    "a product of 2**64": (tensors(entry("t", (2**32, 2**32))), ["'t' ends at byte 73786976294838206"]),
    "half a block": (tensors(entry("t", (48, 2), Q4_0)), ["[2, 48]", "a multiple of 32 (Q4_0)"]),
    "beyond the end": (tensors(entry("t", (65,))), ["'t' ends at byte", "download it again"]),
    "an offset of 2**64 - 32": (tensors(entry("t", (4,), offset=2**64 - 32)), ["'t' ends at byte"]),
    "an offset that is not aligned": (tensors(entry("t", (4,), offset=8)), ["offset 8", "multiple of 32"]),
    "overlapping tensors": (tensors(entry("t", (9,)), entry("u", (4,), offset=32)), ["'u' overlaps 't'"]),
    "IQ1_M": (tensors(entry("t", (256,), 29)), ["'t' has the format IQ1_M", "Q4_0"]),
    "an alignment of 0": (gguf_bytes({"general.alignment": 0}, {}), ["general.alignment=0"]),
    "an alignment of 2**31": (gguf_bytes({"general.alignment": 2**31}, {}), ["general.alignment=2147483648"]),
    "escape sequences": (header(0, 2, (string("\x1b[31m\n") + value(1)) * 2), ["\\x1b[31m\\n"]),
}  # fmt: skip


def is_refused_in_little_memory(path: Path, *words: str) -> None:
    tracemalloc.start()
    try:
        refuses(lambda: read_gguf(path), "model.gguf", *words)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", CASES)
def test_a_broken_file_is_refused(name: str, tmp_path: Path) -> None:
    content, words = CASES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    is_refused_in_little_memory(path, *words)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    assert read_gguf(path).metadata == {"general.architecture": "llama", "a": 1}
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        refuses(lambda: read_gguf(path), "model.gguf is not a valid GGUF file")


def test_a_header_beyond_its_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", limit := 1 << 20)
    path = tmp_path / "model.gguf"
    with open(path, "wb") as f:
        f.write(header(0, 1, string("k") + array(0, limit)))
        f.truncate(3 * limit)
    refuses(lambda: read_gguf(path), str(limit))
    with open(path, "wb") as f:
        f.write(header(0, 2, string("k") + array(0, limit - 50)))
        f.truncate(3 * limit)
    refuses(lambda: read_gguf(path), f"beyond the first {limit} bytes")


# Small files that would take much memory and time --------------------------------------------------------------

TOKENS = "tokenizer.ggml.tokens"
LARGE: dict[str, tuple[bytes, list[str]]] = {
    "strings": (header(0, 1, string(TOKENS) + array(STRING, 14_000_000)), ["14000000 strings", "limit is 2097152"]),
    "keys": (header(0, 5_000_000), ["5000000 metadata entries", "the limit is 16384"]),
    "tensors": (header(3_000_000, 0), ["3000000 tensors", "the limit is 65536"]),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_count_beyond_its_limit_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    content, words = LARGE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with open(path, "ab") as f:
        f.truncate(MAX_HEADER_BYTES)  # zeros: empty strings and empty keys
    is_refused_in_little_memory(path, *words)


def test_the_limit_of_strings_is_that_of_all_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_STRINGS", 5)
    path = write_gguf(tmp_path / "model.gguf", {"a": ["x"] * 3, "b": ["y"] * 2}, {})
    assert read_gguf(path).metadata == {"a": ["x"] * 3, "b": ["y"] * 2}
    write_gguf(path, {"a": ["x"] * 3, "b": ["y"] * 3}, {})
    refuses(lambda: read_gguf(path), "3 strings in 'b', 6 in total; the limit is 5")


def test_strings_of_all_lengths_are_read_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_CHUNK", 64)
    texts = ["", "a", "é" * 13, "x" * 200, *(str(i) * (i % 23) for i in range(300)), ""]
    metadata = {"a": texts, "b": 7, "c": texts[::-1]}
    assert read_gguf(write_gguf(tmp_path / "model.gguf", metadata, {})).metadata == metadata
    broken = gguf_bytes(metadata, {}).replace("é".encode() * 13, b"\xff" * 26)
    (tmp_path / "model.gguf").write_bytes(broken)
    refuses(lambda: read_gguf(tmp_path / "model.gguf"), "the value of 'a' is not UTF-8 (byte 0")


COUNTS: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"tokens": ["a"] * 1033}, "tokenizer.ggml.tokens has 1033 values, but token_embd.weight has 8 rows"),
    "scores": ({"scores": np.zeros(1033, np.float32)}, "tokenizer.ggml.scores has 1033 values, but token_embd.weight"),
    "types": ({"token_type": np.ones(1033, np.int32)}, "tokenizer.ggml.token_type has 1033 values"),
    "merges": ({"merges": ["a b"] * 33}, "tokenizer.ggml.merges has 33 values, the limit for 8 tokens is 32"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_compared_with_the_embedding_before_a_tokenizer_is_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, message = COUNTS[name]
    assert load_model(str(tiny_gguf(tmp_path / "good.gguf"))).tokenizer is not None
    monkeypatch.setattr(gguf_tokenizer, "_read_vocabulary", None)
    path = tiny_gguf(tmp_path / "model.gguf", **extra)
    for call in (load_model, load_tokenizer):
        refuses(lambda call=call: call(str(path)), f"model.gguf: {message}")  # type: ignore[misc]


def test_a_tokenizer_without_a_model_has_a_limit_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [], TOKENS: list("abcdefgh")}
    path = write_gguf(tmp_path / "model.gguf", metadata, {})
    assert load_tokenizer(str(path)).vocab_size == 8
    monkeypatch.setattr(gguf_tokenizer.limits, "MAX_TOKENS", 7)
    refuses(lambda: load_tokenizer(str(path)), "tokenizer.ggml.tokens has 8 values; the limit is 7")
    refuses(lambda: load_model(str(tiny_gguf(path))), "tokenizer.ggml.tokens has 8 values; the limit is 7")


def test_merges_that_are_derived_from_scores_are_bounded(tmp_path: Path) -> None:
    """Each text of a and b of up to 7 letters can be divided everywhere: 6 merges a token, with few tokens."""
    words = [""]
    for _ in range(7):
        words += [w + c for w in words if len(w) == len(words[-1]) for c in "ab"]
    tokens = ["<unk>", "<s>", "</s>", *words[1:]]
    extra = {"model": "llama", "tokens": tokens, "scores": np.zeros(len(tokens), np.float32), "merges": None}
    loaded = load_model(str(tiny_gguf(tmp_path / "model.gguf", len(tokens), **extra)))
    assert loaded.tokenizer is None
    limit = 4 * len(tokens)
    assert f"the tokens can be made by more than {limit} merges, the limit" in loaded.no_tokenizer_reason


def test_a_long_array_of_the_architecture_is_not_made_a_list(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", {"general.architecture": "llama", "llama.x": np.zeros(1 << 20, np.uint8)}, {}
    )
    tracemalloc.start()
    try:
        refuses(lambda: load_model(str(path)), "'llama.x' has more than 4096 values")
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # a list of small integers has 8 MiB
    finally:
        tracemalloc.stop()


def test_every_type_of_value(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "u8": np.uint8(255), "i8": np.int8(-1), "u16": np.uint16(65535), "i16": np.int16(-2), "u32": 2**32 - 1,
        "i32": np.int32(-3), "u64": np.uint64(2**64 - 1), "i64": np.int64(-(2**63)), "f32": 0.5,
        "f64": np.float64(0.1), "yes": True, "no": False, "text": "é\n", "": "", "texts": ["a", "", "ü"],
        "numbers": np.array([1, 2, 3], np.int32), "bools": np.array([True, False]), "none": np.array([], np.float32),
    }  # fmt: skip
    found = read_gguf(write_gguf(tmp_path / "a.gguf", metadata, {}, version=2)).metadata
    assert found.keys() == metadata.keys()
    for key, expected in metadata.items():
        got = found[key]
        if isinstance(expected, np.ndarray):
            assert isinstance(got, np.ndarray)
            assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist())
        else:
            assert (type(got), got) == (type(expected if isinstance(expected, (str, list)) else got), expected)
            assert not isinstance(got, np.generic)


def test_tensors_are_found_at_their_offsets(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float32)
    stored = {"a": as_f32(a), "b": as_f32(b), "d": Stored((2,), 28, np.array([0.5, 2.0]).tobytes())}
    for alignment in (1, 8, 32, 256):
        metadata = {"general.alignment": alignment}
        found = read_gguf(write_gguf(tmp_path / "a.gguf", metadata, stored, alignment=alignment)).tensors
        np.testing.assert_array_equal(found["a"].read().values, a)
        np.testing.assert_array_equal(found["b"].read().values, b)
        np.testing.assert_array_equal(found["d"].read().values, [0.5, 2.0])


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, {"t": as_f32(np.ones((64, 64)))})
    tensor = read_gguf(path).tensors["t"]
    path.write_bytes(path.read_bytes()[:-4])
    refuses(tensor.read, "was changed while it was read")


@pytest.mark.parametrize("make", ["mkfifo", "mkdir"])
def test_what_is_no_file_is_refused_at_once(make: str, tmp_path: Path) -> None:
    import os

    path = tmp_path / "model.gguf"
    act: Callable[[Path], None] = getattr(os, make)
    act(path)
    refuses(lambda: load_model(str(path)), "model.gguf", "pipe" if make == "mkfifo" else "config.json")


@pytest.mark.parametrize("model", [np.array([3, 3], np.int32), ["a", "b"], 5])
def test_the_kind_of_a_tokenizer_is_a_string(model: Any, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", model=model)
    refuses(lambda: load_tokenizer(str(path)), "tokenizer.ggml.model=", "only gpt2, llama, t5 and gemma4 are")
    assert "tokenizer.ggml.model=" in load_model(str(path)).no_tokenizer_reason
