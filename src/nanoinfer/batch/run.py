"""Generate for the lines of a file: a bounded window of them, in flight together, written in order.

    reader -> [ line 7: written next, running | line 8: its record waits | line 9: running | ... ] -> output

The window holds at most WINDOW_FACTOR * max_num_seqs lines and WINDOW_BYTES bytes of lines and records, and a line is
read only while fewer than QUEUE_FACTOR * max_num_seqs sequences are unfinished. So memory does not grow with the file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from nanoinfer.batch.files import Checkpoint, Line, Place
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


class Source(Protocol):
    """Where lines come from: a `LineReader`, or a queue."""

    @property
    def num_files(self) -> int:
        """Number of files; where there are several, a record names its own."""

    def __next__(self) -> Line:
        """Return the next line. Waits for it."""

    def ready(self) -> bool:
        """Return whether `__next__` would not wait."""

    @property
    def total_lines(self) -> int | None:
        """Number of lines; None: not known."""


class Sink(Protocol):
    """Where records go: a `FileOutput`, a `StreamOutput`, or who waits for them."""

    @property
    def done(self) -> Checkpoint:
        """The records so far."""

    def write(self, record: bytes, place: Place, error: str = "") -> None:
        """Take the record of the next line; `error`: its message, if it is an error record."""

    def checkpoint(self) -> None:
        """Save how far the batch is, if it is time to."""


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

    def run(self, reader: Source, output: Sink, bar: ProgressBar) -> None:
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

    def _fill(self, reader: Source, several: bool) -> bool:
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

    def _write(self, output: Sink) -> None:
        """Write the records whose predecessors are all written."""
        while self._window and (record := self._window[0].record) is not None:
            entry = self._window[0]
            output.write(record, entry.place, entry.error)
            self._window.popleft()
            self._num_bytes -= entry.num_bytes
        output.checkpoint()
