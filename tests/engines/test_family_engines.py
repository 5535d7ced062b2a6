"""The models of all families on the rungs: greedy tokens, samples, sliding, speculation, and formats of native.

`native` generates greedy tokens with every case. Each other matrix runs a case of each feature (helpers/features.py),
and all cases in `make test-nightly`.
"""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.engines import generate, make_engine, naive_greedy
from helpers.families import CASES
from helpers.features import FEATURES
from helpers.models import TINY, make_limits, make_weights
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gpt_loading import load_gpt, weights_of
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.checkpoints.weights import has_format
from nanoinfer.config import EngineConfig, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.engines.compiled import CompiledEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.transformer import Transformer
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.utils.arrays import to_numpy

GREEDY = SamplingParams(max_tokens=16, temperature=0)
PROMPTS = [[5, 9, 11, 30, 7], [3], [8] * 23 + [1, 2, 3], list(range(17, 29))]
REPEATING = [4, 8, 15, 16, 23, 42] * 6
RUNGS = [name for name in ENGINES if name != "triton"]  # tests/gpu/test_triton_families.py
FAST = [name for name in RUNGS if name not in ("compiled", "cuda_graph")]  # they trace each shape of each model
DAILY = {
    "native": tuple(CASES), **dict.fromkeys(("dynamic", "static", "paged"), FEATURES),
    "cuda_graph": (*FEATURES[::8], "gemma2", "gpt_oss"),
}  # fmt: skip
"""What `make test-all` generates. recompute has the reference's step, cuda_graph and compiled have one of their own, of
which the soft cap and the sinks of attention are here."""
all_cases = pytest.mark.parametrize("case", CASES)
a_case_a_feature = pytest.mark.nightly_if(lambda case: case not in FEATURES)


@pytest.fixture(scope="module")
def greedy_of(gpt_of: Callable[[str], Transformer]) -> Callable[[str], list[list[list[int]]]]:
    """Return the greedy tokens of PROMPTS by the naive loop."""
    return functools.cache(lambda case: [[naive_greedy(gpt_of(case), p, GREEDY.max_tokens)] for p in PROMPTS])


def engine_of(name: str, gpt: Transformer, max_num_seqs: int = 4) -> Engine:
    if name == "compiled":  # test_engines shares what is compiled among models of one shape
        return CompiledEngine(gpt, make_limits(gpt.config, max_num_seqs), backend="eager")
    return make_engine(name, gpt, max_num_seqs)


@pytest.mark.parametrize("norm_weight", ["none", "one_plus"])
def test_layer_norms_have_no_weight_or_one_that_is_added_to_1(norm_weight: str) -> None:
    plain = make_weights(TINY)
    gpt, changed = load_gpt(plain), replace(TINY, norm_weight=norm_weight)
    scaled = {name: t for name, t in gpt.state_dict().items() if "ln_" in name and name.endswith("weight")}
    for tensor in scaled.values():
        tensor.fill_(1.0 if norm_weight == "none" else 1.5)
    given = {name: t for name, t in gpt.state_dict().items() if norm_weight != "none" or name not in scaled}
    same = Transformer(changed).eval()
    same.load_state_dict({name: t - 1.0 if name in scaled else t for name, t in given.items()})
    expected = [[naive_greedy(gpt, prompt, 6)] for prompt in PROMPTS[:3]]
    assert [[naive_greedy(same, prompt, 6)] for prompt in PROMPTS[:3]] == expected
    for name in ("static", "native"):
        found = generate(make_core(engine_of(name, same)), PROMPTS[:3], [replace(GREEDY, max_tokens=6)] * 3)
        assert found == expected, name


def make_core(engine: Engine, **options: int) -> Core:
    return Core(engine, Scheduler(engine, SchedulerConfig(**options)), sample, None, engine.config.vocab_size)


def generated(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], replace(params, ignore_eos=True))


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in generated(llm, prompts, params)]


