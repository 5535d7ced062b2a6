"""docs/from-vllm.md is true: each row of its tables has a test here, found by the row's first cell."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenizers as hf
from helpers.environment import ROOT
from helpers.errors import refuses
from helpers.models import CHARS, TINY, make_folder, make_model, submit
from helpers.trained_tokenizers import bpe
from nanoinfer import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    NanoinferError,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from nanoinfer.entrypoints.vllm_names import FOREIGN
from nanoinfer.models.presets import PRESETS
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.tokenizers import tokenizer as tokenizers

PAGE = (ROOT / "docs" / "from-vllm.md").read_text()
ROWS = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row not in ("name", "what", "argument")]
GREEDY = SamplingParams(max_tokens=8, temperature=0)
TESTED: dict[str, Callable[..., None]] = {}


def row(*cells: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which rows of the page a test is about."""

    def keep(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.update(dict.fromkeys(cells, test))
        return test

    return keep


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=4)


def one(llm: LLM, prompt: object = "Go", params: SamplingParams = GREEDY) -> CompletionOutput:
    (output,) = llm.generate(prompt, params)  # type: ignore[arg-type]
    return output.outputs[0]


# tests/entrypoints/test_vllm_names.py has each value of these
ARGUMENTS = [f"`{name}`" for name in FOREIGN] + ["`hf_overrides`, `pooler_config`"]


def test_every_row_has_its_test() -> None:
    assert sorted([*TESTED, *ARGUMENTS]) == sorted(ROWS)


def test_the_table_of_arguments_is_that_of_the_code() -> None:
    table = PAGE.split("## Arguments of LLM\n")[1]
    assert [line for line in table.splitlines() if line.startswith("| `")] == [
        f"| `{name}` | {known.accepted} | {known.why} | {known.remedy} |" for name, known in FOREIGN.items()
    ]


def test_the_pages_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(program, {})
    assert capsys.readouterr().out.startswith("True ")


