"""The native decoder at its boundary: bad calls change nothing, and other sequences in the batch change no bit."""

from __future__ import annotations

import gc
import math
import os
import runpy
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.environment import ROOT
from helpers.models import TINY, make_folder, make_model, make_weights, refuses
from helpers.native import BLOCK, FORMATS, ISAS, V, _native, engine_of, extend, make_decoder, new_decoder, tokens
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.load import load_model
from nanoinfer.config import LayerKind
from nanoinfer.engines.base import StepBatch
from nanoinfer.models.parameters import num_parameters
from nanoinfer.models.presets import PRESETS

CACHES = ["float32", "bfloat16", "int8", "int4"]
QUICK = "NANOINFER_TEST_EXTENSION" in os.environ  # make asan: every access is checked, so fewer will do
CALLS = 400 if QUICK else 2000
ERRORS = (ValueError, IndexError, TypeError, OverflowError)


@pytest.mark.parametrize("field", ["vocab_size", "block_size", "n_layer", "n_head", "n_embd", "mlp_dim", "threads",
                                   "max_num_cached_tokens"])  # fmt: skip
def test_sizes_out_of_range_are_refused(field: str) -> None:
    for value in (0, -1, -(2**63), 2**63 - 1, 2**64, 1.5, None, "3"):
        with pytest.raises(ERRORS):
            new_decoder(**{field: value})


