"""The results file, one JSON document that is checked when it is read, and the metrics that follow from measured rows:
bytes and FLOPs a token, MBU, MFU, ceilings, speed-ups.

    {
      "schema": "nanoinfer-bench/2",      another value is refused
      "suite": "ladder",                  which suite, or "custom"
      "baseline": "recompute",            backend that speed-ups are over, in the same shape and dtype
      "created": "2026-11-21T12:00:00+00:00", "commit": "abc1234", "command": "nanoinfer bench ...",
      "machine": {"cpu": ..., "cores": 2, "threads": 2, "memory_bytes": ..., "gpu": null, "gpu_details": null},
      "versions": {"python": ..., "torch": ..., "nanoinfer": ...},
      "ceiling": {"read_bytes_per_sec": ..., "read_bytes_per_sec_by_size": {"1048576": ...}, "source": "...",
                  "flops_per_sec": {"float32": ..., "bfloat16": ...}},
      "rows": [Row, ...]
    }

`read_bytes_per_sec` is the speed of the main memory; on a GPU that of a copy, bytes read and bytes written together.
`read_bytes_per_sec_by_size` has a CPU's by the size of the buffer (`roofline.ceilings`); it is missing in older files,
whose limits follow from the main memory alone. A row is a case, its measurements, and what the arithmetic derives from
them; every key is a field of `case.Row`. A case that failed is a row with `error` set and no figures. Unknown is null,
never a guess. A row is one line, numbers have 4 significant digits, and fields with their default value are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoinfer.bench.backends import PEERS
from nanoinfer.bench.case import IRREGULAR, Case, Figures, Row
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, escaped, reason, show
from nanoinfer.roofline import arithmetic
from nanoinfer.roofline.ceilings import Ceiling
from nanoinfer.roofline.formats import FORMATS, WeightFormat, int4
from nanoinfer.roofline.report import predict
from nanoinfer.utils.files import parse_json, read_limited

SCHEMA = "nanoinfer-bench/2"
SIGNIFICANT_DIGITS = 4
MAX_BYTES = 16 << 20  # a row has about 1 kB


@dataclass
class Results:
    """A results file."""

    suite: str
    baseline: str
    created: str
    commit: str | None
    command: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    ceiling: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        """Rows without figures."""
        return [row for row in self.rows if row.error is not None]


def to_json(results: Results) -> str:
    """Return the document as JSON text, a line for each row."""
    head = {"schema": SCHEMA} | {f.name: getattr(results, f.name) for f in dataclasses.fields(results)[:-1]}
    rows = ",\n".join(json.dumps(_compact(row), separators=(",", ":")) for row in results.rows)
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}'


def _compact(value: Any) -> Any:
    """Return a value as plain data: without fields that have their default value, numbers rounded."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        return {name: _compact(own) for name, (own, default) in fields.items() if own != default}
    if isinstance(value, dict):
        return {name: _compact(own) for name, own in value.items()}
    if isinstance(value, list):
        return [_compact(own) for own in value]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def from_json(text: str | bytes, source: str) -> Results:
    """Return the results in a JSON document; raise NanoinferError, which names `source`, for anything else."""
    source = escaped(source)
    raw = parse_json(text, f"{source} is no JSON")
    schema = raw.pop("schema", None) if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise NanoinferError(f"{source} has schema {show(schema)}, not {SCHEMA!r}: run the benchmark again")
    try:
        rows = [_row(r) for r in raw.pop("rows")]
        results = _checked(Results(rows=rows, **raw))
        Ceiling.from_results(results.ceiling)
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise NanoinferError(f"{source} does not follow {SCHEMA}: {reason(e)}") from None
    return results


def _row(raw: dict[str, Any]) -> Row:
    case, figures = _checked(Case(**raw.pop("case"))), raw.pop("figures", None)
    row = _checked(Row(case=case, figures=_checked(Figures(**figures)) if figures is not None else None, **raw))
    return row


T = typing.TypeVar("T", Case, Figures, Row, Results)


