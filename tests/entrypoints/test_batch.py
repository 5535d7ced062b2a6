"""`nanoinfer batch`: records of both forms, bad lines, order, bounded memory, streams, unusable files."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from helpers.batch import run_on, runner
from helpers.chat import chat_folder
from helpers.models import Run, Terminal
from helpers.tools import TWO, check_call, tools_folder
from nanoinfer import LLM, PoolingParams, SamplingParams
from nanoinfer.batch import run as batch_run
from nanoinfer.batch.files import MAX_LINE_BYTES, FileOutput, LineReader, open_output
from nanoinfer.batch.records import derive_seed
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.errors import TokensExcluded
from nanoinfer.protocols.fields import EMBEDDINGS
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.progress import ProgressBar

PROMPTS = ("To be", "or not", "c" * 30)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> Run:
    """Run `nanoinfer batch ARGUMENTS` on the tiny model in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, model: Path = folder, stdin: bytes = b"") -> tuple[int, str, str]:
        return run("batch", "-m", model, *arguments, stdin=stdin)

    return call


def write(name: str, *lines: object) -> None:
    """Write a file: strings as they are, other values as JSON."""
    Path(name).write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")


def read(name: str) -> list[Any]:
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


def openai(url: str, custom_id: object = "r", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "nanoinfer", "batch", *map(str, arguments)]


# Records ------------------------------------------------------------------------------------------------------


