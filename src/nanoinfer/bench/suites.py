"""The suites: what each measures, in the shapes of the published tables that it corresponds to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanoinfer.bench.case import MIXED_HIGH, Case
from nanoinfer.bench.results import BEST_PEER
from nanoinfer.config import ModelConfig, SchedulerConfig
from nanoinfer.engines.registry import ENGINES

_Format = tuple[str, str, str | None]  # backend, dtype, quantization


@dataclass(frozen=True)
class Options:
    """How carefully to measure."""

    rounds: int = 3
    """Timed runs of each case."""
    max_warmups: int = 3
    """Untimed runs until two in a row agree within 10%."""
    max_case_sec: float = 6.0
    """A case that has been timed for this long gets no further round; every case gets one."""
    vary_prompts: bool = False
    """Every round has prompts of its own, the same for all cases of a shape."""
    verify: bool = False
    """Our engines: compare logits with float32's before timing, and measure the cost of verifying 5 tokens."""
    budget_sec: float = math.inf
    """No further backend is loaded after this time; those that are loaded finish."""
    together: bool = True
    """The backends of a shape are loaded together and take turns. Otherwise each is measured to its end, and its row
    kept, before the next one is loaded."""


@dataclass(frozen=True)
class Suite:
    """A set of cases, and how to measure them."""

    baseline: str
    """Backend that speed-ups are over, in the same shape and dtype."""
    cases: Callable[[str, ModelConfig, Sequence[str], bool], list[Case]]
    """(model, its shape, our engines here, quick) -> cases, those of one shape together."""
    options: Options = Options()
    model: str = "random:gpt2"
    device: str | None = None
    """Kind of device that it needs; None: any."""


def _in_formats(shape: Case, formats: Sequence[_Format]) -> list[Case]:
    """Return one shape in several formats."""
    return [replace(shape, backend=name, dtype=d, quantization=q) for name, d, q in formats]


def _by_bits(cases: Sequence[Case]) -> list[Case]:
    """Return cases of one shape with those in as many bits together: they are loaded and compared together."""
    return sorted(cases, key=lambda c: -c.bits)


