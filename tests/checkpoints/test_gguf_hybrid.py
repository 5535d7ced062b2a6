"""Models with recurrent layers in GGUF files, as llama.cpp's converter orders them (`make test-published` runs it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.adapters import write_adapter
from helpers.families import CASES, make_folder
from helpers.gguf_files import NAMES, Q4_0, Stored, as_f16, as_f32, as_q8_0, write_gguf
from helpers.models import refuses
from helpers.mtp import check_gguf, make_mtp_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.adapters import read_adapter
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder

THEIRS = NAMES | {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "post_attention_layernorm": "post_attention_norm", "conv.conv": "shortconv.conv",
    "model.embedding_norm": "token_embd_norm", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip
IDS = [(7 * i * i + 3 * i) % 61 for i in range(40)]


def tiled(values: np.ndarray, config: Any, part: str) -> np.ndarray:
    """Return a tensor whose heads of values that share a key are not side by side, but beside those of other keys."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    share = config.linear_num_value_heads // keys
    if part == "out_proj":
        return values.reshape(len(values), keys, share, width).swapaxes(1, 2).reshape(values.shape)
    width = width if part in ("in_proj_qkv", "in_proj_z", "conv1d") else 1
    first = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv", "conv1d") else 0
    rest = values[first:].reshape(keys, share, width, -1).swapaxes(0, 1)
    return np.concatenate((values[:first], rest.reshape(values[first:].shape)))


def convert(model: Any, path: Path, store: Any = as_f32, **extra: Any) -> Path:
    """Write a model of transformers' as a GGUF file; what is multiplied with tokens is stored by `store`."""
    config, tensors = model.config, {}
    delta = config.model_type.startswith("qwen")
    for name, p in model.state_dict().items():
        values = p.detach().numpy()
        layer, _, base = name.removeprefix("model.layers.").partition(".") if ".layers." in name else ("", "", name)
        base, _, suffix = base.rpartition(".")
        prefix = f"blk.{layer}." if layer else ""
        if ".experts." in name:
            halves = np.split(values, 2, 1) if name.endswith("gate_up_proj") else [values]
            kinds = ("gate", "up") if len(halves) == 2 else ("down",)
            tensors |= {
                f"{prefix}ffn_{kind}_exps.weight": store(half) for kind, half in zip(kinds, halves, strict=True)
            }
            continue
        if suffix == "expert_bias":
            tensors[f"{prefix}exp_probs_b.bias"] = as_f32(values)
            continue
        if suffix in ("A_log", "dt_bias"):
            values = tiled(-np.exp(values) if suffix == "A_log" else values, config, suffix)
            tensors[prefix + {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}[suffix]] = as_f32(values)
            continue
        if base.endswith(("conv1d", "conv.conv")):
            values = values.squeeze(1)
        if "linear_attn." in base and not base.endswith("norm"):
            values = tiled(values, config, base.rpartition(".")[2])
        if delta and base.endswith(("norm", "layernorm")) and "linear_attn" not in base:
            values = values + np.float32(1)
        theirs = THEIRS[base]
        values = values[0] if theirs.endswith("inp_shexp") else values
        exact = values.ndim == 1 or "conv" in theirs.split(".")[0] + theirs[-6:] or theirs == "ffn_gate_inp"
        tensors[f"{prefix}{theirs}.{suffix}"] = (as_f32 if exact else store)(values)
    return write_gguf(path, metadata(config) | extra, tensors)


