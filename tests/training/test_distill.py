"""Distillation: who writes what, what is kept of the target, the loss, resuming, and that a draft comes nearer."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.models import CHARS, TINY, command, make_folder, make_model, one_thread, refuses
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.load import load_model
from nanoinfer.cli.train import _Writer
from nanoinfer.config import LayerKind, Rotary
from nanoinfer.training import distill
from nanoinfer.training.loop import TrainProgress, prepare, train, validate
from nanoinfer.training.train_config import TrainConfig

TEXT = "the cat sat on the mat, and the dog sat on the log. " * 80


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """A draft of one layer of 16, and a target with random weights: nothing but the target says what to learn."""
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), distill=str(make_folder(tmp_path / "target")),
        distill_tokens=3000, n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=8, max_steps=60,
        warmup_steps=10, learning_rate=1e-2, eval_interval=20,
    )  # fmt: skip


def run(config: TrainConfig, *, resume: bool = False) -> list[TrainProgress]:
    history: list[TrainProgress] = []
    train(prepare(config, resume=resume, complete=_Writer(config)), history.append)
    return history


def test_a_draft_comes_nearer_to_its_target(config: TrainConfig) -> None:
    """What is reported is the KL divergence of the saved model, and more tokens are the target's than before."""
    start = validate(prepare(config, complete=_Writer(config)))
    history = run(config)
    validations = [p.val_loss for p in history if p.val_loss is not None]
    assert len(validations) == 3
    assert validations[-1] < validations[0] < start
    assert validations[-1] < 0.5 * start
    text = TEXT[int(len(TEXT) * 0.9) :][:32]
    target, draft = load_model(str(config.distill)), load_model(config.out)
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


def test_what_the_writer_writes_is_the_targets(config: TrainConfig) -> None:
    """Greedy rows are the target's greedy text, sampled ones are not, and both are the same the next time."""
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    greedy, sampled, other = _Writer(config)(texts, [0.0, 1.0, 1.0], 9)
    llm = LLM(str(config.distill), **_Writer(config).precision())
    (alone,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9, temperature=0))
    assert greedy == [1, 2, 3, *alone.outputs[0].token_ids]
    assert len({tuple(greedy), tuple(sampled), tuple(other)}) == 3
    assert _Writer(config)(texts, [0.0, 1.0, 1.0], 9) == [greedy, sampled, other]


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


def test_what_does_not_fit_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    def writer(*_: object) -> list[list[int]]:
        raise AssertionError("asked to write before everything was checked")

    other = make_folder(tmp_path / "other", chars=CHARS[:-1] + "~")
    nameless = make_folder(tmp_path / "nameless", chars=None)
    for changed, words in (
        (
            replace(config, init=str(other)),
            ("target' has a vocabulary of 59", "init=", "other' has another vocabulary"),
        ),
        (
            replace(config, tokenizer="shakespeare"),
            ("of 59 tokens", "'shakespeare' has another vocabulary, of 2048"),
        ),
        (replace(config, distill=str(nameless)), ("distill=", "nameless", "no tokenizer")),
        (replace(config, distill="no such model!"), ("neither built in",)),
        (replace(config, block_size=33), ("block_size=33 is more than the 32 of distill=",)),
    ):
        refuses(lambda c=changed: prepare(c, complete=writer), *words)  # type: ignore[misc]
    refuses(lambda: replace(config, distill_tokens=0), "distill_tokens=0 is not an integer in [1, ")


@pytest.mark.slow
def test_the_command(config: TrainConfig) -> None:
    done = subprocess.run(
        command(
            "train", "--data", *config.data, "--out", config.out, "--distill", config.distill, "--distill-tokens", 1000,
            "--block-size", 32, "--n-layer", 1, "--max-steps", 4, "--eval-interval", 2,
        ),
        capture_output=True, text=True, env=one_thread(), check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"best KL divergence from {config.distill} on validation text ")
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
