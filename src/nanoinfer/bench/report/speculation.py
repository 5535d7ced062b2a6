"""The figures of a suite with drafts: tokens/s against k, and each draft and situation over plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt

from nanoinfer.bench.case import Case
from nanoinfer.bench.report.marks import (
    COLORS,
    GREY,
    INK,
    TOOLTIP,
    Figure,
    bar_chart,
    data,
    look,
    record_of,
    y_axis,
)
from nanoinfer.bench.report.panels import DECODE, Measure, setting
from nanoinfer.bench.report.text import clean, positive
from nanoinfer.bench.results import Row


def speculation(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield tokens/s against the number of proposals, then each draft and each situation over plain decoding."""
    plain = {row.case: row for row in rows if row.case.draft is None}
    drafted = [row for row in rows if row.case.draft is not None]
    if not drafted:
        return
    first = drafted[0].case
    swept = [row for row in drafted if row.case.draft == first.draft and row.case.shape == first.shape]
    records = [
        record_of(
            row, DECODE, y, x=str(row.case.speculate_k if row.case.draft else 0), backend=clean(row.case.plain.label)
        )
        for row in [*(plain[c] for c in dict.fromkeys(r.case.plain for r in swept) if c in plain), *swept]
        if (y := DECODE.value(row)) is not None
    ]
    if records:
        color, dash, shape = look([plain[row.case.plain] for row in swept if row.case.plain in plain])
        ks = sorted({r["x"] for r in records} - {"auto"}, key=int)
        x = alt.X("x:O", sort=[*ks, "auto"], axis=alt.Axis(title="proposals at a time (k)", labelAngle=0))
        speed = y_axis(DECODE, records)
        base, numbered = data(records), data([r for r in records if r["x"] != "auto"])
        chart = alt.layer(
            numbered.mark_line(strokeWidth=2).encode(x, speed, color, dash),
            base.mark_point(filled=True, size=55, opacity=1).encode(x, speed, color, shape, tooltip=TOOLTIP),
        ).properties(width="container", height=240)
        caption = f"Draft {clean(first.draft)}; 0 is decoding without a draft. {setting(swept)}."
        yield Figure("k", "Decode throughput against k", caption, chart)
    same = [row for row in drafted if row.case.shape == first.shape and row.case.plain == first.plain]
    others = [row for row in drafted if row.case.plain.shape != first.shape]
    for name, title, some in (
        ("drafts", "Drafts", same),
        ("situations", "Other prompts, samplers and batches", others),
    ):
        best = [row for row in some if row.case.speculate_k == "auto" or name == "situations"]
        records = [
            record_of(row, _SPEEDUP, row.speedup, backend=_situation(row.case, name == "situations"))
            for row in best
            if positive(row.speedup) is not None and row.speedup is not None
        ]
        if records:
            names = [record["backend"] for record in records]
            rule = data([{"y": 1}]).mark_rule(color=INK, strokeDash=[3, 3]).encode(x="y:Q")
            chart = bar_chart(records, _SPEEDUP.axis, names, [COLORS.get(first.backend, GREY)] * len(names)) + rule
            yield Figure(name, f"{title}: speed-up over the same case without a draft", f"{setting(best)}.", chart)


_SPEEDUP = Measure("speedup", "Speed-up", "times plain decoding", lambda row: row.speedup, "x")


def _situation(case: Case, other: bool) -> str:
    """Return the name of a bar: the draft, and where and how it is used."""
    rule = " reject" if case.speculate_rule == "reject" else ""
    name = f"{case.draft} k={case.speculate_k}{rule}"
    words = ("random" if case.workload == "uniform" else case.workload, case.sampler.replace("greedy", ""))
    where = f"{' '.join(filter(None, words))}, batch {case.batch}: " if other else ""
    return clean(where + name)
