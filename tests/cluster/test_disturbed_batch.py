"""Workers, nodes and the driver are killed at random moments; the output has the bytes of the undisturbed run.

`make test-cluster` runs all seeds; test_batch_on_ray.py kills workers and the driver once each.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.models import command, one_thread
from helpers.ray_cluster import NODE, WAIT_SEC, cluster, grows, kill, start, workers

pytest.importorskip("ray")
pytestmark = pytest.mark.nightly
OPTIONS = ("-m", "shakespeare", "--max-tokens", "12", "--seed", "1")
SLOWLY = ("--max-num-seqs", "2")  # so that something is left to do when something dies
NUM_KILLS = 8
PROGRESS = re.compile(r"nanoinfer: batch: [\d,]+ of [\d,]+(, [\d:]+ left)?")  # a line each 30 s
CASES = [(0, 400), *((seed, 2000) for seed in range(1, 11))]


def write_prompts(path: Path, count: int) -> None:
    text = ("To be, or not to be", "O Romeo, Romeo!", "Now is the winter", "A horse! A horse!", "If music be")
    lines = [{"id": i, "prompt": f"{text[i % 5]} {i}", "max_tokens": 1 + i % 24} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reports(folder: Path) -> list[str]:
    """Return what the drivers wrote to stderr, without their progress."""
    return [line for line in (folder / "err").read_text().splitlines() if not PROGRESS.fullmatch(line)]


def run_alone(folder: Path, num_prompts: int) -> bytes:
    """Write prompts, and return the output of one machine."""
    write_prompts(folder / "in.jsonl", num_prompts)
    one = command("batch", "in.jsonl", "one.jsonl", *OPTIONS)
    subprocess.run(one, cwd=folder, env=one_thread(), check=True, timeout=WAIT_SEC, stdin=subprocess.DEVNULL)
    return (folder / "one.jsonl").read_bytes()


def disturb(made: Any, driver: subprocess.Popen[str], generator: random.Random) -> str:
    """Kill a worker, a node or the driver; return which."""
    what = generator.choice(("worker", "worker", "node", "driver"))
    if what == "driver":
        kill(driver.pid)
        driver.wait(WAIT_SEC)
    elif what == "node":
        made.remove_node(generator.choice(sorted(made.worker_nodes, key=lambda n: n.node_id)), allow_graceful=False)
        made.add_node(**NODE, num_cpus=1)
    elif found := workers(made):
        kill(generator.choice(found))
    return what


@pytest.mark.parametrize(("seed", "num_prompts"), CASES)
def test_output_of_a_disturbed_batch(tmp_path: Path, seed: int, num_prompts: int) -> None:
    undisturbed = run_alone(tmp_path, num_prompts)
    generator, done = random.Random(seed), []
    with cluster(1, 1, 1) as made:
        driver = start(tmp_path, "in.jsonl", "out.jsonl", *OPTIONS, *SLOWLY, address=made.address)
        try:
            while driver.poll() is None:
                if len(done) < NUM_KILLS:
                    with suppress(subprocess.TimeoutExpired):  # a random moment
                        driver.wait(generator.uniform(0.5, 5))
                    if driver.poll() is None:
                        done.append(disturb(made, driver, generator))
                        if done[-1] == "driver":
                            driver = start(tmp_path, "in.jsonl", "out.jsonl", *OPTIONS, *SLOWLY, address=made.address)
                else:
                    driver.wait(WAIT_SEC)
        finally:
            kill(driver.pid)
            driver.wait(WAIT_SEC)
    lines = reports(tmp_path)
    assert driver.returncode == 0, (done, lines)
    assert [line for line in lines if not line.startswith("nanoinfer: out.jsonl continues after ")] == []
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed, done


def test_a_node_that_is_gone_for_good(tmp_path: Path) -> None:
    """The other has no CPUs for its actor: the rest goes on without it."""
    undisturbed = run_alone(tmp_path, 1500)
    with cluster(1, 1) as made:
        driver = start(tmp_path, "in.jsonl", "out.jsonl", *OPTIONS, *SLOWLY[:1], 1, address=made.address)
        try:
            grows(tmp_path / "out.jsonl", 0, driver)
            made.remove_node(*made.worker_nodes, allow_graceful=False)
            assert driver.wait(WAIT_SEC) == 0, (tmp_path / "err").read_text()
        finally:
            kill(driver.pid)
    assert reports(tmp_path) == []
    assert (tmp_path / "out.jsonl").read_bytes() == undisturbed
