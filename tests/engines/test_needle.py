"""A needle: models without attention, trained to recite what a text has assigned (benchmarks/train_needle.py)."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from helpers.engines import make_core, make_engine, nightly_if_interpreted
from helpers.models import load_gpt, submit
from nanoinfer import SamplingParams
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.engines.registry import ENGINES
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"delta": ROOT / "ladder" / "toy", "mamba2": ROOT / "tests" / "toys" / "mamba2"}


@cache
def words(length: int) -> str:
    rng = random.Random(length)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=length))


@pytest.mark.parametrize("rule", FOLDERS)
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "compiled"])
@nightly_if_interpreted
@pytest.mark.parametrize("length", [2_000, pytest.param(16_000, marks=pytest.mark.nightly)])
def test_what_was_assigned_at_the_beginning_is_recited(name: str, rule: str, length: int) -> None:
    """It is in the states alone, which no other test follows for more than 400 tokens."""
    tokenizer = Tokenizer.from_file(str(FOLDERS[rule] / "tokenizer.json"))
    core = make_core(make_engine(name, load_gpt(open_folder(FOLDERS[rule])), 8))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    texts = {f"A7{words(length)}?": "A7B-C-D-", f"{words(length // 2)}D2{words(length // 2)}B5{words(9)}?": "A-B5C-D2"}
    requests = [submit(core, None, tokenizer.encode(text).ids, params, seed=0) for text in texts]
    while core.unfinished:
        core.step()
    assert [tokenizer.decode(core.output(r).outputs[0].token_ids) for r in requests] == [*texts.values()]
    edited = submit(core, None, tokenizer.encode(f"A7{words(length)}C1?").ids, params, seed=0)
    while core.unfinished:
        core.step()
    assert tokenizer.decode(core.output(edited).outputs[0].token_ids) == "A7B-C1D-"
    assert edited.num_cached_tokens == (length + 2 if name == "recompute" else (length + 2) // 16 * 16)
