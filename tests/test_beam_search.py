"""Beam search on every engine: transformers' outputs, one after the other, in a batch, and beside other requests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import test_families
from conftest import INTERPRETED, TINY, edit_config, make_folder, make_model, refuses, submit
from nanoinfer import LLM, BeamSearchParams, BeamSearchSequence, SamplingParams
from nanoinfer.core import Core
from nanoinfer.engines.registry import ENGINES
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.sequence import Request
from test_core import RANDOM, TableEngine, make_core
from test_engines import make_core as core_of
from test_engines import make_engine, prompt
from test_overlap import TorchSampler

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
    assert [s.score for s in found] == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, LLM]]:
    """Return a model of transformers, and the same one on `native` (where it is installed, else `static`)."""

    @functools.cache
    def make(case: str) -> tuple[Any, LLM]:
        folder = tmp_path_factory.mktemp("beams") / case
        model = test_families.make_folder(case, folder)
        edit_config(folder, eos_token_id=ENDS)
        (folder / "generation_config.json").unlink()
        native = ENGINES["native"].unavailable() is None
        llm = LLM(
            str(folder), engine="native" if native else "static", dtype="float32", device="cpu", max_num_seqs=24
        )
        return model, llm

    return make


@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("width", WIDTHS)
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


@pytest.mark.parametrize("case", ["gemma3", "qwen2-windows", "nanochat", "gpt_neox"])
def test_other_families_equal_transformers(model_of: Callable[[str], tuple[Any, LLM]], case: str) -> None:
    model, llm = model_of(case)
    for width, max_tokens, ignore_eos in [(3, 1, False), (4, 20, True), (6, 9, False)]:
        params = BeamSearchParams(width, max_tokens=max_tokens, ignore_eos=ignore_eos, length_penalty=0.7)
        for ids, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            assert_equal(output.sequences, reference(model, ids, params, ENDS))


def tiny_llm(folder: Path, **options: Any) -> LLM:
    config = replace(TINY, eos_token_ids=(3, 8, 21))
    return LLM(str(make_folder(folder, config)), **{"engine": "static", "device": "cpu", "max_num_seqs": 16} | options)


def run(core: Core, *requests: Request) -> None:
    """Run until all requests have finished."""
    for request in requests:
        assert request.finish_or_pending if False else True
    while core.unfinished:
        core.step()
        core.scheduler.check_integrity()


def beam_request(core: Core, ids: list[int], params: BeamSearchParams, ends: tuple[int, ...] = (3, 8, 21)) -> Request:
    return submit(core, None, ids, params.sampling_params, 0, ends, beams=params)


def result(core: Core, request: Request) -> list[tuple[list[int], str | None]]:
    return [(o.token_ids, o.finish_reason) for o in core.output(request).outputs]


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
@pytest.mark.slow_if(lambda name: name == "triton" and INTERPRETED)
def test_every_engine_finds_the_beams_of_recompute(name: str, width: int, early_stopping: bool | str) -> None:
    if name == "triton" and INTERPRETED:
        pytest.skip("no CUDA device")
    found = search(core_of(make_engine(name, make_model(), 20)), width, early_stopping)
    for (tokens, sums), (expected, expected_sums) in zip(found, recomputed(width, early_stopping), strict=True):
        assert tokens == expected
        assert sums == pytest.approx(expected_sums, abs=1e-4)
