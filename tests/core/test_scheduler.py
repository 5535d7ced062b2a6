"""The scheduler with plain numbers: no engine, no weights, no tensors."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scheduling import World, check_integrity, make_request, summary
from nanoinfer.config import EngineLimits, SchedulerConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Request, Sequence, window_start
from nanoinfer.scheduling.text import OutputText
from nanoinfer.scheduling.work import ScheduledSequence, sampling_sequences


def expected_output(request: Request, index: int, block_size: int) -> tuple[list[int], str]:
    """Tokens and finish reason, from the documentation."""
    p, out = request.params, []
    while True:
        out.append((index * 5 + len(out) * 7) % 11)
        if out[-1] in request.end_token_ids and len(out) >= p.min_tokens:
            return out, "stop"
        full = p.overflow == "stop" and len(request.prompt_token_ids) + len(out) > block_size
        if full or len(out) == p.max_tokens:
            return out, "length"


# Any mix of requests -----------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size, max_num_seqs = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    capacity = draw(st.integers(block_size, max_num_seqs * block_size))
    limits = EngineLimits(max_num_seqs, block_size, capacity, draw(st.sampled_from([0, 3, 100])))
    config = SchedulerConfig(
        draw(st.integers(1, 40)), None, draw(st.booleans()), None, draw(st.sampled_from([None, 1, 80]))
    )
    return World(limits, config, decode_sec=draw(st.floats(0, 0.1)), token_sec=draw(st.floats(0, 0.01)))


@st.composite
def requests_for(draw: st.DrawFn, limits: EngineLimits) -> Request:
    block_size = limits.block_size
    slide = draw(st.booleans())
    num_prompt = draw(st.integers(1, 3 * block_size if slide else block_size))
    max_tokens = draw(st.integers(1, 20))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        n=draw(st.integers(1, limits.max_num_seqs)),
        overflow="slide" if slide else "stop",
        slide_stride=draw(st.none() | st.integers(1, block_size)) if slide else None,
    )
    request = make_request(num_prompt, params, block_size, draw(st.sampled_from([(), (7,), (3, 4)])))
    request.queue = draw(st.sampled_from([None, deque()]))
    request.priority, request.salt = draw(st.integers(0, 2)), draw(st.sampled_from([None, "a"]))
    return request


@settings(max_examples=75, deadline=None)
@given(st.data())
def test_any_mix_of_requests_runs_to_its_end_within_the_limits(data: st.DataObject) -> None:
    """Prompts are prefixes of each other. Capacity is from one whole sequence to all: sequences are preempted."""
    world = data.draw(worlds())
    requests = data.draw(st.lists(requests_for(world.limits), min_size=1, max_size=8))
    arrivals = data.draw(st.lists(st.integers(0, 10), min_size=len(requests), max_size=len(requests)).map(sorted))
    aborts = data.draw(st.dictionaries(st.integers(0, len(requests) - 1), st.integers(0, 25), max_size=3))
    coming = list(zip(arrivals, requests, strict=True))
    while coming or world.scheduler.unfinished:
        while coming and (coming[0][0] <= world.steps or not world.scheduler.unfinished):
            world.scheduler.add(coming.pop(0)[1])
        world.step()
        for index, at in aborts.items():
            if world.steps == at and requests[index] not in [r for _, r in coming]:
                world.scheduler.abort(requests[index])
                check_integrity(world.scheduler)
                assert requests[index].finished
    assert world.scheduler.running == []
    assert list(world.engine.handles) == sorted(world.scheduler.cache.idle)
    for i, request in enumerate(requests):
        for s in request.sequences:
            tokens, reason = expected_output(request, s.sample_index, world.limits.block_size)
            if s.finish_reason == "abort":
                assert i in aborts
                assert s.output_token_ids == tokens[: s.num_output_tokens]
            else:
                assert (s.output_token_ids, s.finish_reason) == (tokens, reason)


# Single rules ------------------------------------------------------------------------------------------------


def make_world(
    *prompts: int, M: int = 8, block_size: int = 32, max_num_seqs: int = 16, capacity: int = 0, **params: object
) -> World:
    """A world without shared prefixes."""
    limits = EngineLimits(max_num_seqs, block_size, capacity or max_num_seqs * block_size)
    world = World(limits, SchedulerConfig(M, enable_prefix_caching=False))
    for num_prompt in prompts:
        world.scheduler.add(make_request(num_prompt, SamplingParams(**params), block_size))  # type: ignore[arg-type]
    return world


def test_prompts_are_fed_in_chunks_in_order_of_arrival() -> None:
    world = make_world(10, 7, 5)
    assert [summary(world.step()) for _ in range(4)] == [
        [(10, 8, False)],
        [(10, 2, True), (7, 6, False)],
        [(10, 1, True), (7, 1, True), (5, 5, True)],  # the last token of a chunked prompt is one token
        [(10, 1, True), (7, 1, True), (5, 1, True)],
    ]


def test_what_decodes_never_waits_for_a_prompt() -> None:
    world = make_world(3, M=8)
    world.step()
    world.scheduler.add(make_request(20, SamplingParams(), 32))
    assert [summary(world.step()) for _ in range(3)] == [
        [(3, 1, True), (20, 7, False)],
        [(3, 1, True), (20, 7, False)],
        [(3, 1, True), (20, 6, True)],
    ]


def test_a_prompt_gets_a_quarter_however_many_decode() -> None:
    world = make_world(*[1] * 12, M=8)
    world.step()
    world.scheduler.add(make_request(5, SamplingParams(), 32))
    assert [summary(world.step())[12:] for _ in range(3)] == [[(5, 2, False)], [(5, 2, False)], [(5, 1, True)]]


def test_slid_windows_take_turns() -> None:
    """stride 1 feeds the whole window for every token; the budget is one window a step."""
    world = make_world(9, 10, 11, M=8, block_size=8, overflow="slide", slide_stride=1)
    assert [summary(world.step()) for _ in range(5)] == [[(n, 8, True)] for n in (9, 10, 11, 9, 10)]


def test_samples_fork_after_the_prompt_is_fed_once() -> None:
    world = make_world(10, M=8, n=3, max_tokens=4)
    first, second, third = world.step(), world.step(), world.step()
    assert summary(first) == [(10, 8, False)]
    assert [list(w.forks) for w in first] == [[]]
    assert summary(second) == [(10, 2, True)]
    assert [s.sample_index for s in sampling_sequences(second)] == [0, 1, 2]
    assert summary(third) == [(10, 1, True)] * 3
    assert sampling_sequences(third) == sampling_sequences(second)


def test_a_request_waits_until_all_of_its_samples_fit_and_none_overtakes_it() -> None:
    world = make_world(2, 2, max_num_seqs=3, max_tokens=3)
    world.scheduler.add(make_request(3, SamplingParams(n=2, max_tokens=1), 32))
    world.scheduler.add(make_request(4, SamplingParams(max_tokens=1), 32))
    assert [summary(world.step()) for _ in range(4)] == [
        [(2, 2, True), (2, 2, True)],
        [(2, 1, True), (2, 1, True)],
        [(2, 1, True), (2, 1, True)],
        [(3, 3, True), (4, 4, True)],
    ]


def test_requests_are_admitted_by_what_is_free_now() -> None:
    """The second prompt has no room beside the first and one more token of it, whatever both may grow to."""
    world = make_world(block_size=16, max_num_seqs=8, capacity=20)
    for num_prompt, max_tokens in ((8, 3), (12, 5), (1, 1)):
        world.scheduler.add(make_request(num_prompt, SamplingParams(max_tokens=max_tokens), 16))
    assert [summary(world.step()) for _ in range(4)] == [
        [(8, 8, True)],
        [(8, 1, True)],
        [(8, 1, True)],
        [(1, 1, True), (12, 7, False)],
    ]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_frees_everything(steps: int) -> None:
    """Waiting, partly prefilled, or running with forks: the next request gets the whole machine."""
    world = make_world(block_size=16, max_num_seqs=2)
    request = make_request(12, SamplingParams(n=2, max_tokens=4), 16)
    after = make_request(12, SamplingParams(n=2, max_tokens=4), 16)
    world.scheduler.add(request)
    world.scheduler.add(after)
    for _ in range(steps):
        world.step()
    world.scheduler.abort(request)
    assert [s.finish_reason for s in request.sequences] == ["abort", "abort"]
    assert world.engine.held == {}
    assert world.scheduler.abort(request) == []  # again: nothing more to do
    assert summary(world.step()) == [(12, 8, False)]
    world.run_all()
    assert [s.finish_reason for s in after.sequences] == ["length", "length"]


def test_abort_of_a_waiting_request_lets_the_next_one_in() -> None:
    world = make_world(2, max_num_seqs=1, max_tokens=2)
    waiting, last = (make_request(n, SamplingParams(max_tokens=1), 32) for n in (3, 4))
    world.scheduler.add(waiting)
    world.scheduler.add(last)
    assert summary(world.step()) == [(2, 2, True)]
    assert world.scheduler.abort(waiting) == []
    assert [summary(world.step()) for _ in range(2)] == [[(2, 1, True)], [(4, 4, True)]]
    assert last.finished
    assert not world.scheduler.unfinished


@pytest.mark.parametrize(
    "num_prompt, params, message",
    [
        (0, {}, r"^the prompt has no tokens: "),
        (4, {"n": 4}, r"^n=4 is more than max_num_seqs=3: "),
        (9, {}, r"^the prompt has 9 tokens, the maximum context length is 8 tokens: .*overflow"),
        (4, {"overflow": "slide", "slide_stride": 9}, r"^slide_stride=9 is more than the context length 8"),
        (4, {"max_tokens": 4}, r"^the request may grow to 7 cached tokens, the KV cache holds 6: "),
    ],
)
def test_what_can_never_run_is_refused_at_once(num_prompt: int, params: dict[str, object], message: str) -> None:
    request = make_request(num_prompt, SamplingParams(**params), 8)  # type: ignore[arg-type]
    with pytest.raises(NanoinferError, match=message) as e:
        request.check(EngineLimits(3, 8, 6))
    assert "\n" not in str(e.value)


def test_several_tokens_at_once_are_dropped_after_the_end() -> None:
    world = make_world(2, 3, M=8, max_tokens=4)
    work = world.scheduler.schedule()
    first, second = sampling_sequences(work)
    second.end_token_ids = (5,)
    assert world.scheduler.postprocess(work, [[1, 2], [3, 5, 7, 5]]) == [second]
    assert (first.output_token_ids, first.finish_reason) == ([1, 2], None)
    assert (second.output_token_ids, second.finish_reason, second.stop_reason) == ([3, 5], "stop", 5)
    assert world.scheduler.postprocess([ScheduledSequence(first, [2], True)], [[3, 4, 5, 6]]) == [first]
    assert (first.output_token_ids, first.finish_reason) == ([1, 2, 3, 4], "length")
    assert not world.scheduler.unfinished


# The window --------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 50), st.data())
def test_window_start(block_size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, block_size))
    starts = [window_start(n, block_size, stride) for n in range(4 * block_size + 2)]
    assert starts[: block_size + 1] == [0] * (block_size + 1)
    assert all(b - a in (0, stride) for a, b in itertools.pairwise(starts))
    for n, start in enumerate(starts[block_size + 1 :], start=block_size + 1):
        assert block_size + 1 - stride <= n - start <= block_size
        assert window_start(n, block_size, 1) == n - block_size


@pytest.mark.parametrize("block_size, stride, start", [(1, None, 4), (8, None, 0), (4, None, 2), (4, 1, 1), (3, 3, 3)])
def test_the_default_stride_is_half_the_context(block_size: int, stride: int | None, start: int) -> None:
    params = SamplingParams(overflow="slide", slide_stride=stride)
    assert make_request(5, params, block_size).sequences[0].next_start == start
    assert make_request(5, SamplingParams(), block_size).sequences[0].next_start == 0


# How a text ends ---------------------------------------------------------------------------------------------

CHARS = "abcdefgh"


def feed(text: str, num_prompt: int = 1, block_size: int = 32, end: str = "", **params: object) -> Sequence:
    """Append the characters' tokens until the text ends."""
    ids = tuple(map(CHARS.index, end))
    request = make_request(num_prompt, SamplingParams(**params), block_size, ids, CHARS)  # type: ignore[arg-type]
    (sequence,) = request.sequences
    for char in text:
        if sequence.finish_reason is None:
            sequence.append(CHARS.index(char))
    return sequence


