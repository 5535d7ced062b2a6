"""Generate for the lines of a file: a bounded window of them, in flight together, written in order.

    reader -> [ line 7: written next, running | line 8: its record waits | line 9: running | ... ] -> output

The window holds at most WINDOW_FACTOR * max_num_seqs lines and WINDOW_BYTES bytes of lines and records, and a line is
read only while fewer than QUEUE_FACTOR * max_num_seqs sequences are unfinished. So memory does not grow with the file.

`LineService` does the same for lines that several calls submit. Those of all calls in flight run together, so no slot
is empty while a call finishes:

    call 1: lines a b c -> [ queue ] -> BatchRunner -> records a b c -> the future of call 1
    call 2: lines d e   -> [       ]    (one thread)           d e   -> the future of call 2
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, cast

from nanoinfer.batch.files import Checkpoint, Line, LineReader, Output, Place
from nanoinfer.batch.records import Form, OpenAIForm, OwnForm, derive_seed, read_form, to_bytes, with_call_ids
from nanoinfer.entrypoints.chat import AnswerReader, Answers, chat_prompt
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.entrypoints.pooling import Reading, make_all
from nanoinfer.errors import NanoinferError, show
from nanoinfer.inputs.chat import ChatOptions
from nanoinfer.inputs.messages import as_conversation
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.protocols.fields import FieldError
from nanoinfer.protocols.pooling import PoolingRequest
from nanoinfer.protocols.requests import GenerationRequest
from nanoinfer.sampling_params import LoRARequest, SamplingParams
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.progress import ProgressBar

WINDOW_FACTOR = 8
QUEUE_FACTOR = 2
WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch that its lines may not change, and defaults that they may."""

    defaults: SamplingParams
    """Sampling parameters that a line does not have; its seed is not used."""
    seed: int = 0
    """Seed of the batch: with its number, it gives the seed of a line without one."""
    chat_template: str | None = None
    """Jinja template to use instead of the model's own."""
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)
    """Adapters that lines name as their model."""


@dataclass(eq=False)
class _Entry:
    """A line in the window."""

    place: Place
    form: Form
    num_bytes: int
    """Bytes of the line, and of the record when there is one."""
    requests: list[Request] = field(default_factory=list)
    answers: Answers | None = None
    """Readers of a chat whose messages have reasoning or calls."""
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """Outputs of the requests that have ended, by id."""
    readings: Sequence[Reading] = ()
    """The inputs of a line that embeds."""
    record: bytes | None = None
    error: str = ""
    """The message of an error record, with its line."""


