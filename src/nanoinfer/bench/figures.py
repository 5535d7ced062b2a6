"""Figures of results files as SVG: the speed of each shape against the swept size, or as bars at a single size.

The rows of a figure differ in backend, weight format and the swept size. The figures fill the Vega-Lite templates of
figures.json. A backend has one colour in all figures, and a weight format one dash and one marker. Text and axes follow
the colour scheme of the viewer. Dotted lines and ticks are the limits of the hardware.
"""

from __future__ import annotations

import copy
import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from nanoinfer.bench.case import IRREGULAR, Row, digits
from nanoinfer.bench.results import NAIVE, Results
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.utils.files import write_folder

MAX_FIGURES = 6
MAX_LINES = 8  # more lines than this cannot be told apart: bars
PROMPT_DOMINATED = 8  # a prompt this many times the output: the time is the prompt's
AXES = {"batch": "batch (sequences)", "prompt_tokens": "prompt (tokens)", "output_tokens": "output (tokens)"}
_SHARED = ("model", "sampler", "batch", "prompt_tokens", "output_tokens", "workload", "device")
VEGA_LITE = "6.4"
_STYLE = (  # the background, too: a page may be light where the system's colour scheme is dark
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e4e7eb;background:#15181c}}</style>"
)
GREY = "#808080"
COLORS = {  # contrast of 3 and more on white and on the dark page
    "native": "#eb4613", "triton": "#cd35cd", "cuda_graph": "#9455db", "compiled": "#6464d8", "static": "#247be0",
    "dynamic": "#1498b8", "paged": "#1b9783", "recompute": "#7b828a", "llama.cpp": "#279b44", "openvino": "#a8623f",
    "transformers-dynamic": "#dd3c7f", "transformers-static": "#dc7284", "vllm": "#5b7fa6",
}  # fmt: skip
_MARKS = {  # weight format -> dash and marker
    "float32": ([1, 0], "circle"), "bfloat16": ([7, 3], "square"), "float16": ([14, 3], "cross"),
    "int8": ([3, 2], "triangle-up"), "Q8_0": ([1, 2], "triangle-down"),
    "int4": ([8, 3, 2, 3], "diamond"), "Q4_0": ([8, 3, 2, 3, 2, 3], "triangle-right"),
}  # fmt: skip
_UNKNOWN_MARK = ([1, 0], "triangle-left")
Record = dict[str, Any]


class Measure(NamedTuple):
    """A quantity that a figure shows."""

    name: str
    """For file names."""
    axis: str
    """Title of the axis, with the unit."""
    field: str
    """Argument of `Row.number`."""
    scale: float = 1.0

    def value(self, row: Row) -> float | None:
        """Return the value of a row; None if it is unknown or not above 0, which a logarithmic axis cannot show."""
        value = row.number(self.field, self.scale)
        return value if value is not None and value > 0 else None


DECODE = Measure("throughput", "decode tokens/s", "decode_tokens_per_sec")
OUTPUT = Measure("output", "output tokens/s", "output_tokens_per_sec")
TTFT = Measure("ttft", "time to first token (ms)", "ttft_sec", 1e3)
WORST_GAP = Measure("gap", "longest time between two tokens (ms)", "worst_gap_sec", 1e3)


