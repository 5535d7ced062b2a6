"""Writing packed folders: `nanoinfer pack`, its errors, and that nothing is left of an interrupted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.models import CHARS, make_folder, make_model, refuses
from helpers.packed import GREEDY, TEXT, pack
from nanoinfer import LLM
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gpt_loading import weights_of
from nanoinfer.cli.app import run
from nanoinfer.tokenizers.tokenizer import char_to_json


def test_a_folder_with_files_is_not_changed(tmp_path: Path, tiny_folder: Path) -> None:
    before = {p: p.read_bytes() for p in tiny_folder.iterdir()}
    refuses(lambda: pack(tiny_folder, "int8"), str(tiny_folder), "contains files")
    assert {p: p.read_bytes() for p in tiny_folder.iterdir()} == before
    file = tmp_path / "file"
    file.touch()
    refuses(lambda: pack(file, "int8"), str(file), "choose another folder")
    refuses(lambda: pack(file / "a", "int8"), str(file), "choose another folder")
    (tmp_path / "empty").mkdir()
    pack(tmp_path / "empty", "int8")


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
def test_nothing_is_left_if_packing_fails(fault: Any, existed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    if existed:
        folder.mkdir(parents=True)

    def stop(done: int, total: int) -> None:
        assert done <= total
        if done > total // 2:
            assert os.listdir(folder) == [f"{packed.FILE}.tmp"]
            raise fault

    with pytest.raises(BaseException, match="No space left" if isinstance(fault, OSError) else None):
        packed.write_folder(weights_of(make_model()), folder, "int8", char_to_json(CHARS), 1, stop)
    assert os.listdir(tmp_path) == (["a"] if existed else [])
    assert not existed or os.listdir(folder) == []


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(packed, "write_atomically", refuse)
    refuses(lambda: pack(tmp_path / "p", "int8"), str(tmp_path / "p"), "Permission denied", "choose another folder")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--quantization", "int8"], "--output"),
        (["--output", "p"], "--quantization"),
        (["--output", "p", "--quantization", "int3"], "int3"),
        (["--output", "p", "--dtype", "float64"], "float64"),
        (["--output", "p", "--dtype", "float16", "--quantization", "int8"], "either"),
        (["--output", "p", "--quantization", "int8", "--threads", "0"], "threads"),
        (["--output", "p", "--quantization", "int8", "--engine", "native"], "--engine"),
        (["--output", "p", "--quantization", "int8", "--tokenizer", "./nowhere"], "nowhere"),
    ],
)
def test_wrong_flags(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["pack", "shakespeare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert word in captured.err
    assert os.listdir(tmp_path) == []


def test_missing_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (f"{tmp_path}/nowhere", "random:gpt9", str(tmp_path)):
        assert run(["pack", model, "--quantization", "int8", "--output", str(tmp_path / "p")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert os.listdir(tmp_path) == []


def test_a_model_without_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    source = str(make_folder(tmp_path / "m", chars=None))
    assert run(["pack", source, "--dtype", "bfloat16", "-o", str(tmp_path / "p")]) == 0
    assert ("no tokenizer is written: " in caplog.text, "error" in capsys.readouterr().err) == (True, False)
    assert sorted(os.listdir(tmp_path / "p")) == ["config.json", packed.FILE]
    outputs = LLM(str(tmp_path / "p")).generate([TEXT], GREEDY)[0].check().outputs
    assert len(outputs[0].token_ids) == 12


INTERRUPTED = """
import os, signal, sys
from nanoinfer.cli.app import run
from nanoinfer.checkpoints import packed
write = packed._write_pieces
def interrupted(file, *arguments):
    def interrupt(done, total):
        os.kill(os.getpid(), signal.SIGINT)
    write(file, *arguments[:-1], interrupt)
packed._write_pieces = interrupted
sys.exit(run(["pack", "shakespeare", "--quantization", "int8", "-o", sys.argv[1]]))
"""


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "p")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []
