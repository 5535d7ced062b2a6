"""Grammars of structured outputs: what is refused and how fast, the cache, the bytes of tokens of every tokenizer."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from helpers.models import CHARS, info, refuses
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.errors import NanoinferError
from nanoinfer.protocols.errors import error_body
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, FieldError
from nanoinfer.protocols.requests import parse
from nanoinfer.structured import grammars, vocabulary
from nanoinfer.structured.grammars import Grammars
from nanoinfer.tokenizers.tokenizer import CharTokenizer, Tokenizer, from_core

llguidance = pytest.importorskip("llguidance")

Structured = StructuredOutputsParams


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    return Grammars(info(CharTokenizer([chr(i) for i in range(32, 127)] + ["\n"])))


def ref_chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(8000)) + '\na8000: "x"'
SELF = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Exploding: time, memory, stack.
    # Whichever limit it reaches first on this machine: 2 s of CPU time, or 256 MB.
    "large multipleOf": ({"json": {"type": "integer", "multipleOf": 100_000_007}}, "cannot be compiled: it needs "),
    "many intersections": ({"json": {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(2000)]}}, "needs"),
    "chain of references": ({"json": ref_chain(3000)}, "it nests too deep"),
    "nested schema": ({"json": nested(200)}, "recursion limit exceeded"),
    "nested rules": ({"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000}, "too deeply nested"),
    "doubling terminals": (
        {"grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'},
        "too big",
    ),
    "conversion of newlines": ({"grammar": "root ::= " + "\n" * 100_000}, "needs more than 2 s of CPU time"),
    "conversion of nested groups": ({"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}, "recursion"),
    # Impossible.
    "no such type": ({"json": {"type": "nothing"}}, "structured_outputs.json: "),
    "nothing satisfies": ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "unsatisfiable"),
    "refers to itself": ({"json": {"$ref": "#"}}, "structured_outputs.json: no output can match it"),
    "no character": ({"regex": r"[^\s\S]"}, "structured_outputs.regex: no output can match it"),
    "empty output": ({"regex": "a{0}"}, "only the empty output matches it, or no token of the model begins one"),
    "no token": ({"regex": "é"}, "only the empty output matches it, or no token of the model begins one"),
    # Not supported.
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "unknown keyword": ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    "no files": ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
    "no imports": ({"grammar": "%import ..secret (X)\nstart: X"}, "structured_outputs.grammar"),
    # Malformed.
    "not JSON": ({"json": "{"}, "structured_outputs.json is not JSON"),
    "not a schema": ({"json": "[]"}, "structured_outputs.json is not a JSON schema: give an object"),
    "duplicate keys": ({"json": '{"type": "string", "type": "integer"}'}, "duplicated"),
    "not a regex": ({"regex": "((("}, "structured_outputs.regex: invalid regex"),
    "undefined rule": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "GBNF junk": ({"grammar": "root ::= (((("}, "structured_outputs.grammar"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.slow_if(lambda case: case in ("large multipleOf", "many intersections", "conversion of newlines"))
@pytest.mark.nightly_if(lambda case: case in ("many intersections", "conversion of newlines"))
def test_it_is_refused_in_one_line_and_in_time(compiler: Grammars, case: str) -> None:
    given, message = REFUSED[case]
    start = time.monotonic()
    refuses(lambda: compiler.compile(Structured(**given)), "structured_outputs", message)
    assert time.monotonic() - start < 60  # 2 s of CPU time, on a busy machine
    with pytest.raises(NanoinferError) as e:
        compiler.compile(Structured(**given))
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 400


@pytest.mark.parametrize(
    "given",
    [
        {"choice": [f"value-{i}" for i in range(5000)]},
        {"json": {"enum": [f"value-{i}" for i in range(5000)]}},
        {"json": {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(480)}}},
        {"json": SELF},
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**6}, "minItems": 10**6}},
        {"regex": "(a|a)*(a|aa)+b(a*)*"},
        {"regex": ".*a.{200}"},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {
            "grammar": "start: a0\n"
            + "\n".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}" for i in range(150))
            + '\na150: "x"'
        },
        {"grammar": 'start: s\ns: s s | "a" | '},
    ],
    ids=lambda given: json.dumps(given)[:40],
)
def test_a_large_grammar_is_bounded_while_it_is_used(compiler: Grammars, given: dict[str, Any]) -> None:
    """Compiling is, and each mask, of which 200 are taken at random; a limit may be exceeded on the way."""
    grammar = compiler.compile(Structured(**given))
    matcher, generator, longest = grammar.lexer().new_matcher(), np.random.default_rng(0), 0.0
    for _ in range(200):
        start = time.thread_time()
        try:
            mask = grammars.read_mask(matcher)
        except NanoinferError:
            break
        longest = max(longest, time.thread_time() - start)
        if not mask[:-1].any():
            break
        assert matcher.consume_token(int(generator.choice(np.flatnonzero(mask[:-1])))) or matcher.is_error()
    assert longest < 0.5


@pytest.mark.slow
def test_a_limit_ends_no_other_grammar(compiler: Grammars) -> None:
    hostile = [Structured(**given) for given, _ in list(REFUSED.values())[:4]]
    fine = [Structured(regex=f"a{{{i}}}") for i in range(1, 5)]

    def attempt(wanted: StructuredOutputsParams) -> bool:
        try:
            compiler.compile(wanted)
        except NanoinferError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(attempt, [x for pair in zip(hostile, fine, strict=True) for x in pair]))
    assert found == [False, True] * 4


def test_a_grammar_is_compiled_once(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    ask = compiler._checker.ask
    monkeypatch.setattr(compiler._checker, "ask", lambda request: asked.append(request) or ask(request))
    start = threading.Barrier(8)

    def compile_one(_: int) -> grammars.Grammar:
        start.wait()
        return compiler.compile(Structured(json={"type": "string", "maxLength": 17}))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(compile_one, range(8)))
    assert len({id(grammar) for grammar in found}) == 1
    assert len(asked) == 1
    num_kept = grammars.MAX_CACHED_BYTES // found[0].num_bytes
    assert 4 < num_kept < 16  # of 16 MiB and what it takes to compile one
    for i in range(1, num_kept + 1):
        compiler.compile(Structured(regex=f"b{{{i}}}"))
    assert sum(kept.result().num_bytes for kept in compiler._cached.values()) <= grammars.MAX_CACHED_BYTES
    assert compiler.compile(Structured(json={"type": "string", "maxLength": 17})) is not found[0]


def test_the_checking_process_has_limits(compiler: Grammars) -> None:
    compiler.compile(Structured(regex="limits"))
    child = compiler._checker._child
    assert child is not None
    with open(f"/proc/{child._process.pid}/limits") as f:
        limits = {line[:26].strip(): line[26:].split()[:2] for line in f}
    assert limits["Max address space"] == [str(grammars.MEMORY_BYTES)] * 2
    assert limits["Max stack size"] == [str(1 << 20)] * 2
    assert limits["Max open files"] == ["3", "3"]
    assert limits["Max file size"] == ["0", "0"]
    child._process.kill()  # as the operating system does when memory is short
    child._process.wait()
    compiler.compile(Structured(regex="killed"))


# What a grammar means ----------------------------------------------------------------------------------------


def accepted(compiler: Grammars, wanted: StructuredOutputsParams, text: str) -> bool:
    """Whether the tokens of a text are permitted one after the other, and the text may end there."""
    matcher = compiler.compile(wanted).lexer().new_matcher()
    ids = compiler._model.require_tokenizer().encode(text)
    return all(matcher.consume_token(i) for i in ids) and bool(matcher.is_accepting())


def test_white_space_in_json(compiler: Grammars) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text, flexible, compact in (
        ('{"a":1}', True, True),
        ('{"a": 1}', True, False),
        ('{\n    "a": 1\n}', True, False),
        ('{  "a": 1}', False, False),
        ("{" + "\n" * 2 + '"a":1}', False, False),
        (' {"a":1}', False, False),
    ):
        assert accepted(compiler, Structured(json=schema), text) == flexible
        assert accepted(compiler, Structured(json=schema, disable_any_whitespace=True), text) == compact
    own = {**schema, "x-guidance": {"whitespace_flexible": True}}
    assert accepted(compiler, Structured(json=own), '{  "a":\n\n1}')


@pytest.mark.parametrize(
    "regex, good, bad",
    [
        (r"a/b\n", ["a/b\n"], ["a/b", "a/bn"]),
        (r'"\d{2}"', ['"12"'], ['"1"']),
        ("^ab$", ["ab"], ["abc", "xab"]),
        ("a b  c", ["a b  c"], ["abc"]),
        ("a|bc", ["a", "bc"], ["ac", "b"]),
        (".", ["a"], ["\n", "ab"]),
        ("(?i)ab", ["aB"], ["a"]),
    ],
)
def test_a_regex_matches_the_whole_output(compiler: Grammars, regex: str, good: list[str], bad: list[str]) -> None:
    assert all(accepted(compiler, Structured(regex=regex), text) for text in good)
    assert not any(accepted(compiler, Structured(regex=regex), text) for text in bad)


def test_grammars_of_both_syntaxes(compiler: Grammars) -> None:
    lark = 'start: item ("," item)*\nitem: NAME "=" %json {"type": "integer"}\nNAME: /[a-z]+/\n%ignore / {1,2}/'
    gbnf = 'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+'
    for grammar, spaces in ((lark, True), (gbnf, False)):
        assert accepted(compiler, Structured(grammar=grammar), "a=1,bc=23")
        assert accepted(compiler, Structured(grammar=grammar), "a =1") == spaces
        assert not accepted(compiler, Structured(grammar=grammar), "a=1,")


# The bytes of tokens -----------------------------------------------------------------------------------------


def metaspace() -> Any:
    """A SentencePiece BPE with byte fallback, as Llama 2 has it."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    tokens = [
        "<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "▁the", "the", "{", '▁{"', "é",
    ]  # fmt: skip
    core = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def word_piece() -> Any:
    import tokenizers
    from tokenizers import decoders, models

    tokens = ["[UNK]", "the", "a", "##ing", "##s", "do", "{"]
    core = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    return core


