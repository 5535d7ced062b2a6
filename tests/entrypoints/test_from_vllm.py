"""docs/from-vllm.md is true: its program runs, the names that it lists are here, those that are not are refused.

vLLM's arguments of LLM: those without effect are accepted and named once, and others end with what to do instead.
vLLM's parameters that concern text, prompts and excluded tokens: values, on every engine, with speculation and n."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenizers as hf
from helpers.chat import HI, chat_folder
from helpers.environment import ROOT
from helpers.models import CHARS, TINY, make_folder, make_model, refuses
from nanoinfer import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from nanoinfer.engines.registry import ENGINES
from nanoinfer.entrypoints.vllm_names import FOREIGN, llm_config
from nanoinfer.outputs import CompletionOutput
from nanoinfer.sampling.sampler import find_logprobs
from nanoinfer.tokenizers import tokenizer as tokenizers

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


TWELVE = SamplingParams(max_tokens=12, temperature=0)
ENGINES_HERE = [name for name, spec in ENGINES.items() if "cpu" in spec.devices and name != "compiled"]
IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(chat_folder(tmp_path_factory.mktemp("parameters") / "chat")))


def texts(llm: LLM, params: SamplingParams, prompt: object = "Go") -> list[str]:
    return [o.text for o in llm.generate(prompt, params)[0].outputs]  # type: ignore[arg-type]


def without(word: str, outputs: list[list[int]], ids: list[int]) -> bool:
    """Whether no output has the tokens of a word."""
    return not any(o[i : i + len(ids)] == ids for o in outputs for i in range(len(o)))


@pytest.mark.parametrize("name", ENGINES_HERE)
def test_excluded_tokens_are_the_same_on_every_engine(name: str, folder: Path, llm: LLM) -> None:
    """Greedy tokens with bad words and allowed tokens, plain and with proposals, sampled and not."""
    (plain,) = texts(llm, TWELVE)
    words = (plain[2:4], plain[5])  # of two tokens and of one
    engine = LLM(str(folder), engine=name, draft="prompt-lookup", speculate_k=3, max_num_seqs=4)
    allowed = tuple(sorted({*llm.tokenize(plain + "abcde")}))[1:]
    for params in (
        replace(TWELVE, bad_words=words),
        replace(TWELVE, allowed_token_ids=allowed, bad_words=(plain[0],)),
        SamplingParams(max_tokens=12, temperature=2.0, seed=3, n=3, bad_words=words, allowed_token_ids=allowed),
    ):
        expected = [o.token_ids for o in llm.generate("Go", params)[0].outputs]
        assert [o.token_ids for o in engine.generate("Go", params)[0].outputs] == expected
        for word in params.bad_words:
            assert without(word, expected, llm.tokenize(word))
        if params.allowed_token_ids is not None:
            assert {i for ids in expected for i in ids} <= {*params.allowed_token_ids}
    assert plain[2:4] in plain
    assert texts(llm, replace(TWELVE, bad_words=("no such", "zq")))[0] == plain


def test_rejected_proposals_are_replaced_by_permitted_tokens(folder: Path, llm: LLM) -> None:
    """With speculate_rule=reject the tokens differ from plain decoding, and excluded ones have probability 0, too."""
    engine = LLM(str(folder), draft="prompt-lookup", speculate_k=3, speculate_rule="reject")
    allowed = tuple(llm.tokenize("abc"))
    params = SamplingParams(
        max_tokens=25, temperature=3.0, seed=1, n=4, allowed_token_ids=allowed, bad_words=("ab", "c")
    )
    (out,) = engine.generate("abcabcab", params)
    found = [o.text for o in out.outputs]
    assert out.metrics.speculation is not None
    assert out.metrics.speculation.num_rejected > 0
    assert {*"".join(found)} == {"a", "b"}
    assert not any("ab" in text for text in found)


@pytest.mark.parametrize("sampler", ["auto", "reference"])
def test_a_bad_word_is_excluded_only_after_its_other_tokens(sampler: str, folder: Path) -> None:
    llm = LLM(str(folder), engine="static", sampler=sampler)
    bias = {token: 1e5 - 1e4 * i for i, token in enumerate(llm.tokenize("abc"))}
    params = replace(TWELVE, max_tokens=6, logit_bias=bias)
    assert texts(llm, params) == ["aaaaaa"]
    assert texts(llm, replace(params, bad_words=["aa"])) == ["ababab"]
    assert texts(llm, replace(params, bad_words=["aa", "bab"])) == ["abacab"]
    assert texts(llm, replace(params, bad_words=["aa", "ab", "ca", "b"])) == ["accccc"]
    assert texts(llm, replace(params, bad_words=["a", "b"])) == ["cccccc"]
    assert texts(llm, replace(params, allowed_token_ids=llm.tokenize("bz"))) == ["bbbbbb"]
    (out,) = llm.generate("Go", replace(params, bad_words=["a"], allowed_token_ids=llm.tokenize("a")))
    assert "bad_words, allowed_token_ids" in (out.outputs[0].error or "")
    (raw,) = llm.generate("Go", replace(params, logprobs=1, max_tokens=1))
    (found,) = llm.generate("Go", replace(params, logprobs=1, max_tokens=1, bad_words=["a"]))
    best = [next(reversed(o.outputs[0].logprobs[0])) for o in (raw, found) if o.outputs[0].logprobs]
    assert best[0] == best[1]  # log-probabilities are those of the model


def test_a_bad_word_after_a_space_is_another_token(chat: LLM) -> None:
    """vLLM's rule: the word is excluded with and without the space before it."""
    tokenizer = chat.tokenizer
    assert tokenizer is not None
    bare, spaced = tokenizer.encode("a"), tokenizer.encode(" a")
    assert (len(bare), len(spaced), bare != spaced) == (1, 1, True)
    bias = {bare[0]: 1e5, spaced[0]: 2e5, tokenizer.encode("o")[0]: 5e4}
    for bad, expected in (((), " a a"), (("a",), "oo"), ((" a",), "oo"), (("e",), " a a")):
        params = SamplingParams(max_tokens=2, temperature=0, logit_bias=bias, bad_words=bad)
        assert texts(chat, params) == [expected]


