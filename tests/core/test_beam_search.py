"""Beam search on every engine: transformers' outputs, one after the other, in a batch, and beside other requests."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers import families
from helpers.engines import DEVICES, make_engine, prompt
from helpers.engines import make_core as core_of
from helpers.models import TINY, edit_config, make_folder, make_model, refuses, submit
from helpers.overlap import TorchSampler
from helpers.scheduling import check_integrity
from helpers.table_engine import RANDOM, make_core
from nanoinfer import LLM, BeamSearchParams, BeamSearchSequence, NanoinferError, SamplingParams
from nanoinfer.core import beam_search as core_beams
from nanoinfer.core.core import Core
from nanoinfer.core.overlap import OverlapScheduler
from nanoinfer.engines.registry import ENGINES
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request

ENDS = [2, 7, 11, 30, 41, 55]
PROMPTS = [[5, 9, 11, 30, 7], [3], list(range(17, 36))]
WIDTHS = [1, 2, 3, 5, 8]
PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]
EARLY: list[bool | str] = [False, True, "never"]


def reference(model: Any, ids: list[int], params: BeamSearchParams, ends: list[int]) -> list[tuple[list[int], float]]:
    """Return transformers' outputs with their scores."""
    ends = [] if params.ignore_eos else ends
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.beam_width, max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping, eos_token_id=ends or None,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    outputs = []
    for row in found.sequences[:, len(ids) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        outputs.append(row[:end])
    if params.beam_width > 1:
        return list(zip(outputs, found.sequences_scores.tolist(), strict=True))
    (tokens,) = outputs  # greedy decoding, which has no score
    total = sum(torch.log_softmax(row[0], -1)[t].item() for row, t in zip(found.scores, tokens, strict=True))
    return [(tokens, total / len(tokens) ** params.length_penalty)]


def assert_equal(found: list[BeamSearchSequence], expected: list[tuple[list[int], float]]) -> None:
    assert [s.token_ids for s in found] == [tokens for tokens, _ in expected]
    # transformers adds up the log-probabilities in float32.
    assert [s.score for s in found] == pytest.approx([score for _, score in expected], rel=1e-6, abs=1e-4)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, LLM]]:
    """Return a model of transformers, and the same one on `native` (where it is installed, else `static`)."""

    @functools.cache
    def make(case: str) -> tuple[Any, LLM]:
        folder = tmp_path_factory.mktemp("beams") / case
        model = families.make_folder(case, folder)
        edit_config(folder, eos_token_id=ENDS)
        (folder / "generation_config.json").unlink()
        native = ENGINES["native"].unavailable() is None
        llm = LLM(str(folder), engine="native" if native else "static", dtype="float32", device="cpu", max_num_seqs=24)
        return model, llm

    return make


@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.slow_if(lambda width, early_stopping: (width, early_stopping) not in ((1, False), (5, "never")))
@pytest.mark.nightly_if(lambda width: width not in (1, 5))
def test_outputs_and_scores_equal_those_of_transformers(
    model_of: Callable[[str], tuple[Any, LLM]], width: int, early_stopping: bool | str
) -> None:
    model, llm = model_of("llama")
    ended = 0
    for penalty in PENALTIES:
        params = BeamSearchParams(width, max_tokens=14, length_penalty=penalty, early_stopping=early_stopping)
        for ids, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            assert_equal(output.sequences, reference(model, ids, params, ENDS))
            for s in output.sequences:
                assert s.score == pytest.approx(s.cum_logprob / len(s.token_ids) ** penalty)
                assert s.finish_reason == ("stop" if s.token_ids[-1] in ENDS else "length")
                assert s.stop_reason == (s.token_ids[-1] if s.finish_reason == "stop" else None)
                ended += s.finish_reason == "stop"
    assert ended > 5  # so that end tokens matter
    assert not llm.engine.handles


@pytest.mark.parametrize("case", ["gemma3", "qwen2-windows", "nanochat", "gpt_neox", "cohere2", "ministral3"])
@pytest.mark.slow_if(lambda case: case not in ("gpt_neox", "qwen2-windows"))
def test_other_families_equal_transformers(model_of: Callable[[str], tuple[Any, LLM]], case: str) -> None:
    model, llm = model_of(case)
    for width, max_tokens, ignore_eos in [(3, 1, False), (4, 20, True), (6, 9, False)]:
        params = BeamSearchParams(width, max_tokens=max_tokens, ignore_eos=ignore_eos, length_penalty=0.7)
        for ids, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            assert_equal(output.sequences, reference(model, ids, params, ENDS))


