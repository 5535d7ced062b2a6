"""Scoring on every CPU engine: prompt_logprobs, loglikelihood and perplexity equal float64 arithmetic on the logits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.models import CHARS, TINY, make_folder, make_model, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.entrypoints.scoring import _logprob, split_pair, windows
from nanoinfer.outputs import Logprob
from nanoinfer.utils.arrays import Array

CPU_ENGINES = [name for name, spec in ENGINES.items() if "cpu" in spec.devices]
BLOCK = TINY.block_size
ONE = SamplingParams(max_tokens=1, temperature=0)
TEXT = "To be, or not to be: that is"


def expected_logprobs(ids: list[int], vocab_size: int = TINY.vocab_size) -> Tensor:
    """(len(ids) - 1, V) float64: what the reference model gives for ids[1:]."""
    return make_model()(torch.tensor([ids[:-1]]))[0, :, :vocab_size].double().log_softmax(-1)


@pytest.fixture
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), max_num_seqs=4)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_prompt_logprobs_equal_the_reference_models(tiny_folder: Path, engine: str, count: int) -> None:
    llm = LLM(str(tiny_folder), engine=engine)
    (out,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=count))
    ids, expected = out.prompt_token_ids, expected_logprobs(out.prompt_token_ids)
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(ids)
    assert out.prompt_logprobs[0] is None
    for row, token, found in zip(expected, ids[1:], out.prompt_logprobs[1:], strict=True):
        assert found is not None
        assert next(iter(found)) == token
        assert set(found) == {token, *row.topk(count).indices.tolist()}
        for i, logprob in found.items():
            assert logprob.logprob == pytest.approx(row[i].item(), abs=1e-4)
            assert (logprob.rank, logprob.decoded_token) == (int((row > row[i]).sum()) + 1, CHARS[i])


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_loglikelihood_and_perplexity_equal_the_reference_models(tiny_folder: Path, engine: str) -> None:
    llm = LLM(str(tiny_folder), engine=engine)
    ids = llm.tokenize(TEXT)
    rows = expected_logprobs(ids)
    values = [row[t].item() for row, t in zip(rows, ids[1:], strict=True)]
    (found,) = llm.loglikelihood(TEXT[:11], TEXT[11:])
    assert (found.token_ids, found.num_tokens, found.num_dropped_tokens) == (ids[11:], 17, 0)
    assert found.token_logprobs == pytest.approx(values[10:], abs=1e-4)
    assert found.log_likelihood == sum(found.token_logprobs)
    assert not found.is_greedy
    (whole,) = llm.perplexity(TEXT)
    assert whole.log_likelihood == pytest.approx(sum(values), abs=1e-3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("lead", [0.0, 5.0, 11.0, 40.0], ids=lambda lead: f"ahead by {lead:g}")
def test_log_probabilities_are_those_of_float64(scale: float, lead: float) -> None:
    """Also where many equal values far from the largest add up: their rounding has one sign."""
    rows = np.random.default_rng(0).normal(0, scale, (4, 50257)).astype(np.float32)
    rows[2:] = rows[2:, :1]
    rows[:, 7] += lead
    for row in rows:
        expected = torch.tensor(row).double().log_softmax(-1).numpy()
        for target in (0, 7, 50256, int(row.argmax())):
            value, is_greedy = _logprob(row, target)
            assert abs(value - expected[target]) < 1e-6
            assert is_greedy == (row[target] == row.max())


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3], ids=str)
def test_log_probabilities_of_logits_that_are_not_finite_are_nan(row: list[float]) -> None:
    value, _ = _logprob(np.array(row, np.float32), 0)
    assert math.isnan(value)
    assert _logprob(np.array([3e38, -3e38, -math.inf], np.float32), 2) == (-math.inf, False)


def test_greedy_continuations_are_greedy(llm: LLM) -> None:
    (made,) = llm.generate("Go", SamplingParams(max_tokens=6, temperature=0, logprobs=0))
    ids = made.outputs[0].token_ids
    other = [*ids[:-1], (ids[-1] + 1) % TINY.vocab_size]
    prompt = made.prompt_token_ids
    greedy, not_greedy = llm.loglikelihood([prompt], [ids, other])
    assert (greedy.is_greedy, not_greedy.is_greedy) == (True, False)
    assert greedy.log_likelihood == pytest.approx(made.outputs[0].cumulative_logprob, abs=1e-4)
    assert not_greedy.token_logprobs[:-1] == pytest.approx(greedy.token_logprobs[:-1], abs=1e-5)


def test_prompt_logprobs_with_everything_else_on(tiny_folder: Path, llm: LLM) -> None:
    """Chunks of 128 positions and of the scheduler, several samples, several requests, speculation."""
    params = SamplingParams(max_tokens=9, seed=3, n=2, prompt_logprobs=1, logprobs=1)
    prompts = [TEXT, "a", "Go away"]
    alone = [llm.generate(p, replace(params, n=1))[0] for p in prompts]
    speculating = LLM(str(tiny_folder), max_num_seqs=4, draft="prompt-lookup")
    for model in (llm, speculating):
        together = model.generate(prompts, params)
        for one, out in zip(alone, together, strict=True):
            assert out.outputs[0].token_ids == one.outputs[0].token_ids
            assert values(out.prompt_logprobs) == pytest.approx(values(one.prompt_logprobs), abs=1e-4)
        assert together[1].prompt_logprobs == [None]
    ids, stream = llm.stream_outputs(prompts, params)
    finished = {item.request_id: item for item in stream if hasattr(item, "outputs")}
    assert [values(finished[i].prompt_logprobs) for i in ids] == [
        pytest.approx(values(one.prompt_logprobs), abs=1e-4) for one in alone
    ]
    assert llm.generate(TEXT, ONE)[0].prompt_logprobs is None


def values(found: list[dict[int, Logprob] | None] | None) -> list[float]:
    assert found is not None
    return [logprob.logprob for at in found if at is not None for logprob in at.values()]


def test_a_generated_token_has_the_same_logprob_as_a_prompts(llm: LLM) -> None:
    (first,) = llm.generate("Go", SamplingParams(max_tokens=6, seed=1, logprobs=2))
    whole = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate(whole, replace(ONE, prompt_logprobs=2))
    assert second.prompt_logprobs is not None
    assert first.outputs[0].logprobs is not None
    for ours, theirs in zip(first.outputs[0].logprobs, second.prompt_logprobs[-6:], strict=True):
        assert theirs is not None
        assert list(ours) == list(theirs)
        assert [v.logprob for v in ours.values()] == pytest.approx([v.logprob for v in theirs.values()], abs=1e-4)


def test_long_prompts_are_read_in_chunks_of_128_positions(tmp_path: Path) -> None:
    config = replace(TINY, block_size=300)
    llm = LLM(str(make_folder(tmp_path / "long", config)))
    rows: list[int] = []
    extend = llm.engine.extend
    llm.engine.extend = lambda batch: (rows.append(sum(batch.num_logits)), extend(batch))[1]  # type: ignore[method-assign]
    ids = torch.randint(TINY.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    (out,) = llm.generate([ids], replace(ONE, prompt_logprobs=0))
    assert rows == [128, 128, 43 + 1]  # the last token is sampled from its row
    logprobs = make_model(config)(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    expected = [row[t].item() for row, t in zip(logprobs, ids[1:], strict=True)]
    assert values(out.prompt_logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_prompt_past_the_context_has_no_prompt_logprobs(llm: LLM) -> None:
    ids = torch.randint(TINY.vocab_size, (BLOCK + 9,), generator=torch.Generator().manual_seed(0)).tolist()
    params = replace(ONE, prompt_logprobs=0, overflow="slide")
    refuses(lambda: llm.generate([ids], params), f"of the prompt's {BLOCK + 9} tokens are outside the context")
    (out,) = llm.generate([ids[:BLOCK]], params)
    assert len(values(out.prompt_logprobs)) == BLOCK - 1


def test_ids_without_text_are_not_among_prompt_logprobs(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "padded", chars=CHARS[:-4])))
    (out,) = llm.generate("To be", replace(ONE, prompt_logprobs=1000))
    expected = expected_logprobs(out.prompt_token_ids, len(CHARS) - 4)
    assert out.prompt_logprobs is not None
    for row, found in zip(expected, out.prompt_logprobs[1:], strict=True):
        assert found is not None
        assert sorted(found) == list(range(len(CHARS) - 4))
        assert found[7].logprob == pytest.approx(row[7].item(), abs=1e-4)
    refuses(lambda: llm.generate([1, 58], replace(ONE, prompt_logprobs=0)), "prompt_logprobs: token id 58")


def test_logits_that_are_not_finite_end_that_request_alone(llm: LLM) -> None:
    bad = llm.tokenize("Q")[0]
    extend = llm.engine.extend

    def poison(batch: StepBatch) -> Array:
        logits, token, row = extend(batch), 0, 0
        for num_new, num_logits in zip(batch.num_new, batch.num_logits, strict=True):
            if bad in batch.token_ids[token : token + num_new]:
                logits[row : row + num_logits] = math.nan
            token, row = token + num_new, row + num_logits
        return logits

    llm.engine.extend = poison  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1)
    good, failed = llm.generate(["ab", "aQa"], params)
    assert failed.outputs[0].finish_reason == "error"
    assert "not finite" in (failed.outputs[0].error or "")
    assert (failed.prompt_logprobs, failed.finished) == (None, True)
    assert (good.outputs[0].finish_reason, len(good.outputs[0].token_ids)) == ("length", 3)
    ids, stream = llm.stream_outputs(["aQa", "ab"], params)
    finished = {item.request_id: item for item in stream if hasattr(item, "outputs")}
    assert [finished[i].outputs[0].finish_reason for i in ids] == ["error", "length"]
    refuses(lambda: llm.loglikelihood("a", "Qa"), "the log-likelihood of the continuation is nan")
    assert not llm.core.unfinished


def test_contexts_and_continuations(llm: LLM) -> None:
    pairs = llm.loglikelihood(["To be", "or not"], [", or", " to be"])
    assert [llm.decode(p.token_ids) for p in pairs] == [", or", " to be"]
    choices = llm.loglikelihood("To be", [", or", " to be"])
    assert choices[0] == pairs[0]
    assert choices[1].token_ids == pairs[1].token_ids
    assert choices[1].log_likelihood != pairs[1].log_likelihood
    (moved,) = llm.loglikelihood("To be  ", "or")
    assert llm.decode(moved.token_ids) == "  or"
    assert moved == llm.loglikelihood("To be", "  or")[0]
    assert llm.loglikelihood("", "Go") == llm.loglikelihood([[0]], [llm.tokenize("Go")])  # the start token is 0
    ids, after = llm.tokenize("a" * BLOCK), llm.tokenize("bcd")
    (long,) = llm.loglikelihood([ids], [after])
    assert long.num_dropped_tokens == 2
    assert replace(long, num_dropped_tokens=0) == llm.loglikelihood([ids[2:]], [after])[0]
    assert llm.loglikelihood("a", []) == []


def test_pairs_that_cannot_be_scored_are_named(llm: LLM, tmp_path: Path) -> None:
    refuses(lambda: llm.loglikelihood(["a", "b", "c"], ["d", "e"]), "3 contexts, but 2 continuations")
    refuses(lambda: llm.loglikelihood("a", [" b", ""]), "continuation 2 of 2: continuation=''", "adds no token")
    refuses(lambda: llm.loglikelihood("a", [[1]]), "continuation=[1]: give both as text, or both as token ids")
    refuses(lambda: llm.loglikelihood("a", "b" * (BLOCK + 1)), "has 33 tokens, but the context length is 32")
    bare = LLM(str(make_folder(tmp_path / "bare", replace(TINY, bos_token_id=None))))
    refuses(lambda: bare.loglikelihood("", "Go"), "has no start token")


def test_split_pair_moves_spaces_and_keeps_the_wholes_tokens() -> None:
    def encode(text: str) -> list[int]:  # "ab" is one token
        return [ord(c) for c in text.replace("ab", "X")]

    assert split_pair(encode, "c ", "d") == ([ord("c")], [ord(" "), ord("d")])
    assert split_pair(encode, "ca", "bd") == ([ord("c"), ord("a")], [ord("d")])  # as lm-evaluation-harness does
    assert split_pair(encode, "  ", "d") == ([], [ord(" "), ord(" "), ord("d")])


def test_windows_score_every_token_once() -> None:
    assert list(windows(10, 4, 2)) == [(0, 1, 5), (2, 5, 7), (4, 7, 9), (5, 9, 10)]
    assert list(windows(1, 4, 2)) == []
    assert list(windows(3, 4, 2)) == [(0, 1, 3)]


# In the steps of other requests ------------------------------------------------------------------------------


def test_many_continuations_process_their_context_once(llm: LLM) -> None:
    counts: list[int] = []
    extend = llm.engine.extend
    llm.engine.extend = lambda batch: (counts.append(len(batch.token_ids)), extend(batch))[1]  # type: ignore[method-assign]
    context = llm.tokenize(TEXT[:20])
    continuations = [[i, 2 * i + 1, i + 2] for i in range(10)]
    together = llm.loglikelihood([context], continuations)
    assert sum(counts) == len(context) - 1 + 10 * 3  # the last token of a continuation is not an input
    assert len(counts) < 10
    for one, ids in zip(together, continuations, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.loglikelihood([context], [ids])
        assert one.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-5)


def test_a_stream_goes_on_in_every_step_of_a_long_text(tmp_path: Path) -> None:
    config = replace(TINY, block_size=300)
    llm = LLM(str(make_folder(tmp_path / "long", config)), engine="native", max_num_seqs=2)
    steps: list[tuple[int, int]] = []
    extend = llm.engine.extend

    def watched(batch: StepBatch) -> Any:
        steps.append((sum(n == 1 for n in batch.num_new), sum(batch.num_logits)))
        return extend(batch)

    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = llm.generate("Go", params)[0].outputs[0].text
    text = [int(t) for t in np.random.default_rng(0).integers(0, TINY.vocab_size, 301)]
    alone = llm.perplexity([text])[0].log_likelihood
    stream = llm.stream("Go", params)
    first = next(stream)
    llm.engine.extend = watched  # type: ignore[method-assign]
    assert llm.perplexity([text])[0].log_likelihood == alone
    assert steps == [(1, 129), (1, 129), (1, 45)]  # 128 positions of the text and the stream's next token
    assert first + "".join(stream) == expected


def test_scoring_waits_for_its_turn_and_frees_it_after_an_interrupt(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=1)
    expected = llm.perplexity(TEXT)[0].log_likelihood
    _, stream = llm.stream_outputs(["Go", "To"], SamplingParams(max_tokens=5, temperature=0))
    next(stream)
    assert llm.perplexity(TEXT)[0].log_likelihood == pytest.approx(expected, abs=1e-5)
    assert len(list(stream)) > 2

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.perplexity(TEXT * 3, stride=1, progress=interrupt)
    assert not llm.core.unfinished
    assert set(llm.engine.handles) == llm.core.scheduler.handles


def test_prompt_logprobs_are_read_in_the_requests_own_prefill(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder))
    num_tokens: list[int] = []
    extend = llm.engine.extend
    llm.engine.extend = lambda batch: (num_tokens.append(len(batch.token_ids)), extend(batch))[1]  # type: ignore[method-assign]
    (out,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=0, n=2))
    num_prompt = len(out.prompt_token_ids)
    assert num_tokens[0] == num_prompt
    (again,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=0))  # what is read is computed again
    assert (again.num_cached_tokens, again.prompt_logprobs) == (0, out.prompt_logprobs)
    assert llm.generate(TEXT, ONE)[0].num_cached_tokens == num_prompt - 1
