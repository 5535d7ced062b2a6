"""Families against transformers: small random models of odd shapes, saved by transformers and read by this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from helpers.families import CASES, EXPERTS, GEMMA4, SMALL, make_folder  # noqa: E402
from helpers.features import FEATURES  # noqa: E402
from helpers.models import edit_config, refuses  # noqa: E402
from nanoinfer.checkpoints.gpt_loading import load_gpt  # noqa: E402
from nanoinfer.checkpoints.huggingface import open_folder, save  # noqa: E402
from nanoinfer.models.families import FAMILIES  # noqa: E402
from nanoinfer.models.parameters import shapes  # noqa: E402
from nanoinfer.models.stored import read_safetensors  # noqa: E402


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers, and the folder where it is saved."""
    return make_folder(request.param, tmp_path / "model"), tmp_path / "model"


@torch.inference_mode()
def test_logits_equal_those_of_transformers(case: tuple[Any, Path]) -> None:
    model, folder = case
    weights = open_folder(folder)
    gpt = load_gpt(weights)
    assert {name: tuple(p.shape) for name, p in gpt.named_parameters()} == shapes(weights.config)
    idx = torch.randint(0, 61, (2, 90), generator=torch.Generator().manual_seed(0))
    expected = model(idx).logits
    delta = weights.config.recurrence and weights.config.recurrence.rule == "delta"
    bound = 5e-4 if delta else 1e-4  # transformers' two forms of the delta rule differ by as much
    torch.testing.assert_close(gpt(idx), expected, rtol=bound, atol=bound)
    assert expected.std() > 0.5  # logits that hardly differ would show nothing


@pytest.mark.nightly_if(lambda case: case not in FEATURES)
@pytest.mark.slow_if(lambda case: case not in FEATURES[::4])
@torch.inference_mode()
def test_several_files_are_one_model(case: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = case
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    idx = torch.arange(40)[None]
    torch.testing.assert_close(load_gpt(open_folder(tmp_path / "shards"))(idx), model(idx).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_may_be_stored_as_transformers_has_them(name: str, tmp_path: Path) -> None:
    """All experts of a layer in two tensors, by the names of transformers 5."""
    model = make_folder(name, tmp_path / "model")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = read_safetensors(tmp_path / "stacked" / "model.safetensors")
    assert any(key.endswith("experts.gate_up_proj") for key in stored)
    idx = torch.arange(40)[None]
    torch.testing.assert_close(
        load_gpt(open_folder(tmp_path / "stacked"))(idx), model(idx).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "gpt_oss"])
def test_experts_that_do_not_fit_the_config_are_refused(name: str, tmp_path: Path) -> None:
    make_folder(name, tmp_path / "model")
    for count, width in ((4, 20), (6, 20), (7, 12), (5, 12), (6, 14)):
        edit_config(tmp_path / "model", num_local_experts=count, intermediate_size=width)
        if (name, count, width) != ("mixtral", 5, 20):
            refuses(lambda: open_folder(tmp_path / "model"), "tensor")


@pytest.mark.nightly_if(lambda case: "-" in case)
@pytest.mark.slow_if(lambda case: case not in FEATURES)
@torch.inference_mode()
def test_a_saved_model_is_the_same_to_transformers(case: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = case
    weights = open_folder(folder)
    if not FAMILIES[weights.config.family].written:
        refuses(lambda: save(weights, tmp_path / "saved"), f"family {weights.config.family} cannot be written")
        return
    save(weights, tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    assert type(loaded).__name__ == FAMILIES[weights.config.family].architecture
    idx = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(idx).logits, model(idx).logits, rtol=1e-5, atol=1e-5)
    assert open_folder(tmp_path / "saved").config == weights.config


def make_folder_with_images(kind: str, folder: Path) -> Any:
    """Save a random model of texts and images; return the model of transformers."""
    small = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = SMALL | {"head_dim": 8}
    if kind == "gemma3":
        vision = transformers.SiglipVisionConfig(**small, image_size=8, patch_size=4)
        config = transformers.Gemma3Config(text_config=text | {"sliding_window": 6}, vision_config=vision)
        config.mm_tokens_per_image = 1
    elif kind == "gemma4":
        vision = transformers.Gemma4VisionConfig(
            **small, num_key_value_heads=2, head_dim=12, patch_size=4, position_embedding_size=16
        )
        sounds = transformers.Gemma4AudioConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16
        )
        text |= GEMMA4 | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=sounds)
    elif kind.startswith("qwen"):
        text |= {"head_dim": 8 if kind == "qwen3_vl" else None}
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        rope = rope if kind == "qwen3_vl" else {"type": "mrope", "mrope_section": [1, 1, 1], "rope_theta": 2e5}
        size = {"hidden_size": 24, "embed_dim": 24, "out_hidden_size": 40, "depth": 1, "num_heads": 2, "patch_size": 4}
        size |= {"hidden_size": 40} if kind == "qwen2_vl" else {}
        config = transformers.AutoConfig.for_model(kind, text_config=text | {"rope_scaling": rope}, vision_config=size)
    elif "-" not in kind:
        vision = {
            "llava": {"model_type": "clip_vision_model"},
            "internvl": {"image_size": [8, 8], "patch_size": [4, 4]},
        }
        text |= {"model_type": {"llava": "qwen2", "internvl": "qwen3"}.get(kind, "llama"), "pad_token_id": 0}
        vision = small | {"image_size": 8, "patch_size": 4} | vision.get(kind, {})
        config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision, pad_token_id=0)
    else:
        vision = transformers.PixtralVisionConfig(**small, image_size=8, patch_size=4)
        text["model_type"] = kind.partition("-")[2]
        config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3-mistral", "mistral3-ministral3", "llava", "internvl",
                                  "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])  # fmt: skip
