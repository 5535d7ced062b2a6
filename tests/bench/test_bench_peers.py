"""Peers as backends: in float32 every one says what our static engine says, and gives exactly what was asked for.

Exporters: complete or not there, made once, made again for other weights, and clear about what they cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.models import make_folder, refuses
from nanoinfer.bench.backends import PEERS, export_once, open_backend, prepare, require_module
from nanoinfer.bench.backends.llamacpp import QUANT_BLOCK, export_gguf
from nanoinfer.bench.case import Case, Requests, RunTimes
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.models.presets import PRESETS

SMALL = ModelConfig(vocab_size=96, block_size=64, n_layer=2, n_head=2, n_embd=64, eos_token_ids=(7,))
ONE = Requests([[3, 1, 4, 1, 5]], [12])
EQUAL = Requests([[3, 1, 4, 1], [2, 7, 1, 8]], [6, 6])
RAGGED = Requests([[5, 7, 9], [1, 2, 3, 4, 5, 6, 7, 0, 0], [50, 60]], [4, 11, 7])
WIDE = replace(SMALL, n_head=4, n_embd=256)  # whole groups of 128 weights
MODULES = {
    "transformers-dynamic": ("transformers",), "transformers-static": ("transformers",),
    "llama.cpp": ("llama_cpp",), "openvino": ("openvino_genai", "optimum.intel"), "vllm": ("vllm",),
}  # fmt: skip
QUANTIZED = [
    ("llama.cpp", "Q8_0"), ("llama.cpp", "Q4_0"), ("openvino", "int8"), ("openvino", "int4"),
    ("vllm", "int8"), ("vllm", "int4"),
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("peers") / "small", SMALL, chars=None)


def make_case(name: str, work: Requests = ONE, **fields: Any) -> Case:
    """A case whose shape holds `work`; skips where the peer is not installed."""
    for module in MODULES.get(name, ()):
        pytest.importorskip(module, reason=f"{module} is an optional peer")
    sizes = max(map(len, work.prompts)), max(work.output_tokens)
    return Case(name, "small", batch=len(work.prompts), prompt_tokens=sizes[0], output_tokens=sizes[1], **fields)


def run(case: Case, folder: Path, work: Requests) -> list[list[int]]:
    """Run a case twice, check what holds for every backend, and return the tokens."""
    backend = open_backend(case, folder)
    tokens, _ = backend.run(work)
    again, times = backend.run(work)
    check_times(times, work)
    assert [len(t) for t in tokens] == work.output_tokens
    assert again == tokens
    return tokens


def check_times(times: RunTimes, work: Requests) -> None:
    assert times.num_prompt_tokens == sum(map(len, work.prompts))
    assert [len(a) for a in times.arrivals] == work.output_tokens
    for arrivals in times.arrivals:
        assert arrivals == sorted(arrivals)
        assert arrivals[0] > 0
    assert times.total_sec < 60


@pytest.mark.parametrize("work", [ONE, EQUAL, RAGGED], ids=["one", "equal", "ragged"])
@pytest.mark.parametrize("name", PEERS)
def test_greedy_tokens_are_those_of_our_engine(small: Path, name: str, work: Requests) -> None:
    pytest.importorskip("torch", reason="engine static runs in PyTorch")
    ours = run(make_case("static", work), small, work)
    assert len({t for row in ours for t in row}) > 2, "the model repeats itself: the test would prove little"
    assert run(make_case(name, work), small, work) == ours


@pytest.mark.parametrize("name", [n for n in PEERS if n != "llama.cpp"])
def test_exact_gelu_untied_head_and_epsilon(tmp_path: Path, name: str) -> None:
    config = replace(SMALL, activation="gelu", tie_word_embeddings=False, norm_epsilon=3e-2, n_inner=96)
    folder = make_folder(tmp_path / "other", config, seed=3, chars=None)
    assert run(make_case(name), folder, ONE) == run(make_case("static"), folder, ONE)


def test_llama_cpp_with_untied_head_and_epsilon(tmp_path: Path) -> None:
    config = replace(SMALL, tie_word_embeddings=False, norm_epsilon=3e-2, n_inner=96)
    folder = make_folder(tmp_path / "other", config, seed=3, chars=None)
    assert run(make_case("llama.cpp"), folder, ONE) == run(make_case("static"), folder, ONE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("peers") / "wide", WIDE, chars=None)


@pytest.mark.parametrize("work", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("name, quantization", QUANTIZED)
def test_quantized_weights_give_the_tokens_asked_for(wide: Path, name: str, quantization: str, work: Requests) -> None:
    dtype = "bfloat16" if name == "vllm" else "float32"  # its int4 has no other
    tokens = run(make_case(name, work, dtype=dtype, quantization=quantization), wide, work)
    assert all(0 <= t < SMALL.vocab_size for row in tokens for t in row)


@pytest.mark.parametrize("name", ["transformers-dynamic", "transformers-static", "llama.cpp"])
def test_bfloat16_runs(small: Path, name: str) -> None:
    run(make_case(name, RAGGED, dtype="bfloat16"), small, RAGGED)


@pytest.mark.parametrize("name", PEERS)
def test_what_a_peer_cannot_do_is_one_clear_line(small: Path, name: str) -> None:
    case = make_case(name)
    refuses(lambda: open_backend(replace(case, quantization="int5"), small), name, "quantization='int5'")
    refuses(lambda: open_backend(replace(case, device="tpu"), small), "device='tpu'")
    refuses(lambda: open_backend(replace(case, sampler="sampled"), small), name, "sampler='greedy' only")
    long = Requests([[1] * 60], [20])
    refuses(lambda: open_backend(case, small).run(long), name, "80 tokens")


def test_llama_cpp_refuses_float16(small: Path) -> None:
    case = make_case("llama.cpp", dtype="float16")
    refuses(lambda: open_backend(case, small), "llama.cpp", "dtype='float16'", "bfloat16")


def test_llama_cpp_keeps_its_log_to_itself(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(make_case("llama.cpp", RAGGED, quantization="Q8_0"), small, RAGGED)
    assert capfd.readouterr() == ("", "")


def test_helpers() -> None:
    assert RAGGED.longest == 20
    refuses(lambda: require_module("no_such_peer"), "no_such_peer", "pip install")


@pytest.mark.parametrize("name", PEERS)
def test_other_families_run_or_are_refused(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers makes the model")
    from helpers.families import make_folder as make_family

    make_family("llama", tmp_path)
    case = make_case(name)
    if name == "vllm":
        with pytest.raises(RuntimeError, match="head_dim=6"):
            run(case, tmp_path, ONE)
    else:
        assert run(case, tmp_path, ONE) == run(make_case("static"), tmp_path, ONE)


GGUF = "gguf is an optional peer: pip install gguf"
LLAMA_CPP = "llama.cpp is an optional peer: pip install llama-cpp-python"


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# The frame -------------------------------------------------------------------------------------------


def test_an_export_is_made_once(tmp_path: Path) -> None:
    written: list[Path] = []

    def write(partial: Path) -> None:
        written.append(partial)
        (partial / "model").write_text(f"version {len(written)}")

    target = tmp_path / "exports" / "peer"
    for _ in range(2):
        assert export_once(target, write) == target
    assert len(written) == 1
    assert (target / "model").read_text() == "version 1"
    assert names(target.parent) == {"peer"}


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(partial: Path) -> None:
        (partial / "model").write_text("half")
        raise OSError(28, "No space left on device")

    refuses(lambda: export_once(tmp_path / "exports" / "peer", write), "exports/peer", "No space left")
    assert names(tmp_path / "exports") == set()


def test_backends_that_load_the_folder_itself_need_no_export(tmp_path: Path) -> None:
    small = make_folder(tmp_path / "small", SMALL, chars=None)
    for name in ("static", "transformers-dynamic"):
        assert prepare(Case(name, str(small)), small) is None
    assert not (small / "exports").exists()


# GGUF ------------------------------------------------------------------------------------------------


def shrunk(preset: str) -> ModelConfig:
    """Return a published model with small sizes."""
    shape = {
        "vocab_size": 96, "block_size": 64, "n_layer": 2, "n_head": 4, "num_kv_heads": 2, "n_embd": 64, "n_inner": 96,
    }  # fmt: skip
    layers = (LayerKind(None, Rotary(32, 1e5)),) * 2
    return replace(PRESETS[preset], **shape, head_size=32, layers=layers, bos_token_id=0, eos_token_ids=(0,))


def types_of(path: Path) -> dict[str, str]:
    package = pytest.importorskip("gguf", reason=GGUF)
    return {t.name: t.tensor_type.name for t in package.GGUFReader(str(path)).tensors}


def test_gguf_float32_holds_the_weights(small: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("gguf", reason=GGUF)
    path = export_gguf(small, tmp_path, "F32")
    reader = package.GGUFReader(str(path))
    assert set(types_of(path).values()) == {"F32"}
    assert sum(int(t.n_elements) for t in reader.tensors) == 12 * 64 * 64 * 2 + 13 * 64 * 2 + (96 + 64 + 2) * 64
    assert reader.get_field("gpt2.context_length").contents() == 64
    assert reader.get_field("gpt2.feed_forward_length").contents() == 256


def test_gguf_stores_an_untied_head(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=GGUF)
    untied = make_folder(tmp_path / "untied", replace(SMALL, tie_word_embeddings=False), chars=None)
    assert "output.weight" in types_of(export_gguf(untied, tmp_path, "F32"))


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen3-0.6b"])
def test_gguf_of_another_family_is_the_same_model(preset: str, tmp_path: Path) -> None:
    config = shrunk(preset)
    weights = open_folder(make_folder(tmp_path / "small", config, chars=None))
    found, _ = gguf.open_file(export_gguf(tmp_path / "small", tmp_path, "F32"))
    assert found.config == config
    for (name, ours), (theirs_name, theirs) in zip(weights.read(), found.read(), strict=True):
        assert name == theirs_name
        np.testing.assert_array_equal(ours.float32(), theirs.float32())


@pytest.mark.parametrize("file_type", ["BF16", "Q8_0", "Q4_0"])
def test_gguf_types(small: Path, tmp_path: Path, file_type: str) -> None:
    pytest.importorskip("gguf", reason=GGUF)
    pytest.importorskip("llama_cpp", reason=LLAMA_CPP)
    types = types_of(export_gguf(small, tmp_path, file_type))
    assert types["blk.1.ffn_up.weight"] == types["blk.0.attn_qkv.weight"] == file_type
    assert types["blk.1.attn_norm.weight"] == types["position_embd.weight"] == "F32"
    assert names(tmp_path) >= {"gguf-F32", f"gguf-{file_type}"}


def test_gguf_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    exact = make_folder(tmp_path / "exact", replace(SMALL, activation="gelu"), chars=None)
    refuses(lambda: export_gguf(exact, tmp_path, "F32"), "activation='gelu'", "gelu_new")
    odd = make_folder(tmp_path / "odd", replace(SMALL, n_embd=48), chars=None)
    refuses(lambda: export_gguf(odd, tmp_path, "Q8_0"), "a width of 48 in Q8_0", str(QUANT_BLOCK))
    pythia = make_folder(tmp_path / "pythia", replace(shrunk("pythia-160m"), num_kv_heads=4), chars=None)
    refuses(lambda: export_gguf(pythia, tmp_path, "F32"), "gpt_neox is not exported", "qwen3")
    refuses(lambda: prepare(Case("llama.cpp", "m", quantization="Q3_K"), odd), "quantization='Q3_K'", "Q4_0")
