"""Draft head: a small recurrent network that predicts a target's next hidden states; its drafter and file format.

    s_0 = h                                                  h: the final hidden state from which x_1 was sampled
    s_i = s_{i-1} + c_proj gelu(c_fc [ln_s(s_{i-1}); ln_e(wte(x_i))])
    logits after x_i = lm_head(s_i)                          x_{i+1} is sampled from them

x_1 is the newest token of the sequence; x_2, x_3, ... are proposals. s_i approximates the output of the target's final
layer norm after x_i. The head therefore uses the target's embedding and output head, and only the MLP and its layer
norms are trained. There is no attention: h holds all information about the tokens before x_1.

Related work: Medusa (Cai et al. 2024, arXiv 2401.10774) puts heads on the last hidden state; Hydra (Ankner et al.
2024, arXiv 2402.05109) feeds each head the preceding proposals; EAGLE (Li et al. 2024, arXiv 2401.15077) predicts
hidden states instead of tokens.

A head is stored as a folder with draft_head.json and draft_head.safetensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.checkpoints.load import BUILTIN
from nanoinfer.config import DTYPES
from nanoinfer.errors import NanoinferError, about
from nanoinfer.models.stored import StoredTensor, read_safetensors, to_safetensors
from nanoinfer.sampling.sampler import Sampler, SamplerRow
from nanoinfer.speculative import numpy_ops
from nanoinfer.speculative.base import DraftRequest, Proposal, ProposalBuilder, sample_next
from nanoinfer.speculative.step_costs import SIZES, StepTimes
from nanoinfer.utils.arrays import Array, HostTensor, to_numpy
from nanoinfer.utils.checks import require_int, show
from nanoinfer.utils.files import read_json, write_folder

if TYPE_CHECKING:
    from nanoinfer.checkpoints.weights import Weights
    from nanoinfer.config import ModelConfig

CONFIG, WEIGHTS = "draft_head.json", "draft_head.safetensors"
MAX_CONFIG_BYTES = 1 << 16


@dataclass(frozen=True)
class DraftHeadConfig:
    """Shape of a head, and the target it was trained for.

    Raises:
        NanoinferError: a field is out of range.
    """

    target: str
    """Name of the target, for messages."""
    vocab_size: int
    """Vocabulary size of the target."""
    n_embd: int
    """Hidden size of the target."""
    n_hidden: int = 1024
    """Width of the MLP's hidden layer."""
    vocabulary: str | None = None
    """`tokenizers.fingerprint` of the target's tokenizer; None if it has none."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_embd", "n_hidden"):
            require_int(name, getattr(self, name), 1, 2**31 - 1)
        if not isinstance(self.target, str) or not self.target:
            raise NanoinferError(f"target={show(self.target)} is not a name")
        if self.vocabulary is not None and not isinstance(self.vocabulary, str):
            raise NanoinferError(f"vocabulary={show(self.vocabulary)} is neither a string nor null")


@dataclass(frozen=True)
class DraftHead:
    """A head: the MLP and its two layer norms."""

    config: DraftHeadConfig
    parameters: Mapping[str, Array]
    """The arrays of `shapes`."""

    def map(self, change: Callable[[Array], Array]) -> DraftHead:
        """Return the head with `change` applied to each array, to copy it to a device."""
        return DraftHead(self.config, {name: change(array) for name, array in self.parameters.items()})


def shapes(config: DraftHeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a head's parameters."""
    C, H = config.n_embd, config.n_hidden
    norms: dict[str, tuple[int, ...]] = {f"{ln}.{name}": (C,) for ln in ("ln_s", "ln_e") for name in ("weight", "bias")}
    return norms | {"c_fc.weight": (H, 2 * C), "c_fc.bias": (H,), "c_proj.weight": (C, H), "c_proj.bias": (C,)}


def next_state(ops: ModuleType, parameters: Mapping[str, Any], state: Any, embedded: Any) -> Any:
    """Return the next state, (..., C). Inference and training call this function.

    Args:
        ops: operations on this kind of array: numpy_ops or torch_ops.
        parameters: the arrays of `shapes`.
        state: (..., C).
        embedded: the target's embedding of the token, (..., C).
    """
    p = parameters
    x = [ops.layer_norm(a, p[f"{ln}.weight"], p[f"{ln}.bias"]) for a, ln in ((state, "ln_s"), (embedded, "ln_e"))]
    hidden = ops.gelu(ops.linear(ops.concatenate(x), p["c_fc.weight"], p["c_fc.bias"]))
    return state + ops.linear(hidden, p["c_proj.weight"], p["c_proj.bias"])


@dataclass(frozen=True)
class TargetEmbeddings:
    """Embedding and output head of the target, as the draft head uses them."""

    wte: Array
    """(V, C)."""
    lm_head: Array
    """(V, C)."""
    scale: float
    """Factor for the first C channels of the target's hidden state, which gives the state the head was trained on."""

    def map(self, change: Callable[[Array], Array]) -> TargetEmbeddings:
        """Return the embeddings with `change` applied to each array. Tied arrays stay tied."""
        wte = change(self.wte)
        return TargetEmbeddings(wte, wte if self.lm_head is self.wte else change(self.lm_head), self.scale)


