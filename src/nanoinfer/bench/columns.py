"""The columns of the tables: one list for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nanoinfer.bench.formatting import DASH, digits
from nanoinfer.bench.report.panels import ceiling, share_of_ceiling
from nanoinfer.bench.row import Row


class Column(NamedTuple):
    """One column: its heading on the page, what it shows of a row, its heading on the terminal, and what that means.

    Columns without a heading on the terminal are on the page only.
    """

    name: str
    show: Callable[[Row], str]
    head: str = ""
    legend: str = ""


def figure(name: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Return the function that shows `Row.number`."""
    return lambda row: digits(row.number(name, scale))


def _range(row: Row) -> str:
    return f"{row.speedup_min:.2f}-{row.speedup_max:.2f}" if row.speedup_min and row.speedup_max else DASH


COLUMNS = (
    Column("decode tokens/s", figure("decode_tokens_per_sec"), "tok/s", "all sequences"),
    Column("ceiling", lambda r: digits(ceiling(r)), "limit", "the roofline's"),
    Column("of it, %", lambda r: digits(share_of_ceiling(r))),
    Column("spread, %", figure("spread_percent")),
    Column("output tokens/s", figure("output_tokens_per_sec"), "output/s", "tokens, by wall time"),
    Column("speed-up", figure("speedup"), "x", "speed-up"),
    Column("prefill tokens/s", figure("prefill_tokens_per_sec")),
    Column("TTFT, ms", figure("ttft_sec", 1e3), "TTFT ms"),
    Column("TPOT, ms", figure("tpot_sec", 1e3), "TPOT ms"),
    Column("p90", figure("tpot_p90_sec", 1e3)),
    Column("p99", figure("tpot_p99_sec", 1e3), "p99 ms"),
    Column("longest gap, ms", figure("worst_gap_sec", 1e3), "gap ms", "the longest between two tokens of a sequence"),
    Column("total, s", figure("total_sec"), "total s"),
    Column("rounds", figure("rounds")),
    Column("peak memory, MB", figure("peak_memory_bytes", 1e-6), "MB"),
    Column("weights, MB", figure("weight_bytes", 1e-6)),
    Column("MB a token", figure("bytes_per_token", 1e-6)),
    Column("GFLOP a token", figure("flops_per_token", 1e-9)),
    Column("MBU, %", figure("mbu_percent"), "MBU %"),
    Column("MFU, %", figure("mfu_percent")),
    Column("accepted, %", figure("acceptance_percent"), "accepted %"),
    Column("accepted a step", figure("mean_accepted_length"), "a step", "accepted in a verify step"),
    Column("time in the draft, %", figure("draft_share_percent"), "draft %", "share of the time"),
    Column("kernels a step", figure("kernels_per_step"), "kernels", "of a decode step"),
    Column("kernels a layer", figure("kernels_per_layer"), "a layer", "kernels"),
    Column("launches a step", figure("launches_per_step"), "launches", "of a decode step"),
    Column("verifying 5 tokens, decodes", figure("verify_ratio"), "verify", "a step of 5 tokens over one of 1"),
    Column("same tokens", lambda r: DASH if r.same_tokens is None else "yes" if r.same_tokens else "NO"),
    Column("note", lambda r: r.note or DASH),
)
TERMINAL_ONLY = (
    Column("", _range, "range", "of the rounds' speed-ups"),
    Column("", lambda r: r.predicted_speculation or DASH, "best k", "by the roofline at that acceptance"),
)
