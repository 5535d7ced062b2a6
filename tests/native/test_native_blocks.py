"""The formats of GGUF files in the C++ kernels: their values are ggml's, bit for bit, and products are exact.

The values are those of `formats`, which test_gguf.py compares with the package gguf. The reference of a product
multiplies them in float64 with activations of 8 bits, a scale of largest / 127 for every 32 inputs, or with AMX for
those of a block of 256.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gguf_files import Stored, as_f16, as_f32, write_gguf
from helpers.models import make_limits, refuses
from helpers.native import new_decoder
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.gguf.file import BlockTensor, read_gguf
from nanoinfer.checkpoints.gguf.formats import FORMATS, Format
from nanoinfer.cli.app import run
from nanoinfer.config import EngineConfig
from nanoinfer.engines.native import NativeEngine
from nanoinfer.utils.arrays import FileBlocks, JoinedBlocks
from nanoinfer.utils.files import RegularFile

_native: Any = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

ISAS = [name for name, missing in _native.instruction_sets() if not missing]
QUANTIZED = [f for f in FORMATS.values() if f.native]
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2),
    "TQ2_0": (64,),
}  # fmt: skip
RTOL = 2e-6  # of the sum of |w x|: float32 sums
ROWS = (1, 2, 7) if "NANOINFER_TEST_EXTENSION" in os.environ else (1, 2, 5, 6, 7, 13, 30, 101)
Array = np.ndarray[Any, Any]


def random_blocks(format: Format, rows: int, columns: int, seed: int = 0, zeros: float = 0.1) -> Array:
    """Return rows of random blocks, (rows, bytes). Scales and minimums are about 0.01, a share of them zero."""
    rng = np.random.default_rng(seed)
    count = rows * columns // format.block_size
    blocks = rng.integers(0, 256, (count, format.block_bytes)).astype(np.uint8)
    for at in HALVES.get(format.name, (0,)):
        halves = (rng.standard_normal((count, 1)) * 0.01 * (rng.random((count, 1)) >= zeros)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if format.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 126, count)
    return blocks.reshape(rows, -1)


def values(format: Format, blocks: Array) -> Array:
    return format.dequantize(blocks.reshape(-1, format.block_bytes)).reshape(len(blocks), -1)


def activations(x: Array, group: int) -> Array:
    groups = x.reshape(len(x), -1, group)
    most = np.abs(groups).max(2, keepdims=True)
    rounded = np.round(groups * (np.float32(127) / most)) * (most / np.float32(127)).astype(np.float64)
    return rounded.reshape(x.shape)


def check_product(format: Format, blocks: Array, x: Array, isa: str) -> Array:
    w = values(format, blocks).astype(np.float64)
    got: Array = _native.multiply(weights=blocks, bias=None, x=x, format=format.name.lower(), isa=isa)
    a = activations(x, 256 if isa == "amx" and format.block_size == 256 else 32)
    # A group's weights are multiplied as scale (code - offset) - minimum: the rounding is that of these two terms.
    assert np.all(np.abs(got - a @ w.T) <= RTOL * (np.abs(a) @ bounds(format, blocks).T) + 1e-37)
    return got


def bounds(format: Format, blocks: Array) -> Array:
    """Return the magnitude of the largest weight of a block for each of its weights."""
    w = np.abs(values(format, blocks)).astype(np.float64).reshape(len(blocks), -1, format.block_size)
    return np.broadcast_to(w.max(2, keepdims=True), w.shape).reshape(len(blocks), -1)


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda f: f.name)
def test_values_are_those_of_ggml(format: Format) -> None:
    for rows, num_blocks in ((1, 1), (33, 2), (70, 5)):
        blocks = random_blocks(format, rows, num_blocks * format.block_size)
        if format.name == "MXFP4":
            blocks.reshape(-1, 17)[:3, 0] = (0, 1, 255)[:rows]  # the smallest ones are subnormal
        assert np.array_equal(_native.unpack(weights=blocks, format=format.name.lower()), values(format, blocks))


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize("isa", ISAS)
def test_product_equals_the_reference(isa: str, format: Format) -> None:
    for columns in (format.block_size, 10 * format.block_size):
        blocks = random_blocks(format, 70, columns)
        x = np.random.default_rng(1).standard_normal((max(ROWS), columns)).astype(np.float32)
        every = check_product(format, blocks, x, isa)
        for rows in ROWS:  # alone and in any company: the same bits
            assert np.array_equal(check_product(format, blocks, x[:rows], isa), every[:rows])


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize("isa", ISAS)
def test_largest_codes_and_activations_do_not_overflow(isa: str, format: Format) -> None:
    blocks = random_blocks(format, 32, 2 * format.block_size)
    kept = blocks.reshape(-1, format.block_bytes)
    for at in range(format.block_bytes):  # all bits of codes and group scales
        if not any(half <= at < half + 2 - (format.name == "MXFP4") for half in HALVES.get(format.name, (0,))):
            kept[:, at] = 255
    x = np.ones((7, 2 * format.block_size), np.float32)
    x[1::2] = -1
    check_product(format, blocks, x, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_scale_that_is_not_a_number_reaches_its_output_only(isa: str) -> None:
    format = FORMATS[12]  # Q4_K
    blocks = random_blocks(format, 40, 512)
    blocks[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    got = _native.multiply(weights=blocks, bias=None, x=np.ones((9, 512), np.float32), format="q4_k", isa=isa)
    assert np.isnan(got[:, 3]).all()
    assert np.isfinite(np.delete(got, 3, axis=1)).all()


def test_floats_are_not_packed_in_formats_of_files() -> None:
    with pytest.raises(ValueError, match="must be given as blocks"):
        _native.multiply(
            weights=np.ones((4, 256), np.float32), bias=None, x=np.ones((1, 256), np.float32), format="q5_k"
        )
    for format, columns in (("q5_k", 256), ("q6_k", 255), ("q5_0", 48)):
        with pytest.raises(ValueError, match=f"'{format}' of {columns} columns is packed from blocks: use pack_blocks"):
            _native.pack(values=np.ones((4, columns), np.float32), dtype="float32", format=format, threads=1)


# Models ----------------------------------------------------------------------------------------------------------

C, F, V, D = 256, 512, 96, 32
KINDS = {format.name: kind for kind, format in FORMATS.items()}
LAYERS = (  # q, k, v, output, gate, up, down
    ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q4_K", "Q6_K"),
    ("Q5_K", "Q3_K", "Q2_K", "Q5_0", "Q4_1", "Q8_0", "IQ4_XS"),  # gate and up share their inputs
    ("IQ4_NL", "MXFP4", "Q5_1", "Q2_K", "F16", "Q3_K", "MXFP4"),
    ("Q5_K", "F32", "Q5_K", "Q4_0", "Q8_0", "F32", "Q5_K"),
    ("TQ2_0",) * 7,
)


def stored(shape: tuple[int, ...], name: str, seed: int) -> Stored:
    """Return a tensor of about 0.05: random blocks, scaled like the others."""
    if name.startswith("F"):
        values = np.random.default_rng(seed).standard_normal(shape) * 0.05
        return (as_f16 if name == "F16" else as_f32)(values)
    format = FORMATS[KINDS[name]]
    blocks = random_blocks(format, *shape, seed, zeros=0).reshape(-1, format.block_bytes)
    spread = format.dequantize(blocks).std()
    for at in HALVES.get(name, (0,)) if name != "MXFP4" else ():
        halves = blocks[:, at : at + 2].copy().view(np.float16) * np.float16(0.05 / spread)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 122
    return Stored(shape, KINDS[name], blocks.tobytes())


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama with matrices in all formats; rows of queries and keys are in the order of llama.cpp."""
    arch = {
        "context_length": 64, "embedding_length": C, "block_count": len(LAYERS), "feed_forward_length": F,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": D, "rope.freq_base": 10000.0, "vocab_size": V,
        "attention.key_length": D, "attention.value_length": D,
    }  # fmt: skip
    tensors = {"token_embd.weight": stored((V, C), "Q6_K", 1), "output_norm.weight": as_f32(np.ones(C))}
    shapes = {"attn_q": (4 * D, C), "attn_k": (2 * D, C), "attn_v": (2 * D, C), "attn_output": (C, 4 * D),
              "ffn_gate": (F, C), "ffn_up": (F, C), "ffn_down": (C, F)}  # fmt: skip
    for i, kinds in enumerate(LAYERS):
        tensors |= {f"blk.{i}.{norm}.weight": as_f32(np.ones(C)) for norm in ("attn_norm", "ffn_norm")}
        for j, ((name, shape), kind) in enumerate(zip(shapes.items(), kinds, strict=True)):
            whole = shape[1] % 256 == 0 or kind.startswith("F") or FORMATS[KINDS[kind]].block_size == 32
            tensors[f"blk.{i}.{name}.weight"] = stored(shape, kind if whole else "Q5_0", 10 * i + j)
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in arch.items()}
    return write_gguf(tmp_path_factory.mktemp("mixed") / "mixed.gguf", metadata, tensors)


