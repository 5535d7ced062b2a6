"""Models with recurrent layers in GGUF files, as llama.cpp's converter orders them (`make test-published` runs it)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.adapters import write_adapter
from helpers.families import CASES, make_folder
from helpers.gguf_files import Q4_0, Stored, as_f16, as_q8_0, convert
from helpers.models import refuses
from helpers.mtp import check_gguf, make_mtp_folder
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.adapters import read_adapter
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.gguf.hybrid import nemotron
from nanoinfer.checkpoints.gguf.metadata import Metadata
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder

IDS = [(7 * i * i + 3 * i) % 61 for i in range(40)]


def test_the_block_that_predicts_a_further_token(tmp_path: Path) -> None:
    """Its norms have 1 more than in a folder, too; it is read from both as the same."""
    check_gguf(make_mtp_folder("qwen3_5", tmp_path / "hf"), tmp_path)


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


def test_groups_of_experts_without_the_number_for_a_token_are_refused() -> None:
    """llama.cpp's converter writes `n_group` of Nemotron-H, and not `topk_group`."""
    m = Metadata({"nemotron_h_moe.expert_group_count": 4}, "nemotron_h_moe", {})
    refuses(lambda: nemotron(m, {}), "nemotron_h_moe.expert_group_count=4 is not supported: only 1 is")
