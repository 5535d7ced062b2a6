"""The Triton sampler draws the reference's tokens: all controls, ties, extremes, state on the device, compiled kernels.

Without a CUDA device Triton's interpreter runs the kernels (conftest.py), and they are compiled for GPUs that are not
there. With one, the same bodies run on it. Where a token differs, the oracle of test_native_sampler decides.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.environment import TESTS

pytest.importorskip("triton")

from helpers.models import refuses
from helpers.samplers import CONTROLS, GPT2_V, LOGITS, make_logits, make_row, random_row
from helpers.samplers import agree as with_the_reference
from nanoinfer.errors import missing_extra
from nanoinfer.sampling import sampler
from nanoinfer.sampling import triton as triton_sampler
from nanoinfer.sampling.native import choose_sampler
from nanoinfer.sampling.rng import uniform_reference
from nanoinfer.sampling.triton import Sample, TritonSampler
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, where a temperature of 1e-300 divides
INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there, so nothing is interpreted")
DEVICES = [
    pytest.param(CPU, marks=ON_CPU, id="interpreter"),
    pytest.param(
        torch.device("cuda"),
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        id="cuda",
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def sample() -> Sample:
    """One for all tests, so that a new row must put right whatever the rows before it left on its slot."""
    return Sample()


def agree(sample: Sample, logits: Tensor, rows: list[Sequence], device: torch.device) -> int:
    """Assert that the kernels draw what the reference does; return how many rows needed the oracle."""
    return with_the_reference(logits.numpy(), rows, draw=lambda _, rows: sample(logits.to(device), rows))


# The same tokens ----------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.slow_if(lambda kind, device: device == CPU and kind != "masked")
def test_random_rows(kind: str, device: torch.device, sample: Sample) -> None:
    rng, g = random.Random(kind), np.random.default_rng(3)
    needed = 0
    for V, count in ((1, 2), (2, 4), (65, 8), (701, 6), (4099, 1)):
        logits = torch.from_numpy(np.concatenate([make_logits(kind, V, g) for _ in range(count)]))
        for i in range(count):
            needed += agree(sample, logits[i : i + 1], [random_row(rng, V, i)], device)
    assert needed <= 1


@on_devices
@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.slow_if(lambda device: device == CPU)
@pytest.mark.nightly_if(lambda name, device: device == CPU and name not in ("all", "top_k, top_p", "top_p"))
def test_every_control_on_many_rows_at_once(name: str, device: torch.device, sample: Sample) -> None:
    """Logits without ties: not one token may need the oracle."""
    logits = torch.randn(1, 2051, generator=torch.Generator().manual_seed(3)).mul(2).expand(8, -1)
    params = [SamplingParams(temperature=t, max_tokens=2000, **CONTROLS[name]) for t in (0.8, 2.5)]
    rows = [make_row(params[n % 2], [1, 2, 3, 3], [*range(n % 60)], (7, 8), seed=n) for n in range(8)]
    assert agree(sample, logits, rows, device) == 0


@on_devices
@pytest.mark.slow_if(lambda device: device == CPU)
def test_gpt2s_vocabulary(device: torch.device, sample: Sample) -> None:
    logits = torch.randn(6, GPT2_V, generator=torch.Generator().manual_seed(1)) * 3
    some: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 50, "temperature": 0.8}, {"top_p": 0.95},
        {"top_p": 0.9, "temperature": 30.0}, {"top_k": 40000, "min_p": 1e-4, "repetition_penalty": 1.2},
    ]  # fmt: skip
    rows = [make_row(SamplingParams(**p), [5, 6], [7, 50256], seed=i) for i, p in enumerate(some)]
    assert agree(sample, logits, rows, device) == 0


@on_devices
@pytest.mark.slow_if(lambda device: device == CPU)
def test_every_top_k_and_extreme_top_p_with_ties(device: torch.device, sample: Sample) -> None:
    logits = torch.randint(-3, 4, (1, 70), generator=torch.Generator().manual_seed(0)).float()
    rows = [make_row(SamplingParams(top_k=k), seed=k) for k in range(1, 72, 7)]
    rows += [make_row(SamplingParams(top_p=p), seed=9) for p in (1e-300, 1e-9, 0.3, 1 - 1e-9, math.nextafter(1, 0))]
    agree(sample, logits.expand(len(rows), -1), rows, device)


@on_devices
@pytest.mark.parametrize("high", [0, 2, 4])
def test_parts_whose_largest_logits_are_far_apart(high: int, device: torch.device, sample: Sample) -> None:
    """Weights are relative to the largest logit of their part, then scaled: no factor may overflow or be NaN."""
    rng, g = random.Random(high), torch.Generator().manual_seed(high)
    logits = torch.randn(5, 2048, generator=g) * 3 + torch.tensor([0.0, -6, -INF, -900, -3e38])[:, None]
    logits = logits.roll(high, 0).flatten()[None, : 4 * 2048 + 65]  # the last part is short
    params: list[dict[str, Any]] = [{}, {"top_p": 0.95}, {"top_k": 2100}, {"min_p": 1e-9, "temperature": 200.0}]
    rows = [make_row(SamplingParams(**p), seed=high) for p in params]
    rows += [random_row(rng, logits.shape[1], i) for i in range(4)]
    assert agree(sample, logits.expand(len(rows), -1), rows, device) == 0


@on_devices
@pytest.mark.parametrize("bad", [[0, NAN, 1], [0, INF, 1], [-INF] * 3, [NAN] * 3], ids=str)
def test_rows_that_are_not_finite(bad: list[float], device: torch.device, sample: Sample) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], bad], device=device)
    for p in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=2, presence_penalty=1.0)):
        rows = [make_row(p, seed=i) for i in range(2)]
        excluded = bad == [-INF] * 3
        words = ["the largest logit is -inf"] if excluded else ["the model's largest logit is", "dtype=float32"]
        refuses(lambda rows=rows: sample(logits, rows), *words)
        slots = TritonSampler(2, 3, device)
        for i, row in enumerate(rows):
            slots.assign(i, row)
        wanted = torch.ones(2, dtype=torch.bool, device=device)
        drawn = slots.sample_slots(logits, torch.arange(2, device=device), wanted)
        assert drawn[0].item() == sampler.sample(logits[:1], rows[:1])[0].token_id
        assert drawn[1].item() == triton_sampler.NOT_FINITE


@on_devices
def test_logprobs_and_rows_without_room_are_the_references(device: torch.device, sample: Sample) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).to(device)
    bias = dict.fromkeys(range(600), 1.0)
    rows = [
        make_row(p, seed=3) for p in (SamplingParams(logprobs=2), SamplingParams(logit_bias=bias), SamplingParams())
    ]
    assert sample(logits, rows) == sampler.sample(logits, rows)
    assert sample(logits[:0], []) == []


# Randomness ---------------------------------------------------------------------------------------------------


@ON_CPU
def test_uniforms_are_the_references_bit_for_bit() -> None:
    from nanoinfer.kernels.triton import sampler as kernels

    slots = TritonSampler(1, 3, CPU)
    found = torch.zeros(1, dtype=torch.float64)
    for seed, index, position in [(0, 0, 0), (2**64 - 1, 2**40 + 5, 2**33 + 1), (2**63, 7, 1), (1, 2**32 - 1, 99)]:
        slots._words[0, kernels.SEED.value] = seed - 2**64 if seed >= 2**63 else seed
        slots._words[0, kernels.SAMPLE.value], slots._words[0, kernels.POSITION.value] = index, position
        _write_uniform()[1,](slots._words, found)
        assert found.item() == uniform_reference(seed=seed, sample=index, position=position)


def _write_uniform() -> Any:
    from helpers import triton_uniform

    return triton_uniform.write_uniform


# State on the device ------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.slow_if(lambda device: device == CPU)
def test_texts_grow_on_the_device_as_they_do_for_the_reference(device: torch.device) -> None:
    """Slots in disorder, rows that are not wanted, a slot that changes hands, padded columns, rows far apart."""
    V, width, num_slots = 331, 340, 5
    g, rng = torch.Generator().manual_seed(5), random.Random(5)
    favourites = torch.randn(width, generator=g) * 3  # tokens come again, so that counts matter
    bias = {3: 2.0, 330: -1.0}
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.9, "frequency_penalty": 0.7},
        {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.4, "min_tokens": 6},
        {"top_k": 20, "repetition_penalty": 0.7},
        {"min_p": 0.05, "logit_bias": bias, "min_tokens": 3},
        {"temperature": 1.7},
    ]
    rows = [make_row(SamplingParams(**s), [1, 2, 400], [2], (4, 9), seed=i) for i, s in enumerate(settings)]
    texts = [[2] for _ in rows]
    slots = TritonSampler(num_slots, V, device)
    for slot, row in enumerate(rows):
        slots.assign(slot, row)
    for step in range(10):
        if step == 6:  # another text takes the slot of one with counts
            rows[1] = make_row(SamplingParams(presence_penalty=2.0, top_k=5), [8], [3, 3], seed=77)
            texts[1] = [3, 3]
            slots.assign(1, rows[1])
        order = rng.sample(range(num_slots), num_slots)
        wanted = [rng.random() < 0.8 for _ in order]
        logits = favourites + torch.randn(num_slots, width, generator=g)
        logits[:, V:] = 1e9  # never drawn
        given = torch.tensor(order, device=device), torch.tensor(wanted, device=device)
        drawn = slots.sample_slots(logits.to(device)[:, :width], *given).tolist()
        for i, slot in enumerate(order):
            if wanted[i]:
                row = rows[slot]
                ends = row.end_token_ids
                now = make_row(row.params, row.prompt_token_ids, texts[slot], tuple(ends), row.seed)
                expected = sampler.sample(logits[i : i + 1, :V], [now])[0].token_id
                assert drawn[i] == expected, (step, slot)
                texts[slot].append(expected)
    assert min(map(len, texts)) > 3
    assert max(len(text) - len({*text}) for text in texts) > 1


@on_devices
def test_more_rows_than_are_drawn_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "SCRATCH_ROWS", 4)
    logits = torch.randn(11, 90, generator=torch.Generator().manual_seed(2))
    rows = [make_row(SamplingParams(top_p=0.8, frequency_penalty=0.1), seed=i) for i in range(11)]
    assert agree(Sample(), logits, rows, device) == 0


def test_what_is_not_covered_is_refused() -> None:
    slots = TritonSampler(2, 100, CPU)
    fine = make_row(SamplingParams(top_k=10**30, logit_bias={99: 1.0}, min_tokens=2), end=(99,))
    assert slots.covers(fine) is None
    for params, end, words in (
        (SamplingParams(logprobs=0), (), "logprobs=0"),
        (SamplingParams(logit_bias=dict.fromkeys(range(513), 1.0)), (), "513 entries"),
        (SamplingParams(logit_bias={100: 1.0}), (), "100"),
        (SamplingParams(min_tokens=1), tuple(range(65)), "65 end tokens"),
        (SamplingParams(max_tokens=2**15, presence_penalty=1.0), (), "32767"),
    ):
        row = make_row(params, end=end)
        assert words in (slots.covers(row) or "")
        refuses(lambda row=row: slots.assign(0, row), words, "reference")
    refuses(lambda: slots.assign(2, fine), "slot=2", "2")
    flags = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    for logits in (torch.zeros(2, 99), torch.zeros(2, 100).double(), torch.zeros(100, 2).T):
        refuses(lambda logits=logits: slots.sample_slots(logits, *flags), "logits of shape", "at least 100 columns")
    refuses(lambda: slots.sample_slots(torch.zeros(3, 100), *flags), "3 rows")


# The choice ---------------------------------------------------------------------------------------------------


def test_cuda_logits_are_drawn_by_the_kernels_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_sampler("cuda:0"), Sample)
    monkeypatch.setattr(triton_sampler, "why_unavailable", lambda: missing_extra("triton", "gpu"))
    assert choose_sampler("cuda:0") is sampler.sample
    refuses(lambda: TritonSampler(1, 5, CPU), "triton is not installed", "pip install")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_draws_on() -> None:
    device, V = torch.device("cuda"), 997
    slots = TritonSampler(2, V, device)
    params = SamplingParams(top_p=0.9, frequency_penalty=0.5)
    for slot in range(2):
        slots.assign(slot, make_row(params, [1], seed=slot))
    logits = torch.randn(2, V, device=device)
    which, wanted = torch.arange(2, device=device), torch.ones(2, dtype=torch.bool, device=device)
    slots.sample_slots(logits, which, wanted)
    for slot in range(2):  # compiling sampled tokens: upload the state again
        slots.assign(slot, make_row(params, [1], seed=slot))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = slots.sample_slots(logits, which, wanted)
    texts: list[list[int]] = [[], []]
    for _ in range(8):
        logits.normal_()
        rows = [make_row(params, [1], text, seed=i) for i, text in enumerate(texts)]
        graph.replay()
        expected = [s.token_id for s in sampler.sample(logits, rows)]
        assert drawn.tolist() == expected
        for text, token in zip(texts, expected, strict=True):
            text.append(token)


# Compiled for GPUs that are not here --------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.slow
@pytest.mark.nightly_if(lambda capability: capability < 90)
def test_kernels_compile_without_spilling(capability: int) -> None:
    script = TESTS / "helpers" / "compile_sampler.py"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, str(capability)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == ["weigh", "sample"]
    for name, stack, shared, num_fusible, waits in lines:
        assert int(stack) == 0, f"{name} spills"
        assert int(shared) <= 48 * 1024, name
        assert int(num_fusible) == 0, name  # the penalties round the product and the sum
        assert waits == str(capability >= 90), name