def byte_level() -> Any:
    import tokenizers
    from nanoinfer.training.data import train_bpe

    core = tokenizers.Tokenizer.from_str(train_bpe(['the engine takes the émigré {"a": 1} \U0001f600 '] * 3, 300))
    core.add_special_tokens(["<|end|>"])
    core.add_tokens(["<plain>"])
    return core


TOKENIZERS = {"characters": lambda: None, "byte-level": byte_level, "metaspace": metaspace, "word pieces": word_piece}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_the_text_of_outputs(name: str) -> None:
    core = TOKENIZERS[name]()
    tokenizer: Tokenizer = CharTokenizer(list(CHARS + "é☃")) if core is None else from_core(core)
    V = tokenizer.vocab_size
    table, generator = vocabulary._bytes(tokenizer, V), np.random.default_rng(0)
    special = set(vocabulary.special_tokens(tokenizer, V).values())
    ordinary = [i for i in range(V) if i not in special]
    (start,) = tokenizer.encode("a")[-1:]
    for _ in range(300):
        ids = generator.choice(ordinary, 12).tolist()
        data = b"".join(table[i] for i in ids)
        stream = tokenizer.stream([start])
        text = "".join(map(stream.push, ids)) + stream.flush()
        try:
            expected = data.decode()
        except UnicodeDecodeError:  # no grammar permits it
            continue
        assert text == expected
    made = vocabulary.build(tokenizer, V, [])
    assert (made.vocab_size, made.eos_token) == (V + 1, V)
    assert {i for i in range(V) if made.is_special_token(i)} >= special


