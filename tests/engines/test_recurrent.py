"""Recurrent layers: states that cannot be cut, on every engine that has them, against the whole prefix in each step.

The matrices of all families (test_family_engines.py, test_family_requests.py) have models of theirs."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from helpers.engines import make_engine, naive_greedy, nightly_if_interpreted
from helpers.models import submit
from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig, LayerKind, ModelConfig, Rotary, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines import base
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.errors import NanoinferError
from nanoinfer.kv.plan import plan_limits, state_bytes
from nanoinfer.kv.states import ZEROS, StatePool
from nanoinfer.models import recurrent
from nanoinfer.models.parameters import shapes
from nanoinfer.models.transformer import Transformer
from nanoinfer.outputs import CompletionOutput
from nanoinfer.recurrence import Recurrence
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler

RULES = {
    "delta": Recurrence("delta", 4, 6, 10, 3, 8),
    "conv": Recurrence("conv", 3, 1, 40),
    "mamba2": Recurrence("mamba2", 4, 6, 16, 2, 8, bias=True),
    "beside": Recurrence("mamba2", 3, 4, 11, 2, 9, norm_groups=0),
}
RUNGS = ("dynamic", "static", "paged", "cuda_graph", "native")
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
COMMON = [(5 * i * i + 3 * i) % 61 for i in range(50)]


@cache
def model(rule: str) -> Transformer:
    """Return a random model with three recurrent layers of five, or none, whose context is 96 tokens.

    beside: they have attention too, and one of the others has no MLP.
    """
    beside = rule == "beside"
    attention, state = (
        LayerKind(rotary=Rotary(8)),
        LayerKind(rotary=Rotary(8) if beside else None, recurrent=True, beside=beside),
    )
    layers = (state, replace(attention, mlp=not beside), state, state, attention)
    config = ModelConfig(
        61, 96, 5, 4, 40, 64, False, "silu", num_kv_heads=2, head_size=16, learned_positions=False, norm="rms",
        gated_mlp=True, layers=layers if rule in RULES else (attention,) * 5, recurrence=RULES.get(rule),
        attention_gate=rule == "delta", eos_token_ids=(3,),
    )  # fmt: skip
    gpt, generator = Transformer(config).eval(), torch.Generator().manual_seed(1)
    assert {name: tuple(p.shape) for name, p in gpt.named_parameters()} == shapes(config)
    with torch.no_grad():
        for name, p in gpt.named_parameters():
            ones = float(p.dim() == 1 and name.endswith(("scale", "weight")))
            p.copy_(torch.randn(p.shape, generator=generator) * (0.15 if p.dim() > 1 else 0.3) + ones)
    return gpt


def new_core(name: str, gpt: Transformer, max_num_seqs: int) -> Core:
    engine = make_engine(name, gpt, max_num_seqs)
    return Core(engine, Scheduler(engine, SchedulerConfig(target_step_ms=None)), sample, None, 61)


@pytest.mark.parametrize("with_rate", [True, False])
def test_chunks_equal_the_definition(with_rate: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 150, 3, n, generator=generator) for n in (8, 8, 10))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, rate = -torch.rand(2, 150, 3, generator=generator), torch.rand(2, 150, 3, generator=generator)
    state = torch.randn(2, 3, 8, 10, generator=generator)
    by_token, whole = (
        recurrent.gated_linear_attention(state, q, k, v, decay, rate if with_rate else None, chunk)
        for chunk in (1, recurrent.CHUNK)
    )
    for one, other in zip(by_token, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    s, outputs = state.double(), []
    for t in range(150):
        s = s * decay[:, t, :, None, None].exp()
        u = v[:, t] - (torch.einsum("bhkv,bhk->bhv", s, k[:, t].double()) if with_rate else 0)
        u = u * rate[:, t, :, None] if with_rate else u
        s = s + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t].double()))
    torch.testing.assert_close(by_token[0].double(), torch.stack(outputs, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_padding_that_is_not_finite_leaves_outputs_and_states_as_they_are(rule: str) -> None:
    cell = next(block.attn for block in model(rule).blocks if isinstance(block.attn, recurrent.Recurrent))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 5, cell.shape.num_inputs, generator=generator)
    state = torch.randn(1, cell.shape.num_state, generator=generator)
    inputs = -inputs.abs()  # decays are not positive
    padded = torch.cat((inputs, torch.full_like(inputs, float("nan"))), 1)
    (y, after), (padded_y, padded_after) = cell.scan(state, inputs), cell.scan(state, padded, torch.tensor([5]))
    torch.testing.assert_close(padded_y[:, :5], y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded_after, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RUNGS)
def test_the_hidden_states_of_new_tokens_that_are_processed_before_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is split where a state is kept, and tokens after a cut are processed again: theirs are not new."""
    monkeypatch.setattr(base, "MIN_SPLIT", 24)
    monkeypatch.setattr(base, "MIN_KEPT", 12)
    reference, engine = (make_engine(n, model("delta"), 2) for n in ("recompute", name))
    for e in (reference, engine):
        for _ in range(2):
            e.open()
    a, b = engine.handles
    for cut, step in ((0, [(a, 40), (b, 30)]), (35, [(a, 2), (b, 1)]), (10, [(b, 3), (a, 30)])):
        found = []
        for e in (reference, engine):
            e.truncate(a, min(cut, e.length(a)))
            batch = StepBatch(all_hidden=True)
            for handle, num_new in step:
                batch.add(handle, COMMON[:num_new], int(handle == a))
            e.extend(batch)
            found.append(e.new_hidden(batch))
        assert [len(rows) for rows in found[1]] == batch.num_new
        for expected, rows in zip(*found, strict=True):
            torch.testing.assert_close(torch.from_numpy(rows), torch.from_numpy(expected), rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize(
    ("name", "rule"), [*((name, rule) for name in RUNGS for rule in RULES), *((name, "none") for name in ENGINES)]
)
@pytest.mark.nightly_if(lambda name, rule: name != "native" and rule == "mamba2")  # "beside" has its state, too
@pytest.mark.slow_if(lambda name: name == "compiled")
@nightly_if_interpreted
def test_any_order_of_the_verbs_gives_the_logits_of_whole_prefixes(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 random calls, of engines with the same code for states 200 others each. States are kept so often that
    truncated forks use them, and so few fit that some are lost.

    none: attention alone."""
    monkeypatch.setattr(base, "MIN_SPLIT", 24)
    monkeypatch.setattr(base, "MIN_KEPT", 12)
    reference, engine = (make_engine(n, model(rule), 4) for n in ("recompute", name))
    engines, rng, num_logits = (reference, engine), random.Random([*ENGINES].index(name)), 0
    num_calls = 400 if name == "native" else 200
    for _ in range(num_calls):
        handles, what = sorted(reference.handles), rng.random()
        if not handles or (what < 0.1 and len(handles) < 4):
            assert reference.open() == engine.open()
        elif what < 0.2:
            handle = rng.choice(handles)
            length = reference.length(handle)
            length = rng.randint(0, length) if rng.random() < 0.5 else max(0, length - rng.randint(0, 5))
            assert engine.cut(handle, length) <= length
            for e in engines:
                e.truncate(handle, length)
        elif what < 0.3 and len(handles) < 4:
            handle = rng.choice(handles)
            assert reference.fork(handle) == engine.fork(handle)
        elif what < 0.35:
            handle = rng.choice(handles)
            for e in engines:
                e.close(handle)
        else:
            batch = StepBatch()
            for handle in rng.sample(handles, rng.randint(1, len(handles))):
                room = 96 - reference.length(handle)
                count = min(room, rng.choice([1, 1, 1, 2, 4, 8, 9, 30, 50]))
                if count:
                    tokens = [rng.randrange(61) for _ in range(count)]
                    batch.add(handle, tokens, rng.randint(0, count) if rng.random() < 0.3 else 1)
            if batch.handles:
                expected, found = (torch.as_tensor(e.extend(batch)) for e in engines)
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                num_logits += len(found)
        assert [reference.length(h) for h in sorted(reference.handles)] == [
            engine.length(h) for h in sorted(engine.handles)
        ]
    assert num_logits > 0.75 * num_calls


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["static", "paged", "native"])
def test_a_conversation_shares_the_states_of_its_messages(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is the one before it, an answer and a message; in three of ten turns, an earlier message is edited."""
    monkeypatch.setattr(base, "MIN_SPLIT", 12)
    monkeypatch.setattr(base, "MIN_KEPT", 4)
    gpt, rng, edits = model(rule), random.Random(1), {4: 40, 7: 25, 9: 50}
    core, turn, shared = new_core(name, gpt, 2), list[int](), []
    for number in range(10):
        turn = turn[: edits.get(number)]
        turn = [*turn, *(rng.randrange(4, 61) for _ in range(12)), 3, 9]  # 3 ends a message, 9 begins the answer
        request = submit(core, None, turn, replace(GREEDY, max_tokens=3), seed=0, end_token_ids=())
        while core.unfinished:
            core.step()
        (output,) = core.output(request).outputs
        assert output.token_ids == naive_greedy(gpt, turn, 3)
        shared.append(request.num_cached_tokens)
        turn = [*turn, *output.token_ids]
    assert shared == [0, 16, 33, 50, 30, 56, 73, 13, 41, 38]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["dynamic", "static", "paged", "native"])
def test_a_state_that_is_not_finite_ends_its_request_alone(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of the request shares a kept state, and its rows are used again: both are as before."""
    monkeypatch.setattr(base, "MIN_SPLIT", 12)
    monkeypatch.setattr(base, "MIN_KEPT", 4)
    gpt = Transformer(replace(model(rule).config, tie_word_embeddings=False)).eval()
    gpt.load_state_dict(model(rule).state_dict())
    gpt.transformer["wte"].weight.data[60] = torch.nan
    core, shared, params = new_core(name, gpt, 4), COMMON[:20], replace(GREEDY, max_tokens=6, logprobs=1)

    def outputs(*prompts: list[int]) -> list[CompletionOutput]:
        requests = [submit(core, None, p, params, seed=0, end_token_ids=()) for p in prompts]
        while core.unfinished:
            core.step()
        return [core.output(r).outputs[0] for r in requests]

    others = [[*shared, 7, 8], COMMON[30:37], COMMON[3:]]
    expected = outputs(*others)
    for bad in ([*shared, 60], [60], [*COMMON[:30], 60, 5, 6]):
        core.reset_prefix_cache()
        first, failed, *rest = outputs(others[0], bad, *others[1:])
        assert (failed.token_ids, failed.finish_reason) == ([], "error")
        assert "largest logit is nan" in (failed.error or "")
        found = [first, *rest]
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        assert found == expected or name != "native"  # the same bits
        assert [o.token_ids for o in outputs([*shared, 7, 8], [*shared, 9])] == [
            naive_greedy(gpt, p, 6) for p in ([*shared, 7, 8], [*shared, 9])
        ]


def test_rows_are_copied_when_they_are_written_and_kept_ones_are_given_up() -> None:
    pool = StatePool(3, num_pending=8)
    pool.open(0)
    assert pool.step([0], [20]) == ([(ZEROS, 1)], [(1, 0)])  # more than 8: nothing is pending
    pool.keep(0)
    assert pool.step([0], [2]) == ([(1, 2)], [(2, 0)])
    assert [pool.cut(0, n) for n in (22, 21, 20, 19, 0)] == [22, 21, 20, 0, 0]
    pool.open(1)
    pool.fork(0, 1)
    pool.truncate(1, 21)
    assert pool.step([1, 0], [1, 1]) == ([(2, 3)], [(3, 1), (2, 2)])
    assert (pool.cut(0, 21), pool.cut(1, 20), pool.cut(1, 21)) == (20, 20, 21)
    pool.open(2)
    assert pool.step([2], [8]) == ([(ZEROS, 1)], [(1, 0)])  # the kept row was given up
    assert (pool.cut(0, 21), pool.cut(2, 3)) == (0, 3)
    for handle in (0, 1, 2):
        pool.close(handle)
    pool.open(3)
    assert [pool.step([3], [1]) for _ in range(2)] == [([(ZEROS, 1)], [(1, 0)]), ([], [(1, 1)])]
    pool = StatePool(3, num_pending=8)
    for handle in (0, 1):
        pool.open(handle)
        pool.step([handle], [100])
        pool.keep(handle, inner=handle == 1)
    assert pool.step([1], [100]) == ([(2, 3)], [(3, 0)])
    assert pool.step([0], [1])[0] == [(1, 2)]  # the row between two chunks was given up, although it was kept later
    assert (pool.cut(0, 100), pool.cut(1, 100)) == (100, 0)


def test_the_plan_counts_states() -> None:
    config = model("delta").config
    row = state_bytes(config, 4)
    assert row == 4 * 3 * (3 * 108 + 6 * 8 * 10 + 4 * (108 + 12))
    options = EngineConfig(max_num_seqs=4, kv_cache_memory=40 * row, max_speculate_k=3)
    limits = plan_limits(config, options, "blocks", "float32", 0)
    assert (limits.num_states, limits.max_idle_seqs, limits.num_pending) == (20, 8, 4)
    assert limits.max_num_cached_tokens * config.kv_bytes_per_token(4) <= 20 * row
    with pytest.raises(NanoinferError, match=r"kv_cache_memory=100 bytes is too little for 4 sequences, whose states"):
        plan_limits(config, EngineConfig(max_num_seqs=4, kv_cache_memory=100), "blocks", "float32", 0)
