"""Targets of requests: bodies that the server's application answers, and lines of batch files, on a small chat model."""

from __future__ import annotations

import asyncio
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

from chat_seeds import HERMES
from exports import LLAMA
from seeds import trained

import tokenizers as hf
from nanoinfer import LLM, AsyncLLM, NanoinferError, SamplingParams
from nanoinfer.batch.files import LineReader, open_output
from nanoinfer.batch.run import BatchOptions, BatchRunner
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.models.parameters import initialize
from nanoinfer.server.app import build_app
from nanoinfer.server.config import ServerConfig
from nanoinfer.utils.progress import ProgressBar

MAX_SECONDS = 30.0
HEADERS = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]


@cache
def chat_llm() -> LLM:
    """Return an LLM with a small random chat model."""
    from dataclasses import replace
    from tempfile import mkdtemp

    folder, core = Path(mkdtemp()), hf.Tokenizer.from_str(trained()["bpe"])
    core.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    config = replace(LLAMA, vocab_size=core.get_vocab_size(), block_size=1024, eos_token_ids=(0,))
    huggingface.save(Weights(config, "float32", partial(initialize, config, 0)), folder, core.to_str())
    settings = {"eos_token": "<|endoftext|>", "chat_template": HERMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return LLM(str(folder), engine="native", threads=1, max_num_seqs=4)


def run_request(data: bytes, folder: Path) -> None:
    """Send {"path": ..., "body": ...} to the server's application. Raises NanoinferError for a response of 4xx."""
    try:
        given = json.loads(data)
        path, body = str(given["path"]), json.dumps(given["body"]).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        path, body = "/v1/chat/completions", data
    status, content = asyncio.run(_send(path, body))
    assert status < 500, f"status {status}: {content!r:.200}"
    if status >= 400:
        error = json.loads(content)["error"]
        assert isinstance(error.get("code", ""), (str, type(None))), "the code is no string"
        raise NanoinferError(f"{status} {error['message']}")
    if content.startswith(b"data: "):
        events = content.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]", "the stream has no end"
        choices = [c for event in events[:-1] for c in json.loads(event.removeprefix("data: ")).get("choices", ())]
        assert not [c for c in choices if c["finish_reason"] == "error"], "a stream ends with an error"
        return
    if content.startswith(b"event: "):  # of a response or a message
        kinds = [line for line in content.decode().splitlines() if line.startswith("event: ")]
        ends = ("response.completed", "response.incomplete", "message_stop")
        assert kinds[-1].removeprefix("event: ") in ends, f"the last is {kinds[-1]}"
        return
    for choice in json.loads(content).get("choices", ()):
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                assert isinstance(json.loads(call["function"]["arguments"]), dict), "arguments are no object"


async def _send(path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the response to a POST."""
    chunks, status = [body, b""], 0
    sent: list[bytes] = []
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "client": ("127.0.0.1", 1),
             "state": {}, "headers": HEADERS}  # fmt: skip

    async def receive() -> dict[str, Any]:
        if not chunks:
            await asyncio.Event().wait()
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            sent.append(message["body"])

    async with AsyncLLM.from_llm(chat_llm()) as llm:
        app = build_app(llm, ServerConfig(served_model_name=("m",)))
        await asyncio.wait_for(app(scope, receive, send), MAX_SECONDS)
    return status, b"".join(sent)


def run_lines(data: bytes, folder: Path) -> None:
    """Run a batch file; each line must have its record, and the model must work afterwards."""
    llm, source, target = chat_llm(), folder / "lines.jsonl", folder / "records.jsonl"
    source.write_bytes(data)
    reader, output = LineReader([str(source)]), open_output(str(target), {}, overwrite=True)
    options = BatchOptions(SamplingParams(max_tokens=20))
    runner = BatchRunner(llm, options)
    try:
        output.skip(reader)
        output.start()
        runner.run(reader, output, ProgressBar("batch", False))
    finally:
        output.close()
    records = [json.loads(line) for line in target.read_bytes().splitlines()]
    wanted = sum(1 for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())
    assert len(records) == wanted, f"{len(records)} records of {wanted} lines"
    errors = []
    for record in records:
        response = record.get("response")
        error = record["error"] if response is None else response["body"].get("error", {}).get("message")
        assert response is None or response["status_code"] < 500, f"status {response['status_code']}: {error}"
        errors += [str(error)] if error else []
    assert not llm.core.scheduler.running, "a sequence is left"
    if errors:
        raise NanoinferError(errors[0])
