"""The benchmark's report: what its page says, what its figures draw, and what it does with hostile or missing data."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanoinfer.bench import report
from nanoinfer.bench.case import Case
from nanoinfer.bench.report import draw, figures, svg
from nanoinfer.bench.report.panels import Panel, panels, setting, sweep_axis
from nanoinfer.bench.report.text import DASH, digits, escape, short, si, slug
from nanoinfer.bench.results import Results, Row
from nanoinfer.bench.stats import Figures
from nanoinfer.errors import NanoinferError

PNG = b"\x89PNG\r\n\x1a\n"
EVIL = '<script>alert("1 & 2")</script>$x^{$\x00\x1b'
SPEED = {"recompute": 10.0, "dynamic": 25.0, "static": 37.5}
PARTS = {"matrix products": 61.0, "attention": 12.5, "output head": 17.5, "sampling": 3.0, "everything else": 6.0}
VOID = {"meta", "br"}


def make_row(contestant: str, batch: int = 1, **fields: Any) -> Row:
    speed = SPEED.get(contestant, 20.0) * batch
    case = Case(contestant, "random:gpt2", batch=batch, output_tokens=40)
    made = Figures(3, 0.0123 * batch, 0.031, 0.0345, 0.0412, speed, speed / batch, 812.3, 0.9 * speed, 2.75, 4.56)
    known: dict[str, Any] = {
        "same_tokens": True, "peak_memory_bytes": 987_000_000, "weight_bytes": 494_000_000,
        "bytes_per_token": 494e6 / batch, "flops_per_token": 247e6, "mbu_percent": 44.4, "mfu_percent": 5.55,
        "predicted_tokens_per_sec": 65.4 * batch, "speedup": speed / batch / 10,
    }  # fmt: skip
    return replace(Row(case, made, **known), **fields)


def failed_row(contestant: str, error: str, batch: int = 1) -> Row:
    return Row(Case(contestant, "random:gpt2", batch=batch, output_tokens=40), error=error)


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
    rows[0] = replace(rows[0], per_position_sec=[0.05, *(0.02 + 0.001 * i for i in range(39))])
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
    text = report.write_report(results, folder)[0].read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str, Page]:
    """The report of `full_results`: its files, its page as text and as read."""
    paths = report.write_report([full_results()], tmp_path_factory.mktemp("full") / "new" / "out")
    text = paths[0].read_text(encoding="utf-8")
    return paths, text, Page(text)


@pytest.fixture
def drawn() -> Iterator[None]:
    with draw.drawing():
        yield


def styles(rows: list[Row]) -> dict[str, draw.Style]:
    return {label: draw.style(i) for i, label in enumerate(dict.fromkeys(r.case.label for r in rows))}


def axes_of(figure: Figure | None, count: int = 1) -> list[Axes]:
    assert figure is not None
    assert len(figure.axes) == count
    return figure.axes


def line_data(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {str(k.get_label()): [(float(x), float(y)) for x, y in k.get_xydata()] for k in axes.get_lines()}


def bar_data(axes: Axes) -> dict[str, float]:
    names = [t.get_text() for t in axes.get_yticklabels()]
    return {names[round(p.get_y() + p.get_height() / 2)]: p.get_width() for p in axes.patches}


# The page -----------------------------------------------------------------------------------------------------


def test_page_is_well_formed_and_fetches_nothing(full: tuple[list[Path], str, Page]) -> None:
    _, text, page = full
    assert not re.search(r"(https?:)?//[a-z]", text), "an address on the network"
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base"})
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "data", "action"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("#"), attributes
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_ids_are_unique_and_references_resolve(tmp_path: Path) -> None:
    text, page = read_page([full_results(), full_results()], tmp_path)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    named = [a["aria-labelledby"] or "" for _, a in page.tags if "aria-labelledby" in a]
    asked = [name for names in named for name in names.split()]
    asked += [a["href"].removeprefix("#") for _, a in page.tags if a.get("href")]
    asked += re.findall(r"url\(#([^)]*)\)", text)
    assert asked
    assert set(asked) <= set(ids)


def test_every_number_is_there_as_text(full: tuple[list[Path], str, Page]) -> None:
    cells = full[2].cells()
    for row in full_results().rows:
        if (f := row.figures) is None:
            continue
        found = [f.ttft_sec * 1e3, f.tpot_sec, f.tpot_p90_sec, f.tpot_p99_sec, f.decode_tokens_per_sec]
        found[1:4] = [1e3 * v for v in (f.tpot_sec, f.tpot_p90_sec, f.tpot_p99_sec) if v is not None]
        found += [f.prefill_tokens_per_sec, f.output_tokens_per_sec, f.total_sec, f.spread_percent]
        found += [row.predicted_tokens_per_sec, row.speedup, row.mbu_percent, row.mfu_percent]
        found += [row.bytes_per_token and row.bytes_per_token / 1e6, 494.0, 0.247]
        found += [1e3 * t for t in row.per_position_sec or ()] + list((row.breakdown_percent or {}).values())
        for value in found:
            assert digits(value) in cells, value
        assert f"{row.case.batch}" in cells


def test_measured_stands_beside_predicted(full: tuple[list[Path], str, Page]) -> None:
    text = full[1]
    assert "<td>37.5</td><td>65.4</td><td>57.3</td>" in text


def test_header_says_where_when_and_with_what(full: tuple[list[Path], str, Page]) -> None:
    said = " ".join(full[2].cells())
    for part in (
        "2026-11-21T12:00:00+00:00", "abc1234", "nanoinfer bench --suite ladder --report out/",
        "cpu a CPU, isa avx2 amx, cores 2, memory 25.8 GB, gpu –", "torch 2.13.0, ctranslate2 –",
        "read 32.5 GB/s, float32 330 GFLOP/s, bfloat16 2.10 TFLOP/s", "13 cases, 1 failed.",
    ):  # fmt: skip
        assert part in said, part


def test_what_suites_share_is_said_once(tmp_path: Path) -> None:
    other = make_results([make_row("static")], suite="peers", commit="other12")
    text, page = read_page([full_results(), other], tmp_path)
    assert text.count("isa avx2 amx") == 1
    assert {"abc1234", "other12"} <= set(page.cells())
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == ["#ladder", "#peers"]


def test_failed_rows_show_their_error_and_unknown_is_a_dash(full: tuple[list[Path], str, Page]) -> None:
    _, text, page = full
    assert text.count("<strong>failed:</strong> the worker died with signal 11") >= 4  # in figures' tables and in all
    assert DASH in page.cells()
    assert "None" not in " ".join(page.cells())
    assert "1 of 13 cases failed" in text
    assert "their errors are in the numbers. static float32: a note.</figcaption>" in text


def test_only_failures_make_a_page_without_figures(tmp_path: Path) -> None:
    paths = report.write_report([make_results([failed_row("static", "no memory")])], tmp_path)
    assert [p.name for p in paths] == ["index.html"]
    assert "no memory" in paths[0].read_text(encoding="utf-8")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    case = Case(EVIL, EVIL, quantization=EVIL)
    rows = [
        replace(make_row("static"), case=case, note=EVIL, breakdown_percent={EVIL: 100.0}),
        replace(make_row("static"), case=replace(case, batch=4), per_position_sec=[0.1] * 40),
        Row(case, error=EVIL),
    ]
    machine = {EVIL: EVIL, "list": [EVIL]}
    hostile = make_results(rows, suite=EVIL, baseline=EVIL, commit=EVIL, command=EVIL, machine=machine, created=EVIL)
    paths = report.write_report([hostile], tmp_path)
    text = paths[0].read_text(encoding="utf-8")
    page = Page(text)
    assert "<script" not in text
    assert "script" not in {tag for tag, _ in page.tags}
    assert text.count(escape(EVIL)) > 10
    assert {p.parent for p in paths} == {tmp_path}
    for path in paths:
        assert re.fullmatch(r"[a-z0-9.-]+", path.name)
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_bytes())


def test_strange_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    odd = make_row("static", mbu_percent=float("nan"), predicted_tokens_per_sec=float("inf"), flops_per_token=1e308)
    huge = make_row("dynamic", 2, peak_memory_bytes=10**400, speedup=-1.0, bytes_per_token=0.0)
    results = make_results([odd, huge], ceiling={"read_bytes_per_sec": None, "flops_per_sec": "?"}, machine={})
    said = read_page([results], tmp_path)[1].cells()
    assert not {"nan", "inf"} & set(said)


# Files --------------------------------------------------------------------------------------------------------


def test_figures_are_written_as_svg_and_png(full: tuple[list[Path], str, Page]) -> None:
    paths = full[0]
    kinds = ("ladder", "throughput", "ttft", "memory", "position", "roofline", "breakdown")
    names = ["index.html", *(f"ladder-{kind}.{end}" for kind in kinds for end in ("svg", "png"))]
    assert sorted(p.name for p in paths) == sorted(names)
    assert sorted(p.name for p in paths[0].parent.iterdir()) == sorted(names), "something was left behind"
    for path in paths:
        content = path.read_bytes()
        assert len(content) > 2000
        assert path.suffix != ".png" or content.startswith(PNG)


def test_svg_has_text_title_and_the_pages_own_colours(full: tuple[list[Path], str, Page]) -> None:
    text = (full[0][0].parent / "ladder-throughput.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    ns = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{ns}svg"
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{ns}title", f"{ns}desc"]
    words = {"".join(t.itertext()).strip() for t in root.iter(f"{ns}text")}
    assert {"recompute float32", "static float32", "64"} <= words
    assert "currentColor" in text
    assert draw.INK not in text
    assert "var(--series-0, #123a5e)" in text
    assert text.count("http") == 1, "only the namespace"


def test_the_same_results_give_the_same_files(full: tuple[list[Path], str, Page], tmp_path: Path) -> None:
    for again in report.write_report([full_results()], tmp_path):
        assert again.read_bytes() == (full[0][0].parent / again.name).read_bytes(), again.name


def test_a_new_report_replaces_the_old_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    report.write_report([make_results([make_row("static")])], tmp_path)
    report.write_report([make_results([make_row("static")], commit="newer12")], tmp_path)
    assert "newer12" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "blocked" / "index.html").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "blocked"):
        with pytest.raises(NanoinferError, match="cannot be written") as e:
            report.write_report([make_results([make_row("static")])], folder)
        assert str(folder) in str(e.value)
        assert "\n" not in str(e.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in (tmp_path / "blocked").iterdir()] == ["index.html"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_nothing_half_written(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    if existing:
        folder.mkdir()
        (folder / "index.html").write_text("the old report")
    write, written = Path.write_bytes, []

    def full_at_the_third(path: Path, content: Any) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_at_the_third)
    with pytest.raises(NanoinferError, match="No space left"):
        report.write_report([make_results([make_row("static")])], folder)
    assert folder.exists() == existing
    if existing:
        assert [p.name for p in folder.iterdir()] == ["index.html"]
        assert (folder / "index.html").read_text() == "the old report"


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NanoinferError, match=re.escape("pip install 'nanoinfer[bench]'")):
        report.write_report([full_results()], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NanoinferError, match="0 results files"):
        report.write_report([], tmp_path)


# Figures ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_throughput_lines_are_the_data_and_the_predictions() -> None:
    rows = full_results().rows
    (axes,) = axes_of(figures.throughput_figure(Panel("batch", rows), styles(rows)))
    data = line_data(axes)
    assert data["static float32"] == [(1, 37.5), (2, 75), (8, 300), (64, 2400)]
    limits = data["roofline: recompute float32, dynamic float32, static float32"]
    assert limits == [(b, pytest.approx(65.4 * b)) for b in (1, 2, 8, 64)]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "8", "64"]


@pytest.mark.usefixtures("drawn")
def test_a_prediction_of_its_own_is_drawn_in_the_contestants_look() -> None:
    rows = full_results().rows
    rows = [replace(r, predicted_tokens_per_sec=12.0) if r.case.contestant == "recompute" else r for r in rows]
    (axes,) = axes_of(figures.throughput_figure(Panel("batch", rows), styles(rows)))
    own = {str(k.get_label()): k for k in axes.get_lines()}
    assert own["roofline: recompute float32"].get_color() == own["recompute float32"].get_color()
    assert own["roofline: recompute float32"].get_markerfacecolor() == "none"
    assert {y for _, y in line_data(axes)["roofline: recompute float32"]} == {12.0}


@pytest.mark.usefixtures("drawn")
def test_one_batch_size_is_bars() -> None:
    rows = [make_row(who, 4) for who in SPEED]
    (axes,) = axes_of(figures.throughput_figure(Panel("batch", rows), styles(rows)))
    assert bar_data(axes) == {f"{who} float32": 4 * speed for who, speed in SPEED.items()}
    ticks = [k.get_xdata() for k in axes.get_lines()]
    assert [list(t) for t in ticks] == [[pytest.approx(261.6)]] * 3
    assert axes.get_xlim()[0] == 0
    assert [t.get_text() for t in axes.texts] == ["40.0 of 262", "100 of 262", "150 of 262"]


@pytest.mark.usefixtures("drawn")
def test_more_contestants_than_lines_can_tell_apart_are_bars_by_batch() -> None:
    rows = [make_row(f"peer{i}", batch) for batch in (1, 64) for i in range(figures.MAX_LINES + 1)]
    first, last = axes_of(figures.throughput_figure(Panel("batch", rows), styles(rows)), 2)
    assert first.get_title(loc="left") == "batch 1"
    assert set(bar_data(first).values()) == {20.0}
    assert set(bar_data(last).values()) == {1280.0}
    assert len(bar_data(last)) == 9


@pytest.mark.usefixtures("drawn")
def test_ttft_and_memory() -> None:
    rows = full_results().rows
    (axes,) = axes_of(figures.ttft_figure(Panel("batch", rows), styles(rows)))
    assert line_data(axes)["dynamic float32"] == [(b, pytest.approx(12.3 * b)) for b in (1, 2, 8, 64)]
    (axes,) = axes_of(figures.memory_figure(Panel("batch", rows), styles(rows)))
    assert line_data(axes)["recompute float32"] == [(1, 987), (8, 987), (64, 987)], "batch 2 is unknown"
    assert axes.get_ylim()[0] == 0
    assert axes.get_yscale() == "linear"


@pytest.mark.usefixtures("drawn")
def test_time_per_token_against_position() -> None:
    row = full_results().rows[0]
    (axes,) = axes_of(figures.time_per_token_figure(Panel("batch", [row]), styles([row])))
    points = line_data(axes)["recompute float32"]
    assert points[0] == (33, pytest.approx(20)), "the first token is left out"
    assert points[-1] == (71, pytest.approx(58))
    few = replace(row, per_position_sec=[0.1] * figures.MIN_POSITIONS)
    assert figures.time_per_token_figure(Panel("batch", [few]), styles([few])) is None


@pytest.mark.usefixtures("drawn")
def test_every_measurement_is_a_point_under_the_roofline() -> None:
    results = full_results()
    (axes,) = axes_of(figures.roofline_figure(results, styles(results.rows)))
    data = line_data(axes)
    expected = [(247e6 * b / 494e6, 247e6 * 37.5 * b) for b in (1, 2, 8, 64)]
    assert data["static float32"] == [tuple(map(pytest.approx, point)) for point in expected]
    assert sum(len(data[f"{who} float32"]) for who in SPEED) == len(results.rows) - 1
    assert len(data[draw.PREDICTED]) == len(results.rows) - 1
    for x, y in data["bandwidth"]:
        assert y == pytest.approx(32.5e9 * x)
    assert data["float32"][0] == (pytest.approx(0.33e12 / 32.5e9), 0.33e12)
    assert data["bfloat16"][-1][1] == 2.1e12
    assert figures.roofline_figure(replace(results, ceiling={}), styles(results.rows)) is None


@pytest.mark.usefixtures("drawn")
def test_ladder_bars_are_the_speedups_at_the_ends() -> None:
    rows = full_results().rows
    first, last = axes_of(figures.ladder_figure(Panel("batch", rows), styles(rows)), 2)
    assert bar_data(first) == {"recompute float32": 1.0, "dynamic float32": 2.5, "static float32": 3.75}
    assert last.get_title(loc="left") == "batch 64"
    none = [replace(row, speedup=None) for row in rows]
    assert figures.ladder_figure(Panel("batch", none), styles(none)) is None


@pytest.mark.usefixtures("drawn")
def test_breakdown_stacks_the_shares() -> None:
    rows = full_results().rows
    (axes,) = axes_of(figures.breakdown_figure(Panel("batch", rows)))
    assert [p.get_width() for p in axes.patches] == list(PARTS.values())
    assert [p.get_x() for p in axes.patches] == [0, 61, 73.5, 91, 94]
    assert figures.breakdown_figure(Panel("batch", [make_row("static")])) is None


@pytest.mark.usefixtures("drawn")
def test_no_text_leaves_the_figure() -> None:
    names = ("a-contestant-with-quite-a-long-name", "$broken^{maths", "_hidden", "static")
    rows = [make_row(name, batch) for name in names for batch in (1, 64)]
    for make in (figures.throughput_figure, figures.ladder_figure):
        figure = make(Panel("batch", rows), styles(rows))
        assert figure is not None
        figure.draw_without_rendering()
        box = figure.get_tightbbox().padded(-0.02)
        assert box.x0 >= 0
        assert box.x1 <= figure.get_figwidth()
        assert box.y0 >= 0
        assert box.y1 <= figure.get_figheight()


def test_contestants_differ_without_colour_and_colours_are_seen_on_both_pages() -> None:
    looks = [draw.style(i) for i in range(132)]
    assert len(set(map(str, looks))) == 132
    assert len({(look.marker, str(look.dash)) for look in looks[:44]}) == 44

    def luminance(color: str) -> float:  # WCAG 2.1, relative luminance
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for light, dark in draw.PALETTE:
        assert 1.05 / (luminance(light) + 0.05) >= 3
        assert (luminance(dark) + 0.05) / (luminance("#15181c") + 0.05) >= 3
    assert svg.palette_css(1).startswith("--series-0: #7ca4f4;")


# Words and panels ---------------------------------------------------------------------------------------------


def test_digits_and_units() -> None:
    values = [1234.56, 0.01234, 41.26, 812.3, 0, -3.456, None, float("nan"), "x", True, 10**400]
    said = ["1,235", "0.0123", "41.3", "812", "0", "-3.46", DASH, DASH, DASH, DASH, DASH]
    assert [digits(v) for v in values] == said
    assert [si(v, "B/s") for v in (32.5e9, 999.6, 0.0021, None)] == ["32.5 GB/s", "1.00 kB/s", "2.10 mB/s", DASH]
    assert short("_a\nb" + "c" * 60, 6) == "a …ccc"
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
