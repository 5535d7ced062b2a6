"""The engine of fused kernels with the models of all families, on the CPU under Triton's interpreter."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("transformers")

from triton.runtime import interpreter

from helpers import families
from helpers.engines import generate, make_core
from helpers.families import CASES
from helpers.features import FEATURES
from helpers.models import make_limits, refuses
from helpers.recorded import FakeRecorder
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import EngineConfig
from nanoinfer.engines import registry
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.recompute import RecomputeEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.engines.triton_engine import TritonEngine
from nanoinfer.engines.triton_layers import FusedLinear, FusedStack
from nanoinfer.kernels.triton import products
from nanoinfer.kernels.triton.quantize import dequantize
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    *([] if products.INTERPRETED else [pytest.mark.gpu]),  # where there is a CUDA device, the engine runs on it
]
QUANTIZED = ("llama", "gemma3", "qwen3", "olmo2", "gpt_neox", "granite", "bitnet", "gpt_oss",
             "gemma4-experts", "qwen3_5")  # fmt: skip
"""Models with norms of all places, with biases and without, with a gate and without, with a factor of the residuals,
with experts: biases in them, and an MLP beside them; with states."""
DAILY = (("llama", "int4"), ("gpt_neox", "int4"), ("gpt_oss", "int8"))
RUN = [
    name for name, (_, config) in CASES.items()
    if "kv_lora_rank" not in config and not config.get("hidden_size_per_layer_input")
    and not name.startswith(("falcon_h1", "nemotron_h"))
]  # fmt: skip
"""The cases without latent attention, per-layer embeddings, attention beside a state and layers without an MLP, which
the engine refuses."""


def model_of(case: str, folder: Path) -> Transformer:
    """The first layer of each kind that a model has, and the last layer. All, if layers need others."""
    families.make_folder(case, folder)
    full = load_gpt(open_folder(folder))
    if full.config.differing is not None:
        return full.eval()
    kinds = [full.config.layer(i) for i in range(full.config.n_layer)]
    chosen = sorted({*map(kinds.index, kinds), full.config.n_layer - 1})
    layers = tuple(full.config.layer(i) for i in chosen)
    gpt = Transformer(replace(full.config, n_layer=len(chosen), layers=layers)).eval()
    state = full.state_dict()
    kept = {name: tensor for name, tensor in state.items() if ".h." not in name}
    for new, old in enumerate(chosen):
        start = f"transformer.h.{old}."
        kept |= {f"transformer.h.{new}.{n[len(start) :]}": t for n, t in state.items() if n.startswith(start)}
    gpt.load_state_dict(kept)
    gpt.tie_weights()
    return gpt


def make_engine(gpt: Transformer, quantization: str | None = None) -> TritonEngine:
    """An engine on the CUDA device, or without graphs: the interpreter's operations cannot be recorded."""
    config = EngineConfig(quantization=quantization, graph_memory=2**30)
    if not products.INTERPRETED:
        return TritonEngine(copy.deepcopy(gpt).cuda(), make_limits(gpt.config), config)
    return TritonEngine(gpt, make_limits(gpt.config), config, recorder=FakeRecorder(fail_at=0))


def run(engine: TritonEngine | RecomputeEngine) -> list[torch.Tensor]:
    """Prompts of 8 and 3 tokens, one token each together, one alone, four of one sequence, the last hidden state."""
    handles = [engine.open(), engine.open()]
    vocab = engine.config.vocab_size
    steps = [([0], [8]), ([1], [3]), ([0, 1], [1, 1]), ([1], [1]), ([0], [4])]
    found = []
    for seed, (chosen, counts) in enumerate(steps):
        ids = [(7 * i * i + 5 * i + 11 * seed + 1) % vocab for i in range(sum(counts))]
        batch = StepBatch([handles[i] for i in chosen], ids, counts, [1 if n == 8 else n for n in counts])
        found.append(engine.extend(batch).cpu().clone())
    return [*found, engine.hidden().cpu().clone()]


