"""Structured outputs: every output matches its grammar, on every engine and with every way of decoding."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.environment import INTERPRETED, ROOT
from helpers.models import TINY, Run, make_folder, refuses
from nanoinfer import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.config import ModelConfig
from nanoinfer.engines import registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.structured import masks
from nanoinfer.structured.grammars import Grammars

pytest.importorskip("llguidance")

CHARS = '\n abcdefghijklmnopqrstuvwxyzABC0123456789{}[]",:.-_\\/'
END = 0
CONFIG: ModelConfig = replace(TINY, vocab_size=len(CHARS), block_size=96, eos_token_ids=(END,))
ENGINES = [name for name, spec in registry.ENGINES.items() if "cpu" in spec.devices]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
Structured = StructuredOutputsParams
LIST = Structured(grammar='start: "[" item ("," item)* "]"\nitem: /[a-c]{1,3}/ | start')
KINDS = {
    "json": Structured(json=PERSON, disable_any_whitespace=True),
    "regex": Structured(regex="[A-C][a-z]{2,5}, [0-9]{3}"),
    "open regex": Structured(regex="[a-z ]+"),
    "choice": Structured(choice=("yes", "no", "no idea")),
    "grammar": LIST,
    "gbnf": Structured(grammar='root ::= [ab]+ "." [cd]*'),
}


def params(kind: str | StructuredOutputsParams, **given: Any) -> SamplingParams:
    structured = KINDS[kind] if isinstance(kind, str) else kind
    return SamplingParams(**{"max_tokens": 80, "seed": 5, "structured_outputs": structured, **given})


def make_llm(folder: Path, engine: str = "native", **options: Any) -> LLM:
    return LLM(str(folder), engine=engine, device="cpu", dtype="float32", **{"max_num_seqs": 8, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("structured") / "tiny", CONFIG, chars=CHARS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder)


def matches(kind: str, text: str) -> bool:
    """Whether a complete output of a kind is one, by other means than a grammar."""
    if kind == "json":
        value = json.loads(text)
        return (
            list(value) == ["name", "age", "tags"]
            and isinstance(value["name"], str)
            and len(value["name"]) <= 6
            and type(value["age"]) is int
            and 0 <= value["age"] <= 120
            and len(value["tags"]) <= 2
            and set(value["tags"]) <= {"x", "yy"}
        )
    if kind == "choice":
        return text in ("yes", "no", "no idea")
    if kind == "grammar":
        items = json.loads(re.sub("[a-c]{1,3}", '"\\g<0>"', text))
        return isinstance(items, list) and len(items) > 0
    patterns = {"regex": "[A-C][a-z]{2,5}, [0-9]{3}", "open regex": "[a-z ]+", "gbnf": r"[ab]+\.[cd]*"}
    return re.fullmatch(patterns[kind], text) is not None


# Outputs match -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_every_complete_output_matches(llm: LLM, kind: str, temperature: float) -> None:
    (output,) = llm.generate("go", params(kind, temperature=temperature, n=8))
    finished = [o for o in output.outputs if o.finish_reason == "stop"]
    assert finished or temperature == 0
    assert all(matches(kind, o.text) for o in finished)
    assert {o.finish_reason for o in output.outputs} <= {"stop", "length"}
    assert all(o.error is None for o in output.outputs)


def test_the_pages_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "structured-outputs.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(program, {})
    assert re.fullmatch("[A-Z][a-z]{2,8}\n", capsys.readouterr().out)


def test_any_json_object(llm: LLM) -> None:
    (output,) = llm.generate("a", params(Structured(json_object=True), n=8, temperature=1.5))
    finished = [o.text for o in output.outputs if o.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_a_complete_output_ends_at_once_without_an_end_token(llm: LLM) -> None:
    """The last token that a grammar permits ends the output, in its own step and before max_tokens."""
    (output,) = llm.generate("a", params(Structured(choice=("yes",)), max_tokens=3, ignore_eos=True, min_tokens=3))
    (o,) = output.outputs
    assert (o.text, len(o.token_ids), o.finish_reason, o.stop_reason) == ("yes", 3, "stop", None)
    early = llm.generate("a", params(Structured(choice=("yes",)), max_tokens=2))[0].outputs[0]
    assert (early.text, early.finish_reason) == ("ye", "length")


def test_end_tokens_are_permitted_where_the_grammar_permits_an_end(llm: LLM) -> None:
    bias = {END: 1000.0}
    for n_letters, pattern in ((3, "[a-z]{3,9}"), (1, "[a-z]+")):
        o = llm.generate("a", params(Structured(regex=pattern), logit_bias=bias))[0].outputs[0]
        assert (len(o.text), o.finish_reason, o.stop_reason) == (n_letters, "stop", END)
        o = llm.generate("a", params(Structured(regex=pattern), logit_bias=bias, min_tokens=6))[0].outputs[0]
        assert (len(o.text), o.finish_reason, o.stop_reason) == (6, "stop", END)
        o = llm.generate("a", params(Structured(regex=pattern), logit_bias=bias, ignore_eos=True))[0].outputs[0]
        assert (len(o.text), o.finish_reason) == ((9, "stop") if n_letters == 3 else (80, "length"))


def test_stop_tokens_end_an_output_too(llm: LLM) -> None:
    dot, x = CHARS.index("."), CHARS.index("x")
    structured = Structured(regex="[a-z]{3,9}")
    o = llm.generate("a", params(structured, logit_bias={dot: 1000.0}, stop_token_ids=[dot]))[0].outputs[0]
    assert (len(o.text), o.stop_reason) == (3, dot)  # not a letter: only where the output may end
    o = llm.generate("a", params(structured, logit_bias={x: 1000.0}, stop_token_ids=[x]))[0].outputs[0]
    assert (o.text, o.stop_reason) == ("", x)  # a letter that the grammar permits, which the request stops at


def test_stop_strings_and_streams(llm: LLM) -> None:
    asked = params("open regex", max_tokens=40, ignore_eos=True)
    whole = llm.generate("a", asked)[0].outputs[0].text
    assert len(whole) == 40
    stop = whole[20:22]
    expected = whole[: whole.index(stop)]
    assert llm.generate("a", replace(asked, stop=(stop,)))[0].outputs[0].text == expected
    assert "".join(llm.stream("a", replace(asked, stop=(stop,)))) == expected


# What is sampled ---------------------------------------------------------------------------------------------


def masked_softmax(output: RequestOutput, position: int, allowed: str, temperature: float = 1.0) -> dict[str, float]:
    """Return the probabilities of the characters of `allowed`, renormalised, by the log-probabilities of an output."""
    values = output.outputs[0].logprobs
    assert values is not None
    raw = {CHARS[i]: entry.logprob / temperature for i, entry in values[position].items()}
    assert len(raw) == len(CHARS)
    weights = {c: np.exp(raw[c]) for c in allowed}
    return {c: float(w / sum(weights.values())) for c, w in weights.items()}


@pytest.mark.parametrize("draft", [None, "self:1"])
def test_the_distribution_is_the_renormalised_softmax(folder: Path, draft: str | None) -> None:
    """Also by the rule `reject`, whose proposals the grammar refuses or the target rejects."""
    chisquare = pytest.importorskip("scipy.stats").chisquare
    options = {} if draft is None else {"draft": draft, "speculate_k": 3, "speculate_rule": "reject"}
    llm = make_llm(folder, max_num_seqs=64, **options)
    structured = Structured(regex="[a-d][e-h][e-h][ij]")
    counts: Counter[str] = Counter()
    for seed in range(8):
        (output,) = llm.generate("go", params(structured, seed=seed, n=64))
        counts.update(o.text[:3] for o in output.outputs)
    (first,) = llm.generate("go", params(structured, logprobs=len(CHARS)))
    expected: dict[str, float] = {}
    for a, p in masked_softmax(first, 0, "abcd").items():
        (second,) = llm.generate("go" + a, params(Structured(regex="[e-h]"), logprobs=len(CHARS)))
        for b, q in masked_softmax(second, 0, "efgh").items():
            (third,) = llm.generate("go" + a + b, params(Structured(regex="[e-h]"), logprobs=len(CHARS)))
            expected |= {a + b + c: p * q * r for c, r in masked_softmax(third, 0, "efgh").items()}
    total = counts.total()
    assert total == 8 * 64
    likely = [text for text, p in expected.items() if p * total >= 5]
    assert len(likely) > 5
    observed = [counts[text] for text in likely] + [total - sum(counts[text] for text in likely)]
    probabilities = [expected[text] for text in likely] + [1 - sum(expected[text] for text in likely)]
    assert chisquare(observed, np.array(probabilities) / sum(probabilities) * total).pvalue > 1e-4
    if draft is not None:
        assert first.metrics.speculation is not None
        assert first.metrics.speculation.num_rejected > 0


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.nightly_if(lambda name: name == "compiled" or (name == "triton" and INTERPRETED))
def test_every_engine_gives_the_tokens_of_recompute(folder: Path, name: str) -> None:
    pytest.importorskip("torch")
    if name == "triton" and not find_spec("triton"):
        pytest.skip("triton is not installed")
    prompts = ["go", "ab" * 20, "c", "x y z", "a" * 9, "go"]
    each = [
        params(kind, temperature=t, max_tokens=30)
        for kind, t in zip(KINDS, (0.0, 1.0, 0.0, 2.0, 0.0, 1.0), strict=True)
    ]
    expected = [o.outputs[0].token_ids for o in make_llm(folder, "recompute").generate(prompts, each)]
    llm = make_llm(folder, name, max_num_batched_tokens=16)
    for _ in range(2):  # the second time from the prefix cache
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, each)] == expected


@pytest.mark.parametrize("draft", ["self:1", "prompt-lookup"])
@pytest.mark.parametrize("k", [1, 4, "auto"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_if(lambda k: k != 4)
def test_speculation_does_not_change_the_tokens(folder: Path, llm: LLM, kind: str, k: Any, draft: str) -> None:
    drafted = make_llm(folder, draft=draft, speculate_k=k)
    for temperature in (0.0, 1.0):
        asked = params(kind, temperature=temperature, n=3 if temperature else 1, repetition_penalty=1.1, min_tokens=2)
        (expected,), (found,) = (model.generate("abcabcabcabc", asked) for model in (llm, drafted))
        assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
        assert [o.finish_reason for o in found.outputs] == [o.finish_reason for o in expected.outputs]


def test_penalties_and_biases_apply_to_what_is_permitted(llm: LLM) -> None:
    a, b, z = (CHARS.index(c) for c in "abz")
    structured = Structured(regex="[ab]{8}")
    o = llm.generate("go", params(structured, logit_bias={z: 1e5, b: 1000.0}))[0].outputs[0]
    assert o.text == "b" * 8  # the grammar refuses z, whatever its bias
    o = llm.generate("go", params(structured, temperature=0.0, frequency_penalty=1000.0))[0].outputs[0]
    assert Counter(o.text) == {"a": 4, "b": 4}
    o = llm.generate("go", params(structured, top_k=1, logit_bias={a: 1e4}))[0].outputs[0]
    assert o.text == "a" * 8
    o = llm.generate("go", params(structured, top_p=1e-6, min_p=0.9))[0].outputs[0]
    assert o.text == llm.generate("go", params(structured, temperature=0.0))[0].outputs[0].text


def test_logprobs_are_the_models(llm: LLM) -> None:
    """As with logit_bias: of the distribution before the mask, also for tokens that the grammar refuses."""
    plain = SamplingParams(max_tokens=1, logprobs=5, seed=5)
    found = llm.generate("go", params("regex", max_tokens=1, logprobs=5))[0].outputs[0].logprobs
    expected = llm.generate("go", plain)[0].outputs[0].logprobs
    assert found is not None
    assert expected is not None
    assert {i: e.logprob for i, e in list(found[0].items())[1:]}.items() <= {
        i: e.logprob for i, e in expected[0].items()
    }.items() | {(i, e.logprob) for i, e in found[0].items()}
    best = sorted(expected[0].values(), key=lambda e: e.rank)[:5]
    assert sorted((e.rank, e.logprob) for e in found[0].values() if e.rank <= 5) == [(e.rank, e.logprob) for e in best]
    assert all(np.isfinite(e.logprob) for e in found[0].values())


@pytest.mark.parametrize("name", ["static", "native"])
def test_other_requests_of_a_batch_do_not_change(folder: Path, name: str) -> None:
    pytest.importorskip("torch")
    llm = make_llm(folder, name)
    prompts = ["go", "ab" * 8, "xyz"]
    plain = [SamplingParams(max_tokens=20, seed=i, temperature=float(i), logprobs=2, n=2 if i else 1) for i in range(3)]
    expected = llm.generate(prompts, plain)
    mixed = llm.generate([*prompts, "go", "go"], [*plain, params("json"), params(Structured(regex="ab☃"))])
    assert mixed[4].outputs[0].error is not None
    for before, after in zip(expected, mixed[:3], strict=True):
        assert [o.token_ids for o in after.outputs] == [o.token_ids for o in before.outputs]
        if name == "native":  # bit-identical
            assert [o.logprobs for o in after.outputs] == [o.logprobs for o in before.outputs]


# Scheduling --------------------------------------------------------------------------------------------------


def test_preemption_windows_and_chunks(folder: Path) -> None:
    pytest.importorskip("torch")
    roomy = make_llm(folder)
    prompts = ["abc" * (2 + i) for i in range(6)]
    asked = [params(Structured(regex="[a-z]{70}"), seed=i, max_tokens=70) for i in range(6)]
    expected = [o.outputs[0].text for o in roomy.generate(prompts, asked)]
    assert all(len(text) == 70 for text in expected)
    tight = make_llm(folder, kv_cache_memory=2 * 96 * 2 * CONFIG.kv_bytes_per_token(4), max_num_batched_tokens=8)
    assert [o.outputs[0].text for o in tight.generate(prompts, asked)] == expected
    assert tight.core.scheduler.stats.num_preempted > 0
    slide = params(Structured(regex="[a-z]{200}"), max_tokens=200, overflow="slide")
    found = [model.generate("go", slide)[0].outputs[0] for model in (roomy, make_llm(folder, "recompute"))]
    assert found[0].token_ids == found[1].token_ids
    assert (len(found[0].text), found[0].finish_reason) == (200, "stop")


def test_event_loops_get_the_same_outputs(folder: Path, llm: LLM) -> None:
    each = [params(kind, seed=i, temperature=1.0) for i, kind in enumerate(KINDS)]
    expected = [llm.generate("go", p)[0].outputs[0].text for p in each]

    async def run() -> list[Any]:
        async with AsyncLLM(str(folder), engine="native", dtype="float32", max_num_seqs=8) as model:

            async def one(p: SamplingParams) -> Any:
                try:
                    outputs = [o async for o in model.generate("go", p)]
                except ValueError as e:
                    return str(e)
                return outputs[-1].outputs[0].text

            bad = params(Structured(json={"type": "nothing"}))
            return await asyncio.gather(*(one(p) for p in [*each, bad]))

    *found, error = asyncio.run(run())
    assert found == expected
    assert error.startswith("structured_outputs.json: ")


def test_masks_are_computed_while_the_engine_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, computed, threads = llm.engine.extend, threading.Event(), set()
    compute = masks.OutputGrammar.compute

    def noted(self: masks.OutputGrammar, proposed: Any) -> None:
        compute(self, proposed)
        threads.add(threading.current_thread().name)
        computed.set()

    def waiting(batch: StepBatch) -> Any:
        if any(batch.num_logits):
            assert computed.wait(10), "the masks are not computed before the engine returns"
            computed.clear()
        return extend(batch)

    monkeypatch.setattr(masks, "AT_ONCE_SEC", 0)
    monkeypatch.setattr(masks.OutputGrammar, "compute", noted)
    monkeypatch.setattr(llm.engine, "extend", waiting)
    assert llm.generate("go", params("choice"))[0].outputs[0].text in ("yes", "no", "no idea")
    assert threads == {"nanoinfer-masks"}


def test_the_thread_ends_with_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "AT_ONCE_SEC", 0)
    before = {*threading.enumerate()}  # some of which may be ending
    model = make_llm(folder)
    model.generate("go", params("choice"))
    (thread,) = (t for t in threading.enumerate() if t.name == "nanoinfer-masks" and t not in before)
    del model
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_requests_without_a_grammar_do_no_work_for_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    for owner, name in ((masks, "start"), (masks, "MaskedRows"), (Grammars, "compile")):
        monkeypatch.setattr(owner, name, forbidden)
    assert llm.generate(["go", "ab"], SamplingParams(max_tokens=5))[1].outputs[0].error is None
    code = "import sys, nanoinfer\nnanoinfer.LLM(sys.argv[1]).generate('go')\nassert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, llm.model.source], check=True, timeout=120)


def test_a_forked_child_and_an_exiting_process(folder: Path) -> None:
    code = """
