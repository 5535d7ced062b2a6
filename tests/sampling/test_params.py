"""SamplingParams: every field's range, what is accepted for convenience, and that nothing else gets through."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import LLM, BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import BadWords

NAN, INF = math.nan, math.inf
NAMES = [f.name for f in fields(SamplingParams)]
BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.0, True, "8", NAN, [1]],
    "temperature": [-0.1, NAN, INF, -INF, True, None, "1", 1e7, 1j],
    "top_k": [-2, 1.0, False, None, "5"],
    "top_p": [0, 0.0, 2, 1.0000001, -0.5, NAN, INF, True, None, "0.9"],
    "min_p": [-0.1, 1.1, NAN, True, None, "0"],
    "presence_penalty": [NAN, INF, -1001, 1001.0, False, None, "0"],
    "frequency_penalty": [NAN, -INF, -1001, 1001.0, False, None, "0"],
    "repetition_penalty": [0, 0.0, 1e-320, -1.0, NAN, INF, 1001, True, None, "1"],
    "seed": [-1, 2**64, 1.0, True, "0", NAN],
    "n": [0, -1, 129, 1.0, True, None, "2"],
    "best_of": [0, -1, 129, 1.0, True, "2"],
    "stop": ["", [""], ["a", ""], [1], 7, 0, False, b"\n", [None]],
    "stop_token_ids": [[-1], [1.0], ["a"], [True], "a", 7, 0, False, [None], np.array([0.5])],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "ignore_eos": [0, 1, None, "yes", 0.0],
    "min_tokens": [-1, 1.0, True, None, 129],
    "logprobs": [-2, 1001, 1.0, True, "5"],
    "prompt_logprobs": [-2, 1001, 1.0, True, "5"],
    "logit_bias": [7, "ab", {-1: 0.0}, {1.0: 0.0}, {True: 0.0}, {1: NAN}, {1: INF}, {1: 1e7}, {1: "a"}, {"a": 1}, [1]],
    "bad_words": ["ab", 7, False, [""], ["a", ""], [1], [None]],
    "allowed_token_ids": [[-1], [1.0], ["a"], [True], "a", 7, 0, False, [None], np.array([0.5])],
    "skip_special_tokens": [0, 1, None, "yes"],
    "spaces_between_special_tokens": [0, 1, None, "yes"],
    "detokenize": [0, 1, None, "yes"],
    "truncate_prompt_tokens": [0, -2, 1.0, True, "5"],
    "output_kind": ["", "Delta", None, 1, ["delta"]],
    "overflow": ["", "Slide", "wrap", None, True, 1, ["slide"]],
    "slide_stride": [0, -1, 1.0, True, "1"],
    "structured_outputs": [
        7,
        "ab",
        ["json"],
        True,
        {"jsn": "x"},
        {"regex": ""},
        {"regex": 3},
        {"json": []},
        {"json": " "},
        {"grammar": b"x"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": 0},
        {"json_object": 1},
        {"json": {1j: NAN}},
        {"disable_any_whitespace": "no"},
        {"disable_additional_properties": 1},
    ],
}


def test_every_field_has_bad_values() -> None:
    assert list(BAD) == NAMES


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD.items() for value in values], ids=repr)
def test_a_bad_value_is_named_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(NanoinferError) as e:
        SamplingParams(**{name: value})
    message = str(e.value)
    assert message.startswith(name)
    assert "\n" not in message
    inside = [*value, *(value.values() if isinstance(value, dict) else ())] if hasattr(value, "__iter__") else []
    assert any(repr(v) in message for v in (value, *inside))


@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_too_large_for_a_float_is_an_error_like_any(name: str, digits: int) -> None:
    with pytest.raises(NanoinferError, match=f"^{name}="):
        SamplingParams(**{name: 10**digits})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given_, kept",
    [
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "\n\n"]}, {"stop": ("x", "\n\n")}),
        ({"stop": None}, {"stop": ()}),
        ({"stop": []}, {"stop": ()}),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"stop_token_ids": range(3)}, {"stop_token_ids": (0, 1, 2)}),
        ({"logit_bias": {3: -1.5, 4: 2}}, {"logit_bias": {3: -1.5, 4: 2}}),
        ({"logit_bias": {}}, {"logit_bias": {}}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"temperature": 0}, {"temperature": 0, "greedy": True}),
        ({"temperature": 1e-300}, {"temperature": 1e-300, "greedy": False}),
        ({"top_p": 1, "min_p": 1, "top_k": 10**30}, {"top_p": 1, "min_p": 1, "top_k": 10**30}),
        ({"max_tokens": 3, "min_tokens": 3}, {"min_tokens": 3}),
        ({"max_tokens": None, "min_tokens": 300}, {"max_tokens": None, "min_tokens": 300}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"logprobs": -1, "prompt_logprobs": -1}, {"logprobs": -1, "prompt_logprobs": -1, "num_logprobs": -1}),
        ({"bad_words": ["a b"]}, {"bad_words": ("a b",)}),
        ({"bad_words": None}, {"bad_words": ()}),
        ({"allowed_token_ids": np.array([3, 1])}, {"allowed_token_ids": (3, 1)}),
        ({"allowed_token_ids": ()}, {"allowed_token_ids": None}),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
        ({"output_kind": "delta"}, {"output_kind": RequestOutputKind.DELTA}),
        ({"overflow": "slide", "slide_stride": 1}, {"slide_stride": 1}),
        ({"n": 128}, {"best_of": None, "num_sequences": 128, "num_logprobs": None}),
        ({"n": 2, "best_of": 2}, {"num_sequences": 2, "num_logprobs": None}),
        ({"n": 2, "best_of": 128}, {"num_sequences": 128, "num_logprobs": 0}),
        ({"best_of": 4, "logprobs": 3}, {"num_sequences": 4, "num_logprobs": 3}),
    ],
    ids=str,
)
def test_accepted_forms(given_: dict[str, Any], kept: dict[str, Any]) -> None:
    params = SamplingParams(**given_)
    assert {name: getattr(params, name) for name in kept} == kept


@pytest.mark.parametrize(
    "given_, kind, kept",
    [
        ({"json": {"type": "object", "b": 1, "a": None}}, "json", '{"type": "object", "b": 1, "a": null}'),
        ({"json": '{"type": "object"}', "regex": None}, "json", '{"type": "object"}'),
        ({"regex": "a+", "json_object": False}, "regex", "a+"),
        ({"choice": ["yes", "no"]}, "choice", ("yes", "no")),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True}, "json_object", True),
    ],
)
def test_structured_outputs_are_one_of_five_kinds(given_: dict[str, Any], kind: str, kept: Any) -> None:
    structured = StructuredOutputsParams(**given_)
    assert (structured.kind, getattr(structured, kind)) == (kind, kept)
    assert SamplingParams(structured_outputs=structured) == SamplingParams(structured_outputs=given_)  # type: ignore[arg-type]


def test_bad_words_exclude_the_token_that_would_complete_one() -> None:
    words = BadWords([[7], [1, 2], [1, 3], [5, 1, 4], [9, 9]])
    assert words.excluded([]) == [7]
    assert words.excluded([1]) == [7, 2, 3]
    assert words.excluded([5, 1]) == [7, 2, 3, 4]
    assert words.excluded([5, 1, 9]) == [7, 9]
    assert words.excluded((0, 0)) == [7]


def test_exclusions_and_stop_strings_that_contradict() -> None:
    with pytest.raises(NanoinferError, match=r"^allowed_token_ids is empty: it excludes every token"):
        SamplingParams(allowed_token_ids=[])  # type: ignore[arg-type]
    with pytest.raises(NanoinferError, match=r"^stop=\['a'\] needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)  # type: ignore[arg-type]


def test_structured_outputs_that_contradict_or_are_too_long() -> None:
    with pytest.raises(NanoinferError, match=r"^structured_outputs has nothing: give exactly one of json, regex, "):
        StructuredOutputsParams()
    with pytest.raises(NanoinferError, match=r"^structured_outputs has json and regex: give exactly one of json, "):
        StructuredOutputsParams(json="{}", regex="a")
    with pytest.raises(NanoinferError, match=r"^structured_outputs.regex has 131073 characters, the limit is 131072: "):
        StructuredOutputsParams(regex="a" * 131073)
    with pytest.raises(NanoinferError, match=r"^structured_outputs.choice has 131074 characters, the limit is 131072"):
        StructuredOutputsParams(choice=("a" * 65537,) * 2)
    with pytest.raises(NanoinferError, match=r"^structured_outputs.grammar contains a lone surrogate"):
        StructuredOutputsParams(grammar='start: "\ud800"')
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(NanoinferError, match=r"^structured_outputs.json={'items': .*\.\.\. is not JSON: Recursion"):
        StructuredOutputsParams(json=deep)


def test_fields_that_contradict_each_other() -> None:
    with pytest.raises(NanoinferError, match=r"^min_tokens=4 is more than max_tokens=3: "):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(NanoinferError, match=r"^best_of=2 is less than n=3: "):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(NanoinferError, match=r"^slide_stride=2 needs overflow='slide'"):
        SamplingParams(slide_stride=2)
    with pytest.raises(NanoinferError, match=r"^max_tokens=None does not end with overflow='slide': set max_tokens"):
        SamplingParams(max_tokens=None, overflow="slide")


HUGE = 10**5000  # more digits than Python prints


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, HUGE) for name in NAMES),
        ("stop", [HUGE]),
        ("stop_token_ids", [HUGE]),
        ("logit_bias", {HUGE: "x"}),
        ("logit_bias", {1: HUGE}),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_integer_too_large_to_print_is_no_exception(name: str, value: Any) -> None:
    try:
        SamplingParams(**{name: value})
    except NanoinferError as e:
        message = str(e)
    else:
        assert name in ("max_tokens", "top_k", "stop_token_ids", "truncate_prompt_tokens")  # which have no upper limit
        return
    assert message.startswith(name), message
    assert len(message) < 300


@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams, LLM])
def test_an_unknown_keyword_is_a_type_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'max_new_tokens'"):
        kind(*["shakespeare"] * (kind is LLM), max_new_tokens=1)


def test_what_the_caller_changes_afterwards_changes_nothing() -> None:
    ids, bias = [5, 6], {1: 2.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)  # type: ignore[arg-type]
    ids.append(7)
    bias[1] = 3.0
    assert (params.stop_token_ids, params.logit_bias) == ((5, 6), {1: 2.0})
    with pytest.raises(FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3) | st.tuples(inner),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JUNK)))
def test_any_mix_of_junk_is_accepted_or_a_nanoinfer_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except NanoinferError:
        return
    assert params.min_tokens >= 0
    assert params.max_tokens is None or params.max_tokens >= params.min_tokens
    assert all(isinstance(s, str) and s for s in params.stop)
    assert all(isinstance(t, int) and t >= 0 for t in params.stop_token_ids)
    assert 0 < params.top_p <= 1
    assert math.isfinite(params.temperature)


def test_numbers_of_numpy_and_torch_are_kept_as_pythons() -> None:
    params = SamplingParams(
        max_tokens=np.int32(5), seed=np.uint64(2**63), top_k=torch.tensor(3), temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([5, 6]), logit_bias={np.int64(7): np.float32(1.5)}, logprobs=np.int8(2),  # type: ignore[arg-type, dict-item]
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=5, seed=2**63, top_k=3, temperature=0.5, stop_token_ids=(5, 6), logit_bias={7: 1.5}, logprobs=2
    )
    for value in (params.max_tokens, params.seed, params.top_k, *params.stop_token_ids, *(params.logit_bias or {})):
        assert type(value) is int
    assert type(params.temperature) is float


BAD_BEAMS: dict[str, list[Any]] = {
    "beam_width": [0, -1, 65, 1.0, True, None, "4", NAN],
    "max_tokens": [0, -1, 1.0, True, "8", NAN],
    "ignore_eos": [0, 1, None, "yes"],
    "temperature": [-0.1, NAN, INF, True, None, "1"],
    "length_penalty": [-10.1, 10.5, NAN, INF, -INF, True, None, "1", 10**400],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "early_stopping": [0, 1, None, "", "Never", "always", 1.0, ["never"], np.array(True)],
}


def test_every_field_of_a_beam_search_has_bad_values() -> None:
    assert list(BAD_BEAMS) == [f.name for f in fields(BeamSearchParams)]


@pytest.mark.parametrize("name, value", [(name, v) for name, values in BAD_BEAMS.items() for v in values], ids=repr)
def test_a_bad_value_of_a_beam_search_is_named_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(NanoinferError) as e:
        BeamSearchParams(**{"beam_width": 4, name: value})
    assert str(e.value).startswith(name)
    assert "\n" not in str(e.value)


def test_parameters_of_a_beam_search_are_frozen_and_have_vllms_defaults() -> None:
    params = BeamSearchParams(np.int64(4), max_tokens=None, length_penalty=np.float32(0.5))  # type: ignore[arg-type]
    assert params == BeamSearchParams(4, None, False, 0.0, 0.5, False, False)
    assert type(params.beam_width) is int
    assert BeamSearchParams(1).length_penalty == 1.0
    assert BeamSearchParams(64, early_stopping="never").early_stopping == "never"
    assert params.sampling_params == SamplingParams(n=4, max_tokens=None, temperature=0.0, skip_special_tokens=False)
    with pytest.raises(FrozenInstanceError):
        params.beam_width = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams()  # type: ignore[call-arg]
