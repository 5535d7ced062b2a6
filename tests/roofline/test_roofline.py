"""FLOPs and bytes against counts taken from the real model, and the times that follow from them.

FLOPs come from torch's counter around a real step, bytes from a log of the tensors that the step's
operations are given. The counter has no formula for the fused attention kernel of CPUs, so attention runs as
its two matrix products (SDPBackend.MATH); both count the whole rectangle of scores, masked or not.

`nanoinfer roofline` as a user meets it, and every number of docs/inference-math.md.

benchmarks/model_tables.py, and the pages that show its tables."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from helpers.environment import ROOT
from helpers.models import TINY, Run, edit_config, make_limits, make_model, refuses
from nanoinfer.cli.measure import si
from nanoinfer.config import Experts, Latent, LayerKind, ModelConfig, Rotary
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.recompute import RecomputeEngine
from nanoinfer.engines.static import StaticEngine
from nanoinfer.models.families import FAMILIES
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.transformer import Transformer
from nanoinfer.roofline.arithmetic import Chosen, Poly, StepCost, decode, extend, kv_cache_layer, prefill
from nanoinfer.roofline.ceilings import DEVICES, Ceiling
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.roofline.report import Question, Setting, answer, generation, predict

FP32 = FORMATS["float32"]
RMS = replace(TINY, bias=False, norm="rms", gated_mlp=True, activation="silu", learned_positions=False, n_inner=40)
WIDE = 64  # a window that holds every sequence of these tests
BY_FAMILY = {
    "llama": replace(RMS, family="llama", num_kv_heads=1, head_size=6, layers=(LayerKind(None, Rotary(6)),) * 2),
    "qwen3": replace(
        RMS, family="qwen3", num_kv_heads=1, head_size=10, qk_norm="head", bias=("qkv",), tie_word_embeddings=False,
        layers=(LayerKind(WIDE, Rotary(10)),) * 2,
    ),
    "gemma3": replace(
        RMS, family="gemma3_text", qk_norm="head", norm_placement="both", norm_weight="one_plus", embedding_scale=4.0,
        n_layer=3, layers=(LayerKind(WIDE, Rotary(8)), LayerKind(None, Rotary(8)), LayerKind(WIDE)),
    ),
    "olmo2": replace(RMS, family="olmo2", norm_placement="after", qk_norm="whole", num_kv_heads=1),
    "gpt_neox": replace(
        TINY, family="gpt_neox", learned_positions=False, parallel_residual=True, bias=("norm", "mlp"),
        layers=(LayerKind(None, Rotary(2)),) * 2,
    ),
    "bitnet": replace(
        RMS, family="bitnet", sub_norms=True, activation="relu2", layers=(LayerKind(None, Rotary(8)),) * 2
    ),
    "deepseek_v2": replace(
        RMS, family="deepseek_v2", num_kv_heads=1, head_size=14, latent=Latent(10, 4, 6, 12, query_rank=8),
        attention_scale=0.3, layers=(LayerKind(None, Rotary(4)),) * 2,
    ),
    "deepseek_v2, no latent of queries": replace(
        RMS, family="deepseek_v2", num_kv_heads=1, head_size=14, latent=Latent(10, 4, 6, 12), n_layer=1,
    ),
    "nanochat": replace(
        RMS, family="nanochat", gated_mlp=False, norm_weight="none", embedding_norm=True, qk_norm="head",
        logits_softcap=5.0, activation="relu2",
    ),
}  # fmt: skip
CONFIGS = {
    "plain": TINY,
    "no bias, one head": replace(TINY, bias=False, n_head=1, n_layer=1),
    "narrow MLP, untied head": replace(TINY, n_inner=24, tie_word_embeddings=False, n_layer=3),
}
ALL = CONFIGS | BY_FAMILY
EVERY = pytest.mark.parametrize("config", ALL.values(), ids=ALL.keys())


# The real model, instrumented ------------------------------------------------------------------------------


class Engine:
    """B sequences of an engine, all of the same length."""

    def __init__(
        self, model: Transformer, B: int, kind: type[StaticEngine] | type[RecomputeEngine] = StaticEngine
    ) -> None:
        self.engine = kind(model, make_limits(model.config))
        self.handles = [self.engine.open() for _ in range(B)]

    def step(self, num_new: int, num_logits: int = 1) -> None:
        if num_new:
            batch = StepBatch()
            for handle in self.handles:
                batch.add(Handle(handle), [1] * num_new, num_logits)
            self.engine.extend(batch)


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, depth=9) as counter:
        yield counter


_WITH_WEIGHTS = ("linear", "layer_norm", "rms_norm", "gelu", "einsum")


class Touched(TorchDispatchMode):
    """Logs which weights and cached tensors the operations of a step are given, in bytes."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self._parameters = {p.data_ptr() for p in model.parameters()}
        self.weights: dict[int, int] = {}
        self.lookups: set[int] = set()
        self.kv = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        flat = [b for a in args for b in (a if isinstance(a, (tuple, list)) else (a,))]
        tensors = [a for a in flat if isinstance(a, torch.Tensor)]
        if name == "embedding":
            self.lookups.add(tensors[0].data_ptr())
        elif name == "scaled_dot_product_attention":
            self.kv += sum(t.nbytes for t in tensors[1:3])
        elif name in _WITH_WEIGHTS or (name == "add" and out.is_floating_point()):
            for t in tensors:
                if t.data_ptr() in self._parameters:
                    self.weights[t.data_ptr()] = t.nbytes
        return out