def run(core: Core) -> None:
    """Run until all requests have finished."""
    while core.unfinished:
        core.step()
        check_integrity(core.scheduler)


def beam_request(core: Core, ids: list[int], params: BeamSearchParams, ends: tuple[int, ...] = (3, 8, 21)) -> Request:
    return submit(core, None, ids, params.sampling_params, 0, ends, beams=params)


@functools.cache
def recomputed(width: int, early_stopping: bool | str) -> list[tuple[list[list[int]], list[float]]]:
    return search(core_of(make_engine("recompute", make_model(), 20)), width, early_stopping)


def search(core: Core, width: int, early_stopping: bool | str) -> list[tuple[list[list[int]], list[float]]]:
    """Return the outputs and log-probabilities of the beams of four prompts, one of which fills the context."""
    params = BeamSearchParams(width, max_tokens=10, early_stopping=early_stopping, length_penalty=1.5)
    requests = [beam_request(core, prompt(length), params) for length in (5, 1, 9, 27)]
    run(core)
    found = [core.output(r).outputs for r in requests]
    assert not core.engine.handles
    return [([o.token_ids for o in outputs], [o.cumulative_logprob or 0.0 for o in outputs]) for outputs in found]


@pytest.mark.parametrize("width, early_stopping", [(1, False), (2, "never"), (5, True)])
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "recompute"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow_if(lambda name: name == "compiled")
def test_every_engine_finds_the_beams_of_recompute(
    name: str, device: str, width: int, early_stopping: bool | str
) -> None:
    if name == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter is slow, and its engine needs a GPU")
    found = search(core_of(make_engine(name, make_model().to(device), 20)), width, early_stopping)
    for (tokens, sums), (expected, expected_sums) in zip(found, recomputed(width, early_stopping), strict=True):
        assert tokens == expected
        assert sums == pytest.approx(expected_sums, abs=1e-4)


def test_a_search_ends_at_the_context_length(model_of: Callable[[str], tuple[Any, LLM]]) -> None:
    model, llm = model_of("llama")
    ids = [t for i in range(28) for t in (3 + i, 13, 17)]  # 84 of 96
    for max_tokens in (None, 50):
        params = BeamSearchParams(4, max_tokens=max_tokens, ignore_eos=True, early_stopping="never")
        (found,) = llm.beam_search(ids, params)
        assert_equal(found.sequences, reference(model, ids, replace(params, max_tokens=13), ENDS))
        assert {(len(s.token_ids), s.finish_reason) for s in found.sequences} == {(13, "length")}


# Beside other requests ------------------------------------------------------------------------------------

BEAMS = BeamSearchParams(4, max_tokens=9)
V = len(RANDOM)


def outputs_of(core: Core, request: Request) -> list[tuple[list[int], str | None]]:
    return [(o.token_ids, o.finish_reason) for o in core.output(request).outputs]


def alone(ids: list[int], params: BeamSearchParams, ends: tuple[int, ...] = (2,)) -> list[tuple[list[int], str | None]]:
    core, _, _ = make_core(RANDOM, max_num_seqs=params.beam_width)
    request = beam_request(core, ids, params, ends)
    run(core)
    return outputs_of(core, request)


def test_one_prefill_serves_all_beams_and_no_more_sequences_are_open_than_beams() -> None:
    core, engine, _ = make_core(RANDOM, max_num_seqs=4)  # the engine asserts this limit
    request = beam_request(core, [0, 1, 2, 3, 4], BEAMS, ())
    core.step()
    assert (engine.num_fed, len(engine.held)) == (5, 4)
    core.step()
    assert (engine.num_fed, len(engine.held)) == (9, 4)
    assert sorted(engine.held.values()) == sorted(s.token_ids[:-1] for s in request.sequences)
    run(core)
    assert engine.num_fed == 5 + 8 * 4
    assert engine.num_calls["open"] == 1
    assert engine.num_calls["close"] == engine.num_calls["fork"] + 1
    assert not engine.held


