"""Folders of packed weights: the same tokens as the original model, and one line for everything that is wrong."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.models import CHARS, TINY, edit_config, make_folder, make_limits, make_model, refuses
from helpers.packed import GREEDY, TEXT, pack
from nanoinfer import LLM
from nanoinfer.bench import run as bench
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gpt_loading import weights_of
from nanoinfer.checkpoints.load import load_model
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.cli.app import run
from nanoinfer.config import EngineConfig
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.tokenizers.tokenizer import char_to_json
from nanoinfer.utils.arrays import to_numpy

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")


def options(format: str) -> EngineConfig:
    return EngineConfig(quantization=format) if format in packed.QUANTIZATIONS else EngineConfig(dtype=format)


def logits(weights: Weights, config: EngineConfig) -> NDArray[np.float32]:
    engine = NativeEngine(weights, make_limits(weights.config), config)
    step = StepBatch(handles=[engine.open()], token_ids=TEXT, num_new=[len(TEXT)], num_logits=[len(TEXT)])
    return to_numpy(engine.extend(step)).copy()


# The same results as the original model ----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", packed.FORMATS)
def test_logits_are_those_of_the_original(format: str, tied: bool, bias: bool, tmp_path: Path) -> None:
    config = replace(TINY, tie_word_embeddings=tied, bias=bias)
    original = replace(weights_of(make_model(config)), dtype=format if format in packed.DTYPES else "float32")
    expected = logits(original, options(format))
    assert np.isfinite(expected).all()
    weights = packed.open_folder(pack(tmp_path / "p", format, config))
    assert weights.format == format
    assert np.array_equal(logits(weights, EngineConfig()), expected)


@pytest.mark.parametrize("format", packed.FORMATS)
def test_tokens_are_those_of_the_original(format: str, tmp_path: Path) -> None:
    source, folder = str(make_folder(tmp_path / "m")), tmp_path / "p"
    flag = "--quantization" if format in packed.QUANTIZATIONS else "--dtype"
    assert run(["pack", source, flag, format, "--output", str(folder)]) == 0
    config = options(format)
    original = LLM(source, engine="native", dtype=config.dtype, quantization=config.quantization)
    expected = original.generate("hello", GREEDY)[0].check().outputs[0]
    for name in (folder, folder / packed.FILE):
        llm = LLM(str(name))
        assert llm.engine_name == "native"
        assert llm.generate("hello", GREEDY)[0].check().outputs[0] == expected
    same = LLM(str(folder), engine="native", device="cpu", dtype=config.dtype, quantization=config.quantization)
    assert same.generate("hello", GREEDY)[0].check().outputs[0] == expected
    assert (folder / "tokenizer.json").read_text() == char_to_json(CHARS)


def test_first_layers_are_a_draft(tmp_path: Path) -> None:
    for format in ("int8", "bfloat16"):
        llm = LLM(str(pack(tmp_path / format, format)), draft="self:1", speculate_k=3)
        plain = LLM(str(tmp_path / format)).generate("hello", GREEDY)[0].check().outputs[0].token_ids
        assert llm.generate("hello", GREEDY)[0].check().outputs[0].token_ids == plain


@pytest.mark.parametrize("format", ["int4", "float32"])
def test_a_packed_draft_model(format: str, tmp_path: Path) -> None:
    source, draft = str(make_folder(tmp_path / "m")), str(pack(tmp_path / "p", format))
    llm = LLM(source, engine="native", draft=draft, speculate_k=3)
    plain = LLM(source, engine="static").generate("hello", GREEDY)[0].check().outputs[0].token_ids
    assert llm.generate("hello", GREEDY)[0].check().outputs[0].token_ids == plain


def test_weights_are_used_in_place(tmp_path: Path) -> None:
    """The panels are views of the mapped file, which exists until the engine is deleted."""
    folder = pack(tmp_path / "p", "int8")
    weights = packed.open_folder(folder)
    start = weights.arrays["transformer.wte.weight"].ctypes.data
    assert start % packed._PAGE == 0
    engine = NativeEngine(weights, make_limits(), EngineConfig())
    step = StepBatch(handles=[engine.open()], token_ids=TEXT, num_new=[len(TEXT)], num_logits=[1])
    expected = to_numpy(engine.extend(step)).copy()
    del weights
    shutil.rmtree(folder)
    gc.collect()
    step = replace(step, handles=[engine.open()])
    assert np.array_equal(to_numpy(engine.extend(step)), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_file_is_unmapped_with_the_engine(tmp_path: Path) -> None:
    folder = pack(tmp_path / "p", "int4")
    engine = NativeEngine(packed.open_folder(folder), make_limits(), EngineConfig())
    assert packed.FILE in Path("/proc/self/maps").read_text()
    del engine
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()


# The format --------------------------------------------------------------------------------------------------

DIGESTS = {
    "float32": "b5622bcda20914fa", "bfloat16": "b5bab7d17b8b5201", "float16": "81b8f5b13c8c4984",
    "int8": "5cdd2532a2bbc6e3",
}  # fmt: skip


@pytest.mark.parametrize("format", DIGESTS)
def test_version_1_keeps_its_layout(format: str) -> None:
    """If this fails, files of version 1 are misread: raise packed.VERSION with the layout."""
    integers = np.arange(70 * 130, dtype=np.int64).reshape(70, 130) * 2654435761 % 4093 - 2046
    panels, scales = _native.pack(
        values=(integers / 2048).astype(np.float32), dtype="float32", format=format, threads=1
    )
    assert hashlib.sha256(panels.tobytes() + scales.tobytes()).hexdigest()[:16] == DIGESTS[format]


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = pack(tmp_path / "p", "int8") / packed.FILE
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {
            "format": "nanoinfer-packed", "version": "1", "byte_order": "little", "weights": "int8",
            "vocab_size": str(TINY.vocab_size),
        }  # fmt: skip
        assert file.get_tensor("transformer.h.0.ln_1.bias").shape == (16,)
        assert file.get_tensor("transformer.h.1.attn.c_attn.scales").shape == (64,)  # 48 outputs are 2 panels
    stored = packed.read_with_metadata(path)[0]
    assert min(tensor.start for tensor in stored.values()) % packed._PAGE == 0
    assert all(tensor.start % 64 == 0 for tensor in stored.values() if tensor.dtype == "uint8")


# Requests that packed weights cannot serve --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "wrong"),
    [
        ("int8", {"engine": "static"}),
        ("int8", {"quantization": "int4"}),
        ("int4", {"quantization": "int8"}),
        ("bfloat16", {"dtype": "float32"}),
        ("float32", {"dtype": "float16"}),
        ("int8", {"device": "cuda"}),
        ("int4", {"draft": "self:int8"}),
    ],
)
def test_other_options_need_the_original(format: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = str(pack(tmp_path / "p", format))
    refuses(lambda: LLM(folder, **wrong), folder, format, "original model", next(iter(wrong.values())).split(":")[-1])


def test_float32_values_need_the_original(tmp_path: Path) -> None:
    folder = str(pack(tmp_path / "p", "int8"))
    refuses(lambda: load_model(f"wide:{folder}:gpt2"), folder, "original model")
    refuses(lambda: load_model(folder).gpt, folder, "original model")
    refuses(lambda: packed.write_folder(load_model(folder).weights, tmp_path / "q", "int4", None, 1), "original model")
    assert not (tmp_path / "q").exists()


# Files that are wrong ----------------------------------------------------------------------------------------


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None], at: int = 0) -> None:
    """Change the header of a safetensors file; its length stays a multiple of the page plus `at`."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % packed._PAGE + at)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def metadata(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({name: value})