def test_standard_output_has_paths(tmp_path: Path, folder: Path) -> None:
    """A file to which standard output is appended keeps what it has."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "out.jsonl").write_text("before\n")
    with (tmp_path / "out.jsonl").open("ab") as out:
        subprocess.run(
            command(tmp_path / "in.jsonl", "/dev/stdout", "-m", folder, "--max-tokens", 2), stdout=out, check=True
        )
    before, record = (tmp_path / "out.jsonl").read_text().splitlines()
    assert (before, json.loads(record)["line"]) == ("before", 1)
    assert not Path("/dev/stdout.state").exists()


def test_records_have_what_generate_gives(run: Run, llm: LLM) -> None:
    write(
        "in.jsonl",
        {"prompt": "To be", "id": "a"},
        {"prompt_token_ids": [3, 4, 5], "custom_id": 7, "n": 2, "max_tokens": 3, "seed": 11},
        {"prompt": "Go", "temperature": 0, "stop": ["zz"], "logit_bias": {"5": 100}, "logprobs": 1},
        {"prompt": "o" * 40, "overflow": "slide", "min_tokens": 2, "top_k": -1},
        {"prompt": "Come", "prompt_logprobs": 0},
    )
    assert run("in.jsonl", "out.jsonl", "--max-tokens", 6, "--temp", 0.9, "--seed", 5)[::2] == (0, "")
    records = read("out.jsonl")
    defaults: dict[str, Any] = {"max_tokens": 6, "temperature": 0.9, "top_k": 50}
    lines: list[tuple[Any, dict[str, Any]]] = [
        ("To be", {"seed": derive_seed(5, 1, 0)}),
        ([3, 4, 5], {"n": 2, "max_tokens": 3, "seed": 11}),
        ("Go", {"temperature": 0, "stop": "zz", "logit_bias": {5: 100}, "logprobs": 1, "seed": derive_seed(5, 3, 0)}),
        ("o" * 40, {"overflow": "slide", "top_k": 0, "seed": derive_seed(5, 4, 0)}),
        ("Come", {"prompt_logprobs": 0, "seed": derive_seed(5, 5, 0)}),
    ]
    for i, (record, (prompt, given)) in enumerate(zip(records, lines, strict=True)):
        (expected,) = llm.generate([prompt], SamplingParams(**{**defaults, **given}))
        found = [(o["index"], o["text"], o["token_ids"], o["finish_reason"]) for o in record["outputs"]]
        assert found == [(o.index, o.text, o.token_ids, o.finish_reason) for o in expected.outputs]
        num_prompt, num_output = len(expected.prompt_token_ids), sum(len(o.token_ids) for o in expected.outputs)
        assert record["usage"] == {
            "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
        }  # fmt: skip
        assert (record["line"], record["seed"], record["error"]) == (i + 1, given["seed"], None)
        if expected.outputs[0].logprobs is not None:
            assert [
                {int(t): (p["logprob"], p["rank"], p["decoded_token"]) for t, p in step.items()}
                for step in record["outputs"][0]["logprobs"]
            ] == [
                {t: (p.logprob, p.rank, p.decoded_token) for t, p in step.items()}
                for step in expected.outputs[0].logprobs
            ]
        assert len(record.get("prompt_logprobs", [])) == (num_prompt if i == 4 else 0)
        assert record.get("num_dropped_tokens", 0) == expected.num_dropped_tokens == (16 if i == 3 else 0)
    assert [record["id"] for record in records] == ["a", 7, None, None, None]


def test_lines_without_a_seed_differ_from_line_to_line_and_from_seed_to_seed() -> None:
    seeds = {derive_seed(seed, number, i) for seed in range(20) for number in range(50) for i in range(3)}
    assert len(seeds) == 20 * 50 * 3
    assert max(seeds) < 2**53
    assert derive_seed(0, 1, 0) == 147069467200144  # the same in every release


def test_messages_go_through_the_template(run: Run, tmp_path: Path) -> None:
    chat = LLM(str(chat_folder(tmp_path / "chat")))
    hi = [{"role": "user", "content": "Hi"}]
    write(
        "in.jsonl",
        {"messages": hi, "temperature": 0, "max_tokens": 4},
        openai(CHAT, messages=hi, temperature=0, max_completion_tokens=4, logprobs=True, top_logprobs=2),
        openai(CHAT, messages=hi, temperature=0, max_tokens=4, logprobs=False),
    )
    assert run("in.jsonl", "out.jsonl", "--logprobs", 3, model=tmp_path / "chat")[0] == 0
    own, theirs, without = read("out.jsonl")
    (expected,) = chat.chat(hi, SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    (o,) = expected.outputs
    assert own["outputs"][0]["text"] == o.text
    assert own["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    body = theirs["response"]["body"]
    (choice,) = body["choices"]
    assert (body["id"], body["object"], body["created"]) == ("chatcmpl-2", "chat.completion", 0)
    assert choice["message"] == {"role": "assistant", "content": o.text}
    assert body["usage"] == own["usage"]
    assert o.logprobs is not None
    for entry, step in zip(choice["logprobs"]["content"], o.logprobs, strict=True):
        best = [(p.decoded_token, p.logprob) for p in sorted(step.values(), key=lambda p: p.rank)[:2]]
        assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == best
        assert (entry["token"], bytes(entry["bytes"]).decode(errors="replace")) == (best[0][0], best[0][0])
    (choice,) = without["response"]["body"]["choices"]
    assert (choice["message"]["content"], choice["logprobs"]) == (o.text, None)
    write("own.jinja", "{{ messages[-1].content }}")
    run("in.jsonl", "plain.jsonl", "--chat-template", "own.jinja", model=tmp_path / "chat")
    (plain,) = chat.generate(["Hi"], SamplingParams(temperature=0, max_tokens=4))
    assert read("plain.jsonl")[0]["outputs"][0]["text"] == plain.outputs[0].text


def test_the_rest_of_vllms_fields(run: Run, tmp_path: Path) -> None:
    """In both forms; what neither the line nor the command says is the model's."""
    folder = chat_folder(tmp_path / "chat")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3, "top_k": 9}')
    chat = LLM(str(folder))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once "}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    more: dict[str, Any] = {"bad_words": ["a"], "skip_special_tokens": False, "truncate_prompt_tokens": 6}
    write(
        "in.jsonl",
        {"messages": messages, **options, **more},
        openai(CHAT, messages=messages, **options, **more),
        openai(CHAT, messages=messages, add_generation_prompt=False),
        {"prompt": "a", "output_kind": "delta"},
        {"messages": messages, "continue_final_message": True},
        {"prompt": "a", "tools": []},
    )
    assert run("in.jsonl", "out.jsonl", model=folder)[0] == 1
    own, theirs, closed, kind, both, prompt = read("out.jsonl")
    (expected,) = chat.chat(messages, SamplingParams(temperature=0, max_tokens=3, **more), **options)
    assert own["outputs"][0]["text"] == expected.outputs[0].text
    assert own["usage"]["prompt_tokens"] == 6
    assert theirs["response"]["body"]["choices"][0]["message"]["content"] == expected.outputs[0].text
    ids = chat.apply_chat_template(messages, add_generation_prompt=False)
    assert closed["response"]["body"]["usage"]["prompt_tokens"] == len(ids)
    assert "the field 'output_kind' is unknown" in kind["error"]
    assert "set add_generation_prompt=False" in both["error"]
    assert prompt["error"] == "tools needs messages: a prompt has no template"
    write("one.jsonl", {"prompt": "a", "seed": 1})
    for flags, params in (
        ((), {"temperature": 0.0, "top_k": 9, "max_tokens": 3}),
        (("--max-tokens", 4, "--temp", 2), {"temperature": 2.0, "top_k": 9, "max_tokens": 4}),
        (("--generation-config", "vllm", "--max-tokens", 5), {"temperature": 0.8, "top_k": 50, "max_tokens": 5}),
    ):
        assert run("one.jsonl", "one.out", "--overwrite", *flags, model=folder)[0] == 0
        (output,) = chat.generate("a", SamplingParams(seed=1, **params))  # type: ignore[arg-type]
        assert read("one.out")[0]["outputs"][0]["token_ids"] == output.outputs[0].token_ids
    code, _, err = run(
        "one.jsonl", "one.out", "--generation-config", "vllm", "--max-tokens", 5, "--temp", 0.8, model=folder
    )
    assert (code, "flags" in err) == (2, True)  # a flag that is given replaces what the model says


