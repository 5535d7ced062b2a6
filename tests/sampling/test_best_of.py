"""best_of: of the outputs sampled from one prefill, the n with the highest log-probability per token are returned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.models import TINY, make_folder, refuses, submit
from helpers.table_engine import CHARS, RANDOM, V, make_core
from nanoinfer import LLM, CompletionOutput, SamplingParams

PARAMS = SamplingParams(n=2, best_of=6, max_tokens=9, temperature=2.0, seed=3, stop_token_ids=range(12))  # type: ignore[arg-type]


def mean(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob / len(output.token_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("best_of") / "tiny", replace(TINY, eos_token_ids=(3,)))


@pytest.fixture(scope="module", params=["recompute", "static", "native"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return LLM(str(folder), engine=request.param, dtype="float32", device="cpu", max_num_seqs=8)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_outputs_are_the_best_of_those_of_n(llm: LLM, logprobs: int | None) -> None:
    (all_six,) = llm.generate("Go", replace(PARAMS, n=6, best_of=None, logprobs=0))
    assert len({len(o.token_ids) for o in all_six.outputs}) > 1  # so that the mean and the sum order them differently
    expected = sorted(all_six.outputs, key=mean, reverse=True)[:2]
    (found,) = llm.generate("Go", replace(PARAMS, logprobs=logprobs))
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected]
    assert [o.index for o in found.outputs] == [0, 1]
    for output, one in zip(found.outputs, expected, strict=True):
        assert output.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-5)
        assert (output.text, output.finish_reason) == (one.text, one.finish_reason)
        assert (output.logprobs is None) == (logprobs is None)
    assert found.metrics.num_output_tokens == sum(len(o.token_ids) for o in all_six.outputs)


def test_best_of_n_returns_all_in_their_order(llm: LLM) -> None:
    (expected,) = llm.generate("Go", replace(PARAMS, n=3, best_of=None))
    (found,) = llm.generate("Go", replace(PARAMS, n=3, best_of=3))
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
    assert [o.cumulative_logprob for o in found.outputs] == [None] * 3


def test_speculation_does_not_change_them(folder: Path) -> None:
    plain = LLM(str(folder), engine="native", dtype="float32", max_num_seqs=8)
    drafted = LLM(str(folder), engine="native", dtype="float32", max_num_seqs=8, draft="prompt-lookup", speculate_k=3)
    params = replace(PARAMS, max_tokens=20, temperature=0.7)
    (expected,), (found,) = (model.generate("GoGoGoGo", params) for model in (plain, drafted))
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
    assert [o.cumulative_logprob for o in found.outputs] == pytest.approx(
        [o.cumulative_logprob for o in expected.outputs], abs=1e-4
    )


def test_one_prefill_serves_all_and_everything_is_freed() -> None:
    core, engine, _ = make_core(RANDOM, max_num_seqs=8)
    request = submit(core, None, [0, 1, 2, 3], replace(PARAMS, stop_token_ids=()), seed=1)
    core.step()
    assert engine.num_fed == 4
    while core.unfinished:
        core.step()
    assert not engine.held
    assert [len(o.token_ids) for o in core.output(request).outputs] == [9, 9]


def test_an_output_that_failed_is_the_last() -> None:
    table = RANDOM.clone()
    table[4:] = torch.nan  # after one of these tokens
    core, _, _ = make_core(table, max_num_seqs=32)
    params = SamplingParams(n=32, max_tokens=3, temperature=2.0, logprobs=0)
    outputs = []
    for p in (params, replace(params, n=4, best_of=32, logprobs=None), replace(params, n=31, best_of=32)):
        request = submit(core, None, [0], p, seed=0)
        while core.unfinished:
            core.step()
        outputs.append(core.output(request).outputs)
    failed = [o for o in outputs[0] if o.error]
    assert 1 < len(failed) < 28
    assert not any(o.error for o in outputs[1])
    assert [o.error is not None for o in outputs[2]] == [False] * (32 - len(failed)) + [True] * (len(failed) - 1)


def test_what_cannot_be_done_is_refused(llm: LLM) -> None:
    for stream in (llm.stream, llm.stream_outputs):
        refuses(lambda s=stream: s("Go", SamplingParams(best_of=4)), "best_of=4 is more than n=1", "use generate")  # type: ignore[misc]
    refuses(lambda: llm.generate("Go", SamplingParams(best_of=9)), "best_of=9 is more than max_num_seqs=8")
    assert len(CHARS) == V