def blocks(formats: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(version="2", formats=formats)


def wte(formats: Any) -> Callable[[dict[str, Any]], None]:
    return blocks(json.dumps({"transformer.wte.weight": formats}))


def rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update({new: header.pop(old)})


def swap_dtype(header: dict[str, Any]) -> None:
    header["transformer.ln_f.weight"].update(dtype="U8", shape=[64])


def split(header: dict[str, Any]) -> None:
    entry = header["transformer.ln_f.weight"]
    entry["shape"] = [4, 4]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "version": (metadata("version", "3"), "version='3'"),
    "no formats": (metadata("version", "2"), "formats cannot be read"),
    "formats that are not a text": (blocks(5), "formats of 'formats' are 5"),
    "formats of another type": (blocks("[]"), "formats of 'formats' are []"),
    "formats of no matrix": (blocks('{"x": [["q4_k", 64]]}'), "formats of 'x'"),
    "unknown format": (wte([["int8", TINY.vocab_size]]), "transformer.wte.weight' are [['int8'"),
    "rows of another type": (wte([["q8_0", float(TINY.vocab_size)]]), "transformer.wte.weight"),
    "too few rows": (wte([["q8_0", 32]]), "transformer.wte.weight"),
    "too many parts": (wte([["q8_0", 16]] * 4), "transformer.wte.weight"),
    "another size of blocks": (wte([["q8_0", TINY.vocab_size]]), "transformer.wte.weight is uint8"),
    "no version": (lambda header: header["__metadata__"].pop("version"), "version=None"),
    "weights": (metadata("weights", "int3"), "weights='int3'"),
    "byte order": (metadata("byte_order", "big"), "byte_order='big'"),
    "format": (metadata("format", "pt"), "format"),
    "no metadata": (lambda header: header.pop("__metadata__"), "format"),
    "missing layer": (rename("transformer.h.1.ln_1.bias", "transformer.h.7.ln_1.bias"), "3 layers"),
    "missing piece": (rename("transformer.h.1.ln_1.bias", "x"), "transformer.h.1.ln_1.bias is missing"),
    "dtype": (swap_dtype, "transformer.ln_f.weight"),
    "shape": (split, "transformer.ln_f.weight"),
    "escape sequence": (metadata("version", "\x1b[1m\n"), "version"),
}