@row("`generate(prompts, sampling_params, use_tqdm=...)`", "`use_tqdm`, if not given")
def test_generate(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    each = [GREEDY, replace(GREEDY, max_tokens=3)]
    outputs = llm.generate(prompts=["Go", "To be"], sampling_params=each, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["Go", "To be"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 3]
    assert llm.generate("Go", GREEDY)[0].outputs == outputs[0].outputs
    assert inspect.signature(LLM.generate).parameters["use_tqdm"].default is None
    assert capfd.readouterr().err == ""  # this is no terminal
    llm.generate("Go", GREEDY, use_tqdm=True)
    assert "1/1" in capfd.readouterr().err


@row('`{"prompt": ...}`', '`{"prompt_token_ids": ...}`')
def test_dicts(llm: LLM) -> None:
    expected = one(llm, "Go")
    assert one(llm, {"prompt": "Go"}) == expected
    assert one(llm, [{"prompt_token_ids": llm.tokenize("Go")}]) == expected


@row("`max_tokens=None`", "`max_tokens`, if not given")
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


@row("`top_k=-1`, `top_k=0`")
def test_top_k(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=5, temperature=3.0)
    texts = [one(llm, params=replace(params, top_k=k)).text for k in (-1, 0, len(CHARS), 1)]
    assert texts[0] == texts[1] == texts[2] != texts[3]


@row("`temperature=0`", "a temperature below 0.01")
def test_temperature(llm: LLM) -> None:
    assert SamplingParams(temperature=1e-3).temperature == 1e-3
    gpt, ids = make_model(), llm.tokenize("Go")
    for _ in range(8):
        ids.append(int(gpt(torch.tensor([ids]))[0, -1].argmax()))
    assert one(llm).token_ids == ids[2:]


@row("`stop`, `stop_token_ids`", "`CompletionOutput.finish_reason`", "`stop_reason` at the end token")
def test_ends(llm: LLM, tmp_path: Path) -> None:
    whole = one(llm, params=SamplingParams(max_tokens=20, seed=1))
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    stop, token = whole.text[7:10], whole.token_ids[9]
    for given in (stop, [stop]):
        o = one(llm, params=SamplingParams(max_tokens=20, seed=1, stop=given))  # type: ignore[arg-type]
        at = whole.text.index(stop)
        assert (o.text, o.token_ids) == (whole.text[:at], whole.token_ids[: at + 3])
        assert (o.finish_reason, o.stop_reason) == ("stop", stop)
    o = one(llm, params=SamplingParams(max_tokens=20, seed=1, stop_token_ids=[token]))  # type: ignore[arg-type]
    at = whole.token_ids.index(token)
    assert (o.text, o.token_ids) == (whole.text[:at], whole.token_ids[: at + 1])
    assert (o.finish_reason, o.stop_reason) == ("stop", token)
    eos = LLM(str(make_folder(tmp_path / "eos", replace(TINY, eos_token_ids=(token,)))))
    o = one(eos, params=SamplingParams(max_tokens=20, seed=1))
    assert (o.finish_reason, o.stop_reason) == ("stop", token)
    request = submit(llm.core, None, [1], GREEDY, 0)
    assert llm.core.output(request).outputs[0].finish_reason is None
    llm.core.abort(request)
    assert llm.core.output(request).outputs[0].finish_reason == "abort"


@row("`ignore_eos`, `min_tokens`")
def test_end_tokens(llm: LLM, tmp_path: Path) -> None:
    ids = one(llm).token_ids
    eos = LLM(str(make_folder(tmp_path / "eos", replace(TINY, eos_token_ids=(ids[2],)))))
    assert one(eos).token_ids == ids[: ids.index(ids[2]) + 1]
    assert one(eos, params=replace(GREEDY, ignore_eos=True)).token_ids == ids
    assert ids[2] not in one(eos, params=replace(GREEDY, min_tokens=5)).token_ids[:4]


@row("`n`", "`seed=None`", "random numbers")
def test_samples_and_seeds(llm: LLM) -> None:
    (out,) = llm.generate("Go", SamplingParams(max_tokens=8, n=3))
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert len({o.text for o in out.outputs}) == 3
    again = SamplingParams(max_tokens=8, n=3, seed=out.seed)
    assert llm.generate(["a", "Go"], [GREEDY, again])[1].outputs == out.outputs


@row("`structured_outputs=StructuredOutputsParams(...)`", "`StructuredOutputsParams`")
def test_structured_outputs(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    table = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in PAGE.splitlines() if "|" in line}
    here = re.findall(r"`(\w+)`", table["`structured_outputs=StructuredOutputsParams(...)`"][1])
    assert sorted(here) == sorted(f.name for f in fields(StructuredOutputsParams))
    for name in re.findall(r"`(\w+)`", table["`StructuredOutputsParams`"][1]):
        with pytest.raises(TypeError, match=name):
            StructuredOutputsParams(**{name: None})
    asked = replace(GREEDY, structured_outputs=StructuredOutputsParams(choice=["Yes", "No"]))
    assert one(llm, params=asked).text in ("Yes", "No")


@row("`logit_bias`")
def test_logit_bias(llm: LLM) -> None:
    assert one(llm, params=replace(GREEDY, logit_bias={5: 1e5})).token_ids == [5] * 8


@row("`logprobs=k`", "`CompletionOutput.cumulative_logprob`", "`logprobs`", "`rank` of equal tokens")
@row("`logprobs=-1`, `prompt_logprobs=-1`")
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
    from nanoinfer.sampling.sampler import find_logprobs

    assert find_logprobs(torch.tensor([1.0, 2.0, 2.0]), 2, 0) == {2: (pytest.approx(-0.8619948), 1)}


@row("`prompt_logprobs=k`")
def test_prompt_logprobs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are held to the reference in tests/entrypoints/test_scoring.py."""
    fed: list[int] = []
    extend = llm.engine.extend
    monkeypatch.setattr(llm.engine, "extend", lambda batch: (fed.append(len(batch.token_ids)), extend(batch))[1])
    (out,) = llm.generate("To be", replace(GREEDY, max_tokens=1, prompt_logprobs=1))
    assert fed == [5]  # one prefill
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert [next(iter(found)) for found in out.prompt_logprobs[1:] if found] == out.prompt_token_ids[1:]


@row("`RequestOutput.prompt`, `.prompt_token_ids`, `.outputs`", "`RequestOutput.finished`", "`request_id`")
def test_request_output(llm: LLM) -> None:
    (out,) = llm.generate("Go", GREEDY)
    assert (out.prompt, out.prompt_token_ids, len(out.outputs)) == ("Go", [CHARS.index(c) for c in "Go"], 1)
    assert type(out.request_id) is int
    assert out.finished is True
    request = submit(llm.core, None, [1], GREEDY, 0)
    assert llm.core.output(request).finished is False
    llm.core.abort(request)
    assert llm.core.output(request).finished is True


@row("`CompletionOutput.index`, `.text`, `.token_ids`")
def test_completion_output(llm: LLM) -> None:
    o = one(llm)
    assert (o.index, o.text) == (0, "".join(CHARS[t] for t in o.token_ids))
    core = hf.Tokenizer.from_str(tokenizers.to_json(bpe()))
    core.add_special_tokens(["<|endoftext|>"])
    special = tokenizers.from_json(core.to_str(), "special")
    ids = special.encode("a<|endoftext|>b")
    assert 320 in ids
    assert tokenizers.decode(special, ids) == "a<|endoftext|>b"


@row("`include_stop_str_in_output`", "`skip_special_tokens`", "`detokenize=False`", "`spaces_between_special_tokens`")
@row("a stop string that is a special token", "`bad_words`", "`allowed_token_ids`", "`allowed_token_ids=[]`")
@row("`truncate_prompt_tokens`", "`output_kind=RequestOutputKind.DELTA`")
def test_parameters_of_text_prompts_and_exclusions(llm: LLM) -> None:
    """tests/entrypoints/test_vllm_parameters.py has their values, on every engine."""
    text = one(llm).text
    stop = replace(GREEDY, stop=(text[3:5],), include_stop_str_in_output=True)
    assert one(llm, params=stop).text == text[: text.index(text[3:5]) + 2]
    assert one(llm, params=replace(GREEDY, skip_special_tokens=False, spaces_between_special_tokens=False)).text == text
    assert one(llm, params=replace(GREEDY, detokenize=False)).text == ""
    assert text[0] not in one(llm, params=replace(GREEDY, bad_words=[text[0]])).text  # type: ignore[arg-type]
    assert one(llm, params=replace(GREEDY, allowed_token_ids=[5])).token_ids == [5] * 8  # type: ignore[arg-type]
    refuses(lambda: SamplingParams(allowed_token_ids=[]), "allowed_token_ids is empty")  # type: ignore[arg-type]
    (cut,) = llm.generate("To be", replace(GREEDY, truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == llm.tokenize("be")
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
    assert replace(GREEDY, output_kind=RequestOutputKind.DELTA).output_kind is RequestOutputKind.DELTA


@row("`sampling_params=None`", "`LLM.get_default_sampling_params()`", "`generation_config`")
def test_no_params(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    assert LLM(str(folder)).get_default_sampling_params() == SamplingParams()
    config = {
        "temperature": 0.0,
        "top_k": 3,
        "top_p": None,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "do_sample": False,
    }
    written = json.dumps({**config, "max_new_tokens": 9, "eos_token_id": [3]})
    (folder / "generation_config.json").write_text(written)
    llm = LLM(str(folder))
    assert llm.config.eos_token_ids == (3,)
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.0, top_k=3, min_p=0.1, repetition_penalty=1.5, max_tokens=9
    )
    assert llm.generate("Go")[0].outputs == llm.generate("Go", llm.get_default_sampling_params())[0].outputs
    plain = LLM(str(folder), generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    assert len({plain.generate("Go")[0].outputs[0].text for _ in range(3)}) > 1  # not greedy
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    refuses(LLM(str(folder)).get_default_sampling_params, "generation_config.json: temperature='hot'", "SamplingParams")


@row("`generate(prompt_token_ids=...)`")
def test_prompt_token_ids(llm: LLM) -> None:
    ids = [llm.tokenize(text) for text in ("Go", "To be")]
    expected = [output.outputs for output in llm.generate(["Go", "To be"], GREEDY)]
    given: tuple[Any, ...] = (ids, tuple(map(tuple, ids)), [np.array(i) for i in ids])
    for several in given:
        assert [o.outputs for o in llm.generate(prompt_token_ids=several, sampling_params=GREEDY)] == expected
    assert [o.outputs for o in llm.generate(None, GREEDY, ids)] == expected
    assert [o.outputs for o in llm.generate(prompt_token_ids=ids[0], sampling_params=GREEDY)] == expected[:1]
    assert llm.generate(prompt_token_ids=[]) == []
    for both in ({}, {"prompts": "Go", "prompt_token_ids": [1]}):
        refuses(lambda given=both: llm.generate(**given), "give either prompts or prompt_token_ids")  # type: ignore[misc]
    refuses(lambda: llm.generate(prompt_token_ids="Go"), "prompt_token_ids='Go' is not a list of token ids")
    refuses(lambda: llm.generate(prompt_token_ids=[ids[0], "Go"]), "prompt 2 of 2: prompt_token_ids='Go' is")  # type: ignore[list-item]


@row("`LLM.get_tokenizer()`", "a tokenizer", "a prompt that a chat template printed, start token included")
def test_tokenizer(llm: LLM, tmp_path: Path) -> None:
    """Methods and values are held to transformers' in tests/entrypoints/test_model_tokenizer.py."""
    tokenizer = llm.get_tokenizer()
    ids = llm.tokenize("To be")
    assert (tokenizer.encode("To be"), tokenizer.decode(ids), len(tokenizer)) == (ids, "To be", len(CHARS))
    table = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in PAGE.splitlines() if "|" in line}
    named = re.findall(r"`(\w+)`", table["`LLM.get_tokenizer()`"][1])
    assert sorted(named) == sorted(name for name in dir(tokenizer) if not name.startswith("_"))
    assert not callable(tokenizer)
    template = "<s>{{ messages[0].content }}"
    core = hf.Tokenizer.from_str(tokenizers.to_json(bpe()))
    core.add_special_tokens(["<s>"])
    tokenizers.prepend(core, "<s>", 320)
    folder = make_folder(tmp_path / "bos", replace(TINY, vocab_size=321))
    (folder / "tokenizer.json").write_text(core.to_str())
    llm = LLM(str(folder))
    (text, ids) = (
        llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "a"}], chat_template=template, tokenize=t)
        for t in (False, True)
    )
    assert (text, ids.count(320)) == ("<s>a", 1)
    assert llm.generate(text, GREEDY)[0].prompt_token_ids == [320, *ids]
    (chat,) = llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template=template)
    assert chat.prompt_token_ids == ids


