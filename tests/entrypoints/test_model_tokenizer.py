"""LLM.get_tokenizer: what its methods return is what transformers' tokenizer of the same folder returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.chat import HI, chat_folder
from helpers.chat_templates import CHATML
from helpers.errors import refuses
from helpers.models import CHARS, make_folder
from nanoinfer import LLM
from nanoinfer.entrypoints.model_tokenizer import ModelTokenizer

TURNS = [*HI, {"role": "assistant", "content": "hello there"}, {"role": "user", "content": "again"}]
TEXTS = ["", "hello there", " be  brief\n", "Grüße \U0001f600", "<|im_start|>user\nhello<|im_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = chat_folder(tmp_path_factory.mktemp("chat") / "tiny")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> ModelTokenizer:
    return LLM(str(folder)).get_tokenizer()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode(ours: ModelTokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_ids_of_any_kind(ours: ModelTokenizer) -> None:
    ids = ours.encode("hello there")
    assert ours.decode(np.array(ids)) == ours.decode(tuple(ids)) == ours.decode(torch.tensor(ids)) == "hello there"  # type: ignore[arg-type]
    assert ours.decode(ids[0]) == ours.decode(ids[:1])
    for wrong in ([len(ours)], [-1], [1.5], "hello", None):
        refuses(lambda w=wrong: ours.decode(w), "token_ids=")  # type: ignore[misc]
    refuses(lambda: ours.encode(["hello"]), "text=['hello'] is not a string")  # type: ignore[arg-type]


def test_special_tokens(ours: ModelTokenizer, theirs: Any) -> None:
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id) == ("<|im_end|>", 2)
    assert (len(ours), ours.vocab_size) == (len(theirs), len(theirs))
    assert (ours.bos_token, ours.bos_token_id) == ("<|im_start|>", 1)  # of config.json; the tokenizer names none
    names = ["<|im_start|>", "<|im_end|>", "hello"]
    assert ours.convert_tokens_to_ids(names) == [1, 2, theirs.convert_tokens_to_ids("hello")]
    assert ours.convert_tokens_to_ids("<|im_end|>") == 2
    assert ours.convert_tokens_to_ids("no such token") is None


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chat_templates(ours: ModelTokenizer, theirs: Any, generation_prompt: bool) -> None:
    options = {"add_generation_prompt": generation_prompt}
    for messages in (HI, TURNS):
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert ours.apply_chat_template(messages, tokenize=False, **options) == text  # type: ignore[arg-type]
        assert ours.apply_chat_template(messages, return_dict=False, **options) == ids  # type: ignore[arg-type]
        assert ours.apply_chat_template([messages], tokenize=False, **options) == [text]  # type: ignore[arg-type]
    template = "{{ messages[0].content }}{{ enable_thinking }}"
    assert ours.apply_chat_template(HI, tokenize=False, chat_template=template, enable_thinking=False) == "HiFalse"


def test_arguments_of_transformers_that_change_the_result(ours: ModelTokenizer) -> None:
    for name, value in {"return_tensors": "pt", "padding": True, "return_dict": True, "max_length": 9}.items():
        refuses(lambda n=name, v=value: ours.apply_chat_template(HI, **{n: v}), f"{name} is not supported")  # type: ignore[misc]
    assert ours.apply_chat_template(HI, padding=False, truncation=None) == ours.apply_chat_template(HI)
    refuses(lambda: ours.apply_chat_template([]), "messages=[] is not a conversation")


def test_the_prompt_is_the_one_of_generate(folder: Path) -> None:
    """The usual program: the text of the template is the prompt."""
    llm = LLM(str(folder))
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    (given,), (chat,) = llm.generate([text]), llm.chat(TURNS)
    assert given.prompt_token_ids == chat.prompt_token_ids == tokenizer.encode(text)


def test_other_tokenizers(tmp_path: Path) -> None:
    chars = LLM(str(make_folder(tmp_path / "chars"))).get_tokenizer()
    assert (chars.decode(chars.encode("Go"), skip_special_tokens=True), chars.eos_token_id) == ("Go", None)
    assert (chars.convert_tokens_to_ids("o"), chars.convert_tokens_to_ids("oo")) == (CHARS.index("o"), None)
    assert (chars.bos_token, chars.eos_token) == (CHARS[0], None)
    built_in = LLM("shakespeare").get_tokenizer()
    assert (built_in.bos_token, built_in.bos_token_id, built_in.eos_token_id) == ("\n", 198, None)
    none = LLM(str(make_folder(tmp_path / "none", chars=None)))
    refuses(none.get_tokenizer, "has no tokenizer")