def test_every_matrix_keeps_its_formats(mixed_file: Path) -> None:
    formats = gguf.open_file(mixed_file)[0].block_formats
    layer = "transformer.h.{}.".format
    assert formats[layer(0) + "attn.c_attn.weight"] == (("q4_k", 6 * D), ("q6_k", 2 * D))
    assert formats[layer(1) + "attn.c_attn.weight"] == (("q5_k", 4 * D), ("q3_k", 2 * D), ("q2_k", 2 * D))
    assert formats[layer(3) + "attn.c_attn.weight"] == (("q5_k", 4 * D), ("q8_0", 2 * D), ("q5_k", 2 * D))
    assert formats[layer(2) + "mlp.c_gate.weight"] == (("q8_0", F),)  # stored in F16, and shares its inputs with c_fc
    assert formats[layer(3) + "mlp.c_fc.weight"] == (("q8_0", F),)
    assert formats[layer(4) + "attn.c_attn.weight"] == (("tq2_0", 8 * D),)
    assert formats[layer(1) + "mlp.c_gate.weight"] == (("q4_1", F),)


def test_logits_are_those_of_the_dequantized_model(mixed_file: Path) -> None:
    """Within the rounding of activations to 8 bits; a matrix in a wrong format or place has nothing in common."""
    tokens = [list(range(1, 50)), [7, 11, 13]]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=V)
    exact, found, floats = (
        LLM(str(mixed_file), engine=engine, dtype=dtype, max_num_seqs=2).generate(tokens, params)
        for engine, dtype in (("static", "float32"), ("native", "auto"), ("native", "float32"))
    )
    assert [o.outputs[0].token_ids for o in floats] == [o.outputs[0].token_ids for o in exact]
    for a, b in zip(exact, found, strict=True):
        for p, q in zip((a.prompt_logprobs or [])[1:], (b.prompt_logprobs or [])[1:], strict=True):
            ours, theirs = (np.array([(row or {})[t].logprob for t in range(V)]) for row in (q, p))
            assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.25 * theirs.std()


