"""LoRA adapters on every engine that has them: a sequence has the tokens of its base with the update in the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import overlap
from helpers.adapters import make_adapter, merged
from helpers.engines import BATCHES, DEVICES, GREEDY, generate, make_core, make_engine, naive_greedy, prompt
from helpers.models import TINY, make_model, refuses
from nanoinfer import SamplingParams
from nanoinfer.checkpoints.adapters import Adapter
from nanoinfer.config import EngineConfig
from nanoinfer.core.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler

WITH = [name for name, spec in ENGINES.items() if "enable_lora" in spec.options]
GPT = make_model()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """Return two adapters of all matrices, one of which has another rank, and one of attention alone."""
    path = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(path / "a", TINY, 1),
        make_adapter(path / "b", TINY, 2, r=5, use_rslora=True),
        make_adapter(path / "c", TINY, 3, targets=("attn.c_attn",)),
    ]


@pytest.fixture(scope="module")
def models(adapters: list[Adapter]) -> list[Transformer]:
    """Return the base, and the base with each adapter."""
    return [GPT, *(merged(GPT, adapter) for adapter in adapters)]


def core_with(name: str, adapters: list[Adapter], device: str = "cpu", **options: int) -> Core:
    engine = make_engine(name, copy.deepcopy(GPT).to(device), enable_lora=True, max_loras=4, max_lora_rank=5)
    assert [engine.load_adapter(adapter) for adapter in adapters] == [1, 2, 3][: len(adapters)]
    return make_core(engine, **options)


def run(
    core: Core, prompts: list[list[int]], params: list[SamplingParams], numbers: list[int]
) -> list[list[list[int]]]:
    requests = [core.make(None, p, q, seed=7) for p, q in zip(prompts, params, strict=True)]
    for request, number in zip(requests, numbers, strict=True):
        request.adapter = number
    core.submit(requests)
    while core.unfinished:
        core.step()
    return [[o.token_ids for o in core.output(r).outputs] for r in requests]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: b.replace(" ", "-"))
@pytest.mark.parametrize("chunk", [2048, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_those_of_each_adapter_alone(
    name: str, chunk: int, batch: str, adapters: list[Adapter], models: list[Transformer], device: str
) -> None:
    """Several adapters and none in a batch, twice in a row: the second time, prefixes are in the cache."""
    prompts = [prompt(n, i) for i, n in enumerate(BATCHES[batch])]
    numbers = [(1 + i) % 4 for i in range(len(prompts))]
    params = [replace(GREEDY, max_tokens=3 + 4 * (i % 3)) for i in range(len(prompts))]
    core = core_with(name, adapters, device, max_num_batched_tokens=chunk)
    expected = [
        [naive_greedy(models[n], p, q.max_tokens or 0)] for n, p, q in zip(numbers, prompts, params, strict=True)
    ]
    assert run(core, prompts, params, numbers) == expected
    assert run(core, prompts, params, numbers) == expected


@pytest.mark.parametrize("recorded", [True, False])
def test_steps_that_overlap_have_the_adapters_of_their_sequences(
    recorded: bool, adapters: list[Adapter], models: list[Transformer]
) -> None:
    """Graphs are recorded without adapters, with one, and with others in the same slots."""
    core = overlap.make_core(copy.deepcopy(GPT), recorded=recorded, enable_lora=True, max_lora_rank=5)
    numbers = [0, *map(core.engine.load_adapter, adapters)]
    prompts, params = [prompt(n, n) for n in (3, 9, 6)], [replace(GREEDY, max_tokens=n) for n in (9, 5, 12)]
    for chosen in ([0, 0, 0], [1, 0, 2], [3, 2, 1], [0, 0, 1]):
        expected = [
            [naive_greedy(models[i], p, q.max_tokens or 0)] for i, p, q in zip(chosen, prompts, params, strict=True)
        ]
        assert run(core, prompts, params, [numbers[i] for i in chosen]) == expected


@pytest.mark.parametrize("name", WITH)
def test_prefixes_are_shared_by_requests_of_one_adapter_alone(
    name: str, adapters: list[Adapter], models: list[Transformer]
) -> None:
    core, ids = core_with(name, adapters), prompt(20)
    expected = [naive_greedy(model, ids, 6) for model in models]
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert run(core, [ids] * 4, [replace(GREEDY, max_tokens=6)] * 4, [0, 1, 2, 3]) == [[e] for e in expected]
    assert core.scheduler.stats.num_shared_tokens == 0
    for i in (3, 2):  # of four idle sequences in memory for four, these were used last
        assert run(core, [ids], [replace(GREEDY, max_tokens=1)], [i]) == [[expected[i][:1]]]
        assert core.scheduler.stats.num_shared_tokens == (4 - i) * 19


@pytest.mark.parametrize("name", WITH)
def test_logits_with_forks_truncation_and_another_adapter_in_its_place(
    name: str, adapters: list[Adapter], models: list[Transformer]
) -> None:
    engine = core_with(name, adapters[:2]).engine
    ids = prompt(12)

    def check(parts: list[tuple[int, list[int], Transformer, list[int]]]) -> None:
        batch, expected = StepBatch(), []
        for handle, new, model, whole in parts:
            batch.add(handle, new, len(new))  # type: ignore[arg-type]
            expected.append(model(torch.tensor([whole]))[0, -len(new) :])
        found = torch.as_tensor(engine.extend(batch))
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)

    a, b, none = engine.open(1), engine.open(2), engine.open()
    check([(b, ids[:7], models[2], ids[:7]), (none, ids[:3], GPT, ids[:3]), (a, ids[:5], models[1], ids[:5])])
    child = engine.fork(a)
    engine.close(none)  # a slot becomes free, into which another sequence may move
    check([(child, ids[5:6], models[1], ids[:6]), (b, ids[7:8], models[2], ids[:8])])
    engine.truncate(child, 2)
    check([(child, ids[7:9], models[1], ids[:2] + ids[7:9]), (a, ids[5:9], models[1], ids[:9])])
    for handle in (a, child):
        refuses(lambda: engine.unload_adapter(1), "adapter 1 has open sequences: close them first")
        engine.close(handle)
    engine.unload_adapter(1)
    refuses(lambda: engine.open(1), "adapter 1 is not loaded")
    assert engine.load_adapter(adapters[2]) == 1
    c = engine.open(1)
    check([(c, ids, models[3], ids), (b, ids[8:9], models[2], ids[:9])])
    engine.reset()
    d = engine.open(2)  # adapters stay loaded
    check([(d, ids, models[2], ids)])


@pytest.mark.parametrize("name", WITH)
def test_samples_beams_and_windows_that_slide(name: str, adapters: list[Adapter], models: list[Transformer]) -> None:
    core = core_with(name, adapters)
    slides = replace(GREEDY, max_tokens=40, overflow="slide")
    (samples, long) = run(core, [prompt(9), prompt(4)], [SamplingParams(max_tokens=8, n=2), slides], [1, 2])
    alone = make_core(make_engine(name, copy.deepcopy(models[1])))
    assert samples == generate(alone, [prompt(9)], [SamplingParams(max_tokens=8, n=2)])[0]
    assert long == [naive_greedy(models[2], prompt(4), 40, TINY.block_size // 2)]


def test_engines_without_adapters_refuse_them(adapters: list[Adapter]) -> None:
    refuses(lambda: make_engine("static", make_model()).load_adapter(adapters[0]), "enable_lora=True")
    engine = make_engine("static", make_model(), enable_lora=True, max_loras=1)
    engine.load_adapter(adapters[0])
    refuses(lambda: engine.load_adapter(adapters[1]), "1 adapters are loaded", "max_loras=1")
    for name in sorted(ENGINES.keys() - {*WITH}):
        if ENGINES[name].unavailable() is None:
            config = EngineConfig(engine=name, enable_lora=True)
            refuses(lambda c=config: registry.resolve(c, "cpu", "float32"), "enable_lora=True is not supported")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["static", "cuda_graph", "native"])
def test_families_with_gates_shared_heads_and_fused_matrices(
    name: str, gpt_of: Callable[[str], Transformer], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    cases = ["qwen2", "gemma2", "phi3", "gpt_neox", "ernie4_5", "olmo2", "gemma4-shared", "qwen3_moe-mixed"]
    for case in [*cases, "qwen3_5_moe", "lfm2", "granitemoehybrid-mamba"]:  # the last have recurrent layers
        gpt = gpt_of(case)
        adapter = make_adapter(tmp_path / case, gpt.config, 4)
        engine = make_engine(name, copy.deepcopy(gpt), enable_lora=True)
        core = Core(engine, Scheduler(engine), sample, None, gpt.config.vocab_size)
        number = engine.load_adapter(adapter)
        ids = [[5, 9, 11, 30, 7], [3, 4]]
        found = run(core, ids, [replace(GREEDY, max_tokens=8)] * 2, [number, 0])
        assert found == [[naive_greedy(merged(gpt, adapter), ids[0], 8)], [naive_greedy(gpt, ids[1], 8)]], case
