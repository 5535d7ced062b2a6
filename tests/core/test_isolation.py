"""Requests do not disturb each other: streams in any order, faults, room, drafts, threads."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.batch import run_on
from helpers.drafters import FailingDrafter
from helpers.models import CHARS, make_folder, make_model, weights_of
from nanoinfer import LLM, AsyncLLM, NanoinferError, SamplingParams
from nanoinfer.checkpoints import huggingface
from nanoinfer.engines import registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.kv.plan import kv_block_bytes
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.tokenizers.tokenizer import char_to_json

ENGINES = [name for name, spec in registry.ENGINES.items() if "cpu" in spec.devices and name != "compiled"]
PROMPTS = ["To be", "or not", "a", "GHOST", "xyz"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(seed=1, max_tokens=9),
    SamplingParams(seed=2, max_tokens=20, top_k=5),
    SamplingParams(seed=3, max_tokens=1),
    SamplingParams(seed=4, max_tokens=40, overflow="slide"),
]


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    return LLM(str(folder), engine=request.param, max_num_seqs=6)


def alone(llm: LLM) -> list[str]:
    return [llm.generate(p, q)[0].outputs[0].text for p, q in zip(PROMPTS, PARAMS, strict=True)]


def num_open(llm: LLM) -> int:
    assert not llm.core.unfinished
    return len(set(llm.engine.handles) - set(llm.core.scheduler.cache.idle))


# Streams -----------------------------------------------------------------------------------------------------


def test_streams_read_in_turn_give_what_each_gives_alone(llm: LLM) -> None:
    expected = alone(llm)
    streams = [llm.stream(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    texts = [""] * len(streams)
    left = set(range(len(streams)))
    while left:
        for i in sorted(left):
            if (piece := next(streams[i], None)) is None:
                left.remove(i)
            else:
                texts[i] += piece
    assert texts == expected
    assert num_open(llm) == 0


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], ids=str)
def test_streams_read_one_after_the_other_in_any_order(llm: LLM, order: list[int]) -> None:
    expected = alone(llm)
    streams = [llm.stream(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    assert [next(s) for s in streams]  # all have begun
    texts = {i: "".join(streams[i]) for i in order}
    assert all(expected[i].endswith(texts[i]) for i in order)


def test_generate_score_and_another_draft_within_a_stream(llm: LLM) -> None:
    expected, score = alone(llm), llm.perplexity("To be or not to be")[0]
    stream = llm.stream(PROMPTS[2], PARAMS[2])
    text = next(stream)
    outputs = llm.generate(PROMPTS, PARAMS)
    text += next(stream)
    within = llm.perplexity("To be or not to be")[0]
    text += next(stream)
    llm.set_draft("prompt-lookup", speculate_k=3)
    try:
        speculated = llm.generate(PROMPTS, PARAMS)
        text += next(stream)
    finally:
        llm.set_draft(None)
    text += "".join(stream)
    assert [o.outputs[0].text for o in outputs] == expected
    assert [o.outputs[0].text for o in speculated] == expected
    assert all(o.metrics.speculation is not None for o in speculated)
    assert text == expected[2]
    assert within.log_likelihood == pytest.approx(score.log_likelihood, rel=1e-6)
    assert num_open(llm) == 0


def test_two_output_streams_have_their_own_deltas(llm: LLM) -> None:
    expected = alone(llm)
    ids_a, a = llm.stream_outputs(PROMPTS[:3], PARAMS[:3])
    ids_b, b = llm.stream_outputs(PROMPTS[3:], PARAMS[3:])
    items: dict[int, list[Delta | RequestOutput]] = {i: [] for i in ids_a + ids_b}
    streams: list[Iterator[Delta | RequestOutput]] = [a, b]
    while streams:
        for ids, stream in ((ids_a, a), (ids_b, b)):
            if stream in streams:
                if (item := next(stream, None)) is None:
                    streams.remove(stream)
                    continue
                assert item.request_id in ids
                items[item.request_id].append(item)
    for request_id, text in zip(ids_a + ids_b, expected, strict=True):
        *deltas, output = items[request_id]
        assert isinstance(output, RequestOutput)
        assert output.outputs[0].text == text
        assert "".join(d.text for d in deltas if isinstance(d, Delta)) == text


@pytest.mark.parametrize("num_read", [0, 2], ids=["not started", "started"])
@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.slow_if(lambda how, num_read: how == "dropped" and num_read == 0)
def test_a_stream_that_is_left_ends_its_request(llm: LLM, num_read: int, how: str) -> None:
    expected = alone(llm)
    stream, other = llm.stream(PROMPTS[4], PARAMS[4]), llm.stream(PROMPTS[2], PARAMS[2])
    for _ in range(num_read):
        next(stream)
    if how == "closed":
        stream.close()
        assert next(stream, None) is None
    else:
        del stream
        gc.collect()
    assert "".join(other) == expected[2]
    assert num_open(llm) == 0


def test_more_streams_than_there_is_room_for(llm: LLM) -> None:
    expected = alone(llm)
    streams = [llm.stream(PROMPTS[i % 5], PARAMS[i % 5]) for i in range(20)]
    texts = ["".join(s) for s in reversed(streams)]
    assert texts == [expected[i % 5] for i in reversed(range(20))]


def test_score_waits_for_room(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path)), engine="static", max_num_seqs=2)
    expected, score = alone(llm), llm.perplexity("To be or not")[0]
    streams = [llm.stream(p, q) for p, q in zip(PROMPTS[:2], PARAMS[:2], strict=True)]
    texts = [next(s) for s in streams]
    assert llm.perplexity("To be or not")[0].log_likelihood == pytest.approx(score.log_likelihood, rel=1e-6)
    assert [t + "".join(s) for t, s in zip(texts, streams, strict=True)] == expected[:2]


def test_score_waits_for_room_in_a_full_pool(tmp_path: Path) -> None:
    """A pool of one text's blocks and few more, all of them promised to a stream: this was an IndexError."""
    folder = make_folder(tmp_path)
    config = LLM(str(folder), engine="native").config
    memory = 5 * kv_block_bytes(config, "float32")
    llm = LLM(str(folder), engine="native", max_num_seqs=2, kv_cache_memory=memory)
    score = llm.perplexity("a" * 32)[0]
    stream = llm.stream("To be", SamplingParams(seed=1, max_tokens=27))
    text = next(stream)
    assert llm.perplexity("a" * 32) == [score]
    assert text + "".join(stream) == llm.generate("To be", SamplingParams(seed=1, max_tokens=27))[0].outputs[0].text


