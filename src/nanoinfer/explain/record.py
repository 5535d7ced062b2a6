"""Record a generation: what each step processed, read and sampled, and which blocks of the cache hold which tokens.

The core calls its observer with the rows and logits of a step, in any thread. The blocks are those of a `BlockPool`
that gets the same calls as the engine for the recorded sequences: extend, truncate, fork and close. Its rules are those
of engines `paged` and `native`; for an engine without blocks it shows what blocks would hold.

Other requests may run at the same time: nothing of them is recorded, and their tokens do not change. While a recorder
is attached, no step is overlapped. A fault of the recorder, or a recording that is too large, ends its requests.

Not covered: beam searches, whose rows sample nothing.

The page of a recording is one HTML file with its style, its program and the recording, which loads nothing else.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np

from nanoinfer.core.step import Observer
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.entrypoints.streams import Ownership, all_finished
from nanoinfer.errors import NanoinferError, one_line
from nanoinfer.kv.plan import KV_BLOCK
from nanoinfer.kv.pool import BlockPool
from nanoinfer.roofline.arithmetic import extend
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, WeightFormat, mixed
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.speculative.speculator import StepRow
from nanoinfer.utils.arrays import Array, to_numpy

NUM_CANDIDATES = 6
"""Most likely tokens that are recorded of each row of logits."""
MAX_STEPS = 2000
MAX_VALUES = 1 << 21
"""Numbers of blocks and candidates in a recording: about 16 MB of JSON."""


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
    """Sequences that have not ended and have no part in the step."""
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

    def document(self) -> dict[str, Any]:
        """Return the recording as dicts and lists, which share its values: the steps as a tuple."""
        steps = tuple({**vars(step), "rows": [vars(row) for row in step.rows]} for step in self.steps)
        return {**vars(self), "steps": steps, "texts": {str(token): text for token, text in self.texts.items()}}


class Recorder(Observer):
    """Observer of a core that records the steps of some of its requests.

    Args:
        llm: the model.
        requests: not submitted yet.
        ceiling: limits of the device; None: steps have no limit.
        draft: name of the draft, for the page.
        salt: requests of this `cache_salt` are recorded, too, from their first step on.
    """

    reads_logits = True

    def __init__(
        self,
        llm: LLM,
        requests: Seq[Request] = (),
        ceiling: Ceiling | None = None,
        draft: str | None = None,
        salt: str | None = None,
    ) -> None:
        self._llm, self._core, self._config, self._ceiling = llm, llm.core, llm.config, ceiling
        self._draft, self._salt = draft, salt
        self._format_name = name = llm.model.quantization or llm.model.dtype
        self._fmt: WeightFormat = mixed(llm.config, llm.model.block_formats, name) or FORMATS[name]
        self._requests: list[Request] = []
        self._ids: dict[Sequence, int] = {}
        for request in requests:
            self._add(request)
        limits = llm.engine.limits
        self._num_blocks = -(-limits.max_num_cached_tokens // KV_BLOCK)
        self._pool = BlockPool(self._num_blocks + limits.max_num_seqs)  # an engine without blocks may fill more of them
        self._steps: list[StepRecord] = []
        self.num_values = 0
        """Numbers of blocks and candidates in the recording."""
        self.error: NanoinferError | None = None
        """Why the recorded requests were ended."""
        self._before: set[int] = set()  # sequences that ran in the step before
        self._rows: list[Row] = []  # of the step
        self._copied: list[tuple[int, int]] = []
        self._starts: dict[Handle, tuple[int, int]] = {}  # of sequences without a row: start and num_new

    def _add(self, request: Request) -> None:
        self._requests.append(request)
        for s in request.sequences:
            self._ids[s] = len(self._ids)

    # Attached between two steps ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Observe the core, and follow the calls of its engine. Raises NanoinferError if it is observed already."""
        self._core.between_steps(self._attach)

    def _attach(self) -> None:
        if type(self._core.observer) is not Observer:
            raise NanoinferError("another generation is recorded or profiled: wait for its end")
        engine: Any = self._core.engine
        after: dict[str, Callable[..., None]] = {
            "extend": lambda _, batch: self._extend(batch),
            "fork": lambda child, parent: self._pool.fork(parent, child),
            "truncate": lambda _, handle, length: self._pool.truncate(handle, length),
            "close": lambda _, handle: self._pool.close(handle),
        }
        for name, note in after.items():
            setattr(engine, name, self._then(getattr(engine, name), note, name == "extend"))
        self._core.observer = self

    def detach(self) -> None:
        """Stop; does nothing if it is not attached."""
        with suppress(Exception):  # a core that fails has told its requests why
            self._core.between_steps(self._detach)

    def _detach(self) -> None:
        if self._core.observer is self:
            for name in ("extend", "fork", "truncate", "close"):
                delattr(self._core.engine, name)
            self._core.observer = Observer()

    def _then(self, call: Callable[..., Any], note: Callable[..., None], always: bool) -> Callable[..., Any]:
        """Return a function that calls `call`, and then `note` with its result and arguments.

        Unless `always`, it is called only if the first argument is a sequence in the pool.
        """

        def both(*args: Any) -> Any:
            result = call(*args)
            if always or args[0] in self._pool.handles:
                self._guarded(lambda: note(result, *args))
            return result

        return both

    def _guarded(self, note: Callable[[], None]) -> None:
        """Call `note` unless something has failed. An exception would end the requests of others, so it is kept."""
        if self.error is None:
            try:
                note()
            except Exception as e:
                self.error = e if isinstance(e, NanoinferError) else NanoinferError(f"recording failed: {one_line(e)}")
                self._core.cancel(self._requests)

    # Called in steps -----------------------------------------------------------------------------------------

    def _running(self) -> dict[Handle, int]:
        """Return the recorded sequences that run."""
        found = {}
        for s in self._core.scheduler.running:
            if self._salt is not None and s.request.salt == self._salt and s not in self._ids:
                self._add(s.request)
            if s in self._ids and s.handle is not None:
                found[s.handle] = self._ids[s]
        return found

    def _extend(self, batch: StepBatch) -> None:
        running = self._running()
        for handle, num_new in zip(batch.handles, batch.num_new, strict=True):
            if handle not in running:
                continue
            if handle not in self._pool.handles:
                self._pool.open(handle)
                if length := self._core.engine.length(handle) - num_new:  # of a prefix that is not recorded
                    self._pool.append(handle, length)
            self._starts[handle] = self._pool.length(handle), num_new
            if (copy := self._pool.append(handle, num_new)) is not None:
                self._copied.append(copy)

    def sampled(self, rows: Seq[StepRow], logits: Array, tokens: Seq[Seq[int]]) -> None:
        """Record the rows of one part of a step; see `Observer.sampled`."""
        self._guarded(lambda: self._sampled(rows, logits, tokens))

    def _sampled(self, rows: Seq[StepRow], logits: Array, tokens: Seq[Seq[int]]) -> None:
        for row, token_ids in zip(rows, tokens, strict=True):
            if row.sequence not in self._ids:
                continue
            values = to_numpy(logits[row.first : row.first + len(token_ids), : self._llm.model.vocab_size])
            candidates = [_candidates(*pair) for pair in zip(values, token_ids, strict=True)]
            start, num_new = self._starts.pop(cast(Handle, row.sequence.handle), (0, 0))  # forks have no new tokens
            self._rows.append(Row(self._ids[row.sequence], start, num_new, [*row.drafts], [*token_ids], candidates))

    def stepped(self, seconds: float) -> None:
        """Record a step if it processed recorded sequences; see `Observer.stepped`."""
        self._guarded(lambda: self._stepped(seconds))

    def _stepped(self, seconds: float) -> None:
        running = self._running()
        rows = self._rows + [Row(running[h], *part) for h, part in self._starts.items() if h in running]
        ran = {row.sequence for row in rows}
        waiting = [i for s, i in self._ids.items() if s.finish_reason is None and i not in ran]
        preempted = [i for i in waiting if i in self._before and i not in running.values()]
        if rows or preempted:
            tables = {str(running.get(Handle(h), f"kept {h}")): [*self._pool.table(h)] for h in self._pool.handles}
            step = StepRecord(seconds, rows, waiting, preempted, tables, self._copied, *self._cost(rows))
            self._steps.append(step)
            self.num_values += sum(map(len, tables.values())) + NUM_CANDIDATES * sum(len(row.tokens) for row in rows)
        self._rows, self._copied, self._starts, self._before = [], [], {}, {*running.values()}
        if len(self._steps) > MAX_STEPS or self.num_values > MAX_VALUES:
            raise NanoinferError(
                f"the generation takes more than {MAX_STEPS} steps, or {MAX_VALUES} blocks and candidates: lower"
                " max_tokens or n"
            )

    def _cost(self, rows: Seq[Row]) -> tuple[int, int, float | None]:
        """Return bytes, FLOPs and the limit in seconds of a step's rows, which share one read of the weights."""
        weight_bytes = num_bytes = extend(self._config, self._fmt, 1).weight_bytes
        flops = 0
        for row in rows:
            if row.num_new:
                cost = extend(self._config, self._fmt, row.num_new).model
                num_bytes += cost.bytes(1, row.start + row.num_new) - weight_bytes
                flops += cost.flops(1, row.start + row.num_new)
        if (ceiling := self._ceiling) is None:
            return num_bytes, flops, None
        return num_bytes, flops, max(num_bytes / ceiling.bandwidth(num_bytes), flops / ceiling.throughput(self._fmt))

    # The result ----------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """Return what was recorded, when the requests have finished. Raises NanoinferError if it is not complete."""
        if self.error is not None:
            raise self.error
        model, requests = self._llm.model, self._requests
        rows = [row for step in self._steps for row in step.rows]
        shown = {t for r in requests for t in r.prompt_token_ids} | {t for row in rows for t in row.proposed}
        shown |= {t for row in rows for candidates in row.candidates for t, _ in candidates}
        return Recording(
            model.name, model.engine, model.device, self._format_name, self._draft,
            extend(model.config, self._fmt, 1).weight_bytes, KV_BLOCK, self._num_blocks,
            [r.prompt_token_ids for r in requests],
            [(i, s.sample_index) for i, r in enumerate(requests) for s in r.sequences], self._steps,
            {token: self._llm.decode([token]) for token in sorted(shown) if self._llm.tokenizer is not None},
        )  # fmt: skip