def touched(model: Transformer, B: int, before: int, num_new: int, num_logits: int) -> Touched:
    engine = Engine(model, B)
    engine.step(before)
    with Touched(model) as log:
        engine.step(num_new, num_logits)
    return log


# FLOPs -----------------------------------------------------------------------------------------------------


def same_flops(cost: StepCost, counter: FlopCounterMode, config: ModelConfig, B: int, N: int) -> None:
    """Assert that every part of the cost is what the counter saw in that part of the model."""
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    L = config.n_layer
    assert counts["Global"] == cost.model.flops(B, N)
    assert counts["Block.attn"] == L * cost.attention.flops(B, N)
    assert counts["Block.mlp"] == L * cost.mlp.flops(B, N)
    assert counts["Block"] == L * cost.layer.flops(B, N)
    assert counts["Global"] - counts["Block"] == cost.head.flops(B, N)


@EVERY
@pytest.mark.parametrize("B,before,num_new", [(3, 0, 2), (1, 8, 1), (4, 31, 1), (2, 4, 5)])
def test_flops_of_a_step_are_what_torch_counts(config: ModelConfig, B: int, before: int, num_new: int) -> None:
    """A prefill, decoding, and verifying, with logits after each new token."""
    engine = Engine(make_model(config), B)
    engine.step(before)
    with counting() as counter:
        engine.step(num_new, num_logits=num_new if before else 1)
    cost = extend(config, FP32, num_new) if before else prefill(config, FP32)
    same_flops(cost, counter, config, B, before + num_new)


@EVERY
@pytest.mark.parametrize("B,N", [(1, 1), (3, 9)])
def test_forward_and_the_naive_step_are_counted_too(config: ModelConfig, B: int, N: int) -> None:
    model = make_model(config)
    with counting() as counter:
        model(torch.zeros(B, N, dtype=torch.long))
    assert counter.get_total_flops() == extend(config, FP32, N).model.flops(B, N)  # logits at all N positions
    engine = Engine(model, B, RecomputeEngine)
    engine.step(N - 1)
    with counting() as counter:
        engine.step(1)
    assert counter.get_total_flops() == prefill(config, FP32).model.flops(B, N)


# Bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, dtype",
    [*((config, dtype) for config in CONFIGS.values() for dtype in ("float32", "bfloat16", "float16")),
     *((config, "float32") for config in BY_FAMILY.values())],
)  # fmt: skip
@pytest.mark.parametrize("B,before,num_new", [(1, 0, 1), (3, 31, 1), (2, 0, 9), (2, 5, 4)])
def test_bytes_are_those_of_the_tensors_that_a_step_reads(
    config: ModelConfig, dtype: str, B: int, before: int, num_new: int
) -> None:
    """Heads that share keys and values read them once, and every weight of every norm is read."""
    model = make_model(config).to(getattr(torch, dtype))
    fmt, N = FORMATS[dtype], before + num_new
    whole = num_new > 1 and before == 0
    cost = prefill(config, fmt) if whole else extend(config, fmt, num_new)
    log = touched(model, B, before, num_new, num_logits=1 if whole else num_new)
    assert sum(log.weights.values()) + log.kv == cost.model.bytes(B, N)
    assert log.kv == (kv_cache_layer(config, fmt) * config.n_layer)(B, N)
    # Everything was read but what is only looked up: wpe, and wte unless it is the output head.
    unread = {p.data_ptr() for p in model.parameters()} - log.weights.keys()
    assert unread <= log.lookups
    assert len(unread) == config.learned_positions + (not config.tie_word_embeddings)


@pytest.mark.parametrize("num_new", [1, 3, 8])
def test_windows_bound_what_a_step_reads(num_new: int) -> None:
    """Against a loop over the layers, the new tokens and the keys of each."""
    windows = (4, None, 4, 9)
    config = replace(BY_FAMILY["llama"], n_layer=4, layers=tuple(LayerKind(w, Rotary(6)) for w in windows))
    full = replace(config, layers=())
    for N in range(num_new, 30):
        reads = [range(max(0, N - num_new + 1 - (w or N)), N) for w in windows]
        cost = extend(config, FP32, num_new)
        outside = extend(full, FP32, num_new).model.flops(1, N) - num_new * 4 * N * 4 * config.attn_dim
        assert cost.model.bytes(1, N) == cost.model.bytes(1, 0) + sum(map(len, reads)) * 2 * config.kv_dim * 4
        assert cost.model.flops(1, N) == outside + sum(map(len, reads)) * num_new * 4 * config.attn_dim
        assert cost.attention.flops(1, N) == extend(full, FP32, num_new).attention.flops(1, N)  # the one without


@EVERY
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_bytes_are_those_of_quantized_tensors(config: ModelConfig, name: str) -> None:
    """Store every matrix that a step reads as the native engine does, the rest in float32, and weigh it."""
    total = 0
    for key, p in make_model(config).named_parameters():
        if "wpe" in key or ("wte" in key and not config.tie_word_embeddings):
            continue
        if p.dim() < 2:
            total += p.nbytes
            continue
        group = p.shape[1] if name == "int8" else 64
        padded = torch.nn.functional.pad(p, (0, -p.shape[1] % group))
        scales = padded.view(p.shape[0], -1, group).abs().amax(-1)
        if name == "int8":
            stored, grid = p.to(torch.int8), scales.nbytes
        else:
            nibbles = p.to(torch.int8) & 15
            stored = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
            zeros = torch.zeros(scales.shape, dtype=torch.uint8)
            grid = scales.to(torch.bfloat16).nbytes + zeros.nbytes
        total += stored.nbytes + grid
    assert decode(config, FORMATS[name]).model.bytes(1, 0) == total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_held_is_the_model_and_the_engines_cache(tiny_folder: Path, dtype: str) -> None:
    memory = answer(str(tiny_folder), Question(device="h100", dtype=dtype, batch=4))["memory"]
    model = make_model().to(getattr(torch, dtype))
    engine = StaticEngine(model, make_limits(max_num_seqs=4))
    assert memory["weight_bytes"] == sum(p.nbytes for p in model.parameters())
    assert memory["kv_cache_bytes"] == engine._cache.k.nbytes + engine._cache.v.nbytes
    assert memory["kv_cache_layer_bytes"] == engine._cache.k[0].nbytes + engine._cache.v[0].nbytes
    assert memory["fits"] is True
    assert answer("gpt2-xl", Question(device="t4", batch=64))["memory"]["fits"] is False


