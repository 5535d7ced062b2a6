"""The results file: one JSON document, checked when it is read.

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

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.bench.case import Case, Figures, Row
from nanoinfer.errors import NanoinferError, escaped, reason, show
from nanoinfer.roofline.ceilings import Ceiling
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