@pytest.mark.parametrize(
    "sequence, reason, stop, text, num_tokens",
    [
        (lambda: feed("abc"), None, None, "abc", 3),
        (lambda: feed("abcd", max_tokens=3), "length", None, "abc", 3),
        (lambda: feed("abcd", end="c"), "stop", 2, "ab", 3),
        (lambda: feed("abcd", end="c", max_tokens=3), "stop", 2, "ab", 3),  # end token before max_tokens
        (lambda: feed("abcd", end="c", stop="bc"), "stop", 2, "ab", 3),  # end token before stop string
        (lambda: feed("abcd", stop="bc"), "stop", "bc", "a", 3),
        (lambda: feed("abcd", stop="bc", max_tokens=3), "stop", "bc", "a", 3),  # stop string before max_tokens
        (lambda: feed("abcd", stop="bc", max_tokens=2), "length", None, "ab", 2),
        (lambda: feed("abcd", 3, 4), "length", None, "ab", 2),  # the last token needs no place in the context
        (lambda: feed("abcd", 4, 4), "length", None, "a", 1),
        (lambda: feed("abcd", 3, 4, end="b"), "stop", 1, "a", 2),  # end token before context
        (lambda: feed("abcd", 3, 4, stop="ab"), "stop", "ab", "", 2),
        (lambda: feed("abcd", 4, 4, overflow="slide"), None, None, "abcd", 4),
        (lambda: feed("abcb", end="b", min_tokens=3), "stop", 1, "abc", 4),
        (lambda: feed("abcab", stop="ab", min_tokens=3), "stop", "ab", "abc", 5),
        (lambda: feed("abcd", stop="ab", min_tokens=2), "stop", "ab", "", 2),
        (lambda: feed("abcd", 3, 4, min_tokens=9), "length", None, "ab", 2),  # the context ends it all the same
    ],
)
def test_reasons_in_their_order(
    sequence: Callable[[], Sequence], reason: str | None, stop: int | str | None, text: str, num_tokens: int
) -> None:
    s = sequence()
    assert (s.finish_reason, s.stop_reason, s.text.text, s.num_output_tokens) == (reason, stop, text, num_tokens)


class Late:
    """A token stream that always holds its last character back."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        self.held, certain = CHARS[token_id], self.held
        return certain

    def flush(self) -> str:
        return self.held


@pytest.mark.parametrize(
    "params, reason, text",
    [
        (SamplingParams(max_tokens=3), "length", "abc"),
        (SamplingParams(max_tokens=3, stop="bc"), "stop", "a"),  # the held-back end completes it
    ],
)
def test_the_held_back_end_counts_when_the_text_ends(params: SamplingParams, reason: str, text: str) -> None:
    s = Sequence(make_request(1, params, 32), 0, OutputText(Late(), params.stop), 32, [100])
    for token in range(3):
        assert s.finish_reason is None
        s.append(token)
    assert (s.finish_reason, s.text.text) == (reason, text)


def test_abort_keeps_the_text_and_what_was_held_back() -> None:
    s = Sequence(make_request(1, SamplingParams(), 32), 0, OutputText(Late(), ("bcd",)), 32, [100])
    for token in range(3):
        s.append(token)
    assert (s.text.text, s.text.take(finished=False)) == ("ab", "a")
    s.abort()
    assert (s.finish_reason, s.stop_reason, s.text.take(finished=True)) == ("abort", None, "bc")
