"""Training: learning, resuming bit for bit, starting from a model, and the folder that comes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.models import TINY, command, make_folder
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.config import LayerKind, Rotary
from nanoinfer.training import data
from nanoinfer.training.loop import TrainProgress, learning_rate, prepare, train
from nanoinfer.training.train_config import TrainConfig

TEXT = "the cat sat on the mat, and the dog sat on the log. " * 80


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), n_layer=2, n_head=2, n_embd=32,
        block_size=32, batch_size=8, max_steps=60, warmup_steps=10, learning_rate=3e-3, eval_interval=20, dropout=0.1,
    )  # fmt: skip


def run(config: TrainConfig, *, resume: bool = False) -> list[TrainProgress]:
    history: list[TrainProgress] = []
    train(prepare(config, resume=resume), history.append)
    return history


def weights(config: TrainConfig) -> bytes:
    return (Path(config.out) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_it_learns_and_writes_a_model_that_generates(config: TrainConfig, tokenizer: str) -> None:
    history = run(replace(config, tokenizer=tokenizer, vocab_size=280))
    validations = [p.val_loss for p in history if p.val_loss is not None]
    assert len(validations) == 3
    assert validations[-1] < validations[0] < history[0].loss
    assert history[-1].best_val_loss == min(validations)
    llm = LLM(config.out)
    text = llm.generate("the ", SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].text
    assert text.strip() and set(text) <= set(TEXT) | {"\ufffd"}  # noqa: PT018
    (score,) = llm.perplexity(TEXT[-200:])
    assert score.perplexity < 10


@pytest.mark.slow
def test_resuming_a_killed_run_gives_the_same_weights(config: TrainConfig, tmp_path: Path) -> None:
    """SIGKILL in the middle; what is lost is at most one interval, and the end is the same bit for bit."""
    whole = replace(config, out=str(tmp_path / "whole"), max_steps=240)  # it must not end before it is killed
    history = run(whole)
    changed = [f.name for f in fields(whole) if getattr(whole, f.name) != f.default and f.name not in ("data", "out")]
    flags = [f"--{name.replace('_', '-')}={getattr(whole, name)}" for name in changed]
    out = tmp_path / "killed"
    child = subprocess.Popen(
        command("train", "--data", whole.data[0], "--out", out, *flags),
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    for _ in range(3000):
        if (out / "training.state").exists():
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    step = json.loads(load_file(out / "training.state")["record"].numpy().tobytes())["step"]
    assert 20 <= step < 240
    resumed = run(replace(whole, out=str(out)), resume=True)
    assert resumed[0].step == step + 1
    assert [p.loss for p in resumed] == [p.loss for p in history[step:]]
    assert weights(replace(whole, out=str(out))) == weights(whole)


def test_a_run_is_not_overwritten_and_settings_must_match(config: TrainConfig) -> None:
    run(config)
    before = weights(config)
    with pytest.raises(NanoinferError, match=r"already holds training\.state: add --resume"):
        prepare(config)
    with pytest.raises(NanoinferError, match=r"was made with dropout=0\.1, not 0\.2"):
        prepare(replace(config, dropout=0.2), resume=True)
    assert run(config, resume=True) == []  # already at max_steps
    assert weights(config) == before


def test_starting_from_a_model_keeps_its_words(config: TrainConfig, tmp_path: Path) -> None:
    init = make_folder(tmp_path / "init")
    short = replace(config, init=str(init), block_size=16, max_steps=1, learning_rate=1e-9, min_learning_rate=0.0)
    history = run(replace(short, dropout=0.0))
    tuned, start = LLM(config.out), LLM(str(init))
    assert tuned.config.block_size == 16
    assert tuned.perplexity("the cat sat")[0].log_likelihood == pytest.approx(
        start.perplexity("the cat sat")[0].log_likelihood, abs=1e-4
    )
    assert len(history) == 1
    with pytest.raises(NanoinferError, match="block_size=64 is more than the 32"):
        prepare(replace(config, init=str(init), out=config.out + "2", block_size=64))


def test_the_best_model_is_kept_not_the_last(config: TrainConfig) -> None:
    """With a far too high learning rate late in the run the validation loss rises again."""
    history = run(replace(config, warmup_steps=55, learning_rate=2.0, max_steps=60, eval_interval=10, grad_clip=1e6))
    validations = [p.val_loss for p in history if p.val_loss is not None]
    assert min(validations) < validations[-1]
    text = data.split_texts([TEXT], 0.1)[1][0]
    (score,) = LLM(config.out).perplexity(text, stride=32)
    assert -score.log_likelihood / score.num_tokens == pytest.approx(min(validations), abs=0.3)


def test_saved_dtype(config: TrainConfig) -> None:
    run(replace(config, save_dtype="float16", max_steps=1))
    assert {tensor.dtype for tensor in load_file(Path(config.out) / "model.safetensors").values()} == {torch.float16}
    assert LLM(config.out).generate("the", SamplingParams(max_tokens=2))


def test_batches_are_a_function_of_seed_and_step() -> None:
    batches = data.Batches(torch.arange(1000), 16, seed=1)
    x, y = batches.draw(7, 4)
    assert torch.equal(x, data.Batches(torch.arange(1000), 16, seed=1).draw(7, 4)[0])
    assert torch.equal(y, x + 1)
    assert not torch.equal(x, batches.draw(8, 4)[0])
    assert not torch.equal(x, data.Batches(torch.arange(1000), 16, seed=2).draw(7, 4)[0])


def test_a_sweep_scores_each_token_once() -> None:
    batches = data.Batches(torch.arange(100), 8, seed=0)
    targets = torch.cat([y.flatten() for _, y in batches.sweep(10**6, 5)])
    assert targets.tolist() == list(range(1, 97))
    assert sum(y.numel() for _, y in batches.sweep(30, 5)) == 24
    assert sum(y.numel() for _, y in batches.sweep(1, 5)) == 8


def test_split_keeps_the_held_out_end_of_every_text() -> None:
    assert data.split_texts(["a" * 10, "b" * 20], 0.1) == (["a" * 9, "b" * 18], ["a", "bb"])


def test_learning_rate_rises_then_follows_the_cosine() -> None:
    config = TrainConfig(data=("x",), out="y", warmup_steps=9, max_steps=109, learning_rate=1.0, min_learning_rate=0.2)
    assert learning_rate(0, config) == pytest.approx(0.1)
    assert learning_rate(9, config) == pytest.approx(1.0)
    assert learning_rate(59, config) == pytest.approx(0.6)
    assert learning_rate(109, config) == pytest.approx(0.2)


def test_a_model_of_another_family_is_trained_on(config: TrainConfig, tmp_path: Path) -> None:
    """`init` of a Llama: the steps change it, and the result is a Llama of the shorter context."""
    llama = replace(
        TINY, family="llama", bias=False, norm="rms", gated_mlp=True, activation="silu", learned_positions=False,
        n_inner=40, num_kv_heads=1, layers=(LayerKind(None, Rotary(8)),) * TINY.n_layer,
    )  # fmt: skip
    init = make_folder(tmp_path / "init", llama)
    settings = replace(config, init=str(init), block_size=16, max_steps=4, eval_interval=2)
    losses = [p.val_loss for p in run(settings) if p.val_loss is not None]
    assert losses[-1] < losses[0]
    assert LLM(config.out).config == replace(LLM(str(init)).config, block_size=16)
    assert run(settings, resume=True) == []
