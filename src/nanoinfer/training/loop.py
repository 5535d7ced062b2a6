"""The training loop: AdamW, cosine learning rate, validation, and resuming an interrupted run.

It follows nanoGPT's train.py with three differences. Batches and dropout are functions of (seed, step), so a resumed
run produces the same weights as an uninterrupted one. Validation covers the held-out text evenly instead of sampling
it. The result is a Hugging Face folder.

`out` contains the model with the best validation loss so far (config.json, model.safetensors, tokenizer.json) and
`training.state`, from which `--resume` continues (run.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gpt_loading import init_weights, load_gpt
from nanoinfer.checkpoints.load import LoadedModel, load_model, load_tokenizer
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.transformer import Transformer
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.training import data, distill
from nanoinfer.training.run import (
    State,
    TrainRun,
    check_digest,
    digest_texts,
    digest_weights,
    finish,
    read_state,
    restore,
    save,
)  # fmt: skip
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.files import require_writable


@dataclass(frozen=True)
class TrainProgress:
    """Losses and speed after a step."""

    step: int
    loss: float
    val_loss: float | None
    """Set after a validation, else None. Nats per token; with distill, the KL divergence on the held-out text."""
    best_val_loss: float
    tokens_per_sec: float


def prepare(config: TrainConfig, *, resume: bool = False, complete: distill.Complete | None = None) -> TrainRun:
    """Read the data, create or load tokenizer and model, and restore the saved state when resuming.

    Args:
        config: the run.
        resume: continue from the state in `out`.
        complete: generates with the target of `distill`: see `distill.Complete`. It must be
            deterministic, so that a resumed run has the same data. It is called after all checks.

    Raises:
        NanoinferError: the data is unusable, `out` contains another run, or the target does not match.
    """
    from nanoinfer.engines.devices import resolve_device

    device, out = torch.device(resolve_device(config.device)), Path(config.out)
    saved = read_state(out, config, resume)
    texts = data.read_texts(config.data)
    digests = {"data": digest_texts(texts)}
    check_digest(saved, "data", digests["data"], "other data")
    train_texts, val_texts = data.split_texts(texts, config.val_fraction)
    torch.manual_seed(config.seed)
    target = None if config.distill is None else distill.load_target(config.distill, config.block_size)
    model, tokenizer, tokenizer_json = _start(config, train_texts, val_texts, saved, target)
    eos = next(iter(model.config.eos_token_ids), None)
    train, val = (
        data.Batches(data.encode_texts(tokenizer, part, eos), config.block_size, config.seed)
        for part in (train_texts, val_texts)
    )
    chars_per_token = sum(map(len, val_texts)) / len(val.tokens)
    run = TrainRun(config, device, model.to(device), tokenizer_json, train, val, chars_per_token, digests=digests)
    run.optimizer = make_optimizer(run)
    if target is not None:
        digests["target"] = digest_weights(target.gpt, target.gpt, torch.float32)
        check_digest(saved, "target", digests["target"], "another target")
    if saved is not None:
        restore(run, saved)
    require_writable(out)
    if target is not None:
        source = f"tokenizer={config.tokenizer!r}" if config.init == "scratch" else f"init={config.init!r}"
        distill.check_vocabularies(target, tokenizer, source)
        _use_target(run, target.gpt, tokenizer.vocab_size, complete)
    if saved is not None and saved.pending:
        finish(run)
    return run


def _use_target(run: TrainRun, target: Transformer, num_tokens: int, complete: distill.Complete | None) -> None:
    """Replace the batches of `run` by batches with what the target computes, on the data and on generated windows."""
    assert complete is not None, "a target needs `complete`"
    config, block_size = run.config, run.config.block_size
    texts = distill.generate_windows(run.train.tokens, config.distill_tokens, block_size, config.seed, complete)
    target, dtype = target.to(run.device), getattr(torch, config.autocast)
    every = torch.cat([distill.windows(run.train.tokens, block_size), texts])
    run.train, run.val = (
        distill.run_target(target, windows, num_tokens, config.seed, dtype)
        for windows in (every, distill.windows(run.val.tokens, block_size))
    )


def _start(
    config: TrainConfig, train: list[str], val: list[str], saved: State | None, target: LoadedModel | None
) -> tuple[Transformer, tokenizers.Tokenizer, str]:
    """Return the model to start from, its tokenizer, and the tokenizer's JSON."""
    if config.init != "scratch":
        return _start_from(config)
    if saved is not None:
        text = saved.tokenizer_json
        tokenizer = tokenizers.from_json(text, str(saved.path))
    elif config.tokenizer in ("char", "bpe") and target is not None:
        assert target.tokenizer is not None
        tokenizer, text = target.tokenizer, tokenizers.to_json(target.tokenizer)
    elif config.tokenizer in ("char", "bpe"):
        tokenizer, text = data.make_tokenizer(config.tokenizer, train, val, config.vocab_size)
    else:
        tokenizer = load_tokenizer(config.tokenizer)
        text = tokenizers.to_json(tokenizer)
    newline = tokenizer.encode("\n") if config.tokenizer == "bpe" or "\n" in train[0] else []
    model_config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        block_size=config.block_size,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        bias=config.bias,
        bos_token_id=newline[0] if len(newline) == 1 else None,  # an empty prompt starts a new line
    )
    model = Transformer(model_config, config.dropout)
    init_weights(model, config.n_layer, config.seed)
    return model, tokenizer, text


