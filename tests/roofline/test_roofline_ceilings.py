"""Ceilings of devices: the published ones, and those that are measured, with stand-in clocks.

The roofline of GGUF files: the bytes that engine `native` reads of them, from the formats of their own matrices."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.gguf_files import F32, Q4_0, Q4_1, Q8_0, Stored, write_gguf
from helpers.models import TINY, Run, refuses
from nanoinfer.checkpoints.gguf.formats import FORMATS as GGUF_FORMATS
from nanoinfer.models.presets import PRESETS
from nanoinfer.roofline import ceilings as measuring
from nanoinfer.roofline.arithmetic import decode
from nanoinfer.roofline.ceilings import DEVICES, Ceiling, Workload, find_device, measure
from nanoinfer.roofline.formats import FORMATS, find_model, find_shape
from nanoinfer.roofline.report import Question, answer, predict
from nanoinfer.utils import environment
from nanoinfer.utils.environment import num_cpus

FP32 = FORMATS["float32"]


def test_every_device_has_a_source_and_knows_its_dtypes() -> None:
    for name, ceiling in DEVICES.items():
        assert find_device(name.upper()) is ceiling
        assert "NVIDIA" in ceiling.source
        assert ceiling.resolve_format("auto").name == ceiling.default_dtype
    t4 = DEVICES["t4"]
    assert (t4.bandwidth_bytes_per_sec, t4.flops_per_sec["float16"]) == (300e9, 65e12)
    refuses(lambda: t4.resolve_format("bfloat16"), "dtype='bfloat16'", "t4", "float16")
    assert t4.compute_dtype(FORMATS["int4"]) == "float16"
    assert find_device("RTX 4090") is DEVICES["rtx4090"]
    for bad in ("t5", "", None, 3):
        refuses(lambda bad=bad: find_device(bad), f"device={bad!r}", "h100")  # type: ignore[misc]


# Measuring -------------------------------------------------------------------------------------------------


def test_measure_takes_the_best_round_of_a_clock() -> None:
    intervals = [4.0, 2.0, 3.0, 0.5, 0.25, 1.0]  # reading, NumPy's float32 product
    # float32, bfloat16, int8: the loops on registers in 3 long rounds of 256 steps and 192 short ones of 16.
    for long, short in ((2.0, 1.0), (1.0, 2.0), (8.0, 0.25)):
        intervals += [16.0, long, 8.0, 4.0, short, *[3.0] * 190]
    compute = pytest.importorskip("nanoinfer._native").compute
    done = {
        (name, steps): compute(format=name, steps=steps, threads=num_cpus())
        for name in ("float32", "bfloat16", "int8")
        for steps in (256, 16)
    }
    times = itertools.chain.from_iterable((100.0 * i, 100.0 * i + d) for i, d in enumerate(intervals))
    ceiling = measure(Workload(num_bytes=1 << 16, matrix_size=8, num_rounds=3), clock=lambda: next(times))
    assert ceiling.bandwidth_bytes_per_sec == (1 << 16) / 2.0
    assert ceiling.flops_per_sec == {
        "float32": max(2 * 8**3 / 0.25, done["float32", 256] / 2.0),
        "bfloat16": done["bfloat16", 256] / 1.0,
        "int8": done["int8", 16] / 0.25,
    }
    assert ceiling.default_dtype == "float32"
    assert ceiling.memory_bytes is None
    refuses(lambda: measure(Workload(1 << 16, 8), clock=lambda: 1.0), "larger buffers")
    refuses(lambda: measure(Workload(1 << 60, 8), clock=lambda: 1.0), "device='measure'", "memory")


@pytest.mark.parametrize("waited", [0.4, 1e3, None])
def test_measure_warns_of_a_busy_machine(
    waited: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([5.0, 5.0 + (waited or 0.0)])
    monkeypatch.setattr(environment, "waited_seconds", lambda: None if waited is None else next(times))
    measure(Workload(num_bytes=1 << 16, matrix_size=8, num_rounds=1))
    assert ("threads waited 1000.0 s in " in caplog.text) == (waited == 1e3)


def test_measure_reads_buffers_of_halving_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller buffers are read more often, and none is slower than a larger one; the largest is the memory's."""
    reads: list[int] = []

    def reader(num_bytes: int, native: bool) -> Callable[[], object]:
        return lambda: reads.append(num_bytes)

    monkeypatch.setattr(measuring, "_reader", reader)
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    intervals = [4.0, 2.0, 1.0, 2.0, 9.0, 2.0, 0.25, 0.5, 1.0, 1.0]  # two rounds each; the last are NumPy's product
    times = itertools.chain.from_iterable((100.0 * i, 100.0 * i + d) for i, d in enumerate(intervals))
    workload = Workload(num_bytes=1 << 20, matrix_size=8, num_rounds=2, smallest_bytes=1 << 17)
    assert workload.buffers == [(1 << 20, 1), (1 << 19, 1), (1 << 18, 1), (1 << 17, 1)]
    ceiling = measure(workload, clock=lambda: next(times))
    assert reads == [size for size in (1 << 20, 1 << 19, 1 << 18, 1 << 17) for _ in range(3)]  # one to warm up
    assert ceiling.bandwidth_bytes_per_sec == (1 << 20) / 2.0
    assert ceiling.bandwidth_by_bytes == {
        1 << 20: (1 << 20) / 2.0,
        1 << 19: (1 << 19) / 1.0,
        1 << 18: (1 << 19) / 1.0,  # 2**18 / 2 is slower than the larger buffer
        1 << 17: (1 << 17) / 0.25,
    }
    several = Workload(num_bytes=1 << 20, matrix_size=8, num_rounds=2, smallest_bytes=1 << 14)
    assert several.buffers[-4:] == [(1 << 17, 1), (1 << 16, 2), (1 << 15, 4), (1 << 14, 8)]
    assert measuring._read_speed(1 << 14, 8, False, 1, iter([0.0, 0.5]).__next__) == (1 << 17) / 0.5
    assert Workload(1 << 16, 8).buffers == [(1 << 16, 1)]
    assert [size >> 20 for size, _ in measuring.CPU_WORKLOAD.buffers] == [1 << i for i in range(10, -1, -1)]


