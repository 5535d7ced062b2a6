"""Speculation gives the tokens of plain decoding: engine x drafter x batch x k x what ends a sequence or its window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.drafters import Scripted
from helpers.engines import BATCHES, GREEDY, V, make_engine, naive_greedy, prompt, slow_if_interpreted
from helpers.environment import INTERPRETED
from helpers.models import CHARS, TINY, make_folder, make_model, refuses, submit, weights_of
from helpers.speculation import FLAT, SAMPLED, generate, make_core, plain
from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.sampling.sampler import sample
from nanoinfer.speculative import draft_factory
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal
from nanoinfer.speculative.draft_model import DraftModel
from nanoinfer.speculative.prompt_lookup import PromptLookup


def make_drafter(kind: str, engine: str) -> Drafter:
    if kind == "prompt-lookup":
        return PromptLookup()
    model = make_model(seed=0 if kind == "itself" else 3)  # itself: every proposal right; other: nearly none
    return DraftModel(kind, make_engine(engine, model), sample, V, FLAT)


DRAFTERS = ("itself", "other", "prompt-lookup")


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: b.replace(" ", "-"))
@pytest.mark.parametrize("k", [1, 3, 8, None], ids=lambda k: f"k-{k or 'auto'}")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", ENGINES)
@slow_if_interpreted
@pytest.mark.nightly_if(lambda name: name == "triton" and INTERPRETED)
@pytest.mark.nightly_if(
    lambda name, k, batch: name not in ("native", "static") and (k != 3 or batch != "unequal lengths")
)
@pytest.mark.slow_if(lambda name, k: k != 3 and (name != "native" or k is not None))
@pytest.mark.slow_if(lambda name, batch: name != "native" and batch != "unequal lengths")
def test_greedy_tokens_equal_the_naive_loop(name: str, kind: str, k: int | None, batch: str) -> None:
    gpt = make_model()
    prompts = [prompt(n, i) for i, n in enumerate(BATCHES[batch])]
    params = [replace(GREEDY, max_tokens=3 + 4 * i) for i in range(len(prompts))]
    core = make_core(make_engine(name, gpt), make_drafter(kind, name), k)
    expected = [naive_greedy(gpt, p, q.max_tokens) for p, q in zip(prompts, params, strict=True)]
    for _ in range(2):  # twice in a row: nothing is left behind
        made = generate(core, prompts, params)
        assert [outputs[0][0] for outputs in made] == expected  # type: ignore[index]


@pytest.mark.parametrize("stride", [1, 3, None, 32], ids=lambda s: f"stride-{s}")
@pytest.mark.parametrize("k", [2, 7, None], ids=lambda k: f"k-{k or 'auto'}")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.slow_if(lambda kind, k, stride: k != 2 or stride != (1 if kind == "other" else None))
@pytest.mark.nightly_if(lambda k, stride: stride in (3, 32) or (stride == 1 and k is None))
def test_sliding_windows(kind: str, k: int | None, stride: int | None) -> None:
    gpt = make_model()
    prompts = [prompt(4), prompt(30), prompt(50)]
    params = replace(GREEDY, max_tokens=3 * TINY.block_size, overflow="slide", slide_stride=stride)
    core = make_core(make_engine("static", gpt), make_drafter(kind, "static"), k, max_num_batched_tokens=16)
    expected = [naive_greedy(gpt, p, params.max_tokens, stride or TINY.block_size // 2) for p in prompts]
    made = generate(core, prompts, [params] * 3)
    assert [outputs[0][0] for outputs in made] == expected  # type: ignore[index]


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("k", [1, 4, None], ids=lambda k: f"k-{k or 'auto'}")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.slow_if(lambda kind, k: k == 1 or kind == "itself")
def test_the_same_seed_gives_the_same_text_with_speculation_on_or_off(
    kind: str, k: int | None, params: SamplingParams
) -> None:
    engine = make_engine("native" if ENGINES["native"].unavailable() is None else "static", make_model())
    prompts = [prompt(n, i) for i, n in enumerate((5, 1, 12, 20))]
    core = make_core(engine, make_drafter(kind, "static"), k)
    assert generate(core, prompts, [params] * 4, eos=(11,)) == plain(engine, prompts, [params] * 4, eos=(11,))


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("ends", ["max_tokens", "stop", "eos", "context"])
@pytest.mark.slow_if(lambda num_right: num_right not in (0, 3))
def test_every_place_of_rejection_and_every_end_inside_a_burst(num_right: int, ends: str) -> None:
    """Five proposals of which the first 0 to 5 are right; the text ends at every place of a burst."""
    engine = make_engine("static", make_model())
    first = prompt(6, 2)
    whole = naive_greedy(make_model(), first, 26)
    for end in range(1, 14):
        params, eos, start = replace(GREEDY, max_tokens=26), tuple[int, ...](), first
        if ends == "max_tokens":
            params = replace(params, max_tokens=end)
        elif ends == "stop":
            params = replace(params, stop=(CHARS[whole[end]],))
        elif ends == "eos":
            eos = (whole[end],)
        else:
            start = [*first, *whole[:end]]
        text = whole[end:] if ends == "context" else whole
        drafter = Scripted({tuple(start): text}, lambda i: num_right)
        assert generate(make_core(engine, drafter, 5), [start], [params], eos) == plain(engine, [start], [params], eos)
        assert drafter.num_known == 0


def test_what_is_counted() -> None:
    engine = make_engine("static", make_model())
    start = prompt(4)
    text = naive_greedy(make_model(), start, 13)
    core = make_core(engine, Scripted({tuple(start): text}, lambda i: (3, 0, 2)[i % 3]), 3)
    request = submit(core, None, start, replace(GREEDY, max_tokens=13), 0, ())
    pieces = [d.num_tokens for _ in range(6) for d in core.step()]
    # the prompt gives 1; then 0 right, 2, 3, 0, 2 of 3 and, with 1 token to come, of none
    assert pieces == [1, 1, 3, 4, 1, 3]
    m = core.output(request).metrics.speculation
    assert m is not None
    assert (m.num_proposed, m.num_accepted, m.num_verify_steps, m.mean_accepted_length) == (14, 7, 5, 7 / 5)
    (output,) = core.output(request).outputs
    assert output.draft_accepted == [accepted for n in pieces for accepted in [True] * (n - 1) + [False]]


def test_nothing_is_left_behind_when_a_request_is_cancelled_between_two_bursts() -> None:
    gpt = make_model()
    engine, drafter = make_engine("static", gpt), make_drafter("itself", "static")
    core = make_core(engine, drafter, 4)
    first, other = submit(core, None, prompt(5), replace(GREEDY, max_tokens=20), 0, ()), prompt(9, 1)
    second = submit(core, None, other, replace(GREEDY, max_tokens=15), 0, ())
    for _ in range(3):
        core.step()
    core.abort(first)
    while core.unfinished:
        core.step()
    assert core.output(first).outputs[0].token_ids == naive_greedy(gpt, prompt(5), 20)[:11]
    assert core.output(second).outputs[0].token_ids == naive_greedy(gpt, other, 15)
    assert isinstance(drafter, DraftModel)
    core.reset_prefix_cache()
    for e in (engine, drafter.engine):
        handles = [e.open() for _ in range(e.limits.max_num_seqs)]  # all of its room is free again
        for h in handles:
            e.close(h)


def test_a_draft_without_free_blocks_proposes_for_the_sequences_that_fit() -> None:
    spec = ENGINES["native"]
    if (reason := spec.unavailable()) is not None:
        pytest.skip(reason)
    small = EngineLimits(4, TINY.block_size, 3 * 16)  # 3 blocks for 4 sequences
    engine = registry.build(spec, weights_of(make_model()), EngineConfig(), "cpu", small)
    drafter = DraftModel("itself", engine, sample, V, FLAT)
    core = make_core(make_engine("native", make_model()), PromptLookup(), 1)
    for i in range(4):
        submit(core, None, prompt(6 + i), replace(GREEDY, max_tokens=20), i)
    core.step()
    asked = [DraftRequest(s, s.token_ids, 0, 5) for s in core.scheduler.running]  # type: ignore[arg-type]
    made = drafter.propose(asked)
    assert [len(p.token_ids) for p in made] == [5, 5, 5, 0]
    assert engine.num_free_blocks == 0
    drafter.forget(asked[1].row)
    assert drafter.propose(asked[2:3]) == made[2:3]
    assert len(drafter.propose(asked[3:])[0].token_ids) == 5
    prompts, params = [prompt(4 * i + 1) for i in range(4)], [replace(GREEDY, max_tokens=24)] * 4
    engine.reset()
    speculative = make_core(make_engine("native", make_model()), DraftModel("itself", engine, sample, V, FLAT), 5)
    assert generate(speculative, prompts, params) == plain(make_engine("native", make_model()), prompts, params)
    assert engine.num_free_blocks == 3


def test_a_draft_model_that_failed_reads_again_and_holds_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine has read the tokens when the error comes: what is held must not be taken for what is read."""
    drafter = make_drafter("itself", "static")
    assert isinstance(drafter, DraftModel)
    core = make_core(make_engine("static", make_model()), PromptLookup(), 1)
    request = submit(core, None, prompt(6), replace(GREEDY, max_tokens=20), 0)
    core.step()
    (s,) = core.scheduler.running
    asked = [DraftRequest(s, s.token_ids, 0, 5)]  # type: ignore[arg-type]
    extend = drafter.engine.extend

    def fails(batch: StepBatch) -> object:
        extend(batch)
        raise RuntimeError("the draft broke")

    for _ in range(2 * drafter.engine.limits.max_num_seqs):
        monkeypatch.setattr(drafter.engine, "extend", fails)
        with pytest.raises(RuntimeError, match="the draft broke"):
            drafter.propose(asked)
        monkeypatch.setattr(drafter.engine, "extend", extend)
        (proposal,) = drafter.propose(asked)
        assert proposal.token_ids == naive_greedy(make_model(), prompt(6), 6)[1:]
    core.abort(request)


