"""The files of deploy/ as data: instructions of the Dockerfile, documents of the manifests, command lines in them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from typing import Any

from helpers.environment import ROOT
from nanoinfer.cli.app import load_command
from nanoinfer.server.config import ServerConfig

DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploy.md").read_text()


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile: ("RUN", "pip wheel ...")."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def values(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML file of deploy/."""
    import yaml

    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(name) if document["kind"] == kind]


def pods(name: str) -> list[dict[str, Any]]:
    """Return the specs of all Pods of a manifest."""
    found: list[dict[str, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("template"), dict):
                found.append(value["template"]["spec"])
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(documents(name))
    return found


def compose_config(name: str) -> Any:
    """Return a configuration file that compose.yaml contains, with the defaults of its variables."""
    import yaml

    content = documents("compose.yaml")[0]["configs"][name]["content"]
    return yaml.safe_load(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", content))


def command_lines() -> dict[str, list[str]]:
    """Return the arguments of each `nanoinfer` in deploy/ and in docs/deploy.md, by where they are."""
    found = {"Dockerfile": json.loads(values("CMD")[-1])}
    found["compose.yaml"] = documents("compose.yaml")[0]["services"]["server"]["command"]
    found["kubernetes.yaml"] = pods("kubernetes.yaml")[0]["containers"][0]["args"]
    for job in of_kind("kuberay.yaml", "RayJob"):
        program, *arguments = shlex.split(job["spec"]["entrypoint"])
        assert program == "nanoinfer"
        found[job["metadata"]["name"]] = arguments
    runs = re.findall(r"^docker run .*?(?<!-)\bnanoinfer((?: .*)?)$", PAGE.replace("\\\n", " "), re.MULTILINE)
    return found | {f"docker run {i}": shlex.split(run, comments=True) for i, run in enumerate(runs) if run}


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line and return the values of its options; an option that is unknown or out of range raises."""
    with load_command(arguments[0]).make_context(arguments[0], list(arguments[1:])) as context:
        return context.params


def server_config(arguments: list[str]) -> ServerConfig:
    params = parse(arguments)
    return ServerConfig(**{f.name: params[f.name] for f in fields(ServerConfig)})
