"""`nanoinfer serve` with several replicas and several models, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")

from helpers.adapters import write_adapter  # noqa: E402
from helpers.models import TINY, make_folder  # noqa: E402
from helpers.replica_servers import TIMEOUT, metric, until  # noqa: E402
from helpers.server_process import ServerProcess, serving  # noqa: E402
from nanoinfer import LLM, LoRARequest, SamplingParams  # noqa: E402
from nanoinfer.cli.app import run  # noqa: E402
from nanoinfer.protocols.fields import COMPLETIONS  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replicas are looked up in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("replicas") / "tiny", replace(TINY, block_size=512))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("replicas") / "other", replace(TINY, block_size=256))


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(p) for task in os.listdir(f"/proc/{pid}/task")
                for p in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]  # fmt: skip
    except OSError:
        return []


def replicas(server: ServerProcess) -> list[int]:
    """Return the processes of the replicas: the hosts' children, without those of templates and grammars."""
    return [r for host in children(server.process.pid) for r in children(host)]


def both(server: ServerProcess) -> list[int]:
    """Return the processes of two replicas, when they are there."""
    until(lambda: len(replicas(server)) == 2)
    return replicas(server)


def complete(server: ServerProcess, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "seed": 3, "max_tokens": 16, **fields}
    response = httpx.post(server.url + COMPLETIONS, json=body, timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--replicas", "2", "--max-num-seqs", "8") as found:
        yield found


def test_answers_are_the_librarys_and_all_replicas_take_part(server: ServerProcess, folder: Path) -> None:
    prompts = [f"{c} to be" for c in "abcdefghijklmnop"]
    params = [SamplingParams(max_tokens=16, seed=3, temperature=1.0)] * len(prompts)
    expected = [o.outputs[0].text for o in LLM(str(folder)).generate(prompts, params)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: complete(server, p, temperature=1.0), prompts))
    assert [f["choices"][0]["text"] for f in found] == expected
    assert metric(server, "nanoinfer:generation_tokens_total{") == 16 * 16
    for replica in "01":
        assert metric(server, f'nanoinfer:generation_tokens_total{{model_name="tiny",replica="{replica}"}}') > 0


def test_the_line_at_the_start(server: ServerProcess) -> None:
    assert "(model: tiny; replicas: 2; connections: " in server.lines[0]


def test_routes_that_do_not_generate(server: ServerProcess) -> None:
    assert httpx.get(server.url + "/health").status_code == 200
    listed = httpx.get(server.url + "/v1/models").json()["data"]
    assert listed[0]["id"] == "tiny"
    assert httpx.get(server.url + "/v1/models/tiny").json()["id"] == "tiny"
    assert "<html" in httpx.get(server.url + "/").text
    assert httpx.get(server.url + "/openapi.json").json()["info"]["title"] == "nanoinfer"
    assert httpx.get(server.url + "/nothing").status_code == 404
    refused = httpx.post(server.url + COMPLETIONS, content=b"{")
    assert (refused.status_code, "JSON" in refused.json()["error"]["message"]) == (400, True)


def test_a_killed_replica_loses_no_request_and_is_replaced(server: ServerProcess) -> None:
    before = both(server)
    expected = complete(server, "a", max_tokens=400, ignore_eos=True)["choices"][0]["text"]
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(complete, server, "a", max_tokens=400, ignore_eos=True) for _ in range(12)]
        until(lambda: metric(server, "nanoinfer:num_requests_running") > 0 or all(w.done() for w in waiting))
        os.kill(before[0], signal.SIGKILL)
        found = [w.result() for w in waiting]
    assert [f["choices"][0]["text"] for f in found] == [expected] * 12
    after = until(lambda: before[0] not in both(server) and both(server))
    assert before[1] in after
    until(lambda: metric(server, "nanoinfer:replicas{") == 2)
    assert any("replica" in line and "has ended (signal 9): it is started again" in line for line in server.lines)


@pytest.mark.slow
def test_a_stream_whose_replica_is_killed_says_so(server: ServerProcess) -> None:
    until(lambda: metric(server, "nanoinfer:replicas{") == 2)
    body = {"prompt": "b", "stream": True, "max_tokens": 10**6, "overflow": "slide", "ignore_eos": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=TIMEOUT) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        for pid in replicas(server):
            os.kill(pid, signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert "the replica that ran this request has ended" in json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.slow
def test_the_second_replica_shares_the_weights(folder: Path) -> None:
    shape = replace(TINY, block_size=64, n_embd=512, n_layer=8)
    big = make_folder(folder.parent / "big", shape)
    with serving(big, "--replicas", "2", "--kv-cache-memory", "16MiB", "--cores-per-replica", "1") as server:
        for prompt in "abcd":
            complete(server, prompt, max_tokens=4)
        weights = (big / "model.safetensors").stat().st_size
        private = [_private_bytes(pid) for pid in both(server)]
    assert weights > 90e6
    assert max(private) < 60 * 2**20, f"private: {private}, weights: {weights}"


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@pytest.mark.slow
def test_the_front_checks_the_keys_and_a_replica_runs_on_its_cores_alone(folder: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    keys = ("--api-key", "first", "--api-key", "second")
    with serving(folder, "--replicas", "2", "--cores-per-replica", "1", *keys) as server:
        assert {tuple(os.sched_getaffinity(pid)) for pid in both(server)} == {(core,) for core in cores[:2]}
        body = {"prompt": "a", "max_tokens": 2}
        for headers, status in (({}, 401), ({"x-api-key": "third"}, 401), ({"Authorization": "Bearer second"}, 200)):
            assert httpx.post(server.url + COMPLETIONS, json=body, headers=headers).status_code == status
        assert httpx.get(server.url + "/v1/models").status_code == 401
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.slow
def test_several_models_each_with_its_name(folder: Path, other: Path) -> None:
    with serving(folder, str(other)) as server:
        assert "(models: tiny, other; replicas: 1, 1; connections: " in server.lines[0]
        texts = {}
        for path in (folder, other):
            expected = LLM(str(path)).generate(["To be"], SamplingParams(max_tokens=16, seed=3))[0].outputs[0].text
            texts[path.name] = complete(server, "To be", model=path.name)["choices"][0]["text"]
            assert texts[path.name] == expected
        assert complete(server, "To be")["choices"][0]["text"] == texts["tiny"]
        response = httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "model": "gone"})
        assert response.status_code == 404
        assert "this server has tiny, other" in response.json()["error"]["message"]
        listed = {m["id"]: m["max_model_len"] for m in httpx.get(server.url + "/v1/models").json()["data"]}
        assert (listed["tiny"], listed["other"]) == (512, 256)


