"""Grammars of structured outputs: compiled by llguidance, once for the requests that share one.

All kinds become llguidance's Lark: a JSON schema is `start: %json {...}`; choices are one terminal, whose states the
lexer makes by their common prefixes. A grammar leaves the choice of tokens to the model where it permits one text only
(`no_forcing`), so that the mask of a position is all tokens that it permits.

A new grammar is first compiled in a child process under limits of time and memory (check_worker.py), because it may
come from anyone and the work that it causes is not bounded otherwise. That takes 0.1 s at the first one, when the
process starts, and a few milliseconds later.

A lexer is the table of states that all outputs with a grammar share. Masks add states to it when they first need them.
llguidance bounds the number of states, but not their size, and does not say how large they are. So the number is
chosen such that they fit MAX_GROWTH for most grammars, and a lexer that is full is replaced by a new one: outputs move
to it by consuming their tokens again.

llguidance may panic. Then the lexer cannot be used any more by any output, and all of them move to a new one.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError, ResultError, about, missing_extra, one_line, printable
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.sampling_params import StructuredOutputsParams
from nanoinfer.structured import schemas, vocabulary
from nanoinfer.utils import processes
from nanoinfer.utils.files import parse_json
from nanoinfer.utils.limited_process import LimitedProcess
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    import llguidance

LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,  # of a mask
    "step_max_items": 20_000,  # of a mask
    "verbose_errors": False,
}
"""llguidance's limits that are not its defaults."""
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
MAX_GROWTH = 16 << 20
"""Bytes of a lexer that are made while masks are computed; hostile grammars exceed it by their largest masks."""
MIN_STATES, MAX_STATES = 2_000, 20_000
"""Bounds of the number of states of a lexer."""
MIN_MASKS = 8
"""Masks that a lexer must have computed for a full one to be replaced. Else a new one would be full at once, too."""
_UNSATISFIABLE = "NoExtensionBias"  # llguidance's name for: no byte can come next
_PANIC = "panic: "  # how llguidance's messages about its own faults begin
MAX_CACHED_BYTES = 256 << 20
"""Memory of the compiled grammars that are kept for later requests. See `Grammar.num_bytes`."""
UNMEASURED_BYTES = 8 << 20
"""Memory of a compiled grammar where the C library does not say how much it has allocated."""
CPU_SEC = 2.0
MEMORY_BYTES = 256 << 20
WHITE_SPACE = r" |\r?\n[ \t]{0,16}"
"""White space at each place of JSON that may have some. Unbounded white space never ends with small models."""
_SETUP = {
    "cpu_sec": CPU_SEC,
    "memory_bytes": MEMORY_BYTES,
    "stack_bytes": 1 << 20,
    "limits": {"max_lexer_states": MAX_STATES, **LIMITS},
    "options": OPTIONS,
}


@dataclass(frozen=True)
class AnswerGrammar(StructuredOutputsParams):
    """The grammar of a chat's answer, whose text may be anything until a marker begins."""

    marker_starts: str | None = None
    """The characters that markers begin with; None: not known. Until one is written, the state of the grammar is the
    same after any text but white space alone."""


