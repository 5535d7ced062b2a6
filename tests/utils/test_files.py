"""Files from outside: read byte for byte, within a limit, and refused in one line where they are anything else."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from helpers.models import refuses
from nanoinfer.errors import NanoinferError, escaped
from nanoinfer.utils import files
from nanoinfer.utils.files import RegularFile, parse_json, read_json, read_limited, read_text


def test_text_is_read_character_for_character(tmp_path: Path) -> None:
    raw = "\ufeffa\r\nb\rc\nd\u2028é🎉\x00\x1a".encode()
    (tmp_path / "t").write_bytes(raw)
    assert read_text(tmp_path / "t").encode() == raw


def test_text_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"abc\xff")
    refuses(lambda: read_text(tmp_path / "t"), "not UTF-8", "byte 3")


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_bytes(b"12345")
    assert read_limited(tmp_path / "t", 5, "a config") == b"12345"
    monkeypatch.setattr(os, "preadv", None)  # a read would fail
    refuses(lambda: read_limited(tmp_path / "t", 4, "a config"), "5 bytes", "a config is 4")


@pytest.mark.parametrize("place", ["pipe", "folder", "/dev/zero", "missing", "a\0b", "x" * 5000])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    refuses(lambda: read_limited(tmp_path / place, 100, "a config"), "a config")


def test_a_file_cut_short_after_its_size_was_checked(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(100))
    file = RegularFile(tmp_path / "t", "a text")
    assert file.read(10, 40) == bytes(40)
    os.truncate(tmp_path / "t", 50)
    refuses(lambda: file.read(0, file.size), "was changed while it was read")
    refuses(lambda: file.read(10, 10), "was changed while it was read")


def test_a_file_is_closed_when_it_is_used_no_more(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"a")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        read_limited(tmp_path / "t", 5, "a text")
        refuses(lambda: read_limited(tmp_path, 5, "a text"), "a folder")
    gc.collect()  # the errors keep their frames
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "text,words",
    [
        ("[" * 100_000, ""),
        ('{"a":' * 100_000, ""),
        ("1" * 5000, "5000 characters"),
        ("-1." + "1" * 5000, "5003 characters"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' is duplicated"),
        ('{"\x1b\n": 1}', ""),
        ("", ""),
        ("\ud800", ""),
        (b"\xff\xfe\x00", ""),
    ],
    ids=lambda v: repr(v[:12]),
)
def test_json_that_is_refused(text: str | bytes, words: str) -> None:
    refuses(lambda: parse_json(text, "x.json cannot be read"), "x.json cannot be read", words)


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"a": [1, 2.5, null, true, "é", 1000000000000000000000]}')
    assert read_json(tmp_path / "t", 100, "a config") == {"a": [1, 2.5, None, True, "é", 10**21]}


def test_paths_are_shown_without_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\nb"
    with pytest.raises(NanoinferError) as caught:
        read_limited(path, 1, "a config")
    assert str(caught.value).isprintable()
    assert r"a\x1b[31m\nb" in str(caught.value)
    assert escaped("日本 é\ud800\u2028") == r"日本 é\ud800\u2028"
    assert escaped("x" * 301) == "x" * 300 + "..."


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_atomically(tmp_path / "t", b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_atomically(tmp_path / "t", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert (tmp_path / "t").read_bytes() == b"old"


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="it is a pipe or a device"):
            files.write_atomically(tmp_path / name, b"new")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]
