"""Grammars of structured outputs: compiled by llguidance, once for the requests that share one.

All kinds become llguidance's Lark: a JSON schema is `start: %json {...}`. A grammar leaves the choice of tokens to the
model where it permits one text only (`no_forcing`), so that the mask of a position is all tokens that it permits.

A new grammar is first compiled in a child process under limits of time and memory (check_worker.py), because it may
come from anyone and the work that it causes is not bounded otherwise. That takes 0.1 s at the first one, when the
process starts, and a few milliseconds later.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer import processes
from nanoinfer.checks import printable
from nanoinfer.errors import NanoinferError, missing_extra, one_line
from nanoinfer.files import parse_json
from nanoinfer.limited_process import LimitedProcess
from nanoinfer.model_info import ModelInfo
from nanoinfer.sampling_params import StructuredOutputsParams
from nanoinfer.workers import Workers

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 16
"""Compiled grammars that are kept for later requests."""
CPU_SEC = 2.0
MEMORY_BYTES = 256 << 20
LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "step_lexer_fuel": 100_000,  # of a mask: 7 ms
    "step_max_items": 20_000,  # of a mask: 1 ms
    "verbose_errors": False,
}
"""llguidance's limits that are not its defaults."""
WHITE_SPACE = r" |\r?\n[ \t]{0,16}"
"""White space at each place of JSON that may have some. Unbounded white space never ends with small models."""
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_UNSATISFIABLE = "NoExtensionBias"  # llguidance's name for: no byte can come next
_SETUP = {
    "cpu_sec": CPU_SEC,
    "memory_bytes": MEMORY_BYTES,
    "stack_bytes": 1 << 20,
    "limits": LIMITS,
    "options": _OPTIONS,
}


class Grammar:
    """A compiled grammar for one vocabulary. Matchers are copied from it; they share its lexer.

    Args:
        matcher: at the start of an output.
        vocab_size: number of tokens that may be sampled.
        workers: a thread that computes masks.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, workers: Workers) -> None:
        self._matcher, self.vocab_size, self.workers = matcher, vocab_size, workers
        self.first_mask = read_mask(matcher)
        """The tokens that an output may begin with, (vocab_size + 1,) bool: see `read_mask`."""
        self.broken = False
        """Whether a matcher has exceeded a limit. The lexer is shared, so the limit may concern all."""

    def new_matcher(self) -> llguidance.LLMatcher:
        """Return a matcher at the start of an output."""
        return self._matcher.deep_copy()


def read_mask(matcher: llguidance.LLMatcher) -> NDArray[np.bool_]:
    """Return the tokens that may come next, (vocab_size + 1,) bool; the last is whether the output may end here.

    Raises NanoinferError if the matcher has exceeded a limit. The interpreter lock is released during the computation.
    """
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").view(np.bool_)
    if not matcher.is_error():
        return bits
    if _UNSATISFIABLE in (error := matcher.get_error()):
        return np.zeros_like(bits)
    raise NanoinferError(explain(error))


class Grammars:
    """Compiles the grammars of requests to one model. Thread-safe.

    Args:
        model: whose tokenizer gives the vocabulary.
    """

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._checker = LimitedProcess(
            Path(__file__).with_name("check_worker.py"),
            ("llguidance",),
            _SETUP,
            "structured_outputs: the grammar cannot be compiled",
        )
        self._start()

    def _start(self) -> None:
        self._generation = processes.generation()
        self._lock = threading.Lock()
        self._cached: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self._vocabulary: Future[llguidance.LLTokenizer] | None = None
        self._workers = Workers("nanoinfer-masks", 1, around=processes.computing)

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Return the grammar for parameters, one that was compiled before if there is one.

        Raises:
            NanoinferError: llguidance is not installed; the model has no tokenizer; the grammar is malformed, not
                supported, exceeds a limit, or no output can match it.
        """
        if self._generation != processes.generation():  # a forked child has none of the parent's threads
            self._start()
        with self._lock:
            found = self._cached.pop(wanted, None)
            if found is None or (found.done() and found.exception() is None and found.result().broken):
                found, is_new = Future(), True
            else:
                is_new = False
            self._cached[wanted] = found
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        if is_new:
            try:
                with processes.computing():
                    found.set_result(self._compile(wanted))
            except BaseException as e:
                with self._lock:
                    self._cached.pop(wanted, None)
                found.set_exception(e if isinstance(e, Exception) else NanoinferError(f"interrupted: {one_line(e)}"))
                raise
        return found.result()

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        name = f"structured_outputs.{wanted.kind}"
        try:
            import llguidance
        except ImportError:
            raise NanoinferError(f"structured_outputs: {missing_extra('llguidance', 'structured')}") from None
        vocabulary = self._table()
        request = {"text": to_text(wanted), "convert": wanted.grammar is not None}
        answer = self._checker.ask(json.dumps(request).encode() + b"\n")
        if answer["error"] is not None:
            raise NanoinferError(f"{name}: {explain(answer['error'])}")
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(vocabulary, answer["lark"] + _OPTIONS, log_level=0, limits=limits)
        if matcher.is_error():
            raise NanoinferError(f"{name}: {explain(matcher.get_error())}")
        try:
            grammar = Grammar(matcher, self._model.vocab_size, self._workers)
        except NanoinferError as e:
            raise NanoinferError(f"{name}: {e}") from None
        if not grammar.first_mask[: self._model.vocab_size].any():
            raise NanoinferError(
                f"{name}: only the empty output matches it, or no token of the model begins one that does: change it"
            )
        return grammar

    def _table(self) -> llguidance.LLTokenizer:
        """Return the table of the vocabulary, which is made once."""
        from nanoinfer.structured import vocabulary

        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise NanoinferError(f"structured_outputs requires a tokenizer: {self._model.no_tokenizer_reason}")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary, is_new = Future(), True
            else:
                is_new = False
            made = self._vocabulary
        if is_new:
            try:
                made.set_result(vocabulary.build(tokenizer, self._model.vocab_size, self._model.end_token_ids))
            except BaseException as e:
                self._vocabulary = None
                made.set_exception(e)
        return made.result()


def to_text(wanted: StructuredOutputsParams) -> str:
    """Return the grammar in Lark, or as it was given. Raises NanoinferError if a schema is not JSON."""
    if wanted.json is not None or wanted.json_object:
        schema: dict[str, Any] = {"type": "object"} if wanted.json is None else _schema(str(wanted.json))
        compact = wanted.disable_any_whitespace
        white_space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITE_SPACE}
        schema.setdefault("x-guidance", white_space)
        return f"start: %json {json.dumps(schema)}"
    if wanted.choice is not None:
        return f"start: {' | '.join(map(json.dumps, wanted.choice))}"
    if wanted.regex is not None:
        from llguidance import LLMatcher

        made: str = json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]["lark_grammar"]
        return made
    return str(wanted.grammar)


def _schema(text: str) -> dict[str, Any]:
    schema = parse_json(text, "structured_outputs.json is not JSON")
    if not isinstance(schema, dict):
        raise NanoinferError("structured_outputs.json is not a JSON schema: give an object, such as {'type': 'object'}")
    return schema


def explain(error: str) -> str:
    """Return llguidance's error message on one line, without the place in the grammar that was made of a schema."""
    if _UNSATISFIABLE in error:
        return "no output can match it: change it"
    first = re.sub(r"^(at )?[0-9]+\([0-9]+\): ", "", error.strip())
    first = re.split(r"\n +[0-9]+ \| |\n<", first)[0]
    return printable(" ".join(first.split()))[:300] or "it is not supported"