def check(config: DraftHeadConfig, name: str, target: ModelConfig, vocabulary: str | None) -> None:
    """Raise NanoinferError unless a head fits the target `name`, whose tokenizer has the fingerprint `vocabulary`.

    The target's width may be a multiple of the head's; `target_embeddings` then checks that it is a widened model.
    """
    remedy = "use a head that was trained for this target"
    for field in ("n_embd", "vocab_size"):
        ours, theirs = getattr(config, field), getattr(target, field)
        if theirs % ours if field == "n_embd" else theirs != ours:
            raise NanoinferError(
                f"the draft head of {config.target!r} has {field}={ours}, the target {name!r} {field}={theirs}:"
                f" {remedy}"
            )
    if None not in (vocabulary, config.vocabulary) and vocabulary != config.vocabulary:
        raise NanoinferError(
            f"the draft head of {config.target!r} and the target {name!r} have different tokens for the same"
            f" {target.vocab_size:,} ids: {remedy}"
        )


def target_embeddings(config: DraftHeadConfig, weights: Weights, name: str) -> TargetEmbeddings:
    """Return the embeddings of a target: the model that the head was trained for, or that one widened (transforms.py).

    A widened model has r copies of every channel. Its final layer norm is divided by r; with an untied output head,
    the output head is divided by r instead.

    Args:
        config: of the head.
        weights: of the target, in a shape that `check` accepts.
        name: of the target, for error messages.

    Raises:
        NanoinferError: the target is wider than the head and is not a widened model.
    """
    theirs, C = weights.config, config.n_embd
    r, tied = theirs.n_embd // C, theirs.tie_word_embeddings
    names = ["transformer.wte.weight", *([] if tied else ["lm_head.weight"])]
    found: dict[str, NDArray[np.float32]] = {}
    for key, tensor in weights.read():
        if key in names:
            values = tensor.dense().values
            if not all(np.array_equal(values[:, :C], values[:, i * C : (i + 1) * C]) for i in range(1, r)):
                raise NanoinferError(
                    f"the draft head of {config.target!r} has n_embd={C}, the target {name!r} n_embd={theirs.n_embd},"
                    " and is not a widened model: use a head that was trained for this target"
                )
            part = HostTensor(np.ascontiguousarray(values[:, :C]), tensor.dtype)  # not the whole embedding
            found[key] = part.float32()
        if len(found) == len(names):
            break
    wte = found["transformer.wte.weight"]
    return TargetEmbeddings(wte, wte, float(r)) if tied else TargetEmbeddings(wte, found["lm_head.weight"] * r, 1.0)


