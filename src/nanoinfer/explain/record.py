"""Record a generation: what each step processed, read and sampled, and which blocks of the cache hold which tokens.

The core calls its observer with the rows and logits of a step. The blocks are those of a `BlockPool` that gets the same
calls as the engine: open, extend, truncate, fork and close. Its rules are those of engines `paged` and `native`; for an
engine without blocks it shows what blocks would hold.

Not covered: beam searches, whose rows sample nothing; overlapped steps, whose logits stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from nanoinfer.core.step import NoObserver
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.entrypoints.streams import Ownership
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.pool import BlockPool
from nanoinfer.roofline.arithmetic import extend
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, WeightFormat, mixed
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.speculative.speculator import StepRow
from nanoinfer.utils.arrays import Array, to_numpy

NUM_CANDIDATES = 6
"""Most likely tokens that are recorded of each row of logits."""
MAX_STEPS = 2000


@dataclass
class Row:
    """One sequence's part of a step."""

    sequence: int
    start: int
    """Tokens in the cache before the step."""
    num_new: int
    """Tokens that the step appended, proposals included."""
    proposed: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The tokens that were sampled: the accepted proposals and one more; none of a part of a prompt."""
    candidates: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each of `tokens`: the most likely tokens and it, with their probabilities before filters."""


@dataclass
class StepRecord:
    """One step. Bytes and FLOPs are those of docs/inference-math.md; seconds of the limit need a measured device."""

    seconds: float
    rows: list[Row]
    waiting: list[int]
    """Sequences that wait after the step."""
    preempted: list[int]
    """Sequences that were taken out of the running ones in the step."""
    tables: dict[str, list[int]]
    """Blocks of each open sequence after the step: "0" of sequence 0, "kept 3" of one that the prefix cache keeps."""
    copied: list[tuple[int, int]]
    """(shared block, own copy) of each copy on write."""
    num_bytes: int
    flops: int
    limit_sec: float | None


@dataclass
class Recording:
    """A generation. Sequences are numbered in the order of the requests and of their samples."""

    model: str
    engine: str
    device: str
    weights: str
    draft: str | None
    weight_bytes: int
    block_size: int
    num_blocks: int
    prompts: list[list[int]]
    """Tokens of each request's prompt."""
    sequences: list[tuple[int, int]]
    """(request, sample) of each sequence."""
    steps: list[StepRecord]
    texts: dict[int, str]
    """Text of each token that occurs."""