@pytest.mark.parametrize("case", RUN)
@pytest.mark.slow_if(lambda case: case != "llama3")
@pytest.mark.nightly_if(lambda case: case not in (*FEATURES[::4], "qwen3_5"))  # test_triton_kernels.py has the others
def test_logits_are_those_of_the_naive_loop(case: str, tmp_path: Path) -> None:
    gpt = model_of(case, tmp_path)
    expected = run(RecomputeEngine(gpt, make_limits(gpt.config)))
    engine = make_engine(gpt)
    for a, b in zip(run(engine), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2_moe"])
def test_a_long_prompt_runs_on_pytorch_before_a_fused_step(case: str, tmp_path: Path) -> None:
    """Modules whose matrices are kernels in the second step have PyTorch's products in the first: 20 float32 rows."""
    gpt = model_of(case, tmp_path)
    ids = [(7 * i * i + 5 * i + 1) % gpt.config.vocab_size for i in range(21)]
    expected = gpt(torch.tensor([ids]))[0]
    engine = make_engine(gpt)
    handle = engine.open()
    first = engine.extend(StepBatch([handle], ids[:20], [20], [20])).cpu().clone()
    found = torch.cat((first, engine.extend(StepBatch([handle], ids[20:], [1], [1])).cpu()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("case", QUANTIZED)
@pytest.mark.nightly_if(lambda case, quantization: (case, quantization) not in DAILY)
def test_quantized_logits_are_those_of_a_model_with_the_values(case: str, quantization: str, tmp_path: Path) -> None:
    gpt = model_of(case, tmp_path)
    reference = copy.deepcopy(gpt)
    engine = make_engine(gpt, quantization)
    for layer, block in zip(engine._layers, reference.blocks, strict=True):
        for name, weight in layer.weights.items():
            block.get_submodule(name).weight.data = dequantize(weight).cpu()
    for name, module in engine.model.named_modules():
        if isinstance(module, FusedLinear):
            reference.get_submodule(name).weight.data = dequantize(module.weight).cpu()
        if isinstance(module, FusedStack):
            reference.get_submodule(name).weight.data = dequantize(module.packed).cpu()
    linear = [name for name, m in engine.model.named_modules() if isinstance(m, torch.nn.Linear) and m.weight.numel()]
    assert {name.split(".")[-1] for name in linear} <= {"lm_head", "router", "shared_gate"}
    reference.lm_head.weight = torch.nn.Parameter(dequantize(engine._head_weight).cpu(), requires_grad=False)
    expected = run(RecomputeEngine(reference, make_limits(reference.config)))
    for a, b in zip(run(engine), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.nightly  # tests/engines/test_engines.py has the greedy tokens of GPT-2's kind
@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3_moe"])
def test_greedy_tokens_are_those_of_the_naive_loop(case: str, tmp_path: Path) -> None:
    """Three texts of other lengths in one batch, past the windows."""
    gpt = model_of(case, tmp_path)
    prompts = [
        [(7 * i * i + 3 * seed + 1) % gpt.config.vocab_size for i in range(n)] for seed, n in enumerate((5, 1, 12))
    ]
    params = [SamplingParams(max_tokens=12, temperature=0)] * 3
    expected = generate(make_core(RecomputeEngine(gpt, make_limits(gpt.config))), prompts, params)
    assert generate(make_core(make_engine(gpt)), prompts, params) == expected


@pytest.mark.parametrize(
    ("case", "changes", "what"),
    [
        ("llama", {"activation": "clamped_silu"}, "activation=clamped_silu"),
        ("deepseek_v3", {}, "latent attention"),
        ("gemma4", {}, "per-layer embeddings"),
    ],
)
def test_a_model_is_refused_before_its_weights_are_read(
    case: str, changes: dict[str, str], what: str, tmp_path: Path
) -> None:
    families.make_folder(case, tmp_path)
    weights = open_folder(tmp_path)
    config = replace(weights.config, **changes)
    weights = replace(weights, config=config, read=lambda: pytest.fail("weights were read"))
    message = f"engine triton has no kernel for {what}: use engine=cuda_graph"
    refuses(lambda: registry.build(ENGINES["triton"], weights, EngineConfig(), "cpu"), message)


@pytest.mark.skipif(not products.INTERPRETED, reason="kernels are counted in Triton's interpreter")
def test_a_step_of_llamas_kind_has_7_kernels_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, names = make_engine(model_of("llama", tmp_path)), list[str]()
    handle, run = engine.open(), interpreter.GridExecutor.__call__

    def launched(self: interpreter.GridExecutor, *args: object, **kwargs: object) -> object:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    engine.extend(StepBatch([handle], [1, 2, 3], [3], [0]))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    engine.extend(StepBatch([handle], [4], [1], [1]))
    layer = ["product", "heads", "attention", "product", "product", "product", "product"]
    layers = layer * engine.config.n_layer
    assert names == [f"{name}_kernel" for name in ("begin", *layers, "norm", "product")]
