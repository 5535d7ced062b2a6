"""The server's routes: values equal those of the library, streams equal whole responses, errors name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from helpers.environment import ROOT

httpx = pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")

from helpers import trained_tokenizers  # noqa: E402
from helpers.chat import chat_folder  # noqa: E402
from helpers.models import CHARS, make_folder  # noqa: E402
from helpers.server_client import Client, uncached  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.core.output_processor import describe  # noqa: E402
from nanoinfer.errors import TokensExcluded  # noqa: E402
from nanoinfer.outputs import CompletionOutput, RequestOutput  # noqa: E402
from nanoinfer.protocols.fields import (  # noqa: E402
    CHAT,
    COMPLETIONS,
    TABLES,
)
from nanoinfer.protocols.output import chat_logprobs, completion_logprobs  # noqa: E402
from nanoinfer.server.app import build_app  # noqa: E402
from nanoinfer.server.config import ServerConfig  # noqa: E402
from nanoinfer.server.service import names_of  # noqa: E402
from nanoinfer.tokenizers.tokenizer import Tokenizer  # noqa: E402

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    made = Client(LLM(str(make_folder(tmp_path_factory.mktemp("server") / "tiny")), engine="native", max_num_seqs=8))
    yield made
    made.async_llm.shutdown()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = chat_folder(tmp_path_factory.mktemp("server") / "chat")
    made = Client(LLM(str(folder), engine="native", max_num_seqs=8), served_model_name=("first", "second"))
    yield made
    made.async_llm.shutdown()


def shapes(output: RequestOutput, n: int = 1) -> list[tuple[str, str | None]]:
    return [(o.text, o.finish_reason) for o in output.outputs[:n]]


# Completions --------------------------------------------------------------------------------------------------

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 5},
    {"seed": 3},
    {"seed": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "max_tokens": 9},
    {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "n": 3},
    {"seed": 5, "best_of": 4, "n": 2},
    {"seed": 6, "stop": ["a", "e"], "max_tokens": 20},
    {"seed": 6, "stop": "a", "min_tokens": 3, "max_tokens": 20},
    {"seed": 7, "logit_bias": {"5": 100.0}, "max_tokens": 3},
    {"seed": 8, "stop_token_ids": [3, 4, 5, 6, 7, 8, 9, 10], "ignore_eos": True, "max_tokens": 20},
    {"seed": 9, "overflow": "slide", "slide_stride": 4, "max_tokens": 40},
    {"seed": 6, "stop": ["a", "e"], "include_stop_str_in_output": True, "max_tokens": 20},
    {"seed": 9, "bad_words": ["a", "th"], "allowed_token_ids": [*range(7, 40)], "n": 2, "skip_special_tokens": False},
    {"seed": 9, "detokenize": False, "spaces_between_special_tokens": True, "max_tokens": 3},
]


@pytest.mark.parametrize("given", SAMPLED, ids=lambda given: "-".join(given))
def test_completions_are_those_of_generate(client: Client, given: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 16, **given, "logit_bias": {5: 100} if "logit_bias" in given else None})
    (expected,) = client.llm.generate("To be", params)
    body = client.post(COMPLETIONS, prompt="To be", model=None, **given)
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == shapes(expected, params.n)
    assert [c["index"] for c in body["choices"]] == list(range(params.n))
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    num_tokens = sum(len(o.token_ids) for o in expected.outputs)
    assert uncached(body["usage"]) == {
        "prompt_tokens": 5, "completion_tokens": num_tokens, "total_tokens": 5 + num_tokens
    }  # fmt: skip
    if "best_of" in given:
        status, error = client.error(COMPLETIONS, prompt="To be", stream=True, **given)
        assert (status, error["param"]) == (400, "best_of")
        return
    chunks = client.stream(COMPLETIONS, prompt="To be", **given)
    assert joined(chunks, params.n) == shapes(expected, params.n)
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def joined(chunks: list[dict[str, Any]], count: int, key: str = "text") -> list[tuple[str, str | None]]:
    """Return the text and finish reason of each choice, from the chunks of a stream."""
    texts, reasons = [""] * count, [None] * count
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        assert reasons[choice["index"]] is None, "a chunk after the last"
        texts[choice["index"]] += choice["text"] if key == "text" else choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    return list(zip(texts, reasons, strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt, plain",
    [
        ("Go", ["Go"]),
        ([3, 4], [[3, 4]]),
        (["Go", "To be", "x"], ["Go", "To be", "x"]),
        ([[3, 4], [5]], [[3, 4], [5]]),
        (["Go", [5, 6]], ["Go", [5, 6]]),
        ("", [""]),
    ],
)
def test_prompts_in_all_forms(client: Client, prompt: Any, plain: list[Any], stream: bool) -> None:
    outputs = client.llm.generate(plain, SamplingParams(max_tokens=4, seed=2, n=2))
    expected = [shape for output in outputs for shape in shapes(output, 2)]
    given: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "seed": 2, "n": 2}
    if stream:
        assert joined(client.stream(COMPLETIONS, **given), len(expected)) == expected
    else:
        choices = client.post(COMPLETIONS, **given)["choices"]
        assert [(c["text"], c["finish_reason"]) for c in choices] == expected


def test_usage_of_a_stream(client: Client) -> None:
    given: dict[str, Any] = {"prompt": ["Go", "To be"], "max_tokens": 3, "ignore_eos": True, "n": 2}
    usage = {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}
    for options in (None, {"continuous_usage_stats": True}):
        assert all("usage" not in chunk for chunk in client.stream(COMPLETIONS, **given, stream_options=options))
    *chunks, last = client.stream(COMPLETIONS, **given, stream_options={"include_usage": True})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], uncached(last["usage"])) == ([], usage)
    *chunks, last = client.stream(
        COMPLETIONS, **given, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert chunks[-1]["usage"] == last["usage"]
    assert uncached(last["usage"]) == usage
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1


def steps(found: dict[str, Any]) -> list[tuple[str, float | None, dict[str, float] | None]]:
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))


def expected_steps(output: RequestOutput, o: CompletionOutput, top: int, echo: bool) -> list[Any]:
    """Return (token, log-probability, most likely ones) of each position, from the library's output."""
    found: list[Any] = []
    prompt = output.prompt_logprobs if echo else []
    ids = [*(output.prompt_token_ids if echo else []), *o.token_ids]
    for token, step in zip(ids, [*(prompt or []), *(o.logprobs or [])], strict=True):
        if step is None:
            found.append((CHARS_OF(token), None, None))
        else:
            likely = {str(p.decoded_token): p.logprob for t, p in step.items() if t == token or p.rank <= top}
            found.append((step[token].decoded_token, step[token].logprob, likely))
    return found


