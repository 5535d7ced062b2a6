"""The arithmetic of the benchmark: statistics, extrapolation, percentages and the results file. Plain numbers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from helpers.models import refuses
from nanoinfer.bench import results
from nanoinfer.bench.case import Case, Row, RunTimes, is_steady, make_requests, naive_token_times, summarize
from nanoinfer.bench.results import Results, add_speedups, fill_in
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.ceilings import Ceiling

CEILING = Ceiling("here", 50e9, {"float32": 0.25e12, "bfloat16": 1e12}, "a test")


RUN = RunTimes(20, [[0.5, 0.6, 0.8], [0.7, 0.8, 1.0]])


def test_figures_of_one_run_by_hand() -> None:
    assert RUN.ttft_sec == pytest.approx(0.6)
    assert RUN.gaps_sec == pytest.approx([0.1, 0.2, 0.1, 0.2])
    assert RUN.worst_gap_sec == pytest.approx(0.2)
    assert RunTimes(5, [[0.5]]).worst_gap_sec is None
    assert RUN.total_sec == 1.0
    assert RUN.decode_tokens_per_sec == pytest.approx(1.5 / 0.1)
    assert RUN.prefill_tokens_per_sec == pytest.approx(20 / 0.7)
    assert RunTimes(5, [[0.5]]).decode_tokens_per_sec is None


def test_rounds_are_medians_and_their_spread() -> None:
    slow = RunTimes(20, [[t * 2 for t in times] for times in RUN.arrivals])
    slower = RunTimes(20, [[t * 3 for t in times] for times in RUN.arrivals])
    f = summarize([slower, RUN, slow])
    assert (f.rounds, f.total_sec, f.spread_percent) == (3, 2.0, 100.0)
    assert f.ttft_sec == pytest.approx(1.2)
    assert f.decode_tokens_per_sec == pytest.approx(7.5)
    assert f.output_tokens_per_sec == pytest.approx(3.0)
    assert f.tpot_p99_sec == pytest.approx(0.6)
    assert f.worst_gap_sec == pytest.approx(0.4)  # of 0.6, 0.2, 0.4
    one = summarize([RunTimes(3, [[0.2]])])
    assert (one.tpot_sec, one.decode_tokens_per_sec, one.output_tokens_per_sec) == (None, None, 5.0)
    assert one.worst_gap_sec is None


def test_percentiles_are_over_all_gaps_and_linear_between_them() -> None:
    gaps = [4.0, 1.0, 3.0, 2.0]
    f = summarize([RunTimes(1, [list(accumulate([0.5, *gaps[:2]])), list(accumulate([0.5, *gaps[2:]]))])])
    assert (f.tpot_sec, f.tpot_p90_sec, f.tpot_p99_sec) == (2.5, pytest.approx(3.7), pytest.approx(3.97))


def test_steady_is_two_in_a_row_within_a_tenth() -> None:
    assert not is_steady([1.0])
    assert not is_steady([3.0, 1.0])
    assert is_steady([3.0, 1.0, 1.09])


def test_naive_times_are_integrated_from_a_few_lengths() -> None:
    asked = []

    def step_sec(length: int) -> float:
        asked.append(length)
        return length / 100  # linear: a few lengths say it all

    times = naive_token_times(step_sec, 10, 50, 40, num_lengths=4)
    assert asked == [10, 20, 30, 40]
    assert times == pytest.approx([min(10 + i, 40) / 100 for i in range(50)])
    asked.clear()
    assert naive_token_times(step_sec, 5, 1, 40, num_lengths=7) == [0.05]
    assert naive_token_times(step_sec, 1, 3, 40, num_lengths=7) == [0.01, 0.02, 0.03]
    assert asked == [5, 1, 2, 3]


def test_bytes_flops_and_shares_by_hand() -> None:
    """GPT-2 at batch 1 reads 494 MB in float32: 50 tokens/s are 24.7 GB/s, half of 50."""
    figures = replace(summarize([RUN]), decode_tokens_per_sec=50.0)
    row = Row(Case("static", "gpt2", prompt_tokens=10, output_tokens=2), figures)
    fill_in(row, PRESETS["gpt2"], CEILING)
    assert row.bytes_per_token == pytest.approx(494e6, rel=0.01)
    assert row.mbu_percent == pytest.approx(100 * row.bytes_per_token * 50 / 50e9)
    assert row.predicted_tokens_per_sec == pytest.approx(50e9 / row.bytes_per_token)
    half = Row(replace(row.case, dtype="bfloat16"), figures)
    fill_in(half, PRESETS["gpt2"], CEILING)
    assert half.bytes_per_token == pytest.approx(row.bytes_per_token / 2)
    q8 = Row(replace(row.case, backend="llama.cpp", quantization="Q8_0"), figures)
    fill_in(q8, PRESETS["gpt2"], CEILING)
    assert q8.bytes_per_token == pytest.approx(124e6 * 8.5 / 8, rel=0.01)  # a 16-bit scale for 32 weights
    values = 12 * 2 * 768 * 11  # the keys and values of 11 tokens, in float16
    assert q8.bytes_per_token == pytest.approx(q8.weight_bytes + 2 * values, abs=0)
    ours = Row(replace(q8.case, backend="native"), figures)
    fill_in(ours, PRESETS["gpt2"], CEILING)
    assert ours.bytes_per_token == pytest.approx(q8.weight_bytes + 2 * values, abs=0)  # bfloat16
    unknown = Row(replace(row.case, quantization="IQ1_M"), figures)
    fill_in(unknown, PRESETS["gpt2"], CEILING)
    assert (unknown.bytes_per_token, unknown.mbu_percent) == (None, None)


def test_speedups_are_over_the_same_shape_and_dtype() -> None:
    fast = replace(summarize([RUN]), output_tokens_per_sec=30.0)
    slow = replace(fast, output_tokens_per_sec=10.0)
    rows = [
        Row(Case("recompute", "m"), slow),
        Row(Case("static", "m"), fast),
        Row(Case("static", "m", "bfloat16"), fast),
        Row(Case("static", "m", batch=4), fast),
        Row(Case("dynamic", "m"), error="broken"),
    ]
    add_speedups(rows, "recompute")
    assert [r.speedup for r in rows] == [1.0, 3.0, None, None, None]


def test_speedups_over_the_best_peer_are_over_any_format_of_a_shape() -> None:
    figures = summarize([RUN])

    def row(backend: str, quantization: str | None, speed: float, **changes: object) -> Row:
        case = replace(Case(backend, "m", quantization=quantization), **changes)  # type: ignore[arg-type]
        return Row(case, replace(figures, output_tokens_per_sec=speed), round_sec=[1 / speed])

    rows = [
        row("native", "int8", 50.0), row("llama.cpp", "Q8_0", 5.0), row("openvino", "int8", 10.0),
        row("llama.cpp", None, 4.0, dtype="bfloat16"), row("native", "int8", 20.0, batch=4),
        row("native", "int8", 80.0, batch=4, prefix_caching=True), Row(Case("static", "m"), error="broken"),
    ]  # fmt: skip
    add_speedups(rows, "the best peer")
    assert [r.speedup for r in rows] == [5.0, 0.5, 1.0, 0.4, None, 4.0, None]


def test_work_is_the_same_for_everyone_and_in_range() -> None:
    case = Case("a", "m", batch=3, prompt_tokens=5, output_tokens=7)
    work = make_requests(case, 100)
    assert work == make_requests(replace(case, backend="b"), 100)
    assert [len(p) for p in work.prompts] == [5, 5, 5]
    assert work.output_tokens == [7, 7, 7]
    assert max(t for p in work.prompts for t in p) < 100
    mixed = make_requests(Case("a", "m", batch=64, prompt_tokens=256, output_tokens=256, workload="mixed"), 100)
    sizes = [*map(len, mixed.prompts), *mixed.output_tokens]
    assert 16 <= min(sizes) < 40 < 230 < max(sizes) <= 256


def test_a_mix_is_no_longer_than_its_case() -> None:
    work = make_requests(Case("a", "m", batch=64, prompt_tokens=20, output_tokens=30, workload="mixed"), 100)
    assert (max(map(len, work.prompts)), max(work.output_tokens)) == (20, 30)
    assert min(work.output_tokens) == 16


def test_prompts_of_a_prefix_differ_at_their_end() -> None:
    case = Case("a", "m", batch=3, prompt_tokens=50, output_tokens=4, workload="prefix")
    work = make_requests(case, 1000)
    assert [len(p) for p in work.prompts] == [50] * 3
    assert {tuple(p[:30]) for p in work.prompts} == {tuple(work.prompts[0][:30])}
    assert len({p[30] for p in work.prompts}) == 3
    assert make_requests(replace(case, batch=2), 1000).prompts == work.prompts[:2]  # what the check compares


def test_a_long_prompt_arrives_last() -> None:
    case = Case("a", "m", batch=4, prompt_tokens=50, output_tokens=6, workload="arrival")
    work = make_requests(case, 1000)
    assert [len(p) for p in work.prompts] == [32, 32, 32, 50]
    assert (work.output_tokens, work.num_late) == ([6, 6, 6, 1], 1)
    assert make_requests(replace(case, workload="uniform"), 1000).num_late == 0
    refuses(lambda: replace(case, batch=1), "batch=1", "[2, ")


def test_names_of_settings_and_the_case_without_them() -> None:
    plain = Case("native", "m", quantization="int8", workload="prefix")
    shared = replace(plain, prefix_caching=True)
    small, timed = replace(plain, max_num_batched_tokens=64), replace(plain, target_step_ms=20)
    assert [c.label.partition(" + ")[2] for c in (plain, shared, small, timed)] == [
        "", "prefix cache", "steps of 64", "steps of 20 ms",
    ]  # fmt: skip
    assert {c.plain for c in (plain, shared, small, timed)} == {plain}
    assert len({c.loaded for c in (plain, shared, small, timed)}) == 4  # each has a process of its own
    assert replace(shared, draft="d").loaded == shared


def example() -> Results:
    row = Row(Case("static", "gpt2"), summarize([RUN]), True, 1 << 20, round_sec=[1.0])
    failed = Row(Case("llama.cpp", "gpt2", quantization="Q8_0"), error="llama.cpp is not installed: pip install ...")
    ceiling = {"read_bytes_per_sec": 50e9, "flops_per_sec": {"float32": 1e12}}
    return Results(
        "ladder", "recompute", "2026-01-01", None, "nanoinfer bench", {"cores": 2}, {"torch": "2"}, ceiling,
        [row, failed],
    )  # fmt: skip


def test_a_model_in_the_caches_has_the_ceiling_of_its_bytes() -> None:
    """int8 at batch 1 reads 125 MB, which are read at 60 GB/s; with the KV cache of 64 sequences 194 MB, at 33."""
    by_bytes = {1 << 20: 90e9, 125_000_000: 60e9, 200_000_000: 32e9, 1 << 30: 30e9}
    ceiling = replace(CEILING, bandwidth_bytes_per_sec=30e9, bandwidth_by_bytes=by_bytes)
    figures = replace(summarize([RUN]), decode_tokens_per_sec=400.0)
    rows = [Row(Case("native", "gpt2", quantization="int8", batch=b, prompt_tokens=24), figures) for b in (1, 64)]
    rows.append(Row(Case("native", "gpt2"), figures))
    for row in rows:
        fill_in(row, PRESETS["gpt2"], ceiling)
        num_bytes = row.bytes_per_token * row.case.batch
        assert row.mbu_percent == pytest.approx(100 * num_bytes * 400 / row.case.batch / ceiling.bandwidth(num_bytes))
    speeds = [ceiling.bandwidth(row.bytes_per_token * row.case.batch) / 1e9 for row in rows]
    assert speeds == [pytest.approx(59.3, rel=0.01), pytest.approx(32.7, rel=0.01), pytest.approx(30.5, rel=0.01)]
    assert rows[0].predicted_tokens_per_sec == pytest.approx(speeds[0] * 1e9 / rows[0].bytes_per_token)


def test_results_survive_the_file(tmp_path: Path) -> None:
    text = results.to_json(example())
    assert json.loads(text)["schema"] == "nanoinfer-bench/2"
    again = results.from_json(text, "here")
    assert results.to_json(again) == text
    assert again.failed == [example().rows[1]]
    old, new = (dataclasses.asdict(r.rows[0].figures) for r in (example(), again))  # type: ignore[arg-type]
    assert new == {name: pytest.approx(value, rel=1e-3) for name, value in old.items()}
    assert replace(again.rows[0], figures=None) == replace(example().rows[0], figures=None)
    (tmp_path / "r.json").write_text(text)
    assert results.read(tmp_path / "r.json") == again
    refuses(lambda: results.read(tmp_path / "no.json"), "no.json cannot be read")


def test_the_file_holds_a_line_for_each_row_and_no_defaults() -> None:
    lines = results.to_json(example()).splitlines()
    assert len(lines) == 4
    assert lines[2] == (
        '{"case":{"backend":"llama.cpp","model":"gpt2","quantization":"Q8_0"},'
        '"error":"llama.cpp is not installed: pip install ..."}'
    )


class Batch:
    """A batch of sequences that a fake clock steps: prompts in chunks, every decoding sequence a token a step."""

    def __init__(self, num_seqs: int, prompts_a_step: int, num_tokens: int, prompt_sec: float, step_sec: float) -> None:
        now, self.arrivals = 0.0, [[] for _ in range(num_seqs)]  # type: list[list[float]]
        started = 0
        while min(map(len, self.arrivals)) < num_tokens:
            begun = min(num_seqs, started + prompts_a_step)
            now += step_sec + prompt_sec * (begun - started)
            for i, times in enumerate(self.arrivals[:begun]):
                if len(times) < num_tokens:
                    times.append(now + 1e-6 * i)  # a step's tokens are read one after the other
            started = begun


def test_decoding_is_measured_while_all_sequences_decode() -> None:
    together = RunTimes(8, Batch(8, 8, 16, prompt_sec=1.0, step_sec=0.25).arrivals)
    assert together.decode_tokens_per_sec == pytest.approx(8 / 0.25, rel=1e-3)
    staggered = RunTimes(8, Batch(8, 1, 16, prompt_sec=1.0, step_sec=0.25).arrivals)
    assert staggered.decode_tokens_per_sec == pytest.approx(8 / 0.25, rel=1e-3)


def test_decoding_is_unknown_where_sequences_never_decode_together() -> None:
    apart = RunTimes(8, Batch(8, 1, 4, prompt_sec=1.0, step_sec=0.25).arrivals)
    assert apart.decode_tokens_per_sec is None
    assert summarize([apart]).decode_tokens_per_sec is None
    assert RunTimes(8, [[1.0]]).decode_tokens_per_sec is None


BY_SIZE = {"read_bytes_per_sec": 1, "flops_per_sec": {}}


def broken(**changes: object) -> str:
    return json.dumps(json.loads(results.to_json(example())) | changes)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is no JSON"),
        ("[]", "schema None"),
        (broken(schema="nanoinfer-bench/9"), "schema 'nanoinfer-bench/9', not 'nanoinfer-bench/2'"),
        (broken(extra=1), "unexpected keyword argument 'extra'"),
        (broken(suite=None), "suite is None, a NoneType"),
        (json.dumps({"schema": "nanoinfer-bench/2", "rows": []}), "missing 8 required positional arguments: 'suite'"),
        (broken(rows=3), "does not follow"),
        (broken(rows=[{}]), "does not follow"),
        (broken(rows=[{"case": {"backend": "a", "model": "m", "batch": 0}, "figures": None}]), "batch=0"),
        (broken(rows=[{"case": {"backend": "a", "model": "m"}, "speedup": "x"}]), "speedup is 'x', a str"),
        ("[" * 100_000, "is no JSON"),
        (broken(ceiling=3), "ceiling is 3, a int"),
        (broken(ceiling={"read_bytes_per_sec": 1, "flops_per_sec": {"float32": "x"}}), "'str'"),
        (broken(ceiling={"read_bytes_per_sec": 0, "flops_per_sec": {}}), "ceiling: a speed is 0"),
        (broken(ceiling=BY_SIZE | {"read_bytes_per_sec_by_size": 3}), "'int' object is not iterable"),
        (broken(ceiling=BY_SIZE | {"read_bytes_per_sec_by_size": {"x": 1}}), "invalid literal for int"),
        (broken(ceiling=BY_SIZE | {"read_bytes_per_sec_by_size": {"0": 1}}), "ceiling: a size is 0"),
        (broken(ceiling=BY_SIZE | {"read_bytes_per_sec_by_size": {"1": -1}}), "ceiling: a speed is -1"),
        (broken(rows=[{"case": {"backend": 1, "model": "m"}}]), "backend is 1, a int"),
        (broken(rows=[{"case": {"backend": "a", "model": "m"}, "note": "a\x1b[2J"}]), r"note is 'a\x1b[2J', a str"),
        (broken(rows=[{"case": {"backend": "a", "model": "m"}, "speedup": 10**400}]), "speedup is 1000"),
        (broken(rows=[{"case": {"backend": "a", "model": "m", "\x1b[31m": 1}}]), r"'\x1b[31m'"),
    ],
)
def test_a_file_of_another_kind_is_refused(text: str, words: str) -> None:
    refuses(lambda: results.from_json(text, "r.json"), "r.json", words)
