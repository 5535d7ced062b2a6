"""GGUF for the fuzzers: seeds, and a mutator that knows the parts of a file."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mutate import MAGIC, MAX_BYTES, mutate_bytes

from nanoinfer.checkpoints.gguf.formats import FORMATS

STRING, ARRAY = 8, 9
PARTS = ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf")
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type


@dataclass
class Parts:
    """The parts of a file, each of which can be changed alone."""

    version: int = 3
    counts: list[int | None] = field(default_factory=lambda: [None, None])
    """Numbers of tensors and of entries in the header; None: the true ones."""
    entries: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Keys, and values with their types."""
    tensors: list[list[Any]] = field(default_factory=list)
    """Name, dimensions, type and offset of each tensor."""
    data: bytes = b""

    def pack(self) -> bytes:
        """Return the content of the file."""
        num_tensors, num_entries = self.counts
        out = b"GGUF" + struct.pack("<I", self.version % 2**32)
        for given, true in ((num_tensors, len(self.tensors)), (num_entries, len(self.entries))):
            out += struct.pack("<Q", true if given is None else given % 2**64)
        out += b"".join(_string(key) + value for key, value in self.entries)
        for name, dims, kind, offset in self.tensors:
            out += _string(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", n % 2**64) for n in dims)
            out += struct.pack("<IQ", kind % 2**32, offset % 2**64)
        return (out + bytes(-len(out) % 32) + self.data)[:MAX_BYTES]


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _value(item: Any) -> bytes:
    """Return a value with its type: lists of strings, or of ints (int32) or floats."""
    if isinstance(item, str):
        return struct.pack("<I", STRING) + _string(item.encode())
    if isinstance(item, list) and isinstance(item[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(_string(s.encode()) for s in item)
    if isinstance(item, list):
        kind, code = (6, "f") if isinstance(item[0], float) else (5, "i")
        return struct.pack("<IIQ", ARRAY, kind, len(item)) + struct.pack(f"<{len(item)}{code}", *item)
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    return struct.pack("<If", 6, item) if isinstance(item, float) else struct.pack("<II", 4, item)


def _split(data: bytes) -> Parts:
    """Return the parts of a file that `Parts.pack` wrote. Raises struct.error or ValueError for others."""
    at = 24

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(data) - at:
            raise ValueError
        at += size
        return data[at - size : at]

    def number(size: int) -> int:
        return int.from_bytes(take(size), "little")

    parts = Parts(struct.unpack("<I", data[4:8])[0])
    num_tensors, num_entries = struct.unpack("<QQ", data[8:24])
    if max(num_tensors, num_entries) > 1000:
        raise ValueError
    for _ in range(num_entries):
        key, start = take(number(8)), at
        kind, count = number(4), 1
        if kind == ARRAY:
            kind, count = number(4), number(8)
        for _ in range(count if kind == STRING else 0):
            take(number(8))
        take(count * SIZES[kind] if kind != STRING else 0)
        parts.entries.append((key, data[start:at]))
    for _ in range(num_tensors):
        name, count = take(number(8)), number(4)
        parts.tensors.append([name, [number(8) for _ in range(min(count, 8))], number(4), number(8)])
    parts.data = data[at + -at % 32 :]
    return parts


def mutate_gguf(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change counts, keys, values, types, shapes or offsets, or sometimes bytes."""
    try:
        parts = _split(data)
    except (ValueError, KeyError, struct.error):
        return mutate_bytes(rng, data, others)
    if rng.random() < 0.1:
        return mutate_bytes(rng, data, others)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(12)
        if kind == 0:
            parts.counts[rng.randrange(2)] = rng.choice(MAGIC)
        elif kind == 1:
            parts.version = rng.choice((0, 1, 2, 4, 3 << 24, *MAGIC))
        elif kind <= 7 and parts.entries:
            _mutate_entry(rng, parts)
        elif parts.tensors:
            _mutate_tensor(rng, parts)
    return parts.pack()


def _mutate_entry(rng: random.Random, parts: Parts) -> None:
    i, j, kind = rng.randrange(len(parts.entries)), rng.randrange(len(parts.entries)), rng.randrange(8)
    key, value = parts.entries[i]
    if kind == 0:
        del parts.entries[i]
    elif kind == 1:
        parts.entries.insert(j, parts.entries[i])
    elif kind == 2:
        parts.entries[i] = (
            rng.choice((b"", b"\xff", b"\x1b[31m\n", b"k" * 70_000, key + b"x", parts.entries[j][0])),
            value,
        )
    elif kind == 3:
        parts.entries[i] = key, parts.entries[j][1]
    elif kind == 4:
        parts.entries[i] = key, _odd_value(rng)
    elif kind == 5:  # a type, a length or a count
        at = rng.choice((0, 4, 8, 16))
        size = 4 if at < 8 else 8
        raw = (rng.choice(MAGIC) % 2 ** (8 * size)).to_bytes(size, "little")
        parts.entries[i] = key, value[:at] + raw + value[at + size :]
    else:
        parts.entries[i] = key, value[:4] + mutate_bytes(rng, value[4:], [])


def _odd_value(rng: random.Random) -> bytes:
    number = rng.choice(MAGIC) % 2**32
    items: list[Any] = [
        number, number, rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf"))), True, "", "\x1b[31m\n", "a" * 5000, "llama",
        ["a"] * rng.choice((1, 300, 20_000)), ["a" * 30_000], [chr(97 + i % 26) * (i % 50) for i in range(5000)], [number % 1000] * 2000,
        ["a b", "ab c"], [0.0] * 300, struct.pack("<IIQ", ARRAY, ARRAY, 1) * rng.choice((1, 1000)),
    ]  # fmt: skip
    item = rng.choice(items)
    return item if isinstance(item, bytes) else _value(item)


def _mutate_tensor(rng: random.Random, parts: Parts) -> None:
    i, kind = rng.randrange(len(parts.tensors)), rng.randrange(7)
    tensor = parts.tensors[i]
    if kind == 0:
        del parts.tensors[i]
    elif kind == 1:
        parts.tensors.append(list(tensor))
    elif kind == 2:
        tensor[0] = rng.choice((b"", b"\x1b[2J", b"rope_freqs.weight", b"blk.99999999.x", rng.choice(parts.tensors)[0]))
    elif kind == 3:
        tensor[1] = [rng.choice((*tensor[1], *MAGIC)) for _ in range(rng.choice((0, 1, 2, 3, 4, 5)))]
    elif kind == 4:
        tensor[2] = rng.choice((*range(42), *MAGIC))
    elif kind == 5:
        tensor[3] = rng.choice((0, 1, 31, 32, tensor[3] + 32, tensor[3] - 32, *MAGIC))
    else:
        parts.data = mutate_bytes(rng, parts.data, [])


def _model(arch: str, width: int, kinds: Sequence[int], extra: dict[str, Any]) -> bytes:
    """Return a model of one layer whose matrices have the formats of some types in turn."""
    rows = 12
    names = {"token_embd": rows, "blk.0.attn_output": width, "blk.0.ffn_up": 2 * width, "blk.0.ffn_down": width}
    vectors = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    if arch == "llama":
        names |= {
            "blk.0.attn_q": width,
            "blk.0.attn_k": width // 2,
            "blk.0.attn_v": width // 2,
            "blk.0.ffn_gate": 2 * width,
        }
    else:
        names |= {"blk.0.attn_qkv": 3 * width, "position_embd": 8}
    metadata = {
        "general.architecture": arch, f"{arch}.block_count": 1, f"{arch}.context_length": 8,
        f"{arch}.embedding_length": width, f"{arch}.feed_forward_length": 2 * width, f"{arch}.attention.head_count": 2,
    }  # fmt: skip
    parts = Parts(entries=[(k.encode(), _value(v)) for k, v in (metadata | extra).items()])
    rng = random.Random(0)

    def add(name: str, dims: list[int], kind: int) -> None:
        num_bytes = math.prod(dims) // FORMATS[kind].block_size * FORMATS[kind].block_bytes
        parts.tensors.append([name.encode(), dims, kind, len(parts.data)])
        content = bytes(rng.randrange(60) for _ in range(num_bytes))
        parts.data += content + bytes(-num_bytes % 32)

    for i, (name, out) in enumerate(names.items()):
        inputs = 2 * width if name.endswith("ffn_down") else width
        add(f"{name}.weight", [inputs, out], kinds[i % len(kinds)])
        if arch == "gpt2" and name.startswith("blk"):
            add(f"{name}.bias", [out], 0)
    for name in vectors:
        add(f"{name}.weight", [width], 0)
        if arch == "gpt2":
            add(f"{name}.bias", [width], 0)
    return parts.pack()


def make_gguf() -> list[bytes]:
    """Return a Llama with each kind of tokenizer in all formats of 32 and of 256 values and in float16, and a GPT-2."""
    llama = {"llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
             "llama.rope.dimension_count": 16, "tokenizer.chat_template": "{{ x }}"}  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", "<0x61>", "\u2581", "a", "b", "c", "ab", "\u2581a", "d d", "[PAD11]"]
    kinds = [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 4, 5]
    common = {"tokens": tokens, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}
    byte_level = common | {"model": "gpt2", "pre": "smollm", "merges": ["a b"]}
    scores = common | {"model": "llama", "scores": [float(-i) for i in range(len(tokens))], "add_space_prefix": True}
    named = [{f"tokenizer.ggml.{k}": v for k, v in t.items()} for t in (byte_level, scores)]
    wide = llama | {"llama.rope.dimension_count": 128, "general.alignment": 32}
    by_size = {size: [kind for kind in reversed(FORMATS) if FORMATS[kind].block_size == size] for size in (32, 64, 256)}
    return [
        _model("llama", 32, by_size[32], llama | named[0]),
        _model("llama", 256, by_size[256], wide | named[1]),
        _model("llama", 64, by_size[64], llama | {"llama.rope.dimension_count": 32} | named[0]),
        _model("llama", 32, [1], llama | named[1] | {"tokenizer.ggml.eot_token_id": 2}),
        _model("gpt2", 32, [0], {"gpt2.attention.layer_norm_epsilon": 1e-5} | named[0]),
    ]


@cache
def make_parts() -> dict[str, bytes]:
    """Return a model in two files, as llama-gguf-split writes them: name -> content."""
    whole, made = _split(make_gguf()[0]), {}
    ends = [offset for *_, offset in whole.tensors[1:]] + [len(whole.data)]
    half = len(whole.tensors) // 2
    for i, (start, stop) in enumerate(((0, half), (half, len(whole.tensors)))):
        split = {"split.no": i, "split.count": 2, "split.tensors.count": len(whole.tensors)}
        part = Parts(entries=[] if i else list(whole.entries))
        part.entries += [(key.encode(), _value(number)) for key, number in split.items()]
        first = whole.tensors[start][3]
        part.tensors = [[name, dims, kind, at - first] for name, dims, kind, at in whole.tensors[start:stop]]
        part.data = whole.data[first : ends[stop - 1]]
        made[PARTS[i]] = part.pack()
    return made


def make_part(name: str) -> list[bytes]:
    """Return one of the parts of a model in two files."""
    return [make_parts()[name]]


def other_parts(name: str) -> dict[str, bytes]:
    """Return the parts of a model in two files, without one of them."""
    return {key: content for key, content in make_parts().items() if key != name}
