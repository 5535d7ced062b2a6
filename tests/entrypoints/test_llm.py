"""The front door: prompts, parameters, streaming, overflow, scoring, and errors that say what to do."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from helpers.models import CHARS, TINY, make_folder, make_model
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.models.transformer import Transformer

GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), max_num_seqs=4)


def test_prompts_of_every_form_give_the_same_text(llm: LLM) -> None:
    ids = [CHARS.index(c) for c in "To be"]
    (text,) = llm.generate("To be", GREEDY)
    assert text.prompt_token_ids == ids
    assert text.outputs[0].text == "".join(CHARS[t] for t in text.outputs[0].token_ids)
    for prompts in (["To be"], ids, [ids]):
        assert llm.generate(prompts, GREEDY)[0].outputs == text.outputs
    mixed = llm.generate(["To be", ids], [GREEDY, GREEDY])
    assert [m.outputs for m in mixed] == [text.outputs, text.outputs]
    assert llm.generate([]) == []


def test_stream_pieces_add_up_to_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=4)
    assert "".join(llm.stream("Go", params)) == llm.generate("Go", params)[0].outputs[0].text


def test_a_stream_that_is_left_frees_its_sequence(llm: LLM) -> None:
    for _ in range(10):  # more often than there are slots
        stream = llm.stream("Go", GREEDY)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
    assert not llm.core.unfinished
    assert len(llm.generate(["a", "b", "c", "d"], GREEDY)) == 4


def test_stream_outputs_tells_each_request_once(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=m, seed=1, n=n) for m, n in ((3, 2), (9, 1), (1, 3), (5, 1))]
    prompts = ["a", "b", "c", "d"]
    ids, stream = llm.stream_outputs(prompts, params)
    texts: dict[tuple[int, int], str] = {}
    finished = {}
    for item in stream:
        if hasattr(item, "outputs"):
            finished[item.request_id] = item
        else:
            assert item.request_id not in finished
            texts[item.request_id, item.index] = texts.get((item.request_id, item.index), "") + item.text
    assert sorted(finished) == ids
    for request_id, expected in zip(ids, llm.generate(prompts, params), strict=True):
        assert finished[request_id].outputs == expected.outputs
        assert [texts[request_id, o.index] for o in expected.outputs] == [o.text for o in expected.outputs]


def test_the_seed_that_is_reported_gives_the_text_again(llm: LLM) -> None:
    first = llm.generate("Ho", SamplingParams(max_tokens=12))[0]
    again = llm.generate("Ho", SamplingParams(max_tokens=12, seed=first.seed))[0]
    assert again.outputs == first.outputs
    other = llm.generate("Ho", SamplingParams(max_tokens=12))[0]
    assert other.seed != first.seed


def test_alone_and_in_company_the_same_text(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=15, seed=i, temperature=0.5 + i / 4, top_k=i * 5) for i in range(6)]
    prompts = ["a", "bcd", "efghij", "k", "lm", "nopqrstu"]
    together = [o.outputs for o in llm.generate(prompts, params)]
    assert together == [llm.generate(p, q)[0].outputs for p, q in zip(prompts, params, strict=True)]


def test_stop_string_across_tokens_and_stop_token(llm: LLM) -> None:
    (whole,) = llm.generate("Go", SamplingParams(max_tokens=20, seed=1))
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[7:10]  # three one-character tokens
    (o,) = llm.generate("Go", SamplingParams(max_tokens=20, seed=1, stop=[stop]))[0].outputs
    assert o.text == text[: text.index(stop)]
    assert (o.finish_reason, o.stop_reason) == ("stop", stop)
    assert o.token_ids == ids[: text.index(stop) + 3]
    token = ids[9]
    (o,) = llm.generate("Go", SamplingParams(max_tokens=20, seed=1, stop_token_ids=[token]))[0].outputs
    assert o.token_ids == ids[: ids.index(token) + 1]
    assert o.text == text[: ids.index(token)]
    assert (o.finish_reason, o.stop_reason) == ("stop", token)


def test_end_of_text_ends_it_unless_ignored(tmp_path: Path) -> None:
    from dataclasses import replace

    plain = LLM(str(make_folder(tmp_path / "plain")))
    ids = plain.generate("Go", SamplingParams(max_tokens=20, seed=1))[0].outputs[0].token_ids
    llm = LLM(str(make_folder(tmp_path / "eos", replace(TINY, eos_token_ids=(ids[5],)))))
    first = ids.index(ids[5])
    params = SamplingParams(max_tokens=20, seed=1)
    assert llm.generate("Go", params)[0].outputs[0].token_ids == ids[: first + 1]
    assert llm.generate("Go", replace(params, ignore_eos=True))[0].outputs[0].token_ids == ids
    late = llm.generate("Go", replace(params, min_tokens=first + 3))[0].outputs[0]
    assert len(late.token_ids) >= first + 3
    assert ids[5] not in late.token_ids[: first + 2]


def test_a_prompt_longer_than_the_context(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        NanoinferError, match=r"prompt has 40 tokens, the maximum context length is 32.*overflow='slide'"
    ):
        llm.generate("a" * 40, GREEDY)
    with caplog.at_level(logging.WARNING, "nanoinfer"):
        params = SamplingParams(max_tokens=3, temperature=0, overflow="slide", slide_stride=1)
        (out,) = llm.generate("b" * 8 + "a" * 32, params)
    assert "the first 8 tokens are dropped" in caplog.text
    assert out.num_dropped_tokens == 8
    assert out.outputs[0].token_ids[:1] == llm.generate("a" * 32, GREEDY)[0].outputs[0].token_ids


def tokens_of(llm: LLM, params: SamplingParams) -> list[int]:
    return [t for o in llm.generate("Go", params)[0].outputs for t in o.token_ids]


def test_ids_without_text_are_never_sampled(tmp_path: Path) -> None:
    """nanoGPT pads 50,257 tokens to 50,304: here 4 ids of 59 have no text."""
    folder = make_folder(tmp_path / "padded", chars=CHARS[:-4])
    llm = LLM(str(folder))
    params = SamplingParams(max_tokens=30, temperature=50.0, seed=0, n=4)
    assert max(tokens_of(llm, params)) < len(CHARS) - 4
    assert max(tokens_of(LLM(str(make_folder(tmp_path / "full"))), params)) >= len(CHARS) - 4
    with pytest.raises(NanoinferError, match="stop_token_ids: token id 58"):
        llm.generate("Go", SamplingParams(stop_token_ids=[58]))


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ("Go é", GREEDY, "character 'é' is not among the 59"),
        ([1, 59], GREEDY, r"token id 59 is not an integer in \[0, 58\]"),
        ([1, -1], GREEDY, "token id -1"),
        ([[1, 2.5]], GREEDY, "token id 2.5"),
        ([[True]], GREEDY, "token id True"),
        (3, GREEDY, "prompt=3 is neither a string nor a list"),
        ([None], GREEDY, "prompt=None is neither"),
        ("Go", {"max_tokens": 3}, "1 prompts, but|is not a SamplingParams"),
        ("Go", [GREEDY, GREEDY], "1 prompts, but 2 SamplingParams"),
        ("Go", SamplingParams(n=5), "n=5 is more than max_num_seqs=4"),
        ("Go", SamplingParams(logit_bias={59: 1.0}), "logit_bias: token id 59"),
        ("Go", SamplingParams(overflow="slide", slide_stride=33), "slide_stride=33 is more than the context"),
    ],
)
def test_bad_requests_say_what_is_wrong(llm: LLM, prompt: object, params: object, message: str) -> None:
    with pytest.raises(NanoinferError, match=message) as e:
        llm.generate(prompt, params)  # type: ignore[arg-type]
    assert "\n" not in str(e.value)
    assert not llm.core.unfinished


def test_one_bad_prompt_queues_none(llm: LLM) -> None:
    with pytest.raises(NanoinferError):
        llm.generate(["good", "b\u00e4d"], GREEDY)
    assert not llm.core.unfinished


def test_an_empty_prompt_is_the_start_token_or_an_error(tmp_path: Path, llm: LLM) -> None:
    from dataclasses import replace

    assert llm.generate("", GREEDY)[0].prompt_token_ids == [0]
    bare = LLM(str(make_folder(tmp_path / "bare", replace(TINY, bos_token_id=None))))
    with pytest.raises(NanoinferError, match=r"the prompt is empty and model .* has no start token"):
        bare.generate("", GREEDY)


def test_without_a_tokenizer_ids_work_and_text_says_why_not(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "m", chars=None)))
    (out,) = llm.generate([1, 2, 3], GREEDY)
    assert (len(out.outputs[0].token_ids), out.outputs[0].text, out.prompt) == (8, "", None)
    for call in (
        lambda: llm.generate("text", GREEDY),
        lambda: llm.stream([1, 2], GREEDY),
        lambda: llm.generate([1], SamplingParams(stop="x")),
        lambda: llm.decode([1]),
    ):
        with pytest.raises(NanoinferError, match=r"has no tokenizer: its vocabulary of 59 tokens is not GPT-2's"):
            call()


def test_unknown_keywords_are_errors(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="tempo"):
        LLM(str(tiny_folder), tempo=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def log_likelihood(gpt: Transformer, ids: list[int], start: int) -> float:
    """Sum of the log-probabilities of ids[start:], by the reference model on the whole list."""
    logprobs = gpt(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return sum(logprobs[t - 1, ids[t]].item() for t in range(start, len(ids)))


@pytest.mark.parametrize("engine", ["recompute", "dynamic", "static", "paged"])
def test_score_equals_the_reference_model(tiny_folder: Path, engine: str) -> None:
    llm, gpt = LLM(str(tiny_folder), engine=engine), make_model()
    text = "To be, or not to be: that is"
    short, pair = llm.perplexity([text, "ab"])
    ids = llm.tokenize(text)
    assert short.num_tokens == len(ids) - 1
    assert short.log_likelihood == pytest.approx(log_likelihood(gpt, ids, 1), abs=1e-4)
    assert short.perplexity == pytest.approx(math.exp(-short.log_likelihood / short.num_tokens))
    assert pair.log_likelihood == pytest.approx(log_likelihood(gpt, llm.tokenize("ab"), 1), abs=1e-4)


@pytest.mark.parametrize("stride", [1, 5, 16, 32])
def test_score_past_the_context_gives_every_token_its_context(llm: LLM, stride: int) -> None:
    gpt, block = make_model(), TINY.block_size
    ids = torch.randint(TINY.vocab_size, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = log_likelihood(gpt, ids[: block + 1], 1)
    for begin in range(block + 1, len(ids), stride):
        end = min(begin + stride, len(ids))
        window = ids[end - 1 - block : end]
        expected += log_likelihood(gpt, window, len(window) - (end - begin))
    (score,) = llm.perplexity(ids, stride=stride)
    assert score.num_tokens == 99
    assert score.log_likelihood == pytest.approx(expected, abs=1e-3)


def test_score_rejects_what_it_cannot_score(llm: LLM) -> None:
    with pytest.raises(NanoinferError, match="a text of 1 token cannot be scored"):
        llm.perplexity("a")
    for stride in (0, 33, 2.5, True):
        with pytest.raises(NanoinferError, match="stride="):
            llm.perplexity("abc", stride=stride)  # type: ignore[arg-type]


def test_metrics_count_what_was_done(llm: LLM) -> None:
    (out,) = llm.generate("abcd", SamplingParams(max_tokens=6, n=2, seed=0))
    m = out.metrics
    assert (m.num_prompt_tokens, m.num_output_tokens) == (4, 12)
    assert m.tpot_sec is not None
    assert m.total_sec == pytest.approx(m.ttft_sec + 5 * m.tpot_sec)
    assert llm.generate("abcd", SamplingParams(max_tokens=1))[0].metrics.tpot_sec is None


def test_a_request_that_excludes_every_token_is_refused_alone(llm: LLM) -> None:
    with pytest.raises(NanoinferError, match="min_tokens=1 excludes every token: all 59 are in stop_token_ids"):
        llm.generate("Go", SamplingParams(min_tokens=1, stop_token_ids=tuple(range(59))))


def test_numbers_too_long_to_print_are_named_not_printed(llm: LLM) -> None:
    huge = 10**5000
    for call in (
        lambda: llm.generate([1, huge]),
        lambda: llm.perplexity("abc", stride=huge),
        lambda: llm.generate("a", SamplingParams(stop_token_ids=[huge])),
    ):
        with pytest.raises(NanoinferError, match="an integer of 16610 bits"):
            call()