def CHARS_OF(token: int) -> str:
    from helpers.models import CHARS

    return CHARS[token]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_of_completions(client: Client, top: int, echo: bool) -> None:
    params = SamplingParams(max_tokens=4, seed=1, n=2, logprobs=top, prompt_logprobs=top)
    outputs = client.llm.generate(["To be", [3, 4, 5]], params)
    given: dict[str, Any] = {"max_tokens": 4, "seed": 1, "n": 2, "logprobs": top, "echo": echo}
    body = client.post(COMPLETIONS, prompt=["To be", [3, 4, 5]], **given)
    pairs = [(output, o) for output in outputs for o in output.outputs]
    chunks = [c for chunk in client.stream(COMPLETIONS, prompt=["To be", [3, 4, 5]], **given) for c in chunk["choices"]]
    for choice, (output, o) in zip(body["choices"], pairs, strict=True):
        prompt = "".join(map(CHARS_OF, output.prompt_token_ids)) if echo else ""
        expected = expected_steps(output, o, top, echo)
        assert choice["text"] == prompt + o.text
        assert steps(choice["logprobs"]) == expected
        assert choice["logprobs"]["text_offset"] == list(range(len(expected)))
        mine = [c for c in chunks if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == prompt + o.text
        assert [step for c in mine for step in steps(c["logprobs"])] == expected
        assert [at for c in mine for at in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


def test_log_probabilities_of_the_whole_vocabulary(client: Client, chat: Client) -> None:
    status, error = client.error(COMPLETIONS, prompt="To be", logprobs=-1)
    assert (status, error["param"]) == (400, "logprobs")
    assert f"logprobs=-1, the whole vocabulary, is {len(CHARS)}; the server's max_logprobs is 20" in error["message"]
    wide = Client(client.llm, max_logprobs=len(CHARS))
    given: dict[str, Any] = {"prompt": "To be", "max_tokens": 2, "seed": 1}
    for more in ({"echo": True}, {}):
        (whole,) = wide.post(COMPLETIONS, **given, **more, logprobs=-1)["choices"]
        assert wide.post(COMPLETIONS, **given, **more, logprobs=len(CHARS))["choices"] == [whole]
        assert len(whole["logprobs"]["top_logprobs"][-1]) == len(CHARS)
    chunks = [c["logprobs"] for chunk in wide.stream(COMPLETIONS, **given, logprobs=-1) for c in chunk["choices"]]
    assert [step for found in chunks for step in found["top_logprobs"]] == whole["logprobs"]["top_logprobs"]
    status, error = Client(client.llm, max_logprobs=len(CHARS), max_logprob_entries=100).error(
        COMPLETIONS, **given, logprobs=-1
    )
    assert (status, f"makes {2 * (len(CHARS) + 1)} log-probabilities" in error["message"]) == (400, True)
    V = chat.llm.model.vocab_size
    (choice,) = Client(chat.llm, max_logprobs=V).post(CHAT, messages=HI, max_tokens=1, logprobs=True, top_logprobs=-1)[
        "choices"
    ]
    assert [len(t["top_logprobs"]) for t in choice["logprobs"]["content"]] == [V]


@pytest.mark.parametrize(
    "tokenizer, first",
    [(trained_tokenizers.bpe(), 0), (trained_tokenizers.byte_fallback(), 1)],
    ids=["bytes", "fallback"],
)
def test_log_probabilities_of_parts_of_characters(tokenizer: Tokenizer, first: int) -> None:
    """Such tokens have the same text, U+FFFD, and different bytes."""
    ids = [token for token in range(first, first + 256) if tokenizer.token_bytes(token) in (b"\xe2", b"\x98", b"\x83")]
    step = describe(tokenizer, {token: (-1.0 - i, i + 1) for i, token in enumerate(ids)})
    (found,) = chat_logprobs([step], 3)
    texts = [entry["token"] for entry in found["top_logprobs"]]
    assert (texts, sorted(entry["bytes"] for entry in found["top_logprobs"])) == (["\ufffd"] * 3, [[131], [152], [226]])
    assert found["bytes"] == list(tokenizer.token_bytes(ids[0]))
    lists = completion_logprobs([step], 3, 0)
    assert lists["tokens"] == ["\ufffd"]
    likely = {"\ufffd": -1.0, f"token_id:{ids[1]}": -2.0, f"token_id:{ids[2]}": -3.0}
    assert lists["top_logprobs"] == [likely]


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_prompt_is_truncated(client: Client, more: dict[str, bool]) -> None:
    """Of a text and of token ids that are longer than the context; echo returns what is left."""
    text = "abcdefghij" * 5
    (expected,) = client.llm.generate(text[-8:], SamplingParams(max_tokens=4, seed=1))
    for prompt in (text, client.llm.tokenize(text)):
        given: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "seed": 1, "echo": True}
        given["truncate_prompt_tokens"] = 8
        found = [client.post(COMPLETIONS, **given)] if not more else client.stream(COMPLETIONS, **given)
        assert "".join(c["text"] for body in found for c in body["choices"]) == text[-8:] + expected.outputs[0].text
    status, error = client.error(COMPLETIONS, prompt=client.llm.tokenize(text), truncate_prompt_tokens=0)
    assert (status, error["param"]) == (400, "truncate_prompt_tokens")


def test_echo_without_logprobs(client: Client) -> None:
    (expected,) = client.llm.generate("To be", SamplingParams(max_tokens=4, seed=1))
    given: dict[str, Any] = {"prompt": "To be", "max_tokens": 4, "seed": 1, "echo": True}
    (choice,) = client.post(COMPLETIONS, **given)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("To be" + expected.outputs[0].text, None)
    first, *_ = chunks = client.stream(COMPLETIONS, **given)
    assert first["choices"][0]["text"] == "To be"
    assert joined(chunks, 1) == [(choice["text"], "length")]


def test_token_ids(client: Client) -> None:
    (expected,) = client.llm.generate("To be", SamplingParams(max_tokens=4, seed=1, n=2))
    given: dict[str, Any] = {"prompt": "To be", "max_tokens": 4, "seed": 1, "return_token_ids": True, "n": 2}
    for choice, o in zip(client.post(COMPLETIONS, **given)["choices"], expected.outputs, strict=True):
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (o.token_ids, expected.prompt_token_ids)
        assert "draft_accepted" not in choice
    chunks = [c for chunk in client.stream(COMPLETIONS, **given) for c in chunk["choices"]]
    for i, o in enumerate(expected.outputs):
        mine = [c for c in chunks if c["index"] == i]
        assert [token for c in mine for token in c["token_ids"]] == o.token_ids
        assert [c.get("prompt_token_ids") for c in mine] == [expected.prompt_token_ids, *[None] * (len(mine) - 1)]


def test_accepted_proposals_are_in_the_chunks(client: Client) -> None:
    prompt = "to be or to be or to be or"
    given: dict[str, Any] = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    client.llm.set_draft("prompt-lookup", speculate_k=3)
    try:
        (expected,) = client.llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0))
        (choice,) = client.post(COMPLETIONS, **given)["choices"]
        chunks = [c for chunk in client.stream(COMPLETIONS, **given) for c in chunk["choices"]]
    finally:
        client.llm.set_draft(None)
    (o,) = expected.outputs
    assert o.draft_accepted is not None
    assert (choice["token_ids"], choice["draft_accepted"]) == (o.token_ids, o.draft_accepted)
    assert [token for c in chunks for token in c["token_ids"]] == o.token_ids
    assert [flag for c in chunks for flag in c.get("draft_accepted", [])] == o.draft_accepted


