"""What `train` refuses to replace or to resume: nothing is changed then, and one line names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.models import make_folder, make_weights, refuses, weights_of
from nanoinfer import LLM
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.cli.train import _Writer
from nanoinfer.training import loop
from nanoinfer.training.loop import TrainProgress, TrainRun, train
from nanoinfer.training.train_config import TrainConfig

TEXT = "the cat sat on the mat, and the dog sat on the log. " * 80
KINDS = ("model", "distill")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), n_layer=1, n_head=2, n_embd=16, block_size=16,
        batch_size=4, max_steps=6, warmup_steps=2, learning_rate=3e-3, eval_interval=2, distill_tokens=99,
    )  # fmt: skip


def of_kind(config: TrainConfig, kind: str) -> TrainConfig:
    if kind == "model":
        return config
    target = Path(config.out).parent / "target"
    if not target.exists():
        make_folder(target)
    return replace(config, distill=str(target))


def prepare(config: TrainConfig, *, resume: bool = False) -> TrainRun:
    return loop.prepare(config, resume=resume, complete=_Writer(config) if config.distill else None)


def go(config: TrainConfig, *, resume: bool = False) -> list[TrainProgress]:
    history: list[TrainProgress] = []
    train(prepare(config, resume=resume), history.append)
    return history


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def refuses_unchanged(config: TrainConfig, *words: str, resume: bool = True) -> None:
    before = contents(Path(config.out))
    refuses(lambda: prepare(config, resume=resume), *words)
    assert contents(Path(config.out)) == before


# A model that training did not make ------------------------------------------------------------------------


def saved_model(folder: Path) -> None:
    make_folder(folder)


def sharded(folder: Path) -> None:
    make_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def one_file(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_bytes(b"a model")

    return make


FOREIGN = {
    "folder": (saved_model, "config.json"),
    "sharded": (sharded, "config.json"),
    "nanogpt": (one_file("ckpt.pt"), "ckpt.pt"),
    "gguf": (one_file("model.Q4_K.gguf"), "model.Q4_K.gguf"),
    "weights": (one_file("model.safetensors"), "model.safetensors"),
    "bin": (one_file("pytorch_model.bin"), "pytorch_model.bin"),
    "tokenizer": (one_file("tokenizer.json"), "tokenizer.json"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_model_that_training_did_not_make_is_kept(config: TrainConfig, foreign: str) -> None:
    make, name = FOREIGN[foreign]
    make(Path(config.out))
    for resume in (False, True):
        refuses_unchanged(config, "out=", name, "no training state", "choose another folder", resume=resume)


def test_other_files_do_not_matter(config: TrainConfig) -> None:
    Path(config.out).mkdir()
    (Path(config.out) / "notes.txt").write_text("mine")
    (Path(config.out) / "model.safetensors.tmp").write_bytes(b"of a run that was killed")
    assert len(go(config, resume=True)) == 6
    assert (Path(config.out) / "notes.txt").read_text() == "mine"


# What is resumed is checked whole --------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def done(config: TrainConfig, request: pytest.FixtureRequest) -> TrainConfig:
    """A run that has ended; the last validation need not be the best."""
    config = of_kind(config, request.param)
    go(config)
    assert go(config, resume=True) == []
    return config


def test_data_that_changed_is_refused(done: TrainConfig) -> None:
    path = Path(done.data[0])
    path.write_text(TEXT[:-1] + "!")
    refuses_unchanged(done, "training.state was made with other data")
    path.write_text(TEXT)
    (path.parent / "copy.txt").write_text(TEXT)
    prepare(replace(done, data=(str(path.parent / "copy.txt"),)), resume=True)  # the content counts
    for i in range(2):
        (path.parent / f"{i}.txt").write_text(TEXT[i * 1000 :][: 1000 if i == 0 else None])
    halves = tuple(str(path.parent / f"{i}.txt") for i in range(2))
    refuses_unchanged(replace(done, data=halves), "training.state was made with other data")


def test_a_model_file_that_is_gone_or_another_is_refused(done: TrainConfig) -> None:
    out = Path(done.out)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        content = (out / name).read_bytes()
        (out / name).unlink()
        refuses_unchanged(done, name)
        (out / name).write_bytes(b"{" + content[1:20])
        refuses_unchanged(done, str(out))
        (out / name).write_bytes(content)
    model = load_gpt(huggingface.open_folder(out))
    with torch.no_grad():
        next(model.parameters()).add_(0.5)
    huggingface.save(weights_of(model), out)
    refuses_unchanged(done, "differ from the run's")


def test_another_tokenizer_is_refused(config: TrainConfig) -> None:
    go(config)
    path = Path(config.out) / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"ä"'))
    refuses_unchanged(config, "tokenizer.json differs from the run's")


def test_another_target_is_refused(config: TrainConfig) -> None:
    config = of_kind(config, "distill")
    go(config)
    huggingface.save(make_weights(seed=5), Path(config.distill or ""))
    refuses_unchanged(config, "was made with another target")


def edited(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        tensors = load_file(path)
        record = json.loads(tensors["record"].numpy().tobytes())
        before = tensors["record"]
        change(tensors, record)
        if tensors.get("record") is before:
            tensors["record"] = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
        save_file(tensors, path)

    return edit


def put(**changes: object) -> Callable[[Path], object]:
    return edited(lambda _, record: record.update(changes))


def tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], object]:
    def change(tensors: dict[str, torch.Tensor], _: object) -> None:
        name_ = next(n for n in tensors if n.startswith(name))
        if value is None:
            del tensors[name_]
        else:
            tensors[name_] = value

    return edited(change)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "junk": (lambda p: p.write_bytes(b"junk"), "is not a valid safetensors file"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "is not a valid safetensors file"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "training.state"),
    "pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "a pipe"),
    "no record": (tensor("record", None), "is not a training state"),
    "record of floats": (edited(lambda t, _: t.update(record=torch.zeros(3))), "not a training"),
    "no tokenizer": (tensor("tokenizer_json", None), "is not a training state"),
    "not UTF-8": (tensor("tokenizer_json", torch.full((3,), 255, dtype=torch.uint8)), "is not a training state"),
    "other tokenizer": (tensor("tokenizer_json", torch.tensor([123, 125], dtype=torch.uint8)), "tokenizer"),
    "config": (put(config=[1]), "is not a training state"),
    "settings": (put(config={}), "was made with"),
    "step": (put(step="3"), "is not a training state"),
    "step 0": (put(step=0), "step=0"),
    "step beyond": (put(step=10**6), "step=1000000"),
    "best": (put(best_val_loss=float("nan")), "best_val_loss=nan"),
    "digests": (put(digests={}), "was made with other data"),
    "weights": (put(weights="0"), "differ from the run's"),
    "no model": (tensor("model.", None), "is missing"),
    "model shape": (tensor("model.", torch.zeros(3)), "[3]"),
    "moment": (tensor("optimizer.0.exp_avg", None), "is missing"),
    "more": (edited(lambda t, _: t.update(more=torch.zeros(1))), "'more' is torch.float32 [1]"),
    "nan": (edited(lambda t, _: t["optimizer.0.exp_avg"].fill_(float("nan"))), "not finite"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_malformed_state_is_one_line(config: TrainConfig, broken: str) -> None:
    go(config)
    change, words = BROKEN[broken]
    change(Path(config.out) / "training.state")
    refuses_unchanged(config, str(Path(config.out) / ""), words)


# Killed between the files of a save ------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nth_write", range(1, 14))
@pytest.mark.slow_if(lambda nth_write: nth_write != 5)
@pytest.mark.nightly_if(lambda nth_write: nth_write % 2 == 0)
def test_a_kill_between_any_two_files_loses_nothing(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, kind: str, nth_write: int
) -> None:
    """Dies before the n-th rename; what is there resumes to the same weights, from a step that was saved."""
    config = of_kind(config, kind)
    whole, cut = (replace(config, out=config.out + name) for name in ("1", "2"))
    go(whole)
    count, rename = 0, os.replace

    def replace_or_die(old: Path, new: Path) -> None:
        nonlocal count
        count += 1
        if count == nth_write:
            raise Killed
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_or_die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a process that is killed tidies nothing up
        try:
            go(cut)
        except Killed:
            pass
        else:
            assert nth_write > 9
    go(cut, resume=True)
    trained = [p.name for p in Path(whole.out).iterdir()]
    assert "training.state.pending" not in os.listdir(cut.out)
    for name in trained:
        if name != "training.state":
            assert (Path(cut.out) / name).read_bytes() == (Path(whole.out) / name).read_bytes()
    if kind == "model":
        LLM(cut.out)