class Grammars:
    """Compiles the grammars of requests to one model. Thread-safe.

    Args:
        model: whose tokenizer gives the vocabulary.
    """

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        tokenizer = model.tokenizer
        special = [] if tokenizer is None else sorted(vocabulary.special_tokens(tokenizer, model.vocab_size).values())
        self._checker = LimitedProcess(
            Path(__file__).with_name("check_worker.py"),
            ("llguidance",),
            {**_SETUP, "special_token_ids": special},
            "structured_outputs: the grammar cannot be compiled",
        )
        self._start()

    def _start(self) -> None:
        self._generation = processes.generation()
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._cached: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._workers = Workers("nanoinfer-masks", 1, around=processes.computing)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar for parameters, one that was compiled before if there is one.

        Raises:
            NanoinferError: llguidance is not installed; the model has no tokenizer; the grammar is malformed, not
                supported, exceeds a limit, or no output can match it.
        """
        if self._generation != processes.generation():  # a forked child has none of the parent's threads
            self._start()
        with self._lock:
            future = self._cached.get(params)
            is_new = future is None
            if future is None:
                future = self._cached[params] = Future()
            self._cached.move_to_end(params)
        if is_new:
            try:
                with processes.computing():
                    future.set_result(self._compile(params))
            except BaseException as e:
                with self._lock:
                    self._cached.pop(params, None)
                future.set_exception(e if isinstance(e, Exception) else NanoinferError(f"interrupted: {one_line(e)}"))
                raise
            self._evict()
        return future.result()

    def _evict(self) -> None:
        """Release the grammars that were not used for the longest time, beyond MAX_CACHED_BYTES."""
        released, num_bytes = [], 0
        with self._lock:
            for params, future in reversed(list(self._cached.items())):
                if future.done() and future.exception() is None:  # else it is being compiled, or about to be removed
                    num_bytes += future.result().num_bytes
                    if num_bytes > MAX_CACHED_BYTES:
                        released.append(self._cached.pop(params).result())
        for grammar in released:
            grammar.release()
        if released:
            self._workers.put(processes.trim_memory)

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        name = f"structured_outputs.{params.kind}"
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise NanoinferError(f"structured_outputs: {missing_extra('llguidance', 'structured')}") from None
        vocabulary = self._table()
        request = {"text": to_text(params), "convert": params.grammar is not None}
        answer = self._checker.ask(json.dumps(request).encode() + b"\n")
        if answer["error"] is not None:
            raise NanoinferError(f"{name}: {explain(answer['error'])}")
        num_bytes = answer["num_bytes"] or UNMEASURED_BYTES
        starts = params.marker_starts if isinstance(params, AnswerGrammar) else None
        grammar = Grammar(answer["lark"], vocabulary, self._model.vocab_size, num_bytes, self._workers, starts)
        with about(name):
            first_mask = grammar.lexer().first_mask
        if not first_mask[: self._model.vocab_size].any():
            raise NanoinferError(
                f"{name}: only the empty output matches it, or no token of the model begins one that does: change it"
            )
        return grammar

    def _table(self) -> llguidance.LLTokenizer:
        """Return the table of the vocabulary, which is made once."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise NanoinferError(f"structured_outputs requires a tokenizer: {self._model.no_tokenizer_reason}")
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = vocabulary.build(tokenizer, self._model.vocab_size, self._model.end_token_ids)
            return self._vocabulary


def to_text(params: StructuredOutputsParams) -> str:
    """Return the grammar in Lark, or as it was given. Raises NanoinferError if a schema is not JSON."""
    if params.json is not None or params.json_object:
        schema: dict[str, Any] = {"type": "object"} if params.json is None else _schema(str(params.json))
        schemas.rewrite(schema)
        if params.disable_additional_properties:
            schemas.close(schema)
        compact = params.disable_any_whitespace
        white_space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITE_SPACE}
        schema.setdefault("x-guidance", white_space)
        return f"start: %json {json.dumps(schema)}"
    if params.choice is not None:
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, params.choice))}"
    if params.regex is not None:
        from llguidance import LLMatcher

        lark: str = json.loads(LLMatcher.grammar_from_regex(params.regex))["grammars"][0]["lark_grammar"]
        return lark
    return str(params.grammar)


def _schema(text: str) -> dict[str, Any]:
    schema = parse_json(text, "structured_outputs.json is not JSON")
    if not isinstance(schema, dict):
        raise NanoinferError("structured_outputs.json is not a JSON schema: give an object, such as {'type': 'object'}")
    return schema


class LexerFailed(ResultError):
    """llguidance panicked. The fault is not the request's."""