class BatchRunner:
    """Runs a batch on a model. Args: options: see `BatchOptions`."""

    def __init__(self, llm: LLM, options: BatchOptions) -> None:
        self._llm, self._core, self._options = llm, llm.core, options
        self._max_num_seqs = llm.core.engine.limits.max_num_seqs
        self._window: deque[_Entry] = deque()
        self._queue: deque[Delta | RequestOutput] = deque()
        self._running: dict[int, tuple[_Entry, Request]] = {}  # by the id of an unfinished request
        self._num_running = self._num_bytes = 0  # sequences of these requests; bytes in the window
        self._at_end = False  # of the input
        self.num_tokens = 0
        """Tokens generated so far."""

    def run(self, reader: LineReader | _Traffic, output: Output | _Traffic, bar: ProgressBar) -> None:
        """Write a record for each line. The caller closes the output.

        Raises:
            NanoinferError: the input cannot be read, or the output cannot be written.
        """
        start, several = time.monotonic(), reader.num_files > 1
        try:
            while self._fill(reader, several) or self._window:
                if self._num_running:
                    self._core.step(until=lambda: bool(self._queue))
                    self._collect()
                self._write(output)
                if bar.due():
                    speed = self.num_tokens / (time.monotonic() - start)
                    total = output.done.num_records + len(self._window) if self._at_end else reader.total_lines
                    bar.update(output.done.num_records, total, f"{speed:,.0f} tokens/s")
        finally:
            self._core.cancel([r for entry in self._window for r in entry.requests if not r.finished])

    def _fill(self, reader: LineReader | _Traffic, several: bool) -> bool:
        """Read and queue lines while the window has room; return whether there may be more."""
        while (
            self._num_running < QUEUE_FACTOR * self._max_num_seqs
            and len(self._window) < WINDOW_FACTOR * self._max_num_seqs
            and self._num_bytes < WINDOW_BYTES
            and not (self._window and not reader.ready())  # what is there goes on while the input is being written
        ):
            if (line := next(reader, None)) is None:
                self._at_end = True
                return False
            self._start(line, several)
        return True

    def _start(self, line: Line, several: bool) -> None:
        """Queue the requests of a line; if it is bad, make its error record."""
        form, error = read_form(line, self._llm.model_name, self._llm.formatter.decode, several)
        entry = _Entry(line.place, form, line.num_bytes)
        self._window.append(entry)
        self._num_bytes += entry.num_bytes
        if error is None:
            try:
                self._make(form.request(self._options.defaults), entry)
            except NanoinferError as e:
                error = e
        if error is not None:
            return self._fail(entry, error)
        for request in entry.requests:
            request.queue = self._queue
            self._running[request.request_id] = entry, request
            self._num_running += len(request.sequences)
        self._core.submit(entry.requests)

    def _make(self, request: GenerationRequest | PoolingRequest, entry: _Entry) -> None:
        """Make the requests of a line, without queueing them. Raises NanoinferError if one of them is refused."""
        lora = self._adapter(request.model, entry)
        if isinstance(request, PoolingRequest):
            shared: Any = {"salt": request.cache_salt, "priority": request.priority, "lora": lora}
            entry.readings = self._llm.pooler.embed(request.inputs, request.params, **shared)
            entry.requests = make_all(entry.readings)
            return
        prompts: Sequence[Any] = request.prompts
        base: Any = request.params
        if request.messages is not None:
            options = ChatOptions(self._options.chat_template, **request.template)
            chat = chat_prompt(self._llm.formatter, as_conversation(request.messages), options, request.params)
            prompts = [{"prompt_token_ids": self._llm.requests.fit(chat.text, request.params, rendered=True)}]
            chat = chat.compiled(self._llm.requests)
            base, entry.answers = chat.params, None if chat.answers.plain else chat.answers
        params = [base] * len(prompts)
        if request.params.seed is None:
            seeds = (derive_seed(self._options.seed, entry.place.number, i) for i in range(len(prompts)))
            params = [replace(base, seed=seed) for seed in seeds]
        entry.requests = self._llm.requests.make_all(prompts, params, lora=lora)

    def _adapter(self, name: str | None, entry: _Entry) -> LoRARequest | None:
        """Return the adapter that a line names. Raises NanoinferError if it names neither one nor the model.

        Without adapters, lines of OpenAI's form may name any model: they were written for another server.
        """
        adapters, is_own = self._options.adapters, isinstance(entry.form, OwnForm)
        if name in (None, self._llm.model_name, self._llm.model.source) or not (adapters or is_own):
            return None
        if (lora := adapters.get(name or "")) is None:
            names = ", ".join((self._llm.model_name, *adapters))
            raise FieldError(f"the model {show(name)} does not exist: use one of {names}", "model", 404)
        if isinstance(entry.form, OpenAIForm):
            entry.form.model = lora.lora_name
        return lora

    def _collect(self) -> None:
        """Count what the last step added, and make the records of lines that have ended."""
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Delta):
                self.num_tokens += item.num_tokens
                continue
            entry, request = self._running.pop(cast(int, item.request_id))
            self._num_running -= len(request.sequences)
            entry.outputs[request.request_id] = item
            if len(entry.outputs) == len(entry.requests):
                self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        """Make the record of a line whose requests have ended."""
        outputs: Any = [entry.outputs[r.request_id] for r in entry.requests]
        if entry.answers is not None:
            for output in (outputs := [AnswerReader(entry.answers).read(output) for output in outputs]):
                output.outputs = [with_call_ids(o, entry.place.number) for o in output.outputs]
        entry.outputs = {}
        entry.requests = []
        try:
            outputs = [output.check() for output in outputs]
            if entry.readings:
                outputs = [reading.result(o) for reading, o in zip(entry.readings, outputs, strict=True)]
            self._keep(entry, to_bytes(entry.form.record(outputs)))
        except NanoinferError as e:
            self._fail(entry, e)

    def _fail(self, entry: _Entry, error: NanoinferError) -> None:
        place = entry.place
        entry.error = f"{place.file}, line {place.line}: {error}"[:500]
        self._keep(entry, to_bytes(entry.form.error(error)))

    def _keep(self, entry: _Entry, record: bytes) -> None:
        entry.record = record
        self._num_bytes += len(record) - entry.num_bytes
        entry.num_bytes = len(record)

    def _write(self, output: Output | _Traffic) -> None:
        """Write the records whose predecessors are all written."""
        while self._window and (record := self._window[0].record) is not None:
            entry = self._window[0]
            output.write(record, entry.place, entry.error)
            self._window.popleft()
            self._num_bytes -= entry.num_bytes
        output.checkpoint()


