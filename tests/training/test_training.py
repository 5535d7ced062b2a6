"""Training: learning, resuming bit for bit, starting from a model, and the folder that comes out.

What `train` refuses to replace or to resume: nothing is changed then, and one line names the file.
Distillation: who writes what, what is kept of the target, the loss, resuming, and that a draft comes nearer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.models import CHARS, TINY, command, make_folder, make_model, make_weights, one_thread, refuses, weights_of
from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gpt_loading import load_gpt
from nanoinfer.checkpoints.load import load_model
from nanoinfer.cli.train import _Writer
from nanoinfer.config import LayerKind, Rotary
from nanoinfer.training import data, distill, loop
from nanoinfer.training.loop import TrainProgress, TrainRun, learning_rate, train, validate
from nanoinfer.training.train_config import TrainConfig

TEXT = "the cat sat on the mat, and the dog sat on the log. " * 80


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), n_layer=2, n_head=2, n_embd=32,
        block_size=32, batch_size=8, max_steps=60, warmup_steps=10, learning_rate=3e-3, eval_interval=20, dropout=0.1,
        distill_tokens=3000,
    )  # fmt: skip


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


KINDS = ("model", "distill")


@pytest.fixture
def quick(tmp_path: Path) -> TrainConfig:
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


def run(config: TrainConfig, *, resume: bool = False) -> list[TrainProgress]:
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
def test_a_model_that_training_did_not_make_is_kept(quick: TrainConfig, foreign: str) -> None:
    make, name = FOREIGN[foreign]
    make(Path(quick.out))
    for resume in (False, True):
        refuses_unchanged(quick, "out=", name, "no training state", "choose another folder", resume=resume)


def test_other_files_do_not_matter(quick: TrainConfig) -> None:
    Path(quick.out).mkdir()
    (Path(quick.out) / "notes.txt").write_text("mine")
    (Path(quick.out) / "model.safetensors.tmp").write_bytes(b"of a run that was killed")
    assert len(run(quick, resume=True)) == 6
    assert (Path(quick.out) / "notes.txt").read_text() == "mine"


# What is resumed is checked whole --------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def done(config: TrainConfig, request: pytest.FixtureRequest) -> TrainConfig:
    """A run that has ended; the last validation need not be the best."""
    config = of_kind(config, request.param)
    run(config)
    assert run(config, resume=True) == []
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


def test_another_tokenizer_is_refused(quick: TrainConfig) -> None:
    run(quick)
    path = Path(quick.out) / "tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"ä"'))
    refuses_unchanged(quick, "tokenizer.json differs from the run's")


def test_another_target_is_refused(quick: TrainConfig) -> None:
    quick = of_kind(quick, "distill")
    run(quick)
    huggingface.save(make_weights(seed=5), Path(quick.distill or ""))
    refuses_unchanged(quick, "was made with another target")


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
def test_a_malformed_state_is_one_line(quick: TrainConfig, broken: str) -> None:
    run(quick)
    change, words = BROKEN[broken]
    change(Path(quick.out) / "training.state")
    refuses_unchanged(quick, str(Path(quick.out) / ""), words)


# Killed between the files of a save ------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nth_write", range(1, 14))
@pytest.mark.slow_if(lambda nth_write: nth_write != 5)
@pytest.mark.nightly_if(lambda nth_write: nth_write % 2 == 0)
def test_a_kill_between_any_two_files_loses_nothing(
    quick: TrainConfig, monkeypatch: pytest.MonkeyPatch, kind: str, nth_write: int
) -> None:
    """Dies before the n-th rename; what is there resumes to the same weights, from a step that was saved."""
    quick = of_kind(quick, kind)
    whole, cut = (replace(quick, out=quick.out + name) for name in ("1", "2"))
    run(whole)
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
            run(cut)
        except Killed:
            pass
        else:
            assert nth_write > 9
    run(cut, resume=True)
    trained = [p.name for p in Path(whole.out).iterdir()]
    assert "training.state.pending" not in os.listdir(cut.out)
    for name in trained:
        if name != "training.state":
            assert (Path(cut.out) / name).read_bytes() == (Path(whole.out) / name).read_bytes()
    if kind == "model":
        LLM(cut.out)


@pytest.fixture
def small(tmp_path: Path) -> TrainConfig:
    """A draft of one layer of 16, and a target with random weights: nothing but the target says what to learn."""
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), distill=str(make_folder(tmp_path / "target")),
        distill_tokens=3000, n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=8, max_steps=60,
        warmup_steps=10, learning_rate=1e-2, eval_interval=20,
    )  # fmt: skip


def test_a_draft_comes_nearer_to_its_target(small: TrainConfig) -> None:
    """What is reported is the KL divergence of the saved model, and more tokens are the target's than before."""
    start = validate(prepare(small))
    history = run(small)
    validations = [p.val_loss for p in history if p.val_loss is not None]
    assert len(validations) == 3
    assert validations[-1] < validations[0] < start
    assert validations[-1] < 0.5 * start
    text = TEXT[int(len(TEXT) * 0.9) :][:32]
    target, draft = load_model(str(small.distill)), load_model(small.out)
    assert target.tokenizer is not None
    ids = torch.tensor([target.tokenizer.encode(text)])
    near = distill.divergences(draft.gpt(ids), target.gpt(ids))[0].item()
    assert near == pytest.approx(min(validations), rel=0.4)
    assert draft.config.vocab_size == len(CHARS)