class Lexer:
    """The table of states of a grammar, and the matcher that all others are copied from.

    Args:
        matcher: at the start of an output.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._num_masks = 0
        self._last: tuple[bytes, NDArray[np.bool_]] = (b"", np.zeros(0, np.bool_))
        self.worn = False
        """Whether outputs must move to another one."""
        self.first_mask = self.read_mask(matcher)
        """The tokens that an output may begin with, (vocab_size + 1,) bool: see `read_mask`."""

    def new_matcher(self) -> llguidance.LLMatcher:
        """Return a matcher at the start of an output."""
        return self._matcher.deep_copy()

    def read_mask(self, matcher: llguidance.LLMatcher) -> NDArray[np.bool_]:
        """Return the tokens that may come next, as the function does. Equal masks in succession are the same array."""
        try:
            bits, mask = self._last
            if (new := read_bits(matcher)) != bits:
                self._last = new, mask = new, unpack(new)
            return mask
        except LexerFailed:
            self.worn = True
            raise
        finally:
            self._num_masks += 1

    def check(self, matcher: llguidance.LLMatcher) -> None:
        """Raise NanoinferError if a matcher has failed; LexerFailed if no matcher of this lexer can be used."""
        if matcher.is_error():
            error = failure(matcher.get_error())
            self.worn = self.worn or isinstance(error, LexerFailed)
            raise error

    def retire(self, error: NanoinferError) -> bool:
        """Say that a matcher failed, perhaps by a limit; return whether one of a new lexer may not."""
        self.worn = True
        return isinstance(error, LexerFailed) or self._num_masks >= MIN_MASKS


class Grammar:
    """A grammar for one vocabulary, and its lexer.

    Args:
        lark: its text, which has compiled in the checking process.
        table: of the vocabulary.
        vocab_size: number of tokens that may be sampled.
        num_bytes: memory that it has when it is compiled.
        workers: a thread that computes masks.
        marker_starts: see `AnswerGrammar`.
    """

    def __init__(
        self,
        lark: str,
        table: llguidance.LLTokenizer,
        vocab_size: int,
        num_bytes: int,
        workers: Workers,
        marker_starts: str | None = None,
    ) -> None:
        self.vocab_size, self.workers, self.marker_starts = vocab_size, workers, marker_starts
        self._texts: dict[int, str] = {}
        self.num_bytes = num_bytes + vocab_size + len(lark) + MAX_GROWTH
        """Memory that it may have, at most."""
        self._lark, self._table = lark, table
        # A state has at most all lexemes: 9 bytes for each, of 1.5 kB or more that it takes to compile one.
        state_bytes = 1024 + num_bytes * 6 // 1000
        self._max_states = min(max(MAX_GROWTH // state_bytes, MIN_STATES), MAX_STATES)
        self._lock = threading.Lock()
        self._lexer: Lexer | None = None

    def lexer(self) -> Lexer:
        """Return the lexer that outputs use now. Raises NanoinferError if llguidance does not compile the grammar."""
        with self._lock:
            if self._lexer is None or self._lexer.worn:
                self._lexer = None  # freed before the next one is made, if no output has it
                self._lexer = self._compile()
            return self._lexer

    def text(self, token_id: int) -> str:
        """Return a token's text if no marker begins in it; else, and for a part of a character, an empty one."""
        if (known := self._texts.get(token_id)) is None:
            raw = b"" if self._table.is_special_token(token_id) else self._table.decode_bytes([token_id])
            text = raw.decode(errors="replace")
            starts = {"\ufffd", *(self.marker_starts or "")}
            known = self._texts[token_id] = text if starts.isdisjoint(text) else ""
        return known

    def release(self) -> None:
        """Free the lexer as soon as no output uses it. If one needs it later, it is compiled again."""
        with self._lock:
            self._lexer = None

    def _compile(self) -> Lexer:
        import llguidance

        limits = llguidance.LLParserLimits(max_lexer_states=self._max_states, **LIMITS)
        matcher = llguidance.LLMatcher(self._table, self._lark + OPTIONS, log_level=0, limits=limits)
        if matcher.is_error():
            raise NanoinferError(explain(matcher.get_error()))
        return Lexer(matcher)


def read_mask(matcher: llguidance.LLMatcher) -> NDArray[np.bool_]:
    """Return the tokens that may come next, (vocab_size + 1,) bool; the last is whether the output may end here.

    Raises NanoinferError if the matcher has exceeded a limit. The interpreter lock is released during the computation.
    """
    return unpack(read_bits(matcher))


def read_bits(matcher: llguidance.LLMatcher) -> bytes:
    """Return the mask of `read_mask`, one bit each."""
    bits: bytes = matcher.compute_bitmask()
    if not matcher.is_error():
        return bits
    if _UNSATISFIABLE in (error := matcher.get_error()):
        return bytes(len(bits))
    raise failure(error)


def unpack(bits: bytes) -> NDArray[np.bool_]:
    """Return a bool for each bit."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def failure(error: str) -> NanoinferError:
    """Return the exception for llguidance's error message."""
    if error.startswith(_PANIC):
        return LexerFailed(f"the server's grammar library failed: {explain(error)}: no fault of the request")
    return NanoinferError(explain(error))


def explain(error: str) -> str:
    """Return llguidance's error message on one line, without the place in the grammar that was made of a schema."""
    if _UNSATISFIABLE in error:
        return "no output can match it: change it"
    first = re.sub(r"^(at )?[0-9]+\([0-9]+\): ", "", error.strip())
    first = re.split(r"\n +[0-9]+ \| |\n<", first)[0]
    if (row := re.search(r"row has (\d+) items; max is (\d+)", first)) is not None:
        return (
            f"too much may follow at one position of the output, {row[1]} items of a grammar of which {row[2]} are the"
            " limit: use fewer alternatives or optional properties"
        )
    return printable(" ".join(first.split()))[:300] or "it is not supported"
