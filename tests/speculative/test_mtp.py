"""Multi-token prediction: the block that ships with a model, as a model of its own and as a draft."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.families import make_folder
from helpers.mtp import WithAssistant, WithBlock, check_gguf, make_assistant, make_mtp_folder, make_right
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.checkpoints.packed import write_folder
from nanoinfer.config import EngineConfig, EngineLimits
from nanoinfer.engines import native, registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.errors import NanoinferError
from nanoinfer.speculative import mtp
from nanoinfer.speculative.base import DraftRequest
from nanoinfer.utils.arrays import to_numpy

CASES = ("qwen3_5", "qwen3_5_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    @cache
    def make(case: str) -> WithBlock | WithAssistant:
        if case.startswith("gemma"):
            return make_assistant(case, 16, tmp_path_factory.mktemp(case))
        return make_mtp_folder(case, tmp_path_factory.mktemp(case))

    return make


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_the_block_gives_the_logits_of_transformers_layers(case: str, folder_of) -> None:  # type: ignore[no-untyped-def]
    """On each engine that drafts run on, in chunks; with the target's embedding and head, or its own."""
    made = folder_of(case)
    ids = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(0))
    h = made.target.model(ids[None]).last_hidden_state[0]
    expected = made.expected(ids[1:], h[:-1])
    weights = open_folder(made.folder)
    limits = EngineLimits(2, weights.config.block_size, 2 * weights.config.block_size, num_states=8, num_pending=8)
    for name, shared in (("native", True), ("native", False), ("static", True), ("paged", False)):
        spec = registry.ENGINES[name]
        target = registry.build(spec, weights, EngineConfig(), "cpu", limits)
        engine = registry.build(spec, weights.mtp(shared), EngineConfig(), "cpu", limits, target if shared else None)
        handle, found = engine.open(), []
        for start, end in ((0, 20), (20, 21), (21, 39)):
            batch = StepBatch(previous=h[start:end].numpy())
            batch.add(handle, ids[1 + start : 1 + end].tolist(), end - start)
            found.append(torch.as_tensor(to_numpy(engine.extend(batch)).copy()))
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-3, atol=1e-3)
    assert expected.std() > 0.3


def test_a_gguf_file_has_the_block_after_its_layers(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    check_gguf(folder_of("deepseek_v3"), tmp_path)


PROMPTS = [
    {"prompt_token_ids": p} for p in ([(5 * i * i + 3 * i) % 61 for i in range(50)], [4], [4, 8, 15, 16, 23] * 5)
]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[object], params: SamplingParams) -> list[list[list[int]]]:
    return [[o.token_ids for o in r.outputs] for r in llm.generate(prompts, params)]


