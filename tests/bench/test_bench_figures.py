"""The benchmark's figures and tables: what they show of the rows, and what they do with failed or missing data."""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from helpers.environment import ROOT
from helpers.models import refuses
from nanoinfer.bench import table
from nanoinfer.bench.case import BITS, DASH, Case, Figures, Row, digits
from nanoinfer.bench.figures import COLORS, GREY, MAX_FIGURES, MAX_LINES, Figure, figures, write_figures
from nanoinfer.bench.results import Results, read
from nanoinfer.bench.suites import SUITES
from nanoinfer.errors import missing_extra

pytest.importorskip("vl_convert", reason="figures are drawn with it")

SPEED = {"recompute": 10.0, "dynamic": 25.0, "static": 37.5}


def make_row(backend: str, batch: int = 1, speed: float | None = None, **case: Any) -> Row:
    rate = batch * (speed or SPEED.get(backend, 20.0))
    made = Figures(3, 0.0123 * batch, 0.031, 0.0345, 0.0412, rate, 812.3, 0.9 * rate, 2.75, 4.56, 0.5)
    known: dict[str, Any] = {
        "same_tokens": True, "peak_memory_bytes": 987_000_000, "mbu_percent": 44.4,
        "predicted_tokens_per_sec": 65.4 * batch, "speedup": rate / batch / 10,
    }  # fmt: skip
    return Row(Case(backend, "random:gpt2", batch=batch, **({"output_tokens": 40} | case)), made, **known)


def make_results(rows: list[Row], suite: str = "ladder") -> Results:
    ceiling = {"read_bytes_per_sec": 32.5e9, "flops_per_sec": {"float32": 0.33e12, "bfloat16": 2.1e12}}
    return Results(suite, "recompute", "2026-11-21", "abc1234", "nanoinfer bench", {"cores": 2}, {}, ceiling, rows)


def full_results() -> Results:
    """Three engines at four batch sizes, and a failure."""
    rows = [make_row(who, batch) for batch in (1, 2, 8, 64) for who in SPEED]
    return make_results([*rows, Row(Case("llama.cpp", "random:gpt2", output_tokens=40), error="the worker died")])


def records(figure: Figure, name: str = "records") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = figure.spec["datasets"].get(name, [])
    return found


def test_a_swept_size_is_lines_with_the_ceilings() -> None:
    rows = full_results().rows  # a backend without a cache does not move the ceiling
    rows = [replace(r, predicted_tokens_per_sec=1e6) if r.case.backend == "recompute" else r for r in rows]
    (figure,) = figures(make_results(rows))
    found = {(r["backend"], r["x"]): r["y"] for r in records(figure)}
    assert found == {(f"{who} float32", b): speed * b for who, speed in SPEED.items() for b in (1, 2, 8, 64)}
    limits = [(r["format"], r["x"], r["y"]) for r in records(figure, "ceilings")]
    assert limits == [("float32", b, pytest.approx(65.4 * b)) for b in (1, 2, 8, 64)]
    assert [r["format"] for r in records(figure, "names")] == ["ceiling float32"]
    x, y = figure.spec["encoding"]["x"], figure.spec["encoding"]["y"]
    assert (x["axis"]["values"], x["scale"]["domain"]) == ([1, 2, 8, 64], [1, 64])
    assert y["axis"]["values"] == [10, 20, 50, 100, 200, 500, 1000, 2000]


def test_one_size_is_bars_with_ceilings_as_ticks() -> None:
    (figure,) = figures(make_results([make_row(who, 4) for who in SPEED]))
    assert [(r["backend"], r["label"]) for r in records(figure)] == [
        ("static float32", "150"), ("dynamic float32", "100"), ("recompute float32", "40.0"),
    ]  # fmt: skip
    assert [r["y"] for r in records(figure, "ceilings")] == [pytest.approx(261.6)] * 2
    far = [replace(make_row(who, 4), predicted_tokens_per_sec=1e5) for who in SPEED]
    assert not records(figures(make_results(far))[0], "ceilings")


def test_more_backends_than_lines_can_tell_apart_are_bars_by_batch() -> None:
    rows = [make_row(f"peer{i}", batch) for batch in (1, 8, 64) for i in range(MAX_LINES + 1)]
    found = figures(make_results(rows))
    assert [{r["y"] for r in records(f)} for f in found] == [{20.0}, {160.0}, {1280.0}]
    assert [len(records(f)) for f in found] == [9, 9, 9]


def test_each_kind_of_row_is_judged_by_its_own_measure() -> None:
    def names(**case: Any) -> list[str]:
        rows = [make_row(who, case.get("batch", 1), **{k: v for k, v in case.items() if k != "batch"}) for who in SPEED]
        return [figure.name for figure in figures(make_results(rows))]

    assert names() == ["throughput"]
    assert names(prompt_tokens=1000, output_tokens=16) == ["ttft"]
    assert names(prompt_tokens=1000, output_tokens=16, batch=8) == ["output"]
    assert names(workload="mixed") == names(workload="prefix") == ["output"]
    assert names(workload="arrival", batch=9) == ["gap"]


