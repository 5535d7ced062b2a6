"""--calibrate of `nanoinfer pack`: results, what files record, and errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.packed import FILE, open_folder
from nanoinfer.cli.app import run
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.stored import read_with_metadata

pytestmark = pytest.mark.skipif(ENGINES["native"].unavailable() is not None, reason="the native extension is not built")
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
INT4 = ["--quantization", "int4", "--threads", "1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "play.txt"
    path.write_text("To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 80)
    return path


def test_a_packed_folder_is_calibrated(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, calibrated = tmp_path / "plain", tmp_path / "calibrated"
    assert run(["pack", "shakespeare", "-o", str(plain), *INT4]) == 0
    flags = ["--calibrate", str(text), "--calibrate-tokens", "1100"]
    capsys.readouterr()
    assert run(["pack", "shakespeare", "-o", str(calibrated), *INT4, *flags]) == 0
    assert capsys.readouterr().err.endswith(f"bytes, calibrated on 1,024 tokens of {text}\n")
    metadata = read_with_metadata(calibrated / FILE)[1]
    assert metadata["calibration_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert metadata["calibration_tokens"] == "1024"
    assert (plain / FILE).stat().st_size == (calibrated / FILE).stat().st_size
    before, after = (open_folder(folder).arrays for folder in (plain, calibrated))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name, array in before.items() if array.dtype == np.uint8}
    assert len(LLM(str(calibrated), threads=1).generate("To", GREEDY)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (None, INT4, ["play.txt", "No such file"]),
        (b"To be", INT4, ["play.txt", "tokens, must have at least 512: use a longer text"]),
        (b"\xff", INT4, ["play.txt is not UTF-8"]),
        (b"x" * 99999, [*INT4, "--calibrate-tokens", "0"], ["calibrate_tokens=0"]),
        (b"x", ["--quantization", "int8"], ["--calibrate has no effect on int8"]),
        (b"x", ["--dtype", "float32"], ["--calibrate has no effect on float32"]),
    ],
)
def test_errors_of_pack(
    content: bytes | None, flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "play.txt", tmp_path / "packed"
    if content is not None:
        path.write_bytes(content)
    assert run(["pack", "shakespeare", "-o", str(folder), "--calibrate", str(path), *flags]) != 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not folder.exists()


def test_a_model_without_a_tokenizer(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["pack", "random:smollm2-135m", "-o", str(tmp_path / "p"), *INT4, "--calibrate", str(text)]
    assert run(arguments) != 0
    assert "--calibrate needs a tokenizer" in capsys.readouterr().err