def test_tools_and_reasoning(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "tools": TWO, "tool_choice": "required", "max_tokens": 100,
        "enable_thinking": True, "thinking_token_budget": 4, "temperature": 1.0, "parallel_tool_calls": False,
    }  # fmt: skip
    write("in.jsonl", body, openai(CHAT, **body), {"prompt": "a", "tools": TWO})
    model = tools_folder(tmp_path / "tools")
    assert run("in.jsonl", "out.jsonl", model=model)[0] == 1
    own, theirs, refused = read("out.jsonl")
    message = own["outputs"][0]["message"]
    (call,) = message["tool_calls"]
    check_call(call["name"], call["arguments"], TWO)
    assert call["id"] == "call_1_0_0"
    assert (message["content"], own["outputs"][0]["num_reasoning_tokens"] > 0) == (None, True)
    (choice,) = theirs["response"]["body"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"], TWO)
    assert (call["id"], choice["finish_reason"]) == ("call_2_0_0", "tool_calls")
    assert refused["error"].endswith("tools needs messages: a prompt has no template")
    run("in.jsonl", "again.jsonl", model=model)
    assert read("again.jsonl") == [own, theirs, refused]


def test_openai_completions(run: Run, llm: LLM) -> None:
    body = {"prompt": ["To be", "Go"], "n": 2, "best_of": 2, "seed": 3, "logprobs": 1, "user": "u", "model": "gpt-9"}
    write("in.jsonl", openai(COMPLETIONS, 5, **body, stream=False, stop=None), openai(COMPLETIONS, prompt=[3, 4]))
    assert run("in.jsonl", "out.jsonl", "--max-tokens", 3)[0] == 0
    several, single = read("out.jsonl")
    params = SamplingParams(max_tokens=3, temperature=0.8, top_k=50, n=2, seed=3, logprobs=1)
    expected = [o for output in llm.generate(["To be", "Go"], params) for o in output.outputs]
    assert {**several, "response": None} == {"id": "batch_req_1", "custom_id": 5, "response": None, "error": None}
    assert {**several["response"], "body": None} == {"status_code": 200, "request_id": "req_1", "body": None}
    body = several["response"]["body"]
    assert (body["id"], body["object"], body["created"]) == ("cmpl-1", "text_completion", 0)
    assert body["model"] == str(llm.model_name)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [  # type: ignore[index]
        (i, o.text, "length") for i, o in enumerate(expected)
    ]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}
    for choice, o in zip(body["choices"], expected, strict=True):  # type: ignore[call-overload]
        found, steps = choice["logprobs"], o.logprobs or []
        assert found["tokens"] == list(o.text)
        assert found["text_offset"] == [0, 1, 2]
        assert found["token_logprobs"] == [s[t].logprob for s, t in zip(steps, o.token_ids, strict=True)]
        assert found["top_logprobs"] == [{p.decoded_token: p.logprob for p in s.values()} for s in steps]
    (other,) = single["response"]["body"]["choices"]
    (expected_other,) = llm.generate(
        [[3, 4]], SamplingParams(max_tokens=3, temperature=0.8, top_k=50, seed=derive_seed(0, 2, 0))
    )
    assert (other["text"], other["logprobs"]) == (expected_other.outputs[0].text, None)


def test_openai_embeddings(run: Run, llm: LLM) -> None:
    texts = ["To be", "Go"]
    write("in.jsonl", openai(EMBEDDINGS, input=texts, dimensions=4), {"prompt": "a", "max_tokens": 2})
    assert run("in.jsonl", "out.jsonl", "--pooling-type", "mean")[0] == 0
    embedded, generated = read("out.jsonl")
    mean = LLM(str(llm.model_name), pooling_type="mean")
    body = embedded["response"]["body"]
    expected = mean.embed(texts, PoolingParams(dimensions=4))
    assert [d["embedding"] for d in body["data"]] == [o.outputs.embedding for o in expected]
    assert (body["id"], body["created"], body["usage"]["total_tokens"]) == ("embd-1", 0, 7)
    assert len(generated["outputs"][0]["token_ids"]) == 2


