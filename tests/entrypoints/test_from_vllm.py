"""docs/from-vllm.md is true: its program runs, the names that it lists are here, those that are not are refused.

vLLM's arguments of LLM: those without effect are accepted and named once, and others end with what to do instead."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.environment import ROOT
from helpers.models import CHARS, TINY, make_model, refuses
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.entrypoints.vllm_names import FOREIGN, llm_config
from nanoinfer.outputs import CompletionOutput
from nanoinfer.sampling.sampler import find_logprobs

PAGE = (ROOT / "docs" / "from-vllm.md").read_text()
TABLE = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in PAGE.splitlines() if "|" in line}
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def one(llm: LLM, prompt: object = "Go", params: SamplingParams = GREEDY) -> CompletionOutput:
    (output,) = llm.generate(prompt, params)  # type: ignore[arg-type]
    return output.outputs[0]


def test_the_pages_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(program, {})
    assert capsys.readouterr().out.startswith("True ")


def test_generate(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    each = [GREEDY, replace(GREEDY, max_tokens=3)]
    outputs = llm.generate(prompts=["Go", "To be"], sampling_params=each, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["Go", "To be"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 3]
    assert llm.generate("Go", GREEDY)[0].outputs == outputs[0].outputs
    assert inspect.signature(LLM.generate).parameters["use_tqdm"].default is None
    assert capfd.readouterr().err == ""  # this is no terminal
    llm.generate("Go", GREEDY, use_tqdm=True)
    assert "generate: " in capfd.readouterr().err


def test_max_tokens(llm: LLM) -> None:
    """A token may be drawn from at most block_size tokens."""
    assert SamplingParams().max_tokens == 128
    free = replace(GREEDY, max_tokens=None)
    for length in (1, 2, TINY.block_size):
        o = one(llm, [3] * length, free)
        assert (len(o.token_ids), o.finish_reason) == (TINY.block_size + 1 - length, "length")
    assert one(llm, "Go", free).token_ids[:8] == one(llm).token_ids
    four = llm.generate("Go", SamplingParams(max_tokens=None, min_tokens=99, n=4, seed=0))[0].outputs
    assert [len(o.token_ids) for o in four] == [TINY.block_size - 1] * 4
    speculating = LLM(llm.model_name, draft="prompt-lookup", speculate_k=3)
    assert one(speculating, "Go", free).token_ids == one(llm, "Go", free).token_ids
    refuses(lambda: llm.generate("a" * 40, free), "the prompt has 40 tokens, the maximum context length is 32")


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=1, temperature=5.0, top_k=9, logprobs=2, presence_penalty=2.0)
    (out,) = llm.generate("Go", params)
    o, ids = out.outputs[0], out.prompt_token_ids + out.outputs[0].token_ids
    raw = make_model()(torch.tensor([ids[:-1]]))[0, 1:].double().log_softmax(-1)
    assert o.logprobs is not None
    for token, expected, found in zip(o.token_ids, raw, o.logprobs, strict=True):
        assert next(iter(found)) == token
        assert set(found) == {token, *expected.topk(2).indices.tolist()}
        for i, logprob in found.items():
            assert logprob.logprob == pytest.approx(expected[i].item(), abs=1e-4)
            assert (logprob.rank, logprob.decoded_token) == (int((expected > expected[i]).sum()) + 1, CHARS[i])
    drawn = [expected[t].item() for t, expected in zip(o.token_ids, raw, strict=True)]
    assert o.cumulative_logprob == pytest.approx(sum(drawn), abs=1e-3)
    assert one(llm).cumulative_logprob is None
    assert SamplingParams(logprobs=1000).logprobs == 1000
    (whole,) = llm.generate("Go", replace(GREEDY, max_tokens=2, logprobs=-1, prompt_logprobs=-1))
    assert [len(step) for step in whole.outputs[0].logprobs or ()] == [len(CHARS)] * 2
    assert [len(step) for step in whole.prompt_logprobs or () if step] == [len(CHARS)]
    for count in (-2, 1001):
        refuses(lambda n=count: SamplingParams(logprobs=n), f"logprobs={count}")  # type: ignore[misc]
    assert find_logprobs(torch.tensor([1.0, 2.0, 2.0]), 2, 0) == {2: (pytest.approx(-0.8619948), 1)}


def test_the_names_that_are_here_and_those_that_are_not(llm: LLM) -> None:
    def names(row: str, column: int) -> list[str]:
        return [name for name in re.findall(r"`(\w+)`", TABLE[row][column]) if name != "TypeError"]

    here = names("`structured_outputs=StructuredOutputsParams(...)`", 1)
    assert sorted(here) == sorted(f.name for f in fields(StructuredOutputsParams))
    for kind in (SamplingParams, StructuredOutputsParams):
        for name in names(f"`{kind.__name__}`", 1):
            with pytest.raises(TypeError, match=name):
                kind(**{name: None})
    for name in names("`LLM.chat`", 1):
        with pytest.raises(TypeError, match=name):
            llm.chat([{"role": "user", "content": "Go"}], **{name: None})
    options = inspect.signature(LLM.__init__).parameters
    for name in names("`LLM(...)`", 2) + names("speculative decoding", 2):
        assert name in options
    assert not options.keys() & FOREIGN.keys()
    for name in ("encode", "classify", "reward"):
        assert not hasattr(LLM, name)


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
