"""The training loop: AdamW, cosine learning rate, validation, and resuming an interrupted run.

It follows nanoGPT's train.py with three differences. Batches and dropout are functions of (seed, step), so a resumed
run produces the same weights as an uninterrupted one. Validation covers the held-out text evenly instead of sampling
it. The result is a Hugging Face folder.

`out` contains the model with the best validation loss so far (config.json, model.safetensors, tokenizer.json) and
`training.state`, from which `--resume` continues.

A run replaces only files that it wrote. `training.state` is a safetensors file with the weights, Adam's moments, the
tokenizer, and a JSON record of the settings, the step, and digests of the data and of the saved model. Its name has no
.safetensors suffix, because other programs load every *.safetensors file of a folder. When the model improved, a save
has three parts, and the run can be killed between any two of them without loss:

    training.state.pending -> model files -> training.state.pending renamed to training.state

If a run resumes from a pending state, the state is complete but the model files may not be, so they are written again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.gpt_loading import from_torch, init_weights, load_gpt, to_torch, weights_of
from nanoinfer.checkpoints.load import LoadedModel, load_model, load_tokenizer
from nanoinfer.config import ModelConfig
from nanoinfer.errors import NanoinferError, about, reason, show
from nanoinfer.models.stored import read_safetensors, to_safetensors
from nanoinfer.models.transformer import Transformer
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.training import data, distill
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.arrays import ITEM_BYTES, HostTensor
from nanoinfer.utils.files import parse_json, read_text, require_writable, write_atomically


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
    optimizer = make_optimizer(model.to(device), config)
    run = TrainRun(config, device, model, optimizer, tokenizer_json, train, val, chars_per_token, digests=digests)
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


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW for a model, with weight decay for matrices and embeddings only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
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


STATE = "training.state"
PENDING = "training.state.pending"
_MODEL_NAMES = ("config.json", "tokenizer.json", "vocab.json", "merges.txt", "meta.pkl")
_MODEL_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_FREE = ("out", "device", "data")  # settings that may change; the content of the data is compared by its digest


@dataclass
class TrainRun:
    """State of a training run; created by `prepare`."""

    config: TrainConfig
    device: torch.device
    model: Transformer
    optimizer: torch.optim.Optimizer
    tokenizer_json: str
    train: data.Batches | distill.TargetBatches
    val: data.Batches | distill.TargetBatches
    val_chars_per_token: float
    step: int = 0
    best_val_loss: float = math.inf
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the data and, if there is one, of the target's weights. A resumed run must have the same digests."""
    saved_weights: str = ""
    """Digest of the weights last saved."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss, nats per token, of inputs x, (B, T).

        Args:
            x: token ids.
            y: the next token ids, (B, T), for cross-entropy; or the target's hidden states, (B, T, C), for the
                distillation loss, which in validation is the KL divergence alone.
        """
        x, y = x.to(self.device), y.to(self.device)
        with self.autocast():
            logits = self.model(x)
        if isinstance(self.train, distill.TargetBatches):
            expected = self.train.logits(y)
            kl, distance = distill.divergences(logits[..., : expected.shape[-1]], expected)
            return kl + distance if self.model.training else kl
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for the dtype of the config."""
        if self.config.autocast == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()


@dataclass(frozen=True)
class State:
    """A saved state whose settings match the run. `restore` checks its tensors."""

    path: Path
    record: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def pending(self) -> bool:
        """Whether the run was killed while it wrote the model."""
        return self.path.name == PENDING

    @property
    def tokenizer_json(self) -> str:
        """The run's tokenizer."""
        return bytes(self.tensors["tokenizer_json"].numpy()).decode()


def digest_texts(texts: Sequence[str]) -> str:
    """Return a hash of texts, including their boundaries."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def digest_weights(model: torch.nn.Module, like: torch.nn.Module, dtype: torch.dtype) -> str:
    """Return a hash of `model`'s weights that have the names of `like`'s parameters, converted to `dtype`."""
    digest, parameters = hashlib.sha256(), dict(model.named_parameters())
    for name, _ in like.named_parameters():
        p = parameters[name].detach().to("cpu", dtype).contiguous()
        digest.update(f"{name} {list(p.shape)}".encode())
        digest.update(p.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_state(out: Path, config: TrainConfig, resume: bool) -> State | None:
    """Return the state to resume from, or None if the folder contains no state and no model.

    Raises:
        NanoinferError: the folder contains a state and resume is False; it contains a model without a state; or the
            state is malformed, of an older version, or has other settings.
    """
    try:
        names = sorted(os.listdir(out)) if os.path.lexists(out) else []
    except OSError as e:
        raise NanoinferError(f"out={out} cannot be written: {reason(e)}: choose another folder") from None
    path = next((out / name for name in (PENDING, STATE) if name in names), None)
    if path is None:
        if model := next((n for n in names if n in _MODEL_NAMES or n.endswith(_MODEL_SUFFIXES)), None):
            raise NanoinferError(f"out={out} contains {model}, but no training state: choose another folder")
        return None  # a run that was killed before its first save starts again
    if not resume:
        raise NanoinferError(f"out={out} already holds {path.name}: add --resume, or choose another folder")
    state = _read(path)
    saved, now = state.record["config"], json.loads(json.dumps(dataclasses.asdict(config)))
    for name in now.keys() - set(_FREE):
        if saved.get(name) != now[name]:
            raise NanoinferError(
                f"{path} was made with {name}={show(saved.get(name))}, not {now[name]!r}: resume with the same settings"
            )
    return state


def _read(path: Path) -> State:
    """Return a state; check the keys and types of its record, and that its tokenizer is UTF-8."""
    stored = read_safetensors(path)
    for name, tensor in stored.items():
        if tensor.dtype not in (*ITEM_BYTES, "uint8"):
            raise NanoinferError(f"{path} is not a training state: tensor {show(name)} is {tensor.dtype[:20]}")
    try:
        tensors = {name: to_torch(tensor.read()) for name, tensor in stored.items()}
        texts = {name: bytes(tensors[name].numpy()) for name in ("record", "tokenizer_json")}
        record = parse_json(texts["record"], f"{path} is not a training state")
        for key, kind in {"config": dict, "step": int, "best_val_loss": float, "digests": dict, "weights": str}.items():
            if type(record[key]) is not kind:
                raise ValueError(f"{key} is a {type(record[key]).__name__}")
        texts["tokenizer_json"].decode()
    except NanoinferError:
        raise
    except Exception as e:  # missing keys, wrong types, a dtype that NumPy lacks
        raise NanoinferError(f"{path} is not a training state: {type(e).__name__}: {reason(e)}") from None
    return State(path, record, tensors)


def check_digest(state: State | None, name: str, digest: str, what: str) -> None:
    """Raise NanoinferError if the digest in the state differs from this run's; `what` describes the difference."""
    if state is not None and state.record["digests"].get(name) != digest:
        raise NanoinferError(f"{state.path} was made with {what}: resume with the same, or choose another folder")