def _checked(value: T) -> T:
    """Return a dataclass. Raises ValueError unless each field has the type that it is annotated with."""
    for name, hint in typing.get_type_hints(type(value)).items():
        if not _fits(own := getattr(value, name), hint):
            raise ValueError(f"{name} is {show(own)}, a {type(own).__name__}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has a type: _fits([1, 2.5], list[float]) -> True.

    A number is finite as a float; a string has no control characters, which would reach the terminal.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= 1e300  # False for NaN
    return hint is Any or (isinstance(value, hint) and (hint is not str or value.isprintable()))


def read(path: Path) -> Results:
    """Return the results in a file. Raises NanoinferError if it cannot be read or follows another schema."""
    return from_json(read_limited(path, MAX_BYTES, "benchmark results"), str(path))


def headline(results: Results) -> str:
    """Return the ceiling of the measured device on one line."""
    flops = ", ".join(f"{name} {value / 1e12:.2f} TFLOP/s" for name, value in results.ceiling["flops_per_sec"].items())
    bandwidth = results.ceiling["read_bytes_per_sec"] / 1e9
    if results.machine.get("gpu_details"):
        name = results.machine.get("gpu")
        return f"ceiling of {name}: copies {bandwidth:,.0f} GB/s, read and written; products {flops}"
    products = f"; products {flops}" if flops else ""
    by_size = results.ceiling.get("read_bytes_per_sec_by_size")
    reads = f"{bandwidth:.1f} GB/s{f' (up to {max(by_size.values()) / 1e9:.1f} from caches)' if by_size else ''}"
    return f"ceiling of this machine: reads {reads}{products} ({results.machine.get('threads', '?')} threads)"


NAIVE = ("recompute",)  # engines without a cache
_CACHES_IN_16_BITS = ("llama.cpp", "openvino", "vllm")
_HEADS = {"openvino": "int8", "vllm": "bfloat16"}  # peers with an int4 -> the format of the head beside it
BEST_PEER = "the best peer"  # a baseline: the fastest peer of a shape, in any format


def _format(case: Case, config: ModelConfig) -> WeightFormat | None:
    """Return the format of a case's weights, None if it is unknown. Peers have a KV cache in 16 bits."""
    fmt = int4(config) if (case.backend, case.format) == ("native", "int4") else FORMATS.get(case.format)
    if fmt is None or fmt.is_float or case.backend not in _CACHES_IN_16_BITS:
        return fmt
    if case.format == "int4" and case.backend in _HEADS:  # groups of 128 with a scale of 16 bits, but for the head
        head = "transformer.wte.weight" if config.tie_word_embeddings else "lm_head.weight"
        fmt = replace(fmt, group_size=128, group_bytes=2, matrices={head: FORMATS[_HEADS[case.backend]]})
    return replace(fmt, cache_bytes=2, cache_scale_bytes=0)


def costs(case: Case, config: ModelConfig, ceiling: Ceiling) -> dict[str, float]:
    """Return the fields of `Row` that follow from a case and the ceiling; without those that are unknown.

    A decode step at the mean length stands for all. Without a cache a step reads and computes the whole prefix.
    """
    if (fmt := _format(case, config)) is None:
        return {}
    cost = (arithmetic.prefill if case.backend in NAIVE else arithmetic.decode)(config, fmt)
    mean = case.mean_length(config.block_size)
    fields = {
        "weight_bytes": cost.weight_bytes,
        "bytes_per_token": cost.model.bytes(case.batch, mean) / case.batch,
        "flops_per_token": cost.model.flops(case.batch, mean) / case.batch,
    }
    with contextlib.suppress(NanoinferError):  # the throughput in this dtype is unknown
        fields["predicted_tokens_per_sec"] = case.batch / predict(cost.model, ceiling, fmt, case.batch, mean).seconds
    return fields


def fill_in(row: Row, config: ModelConfig, ceiling: Ceiling) -> None:
    """Set `costs` and the share of the bandwidth of a measured row."""
    if row.figures is None:
        return
    case, speed = row.case, row.figures.decode_tokens_per_sec
    row.update(costs(case, config, ceiling))
    if speed is None or row.bytes_per_token is None or case.workload in IRREGULAR or case.draft is not None:
        return
    bandwidth = ceiling.bandwidth(row.bytes_per_token * case.batch)
    row.mbu_percent = 100 * row.bytes_per_token * speed / bandwidth


def add_speculation(row: Row, totals: dict[str, float]) -> None:
    """Set the share of accepted proposals, from the totals of a run."""
    row.draft_share_percent = 100 * totals["draft_share"]
    if judged := totals["num_accepted"] + totals["num_rejected"]:
        row.acceptance_percent = 100 * totals["num_accepted"] / judged
        row.mean_accepted_length = totals["num_accepted"] / totals["num_verify_steps"]


def add_speedups(rows: Sequence[Row], baseline: str) -> None:
    """Set each row's speed-up over backend `baseline` in the same shape and dtype; None where there is none.

    BEST_PEER is the fastest peer of the shape in any format. A row with a draft or other settings is compared to its
    own backend without: the median of the ratios in the rounds of both.
    """
    plain = [r for r in rows if r.case == r.case.plain and r.figures is not None]
    alone = {r.case: r for r in plain}

    best = baseline == BEST_PEER
    same = [r for r in plain if r.case.backend in (PEERS if best else [baseline])]
    same = [r for r in same if best or r.case.quantization is None]
    same.sort(key=lambda r: r.number("output_tokens_per_sec") or 0)
    base = {(r.case.shape, best or r.case.dtype): r for r in same}  # of several the fastest
    for row in rows:
        case = row.case
        other = base.get((case.shape, best or case.dtype)) if case == case.plain else alone.get(case.plain)
        row.speedup = None
        if row.figures is not None and other is not None and other.figures is not None:
            row.speedup = row.figures.output_tokens_per_sec / other.figures.output_tokens_per_sec
            if case != case.plain and row.round_sec and other.round_sec:
                ratios = [a / b for a, b in zip(other.round_sec, row.round_sec, strict=False)]
                row.speedup, row.speedup_min, row.speedup_max = statistics.median(ratios), min(ratios), max(ratios)
