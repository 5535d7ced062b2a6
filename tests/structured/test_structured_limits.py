"""Limits of structured outputs: many choices, grammars that fail while they are used, memory, the client's status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.models import TINY, info, make_folder
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.errors import ResultError
from nanoinfer.protocols.errors import as_sent, status_code
from nanoinfer.structured import grammars
from nanoinfer.structured.grammars import Grammars
from nanoinfer.tokenizers.tokenizer import CharTokenizer

pytest.importorskip("llguidance")

Structured = StructuredOutputsParams
CHARS = [chr(i) for i in range(32, 127)] + ["\n", "é", "☃", "\U0001f600"]


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    return Grammars(info(CharTokenizer(CHARS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY, vocab_size=len(CHARS), block_size=256, eos_token_ids=(CHARS.index("~"),))
    return make_folder(tmp_path_factory.mktemp("limits") / "tiny", config, chars="".join(CHARS))


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), engine="native", dtype="float32", **{"max_num_seqs": 8, **options})


# Choices -----------------------------------------------------------------------------------------------------


def words(count: int, seed: int) -> tuple[str, ...]:
    generator, found = np.random.default_rng(seed), set[str]()
    while len(found) < count:
        found.add("".join(generator.choice(list('abc"\\é☃\U0001f600 [*\n'), int(generator.integers(1, 9)))))
    return tuple(sorted(found))


@pytest.mark.parametrize(
    "choices",
    [
        ("a", "ab", "abc", "abd", "b"),
        ("aa", "aaa", "a", "aaaaa"),
        ("yes", "no", "no idea", "nobody"),
        ('a"b', "a\\b", "a\nb", "/a/", "a*", "[a-z]+", "start", "CHOICE"),
        ("é", "éa", "☃", "\U0001f600", "\U0001f600é", "e"),
        words(300, 0),
    ],
    ids=lambda choices: repr(choices[:4]),
)
def test_what_may_follow_is_what_continues_a_choice(compiler: Grammars, choices: tuple[str, ...]) -> None:
    """After each beginning of a choice: the next characters of all that begin so, and the end where one is complete."""
    lexer = compiler.compile(Structured(choice=choices)).lexer()
    beginnings = {text[:i] for text in choices for i in range(len(text) + 1)}
    for beginning in sorted(beginnings):
        matcher = lexer.new_matcher()
        assert matcher.consume_tokens([CHARS.index(c) for c in beginning])
        following = {text[len(beginning)] for text in choices if text.startswith(beginning) and text != beginning}
        if following:
            mask = lexer.read_mask(matcher)
            assert {CHARS[i] for i in np.flatnonzero(mask[: len(CHARS)])} == following
            assert mask[len(CHARS)] == (beginning in choices)
        assert matcher.is_stopped() == (not following)
        assert matcher.is_accepting() == (beginning in choices)


@pytest.mark.parametrize(
    "choices",
    [[f"v{i}" for i in range(10_000)], [f"{'the same beginning ' * 3}{i}" for i in range(2001)]],
    ids=lambda choices: f"{len(choices)} of {len(choices[-1])}",
)
def test_thousands_of_choices(folder: Path, choices: list[str]) -> None:
    asked = SamplingParams(n=4, seed=1, temperature=2.0, max_tokens=80, structured_outputs={"choice": choices})
    (found,) = make_llm(folder).generate("go", asked)
    assert [(o.finish_reason, o.error) for o in found.outputs] == [("stop", None)] * 4
    assert {o.text for o in found.outputs} <= set(choices)


# Schemas that cannot be generated ----------------------------------------------------------------------------


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(count)}}


NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def test_too_much_that_may_follow_ends_the_request(folder: Path) -> None:
    (found,) = make_llm(folder).generate("go", SamplingParams(seed=1, structured_outputs={"json": optional(600)}))
    (o,) = found.outputs
    assert o.finish_reason == "error"
    assert o.error is not None
    assert o.error.startswith("structured_outputs: too much may follow at one position of the output, ")


# Lexers that are replaced ------------------------------------------------------------------------------------


@pytest.fixture
def lexers_made(monkeypatch: pytest.MonkeyPatch) -> list[grammars.Lexer]:
    made: list[grammars.Lexer] = []
    new = grammars.Grammar._compile
    monkeypatch.setattr(grammars.Grammar, "_compile", lambda self: made.append(new(self)) or made[-1])
    return made


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_a_full_lexer_is_replaced_and_the_tokens_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lexers_made: list[grammars.Lexer], draft: str | None
) -> None:
    structured = {"regex": "[a-z ]*[a-m][a-z ]{12}!"}  # a state for each of the last 12 characters' classes
    asked = SamplingParams(n=3, seed=3, max_tokens=150, structured_outputs=structured)
    options = {} if draft is None else {"draft": draft, "speculate_k": 3}
    expected = make_llm(folder).generate("abcabcabc", asked)[0].outputs
    assert len(lexers_made) == 1
    monkeypatch.setattr(grammars, "MIN_STATES", 250)
    monkeypatch.setattr(grammars, "MAX_STATES", 250)
    found = make_llm(folder, **options).generate("abcabcabc", asked)[0].outputs
    assert [(o.token_ids, o.finish_reason, o.error) for o in found] == [
        (o.token_ids, o.finish_reason, o.error) for o in expected
    ]
    assert max(len(o.token_ids) for o in found) > 100
    assert len(lexers_made) > 2, [len(o.token_ids) for o in found]


def test_a_lexer_that_is_full_at_once_is_not_replaced_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lexers_made: list[grammars.Lexer]
) -> None:
    """The states of 150 characters do not fit: the output fails when a new lexer has not computed MIN_MASKS masks."""
    monkeypatch.setattr(grammars, "MIN_STATES", 120)
    monkeypatch.setattr(grammars, "MAX_STATES", 120)
    structured = {"regex": "[a-z ]{150,200}"}
    (o,) = (
        make_llm(folder)
        .generate("go", SamplingParams(seed=3, max_tokens=200, structured_outputs=structured))[0]
        .outputs
    )
    assert o.finish_reason == "error"
    assert o.error is not None
    assert o.error.startswith("structured_outputs: ")
    assert 50 < len(o.text) < 150
    assert len(lexers_made) < 20


def test_a_grammar_that_is_not_cached_any_more_is_compiled_when_its_output_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lexers_made: list[grammars.Lexer]
) -> None:
    """Requests that wait hold no memory of llguidance beyond the cache's."""
    asked = [
        SamplingParams(seed=i, max_tokens=60, n=2, structured_outputs={"regex": f"[a-f]{{{i + 20}}}"}) for i in range(6)
    ]
    expected = [o.outputs[1].text for o in make_llm(folder).generate(["go"] * 6, asked)]
    assert [len(text) for text in expected] == [20, 21, 22, 23, 24, 25]
    lexers_made.clear()
    monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", 0)
    llm = make_llm(folder, max_num_seqs=2)
    assert [o.outputs[1].text for o in llm.generate(["go"] * 6, asked)] == expected
    assert len(llm.requests._grammars._cached) == 0
    assert len(lexers_made) == 12  # each when its request arrives, and for its two outputs


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_a_lexer_that_panicked_is_used_by_no_output(folder: Path, draft: str | None) -> None:
    """llguidance 1.9 panics at the end of a `stop` of several tokens that `max_tokens` bounds."""
    structured = {"grammar": 'start: t "aaaa" X\nX: T\nT: /(?s:.*)/\nt[max_tokens=30, stop="aaaa"]: T'}

    def asked(characters: str, seed: int) -> SamplingParams:
        ids = [CHARS.index(c) for c in characters]
        return SamplingParams(max_tokens=20, seed=seed, allowed_token_ids=ids, structured_outputs=structured)

    llm = make_llm(folder, **({} if draft is None else {"draft": draft, "speculate_k": 3}))
    each = [asked("cde", 0), asked("a", 1), asked("cde", 2), asked("a", 3), asked("cde", 4)]
    outputs = [o.outputs[0] for o in llm.generate(["cdecde"] * 5, each)]
    failed = "the server's grammar library failed: panic: "
    assert [(o.error or "").startswith(failed) for o in outputs] == [False, True, False, True, False]
    alone = [make_llm(folder).generate("cdecde", each[i])[0].outputs[0].text for i in (0, 2, 4)]
    assert [outputs[i].text for i in (0, 2, 4)] == alone
    assert status_code(ResultError(str(outputs[1].error))) == 500