def _start_from(config: TrainConfig) -> tuple[Transformer, tokenizers.Tokenizer, str]:
    """Return a copy of an existing model with its positions cropped to block_size, its tokenizer and the JSON."""
    override = None if config.tokenizer in ("char", "bpe") else config.tokenizer
    loaded = load_model(config.init, tokenizer=override)
    with about(f"init={config.init!r}"):
        huggingface.require_writable(loaded.config)
    if loaded.tokenizer is None:
        raise NanoinferError(f"init={config.init!r}: {loaded.no_tokenizer_reason}")
    if config.block_size > loaded.config.block_size:
        raise NanoinferError(
            f"block_size={config.block_size} is more than the {loaded.config.block_size} of init={config.init!r}"
        )
    start = load_gpt(loaded.weights.shortened(config.block_size))
    model = Transformer(start.config, config.dropout)
    model.load_state_dict(start.state_dict())
    return model, loaded.tokenizer, tokenizers.to_json(loaded.tokenizer)


def make_optimizer(run: TrainRun) -> torch.optim.Optimizer:
    """Return AdamW for a run's model, with weight decay for matrices and embeddings only."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    config = run.config
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to min_learning_rate (as nanoGPT's)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    ratio = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, ratio)))
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


def train(run: TrainRun, report: Callable[[TrainProgress], None]) -> float:
    """Train to `max_steps`, saving at every validation; return the best validation loss, nats per token.

    Args:
        run: from `prepare`; changed in place.
        report: called after every step.
    """
    config, model, optimizer = run.config, run.model, run.optimizer
    assert optimizer is not None
    tokens_per_step = config.batch_size * config.block_size
    while run.step < config.max_steps:
        start = time.perf_counter()
        torch.manual_seed(config.seed * 1_000_003 + run.step)  # makes dropout a function of the step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.step, config)
        model.train()
        loss = run.loss(*run.train.draw(run.step, config.batch_size))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.step += 1
        train_loss = loss.item()
        if not math.isfinite(train_loss):
            raise NanoinferError(f"loss is {train_loss} at step {run.step}: use a lower learning_rate")
        seconds = time.perf_counter() - start
        val_loss = None
        if run.step % config.eval_interval == 0 or run.step == config.max_steps:
            val_loss = validate(run)
            if not math.isfinite(val_loss):
                raise NanoinferError(f"validation loss is {val_loss} at step {run.step}: use a lower learning_rate")
            improved = val_loss < run.best_val_loss
            run.best_val_loss = min(val_loss, run.best_val_loss)
            save(run, improved)
        report(TrainProgress(run.step, train_loss, val_loss, run.best_val_loss, tokens_per_step / seconds))
    return run.best_val_loss


@torch.no_grad()
def validate(run: TrainRun) -> float:
    """Return the mean loss, nats per token, over the held-out text."""
    run.model.eval()
    total, count = 0.0, 0
    for x, y in run.val.sweep(run.config.eval_tokens, run.config.batch_size):
        total += run.loss(x, y).item() * x.numel()
        count += x.numel()
    return total / count