@row("`EngineArgs(...)`, `AsyncEngineArgs(...)`", "`EngineArgs`")
def test_engine_args(folder: Path, llm: LLM) -> None:
    args = EngineArgs(model=str(folder), max_num_seqs=3, tensor_parallel_size=1, kv_cache_memory_bytes=1 << 20)
    same = LLM(**asdict(args))
    assert (same.engine.limits.max_num_seqs, one(same)) == (3, one(llm))
    assert replace(args, max_num_seqs=2).max_num_seqs == 2
    assert (args.kv_cache_memory, args.seed, args.tokenizer) == (1 << 20, 0, None)
    for name in ("add_cli_args", "create_engine_config", "tensor_parallel_size"):
        assert not hasattr(args, name)
    with pytest.raises(FrozenInstanceError):
        args.max_num_seqs = 4  # type: ignore[misc]
    with pytest.raises(NanoinferError, match="tensor_parallel_size=2"):
        EngineArgs(str(folder), tensor_parallel_size=2)
    with pytest.raises(TypeError, match="no_such_name"):
        AsyncEngineArgs(str(folder), no_such_name=2)

    refuses(lambda: AsyncLLM.from_engine_args({"model": "m"}), "args={'model': 'm'} is not an AsyncEngineArgs")  # type: ignore[arg-type]

    async def main() -> RequestOutput:
        async with AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_num_seqs=2)) as model:
            assert model.llm.engine.limits.max_num_seqs == 2
            assert (await model.get_tokenizer()).encode("Go") == llm.tokenize("Go")
            return [output async for output in model.generate("Go", GREEDY)][-1]

    assert asyncio.run(main()).outputs == llm.generate("Go", GREEDY)[0].outputs


