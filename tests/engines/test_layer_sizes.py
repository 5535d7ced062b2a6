"""Layers of different sizes, and layers that share keys and values: made-up models on every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers.engines import generate, make_engine, naive_greedy
from helpers.environment import INTERPRETED
from helpers.models import make_limits, refuses
from nanoinfer import SamplingParams
from nanoinfer.checkpoints.gpt_loading import weights_of
from nanoinfer.config import EngineConfig, LayerKind, ModelConfig, Rotary, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.compiled import CompiledEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import kv_block_bytes
from nanoinfer.models.parameters import shapes
from nanoinfer.models.transformer import Transformer
from nanoinfer.roofline.arithmetic import decode, extend
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.utils.arrays import to_numpy

NEAR, FAR = Rotary(6), Rotary(10)
SIZES = (
    LayerKind(5, NEAR),
    LayerKind(None, FAR, n_head=2, num_kv_heads=1, head_size=10, n_inner=30),
    LayerKind(None, None, n_head=6, num_kv_heads=3, head_size=4),
    LayerKind(5, NEAR, n_inner=70),
)
SHARED = (
    LayerKind(5, NEAR, value_norm=True),
    LayerKind(None, FAR, n_head=2, num_kv_heads=1, head_size=10, keys_as_values=True, value_norm=True),
    LayerKind(5, NEAR, n_inner=50, kv_layer=0),
    LayerKind(None, FAR, n_head=3, num_kv_heads=1, head_size=10, kv_layer=1),
    LayerKind(9, NEAR, keys_as_values=True),
)
BASE = ModelConfig(
    vocab_size=61, block_size=96, n_layer=4, n_head=4, num_kv_heads=2, head_size=6, n_embd=24, n_inner=40, bias=False,
    learned_positions=False, norm="rms", gated_mlp=True, qk_norm="head",
)  # fmt: skip
MODELS = {
    "sizes": replace(BASE, layers=SIZES),
    "shared": replace(BASE, n_layer=5, layers=SHARED),
    "shared-whole": replace(
        BASE, n_layer=5, layers=SHARED, qk_norm="whole", bias=("qkv", "mlp"), attention_softcap=4.0
    ),
    "per-layer": replace(
        BASE, layers=tuple(replace(kind, scaled=i != 1) for i, kind in enumerate(SIZES)), per_layer_dim=19
    ),
    "scaled": replace(BASE, layers=(LayerKind(5, NEAR, scaled=True),) * 4),
    "sinks": replace(BASE, layers=SIZES, sinks=True, sub_norms=True),
    "shared-sinks": replace(BASE, n_layer=5, layers=SHARED, sinks=True, sub_norms=True),
    "layer-norms": replace(BASE, n_layer=5, layers=SHARED, norm="layer", gated_mlp=False, bias=True, qk_norm="none"),
}
PROMPTS = [[5, 9, 11, 30, 7], [3], [8] * 23 + [1, 2, 3], list(range(17, 29))]
GREEDY = SamplingParams(max_tokens=24, temperature=0)
RUNGS = [name for name in ENGINES if name != "triton"]


def make_gpt(model: str | ModelConfig) -> Transformer:
    gpt = Transformer(MODELS[model] if isinstance(model, str) else model).eval().requires_grad_(False)
    torch.manual_seed(1)
    for name, p in gpt.named_parameters():
        p.copy_(torch.randn_like(p) * 0.3 + float(p.dim() == 1 and name.endswith("weight")))
    return gpt


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.nightly_if(
    lambda name, model: name not in ("static", "native") and (name == "compiled" or model != "shared")
)
@pytest.mark.slow_if(lambda name, model: name != "native" and (name, model) != ("static", "shared"))
def test_greedy_tokens_equal_the_naive_loop(name: str, model: str) -> None:
    gpt = make_gpt(model)
    assert {name: tuple(p.shape) for name, p in gpt.named_parameters()} == shapes(gpt.config)
    if name == "compiled":
        engine: Any = CompiledEngine(gpt, make_limits(gpt.config, 4), backend="eager")
    else:
        engine = make_engine(name, gpt, 4)
    expected = [[naive_greedy(gpt, prompt, GREEDY.max_tokens)] for prompt in PROMPTS]
    for chunk in (2048, 5):
        core = Core(engine, Scheduler(engine, SchedulerConfig(max_num_batched_tokens=chunk)), sample, None, 61)
        assert generate(core, PROMPTS, [GREEDY] * len(PROMPTS)) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_native_in_any_company_and_with_every_cache(cache: str, model: str) -> None:
    pytest.importorskip("nanoinfer._native")
    gpt, ids = make_gpt(model), [(7 * i * i + i) % 61 for i in range(40)]
    config = EngineConfig(max_num_seqs=3, threads=2, kv_cache_dtype=cache)
    engine: Any = registry.build(ENGINES["native"], weights_of(gpt), config, "cpu")
    alone, first, second = engine.open(), engine.open(), engine.open()
    whole = to_numpy(engine.extend(StepBatch([alone], ids, [40], [40]))).copy()
    together = to_numpy(engine.extend(StepBatch([first, second], [*ids[:17], *ids], [17, 40], [17, 40]))).copy()
    assert np.array_equal(together[:17], whole[:17])
    assert np.array_equal(together[17:], whole)
    expected = gpt(torch.tensor([ids]))[0].numpy()
    error = np.sqrt(np.mean((whole - expected) ** 2)) / expected.std()
    assert error < {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.06}[cache]
    assert engine._decoder.cache_bytes == engine._decoder.blocks_total * kv_block_bytes(gpt.config, cache)


def test_rows_without_logits_stop_at_the_layers_without_keys() -> None:
    """Native leaves them out there; steps of several chunks of 256 rows, some of them without logits."""
    pytest.importorskip("nanoinfer._native")
    layers = tuple(replace(kind, scaled=True) for kind in SHARED[:4])
    gpt = make_gpt(replace(BASE, block_size=700, layers=layers, per_layer_dim=19))
    ids = [(7 * i * i + i) % 61 for i in range(640)]
    config = EngineConfig(max_num_seqs=3, threads=2)
    engine: Any = registry.build(ENGINES["native"], weights_of(gpt), config, "cpu")
    a, b, c, d = (engine.open() for _ in range(4))
    whole = to_numpy(engine.extend(StepBatch([a], ids, [640], [640]))).copy()
    expected = gpt(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-4)
    assert engine.extend(StepBatch([b], ids[:270], [270], [0])).shape == (0, 61)
    mixed = StepBatch([b, c, d], [*ids[270:600], *ids[:40], *ids[:300]], [330, 40, 300], [3, 40, 0])
    assert np.array_equal(to_numpy(engine.extend(mixed)), [*whole[597:600], *whole[:40]])
    after = StepBatch([d, b], [*ids[300:302], ids[600]], [2, 1], [1, 1])
    assert np.array_equal(to_numpy(engine.extend(after)), [whole[301], whole[600]])


@pytest.mark.parametrize("model", MODELS)
def test_a_step_reads_all_weights_and_the_cache_of_each_layer(model: str) -> None:
    config = MODELS[model]
    cost = decode(config, FORMATS["float32"]).model
    table = "transformer.per_layer.wte.weight"  # of which a step reads some rows
    assert cost.bytes(1, 0) == 4 * sum(int(np.prod(shape)) for name, shape in shapes(config).items() if name != table)
    read = [(config.at(i), config.layer(i).window or 30) for i in range(config.n_layer)]
    assert cost.bytes(1, 30) - cost.bytes(1, 0) == sum(8 * at.kv_dim * min(30, window) for at, window in read)


@pytest.mark.parametrize("model", MODELS)
def test_the_roofline_counts_what_torch_counts(model: str) -> None:
    """PyTorch computes masked scores too, so windows count as whole contexts."""
    gpt = make_gpt(model)
    full = replace(gpt.config, layers=tuple(replace(kind, window=None) for kind in gpt.config.layers))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # of which it knows the products
        gpt(torch.zeros(2, 12, dtype=torch.long))
    assert counter.get_total_flops() == extend(full, FORMATS["float32"], 12).model.flops(2, 12)


def test_layers_that_share_keys_take_no_memory() -> None:
    config = MODELS["shared"]
    assert config.kv_bytes_per_token(1) == 2 * sum(config.at(i).kv_dim for i in (0, 1, 4))
    static = make_engine("static", make_gpt("shared"), 2)
    assert static._cache.k.nbytes * 2 == config.kv_bytes_per_token(4) * 96 * 2
    assert static._cache.k[2] is static._cache.k[0]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="kernels run on a CUDA device here, and models are on the CPU")
def test_triton_runs_layers_with_norms_of_all_heads_and_keys_as_values() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    gpt, ids = make_gpt("shared-whole"), [(7 * i * i + i) % 61 for i in range(13)]
    engine: Any = make_engine("triton", gpt, 2)
    handle = engine.open()
    first = engine.extend(StepBatch([handle], ids[:12], [12], [12])).clone()
    logits = torch.cat((first, engine.extend(StepBatch([handle], ids[12:], [1], [1]))))
    torch.testing.assert_close(logits, gpt(torch.tensor([ids]))[0], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LayerKind(kv_layer=3), ("kv_layer=3", "layer 3")),
        (LayerKind(kv_layer=2), ("kv_layer=2", "layer 3")),
        (LayerKind(kv_layer=1), ("kv_layer=1", "(1, 10)", "(2, 6)")),
        (LayerKind(kv_layer=0, keys_as_values=True), ("kv_layer=0", "values")),
        (LayerKind(kv_layer=True), ("kv_layer=True",)),  # type: ignore[arg-type]
        (LayerKind(n_head=3), ("n_head=3", "num_kv_heads=2")),
        (LayerKind(head_size=0), ("head_dim=0",)),
        (LayerKind(head_size=4, rotary=NEAR), ("rotary dim=6", "head_dim=4")),
        (LayerKind(n_inner=-1), ("n_inner=-1",)),
        (LayerKind(scaled=None), ("scaled=None",)),  # type: ignore[arg-type]
        (LayerKind(value_norm=1), ("value_norm=1",)),  # type: ignore[arg-type]
        (LayerKind(rotary=Rotary(4, query_growth=0.5), head_size=4), ("query_growth",)),
    ],
)
def test_kinds_that_contradict_the_model_are_refused(kind: LayerKind, words: tuple[str, ...]) -> None:
    layers = (*SHARED[:3], kind)
    refuses(lambda: replace(BASE, layers=layers), *words)