@pytest.mark.slow
def test_an_idle_model_is_unloaded_and_comes_back(folder: Path) -> None:
    with serving(folder, "--idle-unload", "0.2") as server:
        expected = complete(server, "a")["choices"][0]["text"]
        until(lambda: not children(server.process.pid))
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["id"] == "tiny"
        assert complete(server, "a")["choices"][0]["text"] == expected


@pytest.mark.slow
def test_a_host_that_is_killed_is_started_again_and_ends_with_the_front(folder: Path) -> None:
    with serving(folder, "--replicas", "2") as server:
        (host,), old = until(lambda: children(server.process.pid)), both(server)
        for pid in old:
            os.kill(pid, signal.SIGSTOP)  # it does not read that the front has ended the connection
        os.kill(host, signal.SIGKILL)
        until(lambda: not any(_runs(pid) for pid in old))
        until(lambda: children(server.process.pid) not in ([], [host]))
        assert complete(server, "a")["usage"]["completion_tokens"] == 16
        everything = [*children(server.process.pid), *both(server)]
        server.process.kill()
        until(lambda: not any(_runs(pid) for pid in everything))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_sighup_loads_the_model_that_is_there_now_and_sigterm_finishes_what_runs(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    link = tmp_path / "model"
    link.symlink_to(folder)
    expected = {str(path): LLM(str(path)).generate(["a"], SamplingParams(max_tokens=16, seed=3))[0].outputs[0].text
                for path in (folder, other)}  # fmt: skip
    with serving(link, "--replicas", "2") as server, ThreadPoolExecutor(4) as pool:
        assert complete(server, "a")["choices"][0]["text"] == expected[str(folder)]
        link.unlink()
        link.symlink_to(other)
        server.process.send_signal(signal.SIGHUP)
        found: list[str] = []
        end = time.monotonic() + TIMEOUT
        while expected[str(other)] not in found[-4:]:
            assert time.monotonic() < end, server.lines
            found += [c["choices"][0]["text"] for c in pool.map(lambda _: complete(server, "a"), range(4))]
        assert set(found) <= set(expected.values())
        until(lambda: any("was loaded again" in line for line in server.lines))
        assert complete(server, "a")["choices"][0]["text"] == expected[str(other)]
        until(lambda: len(children(server.process.pid)) == 1)
        waiting = pool.submit(complete, server, "a", max_tokens=200, ignore_eos=True)
        until(lambda: metric(server, "nanoinfer:num_requests_running{") > 0 or waiting.done())
        server.process.send_signal(signal.SIGTERM)
        assert waiting.result()["usage"]["completion_tokens"] == 200
        assert server.wait() == 0


@pytest.mark.slow
def test_ctrl_c_while_a_model_is_loaded_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanoinfer", "serve", "random:gpt2", "--replicas", "2", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        (host,) = until(lambda: children(process.pid))
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
        until(lambda: not _runs(host))
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.stderr.close()  # type: ignore[union-attr]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(["serve", "--port", "0", *arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["shakespeare", "shakespeare"],
            "the model shakespeare is given twice: use --replicas for several of one model",
        ),
        (
            ["shakespeare", "shakespeare-draft", "--served-model-name", "a"],
            "served_model_name names one model, and 2 are",
        ),
        (
            ["shakespeare", "--idle-unload", "9", "--prefix-cache-file", "a"],
            "prefix_cache_file='a' needs one process: leave it out, or replicas and idle_unload",
        ),
        (["shakespeare", "--replicas", "-1"], "replicas=-1 is not an integer in [1, 1024]"),
        (["shakespeare", "--replicas", "9", "--cores-per-replica", "999"], "is 8991 cores and this process has"),
        pytest.param(
            ["shakespeare", "--replicas", "2", "--engine", "dynamic"],
            "replicas=2 needs engine native, and the engine is",
            marks=pytest.mark.slow,
        ),
        pytest.param(["shakespeare", "nothing/there.gguf"], "nothing/there.gguf", marks=pytest.mark.slow),
    ],
)
def test_bad_options_are_one_line(capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, text = call(capfd, *arguments)
    assert (code, text.count("\n")) == (2, 1), text
    assert message in text


def test_adapters_of_replicas(folder: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", replace(TINY, block_size=512), seed=1)
    lora = LoRARequest("a", 1, str(path))
    llm = LLM(str(folder), enable_lora=True, engine="native")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with serving(folder, "--replicas", "2", "--lora-modules", f"a={path}") as server:
        for model, adapter in ((None, None), ("a", lora)):
            fields = {"model": model, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
            (expected,) = llm.generate("To be", params, lora_request=adapter)
            found = complete(server, "To be", **fields)
            assert (found["choices"][0]["text"], found["model"]) == (expected.outputs[0].text, model or folder.name)