def test_priority_and_salt_reach_the_engine(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = client.llm.core.make

    def record(*arguments: Any) -> Any:
        made.append(arguments[5:7])
        return make(*arguments)

    monkeypatch.setattr(client.llm.core, "make", record)
    client.post(COMPLETIONS, prompt=["a", [3]], priority=-2, cache_salt="x")
    assert made == [("x", -2)] * 2


FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
]


@pytest.mark.parametrize("given, pattern", FORMATS, ids=str)
def test_structured_outputs(client: Client, given: dict[str, Any], pattern: str) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    params = SamplingParams(max_tokens=8, seed=1, structured_outputs=given.get("structured_outputs"))
    (expected,) = client.llm.generate("To be", params)
    (choice,) = client.post(COMPLETIONS, prompt="To be", max_tokens=8, seed=1, **given)["choices"]
    assert choice["text"] == expected.outputs[0].text
    assert re.fullmatch(pattern or ".*", choice["text"], re.S)
    assert joined(client.stream(COMPLETIONS, prompt="To be", max_tokens=8, seed=1, **given), 1) == shapes(expected)


def test_response_format_of_a_chat(chat: Client) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = chat.post(CHAT, messages=HI, seed=1, max_tokens=60, response_format=given)
    assert json.loads(body["choices"][0]["message"]["content"]) in ({"a": 1}, {"a": 2})