def test_openai_echo_and_best_of(run: Run, llm: LLM) -> None:
    given: dict[str, Any] = {"max_tokens": 3, "seed": 3}
    write(
        "in.jsonl",
        openai(COMPLETIONS, prompt=["To be", [3, 4]], echo=True, logprobs=1, **given),
        openai(COMPLETIONS, prompt="To be", n=2, best_of=4, **given),
    )
    assert run("in.jsonl", "out.jsonl", "--temp", 1, "--top-k", 0)[0] == 0
    echoed, best = (record["response"]["body"] for record in read("out.jsonl"))
    outputs = llm.generate(["To be", [3, 4]], SamplingParams(**given, logprobs=1, prompt_logprobs=1))
    for choice, output, prompt in zip(echoed["choices"], outputs, ["To be", llm.decode([3, 4])], strict=True):
        assert choice["text"] == prompt + output.outputs[0].text
        steps = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        values = [next(iter(step.values())).logprob for step in steps if step]
        assert choice["logprobs"]["token_logprobs"] == [None, *values]
        assert "prompt_logprobs" not in choice
    (expected,) = llm.generate("To be", SamplingParams(**given, n=2, best_of=4))
    assert [c["text"] for c in best["choices"]] == [o.text for o in expected.outputs]


OPENAI_ERRORS: list[tuple[dict[str, object], str, str | None]] = [
    (openai(COMPLETIONS), "prompt is missing", "prompt"),
    (openai(COMPLETIONS, prompt=[]), "prompt has 0 items", "prompt"),
    (openai(COMPLETIONS, prompt=["a"] * 129), "1 to 128", "prompt"),
    (openai(COMPLETIONS, prompt=["a", 5]), "prompt=5 is neither", "prompt"),
    (openai(COMPLETIONS, prompt="a", stream=True), "stream=True is not supported", "stream"),
    (openai(COMPLETIONS, prompt="a", suffix="b"), "suffix='b' is not supported", "suffix"),
    (openai(COMPLETIONS, prompt="a", n=3, best_of=2), "best_of=2 is less than n=3", "best_of"),
    (openai(COMPLETIONS, prompt="a", tools=[1]), "'tools' is not supported for /v1/completions", "tools"),
    (openai(COMPLETIONS, prompt="a", temperature=3e9), "temperature=3000000000.0", "temperature"),
    (openai(COMPLETIONS, prompt="a" * 33), "33 tokens, the maximum context length is 32 tokens", "prompt"),
    (openai(CHAT), "messages is missing", "messages"),
    (openai(CHAT, messages=[]), "messages=[] is not a conversation", "messages"),
    (openai(CHAT, messages=[{"role": "user", "content": "a"}]), "has no chat template", None),
    (openai(CHAT, messages=[{"role": "user", "content": "a"}], tools=[{}]), "tools[0]: {} is not {'type'", "tools"),
    (openai(CHAT, messages=[], top_logprobs=2), "needs logprobs=true", "top_logprobs"),
    (openai(CHAT, messages=[], max_tokens=1, max_completion_tokens=1), "both given", "max_completion_tokens"),
    (openai("/v1/images", input="a"), "url='/v1/images'", "url"),
    (openai(EMBEDDINGS, input=["a", "b" * 33]), "prompt 2 of 2: the input has 33 tokens", "input"),
    ({**openai(COMPLETIONS, prompt="a"), "method": "GET"}, "method='GET' is not 'POST'", "method"),
    ({"url": COMPLETIONS, "method": "POST", "body": [1]}, "body=[1] is not a JSON object", "body"),
    ({**openai(COMPLETIONS, prompt="a"), "x": 1}, "the field 'x' is unknown", "x"),
]


def test_openai_errors_name_the_field(run: Run) -> None:
    write("in.jsonl", *(line for line, _, _ in OPENAI_ERRORS))
    assert run("in.jsonl", "out.jsonl")[0] == 1
    for i, (record, (_, message, param)) in enumerate(zip(read("out.jsonl"), OPENAI_ERRORS, strict=True), 1):
        assert (record["id"], record["error"], record["response"]["status_code"]) == (f"batch_req_{i}", None, 400)
        error = record["response"]["body"]["error"]
        assert message in error["message"]
        assert error["message"].startswith(f"line {i}: ")
        code = "context_length_exceeded" if "the maximum context length is 32 tokens" in error["message"] else None
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