import os, sys, threading
from nanoinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], engine="native", dtype="float32")
asked = SamplingParams(seed=1, structured_outputs={"regex": "[a-c]{9}"})
def run(): return llm.generate("go", asked)[0].outputs[0].text
expected = run()
if (child := os.fork()) == 0:
    os._exit(0 if run() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
def forever():
    while True: run()
threading.Thread(target=forever, daemon=True).start()
run()
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(folder)]  # of fork, from 3.12 on
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


# Errors ------------------------------------------------------------------------------------------------------


def test_a_dead_end_ends_that_request_alone(llm: LLM, folder: Path) -> None:
    asked = [params(Structured(regex="ab☃")), params("choice", n=2), params(Structured(regex="[ab]☃|cd"), n=8)]
    dead, good, some = llm.generate(["go"] * 3, asked)
    assert (dead.outputs[0].text, dead.outputs[0].finish_reason) == ("ab", "error")
    assert dead.outputs[0].error == (
        "structured_outputs: no token of the model continues the output as the grammar asks: change the grammar"
    )
    assert [o.finish_reason for o in good.outputs] == ["stop"] * 2
    drafted = make_llm(folder, draft="prompt-lookup", speculate_k=4)
    again = drafted.generate("abcabcabc", params(Structured(regex="abc☃")))[0].outputs[0]
    assert (again.text, again.finish_reason) == ("abc", "error")  # the proposals are accepted before the dead end
    assert {(o.text, o.finish_reason) for o in some.outputs} <= {("a", "error"), ("b", "error"), ("cd", "stop")}


