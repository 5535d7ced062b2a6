"""Adapters by the name of the model: in the server, in batch files, and over several models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `server` is not installed")

from starlette.types import ASGIApp

from helpers.adapters import write_adapter
from helpers.asgi import call, serve
from helpers.async_llm import freed
from helpers.batch import run_on
from helpers.models import TINY, make_folder, refuses
from nanoinfer import LLM, AsyncLLM, LoRARequest, SamplingParams
from nanoinfer.batch.run import BatchOptions
from nanoinfer.cli.app import run
from nanoinfer.cluster.front import check
from nanoinfer.config import EngineConfig, LLMConfig
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, EMBEDDINGS
from nanoinfer.sampling_params import named_adapters
from nanoinfer.server.config import ClusterConfig, ServerConfig

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base and adapters "a" and "b"."""
    path = tmp_path_factory.mktemp("lora")
    make_folder(path / "base")
    for i, name in enumerate("ab"):
        write_adapter(path / name, TINY, seed=i + 1)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path / "base"), engine="static", enable_lora=True)


def modules(path: Path) -> tuple[str, ...]:
    return tuple(f"{name}={path / name}" for name in "ab")


def text(llm: LLM, lora: LoRARequest | None) -> str:
    return llm.generate("To be", PARAMS, lora_request=lora)[0].outputs[0].text


def test_requests_name_an_adapter_as_their_model(llm: LLM, path: Path) -> None:
    adapters = named_adapters(modules(path))
    body = {"prompt": "To be", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    names = ["m", "a", "b", None]

    async def main(app: ASGIApp, model: AsyncLLM) -> Any:
        bodies = [{**body, "model": name} for name in names]
        found = await asyncio.gather(
            *(call(app, "POST", COMPLETIONS, body=json.dumps(b).encode()) for b in bodies),
            call(app, "POST", COMPLETIONS, body=json.dumps({**body, "model": "a", "stream": True}).encode()),
            call(app, "POST", COMPLETIONS, body=json.dumps({**body, "model": "c"}).encode()),
            call(app, "POST", EMBEDDINGS, body=json.dumps({"input": "To be", "model": "b"}).encode()),
            call(app, "GET", "/v1/models"),
            call(app, "GET", "/v1/models/b"),
        )
        await freed(model)
        return found

    found = serve(llm, main, served_model_name=("m",), lora_modules=modules(path))
    answers = [json.loads(f.content) for f in found[:4]]
    expected = [text(llm, adapters.get(name or "")) for name in names]
    assert [a["choices"][0]["text"] for a in answers] == expected
    assert len({*expected}) == 3
    assert [a["model"] for a in answers] == ["m", "a", "b", "m"]
    events = [json.loads(line[6:]) for line in found[4].content.decode().split("\n\n") if line.startswith("data: {")]
    assert {e["model"] for e in events} == {"a"}
    assert "".join(e["choices"][0]["text"] for e in events) == expected[1]
    assert found[5].status == 404
    assert json.loads(found[5].content)["error"]["message"] == "the model 'c' does not exist: this server has m, a, b"
    embedded = json.loads(found[6].content)
    assert embedded["model"] == "b"
    (output,) = llm.embed("To be", lora_request=adapters["b"])
    assert embedded["data"][0]["embedding"] == pytest.approx(output.outputs.embedding, abs=1e-6)
    assert output.outputs.embedding != pytest.approx(llm.embed("To be")[0].outputs.embedding, abs=1e-2)
    listed = json.loads(found[7].content)["data"]
    assert [(m["id"], m["root"], m.get("parent")) for m in listed] == [
        ("m", llm.model_name, None), ("a", str(path / "a"), "m"), ("b", str(path / "b"), "m")
    ]  # fmt: skip
    assert json.loads(found[8].content) == listed[2]


def test_adapters_are_checked_when_the_server_starts(path: Path) -> None:
    llm = LLM(str(path / "base"), engine="static", enable_lora=True)

    async def main(app: ASGIApp, model: AsyncLLM) -> None:
        raise AssertionError

    for value, message in ((f"a={path}", "is not an adapter"), (f"base={path / 'a'}", "'base' is a name of the model")):
        refuses(lambda v=value: serve(llm, main, lora_modules=(v,)), message)  # type: ignore[misc]
    for values in (("a",), ("=b",), ("a=",), ("a=b", "a=c")):
        refuses(lambda v=values: ServerConfig(lora_modules=v), f"lora_modules={values[-1]!r} is not NAME=PATH")  # type: ignore[misc]
    configs = [LLMConfig("a"), LLMConfig("b")]
    refuses(lambda: check(configs, ServerConfig(lora_modules=("a=b",)), ClusterConfig()), "adapters of one model")
    assert EngineConfig().with_adapters(0) == EngineConfig()
    assert EngineConfig().with_adapters(20) == EngineConfig(enable_lora=True, max_loras=20)


def test_lines_of_a_batch_name_an_adapter(llm: LLM, path: Path, tmp_path: Path) -> None:
    adapters = named_adapters(modules(path))
    fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    openai = {"custom_id": "x", "method": "POST", "url": COMPLETIONS}
    lines = [
        {"prompt": "To be", **fields},
        {"prompt": "To be", "model": "a", **fields},
        {"prompt": "To be", "model": "nobody", **fields},
        {**openai, "body": {"prompt": "To be", "model": "b", **fields}},
        {**openai, "body": {"prompt": "To be", "model": "gpt-4o", **fields}},
        {**openai, "url": EMBEDDINGS, "body": {"input": "To be", "model": "a"}},
        {**openai, "url": CHAT, "body": {"messages": [], "model": "a"}},
        {"prompt": "To be", "model": 3},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = BatchOptions(SamplingParams(), adapters=adapters)
    run_on(llm, str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), options)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["outputs"][0]["text"] for r in records[:2]] == [text(llm, None), text(llm, adapters["a"])]
    assert records[2]["error"] == f"the model 'nobody' does not exist: use one of {llm.model_name}, a, b"
    body = records[3]["response"]["body"]
    assert (body["model"], body["choices"][0]["text"]) == ("b", text(llm, adapters["b"]))
    assert records[4]["response"]["status_code"] == 404
    (output,) = llm.embed("To be", lora_request=adapters["a"])
    embedding = records[5]["response"]["body"]["data"][0]["embedding"]
    assert embedding == pytest.approx(output.outputs.embedding, abs=1e-6)
    assert records[5]["response"]["body"]["model"] == "a"
    assert records[6]["response"]["status_code"] == 400
    assert records[7]["error"] == "model=3 is not a string"


def test_the_command_for_batches_has_adapters(llm: LLM, path: Path, tmp_path: Path) -> None:
    """It is another batch with another adapter of the same name: its output is not continued."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"prompt": "To be", "model": "a", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    source.write_text(json.dumps(line))
    command = ["batch", str(source), str(target), "--model", str(path / "base"), "--engine", "static"]
    assert run([*command, "--lora-modules", modules(path)[0]]) == 0
    expected = text(llm, named_adapters(modules(path))["a"])
    assert json.loads(target.read_text())["outputs"][0]["text"] == expected
    assert run([*command, "--lora-modules", f"a={path / 'b'}"]) == 2
    assert run([*command, "--lora-modules", "a"]) == 2
