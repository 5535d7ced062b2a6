"""checks.py: values of any type are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanoinfer import NanoinferError, SamplingParams
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.errors import show
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.checks import require_bool, require_choice, require_float, require_int

PAIR: Any = np.array([1, 2])


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    "value",
    [PAIR, nested(5000), 10**5000, "a" * 5000, "\x1b[31m\n"],
    ids=["array", "nested", "digits", "long", "escape"],
)
@pytest.mark.parametrize(
    "check",
    [
        lambda value: require_int("x", value, 0, 9),
        lambda value: require_float("x", value, 0.0, 9.0),
        lambda value: require_bool("x", value),
        lambda value: require_choice("x", value, ("a", "b")),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_short_line(check: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(NanoinferError, match=r"^x=") as e:
        check(value)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 300


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda v: ModelConfig(n_layer=v), "n_layer"),
        (lambda v: EngineConfig(threads=v), "threads"),
        (lambda v: SchedulerConfig(max_num_batched_tokens=v), "max_num_batched_tokens"),
        (lambda v: SamplingParams(temperature=v), "temperature"),
        (lambda v: TrainConfig(data=v, out="o"), "data"),
    ],
)
def test_an_array_is_refused_by_name(make: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(NanoinferError, match=f"^{name}=array"):
        make(PAIR)


def test_show_cuts_what_is_deep_or_long() -> None:
    assert show(nested(5000)) == "[" * 200 + "..."
    assert show(10**5000) == "an integer of 16610 bits"
    assert show("a" * 300) == "'" + "a" * 199 + "..."
    assert show("a\nb") == r"'a\nb'"
