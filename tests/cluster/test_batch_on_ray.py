"""`nanoinfer batch --ray`: the bytes of one machine, in files and in folders, and what it refuses."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.models import command, make_folder, one_thread
from helpers.ray_cluster import LOOPBACK, WAIT_SEC, children, grows, kill, listening, start, until, workers
from nanoinfer.cli import app

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # a cluster takes seconds to start
LOOPBACK_ADDRESSES = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same in IPv6, and ::1."""
ENGINE = ("--engine", "native", "--max-tokens", "6", "--seed", "3")
IMPATIENT = {
    "RAY_py_gcs_connect_timeout_s": "1",
    "RAY_gcs_rpc_server_connect_timeout_s": "1",
    "RAY_gcs_server_port_wait_time_s": "1",
}
"""Ray's settings: how long each of its three attempts at a connection takes, 33 seconds together by default."""


@pytest.fixture
def address(nodes: Any) -> str:
    return str(nodes.address)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


def write_lines(path: Path, num_lines: int, start: int = 0) -> None:
    """Write lines of several forms, some of them bad, with blank lines between."""
    rows: list[Any] = [{"prompt_token_ids": [1 + i % 50, 2 + i % 40], "id": i} for i in range(start, start + num_lines)]
    rows[num_lines // 2] = {"prompt": "abc", "n": 2, "temperature": 0}
    rows[num_lines // 3] = {"promt": "abc"}
    rows[-1] = {"method": "POST", "url": "/v1/completions", "custom_id": "x", "body": {"prompt": "ab"}}
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")


def run(folder: Path, *arguments: object, **environment: str) -> tuple[int, str]:
    """Run `nanoinfer batch` as a process: exit code and stderr."""
    done = subprocess.run(
        command("batch", *arguments, *ENGINE), cwd=folder, env=one_thread() | LOOPBACK | environment, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=WAIT_SEC,
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_files_give_the_bytes_of_one_machine_and_a_killed_worker_changes_nothing(
    tmp_path: Path, model: Path, nodes: Any, address: str
) -> None:
    write_lines(tmp_path / "a.jsonl", 400)
    write_lines(tmp_path / "b.jsonl", 50, start=400)
    files = ("a.jsonl", "b.jsonl", "-o")
    code, err = run(tmp_path, *files, "one.jsonl", "-m", model)
    last = err.splitlines()[-1]  # lines of progress may be before it
    assert (code, last.startswith("nanoinfer: error: 2 of 450 lines failed: ")) == (1, True)
    driver = start(tmp_path, *files, "ray.jsonl", "-m", model, *ENGINE, address=address)
    grows(tmp_path / "ray.jsonl", 0, driver)
    for pid in workers(nodes):
        kill(pid)
    assert driver.wait(WAIT_SEC) == 1
    assert (tmp_path / "err").read_text().splitlines()[-1] == last
    for name in ("jsonl", "jsonl.state"):
        assert (tmp_path / f"ray.{name}").read_bytes() == (tmp_path / f"one.{name}").read_bytes()


@pytest.mark.nightly
def test_a_killed_batch_of_a_cluster_continues_on_one_machine(tmp_path: Path, model: Path, address: str) -> None:
    write_lines(tmp_path / "in.jsonl", 600)
    out, err = tmp_path / "out.jsonl", tmp_path / "err"
    driver = start(tmp_path, "in.jsonl", "out.jsonl", "-m", model, *ENGINE, address=address)
    grows(out, 0, driver)
    kill(driver.pid)
    driver.wait(WAIT_SEC)
    assert err.read_text() == ""
    run(tmp_path, "in.jsonl", "one.jsonl", "-m", model)
    done = run(tmp_path, "in.jsonl", "out.jsonl", "-m", model)
    assert done[0] == 1
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_folder_on_a_local_cluster_which_listens_on_loopback_alone(tmp_path: Path, model: Path) -> None:
    parts, out = tmp_path / "parts", tmp_path / "out"
    parts.mkdir()
    write_lines(parts / "a.jsonl", 300)
    (parts / "b.jsonl").write_text("")
    write_lines(parts / "c.jsonl", 20, start=300)
    (parts / "other.txt").write_text("is none of them")
    driver = start(tmp_path, parts, out, "-m", model, *ENGINE, address="local")
    grows(out / "a.jsonl", 0, driver)
    pids = [driver.pid, *children(driver.pid)]
    addresses = listening(pids)
    assert driver.wait(WAIT_SEC) == 1, (tmp_path / "err").read_text()
    assert len(addresses) > 3
    assert {address.partition(":")[0] for address in addresses} <= LOOPBACK_ADDRESSES
    assert "2 of 320 lines failed" in (tmp_path / "err").read_text()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "processes of the cluster are left")

    code, err = run(tmp_path, parts, out, "-m", model)
    assert (code, err.startswith(f"nanoinfer: {out} is complete after 320 lines\n")) == (1, True), err
    files = {p.name: p.read_bytes() for p in out.iterdir()}
    assert sorted(files) == sorted(f"{name}.jsonl{end}" for name in "abc" for end in ("", ".state"))
    run(tmp_path, parts / "a.jsonl", parts / "c.jsonl", "-o", "one.jsonl", "-m", model)
    records = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("file", None)
    assert [json.loads(line) for name in "ac" for line in files[f"{name}.jsonl"].splitlines()] == records


def test_what_a_node_cannot_load_is_one_line_that_names_it(tmp_path: Path, address: str) -> None:
    write_lines(tmp_path / "in.jsonl", 100)
    code, err = run(tmp_path, "in.jsonl", "out.jsonl", "-m", "random:nothing", "--ray", address)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("nanoinfer: error: node 127.0.0.1 (")
    assert "random:nothing" in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("in.jsonl", "out", "--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1 does not answer: "),
        (("in.jsonl", "out", "--ray", "nowhere"), "--ray nowhere is no address: give HOST:PORT"),
        (("in.jsonl", "out", "--num-actors", "2"), "--num-actors needs --ray"),
        (("in.jsonl", "out", "--ray", "local", "--cpus-per-actor", "0"), "cpus_per_actor=0"),
        (("-", "out", "--ray", "local"), "give regular files"),
        (("s3://bucket/in", "out"), "bucket/in cannot be read as prompts"),
        ((".", "in.jsonl", "-o", "out", "--ray", "local"), ". is a folder, not a file of prompts"),
        (("empty", "out", "--ray", "local"), "empty has no .jsonl files"),
    ],
)
def test_what_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", 3)
    (tmp_path / "empty").mkdir()
    code = app.run(["batch", *arguments])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1), err
    assert words in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "in.jsonl"]


@pytest.mark.nightly
def test_an_address_where_something_else_answers(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, err = run(tmp_path, "in.jsonl", "out.jsonl", "--ray", address, **IMPATIENT)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith(f"nanoinfer: error: --ray {address}: ")


def test_more_actors_than_the_cluster_has_cpus_for(tmp_path: Path, address: str) -> None:
    write_lines(tmp_path / "in.jsonl", 3)
    code, err = run(tmp_path, "in.jsonl", "out.jsonl", "--ray", address, "--num-actors", "3")
    assert (code, err.count("\n")) == (2, 1), err
    assert "has room for 2" in err