@dataclass(frozen=True)
class Figure:
    """A figure of a suite."""

    name: str
    title: str
    spec: dict[str, Any]
    """The Vega-Lite specification."""

    @property
    def svg(self) -> bytes:
        """The figure as an SVG file."""
        import vl_convert

        text: str = vl_convert.vegalite_to_svg(self.spec, vl_version=VEGA_LITE)
        text = re.sub("<[^>]*>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), text)  # hundredths of a pixel
        return text.replace(">", f' role="img"><title>{html.escape(self.title)}</title>{_STYLE}', 1).encode()


def write_figures(results: Sequence[Results], folder: Path) -> None:
    """Write the figures of some suites into a folder, as SUITE-MEASURE.svg; files of the same names are replaced."""
    try:
        import vl_convert  # noqa: F401  before anything is drawn
    except ImportError as e:
        raise NanoinferError(f"figures cannot be drawn: {missing_extra(e.name or 'a package', 'bench')}") from None
    files: dict[str, bytes] = {}
    for suite in results:
        for figure in figures(suite):
            stem = re.sub("[^a-z0-9]+", "-", f"{suite.suite}-{figure.name}".lower()).strip("-")
            count = sum(re.fullmatch(rf"{stem}(-\d+)?\.svg", name) is not None for name in files)
            files[f"{stem}-{count + 1}.svg" if count else f"{stem}.svg"] = figure.svg
    write_folder(folder, files)


def figures(results: Results) -> list[Figure]:
    """Return the figures of a suite, a limited number of them."""
    return list(islice(_figures(results.rows), MAX_FIGURES))


def _figures(rows: Sequence[Row]) -> Iterator[Figure]:
    uniform = [row.case for row in rows if row.case.workload == "uniform"]
    axis = max(AXES, key=lambda axis: len({getattr(case, axis) for case in uniform}))
    for panel in _panels(rows, [field for field in _SHARED if field != axis]):
        sizes = {getattr(row.case, axis) for row in panel}
        swept = len(sizes) >= 3 and len({row.case.label for row in panel}) <= MAX_LINES
        for part in [panel] if swept else _panels(panel, _SHARED):
            measure = _measure(part)
            if any(measure.value(row) is not None for row in part):
                spec = _lines(part, measure, axis) if swept else _bars(part, measure)
                shared = [f for f in _SHARED if not (swept and f == axis)]
                title = ", ".join(f"{field}={getattr(part[0].case, field)}" for field in shared)
                yield Figure(measure.name, f"{measure.axis}: {title}", spec)


def _panels(rows: Sequence[Row], fields: Sequence[str]) -> list[list[Row]]:
    """Return rows in groups whose cases are equal in some fields."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row.case, field) for field in fields), []).append(row)
    return list(groups.values())


def _measure(rows: Sequence[Row]) -> Measure:
    """Return what a figure shows: decoding, unless prompts take most of the time or few rows have a rate."""
    case = rows[0].case
    rates = [DECODE.value(row) is not None for row in rows if row.figures is not None]
    if case.workload == "arrival":
        return WORST_GAP
    if case.workload in IRREGULAR or 2 * sum(rates) < len(rates):
        return OUTPUT
    if case.prompt_tokens < PROMPT_DOMINATED * case.output_tokens:
        return DECODE
    return TTFT if case.batch == 1 else OUTPUT


def _chart(kind: str, **datasets: list[Record]) -> dict[str, Any]:
    """Return a template with its data; layers without data are left out."""
    templates = json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))
    spec: dict[str, Any] = copy.deepcopy(templates[kind]) | {"config": templates["config"]}
    spec["datasets"] = {name: records for name, records in datasets.items() if records}
    spec["layer"] = [layer for layer in spec["layer"] if layer["data"]["name"] in spec["datasets"]]
    return spec


def _ceiling(row: Row, measure: Measure) -> float | None:
    """Return the limit of the hardware for decoding; None for other measures and for backends without a cache."""
    return row.ceiling if measure is DECODE and row.case.backend not in NAIVE else None


def _lines(rows: Sequence[Row], measure: Measure, axis: str) -> dict[str, Any]:
    """Return a measure against the swept size, on logarithmic axes; a ceiling for each weight format."""
    records, ceilings = [], dict[tuple[str, int], float]()
    for row in rows:
        x = getattr(row.case, axis)
        if (value := measure.value(row)) is not None:
            records.append({"backend": row.case.label, "x": x, "y": value})
        if (limit := _ceiling(row, measure)) is not None:
            ceilings[row.case.format, x] = max(limit, ceilings.get((row.case.format, x), 0.0))
    limits = [{"format": name, "x": x, "y": y} for (name, x), y in ceilings.items()]
    spec = _chart("lines", records=records, ceilings=limits, names=_ceiling_names(limits))
    x_axis, y_axis = spec["encoding"]["x"], spec["encoding"]["y"]
    sizes = sorted({record["x"] for record in records})
    x_axis["scale"]["domain"], x_axis["axis"]["values"] = [sizes[0], sizes[-1]], sizes
    x_axis["axis"]["title"], y_axis["axis"]["title"] = AXES[axis], measure.axis
    low, high = (f(record["y"] for record in (*records, *limits)) for f in (min, max))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    y_axis["axis"]["values"] = [m * 10.0**e for e in decades for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    labels = {record["backend"] for record in records}
    cases = {row.case.label: row.case for row in rows if row.case.label in labels}
    dashes, shapes = zip(*(_MARKS.get(case.format, _UNKNOWN_MARK) for case in cases.values()), strict=True)
    colors = [COLORS.get(case.backend, GREY) for case in cases.values()]
    for layer in spec["layer"]:
        for channel, values in (("color", colors), ("strokeDash", dashes), ("shape", shapes)):
            if channel in layer["encoding"]:
                layer["encoding"][channel]["scale"] = {"domain": list(cases), "range": list(values)}
    return spec


def _ceiling_names(limits: Sequence[Record]) -> list[Record]:
    """Return the names of the ceilings at the right end; those too near each other share one."""
    last = max((record["x"] for record in limits), default=0)
    named: list[Record] = []
    for record in sorted((r for r in limits if r["x"] == last), key=lambda r: -r["y"]):
        if named and named[-1]["y"] < 1.6 * record["y"]:
            named[-1] = named[-1] | {"format": f"{named[-1]['format']}, {record['format']}"}
        else:
            named.append(record | {"format": f"ceiling {record['format']}"})
    return named


def _bars(rows: Sequence[Row], measure: Measure) -> dict[str, Any]:
    """Return a measure at one size as bars, by bits of a weight and then by value, best first; ceilings as ticks."""
    sign = 1 if measure.axis.endswith("(ms)") else -1
    values = [(row, value) for row in rows if (value := measure.value(row)) is not None]
    values.sort(key=lambda pair: (-pair[0].case.bits, sign * pair[1]))
    longest = max(value for _, value in values)
    limits = [(row.case.label, limit) for row, _ in values if (limit := _ceiling(row, measure)) is not None]
    limits = [(label, limit) for label, limit in limits if limit <= 3 * longest]  # one far above all bars hides them
    ceilings = [{"backend": label, "y": limit} for label, limit in limits]
    records: list[Record] = [{"backend": row.case.label, "y": value, "label": digits(value)} for row, value in values]
    spec = _chart("bars", records=records, ceilings=ceilings)
    x_axis, y_axis = spec["encoding"]["x"], spec["encoding"]["y"]
    x_axis["scale"]["domain"] = [0, 1.2 * max([longest, *(limit for _, limit in limits)])]  # with room for the values
    x_axis["axis"]["title"], y_axis["sort"] = measure.axis, [record["backend"] for record in records]
    colors = [COLORS.get(row.case.backend, GREY) for row, _ in values]
    spec["layer"][0]["encoding"]["color"]["scale"] = {"domain": y_axis["sort"], "range": colors}
    return spec
