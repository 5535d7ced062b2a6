"""Measure decoding and prompts after many tokens: engine native by type of cache, and llama.cpp on the same file.

    python benchmarks/depth.py FILE.gguf [--depths 32 1000 8000] [--batch 1] [--systems "native int8" ...] [--rounds 5]

Decoding: milliseconds of a step of all sequences, and what a plain read of its weights and its cache takes in the same
rounds, in percent. Prompts: microseconds a token of the next 256. Rounds of all systems are interleaved; figures are
medians. Contexts are filled with the keys and values of one prompt of 512 tokens again and again, since speed does not
depend on them. The context of the model must have room for 512 tokens, and for 257 after the largest depth. llama.cpp's
systems need llama-cpp-python (pip install '.[peers]').
"""

from __future__ import annotations

import argparse
import ctypes
import io
import math
import statistics
import struct
import time
from typing import Any

import numpy as np
from nanoinfer._native import ReadBuffer
from vs_llamacpp import LlamaCpp, Native

from nanoinfer.engines.base import StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.environment import num_cpus

PROMPT = 256
FILLED = 512  # tokens of the prompt that fills contexts
F16, Q8, Q4 = 1, 8, 2  # enum ggml_type
SYSTEMS: dict[str, dict[str, Any]] = {
    **{f"native {cache}": {"kv_cache_dtype": cache} for cache in ("bfloat16", "int8", "int4")},
    "llama.cpp f16": {"flash_attn_type": 1, "type_k": F16, "type_v": F16},
    "llama.cpp f16, no flash": {"flash_attn_type": 0, "type_k": F16, "type_v": F16},
    "llama.cpp q8_0": {"flash_attn_type": 1, "type_k": Q8, "type_v": Q8},
    "llama.cpp q4_0": {"flash_attn_type": 1, "type_k": Q4, "type_v": Q4},
}
"""Systems -> options; llama.cpp has its repacked weights, which are its default."""


def tokens(count: int) -> list[int]:
    """Return random tokens."""
    found: list[int] = np.random.default_rng(0).integers(0, 2000, count).tolist()
    return found


