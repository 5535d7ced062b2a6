"""The final hidden states of a step, which poolings read: they are what the logits are made from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.engines import make_engine, prompt
from helpers.models import TINY, make_limits, make_model, weights_of
from nanoinfer.config import EngineConfig
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.utils.arrays import to_numpy

native = pytest.mark.skipif(ENGINES["native"].unavailable() is not None, reason="built without the extension")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.slow_if(lambda name: name in ("compiled", "triton"))
@pytest.mark.nightly_if(lambda name, tied: name == "triton" and not tied)
def test_the_hidden_states_are_what_the_logits_are_made_from(name: str, tied: bool) -> None:
    gpt = make_model(replace(TINY, block_size=400, tie_word_embeddings=tied))
    engine = make_engine(name, gpt)
    a, b, c = engine.open(), engine.open(), engine.open()
    steps = ([(a, 5, 5), (b, 3, 1), (c, 2, 0)], [(c, 1, 1), (a, 4, 2)], [(b, 300, 290), (c, 7, 7)], [(a, 1, 0)])
    for step in steps:
        batch = StepBatch()
        for handle, num_new, num_logits in step:
            batch.add(handle, prompt(num_new, handle), num_logits)
        logits = torch.as_tensor(engine.extend(batch))
        engine.truncate(step[0][0], engine.length(step[0][0]) - 1)  # nothing but the next step changes them
        hidden = torch.as_tensor(engine.hidden())
        assert hidden.dtype == torch.float32
        assert hidden.shape == (sum(n for _, _, n in step), TINY.n_embd)
        torch.testing.assert_close(F.linear(hidden, gpt.lm_head.weight), logits, atol=1e-4, rtol=1e-4)
    found = []
    for hidden_only, num_rows in ((True, 0), (False, 5)):
        batch = StepBatch(hidden_only=hidden_only)
        batch.add(b, prompt(6, 1), 4)
        batch.add(c, prompt(2, 2), 1)
        assert engine.extend(batch).shape == (num_rows, TINY.vocab_size)
        found.append(torch.as_tensor(engine.hidden()).clone())
        engine.truncate(b, engine.length(b) - 6)
        engine.truncate(c, engine.length(c) - 2)
    assert torch.equal(*found)
    engine.extend(StepBatch())
    assert engine.hidden().shape == (0, TINY.n_embd)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.slow_if(lambda name: name in ("compiled", "triton"))
def test_the_hidden_states_of_all_new_tokens_need_no_logits(name: str) -> None:
    """Those of 290 prompt tokens and of 3 that are verified, with logits of some; the logits do not change by it."""
    engine, other = (make_engine(name, make_model(replace(TINY, block_size=400))) for _ in range(2))
    for e in (engine, other):
        for _ in range(3):
            e.open()
    a, b, c = engine.handles
    for step in ([(a, 5, 1), (b, 290, 0), (c, 2, 2)], [(c, 1, 1), (a, 4, 0)], [(b, 3, 3), (a, 1, 1)], [(c, 3, 0)]):
        some, every = StepBatch(all_hidden=True, hidden_only=step == [(c, 3, 0)]), StepBatch()
        for handle, num_new, num_logits in step:
            some.add(handle, prompt(num_new, handle), num_logits)
            every.add(handle, prompt(num_new, handle), num_new)
        logits, expected = (torch.as_tensor(e.extend(batch)) for e, batch in ((engine, some), (other, every)))
        rows, at = torch.as_tensor(other.hidden()), 0
        wanted = []
        for (_, num_new, num_logits), found in zip(step, engine.new_hidden(some), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), rows[at : at + num_new], atol=1e-4, rtol=1e-4)
            at += num_new
            wanted += range(at - num_logits, at)
        assert at == len(rows)
        torch.testing.assert_close(logits, expected[wanted], atol=1e-4, rtol=1e-4)


@native
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("int4", 0.4)])
def test_the_hidden_states_of_fewer_bits(quantization: str, tolerance: float) -> None:
    """They are not rounded themselves: what differs is the head, and the layers before."""
    gpt = make_model()
    engines = [NativeEngine(weights_of(gpt), make_limits(), EngineConfig(quantization=q)) for q in (None, quantization)]
    for engine in engines:
        batch = StepBatch()
        batch.add(engine.open(), prompt(9), 9)
        engine.extend(batch)
    exact, rounded = (to_numpy(e.hidden()) for e in engines)
    assert np.linalg.norm(exact - rounded) < tolerance * np.linalg.norm(exact)


@native
def test_the_decoder_checks_what_it_writes_to() -> None:
    engine = NativeEngine(weights_of(make_model()), make_limits())
    batch = StepBatch()
    batch.add(engine.open(), prompt(3), 2)
    engine.extend(batch)
    for shape in ((1, 16), (3, 16), (2, 15), (0, 16)):
        with pytest.raises(ValueError, match=r"out must be \(2, 16\)"):
            engine._decoder.hidden(out=torch.zeros(shape))
    with pytest.raises(TypeError):
        engine._decoder.hidden(out=torch.zeros(2, 16, dtype=torch.float64))