# Faults ------------------------------------------------------------------------------------------------------


def folder_with_nan(path: Path, token: str) -> Path:
    """A model in which one token's embedding is NaN: a prompt that holds it has no finite logits."""
    gpt = make_model(replace(make_model().config, tie_word_embeddings=False))
    gpt.transformer["wte"].weight.data[CHARS.index(token)] = float("nan")
    huggingface.save(weights_of(gpt), path, char_to_json(CHARS))
    return path


@pytest.mark.parametrize("engine", [e for e in registry.ENGINES if "cpu" in registry.ENGINES[e].devices])
@pytest.mark.parametrize("token", ["q", CHARS[0]], ids=["q", "the token of padding"])
@pytest.mark.nightly_if(lambda engine: engine == "compiled")
def test_one_request_that_is_not_finite_ends_alone(tmp_path: Path, engine: str, token: str) -> None:
    if engine == "compiled" and token != "q":
        pytest.skip("compiling takes a minute: one case of compiled stands for both")
    prompts = [c * n for c, n in zip("abcdefgh", [1, 9, 3, 30, 2, 17, 5, 4], strict=True)]
    num = 64 if engine == "native" else len(prompts)
    prompts = [prompts[i % 8] + CHARS[8 + i // 8] for i in range(num - 1)]
    bias = {CHARS.index(token): -100.0}
    params = [SamplingParams(seed=i, max_tokens=8 if i % 2 else 1, logit_bias=bias) for i in range(num)]
    llm = LLM(str(folder_with_nan(tmp_path, token)), engine=engine, max_num_seqs=num)
    expected = [o.outputs for o in llm.generate(prompts, params[1:])]
    at = num // 2
    outputs = llm.generate(
        [*prompts[:at], f"ab{token}", *prompts[at:]], [*params[1 : at + 1], params[0], *params[at + 1 :]]
    )
    (failed,) = outputs.pop(at).outputs
    assert [o.outputs for o in outputs] == expected
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert failed.error is not None
    assert "largest logit is nan" in failed.error
    assert num_open(llm) == 0


def test_a_stream_raises_the_fault_of_its_own_request(tmp_path: Path) -> None:
    llm = LLM(str(folder_with_nan(tmp_path, "q")))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = llm.generate("abc", params)[0].outputs[0].text
    bad, good = llm.stream("aqua", params), llm.stream("abc", params)
    text = next(good)
    with pytest.raises(NanoinferError, match="largest logit is nan"):
        next(bad)
    assert next(bad, None) is None
    assert text + "".join(good) == expected


def test_a_text_whose_likelihood_is_not_finite_is_an_error(tmp_path: Path) -> None:
    llm = LLM(str(folder_with_nan(tmp_path, "q")))
    with pytest.raises(NanoinferError, match=r"text 2 of 3: .* is nan"):
        llm.perplexity(["abc", "aqua", "abc"])
    assert num_open(llm) == 0


def test_a_request_that_the_drafter_refuses_ends_alone(llm: LLM) -> None:
    from nanoinfer.speculative.speculator import Speculator

    prompts, params = ["abc", "bcd", "cde"], SamplingParams(temperature=0.0, max_tokens=6)
    expected = llm.generate(prompts, params)
    llm.reset_prefix_cache()
    llm.core.speculator = Speculator(FailingDrafter(), speculate_k=2)
    try:
        outputs = llm.generate(prompts, params)
    finally:
        llm.set_draft(None)
    assert [o.outputs for o in outputs[::2]] == [o.outputs for o in expected[::2]]
    (failed,) = outputs[1].outputs
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: I do not like b")
    assert failed.token_ids == expected[1].outputs[0].token_ids[:1]  # the prompt's own step has no proposals
    assert num_open(llm) == 0


# Threads -----------------------------------------------------------------------------------------------------


def test_several_threads_share_one_model(llm: LLM) -> None:
    """Generating, streaming, scoring and dropping streams in 8 threads; each gets what it gets alone."""
    expected, score = alone(llm), llm.perplexity("To be or not")[0].log_likelihood
    wrong: list[object] = []

    def work(k: int) -> None:
        try:
            for j in range(4):
                i = (k + j) % 5
                texts = [
                    llm.generate(PROMPTS[i], PARAMS[i])[0].outputs[0].text,
                    "".join(llm.stream(PROMPTS[i], PARAMS[i])),
                ]
                next(llm.stream(PROMPTS[4], PARAMS[4]))  # and dropped
                if texts != [expected[i]] * 2:
                    wrong.append((texts, expected[i]))
                if abs(llm.perplexity("To be or not")[0].log_likelihood - score) > 1e-4 * abs(score):
                    wrong.append("score")
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=[k]) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    assert wrong == []
    assert num_open(llm) == 0


def test_a_request_that_another_thread_finishes_keeps_its_last_delta(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is finished a moment before the step that ends it queues its delta."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    expected = llm.generate("abc", params)[0].outputs[0].text
    _, stream = llm.stream_outputs("abc", params)
    postprocess, finished = llm.core.scheduler.postprocess, threading.Event()

    def slow(work: Any, tokens: Any) -> Any:
        ended = postprocess(work, tokens)
        if ended:
            finished.set()
            time.sleep(0.2)
        return ended

    monkeypatch.setattr(llm.core.scheduler, "postprocess", slow)
    thread = threading.Thread(target=lambda: [llm.core.step() for _ in range(3)])
    thread.start()
    assert finished.wait(60)
    delta, output = stream
    thread.join(60)
    assert isinstance(delta, Delta)
    assert delta.text == expected
    assert isinstance(output, RequestOutput)
    assert output.finished


def test_a_thread_is_not_starved_by_one_that_generates_in_a_loop(tmp_path: Path) -> None:
    """The other thread's request is short; its stream must not wait until the long one has ended."""
    llm = LLM(str(make_folder(tmp_path)), engine="native")
    long = SamplingParams(seed=1, max_tokens=20_000, overflow="slide", slide_stride=1)  # some seconds
    stop = threading.Event()

    def generate() -> None:
        for _ in llm.stream("a", long):
            if stop.is_set():
                return

    thread = threading.Thread(target=generate)
    thread.start()
    while not llm.core.scheduler.running:
        pass
    assert len("".join(llm.stream("b", SamplingParams(temperature=0.0, max_tokens=10)))) == 10
    assert thread.is_alive()
    stop.set()
    thread.join(120)
    assert not thread.is_alive()


async def _async_text(llm: LLM) -> str:
    async with AsyncLLM.from_llm(llm) as model:
        return [output async for output in model.generate("ab", ONE)][-1].outputs[0].text


def _batch_text(llm: LLM, folder: Path) -> str:
    (folder / "in.jsonl").write_text('{"prompt": "ab", "max_tokens": 1, "temperature": 0}\n')
    run_on(llm, str(folder / "in.jsonl"), str(folder / "out.jsonl"))
    return (folder / "out.jsonl").read_text()


ONE = SamplingParams(temperature=0.0, max_tokens=1)
TWO = SamplingParams(temperature=0.0, max_tokens=2)
LONG = SamplingParams(temperature=0.0, max_tokens=20)
CALLS: dict[str, Callable[[LLM, Path], Any]] = {
    "stream": lambda llm, _: "".join(llm.stream("ab", ONE)),
    "generate": lambda llm, _: [output.outputs[0].text for output in llm.generate(["ab", "ab"], ONE)],
    "embed": lambda llm, _: llm.embed("ab")[0].outputs.embedding,
    "loglikelihood": lambda llm, _: llm.loglikelihood("a", "b")[0].log_likelihood,
    "batch": _batch_text,
    "async": lambda llm, _: asyncio.run(_async_text(llm)),
    "use_engine": lambda llm, _: llm.core.use_engine(1, lambda engine: 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_no_step_that_another_thread_has_made_needless(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call waits for the lock while another thread runs the step that ends what the call waits for."""
    llm = LLM(str(make_folder(tmp_path)), engine="native", threads=1, max_num_seqs=4, enable_prefix_caching=False)
    core, step, extend = llm.core, llm.core.step, llm.engine.extend
    expected = CALLS[name](llm, tmp_path)
    (tmp_path / "out.jsonl").unlink(missing_ok=True)
    others = [TWO, LONG, LONG, LONG] if name == "use_engine" else [LONG]  # as many as fit, until one has ended
    core.submit(llm.requests.make_all(["b"] * len(others), others))
    core.step()
    steps_of: list[str] = []
    in_step, ended, callers = threading.Event(), threading.Event(), set[int]()

    def slow_extend(batch: StepBatch) -> Any:
        steps_of.append(threading.current_thread().name)
        in_step.set()
        while steps_of == ["other"] and not callers & core._waiting:  # until the call waits for the lock
            time.sleep(0.001)
        return extend(batch)

    def step_of_call(**until: Any) -> Any:
        callers.add(threading.get_ident())
        if not steps_of:
            other = threading.Thread(target=lambda: [step(), ended.set()], name="other")
            other.start()
            assert in_step.wait(60)
        return step(**until)

    monkeypatch.setattr(llm.engine, "extend", slow_extend)
    monkeypatch.setattr(core, "step", step_of_call)
    assert CALLS[name](llm, tmp_path) == expected
    assert ended.wait(60)
    assert steps_of == ["other"]


def test_the_outputs_of_ended_requests_wait_for_no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    requests = llm.requests.make_all(["ab", "ba"], params)
    llm.core.submit(requests)
    while not all(r.finished for r in requests):
        llm.core.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.core, "_lock", None)  # whoever takes it raises an error
        texts = [llm.core.output(r).outputs[0].text for r in requests]
    assert texts == [llm.generate(p, params)[0].outputs[0].text for p in ("ab", "ba")]
