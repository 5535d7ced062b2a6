"""vLLM's arguments of LLM: those without effect are accepted and named once, and others end with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.errors import refuses
from nanoinfer import LLM, EngineArgs
from nanoinfer.engines import devices
from nanoinfer.entrypoints.vllm_names import FOREIGN

# Argument -> values that have no effect on a CPU, and values that are refused there.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "tensor_parallel_size": ([1], [2, True, None]),
    "pipeline_parallel_size": ([1], [2]),
    "distributed_executor_backend": ([None, "uni"], ["ray", "mp"]),
    "gpu_memory_utilization": ([0.9, 0.2, 1], [0, 1.1, "0.9", None]),
    "block_size": ([16, None], [32]),
    "swap_space": ([4, 0, 1.5], [-1, None, float("nan")]),
    "cpu_offload_gb": ([0, 0.0], [4]),
    "enforce_eager": ([True, False], [1, None]),
    "enable_chunked_prefill": ([True, None], [False]),
    "speculative_config": ([None], [{"method": "ngram"}]),
    "disable_log_stats": ([True], [False]),
    "max_logprobs": ([20, 1000, 0], [-1, 1001]),
    "task": (["generate", "auto", "embed", "score"], ["classify"]),
    "runner": (["generate", "auto", "pooling"], ["draft"]),
    "limit_mm_per_prompt": ([None, {}, {"image": 0}], [{"image": 1}, 1]),
    "enable_lora": ([False], [True]),
    "trust_remote_code": ([False, True], [1, None]),
    "tokenizer_mode": (["auto", "hf"], ["slow", "mistral"]),
    "revision": ([None, "main"], ["v2"]),
    "download_dir": ([None, "/models"], []),  # of a model on this machine
}


@pytest.fixture(autouse=True)
def _a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: 0)


def given_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: 1)


def test_every_argument_has_its_values() -> None:
    assert list(VALUES) == list(FOREIGN)


@pytest.mark.parametrize("name", FOREIGN)
def test_values_without_effect_and_others(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = EngineArgs("shakespeare")
    for value in VALUES[name][0]:
        caplog.clear()
        assert EngineArgs("shakespeare", **{name: value}) == plain
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
            (
                "WARNING",
                f"vLLM's arguments without effect here (docs/from-vllm.md): {name}={value!r} ({FOREIGN[name].why})",
            )
        ]
    for value in VALUES[name][1]:
        known = FOREIGN[name]
        message = f"{name}={value!r} is not supported (accepted: {known.accepted.replace('`', '')})"
        refuses(lambda v=value: EngineArgs("shakespeare", **{name: v}), f"{message}: {known.why}: {known.remedy}")  # type: ignore[misc]


def test_pooling_as_vllm_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """The page's row about hf_overrides and pooler_config."""
    reranker = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    args = EngineArgs("shakespeare", hf_overrides=reranker, pooler_config={"pooling_type": "MEAN"})
    assert args == EngineArgs("shakespeare", classifier_from_token="no,yes", pooling_type="mean")
    assert "hf_overrides['architectures'] (config.json describes the model)" in caplog.text
    assert EngineArgs("shakespeare", hf_overrides=None, pooler_config={}) == EngineArgs("shakespeare")
    for options, message in [
        ({"pooler_config": {"pooling_type": "ALL"}}, "pooling_type='all'"),
        (
            {"pooler_config": {"normalize": True}},
            "pooler_config={'normalize': True} is not supported (accepted: a dict",
        ),
        ({"hf_overrides": {"classifier_from_token": ["a"], "rope_theta": 1}}, "'rope_theta': 1} is not supported"),
        ({"hf_overrides": 5}, "hf_overrides=5 is not supported (accepted: a dict with classifier_from_token)"),
    ]:
        refuses(lambda o=options: EngineArgs("shakespeare", **o), message)  # type: ignore[misc]


def test_all_arguments_are_named_in_one_line(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The arguments of a usual program."""
    given: dict[str, Any] = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "trust_remote_code": False}
    given |= {"enforce_eager": True, "swap_space": 4, "download_dir": "/models", "task": "generate"}
    llm = LLM(str(tiny_folder), max_model_len=16, dtype="auto", **given)
    assert llm.config.block_size == 16
    said = [message for message in caplog.messages if "vLLM" in message]
    assert said == [
        "vLLM's arguments without effect here (docs/from-vllm.md): tensor_parallel_size=1 (one device computes),"
        " gpu_memory_utilization=0.9 (keys and values take a quarter of the free memory), trust_remote_code=False (no"
        " code in a model's files runs), enforce_eager=True (the engine determines whether steps are captured or"
        " compiled), swap_space=4 (no keys and values are swapped), download_dir='/models' (models are downloaded to"
        " the Hub's cache), task='generate' (a model generates, embeds and scores)"
    ]
    caplog.clear()
    LLM(str(tiny_folder))
    assert not any("vLLM" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["tensor_parallel_sise", "max_loras", "hf_token"])
def test_an_unknown_name_is_found_before_a_value_is_refused(name: str) -> None:
    message = rf"argument '{name}': help\(LLM\) and docs/from-vllm.md list the arguments$"
    with pytest.raises(TypeError, match=message):
        EngineArgs("shakespeare", tensor_parallel_size=2, **{name: 1})


def test_a_model_that_is_no_name_is_an_error_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    for model in (None, 3, b"gpt2"):
        refuses(lambda m=model: LLM(m, download_dir=None), f"model={model!r} is not a name or a path")  # type: ignore[misc]
        refuses(lambda m=model: LLM(m, download_dir="/models"), "download_dir='/models'")  # type: ignore[misc]


def test_none_is_the_default_where_vllm_says_so() -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": None, "enable_prefix_caching": None, "seed": None}
    assert EngineArgs("shakespeare", **options) == EngineArgs("shakespeare")


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_what_has_no_effect_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_a_gpu(monkeypatch)
    refused: list[dict[str, Any]] = [
        {"gpu_memory_utilization": 0.3}, {"enforce_eager": True}, {"enforce_eager": True, "engine": "cuda_graph"},
    ]  # fmt: skip
    for options in refused:
        if device == "cpu" and options.get("engine") is None:
            EngineArgs("shakespeare", device=device, **options)
        else:
            refuses(lambda o=options: EngineArgs("shakespeare", device=device, **o), "is not supported")  # type: ignore[misc]
    EngineArgs("shakespeare", device=device, gpu_memory_utilization=0.5, enforce_eager=False)
    EngineArgs("shakespeare", device=device, enforce_eager=True, engine="static")
