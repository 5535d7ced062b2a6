"""The native sampler draws the reference's tokens: all filters, ties, extremes, errors, strides, threads."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.models import refuses
from helpers.samplers import CONTROLS, GPT2_V, LOGITS, agree, make_logits, make_row, normal, outcome, random_row
from nanoinfer import LLM
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling import native, sampler
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="the native extension is not built")

INF, NAN = math.inf, math.nan
LAST = 1 - 2**-53  # the largest uniform


# Both on the same rows --------------------------------------------------------------------------------------


@pytest.fixture
def given_uniforms(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """A function that makes row i of both samplers draw with the i-th uniform: the seed is the index."""

    def use(values: list[float]) -> None:
        for module in (sampler, native):
            monkeypatch.setattr(module, "uniform", lambda seed, sample, position: values[seed])

    return use


# Random rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("V, num_rows", [(1, 8), (2, 40), (17, 60), (64, 30), (65, 30), (700, 60), (2048, 40)])
def test_random_rows(kind: str, V: int, num_rows: int) -> None:
    rng, g = random.Random(f"{kind} {V}"), np.random.default_rng(V)
    for seed in range(num_rows):
        agree(make_logits(kind, V, g), [random_row(rng, V, seed)])


@pytest.mark.parametrize("kind", LOGITS)
def test_random_rows_of_gpt2s_vocabulary(kind: str) -> None:
    rng, g = random.Random(kind), np.random.default_rng(1)
    for seed in range(8):
        agree(make_logits(kind, GPT2_V, g), [random_row(rng, GPT2_V, seed)])


@pytest.mark.parametrize("temperature", [0.8, 2.5])
@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_along_a_text(name: str, temperature: float) -> None:
    """Logits without ties, hundreds of uniforms: not one token may need the oracle."""
    logits = np.broadcast_to(normal(1, 2048, seed=3) * 2, (250, 2048))
    params = SamplingParams(temperature=temperature, max_tokens=2000, **CONTROLS[name])
    rows = [make_row(params, [1, 2, 3, 3], [*range(n % 60)], (7, 8), seed=n) for n in range(250)]
    assert agree(logits, rows) == 0


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.75), SamplingParams(top_k=5, min_p=0.1)])
def test_uniforms_on_borders(params: SamplingParams, given_uniforms: Callable[[list[float]], None]) -> None:
    """Weights that are powers of two: multiples of 1/64 are borders, exactly or nearly."""
    logits = np.float32([math.log(w) for w in (1, 2, 8, 1, 4, 16, 32)] + [-INF, -800.0])
    uniforms = [0.0, 5e-324, 1e-300, LAST, *(k / 64 for k in range(64)), *(k / 64 - 2**-54 for k in range(1, 64))]
    given_uniforms(uniforms)
    rows = [make_row(params, seed=i) for i in range(len(uniforms))]
    agree(np.tile(logits, (len(rows), 1)), rows, uniforms)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=5), SamplingParams(min_p=0.9)])
def test_a_uniform_on_a_border_draws_the_next_token(
    params: SamplingParams, given_uniforms: Callable[[list[float]], None]
) -> None:
    """Equal weights are exactly 1, so nothing is rounded: the running sum must exceed u times the total."""
    logits = np.float32([-INF] + [3.0] * 8 + [-900.0, -INF])
    uniforms = [k / 8 for k in range(8)] + [k / 8 - 2**-53 for k in range(1, 8)]
    given_uniforms(uniforms)
    rows = [make_row(params, seed=i) for i in range(len(uniforms))]
    drawn = [d.token_id for d in native.sample(np.tile(logits, (len(rows), 1)), rows)]
    assert drawn == [*range(1, 9), *range(1, 8)]


@pytest.mark.parametrize("V", [2, 300, GPT2_V])
@pytest.mark.parametrize("name", CONTROLS)
def test_the_first_and_the_last_uniform(V: int, name: str, given_uniforms: Callable[[list[float]], None]) -> None:
    uniforms = [0.0, LAST]
    given_uniforms(uniforms)
    logits = normal(2, V, seed=V) * 3
    logits[:, 0], logits[:, -1] = -INF, -INF if V > 2 else 1.0
    params = SamplingParams(**{k: v for k, v in CONTROLS[name].items() if k not in ("logit_bias", "min_tokens")})
    agree(logits, [make_row(params, [1], [1], seed=i) for i in range(2)], uniforms)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_logits_at_all(data: st.DataObject) -> None:
    some = (
        st.floats(width=32) | st.integers(-3, 3).map(float) | st.sampled_from([-INF, 0.0, -0.0, 3.4028234663852886e38])
    )
    logits = np.float32([data.draw(st.lists(some, min_size=1, max_size=12))])
    seed = data.draw(st.integers(0, 2**32))
    agree(logits, [random_row(random.Random(seed), logits.shape[-1], seed)])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 200))
@example(0, 1, 1)
def test_rows_together_are_the_rows_alone(seed: int, B: int, V: int) -> None:
    rng = random.Random(seed)
    logits = normal(B, V, seed=seed)
    rows = [random_row(rng, V, i) for i in range(B)]
    alone = [outcome(native.sample, logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    if any(isinstance(a, str) for a in alone):  # all tokens excluded
        assert isinstance(outcome(native.sample, logits, rows), str)
    else:
        assert native.sample(logits, rows) == [a[0] for a in alone]


def test_logprobs_are_the_references() -> None:
    logits = normal(3, 40)
    rows = [make_row(SamplingParams(temperature=t, logprobs=n)) for t, n in ((0.0, 0), (1.0, 5), (0.0, 100))]
    drawn = native.sample(logits, rows)
    assert drawn == sampler.sample(logits, rows)
    assert [len(d.logprobs or ()) for d in drawn][::2] == [1, 40]


# Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=2)])
@pytest.mark.parametrize(
    "bad", [[0, NAN, 1], [0, -NAN, 1], [NAN, INF, 0], [0, INF, 1], [-INF, -INF, INF], [-INF] * 3, [NAN] * 3], ids=str
)
def test_rows_that_are_not_finite_are_the_references_error(params: SamplingParams, bad: list[float]) -> None:
    logits = np.float32([[0.0, 1.0, 2.0], bad])
    rows = [make_row(params), make_row(params)]
    refuses(lambda: native.sample(logits, rows), "largest logit is", "exclude every token")
    assert outcome(native.sample, logits, rows) == outcome(sampler.sample, logits, rows)


@pytest.mark.parametrize("bad", [[0, NAN, 1], [NAN, INF, 0], [-INF] * 3, [0, INF, 1]], ids=str)
def test_the_extension_reports_every_row_that_is_not_finite(bad: list[float]) -> None:
    logits = np.float32([[0.0, 1.0, 2.0], bad, [3.0, 1.0, 2.0], bad])
    options = native._native.SampleOptions(uniform=0.5, top_k=1)
    for rows in ([None] * 4, [options] * 4, [None, options] * 2, [options, None] * 2):
        assert native._native.sample_rows(logits=logits, rows=rows) == [2, -1, 0, -1]


@pytest.mark.parametrize("V", [3, 100, 5000])
def test_one_nan_anywhere_is_found(V: int) -> None:
    for at in {0, 1, V // 2, V - 1}:
        for value in (NAN, -NAN):
            logits = np.zeros((1, V), np.float32)
            logits[0, at] = value
            for params in (
                SamplingParams(temperature=0.0),
                SamplingParams(top_k=1),
                SamplingParams(logit_bias={at: 1.0}),
            ):
                with pytest.raises(NanoinferError, match="largest logit is nan"):
                    native.sample(logits, [make_row(params)])
            excluded = make_row(SamplingParams(min_tokens=1), end=(at,))  # its logit is replaced
            assert agree(logits, [excluded]) == 0


ID_LISTS = ("prompt_ids", "output_ids", "bias_ids", "excluded_ids")
BAD_OPTIONS = [
    *(("uniform", v) for v in (NAN, -0.1, 1.0, INF)),
    *(("temperature", v) for v in (NAN, -1.0, INF)),
    ("top_k", -1),
    *(("top_p", v) for v in (NAN, 0.0, -0.5, 1.1)),
    *(("min_p", v) for v in (NAN, -0.1, 1.1)),
    *(("repetition_penalty", v) for v in (NAN, 0.0, -1.0, INF)),
    *((name, v) for name in ("presence_penalty", "frequency_penalty") for v in (NAN, INF, -INF)),
    *((name, v) for name in ID_LISTS for v in ([-1], [2**31], [10**30])),
    *(("bias_values", v) for v in ([NAN], [INF], [1.0, 2.0], [])),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD_OPTIONS, ids=str)
def test_options_out_of_range_are_refused(name: str, value: Any) -> None:
    good: dict[str, Any] = {"uniform": 0.5, "bias_ids": [1], "bias_values": [1.0]}
    with pytest.raises(ValueError, match=name):
        native._native.SampleOptions(**(good | {name: value}))


@pytest.mark.parametrize("value", [None, 3, "ab", ["a"], [1.5], [None], [[1]]], ids=str)
@pytest.mark.parametrize("name", ID_LISTS)
def test_token_ids_that_are_no_integers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        native._native.SampleOptions(uniform=0.5, **{name: value})


def test_options_that_do_not_fit_the_logits_are_refused() -> None:
    sample_rows, Options = native._native.sample_rows, native._native.SampleOptions
    logits = np.zeros((2, 10), np.float32)
    fine = Options(uniform=0.5)
    with pytest.raises(ValueError, match="2 rows, but there are options for 1"):
        sample_rows(logits=logits, rows=[fine])
    with pytest.raises(ValueError, match="row 1: bias_ids holds 10, which is not below the vocabulary's 10"):
        sample_rows(logits=logits, rows=[None, Options(uniform=0.5, bias_ids=[3, 10], bias_values=[1.0, 1.0])])
    with pytest.raises(ValueError, match="row 0: excluded_ids holds 900"):
        sample_rows(logits=logits, rows=[Options(uniform=0.5, excluded_ids=(900,)), fine])
    with pytest.raises(ValueError, match="0 columns"):
        sample_rows(logits=np.zeros((1, 0), np.float32), rows=[None])
    with pytest.raises(ValueError, match="rows must be contiguous"):
        sample_rows(logits=np.zeros((10, 2), np.float32).T, rows=[None, None])
    for row in (3, "x", object(), {}):
        with pytest.raises(TypeError, match="row 1 is neither"):
            sample_rows(logits=logits, rows=[None, row])
    for array in (logits.astype(np.float64), logits[0], logits[None], [[1.0]], None):
        with pytest.raises(TypeError):
            sample_rows(logits=array, rows=[None])
    with pytest.raises(TypeError):
        sample_rows(logits, [None, None])
    assert sample_rows(logits=logits[:0], rows=[]) == []


# Logits that change meanwhile --------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [300, 5000, GPT2_V])
@pytest.mark.slow_if(lambda V: V < GPT2_V)
def test_logits_that_change_while_they_are_read(V: int) -> None:
    """Any token of the row, or -1: no search, sort or index may run past the row."""
    logits = np.zeros((1, V), np.float32)
    generator = np.random.default_rng(V)
    states = [generator.uniform(-scale, scale, V).astype(np.float32) for scale in (1e-3, 1, 30, 3e38)]
    states += [np.full(V, value, np.float32) for value in (NAN, INF, -INF, 7.0)]
    options = [{}, {"top_k": 5}, {"top_k": V // 2}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 99, "top_p": 0.5}]
    rows = [None, *(native._native.SampleOptions(uniform=0.999, **given) for given in options)]
    rows += [native._native.SampleOptions(uniform=0.5, temperature=0.0, bias_ids=[3], bias_values=[1.0])]
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for state in states:
                np.copyto(logits, state)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for thread in writers:
        thread.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for row in rows:
                (token,) = native._native.sample_rows(logits=logits, rows=[row])
                assert -1 <= token < V
    finally:
        done.set()
        for thread in writers:
            thread.join()


# Memory -----------------------------------------------------------------------------------------------------


def test_logits_are_read_in_place_whatever_the_distance_of_rows() -> None:
    wide = normal(6, 50, seed=1)
    wide[:, 47:] = 1e9  # not to be seen
    rows = [make_row(SamplingParams(top_p=0.9), seed=i) for i in range(3)]
    options = [native._options(row, 47) for row in rows]
    one = np.broadcast_to(wide[1:2, :47], (3, 47))
    for view in (wide[:3, :47], wide[::2, :47], one, wide.T.copy().T[:3, :47]):
        expected = sampler.sample(view, rows)
        assert native.sample(view, rows) == expected
        if view.strides[-1] == view.itemsize:
            drawn = native._native.sample_rows(logits=view, rows=options)
            assert drawn == [d.token_id for d in expected]


def test_arrays_and_tensors_give_the_same_tokens_and_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = pytest.importorskip("torch").from_numpy(normal(6, 50, seed=1))
    rows = [make_row(SamplingParams(temperature=t, logprobs=2), seed=i) for i, t in enumerate((0.0, 1.0, 1.0))]
    read: list[Any] = []
    sample_rows = native._native.sample_rows

    def watched(*, logits: Any, rows: list[Any]) -> list[int]:
        read.append(logits)
        return sample_rows(logits=logits, rows=rows)

    monkeypatch.setattr(native._native, "sample_rows", watched)
    for key in ((slice(0, 3), slice(0, 50)), (slice(0, 6, 2), slice(2, 47))):
        expected = sampler.sample(tensor[key], rows)
        for logits in (tensor[key], tensor.numpy()[key]):
            assert native.sample(logits, rows) == expected
            assert isinstance(read[-1], np.ndarray)
            assert read[-1].ctypes.data == tensor[key].data_ptr()
    columns = np.asfortranarray(tensor[:3].numpy())
    assert native.sample(columns, rows) == sampler.sample(columns, rows)


def test_inference_tensors_and_gradients_are_no_obstacle() -> None:
    row = make_row(SamplingParams(temperature=0.0))
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        logits = torch.arange(5.0)[None] * 1
    assert native.sample(logits, [row])[0].token_id == 4
    assert native.sample(torch.arange(5.0)[None].requires_grad_(), [row])[0].token_id == 4


def test_threads_do_not_disturb_each_other() -> None:
    rng = random.Random(0)
    work = []
    for V in (2000, 30, 5000, 700):
        logits = normal(20, V, seed=V)
        work.append((logits, [make_row(SamplingParams(top_p=0.9), [*range(9)], seed=rng.getrandbits(32))] * 20))
    expected = [native.sample(*w) for w in work]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda w: native.sample(*w), work)) == expected


def test_the_threads_of_a_decoder_sample_the_same_tokens(tiny_folder: Path) -> None:
    """Large batches are divided among them, unless they are busy: then the caller samples all rows."""
    rows = [make_row(SamplingParams(temperature=t, top_k=40), seed=i) for i, t in enumerate((0.0, 1.0, 0.7) * 3)]
    logits = normal(len(rows), GPT2_V, seed=3)
    bad = logits.copy()
    bad[7, 12] = NAN
    expected = [sampler.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    for threads in (1, 2, 5):
        llm = LLM(str(tiny_folder), engine="native", threads=threads)
        assert native.sample(logits, rows) == expected
        refuses(lambda: native.sample(bad, rows), "largest logit is nan")
        with ThreadPoolExecutor(3) as pool:
            sampled = [pool.submit(native.sample, logits, rows) for _ in range(12)]
            (output,) = llm.generate("To be", SamplingParams(max_tokens=9, temperature=0))
            assert [future.result() for future in sampled] == [expected] * 12
        assert len(output.outputs[0].token_ids) == 9
        del llm


def test_no_rows_are_no_tokens() -> None:
    assert native.sample(np.zeros((0, 5), np.float32), []) == []


# The choice -------------------------------------------------------------------------------------------------


def test_cpus_sample_natively_and_other_devices_do_not(tiny_folder: Path) -> None:
    assert choose_sampler("cpu") is native.sample
    assert choose_sampler("cpu", "reference") is sampler.sample
    refuses(lambda: choose_sampler("cpu", "fast"), "sampler='fast'", "reference")
    assert LLM(str(tiny_folder), device="cpu").core._steps._sampler is native.sample


def test_without_the_extension_the_reference_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    assert not native.available()
    assert choose_sampler("cpu") is sampler.sample
