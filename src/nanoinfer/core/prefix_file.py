"""Prefixes in a file: a process that starts again shares what the one before it has computed (`prefix_cache_file`).

    magic, lengths, checksum | JSON: fingerprint, records | tokens | blocks | a checksum of each block

A record is one sequence, in the order of tokens. What it shares with the record before it is not stored again, but for
the part of a block:

    record 0    A B C D E F     blocks [A B C D] [E F . .]        of 4 tokens
    record 1    A B C D E G         shared = 5:  [E G . .]

Blocks are read when a request shares their tokens, and compared with their checksums first. The fingerprint has what
keys and values depend on; that of the weights is a block that the model computes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.errors import NanoinferError, escaped, reason
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.scheduling.prefix_cache import Entry, PrefixCache, num_common
from nanoinfer.utils.files import RegularFile, replacing

log = logging.getLogger("nanoinfer")

MAGIC = b"nanoinfer prefixes 1\n"
MAX_JSON_BYTES = 1 << 28
_SIZES = struct.Struct("<QQQI")
"""Bytes of the JSON text, number of tokens, number of blocks, checksum of text and tokens."""
Blocks = NDArray[np.uint8]


class DamagedPrefixes(NanoinferError):
    """A block of a file has another checksum than when it was written."""


class Record(NamedTuple):
    """A sequence in a file."""

    salt: str | None
    shared: int
    """Number of its first tokens that are those of the record before it."""
    num_tokens: int

    @property
    def first_block(self) -> int:
        """The first of its blocks that the file has for it."""
        return self.shared // KV_BLOCK


@dataclass(frozen=True)
class KeptPrefix:
    """A sequence to write."""

    salt: str | None
    token_ids: list[int]
    read: Callable[[int, int], Blocks]
    """(first, end) -> its blocks [first, end), (end - first, block bytes)."""


def fingerprint(engine: NativeEngine) -> str:
    """Return what keys and values depend on, as a checksum: the configuration, and the block that 16 tokens fill.

    Raises:
        NanoinferError: the context is shorter than a block.
    """
    if engine.limits.block_size < KV_BLOCK:
        raise NanoinferError(f"prefix_cache_file needs a context of {KV_BLOCK} tokens, not {engine.limits.block_size}")
    handle = engine.open()
    tokens = [(7919 * i + 1) % engine.config.vocab_size for i in range(KV_BLOCK)]
    engine.extend(StepBatch([handle], tokens, [KV_BLOCK], [0]))
    block = engine.read_blocks(handle, 0, 1)
    engine.close(handle)
    named = json.dumps([asdict(engine.config), engine.block_format], sort_keys=True, default=str)
    return hashlib.sha256(named.encode() + block.tobytes()).hexdigest()


class PrefixFile:
    """The sequences of a file. Its header is read and checked at once.

    Args:
        path: written by `write`.
        fingerprint: of the engine that is to use them.
        block_bytes: of that engine.

    Raises:
        NanoinferError: the file cannot be read, is damaged, or was written for another model or format.
    """

    def __init__(self, path: Path, fingerprint: str, block_bytes: int) -> None:
        self.path, self._block_bytes = path, block_bytes
        self._file = RegularFile(path, "kept prefixes")
        start = len(MAGIC) + _SIZES.size
        if self._file.size < start or self._file.read(0, len(MAGIC)) != MAGIC:
            raise self._refused("is no file of kept prefixes of this version")
        text_bytes, num_tokens, num_blocks, checksum = _SIZES.unpack(self._file.read(len(MAGIC), _SIZES.size))
        self._blocks_at = start + text_bytes + 4 * num_tokens
        self._checksums_at = self._blocks_at + num_blocks * block_bytes
        if text_bytes > MAX_JSON_BYTES or self._blocks_at > self._file.size:
            raise self._refused("is damaged: its header does not fit its size")
        header = self._file.read(start, text_bytes + 4 * num_tokens)
        if zlib.crc32(header) != checksum:
            raise self._refused("is damaged: the checksum of its header is another one")
        try:
            described = json.loads(header[:text_bytes])
            self.records = [Record(None if s is None else str(s), *map(int, n)) for s, *n in described["records"]]
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            raise self._refused("is damaged: its header describes no sequences") from None
        if described.get("fingerprint") != fingerprint:
            raise self._refused("was written for another model, max_model_len, kv_cache_dtype or instruction set")
        self._tokens = np.frombuffer(header, "<i4", offset=text_bytes)
        self._ends = [*accumulate(_num_blocks(r.num_tokens) - r.first_block for r in self.records)]  # of their blocks
        self._token_ends = [*accumulate(r.num_tokens - r.shared for r in self.records)]
        fit = all(0 <= s <= min(m, n) for (_, _, m), (_, s, n) in pairwise([Record(None, 0, 0), *self.records]))
        counts = fit, [0, *self._ends][-1], [0, *self._token_ends][-1]
        if self._checksums_at + 4 * num_blocks != self._file.size or counts != (True, num_blocks, num_tokens):
            raise self._refused("is damaged: its blocks do not fit its size")

    def _refused(self, why: str) -> NanoinferError:
        return NanoinferError(f"prefix_cache_file {escaped(self.path)} {why}: delete it, or choose another name")

    def token_ids(self) -> Iterator[list[int]]:
        """Yield the tokens of each record."""
        before: list[int] = []
        for record, end in zip(self.records, self._token_ends, strict=True):
            own = self._tokens[end - (record.num_tokens - record.shared) : end]
            before = before[: record.shared] + own.tolist()
            yield before

    def read(self, index: int, first: int, end: int) -> Blocks:
        """Return the blocks [first, end) of a record, (end - first, block bytes).

        Raises:
            DamagedPrefixes: a block is damaged.
            NanoinferError: the file was changed or cannot be read.
        """
        out = np.empty((end - first, self._block_bytes), np.uint8)
        for i, block in enumerate(range(first, end)):
            owner = index
            while self.records[owner].first_block > block:
                owner -= 1
            at = self._ends[owner] - _num_blocks(self.records[owner].num_tokens) + block
            self._file.read_into(self._blocks_at + at * self._block_bytes, memoryview(out[i]))
            if struct.pack("<I", zlib.crc32(out[i].data)) != self._file.read(self._checksums_at + 4 * at, 4):
                raise DamagedPrefixes(
                    f"prefix_cache_file {escaped(self.path)} is damaged (block {at}): its prefixes are computed again,"
                    " and it will be replaced"
                )
        return out


def write(path: Path, fingerprint: str, prefixes: Sequence[KeptPrefix], max_blocks: int) -> int:
    """Write sequences to a file that only its owner may read, in the place of one of this name; return their number.

    Args:
        path: the file; its folder must exist.
        fingerprint: of the engine.
        prefixes: the most recently used first. Those that others begin with are left out.
        max_blocks: of all of them; the rest is left out.

    Raises:
        NanoinferError: the file cannot be written. What was there is still there.
    """
    ends = accumulate(_num_blocks(len(p.token_ids)) for p in prefixes)
    chosen = [p for p, end in zip(prefixes, ends, strict=True) if end <= max_blocks]
    chosen.sort(key=lambda p: (p.salt is not None, p.salt, p.token_ids))
    chosen = [a for a, b in pairwise([*chosen, None]) if a is not None and not _begins(b, a)]
    records, tokens = list[Record](), list[int]()
    for before, prefix in zip([None, *chosen], chosen, strict=False):
        same = before is not None and before.salt == prefix.salt
        shared = num_common(before.token_ids, prefix.token_ids) if same else 0  # type: ignore[union-attr]
        records.append(Record(prefix.salt, shared, len(prefix.token_ids)))
        tokens += prefix.token_ids[shared:]
    text = json.dumps({"fingerprint": fingerprint, "records": records}).encode()
    header = text + np.array(tokens, "<i4").tobytes()
    num_blocks = sum(_num_blocks(r.num_tokens) - r.first_block for r in records)
    checksums: list[int] = []
    try:
        with replacing(path, private=True) as file:
            file.write(MAGIC + _SIZES.pack(len(text), len(tokens), num_blocks, zlib.crc32(header)) + header)
            for record, prefix in zip(records, chosen, strict=True):
                for at in range(record.first_block, _num_blocks(record.num_tokens)):
                    block = prefix.read(at, at + 1)
                    checksums.append(zlib.crc32(block.data))
                    file.write(block.data)
            file.write(np.array(checksums, "<u4").tobytes())
    except OSError as e:
        raise NanoinferError(f"prefix_cache_file {escaped(path)} cannot be written: {reason(e)}") from None
    return len(records)


class StoredPrefixes:
    """The file of a prefix cache: its sequences are shared from now on, and `save` replaces it.

    Args:
        path: the file; it need not exist, but its folder must.
        engine, cache: without requests.

    Raises:
        NanoinferError: as `fingerprint` and `PrefixFile`; or the file could not be written.
    """

    def __init__(self, path: Path, engine: NativeEngine, cache: PrefixCache) -> None:
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise NanoinferError(f"prefix_cache_file {escaped(path)} cannot be written: name one in a writable folder")
        self._path, self._engine, self._cache = path, engine, cache
        self._fingerprint = fingerprint(engine)
        self._max_blocks = engine.num_free_blocks
        if path.exists():
            file = PrefixFile(path, self._fingerprint, engine.block_bytes)
            for index, (record, token_ids) in enumerate(zip(file.records, file.token_ids(), strict=True)):
                cache.store((record.salt, 0), token_ids, _Stored(engine, file, index))

    def save(self) -> int:
        """Write the idle sequences and those of the file without adapters; return their number. Raises as `write`."""
        try:
            prefixes = [KeptPrefix(e.key[0], e.token_ids, self._reader(e)) for e in self._cache.kept if e.key[1] == 0]
            return write(self._path, self._fingerprint, prefixes, self._max_blocks)
        except DamagedPrefixes as e:  # of a sequence that no request has shared
            log.warning("%s", e)
            self._cache.forget_stored()
            return self.save()

    def _reader(self, entry: Entry) -> Callable[[int, int], Blocks]:
        stored = entry.load
        if isinstance(stored, _Stored):
            return partial(stored.file.read, stored.record)
        return partial(self._engine.read_blocks, entry.handle)


@dataclass(frozen=True)
class _Stored:
    """Reads a record into the engine (`prefix_cache.Load`)."""

    engine: NativeEngine
    file: PrefixFile
    record: int

    def __call__(self, handle: Handle, length: int) -> None:
        before = self.engine.length(handle)
        blocks = self.file.read(self.record, before // KV_BLOCK, _num_blocks(length))
        self.engine.append_blocks(handle, length - before, blocks)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // KV_BLOCK)


def _begins(longer: KeptPrefix | None, prefix: KeptPrefix) -> bool:
    """Return whether a sequence begins with another one."""
    same = longer is not None and longer.salt == prefix.salt
    return same and longer.token_ids[: len(prefix.token_ids)] == prefix.token_ids  # type: ignore[union-attr]