def test_what_is_refused(llm: LLM, tmp_path: Path) -> None:
    refuses(lambda: llm.generate("Go", replace(TWELVE, allowed_token_ids=(3, 999))), "allowed_token_ids: token id 999")
    refuses(lambda: llm.generate("Go", replace(TWELVE, bad_words=("ä",))), "character 'ä' is not among")
    refuses(lambda: llm.stream("Go", replace(TWELVE, detokenize=False)), "detokenize=False: stream yields the text")
    no_text = LLM(str(make_folder(tmp_path / "no", chars=None)))
    refuses(lambda: no_text.generate([1], replace(TWELVE, bad_words=("a",))), "bad_words=('a',) requires a tokenizer")


@pytest.mark.parametrize("draft", [None, "prompt-lookup"])
def test_stop_strings_and_tokens_that_stay_in_the_text(folder: Path, draft: str | None) -> None:
    llm = LLM(str(folder), draft=draft)
    (whole,) = llm.generate("Go", replace(TWELVE, max_tokens=20))
    o = whole.outputs[0]
    stop, at = o.text[4:6], o.text.index(o.text[4:6])
    params = replace(TWELVE, max_tokens=20, stop=(stop,))
    assert texts(llm, params) == [o.text[:at]]
    kept = replace(params, include_stop_str_in_output=True)
    assert texts(llm, kept) == [o.text[: at + 2]]
    assert "".join(llm.stream("Go", kept)) == o.text[: at + 2]
    token = o.token_ids[3]
    ends = replace(TWELVE, stop_token_ids=(token,))
    first = o.token_ids.index(token)
    assert texts(llm, ends) == [o.text[:first]]
    assert texts(llm, replace(ends, include_stop_str_in_output=True)) == [o.text[: first + 1]]


def test_special_tokens_are_left_out_of_the_text(chat: LLM) -> None:
    bias = {IM_START: 1e5}
    params = SamplingParams(max_tokens=3, temperature=0, logit_bias=bias)
    (out,) = chat.generate("a", replace(params, logprobs=0))
    o = out.outputs[0]
    assert (o.token_ids, o.text) == ([IM_START] * 3, "")
    assert [step[IM_START].decoded_token for step in o.logprobs or ()] == ["<|im_start|>"] * 3
    assert texts(chat, replace(params, skip_special_tokens=False)) == ["<|im_start|>" * 3]
    assert texts(chat, replace(params, detokenize=False, skip_special_tokens=False)) == [""]
    assert list(chat.stream("a", params)) == []
    # One that is a stop string ends the output, in the text or not.
    for skip, text in ((True, ""), (False, "<|im_start|>")):
        stopped = replace(params, stop=("<|im_start|>",), skip_special_tokens=skip, include_stop_str_in_output=True)
        o = chat.generate("a", stopped)[0].outputs[0]
        assert (o.text, o.finish_reason, o.stop_reason, len(o.token_ids)) == (text, "stop", "<|im_start|>", 1)
    # The end token is in the text only if both are asked for.
    ends = replace(params, logit_bias={IM_END: 1e5})
    for include, skip, text in ((False, False, ""), (True, True, ""), (True, False, "<|im_end|>")):
        o = chat.generate("a", replace(ends, include_stop_str_in_output=include, skip_special_tokens=skip))[0].outputs[
            0
        ]
        assert (o.text, o.stop_reason) == (text, IM_END)


