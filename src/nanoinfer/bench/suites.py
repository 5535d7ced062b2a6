"""The suites: what each measures, in the shapes of the published tables that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanoinfer.bench.case import MIXED_HIGH, Case
from nanoinfer.config import ModelConfig
from nanoinfer.engines.registry import ENGINES


@dataclass(frozen=True)
class Suite:
    """A set of cases, and how to read them."""

    name: str
    answers: str
    """Whose published figures it stands beside."""
    baseline: str
    """Backend that speed-ups are over, in the same shape and dtype."""
    cases: Callable[[str, ModelConfig, Sequence[str], bool], list[Case]]
    """(model, its shape, our engines here, quick) -> cases, those of one shape together."""
    rounds: int = 3
    max_case_sec: float = 6.0
    """A case that has been timed for this long gets no further round."""
    vary_prompts: bool = False
    """Whether every round has prompts of its own."""
    breakdown: bool = False
    model: str = "random:gpt2"
    """Model to measure, unless another is asked for."""
    device: str | None = None
    """Kind of device that it is about; None: any."""
    verify: bool = False
    """Also measure what verifying 5 tokens costs."""


def _ladder(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    batches = (1, 4, 16) if quick else (1, 4, 16, 64, 256, 512)
    rungs = [(engine, q) for engine in engines for q in (None, *ENGINES[engine].quantizations)]
    return [
        Case(engine, model, quantization=q, batch=b, prompt_tokens=32, output_tokens=8 if quick else 16)
        for b in batches
        for engine, q in rungs
    ]


def _kv_cache(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    best = engines[-1]
    room = config.block_size - 16
    sizes = (100,) if quick else (200, 400, 800)
    dtypes = ("float32", "bfloat16") if quick else ("float32", "bfloat16", "float16")
    shapes = [Case(best, model, d, prompt_tokens=8, output_tokens=min(n, room)) for n in sizes for d in dtypes]
    if not quick:
        shapes.append(Case(best, model, batch=10, prompt_tokens=8, output_tokens=min(1000, room)))
    return [replace(c, backend=name) for c in shapes for name in ("nanogpt", best)]


def _long(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    tokens = 96 if quick else config.block_size + config.block_size // 4
    return [Case(engine, model, prompt_tokens=8, output_tokens=tokens) for engine in engines]


def _throughput(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    batches = (8,) if quick else (1, 8, 32)
    cases = [
        Case(name, model, batch=b, prompt_tokens=32, output_tokens=32 if quick else 100)
        for b in batches
        for name in ("nanogpt", *engines)
    ]
    first = Case(engines[-1], model, prompt_tokens=32, output_tokens=32 if quick else 100)
    drafts = [replace(first, draft=draft) for draft in _drafts(model, config)]
    return [c for c in cases if c.batch == 1] + drafts + [c for c in cases if c.batch > 1]


def _drafts(model: str, config: ModelConfig) -> list[str]:
    """Return the drafts to measure with a model: the nearest to ten times as small, a smaller one, prompt lookup."""
    source = model.split(":")[1] if model.startswith("wide:") else model
    if source == "shakespeare":
        small = ["shakespeare-draft", "shakespeare-head", "prompt-lookup"]
        return ["wide:shakespeare-draft:gpt2", *small] if config.n_embd >= 1024 else small
    if source.removeprefix("openai-community/") in ("gpt2-medium", "gpt2-large", "gpt2-xl"):
        return ["gpt2", "distilbert/distilgpt2", "prompt-lookup"]
    return ["prompt-lookup"]


def _speculative(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    """Fixed k and auto beside plain decoding, by draft and format; sampled, repeating, in batches, unpredictable."""
    best, drafts = engines[-1], _drafts(model, config)
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
    shapes = list(dict.fromkeys(c.shape for c in cases))
    return sorted(dict.fromkeys(cases), key=lambda c: shapes.index(c.shape))  # those of one shape together


def _with(plain: Case, draft: str, ks: Sequence[int | str]) -> list[Case]:
    """Return a case without and with a draft."""
    return [plain, *(replace(plain, draft=draft, speculate_k=k) for k in ks)]


def _peers(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    best = engines[-1]
    long_prompt = min(1000, config.block_size - 24)
    short = Case(best, model, prompt_tokens=32, output_tokens=16 if quick else 32)
    if quick:
        return _everyone(short)
    long = replace(short, prompt_tokens=long_prompt, output_tokens=16)
    mixed = replace(short, batch=64, workload="mixed", prompt_tokens=MIXED_HIGH, output_tokens=MIXED_HIGH)
    cases = [
        case for shape in (short, replace(short, batch=8), replace(short, batch=64), long) for case in _everyone(shape)
    ]
    # Minutes a case in float32, and for the mix in transformers, which pads all texts to the longest (69 tokens/s where
    # the others make 200 and more: docs/log.md): so only the formats that people would use for speed.
    cases += [c for c in _everyone(replace(long, batch=8)) if _is_light(c)]
    return cases + [c for c in _everyone(mixed) if _is_light(c) and not c.backend.startswith("transformers")]


def _everyone(shape: Case) -> list[Case]:
    """Return one shape for our best engine and every peer, in the formats that each is used in."""
    formats: list[tuple[str, str, str | None]] = [
        (shape.backend, "float32", None),
        (shape.backend, "bfloat16", None),
        *((shape.backend, "float32", q) for q in ENGINES[shape.backend].quantizations),
        ("transformers-dynamic", "float32", None),
        ("transformers-dynamic", "bfloat16", None),
        ("transformers-static", "float32", None),
        ("transformers-static", "bfloat16", None),
        ("ctranslate2", "float32", None),
        ("ctranslate2", "float32", "int8"),
        ("llama.cpp", "float32", None),
        ("llama.cpp", "bfloat16", None),
        ("llama.cpp", "float32", "Q8_0"),
        ("llama.cpp", "float32", "Q4_0"),
    ]
    return [replace(shape, backend=name, dtype=d, quantization=q) for name, d, q in formats]


def _is_light(case: Case) -> bool:
    return (case.dtype != "float32" or case.quantization is not None) and case.backend != "transformers-static"


# Rungs of a GPU, by name: one that is not there is a row that says so.
_Format = tuple[str, str, str | None]  # backend, dtype, quantization
_GPU_RUNGS: list[_Format] = [
    ("static", "bfloat16", None),
    ("compiled", "bfloat16", None),
    ("cuda_graph", "bfloat16", None),
    ("triton", "bfloat16", None),
    ("triton", "bfloat16", "int8"),
    ("triton", "bfloat16", "int4"),
]
_GPU_PEERS: list[_Format] = [
    ("nanogpt", "bfloat16", None),
    ("transformers-dynamic", "bfloat16", None),
    ("transformers-static", "bfloat16", None),
]
_GPU_HALF: list[_Format] = [(name, "float16", None) for name in ("transformers-dynamic", "transformers-static")]
_GPU_EXACT: list[_Format] = [
    (name, "float32", None)
    for name in ("static", "compiled", "cuda_graph", "triton", "nanogpt", "transformers-dynamic", "transformers-static")
]
GPU_LARGE = "random:gpt2-xl"


def _gpu(model: str, config: ModelConfig, engines: Sequence[str], quick: bool) -> list[Case]:
    """GPT-2 at batch 1 and GPT-2 XL first: what a short lease of a GPU must answer. Then larger batches.

    Float32 runs where it costs little, so that every backend's words are compared before its speed is read.
    """
    short = Case("static", model, prompt_tokens=32, output_tokens=32 if quick else 64)
    large = replace(short, model=GPU_LARGE)
    exact_large = [f for f in _GPU_EXACT if f[0] in ("static", "cuda_graph", "triton")]
    quick_rungs = [f for f in _GPU_RUNGS if f[0] != "compiled"]
    plan: list[tuple[Case, list[_Format]]] = (
        [(short, exact_large + quick_rungs + _GPU_PEERS[1:2]), (large, quick_rungs + _GPU_PEERS[1:2]),
         (replace(short, batch=512), [_GPU_RUNGS[0], *_GPU_RUNGS[2:4]])]
        if quick else
        [(short, _GPU_EXACT + _GPU_RUNGS + _GPU_PEERS + _GPU_HALF), (large, exact_large + _GPU_RUNGS + _GPU_PEERS),
         (replace(short, batch=512), _GPU_RUNGS + _GPU_PEERS), (replace(short, batch=64), _GPU_RUNGS + _GPU_PEERS),
         (replace(short, batch=8), _GPU_EXACT + _GPU_RUNGS + _GPU_PEERS)]
    )  # fmt: skip
    return [replace(c, backend=name, dtype=d, quantization=q) for c, formats in plan for name, d, q in formats]


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "ladder",
            "nanoGPT-inference: throughput, time to first token and memory against batch size",
            "recompute",
            _ladder,
            breakdown=True,
        ),
        Suite(
            "kv-cache",
            "nanoGPT_KV_Cache (T4: 2.44x, 2.82x, 4.24x for gpt2, medium, large), building-from-scratch (up to 2.76x)",
            "nanogpt",
            _kv_cache,
            rounds=2,
        ),
        Suite(
            "long",
            "time per token at every position up to the context length and past it",
            "recompute",
            _long,
            rounds=1,
        ),
        Suite(
            "throughput",
            "CS229S: batch throughput with a cache over the naive loop (10x asked), latency with speculation (2x)",
            "nanogpt",
            _throughput,
        ),
        Suite(
            "peers",
            "what people would use instead, on the same weights",
            "transformers-dynamic",
            _peers,
        ),
        Suite(
            "speculative",
            "building-from-scratch: gpt2 to gpt2-large and gpt2-xl, k = 3 to 7, three dtypes",
            "native",
            _speculative,
            rounds=6,
            max_case_sec=30.0,  # how often a draft is right depends on the passage: all six are wanted
            vary_prompts=True,
            model="wide:shakespeare:gpt2-large",
        ),
        Suite(
            "gpu",
            "nanoGPT-inference's question on CUDA: the loop, a static cache, graphs, few kernels, and transformers",
            "static",
            _gpu,
            rounds=5,  # short ones: most of the time is loading
            device="cuda",
            verify=True,
        ),
    )
}
