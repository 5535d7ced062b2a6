"""Measuring speculation: prompts of real text, the arithmetic, shared processes, and the suite's cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from helpers.models import CHARS, refuses
from nanoinfer.bench import model_folders
from nanoinfer.bench.backends.engines import _spread
from nanoinfer.bench.case import Case, Row, RunTimes, cut_prompt, make_requests, repeat_prompt, summarize
from nanoinfer.bench.results import add_speculation, add_speedups
from nanoinfer.bench.run import Plan, run
from nanoinfer.bench.suites import SUITES
from nanoinfer.bench.table import shape_name
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.presets import PRESETS

PLAIN = Case("native", "m", quantization="int8", workload="text", prompt_tokens=14, output_tokens=6)


def test_prompts_are_cut_or_repeated_with_edits() -> None:
    text = [list(range(100, 200)), list(range(300, 400))]
    assert cut_prompt(text, 3, 5) == [300, 301, 302, 303, 304]
    made = repeat_prompt(text, 0, 35)
    assert len(made) == 35
    assert made[:20] == list(range(100, 120))
    assert made[20:34] == list(range(100, 114))  # said before
    assert made[34] == 100 + 7 * 14  # the 15th is another
    work = make_requests(replace(PLAIN, batch=3), 1000, passages=text)
    assert [p[0] for p in work.prompts] == [100, 300, 100]
    assert work.output_tokens == [6, 6, 6]
    later = make_requests(replace(PLAIN, batch=2), 1000, seed=1, passages=[*text, list(range(500, 600))])
    assert [p[0] for p in later.prompts] == [500, 100]  # the passages after those of the first round


def test_passages_of_a_file_and_of_the_model_itself(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(CHARS * 20)
    model_folders.write_passages(tmp_path, str(tiny_folder), text)
    read = model_folders.read_passages(tmp_path)
    assert len(read) == model_folders.NUM_PASSAGES
    for p in read:
        assert [(b - a) % len(CHARS) for a, b in pairwise(p)] == [1] * (model_folders.PASSAGE_TOKENS - 1)
    model_folders.write_passages(tmp_path, str(tiny_folder), None)
    assert {len(p) for p in model_folders.read_passages(tmp_path)} == {model_folders.PASSAGE_TOKENS}
    assert model_folders.read_passages(tmp_path / "nowhere") == ()
    text.write_text("short")
    refuses(lambda: model_folders.write_passages(tmp_path, str(tiny_folder), text), "5 tokens", "give 512 or more")
    text.write_bytes(b"\xff")
    refuses(lambda: model_folders.write_passages(tmp_path, str(tiny_folder), text), "UTF-8")


def test_a_burst_arrives_evenly_since_the_last_token() -> None:
    assert _spread([1.0], 4.0, 3) == [2.0, 3.0, 4.0]
    assert _spread([], 2.0, 1) == [2.0]
    assert _spread([1.0], 2.0, 0) == []


def test_what_is_said_of_the_proposals() -> None:
    row = Row(replace(PLAIN, model="gpt2-xl", draft="gpt2"))
    made = {"num_accepted": 30, "num_rejected": 10, "num_verify_steps": 12, "draft_share": 0.25}
    add_speculation(row, made)
    assert (row.acceptance_percent, row.mean_accepted_length, row.draft_share_percent) == (75.0, 2.5, 25.0)
    nothing = Row(replace(row.case, draft="prompt-lookup"))
    add_speculation(nothing, dict.fromkeys(made, 0))
    assert (nothing.acceptance_percent, nothing.mean_accepted_length, nothing.draft_share_percent) == (None, None, 0.0)


def test_speedups_are_over_the_same_without_a_draft() -> None:
    def row(case: Case, seconds: float) -> Row:
        return Row(case, summarize([RunTimes(1, [[seconds / 2, seconds]])]))

    half = replace(PLAIN, dtype="bfloat16", quantization=None)
    rows = [row(PLAIN, 4.0), row(replace(PLAIN, draft="a"), 2.0), row(half, 6.0), row(replace(half, draft="a"), 2.0)]
    add_speedups(rows, "native")
    assert [r.speedup for r in rows] == [None, 2.0, 1.0, 3.0]


def test_speedups_of_drafts_are_medians_over_rounds_beside_each_other() -> None:
    """Passages differ in length of time: only runs of the same round are compared."""

    def row(case: Case, seconds: list[float]) -> Row:
        return Row(case, summarize([RunTimes(1, [[s / 2, s]]) for s in seconds]), round_sec=seconds)

    rows = [row(PLAIN, [2.0, 8.0, 3.0, 9.0]), row(replace(PLAIN, draft="a"), [1.0, 8.0, 2.0])]
    add_speedups(rows, "native")
    assert (rows[1].speedup, rows[1].speedup_min, rows[1].speedup_max) == (1.5, 1.0, 2.0)
    assert rows[0].speedup_min is None


def test_names_of_cases() -> None:
    drafted = replace(PLAIN, draft="gpt2", speculate_k=4, speculate_rule="reject")
    assert drafted.label == "native int8 + gpt2 k=4 reject"
    assert drafted.plain == PLAIN
    assert shape_name(replace(PLAIN, sampler="sampled")) == "batch 1, text sampled 14+6 tokens"
    refuses(lambda: replace(PLAIN, draft="gpt2", speculate_k="many"), "speculate_k='many'")


@pytest.mark.parametrize("quick", [False, True])
def test_the_suite_has_every_case_once_beside_its_plain_one(quick: bool) -> None:
    suite = SUITES["speculative"]
    cases = suite.cases(suite.model, PRESETS["gpt2-large"], list(ENGINES), quick)
    assert len(set(cases)) == len(cases)
    assert {c.plain for c in cases} <= set(cases)
    assert len([s for s, _ in groupby(c.shape for c in cases)]) == len({c.shape for c in cases})  # interleaved
    hard = {c.draft for c in cases if c.sampler == "hot" and c.speculate_k == "auto" and c.draft}
    assert hard == {c.draft for c in cases if c.draft}  # each draft on prompts that it cannot predict
    assert (suite.options.rounds, suite.options.vary_prompts) == (6, True)
    assert max(c.batch for c in cases) == (1 if quick else 32)
    if not quick:
        ks = {c.speculate_k for c in cases if c.draft == "wide:shakespeare-draft:gpt2" and c.batch == 1}
        assert ks == {2, 4, 8, "auto"}
        assert {(c.dtype, c.quantization) for c in cases} == {
            ("float32", "int8"), ("bfloat16", None), ("float32", None),
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ceiling")
def test_a_run_with_drafts_shares_a_process_and_says_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    plan = Plan(
        model=str(tiny_folder), engine=("static",), batch=(2,), prompt_tokens=(8,), output_tokens=(12,), rounds=1,
        draft="prompt-lookup", speculate_k=("2", "auto"), workload="copy", output=tmp_path / "r.json",
    )  # fmt: skip
    (made,), _ = run(plan, "test", log=lambda _: None)
    assert [r.case.speculate_k for r in made.rows] == ["auto", 2, "auto"]
    assert [r.error for r in made.rows] == [None] * 3
    assert [r.same_tokens for r in made.rows] == [True] * 3
    assert made.rows[1].speedup is not None
    failing, _ = run(replace(plan, draft="self:9", speculate_k=()), "test", log=lambda _: None)
    assert [r.error is None for r in failing[0].rows] == [True, False]
    assert "1 to 1" in str(failing[0].rows[1].error)


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    refuses(lambda: Plan(suite=("ladder",), draft="gpt2"), "--suite fixes its own cases")
    refuses(lambda: Plan(suite=("ladder", "speculative")), "speculative", "--model")
    refuses(lambda: Plan(text=tmp_path / "nothing.txt"), "nothing.txt", "no such file")
    assert Plan(suite=("speculative",)).model_of("speculative") == "wide:shakespeare:gpt2-large"
    assert Plan(suite=("ladder",)).model_of("ladder") == "random:gpt2"