# Chats --------------------------------------------------------------------------------------------------------


def test_the_last_message_is_continued(chat: Client) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once "}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    ids = chat.llm.apply_chat_template(messages, **options)
    assert chat.llm.decode(ids).endswith("Once ")
    assert chat.post("/tokenize", messages=messages, **options)["tokens"] == ids
    (expected,) = chat.llm.generate([ids], SamplingParams(max_tokens=4, seed=1))
    (choice,) = chat.post(CHAT, messages=messages, max_tokens=4, seed=1, **options)["choices"]
    assert choice["message"]["content"] == expected.outputs[0].text
    for wrong, param in (
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"documents": ["a"]}, "documents"),
        ({"output_kind": "delta"}, "output_kind"),
    ):
        status, error = chat.error(CHAT, messages=messages, **wrong)
        assert (status, error["param"]) == (400, param), error


def test_fields_that_are_not_given_are_those_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = chat_folder(tmp_path / "chat")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}')
    llm = LLM(str(folder), engine="native")
    made = Client(llm)
    assert len([m for m in caplog.messages if "generation_config.json (temperature=0.0" in m]) == 1
    (expected,) = llm.chat(HI, SamplingParams(temperature=0.0, max_tokens=5))
    assert made.post(CHAT, messages=HI)["choices"][0]["message"]["content"] == expected.outputs[0].text
    (sampled,) = llm.chat(HI, SamplingParams(temperature=2.0, max_tokens=5, seed=1))
    (choice,) = made.post(CHAT, messages=HI, temperature=2.0, seed=1)["choices"]
    assert choice["message"]["content"] == sampled.outputs[0].text
    found = made.get("/info")["sampling_params"]
    assert [(found[name]["temperature"], found[name]["max_tokens"]) for name in found] == [(0.0, 16), (0.0, 5)]
    of_page = made.get("/info")["page_sampling_params"]  # as on the command line
    assert [*of_page.values()] == [{"max_tokens": 5, "temperature": 0.0, "top_k": 50}] * 2
    info = Client(LLM(str(folder), engine="native", generation_config="vllm")).get("/info")
    off = info["sampling_params"]["chat"]
    assert (off["temperature"], off["max_tokens"]) == (1.0, None)
    assert info["page_sampling_params"]["chat"] == {"max_tokens": 1024, "temperature": 0.8, "top_k": 50}


def test_chats_are_those_of_chat(chat: Client) -> None:
    params = SamplingParams(max_tokens=6, seed=1, n=2, logprobs=2)
    (expected,) = chat.llm.chat(HI, params)
    given: dict[str, Any] = {
        "messages": HI, "max_completion_tokens": 6, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2,
        "return_token_ids": True,
    }  # fmt: skip
    body = chat.post(CHAT, **given, model="second")
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "first", "chatcmpl-")
    assert body["prompt_token_ids"] == expected.prompt_token_ids
    chunks = chat.stream(CHAT, **given)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert joined(chunks, 2, "delta") == shapes(expected, 2)
    for choice, o in zip(body["choices"], expected.outputs, strict=True):
        assert choice["message"] == {"role": "assistant", "content": o.text}
        assert (choice["finish_reason"], choice["token_ids"]) == (o.finish_reason, o.token_ids)
        content = choice["logprobs"]["content"]
        assert [t["logprob"] for t in content] == [
            s[t].logprob for s, t in zip(o.logprobs or [], o.token_ids, strict=True)
        ]
        assert [len(t["top_logprobs"]) for t in content] == [2] * len(o.token_ids)
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]] == content
        assert [t for c in mine for t in c.get("token_ids", [])] == o.token_ids


