"""Schemathesis over /openapi.json: no request that it generates is answered by a 5xx, or by what the document has not.

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

from server_process import serving

TOOL = shutil.which("st", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
EXAMPLES = int(os.environ.get("NANOINFER_TEST_SCHEMA_EXAMPLES", "10"))  # for each operation
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"


MODEL = "shakespeare"
NARROWER: dict[str, dict[str, Any]] = {
    "model": {"enum": [MODEL]},
    "max_tokens": {"maximum": 12},
    "max_completion_tokens": {"maximum": 12},
    "n": {"maximum": 4},
    "best_of": {"maximum": 4},
    "logprobs": {"maximum": 5},
    "prompt_logprobs": {"maximum": 5},
    "top_logprobs": {"maximum": 5},
}
"""What most requests must have so that they are not refused, and end soon. Schemathesis generates wrong values, too."""


def narrowed(url: str) -> dict[str, Any]:
    """Return the document of a server, with fewer valid values of some fields."""
    with urlopen(f"{url}/openapi.json", timeout=30) as response:
        document: dict[str, Any] = json.load(response)
    for path in ("/v1/completions", "/v1/chat/completions"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for name, narrower in NARROWER.items():
            if "integer" in (field := schema["properties"].get(name, {})).get("type", ()) or name == "model":
                field.update(narrower)
    return document


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason="schemathesis is not installed: make test-clients")
def test_no_generated_request_is_a_server_error(tmp_path: Path) -> None:
    assert TOOL is not None
    with serving(MODEL, "--engine", "native", "--max-num-seqs", "16", "--access-log", str(tmp_path / "log")) as server:
        (tmp_path / "openapi.json").write_text(json.dumps(narrowed(server.url)))
        found = subprocess.run(
            [TOOL, "run", "openapi.json", "--url", server.url, "--checks", CHECKS, "--max-examples", str(EXAMPLES),
             "--phases", "examples,coverage,fuzzing", "--no-color", "--request-timeout", "120", "--seed", "1",
             "--suppress-health-check", "all", "--workers", "2"],
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
    assert statuses["/v1/completions", 200] > EXAMPLES / 10