def restore(run: TrainRun, state: State) -> None:
    """Restore a run from its state.

    Raises:
        NanoinferError: the names, shapes, dtypes or values of the tensors do not fit the run, or the model in its
            folder is not the one that it wrote.
    """
    step, best = state.record["step"], state.record["best_val_loss"]
    if not (1 <= step <= run.config.max_steps and math.isfinite(best)):
        raise NanoinferError(f"{state.path} is not a training state: step={show(step)}, best_val_loss={best}")
    if state.tokenizer_json != run.tokenizer_json:
        raise NanoinferError(f"{state.path} was made with another tokenizer: resume with the same one")
    expected = _tensors(run, fresh=True)
    saved = {n: t for n, t in state.tensors.items() if n not in ("record", "tokenizer_json")}
    for name in sorted(expected.keys() | saved.keys()):
        have, want = (_describe(some.get(name)) for some in (saved, expected))
        if have != want:
            raise NanoinferError(f"{state.path}: tensor {show(name)} is {have}, but the run's is {want}")
        if not saved[name].isfinite().all():
            raise NanoinferError(f"{state.path}: tensor {name} has values that are not finite")
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(saved[f"model.{name}"])
    keys = ("step", "exp_avg", "exp_avg_sq")
    moments = {i: {key: saved[f"optimizer.{i}.{key}"] for key in keys} for i in range(len(_parameters(run)))}
    run.optimizer.load_state_dict({"state": moments, "param_groups": run.optimizer.state_dict()["param_groups"]})
    run.step, run.best_val_loss, run.saved_weights = step, best, state.record["weights"]
    _check_saved_model(run, state)


def _check_saved_model(run: TrainRun, state: State) -> None:
    """Raise NanoinferError unless the model in the run's folder is the one that the run wrote."""
    if state.pending:  # `finish` writes the model again
        return
    out, dtype = Path(run.config.out), getattr(torch, run.config.save_dtype)
    path = out / "tokenizer.json"
    if read_text(path, "a part of the trained model") != run.tokenizer_json:
        raise NanoinferError(f"{path} differs from the run's: restore the file, or choose another folder")
    try:
        same = digest_weights(load_gpt(huggingface.open_folder(out)), run.model, dtype) == run.saved_weights
    except KeyError:  # a model with other parameters
        same = False
    if not same:
        raise NanoinferError(f"weights in {out} differ from the run's: restore the file, or choose another folder")


def save(run: TrainRun, improved: bool) -> None:
    """Write the state, and the model if it improved."""
    out = Path(run.config.out)
    if improved:
        run.saved_weights = digest_weights(run.model, run.model, getattr(torch, run.config.save_dtype))
    try:
        write_atomically(out / (PENDING if improved else STATE), _to_bytes(run))
        if improved:
            finish(run)
    except OSError as e:
        raise NanoinferError(f"out={out} cannot be written: {reason(e)}: free some space, and resume") from None


def finish(run: TrainRun) -> None:
    """Write the model of the pending state, then rename the pending state."""
    out = Path(run.config.out)
    huggingface.save(weights_of(run.model), out, run.tokenizer_json, run.config.save_dtype)
    os.replace(out / PENDING, out / STATE)


def _to_bytes(run: TrainRun) -> bytes:
    record = {
        "config": dataclasses.asdict(run.config),
        "step": run.step,
        "best_val_loss": run.best_val_loss,
        "digests": run.digests,
        "weights": run.saved_weights,
    }
    texts = {"record": json.dumps(record), "tokenizer_json": run.tokenizer_json}
    tensors = {name: HostTensor(np.frombuffer(text.encode(), np.uint8), "uint8") for name, text in texts.items()}
    return to_safetensors(tensors | {name: from_torch(t) for name, t in _tensors(run).items()})


def _describe(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _parameters(run: TrainRun) -> list[torch.nn.Parameter]:
    return [p for group in run.optimizer.param_groups for p in group["params"]]


def _tensors(run: TrainRun, fresh: bool = False) -> dict[str, Tensor]:
    """Return the tensors of model and Adam in a state. `fresh`: only their shapes, before Adam's first step."""
    tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in run.model.named_parameters()}
    for i, p in enumerate(_parameters(run)):
        moments = {"step": torch.zeros(()), "exp_avg": p, "exp_avg_sq": p} if fresh else run.optimizer.state[p]
        tensors |= {f"optimizer.{i}.{key}": moments[key] for key in ("step", "exp_avg", "exp_avg_sq")}
    return tensors