def test_special_tokens_and_end_tokens_are_never_text() -> None:
    tokenizer = from_core(byte_level())
    (end,), (plain,) = tokenizer.encode("<|end|>"), tokenizer.encode("<plain>")
    (e,) = tokenizer.encode("e")
    for ends in ([], [e]):
        table = vocabulary.build(tokenizer, tokenizer.vocab_size, ends)
        matcher = llguidance.LLMatcher(table, 'start: /[^\\n]*/\n%llguidance {"no_forcing": true}')
        mask = grammars.read_mask(matcher)
        assert (mask[end], mask[plain], mask[e]) == (False, True, not ends)


@pytest.mark.parametrize("text", ["é☃\U0001f600", '{"a": "ü"}'])
def test_text_of_several_bytes_is_generated_whole(text: str) -> None:
    llm = LLM("shakespeare", engine="native")
    o = llm.generate("O", SamplingParams(structured_outputs=Structured(choice=(text,)), seed=1, max_tokens=60))[
        0
    ].outputs[0]
    assert (o.text, o.finish_reason) == (text, "stop")


# OpenAI's requests -------------------------------------------------------------------------------------------


def test_response_format_is_a_structured_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    prompt = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
    for url, body in prompt.items():
        for given, expected in (
            (None, None),
            ({"type": "text"}, None),
            ({"type": "json_object"}, Structured(json_object=True)),
            ({"type": "json_object", "schema": schema, "json_schema": None}, Structured(json=schema)),
            (
                {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
                Structured(json=schema),
            ),
        ):
            assert parse(url, body | {"response_format": given}, SamplingParams()).params.structured_outputs == expected
        own = parse(url, body | {"structured_outputs": {"regex": "a"}}, SamplingParams()).params.structured_outputs
        assert own == Structured(regex="a")
        for bad, part in (
            ("json", ""),
            ({"type": "xml"}, ".type"),
            ([], ""),
            ({"type": "json_schema", "json_schema": {}}, ".json_schema"),
            ({"type": "json_object", "schemas": schema}, ""),
            ({"type": "json_schema", "json_schema": {"schema": schema, "x": 1}}, ".json_schema"),
        ):
            with pytest.raises(FieldError, match=r"^response_format") as e:
                parse(url, body | {"response_format": bad}, SamplingParams())
            assert error_body(e.value)["error"]["param"] == f"response_format{part}"
        with pytest.raises(NanoinferError) as caught:
            parse(url, body | {"structured_outputs": {"regx": "a"}}, SamplingParams())
        assert error_body(caught.value)["error"]["param"] == "structured_outputs"
        both = body | {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
        with pytest.raises(FieldError, match=r"^response_format and structured_outputs are both given: give one"):
            parse(url, both, SamplingParams())
        options = both | {"structured_outputs": {"disable_additional_properties": False}}
        found = parse(url, options, SamplingParams()).params.structured_outputs
        assert found == Structured(json_object=True, disable_additional_properties=False)
        options["structured_outputs"] = {"disable_any_whitespace": 1}
        with pytest.raises(NanoinferError, match=r"^structured_outputs\.disable_any_whitespace=1"):
            parse(url, options, SamplingParams())
