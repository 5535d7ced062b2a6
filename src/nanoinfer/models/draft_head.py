"""Draft head: a small recurrent network that predicts a target's next hidden states; and its file format.

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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checks import require_int, show
from nanoinfer.errors import NanoinferError
from nanoinfer.files import read_json, write_folder
from nanoinfer.models.checkpoints.load import BUILTIN
from nanoinfer.models.checkpoints.stored import StoredTensor, read_safetensors
from nanoinfer.models.gpt import init_weight

if TYPE_CHECKING:
    from nanoinfer.config import ModelConfig
    from nanoinfer.models.checkpoints.weights import Weights

CONFIG, WEIGHTS = "draft_head.json", "draft_head.safetensors"
MAX_CONFIG_BYTES = 1 << 16
DTYPES = ("float32", "bfloat16", "float16")


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


class RecurrentHead(nn.Module):
    """The MLP and its two layer norms. Weights are uninitialized: load them, or call `init_weights`."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        C = config.n_embd
        self.ln_s, self.ln_e = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_fc, self.c_proj = nn.Linear(2 * C, config.n_hidden), nn.Linear(config.n_hidden, C)

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialize as GPT-2 does: normal(0, 0.02), scaled by 2**-0.5 for the projection added to the state."""
        for name, p in self.named_parameters():
            init_weight(name, p, 1, generator)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the next state, (..., C).

        Args:
            state: (..., C).
            embedded: the target's embedding of the token, (..., C).
        """
        x = torch.cat([self.ln_s(state), self.ln_e(embedded)], -1)  # (..., 2 C)
        return state + self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TargetEmbeddings:
    """Embedding and output head of the target, as the draft head uses them."""

    wte: Tensor
    """(V, C)."""
    lm_head: Tensor
    """(V, C)."""
    scale: float
    """Factor for the first C channels of the target's hidden state, which gives the state the head was trained on."""

    def to(self, device: torch.device, dtype: torch.dtype) -> TargetEmbeddings:
        """Return a copy on another device or in another dtype. Tied tensors stay tied."""
        wte = self.wte.to(device, dtype)
        return TargetEmbeddings(wte, wte if self.lm_head is self.wte else self.lm_head.to(device, dtype), self.scale)


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
    """Return the embeddings of a target: the model that the head was trained for, or that model widened (widen.py).

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
    found: dict[str, Tensor] = {}
    for key, host in weights.read():
        tensor = torch.from_numpy(host.float32())
        if key in ("transformer.wte.weight", "lm_head.weight"):
            found[key] = tensor[:, :C].clone()  # not the whole embedding
            if not torch.equal(tensor, tensor[:, :C].repeat(1, r)):
                raise NanoinferError(
                    f"the draft head of {config.target!r} has n_embd={C}, the target {name!r} n_embd={theirs.n_embd},"
                    " and is not a widened model: use a head that was trained for this target"
                )
        if tied and found:  # a tied head is stored once, as the first tensor
            break
    wte = found["transformer.wte.weight"]
    return TargetEmbeddings(wte, wte, float(r)) if tied else TargetEmbeddings(wte, found["lm_head.weight"] * r, 1.0)


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


def save(head: RecurrentHead, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a head as a folder.

    Args:
        head: its own dtype is not changed.
        folder: created if it does not exist.
        dtype: dtype of the stored weights; None keeps the head's.

    Raises:
        NanoinferError: the folder cannot be written.
    """
    from safetensors.torch import save as to_bytes

    tensors = {name: p.detach().to("cpu", dtype or p.dtype).contiguous() for name, p in head.state_dict().items()}
    config = json.dumps(asdict(head.config), indent=2).encode() + b"\n"
    write_folder(folder, {WEIGHTS: to_bytes(tensors, metadata={"format": "pt"}), CONFIG: config})


def load(folder: Path) -> RecurrentHead:
    """Return the head in a folder, in float32 and eval mode. The files may be untrusted.

    Raises:
        NanoinferError: a file is missing or malformed, or a tensor's shape differs from the config's.
    """
    config = _read_config(folder / CONFIG)
    with torch.device("meta"):
        head = RecurrentHead(config)
    wanted = {name: tuple(p.shape) for name, p in head.state_dict().items()}
    path = folder / WEIGHTS
    stored = read_safetensors(path)
    _check_shapes({key: tensor.shape for key, tensor in stored.items()}, wanted, path)
    state = {name: _checked(stored[name], f"{path}: tensor {name}") for name in wanted}
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False).eval()


def _read_config(path: Path) -> DraftHeadConfig:
    raw = read_json(path, MAX_CONFIG_BYTES, "a draft head's config")
    names = [f.name for f in fields(DraftHeadConfig)]
    if not isinstance(raw, dict) or sorted(raw) != sorted(names):
        found = ", ".join(map(show, raw)) if isinstance(raw, dict) else f"a {type(raw).__name__}"
        raise NanoinferError(f"{path} holds {found[:200]}: a draft head's config holds {', '.join(names)}")
    try:
        return DraftHeadConfig(**raw)
    except NanoinferError as e:
        raise NanoinferError(f"{path}: {e}") from None


def _check_shapes(shapes: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], path: Path) -> None:
    """Compare all shapes before any tensor is read or allocated."""
    if extra := sorted(shapes.keys() - wanted.keys()):
        raise NanoinferError(f"{path}: unexpected tensor {show(extra[0])}: a draft head has {', '.join(wanted)}")
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            found = list(shapes[name]) if name in shapes else "missing"
            raise NanoinferError(f"{path}: tensor {name} is {found}, but the config requires {list(shape)}")


def _checked(stored: StoredTensor, what: str) -> Tensor:
    if stored.dtype not in DTYPES:
        raise NanoinferError(f"{what} is {show(stored.dtype)}: weights must be one of {', '.join(DTYPES)}")
    tensor = torch.from_numpy(stored.read().float32())
    if not bool(tensor.isfinite().all()):
        raise NanoinferError(f"{what} has values that are not finite")
    return tensor