def _ladder(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    batches = (1, 4, 16) if quick else (1, 4, 16, 64, 256, 512)
    rungs = [(engine, "float32", q) for engine in engines for q in (None, *ENGINES[engine].quantizations)]
    shape = Case(engines[-1], model, prompt_tokens=32, output_tokens=8 if quick else 16)
    return [case for b in batches for case in _in_formats(replace(shape, batch=b), rungs)]


def _drafts(model: str, config: ModelConfig) -> list[str]:
    """Return the drafts to measure with a model: one about a tenth of its size, a smaller one, prompt lookup."""
    source = model.split(":")[1] if model.startswith("wide:") else model
    if source == "shakespeare":
        small = ["shakespeare-draft", "prompt-lookup"]
        return ["wide:shakespeare-draft:gpt2", *small] if config.n_embd >= 1024 else small
    if source.removeprefix("openai-community/") in ("gpt2-medium", "gpt2-large", "gpt2-xl"):
        return ["gpt2", "distilbert/distilgpt2", "prompt-lookup"]
    return ["prompt-lookup"]


def _speculative(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    """Fixed k and auto beside plain decoding, by draft and format; sampled, repeating, in batches, unpredictable."""
    best = "native" if "native" in engines else engines[-1]
    drafts = _drafts(model, config)
    small: str | None = next(iter(ENGINES[best].quantizations), None)
    text = Case(best, model, "float32", small, workload="text", prompt_tokens=96, output_tokens=32 if quick else 64)
    ks: list[int | str] = [4, "auto"] if quick else [2, 4, 8, "auto"]
    few: list[int | str] = [4, "auto"]
    cases = [c for draft in drafts for c in _with(text, draft, ks)]
    if not quick:
        half, single = replace(text, dtype="bfloat16", quantization=None), replace(text, quantization=None)
        cases += [c for draft in dict.fromkeys((drafts[0], drafts[-1])) for c in _with(half, draft, ks)]
        cases += _with(single, drafts[0], few)
    sampled = _with(replace(text, sampler="sampled"), drafts[0], ks)
    cases += [*sampled, *(replace(c, speculate_rule="reject") for c in sampled[1:] if c.speculate_k in few)]
    cases += _with(replace(text, workload="copy"), drafts[-1], ks)
    hot = replace(text, workload="uniform", sampler="hot", prompt_tokens=32)
    cases += [c for draft in drafts for c in _with(hot, draft, few)]
    if not quick:
        several, many = replace(text, batch=8), replace(hot, batch=32, output_tokens=32)
        for draft in dict.fromkeys((drafts[0], drafts[-1])):
            cases += [*_with(several, draft, few), *_with(many, draft, ["auto"])]
    return by_shape(list(dict.fromkeys(cases)))


def by_shape(cases: Sequence[Case]) -> list[Case]:
    """Return cases with those of one shape together, in the order of the first of each."""
    shapes = list(dict.fromkeys(c.shape for c in cases))
    return sorted(cases, key=lambda c: shapes.index(c.shape))


def _with(plain: Case, draft: str, ks: Sequence[int | str]) -> list[Case]:
    """Return a case without and with a draft."""
    return [plain, *(replace(plain, draft=draft, speculate_k=k) for k in ks)]


_PEERS: list[_Format] = [
    *((f"transformers-{cache}", dtype, None) for cache in ("dynamic", "static") for dtype in ("float32", "bfloat16")),
    ("llama.cpp", "float32", None), ("llama.cpp", "bfloat16", None),
    *(("llama.cpp", "float32", q) for q in ("Q8_0", "Q4_0")),
    *((name, "bfloat16", q) for name in ("openvino", "vllm") for q in (None, "int8", "int4")),
]  # fmt: skip


def _peers(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    best = engines[-1]
    ours: list[_Format] = [(best, "float32", None), (best, "bfloat16", None)]
    ours += [(best, "float32", q) for q in ENGINES[best].quantizations]
    short = Case(best, model, prompt_tokens=32, output_tokens=16 if quick else 32)
    if quick:
        return _by_bits(_in_formats(short, ours + _PEERS))
    long = replace(short, prompt_tokens=min(1000, config.block_size - 24), output_tokens=16)
    # A case takes minutes in float32, so this has only the formats used for speed.
    light = [f for f in ours + _PEERS if f[1:] != ("float32", None) and f[0] != "transformers-static"]
    shapes = (short, replace(short, batch=8), replace(short, batch=64), long)
    cases = [case for shape in shapes for case in _by_bits(_in_formats(shape, ours + _PEERS))]
    return cases + _by_bits(_in_formats(replace(long, batch=8), light))


def _serving(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    """Many requests: of all lengths, with a common prefix, beside a long prompt that arrives, steadily decoding."""
    best, room = engines[-1], config.block_size
    small: str | None = next(iter(ENGINES[best].quantizations), None)
    # In transformers, which pads all sequences to the longest, the mix takes minutes (docs/log/2026-11.md).
    formats = [(best, "bfloat16", None), *((best, "float32", q) for q in ENGINES[best].quantizations)]
    formats += [f for f in _PEERS if f[1:] != ("float32", None) and not f[0].startswith("transformers")]
    longest = min(64 if quick else MIXED_HIGH, room // 2)
    mixed = Case(best, model, batch=64, prompt_tokens=longest, output_tokens=longest, workload="mixed")
    one = replace(mixed, quantization=small)
    prefix = replace(one, batch=200, prompt_tokens=min(520, room - 16), output_tokens=10, workload="prefix")
    arrival = replace(one, batch=9, prompt_tokens=min(1000, room - 24), output_tokens=64, workload="arrival")
    steady = replace(one, prompt_tokens=32, output_tokens=32, workload="uniform")
    arrivals, batches = [arrival, replace(arrival, target_step_ms=SchedulerConfig.target_step_ms)], [64, 512]
    if quick:
        formats = [f for f in formats if f[2] in (small, "int8", "Q8_0")]
        mixed, prefix = replace(mixed, batch=8), replace(prefix, batch=8, prompt_tokens=min(120, room - 16))
        arrival = replace(arrival, prompt_tokens=min(256, room - 24), output_tokens=16)
        arrivals, batches = [arrival], [16]
    cases = [prefix, replace(prefix, prefix_caching=True), *arrivals, replace(arrival, max_num_batched_tokens=64)]
    return [*_by_bits(_in_formats(mixed, formats)), *cases, *(replace(steady, batch=b) for b in batches)]


GPU_LARGE = "random:gpt2-xl"
# Engines of a GPU, by name: one that does not exist here is a row with its error.
_GPU_BEST: list[_Format] = [(name, "bfloat16", None) for name in ("cuda_graph", "triton")]
_GPU_SMALL: list[_Format] = [("triton", "bfloat16", q) for q in ("int8", "int4")]
_GPU_SLOW: list[_Format] = [(name, "bfloat16", None) for name in ("compiled", "transformers-static")]
_GPU_PLAIN: list[_Format] = [(name, "bfloat16", None) for name in ("static", "transformers-dynamic")]
_GPU_HALF = [*_GPU_BEST, *_GPU_PLAIN, *_GPU_SMALL, *_GPU_SLOW, ("recompute", "bfloat16", None)]
_GPU_EXACT: list[_Format] = [(name, "float32", None) for name in ("static", "cuda_graph", "triton")]


def _gpu(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    """What is worth most first, for short GPU time; float32, to compare tokens, where it costs little.

    The quick cases are the first of the others, so that a full run continues a quick one.
    """
    small = Case("static", model, prompt_tokens=32)
    large, many = replace(small, model=GPU_LARGE), replace(small, batch=512)
    plan: list[tuple[Case, Sequence[_Format]]] = [(shape, _GPU_BEST) for shape in (small, large, many)]
    plan += [(many, _GPU_PLAIN[:1]), (small, [*_GPU_EXACT, *_GPU_PLAIN, *_GPU_SMALL])]
    plan += [(large, [*_GPU_PLAIN, *_GPU_SMALL]), (small, _GPU_SLOW)]
    if not quick:
        every: list[_Format] = [*_GPU_EXACT, *((f[0], "float32", None) for f in _GPU_HALF)]
        others: list[_Format] = [(f"transformers-{cache}", "float16", None) for cache in ("dynamic", "static")]
        plan += [(replace(small, batch=64), _GPU_HALF), (many, _GPU_HALF), (large, [*_GPU_EXACT, *_GPU_HALF])]
        plan += [(replace(small, batch=8), [*every, *_GPU_HALF]), (small, [*every, *_GPU_HALF, *others])]
    return list(dict.fromkeys(case for shape, formats in plan for case in _in_formats(shape, formats)))


SUITES: dict[str, Suite] = {  # the published figures that each corresponds to: docs/benchmarks.md
    "ladder": Suite("recompute", _ladder),
    "peers": Suite("transformers-dynamic", _peers),
    "serving": Suite(BEST_PEER, _serving),
    "speculative": Suite(  # acceptance depends on the passage: all count
        "native", _speculative, Options(rounds=6, max_case_sec=30.0, vary_prompts=True), "wide:shakespeare:gpt2-large"
    ),
    "gpu": Suite("static", _gpu, Options(rounds=5, verify=True, together=False), device="cuda"),
}
