"""Hostile use of speculation: random requests, full pools, odd drafts, interruptions; the texts stay as they were."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.models import CHARS, TINY, make_folder
from helpers.scheduling import check_integrity
from nanoinfer import LLM, SamplingParams
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import KV_BLOCK, kv_block_bytes
from nanoinfer.outputs import RequestOutput
from nanoinfer.speculative.draft_model import DraftModel

LONG = replace(TINY, block_size=64)
needs_native = pytest.mark.skipif(ENGINES["native"].unavailable() is not None, reason="no native extension")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    one = replace(LONG, n_layer=1)
    return {
        "target": str(make_folder(root / "t", LONG)),
        "short": str(make_folder(root / "s", replace(one, block_size=24), seed=5)),
        "padded": str(make_folder(root / "p", replace(one, vocab_size=80), seed=5)),
        "padded target": str(make_folder(root / "pt", replace(LONG, vocab_size=80))),
        "unpadded": str(make_folder(root / "u", one, seed=5)),
    }


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(chance: float, value: Callable[[], object], **other: object) -> dict[str, object]:
        return {name: value() if v is None else v for name, v in other.items()} if rng.random() < chance else {}

    most = rng.randint(1, 70)
    p: dict[str, object] = {"max_tokens": most, "temperature": rng.choice([0.0, 0.7, 1.5]), "seed": rng.randrange(99)}
    p |= maybe(0.3, lambda: rng.randint(1, 60), top_k=None) | maybe(0.3, rng.random, min_p=None)
    p |= maybe(0.3, lambda: rng.uniform(0.1, 1), top_p=None)
    p |= maybe(0.2, lambda: rng.uniform(0.7, 1.6), repetition_penalty=None)
    p |= maybe(0.2, lambda: rng.uniform(-1, 1), presence_penalty=None, frequency_penalty=None)
    p |= maybe(0.2, lambda: {rng.randrange(59): rng.uniform(-5, 5)}, logit_bias=None)
    p |= maybe(0.3, lambda: tuple(rng.choice(CHARS) + rng.choice(CHARS) for _ in range(9)), stop=None)
    p |= maybe(0.2, lambda: (rng.randrange(59),), stop_token_ids=None)
    p |= maybe(0.2, lambda: rng.randint(0, most), min_tokens=None) | maybe(0.3, lambda: rng.randint(1, 4), n=None)
    p |= maybe(0.4, lambda: rng.choice([None, 1, 7, 64]), slide_stride=None, overflow="slide")
    return SamplingParams(**p)  # type: ignore[arg-type]


def random_prompt(rng: random.Random, params: SamplingParams) -> list[int]:
    base = [rng.randrange(59) for _ in range(rng.randint(1, 6))]  # repeats itself, so that look-ups find something
    return (base * 100)[: rng.randint(1, 100 if params.overflow == "slide" else 64)]


def texts(outputs: list[RequestOutput]) -> list[list[tuple[object, ...]]]:
    return [[(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in r.outputs] for r in outputs]


def assert_nothing_is_held(llm: LLM) -> None:
    assert llm.core.speculator is not None
    drafter = llm.core.speculator.drafter
    llm.reset_prefix_cache()
    for engine in [llm.engine, *([drafter.engine] if isinstance(drafter, DraftModel) else [])]:
        handles = [engine.open() for _ in range(engine.limits.max_num_seqs)]
        for h in handles:
            engine.close(h)
    for held in (getattr(drafter, "_held", {}), getattr(drafter, "_indices", {})):
        assert not held
    check_integrity(llm.core.scheduler)


TORCH = [name for name, spec in ENGINES.items() if name != "native" and spec.unavailable() is None]
ENGINE_OPTIONS = [{"engine": name} for name in TORCH] + [
    pytest.param({"engine": "native"} | more, marks=needs_native, id="-".join(["native", *map(str, more.values())]))
    for more in (
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
    )
]

CHOSEN = [{"engine": "static"}, {"engine": "native"}, {"engine": "native", "quantization": "int4"}]
"""What is tested but in `make test-nightly`: an engine in PyTorch, and the one that samples and drafts in C++."""


@pytest.mark.parametrize("options", ENGINE_OPTIONS)
@pytest.mark.nightly_if(lambda options: options not in CHOSEN)
@pytest.mark.slow_if(lambda options: options != {"engine": "native"})
def test_random_requests_say_what_plain_decoding_says(options: dict[str, str], folders: dict[str, str]) -> None:
    rng = random.Random(1)
    params = [random_params(rng) for _ in range(12)]
    prompts = [random_prompt(rng, p) for p in params]
    expected = texts(LLM(folders["target"], max_num_seqs=4, **options).generate(prompts, params))  # type: ignore[arg-type]
    for draft, k in (("prompt-lookup", 4), ("self:1", 12), (folders["short"], "auto"), (folders["padded"], 3)):
        llm = LLM(folders["target"], max_num_seqs=4, draft=draft, speculate_k=k, **options)  # type: ignore[arg-type]
        assert texts(llm.generate(prompts, params)) == expected, (draft, k)
        assert_nothing_is_held(llm)


Job = tuple[int, int, int]


@needs_native
@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 3)), min_size=1, max_size=8), st.data()
)
def test_the_pool_never_runs_out(
    folders: dict[str, str], jobs: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Memory for one text and a partly used block for each sequence, to the last block; the draft has its own."""
    num_seqs, k = data.draw(st.integers(3, 5)), data.draw(st.integers(1, 12))
    draft = data.draw(st.sampled_from(["prompt-lookup", "self:1", "self:int8"]))
    need = (LONG.block_size * 3 // KV_BLOCK + num_seqs) * kv_block_bytes(LONG, "float32")
    if draft != "prompt-lookup":
        need *= 2
    params = [SamplingParams(max_tokens=m, n=n, temperature=1.0, seed=1) for _, m, n in jobs]
    prompts = [[(7 * i) % 5 for i in range(length)] for length, _, _ in jobs]
    options = {"engine": "native", "max_num_seqs": num_seqs, "kv_cache_memory": need}
    llm = LLM(folders["target"], draft=draft, speculate_k=k, **options)  # type: ignore[arg-type]
    made = texts(llm.generate(prompts, params))
    assert_nothing_is_held(llm)
    assert made == texts(LLM(folders["target"], engine="native").generate(prompts, params))


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
@pytest.mark.parametrize("draft", ["prompt-lookup", "self:1"])
def test_a_stream_that_is_closed_leaves_nothing_behind(draft: str, num_pieces: int, folders: dict[str, str]) -> None:
    llm = LLM(folders["target"], max_num_seqs=1, draft=draft, speculate_k=6)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    pieces = llm.stream("aa aa aa", params)
    for _ in range(num_pieces):
        next(pieces)
    pieces.close()
    assert_nothing_is_held(llm)
    assert (
        "".join(llm.stream("aa aa aa", params))
        == LLM(folders["target"]).generate("aa aa aa", params)[0].outputs[0].text
    )


@pytest.mark.parametrize("whose", ["target", "draft"])
@pytest.mark.parametrize("on_call", [1, 4])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_interruption_inside_a_step_leaves_nothing_behind(
    whose: str, on_call: int, late: bool, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while an engine extends, before or after it has changed anything."""
    llm = LLM(folders["target"], max_num_seqs=4, draft="self:1", speculate_k=3)
    params = [SamplingParams(max_tokens=30, temperature=0.0), SamplingParams(max_tokens=20, seed=1, n=3)]
    prompts = ["To be", "or not"]
    expected = texts(llm.generate(prompts, params))
    assert llm.core.speculator is not None
    assert isinstance(llm.core.speculator.drafter, DraftModel)
    engine = llm.engine if whose == "target" else llm.core.speculator.drafter.engine
    extend, calls = engine.extend, iter(range(1, 1000))

    def interrupted(batch: StepBatch) -> object:
        now = next(calls) == on_call
        if now and not late:
            raise KeyboardInterrupt
        logits = extend(batch)
        if now:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(engine, "extend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params)
    assert_nothing_is_held(llm)
    assert texts(llm.generate(prompts, params)) == expected


def test_stop_strings_across_bursts_in_a_stream(folders: dict[str, str]) -> None:
    """Whatever a burst holds, a stop string that begins in one and ends in the next is never shown."""
    params = SamplingParams(max_tokens=60, temperature=0.0)
    (whole,) = LLM(folders["target"]).generate("To be or", params)
    text = whole.outputs[0].text
    llm = LLM(folders["target"], draft=folders["target"], speculate_k=4)  # itself: nearly every proposal is right
    for begin in range(1, 30):
        stop = text[begin : begin + 6]
        if len(stop) == 6:
            expected = text[: text.index(stop)]
            assert "".join(llm.stream("To be or", replace(params, stop=(stop, "#~")))) == expected


def test_logprobs_of_bursts_are_those_of_the_tokens(folders: dict[str, str]) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=3, stop=("a", "e"), n=2, min_tokens=5)
    (plain,), (made,) = (
        LLM(folders["target"], engine="dynamic", draft=d, speculate_k=4).generate("To be", params)
        for d in (None, folders["target"])
    )
    for a, b in zip(plain.outputs, made.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert len(a.logprobs) == len(b.logprobs) == len(a.token_ids)
        for token, x, y in zip(a.token_ids, a.logprobs, b.logprobs, strict=True):
            assert next(iter(y)) == token
            assert [(t, lp.rank, lp.decoded_token) for t, lp in x.items()] == [
                (t, lp.rank, lp.decoded_token) for t, lp in y.items()
            ]
            assert [lp.logprob for lp in y.values()] == pytest.approx([lp.logprob for lp in x.values()], abs=1e-4)


@pytest.mark.parametrize("rule", ["reproduce", "reject"])
@pytest.mark.parametrize("draft", ["padded", "unpadded"])
def test_drafts_of_more_or_fewer_padded_tokens(draft: str, rule: str, folders: dict[str, str]) -> None:
    """Ids past the tokenizer's may stand in a prompt; the draft need not have as many of them."""
    llm = LLM(folders["padded target"], draft=folders[draft], speculate_k=3, speculate_rule=rule)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    prompts = [[1, 2, 75, 3], [4, 5]]
    assert texts(llm.generate(prompts, params)) == texts(LLM(folders["padded target"]).generate(prompts, params))


def test_a_model_with_a_draft_is_freed_when_nobody_needs_it(folders: dict[str, str]) -> None:
    llm = LLM(folders["target"], draft="self:1", speculate_k=2)
    llm.generate("To be", SamplingParams(max_tokens=5))
    assert llm.core.speculator is not None
    kept = [weakref.ref(x) for x in (llm.engine, llm.core.speculator, llm.core.speculator.drafter, llm.core)]
    del llm
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