class Ours:
    """Sequences of engine native."""

    def __init__(self, path: str, batch: int, length: int, options: dict[str, Any]) -> None:
        native = Native(path, batch + 1, length, kv_cache_memory=None, **options)
        self._engine = native.llm.engine
        first = self._engine.open()
        self._engine.extend(StepBatch([first], tokens(FILLED), [FILLED], [1]))
        self._blocks = self._engine.read_blocks(first, 0, FILLED // 16).copy()
        self._engine.close(first)
        self._handles = [self._engine.open() for _ in range(batch)]
        self.weight_bytes = self._engine._decoder.weight_bytes
        self.bytes_per_token = self._blocks.nbytes // FILLED

    def fill(self, depth: int) -> None:
        """Extend all sequences to `depth` tokens."""
        for handle in self._handles:
            self._engine.truncate(handle, 0)
            for at in range(0, depth, FILLED):
                count = min(FILLED, depth - at)
                self._engine.append_blocks(handle, count, self._blocks[: -(-count // 16)])

    def run(self, depth: int, count: int, sequences: int) -> float:
        """Return the seconds of a step that appends `count` tokens to each of the first sequences, and undo it."""
        handles, start = self._handles[:sequences], time.perf_counter()
        self._engine.extend(StepBatch(handles, tokens(count * sequences), [count] * sequences, [1] * sequences))
        seconds = time.perf_counter() - start
        for handle in handles:
            self._engine.truncate(handle, depth)
        return seconds


def repeat_cells(state: bytes, depth: int) -> bytes:
    """Return llama.cpp's state of a sequence of `FILLED` tokens with its cells repeated up to `depth` tokens.

    The layout is that of `llama_kv_cache::state_write`, once for each cache of a model; that of a window of positions
    keeps its number of cells.
    """
    source, target = io.BytesIO(state), io.BytesIO()

    def copy(layout: str) -> tuple[int, ...]:
        values = struct.unpack(layout, source.read(struct.calcsize(layout)))
        target.write(struct.pack(layout, *values))
        return values

    copy("<II")  # a magic number and the sequence
    while source.tell() < len(state):
        for _ in range(copy("<I")[0]):
            (old,) = struct.unpack("<I", source.read(4))
            new = depth if old == FILLED else min(old, depth)
            target.write(struct.pack("<I", new))
            if not old:
                continue
            cells = np.frombuffer(source.read(12 * old), "<i4").reshape(old, 3)[np.arange(new) % old].copy()
            cells[:, 0] = np.arange(depth - new, depth)
            target.write(cells.tobytes())
            transposed, layers = copy("<II")
            for values in (False, True):
                for _ in range(layers):
                    layout = "<iII" if values and transposed else "<iQ"
                    size, rows = (*copy(layout)[1:], 1)[:2]
                    axes = (rows, old, size) if layout == "<iII" else (1, old, size)
                    data = np.frombuffer(source.read(math.prod(axes)), np.uint8).reshape(axes)
                    target.write(data[:, np.arange(new) % old].tobytes())
    return target.getvalue()


class Theirs:
    """Sequences of llama.cpp."""

    def __init__(self, path: str, batch: int, length: int, options: dict[str, Any]) -> None:
        self._llama, self._batch = LlamaCpp(path, batch, length, **options), batch
        self._llama.run([(0, tokens(FILLED), False)])
        lib, context = self._llama.lib, self._llama.context
        state = (ctypes.c_uint8 * lib.llama_state_seq_get_size(context, 0))()
        if lib.llama_state_seq_get_data(context, state, len(state), 0) != len(state):
            raise RuntimeError("llama.cpp does not return the state of a sequence")
        self._state = bytes(state)

    def fill(self, depth: int) -> None:
        """Extend all sequences to `depth` tokens."""
        state = repeat_cells(self._state, depth)
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        for sequence in range(self._batch):
            if not self._llama.lib.llama_state_seq_set_data(self._llama.context, data, len(data), sequence):
                raise RuntimeError(f"llama.cpp does not take the state of {depth} tokens")
            self._llama.lengths[sequence] = depth

    def run(self, depth: int, count: int, sequences: int) -> float:
        """As `Ours.run`."""
        start = time.perf_counter()
        self._llama.run([(i, tokens(count), False) for i in range(sequences)])
        seconds = time.perf_counter() - start
        for i in range(sequences):
            self._llama.lib.llama_memory_seq_rm(self._llama.lib.llama_get_memory(self._llama.context), i, depth, -1)
            self._llama.lengths[i] = depth
        return seconds


def measure(systems: dict[str, Any], depth: int, batch: int, rounds: int) -> dict[str, str]:
    """Return a cell for each system: "12.3 (85%), 456": a step, the share of a plain read, a token of a prompt."""
    steps: dict[str, list[float]] = {name: [] for name in systems}
    reads: dict[str, list[float]] = {name: [] for name in systems}
    prompts: dict[str, list[float]] = {name: [] for name in systems}
    buffers = {
        name: ReadBuffer(num_bytes=s.weight_bytes + s.bytes_per_token * depth * batch, threads=num_cpus())
        for name, s in systems.items()
        if isinstance(s, Ours)
    }
    for system in systems.values():
        system.fill(depth)
    for round_ in range(rounds + 1):  # the first one warms up
        for name, system in systems.items():
            if name in buffers:
                start = time.perf_counter()
                buffers[name].read()
                reads[name].append(time.perf_counter() - start)
            steps[name].append(system.run(depth, 1, batch))
            if round_ % 2:
                prompts[name].append(system.run(depth, PROMPT, 1) / PROMPT)
    cells = {}
    for name in systems:
        step = statistics.median(steps[name][1:])
        share = f" ({100 * statistics.median(reads[name][1:]) / step:.0f}%)" if reads[name] else ""
        cells[name] = f"{1e3 * step:.1f}{share}, {1e6 * statistics.median(prompts[name]):,.0f}"
    return cells


def main() -> None:
    """Print a table of depths and systems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--depths", type=int, nargs="+", default=[32, 1000, 4000, 8000, 16000])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if min(given.rounds, given.batch, *given.depths) < 1:
        parser.error("--rounds, --batch and --depths must be at least 1")
    room = max(FILLED, max(given.depths) + PROMPT + 1)
    try:
        systems = {
            name: (Ours if name.startswith("native") else Theirs)(given.file, given.batch, room, SYSTEMS[name])
            for name in given.systems
        }
    except (ModuleNotFoundError, NanoinferError) as e:
        parser.exit(2, f"depth.py: error: {e}\n")
    print(f"| tokens before | {' | '.join(systems)} |\n|--:|{'---|' * len(systems)}", flush=True)
    for depth in sorted(given.depths):
        cells = measure(systems, depth, given.batch, given.rounds)
        print(f"| {depth:,} | {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    main()