def test_published_numbers() -> None:
    gpt2 = PRESETS["gpt2"]
    for name, megabytes, tolerance in (
        ("float32", 494, 0.01), ("bfloat16", 247, 0.01), ("int8", 124, 0.01), ("int4", 68, 0.01),
    ):  # fmt: skip
        assert decode(gpt2, FORMATS[name]).model.bytes(1, 1) == pytest.approx(megabytes * 1e6, rel=tolerance)
    assert decode(gpt2, FP32).model.flops(1, 1) == pytest.approx(2 * 123.6e6, rel=0.01)  # 2 FLOPs a weight and token
    assert kv_cache_layer(gpt2, FORMATS["bfloat16"])(1, 1000) * 12 == pytest.approx(37e6, rel=0.01)
    assert kv_cache_layer(gpt2, FORMATS["int8"])(1, 1) == 2 * (768 + 12 * 4)  # bytes, and a scale a head


# Experts ---------------------------------------------------------------------------------------------------

MIXTURE = Experts(6, 2, 10, normalize=True, shared_width=7, shared_gate=True)
MIXED = replace(RMS, experts=MIXTURE, layers=(LayerKind(), LayerKind(experts=True)))
BIASED = replace(MIXED, experts=replace(MIXTURE, bias=True), activation="clamped_silu", sinks=True)
BESIDE = replace(
    RMS, experts=Experts(6, 2, 10, normalize=True, beside=True), norm_placement="both", bias=False,
    layers=(LayerKind(experts=True), LayerKind(experts=True, n_inner=28)),
)  # fmt: skip


@pytest.mark.parametrize("B,N", [(1, 1), (3, 9)])
@pytest.mark.parametrize("config", [MIXED, BESIDE], ids=["mixed", "beside"])
def test_flops_of_experts_are_what_torch_counts(config: ModelConfig, B: int, N: int) -> None:
    """Each token takes its experts alone, in a decode step and in a prefill."""
    engine, before = Engine(make_model(config), B), N - 1
    engine.step(before)
    with counting() as counter:
        engine.step(1)
    assert counter.get_total_flops() == decode(config, FP32).model.flops(B, N)
    engine = Engine(make_model(config), B)
    with counting() as counter:
        engine.step(N)
    assert counter.get_total_flops() == prefill(config, FP32).model.flops(B, N)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
def test_a_step_reads_the_experts_that_its_tokens_choose(name: str) -> None:
    fmt = FORMATS[name]
    cost = decode(MIXED, fmt)
    one = 2 * fmt.matrix_bytes(10, 16) + fmt.matrix_bytes(16, 10)
    none = cost.model.bytes(0, 0)
    assert cost.model.bytes(1, 0) == none + 2 * one
    assert cost.model.bytes(2, 0) == none + round((6 - 6 * (4 / 6) ** 2) * one)
    assert cost.model.bytes(1000, 0) == none + 6 * one == cost.weight_bytes
    assert prefill(MIXED, fmt).model.bytes(2, 3) - prefill(replace(MIXED, experts=MIXTURE), fmt).model.bytes(0, 0) == (
        round((6 - 6 * (4 / 6) ** 6) * one) + (kv_cache_layer(MIXED, fmt) * 2)(2, 3)
    )


