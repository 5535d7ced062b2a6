"""The random numbers: Random123's published answers, and the native twin equal to the reference bit for bit."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from nanoinfer.sampling.rng import philox4x32, uniform, uniform_reference

WORD64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
MAX = 2**64 - 1


def words(text: str) -> tuple[int, ...]:
    """ "1f a0" -> (31, 160)."""
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(
    "counter, key, answer",
    [  # Random123 (Salmon et al. 2011), tests/kat_vectors, philox4x32 with 10 rounds
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(answer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seed, sample, position, answer",
    [
        (0, 0, 0, "6627e8d5 e169c58d"),
        (MAX, MAX, MAX, "408f276d 41c83b0e"),
        (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, "d16cfe09 94fdcceb"),
    ],
)
def test_a_uniform_is_the_first_53_bits_of_two_words(seed: int, sample: int, position: int, answer: str) -> None:
    """The position is the low half of the counter, the sample the high half, the seed the key."""
    first, second = words(answer)
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniform_reference(seed=seed, sample=sample, position=position) == expected
    assert uniform(seed=seed, sample=sample, position=position) == expected


@settings(max_examples=100, deadline=None)
@given(WORD64, WORD64, WORD64)
@example(0, 0, 0)
@example(MAX, MAX, MAX)
def test_native_equals_the_reference_bit_for_bit(seed: int, sample: int, position: int) -> None:
    native = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    expected = uniform_reference(seed=seed, sample=sample, position=position)
    assert native.uniform(seed=seed, sample=sample, position=position).hex() == expected.hex()
    assert 0.0 <= expected < 1.0


@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
def test_uniforms_are_uniform_along_each_argument(varied: str) -> None:
    arguments = {"seed": 7, "sample": 0, "position": 0}
    counts, pairs, last = [0] * 64, [0] * 64, 0.0
    for i in range(20_000):
        u = uniform(**(arguments | {varied: i}))
        counts[int(u * 64)] += 1
        pairs[int(last * 8) * 8 + int(u * 8)] += 1  # a number says nothing about the next
        last = u
    assert chisquare(counts).pvalue > 1e-6
    assert chisquare(pairs).pvalue > 1e-6


@pytest.mark.parametrize("name", ["seed", "sample", "position"])
@pytest.mark.parametrize("bad", [-1, 2**64, 10**100, 1.0, math.nan, "1", None, [1]], ids=str)
def test_native_rejects_what_is_no_64_bit_integer(name: str, bad: object) -> None:
    native = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    with pytest.raises(TypeError):
        native.uniform(**({"seed": 1, "sample": 2, "position": 3} | {name: bad}))


def test_native_takes_its_three_arguments_by_name_only() -> None:
    native = pytest.importorskip("nanoinfer._native", reason="the native extension is not built")
    with pytest.raises(TypeError):
        native.uniform(1, 2, 3)
    with pytest.raises(TypeError):
        native.uniform(seed=1, sample=2)
    with pytest.raises(TypeError):
        native.uniform(seed=1, sample=2, position=3, state=4)
