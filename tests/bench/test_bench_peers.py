"""Peers as backends: in float32 every one says what our static engine says, and gives exactly what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.models import make_folder, refuses
from nanoinfer.bench.backends import PEERS, open_backend, require_module
from nanoinfer.bench.case import Case, Requests, RunTimes
from nanoinfer.config import ModelConfig

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