@row('`dtype="half"`, `dtype="float"`, `dtype=torch.float16`', "`kv_cache_memory_bytes`", "`LLM(seed=...)`")
def test_other_names(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    dtypes: tuple[Any, ...] = ("half", "float", torch.float16, torch.bfloat16)
    names = ("float16", "float32", "float16", "bfloat16")
    assert tuple(EngineArgs(str(folder), dtype=dtype).dtype for dtype in dtypes) == names
    assert LLM(str(folder), dtype="half", engine="native").dtype == "float16"
    with pytest.raises(NanoinferError, match="kv_cache_memory and kv_cache_memory_bytes are both given"):
        EngineArgs(str(folder), kv_cache_memory=1, kv_cache_memory_bytes=1)
    assert caplog.messages == []
    llm = LLM(str(folder), seed=7)
    assert caplog.messages[0].startswith("seed=7 is that of random weights: ")
    assert one(llm) == one(LLM(str(folder), seed=None))  # type: ignore[arg-type]
    caplog.clear()
    preset = next(iter(PRESETS))
    assert EngineArgs(f"random:{preset}", seed=7).seed == 7
    assert caplog.messages == []


@row("a fault of one request")
def test_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, bad = llm.engine.extend, llm.tokenize("Q")[0]

    def poison(batch: object) -> torch.Tensor:
        logits = extend(batch)  # type: ignore[arg-type]
        at = [i for i, ids in enumerate(split(batch)) if bad in ids]
        logits[at] = torch.nan
        return logits

    monkeypatch.setattr(llm.engine, "extend", poison)
    failed, good = llm.generate(["Q", "Go"], replace(GREEDY, logit_bias={bad: -1e5}))
    assert failed.outputs[0].finish_reason == "error"
    assert "not finite" in (failed.outputs[0].error or "") or "nan" in (failed.outputs[0].error or "")
    assert good.outputs[0].finish_reason == "length"


def split(batch: object) -> list[list[int]]:
    ids = iter(batch.token_ids)  # type: ignore[attr-defined]
    return [[next(ids) for _ in range(n)] for n in batch.num_new]  # type: ignore[attr-defined]


@row("a prompt longer than the context")
def test_long_prompt(llm: LLM) -> None:
    refuses(lambda: llm.generate("a" * 40, GREEDY), "40 tokens", "overflow='slide'")
    o = one(llm, "a" * 40, replace(GREEDY, max_tokens=50, overflow="slide"))
    assert len(o.token_ids) == 50


CHAT = "`chat(messages, sampling_params, use_tqdm=..., chat_template=..., add_generation_prompt=..., "


@row(CHAT + "chat_template_kwargs=...)`", "`RequestOutput.num_cached_tokens`", "`LLM.chat`")
@row("`chat(..., continue_final_message=True, add_generation_prompt=False)`")
@row("`chat(..., documents=..., chat_template_content_format=...)`")
def test_chat(llm: LLM) -> None:
    template = "{{ messages[0].content }}{{ end }}{{ add_generation_prompt }}"
    message = {"role": "user", "content": [{"type": "text", "text": "Go"}]}
    options = {"use_tqdm": False, "chat_template": template, "add_generation_prompt": False}
    options["chat_template_kwargs"] = {"end": "!"}
    for messages in ([message], [[message]]):
        (output,) = llm.chat(messages, sampling_params=GREEDY, **options)  # type: ignore[arg-type]
        assert output.outputs == llm.generate("Go!False", GREEDY)[0].outputs
    assert output.num_cached_tokens == len(output.prompt_token_ids) - 1  # of the same prompt before
    table = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in PAGE.splitlines() if "|" in line}
    for name in re.findall(r"`(\w+)`", table["`LLM.chat`"][1]):
        with pytest.raises(TypeError, match=name):
            llm.chat([message], **{name: None})
    refuses(lambda: llm.chat([message], chat_template_content_format="openai"), "use one of auto, string")
    template = "{{ documents[0].text }}{{ messages[0].content }}<end>"
    (output,) = llm.chat(
        [message], GREEDY, chat_template=template, documents=[{"text": "a "}], chat_template_content_format="string",
        continue_final_message=True, add_generation_prompt=False,
    )  # fmt: skip
    assert output.prompt == "a Go"