def _candidates(logits: Any, token: int) -> list[tuple[int, float]]:
    """Return the most likely tokens of a row of logits (V) with their probabilities; `token` is one of them."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    top = np.argpartition(-weights, min(NUM_CANDIDATES, len(weights) - 1))[:NUM_CANDIDATES]
    order = top[np.lexsort((top, -weights[top]))].tolist()
    ids = order if token in order else [*order[:-1], token]
    total = weights.sum()
    return [(i, round(float(weights[i] / total), 5)) for i in ids]


def record(
    llm: LLM, prompts: list[str], params: SamplingParams, ceiling: Ceiling | None = None, draft: str | None = None
) -> Recording:
    """Generate, and return a recording of all steps.

    Args:
        llm: not recorded or profiled otherwise.
        prompts: all are submitted at once.
        params: of all prompts.
        ceiling: limits of the device; None: steps have no limit.
        draft: name of the draft, for the page.

    Raises:
        NanoinferError: a prompt or parameter is invalid, or the generation takes more than MAX_STEPS steps or
            MAX_VALUES values.
    """
    requests = llm.requests.make_all(prompts, params)
    recorder, finished = Recorder(llm, requests, ceiling, draft), all_finished(requests)
    recorder.attach()
    try:
        with Ownership(llm.core, requests):
            llm.core.submit(requests)
            while not finished():
                llm.core.step(until=finished)
    finally:
        recorder.detach()
    return recorder.recording()


_FOLDER = Path(__file__).parent


_STYLE, _PROGRAM = ((_FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))


def policy() -> str:
    """Return the sources of a Content-Security-Policy that permits the style and the program of the page alone."""
    style, program = (b64encode(sha256(text.encode()).digest()).decode() for text in (_STYLE, _PROGRAM))
    return f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{program}'"


def page(recording: Recording | None) -> str:
    """Return the page, HTML in UTF-8. The recording is in it as JSON, in a script that is not executed.

    Without a recording, it is the page that requests one from the page that has opened it.
    """
    data = json.dumps(recording.document(), ensure_ascii=False, separators=(",", ":")) if recording else ""
    html = (_FOLDER / "page.html").read_text("utf-8")
    parts = {"STYLE": _STYLE, "PROGRAM": _PROGRAM, "RECORDING": data.replace("<", "\\u003c")}  # of "</script>"
    head, *rest = html.split("@@")  # text and names in turn
    return head + "".join(parts[part] if i % 2 == 0 else part for i, part in enumerate(rest))