def test_the_model_must_have_a_tokenizer(tmp_path: Path) -> None:
    llm = make_llm(make_folder(tmp_path / "tiny", CONFIG, chars=None))
    refuses(lambda: llm.generate([[1, 2]], params("choice")), "structured_outputs requires a tokenizer: ")


def test_the_extra_is_named_if_it_is_missing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refuses(
        lambda: llm.generate("go", params(Structured(regex="never before"))),
        "llguidance is not installed: pip install '.[structured]'",
    )


# The command line, batch files and OpenAI's requests ---------------------------------------------------------


def test_flags_of_generate(run: Run, folder: Path, tmp_path: Path) -> None:
    common = ["generate", "go", "--model", str(folder), "--engine", "native"]
    (schema := tmp_path / "schema.json").write_text(json.dumps(PERSON | {"x-guidance": {"whitespace_flexible": False}}))
    (grammar := tmp_path / "list.lark").write_text(str(LIST.grammar))
    cases = {
        "json": ["--json-schema", str(schema)],
        "regex": ["--regex", "[A-C][a-z]{2,5}, [0-9]{3}"],
        "choice": ["--choice", "yes", "--choice", "no"],
        "grammar": ["--grammar", str(grammar), "--temp", "2"],
    }
    for kind, flags in cases.items():
        code, out, err = run(*common, "--seed", "1", *flags)
        assert (code, err) == (0, "")
        assert matches(kind, out.rstrip("\n"))
    code, out, _ = run(*common, "--json-schema", '{"type": "integer", "maximum": 9, "minimum": 9}')
    assert (code, out) == (0, "9\n")
    for flags, message in (
        (["--regex", "a", "--choice", "b"], "--regex and --choice are both given: leave one of them out"),
        (["--regex", "("], "structured_outputs.regex: invalid regex"),
        (["--json-schema", "no/such/file"], "no/such/file"),
    ):
        code, out, err = run(*common, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_batch_lines_have_them(run: Run, folder: Path, tmp_path: Path) -> None:
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
    lines = [
        {"prompt": "go", "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "go", "structured_outputs": {"regex": "("}},
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "go", "response_format": bad},
        },
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--model", str(folder), "--engine", "native")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert matches("choice", records[0]["outputs"][0]["text"])
    assert "structured_outputs.regex: invalid regex" in json.dumps(records[1]["error"])
    error = records[2]["response"]["body"]["error"]
    assert (records[2]["response"]["status_code"], error["param"]) == (400, "response_format")
    assert error["message"].startswith("line 3: response_format.json_schema: ")


def test_an_accepted_proposal_that_completes_the_output_is_marked(folder: Path) -> None:
    llm = LLM(str(folder), draft="prompt-lookup", speculate_k=5)
    params = SamplingParams(max_tokens=20, temperature=0, structured_outputs={"regex": " hello"})
    (o,) = llm.generate("hello hello hello", params)[0].outputs
    assert (o.text, o.finish_reason) == (" hello", "stop")
    assert o.draft_accepted == [False, *[True] * 5]
