"""max_model_len: a context length below the model's, for every part that knows one."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.models import TINY, make_folder, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import LAYOUTS, plan_limits
from nanoinfer.models.presets import PRESETS

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
