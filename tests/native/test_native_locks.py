"""No binding of the extension stops the other Python threads while a step of the decoder runs.

A step holds the decoder's lock, and the threads of its pool. Each binding is called in a thread of its own during a
long step. If it waited for a lock without releasing the interpreter lock, the main thread would not run again before
the end of the step. On a busy machine, that can happen to any binding once: it is called again in another step.
Every binding must have a case.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from nanoinfer.config import ModelConfig
from nanoinfer.models.parameters import shapes

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

QUICK = "NANOINFER_TEST_EXTENSION" in os.environ  # make asan: every access is checked
LENGTH = 2048 if QUICK else 8192  # tokens of a step: 1.4 s on two cores, with the slowest kernels; the calls take 0.2 s
SHORT = LENGTH // 2  # 0.3 s, for one call
MODEL = ModelConfig(vocab_size=64, block_size=LENGTH, n_layer=2, n_head=2, n_embd=128)
POOL = 2  # threads; decoders and packing share a pool of this size
TICKS = 3
STEPS = 10  # in which no binding was shown to let this thread run, after which the test fails


def options() -> Any:
    made = _native.DecoderOptions()
    given = {
        "vocab_size": 64, "block_size": LENGTH, "n_layer": 2, "n_head": 2, "n_embd": 128, "mlp_dim": 512,
        "packed": True, "weights": "int8", "cache": "float32", "max_num_cached_tokens": 2 * LENGTH, "threads": POOL,
        "isa": "scalar",
    }  # fmt: skip
    for name, value in given.items():
        setattr(made, name, value)
    return made


def aligned(panels: Any) -> Any:
    """Return a copy at a multiple of 64 bytes."""
    buffer = np.empty(panels.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + panels.size] = panels
    return buffer[start : start + panels.size]


class Stepping:
    """A decoder that runs one long step in a thread. Args: length: of the step, in tokens."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.decoder, random = _native.Decoder(options()), np.random.default_rng(0)
        self.packed: dict[str, tuple[Any, Any]] = {}
        for name, shape in shapes(MODEL).items():
            values = random.normal(0, 0.1, shape).astype(np.float32)
            if len(shape) == 1 or "wpe" in name:
                self.decoder.load(name, values)
                continue
            panels, scales = _native.pack(values=values, dtype="float32", format="int8", threads=1)
            self.packed[name] = aligned(panels), scales
            self.decoder.load_packed(name, *self.packed[name])
        self.long, *self.short = (self.decoder.open() for _ in range(5))
        for handle in self.short:
            self.extend(handle, 20)
        self.hidden = np.full((1, 128), math.nan, np.float32)
        self.logits = self.new_logits()
        self.thread = threading.Thread(target=lambda: self.extend(self.long, self.length, self.logits))

    def new_logits(self) -> Any:
        return np.full((1, self.decoder.logits_stride), math.nan, np.float32)

    def extend(self, handle: int, count: int, logits: Any = None) -> None:
        logits = self.new_logits() if logits is None else logits
        self.decoder.extend(handles=[handle], token_ids=[1] * count, num_new=[count], num_logits=[1], logits=logits)
        assert np.isfinite(logits).all()

    @property
    def ended(self) -> bool:
        """Whether the step has written its logits, after which it releases the lock."""
        return bool(np.isfinite(self.logits).all())


class Case(NamedTuple):
    """A call, what it must return, and whether it waits for the end of the step."""

    call: Callable[[Stepping], Any]
    expected: Any = None
    waits: bool | None = True
    """None: it waits for the threads of the pool, which a step releases for a moment between two parts."""


def of_decoder(name: str, *arguments: Any) -> Callable[[Stepping], Any]:
    return lambda s: getattr(s.decoder, name)(*arguments)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def blocks(s: Stepping, count: int) -> Any:
    return np.empty((count, s.decoder.block_bytes), np.uint8)