@row('`{"prompt": ..., "cache_salt": ...}`', "`generate(prompts, priority=...)`")
@row("`enable_prefix_caching`, `max_num_batched_tokens`, `LLM.reset_prefix_cache()`")
def test_sharing(folder: Path) -> None:
    llm = LLM(str(folder), enable_prefix_caching=True, max_num_batched_tokens=2048)
    assert llm.core.scheduler.config == LLM(str(folder)).core.scheduler.config
    prompts = [{"prompt": "GoGoGo", "cache_salt": salt} for salt in ("a", "a", "b")]
    cached = [llm.generate(p, GREEDY, priority=[1])[0].num_cached_tokens for p in prompts]
    assert cached == [0, 5, 0]
    llm.reset_prefix_cache()
    assert llm.generate(prompts[0], GREEDY)[0].num_cached_tokens == 0


@row("`SamplingParams`", "`LLM(...)`", "speculative decoding")
@row("`LLM.encode`, `LLM.classify`, `LLM.reward`")
def test_what_is_not_here(folder: Path, llm: LLM) -> None:
    table = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in PAGE.splitlines() if "|" in line}
    for name in re.findall(r"`(\w+)`", table["`SamplingParams`"][1]):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: None})
    with pytest.raises(TypeError, match="no_such_name"):
        LLM(str(folder), no_such_name=None)
    with pytest.raises(NanoinferError, match=r"speculative_config=\{'method': 'ngram'\}.*draft='prompt-lookup'"):
        LLM(str(folder), speculative_config={"method": "ngram"})
    ours = inspect.signature(LLM.__init__).parameters
    for cell in (table["`LLM(...)`"][2], table["speculative decoding"][2]):
        names = [name for name in re.findall(r"`(\w+)`", cell) if name != "TypeError"]
        assert len(names) >= 3
        assert all(name in ours for name in names)
    assert not ours.keys() & FOREIGN.keys()
    for name in ("encode", "classify", "reward"):
        assert not hasattr(LLM, name)
    assert llm.decode(llm.tokenize("To be")) == "To be"


