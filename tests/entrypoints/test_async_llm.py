"""AsyncLLM: the tokens of LLM.generate, cancellation in every way, errors of one request, many requests and loops."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.async_llm import freed, run
from helpers.environment import ROOT
from helpers.models import CHARS
from nanoinfer import LLM, AsyncLLM, AsyncOutputStream, BeamSearchParams, RequestOutput, SamplingParams
from nanoinfer.config import LLMConfig
from nanoinfer.entrypoints import async_engine as async_engine_module
from nanoinfer.entrypoints.async_engine import CLOSED, AsyncRequest
from nanoinfer.errors import NanoinferError, QueueFull, ResultError
from nanoinfer.outputs import Logprob
from nanoinfer.scheduling.sequence import Request
from nanoinfer.utils.arrays import to_numpy

PROMPTS = ["To be", "or not", "a", "GHOST", "xyz"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(seed=1, max_tokens=9, logprobs=2),
    SamplingParams(seed=2, max_tokens=20, top_k=5, n=3),
    SamplingParams(seed=3, max_tokens=1, prompt_logprobs=1),
    SamplingParams(seed=4, max_tokens=40, overflow="slide", stop=["e", "qq"]),
]
LONG = SamplingParams(temperature=0.0, max_tokens=100_000, overflow="slide", slide_stride=16)
GREEDY = PARAMS[0]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}"


@pytest.fixture(scope="module", params=["native", "static"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    if request.param == "native":
        pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    return LLM(str(folder), engine=request.param, max_num_seqs=6)


async def whole(stream: AsyncOutputStream) -> RequestOutput:
    async for output in stream:
        last = output
    return last


async def refused(stream: AsyncOutputStream, kind: type[Exception] = NanoinferError) -> str:
    with pytest.raises(kind) as caught:
        await whole(stream)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return str(caught.value)


def same(a: RequestOutput, b: RequestOutput) -> None:
    """Assert that two outputs are equal; log-probabilities up to what depends on the other sequences of a batch."""
    assert (a.prompt, a.prompt_token_ids, a.num_dropped_tokens) == (b.prompt, b.prompt_token_ids, b.num_dropped_tokens)
    exact = [[replace(o, logprobs=None, cumulative_logprob=None) for o in x.outputs] for x in (a, b)]
    assert exact[0] == exact[1]
    totals = [[o.cumulative_logprob or 0.0 for o in x.outputs] for x in (a, b)]
    assert totals[0] == pytest.approx(totals[1], abs=1e-3)
    assert a.metrics.num_output_tokens == b.metrics.num_output_tokens
    for x, y in zip(
        [a.prompt_logprobs, *(o.logprobs for o in a.outputs)],
        [b.prompt_logprobs, *(o.logprobs for o in b.outputs)],
        strict=True,
    ):
        assert values(x) == pytest.approx(values(y), abs=1e-4)


def values(logprobs: Sequence[dict[int, Logprob] | None] | None) -> list[float]:
    return [v for found in logprobs or [] for pair in (found or {}).items() for v in (pair[0], pair[1].logprob)]


# Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_outputs_equal_those_of_generate(llm: LLM, kind: str) -> None:
    expected = llm.generate(PROMPTS, PARAMS)

    async def read(stream: AsyncOutputStream) -> list[RequestOutput]:
        return [output async for output in stream]

    async def main(model: AsyncLLM) -> list[list[RequestOutput]]:
        streams = [model.generate(p, q, output_kind=kind) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        return await asyncio.gather(*map(read, streams))

    for output, many in zip(expected, run(main, llm), strict=True):
        *parts, last = many
        assert last.finished
        assert not any(part.finished for part in parts)
        assert len({part.request_id for part in many}) == 1
        if kind == "final_only":
            assert parts == []
        if kind != "delta":
            same(last, output)
            for before, after in pairwise(many):
                for a, b in zip(before.outputs, after.outputs, strict=True):
                    assert b.text.startswith(a.text)
                    assert b.token_ids[: len(a.token_ids)] == a.token_ids
                    assert (b.logprobs or [])[: len(a.logprobs or [])] == (a.logprobs or [])  # the same objects
                assert before.metrics.num_output_tokens == sum(len(o.token_ids) for o in before.outputs)
            continue
        for i, o in enumerate(output.outputs):
            pieces = [piece for part in many for piece in part.outputs if piece.index == i]
            assert "".join(piece.text for piece in pieces) == o.text
            assert [t for piece in pieces for t in piece.token_ids] == o.token_ids
            assert values([t for p in pieces for t in p.logprobs or []]) == pytest.approx(values(o.logprobs), abs=1e-4)
            assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (o.finish_reason, o.stop_reason)
        assert last.metrics.num_output_tokens == output.metrics.num_output_tokens


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
@pytest.mark.parametrize(
    "params", [SamplingParams(seed=5, max_tokens=6, n=2, best_of=4), BeamSearchParams(3, 6)], ids=str
)
def test_outputs_that_are_chosen_at_the_end(llm: LLM, kind: str, params: Any) -> None:
    expected = llm.generate("To be", params)[0]

    async def main(model: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in model.generate("To be", params, output_kind=kind)]

    (output,) = run(main, llm)
    same(output, expected)


async def test_synchronous_calls_of_another_thread_run_beside(llm: LLM, model: AsyncLLM) -> None:
    expected = llm.generate(PROMPTS, PARAMS)
    score = llm.perplexity("To be or not to be")[0].log_likelihood
    stop = threading.Event()
    found: list[list[RequestOutput]] = []

    def generate() -> None:
        while not stop.is_set():
            found.append(llm.generate(PROMPTS, PARAMS))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        for _ in range(5):
            streams = [model.generate(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
            for output, other in zip(expected, await asyncio.gather(*map(whole, streams)), strict=True):
                same(other, output)
            (scored,) = await model.perplexity("To be or not to be")
            assert scored.log_likelihood == pytest.approx(score, rel=1e-6)
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)
    assert found
    for outputs in found:
        for a, b in zip(outputs, expected, strict=True):
            same(a, b)


async def test_chat_and_the_other_calls(llm: LLM, model: AsyncLLM) -> None:
    message = {"role": "user", "content": "Go"}
    options: dict[str, Any] = {"chat_template": TEMPLATE, "chat_template_kwargs": {"end": "!"}}
    (expected,) = llm.chat([message], GREEDY, **options)
    output = await whole(model.chat([message], GREEDY, "chat-1", **options))
    assert (output.prompt, output.request_id) == ("Go!", "chat-1")
    same(output, expected)
    assert await model.apply_chat_template([message], **options) == llm.tokenize("Go!")
    assert await model.tokenize("To be") == llm.tokenize("To be")
    assert await model.decode(llm.tokenize("To be")) == "To be"
    assert await model.loglikelihood("To", [" be", " bee"]) == llm.loglikelihood("To", [" be", " bee"])
    with pytest.raises(NanoinferError, match="no chat template"):
        await whole(model.chat([message], GREEDY))
    with pytest.raises(NanoinferError, match="half a surrogate"):
        await model.tokenize("\ud800")


def test_constructors(folder: Path) -> None:
    async def main(model: AsyncLLM) -> RequestOutput:
        async with model:
            return await whole(model.generate(prompt="Go", sampling_params=GREEDY, request_id="a"))

    one = asyncio.run(main(AsyncLLM(str(folder), max_num_seqs=2, dtype="float32")))
    two = asyncio.run(main(AsyncLLM.from_config(LLMConfig(str(folder)))))
    same(one, two)
    assert (one.request_id, one.outputs[0].finish_reason) == ("a", "length")
    with pytest.raises(TypeError, match="no_such_option"):
        AsyncLLM(str(folder), no_such_option=1)
    with pytest.raises(NanoinferError, match="max_num_seqs=0"):
        AsyncLLM(str(folder), max_num_seqs=0)


# Leaving the iterator ----------------------------------------------------------------------------------------


async def leave_by_break(stream: AsyncOutputStream) -> None:
    async for _ in stream:
        break


async def leave_by_aclose(stream: AsyncOutputStream) -> None:
    async with aclosing(stream):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_an_exception(stream: AsyncOutputStream) -> None:
    with suppress(ZeroDivisionError):
        async for _ in stream:
            raise ZeroDivisionError


async def cancelled_after(seconds: float, stream: AsyncOutputStream) -> None:
    task = asyncio.create_task(whole(stream))
    await asyncio.sleep(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancellation(stream: AsyncOutputStream) -> None:
    await anext(stream)
    await cancelled_after(0.005, stream)


async def leave_by_timeout(stream: AsyncOutputStream) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(whole(stream), 0.02)


async def leave_before_it_is_prepared(stream: AsyncOutputStream) -> None:
    await cancelled_after(0, stream)


async def leave_before_it_begins(stream: AsyncOutputStream) -> None:
    await stream.aclose()


async def leave_by_garbage_collection(stream: AsyncOutputStream) -> None:
    await anext(stream)
    cycle = [stream]
    cycle.append(cycle)  # type: ignore[arg-type]


WAYS = [
    leave_by_break, leave_by_aclose, leave_by_an_exception, leave_by_cancellation, leave_by_timeout,
    leave_before_it_is_prepared, leave_before_it_begins, leave_by_garbage_collection,
]  # fmt: skip


FINAL = [leave_by_timeout, leave_before_it_is_prepared]  # of an iterator that has returned nothing yet
CASES = [(way, "cumulative") for way in WAYS] + [(way, "final_only") for way in FINAL]


@pytest.mark.parametrize(("leave", "kind"), CASES, ids=lambda value: getattr(value, "__name__", value))
async def test_leaving_frees_the_request(
    llm: LLM, leave: Callable[[AsyncOutputStream], Any], kind: str, model: AsyncLLM
) -> None:
    for n in (1, 3):
        await leave(model.generate("To be", replace(LONG, n=n), output_kind=kind))
        if leave is leave_by_garbage_collection:
            gc.collect()
        await freed(model)
    same(await whole(model.generate("To be", GREEDY)), llm.generate("To be", GREEDY)[0])


@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_a_request_ends_within_one_step(
    llm: LLM, how: str, monkeypatch: pytest.MonkeyPatch, model: AsyncLLM
) -> None:
    sizes: list[int] = []
    extend = llm.engine.extend

    def record(batch: Any) -> Any:
        sizes.append(len(batch.handles))
        time.sleep(0.002)
        return extend(batch)

    monkeypatch.setattr(llm.engine, "extend", record)
    streams = [model.generate(p, LONG, request_id=p) for p in PROMPTS[:3]]
    for stream in streams:
        await anext(stream)
    await anext(streams[2])
    assert sizes[-1] == 3
    if how == "aclose":
        await streams[1].aclose()
    else:
        await model.abort(PROMPTS[1])
    before = len(sizes)  # not before the call: this thread may wait there for a while
    while len(sizes) < before + 4:
        await anext(streams[0])
    assert sizes[before + 1 : before + 4] == [2, 2, 2]  # one step may have begun
    for stream in streams:
        await stream.aclose()


async def test_abort_by_id(model: AsyncLLM) -> None:
    stream = model.generate("To be", LONG, "mine")
    other = model.generate("To be", LONG)
    first = await anext(stream)
    await anext(other)
    await model.abort("no such id")
    await model.abort("mine")
    last = await whole(stream)
    assert (last.request_id, last.finished, last.outputs[0].finish_reason) == ("mine", True, "abort")
    assert last.outputs[0].text.startswith(first.outputs[0].text)
    assert other.request_id != stream.request_id
    await model.abort(other.request_id)
    assert (await whole(other)).outputs[0].finish_reason == "abort"
    await freed(model)
    waiting = model.generate("To be", LONG, "mine", output_kind="final_only")  # the id is free again
    task = asyncio.create_task(whole(waiting))
    await asyncio.sleep(0)
    await model.abort("mine")  # before it is prepared
    assert (await task).outputs[0].finish_reason == "abort"


async def test_an_id_is_refused_while_it_is_in_use(model: AsyncLLM) -> None:
    stream = model.generate("To be", LONG, "a")
    await anext(stream)
    message = await refused(model.generate("Go", GREEDY, "a"))
    assert message.startswith("request_id='a' is the id of an unfinished request")
    await anext(stream)
    await stream.aclose()
    for _ in range(2):  # ended by its iterator, ended by itself
        assert (await whole(model.generate("Go", GREEDY, "a"))).request_id == "a"
    for wrong in ("", 3):
        with pytest.raises(NanoinferError, match=f"request_id={wrong!r} is not a string"):
            model.generate("Go", GREEDY, wrong)  # type: ignore[arg-type]


def remaining_requests(earlier: list[object]) -> list[object]:
    gc.collect()
    known = set(map(id, earlier))
    return [o for o in gc.get_objects() if type(o) in (AsyncRequest, Request) and id(o) not in known]


async def test_nothing_refers_to_a_request_that_has_ended(model: AsyncLLM) -> None:
    earlier = remaining_requests([])  # of other tests: the tracebacks of their errors refer to them
    await asyncio.gather(*(whole(model.generate(p, q)) for p, q in zip(PROMPTS, PARAMS, strict=True)))
    await leave_by_break(model.generate("To be", LONG))
    await leave_by_cancellation(model.generate("To be", LONG))
    await refused(model.generate("a" * 40, GREEDY))
    await freed(model)
    until = time.monotonic() + 10
    while left := remaining_requests(earlier):  # the engine thread refers to one until it has returned from sending
        assert time.monotonic() < until, left
        del left  # refers to them as well
        await asyncio.sleep(0.001)


# Errors ------------------------------------------------------------------------------------------------------


async def test_invalid_input_is_refused_at_the_first_iteration(llm: LLM, model: AsyncLLM) -> None:
    good = asyncio.create_task(whole(model.generate("To be", GREEDY)))
    assert "40 tokens" in await refused(model.generate("a" * 40, GREEDY))
    assert "token id 99" in await refused(model.generate([99], GREEDY))
    assert "SamplingParams" in await refused(model.generate("Go", {"n": 1}))  # type: ignore[arg-type]
    assert "n=7 is more than max_num_seqs=6" in await refused(model.generate("Go", replace(GREEDY, n=7)))
    with pytest.raises(NanoinferError, match="output_kind='all' is unknown"):
        model.generate("Go", GREEDY, output_kind="all")
    same(await good, llm.generate("To be", GREEDY)[0])


@pytest.mark.parametrize("n", [1, 3])
async def test_a_fault_of_one_request_reaches_its_iterator_alone(
    llm: LLM, n: int, monkeypatch: pytest.MonkeyPatch, model: AsyncLLM
) -> None:
    expected = llm.generate("To be", GREEDY)[0]
    extend, bad = llm.engine.extend, CHARS.index("Q")
    fed: dict[int, list[int]] = {}

    def poison(batch: Any) -> Any:
        logits = to_numpy(extend(batch)).copy()
        at = 0
        for i, (handle, count) in enumerate(zip(batch.handles, batch.num_new, strict=True)):
            fed.setdefault(handle, []).extend(batch.token_ids[at : at + count])
            at += count
            if bad in fed[handle] and len(fed[handle]) > 3:
                logits[i] = math.nan
        return logits

    monkeypatch.setattr(llm.engine, "extend", poison)
    good, failed = model.generate("To be", GREEDY), model.generate("Q", replace(LONG, n=n))
    (output, message) = await asyncio.gather(whole(good), refused(failed, ResultError))
    assert "not finite" in message or "nan" in message
    same(output, expected)


def test_an_exception_of_the_engine_ends_what_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = llm.generate("To be", GREEDY)[0]
    extend, broken = llm.engine.extend, threading.Event()

    def fail(batch: Any) -> Any:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("the engine\nfailed")
        return extend(batch)

    monkeypatch.setattr(llm.engine, "extend", fail)

    async def main(model: AsyncLLM) -> None:
        streams = [model.generate(p, LONG) for p in PROMPTS[:4]]
        for stream in streams:
            await anext(stream)
        broken.set()
        for stream in streams:
            assert await refused(stream, ResultError) == "RuntimeError: the engine failed"
        same(await whole(model.generate("To be", GREEDY)), expected)

    run(main, llm)
    (record,) = caplog.records
    assert record.getMessage() == "RuntimeError: the engine failed: all running requests have ended"
    assert record.exc_info is None or not record.exc_info


async def test_an_exception_outside_the_engine_does_not_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, model: AsyncLLM
) -> None:
    def fail(**until: Any) -> None:
        raise RuntimeError("no schedule")

    monkeypatch.setattr(llm.core, "step", fail)
    message = await refused(model.generate("To be", LONG), ResultError)
    assert message == "the request was aborted: RuntimeError: no schedule"
    monkeypatch.undo()
    same(await whole(model.generate("To be", GREEDY)), llm.generate("To be", GREEDY)[0])


async def test_an_engine_that_cannot_be_reset_is_an_error_of_each_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, model: AsyncLLM
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    running = model.generate("a", LONG)
    await anext(running)
    monkeypatch.setattr(llm.engine, "extend", fail)
    monkeypatch.setattr(llm.engine, "reset", fail)
    assert "the device is gone" in await refused(running, ResultError)
    for prompt in PROMPTS:
        assert "the device is gone" in await refused(model.generate(prompt, GREEDY), ResultError)
    monkeypatch.undo()
    same(await whole(model.generate("To be", GREEDY)), llm.generate("To be", GREEDY)[0])


async def test_an_interrupt_in_another_thread_reaches_the_iterators(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, model: AsyncLLM
) -> None:
    extend, loop_thread = llm.engine.extend, threading.get_ident()

    def interrupt(batch: Any) -> Any:
        if threading.get_ident() == loop_thread:
            raise KeyboardInterrupt
        time.sleep(0.001)
        return extend(batch)

    monkeypatch.setattr(llm.engine, "extend", interrupt)
    running = [model.generate(p, LONG) for p in PROMPTS[:4]]
    for stream in running:
        await anext(stream)
    waiting = [asyncio.create_task(whole(model.generate("To be", replace(GREEDY, n=3)))) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):  # ends the running requests, and none of those that wait
        llm.generate(["Go"] * 50, GREEDY)
    for stream in running:
        assert "an operation of another thread was interrupted" in await refused(stream, ResultError)
    for output in await asyncio.gather(*waiting):
        assert [o.finish_reason for o in output.outputs] == ["length"] * 3


def test_a_full_queue_refuses_one_request(folder: Path) -> None:
    llm = LLM(str(folder), max_num_seqs=1, max_num_queued=2)
    expected = llm.generate("To be", GREEDY)[0]

    async def main(model: AsyncLLM) -> None:
        running = model.generate("To be", LONG)
        await anext(running)
        waiting = [asyncio.create_task(whole(model.generate("To be", GREEDY))) for _ in range(2)]
        while llm.core.scheduler.num_waiting < 2:
            await asyncio.sleep(0.001)
        message = await refused(model.generate("or", GREEDY, "x"), QueueFull)
        assert "max_num_queued=2" in message
        await anext(running)
        await running.aclose()
        for output in await asyncio.gather(*waiting):
            same(output, expected)
        assert (await whole(model.generate("or", GREEDY, "x"))).finished

    run(main, llm)


def test_requests_of_smaller_priority_are_admitted_first(folder: Path) -> None:
    llm = LLM(str(folder), max_num_seqs=1)

    async def main(model: AsyncLLM) -> list[str]:
        ended: list[str] = []

        async def read(prompt: str, priority: int) -> None:
            await whole(model.generate({"prompt": prompt, "cache_salt": prompt}, GREEDY, priority=priority))
            ended.append(prompt)

        first = model.generate("first", replace(LONG), priority=-1)
        await anext(first)
        tasks = [asyncio.create_task(read(p, i)) for p, i in (("low", 2), ("high", 0), ("middle", 1))]
        while llm.core.scheduler.num_waiting < 3:
            await asyncio.sleep(0.001)
        await first.aclose()
        await asyncio.gather(*tasks)
        assert "priority='x'" in await refused(model.generate("a", GREEDY, priority="x"))  # type: ignore[arg-type]
        return ended

    assert run(main, llm) == ["high", "middle", "low"]


# Many requests, several loops, slow readers ------------------------------------------------------------------


def test_hundreds_of_requests(folder: Path) -> None:
    llm = LLM(str(folder))
    params = [SamplingParams(max_tokens=4 + i % 3, seed=i, temperature=float(i % 2)) for i in range(60)]
    expected = [o.outputs[0].token_ids for o in llm.generate(["To be"] * 60, params)]
    wakes = 0

    async def main(model: AsyncLLM) -> list[RequestOutput]:
        nonlocal wakes
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal wakes
            wakes += arguments[0] is async_engine_module._receive
            return call(*arguments, **options)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        streams = [model.generate("To be", params[i % 60], str(i), output_kind="delta") for i in range(500)]
        tasks = [asyncio.create_task(read(stream)) for stream in streams]
        return await asyncio.gather(*tasks)

    async def read(stream: AsyncOutputStream) -> list[int]:
        return [t async for output in stream for o in output.outputs for t in o.token_ids]

    start = time.perf_counter()
    found = run(main, llm)
    seconds = time.perf_counter() - start
    assert found == [expected[i % 60] for i in range(500)]
    num_tokens = sum(map(len, found))
    assert wakes < num_tokens / 10  # one a step, in which up to 64 sequences run
    assert seconds / num_tokens < 0.005


async def test_two_event_loops_in_two_threads(llm: LLM, model: AsyncLLM) -> None:
    expected = llm.generate(PROMPTS, PARAMS)

    async def again() -> list[RequestOutput]:
        found = []
        for _ in range(3):
            streams = [model.generate(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
            found += await asyncio.gather(*map(whole, streams))
        return found

    here, there = await asyncio.gather(again(), asyncio.to_thread(lambda: asyncio.run(again())))
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        same(a, expected[i % 5])
        same(b, expected[i % 5])


async def test_a_loop_that_is_gone_frees_its_requests(model: AsyncLLM) -> None:
    stream = model.generate("To be", LONG)

    async def begin() -> None:
        await anext(stream)

    await asyncio.to_thread(lambda: asyncio.run(begin()))  # the stream is not closed
    await freed(model)


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
async def test_a_slow_reader_gets_merged_outputs_and_delays_no_other(llm: LLM, kind: str, model: AsyncLLM) -> None:
    params = replace(PARAMS[2], max_tokens=60, overflow="slide", logprobs=0)
    expected = llm.generate("To be", params)[0]
    slow = model.generate("To be", params, output_kind=kind)
    outputs = [await anext(slow)]
    same(await whole(model.generate("or", GREEDY)), llm.generate("or", GREEDY)[0])
    while model.num_unfinished_requests:
        await asyncio.sleep(0.001)
    outputs += [output async for output in slow]
    assert len(outputs) <= 3
    if kind == "cumulative":
        same(outputs[-1], expected)
    for i, o in enumerate(expected.outputs):
        pieces = [p for output in outputs for p in output.outputs if p.index == i]
        if kind == "delta":
            assert "".join(p.text for p in pieces) == o.text
            assert [t for p in pieces for t in p.token_ids] == o.token_ids
            found = [t for p in pieces for t in p.logprobs or []]
            assert values(found) == pytest.approx(values(o.logprobs), abs=1e-4)


async def test_a_long_prompt_does_not_stop_the_loop() -> None:
    async with AsyncLLM("shakespeare", max_num_seqs=1) as model:
        text = "To be, or not to be: that is the question. " * 20_000
        gaps = []
        task = asyncio.create_task(model.tokenize(text))
        before = start = time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now
        assert await model.decode((await task)[:100]) == text[: len(model.llm.decode((await task)[:100]))]
        gap, seconds = max(gaps), before - start
    assert gap < seconds / 2, (gap, seconds)


# The end -----------------------------------------------------------------------------------------------------


async def test_close_ends_everything(llm: LLM) -> None:
    model = AsyncLLM.from_llm(llm)
    await anext(running := model.generate("a", LONG))  # alone: requests are prepared, and so begin, in any order
    tasks = [asyncio.create_task(whole(model.generate("To be", LONG))) for _ in range(20)]
    await asyncio.sleep(0)  # until each is registered
    assert model.num_unfinished_requests == 21
    await model.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert (type(result), str(result)) == (NanoinferError, CLOSED)
    assert await refused(running) == CLOSED
    assert await refused(model.generate("To be", GREEDY)) == CLOSED
    for call in (model.tokenize("a"), model.perplexity("To be"), model.abort("x")):
        with pytest.raises(NanoinferError, match="closed"):
            await call
    assert model.num_unfinished_requests == 0
    await model.close()
    model.shutdown()
    assert not llm.core.unfinished
    assert set(llm.engine.handles) == llm.core.scheduler.handles
    assert llm.generate("To be", GREEDY)[0].finished  # the model itself is not closed


def test_a_dropped_model_ends_its_threads(llm: LLM) -> None:
    others = {*threading.enumerate()}  # those of earlier tests may still be ending

    def num_threads() -> int:
        return sum(thread.name.startswith("nanoinfer") for thread in {*threading.enumerate()} - others)

    async def main() -> None:
        model = AsyncLLM.from_llm(llm)
        stream = model.generate("To be", LONG)
        del model
        await anext(stream)  # the iterator holds the model
        assert num_threads() == 2
        del stream
        gc.collect()

    asyncio.run(main())
    until = time.monotonic() + 10
    while num_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert num_threads() == 0
    assert not llm.core.unfinished


async def test_the_engine_thread_sleeps_without_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, model: AsyncLLM
) -> None:
    steps = 0
    step = llm.core.step

    def count(**until: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(**until)

    monkeypatch.setattr(llm.core, "step", count)
    await whole(model.generate("To be", GREEDY))
    await freed(model)
    before, cpu = steps, time.process_time()
    await asyncio.sleep(0.2)
    assert steps == before
    assert time.process_time() - cpu < 0.1
    await whole(model.generate("To be", GREEDY))


def test_the_pages_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "async.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(program, {})
    params = SamplingParams(max_tokens=20, seed=0)
    expected = [o.outputs[0].text for o in LLM("shakespeare").generate(["O Romeo,", "To be"], params)]
    assert capsys.readouterr().out.splitlines()[-1] == str(expected)


PROGRAM = """
import asyncio, os, signal, sys, threading, time, traceback
from nanoinfer import AsyncLLM, NanoinferError, SamplingParams
params = SamplingParams(max_tokens=100000, overflow="slide", slide_stride=16)
model = AsyncLLM(sys.argv[1], engine=sys.argv[2], max_num_seqs=8)
async def read():
    async for output in model.generate("To be", params): pass
