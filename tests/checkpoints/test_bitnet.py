"""BitNet's folders: packed ternary matrices and inputs of 8 bits, against transformers' layers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
integrations = pytest.importorskip("transformers.integrations")  # of which `bitnet` takes seconds to import

from safetensors.torch import load_file, save_file  # noqa: E402

from helpers.engines import generate, make_core, make_engine, naive_greedy  # noqa: E402
from helpers.families import SMALL  # noqa: E402
from helpers.models import edit_config, make_limits, refuses  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.checkpoints import packed  # noqa: E402
from nanoinfer.checkpoints.gguf import export as gguf_export  # noqa: E402
from nanoinfer.checkpoints.gpt_loading import load_gpt  # noqa: E402
from nanoinfer.checkpoints.huggingface import open_folder, save  # noqa: E402
from nanoinfer.config import EngineConfig, ModelConfig  # noqa: E402
from nanoinfer.engines import registry  # noqa: E402
from nanoinfer.engines.base import StepBatch  # noqa: E402
from nanoinfer.engines.registry import ENGINES  # noqa: E402
from nanoinfer.models.layers import rounded  # noqa: E402
from nanoinfer.roofline.formats import find_shape  # noqa: E402
from nanoinfer.utils.arrays import to_numpy  # noqa: E402

SHAPE = SMALL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
IDS = [(7 * i * i + i) % 61 for i in range(60)]
TEXTS = torch.tensor(IDS).view(20, 3)
"""Short ones: an input that is rounded to another integer changes all later tokens a little."""
CASES = {  # linear class, scale of the matrices, a family
    "multiplied": ("autobitlinear", 0.0625, "BitNetConfig"),
    "divided": ("bitlinear", 12.0, "BitNetConfig"),
    "llama": ("autobitlinear", 0.09375, "LlamaConfig"),
}


def make_folder(case: str, folder: Path) -> Any:
    """Save a random model with packed ternary matrices; return the model of transformers."""
    kind, scale, name = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**SHAPE)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    given = transformers.BitNetQuantConfig(linear_class=kind)
    integrations.bitnet.replace_with_bitnet_linear(model, modules_to_not_convert=["lm_head"], quantization_config=given)
    stored = {}
    with torch.no_grad():
        for p in model.parameters():
            if p.device.type != "meta":
                p.copy_(torch.randn_like(p) * 0.3 + float(p.dim() == 1))
        for path, layer in model.named_modules():
            if isinstance(layer, (integrations.bitnet.BitLinear, integrations.bitnet.AutoBitLinear)):
                codes = torch.randint(-1, 2, (layer.out_features, layer.in_features))
                stored[f"{path}.weight"] = integrations.bitnet.pack_weights(codes.clone())
                stored[f"{path}.weight_scale"] = layer.weight_scale = torch.tensor([scale])
                values = codes.float() if kind == "autobitlinear" else stored[f"{path}.weight"]
                layer.weight = torch.nn.Parameter(values, requires_grad=False) if values.is_floating_point() else values
                layer.dtype = torch.float32
    folder.mkdir()
    plain = {k: v for k, v in model.state_dict().items() if k not in stored}
    save_file({k: v.contiguous() for k, v in (plain | stored).items()}, folder / "model.safetensors")
    fields = config.to_dict() | {"quantization_config": {"quant_method": "bitnet", "linear_class": kind}}
    (folder / "config.json").write_text(json.dumps(fields))
    return model


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """transformers compiles its layers, which takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return the model of a case and its folder, which are made once."""

    @functools.cache
    def make(case: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("bitnet") / case
        return make_folder(case, folder), folder

    return make


def assert_close(found: Any, expected: Any) -> None:
    """Where a product differs in its last bit, an input may be rounded to the next integer: in few tokens."""
    error = np.abs(np.asarray(found) - np.asarray(expected)).max(-1)
    assert np.quantile(error, 0.7) < 1e-4, error
    assert error.max() < 0.1 * np.asarray(expected).std(), error


def native(folder: Path, **options: Any) -> Any:
    """Return the logits of engine native for TEXTS, (20, 3, V)."""
    llm = LLM(str(folder), engine="native", max_num_seqs=20, **options)
    batch = StepBatch([llm.engine.open() for _ in TEXTS], IDS, [3] * 20, [3] * 20)
    return to_numpy(llm.engine.extend(batch)).reshape(20, 3, -1)


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, folder_of: Callable[[str], tuple[Any, Path]]) -> None:
    model, folder = folder_of(case)
    weights = open_folder(folder)
    assert weights.config.rounded_inputs
    expected = model(TEXTS).logits
    assert expected.std() > 0.5
    gpt = load_gpt(weights)
    assert_close(gpt(TEXTS), expected)
    assert_close(native(folder, dtype="float32"), expected)
    plain = load_gpt(open_folder(folder))
    for part in plain.modules():
        part._forward_pre_hooks.clear()
    assert (plain(TEXTS) - expected).abs().median() > 1e-3  # rounding matters


@torch.inference_mode()
def test_native_computes_in_two_bits(folder_of: Callable[[str], tuple[Any, Path]]) -> None:
    """Activations of 8 bits with one scale and integers: the same values as in float32."""
    model, folder = folder_of("multiplied")
    formats = open_folder(folder).block_formats
    assert {f for parts in formats.values() for f, _ in parts} == {"tq2_0"}
    assert len(formats) == 2 * 5
    expected = model(TEXTS).logits
    assert_close(native(folder, kv_cache_dtype="float32"), expected)
    assert not open_folder(folder_of("divided")[1]).block_formats  # 1 / 12 is no float16


@pytest.mark.parametrize(
    "options, limit",
    [({"dtype": "bfloat16"}, 0.1), ({"dtype": "float16"}, 0.1), ({"quantization": "int8"}, 0.1),
     ({"quantization": "int4"}, 0.3), ({"kv_cache_dtype": "int8"}, 0.1)],
)  # fmt: skip
@torch.inference_mode()
def test_other_formats_of_native(
    options: dict[str, str], limit: float, folder_of: Callable[[str], tuple[Any, Path]]
) -> None:
    model, folder = folder_of("multiplied")
    expected = model(TEXTS).logits.numpy()
    error = native(folder, **options) - expected
    assert np.sqrt(np.median(np.mean(error**2, -1))) < limit * expected.std()


@pytest.mark.parametrize("name", ["dynamic", "static", "paged", "compiled", "native"])
def test_greedy_tokens_are_those_of_the_naive_loop(name: str, folder_of: Callable[[str], tuple[Any, Path]]) -> None:
    gpt = load_gpt(open_folder(folder_of("multiplied")[1]))
    prompts = [[5, 9, 11, 30, 7], [3], list(range(17, 29))]
    expected = [[naive_greedy(gpt, p, 12)] for p in prompts]
    engine = make_engine(name, gpt)
    assert generate(make_core(engine), prompts, [SamplingParams(max_tokens=12, temperature=0)] * 3) == expected


def test_a_row_has_the_same_bits_in_any_company(folder_of: Callable[[str], tuple[Any, Path]]) -> None:
    weights = open_folder(folder_of("multiplied")[1])
    config = EngineConfig(max_num_seqs=4, threads=2)
    engine = registry.build(ENGINES["native"], weights, config, "cpu", make_limits(weights.config))
    alone = to_numpy(engine.extend(StepBatch([engine.open()], IDS[:9], [9], [1]))).copy()
    handles = [engine.open(), engine.open()]
    both = to_numpy(engine.extend(StepBatch(handles, IDS[20:40] + IDS[:9], [20, 9], [1, 1])))
    assert np.array_equal(both[1:], alone)


@torch.inference_mode()
def test_a_packed_folder_is_the_same_model(folder_of: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    _, folder = folder_of("multiplied")
    weights = open_folder(folder)
    refuses(lambda: save(weights, tmp_path / "saved"), "cannot be written as a folder")
    packed.write_folder(weights, tmp_path / "packed", "float32", None, threads=1)
    assert np.array_equal(native(tmp_path / "packed"), native(folder))
    assert find_shape(str(tmp_path / "packed")) == weights.config
    llama = open_folder(folder_of("llama")[1])
    refuses(lambda: gguf_export.write_file(llama, tmp_path / "m.gguf", "F32", {}, "m"), "rounded_inputs=True")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"quantization_mode": "online"}, "quantization_mode='online' is not supported: only 'offline' is"),
        ({"use_rms_norm": True}, "use_rms_norm=True is not supported: only False is"),
        ({"linear_class": "linear"}, "linear_class='linear' is not supported: only 'bitlinear' is"),
        ({"modules_to_not_convert": ["mlp"]}, "modules_to_not_convert=['mlp'] is not supported: only None is"),
    ],
)
def test_what_is_refused(
    fields: dict[str, Any], message: str, folder_of: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folder_of("llama")[1] / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder_of("llama")[1] / "model.safetensors")
    edit_config(tmp_path, quantization_config={"quant_method": "bitnet"} | fields)
    refuses(lambda: open_folder(tmp_path), message)


@pytest.mark.parametrize(
    "end, change, message",
    [
        ("weight_scale", lambda t: t.repeat(2), "weight_scale is [2], but must be [1]"),
        ("weight_scale", lambda t: t.int(), "weight_scale is int32, but must be float16 or bfloat16 or float32"),
        ("weight", lambda t: t[:-1], "up_proj.weight is [252, 256], but the config requires [256, 256]"),
        ("weight", lambda t: t.int(), "weight is int32, but must be uint8"),
    ],
)
def test_bad_tensors_are_refused(
    end: str, change: Callable[[torch.Tensor], torch.Tensor], message: str,
    folder_of: Callable[[str], tuple[Any, Path]], tmp_path: Path,
) -> None:  # fmt: skip
    folder, name = folder_of("multiplied")[1], f"model.layers.1.mlp.up_proj.{end}"
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {name: change(stored[name]).contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    refuses(lambda: open_folder(tmp_path), message)


def test_a_description_that_contradicts_itself_is_refused() -> None:
    refuses(lambda: ModelConfig(sub_norms=True), "sub_norms=True needs norm=rms, gated_mlp=True and no experts")


def test_rounding() -> None:
    x = torch.tensor([[1.0, -254.0, 3.0, 2.9, 0.0], [0.0, 0.0, 1e-6, 0.0, 0.0], [float("nan"), 1.0, 0.0, 0.0, 0.0]])
    found = rounded(x)
    assert found[0].tolist() == [0.0, -254.0, 4.0, 2.0, 0.0]  # 0.5 and 1.5 units of 2: ties to even
    assert found[1].tolist() == pytest.approx([0.0, 0.0, 13 * 1e-5 / 127, 0.0, 0.0])
    assert found[2].isnan().all()