# Memory ------------------------------------------------------------------------------------------------------

HOSTILE = """
import json, os, sys
import numpy as np
from nanoinfer import LLM, StructuredOutputsParams
from nanoinfer.errors import NanoinferError
from nanoinfer.structured import grammars

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def hostile(number):
    body = lambda j: f"/[a-z ]*{chr(97 + j % 26)}{chr(97 + j // 26)}[a-z ]*{j}{number}/"
    terminals = "\\n".join(f"A{j}: {body(j)}" for j in range(100))
    return "start: (" + "|".join(f"A{j}" for j in range(100)) + ")*\\n" + terminals

count, grammars.MAX_CACHED_BYTES = int(sys.argv[1]), int(sys.argv[2])
made = LLM("shakespeare", engine="native").requests._grammars
generator = np.random.default_rng(0)
made.compile(StructuredOutputsParams(regex="a"))
before, most, errors = resident(), 0, 0
for number in range(count):
    lexer = made.compile(StructuredOutputsParams(grammar=hostile(number))).lexer()
    matcher = lexer.new_matcher()
    try:
        for _ in range(200):
            mask = lexer.read_mask(matcher)[:-1]
            matcher.consume_token(int(generator.choice(np.flatnonzero(mask))))
    except NanoinferError:
        errors += 1
    del lexer, matcher
    most = max(most, resident() - before)
print(json.dumps({"most": most, "errors": errors, "num_kept": len(made._cached)}))
"""
SLACK = 64 << 20  # what one lexer and one mask may exceed MAX_GROWTH by, and what the allocator keeps


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, limit", [(12, 48 << 20), pytest.param(80, grammars.MAX_CACHED_BYTES, marks=pytest.mark.nightly)]
)
def test_the_memory_of_many_grammars_is_bounded(count: int, limit: int) -> None:
    """Of grammars whose lexers fill up, as 20,000 states of 2 kB did: 12 of them had 0.3 GB, and 16 0.5 GB."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(count), str(limit)], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["errors"] == count
    assert 2 <= found["num_kept"] <= limit // grammars.MAX_GROWTH
    assert found["most"] < limit + SLACK


def test_the_checking_process_measures_grammars(compiler: Grammars) -> None:
    """A larger grammar has more memory. The figures are those of x86-64 within a factor of 4."""
    for wanted, expected in ((Structured(json=NAMED), 100e3), (Structured(json=optional(400)), 1.8e6)):
        request = {"text": grammars.to_text(wanted), "convert": False}
        answer = compiler._checker.ask(json.dumps(request).encode() + b"\n")
        assert answer["error"] is None
        if not answer["num_bytes"]:
            pytest.skip("the C library does not tell how much it has allocated")
        assert expected / 4 < answer["num_bytes"] < expected * 4


# What the client gets ----------------------------------------------------------------------------------------


def test_the_status_of_an_output_that_its_grammar_fails() -> None:
    error = ResultError("structured_outputs: too many states")
    assert status_code(error) == 400
    sent = as_sent(error, response_format=True)
    assert (str(sent), status_code(sent)) == ("response_format: too many states", 400)
    assert status_code(ResultError("the logits are not finite")) == 500


def test_no_request_gets_a_500_for_its_grammar(folder: Path) -> None:
    """A dead end, a limit that a mask exceeds, a grammar that is refused: whole, as a stream, in a batch of prompts."""
    pytest.importorskip("starlette")
    from helpers.asgi import call, serve

    dead_end = {"structured_outputs": {"regex": "ab\u2603{2}\u2604"}}
    refused = {"type": "json_schema", "json_schema": {"schema": {"const": "\u2604"}}}
    cases: list[tuple[dict[str, Any], str]] = [
        (dead_end, "structured_outputs"),
        ({"response_format": refused}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": optional(600)}}}, "response_format"),
    ]

    async def main(app: Any, _: Any) -> None:
        for given, param in cases:
            for further in ({}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b"]}):
                body = {"prompt": "go", "max_tokens": 50, **given, **further}
                found = await call(app, "POST", "/v1/completions", body=json.dumps(body).encode())
                if found.status == 200:
                    assert further == {"stream": True}
                    last = found.content.decode().strip().split("\n\n")[-1].removeprefix("data: ")
                    error = json.loads(last)["error"]
                else:
                    assert found.status == 400, found.content
                    error = found.error
                assert (error["type"], error["param"]) == ("invalid_request_error", param)
                assert re.match(rf"(prompt \d of \d: )?{param}", error["message"])
        whole = {"prompt": "go", "max_tokens": 2, "structured_outputs": {"choice": ["ok"]}}
        assert (await call(app, "POST", "/v1/completions", body=json.dumps(whole).encode())).status == 200

    serve(make_llm(folder), main)