def test_only_failures_make_no_figure_and_no_suite_has_many(tmp_path: Path) -> None:
    assert figures(make_results([Row(Case("static", "m"), error="no memory")])) == []
    rows = [make_row(who, prompt_tokens=n) for n in range(10, 30) for who in ("static", *map(str, range(9)))]
    assert len(figures(make_results(rows))) == MAX_FIGURES


def test_a_backend_has_one_colour_and_a_format_one_mark() -> None:
    rows = [make_row(who, b) for b in (1, 2, 4) for who in ("native", "a-stranger")]
    rows += [make_row("native", b, quantization=name) for b in (1, 2, 4) for name in list(BITS)[3:]]
    (figure,) = figures(make_results(rows))
    _, lines, points, _ = figure.spec["layer"]
    colors, dashes, shapes = (
        layer["encoding"][channel]["scale"]["range"]
        for layer, channel in ((lines, "color"), (lines, "strokeDash"), (points, "shape"))
    )
    assert set(colors) == {COLORS["native"], GREY}
    assert len({str(dash) for dash in dashes}) == len(set(shapes)) == len(BITS) - 2


def test_colours_are_seen_on_both_pages() -> None:
    def luminance(color: str) -> float:  # WCAG 2.1, relative luminance
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in (*COLORS.values(), GREY):
        assert 1.05 / (luminance(color) + 0.05) >= 3
        assert (luminance(color) + 0.05) / (luminance("#15181c") + 0.05) >= 3
    assert len(set(COLORS.values())) == len(COLORS)


def test_svg_has_text_title_and_follows_the_colour_scheme(tmp_path: Path) -> None:
    write_figures([full_results(), make_results([make_row("static", speed=0.66612)])], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ladder-throughput-2.svg", "ladder-throughput.svg"]
    text = (tmp_path / "ladder-throughput.svg").read_text(encoding="utf-8")
    root, ns = ElementTree.fromstring(text), "{http://www.w3.org/2000/svg}"
    assert (root.tag, root.get("role"), root[0].tag) == (f"{ns}svg", "img", f"{ns}title")
    assert str(root[0].text).startswith("decode tokens/s: model=random:gpt2, sampler=greedy, prompt_tokens=32,")
    ink, dark_ink = re.findall(r"svg\{color:(#\w+);background:#\w+\}", text)  # readable on a page of the other scheme
    assert (ink, dark_ink, "@media(prefers-color-scheme:dark)" in text) == ("#1b1f24", "#e4e7eb", True)
    words = {"".join(t.itertext()).strip() for t in root.iter(f"{ns}text")}
    assert {"recompute float32", "static float32", "64", "ceiling float32"} <= words
    assert COLORS["static"] in text
    other = (tmp_path / "ladder-throughput-2.svg").read_text(encoding="utf-8")
    assert ">0.666</text>" in other
    assert not any(re.search(r"\d\.\d{3}", tag) for tag in re.findall("<[^>]*>", other))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = '<script>alert("1 & 2")</script>'
    row = make_row("static")
    write_figures(
        [make_results([replace(row, case=Case(evil, evil, quantization=evil))], suite=f"../{evil}")], tmp_path
    )
    (path,) = tmp_path.iterdir()
    assert path.name == "script-alert-1-2-script-throughput.svg"
    assert not list(ElementTree.fromstring(path.read_bytes()).iter("{http://www.w3.org/2000/svg}script"))


def test_what_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    made = [make_results([make_row("static")])]
    refuses(lambda: write_figures(made, tmp_path / "file"), "cannot be written", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refuses(lambda: write_figures(made, tmp_path / "out"), "No space left")
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    refuses(lambda: write_figures(made, tmp_path), f"figures cannot be drawn: {missing_extra('vl_convert', 'bench')}")


RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("suite", [name for name in SUITES if (RESULTS / f"{name}.json").exists() and name != "gpu"])
def test_tables_fit_80_columns_with_every_name_in_full(suite: str) -> None:
    made = read(RESULTS / f"{suite}.json")
    out = StringIO()
    table.show(made, Console(file=out, width=80))
    errors = [str(row.error) for row in made.failed]  # a line each, which a terminal wraps
    lines = [line for line in out.getvalue().splitlines() if not any(error in line for error in errors)]
    assert max(map(len, lines)) <= 80
    assert "…" not in out.getvalue()
    words = " ".join(out.getvalue().split())
    for case in (row.case for row in made.rows):
        assert (case.plain.label if case.draft is None else f"+ {case.draft} k={case.speculate_k}") in words
    assert words.count("tok/s") >= 1


def test_a_wide_terminal_shows_every_column() -> None:
    out = StringIO()
    table.show(full_results(), Console(file=out, width=1000))
    assert next(x.split() for x in out.getvalue().splitlines() if x.startswith("backend")) == [
        "backend", "tok/s", "x", "TTFT", "ms", "TPOT", "ms", "MBU", "%", "MB", "limit", "p99", "ms",
    ]  # fmt: skip
    assert "llama.cpp float32, batch 1: the worker died" in out.getvalue()


def test_digits() -> None:
    values = [1234.56, 0.01234, 41.26, 812.3, 0, -3.456, None]
    assert [digits(v) for v in values] == ["1,235", "0.0123", "41.3", "812", "0", "-3.46", DASH]