def test_a_matrix_whose_rows_are_in_two_files(mixed_file: Path, tmp_path: Path) -> None:
    """q and k of layer 0 are in one format and in two files, and their rows are in another order than the matrix's."""
    whole = read_gguf(mixed_file)
    content = mixed_file.read_bytes()
    tensors = {}
    for name, t in whole.tensors.items():
        kind = t.format.name if isinstance(t, BlockTensor) else {"float32": "F32", "float16": "F16"}[t.dtype]
        size = len(t.read_blocks().tobytes()) if isinstance(t, BlockTensor) else t.num_bytes
        tensors[name] = Stored(t.shape, KINDS.get(kind, 1), content[t.start : t.start + size])
    last = list(tensors).index("blk.0.attn_q.weight") + 1
    split = {"split.count": np.uint16(2), "split.tensors.count": np.int32(len(tensors))}
    paths = [tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(paths[0], whole.metadata | split | {"split.no": np.uint16(0)}, dict(list(tensors.items())[:last]))
    write_gguf(paths[1], split | {"split.no": np.uint16(1)}, dict(list(tensors.items())[last:]))

    read = dict(gguf.open_file(paths[0])[0].read())
    joined = read["transformer.h.0.attn.c_attn.weight"]
    assert isinstance(joined, JoinedBlocks)
    assert {len(part.files) for part in joined.parts if isinstance(part, FileBlocks)} == {1, 2}
    for name, expected in gguf.open_file(mixed_file)[0].read():
        np.testing.assert_array_equal(read[name].float32(), expected.float32())
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=V)
    one, two = (LLM(str(p)).generate([[1, 2, 3]], params)[0].outputs[0].logprobs for p in (mixed_file, paths[0]))
    assert one == two