def metadata(config: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes."""
    arch = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2", "lfm2_moe": "lfm2moe"}[
        config.model_type
    ]
    attention = [kind == "full_attention" for kind in config.layer_types]
    keys: dict[str, Any] = {
        "context_length": 96, "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "attention.head_count": 4, "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
    }  # fmt: skip
    if arch.startswith("lfm2"):
        keys |= {"shortconv.l_cache": config.conv_L_cache, "attention.layer_norm_rms_epsilon": config.norm_eps}
        keys |= {"attention.head_count_kv": np.array([2 * i for i in attention], np.int32), "vocab_size": 61}
        if arch == "lfm2":
            return named(arch, keys | {"feed_forward_length": 256})  # `block_multiple_of`
        keys |= {"feed_forward_length": config.intermediate_size, "expert_gating_func": 2}
        keys |= {"leading_dense_block_count": config.num_dense_layers, "expert_count": config.num_experts}
        keys |= {"expert_weights_scale": config.routed_scaling_factor, "expert_used_count": config.num_experts_per_tok}
        return named(arch, keys | {"expert_feed_forward_length": config.moe_intermediate_size})
    keys |= {
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "rope.dimension_sections": np.array([1, 1, 0, 0], np.int32), "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": ~np.array(attention),
    }  # fmt: skip
    if arch == "qwen35":
        return named(arch, keys | {"feed_forward_length": config.intermediate_size})
    return named(arch, keys | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    })  # fmt: skip


def named(arch: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in keys.items()}


@torch.inference_mode()
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe"])
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Of heads that share a key and are not side by side, decays, convolutions and gates in their order."""
    model = make_folder(case, tmp_path / "hf")
    weights, _ = gguf.open_file(convert(model, tmp_path / "a.gguf"))
    expected = model(torch.tensor([IDS])).logits
    bound = 1e-4 if case.startswith("lfm2") else 5e-4
    torch.testing.assert_close(load_gpt(weights)(torch.tensor([IDS])), expected, rtol=bound, atol=bound)


def test_the_block_that_predicts_a_further_token(tmp_path: Path) -> None:
    """Its norms have 1 more than in a folder, too; it is read from both as the same."""
    check_gguf(make_mtp_folder("qwen3_5", tmp_path / "hf"), convert, "qwen35", tmp_path, added=1.0)


def store(values: np.ndarray) -> Stored:
    """Store rates and decays in 16 bits, as some do, gates, keys and values in 4 bits, and other matrices in 8 bits."""
    if len(values) < 20 or len(values) not in (32, 192):
        return as_f16(values) if len(values) < 20 else as_q8_0(values)
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 7).astype(np.float16)
    q = np.clip(np.round(blocks / scale.astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    codes = q[:, :16] | q[:, 16:] << 4
    return Stored(values.shape, Q4_0, np.concatenate((scale.view(np.uint8), codes), 1).tobytes())


def test_engine_native_reads_parts_in_several_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads that are not side by side; queries and their gates are one tensor, and few rows have another format."""
    name, fields = CASES["qwen3_5"]
    widths = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "linear_value_head_dim": 32}
    monkeypatch.setitem(CASES, "qwen3_5", (name, fields | widths | {"linear_key_head_dim": 16}))
    path = convert(make_folder("qwen3_5", tmp_path / "hf"), tmp_path / "a.gguf", store)
    weights, _ = gguf.open_file(path)
    formats = [weights.block_formats[f"transformer.h.{i}.attn.c_attn.weight"] for i in (0, 2)]
    assert formats[0] == (("q8_0", 288), ("q4_0", 192), ("q8_0", 12))
    assert formats[1] == (("q8_0", 64), ("q4_0", 64), ("q8_0", 64))  # queries, keys and values, gates
    with torch.inference_mode():
        expected = load_gpt(weights)(torch.tensor([IDS]))[0, -1].log_softmax(-1)
    for dtype, error in (("float32", 2e-3), ("auto", 0.3)):  # with blocks, activations have 8 bits
        llm = LLM(str(path), engine="native", dtype=dtype, kv_cache_dtype="float32")
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=3)
        (found,) = llm.generate([{"prompt_token_ids": IDS}], params)
        for token, one in found.outputs[0].logprobs[0].items():
            assert one.logprob == pytest.approx(float(expected[token]), abs=error)


def test_a_packed_file_keeps_the_order_of_its_heads(tmp_path: Path) -> None:
    weights, _ = gguf.open_file(convert(make_folder("qwen3_5", tmp_path / "hf"), tmp_path / "a.gguf"))
    packed.write_folder(weights, tmp_path / "packed", "float32", None, threads=1)
    state = LLM(str(tmp_path / "packed")).config.recurrence
    assert state == weights.config.recurrence
    assert state is not None
    assert state.tiled


def test_an_adapter_whose_heads_have_another_order_is_refused(tmp_path: Path) -> None:
    """A folder of peft for a GGUF file; one that updates MLPs alone is loaded."""
    path = convert(make_folder("qwen3_5", tmp_path / "hf"), tmp_path / "a.gguf")
    config, theirs = gguf.open_file(path)[0].config, open_folder(tmp_path / "hf").config
    folder = write_adapter(tmp_path / "lora", theirs)
    refuses(lambda: read_adapter(folder, config, 64), "a folder of peft has the heads of recurrent layers in another")
    others = write_adapter(tmp_path / "mlp", theirs, targets=("mlp.c_fc", "mlp.c_proj"))
    assert len(read_adapter(others, config, 64).updates) == 2 * config.n_layer


def test_keys_and_decays_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = make_folder("qwen3_5", tmp_path / "hf")
    for key, value, message in (
        ("attention.recurrent_layers", np.ones(5, bool), "is not a list of 6 booleans"),
        ("ssm.inner_size", 121, "is no multiple of the 6 heads of qwen35.ssm.time_step_rank"),
        ("ssm.group_count", 4, "6 heads of a state are no multiple of 4 of keys"),
        ("full_attention_interval", 0, "full_attention_interval=0"),
    ):
        path = convert(model, tmp_path / "a.gguf", **{f"qwen35.{key}": value})
        refuses(lambda path=path: gguf.open_file(path), message)
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log[0] = -np.inf
    path = convert(model, tmp_path / "a.gguf")
    refuses(lambda: list(gguf.open_file(path)[0].read()), "ssm_a has numbers that are not negative")
    model = make_folder("lfm2", tmp_path / "hf2")
    for counts, message in (
        ([0, 2], "is not a list of 5 numbers"),
        ([0, 0, 2, 0, 1], "[0, 0, 2, 0, 1] is not an integer"),
    ):
        path = convert(model, tmp_path / "a.gguf", **{"lfm2.attention.head_count_kv": np.array(counts, np.int32)})
        refuses(lambda path=path: gguf.open_file(path), message)