@row("`best_of`")
def test_best_of(llm: LLM) -> None:
    """Values are held to those of n in tests/sampling/test_best_of.py."""
    (output,) = llm.generate("Go", SamplingParams(max_tokens=4, n=2, best_of=4, seed=0))
    (all_four,) = llm.generate("Go", SamplingParams(max_tokens=4, n=4, logprobs=0, seed=0))
    best = sorted(all_four.outputs, key=lambda o: -(o.cumulative_logprob or 0.0))
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in best[:2]]
    refuses(lambda: SamplingParams(n=129), "n=129")
    refuses(lambda: SamplingParams(best_of=129), "best_of=129")


@row("`LLM.beam_search(prompts, BeamSearchParams(...))`", "score of a beam search", "`BeamSearchSequence`")
@row("end of a beam search")
def test_beam_search(llm: LLM) -> None:
    """Values are held to transformers' in tests/core/test_beam_search.py."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=False, temperature=0.0, length_penalty=2.0)
    (output,) = llm.beam_search([{"prompt": "Go"}], params, use_tqdm=False)
    assert len(output.sequences) == 3
    for s in output.sequences:
        assert s.score == pytest.approx(s.cum_logprob / len(s.token_ids) ** 2.0)
        assert not hasattr(s, "tokens")
        assert s.text == llm.decode(s.token_ids)


@row("scoring")
def test_scoring(llm: LLM) -> None:
    """Values are held to the reference in tests/entrypoints/test_scoring.py."""
    good, bad = llm.loglikelihood("To be", [", or", " to be"])
    assert len(good.token_logprobs) == 4
    (whole,) = llm.perplexity("To be, or")
    (start,) = llm.perplexity("To be")
    assert good.log_likelihood == pytest.approx(whole.log_likelihood - start.log_likelihood, abs=1e-3)
    assert bad.log_likelihood != good.log_likelihood


@row("streaming")
def test_streaming(llm: LLM) -> None:
    assert "".join(llm.stream("Go", GREEDY)) == one(llm).text
    ids, stream = llm.stream_outputs(["Go", "To be"], GREEDY)
    finished = {item.request_id: item for item in stream if isinstance(item, RequestOutput)}
    assert [finished[i].outputs for i in ids] == [o.outputs for o in llm.generate(["Go", "To be"], GREEDY)]


@row("`AsyncLLM.generate(prompt, sampling_params, request_id, priority=...)`", "`AsyncLLM`")
@row("`AsyncLLM.abort(request_id)`, `AsyncLLM.shutdown()`")
def test_async(llm: LLM) -> None:
    """Cancellation is held in tests/entrypoints/test_async_llm.py."""

    async def main() -> list[RequestOutput]:
        model = AsyncLLM.from_llm(llm)
        long = model.generate("Go", SamplingParams(max_tokens=10**5, overflow="slide"), "long", priority=1)
        await anext(long)
        await model.abort("long")
        outputs = [output async for output in model.generate("Go", GREEDY, "mine", output_kind="final_only")]
        outputs += [output async for output in long][-1:]
        model.shutdown()
        return outputs

    done, aborted = asyncio.run(main())
    assert (done.request_id, done.outputs) == ("mine", llm.generate("Go", GREEDY)[0].outputs)
    assert (aborted.request_id, aborted.outputs[0].finish_reason) == ("long", "abort")


@row("`RequestOutput.metrics`")
def test_metrics(llm: LLM) -> None:
    m = llm.generate("Go", GREEDY)[0].metrics
    assert (m.num_prompt_tokens, m.num_output_tokens) == (2, 8)
    assert m.tpot_sec is not None
    assert m.total_sec == pytest.approx(m.ttft_sec + 7 * m.tpot_sec)


@row("`LLM.embed(prompts, pooling_params=PoolingParams(dimensions=..., use_activation=...))`")
@row("`LLM.score(queries, documents, chat_template=...)`", "`truncate_prompt_tokens` of `embed` and `score`")
@row("`dimensions` of an embedding", "score of a decoder without `classifier_from_token`")
def test_embed_and_score(llm: LLM) -> None:
    """tests/entrypoints/test_pooling.py has the values."""
    whole, short = (
        llm.embed(["Go", "To be"], pooling_params=PoolingParams(dimensions=d, use_activation=False)) for d in (None, 4)
    )
    assert [o.outputs.embedding[:4] for o in whole] == [o.outputs.embedding for o in short]
    assert (short[0].outputs.hidden_size, short[0].finished, whole[0].outputs.hidden_size) == (4, True, TINY.n_embd)
    cosines = [o.outputs.score for o in llm.score("Go", ["Go", "To be"])]
    assert cosines[0] == pytest.approx(1.0)
    assert cosines[1] == llm.score(["Go"], ["To be"])[0].outputs.score
    (cut,) = llm.embed("a" * 40 + "Go", truncate_prompt_tokens=2)
    assert cut.prompt_token_ids == llm.tokenize("Go")
    assert len(llm.embed("a" * 40, truncate_prompt_tokens=-1)[0].prompt_token_ids) == TINY.block_size
