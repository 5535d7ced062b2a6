"""The generation core on a pretended engine with known logits: texts, handles, clocks and failures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from torch import Tensor

from helpers.models import submit
from helpers.scheduling import check_integrity
from helpers.table_engine import CHARS, RANDOM, V, make_core
from nanoinfer.core.core import Core
from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import Logprob, RequestOutput
from nanoinfer.sampling.sampler import Sampled, SamplerRow, sample
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def add(core: Core, prompt: str, params: SamplingParams = GREEDY, eos: str = "") -> Request:
    ids = [CHARS.index(c) for c in prompt]
    return submit(core, prompt, ids, params, params.seed or 0, tuple(CHARS.index(c) for c in eos))


def run(core: Core, *requests: Request) -> list[RequestOutput]:
    """Step until nothing is left; check that each text is its deltas joined."""
    texts: dict[tuple[int, int], str] = {}
    reasons = {}
    while core.unfinished:
        for d in core.step():
            texts[d.request_id, d.index] = texts.get((d.request_id, d.index), "") + d.text
            reasons[d.request_id, d.index] = d.finish_reason
        check_integrity(core.scheduler)
    outputs = [core.output(r) for r in requests]
    for request_output in outputs:
        for o in request_output.outputs:
            key = (request_output.request_id, o.index)
            assert (texts[key], reasons[key]) == (o.text, o.finish_reason)
    return outputs


# Texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params, eos, text, num_tokens, reason, stop_reason",
    [
        ({}, "", "cdef", 4, "length", None),
        ({}, "e", "cd", 3, "stop", 4),  # the end token is a token of the output, its text is not
        ({"ignore_eos": True}, "e", "cdef", 4, "length", None),
        ({"stop_token_ids": [3]}, "e", "c", 2, "stop", 3),
        ({"stop_token_ids": [3], "ignore_eos": True}, "e", "c", 2, "stop", 3),
        ({"stop": ["ef"]}, "", "cd", 4, "stop", "ef"),
        ({"stop": "fg"}, "", "cdef", 4, "length", None),  # the f is shown in the end
        ({"min_tokens": 2}, "c", "ab", 3, "stop", 2),  # a masked end token gives way to the first of the others
        ({"min_tokens": 3}, "c", "abab", 4, "length", None),
        ({"logit_bias": {0: 100.0}}, "", "aaaa", 4, "length", None),
    ],
)
def test_texts_and_why_they_end(
    params: dict[str, object], eos: str, text: str, num_tokens: int, reason: str, stop_reason: int | str | None
) -> None:
    core, engine, _ = make_core()
    (output,) = run(core, add(core, "ab", SamplingParams(temperature=0.0, max_tokens=4, **params), eos))  # type: ignore[arg-type]
    (o,) = output.outputs
    assert (o.text, len(o.token_ids), o.finish_reason, o.stop_reason) == (text, num_tokens, reason, stop_reason)
    assert (output.prompt, output.prompt_token_ids, output.num_dropped_tokens) == ("ab", [0, 1], 0)
    assert engine.held == {}


def test_tokens_past_the_vocabulary_are_never_drawn() -> None:
    core, _, _ = make_core(vocab_size=4)
    (output,) = run(core, add(core, "cd"))
    assert output.outputs[0].text == "abcd"


def test_a_window_that_slides_is_fed_again() -> None:
    core, engine, _ = make_core(block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=4, overflow="slide", slide_stride=2)
    (output,) = run(core, add(core, "abcdef", params))
    assert (output.outputs[0].text, output.num_dropped_tokens) == ("ghab", 2)
    assert engine.num_fed == 4 + 3 + 1 + 3  # windows of 4, 3, 4 and 3 tokens
    assert engine.num_calls == {"open": 1, "extend": 4, "truncate": 2, "fork": 0, "close": 1}


def test_without_a_tokenizer_there_are_token_ids_only() -> None:
    _, engine, clock = make_core()
    core = Core(engine, Scheduler(engine), sample, None, V, clock)
    request = submit(core, None, [0], SamplingParams(temperature=0.0, max_tokens=2, logprobs=0), 0)
    (output,) = run(core, request)
    (o,) = output.outputs
    assert (output.prompt, o.text, o.token_ids, o.finish_reason) == (None, "", [1, 2], "length")
    assert [lp.decoded_token for step in o.logprobs or [] for lp in step.values()] == [None, None]


def test_a_request_that_is_refused_leaves_nothing_behind() -> None:
    core, _, _ = make_core(block_size=4)
    with pytest.raises(NanoinferError, match="the prompt has 5 tokens"):
        add(core, "abcde")
    assert not core.unfinished
    assert [o.outputs[0].text for o in run(core, add(core, "a"))] == ["bcde"]


def test_a_step_without_work_does_not_call_the_engine() -> None:
    core, engine, _ = make_core()
    assert core.step() == []
    request = add(core, "ab")
    core.step()
    core.cancel([request])
    assert core.step() == []
    assert engine.num_calls == {"open": 1, "extend": 1, "truncate": 0, "fork": 0, "close": 1}


# Samples and batches -----------------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_fork_once() -> None:
    core, engine, _ = make_core(RANDOM)
    run(core, add(core, "abc", SamplingParams(n=3, max_tokens=4)))
    assert engine.num_calls == {"open": 1, "extend": 4, "truncate": 0, "fork": 2, "close": 3}
    assert engine.num_fed == 3 + 3 * 3
    assert engine.held == {}


def test_requests_say_the_same_alone_and_in_company() -> None:
    prompts = [
        ("a", SamplingParams(max_tokens=9, seed=1)),
        ("bcd", SamplingParams(max_tokens=5, temperature=0.0)),
        ("e", SamplingParams(max_tokens=20, seed=2, n=2, top_p=0.8, overflow="slide")),
        ("fg", SamplingParams(max_tokens=7, seed=1, frequency_penalty=1.0, stop="ab")),
        ("h", SamplingParams(max_tokens=11, seed=3, temperature=3.0, top_k=3)),
    ]
    core, _, _ = make_core(RANDOM, max_num_seqs=3, block_size=16)
    together = run(core, *(add(core, *prompt) for prompt in prompts))
    alone = [run(core, add(core, *prompt))[0] for prompt in prompts]
    assert [o.outputs for o in together] == [o.outputs for o in alone]


# Clocks ------------------------------------------------------------------------------------------------------


def test_metrics_are_the_clock_s_differences() -> None:
    core, engine, clock = make_core(max_num_seqs=1)
    first = add(core, "abc")
    second = add(core, "d", SamplingParams(max_tokens=1))
    engine.cost_sec = iter([2.0, 0.5, 0.5, 1.0, 3.0])
    clock.now += 1.0
    a, b = (o.metrics for o in run(core, first, second))
    assert (a.num_prompt_tokens, a.num_output_tokens) == (3, 4)
    assert (a.ttft_sec, a.tpot_sec, a.total_sec) == (3.0, 2.0 / 3, 5.0)
    assert (b.ttft_sec, b.tpot_sec, b.total_sec) == (8.0, None, 8.0)  # waiting included
    assert (a.queue_sec, b.queue_sec) == (1.0, 5.0)  # until the step that processes the prompt begins
    assert core.scheduler.stats.num_output_tokens == a.num_output_tokens + b.num_output_tokens


def test_metrics_of_several_samples_go_by_the_longest() -> None:
    core, engine, _ = make_core(RANDOM)
    request = add(core, "a", SamplingParams(n=2, max_tokens=8, seed=0), eos="b")
    engine.cost_sec = iter([1.0] * 8)
    (output,) = run(core, request)
    lengths = [len(o.token_ids) for o in output.outputs]
    assert lengths[0] != lengths[1]
    assert output.metrics.num_output_tokens == sum(lengths)
    assert (output.metrics.ttft_sec, output.metrics.tpot_sec, output.metrics.total_sec) == (1.0, 1.0, max(lengths))


@pytest.mark.parametrize("num_steps", [0, 2])
def test_time_stops_for_a_request_that_is_aborted(num_steps: int) -> None:
    core, engine, clock = make_core()
    request = add(core, "a")
    engine.cost_sec = iter([1.0] * num_steps)
    for _ in range(num_steps):
        core.step()
    core.abort(request)
    clock.now += 50.0
    assert core.output(request).metrics.total_sec == num_steps


# Log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_of_each_token() -> None:
    core, _, _ = make_core(RANDOM)
    request = add(core, "a", SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
    (output,) = run(core, request)
    (o,) = output.outputs
    assert o.logprobs is not None
    last = 0
    for token, logprobs in zip(o.token_ids, o.logprobs, strict=True):
        values = RANDOM[last].double().log_softmax(-1).tolist()
        best = sorted(range(V), key=lambda t: -values[t])[:2]
        assert logprobs == {t: Logprob(pytest.approx(values[t]), i + 1, CHARS[t]) for i, t in enumerate(best)}
        assert next(iter(logprobs)) == token
        last = token
    assert core.output(request).outputs == output.outputs  # asking again is harmless


def test_outputs_of_texts_that_go_on() -> None:
    core, _, _ = make_core()
    with_logprobs = add(core, "a", SamplingParams(temperature=0.0, logprobs=0))
    without = add(core, "b", GREEDY)
    assert [core.output(r).outputs[0].logprobs for r in (with_logprobs, without)] == [[], None]
    core.step()
    for request, text, num_logprobs in ((with_logprobs, "b", 1), (without, "c", None)):
        (o,) = core.output(request).outputs
        assert (o.text, o.finish_reason, o.logprobs and len(o.logprobs)) == (text, None, num_logprobs)
    core.step()
    assert len(core.output(with_logprobs).outputs[0].logprobs or []) == 2


def test_nothing_is_kept_of_a_request_whose_output_nobody_asks_for() -> None:
    core, _, _ = make_core()
    request = weakref.ref(add(core, "a", SamplingParams(max_tokens=3, logprobs=2)))
    run(core)
    gc.collect()
    assert request() is None


# Failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_closes_every_handle(num_steps: int) -> None:
    core, engine, _ = make_core(max_num_seqs=3)
    request, other = add(core, "ab", SamplingParams(n=3)), add(core, "c")
    for _ in range(num_steps):
        core.step()
    core.abort(request)
    assert engine.held == {}
    assert [o.finish_reason for o in core.output(request).outputs] == ["abort"] * 3
    assert run(core, other)[0].outputs[0].text == "defg"


def failing_sampler(position: int) -> Callable[..., list[Sampled]]:
    """The sampler, but for the logits of one position, which are NaN."""

    def draw(logits: Tensor, rows: list[SamplerRow]) -> list[Sampled]:
        return sample(logits * float("nan") if rows[0].num_output_tokens == position else logits, rows)

    return draw


@pytest.mark.parametrize("error", [RuntimeError("broken"), NanoinferError("full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fail", [("open", 2), ("extend", 1), ("extend", 3), ("fork", 2), ("truncate", 1)])
def test_after_a_failure_of_the_engine_nothing_is_open_and_others_run(
    fail: tuple[str, int], error: BaseException
) -> None:
    core, engine, clock = make_core(max_num_seqs=4, block_size=4)
    engine.fail, engine.error = fail, error
    running = [
        add(core, "ab", SamplingParams(n=3, max_tokens=2)),
        add(core, "abc", SamplingParams(max_tokens=50, overflow="slide")),
    ]
    waiting = add(core, "a", SamplingParams(n=4, max_tokens=3, temperature=0.0))
    with pytest.raises(type(error)) as e:
        run(core)
    assert e.value is error
    assert engine.held == {}
    clock.now += 1.0
    for request in running[: 1 if fail == ("open", 2) else 2]:  # the second has not been admitted: it runs later
        assert request.finished
        assert core.output(request).metrics.total_sec == 0.0
    assert [o.text for o in run(core, waiting)[0].outputs] == ["bcd"] * 4
    assert run(core, add(core, "c"))[0].outputs[0].text == "defg"
    assert engine.held == {}


@pytest.mark.parametrize("position", [0, 2])
def test_a_step_whose_logits_are_not_finite_ends_its_sequences_with_an_error(position: int) -> None:
    core, engine, _ = make_core(sampler=failing_sampler(position))
    request = add(core, "ab", SamplingParams(n=3, temperature=0.0, logprobs=1, max_tokens=9))
    run(core)
    assert engine.held == {}
    kept = core.output(request).outputs
    assert [(o.text, o.finish_reason, len(o.logprobs or [])) for o in kept] == [
        ("cde"[:position], "error", position)
    ] * 3
    assert all("largest logit is nan" in (o.error or "") for o in kept)


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_fault_of_one_sequence_is_its_own(num_before: int) -> None:
    """Row h of the table is NaN: what reaches h ends there, everything else is as it is alone."""
    table = RANDOM.clone()
    table[7] = float("nan")
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, logit_bias={7: -100.0})
    to_h = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={7: 100.0})
    core, engine, _ = make_core(table, max_num_seqs=8)
    alone = [run(core, add(core, c, params))[0].outputs for c in "abcd"]
    requests = [add(core, c, params) for c in "ab"]
    for _ in range(num_before):
        core.step()
    bad = add(core, "a", to_h)
    requests += [add(core, c, params) for c in "cd"]
    while core.unfinished:
        core.step()
    outputs = [core.output(r) for r in (*requests, bad)]
    assert [o.outputs for o in outputs[:4]] == alone
    (failed,) = outputs[4].outputs
    assert (failed.text, failed.finish_reason, failed.stop_reason) == ("h", "error", None)
    assert failed.error is not None
    assert "largest logit is nan" in failed.error
    assert engine.held == {}


def test_a_row_that_the_sampler_refuses_ends_alone() -> None:
    def refusing(logits: Tensor, rows: list[Request]) -> list[Sampled]:
        if any(row.seed == 13 for row in rows):
            raise RuntimeError("no\nthirteen")
        return sample(logits, rows)  # type: ignore[arg-type]

    core, engine, _ = make_core(sampler=refusing)  # type: ignore[arg-type]
    good, bad = add(core, "a"), add(core, "b", SamplingParams(temperature=0.0, seed=13))
    first, second = (o.outputs[0] for o in run(core, good, bad))
    assert (first.text, first.finish_reason, first.error) == ("bcde", "length", None)
    assert (second.text, second.finish_reason, second.error) == ("", "error", "RuntimeError: no thirteen")
    assert engine.held == {}


def test_a_token_without_text_ends_its_own_sequence() -> None:
    """Token e has no text here."""
    core, engine, clock = make_core(num_chars=4)
    ends, fails = add(core, "a", SamplingParams(temperature=0.0, max_tokens=2)), add(core, "c")
    run(core)
    assert engine.held == {}
    clock.now += 1.0
    (ended,), (failed,) = core.output(ends).outputs, core.output(fails).outputs
    assert (ended.text, ended.finish_reason, failed.text, failed.finish_reason) == ("bc", "length", "d", "error")
    assert failed.error is not None
    assert "has no text" in failed.error
    assert [core.output(r).metrics.total_sec for r in (ends, fails)] == [0.0, 0.0]
    assert run(core, add(core, "a", SamplingParams(temperature=0.0, max_tokens=3)))[0].outputs[0].text == "bcd"
