"""`nanoinfer.ray.Generator` in a pipeline of a user's own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nanoinfer.ray
from helpers.models import make_folder, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.batch.records import derive_seed
from nanoinfer.batch.run import BatchOptions
from nanoinfer.config import LLMConfig
from nanoinfer.ray.connect import check_versions, connected, versions
from nanoinfer.ray.pool import Job, LineActor

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # a cluster takes seconds to start

PARAMS = {"max_tokens": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def _connected(nodes: Any) -> Iterator[None]:
    with connected(nodes.address):
        yield


def generate(rows: list[Any], model: str, blocks: int, **arguments: Any) -> list[Any]:
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    dataset = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        nanoinfer.ray.Generator,
        fn_constructor_kwargs={"model": model, "sampling_params": PARAMS, "engine": "native", **arguments},
        compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=4),
    )
    # A block without a temperature has no such column; in another, a missing one is NaN.
    return [{name: value for name, value in row.items() if value == value} for row in dataset.take_all()]


@pytest.mark.usefixtures("_connected")
def test_rows_get_the_text_of_one_machine_whatever_their_batch(model: str) -> None:
    rows: list[Any] = [{"prompt": f"row {chr(97 + i % 26)}", "number": i + 5, "title": f"t{i}"} for i in range(30)]
    rows[7]["temperature"] = 0.0
    rows[8]["n"] = 2
    one, many = (generate(rows, model, blocks, number="number", seed=4) for blocks in (1, 8))
    assert one == many
    llm = LLM(model, engine="native")
    for row, made in zip(rows, one, strict=True):
        assert {name: made[name] for name in ("prompt", "number", "title")} == {
            name: row[name] for name in ("prompt", "number", "title")
        }
        seed = derive_seed(4, row["number"], 0)
        given = {name: row[name] for name in ("temperature", "n") if name in row}
        expected = llm.generate(row["prompt"], SamplingParams(**PARAMS, seed=seed, **given))[0]
        assert made["seed"] == seed
        assert made["error"] is None
        assert [o["text"] for o in made["outputs"]] == [o.text for o in expected.outputs]


@pytest.mark.usefixtures("_connected")
def test_openai_rows_embeddings_and_rows_that_are_bad(model: str) -> None:
    bodies = [("/v1/completions", {"prompt": "ab", "max_tokens": 2}), ("/v1/embeddings", {"input": ["ab", "c"]}),
              ("/v1/nothing", {})]  # fmt: skip
    rows = [{"custom_id": str(i), "method": "POST", "url": u, "body": json.dumps(b)} for i, (u, b) in enumerate(bodies)]
    made = generate(rows, model, 1)
    responses = [json.loads(row["response"]) for row in made]
    assert [response["status_code"] for response in responses] == [200, 200, 400]
    assert responses[0]["body"]["usage"]["completion_tokens"] == 2
    assert [len(item["embedding"]) for item in responses[1]["body"]["data"]] == [16, 16]
    assert "url='/v1/nothing'" in responses[2]["body"]["error"]["message"]


@pytest.mark.usefixtures("_connected")
def test_versions_that_differ_are_a_fault_that_names_the_node(model: str) -> None:
    check_versions(versions())
    refuses(lambda: check_versions({**versions(), "ray": "1.0"}), "it has ray 2.", "runs with ray 1.0")
    job = Job(LLMConfig(model), BatchOptions(SamplingParams()), ())
    fault = asyncio.run(LineActor(job, {**versions(), "nanoinfer": "9"}).fault())
    assert "node 127.0.0.1 (" in fault
    assert "it has nanoinfer " in fault
    assert "runs with nanoinfer 9" in fault


def test_nothing_of_ray_is_imported_without_the_flag(tmp_path: Path) -> None:
    code = "import sys, nanoinfer.ray, nanoinfer.cli.batch; print({'ray', 'pyarrow'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    def connect() -> None:
        with connected("local"):
            pass

    refuses(connect, "ray is not installed: pip install '.[cluster]'")
    refuses(lambda: nanoinfer.ray.Generator(model), "ray is not installed: pip install '.[cluster]'")
