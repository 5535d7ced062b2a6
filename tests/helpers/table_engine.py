"""A pretended engine with known logits, a clock that passes when told to, and a core of the two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from nanoinfer.config import EngineLimits, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.sampling.sampler import Sampled, sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.tokenizers.tokenizer import CharTokenizer

CHARS = "abcdefgh"
V = len(CHARS)
RANDOM = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
ALPHABET = torch.full((V, V), -9.0).index_put_((torch.arange(V), (torch.arange(V) + 1) % V), torch.tensor(9.0))
UNSHARED = SchedulerConfig(enable_prefix_caching=False, target_step_ms=None)


class Clock:
    """Seconds that pass only when told to. Never 0, as no real clock is."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class TableEngine:
    """The next logits are a row of a table, chosen by the last token; every call is counted."""

    def __init__(self, table: Tensor, limits: EngineLimits, clock: Clock) -> None:
        self.table, self.limits, self.clock = table, limits, clock
        self.held: dict[Handle, list[int]] = {}
        self.num_calls = dict.fromkeys(("open", "extend", "truncate", "fork", "close"), 0)
        self.num_fed = 0
        self.fail: tuple[str, int] | None = None  # (method, on which call)
        self.error: BaseException = RuntimeError("the engine failed")
        self.cost_sec: Iterator[float] = iter(())  # of the next steps

    def _call(self, method: str) -> None:
        self.num_calls[method] += 1
        if self.fail == (method, self.num_calls[method]):
            raise self.error

    def _new(self, tokens: list[int]) -> Handle:
        assert len(self.held) < self.limits.max_num_seqs
        handle = Handle(self.num_calls["open"] + self.num_calls["fork"])
        self.held[handle] = tokens
        return handle

    def open(self, adapter: int = 0) -> Handle:
        self._call("open")
        return self._new([])

    def fork(self, handle: Handle) -> Handle:
        self._call("fork")
        return self._new(list(self.held[handle]))

    def extend(self, batch: StepBatch) -> Tensor:
        self.clock.now += next(self.cost_sec, 0.0)
        at, rows = 0, []
        for handle, count, num_logits in zip(batch.handles, batch.num_new, batch.num_logits, strict=True):
            self.held[handle] += batch.token_ids[at : at + count]
            assert len(self.held[handle]) <= self.limits.block_size
            at += count
            rows += self.held[handle][len(self.held[handle]) - num_logits :]
        self.num_fed += at
        self._call("extend")  # a failure comes after something has changed
        return self.table[rows]

    def hidden(self) -> Tensor:
        raise NotImplementedError("no test here asks for hidden states")

    def truncate(self, handle: Handle, length: int) -> None:
        self._call("truncate")
        assert 0 <= length <= len(self.held[handle])
        del self.held[handle][length:]

    def cut(self, handle: Handle, length: int) -> int:
        return length

    def close(self, handle: Handle) -> None:
        self._call("close")
        del self.held[handle]

    def length(self, handle: Handle) -> int:
        return len(self.held[handle])

    @property
    def handles(self) -> Collection[Handle]:
        return self.held.keys()

    @property
    def num_free_blocks(self) -> int:
        return self.limits.max_num_cached_tokens - sum(map(len, self.held.values()))

    def blocks_needed(self, handle: Handle, num_new: int) -> int:
        return num_new

    def reset(self) -> None:
        self.held.clear()


def make_core(
    table: Tensor = ALPHABET,
    max_num_seqs: int = 4,
    block_size: int = 32,
    sampler: Callable[..., list[Sampled]] = sample,
    vocab_size: int = V,
    num_chars: int = V,
    config: SchedulerConfig = UNSHARED,
) -> tuple[Core, TableEngine, Clock]:
    clock = Clock()
    engine = TableEngine(table, EngineLimits(max_num_seqs, block_size, max_num_seqs * block_size), clock)
    core = Core(engine, Scheduler(engine, config), sampler, CharTokenizer(CHARS[:num_chars]), vocab_size, clock)
    return core, engine, clock
