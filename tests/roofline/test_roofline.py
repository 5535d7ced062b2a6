"""FLOPs and bytes against counts taken from the real model, and the times that follow from them.

FLOPs come from torch's counter around a real step, bytes from a log of the tensors that the step's
operations are given. The counter has no formula for the fused attention kernel of CPUs, so attention runs as
its two matrix products (SDPBackend.MATH); both count the whole rectangle of scores, masked or not.
"""

from __future__ import annotations

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

from helpers.models import TINY, make_limits, make_model, refuses
from nanoinfer.config import Experts, Latent, LayerKind, ModelConfig, Rotary
from nanoinfer.engines.base import Handle, StepBatch
from nanoinfer.engines.recompute import RecomputeEngine
from nanoinfer.engines.static import StaticEngine
from nanoinfer.models.presets import PRESETS
from nanoinfer.models.transformer import Transformer
from nanoinfer.roofline.arithmetic import Chosen, Poly, StepCost, decode, extend, kv_cache_layer, prefill
from nanoinfer.roofline.ceilings import DEVICES, Ceiling
from nanoinfer.roofline.formats import FORMATS
from nanoinfer.roofline.report import Question, Setting, answer, generation, predict

FP32 = FORMATS["float32"]
RMS = replace(TINY, bias=False, norm="rms", gated_mlp=True, activation="silu", learned_positions=False, n_inner=40)
WIDE = 64  # a window that holds every sequence of these tests
FAMILIES = {
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
ALL = CONFIGS | FAMILIES
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
     *((config, "float32") for config in FAMILIES.values())],
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
    config = replace(FAMILIES["llama"], n_layer=4, layers=tuple(LayerKind(w, Rotary(6)) for w in windows))
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