def test_a_space_after_a_special_token_is_as_in_transformers(tmp_path: Path) -> None:
    """What follows a special token is decoded as if it were not there."""
    from helpers.trained_tokenizers import byte_fallback

    tokenizer = byte_fallback()
    core = hf.Tokenizer.from_str(tokenizers.to_json(tokenizer))
    core.add_special_tokens(["<s>"])
    found = tokenizers.from_json(core.to_str(), "special")
    (special,) = found.special_tokens
    ids = found.encode("the engine")
    from nanoinfer.scheduling.text import OutputText

    text = OutputText(found.stream(), (), found.special_tokens)
    for token in [special, ids[0], special, *ids[1:]]:
        text.push(token)
    text.flush()
    assert text.text == core.decode([special, ids[0], special, *ids[1:]], skip_special_tokens=True)


def test_a_conversation_reprocesses_an_answer_whose_text_lacks_tokens(chat: LLM) -> None:
    conversation = chat.conversation()
    bias = {IM_START: 1e5}
    assert "".join(conversation.send("Hi", SamplingParams(max_tokens=3, temperature=0, logit_bias=bias))) == ""
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}
    "".join(conversation.send("Hi", SamplingParams(max_tokens=3, temperature=0)))
    assert conversation.output is not None
    assert conversation.output.prompt_token_ids == chat.apply_chat_template(conversation.messages[:-1])


def test_prompts_are_truncated_at_the_left(llm: LLM, chat: LLM, tmp_path: Path) -> None:
    prompt = "abcdefghij" * 4  # 40 tokens; the context has 32
    cut = replace(TWELVE, truncate_prompt_tokens=7)
    for given in (prompt, llm.tokenize(prompt)):
        (out,) = llm.generate(given, cut)
        assert out.prompt_token_ids == llm.tokenize(prompt)[-7:]
        assert out.outputs == llm.generate(prompt[-7:], TWELVE)[0].outputs
    assert llm.generate("Go", cut)[0].prompt_token_ids == llm.tokenize("Go")
    assert len(llm.generate(prompt, replace(cut, truncate_prompt_tokens=-1))[0].prompt_token_ids) == 32
    refuses(
        lambda: llm.generate(prompt, replace(cut, truncate_prompt_tokens=33)),
        "33 tokens",
        "maximum context length is 32",
    )
    (out,) = chat.chat(HI, replace(TWELVE, truncate_prompt_tokens=3))
    assert out.prompt_token_ids == chat.apply_chat_template(HI)[-3:]

    core = hf.Tokenizer.from_str(tokenizers.to_json(chat.tokenizer))  # type: ignore[arg-type]
    tokenizers.surround(core, ("<pad>", 0))
    folder = chat_folder(tmp_path / "bos")
    (folder / "tokenizer.json").write_text(core.to_str())
    start = LLM(str(folder))
    (out,) = start.generate("hello there", replace(TWELVE, truncate_prompt_tokens=2))
    assert out.prompt_token_ids == [0, start.tokenize("hello there")[-1]]  # a text keeps the start token
    (out,) = start.generate("hello there", replace(TWELVE, truncate_prompt_tokens=1))
    assert out.prompt_token_ids == [0]

    async def main() -> list[list[int]]:
        counted: list[int] = []
        async with AsyncLLM(str(folder)) as model:
            for given in ("hello there", start.tokenize("hello there")):
                stream = model.generate(given, replace(TWELVE, truncate_prompt_tokens=2), check=counted.append)
                ids = [output async for output in stream][-1].prompt_token_ids
            return [counted, ids]

    assert asyncio.run(main()) == [[2, 2], start.tokenize("hello there")[-2:]]


def test_log_probabilities_of_the_whole_vocabulary(llm: LLM) -> None:
    (out,) = llm.generate("Go", replace(TWELVE, max_tokens=2, logprobs=-1, prompt_logprobs=-1))
    some = llm.generate("Go", replace(TWELVE, max_tokens=2, logprobs=len(CHARS), prompt_logprobs=len(CHARS)))
    assert out.outputs[0].logprobs == some[0].outputs[0].logprobs
    assert out.prompt_logprobs == some[0].prompt_logprobs
    assert out.outputs[0].logprobs is not None
    assert [sorted(step) for step in out.outputs[0].logprobs] == [list(range(len(CHARS)))] * 2
    none = llm.generate("Go", replace(TWELVE, max_tokens=1, logprobs=1, prompt_logprobs=1, detokenize=False))[0]
    assert none.prompt_logprobs is not None
    steps = [none.prompt_logprobs[1], (none.outputs[0].logprobs or [])[0]]
    assert {entry.decoded_token for step in steps for entry in (step or {}).values()} == {None}


