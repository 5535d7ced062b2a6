"""The recording of a generation is that of what was generated, and its page holds it without anything from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.models import Run
from nanoinfer import LLM, SamplingParams
from nanoinfer.explain.record import Recording, page, record
from nanoinfer.roofline.ceilings import Ceiling

PROMPTS = ["O Romeo,", "O Romeo, what is your name, my lord? I would not", "First Citizen: speak"]
CEILING = Ceiling("none", 1e9, {"float32": 1e9}, "invented", 1e9)


def outputs(recording: Recording) -> list[list[int]]:
    """Return the tokens of each sequence."""
    return [
        [t for step in recording.steps for row in step.rows if row.sequence == i for t in row.tokens]
        for i in range(len(recording.sequences))
    ]


@pytest.mark.parametrize("engine", ["native", "paged", "static"])
@pytest.mark.parametrize(
    "options", [{}, {"draft": "shakespeare-draft"}, {"max_num_seqs": 2, "max_num_batched_tokens": 8}]
)
@pytest.mark.slow_if(lambda engine, options: engine != "native" and options)
def test_a_recording_has_the_tokens_that_are_generated_without_it(engine: str, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=12, n=2, temperature=0.8, seed=1)
    llm = LLM("shakespeare", engine=engine, dtype="float32", device="cpu", **options)
    recording = record(llm, PROMPTS, params, CEILING)
    again = llm.generate(PROMPTS, params)
    assert outputs(recording) == [list(sample.token_ids) for output in again for sample in output.outputs]
    assert recording.sequences == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for step in recording.steps:
        for row in step.rows:
            assert [t in dict(c) for t, c in zip(row.tokens, row.candidates, strict=True)] == [True] * len(row.tokens)
        assert step.limit_sec == max(step.num_bytes, step.flops) / 1e9


def test_the_tables_are_those_of_the_engine() -> None:
    llm = LLM("shakespeare", engine="paged", dtype="float32", device="cpu")
    tables: list[dict[str, list[int]]] = []
    step = llm.core.step

    def keep(until: Any = None) -> Any:
        deltas = step(until)
        numbers = {s.handle: s.sample_index for s in llm.core.scheduler.running}
        own = {h: llm.engine._pool.table(h) for h in llm.engine.handles}  # type: ignore[attr-defined]
        tables.append({str(numbers.get(h, f"kept {h}")): list(t) for h, t in own.items()})
        return deltas

    llm.core.step = keep  # type: ignore[method-assign]
    recording = record(llm, [PROMPTS[1]], SamplingParams(max_tokens=24, n=3, temperature=1, seed=2))
    assert [s.tables for s in recording.steps] == tables
    assert sum(len(s.copied) for s in recording.steps) == 2  # two of three samples copy the last block of the prompt


def test_each_sequence_runs_waits_or_has_ended_in_a_step_with_few_blocks() -> None:
    llm = LLM("shakespeare", engine="paged", device="cpu", max_model_len=64, kv_cache_memory=8 * 196_608)
    prompts = [
        "O Romeo, Romeo! wherefore art thou Romeo?",
        "To be",
        "First Citizen: " * 5,
        "What say you, my lord? " * 2,
    ]
    recording = record(llm, prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    assert recording.num_blocks == 8
    num_tokens = [0] * 4
    for step in recording.steps:
        unfinished = {i for i in range(4) if num_tokens[i] < 24}
        assert {row.sequence for row in step.rows} | {*step.waiting} == unfinished
        assert {*step.preempted} <= {*step.waiting}
        for row in step.rows:
            num_tokens[row.sequence] += len(row.tokens)
    assert sum(len(step.preempted) for step in recording.steps) > 0


def test_the_page_loads_nothing_and_escapes_what_it_shows() -> None:
    llm = LLM("shakespeare", engine="native")
    html = page(record(llm, ["</script><b>"], SamplingParams(max_tokens=4, temperature=0)))
    data = html.partition('id="recording">')[2].partition("</script>")[0]
    assert "".join(json.loads(data)["texts"][str(t)] for t in json.loads(data)["prompts"][0]) == "</script><b>"
    assert "default-src 'none'" in html
    assert "src=" not in html.replace("-src=", "")


def test_the_command_writes_a_page(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "page.html"
    code, out, _ = run("explain", "O Romeo,", "-o", path, "--max-tokens", "3", "--device-limits", "t4")
    assert (code, out) == (0, f"{path}: 3 steps\n")
    assert path.read_text().startswith("<!doctype html>")