def test_a_file_that_changes_while_its_blocks_are_read(mixed_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "changing.gguf"
    path.write_bytes(mixed_file.read_bytes())
    weights = gguf.open_file(path)[0]
    load = lambda: NativeEngine(weights, make_limits(weights.config), EngineConfig(threads=2))  # noqa: E731
    load()
    path.write_bytes(mixed_file.read_bytes()[:-4])
    refuses(load, "changing.gguf was changed while it was read: load it again")


@pytest.mark.parametrize("size, descriptor, message", [(143, None, "it ends within a tensor"), (144, -1, "Bad file")])
def test_rows_that_cannot_be_read(size: int, descriptor: int | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(size))
    file = RegularFile(tmp_path / "rows", "rows")
    places = np.array([[file.fileno() if descriptor is None else descriptor, 0]] * C)
    matrix = FileBlocks(places, "q4_k", C, FORMATS[KINDS["Q4_K"]].dequantize, 144, frozenset((file,)))
    name = "transformer.h.0.attn.c_proj.weight"
    options = {"n_layer": 1, "n_embd": C, "n_head": 1, "mlp_dim": C, "formats": {name: [("q4_k", C)]}}
    decoder = new_decoder(**options)
    refuses(lambda: matrix.read_by(partial(decoder.load_blocks, name)), "rows cannot be read: ", message)
    with pytest.raises(ValueError, match="places must be"):
        decoder.load_blocks(name, places[:, :1].copy(), 144)
    with pytest.raises(ValueError, match=f"has {C} rows of 143 bytes, must have {C} of 144"):
        decoder.load_blocks(name, np.zeros((C, 143), np.uint8))


def test_a_packed_folder_keeps_the_formats(
    mixed_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packed"
    assert run(["pack", str(mixed_file), "--output", str(folder)]) == 0
    assert {"q4_k", "q5_0", "q5_1"} <= set(capsys.readouterr().err.split())
    weights = packed.open_folder(folder)
    assert weights.block_formats == gguf.open_file(mixed_file)[0].block_formats
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=V)
    original, mapped = (LLM(str(place)).generate([[1, 2, 3]], params)[0].outputs[0] for place in (mixed_file, folder))
    assert mapped.logprobs == original.logprobs
    assert mapped.token_ids == original.token_ids
    refuses(
        lambda: LLM(str(folder), dtype="float32"),
        "packed as blocks of a GGUF file",
        "dtype='float32' needs the original",
    )
    refuses(lambda: LLM(str(folder), quantization="int8"), "quantization='int8' needs the original")
    assert run(["pack", str(mixed_file), "--output", str(tmp_path / "dense"), "--dtype", "float32"]) == 0
    assert packed.open_folder(tmp_path / "dense").block_formats == {}


def test_rows_are_packed_as_whole_blocks() -> None:
    with pytest.raises(ValueError, match="rows have 145 bytes, must have whole blocks of 144"):
        _native.pack_blocks(blocks=np.zeros((2, 145), np.uint8), format="q4_k", threads=1)
    with pytest.raises(ValueError, match="'int8' has no blocks: use pack"):
        _native.pack_blocks(blocks=np.zeros((2, 144), np.uint8), format="int8", threads=1)


def test_tokens_do_not_depend_on_company_or_speculation(mixed_file: Path) -> None:
    prompts = [[i, 2 * i % V, 5, 5, i] for i in range(1, 10)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    llm = LLM(str(mixed_file), max_num_seqs=9)
    alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == alone
    lookup = LLM(str(mixed_file), max_num_seqs=9, draft="prompt-lookup")
    assert [o.outputs[0].token_ids for o in lookup.generate(prompts, params)] == alone
