"""The engine matrix: every engine, every batch, every decoding method says what the naive loop says.

`naive_greedy` (helpers/engines.py) is the definition of correct: nanoGPT's loop, one sequence, the whole prefix run
again for every token. Adding an engine to the registry adds it to every test here.

The final hidden states of a step, which poolings read: they are what the logits are made from.
Layers of different sizes, and layers that share keys and values: made-up models on every engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import nanoinfer
from helpers.engines import (
    BATCHES,
    BLOCKS,
    DEVICES,
    GREEDY,
    V,
    generate,
    make_core,
    make_engine,
    naive_greedy,
    nightly_if_interpreted,
    prompt,
    slow_if_interpreted,
)
from helpers.environment import INTERPRETED
from helpers.models import TINY, make_folder, make_limits, make_model, refuses, submit, weights_of
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.config import EngineConfig, LayerKind, ModelConfig, Rotary, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines import devices, registry, static_shapes, torch_engine
from nanoinfer.engines.base import Engine, Handle, StepBatch
from nanoinfer.engines.compiled import CompiledEngine
from nanoinfer.engines.devices import resolve_dtype, supported_dtypes
from nanoinfer.engines.native import NativeEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.engines.static_shapes import run_block
from nanoinfer.kv.plan import kv_block_bytes
from nanoinfer.models.attention import attention_backends
from nanoinfer.models.parameters import shapes
from nanoinfer.models.transformer import Transformer
from nanoinfer.roofline.arithmetic import decode, extend
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.utils.arrays import to_numpy

CHOSEN = ("unequal lengths", 5)
"""The batch and chunk with which the greedy matrix of an interpreted engine is run in `make test-all`."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: b.replace(" ", "-"))
@pytest.mark.parametrize("chunk", [2048, 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", ENGINES)
@slow_if_interpreted
@pytest.mark.nightly_if(lambda name, chunk, batch: name == "triton" and INTERPRETED and (batch, chunk) != CHOSEN)
def test_greedy_tokens_equal_the_naive_loop(name: str, chunk: int, batch: str, device: str) -> None:
    gpt = make_model().to(device)
    prompts = [prompt(n, i) for i, n in enumerate(BATCHES[batch])]
    more = 1 if name == "triton" and INTERPRETED else 4
    params = [replace(GREEDY, max_tokens=3 + more * i) for i in range(len(prompts))]
    core = make_core(make_engine(name, gpt), max_num_batched_tokens=chunk)
    expected = [[naive_greedy(gpt, p, q.max_tokens)] for p, q in zip(prompts, params, strict=True)]
    assert generate(core, prompts, params) == expected
    assert generate(core, prompts, params) == expected  # twice in a row: nothing is left behind


@pytest.mark.parametrize("chunk", [2048, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("stride", [1, 3, None, 32], ids=lambda s: f"stride-{s}")
@pytest.mark.parametrize("name", ENGINES)
@nightly_if_interpreted
@pytest.mark.nightly_if(lambda name, stride: name != "native" and stride in (3, 32))
@pytest.mark.nightly_if(lambda name, stride: name in ("compiled", "cuda_graph") and stride == 1)  # as static
@pytest.mark.slow_if(lambda name, stride, chunk: stride is not None if name != "native" else stride in (3, 32))
def test_sliding_window_equals_crop_and_recompute(name: str, stride: int | None, chunk: int) -> None:
    """At twice the block size; stride 1 is nanoGPT's own output. One prompt is longer than the context."""
    gpt = make_model()
    prompts = [prompt(4), prompt(30), prompt(50)]
    params = replace(GREEDY, max_tokens=2 * TINY.block_size, overflow="slide", slide_stride=stride)
    core = make_core(make_engine(name, gpt), max_num_batched_tokens=chunk)
    expected = [[naive_greedy(gpt, p, params.max_tokens, stride or TINY.block_size // 2)] for p in prompts]
    assert generate(core, prompts, [params] * 3) == expected


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.nightly_if(lambda name: name == "triton" and INTERPRETED)
def test_text_stops_when_the_context_is_full(name: str) -> None:
    gpt = make_model()
    long = replace(GREEDY, max_tokens=1000)
    core = make_core(make_engine(name, gpt))
    (tokens,), (last,) = generate(core, [prompt(6), prompt(32)], [long, long])
    assert tokens == naive_greedy(gpt, prompt(6), 27)  # the 27th is drawn from a full window of 32
    assert last == naive_greedy(gpt, prompt(32), 1)


@pytest.mark.parametrize("name", ENGINES)
@nightly_if_interpreted
def test_samples_fork_and_equal_separate_requests(name: str) -> None:
    """n texts of one request are what the sampler would draw for each sample index alone, in any batch."""
    params = SamplingParams(max_tokens=10, temperature=0.9, top_k=20, n=3)
    gpt = make_model()
    core = make_core(make_engine(name, gpt))
    together = generate(core, [prompt(9), prompt(2)], [params, replace(params, n=1)])
    alone = generate(core, [prompt(9)], [params])
    assert together[0] == alone[0]
    assert len({tuple(t) for t in alone[0]}) == 3
    assert generate(core, [prompt(9)], [replace(params, n=1)])[0][0] == alone[0][0]


@pytest.mark.parametrize("name", ENGINES)
@slow_if_interpreted
def test_logits_equal_the_reference_model(name: str, device: str) -> None:
    """Prefill, decode, several tokens with a past, truncate and fork, in one ragged batch, at every position."""
    gpt = make_model().to(device)
    engine = make_engine(name, gpt)
    ids = prompt(20)
    whole = gpt(torch.tensor([ids], device=device))[0]
    other = gpt(torch.tensor([ids[:6] + ids[:4]], device=device))[0]
    a, b = engine.open(), engine.open()
    assert_extend(engine, [(a, ids[:6], 6), (b, ids[:1], 1)], [whole[:6], whole[:1]])
    assert_extend(engine, [(b, ids[1:9], 3), (a, ids[6:7], 1)], [whole[6:9], whole[6:7]])
    c = engine.fork(a)
    assert_extend(engine, [(c, ids[7:12], 5), (a, ids[7:8], 0), (b, ids[9:10], 1)], [whole[7:12], whole[9:10]])
    engine.truncate(c, 6)
    assert_extend(engine, [(c, ids[:4], 4)], [other[6:10]])
    engine.close(a)  # b and c go on, whatever was moved
    assert_extend(engine, [(c, ids[:1], 0), (b, ids[10:11], 1)], [whole[10:11]])
    engine.truncate(b, 0)
    assert_extend(engine, [(b, ids, 20)], [whole])
    assert (engine.length(b), engine.length(c)) == (20, 11)


def assert_extend(engine: Engine, parts: list[tuple[Handle, list[int], int]], expected: list[torch.Tensor]) -> None:
    batch = StepBatch()
    for handle, ids, num_logits in parts:
        batch.add(handle, ids, num_logits)
    logits = torch.as_tensor(engine.extend(batch))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ENGINES)
@slow_if_interpreted
def test_bad_arguments_raise_and_change_nothing(name: str) -> None:
    gpt = make_model()
    engine = make_engine(name, gpt, max_num_seqs=2)
    a, b = engine.open(), engine.open()
    for _ in range(engine.limits.max_idle_seqs):
        engine.open()
    ids = prompt(10)
    assert_extend(
        engine,
        [(a, ids[:5], 1), (b, ids[:3], 1)],
        [gpt(torch.tensor([ids[:5]]))[0, -1:], gpt(torch.tensor([ids[:3]]))[0, -1:]],
    )
    bad = [
        (StepBatch([Handle(9999)], [1], [1], [1]), "handle 9999"),
        (StepBatch([a, a], [1, 1], [1, 1], [1, 1]), "each sequence once"),
        (StepBatch([a], [1], [1], []), "num_logits"),
        (StepBatch([a], [1, 2], [1], [1]), "adds up to 1"),
        (StepBatch([a], [], [0], [0]), "num_new=0"),
        (StepBatch([a], [1], [1], [2]), "num_logits=2"),
        (StepBatch([a], [1], [1], [-1]), "num_logits=-1"),
        (StepBatch([b, a], [1, V], [1, 1], [1, 1]), f"token id {V}"),
        (StepBatch([a], [-1], [1], [1]), "token id -1"),
        (StepBatch([b, a], [1, *prompt(28)], [1, 28], [1, 1]), "context length 32"),
    ]
    for batch, message in bad:
        with pytest.raises(NanoinferError, match=message):
            engine.extend(batch)
    for call, message in (
        (lambda: engine.open(), "max_num_seqs=2"),
        (lambda: engine.fork(a), "max_num_seqs=2"),
        (lambda: engine.truncate(a, 6), "has 5 tokens"),
        (lambda: engine.truncate(a, -1), "truncate to -1"),
        (lambda: engine.close(Handle(9999)), "handle 9999"),
    ):
        with pytest.raises(NanoinferError, match=message):
            call()
    assert (engine.length(a), engine.length(b)) == (5, 3)
    assert_extend(
        engine,
        [(a, ids[5:], 1), (b, ids[3:4], 1)],
        [gpt(torch.tensor([ids]))[0, -1:], gpt(torch.tensor([ids[:4]]))[0, -1:]],
    )
    engine.close(b)
    with pytest.raises(NanoinferError, match=f"handle {b}"):
        engine.close(b)


@pytest.mark.parametrize("name", ENGINES)
def test_an_empty_batch_gives_no_logits(name: str) -> None:
    assert make_engine(name, make_model()).extend(StepBatch()).shape == (0, V)


@pytest.mark.parametrize("name", ENGINES)
@slow_if_interpreted
def test_one_texts_nan_never_reaches_another(name: str) -> None:
    """A token whose embedding is NaN poisons its own text only, also for later texts in the same memory."""
    gpt = make_model(replace(TINY, tie_word_embeddings=False))
    gpt.transformer["wte"].weight[5] = float("nan")
    engine = make_engine(name, gpt)
    clean = [t for t in prompt(24) if t != 5]
    expected = gpt(torch.tensor([clean]))[0]
    keep, poisoned = engine.open(), engine.open()
    engine.extend(StepBatch([keep, poisoned], [*clean[:2], *[5] * 20], [2, 20], [0, 0]))
    engine.truncate(poisoned, 10)
    engine.close(keep)
    engine.close(poisoned)
    a, b = engine.open(), engine.open()
    engine.extend(StepBatch([a, b], [*clean[:3], *clean[:15]], [3, 15], [0, 0]))
    for i in range(3):
        assert_extend(
            engine,
            [(a, clean[3 + i : 4 + i], 1), (b, clean[15 + i : 16 + i], 1)],
            [expected[3 + i : 4 + i], expected[15 + i : 16 + i]],
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ENGINES)
@nightly_if_interpreted  # tests/gpu/test_triton_engine.py has it at a smaller shape
def test_reduced_precision_stays_near_float32(name: str, dtype: str, device: str) -> None:
    if dtype not in supported_dtypes("cpu" if device == "cpu" else "cuda:0"):
        pytest.skip(f"{dtype} is not supported on this {device} device")
    gpt = make_model(std=0.1)
    ids = prompt(20)
    exact = gpt(torch.tensor([ids]))[0]
    engine = make_engine(name, gpt.to(device, getattr(torch, dtype)))
    handle = engine.open()
    rows = [
        torch.as_tensor(engine.extend(StepBatch([handle], ids[:8], [8], [8]))).clone()
    ]  # its own until the next call only
    rows += [torch.as_tensor(engine.extend(StepBatch([handle], [t], [1], [1]))).clone() for t in ids[8:]]
    error = (torch.cat(rows).cpu() - exact).abs().max() / exact.abs().max()
    assert error < (0.03 if dtype == "bfloat16" else 0.005)


def test_auto_takes_the_fastest_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nanoinfer"):
        spec = registry.resolve(EngineConfig(), "cpu", "float32")
    assert spec.name == "native"
    assert "engine=auto: using native" in caplog.text


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"engine": "warp"}, "engine='warp' is unknown: use auto or one of recompute"),
        ({"engine": "static", "quantization": "int8"}, "quantization='int8' is not supported"),
        ({"quantization": "q4_k_m"}, "quantization='q4_k_m' is unknown: use int8 or int4, or leave it out"),
        ({"device": "tpu"}, "device='tpu' is unknown"),
        ({"device": "cuda:99"}, "device='cuda:99'"),
        ({"dtype": "float64"}, "dtype='float64' is unknown"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        (
            {"engine": "static", "max_num_seqs": 8, "kv_cache_memory": 1000},
            "kv_cache_memory=1,000 bytes is too little for 8 sequences",
        ),
        ({"kv_cache_memory": 1000, "engine": "dynamic"}, "too little for 1 sequences"),
        ({"kv_cache_memory": 1000, "engine": "native"}, "too little for 1 sequence of 32 tokens"),
        ({"kv_cache_memory": 1000, "engine": "paged"}, r"too little for 1 sequence of 32 tokens \(8,192 bytes\)"),
        ({"kv_cache_dtype": "float8"}, "kv_cache_dtype='float8' is unknown"),
        ({"kv_cache_dtype": "bfloat16", "engine": "static"}, r"use auto \(the type of the weights\), int8 or int4"),
        ({"threads": 0}, "threads=0"),
        ({"graph_memory": -1}, "graph_memory=-1"),
        ({"graph_memory": 5, "engine": "static"}, "graph_memory=5 is not supported"),
        ({"graph_memory": 5, "engine": "compiled", "device": "cpu"}, "graph_memory=5 is not supported"),
        ({"sampler": "fast"}, "sampler='fast' is unknown: use one of auto, reference"),
        ({"threads": 2, "engine": "static"}, "threads=2 is not supported"),
    ],
)
def test_what_cannot_run_says_why(tiny_folder: Path, keywords: dict[str, object], message: str) -> None:
    with pytest.raises(NanoinferError, match=message) as e:
        LLM(str(tiny_folder), **keywords)
    assert "\n" not in str(e.value)


def test_limits_follow_the_memory_given(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m"))
    text = 32 * TINY.kv_bytes_per_token(4)  # one full-length text
    slots = LLM(folder, engine="static", kv_cache_memory=3 * text + 1).engine.limits
    assert (slots.max_num_seqs, slots.max_num_cached_tokens) == (3, 96)
    assert LLM(folder, engine="compiled", kv_cache_memory=3 * text + 1).engine.limits.max_num_seqs == 2  # and padding
    shared = LLM(folder, engine="dynamic", max_num_seqs=10, kv_cache_memory=3 * text).engine.limits
    assert (shared.max_num_seqs, shared.max_num_cached_tokens) == (10, 96)
    paged = LLM(folder, engine="paged", max_num_seqs=2, kv_cache_memory=3 * text + text // 2 + 1).engine
    assert (paged.limits.max_num_seqs, paged.limits.max_num_cached_tokens) == (2, 112)  # blocks of 16: half a text each
    assert paged.num_free_blocks == 7
    limits = replace(make_limits(max_num_seqs=64), max_idle_seqs=1024, num_pending=1)
    assert limits == LLM(folder, engine="recompute").engine.limits


def test_a_chip_without_bfloat16_gets_float16_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    device = "cuda:0"
    assert resolve_dtype("auto", device) == "float16"
    with pytest.raises(NanoinferError, match="dtype='bfloat16' is not supported on cuda:0: use one of float32"):
        resolve_dtype("bfloat16", device)


def test_a_gpu_that_needs_pytorch_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: 0)
    monkeypatch.setattr(devices, "_has_cuda_driver", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert devices.resolve_device("auto") == "cpu"
    assert "using the CPU and no GPU: torch is not installed: pip install '.[gpu]'" in caplog.text


def test_auto_goes_down_where_a_rung_is_missing_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ENGINES["cuda_graph"]
    monkeypatch.setattr(registry, "num_cuda_devices", lambda: 1)
    cuda = "cuda:0"
    assert registry.resolve(EngineConfig(), cuda, "float16") is spec
    missing = replace(spec, module="no_such_package")
    monkeypatch.setitem(ENGINES, "cuda_graph", missing)
    assert registry.resolve(EngineConfig(), cuda, "float16").name == "static"
    assert "engine=auto: skipped cuda_graph: no_such_package is not installed: pip install '.[gpu]'" in caplog.text
    find_spec = importlib.util.find_spec  # neither Triton nor the extension
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if name == "torch" else None)
    with pytest.raises(NanoinferError, match="engine='triton' cannot run: triton is not installed"):
        registry.resolve(EngineConfig(engine="triton"), cuda, "float16")
    with pytest.raises(NanoinferError, match="no engine supports quantization='int8' with dtype=float16 on cuda:0"):
        registry.resolve(EngineConfig(quantization="int8"), cuda, "float16")


def test_attention_over_lengths_that_are_always_new_is_not_planned() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with attention_backends(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", [name for name, spec in ENGINES.items() if not spec.native])
def test_attention_of_every_engine_runs_on_the_backends_that_are_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, calls, attend = [], [], F.scaled_dot_product_attention

    @contextmanager
    def choose(device: torch.device) -> Iterator[None]:
        chosen.append(device)
        yield
        chosen.pop()

    def attended(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(len(chosen))
        return attend(*arguments, **options)

    for module in (torch_engine, static_shapes):
        monkeypatch.setattr(module, "attention_backends", choose)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attended)
    monkeypatch.setattr(CompiledEngine, "_compile", lambda self: run_block)
    model = make_model()
    monkeypatch.setitem(BLOCKS, ("cpu", model.config), {})
    engine = make_engine(name, model)
    handles = [engine.open(), engine.open()]
    engine.extend(StepBatch(handles, [*prompt(20), *prompt(3)], [20, 3], [1, 1]))
    for _ in range(2):
        engine.extend(StepBatch(handles, [1, 2], [1, 1], [1, 1]))
    assert calls
    assert set(calls) == {1}


# Frames -----------------------------------------------------------------------------------------------------

FRAMES = {
    "recompute": 8, "dynamic": 8, "static": 8, "paged": 8, "compiled": 13, "cuda_graph": 7, "triton": 11, "native": 4,
}  # fmt: skip
"""Python frames of this package, from Core.step to what computes (LLM.generate is one more): a matrix product of
PyTorch's, a compiled block, the replay of a graph, the launch of a kernel, the call into C++."""


@pytest.mark.parametrize("name", ENGINES)
def test_few_frames_from_a_step_to_what_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, depths = str(Path(nanoinfer.__file__).parent), []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            frame, depth = sys._getframe(1), 0
            while frame is not None:
                depth += package in frame.f_code.co_filename
                frame = frame.f_back  # type: ignore[assignment]
            depths.append(depth)
            return call(*args, **kwargs)

        return run

    engine: Any = make_engine(name, make_model())
    core = make_core(engine)
    submit(core, None, [1, 2, 3], GREEDY, 0)
    for _ in range(3):  # compiled, recorded
        core.step()
    if name == "compiled":
        monkeypatch.setattr(engine, "_compiled", {key: counted(run) for key, run in engine._compiled.items()})
    elif name == "cuda_graph":
        recorded = {key: (counted(replay), out) for key, (replay, out) in engine.graphs._recorded.items()}
        monkeypatch.setattr(engine.graphs, "_recorded", recorded)
    elif name == "triton":
        triton_engine = importlib.import_module("nanoinfer.engines.triton_engine")
        monkeypatch.setattr(triton_engine, "product", counted(triton_engine.product))
    elif name == "native":
        decoder = engine._decoder
        room = {"blocks_free": decoder.blocks_free, "open": decoder.open}
        monkeypatch.setattr(engine, "_decoder", SimpleNamespace(extend=counted(decoder.extend), **room))
    else:
        monkeypatch.setattr(torch.nn.functional, "linear", counted(torch.nn.functional.linear))
    core.step()
    assert max(depths) == FRAMES[name]


native = pytest.mark.skipif(ENGINES["native"].unavailable() is not None, reason="built without the extension")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.slow_if(lambda name: name in ("compiled", "triton"))
@pytest.mark.nightly_if(lambda name, tied: name == "triton" and not tied)
def test_the_hidden_states_are_what_the_logits_are_made_from(name: str, tied: bool) -> None:
    gpt = make_model(replace(TINY, block_size=400, tie_word_embeddings=tied))
    engine = make_engine(name, gpt)
    a, b, c = engine.open(), engine.open(), engine.open()
    steps = ([(a, 5, 5), (b, 3, 1), (c, 2, 0)], [(c, 1, 1), (a, 4, 2)], [(b, 300, 290), (c, 7, 7)], [(a, 1, 0)])
    for step in steps:
        batch = StepBatch()
        for handle, num_new, num_logits in step:
            batch.add(handle, prompt(num_new, handle), num_logits)
        logits = torch.as_tensor(engine.extend(batch))
        engine.truncate(step[0][0], engine.length(step[0][0]) - 1)  # nothing but the next step changes them
        hidden = torch.as_tensor(engine.hidden())
        assert hidden.dtype == torch.float32
        assert hidden.shape == (sum(n for _, _, n in step), TINY.n_embd)
        torch.testing.assert_close(F.linear(hidden, gpt.lm_head.weight), logits, atol=1e-4, rtol=1e-4)
    found = []
    for hidden_only, num_rows in ((True, 0), (False, 5)):
        batch = StepBatch(hidden_only=hidden_only)
        batch.add(b, prompt(6, 1), 4)
        batch.add(c, prompt(2, 2), 1)
        assert engine.extend(batch).shape == (num_rows, TINY.vocab_size)
        found.append(torch.as_tensor(engine.hidden()).clone())
        engine.truncate(b, engine.length(b) - 6)
        engine.truncate(c, engine.length(c) - 2)
    assert torch.equal(*found)
    engine.extend(StepBatch())
    assert engine.hidden().shape == (0, TINY.n_embd)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.slow_if(lambda name: name in ("compiled", "triton"))
def test_the_hidden_states_of_all_new_tokens_need_no_logits(name: str) -> None:
    """Those of 290 prompt tokens and of 3 that are verified, with logits of some; the logits do not change by it."""
    engine, other = (make_engine(name, make_model(replace(TINY, block_size=400))) for _ in range(2))
    for e in (engine, other):
        for _ in range(3):
            e.open()
    a, b, c = engine.handles
    for step in ([(a, 5, 1), (b, 290, 0), (c, 2, 2)], [(c, 1, 1), (a, 4, 0)], [(b, 3, 3), (a, 1, 1)], [(c, 3, 0)]):
        some, every = StepBatch(all_hidden=True, hidden_only=step == [(c, 3, 0)]), StepBatch()
        for handle, num_new, num_logits in step:
            some.add(handle, prompt(num_new, handle), num_logits)
            every.add(handle, prompt(num_new, handle), num_new)
        logits, expected = (torch.as_tensor(e.extend(batch)) for e, batch in ((engine, some), (other, every)))
        rows, at = torch.as_tensor(other.hidden()), 0
        wanted = []
        for (_, num_new, num_logits), found in zip(step, engine.new_hidden(some), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), rows[at : at + num_new], atol=1e-4, rtol=1e-4)
            at += num_new
            wanted += range(at - num_logits, at)
        assert at == len(rows)
        torch.testing.assert_close(logits, expected[wanted], atol=1e-4, rtol=1e-4)


@native
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("int4", 0.4)])
def test_the_hidden_states_of_fewer_bits(quantization: str, tolerance: float) -> None:
    """They are not rounded themselves: what differs is the head, and the layers before."""
    gpt = make_model()
    engines = [NativeEngine(weights_of(gpt), make_limits(), EngineConfig(quantization=q)) for q in (None, quantization)]
    for engine in engines:
        batch = StepBatch()
        batch.add(engine.open(), prompt(9), 9)
        engine.extend(batch)
    exact, rounded = (to_numpy(e.hidden()) for e in engines)
    assert np.linalg.norm(exact - rounded) < tolerance * np.linalg.norm(exact)


@native
def test_the_decoder_checks_what_it_writes_to() -> None:
    engine = NativeEngine(weights_of(make_model()), make_limits())
    batch = StepBatch()
    batch.add(engine.open(), prompt(3), 2)
    engine.extend(batch)
    for shape in ((1, 16), (3, 16), (2, 15), (0, 16)):
        with pytest.raises(ValueError, match=r"out must be \(2, 16\)"):
            engine._decoder.hidden(out=torch.zeros(shape))
    with pytest.raises(TypeError):
        engine._decoder.hidden(out=torch.zeros(2, 16, dtype=torch.float64))


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
LONGER = SamplingParams(max_tokens=24, temperature=0)
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
def test_greedy_tokens_of_layers_that_differ_equal_the_naive_loop(name: str, model: str) -> None:
    gpt = make_gpt(model)
    assert {name: tuple(p.shape) for name, p in gpt.named_parameters()} == shapes(gpt.config)
    if name == "compiled":
        engine: Any = CompiledEngine(gpt, make_limits(gpt.config, 4), backend="eager")
    else:
        engine = make_engine(name, gpt, 4)
    expected = [[naive_greedy(gpt, prompt, LONGER.max_tokens)] for prompt in PROMPTS]
    for chunk in (2048, 5):
        core = Core(engine, Scheduler(engine, SchedulerConfig(max_num_batched_tokens=chunk)), sample, None, 61)
        assert generate(core, PROMPTS, [LONGER] * len(PROMPTS)) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8", "int4"])
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
    expected, others = gpt(torch.tensor([ids]))[0].numpy(), []
    if cache in ("int8", "int4"):  # all engines in PyTorch round alike; a number between two codes may get either
        engines = [make_engine(name, make_gpt(model), kv_cache_dtype=cache) for name in RUNGS if name != "native"]
        expected, *others = (to_numpy(e.extend(StepBatch([e.open()], ids, [40], [40]))) for e in engines)
    for logits in (whole, *others):
        error = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
        assert error < {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.005, "int4": 0.06}[cache]
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
