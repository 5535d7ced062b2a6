"""What requests ask of the models of all families, beside greedy tokens: beams, scores, shared prefixes, preemption.

The public API on `native` and, in `make test-nightly`, on an engine in PyTorch, against the reference model without a
cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.engines import naive_greedy
from helpers.families import CASES, RECURRENT
from helpers.features import FEATURES
from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.kv.plan import _MIN_KEPT, KV_BLOCK, kv_block_bytes, state_bytes
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.beams import BeamSearch, Hypothesis, find_candidates

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
COMMON = [(5 * i * i + 3 * i) % 61 for i in range(20)]
PROMPTS = [[*COMMON, 7], [*COMMON[:17], 3, 9], [4], COMMON[::-1] + COMMON[:10], [8] * 25]
BEAMS = BeamSearchParams(3, max_tokens=8, length_penalty=0.7)
NUM_BLOCKS = 8
"""Blocks of keys and values: a whole context has 6, and the prompts with their outputs 20."""


def tolerance(case: str) -> float:
    """Return that of a log-probability: rounding grows in states."""
    return 3e-4 if case in RECURRENT else 1e-4


all_families = pytest.mark.parametrize("case", CASES)
both_engines = pytest.mark.parametrize("engine", ["native", "paged"])
one_engine = pytest.mark.nightly_if(lambda engine, case: case not in (FEATURES if engine == "native" else ["olmo2"]))
few_are_fast = pytest.mark.slow_if(lambda case: case not in FEATURES[::8])


@pytest.fixture(scope="module")
def llm_of(folder_of: Callable[[str], Path], gpt_of: Callable[[str], Transformer]) -> Callable[[str, str], LLM]:
    """Return a case on an engine with few blocks of keys and values."""

    @functools.cache
    def make(engine: str, case: str) -> LLM:
        config = gpt_of(case).config
        block = kv_block_bytes(config, "float32") if engine == "native" else KV_BLOCK * config.kv_bytes_per_token(4)
        blocks = NUM_BLOCKS * block
        states = max(blocks, (5 + _MIN_KEPT) * state_bytes(config, 1)) if config.recurrence else 0  # at least half
        options = {"dtype": "float32", "max_num_seqs": 5, "kv_cache_memory": blocks + states}
        return LLM(str(folder_of(case)), engine=engine, device="cpu", **options)

    return make


@pytest.fixture(scope="module")
def beams_of(gpt_of: Callable[[str], Transformer]) -> Callable[[str], list[list[Hypothesis]]]:
    """Return the results of a case's beam searches of PROMPTS[:3], which run the whole sequence of each beam."""
    return functools.cache(lambda case: [search_whole(gpt_of(case), ids, BEAMS) for ids in PROMPTS[:3]])


def prompts_of(ids: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": p} for p in ids]


def logprobs(gpt: Transformer, ids: list[int]) -> np.ndarray:
    """Return the reference's log-probabilities after each token, (T, V)."""
    with torch.inference_mode():
        return torch.log_softmax(gpt(torch.tensor([ids]))[0].double(), -1).numpy()  # type: ignore[no-any-return]


def search_whole(gpt: Transformer, ids: list[int], params: BeamSearchParams) -> list[Hypothesis]:
    """Return the results of a beam search that runs the whole sequence of each beam in each step."""
    search = BeamSearch(params, gpt.config.eos_token_ids, params.max_tokens)
    beams: list[list[int]] = [ids]
    while not search.finished:
        with torch.inference_mode():
            rows = torch.log_softmax(gpt(torch.tensor(beams))[:, -1].double(), -1).numpy()
        found = [find_candidates(row, search.num_candidates) for row in rows]
        beams = [[*beams[parent], token] for parent, token in search.advance(found)]
    return search.results()


@all_families
@both_engines
@one_engine
@few_are_fast
def test_beams(
    engine: str, case: str, llm_of: Callable[[str, str], LLM], beams_of: Callable[[str], list[list[Hypothesis]]]
) -> None:
    outputs = llm_of(engine, case).beam_search(prompts_of(PROMPTS[:3]), BEAMS)
    for expected, output in zip(beams_of(case), outputs, strict=True):
        assert [s.token_ids for s in output.sequences] == [h.token_ids for h in expected]
        assert [s.score for s in output.sequences] == pytest.approx([h.score for h in expected], abs=tolerance(case))


@all_families
@both_engines
@one_engine
@few_are_fast
def test_scores(
    engine: str, case: str, llm_of: Callable[[str, str], LLM], gpt_of: Callable[[str], Transformer]
) -> None:
    """Of a prompt, of continuations, and of the generated tokens."""
    llm, gpt = llm_of(engine, case), gpt_of(case)
    params = replace(GREEDY, max_tokens=4, prompt_logprobs=3, logprobs=3)
    for ids, output in zip(PROMPTS[:2], llm.generate(prompts_of(PROMPTS[:2]), params), strict=True):
        tokens = ids + output.outputs[0].token_ids
        rows = logprobs(gpt, tokens[:-1])
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        for token, row, found in zip(
            tokens[1:], rows, output.prompt_logprobs[1:] + output.outputs[0].logprobs, strict=True
        ):
            best = np.argsort(-row)[:3]
            assert found is not None
            assert found.keys() == {token, *best.tolist()}
            assert [p.logprob for p in found.values()] == pytest.approx([row[t] for t in found], abs=tolerance(case))
            assert found[token].rank == 1 + int((row > row[token]).sum())
    for more, found in zip(PROMPTS[2:4], llm.loglikelihood([PROMPTS[0]], PROMPTS[2:4]), strict=True):
        rows = logprobs(gpt, PROMPTS[0] + more)[len(PROMPTS[0]) - 1 : -1]
        assert found.token_logprobs == pytest.approx(rows[range(len(more)), more].tolist(), abs=tolerance(case))


@all_families
@both_engines
@one_engine
@few_are_fast
def test_shared_prefixes_and_preemption(
    engine: str, case: str, llm_of: Callable[[str, str], LLM], gpt_of: Callable[[str], Transformer]
) -> None:
    """Prompts with a common beginning, one after the other; then all at once, which do not fit with their outputs."""
    llm, gpt = llm_of(engine, case), gpt_of(case)
    llm.reset_prefix_cache()
    shared = 0 if gpt.config.recurrence else 17  # so few tokens keep no state: see test_recurrent.py
    for ids, num_cached in zip(PROMPTS[:2], (0, shared), strict=True):
        (output,) = llm.generate(prompts_of([ids]), replace(GREEDY, max_tokens=6))
        assert output.outputs[0].token_ids == naive_greedy(gpt, ids, 40)[:6]
        assert output.num_cached_tokens == num_cached
    before = llm.core.scheduler.stats.num_preempted
    outputs = llm.generate(prompts_of(PROMPTS), GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [naive_greedy(gpt, ids, 40) for ids in PROMPTS]
    assert llm.core.scheduler.stats.num_preempted > before