@pytest.mark.parametrize("config", [MIXED, BIASED, BESIDE], ids=["mixed", "biased", "beside"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_experts_is_that_of_the_model(dtype: str, config: ModelConfig) -> None:
    fmt, model = FORMATS[dtype], make_model(config).to(getattr(torch, dtype))
    assert decode(config, fmt).weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    "case",
    [
        "qwen3_5",
        "qwen3_5_moe",
        "lfm2",
        "granitemoehybrid-mamba",
        "granitemoehybrid-mamba-experts",
        "nemotron_h",
        "nemotron_h-experts",
        "falcon_h1",
    ],
)
def test_a_step_reads_states_of_recurrent_layers(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from helpers.features import config_of

    config, fmt = config_of(case, tmp_path), FORMATS["float32"]
    with torch.device("meta"):
        model = Transformer(config)
    cost, state = decode(config, fmt), config.recurrence
    assert state is not None
    wte = 0 if config.tie_word_embeddings else 4 * config.vocab_size * config.n_embd
    assert cost.weight_bytes == sum(p.nbytes for p in model.parameters()) - wte
    per_token = 8 * len(config.kv_layers) * config.kv_dim
    per_sequence = 4 * len(config.recurrent_layers) * state.num_state
    assert cost.model.bytes(3, 50) - cost.model.bytes(3, 0) == 3 * 50 * per_token
    if config.experts is None:
        assert cost.model.bytes(3, 0) - cost.model.bytes(0, 0) == 3 * per_sequence
        products = (p for n, p in model.named_parameters() if p.dim() == 2 and not n.endswith((".conv", "wte.weight")))
        matrices = sum(p.numel() for p in products)
        per_layer = (
            2 * (2 + (state.rule == "delta")) * state.key_dim * state.inner_dim + 2 * state.taps * state.num_channels
        )
        head = config.vocab_size * config.n_embd if config.tie_word_embeddings else 0
        assert cost.model.flops(1, 0) == 2 * (matrices + head) + len(config.recurrent_layers) * per_layer


def test_the_expected_number_of_experts_is_that_of_uniform_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    for count, per_token, tokens in ((8, 2, 1), (8, 2, 4), (60, 4, 16)):
        expected = Chosen(count, per_token, Poly.of({(1, 0): 1}), 1000)(tokens, 0) / 1000
        scores = torch.rand(2000, tokens, count, generator=generator)
        found = scores.topk(per_token).indices.flatten(1)
        mean = sum(len(row.unique()) for row in found) / len(found)
        assert mean == pytest.approx(expected, rel=0.01)


def test_chosen_experts_print_as_a_term() -> None:
    some = decode(MIXED, FP32).model.bytes
    assert str(some).endswith(" + 1,920 chosen(2 of 6, 1 B)")
    assert str(some + some).endswith(" + 3,840 chosen(2 of 6, 1 B)")
    assert str(some * 3).endswith(" + 5,760 chosen(2 of 6, 1 B)")
    report = answer("random:gpt2", Question(device="h100"))
    assert "chosen" not in report["decode"]["model"]["bytes_formula"]


# Polynomials and predictions -------------------------------------------------------------------------------


def test_polynomials_print_as_formulas() -> None:
    p = Poly.of({(1, 2): 4000, (1, 1): 1, (0, 0): -100})
    assert str(p) == "4,000 B N^2 + 1 B N - 100"
    assert str(p + p * -1) == "0"
    assert str(Poly.of({(0, 0): -2})) == "-2"
    assert p(3, 10) == 4000 * 300 + 30 - 100
    some = Poly.of({(1, 1): 2, (0, 0): 1}, window=5) + Poly.of({(1, 1): 3})
    assert str(some) == "3 B N + 2 B min(N, 5) + 1"
    assert (some(2, 4), some(2, 9)) == (41, 75)
    assert p + Poly() == p == Poly.of({(0, 0): -100, (1, 1): 1, (1, 2): 4000})


@given(st.integers(1, 512), st.integers(1, 1023), st.sampled_from(sorted(FORMATS)), st.sampled_from(sorted(PRESETS)))
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less(B: int, N: int, dtype: str, preset: str) -> None:
    config, fmt, ceiling = PRESETS[preset], FORMATS[dtype], DEVICES["h100"]
    for cost in (prefill(config, fmt), decode(config, fmt), extend(config, fmt, 4)):
        here, longer, wider = (predict(cost.model, ceiling, fmt, b, n) for b, n in ((B, N), (B, N + 1), (B + 1, N)))
        for more in (longer, wider):
            assert more.seconds >= here.seconds
            assert more.flops > here.flops
            assert more.bytes > here.bytes
        assert here.seconds == max(here.memory_sec, here.compute_sec)
        assert here.bound_ratio >= 1
        assert (here.bound == "compute") == (here.intensity > ceiling.ridge(fmt, here.bytes))
        assert wider.seconds / (B + 1) <= here.seconds / B * (1 + 1e-12)  # a token of a larger batch is no dearer
    assert extend(config, fmt, 1) == decode(config, fmt)


def test_a_step_has_new_tokens() -> None:
    refuses(lambda: extend(TINY, FP32, 0), "num_new=0")


@given(st.integers(1, 64), st.integers(1, 1024), st.data())
@settings(max_examples=30, deadline=None)
def test_a_cache_never_costs_time(B: int, N: int, data: st.DataObject) -> None:
    num_new = data.draw(st.integers(1, min(N, 40)))
    g = generation(Setting(PRESETS["gpt2"], FP32, DEVICES["a100"], B, N), num_new)
    assert g["num_prompt_tokens"] + num_new == N + 1
    assert g["naive_sec"] >= g["cached_sec"]
    if num_new == 1:
        step = predict(prefill(PRESETS["gpt2"], FP32).model, DEVICES["a100"], FP32, B, N)
        assert g["cached_sec"] == g["naive_sec"] == step.seconds


def test_generation_adds_up_its_steps() -> None:
    unit = Ceiling("unit", 1e30, {"float32": 1.0}, "compute takes 1 s a FLOP")
    whole, one = prefill(TINY, FP32).model.flops, decode(TINY, FP32).model.flops
    g = generation(Setting(TINY, FP32, unit, 2, 10), 3)
    assert g["naive_sec"] == whole(2, 8) + whole(2, 9) + whole(2, 10)
    assert g["cached_sec"] == whole(2, 8) + one(2, 9) + one(2, 10)


PAGE = (ROOT / "docs" / "inference-math.md").read_text()


BAD = {
    "unknown model": (["gpt5", "--device", "t4"], "model 'gpt5' is unknown: use one of gpt2"),
    "missing preset": (["random:gpt5"], "model 'random:gpt5' is unknown"),
    "missing folder": (["./no/such"], "./no/such"),
    "missing user": (["~no-such-user/model.gguf"], "model '~no-such-user/model.gguf' is unknown"),
    "long name": (["a" * 5000 + ".gguf"], "is unknown: use one of gpt2"),
    "null byte": (["a\0b.gguf"], "is unknown"),
    "broken config": (["{broken}"], "n_embd=16 is not a multiple of n_head=3"),
    "unknown device": (["gpt2", "--device", "t5"], "device='t5' is unknown: use one of t4, l40s"),
    "batch 0": (["gpt2", "--batch", 0], "batch=0 is not an integer in [1,"),
    "no number": (["gpt2", "--batch", "nan"], "--batch"),
    "context 0": (["gpt2", "--context", 0], "context=0 is not an integer >= 1"),
    "long context": (["gpt2", "--context", 1025], "block_size=1024: use at most 1024"),
    "unknown dtype": (["gpt2", "--dtype", "int3"], "dtype='int3' is unknown"),
    "no bfloat16": (["gpt2", "--device", "t4", "--dtype", "bfloat16"], "no throughput on t4: use float32, float16"),
    "many new tokens": (["gpt2", "--context", 9, "--new-tokens", 10], "new_tokens=10 is more than context=9"),
    "no new tokens": (["gpt2", "--new-tokens", 0], "new_tokens=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, tiny_folder: Path, tmp_path: Path, case: str) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_folder / "config.json").read_text())
    edit_config(broken, n_head=3)
    arguments, message = BAD[case]
    code, out, err = run("roofline", *[str(a).format(tiny=tiny_folder, broken=broken) for a in arguments])
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("nanoinfer: error: ")
    assert err.count("\n") == 1


def test_tables_fit_80_columns_and_the_json_says_the_same(run: Run) -> None:
    flags = ("gpt2-xl", "--device", "H100", "--batch", 64)
    code, text, err = run("roofline", *flags)
    assert (code, err) == (0, "")
    assert max(map(len, text.splitlines())) <= 80
    code, out, err = run("roofline", *flags, "--json")
    r = json.loads(out)
    assert (code, err) == (0, "")
    assert (r["batch"], r["context_tokens"], r["dtype"]) == (64, 1024, "bfloat16")
    for step in ("prefill", "decode"):
        assert f"{r[step]['bound']}-bound, {r[step]['bound_ratio']:,.2f} times" in text
        assert f"{si(r[step]['step_sec'], 's')} a step, {r[step]['tokens_per_sec']:,.0f} tokens/s" in text
        assert r[step]["layer"]["flops_formula"] in text


def test_a_step_that_the_caches_hold_has_their_speed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes = {1 << 27: 60e9, 1 << 30: 30e9}
    ceiling = Ceiling("here", 30e9, {"float32": 3e11, "int8": 6e12}, "test", bandwidth_by_bytes=by_bytes)
    monkeypatch.setattr("nanoinfer.roofline.report.find_device", lambda *args: ceiling)
    arguments = ("gpt2", "--dtype", "int8", "--context", 32)
    decoding = json.loads(run("roofline", *arguments, "--json")[1])["decode"]
    assert decoding["bandwidth_bytes_per_sec"] == 60e9
    assert decoding["ridge_flops_per_byte"] == 6e12 / 60e9
    assert decoding["memory_sec"] == decoding["model"]["bytes"] / 60e9
    assert decoding["tokens_per_sec"] == pytest.approx(60e9 / decoding["model"]["bytes"], rel=1e-12)
    text = run("roofline", *arguments)[1]
    assert "on here: 30 GB/s, 6 TFLOP/s in int8, ridge at 200.0 FLOP/B" in text
    assert text.count("the caches hold some of the bytes: 60 GB/s, ridge at 100.0 FLOP/B") == 2
    assert max(map(len, text.splitlines())) <= 80


def test_models_are_shapes_without_weights(run: Run, tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()  # only config.json is read
    r = json.loads(run("roofline", tiny_folder, "--device", "t4", "--dtype", "float32", "--json")[1])
    assert r["shape"]["n_embd"] == TINY.n_embd
    assert r["decode"]["model"]["flops"] == decode(TINY, FORMATS["float32"]).model.flops(1, TINY.block_size)
    assert json.loads(run("roofline", "random:gpt2", "--device", "t4", "--json")[1])["shape"]["n_layer"] == 12


def test_a_nanogpt_checkpoint_has_its_shape_inside(run: Run, tmp_path: Path) -> None:
    config = replace(TINY, bias=False, activation="gelu")
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
    arguments = {n: getattr(config, n) for n in names} | {"dropout": 0.0}
    torch.save({"model": make_model(config).state_dict(), "model_args": arguments}, tmp_path / "ckpt.pt")
    r = json.loads(run("roofline", tmp_path / "ckpt.pt", "--device", "a100", "--json")[1])
    assert r["decode"]["model"]["bytes"] == decode(config, FORMATS["bfloat16"]).model.bytes(1, 32)


def test_a_pipe_without_unicode_gets_plain_characters() -> None:
    command = [sys.executable, "-c", "from nanoinfer.cli import main; main()", "roofline", "gpt2", "--device", "t4"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "40"}
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    assert done.stdout.isascii()
    assert b"memory-bound" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_si() -> None:
    assert [si(v, "s") for v in (0.00093, 999.96e-6, 1.5, 0)] == ["930 us", "1 ms", "1.5 s", "0 us"]
    assert [si(v, "B") for v in (3115000000, 999, 12e18)] == ["3.115 GB", "999 B", "12,000 PB"]


WORKED = re.findall(r"^\| [^|]+ \| `(\.[\w.\[\]]+)` \|(.+)\|$", PAGE, re.M)
COLUMNS = [(1, 32), (1, 1024), (64, 32), (64, 1024)]


@pytest.mark.slow
def test_the_worked_numbers_of_the_page_are_what_the_code_computes() -> None:
    question = Question(device="h100")
    answers = [answer("gpt2-xl", replace(question, batch=B, context=N)) for B, N in COLUMNS]
    assert len(WORKED) >= 20
    prefixes = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "m": 1e-3, "u": 1e-6}
    for path, cells in WORKED:
        for cell, r in zip(cells.split("|"), answers, strict=True):
            value: Any = r
            for key in path[1:].split("."):
                value = value[key]
            if isinstance(value, str):
                assert cell.strip() == value, path
                continue
            match = re.fullmatch(r"([\d,.]+)(?: ([kMGTmu]?)(?:B|s|FLOP)?)?", cell.strip())
            assert match, f"{path}: {cell}"
            shown = float(match[1].replace(",", "")) * prefixes[match[2] or ""]
            assert shown == pytest.approx(value, rel=6e-4, abs=0), f"{path}: {cell} is {value}"


def test_the_pages_devices_are_the_table_in_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d.]+|-) \| ([\d.]+|-) \| ([\d.]+|-) \|", PAGE, re.M)
    assert [row[0] for row in rows] == list(DEVICES)
    for name, bandwidth, *rates in rows:
        device = DEVICES[name]
        assert float(bandwidth.replace(",", "")) * 1e9 == device.bandwidth_bytes_per_sec
        for dtype, rate in zip(("float32", "bfloat16", "float16"), rates, strict=True):
            assert device.flops_per_sec.get(dtype) == (None if rate == "-" else pytest.approx(float(rate) * 1e12))


DOCS = ROOT / "docs"


@pytest.mark.parametrize("table, page", [("models", "models.md"), ("presets", "inference-math-families.md")])
def test_a_page_shows_what_the_command_prints(table: str, page: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "model_tables.py"), table]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"\n\n{printed}\n" in (DOCS / page).read_text()
    assert f"python benchmarks/model_tables.py {table}" in (DOCS / page).read_text()


def test_the_pages_show_what_was_found_about_files_of_others() -> None:
    """docs/results/published.json is written by tests/published."""
    tables = runpy.run_path(str(ROOT / "benchmarks" / "model_tables.py"))
    assert f"\n{tables['exceptions']()}\n" in (DOCS / "models.md").read_text()
    page = (DOCS / "gguf.md").read_text()
    assert tables["architectures"](page) == page


def test_the_table_lists_exactly_the_families() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "models.md").read_text(), re.M)
    assert rows == ["model_type", *FAMILIES]
    shown = re.findall(r"^\| `([\w.-]+)` \| [\d,]+ M \|", (DOCS / "inference-math-families.md").read_text(), re.M)
    assert shown == list(PRESETS)


def test_the_worked_example_is_the_file() -> None:
    page = (DOCS / "adding-a-family.md").read_text()
    source = (ROOT / "src" / "nanoinfer" / "models" / "families" / "mistral.py").read_text()
    (shown,) = re.findall(r"```python\n(STARCODER2 = .*?)```", page, re.S)
    without = re.sub(r" +#.*", "", shown)
    assert "".join(without.split()) in "".join(source.split())
    (lines,) = re.findall(r"in (\d+) lines", page)
    assert int(lines) == len(shown.splitlines())
    cases = re.findall(r"```text\n(\"starcoder2\".*?)```", page, re.S)[0].splitlines()
    assert all(line in (ROOT / "tests" / "helpers" / "families.py").read_text() for line in cases)
