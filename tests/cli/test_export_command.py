"""Writing GGUF files: `nanoinfer export` and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.models import CHARS, make_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.gguf.file import read_gguf
from nanoinfer.cli.app import run

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "Q4_0"], ["format='Q4_0'", "F32, F16, BF16, Q8_0, Q4_K_M"]),
        (["--format", "q8_0"], ["format='q8_0'"]),
        (["--tokenizer", "./nowhere"], ["nowhere"]),
        (["--dtype", "float16"], ["--dtype"]),
    ],
)
def test_wrong_flags(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "shakespeare", str(tmp_path / "a.gguf"), *arguments]) == 2
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
    for name, why in (("folder.gguf", "Is a directory"), ("pipe", "it is a pipe or a device")):
        assert run(["export", "shakespeare", str(tmp_path / name), "--force"]) == 2
        assert f"cannot be written: {why}" in capsys.readouterr().err
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


@pytest.mark.parametrize(("program", "code"), [(WITHOUT_TORCH, 0), (INTERRUPTED, 130)])
def test_without_pytorch_and_with_ctrl_c(program: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.gguf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == (["a.gguf"] if code == 0 else [])