def test_unknown_names_are_refused() -> None:
    for change in (
        {"weights": "int3"}, {"cache": "float16"}, {"isa": "mmx"}, {"activation": "tanh"}, {"n_head": 3},
        {"norm_epsilon": -1.0}, {"norm_epsilon": math.nan}, {"norm_epsilon": 2.0},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            new_decoder(**change)


def test_tensors_are_checked() -> None:
    decoder = new_decoder()
    wte = np.zeros((V, 16), np.float32)
    for name, values in (
        ("transformer.wte", wte), ("", wte), ("lm_head.weight", wte), ("transformer.wte.weight", wte.T.copy()),
        ("transformer.wte.weight", wte.astype(np.float64)), ("transformer.wte.weight", np.zeros((), "f4")),
        ("transformer.wte.weight", wte.ravel()), ("transformer.wte.weight", wte[None]),
        ("transformer.wte.weight", wte.view(np.uint16)), ("transformer.wte.weight", wte[:, :0]),
        ("transformer.ln_f.weight", np.zeros(15, np.float32)), ("transformer.ln_f.weight", wte),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            decoder.load(name, values)
    for dtype in ("float16", "bfloat16", "float64", ""):
        with pytest.raises(ValueError, match="dtype"):
            decoder.load("transformer.wte.weight", wte, dtype)
    for values in (None, "wte", 3, [[1.0]]):
        with pytest.raises(TypeError):
            decoder.load("transformer.wte.weight", values)
    with pytest.raises(ValueError, match="not loaded"):
        decoder.check_loaded()


def test_bad_steps_change_nothing() -> None:
    decoder, untouched = make_decoder(max_num_cached_tokens=72), make_decoder()
    a, b = decoder.open(), decoder.open()
    clean = untouched.open(), untouched.open()
    extend(decoder, [(a, tokens(5, 0)), (b, tokens(17, 1))])
    extend(untouched, [(clean[0], tokens(5, 0)), (clean[1], tokens(17, 1))])
    stride = decoder.logits_stride
    logits = np.zeros((1, stride), np.float32)
    frozen = logits.copy()
    frozen.flags.writeable = False
    good = {"handles": [a], "token_ids": [1], "num_new": [1], "num_logits": [1], "logits": logits}
    for change in (
        {"handles": [99]}, {"handles": [-1]}, {"handles": [2**70]}, {"handles": [a, a]}, {"handles": []},
        {"handles": [a, a], "token_ids": [1, 1], "num_new": [1, 1], "num_logits": [1, 0]},
        {"token_ids": [V]}, {"token_ids": [-1]}, {"token_ids": [2**63]}, {"token_ids": [1, 2]}, {"token_ids": []},
        {"token_ids": [1.5]}, {"token_ids": None}, {"num_new": [0]}, {"num_new": [-1]}, {"num_new": [2**62]},
        {"num_new": []}, {"num_logits": [2]}, {"num_logits": [-1]}, {"num_logits": []}, {"num_logits": [0]},
        {"token_ids": [1] * 28, "num_new": [28]},  # past the context
        {"logits": np.zeros((1, stride - 1), "f4")}, {"logits": np.zeros((2, stride), "f4")},
        {"logits": np.zeros((1, stride))}, {"logits": np.zeros((1, 2 * stride), "f4")[:, ::2]}, {"logits": frozen},
        {"logits": np.zeros(stride, "f4")}, {"logits": None},
    ):  # fmt: skip
        with pytest.raises(ERRORS):
            decoder.extend(**(good | change))
    for call in (
        lambda: decoder.truncate(a, 6), lambda: decoder.truncate(a, -1), lambda: decoder.truncate(99, 0),
        lambda: decoder.fork(99), lambda: decoder.close(-5), lambda: decoder.length(2**62),
    ):  # fmt: skip
        with pytest.raises(ERRORS):
            call()
    assert (decoder.length(a), decoder.length(b)) == (5, 17)
    got = extend(decoder, [(b, [3]), (a, [4])])
    assert np.array_equal(got, extend(untouched, [(clean[1], [3]), (clean[0], [4])]))


def test_a_full_pool_is_an_error_that_changes_nothing() -> None:
    decoder = make_decoder(max_num_cached_tokens=20)  # 2 blocks
    a, b = decoder.open(), decoder.open()
    first = extend(decoder, [(a, tokens(32, 0))])
    with pytest.raises(IndexError, match="kv_cache_memory"):
        extend(decoder, [(b, [1])])
    assert decoder.length(b) == 0
    decoder.truncate(a, 0)
    assert np.array_equal(extend(decoder, [(b, tokens(32, 0))]), first)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
def test_company_changes_no_bit(fmt: str, threads: int) -> None:
    for isa in ISAS:
        decoder = make_decoder(weights=fmt, threads=threads, isa=isa)
        texts = [tokens(1 + (7 * i) % 25, i) for i in range(20)]
        alone = []
        for text in texts:
            handle = decoder.open()
            alone.append(extend(decoder, [(handle, text)]))
            decoder.close(handle)
        for count in (2, 7, 20):
            handles = [decoder.open() for _ in range(count)]
            first = extend(decoder, [(h, t[:1]) for h, t in zip(handles, texts, strict=False)])
            rest = [(h, t[1:]) for h, t in zip(handles, texts, strict=False) if t[1:]]
            together = extend(decoder, rest)
            assert np.array_equal(first, np.concatenate([a[:1] for a in alone[:count]])), (isa, count)
            assert np.array_equal(together, np.concatenate([a[1:] for a in alone[:count]])), (isa, count)
            for h in handles:
                decoder.close(h)


@pytest.mark.parametrize("cache", CACHES)
def test_pieces_of_long_contexts_change_no_bit(cache: str) -> None:
    """Pieces of 512 positions are items of their own if threads would have too few; chunks and company change that."""
    config = replace(TINY, block_size=1200, n_head=4, num_kv_heads=2, layers=(LayerKind(600), LayerKind()), sinks=True)
    texts, found = [tokens(n, n) for n in (1150, 40, 530)], []
    for threads in (1, 2, 5):
        engine = engine_of(make_weights(config), 4096, threads=threads, kv_cache_dtype=cache)
        for lengths in ((1100, 1, 5, 44), (500, 600, 20, 30)):
            handle, rows, at = engine.open(), [], 0
            for n in lengths:  # logits of the last ones, which both have
                batch, at = StepBatch([handle], texts[0][at : at + n], [n], [min(n, 50)]), at + n
                rows.append(engine.extend(batch).copy())
            engine.truncate(handle, 1100)
            others = [engine.open() for _ in texts[1:]]
            batch = StepBatch([handle, *others], texts[0][1100:] + texts[1] + texts[2], [50, 40, 530], [50, 40, 100])
            together = engine.extend(batch).copy()
            assert np.array_equal(np.concatenate(rows)[-50:], together[:50]), (threads, lengths)
            found.append(together)
            for h in (handle, *others):
                engine.close(h)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_forks_share_and_then_diverge() -> None:
    decoder = make_decoder()
    text = tokens(19, 0)
    a = decoder.open()
    extend(decoder, [(a, text)])
    children = [decoder.fork(a) for _ in range(3)]
    got = extend(decoder, [(c, [i]) for i, c in enumerate(children)])
    for i in range(3):
        assert np.array_equal(got[i], extend(decoder, [(decoder.open(), [*text, i])])[-1])
    assert np.array_equal(extend(decoder, [(a, [9])]), extend(decoder, [(decoder.open(), [*text, 9])])[-1:])


DISTANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 0.05, "int8": 0.1, "q8_0": 0.1}  # of the logits' deviation
CACHE_DISTANCE = {"float32": 0.0, "bfloat16": 0.05, "int8": 0.1, "int4": 0.5}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_distance_from_float32(fmt: str, cache: str) -> None:
    text = tokens(30, 5)
    exact = make_model()(torch.tensor([text]))[0].numpy()
    decoder = make_decoder(weights=fmt, cache=cache)
    error = extend(decoder, [(decoder.open(), text)]) - exact
    limit = DISTANCE[fmt] + CACHE_DISTANCE[cache]
    assert math.sqrt((error**2).mean()) <= limit * exact.std()


def test_forced_instruction_set(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOINFER_ISA", "mmx")
    refuses(lambda: LLM(str(tiny_folder), engine="native"), "mmx", *ISAS)
    greedy = SamplingParams(max_tokens=12, temperature=0)
    words = []
    for isa in ISAS:
        monkeypatch.setenv("NANOINFER_ISA", isa)
        llm = LLM(str(tiny_folder), engine="native")
        assert llm.engine.isa == isa  # type: ignore[attr-defined]
        words.append(llm.generate("hello", greedy)[0].outputs[0].token_ids)
    assert all(w == words[0] for w in words)


def test_a_build_for_another_cpu_says_how_to_build_for_this_one(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_native, "fastest_isa", lambda: "scalar")
    LLM(str(tiny_folder), engine="native")
    assert caplog.messages == []
    monkeypatch.setattr(_native, "fastest_isa", lambda: "avx1024")
    LLM(str(tiny_folder), engine="native")
    (message,) = caplog.messages
    names = ", ".join(name for name, _ in _native.instruction_sets())
    assert f"were built for {names}, this CPU has avx1024" in message
    assert "NANOINFER_ISA=all" in message
    monkeypatch.setenv("NANOINFER_ISA", "scalar")  # asked for
    LLM(str(tiny_folder), engine="native")
    assert len(caplog.messages) == 1


def test_kv_cache_memory_is_a_hard_limit(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "m", replace(TINY, n_embd=24, n_head=3)))  # heads of 8: values are padded to 16
    block_bytes = 2 * 3 * (8 + 16) * 16 * 4
    for memory in (6 * block_bytes, 20 * block_bytes + 5):
        llm = LLM(folder, engine="native", kv_cache_memory=memory, max_num_seqs=3)
        engine: Any = llm.engine
        assert engine._decoder.cache_bytes == memory // block_bytes * block_bytes
        assert engine._decoder.blocks_total == engine.num_free_blocks == memory // block_bytes
        llm.generate(["hello"] * 5, SamplingParams(max_tokens=20, temperature=0))
    refuses(lambda: LLM(folder, engine="native", kv_cache_memory=block_bytes), "kv_cache_memory")


def test_isa_of_a_new_process(tiny_folder: Path) -> None:
    code = f"from nanoinfer import LLM; print(LLM({str(tiny_folder)!r}, engine='native').engine.isa)"
    env = os.environ | {"NANOINFER_ISA": "scalar"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "scalar"


@pytest.mark.slow
def test_the_weights_are_gone_once_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, also after an error of the Hub's library: not only when cycles are collected."""
    weights: list[weakref.ref[Any]] = []

    def load_and_watch(*args: Any, **kwargs: Any) -> Any:
        loaded = load_model(*args, **kwargs)
        weights.append(weakref.ref(loaded.weights))
        return loaded

    monkeypatch.setattr("nanoinfer.core.build.load_model", load_and_watch)
    gc.collect()
    gc.disable()
    try:
        llm = LLM("random:gpt2", engine="native", quantization="int8", max_num_seqs=1)
        assert weights[0]() is None
    finally:
        gc.enable()
    assert llm.tokenizer is None or llm.tokenizer.vocab_size == 50257


PEAK = """
import sys
from nanoinfer import LLM
def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:"))
options = {"engine": "native", "quantization": "int8", "max_num_seqs": 1, "threads": 1}
LLM("shakespeare", **options)  # what Python and torch take is not counted
before = peak()
LLM(sys.argv[1], **options)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.skipif(QUICK, reason="a sanitizer takes memory of its own")
@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("random", 0.9),  # 0.4 of the float32 weights: packed, and one tensor
        ("folder", 0.9),
        ("checkpoint", 2.3),  # PyTorch maps the file, whose pages count, and is imported
    ],
)
@pytest.mark.slow
def test_loading_takes_little_more_than_the_packed_weights(source: str, bound: float, tmp_path: Path) -> None:
    """Without care it is 1.3 (random) to 2.3 times the float32 weights."""
    config = PRESETS["gpt2"]
    name = "random:gpt2"
    if source != "random":
        config = replace(TINY, n_embd=512, n_head=8, n_layer=16, vocab_size=8192, bos_token_id=None)
        name = str(tmp_path / "m")
    if source == "folder":
        make_folder(Path(name), config, chars=None)
    elif source == "checkpoint":
        shape = {f: getattr(config, f) for f in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
        torch.save({"model": make_model(config).state_dict(), "model_args": shape}, name)
    run = subprocess.run([sys.executable, "-c", PEAK, name], capture_output=True, text=True, check=True)
    assert int(run.stdout) < bound * 4 * num_parameters(config)


def test_engines_share_their_threads() -> None:
    """Two pools would spin on each other's cores: a draft's steps took 9 ms instead of 0.4 beside its target."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("no /proc")
    first = make_decoder(threads=3)
    before = len(list(tasks.iterdir()))
    second = make_decoder(threads=3)
    assert len(list(tasks.iterdir())) <= before  # a thread of an earlier test may have ended
    del first
    assert extend(second, [(second.open(), [1, 2, 3])]) is not None


def test_steps_of_two_python_threads_and_a_sampler_on_one_buffer() -> None:
    """Wrong logits are the caller's doing; a crash would not be."""
    decoder = make_decoder(threads=2)
    logits = np.zeros((1, decoder.logits_stride), np.float32)

    def work(which: int) -> None:
        handle = decoder.open()
        for t in tokens(BLOCK, which):
            decoder.extend(handles=[handle], token_ids=[t], num_new=[1], num_logits=[1], logits=logits)
            (token,) = _native.sample_rows(logits=logits[:, :V], rows=[None])
            assert -1 <= token < V
            decoder.truncate(handle, decoder.length(handle) - 1 if t % 3 == 0 else decoder.length(handle))
        decoder.close(handle)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_nan_in_one_row_reaches_no_other(fmt: str) -> None:
    for isa in ISAS:
        decoder = new_decoder(weights=fmt, tie_word_embeddings=False, isa=isa)
        gpt = make_model(replace(TINY, tie_word_embeddings=False))
        alone = new_decoder(weights=fmt, tie_word_embeddings=False, isa=isa)
        for name, tensor in gpt.named_parameters():
            values = tensor.float().contiguous().numpy().copy()
            alone.load(name, values)
            if name == "transformer.wte.weight":
                values[3] = math.nan
            decoder.load(name, values)
        bad, good = [1, 3, 5], [[2, 4, 5], [7]]
        expected = [extend(alone, [(alone.open(), ids)]) for ids in good]
        got = extend(decoder, [(decoder.open(), ids) for ids in (good[0], bad, good[1])])
        assert np.array_equal(got[:3], expected[0]), isa
        assert np.isfinite(got[3]).all()
        assert np.isnan(got[4:6]).all()
        assert np.array_equal(got[6:], expected[1]), isa


def test_the_busiest_of_many_threads_has_a_share_that_is_known(tmp_path: Path) -> None:
    """The phases of a step, without more threads: a phase more, or larger items, are a loss on many cores."""
    config = replace(TINY, n_embd=256, n_head=4, n_layer=3, vocab_size=2048)
    llm = LLM(str(make_folder(tmp_path, config)), engine="native", threads=1, max_num_seqs=4)
    script = runpy.run_path(str(ROOT / "benchmarks" / "threads.py"))
    for batch in (1, 4):
        rows, heads = ("everything else", batch), ("attention", 4 * batch)
        first = [rows, ("matrix products", 24), ("attention", batch), heads, rows, ("matrix products", 8)]
        layer = [*first, rows, ("matrix products", 32), rows, ("matrix products", 8)]
        plan = script["phases"](llm, batch)
        assert [phase[:2] for phase in plan] == [rows, *3 * layer, rows, ("output head", 64)]
        assert [round(script["bound"](plan, n), 2) for n in (1, 2, 8, 16, 64)] == [1.0, 2.0, 8.0, 11.35, 16.0]
        assert math.isclose(sum(phase.num_bytes for phase in plan), llm.core.engine._decoder.weight_bytes, rel_tol=1e-4)
    assert [script["largest"](24, n) for n in (8, 16, 64)] == [3 / 24, 2 / 24, 1 / 24]