class HeadDrafter:
    """Proposes the tokens that a draft head predicts from the target's last hidden state, without a KV cache.

    After each step the core passes the hidden state from which each newest token was sampled (`update_hidden`). The
    drafter stores only this row for a sequence, so it has no prefill, whatever the length of the prompt:

        sequence    [a b c d]        d was sampled from the hidden state h of c
        proposal    s_1 = f(h, d) -> e      s_2 = f(s_1, e) -> f      ...
        target      extends by d e f ..., accepts e, samples g instead of f; the new hidden state is that of e

    Args:
        head: NumPy arrays in float32, or what `placement` of the operations makes of them: tensors on the target's
            device, or matrices of the native extension.
        embeddings: of the target; the same kind of array in the same dtype.
        vocab_size: number of tokens that may be sampled, as for the target.
        ops: operations on this kind of array: speculative/numpy_ops.py or torch_ops.py.
        max_num_seqs: maximum number of requests per call.
    """

    def __init__(
        self,
        name: str,
        head: DraftHead,
        embeddings: TargetEmbeddings,
        sampler: Sampler,
        vocab_size: int,
        *,
        ops: ModuleType = numpy_ops,
        max_num_seqs: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._head, self._scale, self._ops = head, embeddings.scale, ops
        self._wte, self._lm_head, self._vocab_size = embeddings.wte, embeddings.lm_head, vocab_size
        self._sampler = sampler
        self._hidden: dict[SamplerRow, Array] = {}
        self._times = self._measure(max_num_seqs, clock)

    def update_hidden(self, rows: Sequence[SamplerRow], hidden: Array) -> None:
        """Store the hidden states, (len(rows), n_embd), from which the newest tokens were sampled."""
        states = self._ops.like(hidden[:, : self._head.config.n_embd], self._wte) * self._scale
        self._hidden.update(zip(rows, states, strict=True))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return the head's proposals; all requests run as one batch.

        A proposal is empty if the target has not processed a token of the sequence yet (a prompt of one token).
        """
        builders = [ProposalBuilder(request) for request in requests]
        known = [s for s in builders if s.request.row in self._hidden]
        active = sorted(known, key=lambda s: -s.request.num_tokens)  # finished proposals are then at the end
        if active:
            state = self._ops.stack([self._hidden[s.request.row] for s in active])  # (B, C)
        while active:
            newest = [s.token_ids[-1] if s.token_ids else s.request.token_ids[-1] for s in active]
            state, logits = self._step(state[: len(active)], newest)
            sample_next(active, logits, self._sampler)
            active = [s for s in active if len(s.token_ids) < s.request.num_tokens]
        return [s.finish() for s in builders]

    def _step(self, state: Array, token_ids: list[int]) -> tuple[Any, Any]:
        """Return the next state, (B, C), and the logits after `token_ids`, (B, V) float32."""
        # An overflow in the head must not end the sequence: the sampler raises an error on logits that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            state = next_state(self._ops, self._head.parameters, state, self._wte[token_ids])
            return state, self._ops.finite(self._ops.linear(state, self._lm_head)[:, : self._vocab_size])

    def num_behind(self, request: DraftRequest) -> int:
        """Return 0: the head has no prefill."""
        return 0

    def estimate_sec(self, num_seqs: int, num_tokens: int, num_behind: int) -> float:
        """Return the estimated seconds of `num_tokens` steps of the head."""
        return num_tokens * self._times(num_seqs)

    def forget(self, row: SamplerRow) -> None:
        """Drop a sequence's hidden state."""
        self._hidden.pop(row, None)

    def reset(self) -> None:
        """Drop all hidden states."""
        self._hidden.clear()

    def _measure(self, max_num_seqs: int, clock: Callable[[], float]) -> StepTimes:
        """Return the seconds of a step, including an argmax, by number of sequences: the best of four runs."""
        measured = {}
        for n in (n for n in SIZES if n == 1 or n <= max_num_seqs):
            state = self._wte[[0] * n]
            sec = []
            for _ in range(5):  # the first run is a warm-up
                start = clock()
                self._step(state, [0] * n)[1].argmax(-1).tolist()  # waits for the device
                sec.append(clock() - start)
            measured[n] = min(sec[1:])
        return StepTimes(measured)


# Files ---------------------------------------------------------------------------------------------------


def find(name: str) -> Path | None:
    """Return the folder of a head given its built-in name or its path; None if there is no such head."""
    for folder in (BUILTIN / name, Path(name)):
        try:
            if (folder / CONFIG).is_file():
                return folder
        except (OSError, ValueError):  # path too long or not accessible; load_model reports it
            continue
    return None


def save(head: DraftHead, folder: Path, dtype: str = "float32") -> None:
    """Write a head as a folder.

    Args:
        head: in float32; not changed.
        folder: created if it does not exist.
        dtype: dtype of the stored weights.

    Raises:
        NanoinferError: the folder cannot be written.
    """
    tensors = {n: HostTensor(to_numpy(a), "float32").to(dtype) for n, a in head.parameters.items()}
    config = json.dumps(asdict(head.config), indent=2).encode() + b"\n"
    write_folder(folder, {WEIGHTS: to_safetensors(tensors), CONFIG: config})


def load(folder: Path) -> DraftHead:
    """Return the head in a folder, as NumPy arrays in float32. The files may be untrusted.

    Raises:
        NanoinferError: a file is missing or malformed, or a tensor's shape differs from the config's.
    """
    config = _read_config(folder / CONFIG)
    path, wanted = folder / WEIGHTS, shapes(config)
    stored = read_safetensors(path)
    _check_shapes({key: tensor.shape for key, tensor in stored.items()}, wanted, path)
    return DraftHead(config, {name: _checked(stored[name], f"{path}: tensor {name}") for name in wanted})


def _read_config(path: Path) -> DraftHeadConfig:
    raw = read_json(path, MAX_CONFIG_BYTES, "a draft head's config")
    names = [f.name for f in fields(DraftHeadConfig)]
    if not isinstance(raw, dict) or sorted(raw) != sorted(names):
        found = ", ".join(map(show, raw)) if isinstance(raw, dict) else f"a {type(raw).__name__}"
        raise NanoinferError(f"{path} holds {found[:200]}: a draft head's config holds {', '.join(names)}")
    with about(str(path)):
        return DraftHeadConfig(**raw)


def _check_shapes(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], path: Path) -> None:
    """Compare all shapes before any tensor is read or allocated."""
    if extra := sorted(found.keys() - wanted.keys()):
        raise NanoinferError(f"{path}: unexpected tensor {show(extra[0])}: a draft head has {', '.join(wanted)}")
    for name, shape in wanted.items():
        if found.get(name) != shape:
            have = list(found[name]) if name in found else "missing"
            raise NanoinferError(f"{path}: tensor {name} is {have}, but the config requires {list(shape)}")


def _checked(stored: StoredTensor, what: str) -> NDArray[np.float32]:
    if stored.dtype not in DTYPES:
        raise NanoinferError(f"{what} is {show(stored.dtype)}: weights must be one of {', '.join(DTYPES)}")
    values = stored.read().float32()
    if not np.isfinite(values).all():
        raise NanoinferError(f"{what} has values that are not finite")
    return values
