"""The findings of a suite in a few sentences, computed from its rows."""

from __future__ import annotations

from collections.abc import Iterator

from nanoinfer.bench.case import Row
from nanoinfer.bench.formatting import digits
from nanoinfer.bench.report.panels import TTFT, Panel, panels, setting, sweep_axis, varying
from nanoinfer.bench.results import Results
from nanoinfer.engines.registry import ENGINES

MAX_SENTENCES = 6


def headlines(results: Results) -> list[str]:
    """Return the findings: over peers, over the same without a draft or a prefix cache, or over the baseline."""
    rows = [row for row in results.rows if row.figures is not None]
    backends = {row.case.backend for row in rows}
    set_beside = [row for row in rows if row.case.draft is not None or row.case.prefix_caching]
    if backends - {*ENGINES, "nanogpt"}:
        found = [line for part in panels(rows, "batch", split=True) if (line := _over_peers(part, rows))]
        found += _over_plain(set_beside, rows)
    elif set_beside and "nanogpt" not in backends:
        found = list(_over_plain(set_beside, rows))
    else:
        found = list(_over_baseline(rows, results.baseline))
    return found[:MAX_SENTENCES]


def _over_peers(panel: Panel, every: list[Row]) -> str | None:
    """Return our best engine over the best peer, in 8 bits if both have it, else in the format that both have."""
    measure = panel.measure
    sign = -1 if measure is TTFT else 1
    for width in (8, 16, 32, 4):
        same = measure.of([r for r in panel.rows if r.case.draft is None and r.case.bits == width])
        ours = [each for each in same if each[0].case.backend in ENGINES]
        peers = [each for each in same if each[0].case.backend not in ENGINES]
        if ours and peers:
            (a, x), (b, y) = (max(group, key=lambda each: sign * each[1]) for group in (ours, peers))
            what = measure.axis if sign > 0 else "ms to the first token"
            ratio = f"{a.case.label}: {digits((x / y) ** sign)}x {b.case.label}"
            where = setting(panel.rows, varying(every))
            return ", ".join(filter(None, (f"{ratio} ({digits(x)} against {digits(y)} {what})", where)))
    return None


def _over_baseline(rows: list[Row], baseline: str) -> Iterator[str]:
    """Yield the best speed-up over the baseline at the smallest and the largest size of each panel."""
    axis = sweep_axis(rows)
    plain = [r for r in rows if r.case.draft is None and r.case.dtype == "float32"]
    for panel in panels(plain, axis):
        for place in dict.fromkeys((panel.places[0], panel.places[-1])):
            here = [r for r in panel.rows if getattr(r.case, axis) == place]
            base = next((r for r in here if r.case.backend == baseline), None)
            others = [r for r in here if r.speedup and r.case.backend != baseline]
            if base is not None and others:
                best = max(others, key=lambda r: r.speedup or 0)
                speeds = [digits(row.number("output_tokens_per_sec")) for row in (best, base)]
                over = f"{base.case.label}{' (extrapolated)' if 'extrapolated' in base.note else ''}"
                where = setting([best], [f for f in varying(rows) if f != axis] + [axis])
                said = f"{best.case.label}: {digits(best.speedup)}x {over}"
                yield f"{said} ({' against '.join(speeds)} output tokens/s), {where}"


def _over_plain(rows: list[Row], every: list[Row]) -> Iterator[str]:
    """Yield the best speed-up of each plain case that a draft or the prefix cache made faster, the highest first."""
    best: dict[object, Row] = {}
    for row in sorted((r for r in rows if r.speedup), key=lambda r: -(r.speedup or 0)):
        best.setdefault(row.case.plain, row)
    for row in best.values():
        speed = digits(getattr(row.figures, "output_tokens_per_sec", None))
        over = (
            f"{row.case.label}: {digits(row.speedup)}x the same without {'it' if row.case.draft is None else 'a draft'}"
        )
        yield f"{over} ({speed} output tokens/s), {setting([row], varying(every))}"