class Recorder:
    """Observer of a core that records its steps.

    Args:
        llm: with no unfinished requests.
        requests: not submitted yet.
        fmt: format of the weights.
        ceiling: limits of the device; None: steps have no limit.
    """

    def __init__(self, llm: LLM, requests: Seq[Request], fmt: WeightFormat, ceiling: Ceiling | None) -> None:
        self._core, self._config, self._fmt, self._ceiling = llm.core, llm.config, fmt, ceiling
        self._ids = {s: i for i, s in enumerate(s for r in requests for s in r.sequences)}
        limits = llm.engine.limits
        self.pool = BlockPool(limits.max_num_cached_tokens // KV_BLOCK + limits.max_num_seqs)
        self._rows: list[Row] = []  # of the step
        self._copied: list[tuple[int, int]] = []
        self._starts: dict[Handle, tuple[int, int]] = {}  # of sequences without a row: start and num_new

    def step(self) -> StepRecord:
        """Run a step and return its record."""
        scheduler, before = self._core.scheduler, {self._ids[s] for s in self._core.scheduler.running}
        self._rows, self._copied, self._starts = [], [], {}
        start = self._core.clock()
        self._core.step()
        seconds = self._core.clock() - start
        running = {s.handle: self._ids[s] for s in scheduler.running if s.handle is not None}
        self._rows += [Row(running[h], *part) for h, part in self._starts.items() if h in running]
        ended = {i for s, i in self._ids.items() if s.finish_reason}
        waiting = [i for i in self._ids.values() if i not in ended and i not in running.values()]
        tables = {str(running.get(h, f"kept {h}")): [*self.pool.table(h)] for h in self._core.engine.handles}
        preempted = [i for i in waiting if i in before]
        return StepRecord(seconds, self._rows, waiting, preempted, tables, self._copied, *self._cost())

    def _cost(self) -> tuple[int, int, float | None]:
        """Return bytes, FLOPs and the limit in seconds of the step's rows, which share one read of the weights."""
        weight_bytes = num_bytes = extend(self._config, self._fmt, 1).weight_bytes
        flops = 0
        for row in self._rows:
            if row.num_new:
                cost = extend(self._config, self._fmt, row.num_new).model
                num_bytes += cost.bytes(1, row.start + row.num_new) - weight_bytes
                flops += cost.flops(1, row.start + row.num_new)
        if (ceiling := self._ceiling) is None:
            return num_bytes, flops, None
        return num_bytes, flops, max(num_bytes / ceiling.bandwidth(num_bytes), flops / ceiling.throughput(self._fmt))

    def span(self, part: str) -> AbstractContextManager[object]:
        """Return a context manager that does nothing: the time of a whole step is recorded."""
        return nullcontext()

    def sampled(self, rows: Seq[StepRow], logits: Array, tokens: Seq[Seq[int]]) -> None:
        """Record the rows of one part of a step; see `Observer.sampled`."""
        values = to_numpy(logits)
        for row, token_ids in zip(rows, tokens, strict=True):
            candidates = [_candidates(values[row.first + i], token) for i, token in enumerate(token_ids)]
            start, num_new = self._starts.pop(cast(Handle, row.sequence.handle), (0, 0))  # forks have no new tokens
            self._rows.append(Row(self._ids[row.sequence], start, num_new, [*row.drafts], [*token_ids], candidates))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Observe the core, and mirror the calls of its engine, for the duration of the `with` block."""
        engine: Any = self._core.engine
        for handle in engine.handles:
            self.pool.open(handle)
            if length := engine.length(handle):
                self.pool.append(handle, length)
        after: dict[str, Callable[..., None]] = {
            "open": lambda handle: self.pool.open(handle),
            "fork": lambda child, parent: self.pool.fork(parent, child),
            "truncate": lambda _, handle, length: self.pool.truncate(handle, length),
            "close": lambda _, handle: self.pool.close(handle),
            "extend": lambda _, batch: self._extend(batch),
        }
        with ExitStack() as stack:
            for name, note in after.items():
                setattr(engine, name, _then(getattr(engine, name), note))
                stack.callback(delattr, engine, name)
            stack.callback(setattr, self._core, "observer", NoObserver())
            self._core.observer = self
            yield

    def _extend(self, batch: StepBatch) -> None:
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            self._starts[handle] = self.pool.length(handle), num_new
            if (copy := self.pool.append(handle, num_new)) is not None:
                self._copied.append(copy)


def _then(call: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that calls `call`, and then `note` with its result and arguments."""

    def both(*args: Any) -> Any:
        result = call(*args)
        note(result, *args)
        return result

    return both


def _candidates(logits: Any, token: int) -> list[tuple[int, float]]:
    """Return the most likely tokens of a row of logits (V) with their probabilities; `token` is one of them."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")[:NUM_CANDIDATES].tolist()
    ids = order if token in order else [*order[:-1], token]
    return [(i, round(float(weights[i]), 5)) for i in ids]


def record(
    llm: LLM, prompts: list[str], params: SamplingParams, ceiling: Ceiling | None = None, draft: str | None = None
) -> Recording:
    """Generate, and return a recording of all steps.

    Args:
        llm: with no unfinished requests.
        prompts: all are submitted at once.
        params: of all prompts.
        ceiling: limits of the device; None: steps have no limit.
        draft: name of the draft, for the page.

    Raises:
        NanoinferError: a prompt or parameter is invalid, or the generation takes more than MAX_STEPS steps.
    """
    core, model = llm.core, llm.model
    requests = llm.requests.make_all(prompts, params)
    name = model.quantization or model.dtype
    fmt = mixed(model.config, model.block_formats, name) or FORMATS[name]
    recorder, steps = Recorder(llm, requests, fmt, ceiling), list[StepRecord]()
    with recorder.attached(), Ownership(core, requests):
        core.submit(requests)
        while not all(r.finished for r in requests):
            steps.append(recorder.step())
            if len(steps) > MAX_STEPS:
                raise NanoinferError(f"the generation takes more than {MAX_STEPS} steps: lower max_tokens")
    rows = [row for step in steps for row in step.rows]
    shown = {t for r in requests for t in r.prompt_token_ids} | {t for row in rows for t in row.proposed}
    shown |= {t for row in rows for candidates in row.candidates for t, _ in candidates}
    return Recording(
        model.name, model.engine, model.device, name, draft, extend(model.config, fmt, 1).weight_bytes, KV_BLOCK,
        recorder.pool.num_blocks, [r.prompt_token_ids for r in requests],
        [(i, s.sample_index) for i, r in enumerate(requests) for s in r.sequences], steps,
        {token: llm.decode([token]) for token in sorted(shown)},
    )  # fmt: skip
