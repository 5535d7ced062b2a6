"""`nanoinfer batch --ray`: the bytes of one machine, in files and in folders, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import command, one_thread
from helpers.models import make_folder
from helpers.ray_cluster import LOOPBACK, WAIT_SEC, children, grows, kill, listening, start, until, workers

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]  # a cluster takes seconds to start
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


def test_files_give_the_bytes_of_one_machine(tmp_path: Path, model: Path, address: str) -> None:
    write_lines(tmp_path / "a.jsonl", 100)
    write_lines(tmp_path / "b.jsonl", 50, start=100)
    there = run(tmp_path, "a.jsonl", "b.jsonl", "-o", "one.jsonl", "-m", model)
    here = run(tmp_path, "a.jsonl", "b.jsonl", "-o", "ray.jsonl", "-m", model, "--ray", address)
    assert here == there
    assert here[0] == 1
    assert here[1].startswith("nanoinfer: error: 2 of 150 lines failed: ")
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "ray.jsonl.state").read_bytes() == (tmp_path / "one.jsonl.state").read_bytes()


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


def test_workers_that_are_killed_change_nothing(tmp_path: Path, model: Path, nodes: Any, address: str) -> None:
    write_lines(tmp_path / "in.jsonl", 600)
    out = tmp_path / "out.jsonl"
    driver = start(tmp_path, "in.jsonl", "out.jsonl", "-m", model, *ENGINE, address=address)
    for size in (0, 40_000):
        grows(out, size, driver)
        for pid in workers(nodes):
            kill(pid)
    assert driver.wait(WAIT_SEC) == 1
    assert (tmp_path / "err").read_text().startswith("nanoinfer: error: 1 of 600 lines failed")
    run(tmp_path, "in.jsonl", "one.jsonl", "-m", model)
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_folder_of_shards(tmp_path: Path, model: Path, address: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    shards, out = tmp_path / "shards", tmp_path / "out"
    shards.mkdir()
    write_lines(shards / "a.jsonl", 30)
    (shards / "b.jsonl").write_text("")
    prompts = [f"line {chr(97 + i % 26) * (1 + i % 7)}" for i in range(40)]
    table = pa.table({"prompt": prompts, "title": [f"t{i}" for i in range(40)]})
    parquet.write_table(table, shards / "c.parquet", row_group_size=16)
    write_lines(shards / "d.jsonl", 20, start=50)
    (shards / "other.txt").write_text("is no shard")
    code, err = run(tmp_path, shards, out, "-m", model, "--ray", address)
    assert (code, err.count("\n")) == (1, 1), err
    assert "2 of 90 lines failed" in err
    assert sorted(p.name for p in out.iterdir()) == [
        "_nanoinfer_batch.json",
        "a.jsonl",
        "b.jsonl",
        "c.parquet",
        "d.jsonl",
    ]

    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    files = [shards / "a.jsonl", tmp_path / "c.jsonl", shards / "d.jsonl"]
    run(tmp_path, *files, "-o", "one.jsonl", "-m", model)
    records = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("file", None)
    made = [json.loads(line) for name in "ad" for line in (out / f"{name}.jsonl").read_text().splitlines()]
    assert made == records[:30] + records[70:]
    rows = parquet.read_table(out / "c.parquet")
    assert rows.select(["prompt", "title"]) == table
    assert [row["outputs"][0]["text"] for row in rows.to_pylist()] == [r["outputs"][0]["text"] for r in records[30:70]]
    assert rows["seed"].to_pylist() == [record["seed"] for record in records[30:70]]

    content = {p.name: p.read_bytes() for p in out.iterdir()}
    code, err = run(tmp_path, shards, out, "-m", model, "--ray", "127.0.0.1:1")  # nothing is left to do
    assert (code, "is complete after 90 lines" in err) == (1, True)
    code, err = run(tmp_path, shards, out, "-m", model, "--ray", "127.0.0.1:1", "--top-k", "7")
    assert (code, err.count("\n"), "was made with top_k=50, not 7" in err) == (2, 1, True)
    (out / "c.parquet").unlink()
    (out / ".d.jsonl.part").write_text("of a run that was killed")
    write_lines(shards / "e.jsonl", 10)
    code, err = run(tmp_path, f"file://{shards}", f"file://{out}", "-m", model, "--ray", address)
    assert (code, "continues after 50 lines" in err) == (1, True), err
    assert parquet.read_table(out / "c.parquet") == rows
    assert len((out / "e.jsonl").read_text().splitlines()) == 10
    assert {name: (out / name).read_bytes() for name in ("a.jsonl", "d.jsonl")} == {
        name: content[name] for name in ("a.jsonl", "d.jsonl")
    }
    write_lines(shards / "a.jsonl", 29)
    code, err = run(tmp_path, shards, out, "-m", model, "--ray", "127.0.0.1:1")
    assert (code, "was made from other shards" in err) == (2, True)


def test_what_a_node_cannot_load_is_one_line_that_names_it(tmp_path: Path, address: str) -> None:
    write_lines(tmp_path / "in.jsonl", 100)
    code, err = run(tmp_path, "in.jsonl", "out.jsonl", "-m", "random:nothing", "--ray", address)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("nanoinfer: error: node 127.0.0.1 (")
    assert "random:nothing" in err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_shard_that_cannot_be_read_is_one_line_that_names_it(tmp_path: Path, model: Path, address: str) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", 10)
    (tmp_path / "in" / "b.parquet").write_bytes(b"no Parquet")
    code, err = run(tmp_path, "in", "out", "-m", model, "--ray", address)
    assert (code, err.count("\n")) == (2, 1), err
    assert "in/b.parquet cannot be read as prompts" in err
    assert [p.name for p in (tmp_path / "out").iterdir()] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1 does not answer: "),
        (("--ray", "nowhere"), "--ray nowhere is no address: give HOST:PORT"),
        (("--num-actors", "2"), "--num-actors needs --ray"),
        (("--ray", "local", "--cpus-per-actor", "0"), "cpus_per_actor=0"),
    ],
)
def test_what_is_refused_before_anything_starts(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    write_lines(tmp_path / "in.jsonl", 3)
    code, err = run(tmp_path, "in.jsonl", "out.jsonl", *arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert words in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("-", "out.jsonl", "--ray", "local"), "give regular files"),
        (("s3://bucket/in", "out"), "s3://bucket/in is a URI: give --ray ADDRESS"),
        ((".", "in.jsonl", "-o", "out", "--ray", "local"), "2 inputs with .: give one folder or URI of shards"),
        ((".", "in.jsonl", "--ray", "local"), "in.jsonl is a file: give a folder"),
        (("empty", "out", "--ray", "local"), "empty has no shards"),
        (("what://is/this", "out", "--ray", "local"), "what://is/this cannot be opened"),
    ],
)
def test_inputs_and_outputs_that_do_not_fit(tmp_path: Path, files: tuple[str, ...], words: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "empty").mkdir()
    code, err = run(tmp_path, *files)
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


def test_a_local_cluster_listens_on_loopback_alone(tmp_path: Path, model: Path) -> None:
    write_lines(tmp_path / "in.jsonl", 2000)
    out = tmp_path / "out.jsonl"
    driver = start(tmp_path, "in.jsonl", "out.jsonl", "-m", model, *ENGINE, address="local")
    grows(out, 0, driver)
    pids = [driver.pid, *children(driver.pid)]
    found = listening(pids)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(WAIT_SEC) == 130
    assert len(found) > 3
    assert {address.partition(":")[0] for address in found} <= LOOPBACK_ADDRESSES
    assert "nanoinfer: interrupted after " in (tmp_path / "err").read_text()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "processes of the cluster are left")