# Bad lines ----------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{'prompt': 'a'}", "the line is not JSON"),
    "not an object": (b'["a"]', "the line ['a'] is not a JSON object"),
    "not UTF-8": (b'{"prompt": "\xff"}', "the line is not UTF-8 (byte 12: invalid start byte)"),
    "nested": (b"[" * 100_000, "the line is not JSON"),
    "a number of 2,000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 2000 + b"}", "a number of 2000 characters"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' is duplicated"),
    "unknown field": (b'{"prompt": "a", "temprature": 1}', "the field 'temprature' is unknown"),
    "no prompt": (b'{"id": 1}', "the line has no prompt"),
    "two prompts": (b'{"prompt": "a", "messages": []}', "the line has prompt and messages: give one"),
    "two ids": (b'{"prompt": "a", "id": 1, "custom_id": 2}', "id and custom_id are both given"),
    "bad id": (b'{"prompt": "a", "id": [1]}', "id=[1] is neither a string nor an integer"),
    "prompt of a wrong type": (b'{"prompt": 5}', "prompt=5"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    "token id": (b'{"prompt_token_ids": [99999]}', "token id 99999 is not an integer in [0,"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "temperature=nan is not a finite number"),
    "bad value": (b'{"prompt": "a", "max_tokens": 0}', "max_tokens=0 is not an integer >= 1"),
    "contradiction": (b'{"prompt": "a", "min_tokens": 900}', "min_tokens=900 is more than max_tokens=2"),
    "n": (b'{"prompt": "a", "n": 65}', "n=65 is more than max_num_seqs"),
    "too long for the context": (b'{"prompt": "' + b"a" * 33 + b'"}', "the prompt has 33 tokens"),
    "far too long": (b'{"prompt": "' + b"a" * 100_000 + b'"}', "the prompt has at least 100000 tokens"),
    "template": (b'{"prompt": "a", "chat_template_kwargs": {}}', "chat_template_kwargs needs messages"),
    "no template": (b'{"messages": [{"role": "user", "content": "a"}]}', "has no chat template"),
}


