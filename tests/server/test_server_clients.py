"""Unmodified clients: openai-python and lm-eval's local-completions give what the library gives, and all of
GuideLLM's requests succeed.

`vllm bench serve` is not among them: it needs vLLM, whose package on PyPI is built for CUDA and takes gigabytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from helpers.environment import ROOT

openai = pytest.importorskip("openai", reason="the extra test is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")

from helpers.chat import chat_folder  # noqa: E402
from helpers.chat_templates import CHATML  # noqa: E402
from helpers.server_process import ServerProcess, serving  # noqa: E402
from helpers.tools import TWO, check_call  # noqa: E402
from nanoinfer import LLM, PoolingParams, SamplingParams  # noqa: E402

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SAMPLING: dict[str, Any] = {"max_tokens": 12, "seed": 3, "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.2}
EXTRA: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
PARAMS = SamplingParams(**SAMPLING, **EXTRA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("clients") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--served-model-name", "tiny") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


# The documentation --------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_work_as_written() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, re.S)
    (curl,) = [text for kind, text in blocks if kind == "bash" and text.startswith("curl ")]
    (example,) = [text for kind, text in blocks if kind == "python"]
    assert "nanoinfer serve shakespeare\n" in page
    assert curl in (ROOT / "README.md").read_text()
    with serving("shakespeare") as shakespeare:
        if which("curl"):
            line = curl.replace("http://127.0.0.1:8000", shakespeare.url)
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
            (choice,) = json.loads(done.stdout)["choices"]
            params = SamplingParams(max_tokens=40, temperature=0.8, top_k=50, seed=1)
            assert choice["text"] == LLM("shakespeare").generate("O Romeo,", params)[0].outputs[0].text
        exec(example.replace("http://127.0.0.1:8000", shakespeare.url), {})


# openai-python ------------------------------------------------------------------------------------------------


def test_tool_calls_of_openai_python(client: Any) -> None:
    """Whole, streamed and put together by the client, and the turn after it."""
    pytest.importorskip("llguidance", reason="the extra structured is not installed")
    tools = [{**t, "function": {**t["function"], "strict": True}} for t in TWO]
    options = {"model": "tiny", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False,
               "max_tokens": 100, "seed": 3}  # fmt: skip
    made = client.chat.completions.create(messages=HI, **options).choices[0]
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)
    (call,) = made.message.tool_calls
    check_call(call.function.name, call.function.arguments, TWO)
    with client.chat.completions.stream(messages=HI, **options) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert (names, final.finish_reason) == ([call.function.name], "tool_calls")
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.parsed_arguments == json.loads(call.function.arguments)
    messages = [*HI, made.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    options |= {"tool_choice": "none", "max_tokens": 5}
    assert client.chat.completions.create(messages=messages, **options).choices[0].message.content


def test_openai_lists_the_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "nanoinfer"


def test_openai_completions(client: Any, llm: LLM) -> None:
    outputs = llm.generate(["To be", [40, 41, 42]], PARAMS)
    whole = client.completions.create(model="tiny", prompt="To be", **SAMPLING, extra_body=EXTRA)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (outputs[0].outputs[0].text, "length")
    assert whole.usage.completion_tokens == 12
    tokens = client.completions.create(model="tiny", prompt=[40, 41, 42], **SAMPLING, extra_body=EXTRA)
    assert tokens.choices[0].text == outputs[1].outputs[0].text
    text = ""
    for chunk in client.completions.create(model="tiny", prompt="To be", stream=True, **SAMPLING, extra_body=EXTRA):
        text += chunk.choices[0].text
    assert text == outputs[0].outputs[0].text


def test_openai_embeddings(client: Any, llm: LLM) -> None:
    """The client asks for base64 unless it is told otherwise."""
    expected = [output.outputs.embedding for output in llm.embed(["To be", "Hi"])]
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(model="tiny", input=["To be", "Hi"], **options)
        if options.get("encoding_format") != "base64":
            assert [item.embedding for item in found.data] == expected
    short = client.embeddings.create(model="tiny", input=[40, 41], dimensions=5, extra_body={"use_activation": False})
    params = PoolingParams(dimensions=5, use_activation=False)
    assert short.data[0].embedding == llm.embed([40, 41], params)[0].outputs.embedding
    assert (short.usage.prompt_tokens, short.model) == (2, "tiny")
    with pytest.raises(openai.BadRequestError, match="dimensions=0"):
        client.embeddings.create(model="tiny", input="a", dimensions=0)


def test_openai_chats(client: Any, llm: LLM) -> None:
    (expected,) = llm.chat(HI, PARAMS)
    whole = client.chat.completions.create(model="tiny", messages=HI, **SAMPLING, extra_body=EXTRA)
    assert whole.choices[0].message.content == expected.outputs[0].text
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}, **SAMPLING, extra_body=EXTRA
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected.outputs[0].text
    assert chunks[-1].usage.total_tokens == len(expected.prompt_token_ids) + 12


def test_openai_logprobs(client: Any, llm: LLM) -> None:
    (expected,) = llm.chat(HI, SamplingParams(max_tokens=5, seed=1, logprobs=2))
    found = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=5, seed=1, logprobs=True, top_logprobs=2
    )
    (o,) = expected.outputs
    values = [s[t].logprob for s, t in zip(o.logprobs or [], o.token_ids, strict=True)]
    assert [t.logprob for t in found.choices[0].logprobs.content] == values


def test_openai_async_streams_side_by_side(server: ServerProcess, llm: LLM) -> None:
    prompts = [f"the {word}" for word in ("system", "user", "answer", "hello", "brief", "again")]
    expected = [o.outputs[0].text for o in llm.generate(prompts, SamplingParams(max_tokens=20, seed=1))]

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as made:

            async def read(prompt: str) -> str:
                stream = await made.completions.create(model="tiny", prompt=prompt, max_tokens=20, seed=1, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(run()) == expected


def test_openai_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"


def test_openai_stream_that_is_closed_early(client: Any) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens <= 2


# lm-eval ------------------------------------------------------------------------------------------------------

QUESTIONS = [
    {"question": f"the {a} and the {b}", "choices": [" hello", " there be", " brief again", " answer"], "gold": i % 4}
    for i, (a, b) in enumerate((a, b) for a in ("system", "user", "answer") for b in ("hello", "brief", "again"))
]


def evaluate(url: str, **options: Any) -> dict[str, Any]:
    """Return the results of lm-eval on the questions, against a server."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    datasets = pytest.importorskip("datasets", reason="lm-eval is not installed")
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    task = ConfigurableTask(
        config={
            "task": "tiny",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(QUESTIONS)},
            "output_type": "multiple_choice",
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    )
    model = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model="tiny", max_length=256, **options)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model, tasks=[task], bootstrap_iters=0, log_samples=True, cache_requests=False
    )
    return found


