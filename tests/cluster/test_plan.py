"""Pieces of files: every line is in one of them, with its place, whatever the file looks like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.errors import refuses
from nanoinfer.batch.lines import MAX_LINE_BYTES, LineReader
from nanoinfer.ray.actor import check_of
from nanoinfer.ray.plan import MAX_BYTES, MIN_LINES, Files, Piece, plan, read, without


def pieces_of(*names: str) -> list[Piece]:
    pieces: list[Piece] = []
    before = 0
    for name in names:
        made, num_lines = plan(name, Files(), before, len(pieces))
        pieces, before = pieces + made, before + num_lines
    return pieces


def check(*names: Path) -> list[Piece]:
    """Assert that the pieces of files have the lines that a reader of the files has; return the pieces."""
    pieces = pieces_of(*map(str, names))
    found = [line for piece in pieces for line in read(piece, Files())]
    expected = list(LineReader([*map(str, names)]))
    assert [(x.place.number, x.place.file, x.place.line, x.content, x.num_bytes) for x in found] == [
        (x.place.number, x.place.file, x.place.line, x.content, x.num_bytes) for x in expected
    ]
    assert sum(piece.num_lines for piece in pieces) == len(expected)
    return pieces


def test_lines_of_files_with_blank_lines_and_marks(tmp_path: Path) -> None:
    first, second, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    mark = b"\xef\xbb\xbf"
    first.write_bytes(mark + b"".join(b"\n" * (i % 3) + mark + b'{"prompt": "%d"}\n' % i for i in range(200)) + b"\n\n")
    second.write_bytes(b"\n\nx\r\n" * 50 + b"no newline")
    empty.write_bytes(b"\n")
    pieces = check(first, empty, second, first)
    assert [piece.num_lines for piece in pieces[:4]] == [MIN_LINES, MIN_LINES + 1, MIN_LINES + 2, MIN_LINES + 3]


def test_a_line_that_is_too_long_is_one_without_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"first\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\nlast\n")
    pieces = check(path)
    assert [piece.num_lines for piece in pieces] == [1, 1, 1]
    assert next(read(pieces[1], Files())).content is None


def test_a_piece_of_long_lines_has_a_limit_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((b"x" * (MAX_BYTES // 3) + b"\n") * 5)
    assert [piece.num_lines for piece in check(path)] == [2, 2, 1]


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n" * 40)
    _, second = pieces_of(str(path))
    path.write_bytes(b"x\n" * 39)
    refuses(lambda: list(read(second, Files())), "a.jsonl was changed while it was read")
    path.unlink()
    refuses(lambda: list(read(second, Files())), "a.jsonl cannot be read as prompts: No such file")


def test_pieces_without_the_lines_that_are_done() -> None:
    pieces = [Piece("a", i, 1, i + 1, 0, 3) for i in range(3)]
    assert without(pieces, 0) == (pieces, 0)
    assert without(pieces, 2) == (pieces, 2)
    assert without(pieces, 3) == (pieces[1:], 0)
    assert without(pieces, 7) == (pieces[2:], 1)
    assert without(pieces, 9) == ([], 0)


def test_the_check_of_a_line_is_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\n")
    one, two = LineReader([str(path)])
    assert check_of(one) != check_of(two)
    assert check_of(one) == check_of(replace(two, content=b"one"))


def test_row_groups_are_the_pieces_of_a_parquet_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = str(tmp_path / "a.parquet")
    table = pa.table({"prompt": [f"p{i}" for i in range(5)], "n": [1, None, 2, None, 3], "title": ["t"] * 5})
    parquet.write_table(table, path, row_group_size=2)
    pieces, num_lines = plan(path, Files(), before=10)
    assert num_lines == 5
    assert [(p.offset, p.first_line, p.num_lines) for p in pieces] == [(0, 1, 2), (1, 3, 2), (2, 5, 1)]
    lines = [line for piece in pieces for line in read(piece, Files())]
    assert [line.place.number for line in lines] == [11, 12, 13, 14, 15]
    assert [line.content for line in lines[:2]] == [b'{"prompt": "p0", "n": 1}', b'{"prompt": "p1"}']
    parquet.write_table(table.slice(0, 2), path)
    refuses(lambda: list(read(pieces[1], Files())), "a.parquet")


def test_a_malformed_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1 is not all that a file needs PAR1")
    refuses(lambda: plan(str(path), Files()), "bad.parquet cannot be read as prompts")
