"""vLLM's arguments of LLM: those without effect are accepted and named once, and others end with what to do instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.environment import ROOT
from helpers.models import refuses
from nanoinfer import LLM
from nanoinfer.entrypoints.vllm_names import FOREIGN, llm_config

# Argument -> values that have no effect beside those of the table, and values that are refused.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "tensor_parallel_size": ([], [2, None]),
    "cpu_offload_gb": ([0.0], [4]),
    "enable_chunked_prefill": ([], [False]),
    "speculative_config": ([], [{"method": "ngram"}]),
    "gpu_memory_utilization": ([0.9, "a"], []),
    "limit_mm_per_prompt": ([], [{"image": 1}]),
    "lora_dtype": ([], ["float16"]),
    "revision": ([], ["v2"]),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_values_without_effect_and_others(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (known, remedy), (accepted, refused) = FOREIGN[name], VALUES.get(name, ([], []))
    for value in (*known, *accepted):
        caplog.clear()
        assert llm_config("shakespeare", {name: value}) == llm_config("shakespeare", {})
        expected = f"vLLM's arguments without effect here (docs/from-vllm.md): {name}={value!r} ({remedy})"
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", expected)]
    for value in refused:
        message = f"{name}={value!r} is not supported (accepted: {', '.join(map(repr, known))}): {remedy}"
        refuses(lambda v=value: llm_config("shakespeare", {name: v}), message)  # type: ignore[misc]


def test_the_page_lists_the_names_of_the_code() -> None:
    section = (ROOT / "docs" / "from-vllm.md").read_text().split("## Arguments of LLM\n")[1]
    assert re.findall(r"`(\w+)`[,.]", section) == list(FOREIGN)


def test_all_arguments_are_named_in_one_line(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The arguments of a usual program."""
    given: dict[str, Any] = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "trust_remote_code": False}
    llm = LLM(str(tiny_folder), max_model_len=16, dtype="auto", **given)
    assert llm.config.block_size == 16
    (line,) = [message for message in caplog.messages if "vLLM" in message]
    assert all(f"{name}={value}" in line for name, value in given.items())
    caplog.clear()
    LLM(str(tiny_folder))
    assert not any("vLLM" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["tensor_parallel_sise", "max_lora", "hf_overrides"])
def test_an_unknown_name_is_found_before_a_value_is_refused(name: str) -> None:
    message = rf"argument '{name}': help\(LLM\) and docs/from-vllm.md list them$"
    with pytest.raises(TypeError, match=message):
        LLM("shakespeare", tensor_parallel_size=2, **{name: 1})


def test_other_names_of_dtypes_and_defaults(caplog: pytest.LogCaptureFixture) -> None:
    for dtype, name in (("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16")):
        assert llm_config("shakespeare", {"dtype": dtype}).engine.dtype == name
    options: dict[str, Any] = {"max_num_batched_tokens": None, "enable_prefix_caching": None, "seed": None}
    assert llm_config("shakespeare", options) == llm_config("shakespeare", {})
    assert llm_config("random:gpt2", {"seed": 7}).seed == 7
    assert caplog.messages == []
    llm_config("shakespeare", {"seed": 7})
    assert caplog.messages[0].startswith("seed=7 is that of random weights: ")
