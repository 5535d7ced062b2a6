"""Grammars of structured outputs: compiled by llguidance, once for the requests that share one.

All kinds become llguidance's Lark: a JSON schema is `start: %json {...}`; choices are one terminal, whose states the
lexer makes by their common prefixes. A grammar leaves the choice of tokens to the model where it permits one text only
(`no_forcing`), so that the mask of a position is all tokens that it permits.

A new grammar is first compiled in a child process under limits of time and memory (check_worker.py), because it may
come from anyone and the work that it causes is not bounded otherwise. That takes 0.1 s at the first one, when the
process starts, and a few milliseconds later.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import NanoinferError, about, missing_extra, one_line
from nanoinfer.models.model_info import ModelInfo
from nanoinfer.sampling_params import StructuredOutputsParams
from nanoinfer.structured import schemas
from nanoinfer.structured.lexers import LIMITS, MAX_STATES, OPTIONS, FreedMemory, Grammar, explain
from nanoinfer.structured.vocabulary import special_tokens
from nanoinfer.utils import processes
from nanoinfer.utils.files import parse_json
from nanoinfer.utils.limited_process import LimitedProcess
from nanoinfer.utils.workers import Workers

if TYPE_CHECKING:
    import llguidance

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


class Grammars:
    """Compiles the grammars of requests to one model. Thread-safe.

    Args:
        model: whose tokenizer gives the vocabulary.
    """

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        tokenizer = model.tokenizer
        special = [] if tokenizer is None else sorted(special_tokens(tokenizer, model.vocab_size).values())
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
        self._freed = FreedMemory(self._workers)

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Return the grammar for parameters, one that was compiled before if there is one.

        Raises:
            NanoinferError: llguidance is not installed; the model has no tokenizer; the grammar is malformed, not
                supported, exceeds a limit, or no output can match it.
        """
        if self._generation != processes.generation():  # a forked child has none of the parent's threads
            self._start()
        with self._lock:
            found = self._cached.get(wanted)
            is_new = found is None
            if found is None:
                found = self._cached[wanted] = Future()
            self._cached.move_to_end(wanted)
        if is_new:
            try:
                with processes.computing():
                    found.set_result(self._compile(wanted))
            except BaseException as e:
                with self._lock:
                    self._cached.pop(wanted, None)
                found.set_exception(e if isinstance(e, Exception) else NanoinferError(f"interrupted: {one_line(e)}"))
                raise
            self._evict()
        return found.result()

    def _evict(self) -> None:
        """Release the grammars that were not used for the longest time, beyond MAX_CACHED_BYTES."""
        released, num_bytes = [], 0
        with self._lock:
            for wanted, found in reversed(list(self._cached.items())):
                if found.done() and found.exception() is None:  # else it is being compiled, or about to be removed
                    num_bytes += found.result().num_bytes
                    if num_bytes > MAX_CACHED_BYTES:
                        released.append(self._cached.pop(wanted).result())
        for grammar in released:
            grammar.release()

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        name = f"structured_outputs.{wanted.kind}"
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise NanoinferError(f"structured_outputs: {missing_extra('llguidance', 'structured')}") from None
        vocabulary = self._table()
        request = {"text": to_text(wanted), "convert": wanted.grammar is not None}
        answer = self._checker.ask(json.dumps(request).encode() + b"\n")
        if answer["error"] is not None:
            raise NanoinferError(f"{name}: {explain(answer['error'])}")
        num_bytes = answer["num_bytes"] or UNMEASURED_BYTES
        grammar = Grammar(answer["lark"], vocabulary, self._model.vocab_size, num_bytes, self._workers, self._freed)
        with about(name):
            first_mask = grammar.lexer().first_mask
        if not first_mask[: self._model.vocab_size].any():
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
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = vocabulary.build(tokenizer, self._model.vocab_size, self._model.end_token_ids)
            return self._vocabulary


def to_text(wanted: StructuredOutputsParams) -> str:
    """Return the grammar in Lark, or as it was given. Raises NanoinferError if a schema is not JSON."""
    if wanted.json is not None or wanted.json_object:
        schema: dict[str, Any] = {"type": "object"} if wanted.json is None else _schema(str(wanted.json))
        schemas.rewrite(schema)
        if wanted.disable_additional_properties:
            schemas.close(schema)
        schemas.check(schema)
        compact = wanted.disable_any_whitespace
        white_space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITE_SPACE}
        schema.setdefault("x-guidance", white_space)
        return f"start: %json {json.dumps(schema)}"
    if wanted.choice is not None:
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, wanted.choice))}"
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
