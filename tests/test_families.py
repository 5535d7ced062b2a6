"""Families against transformers: small random models of odd shapes, saved by transformers and read by this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanoinfer.models.checkpoints.huggingface import open_folder, save  # noqa: E402
from nanoinfer.models.families import FAMILIES  # noqa: E402
from nanoinfer.models.gpt_loading import load_gpt  # noqa: E402
from nanoinfer.models.parameters import shapes  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# Name -> (config class of transformers, fields beside SMALL's; None removes one)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "hidden_size": 32}),
    "gpt_neox-sequential": (
        "GPTNeoXConfig",
        {"num_key_value_heads": None, "use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "llama": ("LlamaConfig", {}),
    "llama-one-head": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}),
    "llama-all-heads": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 10, "sliding_window": 6, "num_key_value_heads": 1}),
    "gemma3-scaled": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN},
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo2-one-head": ("Olmo2Config", {"num_key_value_heads": 1}),
    "smollm3": ("SmolLM3Config", {"head_dim": 8}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "starcoder2": ("Starcoder2Config", {}),
    "starcoder2-window": ("Starcoder2Config", {"sliding_window": 6, "use_bias": False, "num_key_value_heads": 1}),
    "nanochat": ("NanoChatConfig", {}),
    "nanochat-all-heads": ("NanoChatConfig", {"num_key_value_heads": 4, "final_logit_softcapping": None}),
}


def make_folder(case: str, folder: Path) -> Any:
    """Save a random model of a case into a folder; return the model of transformers."""
    name, fields = CASES[case]
    given = {k: v for k, v in (SMALL | fields).items() if v is not None or k not in SMALL}
    config = getattr(transformers, name)(**given)
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # the initial values are so small that positions hardly matter
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.dim() == 1 and name.endswith("weight") else 0.0))
    model.save_pretrained(folder)
    return model


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers, and the folder where it is saved."""
    return make_folder(request.param, tmp_path / "model"), tmp_path / "model"


@torch.inference_mode()
def test_logits_equal_those_of_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    gpt = load_gpt(open_folder(folder))
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model(idx).logits
    torch.testing.assert_close(gpt(idx), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5  # logits that hardly differ would show nothing


@torch.inference_mode()
def test_several_files_are_one_model(case: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = case
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    idx = torch.arange(40)[None]
    torch.testing.assert_close(load_gpt(open_folder(tmp_path / "shards"))(idx), model(idx).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_saved_model_is_the_same_to_transformers(case: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = case
    weights = open_folder(folder)
    save(weights, tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    assert type(loaded).__name__ == FAMILIES[weights.config.family].architecture
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(idx).logits, model(idx).logits, rtol=1e-5, atol=1e-5)
    assert open_folder(tmp_path / "saved").config == weights.config


def test_the_parameters_of_the_reference_model_are_those_of_the_shapes(case: tuple[Any, Path]) -> None:
    weights = open_folder(case[1])
    found = {name: tuple(p.shape) for name, p in load_gpt(weights).named_parameters()}
    assert found == shapes(weights.config)
