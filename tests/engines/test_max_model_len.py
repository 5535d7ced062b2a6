"""max_model_len: a context length below the model's, for every part that knows one.

dtype="auto": the checkpoint's dtype, where computing in it is fast; and the line that says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from helpers.models import CHARS, TINY, make_folder, make_weights, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import huggingface, packed
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.checkpoints.load import load_model
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.core import build
from nanoinfer.engines import devices
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import LAYOUTS, plan_limits
from nanoinfer.models.presets import PRESETS
from nanoinfer.tokenizers.tokenizer import char_to_json

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 5, 2]}
ENGINE = [name for name, spec in ENGINES.items() if "cpu" in spec.devices and name != "compiled"]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("engine", ENGINE)
def test_a_sequence_ends_at_the_shorter_context(engine: str, tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "model"))
    want = tokens(LLM(folder, engine="recompute"))
    assert TINY.block_size == 32
    llm = LLM(folder, engine=engine, max_model_len=12, max_num_seqs=2)
    assert (llm.config.block_size, llm.engine.limits.block_size) == (12, 12)
    assert llm.engine.limits.max_num_cached_tokens <= 32  # in whole blocks of 16
    assert tokens(llm) == want[: 12 - 3 + 1]
    refuses(
        lambda: llm.generate([{"prompt_token_ids": [1] * 13}], GREEDY), "13 tokens, the maximum context length is 12"
    )
    slid = tokens(llm, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, overflow="slide"))
    assert slid[:10] == want[:10]
    assert len(slid) == 40


def test_it_is_at_most_the_models(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "model"))
    refuses(
        lambda: LLM(folder, max_model_len=33),
        "max_model_len=33 is more than the model's context length of 32 tokens: lower it, or leave it out",
    )
    refuses(lambda: LLM(folder, max_model_len=0), "max_model_len=0 is not an integer >= 1")
    assert LLM(folder, max_model_len=32).config == LLM(folder).config


def test_drafts_and_packed_weights_have_it_too(tmp_path: Path) -> None:
    pytest.importorskip("nanoinfer._native")
    folder = str(make_folder(tmp_path / "model"))
    want = tokens(LLM(folder, engine="native", max_model_len=12))
    for draft in ("self:int8", "self:1", folder):
        llm = LLM(folder, engine="native", max_model_len=12, draft=draft, speculate_k=3)
        assert tokens(llm) == want
        assert llm.core.speculator is not None
        assert llm.core.speculator.drafter.engine.limits.block_size == 12  # type: ignore[attr-defined]
    packed.write_folder(open_folder(Path(folder)), tmp_path / "packed", "int8", None, threads=1)
    llm = LLM(str(tmp_path / "packed"), max_model_len=12)
    assert llm.config.block_size == 12
    assert tokens(llm) == tokens(LLM(folder, engine="native", quantization="int8", max_model_len=12))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_default_plan_of_every_preset_fits_a_small_machine(preset: str, layout: str) -> None:
    """At least one sequence of the whole context, and no more than a quarter of 24 GiB for keys and values."""
    model, free = PRESETS[preset], 24 << 30
    limits = plan_limits(model, EngineConfig(), layout, "float32", free)
    assert limits.block_size == model.block_size
    assert limits.max_num_cached_tokens >= model.block_size
    if layout != "none":
        needed = limits.max_num_cached_tokens * model.kv_bytes_per_token(4)
        assert needed <= max(free // 4, _full(model))


def _full(model: ModelConfig) -> int:
    return model.block_size * model.kv_bytes_per_token(4)


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
