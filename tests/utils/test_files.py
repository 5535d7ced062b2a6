"""The limits of a container: threads, and the memory for keys and values, are those of its control group.

Files from outside: read byte for byte, within a limit, and refused in one line where they are anything else."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from helpers.models import refuses
from nanoinfer.engines import devices
from nanoinfer.errors import NanoinferError, escaped
from nanoinfer.utils import environment, files
from nanoinfer.utils.files import RegularFile, parse_json, read_json, read_limited, read_text

MIB = 1 << 20


class Groups:
    """Control groups in a folder: of a container, which sees its own as the root, unless `own` is another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, own: str = "0::/\n") -> None:
        self.folder = folder / "cgroup"
        (folder / "own").write_text(own)
        monkeypatch.setattr(environment, "_GROUPS", self.folder)
        monkeypatch.setattr(environment, "_OWN", folder / "own")

    def write(self, group: str = "", **files: str) -> None:
        (self.folder / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.folder / group / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_without_limits_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(tmp_path, monkeypatch)
    groups.write(cpu_max="max 100000", memory_max="max", memory_current="5", memory_stat="")
    assert (environment.cpu_limit(), environment.container_memory()) == (None, None)
    assert environment.num_cpus() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("own", ["", "0::/../other\n", "4:memory:/docker/x\n", "nonsense"])
def test_groups_that_cannot_be_seen_set_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    groups = Groups(tmp_path, monkeypatch, own)
    groups.write(cpu_max="100000 100000", memory_max="1000", memory_current="5", memory_stat="")
    groups.write("../other", cpu_max="100000 100000")
    assert (environment.cpu_limit(), environment.container_memory()) == (None, None)


@pytest.mark.parametrize(
    "quota, cpus, threads", [("200000 100000", 2.0, 2), ("150000 100000", 1.5, 2), ("20000 100000", 0.2, 1)]
)
def test_threads_are_those_of_the_cpu_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: float, threads: int
) -> None:
    Groups(tmp_path, monkeypatch).write(cpu_max=quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert environment.cpu_limit() == cpus
    assert environment.num_cpus() == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7})
    assert environment.num_cpus() == 1


def test_free_memory_is_what_the_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(tmp_path, monkeypatch)
    stat = f"anon {40 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}"
    groups.write(memory_max=str(100 * MIB), memory_current=str(70 * MIB), memory_stat=stat)
    assert environment.container_memory() == devices.free_memory("cpu") == 60 * MIB
    groups.write(memory_current=str(200 * MIB))
    assert devices.free_memory("cpu") == 0
    groups.write(memory_max=str(1 << 60))
    assert 0 < devices.free_memory("cpu") < 1 << 50


def test_the_least_limit_of_all_groups_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(tmp_path, monkeypatch, "1:name=systemd:/x\n0::/user/service\n")
    groups.write(cpu_max="100000 100000")  # the root is a parent, too
    groups.write("user", cpu_max="400000 100000", memory_max="900", memory_current="100", memory_stat="")
    groups.write("user/service", cpu_max="300000 100000", memory_max="max", memory_current="50", memory_stat="")
    assert environment.cpu_limit() == 1.0
    assert environment.container_memory() == 800


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


def test_a_file_that_another_process_writes_is_not_written_too(tmp_path: Path) -> None:
    """Each would write into the file of the other, and the first that ends would replace `path` by it."""
    (tmp_path / "t.tmp").write_bytes(b"of a process that was killed")
    with files.replacing(tmp_path / "t", private=True) as first:
        first.write(b"first")
        first.flush()
        with pytest.raises(OSError, match="another process is writing it"):
            files.write_atomically(tmp_path / "t", b"second")
    assert [(p.name, p.read_bytes(), p.stat().st_mode & 0o777) for p in tmp_path.iterdir()] == [("t", b"first", 0o600)]


def test_a_file_that_is_complete_before_it_is_locked_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process renames its file between our opening of it and our lock."""
    (tmp_path / "t.tmp").write_bytes(b"first")
    lock = files.lock
    monkeypatch.setattr(files, "lock", lambda fd: os.replace(tmp_path / "t.tmp", tmp_path / "t") or lock(fd))
    with pytest.raises(OSError, match="another process is writing it"):
        files.write_atomically(tmp_path / "t", b"second")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("t", b"first")]


def test_a_folder_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path(), Path("/")):
        with pytest.raises(OSError, match="it is a folder, a pipe or a device"):
            files.write_atomically(path, b"new")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]