def test_texts_begin_with_the_data_and_go_on_at_two_temperatures() -> None:
    calls = []

    def complete(texts: list[list[int]], temperatures: list[float], num_tokens: int) -> list[list[int]]:
        calls.append((temperatures, num_tokens))
        return [t + [max(t[-1], 1000) + 1] * num_tokens for t in texts]

    texts = distill.generate_windows(torch.arange(100), 5 * 28 - 1, 32, 7, complete)
    assert calls == [([1.0, 0.0, 0.8, 0.0, 1.0], 14), ([0.0, 1.0, 0.0, 0.8, 0.0], 14)]
    for text in texts.tolist():
        assert text[:4] == list(range(text[0], text[0] + 4))
        assert text[4:] == [1001] * 14 + [1002] * 14
    assert len({int(t[0]) for t in texts}) > 1
    assert torch.equal(texts, distill.generate_windows(torch.arange(100), 5 * 28 - 1, 32, 7, complete))
    assert not torch.equal(texts, distill.generate_windows(torch.arange(100), 5 * 28 - 1, 32, 8, complete))
    assert distill.generate_windows(torch.arange(100), 1, 2, 0, complete).shape == (1, 2)
    refuses(lambda: distill.generate_windows(torch.arange(100), 1, 1, 0, complete), "block_size=1", "use 2 or more")


def test_what_the_writer_writes_is_the_targets(small: TrainConfig) -> None:
    """Greedy rows are the target's greedy text, sampled ones are not, and both are the same the next time."""
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    greedy, sampled, other = _Writer(small)(texts, [0.0, 1.0, 1.0], 9)
    llm = LLM(str(small.distill), **_Writer(small).precision())
    (alone,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9, temperature=0))
    assert greedy == [1, 2, 3, *alone.outputs[0].token_ids]
    assert len({tuple(greedy), tuple(sampled), tuple(other)}) == 3
    assert _Writer(small)(texts, [0.0, 1.0, 1.0], 9) == [greedy, sampled, other]


def test_batches_have_the_targets_logits() -> None:
    target = make_model()
    tokens = torch.randint(len(CHARS), (7, 20), generator=torch.Generator().manual_seed(0))
    batches = distill.run_target(target, tokens, len(CHARS), 1, torch.float32)
    seen = []
    for x, y in batches.sweep(10**6, 3):
        torch.testing.assert_close(batches.logits(y), target(x))
        seen += x.tolist()
    assert seen == tokens.tolist()
    assert sum(len(x) for x, _ in batches.sweep(65, 3)) == 3
    x, y = batches.draw(4, 5)
    assert torch.equal(x, batches.draw(4, 5)[0])
    assert not torch.equal(x, batches.draw(5, 5)[0])
    torch.testing.assert_close(batches.logits(y), target(x))
    low = distill.run_target(target, tokens, 9, 1, torch.bfloat16)  # the ids that have no text are left out
    logits = low.logits(low.draw(4, 5)[1])
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), batches.logits(y)[..., :9], atol=0.3, rtol=0.05)


def test_windows_do_not_overlap() -> None:
    assert distill.windows(torch.arange(11), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_divergences() -> None:
    a, b = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    p, q = b.softmax(-1), a.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    kl, distance = distill.divergences(a, b)
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(distance, 2 - 2 * torch.minimum(p, q).sum(-1).mean())
    assert [x.item() for x in distill.divergences(b, b)] == pytest.approx([0, 0], abs=1e-6)


def test_what_does_not_fit_is_refused(small: TrainConfig, tmp_path: Path) -> None:
    def writer(*_: object) -> list[list[int]]:
        raise AssertionError("asked to write before everything was checked")

    other = make_folder(tmp_path / "other", chars=CHARS[:-1] + "~")
    nameless = make_folder(tmp_path / "nameless", chars=None)
    for changed, words in (
        (replace(small, init=str(other)), ("target' has a vocabulary of 59", "init=", "other' has another vocabulary")),
        (replace(small, tokenizer="shakespeare"), ("of 59 tokens", "'shakespeare' has another vocabulary, of 2048")),
        (replace(small, distill=str(nameless)), ("distill=", "nameless", "no tokenizer")),
        (replace(small, distill="no such model!"), ("neither built in",)),
        (replace(small, block_size=33), ("block_size=33 is more than the 32 of distill=",)),
    ):
        refuses(lambda c=changed: loop.prepare(c, complete=writer), *words)  # type: ignore[misc]
    refuses(lambda: replace(small, distill_tokens=0), "distill_tokens=0 is not an integer in [1, ")


@pytest.mark.slow
def test_the_command(small: TrainConfig) -> None:
    done = subprocess.run(
        command(
            "train", "--data", *small.data, "--out", small.out, "--distill", small.distill, "--distill-tokens", 1000,
            "--block-size", 32, "--n-layer", 1, "--max-steps", 4, "--eval-interval", 2,
        ),
        capture_output=True, text=True, env=one_thread(), check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"best KL divergence from {small.distill} on validation text ")
    assert "generates 14 tokens after each of 36 prompts" in done.stderr
    assert "step 4/4" in done.stderr


ROTARY = {"learned_positions": False, "layers": (LayerKind(None, Rotary(8)),) * TINY.n_layer}
NANOCHAT = {
    "family": "nanochat", "bias": False, "norm": "rms", "norm_weight": "none", "embedding_norm": True,
    "qk_norm": "head", "activation": "relu2", "n_inner": 40, "logits_softcap": 5.0,
}  # fmt: skip
GPTJ = {
    "family": "gptj", "bias": ("norm", "mlp"), "norm_placement": "shared", "parallel_residual": True,
    "head_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields, words", [(NANOCHAT, "logits_softcap=5.0 is not supported"), (GPTJ, "biases of the output head is not")]
)
def test_a_target_whose_logits_are_more_than_a_product_is_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    target = make_folder(tmp_path / "target", replace(TINY, **ROTARY, **fields))
    refuses(lambda: distill.load_target(str(target), 16), f"distill='{target}': a target with", words)
