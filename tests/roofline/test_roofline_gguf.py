"""The roofline of GGUF files: the bytes that engine `native` reads of them, from the formats of their own matrices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.gguf_files import F32, Q4_0, Q4_1, Q8_0, Stored, write_gguf
from helpers.models import Run, refuses
from nanoinfer.checkpoints.gguf.formats import FORMATS as GGUF_FORMATS
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.formats import FORMATS, find_model, find_shape
from nanoinfer.roofline.report import Question, answer

C, F, V, L, D = 64, 128, 70, 3, 32
Q6_K = 14
KEYS = {
    "context_length": 48, "embedding_length": C, "block_count": L, "feed_forward_length": F,
    "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": D, "rope.freq_base": 10000.0, "vocab_size": V,
    "attention.key_length": D, "attention.value_length": D,
}  # fmt: skip


def zeros(shape: tuple[int, ...], kind: int) -> Stored:
    fmt = GGUF_FORMATS[kind]
    return Stored(shape, kind, bytes(math.prod(shape) // fmt.block_size * fmt.block_bytes))


def make_file(path: Path, kinds: dict[str, int], other: int, tied: bool = True, **keys: Any) -> tuple[Path, int]:
    """Write a Llama of zeros, its matrices in the formats `kinds` by name and `other`; return it and its bytes."""
    width = keys.get("embedding_length", C)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (V, width), "output_norm": (width,)}
    if not tied:
        shapes["output"] = (V, width)
    for i in range(L):
        matrices = {
            "attn_q": (2 * D, width), "attn_k": (D, width), "attn_v": (D, width), "attn_output": (width, 2 * D),
            "ffn_gate": (F, width), "ffn_up": (F, width), "ffn_down": (width, F),
            "attn_norm": (width,), "ffn_norm": (width,),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in matrices.items()}
    tensors = {
        f"{name}.weight": zeros(shape, F32 if len(shape) == 1 else kinds.get(name, other))
        for name, shape in shapes.items()
    }
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in (KEYS | keys).items()}
    return write_gguf(path, metadata, tensors), sum(len(t.content) for t in tensors.values())


@pytest.fixture
def mixed_file(tmp_path: Path) -> tuple[Path, int]:
    """As SmolLM2's: Q4_1 with the embedding in Q8_0, and one matrix of one layer in Q4_0."""
    return make_file(tmp_path / "mixed.gguf", {"token_embd": Q8_0, "blk.1.ffn_down": Q4_0}, Q4_1)


def test_a_step_reads_the_bytes_of_the_file(mixed_file: tuple[Path, int]) -> None:
    path, num_bytes = mixed_file
    config, fmt = find_model(str(path))
    assert fmt is not None
    assert find_shape(str(path)) == config
    assert (config.n_embd, config.n_layer, config.vocab_size) == (C, L, V)
    assert fmt.name == "Q4_1 + Q8_0 + Q4_0"
    cost = decode(config, fmt)
    assert cost.model.bytes(0, 0) == num_bytes
    assert cost.head.bytes(0, 0) == V * C // 32 * 34 + 4 * C
    assert [count for *_, count in cost.layers] == [2, 1]
    assert cost.mlp.bytes(0, 0) == 3 * F * C // 32 * 20 + 4 * C
    assert cost.mlp.bytes(0, 0) - cost.layers[1][1].bytes(0, 0) == F * C // 32 * 2  # Q4_0 has no minimum
    assert cost.model.bytes(2, 10) - num_bytes == L * 2 * 10 * 2 * 2 * D  # keys and values in bfloat16
    assert cost.model.flops == decode(config, FORMATS["float32"]).model.flops


@pytest.mark.parametrize("kind,name", [(Q8_0, "Q8_0"), (Q4_0, "Q4_0"), (Q4_1, "Q4_1")])
def test_one_format_is_that_of_the_table(tmp_path: Path, kind: int, name: str) -> None:
    path, num_bytes = make_file(tmp_path / "one.gguf", {}, kind, tied=False)
    config, fmt = find_model(str(path))
    assert fmt is not None
    assert fmt.name == name
    lookup = zeros((V, C), kind)
    assert decode(config, fmt) == decode(config, FORMATS[name])
    assert decode(config, fmt).model.bytes(0, 0) == num_bytes - len(lookup.content)
    assert answer(str(path), Question("t4"))["memory"]["weight_bytes"] == num_bytes


def test_each_matrix_is_counted_in_its_own_format(tmp_path: Path) -> None:
    rounded = {"token_embd": Q6_K, "blk.0.attn_v": Q8_0, "blk.2.ffn_up": F32, "blk.2.ffn_gate": F32}
    path, _ = make_file(tmp_path / "k.gguf", rounded, Q4_0, embedding_length=256)
    config, fmt = find_model(str(path))
    assert fmt is not None
    assert fmt.of("transformer.wte.weight").name == "Q6_K"
    joined = fmt.of("transformer.h.0.attn.c_attn.weight")  # queries, keys and values are one matrix
    assert joined.name == "Q4_0 + Q8_0"
    assert joined.matrix_bytes(4 * D, 256) == 3 * D * 256 // 32 * 18 + D * 256 // 32 * 34
    assert fmt.of("transformer.h.1.attn.c_attn.weight").name == "Q4_0"
    assert fmt.of("transformer.h.2.mlp.c_fc.weight").name == "float32"
    up = [mlp.bytes(0, 0) for _, mlp, _ in decode(config, fmt).layers]
    assert max(up) - min(up) == 2 * (4 * F * 256 - F * 256 // 32 * 18)


def test_a_file_of_floats_has_the_format_of_the_device(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path / "f32.gguf", {}, F32)
    assert find_model(str(path))[1] is None
    assert answer(str(path), Question("h100"))["dtype"] == "bfloat16"


def test_the_command_takes_a_file_and_the_formats(mixed_file: tuple[Path, int], run: Run) -> None:
    def answer_to(*arguments: object) -> Any:
        return json.loads(run("roofline", *arguments, "--device", "t4", "--json")[1])

    path, num_bytes = mixed_file
    own = answer_to(path)
    assert (own["dtype"], own["compute_dtype"]) == ("Q4_1 + Q8_0 + Q4_0", "float16")
    assert own["memory"]["weight_bytes"] == num_bytes
    config = find_shape(str(path))
    int8 = answer_to(path, "--dtype", "int8")
    assert int8["decode"]["model"]["bytes"] == decode(config, FORMATS["int8"]).model.bytes(1, 48)
    for name in ("Q8_0", "Q4_0", "Q4_1"):
        found = answer_to("smollm2-135m", "--dtype", name)
        expected = decode(PRESETS["smollm2-135m"], FORMATS[name]).model.bytes(1, found["context_tokens"])
        assert (found["dtype"], found["decode"]["model"]["bytes"]) == (name, expected)


def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    refuses(lambda: find_model(str(tmp_path / "bad.gguf")), "bad.gguf is not a valid GGUF file")
    refuses(lambda: find_model(str(tmp_path / "none.gguf")), "is unknown", "GGUF file")