def test_searches_and_samples_in_the_same_steps_do_not_change_each_other() -> None:
    sampled = SamplingParams(n=3, max_tokens=7, temperature=1.0)
    core, engine, _ = make_core(RANDOM, max_num_seqs=16)
    samples = submit(core, None, [4, 5], sampled, seed=5)
    core.step()
    searches = [beam_request(core, ids, replace(BEAMS, beam_width=w), (2,)) for ids, w in (([1], 4), ([3, 7], 5))]
    core.step()
    assert len(engine.held) == 12
    late = beam_request(core, [6], replace(BEAMS, beam_width=7), (2,))  # waits for room
    run(core)
    lone, _, _ = make_core(RANDOM, max_num_seqs=3)
    expected = submit(lone, None, [4, 5], sampled, seed=5)
    run(lone)
    assert outputs_of(core, samples) == outputs_of(lone, expected)
    assert outputs_of(core, searches[0]) == alone([1], BEAMS)
    assert outputs_of(core, searches[1]) == alone([3, 7], replace(BEAMS, beam_width=5))
    assert outputs_of(core, late) == alone([6], replace(BEAMS, beam_width=7))
    assert not engine.held


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_beam_that_was_closed_is_computed_again_while_the_others_wait(chunk: int) -> None:
    core, engine, _ = make_core(RANDOM, max_num_seqs=4)
    core.scheduler.config = replace(core.scheduler.config, max_num_batched_tokens=chunk)
    request = beam_request(core, [0, 1, 2], BEAMS, (2,))
    beside = submit(core, None, [1], SamplingParams(max_tokens=20, temperature=0.0), 0) if chunk == 64 else None
    for num_steps in range(500):
        first = request.sequences[0]
        if num_steps % 11 == 5 and first.handle is not None:
            core.scheduler._preempt(first)
        if not core.unfinished:
            break
        core.step()
    assert num_steps > 11
    assert outputs_of(core, request) == alone([0, 1, 2], BEAMS)
    assert beside is None or beside.finished
    assert not engine.held


def test_cancelling_a_search_frees_all_beams_and_leaves_its_neighbour_alone() -> None:
    core, engine, _ = make_core(RANDOM, max_num_seqs=8)
    gone, stays = (beam_request(core, ids, BEAMS, ()) for ids in ([0], [1]))
    for _ in range(3):
        core.step()
    assert len(engine.held) == 8
    core.abort(gone)
    assert len(engine.held) == 4
    assert {reason for _, reason in outputs_of(core, gone)} == {"abort"}
    run(core)
    assert outputs_of(core, stays) == alone([1], BEAMS, ())
    assert not engine.held


def test_logits_that_are_not_finite_end_their_own_search() -> None:
    table = RANDOM.clone()
    table[7] = torch.nan
    table[:7, 7] = -50.0  # no other token leads to 7
    core, engine, _ = make_core(table, max_num_seqs=8)
    fails, stays = (beam_request(core, ids, BEAMS, ()) for ids in ([7], [1]))
    deltas = core.step()
    assert [(d.request_id, d.index, d.finish_reason) for d in deltas] == [(0, i, "error") for i in range(4)]
    assert len(engine.held) == 4
    run(core)
    assert all("largest logit is nan" in str(o.error) for o in core.output(fails).outputs)
    assert {o.finish_reason for o in core.output(stays).outputs} == {"length"}
    assert not engine.held


@pytest.mark.parametrize("call", [("fork", 5), ("close", 2), ("extend", 4)])
def test_a_failure_of_the_engine_ends_all_and_the_next_search_is_as_if_alone(call: tuple[str, int]) -> None:
    core, engine, _ = make_core(RANDOM, max_num_seqs=8)
    requests = [beam_request(core, ids, BEAMS, ()) for ids in ([0], [1])]
    engine.fail = call
    with pytest.raises(RuntimeError, match="the engine failed"):
        run(core)
    assert all(s.error for r in requests for s in r.sequences)
    assert not engine.held
    again = beam_request(core, [1], BEAMS, ())
    run(core)
    assert outputs_of(core, again) == alone([1], BEAMS, ())


def test_a_finished_search_keeps_nothing_alive() -> None:
    core, _, _ = make_core(RANDOM, max_num_seqs=4)
    request = weakref.ref(beam_request(core, [0], BEAMS, ()))
    core.step()
    run(core)
    gc.collect()
    assert request() is None


def test_steps_do_not_overlap_while_a_search_runs() -> None:
    engine = make_engine("cuda_graph", make_model(), 6)
    overlap = OverlapScheduler(engine, TorchSampler())  # type: ignore[arg-type]
    core = Core(engine, Scheduler(engine), sample, None, TINY.vocab_size, overlap=overlap)
    greedy = submit(core, None, prompt(5), SamplingParams(max_tokens=20, temperature=0.0), 0)
    core.step()
    assert core._in_flight is not None
    searches = [beam_request(core, prompt(4), BeamSearchParams(w, max_tokens=6), ()) for w in (1, 4)]
    while not all(r.finished for r in searches):
        core.step()
        assert core._in_flight is None
    core.step()
    assert core._in_flight is not None
    run(core)
    lone = core_of(make_engine("recompute", make_model(), 6))
    expected = [beam_request(lone, prompt(4), BeamSearchParams(w, max_tokens=6), ()) for w in (1, 4)]
    expected.append(submit(lone, None, prompt(5), SamplingParams(max_tokens=20, temperature=0.0), 0))
    run(lone)
    assert [outputs_of(core, r) for r in [*searches, greedy]] == [outputs_of(lone, r) for r in expected]


