"""The presets: shapes of published models."""

from __future__ import annotations

import pytest

from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.checkpoints.load import load_model, split_wide
from nanoinfer.models import presets
from nanoinfer.models.parameters import num_parameters
from nanoinfer.models.presets import PRESETS, REPOSITORIES
from nanoinfer.roofline.formats import find_shape

# Parameters that the models' pages on the Hub give, a tied head once. pythia-160m's page counts both embeddings, and
# qwen3.5-0.8b's the vision tower and the block that predicts a further token.
PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096,
    "llama-3.2-1b": 1_235_814_400, "gemma3-270m": 268_098_176, "pythia-160m": 162_322_944, "olmo2-1b": 1_484_916_736,
    "qwen3.5-0.8b": 752_393_024, "lfm2-1.2b": 1_170_340_608, "granite-4-h-350m": 340_332_224,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_the_published_model(name: str) -> None:
    assert num_parameters(PRESETS[name]) == PARAMETERS[name]
    assert find_shape(f"random:{name}") == find_shape(name) == PRESETS[name]


def test_a_preset_is_the_short_name_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repository: str) -> None:
        asked.append(repository)
        raise NanoinferError("no network")

    monkeypatch.setattr("nanoinfer.checkpoints.hub._list", download)
    for name in ("gpt2-xl", "smollm2-135m", "some/model"):
        with pytest.raises(NanoinferError, match="no network"):
            load_model(name)
    assert asked == ["openai-community/gpt2-xl", "HuggingFaceTB/SmolLM2-135M", "some/model"]
    assert REPOSITORIES.keys() == PRESETS.keys()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A preset with the layers of a published model, but fewer and narrower ones."""
    raw = presets._PRESETS["pythia-160m"][1] | {"hidden_size": 192, "num_hidden_layers": 1, "intermediate_size": 8}
    monkeypatch.setitem(PRESETS, "pythia-160m", presets._read(raw))
    return "random:pythia-160m"


def test_a_preset_of_another_family_has_no_default_tokenizer(small: str) -> None:
    llm = LLM(small, engine="recompute", dtype="float32")
    assert llm.tokenizer is None
    (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(NanoinferError, match=r"has no tokenizer: .*give token ids, or tokenizer="):
        llm.generate("To be")
    llm = LLM(small, engine="recompute", tokenizer="shakespeare", dtype="float32")
    assert llm.generate("To be", SamplingParams(max_tokens=2))[0].prompt == "To be"


def test_only_presets_of_gpt2_widen() -> None:
    assert split_wide("wide:shakespeare:gpt2") == ("shakespeare", PRESETS["gpt2"])
    with pytest.raises(NanoinferError, match=r"its preset is one of gpt2, gpt2-medium, gpt2-large, gpt2-xl$"):
        split_wide("wide:shakespeare:qwen3-0.6b")