@dataclass(frozen=True)
class Result:
    """The record of a line."""

    record: bytes
    """JSON, with a newline."""
    error: str
    """The message of an error record, with its line; "": it is none."""


Results = Future[list[Result]]


@dataclass(eq=False)
class _Call:
    """Lines that were submitted together."""

    num_lines: int
    future: Results = field(default_factory=Future)
    results: list[Result] = field(default_factory=list)


class LineService:
    """Runs a BatchRunner in a thread. Thread-safe.

    Args:
        llm: the model; no other thread uses it.
        options: as of a batch file.
        several: whether records name the file of their line.
    """

    def __init__(self, llm: LLM, options: BatchOptions, several: bool = False) -> None:
        self._traffic = _Traffic(several)
        runner = BatchRunner(llm, options)
        threading.Thread(target=_serve, args=(runner, self._traffic), name="lines", daemon=True).start()

    def submit(self, lines: Sequence[Line]) -> Results:
        """Queue lines; the future has their results in the same order, or the exception that ended the thread."""
        return self._traffic.put(lines)

    def __del__(self) -> None:
        self._traffic.close()


class _Traffic:
    """The lines of all calls, as the runner reads them, and their records as it writes them."""

    done = Checkpoint()  # no bar shows how far it is
    total_lines = None  # more may come

    def __init__(self, several: bool) -> None:
        self.num_files = 2 if several else 1
        self._queue: SimpleQueue[tuple[Line, _Call] | None] = SimpleQueue()
        self._reading: deque[_Call] = deque()  # the call of each line without a record, in the order of the lines
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        self._fault: BaseException | None = None

    def put(self, lines: Sequence[Line]) -> Results:
        """Queue the lines of a call."""
        call = _Call(len(lines))
        with self._lock:
            if self._fault is not None:
                call.future.set_exception(self._fault)
            elif not lines:
                call.future.set_result([])
            else:
                self._calls.add(call)
                for line in lines:
                    self._queue.put((line, call))
        return call.future

    def close(self) -> None:
        """End the input after what is queued."""
        self._queue.put(None)

    def fail(self, fault: BaseException) -> None:
        """End all calls, and those to come, with an exception."""
        with self._lock:
            self._fault = fault
            for call in self._calls:
                call.future.set_exception(fault)
            self._calls.clear()

    def __next__(self) -> Line:
        if (item := self._queue.get()) is None:
            raise StopIteration
        line, call = item
        self._reading.append(call)
        return line

    def ready(self) -> bool:
        """Return whether a line is queued."""
        return not self._queue.empty()

    def write(self, record: bytes, place: Place, error: str = "") -> None:
        """Give a record to the call of its line."""
        call = self._reading.popleft()
        call.results.append(Result(record, error))
        if len(call.results) == call.num_lines:
            with self._lock:
                self._calls.discard(call)
            call.future.set_result(call.results)

    def checkpoint(self) -> None:
        """Do nothing: the calls keep the records."""


def _serve(runner: BatchRunner, traffic: _Traffic) -> None:
    try:
        runner.run(traffic, traffic, ProgressBar("lines", False))
    except BaseException as e:  # of the engine: it is the calls that report it
        traffic.fail(e)