@pytest.mark.parametrize("reads", ["token", "hidden"])
@pytest.mark.parametrize("case", ["qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize("engine", ["native", "dynamic", "static"])
def test_every_proposal_of_a_block_that_is_right_is_accepted(
    engine: str,
    case: str,
    reads: str,
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    """One place off, a token or a hidden state would be wrong in all; a deeper proposal reads the block's own."""
    folder = make_right(folder_of(case), tmp_path / "right", reads)
    llm = LLM(str(folder), engine=engine, device="cpu", draft="auto", speculate_k=3, max_num_batched_tokens=16)
    prompts = [[(7 * i + j) % 61 for j in range(n)] for i, n in enumerate((50, 1, 24))]
    for prompt, output in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY), strict=True):
        assert output.outputs[0].token_ids == [(prompt[-1] + i) % 61 for i in range(1, 25)]
        spec = output.metrics.speculation
        assert spec.num_proposed == spec.num_accepted >= 17  # 24 tokens: 1, then 5 steps of 4, then 3
        assert spec.num_verify_steps == 6


@pytest.mark.parametrize(
    ("engine", "case"),
    [*((e, case) for e in ("native", "static") for case in (*CASES, "gemma4-shared")), ("packed", "qwen3_5")],
)
def test_tokens_are_those_without_a_draft(engine: str, case: str, folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Chunked prompts of unequal lengths, samples, shared prefixes, windows that slide, adaptive k, embeddings."""
    folder = str(folder_of(case).folder)
    draft = f"{folder}/assistant" if case.startswith("gemma") else "mtp"
    if engine == "packed":
        write_folder(open_folder(Path(folder)), tmp_path / "packed", "float32", None, threads=1)
        folder, engine = str(tmp_path / "packed"), "native"
    options = {"engine": engine, "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 12}
    plain, fixed, adaptive = (
        LLM(folder, **options, **more) for more in ({}, {"draft": draft, "speculate_k": 3}, {"draft": draft})
    )
    longer = [{"prompt_token_ids": [*PROMPTS[0]["prompt_token_ids"], 7, i]} for i in range(3)]
    for prompts, params in (
        (PROMPTS, GREEDY),
        (longer, GREEDY),  # forks of a cached prefix
        (PROMPTS, SamplingParams(max_tokens=12, temperature=0.9, n=2, seed=3, ignore_eos=True)),
        (PROMPTS[1:], replace(GREEDY, max_tokens=6, overflow="slide")),
        (PROMPTS[:1], replace(GREEDY, max_tokens=4, prompt_logprobs=1)),
    ):
        expected = tokens_of(plain, prompts, params)
        assert [tokens_of(llm, prompts, params) for llm in (fixed, adaptive)] == [expected] * 2
    assert fixed.generate(PROMPTS, GREEDY)[0].metrics.speculation.num_proposed > 20
    expected = [o.outputs.values for o in plain.embed(longer)]
    _, stream = fixed.stream_outputs(PROMPTS[:1], GREEDY)  # whose steps keep the hidden states of all tokens
    next(stream)
    found = [o.outputs.values for o in fixed.embed(longer)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_preempted_sequences_propose_again(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = make_right(folder_of("deepseek_v3"), tmp_path / "right", "hidden")
    options = {"engine": "native", "device": "cpu", "max_num_seqs": 3}
    per_token = open_folder(folder).config.kv_bytes_per_token(4)
    small = LLM(str(folder), **options, draft="mtp", speculate_k=2, kv_cache_memory=150 * per_token)
    outputs = small.generate([{"prompt_token_ids": list(range(30 + i))} for i in range(3)], GREEDY)
    assert small.core.scheduler.stats.num_preempted > 0
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == [(29 + i + j) % 61 for j in range(1, 25)]
        spec = output.metrics.speculation
        assert spec.num_accepted == spec.num_proposed > 10


def test_a_model_without_a_block(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = make_folder("qwen3_5", tmp_path) and tmp_path
    with pytest.raises(NanoinferError, match=r"draft='mtp': '.*' has no block that predicts a further token: use auto"):
        LLM(str(folder), engine="native", draft="mtp")
    llm = LLM(str(folder), engine="native", draft="auto", speculate_k=3)
    assert (llm.core.speculator.drafter.name, llm.engine.limits.num_pending) == ("prompt-lookup", 4)
    with pytest.raises(
        NanoinferError, match=r"proposes up to 12 tokens, .* room to reject 3: give max_speculate_k=12 to"
    ):
        llm.set_draft("prompt-lookup")


def test_hidden_states_are_kept_until_their_tokens_are_read() -> None:
    """Of a fork, too; a window that slid, a gap and rejected proposals leave what follows them."""
    drafter, rows = mtp.NextTokens("mtp", None, None, 61, None), np.zeros((5, 4), np.float32)

    def behind(row: str, num_tokens: int, start: int = 0) -> int:
        return drafter.num_behind(DraftRequest(row, list(range(num_tokens)), start, 1))  # type: ignore[arg-type]

    drafter.observe(["a"], 0, rows)  # type: ignore[list-item]
    drafter.observe(["a", "b"], 5, rows[:4])  # type: ignore[list-item]
    assert [behind("a", 10), behind("b", 10), behind("a", 10, start=3)] == [9, 9, 6]
    assert behind("a", 11) == 11  # the last state is missing: no proposal
    drafter.observe(["b"], 12, rows)  # type: ignore[list-item]
    drafter.observe(["a"], 7, rows[:1])  # type: ignore[list-item]
    assert [behind("b", 17), behind("a", 9), behind("a", 10)] == [4, 8, 10]
    drafter.forget("a")  # type: ignore[arg-type]
    assert behind("a", 9) == 9


def test_hidden_states_are_dropped_beyond_the_limit_and_acceptance_goes_on(
    folder_of,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    folder = make_right(folder_of("qwen3_5"), tmp_path / "right", "hidden")
    monkeypatch.setattr(mtp, "MAX_KEPT_BYTES", 40 * 24 * 4)
    llm = LLM(str(folder), engine="native", draft="mtp", speculate_k=2, max_num_batched_tokens=16)
    outputs = llm.generate([{"prompt_token_ids": list(range(50))} for _ in range(2)], GREEDY)
    for output in outputs:
        spec = output.metrics.speculation
        assert spec.num_accepted == spec.num_proposed > 10


def test_a_head_of_the_first_tokens_proposes_no_others(  # type: ignore[no-untyped-def]
    folder_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it fail where only others are allowed."""
    monkeypatch.setattr(native, "MTP_TOKENS", 32)
    folder = str(make_right(folder_of("qwen3_5"), tmp_path / "right", "hidden"))
    llm = LLM(folder, engine="native", draft="mtp", speculate_k=2)
    (output,) = llm.generate([{"prompt_token_ids": list(range(8))}], replace(GREEDY, max_tokens=40))
    assert output.outputs[0].token_ids == list(range(8, 48))
    spec = output.metrics.speculation
    assert 14 <= spec.num_accepted <= 20 < spec.num_proposed  # of the tokens below 32
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, allowed_token_ids=[40, 41], ignore_eos=True)
    expected = tokens_of(LLM(folder, engine="native"), PROMPTS, params)
    assert tokens_of(llm, PROMPTS, params) == expected
    rejecting = LLM(folder, engine="native", draft="mtp", speculate_k=2, speculate_rule="reject")
    for (tokens,) in tokens_of(rejecting, PROMPTS, params):
        assert len(tokens) == 9
        assert {*tokens} <= {40, 41}
