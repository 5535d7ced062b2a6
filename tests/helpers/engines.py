"""Engines of the tests, and the naive loop that says what is correct: `naive_greedy`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from helpers.environment import INTERPRETED
from helpers.models import TINY, make_limits, submit, weights_of
from helpers.recorded import FakeRecorder
from helpers.scheduling import check_integrity
from nanoinfer import NanoinferError, SamplingParams
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.engines import registry
from nanoinfer.engines.base import Engine, StepBatch
from nanoinfer.engines.compiled import CompiledEngine, RunBlock
from nanoinfer.engines.cuda_graph import CudaGraphEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.sampler import sample
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import window_start

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
V = TINY.vocab_size
slow_if_interpreted = pytest.mark.slow_if(lambda name: name == "triton" and INTERPRETED)
nightly_if_interpreted = pytest.mark.nightly_if(lambda name: name == "triton" and INTERPRETED)
BLOCKS: defaultdict[tuple[str, ModelConfig], dict[tuple[torch.Size, int, bool, bool, bool], RunBlock]] = defaultdict(
    dict
)
"""What the compiled engines of all tests have compiled: most of their models have the same shapes."""


def make_engine(name: str, gpt: Transformer, max_num_seqs: int = 4, **options: Any) -> Engine:
    """Return an engine with options of EngineConfig. On a CPU, graphs are recordings of operations (recorded.py),
    blocks are traced only, and Triton's kernels are interpreted."""
    device, config = gpt.lm_head.weight.device, EngineConfig(max_num_seqs=max_num_seqs, graph_memory=2**30, **options)
    limits = make_limits(gpt.config, max_num_seqs)
    if name == "compiled":
        engine = CompiledEngine(gpt, limits, config, backend="inductor" if device.type == "cuda" else "eager")
        engine._compiled = BLOCKS[device.type, gpt.config]
        return engine
    if name == "cuda_graph" and device.type == "cpu":
        return CudaGraphEngine(gpt, limits, config, recorder=FakeRecorder())
    if name == "triton" and device.type == "cpu" and find_spec("triton"):
        from nanoinfer.engines.triton_engine import TritonEngine

        # Its kernels run in Triton's interpreter, whose work no recording sees: so there are none.
        return TritonEngine(gpt, limits, config, recorder=FakeRecorder(fail_at=0))
    spec = ENGINES[name]
    if (reason := spec.unavailable()) is not None:
        pytest.skip(f"engine {name}: {reason}")
    return registry.build(spec, weights_of(gpt), replace(config, graph_memory=None), str(device))


def make_core(engine: Engine, **options: int) -> Core:
    """Return a core whose steps do not depend on how long they take."""
    return Core(engine, Scheduler(engine, SchedulerConfig(target_step_ms=None, **options)), sample, None, V)


def generate(core: Core, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    requests = [submit(core, None, p, q, seed=7, end_token_ids=()) for p, q in zip(prompts, params, strict=True)]
    while core.unfinished:
        core.step()
        check_integrity(core.scheduler)
    core.reset_prefix_cache()  # another core may use the engine next
    return [[o.token_ids for o in core.output(r).outputs] for r in requests]


def naive_greedy(gpt: Transformer, prompt: list[int], max_tokens: int, stride: int | None = None) -> list[int]:
    """nanoGPT's generate at temperature 0, with the window of the sliding rule (stride 1 is its own crop).

    The matrices ask for the same tokens again and again: they are computed once for each model, by its weights.
    """
    weights = hashlib.sha256(b"".join(bytes_of(p) for p in gpt.parameters())).digest()
    key = (weights, gpt.config, tuple(prompt), max_tokens, stride)
    if key not in _NAIVE:
        _NAIVE[key] = _naive_greedy(gpt, prompt, max_tokens, stride)
    return list(_NAIVE[key])


_NAIVE: dict[Any, list[int]] = {}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _naive_greedy(gpt: Transformer, prompt: list[int], max_tokens: int, stride: int | None) -> list[int]:
    """Where one run of the model over the text and the tokens of `native` chooses the same tokens, so does the loop:
    in the reference model, no position depends on a later one. From the first other token on, the loop runs."""
    ids, guess = list(prompt), _guess(gpt, prompt, max_tokens)
    if guess:
        with torch.inference_mode():
            logits = gpt(torch.tensor([[*prompt, *guess[:-1]]], device=gpt.lm_head.weight.device))[0, len(prompt) - 1 :]
        same = [a == b for a, b in zip(logits.argmax(-1).tolist(), guess, strict=True)]
        ids += guess[: [*same, False].index(False)]
    for _ in range(len(prompt) + max_tokens - len(ids)):
        if stride is None and len(ids) > gpt.config.block_size:
            break
        start = window_start(len(ids), gpt.config.block_size, stride or 1)
        with torch.inference_mode():
            logits = gpt(torch.tensor([ids[start:]], device=gpt.lm_head.weight.device))
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _guess(gpt: Transformer, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the tokens of `native` within the context, or none if it is not built or refuses the model."""
    num_tokens = min(max_tokens, gpt.config.block_size + 1 - len(prompt))
    device, dtype = gpt.lm_head.weight.device, gpt.lm_head.weight.dtype
    if num_tokens < 4 or (device.type, dtype) != ("cpu", torch.float32) or ENGINES["native"].unavailable():
        return []
    try:
        engine = make_engine("native", gpt, 1)
    except NanoinferError:
        return []
    handle, ids = engine.open(), list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        new = ids if len(ids) == len(prompt) else ids[-1:]
        ids.append(int(engine.extend(StepBatch([handle], new, [len(new)], [1]))[0].argmax()))
    return ids[len(prompt) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(V, (length,), generator=generator).tolist()


BATCHES = {
    "alone": [5],
    "twice the same": [5, 5],
    "unequal lengths": [1, 9, 4, 20],
    "more than fit": [3, 17, 1, 8, 8, 2, 11],
}
