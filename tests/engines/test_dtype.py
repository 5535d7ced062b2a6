"""dtype="auto": the checkpoint's dtype, where computing in it is fast; and the line that says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from helpers.models import CHARS, TINY, make_weights
from nanoinfer import LLM
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.load import load_model
from nanoinfer.core import build
from nanoinfer.engines import devices
from nanoinfer.errors import NanoinferError
from nanoinfer.tokenizers.tokenizer import char_to_json

ALL = ("float32", "bfloat16", "float16")
OLD = ("float32", "float16")  # GPUs before Ampere


@pytest.mark.parametrize(
    "device, have, stored, expected",
    [
        ("cpu", ALL, "float32", "float32"),
        ("cpu", ALL, "bfloat16", "bfloat16"),
        ("cpu", ALL, "float16", "float32"),
        ("cuda:0", ALL, "float32", "bfloat16"),
        ("cuda:0", ALL, "bfloat16", "bfloat16"),
        ("cuda:0", ALL, "float16", "float16"),
        ("cuda:0", OLD, "float32", "float16"),
        ("cuda:0", OLD, "bfloat16", "float16"),
    ],
)
def test_what_auto_is(
    monkeypatch: pytest.MonkeyPatch, device: str, have: tuple[str, ...], stored: str, expected: str
) -> None:
    monkeypatch.setattr(devices, "supported_dtypes", lambda device: have)
    assert devices.resolve_dtype("auto", device, stored) == expected
    assert devices.resolve_dtype("float16", device, stored) == "float16"


@pytest.mark.parametrize("stored, expected", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_a_model_runs_in_its_own_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str, expected: str
) -> None:
    huggingface.save(make_weights(TINY), tmp_path, char_to_json(CHARS), stored)
    with caplog.at_level(logging.INFO, "nanoinfer"):
        llm = LLM(str(tmp_path), engine="native", max_num_seqs=1)
    assert llm.dtype == expected
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("dtype=auto")]
    assert line.startswith(f"dtype=auto: using {expected}")
    assert (f"the checkpoint is {stored}" in line) == (stored != expected)
    assert LLM(str(tmp_path), engine="native", max_num_seqs=1, dtype="float32").dtype == "float32"


def test_the_line_is_left_out_where_the_dtype_is_given(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanoinfer"):
        LLM(str(tiny_folder), engine="native", max_num_seqs=1, dtype="float32")
        LLM(str(tiny_folder), engine="native", max_num_seqs=1, quantization="int8")
    assert not any(r.getMessage().startswith("dtype=auto") for r in caplog.records)


def test_the_built_in_model_is_stored_in_16_bits_and_runs_in_float32() -> None:
    assert load_model("shakespeare").weights.stored_dtype == "float16"
    assert LLM("shakespeare", device="cpu", max_num_seqs=1).dtype == "float32"


def test_a_wrong_engine_is_refused_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object, **options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load_model", fetch)
    for options in ({"engine": "nosuch"}, {"engine": "static", "quantization": "int8"}):
        with pytest.raises(NanoinferError, match=r"engine='(nosuch|static)'"):
            LLM("owner/repo", **options)