async def first(count=6):
    streams = [model.generate("To be", params) for _ in range(count)]
    await asyncio.gather(*(anext(s) for s in streams[:4]))
    return streams
"""
ENDS = {
    "open requests": "loop = asyncio.new_event_loop(); streams = loop.run_until_complete(first())",
    "tasks that are pending": """
async def main():
    global tasks
    tasks = [asyncio.ensure_future(read()) for _ in range(50)]
    await asyncio.sleep(0.1)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # asyncio says that pending tasks were destroyed
""",
    "Ctrl-C": """
async def main():
    async with model:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.gather(*(read() for _ in range(50)))
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
assert not model.llm.core.unfinished
""",
    "a fork": """
async def one():
    async for output in model.generate("To be", SamplingParams(max_tokens=5, temperature=0)): pass
    return output.outputs[0].token_ids
async def main():
    streams = await first()
    child = os.fork()
    return streams, child
expected = asyncio.run(one())
streams, child = asyncio.run(main())
if child == 0:
    signal.alarm(20)
    try:
        same = asyncio.run(one()) == expected and asyncio.run(one()) == expected
        same = same and not model.llm.core.unfinished
    except NanoinferError as e:  # the fork was within a step
        same = model.llm.engine_name == "native" and "forked" in str(e)
    except BaseException:
        traceback.print_exc()
        os._exit(9)
    asyncio.run(model.close())
    os._exit(not same)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert asyncio.run(one()) == expected
""",
}


@pytest.mark.skipif("NANOINFER_TEST_EXTENSION" in os.environ, reason="a new process has the installed extension")
@pytest.mark.parametrize("engine", ["native", "static"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.slow_if(lambda end, engine: (end, engine) != ("Ctrl-C", "native"))
@pytest.mark.nightly_if(lambda end, engine: engine == "static" and end != "a fork")
def test_the_process_ends(folder: Path, end: str, engine: str) -> None:
    if engine == "native":
        pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + ENDS[end], str(folder), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, preexec_fn=_interruptible)
    assert (done.returncode, _without_warnings(done.stderr)) == (0, "")
    assert done.stdout == ("interrupted\n" if "Ctrl-C" in end else "")


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _without_warnings(stderr: str) -> str:
    return "".join(line for line in stderr.splitlines(True) if "PyTorch computes with one thread" not in line)
