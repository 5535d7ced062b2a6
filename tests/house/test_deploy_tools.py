"""The tools and schemas of others find nothing wrong in deploy/; the Dockerfile's commands run (make test-deploy)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.environment import ROOT

pytest.importorskip("yaml", reason="PyYAML is not installed")
pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.deploy import DEPLOY, compose_config, documents, values
from helpers.server_process import READY, serving

SCHEMAS = os.environ.get("NANOINFER_TEST_SCHEMAS", "")
has_schemas = pytest.mark.skipif(not SCHEMAS, reason="NANOINFER_TEST_SCHEMAS names no folder")
WAIT_SEC = 120.0


def run(*command: object, **options: Any) -> str:
    """Return what a command that succeeds prints."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    """Return the path of a program, beside this Python or in PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_hadolint() -> None:
    run(tool("hadolint"), "--failure-threshold", "style", DEPLOY / "Dockerfile")


def test_promtool(tmp_path: Path) -> None:
    promtool, config = tool("promtool"), tmp_path / "prometheus.yml"
    config.write_text(json.dumps(compose_config("prometheus")))  # JSON is YAML
    assert "SUCCESS" in run(promtool, "check", "config", config)
    dashboard = (ROOT / "docs" / "grafana.json").read_text().replace("$__rate_interval", "1m").replace("$model", ".*")
    queries = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]]
    groups = [{"name": "dashboard", "rules": [{"record": f"q{i}", "expr": query} for i, query in enumerate(queries)]}]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": groups}))
    assert f"SUCCESS: {len(queries)} rules found" in run(promtool, "check", "rules", tmp_path / "rules.yml")


def faults(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return what a JSON schema refuses, without the schema itself."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


@has_schemas
def test_compose_schema() -> None:
    schema = json.loads((Path(SCHEMAS) / "compose-spec.json").read_text())
    (document,) = documents("compose.yaml")
    assert faults(document, schema) == []
    assert len(faults(document | {"unknown": 1}, schema)) == 1


def test_kubernetes_schemas() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    version = validator.latest_version()
    found = documents("kubernetes.yaml") + [d for d in documents("kuberay.yaml") if "ray.io" not in d["apiVersion"]]
    assert len(found) == 5
    for document in found:
        validator.validate(document, version, strict=True)


def strict(schema: Any) -> Any:
    """Return a CRD's schema in which an unknown field is an error: the API server would drop it."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        made["additionalProperties"] = schema.get("x-kubernetes-preserve-unknown-fields", False)
    return made


@has_schemas
def test_kuberay_schemas() -> None:
    import yaml

    for document in [d for d in documents("kuberay.yaml") if "ray.io" in d["apiVersion"]]:
        path = Path(SCHEMAS) / f"ray.io_{document['kind'].lower()}s.yaml"
        versions = {v["name"]: v for v in yaml.safe_load(path.read_text())["spec"]["versions"]}
        schema = strict(versions[document["apiVersion"].partition("/")[2]]["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
        assert faults(document, schema) == []
        assert len(faults(document | {"spec": document["spec"] | {"unknown": 1}}, schema)) == 1


def health_check(url: str) -> int:
    """Return the exit code of the image's health check, against a server on another port."""
    (_, instruction) = values("HEALTHCHECK")[0].split(" CMD ")
    python, flag, code = json.loads(instruction)
    assert (python, flag) == ("python", "-c")
    port = re.findall(r":(\d+)$", url)[0]
    assert code.count("8000") == 1
    done = subprocess.run([sys.executable, flag, code.replace("8000", port)], capture_output=True, check=False)
    return done.returncode


def test_the_health_check_is_that_of_the_server() -> None:
    with serving("shakespeare", "--host", "0.0.0.0") as server:
        assert health_check(server.url) == 0
    assert health_check(server.url) == 1  # nothing listens


@contextmanager
def started(*command: object) -> Iterator[str]:
    """Run a server; yield its URL."""
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        (url,) = READY.findall(next(line for line in process.stderr if READY.search(line)))
        yield url
        process.terminate()
        assert process.wait(WAIT_SEC) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.nightly
def test_the_commands_of_the_build_run(tmp_path: Path) -> None:
    """In a fresh environment, on a copy of what the image copies: needs the package index and a compiler."""
    source, python = tmp_path / "source", tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    for line in values("COPY"):
        *paths, target = line.split()
        for path in paths:
            place = source / (path if target == "./" else target)
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, place)
    commands = [re.sub(r"--mount=\S+\s+", "", line) for line in values("RUN")]
    pip = [line for line in commands if re.match(r"(\w+=\S+ )?pip ", line)]
    assert len(pip) == 2
    extras = next(line.partition("=")[2] for line in values("ARG") if line.startswith("EXTRAS="))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    for line in pip:
        here = line.replace("/wheels", f"{tmp_path}/wheels").replace("/constraints.txt", f"{ROOT}/constraints.txt")
        run("sh", "-ec", here, cwd=source, env=os.environ | {"PATH": path, "EXTRAS": extras})
    shutil.rmtree(source)
    with started(python.parent / "nanoinfer", "serve", "shakespeare", "--port", "0") as url:
        assert health_check(url) == 0
    listed = run(python, "-m", "pip", "list", "--format", "freeze")
    assert not re.search(r"^(torch|ray)==", listed, re.MULTILINE)