ONES = np.ones((2, 8), np.float32)
NAME = "transformer.h.0.attn.c_attn.weight"
WAITING = {
    "load": Case(of_decoder("load", "transformer.ln_f.weight", np.ones(128, np.float32))),
    "load_blocks": Case(
        lambda s: refused(lambda: s.decoder.load_blocks(NAME, np.zeros((384, 2), np.int64), 136)),
        f"tensor '{NAME}' cannot be given as blocks",
    ),
    "load_packed": Case(lambda s: s.decoder.load_packed(NAME, *s.packed[NAME])),
    "load_adapter": Case(
        lambda s: s.decoder.load_adapter(
            adapter=1, name=NAME.removesuffix(".weight"), first=0, a=np.ones((1, 128), np.float32), b=ONES[:, :1]
        )
    ),
    "unload_adapter": Case(of_decoder("unload_adapter", 2)),
    "check_loaded": Case(of_decoder("check_loaded")),
    "open": Case(lambda s: s.decoder.open() >= 5, True),  # `fork` makes a sequence, too
    "fork": Case(lambda s: s.decoder.length(s.decoder.fork(s.short[0])), 20),
    "truncate": Case(lambda s: (s.decoder.truncate(s.short[1], 3), s.decoder.length(s.short[1]))[1], 3),
    "close": Case(lambda s: s.decoder.close(s.short[2])),
    "length": Case(lambda s: s.decoder.length(s.long), LENGTH),
    "blocks_needed": Case(lambda s: s.decoder.blocks_needed(s.long, 1), 1),
    "block_table": Case(lambda s: len(s.decoder.block_table(s.long)), LENGTH // 16),
    "extend": Case(lambda s: (s.extend(s.short[3], 2), s.decoder.length(s.short[3]))[1], 22),
    "hidden": Case(lambda s: (s.decoder.hidden(out=s.hidden), bool(np.isfinite(s.hidden).all()))[1], True),
    "read_experts_ahead": Case(lambda s: s.decoder.read_experts_ahead()),
    "part_seconds": Case(lambda s: min(s.decoder.part_seconds().values()) > 0, True),
    "logits_stride": Case(lambda s: s.decoder.logits_stride, 64),
    "isa": Case(lambda s: s.decoder.isa, "scalar"),
    "threads": Case(lambda s: s.decoder.threads, POOL),
    "blocks_free": Case(lambda s: s.decoder.blocks_free < LENGTH // 16, True),
    "blocks_total": Case(lambda s: s.decoder.blocks_total, 2 * LENGTH // 16),
    "read_blocks": Case(lambda s: s.decoder.read_blocks(s.short[0], 0, blocks(s, 2))),
    "append_blocks": Case(
        lambda s: refused(
            lambda: s.decoder.append_blocks(s.short[0], 1, np.empty((3, s.decoder.block_bytes), np.uint8))
        ),
        "3 blocks, must be 1",
    ),
    "phase_items": Case(lambda s: len(s.decoder.phase_items()) > 20, True),
    "block_bytes": Case(lambda s: s.decoder.block_bytes, 16 * 2 * 2 * 128 * 4),
    "cache_bytes": Case(lambda s: s.decoder.cache_bytes, 2 * LENGTH * 2 * 2 * 128 * 4),
    "state_bytes": Case(lambda s: s.decoder.state_bytes, 0),
    "weight_bytes": Case(lambda s: s.decoder.weight_bytes > 2 * 12 * 128 * 128, True),
}
AT_ONCE: dict[str, Callable[[], Any]] = {
    "Decoder": lambda: _native.Decoder(options()).length,
    "DecoderOptions": lambda: [
        setattr(o := options(), name, getattr(o, name)) for name in public(_native.DecoderOptions)
    ],
    "LayerShape": lambda: [
        setattr(s := _native.LayerShape(), name, getattr(s, name)) for name in public(_native.LayerShape)
    ],
    "StateShape": lambda: [
        setattr(s := _native.StateShape(), name, getattr(s, name)) for name in public(_native.StateShape)
    ],
    "ReadBuffer": lambda: _native.ReadBuffer(num_bytes=1 << 16, threads=POOL),
    "SampleOptions": lambda: _native.SampleOptions(uniform=0.5, prompt_ids=[1, 2]),
    "attention": lambda: _native.attention(q=ONES, k=ONES, v=ONES, start=0, cache="float32"),
    "compute": lambda: _native.compute(format="int8", steps=1, threads=1),
    "fastest_isa": lambda: _native.fastest_isa(),
    "instruction_sets": lambda: _native.instruction_sets(),
    "multiply": lambda: _native.multiply(weights=ONES, bias=None, x=ONES, format="int8"),
    "hadamard": lambda: _native.hadamard(ONES),
    "norm": lambda: _native.norm(x=ONES, weight=ONES[0], bias=ONES[0], eps=1e-5),
    "packed_size": lambda: _native.packed_size(format="int8", rows=3, columns=4),
    "rotate": lambda: _native.rotate(x=ONES, cos=ONES[0, :4], sin=ONES[0, :4]),
    "quantize": lambda: _native.quantize(
        values=np.ones((2, 32), np.float32), dtype="float32", format="q8_0", threads=1
    ),
    "sample_rows": lambda: _native.sample_rows(logits=np.zeros((2, 1 << 17), np.float32), rows=[None, None]),
    "uniform": lambda: _native.uniform(seed=0, sample=0, position=0),
    "unpack": lambda: _native.unpack(weights=ONES, format="int8"),
}
CASES = {
    **{f"Decoder.{name}": case for name, case in WAITING.items()},
    **{name: Case(lambda s, call=call: call() is not None, True, waits=False) for name, call in AT_ONCE.items()},
    "pack": Case(
        lambda s: _native.pack(values=ONES, dtype="float32", format="int8", threads=POOL)[0].size,
        _native.packed_size(format="int8", rows=2, columns=8)[0],
        waits=None,
    ),
    "pack_blocks": Case(
        lambda s: _native.pack_blocks(blocks=np.zeros((2, 34), np.uint8), format="q8_0", threads=POOL)[0].size,
        _native.packed_size(format="q8_0", rows=2, columns=32)[0],
        waits=None,
    ),
    "ReadBuffer.read": Case(
        lambda s: type(_native.ReadBuffer(num_bytes=1 << 16, threads=POOL).read()), int, waits=None
    ),
}
ALONE = {"Decoder.clear": Case(lambda s: s.decoder.clear())}  # the other calls' sequences would be closed


def public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def bindings() -> set[str]:
    """Return the functions, classes and methods of the extension. The attributes of options are in one case."""
    found = {name for name in dir(_native) if not name.startswith("_")}
    classes = {name: kind for name in found if inspect.isclass(kind := getattr(_native, name))}
    del classes["DecoderOptions"], classes["LayerShape"], classes["StateShape"]
    return found | {f"{name}.{method}" for name, kind in classes.items() for method in public(kind)}


def test_every_binding_has_a_case() -> None:
    assert bindings() == CASES.keys() | ALONE.keys()


class Calling:
    """Calls a case in a thread."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name, self._call = name, call
        self.found: Any = None
        self.began = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.began.set()  # no other thread runs before the call releases the interpreter lock
        try:
            self.found = self._call()
        except BaseException as e:
            self.found = e


@pytest.fixture
def no_switches() -> Iterator[None]:
    """A thread runs until it releases the interpreter lock itself."""
    before = sys.getswitchinterval()
    gc.collect()
    gc.disable()  # a finalizer may release the lock
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)
    gc.enable()


def tick() -> None:
    """Let the other threads run some times."""
    for _ in range(TICKS):
        time.sleep(0.001)


def shown(cases: Mapping[str, Case], length: int) -> list[str]:
    """Call cases during a step; return those that let this thread run, and wait for the step if they must."""
    step, found = Stepping(length), []
    calls: list[Calling] = []
    step.thread.start()
    try:
        while not step.ended:  # until the step has the lock
            calls.append(probe := Calling("threads", lambda: step.decoder.threads == POOL))
            probe.began.wait()
            tick()
            if probe.thread.is_alive():
                break
        for name, case in cases.items():
            calls.append(call := Calling(name, lambda case=case: case.call(step) == case.expected))
            call.began.wait()
            if case.waits is False:
                call.thread.join()
            tick()
            waits = call.thread.is_alive()
            if step.ended:
                break
            if waits or not case.waits:
                found.append(name)
    finally:
        for thread in (step.thread, *(call.thread for call in calls)):
            thread.join()
    assert {call.name: call.found for call in calls} == dict.fromkeys((call.name for call in calls), True)
    return found


@pytest.mark.usefixtures("no_switches")
@pytest.mark.parametrize("cases, length", [(CASES, LENGTH), (ALONE, SHORT)], ids=["all", "clear"])
def test_other_threads_run_while_a_binding_waits_for_a_step(cases: dict[str, Case], length: int) -> None:
    left, num_failed = dict(cases), 0
    while left and num_failed < STEPS:
        found = shown(left, length)
        left = {name: case for name, case in left.items() if name not in found}
        if left and not found:
            num_failed += 1
            first = next(iter(left))
            left[first] = left.pop(first)  # the others come first
    assert not left, f"{', '.join(left)}: stops the other threads until the end of a step, or does not wait for it"


@pytest.mark.usefixtures("no_switches")
def test_a_call_that_holds_the_interpreter_lock_is_not_shown() -> None:
    usleep = ctypes.PyDLL(None).usleep  # a function of a PyDLL keeps the lock

    def holds(step: Stepping) -> bool:
        while not step.ended:
            usleep(1000)
        return True

    assert shown({"a call that holds the lock": Case(holds, True)}, SHORT) == []
    assert shown({"a call that does not wait": Case(lambda s: True, True)}, SHORT) == []


LARGE = 1 << 28
COMPUTING: dict[str, Callable[[], Any]] = {
    "ReadBuffer": lambda: _native.ReadBuffer(num_bytes=LARGE, threads=1),
    "compute": lambda: _native.compute(format="float32", steps=1 << 24, threads=1),
    "pack": lambda: _native.pack(values=np.zeros((4096, 4096), np.float32), dtype="float32", format="int8", threads=1),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_other_threads_run_while_a_binding_computes(name: str) -> None:
    call = Calling(name, COMPUTING[name])
    call.began.wait()
    ticks = 0
    while call.thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert not isinstance(call.found, BaseException)
    assert ticks >= TICKS
