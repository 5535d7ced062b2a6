"""Prompts in every form: what is accepted, what is refused, and which of several an error names."""

from __future__ import annotations

import array
import json
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.models import make_folder, refuses
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.inputs.prompts import as_list, numbered
from nanoinfer.protocols.fields import FieldError

GREEDY = SamplingParams(max_tokens=3, temperature=0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(make_folder(tmp_path_factory.mktemp("prompts") / "m")), engine="static")


@pytest.mark.parametrize(
    "given, expected",
    [
        ("Go", ["Go"]),
        ("", [""]),
        ([], []),
        ([[]], [[]]),
        ([39, 15], [[39, 15]]),
        ((39, 15), [[39, 15]]),
        (range(3), [[0, 1, 2]]),
        (["Go", [39, 15]], ["Go", [39, 15]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ({"prompt": "Go"}, ["Go"]),
        ({"prompt_token_ids": [39, 15]}, [[39, 15]]),
        (OrderedDict(prompt_token_ids=np.array([39, 15])), [[39, 15]]),
        ([{"prompt": "Go"}, {"prompt_token_ids": (1,)}, "Ho"], ["Go", [1], "Ho"]),
        ([np.int64(39), np.uint8(15)], [[39, 15]]),
        (np.array([39, 15]), [[39, 15]]),
        (np.array([[39, 15], [1, 2]], dtype=np.int32), [[39, 15], [1, 2]]),
        ([np.array([39]), np.array([15, 1])], [[39], [15, 1]]),
        (np.array(["Go", "Ho"]), ["Go", "Ho"]),
        (torch.tensor([39, 15]), [[39, 15]]),
        ([torch.tensor(39), 15], [[39, 15]]),
        (array.array("i", [39, 15]), [[39, 15]]),
    ],
)
def test_every_form_of_a_prompt(given: Any, expected: list[str | list[int]]) -> None:
    made = as_list(given)
    assert made == expected
    assert all(type(t) is int for prompt in made if not isinstance(prompt, str) for t in prompt)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"text": "To be"}, "prompt: the key 'text' is unknown: use one of prompt, prompt_token_ids"),
        ({}, "prompt={}: give exactly one of prompt and prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "give exactly one of prompt and prompt_token_ids"),
        ({"prompt": [1]}, "prompt=[1] is not a string"),
        ({"prompt": b"a"}, "prompt=b'a' is not a string"),
        ({"prompt_token_ids": "Go"}, "prompt_token_ids='Go' is not a list of token ids"),
        ({"prompt_token_ids": {"prompt_token_ids": [1]}}, "is not a list of token ids"),
        ({"prompt_token_ids": [["a"]]}, "token id ['a'] is not an integer"),
        ({1, 2}, "prompt={1, 2} is neither a string nor a list of token ids"),
        (frozenset({1}), "prompt=frozenset({1}) is neither"),
        ({"a": 1}.keys(), "prompt=dict_keys(['a']) is neither"),
        (b"To be", "prompt=b'To be' is neither a string nor a list of token ids"),
        (bytearray(b"To"), "prompt=bytearray(b'To') is neither"),
        (memoryview(b"To"), "prompt=<memory at"),
        ([b"To be"], "prompt=b'To be' is neither"),
        ([1, 2.5], "token id 2.5 is not an integer"),
        ([True, 1], "token id True is not an integer"),
        (np.array([True]), "token id True is not an integer"),
        (torch.tensor([True]), "token id True is not an integer"),
        (np.array([1.0, 2.0]), "token id 1.0 is not an integer"),
        (np.array(5), "prompt=5 is neither"),
        (["Go", {1}], "prompt 2 of 2: prompt={1} is neither"),
        ([1, "Go"], "prompt 1 of 2: prompt=1 is neither"),
        ("\ud800", "character 0, '\\ud800', is half a surrogate pair"),
    ],
)
def test_what_only_looks_like_a_prompt_is_refused(given: Any, message: str, llm: LLM) -> None:
    refuses(lambda: as_list(given), message)
    refuses(lambda: llm.generate(given, GREEDY), message)
    refuses(lambda: llm.perplexity(given), message)


def test_the_keys_that_are_listed_are_those_that_are_taken(llm: LLM) -> None:
    refuses(lambda: llm.generate({"text": "Go"}, GREEDY), "use one of prompt, prompt_token_ids, cache_salt")
    assert llm.generate({"prompt": "Go", "cache_salt": "a"}, GREEDY)[0].outputs[0].token_ids
    with pytest.raises(NanoinferError, match=r"'cache_salt' is unknown: use one of prompt, prompt_token_ids$"):
        as_list({"prompt": "Go", "cache_salt": "a"})


def test_dicts_and_arrays_generate_what_strings_do(llm: LLM) -> None:
    (plain,) = llm.generate("Go", GREEDY)
    ids = llm.tokenize("Go")
    for prompt in ({"prompt": "Go"}, {"prompt_token_ids": ids}, np.array(ids), torch.tensor(ids)):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs == plain.outputs
        assert json.loads(json.dumps(asdict(output)))["prompt_token_ids"] == ids
        assert llm.tokenize(prompt) == ids
        assert llm.perplexity(prompt)[0].log_likelihood == llm.perplexity("Go")[0].log_likelihood
    assert llm.generate({"prompt": "Go"}, GREEDY)[0].prompt == "Go"


def test_a_token_id_outside_the_vocabulary_is_shown_as_a_plain_number(llm: LLM) -> None:
    refuses(lambda: llm.generate([np.int64(59)], GREEDY), "token id 59 is not an integer in [0, 58]")


def test_an_error_among_several_keeps_its_fields() -> None:
    error = FieldError("it is bad", "prompt", 404, "code")
    with pytest.raises(FieldError, match=r"^prompt 2 of 3: it is bad$") as caught, numbered(1, 3):
        raise error
    assert vars(caught.value) == vars(error)
    assert str(error) == "it is bad"


def test_an_error_of_one_prompt_among_several_says_which(llm: LLM) -> None:
    prompts = ["Go"] * 52
    prompts[16] = "a" * 33
    refuses(lambda: llm.generate(prompts, GREEDY), "prompt 17 of 52: ", "33 tokens")
    refuses(lambda: llm.generate(["Go", [99]], GREEDY), "prompt 2 of 2: token id 99 is not an integer in [0, 58]")
    refuses(lambda: llm.perplexity(["Go", "", "a"]), "text 2 of 3: ")
    with pytest.raises(ValueError, match=r"^(?!prompt 1 of 1)"):
        llm.generate(["a" * 33], GREEDY)
    assert not llm.core.unfinished


def test_numbers_of_numpy_reach_the_engine_as_integers(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "m")), engine="static", max_num_seqs=np.int64(2))  # type: ignore[arg-type]
    (output,) = llm.generate("Go", SamplingParams(max_tokens=3, seed=np.int64(7)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(asdict(output)))["seed"] == 7