@all_cases
@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.nightly_if(lambda name, case: case not in DAILY.get(name, FEATURES[::8]))
@pytest.mark.slow_if(
    lambda name, case: case not in {"native": FEATURES[::2], "static": FEATURES[::8]}.get(name, ["olmo2"])
)
def test_greedy_tokens_equal_the_naive_loop(
    name: str, case: str, gpt_of: Callable[[str], Transformer], greedy_of: Callable[[str], list[list[list[int]]]]
) -> None:
    """Alone and in a ragged batch, with whole prompts and chunks of 5 tokens, twice on one engine."""
    gpt, expected = gpt_of(case), greedy_of(case)
    assert len({tuple(t) for (t,) in expected}) > 1
    engine = engine_of(name, gpt)
    for chunk in (2048, 5):
        core = make_core(engine, max_num_batched_tokens=chunk)
        assert generate(core, PROMPTS, [GREEDY] * len(PROMPTS)) == expected
    assert generate(make_core(engine), PROMPTS[2:3], [GREEDY]) == expected[2:3]


@pytest.mark.nightly  # tests/engines/test_static_shapes.py compiles a smaller model
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU: install g++")
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_moe-mixed"])
def test_what_torch_compile_makes_on_a_cpu_gives_the_same_tokens(
    case: str, folder_of: Callable[[str], Path], greedy_of: Callable[[str], list[list[list[int]]]]
) -> None:
    """The engine as users get it; the tests above trace with the backend eager. Rotation, grouped heads, gated MLP."""
    llm = LLM(str(folder_of(case)), engine="compiled", device="cpu", dtype="float32", max_num_seqs=2)
    assert llm.engine._backend == "inductor"
    expected = [output for (output,) in greedy_of(case)]
    assert tokens(llm, PROMPTS[:1], GREEDY) == expected[:1]
    assert tokens(llm, PROMPTS[:2], GREEDY) == expected[:2]
    assert llm.engine._compiled


