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
    "data_parallel_size": ([1], [2]),
    "distributed_executor_backend": ([None, "uni"], ["ray", "mp"]),
    "disable_custom_all_reduce": ([True, False], [None]),
    "enable_expert_parallel": ([False], [True]),
    "gpu_memory_utilization": ([0.9, 0.2, 1], [0, 1.1, "0.9", None]),
    "num_gpu_blocks_override": ([None], [100]),
    "block_size": ([16, None], [32]),
    "swap_space": ([4, 0, 1.5], [-1, None, float("nan")]),
    "cpu_offload_gb": ([0, 0.0], [4]),
    "enforce_eager": ([True, False], [1, None]),
    "max_seq_len_to_capture": ([8192], [0, None]),
    "compilation_config": ([None, 0, {}], [3, {"level": 3}]),
    "enable_chunked_prefill": ([True, None], [False]),
    "scheduling_policy": (["fcfs", "priority"], ["lifo"]),
    "speculative_config": ([None], [{"method": "ngram"}]),
    "disable_log_stats": ([True], [False]),
    "enable_log_requests": ([False], [True]),
    "max_logprobs": ([20, 1000, 0], [-1, 1001]),
    "logits_processors": ([None, []], [[print]]),
    "guided_decoding_backend": (["auto", "guidance"], ["xgrammar"]),
    "structured_outputs_config": ([None, {}], [{"backend": "xgrammar"}]),
    "override_generation_config": ([None, {}], [{"temperature": 0.5}]),
    "task": (["generate", "auto", "embed", "score"], ["classify"]),
    "runner": (["generate", "auto", "pooling"], ["draft"]),
    "convert": (["auto", "none", "embed"], ["classify"]),
    "pooler_config": ([None, {}], [{"normalize": True}]),
    "limit_mm_per_prompt": ([None, {}, {"image": 0}], [{"image": 1}, 1]),
    "mm_processor_kwargs": ([None, {}], [{"size": 1}]),
    "allowed_local_media_path": ([""], ["/tmp"]),
    "enable_lora": ([False], [True]),
    "max_loras": ([1], [4]),
    "max_lora_rank": ([16], [64]),
    "trust_remote_code": ([False, True], [1, None]),
    "tokenizer_mode": (["auto", "hf"], ["slow", "mistral"]),
    "skip_tokenizer_init": ([False], [True]),
    "revision": ([None, "main"], ["v2"]),
    "tokenizer_revision": ([None, "main"], ["v2"]),
    "download_dir": ([None, "/models"], []),  # of a model on this machine
    "hf_token": ([None, True], ["hf_secret"]),
    "hf_overrides": ([None, {}, {"is_matryoshka": True}], [{"rope_theta": 1}, 5]),
    "rope_scaling": ([None, {}], [{"type": "yarn"}]),
    "load_format": (["auto", "hf"], ["dummy"]),
    "config_format": (["auto", "hf"], ["mistral"]),
    "model_impl": (["auto"], ["transformers"]),
    "served_model_name": ([None], ["name"]),
    "enable_sleep_mode": ([False], [True]),
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
        shown = "..." if name == "hf_token" else repr(value)
        known = FOREIGN[name]
        message = f"{name}={shown} is not supported (accepted: {known.accepted.replace('`', '')})"
        refuses(lambda v=value: EngineArgs("shakespeare", **{name: v}), f"{message}: {known.why}: {known.remedy}")  # type: ignore[misc]


def test_pooling_as_vllm_has_it() -> None:
    reranker = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    args = EngineArgs("shakespeare", hf_overrides=reranker, pooler_config={"pooling_type": "MEAN"})
    assert args == EngineArgs("shakespeare", classifier_from_token="no,yes", pooling_type="mean")
    refuses(lambda: EngineArgs("shakespeare", pooler_config={"pooling_type": "ALL"}), "pooling_type='all'")
    refuses(
        lambda: EngineArgs("shakespeare", hf_overrides={"classifier_from_token": ["a"], "rope_theta": 1}),
        "hf_overrides={'rope_theta': 1} is not supported",
    )


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


def test_an_unknown_name_is_found_before_a_value_is_refused() -> None:
    with pytest.raises(TypeError, match=r"argument 'tensor_parallel_sise'$"):
        EngineArgs("shakespeare", tensor_parallel_size=2, tensor_parallel_sise=1)


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
        {"max_seq_len_to_capture": 8192},
    ]  # fmt: skip
    for options in refused:
        if device == "cpu" and options.get("engine") is None:
            EngineArgs("shakespeare", device=device, **options)
        else:
            refuses(lambda o=options: EngineArgs("shakespeare", device=device, **o), "is not supported")  # type: ignore[misc]
    EngineArgs("shakespeare", device=device, gpu_memory_utilization=0.5, enforce_eager=False)
    EngineArgs("shakespeare", device=device, enforce_eager=True, engine="static")


def test_where_a_model_of_the_hub_is_downloaded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for folder in (None, str(tmp_path / "hub"), tmp_path / "hub", "hub"):
        EngineArgs("owner/name", download_dir=folder)
    for other in ("/models", 3):
        refuses(lambda v=other: EngineArgs("owner/name", download_dir=v), f"download_dir={other!r}", "HF_HUB_CACHE")  # type: ignore[misc]
