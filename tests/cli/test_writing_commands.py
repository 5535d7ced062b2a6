"""Writing GGUF files: `nanoinfer export` and its errors.

Writing packed folders: `nanoinfer pack`, its errors, and that nothing is left of an interrupted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.models import CHARS, make_folder, make_model, refuses
from helpers.packed import TEXT, pack
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gguf.file import read_gguf
from nanoinfer.checkpoints.gpt_loading import weights_of
from nanoinfer.cli.app import run
from nanoinfer.tokenizers.tokenizer import char_to_json

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def test_a_built_in_model_gives_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shakespeare.gguf"
    assert run(["export", "shakespeare", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{path}: shakespeare in F16, {path.stat().st_size:,} bytes\n"
    metadata = read_gguf(path).metadata
    assert (metadata["general.name"], metadata["general.file_type"]) == ("shakespeare", 1)
    expected, found = (
        LLM(name, dtype="float32").generate("O Romeo,", GREEDY)[0] for name in ("shakespeare", str(path))
    )
    assert found.outputs[0].text == expected.outputs[0].text


EXPORT, PACK = ("export", "shakespeare", "a.gguf"), ("pack", "shakespeare")
INT8 = ("--quantization", "int8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*EXPORT, "--format", "Q4_0"], ["format='Q4_0'", "F32, F16, BF16, Q8_0, Q4_K_M"]),
        ([*EXPORT, "--format", "q8_0"], ["format='q8_0'"]),
        ([*EXPORT, "--tokenizer", "./nowhere"], ["nowhere"]),
        ([*EXPORT, "--dtype", "float16"], ["--dtype"]),
        ([*PACK, *INT8], ["--output"]),
        ([*PACK, "--output", "p"], ["--quantization"]),
        ([*PACK, "--output", "p", "--quantization", "int3"], ["int3"]),
        ([*PACK, "--output", "p", "--dtype", "float64"], ["float64"]),
        ([*PACK, "--output", "p", "--dtype", "float16", *INT8], ["either"]),
        ([*PACK, "--output", "p", *INT8, "--threads", "0"], ["threads"]),
        ([*PACK, "--output", "p", *INT8, "--engine", "native"], ["--engine"]),
        ([*PACK, "--output", "p", *INT8, "--tokenizer", "./nowhere"], ["nowhere"]),
    ],
)
def test_wrong_flags(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)
    assert os.listdir(tmp_path) == []


def test_a_file_that_exists_is_replaced_only_if_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.gguf"
    path.write_text("old")
    assert run(["export", "shakespeare", str(path)]) == 2
    assert "a.gguf exists" in (err := capsys.readouterr().err)
    assert "--force" in err
    assert path.read_text() == "old"
    assert run(["export", "shakespeare", str(path), "--force"]) == 0
    assert path.read_bytes()[:4] == b"GGUF"
    assert run(["export", str(path), str(path), "--force", "--format", "Q8_0"]) == 0  # itself
    assert read_gguf(path).metadata["general.file_type"] == 7


def test_places_that_cannot_be_written_and_models_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for model, path, word in (
        ("shakespeare", tmp_path / "no" / "a.gguf", "choose another place"),
        ("shakespeare", tmp_path / "folder.gguf", "--force"),
        ("random:gpt9", tmp_path / "a.gguf", "gpt9"),
        (str(tmp_path), tmp_path / "a.gguf", "config.json"),
    ):
        assert run(["export", model, str(path)]) == 2
        assert word in (err := capsys.readouterr().err)
        assert err.count("\n") == 1
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "folder.gguf", tmp_path / "pipe", "."):
        assert run(["export", "shakespeare", str(path), "--force"]) == 2
        assert "cannot be written: it is a folder, a pipe or a device" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["folder.gguf", "pipe"]


def test_tokenizers_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    source, path = str(make_folder(tmp_path / "m", chars=CHARS[:-1] + "é")), str(tmp_path / "a.gguf")
    assert run(["export", source, path]) == 2
    err = capsys.readouterr().err
    assert "only ASCII can be written" in err
    assert "--no-tokenizer" in err
    assert run(["export", source, path, "--no-tokenizer"]) == 0
    assert "error" not in capsys.readouterr().err
    without = str(make_folder(tmp_path / "n", chars=None))
    assert run(["export", without, str(tmp_path / "b.gguf")]) == 0
    assert ("no tokenizer is written: model" in caplog.text, "error" in capsys.readouterr().err) == (True, False)
    for file in (path, str(tmp_path / "b.gguf")):
        assert len(LLM(file).generate([3, 4], GREEDY)[0].outputs[0].token_ids) == 12


def test_weights_that_are_quantized_already(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "a.gguf"
    assert run(["export", "shakespeare", str(source), "--format", "Q8_0"]) == 0
    larger = f"the file is larger than the {source.stat().st_size:,} bytes of {source}, which is quantized"
    for format, expected in (("Q8_0", []), ("F16", [larger])):
        caplog.clear()
        assert run(["export", str(source), str(tmp_path / "b.gguf"), "--format", format, "--force"]) == 0
        assert caplog.messages == expected
    caplog.clear()
    assert run(["pack", str(source), "--quantization", "int8", "--output", str(tmp_path / "packed")]) == 0
    assert caplog.messages == [f"{source} is quantized already (q8_0): int8 rounds its weights again"]


def test_packed_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nanoinfer._native")
    assert run(["pack", "shakespeare", "--quantization", "int8", "-o", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    assert run(["export", str(tmp_path / "p"), str(tmp_path / "a.gguf")]) == 2
    assert "give the original model" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["p"]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from nanoinfer.cli.app import run
sys.exit(run(["export", "shakespeare", sys.argv[1], "--format", "Q8_0"]))
"""

INTERRUPTED = """
import os, signal, sys
from nanoinfer.cli.app import run
from nanoinfer.checkpoints.gguf import export as gguf_export
write = gguf_export._write
def interrupted(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGINT)
gguf_export._write = interrupted
sys.exit(run(["export", "shakespeare", sys.argv[1]]))
"""

PACKING = """
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


@pytest.mark.parametrize(("program", "code"), [(WITHOUT_TORCH, 0), (INTERRUPTED, 130), (PACKING, 130)])
def test_without_pytorch_and_with_ctrl_c(program: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.gguf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == (["a.gguf"] if code == 0 else [])


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