@all_cases
@a_case_a_feature
@pytest.mark.slow_if(lambda case: case not in FEATURES[::8])
@pytest.mark.nightly_if(lambda case: case not in FEATURES[::2])
def test_samples_and_sliding_are_the_same_on_every_rung(case: str, gpt_of: Callable[[str], Transformer]) -> None:
    """Two sampled outputs share the keys and values of their prompt; a full context slides, or ends the sequence."""
    gpt = gpt_of(case)
    two = SamplingParams(max_tokens=12, temperature=0.9, top_k=20, n=2)
    slide, stop = (replace(GREEDY, max_tokens=20, overflow=o) for o in ("slide", "stop"))
    long = [(7 * i * i + i) % 61 for i in range(90)]
    expected = [naive_greedy(gpt, long, 20, stride=gpt.config.block_size // 2)], [naive_greedy(gpt, long, 20)]
    assert [len(t) for (t,) in expected] == [20, 7]
    found = {}
    for name in FAST:
        core = make_core(engine_of(name, gpt))
        found[name], *ended = generate(core, [PROMPTS[0], long, long], [two, slide, stop])
        assert tuple(ended) == expected, name
    assert all(outputs == found["recompute"] for outputs in found.values())
    assert found["native"][0] != found["native"][1]


@all_cases
@pytest.mark.parametrize("engine", ["native", "static"])
@a_case_a_feature
@pytest.mark.nightly_if(lambda engine, case: engine == "static" and case not in FEATURES[::4])
@pytest.mark.slow_if(lambda engine, case: case not in FEATURES[:: 8 if engine == "native" else 20])
def test_speculation_changes_no_token(engine: str, case: str, folder_of: Callable[[str], Path]) -> None:
    """Drafts: repetition, the target itself in 8 bits or with fewer layers, and a model of another family."""
    folder = str(folder_of(case))
    other = str(folder_of("llama" if not case.startswith("llama") else "gpt_neox"))
    prompts, params = [REPEATING, *PROMPTS], replace(GREEDY, max_tokens=24)
    plain = tokens(LLM(folder, engine=engine, dtype="float32"), prompts, params)
    llm = LLM(folder, engine=engine, dtype="float32", max_num_seqs=5, max_speculate_k=3)
    accepted = {}
    first_layers = [] if llm.config.per_layer_dim else ["self:2"]  # which such a model has none of
    for draft in ("prompt-lookup", "self:int8", *first_layers, other):
        llm.set_draft(draft, speculate_k=3)
        outputs = generated(llm, prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == plain, draft
        assert outputs[0].metrics.speculation is not None
        accepted[draft] = outputs[0].metrics.speculation.num_accepted
    assert accepted["self:int8"] > 8, accepted


# Format of native -> the largest distance of its logits from those of the same rounded weights in float32: root mean
# square, in standard deviations of the logits. With int8 and int4, activations are rounded to 8 bits.
#
# Rounding may change the choice of experts of some tokens, which other tokens attend to. So with experts the median of
# the tokens' mean squares stands for the mean, and limits are twice as large; with states, which multiply rounding
# errors, three times.
WEIGHTS = {"float32": 1e-5, "bfloat16": 0.03, "float16": 1e-5, "int8": 0.12, "int4": 0.12}
CACHES = {"bfloat16": 0.03, "int8": 0.06, "int4": 0.5}


@all_cases
@a_case_a_feature
@pytest.mark.slow_if(lambda case: case not in FEATURES[::2])
def test_formats_of_native(case: str, gpt_of: Callable[[str], Transformer]) -> None:
    native = pytest.importorskip("nanoinfer._native")
    weights, ids = weights_of(gpt_of(case)), [(7 * i * i + i) % 61 for i in range(40)]

    def rounded(format: str) -> Any:
        """Return the float32 logits of the weights that a format stores."""
        gpt = copy.deepcopy(gpt_of(case))
        with torch.inference_mode():
            mix = weights.formats(format if format == "int4" else None)
            for name, p in gpt.named_parameters():
                start = 0
                for part, rows in mix.get(name, ((format, len(p)),)) if has_format(name, tuple(p.shape)) else ():
                    some = p[start : start + rows]
                    some.copy_(torch.from_numpy(native.unpack(weights=some.numpy(), format=part)))
                    start += rows
            return gpt(torch.tensor([ids]))[0].numpy()

    def distance(expected: Any, dtype: str = "float32", **options: Any) -> float:
        config = EngineConfig(max_num_seqs=1, threads=1, **options)
        engine = registry.build(ENGINES["native"], replace(weights, dtype=dtype), config, "cpu")
        found = to_numpy(engine.extend(StepBatch([engine.open()], ids, [len(ids)], [len(ids)])))
        squares = np.mean((found - expected) ** 2, axis=1)
        mean = np.mean(squares) if weights.config.experts is None else np.median(squares)  # another expert's output
        part = 3 if weights.config.recurrence else 1 if weights.config.experts is None else 2
        return float(np.sqrt(mean) / expected.std()) / part

    for name, limit in WEIGHTS.items():
        options = {"quantization": name} if name in ("int8", "int4") else {"dtype": name}
        assert distance(rounded(name), kv_cache_dtype="float32", **options) < limit, name
    for name, limit in CACHES.items():
        assert distance(rounded("float32"), kv_cache_dtype=name) < limit, name


@all_cases
@a_case_a_feature
def test_native_on_every_instruction_set(
    case: str, gpt_of: Callable[[str], Transformer], greedy_of: Callable[[str], list[list[list[int]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    native = pytest.importorskip("nanoinfer._native")
    for isa in [name for name, missing in native.instruction_sets() if not missing]:
        monkeypatch.setenv("NANOINFER_ISA", isa)
        core = make_core(make_engine("native", gpt_of(case)))
        assert generate(core, PROMPTS, [GREEDY] * len(PROMPTS)) == greedy_of(case), isa


@all_cases
@a_case_a_feature
@pytest.mark.slow_if(lambda case: case not in FEATURES[::4])
def test_packed_weights_are_the_same_model(case: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("nanoinfer._native")
    folder = folder_of(case)
    packed.write_folder(open_folder(folder), tmp_path / "packed", "int8", None, threads=1)
    llm = LLM(str(tmp_path / "packed"))
    assert llm.config == open_folder(folder).config
    assert tokens(llm, PROMPTS, GREEDY) == tokens(LLM(str(folder), quantization="int8"), PROMPTS, GREEDY)


def test_a_step_copies_nothing_from_the_host(
    gpt_of: Callable[[str], Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph cannot capture such a copy: after the first step, frequencies are on the device."""
    gpt = copy.deepcopy(gpt_of("gemma3"))
    first = gpt(torch.tensor([[1, 2, 3]]))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a copy from the host")

    monkeypatch.setattr(torch, "from_numpy", fails)
    assert torch.equal(gpt(torch.tensor([[1, 2, 3]])), first)


def test_every_family_has_a_case(folder_of: Callable[[str], Path]) -> None:
    assert {open_folder(folder_of(case)).config.family for case in CASES} | {"gpt2"} == FAMILIES.keys()
