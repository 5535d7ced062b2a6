"""Schemathesis over /openapi.json: no request that it generates is answered by a 5xx.

The model has a chat template, and most values of the structured fields can be compiled, so that many requests succeed.
`make test-clients` installs it and runs some hundred cases, `make test-server-schema` 10,000.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.chat import chat_folder
from helpers.server_process import serving

TOOL = shutil.which("st", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
EXAMPLES = int(os.environ.get("NANOINFER_TEST_SCHEMA_EXAMPLES", "10"))  # for each operation
CHECKS = "not_a_server_error"


MODEL = "tiny"
PROPERTY = {"enum": [{"type": "integer"}, {"type": "string", "maxLength": 8}, {"enum": ["a", 1, None]}, {"$ref": "#"},
                     {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, {"pattern": "^[a-c]+$"}, {}, True,
                     {"multipleOf": 7}, {"anyOf": [{"type": "null"}, {"const": "b"}]}, {"not": {}}, 5]}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": PROPERTY, "maxProperties": 4},
        "required": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "additionalProperties": {"enum": [False, True, {"type": "integer"}]},
    },
    "required": ["type"],
    "additionalProperties": False,
}
"""Of JSON schemas, some of which cannot be compiled."""


def only(**properties: Any) -> dict[str, Any]:
    """Return the schema of objects that have these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


FEW = {"maximum": 4}
NARROWER: dict[str, dict[str, Any]] = {
    "model": {"enum": [MODEL]},
    "messages": {"items": only(role={"enum": ["system", "user", "assistant"]}, content={"type": "string"})},
    "input": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "minItems": 1,
                "items": only(role={"enum": ["developer", "user", "assistant"]}, content={"type": "string"}),
            },
        ]
    },
    "max_output_tokens": {"maximum": 12},
    "text": {
        "anyOf": [
            only(format=only(type={"enum": ["text", "json_object"]})),
            only(format=only(type={"const": "json_schema"}, name={"const": "x"}, schema=SCHEMA)),
        ]
    },
    "max_tokens": {"maximum": 12},
    "max_completion_tokens": {"maximum": 12},
    "min_tokens": FEW,
    "tokens": {"items": {"type": "integer", "minimum": 0, "maximum": 300}},
    **dict.fromkeys(("n", "best_of", "logprobs", "top_logprobs"), FEW),
    "response_format": {
        "anyOf": [
            only(type={"enum": ["text", "json_object"]}),
            only(type={"const": "json_schema"}, json_schema=only(name={"const": "x"}, schema=SCHEMA)),
        ]
    },
    "structured_outputs": {
        "anyOf": [
            only(json=SCHEMA),
            only(regex={"enum": ["[a-z]{1,8}", "(a|b)*c", "a{1,3}|", "(", "\\d+\\.\\d", ".*", "(?=a)"]}),
            only(regex={"type": "string", "maxLength": 6}),
            only(choice={"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}),
            only(grammar={"enum": ["start: /[a-z]+/", 'root ::= "a" | "b" root', "start:", "?"]}),
            only(json_object={"const": True}),
        ]
    },
}
"""What most requests must have so that they are not refused, and end soon. Schemathesis generates wrong values, too."""


LEFT_OUT = {
    "/v1/completions": ("response_format", "stream_options", "slide_stride"),
    "/v1/chat/completions": ("structured_outputs", "stream_options", "slide_stride", "max_tokens"),
    "/v1/responses": ("structured_outputs", "stream_options", "slide_stride"),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), ("tool_choice", "thinking")),
    "/tokenize": (),
    "/detokenize": (),
}
"""What excludes or needs another field. Schemathesis would give most requests a pair that is refused."""


def narrowed(url: str) -> dict[str, Any]:
    """Return the document of a server, with fewer valid values of some fields."""
    with urlopen(f"{url}/openapi.json", timeout=30) as response:
        document: dict[str, Any] = json.load(response)
    for path in LEFT_OUT:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for name in LEFT_OUT[path]:
            del schema["properties"][name]
        for name, narrower in NARROWER.items():
            field = schema["properties"].get(name, {})
            if "anyOf" in narrower:
                field.clear()
            if name != "logprobs" or "integer" in field.get("type", ()):
                field.update(narrower)
    return document


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason="schemathesis is not installed: make test-clients")
def test_no_generated_request_is_a_server_error(tmp_path: Path) -> None:
    assert TOOL is not None
    folder = chat_folder(tmp_path / MODEL)
    options = ("--engine", "native", "--max-num-seqs", "16", "--access-log", str(tmp_path / "log"))
    with serving(folder, "--served-model-name", MODEL, *options) as server:
        (tmp_path / "openapi.json").write_text(json.dumps(narrowed(server.url)))
        # One worker: two threads that parse Python at once can fail in CPython before 3.11.8 (python/cpython#106905),
        # and Hypothesis, which generates the requests, parses the source of lambdas.
        found = subprocess.run(
            [TOOL, "run", "openapi.json", "--url", server.url, "--checks", CHECKS, "--max-examples", str(EXAMPLES),
             "--phases", "examples,coverage,fuzzing", "--no-color", "--request-timeout", "120", "--seed", "1",
             "--suppress-health-check", "all", "--workers", "1"],
            cwd=tmp_path, capture_output=True, text=True, timeout=3000,
        )  # fmt: skip
        summary = found.stdout.partition("SUMMARY")[2]
        count = re.search(r"([\d,]+) generated", summary)
        assert count is not None, found.stdout + found.stderr
        assert int(count[1].replace(",", "")) >= 5 * EXAMPLES
        assert found.returncode == 0, found.stdout[-8000:]
        assert server.process.poll() is None
        assert not any("Traceback" in line or "Error" in line for line in server.lines), server.lines
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    statuses = Counter((entry["path"], entry["status"]) for entry in entries if "models/" not in entry["path"])
    print(summary, *sorted(statuses.items()), sep="\n")
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert statuses[path, 200] > EXAMPLES / 2