class Broken(Scripted):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        raise RuntimeError("the drafter broke")


def test_a_drafter_that_fails_ends_the_sequences_that_it_was_asked_for() -> None:
    gpt = make_model()
    engine = make_engine("static", gpt)
    core = make_core(engine, Broken({}, lambda i: 0), 2)
    request = submit(core, None, prompt(3), GREEDY, 0, ())
    core.step()
    core.step()
    (failed,) = core.output(request).outputs
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: the drafter broke")
    assert generate(core, [prompt(3)], [replace(GREEDY, max_tokens=1)]) == plain(
        engine, [prompt(3)], [replace(GREEDY, max_tokens=1)]
    )


# Names ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_drafts_by_name(tmp_path: Path) -> None:
    folder, small = make_folder(tmp_path / "m"), make_folder(tmp_path / "d", replace(TINY, n_layer=1), seed=5)
    params = [SamplingParams(max_tokens=12, temperature=t, seed=3) for t in (0.0, 1.0)]
    expected = [o.outputs for o in LLM(str(folder)).generate(["Go", "To be"], params)]
    names = ["prompt-lookup", "auto", str(small), "self:1"]
    if ENGINES["native"].unavailable() is None:
        names += ["self:int8", "self:int4"]
    for name in names:
        for k in ("auto", 3):
            llm = LLM(str(folder), draft=name, speculate_k=k)
            assert [o.outputs for o in llm.generate(["Go", "To be"], params)] == expected, (name, k)


