"""Mutators: change a few places of an input, in terms of its format or of its bytes.

Each mutator takes a random generator, the input, and the other inputs of the corpus (for splicing), and returns a new
input of at most MAX_BYTES. An input that does not parse is mutated as bytes.
"""

from __future__ import annotations

import json
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

Mutator = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
MAX_BYTES = 4 << 20
MAGIC = [0, 1, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62 - 1,
         2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip
PRIME = 2**61 - 1  # its multiples have the hash 0, so a dict of them takes quadratic time


# Bytes ---------------------------------------------------------------------------------------------------


def mutate_bytes(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Flip, overwrite, delete, repeat, insert, cut or splice, one to four times."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        a, b = sorted((rng.randint(0, len(out)), rng.randint(0, len(out))))
        b = min(b, a + rng.choice((1, 4, 16, 1 << 20)))
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[min(a, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[min(a, len(out) - 1)] = rng.choice((0, 0xFF, 0x0A, 0x1B, 0x22, rng.randrange(256)))
        elif kind == 2:
            del out[a:b]
        elif kind == 3:
            out[a:a] = out[a:b] * rng.choice((1, 2, 50))
        elif kind == 4:
            out[a:a] = rng.randbytes(rng.choice((1, 4, 40)))
        elif kind == 5:
            size = rng.choice((1, 2, 4, 8))
            out[a : a + size] = (rng.choice(MAGIC) % 2 ** (8 * size)).to_bytes(size, rng.choice(("little", "big")))
        elif kind == 6:
            del out[a:]
        elif others:
            other = rng.choice(others)
            at = rng.randint(0, len(other))
            out[a:b] = other[at : at + rng.choice((8, 64, 1 << 20))]
    return bytes(out[:MAX_BYTES])


# JSON ----------------------------------------------------------------------------------------------------


class Raw(str):
    """Literal JSON text, such as a number of 5,000 digits."""


class Pairs(list[list[Any]]):
    """An object as [key, value] pairs, which allows duplicate keys."""


DEEP = 100_000  # nesting that a recursive parser cannot parse
VALUES = [
    "null", "true", "false", "0", "1", "-1", "2", "1.5", "1e-320", "1e999", "-1e999", "NaN", "Infinity", "-0.0", "1e16",
    "[]", "{}", "[[]]", '""', '"\\u0000"', '"\\ud800"', '"\\u001b[31m\\n\\u2028"', '"\\u202e"', '"../x"', '"/etc/passwd"',
    '"1"', '"F64"', '"gpt2"', "9" * 400, "9" * 5000, "-" + "9" * 5000, '"' + "a" * 5000 + '"', '"\\u00e9"', '{"a": {}}',
    *map(str, MAGIC),
]  # fmt: skip
KEYS = ["", "a", "A\\ud800", "\\u001b[2J", "\\n", "type", "schema", "__metadata__", "k" * 3000, "\\u0000"]


def _dump(node: Any) -> str:
    """Return a tree as JSON. Recursion is shallow, because deep nesting is a Raw."""
    if isinstance(node, Pairs):
        return "{" + ", ".join(f"{_dump(k)}: {_dump(v)}" for k, v in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(_dump, node)) + "]"
    return str(node) if isinstance(node, Raw) else json.dumps(node)


def _slots(node: Any) -> list[tuple[Any, int]]:
    """Return every place of a tree as (container, index)."""
    found: list[tuple[Any, int]] = []
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            found += [(node, i) for i in range(len(node))]
            todo += [v for _, v in node] if isinstance(node, Pairs) else node
    return found


def _value(rng: random.Random) -> Raw:
    if rng.random() < 0.03:
        a, b = rng.choice((("[", "]"), ('{"a":', "}")))
        depth = rng.choice((500, 1100, 5000, DEEP))
        return Raw(a * depth + "1" + b * depth)
    if rng.random() < 0.02:
        return Raw("[" + "0," * rng.choice((1000, 200_000)) + "0]")
    return Raw(rng.choice(VALUES))


def mutate_json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Replace, delete, repeat, rename or move parts of the tree, or sometimes change bytes."""
    try:
        tree = [json.loads(data.decode(), object_pairs_hook=lambda p: Pairs(map(list, p)), parse_int=Raw)]
    except (ValueError, RecursionError):
        return mutate_bytes(rng, data, others)
    if rng.random() < 0.1:
        return mutate_bytes(rng, data, others)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        slots = _slots(tree)
        where, i = rng.choice(slots[: rng.choice((30, len(slots)))])
        kind = rng.randrange(8)
        if isinstance(where, Pairs):
            key, old = where[i]
            if kind == 0:
                del where[i]
            elif kind == 1:
                where.insert(rng.randint(0, len(where)), [key, _value(rng)])
            elif kind == 2:
                where[i] = [Raw(f'"{rng.choice(KEYS)}"'), old]
            elif kind == 3:
                where.append([Raw(f'"{rng.choice(KEYS)}"'), _value(rng)])
            elif kind == 4:
                where[i] = [key, rng.choice([v for _, v in where])]
            else:
                where[i] = [key, _value(rng)]
        elif kind == 0 and where is not tree:
            del where[i]
        elif kind == 1 and where is not tree:
            where.insert(i, where[i])
        elif kind == 2 and where is not tree:
            where[i] = where[rng.randrange(len(where))]
        elif where is not tree or kind == 3:
            where[i] = _value(rng)
    try:
        return _dump(tree[0]).encode(errors="surrogatepass")[:MAX_BYTES]
    except RecursionError:
        return data


def mutate_safetensors(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate the header as JSON, its length, or the bytes."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) or rng.random() < 0.2:
        return mutate_bytes(rng, data, others)
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.8:
        header = mutate_json(rng, header, [])
    size = len(header) if rng.random() < 0.95 else rng.choice(MAGIC)
    return (size.to_bytes(8, "little") + header + body)[:MAX_BYTES]


def mutate_packed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate as `mutate_safetensors`, usually with the header padded again, so that the data is still aligned."""
    out = mutate_safetensors(rng, data, others)
    size = int.from_bytes(out[:8], "little")
    if 8 + size > len(out) or rng.random() < 0.1:
        return out
    header = out[8 : 8 + size].rstrip(b" ")
    header += b" " * (-(8 + len(header)) % 4096)
    return (len(header).to_bytes(8, "little") + header + out[8 + size :])[:MAX_BYTES]


# Pickles ---------------------------------------------------------------------------------------------------


def _long(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _collide(n: int) -> bytes:
    """Return the opcodes of a dict of n keys with equal hashes."""
    return b"}(" + b"".join(_long(PRIME * i) + b"N" for i in range(1, n)) + b"u"


def _snippet(rng: random.Random) -> bytes:
    """Return opcodes of a hostile pickle; most leave a value, or a key and a value, on the stack."""
    if rng.random() < 0.02:
        return _collide(60_000)
    n = rng.choice((1, 10, 300, 990, 1010, 5000, 200_000))
    deep = rng.choice(MAGIC) % 2**32
    return rng.choice((
        b"N", b"\x88", b"K\x01", b")", b"]", b"}", b"0", b"2", b"(", b"1", b"a", b"s", b"u", b"e", b"b", b"R", b"\x81",
        b"\x93", b"Q", b"t", b"\x85", b"\x94", b".", b"l", b"d", b"o", b"\x8f", b"\x91", b"\x90",
        b")" + b"\x85" * n,  # nested tuples, as a value
        b"})" + b"\x85" * n + b"Ns",  # as a key
        b")" + b"\x85" * n + b"N",  # as a key of the dict that is being filled
        b"X\x0b\x00\x00\x00\x1b[31m\n\xc2\x85aaaN",
        b"]" * n + b"a" * (n - 1), b"}" + b"K\x00}" * n + b"s" * n,
        b"G" + struct.pack(">d", rng.choice((float("nan"), float("inf"), -0.0, 1e308))),
        _long(-(2 ** rng.choice((1, 31, 63, 2000)))), b"I" + b"9" * rng.choice((10, 4000, 5000)) + b"\n", b"L1L\n",
        b"r" + struct.pack("<I", deep), b"j" + struct.pack("<I", deep), b"q\xff", b"h\xff",
        b"B" + struct.pack("<I", deep), b"\x8e" + struct.pack("<Q", rng.choice(MAGIC)), b"X" + struct.pack("<I", deep),
        b"\x96" + struct.pack("<Q", rng.choice(MAGIC)), b"\x8b" + struct.pack("<i", rng.choice((-1, 2**31 - 1))),
        b"\x95" + struct.pack("<Q", rng.choice(MAGIC)), b"\x80\xff", b"X\x03\x00\x00\x00\xed\xa0\x80",
        b"X\x08\x00\x00\x00\x1b[31m\n\xc2\x85", b"cos\nsystem\n", b"cbuiltins\nlist\n", b"ccollections\nOrderedDict\n",
        b"ctorch\nSize\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n",
        b"cc\x1b[31m\nx\n", b"P" + b"9" * 20 + b"\n", _collide(rng.choice((50, 500))),
    ))  # fmt: skip


def mutate_pickle(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Delete, repeat, move or insert opcodes, or change their arguments, or sometimes change bytes."""
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return mutate_bytes(rng, data, others)
    if rng.random() < 0.15:
        return mutate_bytes(rng, data, others)
    ops = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        i, kind = rng.randrange(len(ops)), rng.randrange(6)
        if kind == 0 and len(ops) > 1:
            del ops[i]
        elif kind == 1:
            ops.insert(rng.randrange(len(ops)), ops[i])
        elif kind == 2 and len(ops[i]) > 1:
            ops[i] = ops[i][:1] + mutate_bytes(rng, ops[i][1:], [])[: max(len(ops[i]), 400)]
        else:
            ops[i] = rng.choice((_snippet(rng), _snippet(rng) + ops[i], ops[i] + _snippet(rng)))
    return b"".join(ops)[:MAX_BYTES]


# Names -----------------------------------------------------------------------------------------------------

_PARTS = ["wide:", "random:", "gpt2", "shakespeare", "gpt2-xl", ":", "/", "..", "~", "~x", "\0", "\n", "\x1b[31m", "a" * 300,
          "é", "\udcff", ".gguf", ".pt", "%s", "{}", " ", "-", "wide:" * 3000, "C:\\", "//", "./"]  # fmt: skip


def mutate_name(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Insert or delete parts of names."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, others)[:10_000]
    at = rng.randint(0, len(data))
    part = rng.choice(_PARTS).encode(errors="surrogateescape")
    return (data[:at] + part + data[at + rng.choice((0, 0, 3, 100)) :])[:100_000]


def make_random(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return new random bytes or a mutation, for targets that read their input as a list of choices."""
    return rng.randbytes(rng.choice((20, 200, 1000))) if rng.random() < 0.3 else mutate_bytes(rng, data, others)[:4000]