def test_cached_tokens_of_a_chat_are_counted(chat: Client) -> None:
    sent = {"messages": [{"role": "user", "content": "Never asked before"}], "max_tokens": 1, "seed": 1}
    chat.llm.reset_prefix_cache()
    usage = chat.post(CHAT, **sent)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    *_, last = chat.stream(CHAT, **sent, stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - 1}


def test_a_chat_without_max_tokens_ends_at_the_context_length(chat: Client) -> None:
    (expected,) = chat.llm.chat(HI, SamplingParams(max_tokens=None, seed=1, ignore_eos=True))
    body = chat.post(CHAT, messages=HI, seed=1, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == len(expected.outputs[0].token_ids) > 128
    assert body["choices"][0]["finish_reason"] == "length"


OFF: dict[str, Any] = {
    "prediction": None, "prompt_cache_retention": "24h", "stop": "", "cache_prompt": True, "keep_alive": "5m",
    "seed": -1,
}  # fmt: skip
"""Fields of other servers whose values mean "off", or only inform."""


def test_fields_that_only_inform_are_accepted(client: Client, chat: Client) -> None:
    given: dict[str, Any] = {"prompt": "To be", "temperature": 0, "max_tokens": 5}
    assert client.post(COMPLETIONS, **given, **OFF)["choices"] == client.post(COMPLETIONS, **given)["choices"]
    sampled = {**given, "temperature": 1, "max_tokens": 16}
    drawn = [client.post(COMPLETIONS, **sampled, seed=seed)["choices"] for seed in (-7, 2**64 - 7, -8, -1, -1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] != drawn[4]
    given = {"messages": HI, "temperature": 0, "max_tokens": 5}
    assert chat.post(CHAT, **given, **OFF, verbosity="low")["choices"] == chat.post(CHAT, **given)["choices"]


def test_options_of_the_template(chat: Client) -> None:
    messages = [*HI, {"role": "assistant", "content": "He"}]
    params = SamplingParams(max_tokens=6, seed=1)
    (expected,) = chat.llm.chat(messages, params, add_generation_prompt=False)
    body = chat.post(CHAT, messages=messages, max_tokens=6, seed=1, add_generation_prompt=False)
    assert body["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


# Errors -------------------------------------------------------------------------------------------------------


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's response_format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


ERRORS: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETIONS, {}, 400, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt", "prompt=5 is neither"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt", "neither"),
    (COMPLETIONS, {"prompt": [[1], ["a"]]}, 400, "prompt", "token id 'a'"),
    (COMPLETIONS, {"prompt": [999]}, 400, "prompt", "token id 999"),
    (COMPLETIONS, {"prompt": ["a", "a" * 33]}, 400, "prompt", "prompt 2 of 2: the prompt has 33 tokens"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix='b' is not supported"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "temprature", "'temprature' is not supported"),
    (COMPLETIONS, {"prompt": "a", "messages": []}, 400, "messages", "not supported for /v1/completions"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature=-1"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens=0"),
    (COMPLETIONS, {"prompt": "a", "echo": 1}, 400, "echo", "echo=1 is not a bool"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream", "stream='yes'"),
    (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", "less than n=3"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"9999": 1}}, 400, "logit_bias", "token id 9999"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "x"}}, 400, "response_format.type", "is not supported"),
    (COMPLETIONS, {"prompt": "a", "response_format": 5}, 400, "response_format", "is not an object"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(", "x": 1}}, 400, "structured_outputs", "x"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "structured_outputs", "regex"),
    (COMPLETIONS, {"prompt": "a", "response_format": as_format({"type": "x"})}, 400, "response_format", "json_schema"),
    (
        COMPLETIONS,
        {"prompt": "a", "response_format": {"type": "json_object", "schema": {"type": "x"}}},
        400,
        "response_format",
        "response_format: ",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "response_format": as_format({"x": "é" * 140_000})},
        400,
        "response_format",
        "schema has",
    ),
    (COMPLETIONS, {"prompt": ["a", "b"], "response_format": as_format({"not": {}})}, 400, "response_format", "prompt"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [[1, 2]]}, 400, "logit_bias", "logit_bias=[[1, 2]] is not an object"),
    (COMPLETIONS, {"prompt": "a", "stop": {"a": 1}}, 400, "stop", "stop={'a': 1} is not a string or a list"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": "1"}, 400, "stop_token_ids", "stop_token_ids='1' is not a list"),
    (COMPLETIONS, {"prompt": "a", "x" * 500: 1}, 400, "x" * 200, "'xxx"),
    (COMPLETIONS, {"prompt": "a", "priority": 2**40}, 400, "priority", "priority="),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2.5}, 400, "max_tokens", "max_tokens=2.5 is not an integer"),
    (COMPLETIONS, {"prompt": "a", "seed": 1e300}, 400, "seed", "seed=1"),
    (COMPLETIONS, {"prompt": "a", "seed": -(2**63) - 1}, 400, "seed", "seed=-9223372036854775809"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop", "stop=''"),
    (CHAT, {"messages": HI, "verbosity": "loud"}, 400, "verbosity", "verbosity='loud' is not supported"),
    (CHAT, {"messages": HI, "prediction": {"type": "content"}}, 400, "prediction", "'prediction' is not supported"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt", "cache_salt=''"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "stream_options", "needs stream=true"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options", "the field 'x'"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "top_p": 2}, 400, "top_p", "top_p=2"),
    (
        COMPLETIONS,
        {"prompt": "a" * 33, "stream": True},
        400,
        "prompt",
        "the prompt has 33 tokens, the maximum context length",
    ),
    (COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404, "model", "the model 'gpt-9' does not exist"),
    (COMPLETIONS, {"prompt": "a", "model": ["a"]}, 400, "model", "is not a string"),
    (CHAT, {}, 400, "messages", "messages is missing"),
    (CHAT, {"messages": []}, 400, "messages", "messages=[]"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "has no content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "read text only"),
    (CHAT, {"messages": [{"role": "user", "content": ["Hi"]}]}, 400, "messages", "give the text as a string"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 1001}, 400, "logprobs", "logprobs=1001 is not an integer in [-1, 20]"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -2}, 400, "top_logprobs", "in [-1, 20], the server's"),
    (CHAT, {"messages": HI, "prompt": "a"}, 400, "prompt", "not supported for /v1/chat/completions"),
    (CHAT, {"messages": HI, "tools": [{}]}, 400, "tools", "tools[0]: {} is not {'type': 'function'"),
    (CHAT, {"messages": HI, "logprobs": 3}, 400, "logprobs", "logprobs=3 is not a bool"),
    (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs=true"),
    (CHAT, {"messages": HI, "chat_template_kwargs": 3}, 400, "chat_template_kwargs", "is not an object"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": 3}}, 400, "chat_template_kwargs", "messages"),
    ("/tokenize", {}, 400, "prompt", "one of prompt and messages"),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt", "one of prompt and messages"),
    ("/tokenize", {"prompt": [1]}, 400, "prompt", "is not a string"),
    ("/tokenize", {"prompt": "a", "x": 1}, 400, "x", "'x' is not supported for /tokenize"),
    ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model", "does not exist"),
    ("/detokenize", {}, 400, "tokens", "tokens is missing"),
    ("/detokenize", {"tokens": [1.5]}, 400, "tokens", "is not a list of token ids"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "token id -1"),
]


@pytest.mark.parametrize("path, body, status, param, message", ERRORS, ids=lambda x: json.dumps(x)[:60])
def test_errors_name_the_field(
    client: Client, path: str, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    found, error = client.error(path, **body)
    assert (found, error["param"]) == (status, param)
    assert message in error["message"]
    kind, code = ("not_found_error", "model_not_found") if status == 404 else ("invalid_request_error", None)
    code = "context_length_exceeded" if "maximum context length is 32 tokens" in error["message"] else code
    assert (error["type"], error["code"]) == (kind, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert client.async_llm.num_unfinished_requests == 0


def test_a_model_without_a_template_has_no_chats(client: Client) -> None:
    status, error = client.error(CHAT, messages=HI)
    assert (status, "has no chat template" in error["message"]) == (400, True)


def test_a_chat_that_is_too_long_names_its_messages(chat: Client) -> None:
    status, error = chat.error(CHAT, messages=[{"role": "user", "content": "a" * 600}])
    assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert error["message"].startswith("messages: the prompt has")


def test_parameters_that_exclude_every_token(client: Client) -> None:
    body = {"prompt": "a", "max_tokens": 2, "allowed_token_ids": [5], "structured_outputs": {"choice": ["zzz"]}}
    response = client.request("POST", COMPLETIONS, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == TokensExcluded.MESSAGE


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "the body is not JSON"),
        (b"{'a'}", "the body is not JSON"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8"),
        (b"[1]", "is not a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' is duplicated"),
        (b"[" * 60_000, "the body is not JSON of at most 64 levels"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature=nan"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 2000 + b"}", "2000 characters"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_bodies_that_are_no_request(client: Client, content: bytes, message: str) -> None:
    response = client.request("POST", COMPLETIONS, content=content)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_unknown_paths_and_methods(client: Client) -> None:
    for method, path, status in (("GET", "/v1/x", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405),
                                 ("POST", COMPLETIONS + "/", 404)):  # fmt: skip
        response = client.request(method, path)
        assert (response.status_code, set(response.json()["error"])) == (status, {"message", "type", "param", "code"})
        assert response.json()["error"]["message"].startswith(f"{method} {path}: ")
        assert response.json()["error"]["message"].count(path) == 1
    message = client.request("POST", CHAT.removeprefix("/v1")).json()["error"]["message"]
    assert message == "POST /chat/completions: Not Found: the path is /v1/chat/completions"


NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


def test_fields_without_effect_are_accepted(client: Client, chat: Client) -> None:
    documented = (ROOT / "docs" / "server.md").read_text()
    given = dict.fromkeys(NO_EFFECT, "x")
    assert all(f"`{name}`" in documented for name in NO_EFFECT)
    with_them = client.post(COMPLETIONS, prompt="a", seed=1, suffix="", response_format={"type": "text"}, **given)
    assert with_them["choices"] == client.post(COMPLETIONS, prompt="a", seed=1)["choices"]
    neutral: dict[str, Any] = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "modalities": ["text"]}
    with_them = chat.post(CHAT, messages=HI, seed=1, max_tokens=4, **given, **neutral)
    assert with_them["choices"] == chat.post(CHAT, messages=HI, seed=1, max_tokens=4)["choices"]


def test_a_message_with_tool_calls_and_no_content_is_accepted(chat: Client) -> None:
    """OpenAI's clients send back what a server answered. The template adds strings."""
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answers = []
    for message in (said, {**said, "content": ""}):
        messages = [*HI, message, {"role": "tool", "tool_call_id": "1", "content": "noon"}]
        answers.append(chat.post(CHAT, messages=messages, seed=1, max_tokens=4)["choices"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_cannot_be_compiled_is_an_error_of_the_field_that_was_sent(chat: Client, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    sent = {"response_format": as_format({"enum": []})}, {"structured_outputs": {"json": {"enum": []}}}
    for body in sent:
        status, error = chat.error(CHAT, messages=HI, stream=stream, **body)
        assert (status, error["param"]) == (400, *body)
        assert error["message"].startswith(f"{error['param']}.json")


def test_whole_numbers_may_be_written_with_a_point(client: Client, chat: Client) -> None:
    """JSON has one type of number: 10.0 is an integer in JSON Schema and in vLLM's requests."""
    found = client.post(COMPLETIONS, prompt="a", max_tokens=3.0, seed=1.0, n=2.0, top_k=5.0, logprobs=1.0, priority=0.0)
    same = client.post(COMPLETIONS, prompt="a", max_tokens=3, seed=1, n=2, top_k=5, logprobs=1)
    assert found["choices"] == same["choices"]
    body = chat.post(CHAT, messages=HI, max_completion_tokens=3.0, logprobs=True, top_logprobs=2.0, seed=1)
    assert [len(t["top_logprobs"]) for t in body["choices"][0]["logprobs"]["content"]] == [2] * 3


def test_null_is_the_default(client: Client) -> None:
    every = dict.fromkeys([*TABLES[COMPLETIONS], *(f.name for f in fields(SamplingParams))])
    assert (
        client.post(COMPLETIONS, **{**every, "prompt": "a", "seed": 1})["choices"]
        == client.post(COMPLETIONS, prompt="a", seed=1)["choices"]
    )


# The other routes ---------------------------------------------------------------------------------------------


def test_models(chat: Client) -> None:
    listed = chat.get("/v1/models")
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in listed["data"]] == [
        ("first", "model", 256), ("second", "model", 256),
    ]  # fmt: skip
    assert chat.get("/v1/models/second") == listed["data"][1]
    assert chat.request("GET", "/v1/models/a/b").status_code == 404
    assert chat.error(CHAT, messages=HI, model=chat.llm.model_name)[0] == 404


def test_a_path_is_served_by_its_name_too(client: Client) -> None:
    path = client.llm.model_name
    assert path.endswith("/tiny")
    assert [m["id"] for m in client.get("/v1/models")["data"]] == ["tiny", path]
    for name in ("tiny", path):
        assert client.get(f"/v1/models/{name}")["id"] == name
        assert client.post(COMPLETIONS, prompt="a", model=name)["model"] == "tiny"
    status, error = client.error(COMPLETIONS, prompt="a", model="tiny.gguf")
    assert (status, error["message"]) == (404, f"the model 'tiny.gguf' does not exist: this server has tiny, {path}")


def test_names_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "a-1.5b").mkdir(parents=True)
    (tmp_path / "shakespeare").mkdir()
    for file in ("models/a.Q8_0.gguf", "sha256-f00", ".gguf"):
        (tmp_path / file).touch()
    (tmp_path / "link.gguf").symlink_to("sha256-f00")
    assert names_of("models/a.Q8_0.gguf") == ("a.Q8_0", "a.Q8_0.gguf", "models/a.Q8_0.gguf")
    assert names_of(str(tmp_path / "sha256-f00")) == ("sha256-f00", str(tmp_path / "sha256-f00"))
    assert names_of("link.gguf") == ("link", "link.gguf")
    assert names_of(".gguf") == (".gguf",)
    assert names_of("models/a-1.5b") == ("a-1.5b", "models/a-1.5b")
    assert names_of("models/a-1.5b/") == ("a-1.5b", "models/a-1.5b/")
    assert names_of(".") == (tmp_path.name, ".")
    assert names_of("/") == ("/",)
    for name in ("shakespeare", "gpt2", "owner/repository", "random:gpt2", "wide:shakespeare:gpt2"):
        assert names_of(name) == (name,)


def test_tokenize_and_detokenize(client: Client, chat: Client) -> None:
    ids = client.llm.tokenize("To be")
    found = client.post("/tokenize", prompt="To be")
    assert found == {"count": 5, "max_model_len": 32, "tokens": ids}
    assert client.post("/detokenize", tokens=ids) == {"prompt": "To be"}
    assert client.post("/tokenize", prompt="")["tokens"] == []
    rendered = chat.llm.apply_chat_template(HI)
    assert chat.post("/tokenize", messages=HI)["tokens"] == rendered
    shorter = chat.llm.apply_chat_template(HI, add_generation_prompt=False)
    assert chat.post("/tokenize", messages=HI, add_generation_prompt=False)["tokens"] == shorter


def test_tokenizer_info(client: Client, chat: Client) -> None:
    found = chat.get("/tokenizer_info")
    assert (found["eos_token"], found["bos_token"], found["model_max_length"]) == ("<|im_end|>", None, 256)
    assert found["chat_template"] == chat.llm.model.chat_template
    assert client.get("/tokenizer_info")["chat_template"] is None


def test_info(client: Client, chat: Client) -> None:
    found = client.get("/info")
    lists = ("stop", "stop_token_ids", "bad_words")
    expected = {**asdict(SamplingParams(max_tokens=16)), **{name: [] for name in lists}}
    del expected["output_kind"]
    assert found["sampling_params"]["completions"] == expected
    assert found["sampling_params"]["chat"]["max_tokens"] is None
    del found["sampling_params"], found["page_sampling_params"]
    assert found == {
        "model": "tiny", "has_chat_template": False, "reasoning_options": [], "block_size": 32, "engine": "native",
        "device": "cpu", "dtype": "float32", "weight_format": "float32", "quantization": None, "speculation": False,
        "shows_tools": False,
    }  # fmt: skip
    assert chat.get("/info")["has_chat_template"] is True


def test_a_default_of_max_tokens_is_that_of_both_routes(chat: Client) -> None:
    other = copy(chat)
    other.app = build_app(chat.async_llm, ServerConfig(default_max_tokens=5))
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        sent = {**body, "ignore_eos": True}
        assert other.post(path, **sent)["usage"]["completion_tokens"] == 5
        assert other.post(path, **sent, max_tokens=7)["usage"]["completion_tokens"] == 7
        assert other.post(path, **sent, max_tokens=None)["usage"]["completion_tokens"] == 5
        posted = other.get("/openapi.json")["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert posted["schema"]["properties"]["max_tokens"]["default"] == 5
    defaults = other.get("/info")["sampling_params"]
    assert (defaults["completions"]["max_tokens"], defaults["chat"]["max_tokens"]) == (5, 5)
    assert chat.post(COMPLETIONS, prompt="a", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_health(client: Client, tmp_path: Path) -> None:
    assert (client.request("GET", "/health").status_code, client.request("GET", "/health").content) == (200, b"")
    other = Client(LLM(str(make_folder(tmp_path / "m")), engine="native", max_num_seqs=1))
    other.async_llm.shutdown()
    assert other.request("GET", "/health").status_code == 503


def test_the_openapi_document_has_the_fields_that_the_parser_knows(client: Client) -> None:
    client = copy(client)
    client.app = build_app(client.async_llm, ServerConfig(max_logprobs=7))
    document = client.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    for path in (COMPLETIONS, CHAT):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        sampling = [f.name for f in fields(SamplingParams) if f.name not in ("output_kind", "prompt_logprobs")]
        assert set(schema["properties"]) == {*TABLES[path], *sampling}
        assert schema["additionalProperties"] is False
        assert schema["properties"]["temperature"]["maximum"] == 1e6
        assert schema["properties"]["logprobs" if path == COMPLETIONS else "top_logprobs"]["maximum"] == 7
        assert schema["properties"]["n"] == {
            "type": ["integer", "null"], "minimum": 1, "maximum": 128, "default": 1,
            "description": "Outputs to return for each prompt, at most 128.",
        }  # fmt: skip
    paths = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
             "/tokenizer_info", "/info", "/health", "/openapi.json"}  # fmt: skip
    assert paths <= set(document["paths"])
