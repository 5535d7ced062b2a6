"""Recurrent layers on engine native: logits of the reference, the same bits in any company, all instruction sets.
tests/engines/test_recurrent.py has sequences of calls and requests, test_family_engines.py all formats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.models import TINY, load_gpt, make_weights
from helpers.native import ISAS, _native, engine_of, new_decoder
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import LayerKind, Rotary
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.kv.plan import state_bytes
from nanoinfer.recurrence import Recurrence

STATES = {
    "delta": Recurrence("delta", 4, 4, 32, 2, 16),
    "delta, odd widths": Recurrence("delta", 2, 6, 39, 3, 7),
    "mamba2": Recurrence("mamba2", 4, 4, 64, 1, 16, bias=True),
    "mamba2, odd widths": Recurrence("mamba2", 5, 6, 11, 3, 9, projection_bias=True, norm_groups=3),
    "beside, odd widths": Recurrence("mamba2", 3, 6, 11, 2, 9, norm_groups=0),
    "conv": Recurrence("conv", 3, 1, 64),
}
PENDING = 8  # of helpers/native.py
LENGTH = 300
"""More than the rows that go through the layers together (kMaxRows in forward.h)."""
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (4, LENGTH))


def weights_of(name: str) -> Weights:
    """Return random weights of a model with a recurrent layer, one with attention, and a recurrent one.

    beside: the recurrent ones have attention too, and the other has no MLP.
    """
    beside, rotary = name.startswith("beside"), Rotary(16)
    state = LayerKind(rotary=rotary if beside else None, recurrent=True, beside=beside)
    attention = LayerKind(rotary=rotary, mlp=not beside)
    config = replace(
        TINY, block_size=320, n_embd=64, n_layer=3, n_head=4, n_inner=96, gated_mlp=True, activation="silu", norm="rms",
        bias=False, learned_positions=False, layers=(state, attention, state), recurrence=STATES[name],
        attention_gate=name.startswith("delta"),
    )  # fmt: skip
    weights = make_weights(config)
    tensors = dict(weights.read())
    for name, tensor in tensors.items():
        tensor.values[...] += name.endswith("_scale")
    return replace(weights, read=lambda: iter(tensors.items()))


def new_engine(weights: Weights, **options: object) -> NativeEngine:
    return engine_of(weights, max_num_cached_tokens=4 * 320, num_states=6, **options)


def logits_of(engine: NativeEngine, rows: list[int], *counts: int) -> np.ndarray:
    """Return the logits of all tokens of TOKENS' rows, (rows, tokens, V), in steps of some new tokens each."""
    handles, found, first = [engine.open() for _ in rows], [], 0
    for n in counts:
        batch = StepBatch()
        for handle, row in zip(handles, rows, strict=True):
            batch.add(handle, TOKENS[row, first : first + n].tolist(), n)
        found.append(engine.extend(batch).reshape(len(rows), n, -1).copy())
        first += n
    for handle in handles:
        engine.close(handle)
    return np.concatenate(found, 1)


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("name", STATES)
def test_logits_are_those_of_the_reference_and_the_same_in_any_company(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have more tokens than a pass over the layers, as many as can be pending, and one more. Any division of the
    tokens into steps gives the same bits."""
    weights = weights_of(name)
    counts = (*(PENDING,) * 9, 1, 1, 3, 9, 214)
    expected = load_gpt(weights).eval()(torch.tensor(TOKENS)).detach().numpy()
    for isa in ISAS:
        monkeypatch.setenv("NANOINFER_ISA", isa)
        engine = new_engine(weights, threads=2)
        found = logits_of(engine, [0, 1, 2, 3], *counts)
        assert error_of(found, expected) < 2e-5
        alone = new_engine(weights, threads=1)
        assert np.array_equal(logits_of(alone, [2], *counts)[0], found[2])
        assert np.array_equal(logits_of(alone, [1], LENGTH)[0], found[1])


def test_few_tokens_of_a_sequence_are_in_one_pass_over_the_layers() -> None:
    """Between 250 tokens of a prompt and the end of a pass are 6 rows, and the next sequence has 8."""
    engine = new_engine(weights_of("delta"))
    alone = logits_of(engine, [1], PENDING, 1)[0]
    prompt, few = engine.open(), engine.open()
    found = []
    for n, count in ((250, PENDING), (1, 1)):
        batch, (first, have) = StepBatch(), (engine.length(prompt), engine.length(few))
        batch.add(prompt, TOKENS[0, first : first + n].tolist(), 0)
        batch.add(few, TOKENS[1, have : have + count].tolist(), count)
        found.append(engine.extend(batch).copy())
    assert np.array_equal(np.concatenate(found), alone)


@pytest.mark.parametrize("name", STATES)
def test_the_decoder_has_the_memory_that_is_planned(name: str) -> None:
    weights = weights_of(name)
    assert new_engine(weights)._decoder.state_bytes == state_bytes(weights.config, PENDING)


def decoder_of(rule: str = "delta", num_states: int = 3, **sizes: int) -> object:
    states, layers = _native.StateShape(), [_native.LayerShape() for _ in range(2)]
    for field, size in (
        {"taps": 4, "num_heads": 4, "value_dim": 5, "num_key_heads": 2, "key_dim": 3, "num_pending": PENDING} | sizes
    ).items():
        setattr(states, field, size)
    for layer in layers:
        layer.n_head = layer.n_kv_head = 2
        layer.head_dim, layer.mlp_dim, layer.recurrent = 8, 64, True
    return new_decoder(rule=rule, recurrence=states, num_states=num_states, layers=layers)


def test_the_decoder_checks_states_and_steps() -> None:
    decoder = decoder_of()
    for change in (
        {"rule": "rwkv"}, {"rule": "none"}, {"rule": "conv"}, {"num_states": 0}, {"num_pending": 0}, {"taps": 1},
        {"taps": 65}, {"num_key_heads": 3}, {"num_key_heads": 0}, {"key_dim": 0}, {"value_dim": 2**24},
        {"norm_groups": 0}, {"norm_groups": 3},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            decoder_of(**change)  # type: ignore[arg-type]
    a, b = decoder.open(), decoder.open()  # type: ignore[attr-defined]
    logits = np.empty((0, decoder.logits_stride), np.float32)  # type: ignore[attr-defined]
    step = {"handles": [a, b], "token_ids": [1, 2], "num_new": [1, 1], "num_logits": [0, 0], "logits": logits}
    good = {"states": [(1, 0), (3, PENDING)], "copies": [(0, 1), (1, 3)]}
    for change in (
        {"states": []}, {"states": [(1, 0)]}, {"states": [(1, 0), (1, 0)]}, {"states": [(0, 0), (1, 0)]},
        {"states": [(1, 0), (4, 0)]}, {"states": [(1, -1), (2, 0)]}, {"states": [(1, PENDING + 1), (2, 0)]},
        {"copies": [(1, 0)]}, {"copies": [(4, 1)]}, {"copies": [(-1, 1)]}, {"copies": [(0, 4)]},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            decoder.extend(**step, **(good | change))  # type: ignore[attr-defined]


def test_a_decoder_without_recurrent_layers_takes_no_states() -> None:
    decoder = new_decoder()
    step = {"handles": [decoder.open()], "token_ids": [1], "num_new": [1], "num_logits": [0]}
    logits = np.empty((0, decoder.logits_stride), np.float32)
    for given in ({"states": [(1, 0)]}, {"copies": [(0, 1)]}):
        with pytest.raises(ValueError):
            decoder.extend(**step, logits=logits, **given)