@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"num_concurrent": 4}], ids=str)
def test_lm_eval_gives_the_scores_of_the_library(server: ServerProcess, llm: LLM, options: dict[str, int]) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    results = evaluate(server.url, **options)  # with the server's tokenizer
    samples = sorted(results["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    num_right = 0
    for question, sample in zip(QUESTIONS, samples, strict=True):
        expected = llm.loglikelihood(question["question"], question["choices"])
        found = [(float(value), greedy) for ((value, greedy),) in sample["resps"]]
        assert [value for value, _ in found] == pytest.approx([o.log_likelihood for o in expected], abs=1e-4)
        assert [greedy for _, greedy in found] == [o.is_greedy for o in expected]
        values = [o.log_likelihood for o in expected]
        num_right += values.index(max(values)) == question["gold"]
    assert results["results"]["tiny"]["acc,none"] == pytest.approx(num_right / len(QUESTIONS))


# GuideLLM -----------------------------------------------------------------------------------------------------

GUIDELLM = which("guidellm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.mark.skipif(GUIDELLM is None, reason="GuideLLM is not installed: make test-clients")
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_of_guidellm_succeed(server: ServerProcess, folder: Path, tmp_path: Path, route: str) -> None:
    """It streams, and asks for the token counts in every chunk."""
    assert GUIDELLM is not None
    tokenizer = tmp_path / "tokenizer"  # as transformers reads it
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    command = [
        GUIDELLM, "run", "--backend", f"kind=openai_http,target={server.url},request_format={route}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = found["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (12, [], [])
    assert [request["output_metrics"]["text_tokens"] for request in requests["successful"]] == [8] * 12