async def test_output_kinds(llm: LLM) -> None:
    async def outputs(kind: RequestOutputKind | str, **options: str) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=5, temperature=0, output_kind=kind)  # type: ignore[arg-type]
        return [output async for output in AsyncLLM.from_llm(llm).generate("Go", params, **options)]

    final = await outputs(RequestOutputKind.FINAL_ONLY)
    assert [len(o.outputs[0].token_ids) for o in final] == [5]
    delta = await outputs("delta")
    assert "".join(o.outputs[0].text for o in delta) == final[0].outputs[0].text
    assert sum(len(o.outputs[0].token_ids) for o in delta) == 5
    assert len((await outputs("final_only", output_kind="cumulative"))[-1].outputs[0].token_ids) == 5
    assert len(await outputs("delta", output_kind="final_only")) == 1  # the argument is first
    params = SamplingParams(max_tokens=5, temperature=0, output_kind=RequestOutputKind.DELTA)
    assert len(llm.generate("Go", params)[0].outputs[0].token_ids) == 5  # LLM returns whole outputs


def test_defaults_of_the_models_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "nanoinfer")
    folder = chat_folder(tmp_path / "chat")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 4}))
    llm = LLM(str(folder))
    assert caplog.messages == []
    expected = llm.generate("Go", SamplingParams(temperature=0.0, max_tokens=4))[0].outputs
    assert caplog.messages == []  # they are not used yet
    assert llm.generate("Go")[0].outputs == expected
    assert llm.generate(["Go", "Go"])[1].outputs == expected
    assert "".join(llm.stream("Go")) == expected[0].text
    assert len(llm.chat(HI)[0].outputs[0].token_ids) <= 4
    conversation = llm.conversation()
    "".join(conversation.send("Hi"))
    assert conversation.output is not None
    assert len(conversation.output.outputs[0].token_ids) <= 4

    async def main() -> RequestOutput:
        return [output async for output in AsyncLLM.from_llm(llm).generate("Go")][-1]

    assert asyncio.run(main()).outputs == expected
    (message,) = caplog.messages  # said once
    assert "generation_config.json (temperature=0.0, max_new_tokens=4)" in message
    assert "generation_config='vllm'" in message
    off = LLM(str(folder), generation_config="vllm")
    assert off.get_default_sampling_params() == off.requests.defaults == SamplingParams()
    assert caplog.messages == [message]
    refuses(lambda: LLM(str(folder), generation_config="folder"), "generation_config='folder' is unknown: use one of")
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    bad = LLM(str(folder))
    refuses(lambda: bad.generate("Go"), "generation_config.json: temperature=-1", "generation_config='vllm'")


TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "content", "prompt"),
    [
        (KEEPS, "Once ", "<user>Hi</><assistant>Once "),
        (TRIMS, "Once ", "<user>Hi</><assistant>Once"),
        (KEEPS, "", "<user>Hi</><assistant>"),
        (KEEPS, "</>", "<user>Hi</><assistant></>"),
        (KEEPS, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "<user>Hi</><assistant>a\nb"),
    ],
)
async def test_the_last_message_is_continued(template: str, content: object, prompt: str, chat: LLM) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    options = {"chat_template": template, "add_generation_prompt": False, "continue_final_message": True}
    (out,) = chat.chat(messages, TWELVE, **options)  # type: ignore[arg-type]
    assert out.prompt == prompt
    assert out.prompt_token_ids == chat.apply_chat_template(messages, **options)
    streamed = [output async for output in AsyncLLM.from_llm(chat).chat(messages, TWELVE, **options)]  # type: ignore[arg-type]
    assert streamed[-1].outputs == out.outputs


def test_what_cannot_be_continued(chat: LLM) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    refuses(lambda: chat.chat(HI, continue_final_message=True), "set add_generation_prompt=False")
    refuses(lambda: chat.chat(HI, chat_template="x", **options), "leaves the content of the last message out")  # type: ignore[arg-type]
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [*HI, {"role": "assistant", "content": "Well", "tool_calls": [call]}]
    refuses(lambda: chat.chat(calls, **options), "the last message has calls: give their results")  # type: ignore[arg-type]


def test_documents_reach_the_template(chat: LLM) -> None:
    template = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "t", "text": "u"}]
    (out,) = chat.chat(HI, TWELVE, chat_template=template, chat_template_kwargs={"documents": documents})
    assert out.prompt == "[t: u]Hi"