CACHED = Ceiling(
    "cached", 10.0, {"float32": 100.0}, "test", bandwidth_by_bytes={100: 50.0, 200: 40.0, 400: 10.0},
)  # fmt: skip


def test_the_bandwidth_depends_on_the_bytes_of_a_step() -> None:
    assert [CACHED.bandwidth(n) for n in (1, 100, 200, 400, 401, 1e30)] == [50.0, 50.0, 40.0, 10.0, 10.0, 10.0]
    assert CACHED.bandwidth(150) == 150 / 3.5  # 100 bytes take 2 s, 200 take 5 s
    assert CACHED.bandwidth(300) == 300 / 22.5
    seconds = [n / CACHED.bandwidth(n) for n in range(1, 500)]
    assert seconds == sorted(seconds)
    assert (CACHED.ridge(FP32, 1), CACHED.ridge(FP32, 1000)) == (2.0, 10.0)
    assert Ceiling("flat", 10.0, {}, "test").bandwidth(1) == 10.0
    assert all(device.bandwidth(1) == device.bandwidth_bytes_per_sec for device in DEVICES.values())


def test_a_prediction_reads_the_whole_step_at_the_speed_of_its_bytes() -> None:
    cost = decode(TINY, FP32)
    weights, whole = cost.model.bytes(0, 0), cost.model.bytes(4, 32)
    ceiling = Ceiling("cached", 1e3, {"float32": 1e30}, "test", bandwidth_by_bytes={weights: 1e6, 2 * whole: 1e3})
    step = predict(cost.model, ceiling, FP32, 4, 32)
    assert whole > weights  # by the keys and values
    expected = weights / 1e6 + (whole - weights) / (2 * whole - weights) * (2 * whole / 1e3 - weights / 1e6)
    assert step.memory_sec == pytest.approx(expected, rel=1e-12)
    assert predict(cost.model, ceiling, FP32, 4, 1).memory_sec < expected


def test_results_keep_the_bandwidths() -> None:
    kept = json.loads(json.dumps(CACHED.to_results()))
    again = Ceiling.from_results(kept)
    assert again.bandwidth_by_bytes == CACHED.bandwidth_by_bytes
    assert again.bandwidth(150) == CACHED.bandwidth(150)
    assert again.flops_per_sec == CACHED.flops_per_sec
    del kept["read_bytes_per_sec_by_size"]  # a file of an older version
    assert Ceiling.from_results(kept).bandwidth(150) == 10.0
    for size, speed in (("0", 1.0), ("-1", 1.0), ("x", 1.0), ("9" * 5000, 1.0), ("1", 0.0)):
        with pytest.raises(ValueError):
            Ceiling.from_results(kept | {"read_bytes_per_sec_by_size": {size: speed}})


def test_measure_measures() -> None:
    ceiling = measure(Workload(num_bytes=8 << 20, matrix_size=128, num_rounds=3))
    assert 1e8 < ceiling.bandwidth_bytes_per_sec < 1e14
    assert list(ceiling.bandwidth_by_bytes) == [8 << 20, 4 << 20, 2 << 20, 1 << 20]
    assert sorted(ceiling.bandwidth_by_bytes.values()) == list(ceiling.bandwidth_by_bytes.values())
    assert all(1e7 < rate < 1e16 for rate in ceiling.flops_per_sec.values())


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