@pytest.mark.parametrize("what", WRONG, ids=lambda s: s.replace(" ", "-"))
def test_wrong_headers(what: str, tmp_path: Path) -> None:
    folder = pack(tmp_path / "p", "int8")
    edit, word = WRONG[what]
    edit_header(folder / packed.FILE, edit)
    refuses(lambda: LLM(str(folder)), str(folder), word)


def test_extra_pieces_and_alignment(tmp_path: Path) -> None:
    folder = pack(tmp_path / "p", "int8")
    path = folder / packed.FILE
    content = path.read_bytes()
    edit_header(path, lambda header: None, at=32)
    refuses(lambda: LLM(str(folder)), "multiple of 64")
    path.write_bytes(content + b"1234")
    refuses(lambda: LLM(str(folder)), packed.FILE)
    path.write_bytes(content)
    length = int.from_bytes(content[:8], "little")
    data = len(content) - 8 - length

    def add(header: dict[str, Any]) -> None:
        header["x"] = {"dtype": "F32", "shape": [0], "data_offsets": [data, data]}

    edit_header(path, add)
    refuses(lambda: LLM(str(folder)), "'x'")


def test_truncated_files(tmp_path: Path) -> None:
    folder = pack(tmp_path / "p", "int4")
    path = folder / packed.FILE
    content = path.read_bytes()
    for size in (0, 4, 8, 100, packed._PAGE, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        refuses(lambda: LLM(str(folder)), str(folder))
    path.write_bytes(b"\0" * len(content))
    refuses(lambda: LLM(str(folder)), str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 1}, {"n_layer": 2**31 - 1}, {"n_embd": 32},
        {"vocab_size": TINY.vocab_size + 1}, {"vocab_size": 2**31 - 1},
        {"n_positions": 64}, {"n_positions": 2**31 - 1}, {"n_inner": 2**31 - 1}, {"tie_word_embeddings": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_differs(change: dict[str, int], tmp_path: Path) -> None:
    folder = pack(tmp_path / "p", "int8")
    edit_config(folder, **change)
    refuses(lambda: LLM(str(folder)), str(folder))


def test_files_that_are_missing(tmp_path: Path) -> None:
    folder = pack(tmp_path / "p", "int8")
    (folder / "config.json").rename(folder / "x")
    refuses(lambda: LLM(str(folder)), "config.json")
    (folder / "x").rename(folder / "config.json")
    (folder / packed.FILE).unlink()
    refuses(lambda: LLM(str(folder)), "model.safetensors")
    os.mkfifo(folder / packed.FILE)
    refuses(lambda: LLM(str(folder)), "model.safetensors")


def test_a_build_without_the_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pack(tmp_path / "p", "int8")
    monkeypatch.setitem(sys.modules, "nanoinfer._native", None)
    monkeypatch.delattr("nanoinfer._native", raising=False)
    refuses(lambda: packed.open_folder(folder), str(folder), "C++ compiler", "original model")


def test_another_byte_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pack(tmp_path / "p", "int8")
    monkeypatch.setattr(sys, "byteorder", "big")
    refuses(lambda: packed.open_folder(folder), "big-endian")
    refuses(lambda: pack(tmp_path / "q", "int8"), "big-endian")


@pytest.mark.parametrize("format,expected", [("int4", ("float32", "int4")), ("bfloat16", ("bfloat16", None))])
def test_a_benchmark_names_the_format_of_the_folder(
    format: str, expected: tuple[str, str | None], tmp_path: Path
) -> None:
    """The limit of the hardware is computed from it."""
    model = str(pack(tmp_path, format))
    cases = bench._cases(bench.Plan(model=model), bench.CUSTOM, TINY, ["native"], "cpu")
    assert [(c.dtype, c.quantization) for c in cases] == [expected]
    wrong = bench.Plan(model=model, quantization=("int8",))
    refuses(lambda: bench._cases(wrong, bench.CUSTOM, TINY, ["native"], "cpu"), f"packed as {format}", "int8")