def test_bad_lines_become_error_records_and_the_rest_goes_on(run: Run) -> None:
    good = b'{"prompt": "Go"}'
    lines = [good, *(line for bad, _ in BAD.values() for line in (bad, good))]
    Path("in.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))  # as some editors write files
    code, out, err = run("in.jsonl", "out.jsonl", "--max-tokens", 2)
    assert (code, out) == (1, "")
    assert err == (
        f"nanoinfer: error: {len(BAD)} of {len(lines)} lines failed: see error in their records; first"
        f" in.jsonl, line 2: {read('out.jsonl')[1]['error']}\n"
    )
    records = read("out.jsonl")
    assert [record["line"] for record in records] == list(range(1, len(lines) + 1))
    for name, record in zip(BAD, records[1::2], strict=True):
        assert BAD[name][1] in record["error"], name
        assert (record["outputs"], record["usage"], record["seed"]) == ([], None, None)
    assert all(record["error"] is None and len(record["outputs"][0]["text"]) == 2 for record in records[::2])


def test_a_request_that_fails_while_it_runs_is_an_error_record(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    tokens = llm.tokenize("To be")

    def fails(request: Request) -> Any:
        output = type(llm.core.outputs).output(llm.core.outputs, request)
        if request.prompt_token_ids != tokens:
            return output
        from dataclasses import replace

        return replace(output, outputs=[replace(output.outputs[0], finish_reason="error", error="not finite")])

    monkeypatch.setattr(llm.core.outputs, "output", fails)
    monkeypatch.chdir(tmp_path)
    write("in.jsonl", {"prompt": "To be"}, {"prompt": "Go"}, openai(COMPLETIONS, prompt="To be"))
    output = run_on(llm, "in.jsonl", "out.jsonl")
    own, good, theirs = read("out.jsonl")
    assert (own["error"], good["error"]) == ("not finite", None)
    assert theirs["response"]["status_code"] == 500
    assert theirs["response"]["body"]["error"]["type"] == "server_error"
    assert (output.done.num_errors, output.done.first_error) == (2, "in.jsonl, line 1: not finite")


def test_a_line_that_excludes_every_token_is_at_fault(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    (token,) = llm.tokenize("T")
    excluding: dict[str, Any] = {"allowed_token_ids": [token], "bad_words": ["T"], "max_tokens": 2}
    (output,) = llm.generate("To be", SamplingParams(**excluding))
    assert output.outputs[0].error == TokensExcluded.MESSAGE
    with pytest.raises(TokensExcluded):
        output.check()
    monkeypatch.chdir(tmp_path)
    write("in.jsonl", openai(COMPLETIONS, prompt="To be", **excluding), {"prompt": "Go"})
    run_on(llm, "in.jsonl", "out.jsonl")
    theirs, own = read("out.jsonl")
    assert (theirs["response"]["status_code"], own["error"]) == (400, None)


def test_a_line_of_100_megabytes_is_not_held_in_memory(run: Run) -> None:
    with open("in.jsonl", "wb") as f:
        f.write(b'{"prompt": "Go"}\n')
        f.seek(100_000_000, os.SEEK_CUR)
        f.write(b'\n{"prompt": "Ho"}\n' + b" " * (MAX_LINE_BYTES - 1) + b"\n")  # a blank line
        f.write(b"{" + b" " * (MAX_LINE_BYTES - 2) + b"\n{" + b" " * (MAX_LINE_BYTES - 1) + b"\n")
    tracemalloc.start()
    try:
        contents = [line.content for line in LineReader(["in.jsonl"])]
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()
    longest = b"{" + b" " * (MAX_LINE_BYTES - 2)
    assert contents == [b'{"prompt": "Go"}', None, b'{"prompt": "Ho"}', longest, None]
    assert run("in.jsonl", "out.jsonl", "--max-tokens", 1)[0] == 1
    records = read("out.jsonl")
    assert [(r["line"], r["error"] is None) for r in records] == [
        (1, True),
        (2, False),
        (3, True),
        (5, False),
        (6, False),
    ]
    assert records[1]["error"].startswith("the line has 100000001 bytes; the limit is 4194304")


def test_blank_lines_are_counted_and_have_no_record(run: Run) -> None:
    write("in.jsonl", "", {"prompt": "Go"}, "  \t\r", {"prompt": "Ho"}, "", "")
    assert run("in.jsonl", "out.jsonl", "--max-tokens", 1)[::2] == (0, "")
    assert [r["line"] for r in read("out.jsonl")] == [2, 4]
    write("empty.jsonl", "", " ")
    assert run("empty.jsonl", "none.jsonl")[::2] == (0, "")
    assert Path("none.jsonl").read_bytes() == b""


# Order and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_lines", [600, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_the_number_of_live_requests_and_records_is_bounded(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_lines: int
) -> None:
    monkeypatch.chdir(tmp_path)
    lengths = [30 if i % 97 == 0 else 1 + i % 2 for i in range(num_lines)]
    lines = [{"prompt": "To be or"[: 1 + i % 8], "max_tokens": length} for i, length in enumerate(lengths)]
    write("in.jsonl", *lines)
    live: WeakSet[Request] = WeakSet()
    make_all, most = llm.requests.make_all, {"live": 0, "window": 0, "sequences": 0}
    monkeypatch.setattr(llm.requests, "make_all", lambda *a, **k: [live.add(r) or r for r in make_all(*a, **k)])  # type: ignore[func-returns-value]
    step = BatchRunner._collect

    def collect(self: BatchRunner) -> None:
        step(self)
        if next(steps) % 50 == 0:
            gc.collect()  # a request and its sequences refer to each other
        elif len(live) > 3 * 4:
            return
        held = {"live": len(live), "window": len(self._window), "sequences": self._num_running}
        most.update({name: max(most[name], value) for name, value in held.items()})
        assert self._num_bytes == sum(entry.num_bytes for entry in self._window)

    steps = itertools.count()
    monkeypatch.setattr(BatchRunner, "_collect", collect)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.freeze()  # collect what this test makes only
    try:
        run_on(llm, "in.jsonl", "out.jsonl")
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as before
    assert most["sequences"] <= 2 * 4
    assert most["live"] <= 3 * 4
    assert 4 < most["window"] <= 8 * 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
    records = read("out.jsonl")
    assert [r["line"] for r in records] == list(range(1, num_lines + 1))
    assert [r["usage"]["completion_tokens"] for r in records] == [
        min(x["max_tokens"], 33 - len(x["prompt"]))
        for x in lines  # type: ignore[call-overload, arg-type]
    ]


def test_the_window_is_bounded_in_bytes_too(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch_run, "WINDOW_BYTES", 1000)
    write("in.jsonl", {"prompt": "a", "max_tokens": 30}, *[{"prompt": "a", "id": "x" * 400}] * 20)
    most = 0
    start = BatchRunner._start

    def counting(self: BatchRunner, *arguments: Any) -> None:
        nonlocal most
        start(self, *arguments)
        most = max(most, len(self._window))

    monkeypatch.setattr(BatchRunner, "_start", counting)
    run_on(llm, "in.jsonl", "out.jsonl")
    assert most == 4  # the fourth exceeds the limit, and no further line is read
    assert [r["line"] for r in read("out.jsonl")] == list(range(1, 22))


def test_records_do_not_depend_on_what_runs_together(run: Run) -> None:
    lines = [{"prompt": p, "max_tokens": 1 + 7 * (i % 5), "n": 1 + i % 2} for i, p in enumerate(PROMPTS * 5)]
    write("in.jsonl", *lines)
    for n in (2, 5, 64):
        assert run("in.jsonl", f"out{n}.jsonl", "--max-num-seqs", n, "--engine", "native")[::2] == (0, "")
    assert read("out2.jsonl") == read("out5.jsonl") == read("out64.jsonl")
    assert run("in.jsonl", "other.jsonl", "--seed", 1)[0] == 0
    assert read("other.jsonl") != read("out64.jsonl")


def test_several_files_are_one_after_the_other(run: Run) -> None:
    write("a.jsonl", {"prompt": "Go"}, {"prompt": "Ho"})
    write("b.jsonl", {"prompt": "Hi"}, "[]")
    Path("both.jsonl").write_bytes(Path("a.jsonl").read_bytes() + Path("b.jsonl").read_bytes())
    assert run("a.jsonl", "b.jsonl", "-o", "two.jsonl")[0] == 1
    assert run("both.jsonl", "--output", "one.jsonl")[0] == 1
    two, one = read("two.jsonl"), read("one.jsonl")
    assert [(r["file"], r["line"]) for r in two] == [("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)]
    assert [r["outputs"] for r in two] == [r["outputs"] for r in one]
    for arguments in (("a.jsonl",), ("a.jsonl", "b.jsonl", "c.jsonl")):
        code, _, err = run(*arguments)
        assert code == 2
        assert "give one input and one output, or any number of inputs and --output" in err


def test_a_folder_has_an_output_for_each_file(run: Run) -> None:
    Path("in").mkdir()
    write("in/a.jsonl", {"prompt": "Go"}, {"prompt": "Ho"})
    write("in/b.jsonl")
    write("in/c.jsonl", {"prompt": "Hi"}, "[]")
    write("in/c.txt", "other")
    run("in/a.jsonl", "in/c.jsonl", "-o", "one.jsonl")
    one = [{name: value for name, value in record.items() if name != "file"} for record in read("one.jsonl")]
    code, _, err = run("in", "out")
    assert (code, read("out/a.jsonl"), read("out/b.jsonl"), read("out/c.jsonl")) == (1, one[:2], [], one[2:])
    assert err.startswith("nanoinfer: error: 1 of 4 lines failed: see error in their records; first in/c.jsonl, line 2")
    assert "out is complete after 4 lines" in run("in", "out")[2]
    Path("out/c.jsonl").unlink()
    assert "out continues after 2 lines" in run("in", "out")[2]
    assert read("out/c.jsonl") == one[2:]
    write("in/aa.jsonl", {"prompt": "Go"})  # the lines of those after it have other numbers now
    assert "out/c.jsonl was made with file=2, not 3" in run("in", "out")[2]


def test_what_is_unfinished_is_cancelled_when_the_output_fails(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write("in.jsonl", {"prompt": "a"}, *[{"prompt": "a", "max_tokens": 30}] * 9)

    class Full(FileOutput):
        def write(self, *arguments: Any) -> None:
            raise OSError(28, "No space left on device")

    output = Full(tmp_path / "out.jsonl", {}, False)
    output.start()
    with pytest.raises(OSError, match="No space"):
        runner(llm, BatchOptions(SamplingParams(max_tokens=1))).run(
            LineReader(["in.jsonl"]), output, ProgressBar("batch", False)
        )
    assert not llm.core.unfinished
    assert len(llm.engine.handles) == len(llm.core.scheduler.cache.idle)


# Streams ------------------------------------------------------------------------------------------------------


def test_standard_input_and_output(run: Run) -> None:
    write("in.jsonl", {"prompt": "Go"}, {"prompt": "\u00e9\u4e2d", "id": "\u4e2d"})
    run("in.jsonl", "out.jsonl", "--max-tokens", 3)
    expected = Path("out.jsonl").read_text(encoding="utf-8")
    assert run("-", "-", "--max-tokens", 3, stdin=Path("in.jsonl").read_bytes())[1] == expected.replace("in.jsonl", "-")


def test_a_record_is_written_while_the_input_is_still_open(folder: Path) -> None:
    child = subprocess.Popen(
        command("-", "-", "-m", folder, "--max-tokens", 2), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    for i in (1, 2):
        child.stdin.write(b'{"prompt": "Go"}\n{"prom')  # a part of the next line is there, too
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["line"] == 2 * i - 1
        child.stdin.write(b'pt": "Go"}\n')
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["line"] == 2 * i
    child.stdin.close()
    assert child.wait(60) == 0


def test_a_reader_that_goes_away_ends_it_quietly(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Go"}\n' * 2000)
    child = subprocess.Popen(
        command(tmp_path / "in.jsonl", "-", "-m", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    child.stdout.close()
    assert child.wait(60) == 0
    assert child.stderr is not None
    assert child.stderr.read() == b""


def test_a_bar_shows_lines_tokens_a_second_and_the_time_left(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("in.jsonl", *({"prompt": "a", "id": "x" * i} for i in range(50)))
    Path("in.jsonl").write_text("\n" + Path("in.jsonl").read_text())
    seen: list[tuple[int, int | None, str]] = []
    update = ProgressBar.update
    monkeypatch.setattr("nanoinfer.utils.progress.INTERVAL_SEC", 0.0)
    monkeypatch.setattr(ProgressBar, "update", lambda self, *a: (seen.append(a), update(self, *a)))  # type: ignore[arg-type, func-returns-value]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n' * 50)))
    for name, at_first in (("in.jsonl", 50), ("-", None)):  # lines of standard input cannot be counted before
        reader, output = LineReader([name]), open_output("out.jsonl", {}, overwrite=True)
        output.start()
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with ProgressBar("batch", True) as bar:
            runner(llm, BatchOptions(SamplingParams(max_tokens=4))).run(reader, output, bar)
        output.close()
        totals = [total for _, total, _ in seen]
        assert (set(totals), totals[0], totals[-1]) == ({at_first, 50}, at_first, 50)
        assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
        assert seen[-1][0] == 50
        assert all(note.endswith(" tokens/s") for _, _, note in seen)
        shown = terminal.getvalue()
        assert "batch" in shown
        assert "tokens/s" in shown
        assert " of 50" in shown
        assert " left" in shown
        seen.clear()


# Inputs and outputs that cannot be used -----------------------------------------------------------------------

UNUSABLE: dict[str, tuple[list[str], str]] = {
    "missing input": (["no.jsonl", "out.jsonl"], "no.jsonl cannot be read as prompts: No such file or directory"),
    "folder to a file": ([".", "foreign.txt"], "foreign.txt cannot be written: File exists"),
    "folder to itself": ([".", "."], "in.jsonl exists and was not written by this command"),
    "folder and file": ([".", "in.jsonl", "-o", "out.jsonl"], ". is a folder, not a file of prompts"),
    "stdin twice": (["-", "-", "-o", "out.jsonl"], "the input - (standard input) is given twice"),
    "null byte": (["a\0b", "out.jsonl"], "cannot be read as prompts"),
    "missing folder": (["in.jsonl", "no/out.jsonl"], "no/out.jsonl cannot be written: there is no folder no"),
    "output folder": (["in.jsonl", "."], ". is a folder: give the name of a file"),
    "long name": (["in.jsonl", "x" * 300], "cannot be written: File name too long"),
    "same file": (["in.jsonl", "./in.jsonl"], "in.jsonl is the input and ./in.jsonl the output: they are the same"),
    "same file, linked": (["in.jsonl", "link.jsonl"], "they are the same file"),
    "input is the state": (["made.jsonl.state", "made.jsonl"], "they are the same file"),
    "foreign output": (["in.jsonl", "foreign.txt"], "foreign.txt exists and was not written by this command"),
    "unknown model": (["in.jsonl", "out.jsonl", "-m", "./no/model"], "there is no such file or folder"),
    "unknown model, overwriting": (["in.jsonl", "foreign.txt", "--overwrite", "-m", "./no/model"], "no such file"),
    "bad seed": (["in.jsonl", "out.jsonl", "--seed", "-1"], "seed=-1 is not an integer in"),
    "bad default": (["in.jsonl", "out.jsonl", "--top-p", "2"], "top_p=2.0 is not a finite number"),
    "no template": (["in.jsonl", "out.jsonl", "--chat-template", "no.jinja"], "no.jinja cannot be read"),
    "device": (["in.jsonl", "/dev/full"], "/dev/full is a pipe or a device: give the name of a file"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_files_are_one_line_and_nothing_is_written(run: Run, tmp_path: Path, case: str) -> None:
    write("in.jsonl", {"prompt": "Go"})
    write("foreign.txt", "mine")
    write("made.jsonl.state", "{}")
    os.link("in.jsonl", "link.jsonl")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    arguments, message = UNUSABLE[case]
    code, out, err = run(*arguments, "--max-tokens", 1)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("nanoinfer: error: ")
    assert message in err
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_without_permission(run: Run) -> None:
    write("in.jsonl", {"prompt": "Go"})
    write("mine.jsonl")
    os.chmod("mine.jsonl", 0o400)
    Path("locked").mkdir(mode=0o500)
    for name in ("mine.jsonl", "locked/out.jsonl"):
        code, _, err = run("in.jsonl", name)
        assert (code, err) == (2, f"nanoinfer: error: {name} cannot be written: Permission denied\n")


def test_standard_output_that_is_full(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Go"}\n')
    arguments = ["sh", "-c", '"$@" >/dev/full', "sh", *command("in.jsonl", "-", "-m", folder)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, check=False)
    message = b"nanoinfer: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)
