"""The benchmark's report: what its page says, what its figures draw, and what it does with hostile or missing data."""

from __future__ import annotations

import errno
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from helpers.environment import ROOT
from nanoinfer.bench import table
from nanoinfer.bench.case import BITS, Case, Row
from nanoinfer.bench.formatting import DASH, digits, slug
from nanoinfer.bench.report import charts
from nanoinfer.bench.report.charts import COLORS, GREY, MAX_FIGURES, Figure, figures, look
from nanoinfer.bench.report.page import write_report
from nanoinfer.bench.report.panels import headlines, panels, setting, sweep_axis
from nanoinfer.bench.results import Results, read
from nanoinfer.bench.stats import Figures
from nanoinfer.bench.suites import SUITES
from nanoinfer.errors import NanoinferError, missing_extra

pytest.importorskip("vl_convert", reason="the report draws with it")

EVIL = '<script>alert("1 & 2")</script>$x^{$\x00\x1b'
SPEED = {"recompute": 10.0, "dynamic": 25.0, "static": 37.5}
PARTS = {"matrix products": 61.0, "attention": 12.5, "output head": 17.5, "sampling": 3.0, "everything else": 6.0}
VOID = {"meta", "br"}


def make_row(backend: str, batch: int = 1, **fields: Any) -> Row:
    speed = SPEED.get(backend, 20.0) * batch
    case = Case(backend, "random:gpt2", batch=batch, output_tokens=40)
    made = Figures(3, 0.0123 * batch, 0.031, 0.0345, 0.0412, speed, 812.3, 0.9 * speed, 2.75, 4.56)
    known: dict[str, Any] = {
        "same_tokens": True, "peak_memory_bytes": 987_000_000, "weight_bytes": 494_000_000,
        "bytes_per_token": 494e6 / batch, "flops_per_token": 247e6, "mbu_percent": 44.4, "mfu_percent": 5.55,
        "predicted_tokens_per_sec": 65.4 * batch, "speedup": speed / batch / 10,
    }  # fmt: skip
    return replace(Row(case, made, **known), **fields)


def failed_row(backend: str, error: str, batch: int = 1) -> Row:
    return Row(Case(backend, "random:gpt2", batch=batch, output_tokens=40), error=error)


def make_results(rows: list[Row], **fields: Any) -> Results:
    known: dict[str, Any] = {
        "suite": "ladder", "baseline": "recompute", "created": "2026-11-21T12:00:00+00:00", "commit": "abc1234",
        "command": "nanoinfer bench --suite ladder --report out/",
        "machine": {"cpu": "a CPU", "isa": ["avx2", "amx"], "cores": 2, "memory_bytes": 25_769_803_776, "gpu": None},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "ctranslate2": None},
        "ceiling": {"read_bytes_per_sec": 32.5e9, "flops_per_sec": {"float32": 0.33e12, "bfloat16": 2.1e12}},
        "rows": rows,
    }  # fmt: skip
    return Results(**(known | fields))


def full_results() -> Results:
    """Three engines at four batch sizes with everything known, one of them with nothing, and a failure."""
    rows = [make_row(who, batch) for batch in (1, 2, 8, 64) for who in SPEED]
    rows[0] = replace(rows[0], per_position_sec=[[33 + i, 0.02 + 0.001 * i] for i in range(39)])
    rows[2] = replace(rows[2], breakdown_percent=PARTS, note="a note")
    rows[3] = replace(rows[3], **dict.fromkeys(("mbu_percent", "speedup", "peak_memory_bytes", "same_tokens")))
    return make_results([*rows, failed_row("llama.cpp", "the worker died with signal 11")])


