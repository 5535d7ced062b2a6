"""deploy/ agrees with itself and with the package: paths, command lines, ports, names, times, metrics, permissions.

`test_deploy_tools.py` asks the tools of others whether it is valid.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from helpers.environment import ROOT

pytest.importorskip("yaml", reason="PyYAML is not installed")
pytest.importorskip("starlette", reason="the extra `server` is not installed")

from helpers import deploy
from nanoinfer.server.access import PUBLIC, CheckOrigins

USER = 10001
COMMANDS = deploy.command_lines()
SERVERS = {where: line for where, line in COMMANDS.items() if line[0] == "serve"}
COMPOSE = deploy.documents("compose.yaml")[0]
SERVICES = COMPOSE["services"]


def sources() -> list[str]:
    """Return the paths of the repository that the Dockerfile copies or mounts."""
    copied = [path for line in deploy.values("COPY") if "--from" not in line for path in line.split()[:-1]]
    mounts = [m for line in deploy.values("RUN") for m in re.findall(r"--mount=(\S+)", line) if "from=" not in m]
    return copied + [re.findall(r"source=([^,]+)", mount)[0] for mount in mounts]


def test_the_build_reads_files_that_are_there_and_are_not_ignored() -> None:
    found = sources()
    assert len(found) == 6
    assert all((ROOT / path).exists() for path in found)
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == set(found)


def test_extras_of_the_image_exist() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python from 3.11 on")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (default,) = [line.partition("=")[2] for line in deploy.values("ARG") if line.startswith("EXTRAS=")]
    assert set(default.split(",")) <= set(extras)
    others = re.findall(r"EXTRAS=([\w,]+)", (deploy.DEPLOY / "kuberay.yaml").read_text() + deploy.PAGE)
    assert others
    assert {name for line in others for name in line.split(",")} <= set(extras)


def test_the_image_runs_as_a_user_and_signals_reach_the_server() -> None:
    last = dict(deploy.instructions())  # the last of each name
    assert last["USER"] == f"{USER}:{USER}"
    assert f"--uid {USER} " in " ".join(deploy.values("RUN"))
    assert json.loads(last["ENTRYPOINT"]) == ["nanoinfer"]  # exec form: no shell between
    assert last["EXPOSE"] == str(deploy.server_config(COMMANDS["Dockerfile"]).port) == "8000"


@pytest.mark.parametrize("where", COMMANDS)
def test_command_line(where: str) -> None:
    deploy.parse(COMMANDS[where])


def status(line: list[str], host: str) -> int:
    """Return the status of a request with this Host."""
    config, found = deploy.server_config(line), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(200)

    async def send(message: Any) -> None:
        found.append(message.get("status"))

    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode())]}
    middleware = CheckOrigins(app, config.host, config.allowed_host, config.allowed_origin)
    asyncio.run(middleware(scope, None, send))  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize("where", SERVERS)
def test_a_server_in_a_container_is_reached_from_outside(where: str) -> None:
    config = deploy.server_config(SERVERS[where])
    assert (config.host, config.port) == ("0.0.0.0", 8000)
    for host in ("127.0.0.1:8000", "localhost:8000", "10.1.2.3:8000"):  # a published port, a probe of Kubernetes
        assert status(SERVERS[where], host) == 200
    names = {"compose.yaml": ["server:8000"], "kubernetes.yaml": ["nanoinfer:8000", "nanoinfer.default.svc:8000"]}
    for host in names.get(where, []):
        assert status(SERVERS[where], host) == 200


def seconds(text: str) -> float:
    return float(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


def test_running_requests_have_time_to_end() -> None:
    assert (
        seconds(SERVICES["server"]["stop_grace_period"])
        >= deploy.server_config(SERVERS["compose.yaml"]).shutdown_timeout + 5
    )
    (pod,) = deploy.pods("kubernetes.yaml")
    stop = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[0] == "sleep"
    needed = float(stop[1]) + deploy.server_config(SERVERS["kubernetes.yaml"]).shutdown_timeout
    assert pod["terminationGracePeriodSeconds"] >= needed + 5
    timeout = deploy.server_config(SERVERS["Dockerfile"]).shutdown_timeout
    assert all(int(given) >= timeout + 5 for given in re.findall(r"--stop-timeout (\d+)", deploy.PAGE))


def test_ports_of_the_compose_file_are_on_loopback() -> None:
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
    assert SERVICES["server"]["read_only"] is True
    assert SERVICES["server"]["cap_drop"] == ["ALL"]


def test_prometheus_and_grafana_find_what_they_read() -> None:
    (job,) = deploy.compose_config("prometheus")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert job["authorization"] == {"credentials": "none"}  # without a key; the server then ignores it
    assert "metrics_path" not in job  # /metrics
    assert '"${NANOINFER_API_KEY:-none}"' in COMPOSE["configs"]["prometheus"]["content"]
    assert SERVICES["server"]["environment"] == {"NANOINFER_API_KEY": "${NANOINFER_API_KEY:-}"}
    (source,) = deploy.compose_config("grafana-datasource")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = deploy.compose_config("grafana-dashboards")["providers"]
    (board,) = [v for v in SERVICES["grafana"]["volumes"] if ".json" in v]
    path, target, mode = board.split(":")
    assert (deploy.DEPLOY / path).resolve() == ROOT / "docs" / "grafana.json"
    assert target.rpartition("/")[0] == provider["options"]["path"]
    assert mode == "ro"
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == target
    given = {each["source"] for service in SERVICES.values() for each in service.get("configs", [])}
    assert given == COMPOSE["configs"].keys()


def test_metrics_that_are_named_exist() -> None:
    """tests/server/test_server_metrics.py holds the table, and the dashboard, against the server."""
    table = set(re.findall(r"^\| `(nanoinfer:\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    board = re.findall(r"nanoinfer:\w+", (ROOT / "docs" / "grafana.json").read_text())
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in board} <= table
    (scaler,) = deploy.of_kind("kubernetes.yaml", "HorizontalPodAutoscaler")
    (metric,) = [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]]
    (series,) = re.findall(r"seriesQuery: '(nanoinfer:\w+)\{", deploy.PAGE)
    assert series in table
    assert metric == series.replace(":", "_")
    assert f"as: {metric} " in deploy.PAGE


def test_objects_of_kubernetes_refer_to_each_other() -> None:
    deployment, service, budget, scaler = deploy.documents("kubernetes.yaml")
    spec = deployment["spec"]
    labels = spec["template"]["metadata"]["labels"]
    for selector in (
        spec["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    assert "replicas" not in spec  # an apply would undo what the autoscaler has done
    target = scaler["spec"]["scaleTargetRef"]
    assert [target[key] for key in ("apiVersion", "kind")] == [deployment[key] for key in ("apiVersion", "kind")]
    assert target["name"] == deployment["metadata"]["name"]
    assert budget["spec"]["minAvailable"] < scaler["spec"]["minReplicas"]  # else no node can be drained
    (container,) = spec["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port == {"name": service["spec"]["ports"][0]["targetPort"], "containerPort": 8000}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert "/health" in PUBLIC  # the kubelet has no key


@pytest.mark.parametrize("manifest", ["kubernetes.yaml", "kuberay.yaml"])
def test_pods_have_few_permissions(manifest: str) -> None:
    found = deploy.pods(manifest)
    assert len(found) == {"kubernetes.yaml": 1, "kuberay.yaml": 2}[manifest]
    for pod in found:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"]) == (USER, USER)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"] == container["resources"]["limits"]
            (key,) = [each for each in container["env"] if each["name"] == "NANOINFER_API_KEY"]
            assert key["valueFrom"] == {"secretKeyRef": {"name": "nanoinfer", "key": "api-key"}}
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_rays_version_and_names() -> None:
    (cluster,) = deploy.of_kind("kuberay.yaml", "RayCluster")
    pins = re.findall(r"^ray(?:\[.*\])?==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pins in ([], [cluster["spec"]["rayVersion"]])
    for job in deploy.of_kind("kuberay.yaml", "RayJob"):
        assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    (claim,) = deploy.of_kind("kuberay.yaml", "PersistentVolumeClaim")
    (data,) = [v for v in deploy.pods("kuberay.yaml")[0]["volumes"] if v["name"] == "data"]
    assert data["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