# The front door --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_folder(tmp_path_factory.mktemp("beam") / "tiny", replace(TINY, eos_token_ids=(22, 33)))
    return LLM(str(folder), engine="static", device="cpu", max_num_seqs=8)


def test_a_draft_does_not_change_a_search(llm: LLM) -> None:
    prompts: list[Any] = ["GoGoGoGo", "Hi"]
    given = [BeamSearchParams(4, max_tokens=8), SamplingParams(max_tokens=12, temperature=0.0)]
    expected = llm.generate(prompts, given)
    llm.set_draft("prompt-lookup", speculate_k=3)
    try:
        found = llm.generate(prompts, given)
    finally:
        llm.set_draft(None)
    assert [[o.token_ids for o in r.outputs] for r in found] == [[o.token_ids for o in r.outputs] for r in expected]
    assert found[0].metrics.speculation is None
    assert found[1].metrics.speculation is not None


def test_text_and_end_tokens(llm: LLM) -> None:
    params = BeamSearchParams(6, max_tokens=3)
    (plain,), (with_end,) = (
        llm.beam_search("Go", p) for p in (params, replace(params, include_stop_str_in_output=True))
    )
    assert {s.finish_reason for s in plain.sequences} == {"stop", "length"}
    for s, t in zip(plain.sequences, with_end.sequences, strict=True):
        made = s.token_ids[:-1] if s.finish_reason == "stop" else s.token_ids
        assert s.text == llm.decode(made)
        assert t == replace(s, text=llm.decode(s.token_ids))


def test_generate_and_streams_take_a_search_too(llm: LLM) -> None:
    params = BeamSearchParams(3, max_tokens=6)
    (expected,) = llm.beam_search("Go", params)
    (output,) = llm.generate("Go", params)
    assert [(o.index, o.token_ids, o.cumulative_logprob) for o in output.outputs] == [
        (i, s.token_ids, s.cum_logprob) for i, s in enumerate(expected.sequences)
    ]
    assert output.metrics.ttft_sec <= output.metrics.total_sec
    _, stream = llm.stream_outputs("Go", params)
    *deltas, last = stream
    assert [(d.index, d.text, d.num_tokens) for d in deltas] == [  # type: ignore[union-attr]
        (i, s.text, len(s.token_ids)) for i, s in enumerate(expected.sequences)
    ]
    assert last.outputs == output.outputs  # type: ignore[union-attr]


def test_a_search_that_fails_says_why_and_the_others_have_their_outputs(llm: LLM) -> None:
    params = BeamSearchParams(4, max_tokens=5)
    (expected,) = llm.beam_search("Go", params)
    read, calls = core_beams.find_candidates, iter([True])

    def fail_once(*arguments: Any) -> Any:
        if next(calls, False):
            raise NanoinferError("the row is bad")
        return read(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_beams, "find_candidates", fail_once)
        failed, other = llm.beam_search(["Hi", "Go"], params)
    assert (failed.sequences, failed.error) == ([], "the row is bad")
    assert [s.token_ids for s in other.sequences] == [s.token_ids for s in expected.sequences]


def test_what_cannot_be_done_is_refused(llm: LLM) -> None:
    many = BeamSearchParams(9)
    refuses(lambda: llm.beam_search("Go", many), "beam_width=9 is more than max_num_seqs=8", "lower beam_width")
    refuses(lambda: llm.beam_search("Go", SamplingParams()), "params=", "is not a BeamSearchParams")  # type: ignore[arg-type]
    refuses(lambda: llm.stream("Go", many), "is not a SamplingParams")  # type: ignore[arg-type]
    refuses(lambda: llm.beam_search([0] * 33, replace(many, beam_width=2)), "33 tokens", "context length")
    refuses(lambda: core_beams.check(BeamSearchParams(5), 6, (1, 2)), "beam_width=5 is more than the 4 tokens", "lower")
    core_beams.check(BeamSearchParams(4), 6, (1, 2))
    core_beams.check(BeamSearchParams(6, ignore_eos=True), 6, (1, 2))
    assert not llm.engine.handles