def test_the_text_model_of_a_model_of_texts_and_images(kind: str, tmp_path: Path) -> None:
    model = make_folder_with_images(kind, tmp_path / "model")
    weights = open_folder(tmp_path / "model")
    idx = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(load_gpt(weights)(idx), model(idx).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_keys_that_no_layer_reads_may_be_in_the_file(tmp_path: Path) -> None:
    """Files of Gemma 4 may have keys and values for layers that attend to those of others, as in transformers."""
    model, idx = make_folder("gemma4-shared", tmp_path / "model"), torch.arange(40)[None]
    tensors = safetensors.load_file(tmp_path / "model" / "model.safetensors")
    of, to = "model.layers.2.self_attn.", "model.layers.4.self_attn."
    unread = {name.replace(of, to): t * 2 for name, t in tensors.items() if name.startswith(of)}
    safetensors.save_file(unread | tensors, tmp_path / "model" / "model.safetensors")
    assert len(unread | tensors) == len(tensors) + 3
    torch.testing.assert_close(load_gpt(open_folder(tmp_path / "model"))(idx), model(idx).logits, rtol=1e-4, atol=1e-4)


NOT_WEIGHTS = ("model.layers.0.self_attn.rotary_emb.inv_freq", "gpt_neox.layers.0.attention.masked_bias",
               "mtp.layers.0.input_layernorm.weight", "model.layers.0.self_attn.k_scale",
               "model.layers.1.self_attn.v_proj.v_scale", "model.layers.0.attn.bias")  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "gpt_neox", "phi"])
def test_tensors_that_transformers_leaves_out_are_left_out(case: str, tmp_path: Path) -> None:
    model, idx = make_folder(case, tmp_path / "model"), torch.arange(40)[None]
    path = tmp_path / "model" / "model.safetensors"
    beside = {name: torch.ones(1, 1, 4, 4, dtype=torch.bool) for name in NOT_WEIGHTS}
    safetensors.save_file(beside | safetensors.load_file(path), path)
    torch.testing.assert_close(load_gpt(open_folder(path.parent))(idx), model(idx).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("embedding", [True, False])
def test_a_tied_model_with_a_head_of_its_own_is_that_of_transformers(
    embedding: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder("llama-one-head", tmp_path)
    path, idx = tmp_path / "model.safetensors", torch.arange(40)[None]
    tensors = safetensors.load_file(path)
    values = tensors["model.embed_tokens.weight"] if embedding else tensors.pop("model.embed_tokens.weight")
    safetensors.save_file(tensors | {"lm_head.weight": values * 2}, path, {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    weights = open_folder(tmp_path)
    torch.testing.assert_close(load_gpt(weights)(idx), model(idx).logits, rtol=1e-4, atol=1e-4)
    assert weights.config.tie_word_embeddings is not embedding
    assert ("lm_head.weight differs from the embedding" in caplog.text) is embedding


@torch.inference_mode()
def test_longrope_takes_the_divisors_of_the_context_length(tmp_path: Path) -> None:
    """transformers selects them by the length of each text."""
    model, idx = make_folder("phi3-long", tmp_path / "model"), torch.arange(60)[None]
    weights = open_folder(tmp_path / "model")
    torch.testing.assert_close(load_gpt(weights)(idx), model(idx).logits, rtol=1e-4, atol=1e-4)
    short = weights.shortened(32)
    torch.testing.assert_close(load_gpt(short)(idx[:, :32]), model(idx[:, :32]).logits, rtol=1e-4, atol=1e-4)
    assert (load_gpt(weights)(idx[:, :32]) - load_gpt(short)(idx[:, :32])).abs().max() > 0.1