class Page(HTMLParser):
    """Holds a page to being well-formed; keeps its tags, its text and its styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def cells(self) -> list[str]:
        return [" ".join(t.split()) for t in self.text]


def read_page(results: list[Results], folder: Path) -> tuple[str, Page]:
    text = write_report(results, folder)[0].read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str, Page]:
    """The report of `full_results`: its files, its page as text and as read."""
    paths = write_report([full_results()], tmp_path_factory.mktemp("full") / "new" / "out")
    text = paths[0].read_text(encoding="utf-8")
    return paths, text, Page(text)


def chart_data(figure: Figure) -> list[dict[str, Any]]:
    """Return the records that a chart draws, layer by layer."""
    spec = figure.spec
    layers = spec.get("layer", [spec])
    sets = [layer.get("data", spec.get("data", {})) for layer in layers]
    return [
        record for found in sets for record in spec.get("datasets", {}).get(found.get("name"), found.get("values", []))
    ]


def series(figure: Figure, x: str = "x") -> dict[str, list[tuple[Any, float]]]:
    """Return the points of a chart by the name of their backend."""
    made: dict[str, list[tuple[Any, float]]] = {}
    for record in chart_data(figure):
        point = record.get(x), record.get("y")
        if "value" in record and "backend" in record and point not in made.setdefault(record["backend"], []):
            made[record["backend"]].append(point)
    return made


def by_name(results: Results) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(results)}


# The page -----------------------------------------------------------------------------------------------------


def test_page_is_well_formed_and_fetches_nothing(full: tuple[list[Path], str, Page]) -> None:
    _, text, page = full
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "img", "iframe", "object", "base"})
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "data", "action"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("#"), attributes
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in text
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'"
    assert "window.vegaEmbed=" in text


def test_ids_are_unique_and_references_resolve(tmp_path: Path) -> None:
    page = read_page([full_results(), full_results()], tmp_path)[1]
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    asked = [a["aria-labelledby"] or "" for _, a in page.tags if "aria-labelledby" in a]
    asked += [(a["href"] or "").removeprefix("#") for _, a in page.tags if a.get("href")]
    assert len(asked) == 2 * len(figures(full_results())) + 2
    assert set(asked) <= set(ids)


def test_the_charts_of_the_page_are_the_figures(full: tuple[list[Path], str, Page]) -> None:
    found = re.findall(r'<script type="application/json">(.*?)</script>', full[1], re.DOTALL)
    assert [json.loads(spec) for spec in found] == [figure.spec for figure in figures(full_results())]


def test_every_number_is_there_as_text(full: tuple[list[Path], str, Page]) -> None:
    cells = full[2].cells()
    for row in full_results().rows:
        if (f := row.figures) is None:
            continue
        found = [f.ttft_sec * 1e3, *(1e3 * v for v in (f.tpot_sec, f.tpot_p90_sec, f.tpot_p99_sec) if v is not None)]
        found += [f.decode_tokens_per_sec, f.prefill_tokens_per_sec, f.output_tokens_per_sec, f.total_sec]
        found += [f.spread_percent, row.predicted_tokens_per_sec, row.speedup, row.mbu_percent, row.mfu_percent]
        found += [row.bytes_per_token and row.bytes_per_token / 1e6, 494.0, 0.247]
        for value in found:
            assert digits(value) in cells, value
        assert f"{row.case.batch}" in cells


def test_measured_stands_beside_the_ceiling(full: tuple[list[Path], str, Page]) -> None:
    assert "<td>37.5</td><td>65.4</td><td>57.3</td><td>4.56</td>" in full[1]


def test_page_says_where_when_and_with_what(full: tuple[list[Path], str, Page]) -> None:
    said = " ".join(full[2].cells())
    for part in (
        "2026-11-21T12:00:00+00:00", "abc1234", "nanoinfer bench --suite ladder --report out/", "cpu a CPU",
        "cores 2", "torch 2.13.0", "read bytes per sec 32500000000.0",
        "13 cases, 1 failed. a CPU, 2026-11-21, commit abc1234.",
    ):  # fmt: skip
        assert part in said, part
    assert "None" not in said.partition("All cases")[2].partition("const")[0]


def test_failed_rows_show_their_error_and_unknown_is_a_dash(full: tuple[list[Path], str, Page]) -> None:
    _, text, page = full
    assert "<strong>failed:</strong> the worker died with signal 11</td>" in text
    assert DASH in page.cells()
    assert "1 of 13 cases failed" in text
    assert "<td>a note</td>" in text


def test_only_failures_make_a_page_without_figures(tmp_path: Path) -> None:
    paths = write_report([make_results([failed_row("static", "no memory")])], tmp_path)
    assert [p.name for p in paths] == ["index.html"]
    assert "no memory" in paths[0].read_text(encoding="utf-8")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    case = Case(EVIL, EVIL, quantization=EVIL)
    rows = [
        replace(make_row("static"), case=case, note=EVIL, breakdown_percent={EVIL: 100.0}),
        replace(make_row("static"), case=replace(case, batch=4), per_position_sec=[[i, 0.1] for i in range(40)]),
        Row(case, error=EVIL),
    ]
    machine = {EVIL: EVIL, "list": [EVIL]}
    hostile = make_results(rows, suite=EVIL, baseline=EVIL, commit=EVIL, command=EVIL, machine=machine, created=EVIL)
    paths = write_report([hostile], tmp_path)
    text = paths[0].read_text(encoding="utf-8")
    Page(text)
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") > 10
    assert {p.parent for p in paths} == {tmp_path}
    for path in paths:
        assert re.fullmatch(r"[a-z0-9.-]+", path.name)
        if path.suffix == ".svg":
            assert not list(ElementTree.fromstring(path.read_bytes()).iter("{http://www.w3.org/2000/svg}script"))


def test_strange_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    odd = make_row("static", mbu_percent=float("nan"), predicted_tokens_per_sec=float("inf"), flops_per_token=1e308)
    huge = make_row("dynamic", 2, peak_memory_bytes=10**400, speedup=-1.0, bytes_per_token=0.0)
    results = make_results([odd, huge], ceiling={"read_bytes_per_sec": None, "flops_per_sec": "?"}, machine={})
    said = read_page([results], tmp_path)[1].cells()
    assert not {"nan", "inf"} & set(said)


# Files --------------------------------------------------------------------------------------------------------


def test_figures_are_written_as_svg(full: tuple[list[Path], str, Page]) -> None:
    kinds = ("throughput", "position", "ttft", "memory", "breakdown")
    names = ["index.html", *(f"ladder-{kind}.svg" for kind in kinds)]
    assert [p.name for p in full[0]] == names
    assert sorted(p.name for p in full[0][0].parent.iterdir()) == sorted(names), "something was left behind"


def test_svg_has_text_title_and_follows_the_colour_scheme(full: tuple[list[Path], str, Page]) -> None:
    text = (full[0][0].parent / "ladder-throughput.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    ns = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{ns}svg"
    assert root.get("role") == "img"
    assert (root[0].tag, root[0].text) == (f"{ns}title", "Decode throughput")
    ink, dark_ink = re.findall(r"svg\{color:(#\w+);background:#\w+\}", text)  # readable on a page of the other scheme
    assert (ink, dark_ink, "@media(prefers-color-scheme:dark)" in text) == ("#1b1f24", "#e4e7eb", True)
    words = {"".join(t.itertext()).strip() for t in root.iter(f"{ns}text")}
    assert {"recompute float32", "static float32", "64", "ceiling float32"} <= words
    assert "currentColor" in text
    assert COLORS["static"] in text


def test_svg_has_short_coordinates_and_full_labels(tmp_path: Path) -> None:
    rows = [make_row(who) for who in SPEED]
    rows[0] = replace(rows[0], figures=replace(rows[0].figures, decode_tokens_per_sec=0.66612))  # type: ignore[type-var]
    write_report([make_results(rows)], tmp_path)
    text = (tmp_path / "ladder-throughput.svg").read_text(encoding="utf-8")
    assert ">0.666</text>" in text
    assert not any(re.search(r"\d\.\d{3}", tag) for tag in re.findall("<[^>]*>", text))


def test_the_same_results_give_the_same_files(full: tuple[list[Path], str, Page], tmp_path: Path) -> None:
    for again in write_report([full_results()], tmp_path):
        assert again.read_bytes() == (full[0][0].parent / again.name).read_bytes(), again.name


def test_a_new_report_replaces_the_old_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_report([make_results([make_row("static")])], tmp_path)
    write_report([make_results([make_row("static")], commit="newer12")], tmp_path)
    assert "newer12" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "blocked" / "index.html").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "blocked"):
        with pytest.raises(NanoinferError, match="cannot be written") as e:
            write_report([make_results([make_row("static")])], folder)
        assert str(folder) in str(e.value)
        assert "\n" not in str(e.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in (tmp_path / "blocked").iterdir()] == ["index.html"]


def test_a_full_disk_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report([make_results([make_row("static")])], tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    synced = 0

    def full_at_the_second(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        if synced == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full_at_the_second)
    with pytest.raises(NanoinferError, match="No space left"):
        write_report([make_results([make_row("static")], commit="newer12")], tmp_path)
    new = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert b"newer12" in new["index.html"]
    assert new | {"index.html": b""} == old | {"index.html": b""}


def test_a_missing_package_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(
        NanoinferError, match=re.escape(f"the report cannot be written: {missing_extra('vl_convert', 'bench')}")
    ):
        write_report([full_results()], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NanoinferError, match="0 results files"):
        write_report([], tmp_path)


# Figures ------------------------------------------------------------------------------------------------------


def test_throughput_lines_are_the_data_and_the_ceilings() -> None:
    figure = by_name(full_results())["throughput"]
    found = series(figure)
    assert found["static float32"] == [(1, 37.5), (2, 75), (8, 300), (64, 2400)]
    assert set(found) == {f"{who} float32" for who in SPEED}
    limits = [(r["x"], r["y"]) for r in chart_data(figure) if r.get("format") == "float32"]
    assert limits == [(b, pytest.approx(65.4 * b)) for b in (1, 2, 8, 64)]
    x, y = figure.spec["encoding"]["x"], figure.spec["encoding"]["y"]
    assert x["scale"]["type"] == y["scale"]["type"] == "log"
    assert x["axis"]["values"] == [1, 2, 8, 64]


def test_a_backend_without_a_cache_does_not_move_the_ceiling() -> None:
    rows = [
        replace(r, predicted_tokens_per_sec=1e6) if r.case.backend == "recompute" else r for r in full_results().rows
    ]
    limits = [r["y"] for r in chart_data(by_name(make_results(rows))["throughput"]) if r.get("format") == "float32"]
    assert limits == [pytest.approx(65.4 * b) for b in (1, 2, 8, 64)]


def test_the_pointer_shows_value_spread_and_share_of_the_ceiling() -> None:
    figure = by_name(full_results())["throughput"]
    record = next(r for r in chart_data(figure) if r.get("backend") == "static float32" and r.get("x") == 8)
    assert record["value"] == "300 tokens/s"
    assert record["spread"] == "4.56% over 3 rounds"
    assert record["ceiling"] == "57.3% of 523 tokens/s"
    assert record["case"] == "random:gpt2, greedy, batch 8, 32-token prompts, 40 tokens out, cpu"
    shown = [t["field"] for t in figure.spec["layer"][2]["encoding"]["tooltip"]]
    assert shown == ["backend", "case", "value", "spread", "ceiling", "note"]


def test_one_batch_size_is_bars_with_ceilings_as_ticks() -> None:
    rows = [make_row(who, 4) for who in SPEED]
    (figure,) = [f for f in figures(make_results(rows)) if f.name == "throughput"]
    assert series(figure) == {f"{who} float32": [(4, 4 * SPEED[who])] for who in ("static", "dynamic", "recompute")}
    assert [r["y"] for r in chart_data(figure) if "value" not in r] == [pytest.approx(261.6)] * 3
    assert figure.spec["layer"][0]["encoding"]["x"]["scale"]["domain"][0] == 0
    assert [r["label"] for r in chart_data(figure) if "label" in r][:3] == ["150", "100", "40.0"]


def test_ceilings_far_above_all_bars_are_left_out() -> None:
    rows = [make_row(who, 4, predicted_tokens_per_sec=1e5) for who in SPEED]
    (figure,) = [f for f in figures(make_results(rows)) if f.name == "throughput"]
    assert [layer["mark"]["type"] for layer in figure.spec["layer"]] == ["bar", "text"]


def test_more_backends_than_lines_can_tell_apart_are_bars_by_batch() -> None:
    rows = [make_row(f"peer{i}", batch) for batch in (1, 8, 64) for i in range(charts.MAX_LINES + 1)]
    found = figures(make_results(rows))
    assert [f.title.rpartition(": ")[2] for f in found] == ["batch 1", "batch 8", "batch 64"]
    assert [{y for points in series(f).values() for _, y in points} for f in found] == [{20.0}, {160.0}, {1280.0}]
    assert [len(series(f)) for f in found] == [9, 9, 9]


def test_long_prompts_are_judged_by_the_first_token_and_mixes_by_output() -> None:
    rows = [make_row(who) for who in SPEED]
    long = [replace(r, case=replace(r.case, prompt_tokens=1000, output_tokens=16)) for r in rows]
    batches = [replace(r, case=replace(r.case, batch=8)) for r in long]
    mixed = [replace(r, case=replace(r.case, workload="mixed")) for r in rows]
    assert [p.measure.name for p in panels([*rows, *long, *mixed], "batch")] == ["throughput", "ttft", "output"]
    assert panels(batches, "batch")[0].measure.name == "output"


def test_ttft_and_memory() -> None:
    found = by_name(full_results())
    assert series(found["ttft"])["dynamic float32"] == [(b, pytest.approx(12.3 * b)) for b in (1, 2, 8, 64)]
    assert series(found["memory"])["recompute float32"] == [(1, 987), (8, 987), (64, 987)], "batch 2 is unknown"
    assert found["memory"].spec["encoding"]["y"]["scale"] == {"zero": True}


def test_time_per_token_against_position() -> None:
    points = series(by_name(full_results())["position"])["recompute float32"]
    assert points[0] == (33, pytest.approx(20))
    assert points[-1] == (71, pytest.approx(58))
    few = replace(full_results().rows[0], per_position_sec=[[i, 0.1] for i in range(charts.MIN_POSITIONS - 1)])
    assert "position" not in by_name(make_results([few]))


def test_breakdown_stacks_the_shares() -> None:
    figure = by_name(full_results())["breakdown"]
    assert [r["y"] for r in chart_data(figure)] == list(PARTS.values())
    assert figure.spec["encoding"]["x"]["stack"] == "zero"
    assert "breakdown" not in by_name(make_results([make_row("static")]))


def test_a_backend_has_one_colour_in_every_figure() -> None:
    rows = [*full_results().rows, make_row("native"), make_row("a-stranger")]
    for some in (rows, rows[::-1], rows[-2:]):
        for figure in figures(make_results(some)):
            for layer in figure.spec.get("layer", []):
                scale = layer["encoding"].get("color", {}).get("scale")
                for label, color in zip(*(scale["domain"], scale["range"]), strict=True) if scale else ():
                    assert color == COLORS.get(label.split(" ")[0], GREY)
    assert len(set(COLORS.values())) == len(COLORS)


def test_no_two_formats_share_a_mark_or_a_dash() -> None:
    rows = [replace(make_row("native"), case=replace(make_row("native").case, quantization=name)) for name in BITS]
    styles = look(rows)
    for channel in ("shape", "strokeDash"):
        assert len({str(value) for value in styles[channel]["scale"]["range"]}) == len(BITS)


def test_no_suite_has_more_than_six_figures() -> None:
    rows = [replace(r, case=replace(r.case, prompt_tokens=n)) for n in range(10, 30) for r in full_results().rows]
    assert len(figures(make_results(rows))) == MAX_FIGURES == 6


def test_colours_are_seen_on_both_pages() -> None:
    def luminance(color: str) -> float:  # WCAG 2.1, relative luminance
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in (*COLORS.values(), GREY):
        assert 1.05 / (luminance(color) + 0.05) >= 3
        assert (luminance(color) + 0.05) / (luminance("#15181c") + 0.05) >= 3


def speculative_rows() -> list[Row]:
    plain = Case("native", "m", quantization="int8", workload="text")
    speeds: dict[int | str, float] = {1: 25.0, 2: 30.0, 4: 40.0, "auto": 38.0}
    rows = [replace(make_row("native"), case=plain, speedup=None)]
    for k, speed in speeds.items():
        row = replace(make_row("native"), case=replace(plain, draft="small", speculate_k=k), speedup=speed / 20)
        rows.append(replace(row, figures=replace(row.figures, decode_tokens_per_sec=speed)))  # type: ignore[type-var]
    other = replace(plain, batch=8)
    return [
        *rows,
        replace(make_row("native"), case=other),
        replace(make_row("native"), case=replace(other, draft="small"), speedup=1.25),
    ]


def test_speculation_is_drawn_against_k_and_over_plain_decoding() -> None:
    found = by_name(make_results(speculative_rows(), suite="speculative"))
    assert list(found) == ["k", "drafts", "situations"]
    points = series(found["k"])["native int8"]
    assert sorted(points, key=str) == [("0", 20.0), ("1", 25.0), ("2", 30.0), ("4", 40.0), ("auto", 38.0)]
    assert series(found["drafts"]) == {"small k=auto": [(None, 1.9)]}
    svg = found["situations"].svg.decode()  # a line each: labels are not cut
    assert (">text, batch 8<" in svg, ">small k=auto<" in svg) == (True, True)
    assert series(found["situations"]) == {"text, batch 8\nsmall k=auto": [(None, 1.25)]}


# Headlines ----------------------------------------------------------------------------------------------------


def test_headline_over_the_baseline_at_the_smallest_and_the_largest_batch() -> None:
    assert headlines(full_results()) == [
        "static float32: 3.75x recompute float32 (33.8 against 9.00 output tokens/s), batch 1",
        "static float32: 3.75x recompute float32 (2,160 against 576 output tokens/s), batch 64",
    ]


def test_headline_over_the_best_peer_in_the_same_bits() -> None:
    def row(who: str, quantization: str | None, speed: float) -> Row:
        made = make_row(who)
        assert made.figures is not None
        case = replace(made.case, quantization=quantization)
        return replace(made, case=case, figures=replace(made.figures, decode_tokens_per_sec=speed))

    rows = [
        row("native", "int8", 371), row("native", "int4", 600), row("llama.cpp", "Q8_0", 234),
        row("ctranslate2", "int8", 75), row("llama.cpp", "Q4_0", 900),
    ]  # fmt: skip
    assert headlines(make_results(rows)) == ["native int8: 1.59x llama.cpp Q8_0 (371 against 234 decode tokens/s)"]
    long = [replace(r, case=replace(r.case, prompt_tokens=1000)) for r in rows]
    slow = replace(long[2], figures=replace(long[2].figures, ttft_sec=0.0246))  # type: ignore[type-var]
    (said,) = headlines(make_results([long[0], slow]))
    assert said == "native int8: 2.00x llama.cpp Q8_0 (12.3 against 24.6 ms to the first token)"


def test_headline_of_drafts_is_the_best_over_plain_decoding() -> None:
    first, second = headlines(make_results(speculative_rows()))
    assert first == "native int8 + small k=4: 2.00x the same without a draft (18.0 output tokens/s), batch 1"
    assert second.startswith("native int8 + small k=auto: 1.25x the same without a draft")


def test_no_figures_make_no_headline() -> None:
    assert headlines(make_results([failed_row("static", "no memory")])) == []


# The terminal ---------------------------------------------------------------------------------------------------

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


# Words and panels ---------------------------------------------------------------------------------------------


def test_digits_and_names() -> None:
    values = [1234.56, 0.01234, 41.26, 812.3, 0, -3.456, None, float("nan"), "x", True, 10**400]
    said = ["1,235", "0.0123", "41.3", "812", "0", "-3.46", DASH, DASH, DASH, DASH, DASH]
    assert [digits(v) for v in values] == said
    assert [slug(v) for v in ("Ladder / GPT-2", "../..", None)] == ["ladder-gpt-2", "suite", "none"]


def test_panels_sort_rows_by_what_they_share() -> None:
    rows = [make_row(who, batch) for batch in (1, 8) for who in SPEED]
    mixed = replace(rows[0], case=replace(rows[0].case, workload="mixed", batch=64))
    long = [replace(row, case=replace(row.case, prompt_tokens=1000)) for row in rows]
    every = [*rows, *long, mixed]
    assert sweep_axis(every) == "batch"
    assert [len(panel.rows) for panel in panels(every, "batch")] == [6, 6, 1]
    assert [len(panel.rows) for panel in panels(every, "batch", split=True)] == [3, 3, 3, 3, 1]
    assert setting(long) == "random:gpt2, greedy, 1,000-token prompts, 40 tokens out, cpu"
    assert setting([mixed]) == "random:gpt2, greedy, batch 64, 16 to 256 tokens in and out, cpu"
    lengths = [replace(rows[0], case=replace(rows[0].case, output_tokens=n)) for n in (200, 400)]
    assert sweep_axis(lengths) == "output_tokens"
    assert sweep_axis([rows[0]]) == "batch"