@pytest.mark.skipif(ENGINES["native"].unavailable() is not None, reason="needs the engine native")
@pytest.mark.parametrize(("num_large", "quantization"), [(1 << 25, "int8"), (0, "int4")])
def test_a_large_draft_has_four_bits_and_a_small_one_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_large: int, quantization: str
) -> None:
    monkeypatch.setattr(draft_factory, "LARGE_DRAFT", num_large)
    folder, small = str(make_folder(tmp_path / "m")), str(make_folder(tmp_path / "d", seed=5))

    def logits(engine: Engine) -> list[float]:
        handle = engine.open()
        found = engine.extend(StepBatch([handle], list(range(9)), [9], [1]))
        engine.close(handle)
        return [float(x) for x in found[0]]

    speculator = LLM(folder, draft=small).core.speculator
    assert speculator is not None
    assert isinstance(speculator.drafter, DraftModel)
    of_draft = logits(speculator.drafter.engine)
    alone = {q: logits(LLM(small, engine="native", quantization=q).engine) for q in ("int8", "int4")}
    assert of_draft == alone[quantization]
    assert alone["int8"] != alone["int4"]


def test_a_draft_that_is_asked_for_again_still_knows_costs_and_acceptance(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "m")), draft="prompt-lookup")
    before = llm.core.speculator
    llm.set_draft("prompt-lookup", speculate_k=3)
    assert llm.core.speculator is not before
    llm.set_draft(None)
    llm.set_draft("prompt-lookup")
    assert llm.core.speculator is before


def test_the_time_to_read_a_prompt_is_measured_and_not_the_step_of_one_token_times_its_length(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "m", replace(TINY, block_size=128))), draft="self:1", max_num_seqs=1)
    assert llm.core.speculator is not None
    drafter = llm.core.speculator.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter._times.sizes == [1, 16, 64]


def test_what_cannot_be_a_draft_is_refused(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m"))
    other = make_folder(tmp_path / "o", replace(TINY, vocab_size=len(CHARS) - 1), chars=CHARS[:-1])
    shuffled = make_folder(tmp_path / "s", chars=CHARS[::-1])
    refuses(lambda: LLM(folder, draft=str(other)), "58 tokens, CharTokenizer", "59 tokens, CharTokenizer", str(other))
    refuses(lambda: LLM(folder, draft=str(shuffled)), "does not share the vocabulary")
    refuses(lambda: LLM(folder, draft="shakespeare-draft"), "2,048 tokens")
    refuses(lambda: LLM(folder, draft="self:int3"), "self:int3", "self:int8")
    refuses(lambda: LLM(folder, draft="self:2"), "1 to 1")
    refuses(lambda: LLM(folder, draft="nowhere/at/all"), "no such file")
    refuses(lambda: LLM(folder, draft="prompt-lookup", speculate_k=0), "speculate_k=0")
    refuses(lambda: LLM(folder, draft="prompt-lookup", speculate_k="many"), "speculate_k='many'", "auto")
    refuses(lambda: LLM(folder, draft="prompt-lookup", speculate_rule="guess"), "reproduce, reject")
    refuses(lambda: LLM(folder, draft=""), "draft=''")


def test_a_draft_shares_the_memory_for_keys_and_values_that_was_asked_for(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m"))
    both = LLM(folder, engine="dynamic", draft="self:1", kv_cache_memory=3 * 8 * 32 * 2 * 2 * 16 * 4)
    alone = LLM(folder, engine="dynamic", kv_cache_memory=3 * 8 * 32 * 2 * 2 * 16 * 4)
    assert both.engine.limits.max_num_cached_tokens == alone.engine.limits.max_num_cached_tokens * 2 // 3
