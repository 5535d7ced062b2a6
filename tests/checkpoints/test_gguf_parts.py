"""GGUF files in several parts, as llama-gguf-split writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gguf_files import Stored, as_f32, tiny_gguf, write_gguf
from helpers.models import refuses
from nanoinfer.checkpoints.gguf.file import read_gguf
from nanoinfer.checkpoints.load import load_model, load_tokenizer

COUNT = 3


def part(folder: Path, number: int, stem: str = "model") -> Path:
    return folder / f"{stem}-{number:05d}-of-{COUNT:05d}.gguf"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a model of random weights in three parts, the first without tensors; return the path of the whole file.

    `change(metadata of each part, tensors of each part)` changes the parts before they are written.
    """

    def write(change: Callable[[list[dict[str, Any]], list[dict[str, Stored]]], None] = lambda m, t: None) -> Path:
        whole, rng = read_gguf(tiny_gguf(tmp_path / "zeros.gguf")), np.random.default_rng(0)
        tensors = {name: as_f32(rng.standard_normal(t.shape)) for name, t in whole.tensors.items()}
        half = len(tensors) // 2
        each = [{}, dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
        split: list[dict[str, Any]] = [
            {"split.no": np.uint16(i), "split.count": np.uint16(COUNT), "split.tensors.count": np.int32(len(tensors))}
            for i in range(COUNT)
        ]
        split[0] |= whole.metadata
        change(split, each)
        for i in range(COUNT):
            write_gguf(part(tmp_path, i + 1), split[i], each[i])
        return write_gguf(tmp_path / "whole.gguf", whole.metadata, tensors)

    return write


@pytest.mark.parametrize("number", range(1, COUNT + 1))
def test_any_part_stands_for_the_model(write: Callable[..., Path], number: int) -> None:
    whole = write()
    wanted = dict(load_model(str(whole)).weights.read())
    loaded = load_model(str(part(whole.parent, number)))
    found = dict(loaded.weights.read())
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name].values, wanted[name].values) for name in wanted)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("abc") == [0, 1, 2]
    assert load_tokenizer(str(part(whole.parent, number))).encode("h") == [7]


def test_a_part_that_is_missing_is_named(write: Callable[..., Path]) -> None:
    folder = write().parent
    part(folder, 2).unlink()
    refuses(lambda: read_gguf(part(folder, 1)), "model-00002-of-00003.gguf cannot be read", "No such file")


@pytest.mark.parametrize("name", ["renamed.gguf", "model-00001-of-00004.gguf"])
def test_a_part_with_another_name_is_refused(write: Callable[..., Path], name: str) -> None:
    folder = write().parent
    part(folder, 1).rename(folder / name)
    refuses(lambda: read_gguf(folder / name), "is one of 3 parts", "NAME-00001-of-00003.gguf")


def test_parts_of_other_models_are_refused(write: Callable[..., Path]) -> None:
    def swap(metadata: list[dict[str, Any]], tensors: list[dict[str, Stored]]) -> None:
        metadata[1]["split.no"] = np.uint16(2)

    refuses(lambda: read_gguf(part(write(swap).parent, 1)), "00002-of-00003.gguf: split.no=2, but by its name it is 1")

    def another(metadata: list[dict[str, Any]], tensors: list[dict[str, Stored]]) -> None:
        del metadata[2]["split.count"]

    refuses(lambda: read_gguf(part(write(another).parent, 1)), "00003-of-00003.gguf: split.count=None, but")


def test_tensors_are_in_one_part_each(write: Callable[..., Path]) -> None:
    def twice(metadata: list[dict[str, Any]], tensors: list[dict[str, Stored]]) -> None:
        tensors[2]["token_embd.weight"] = tensors[1]["token_embd.weight"]

    refuses(lambda: read_gguf(part(write(twice).parent, 1)), "token_embd.weight", "is in another part too")

    def lost(metadata: list[dict[str, Any]], tensors: list[dict[str, Stored]]) -> None:
        del tensors[1]["token_embd.weight"]

    refuses(lambda: read_gguf(part(write(lost).parent, 1)), "split.tensors.count=16, but its parts have 15")


@pytest.mark.parametrize("count", [513, 2**31, "3", -1, 2.0])
def test_the_number_of_parts_is_limited(tmp_path: Path, count: Any) -> None:
    metadata = {"split.count": np.int32(-1) if count == -1 else count}
    path = tiny_gguf(tmp_path / "model-00001-of-00003.gguf", metadata=metadata)
    refuses(lambda: load_model(str(path)), f"split.count={count!r} is not a number from 2 to 512")


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_numbers_of_parts_are_no_arrays(write: Callable[..., Path], number: int, key: str) -> None:
    def change(metadata: list[dict[str, Any]], tensors: list[dict[str, Stored]]) -> None:
        metadata[number][key] = np.array([3, 3], np.int32)

    folder = write(change).parent
    if key != "split.tensors.count" or number == 0:  # the first part's counts
        refuses(lambda: read_gguf(part(folder, 1)), f"{key}=")
