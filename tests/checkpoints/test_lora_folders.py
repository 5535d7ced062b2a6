"""Reading LoRA adapters: logits and tokens are those of peft, and what is malformed or unsupported ends in one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from helpers import gguf_files
from helpers.adapters import merged, write_adapter
from helpers.families import make_config, random_model
from helpers.models import TINY, make_folder, refuses
from nanoinfer import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from nanoinfer.checkpoints.adapters import read_adapter
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder, read_config
from nanoinfer.cli.app import run
from nanoinfer.models.stored import read_safetensors, to_safetensors

PROMPTS = [[5, 9, 11, 30, 7, 2, 3], [3], list(range(17, 29))]
GPT2 = {"vocab_size": 61, "n_positions": 96, "n_embd": 24, "n_layer": 3, "n_head": 4}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[list[str] | str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama-one-head": (["q_proj", "v_proj"], {"use_rslora": True, "r": 7}),
    "qwen2": (LLAMA, {"rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 6}, "alpha_pattern": {"v_proj": 1}}),
    "gemma": ("all-linear", {"lora_alpha": 3}),
    "gpt2": (["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    "phi3": (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {}),
    "gpt_neox": (["query_key_value", "dense", "dense_h_to_4h"], {"layers_to_transform": [0, 2]}),
    "falcon_h1": ([*LLAMA, "in_proj"], {}),  # its weights have factors
    "ernie4_5": (LLAMA, {"init_lora_weights": "gaussian"}),
}
"""Case -> target_modules, and further fields of LoraConfig."""


def peft_folders(case: str, path: Path) -> Any:
    """Save a random base and a random adapter to the folders "base" and "adapter"; return peft's model."""
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(**GPT2) if case == "gpt2" else make_config(case)
    base = random_model(config)
    base.save_pretrained(path / "base")
    targets, fields = CASES[case]
    options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "target_modules": targets}
    model = peft.get_peft_model(base, peft.LoraConfig(**options | fields)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn_like(p) * 0.3)
    model.save_pretrained(path / "adapter")
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    model = peft_folders(case, tmp_path)
    weights = open_folder(tmp_path / "base")
    adapter = read_adapter(tmp_path / "adapter", weights.config, 16)
    gpt, ids = merged(load_gpt(weights), adapter), torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        expected = model(ids).logits
        with model.disable_adapter():
            assert (model(ids).logits - expected).abs().max() > 0.1
    torch.testing.assert_close(gpt(ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("engine", ["recompute", "static", "native"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_tokens_are_those_of_peft(case: str, engine: str, tmp_path: Path) -> None:
    """A prompt with the adapter, one without, and one with another adapter, in one batch."""
    model, params = peft_folders(case, tmp_path), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    config = read_config(tmp_path / "base" / "config.json")
    write_adapter(tmp_path / "other", config, seed=5)
    llm = LLM(str(tmp_path / "base"), engine=engine, enable_lora=True)
    lora, other = (LoRARequest(name, i + 1, str(tmp_path / name)) for i, name in enumerate(("adapter", "other")))
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    outputs = llm.generate(prompts, params, lora_request=[lora, None, other])
    assert outputs[0].outputs[0].token_ids == greedy(model, PROMPTS[0], 12)
    with model.disable_adapter():
        assert outputs[1].outputs[0].token_ids == greedy(model, PROMPTS[1], 12)
    gpt = merged(load_gpt(open_folder(tmp_path / "base")), read_adapter(other.lora_path, config, 16))
    assert outputs[2].outputs[0].token_ids == greedy(lambda ids: gpt(ids), PROMPTS[2], 12)


def greedy(model: Callable[[torch.Tensor], Any], prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]))
            ids.append(int(getattr(logits, "logits", logits)[0, -1].argmax()))
    return ids[len(prompt) :]


PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

# Files that are refused --------------------------------------------------------------------------------------


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.read() for name, tensor in read_safetensors(path).items()}
    change(tensors)
    path.write_bytes(to_safetensors(tensors))


KEY = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported: only LORA is"),
        ({"use_dora": True}, "use_dora=True: DoRA layers are not supported: merge the adapter by peft"),
        ({"bias": "all"}, "bias='all' is not supported: merge the adapter by peft"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: whole modules in the adapter"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"r": 4}, "lora_A has rank 3, the config says 4"),
        ({"r": 65}, "rank 65 is more than max_lora_rank=64: raise it"),
        ({"r": "3"}, "r='3' is not an integer >= 1"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan is not a finite number"),
        ({"rank_pattern": {"(a+)+": 3}}, "rank_pattern={'(a+)+': 3} is not an object whose keys are names"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    edit(write_adapter(tmp_path / "adapter", TINY), **changes)
    refuses(lambda: read_adapter(tmp_path / "adapter", TINY, 64), str(tmp_path / "adapter"), message)


def also(module: str, letters: Sequence[str] = "AB") -> Callable[[dict[str, Any]], object]:
    """Return what adds the factors of another module to the tensors."""

    def change(tensors: dict[str, Any]) -> None:
        tensors.update({KEY.replace("h.0.attn.c_attn.lora_A", f"{module}.lora_{x}"): tensors[KEY] for x in letters})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (also("h.0.attn.c_attn", ("magnitude_vector",)), "is not lora_A or lora_B of a matrix"),
        (lambda t: t.pop(KEY), "module 'transformer.h.0.attn.c_attn' has lora_B alone"),
        (also("h.7.attn.c_attn"), "1 of its modules, such as 'transformer.h.7.attn.c_attn', are no matrices"),
        (also("h.0.ln_1"), "such as 'transformer.h.0.ln_1', are no matrices of attention or of MLPs in the base"),
        (lambda t: t.clear(), "the adapter has no updates of the base"),
    ],
)
def test_tensors_that_are_refused(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    rewrite(write_adapter(tmp_path / "adapter", TINY), change)
    refuses(lambda: read_adapter(tmp_path / "adapter", TINY, 64), message)


def test_adapters_of_another_base_and_folders_that_are_none(tmp_path: Path) -> None:
    write_adapter(tmp_path / "wide", replace(TINY, n_embd=32))
    message = (
        "lora_A is [3, 32] and lora_B [96, 3], but the base's matrix is [48, 16]: is it an adapter of another base?"
    )
    refuses(lambda: read_adapter(tmp_path / "wide", TINY, 64), message)
    refuses(
        lambda: read_adapter(tmp_path / "none", TINY, 64), "none", "is not an adapter: give a folder with adapter_con"
    )
    (tmp_path / "wide" / "adapter_model.safetensors").unlink()
    refuses(lambda: read_adapter(tmp_path / "wide", TINY, 64), "has no adapter_model.safetensors or adapter_model.bin")
    torch.save(
        {KEY: torch.zeros(3, 16), KEY.replace("_A", "_B"): torch.ones(48, 3)}, tmp_path / "wide" / "adapter_model.bin"
    )
    (update,) = read_adapter(tmp_path / "wide", TINY, 64).updates["transformer.h.0.attn.c_attn"]
    assert np.array_equal(update.b, np.full((48, 3), 2.0, np.float32))  # lora_alpha / r


# GGUF files, and adapters that are merged --------------------------------------------------------------------


def gguf_of(folder: Path, config: Any, arch: str, **changes: Any) -> Path:
    """Write the adapter in a folder as llama.cpp's convert_lora_to_gguf.py does; return the file."""
    tensors, stored = {}, read_safetensors(folder / "adapter_model.safetensors")
    for key, tensor in stored.items():
        name, letter = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        if letter == "B":
            theirs, b = gguf_files.tensor_of(f"{name}.weight", tensor.read().values, config)
            a = stored[key.replace(".lora_B.", ".lora_A.")].read().values
            tensors |= {f"{theirs}.lora_a": gguf_files.as_f32(a), f"{theirs}.lora_b": gguf_files.as_f32(b)}
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    metadata = {"general.type": "adapter", "general.architecture": arch, "adapter.type": "lora"}
    metadata |= {"adapter.lora.alpha": float(alpha)} | changes
    return gguf_files.write_gguf(folder / "adapter.gguf", metadata, tensors)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma2"])
def test_adapters_in_gguf_files_are_those_of_the_folder(case: str, tmp_path: Path) -> None:
    theirs = make_config(case)
    random_model(theirs).save_pretrained(tmp_path)
    config = read_config(tmp_path / "config.json")
    folder = write_adapter(tmp_path / "adapter", config, seed=3)
    expected = read_adapter(folder, config, 16).updates
    found = read_adapter(gguf_of(folder, theirs, case), config, 16).updates
    assert found.keys() == expected.keys()
    for name, parts in expected.items():
        for mine, part in zip(found[name], parts, strict=True):
            assert mine.first == part.first
            assert np.array_equal(mine.a, part.a)
            np.testing.assert_allclose(mine.b, part.b, rtol=1e-6)


def test_gguf_files_that_are_no_adapters_of_the_base(tmp_path: Path) -> None:
    theirs = make_config("llama")
    random_model(theirs).save_pretrained(tmp_path)
    config = read_config(tmp_path / "config.json")
    folder = write_adapter(tmp_path / "adapter", config)
    for changes, message in (
        ({"general.type": "model"}, "general.type='model': only general.type='adapter' is a LoRA adapter"),
        ({"adapter.type": "control"}, "adapter.type='control'"),
        ({"general.architecture": "qwen2"}, "general.architecture='qwen2' is not that of the base, a llama"),
        ({"adapter.lora.alpha": "x"}, "adapter.lora.alpha='x' is not a finite number"),
        ({"adapter.alora.invocation_tokens": np.zeros(1, np.int32)}, "adapters of some tokens are not supported"),
    ):
        file = gguf_of(folder, theirs, "llama", **changes)
        refuses(lambda f=file: read_adapter(f, config, 16), "adapter.gguf", message)  # type: ignore[misc]
    refuses(lambda: read_adapter(gguf_of(folder, theirs, "llama"), config, 2), "rank 3 is more than max_lora_rank=2")


@pytest.mark.parametrize("command", ["pack", "export"])
def test_merged_weights_generate_the_tokens_of_the_adapter(command: str, tmp_path: Path) -> None:
    base, adapter = make_folder(tmp_path / "base"), write_adapter(tmp_path / "adapter", TINY, r=20, lora_alpha=3)
    lora = LoRARequest("a", 1, str(adapter))
    llm = LLM(str(base), engine="recompute", enable_lora=True, max_lora_rank=20)
    target = tmp_path / ("merged" if command == "pack" else "merged.gguf")
    options = ["--dtype", "float32", "--output", str(target)] if command == "pack" else [str(target), "--format", "F32"]
    assert run([command, str(base), "--merge", str(adapter), *options]) == 0
    expected = llm.generate("To be", PARAMS, lora_request=lora)[0].outputs[0].text
    assert LLM(str(target)).generate("To be", PARAMS)[0].outputs[0].text == expected
    assert expected != llm.generate("To be", PARAMS)[0].outputs[0].text


# Requests ----------------------------------------------------------------------------------------------------


def test_a_request_with_a_bad_adapter_is_refused_and_others_continue(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    llm = LLM(str(base), engine="static", enable_lora=True, max_loras=2, max_lora_rank=4)
    for i in range(3):
        write_adapter(tmp_path / f"{i}", TINY, seed=i)
    write_adapter(tmp_path / "5", TINY, r=5)
    loras = [LoRARequest(f"name {i}", i + 1, str(tmp_path / f"{i}")) for i in range(3)]
    stream = llm.stream("To be", PARAMS, lora_request=loras[0])
    refuses(lambda: llm.generate("a", PARAMS, lora_request=LoRARequest("x", 9, str(tmp_path / "5"))), "max_lora_rank=4")
    refuses(
        lambda: llm.generate("a", PARAMS, lora_request=LoRARequest("x", 9, str(tmp_path / "no"))), "is not an adapter"
    )
    refuses(
        lambda: llm.generate("a", PARAMS, lora_request=LoRARequest("x", 1, str(tmp_path / "1"))), "lora_int_id=1 of"
    )
    refuses(lambda: llm.generate("a", PARAMS, lora_request="name"), "lora_request='name' is not a LoRARequest")  # type: ignore[arg-type]
    refuses(lambda: llm.generate(["a", "b"], PARAMS, lora_request=[None]), "2 prompts, but 1 lora_requests")
    refuses(
        lambda: llm.generate(["a"] * 3, PARAMS, lora_request=loras), "max_loras=2 adapters have unfinished requests"
    )
    expected = llm.generate("To be", PARAMS, lora_request=loras[1])[0].outputs[0].text
    assert "".join(stream) == llm.generate("To be", PARAMS, lora_request=loras[0])[0].outputs[0].text != expected
    for lora in (loras[2], loras[1], loras[0], loras[1]):  # each takes the place of the one that was named first
        text = llm.generate("To be", PARAMS, lora_request=lora)[0].outputs[0].text
    assert text == expected


def test_all_ways_to_generate_take_an_adapter(tmp_path: Path) -> None:
    """And adapters of one number that are queued together must be one."""
    llm = LLM(
        str(make_folder(tmp_path / "base")),
        engine="static",
        enable_lora=True,
        chat_template="{{ messages[0].content }}",
    )
    lora, other = (LoRARequest(name, 1, str(write_adapter(tmp_path / name, TINY, seed=4))) for name in "ab")
    expected = llm.generate("To be", PARAMS, lora_request=lora)[0].outputs[0].text
    messages = [{"role": "user", "content": "To be"}]
    assert expected != llm.generate("To be", PARAMS)[0].outputs[0].text
    assert llm.chat(messages, PARAMS, lora_request=lora)[0].outputs[0].text == expected
    assert "".join(llm.conversation(lora_request=lora).send("To be", PARAMS)) == expected
    _, stream = llm.stream_outputs("To be", PARAMS, lora_request=lora)
    assert [o.outputs[0].text for o in stream if isinstance(o, RequestOutput)] == [expected]
    options = ["--merge", lora.lora_path, "--dtype", "float32", "--output", str(tmp_path / "merged")]
    assert run(["pack", str(tmp_path / "base"), *options]) == 0
    merged_llm = LLM(str(tmp_path / "merged"))
    (found,), (same,) = llm.perplexity("To be or", lora_request=lora), merged_llm.perplexity("To be or")
    assert found.log_likelihood == pytest.approx(same.log_likelihood, abs=1e-4)
    (pair,), (same_pair,) = (
        llm.loglikelihood("To be", " or", lora_request=lora),
        merged_llm.loglikelihood("To be", " or"),
    )
    assert pair.log_likelihood == pytest.approx(same_pair.log_likelihood, abs=1e-4)
    assert pair.log_likelihood != pytest.approx(llm.loglikelihood("To be", " or")[0].log_likelihood, abs=1e-2)
    beams = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    assert llm.beam_search("To be", beams, lora_request=lora)[0].sequences[0].text == expected

    async def stream_all() -> list[str]:
        async with AsyncLLM.from_llm(llm) as model:
            outputs = [
                *[o async for o in model.generate("To be", PARAMS, lora_request=lora)],
                *[o async for o in model.chat(messages, PARAMS, lora_request=lora, output_kind="final_only")],
            ]
            return [o.outputs[0].text for o in outputs if o.finished]

    assert asyncio.run(stream_all()) == [expected] * 2
    refuses(lambda: llm.generate("To be", PARAMS, lora_request=other), "lora_int_id=1 of")
    plain = LLM(str(tmp_path / "base"), engine="static")
    refuses(
        lambda: plain.generate("a", lora_request=lora), "lora_request='a': the model was loaded without enable_lora"
    )
    fresh = LLM(str(tmp_path / "base"), engine="static", enable_lora=True)
    refuses(lambda: fresh.generate(["a", "b"], PARAMS, lora_request=[lora, other]), "lora_int_id=1 of")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "a"), "lora_name=''"),
        (("a", 0, "a"), "lora_int_id=0 is not an integer in [1,"),
        (("a", 1, None), "lora_path=None"),
    ],
)
def test_fields_of_a_request(fields: tuple[Any, ...], message: str) -> None:
    refuses(lambda: LoRARequest(*fields), message)
