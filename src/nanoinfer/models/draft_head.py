"""A draft head: a small recurrent network that guesses a target's next hidden states; and its files.

    s_0 = h                                                  h: the final hidden state that x_1 was drawn from
    s_i = s_{i-1} + c_proj gelu(c_fc [ln_s(s_{i-1}); ln_e(wte(x_i))])
    logits after x_i = lm_head(s_i)                          from them x_{i+1} is drawn

x_1 is the newest token of the text, x_2, x_3, ... are guesses. s_i stands for what the target's final layer norm
would say after x_i, so the target's own embedding and output head serve, and only the MLP is trained. There is no
attention: all that is known of the text before x_1 is in h.

Sources of the idea: Medusa (Cai et al. 2024, arXiv 2401.10774), heads on the last hidden state; Hydra (Ankner et al.
2024, arXiv 2402.05109), heads that see the tokens before theirs; EAGLE (Li et al. 2024, arXiv 2401.15077),
guessing hidden states instead of tokens.

On disk a head is a folder with draft_head.json and draft_head.safetensors.
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
from nanoinfer.files import read_json, write_atomically
from nanoinfer.models.checkpoints.load import BUILTIN
from nanoinfer.models.checkpoints.stored import StoredTensor, read_safetensors

if TYPE_CHECKING:
    from nanoinfer.config import ModelConfig
    from nanoinfer.models.checkpoints.weights import Weights

CONFIG, WEIGHTS = "draft_head.json", "draft_head.safetensors"
MAX_CONFIG_BYTES = 1 << 16
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DraftHeadConfig:
    """Shape of a head, and whose it is.

    Raises:
        NanoinferError: a field is out of range.
    """

    target: str
    """Name of the model that it was trained for, for people."""
    vocab_size: int
    """The target's."""
    n_embd: int
    """The target's."""
    n_hidden: int = 1024
    """Width of the MLP's hidden layer."""
    vocabulary: str | None = None
    """`tokenizers.fingerprint` of the target's tokenizer; None: it has none."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_embd", "n_hidden"):
            require_int(name, getattr(self, name), 1, 2**31 - 1)
        if not isinstance(self.target, str) or not self.target:
            raise NanoinferError(f"target={show(self.target)} is not a name")
        if self.vocabulary is not None and not isinstance(self.vocabulary, str):
            raise NanoinferError(f"vocabulary={show(self.vocabulary)} is neither a string nor null")


class RecurrentHead(nn.Module):
    """The MLP and its two layer norms. Its weights are whatever was there: load them, or call `init_weights`."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        C = config.n_embd
        self.ln_s, self.ln_e = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_fc, self.c_proj = nn.Linear(2 * C, config.n_hidden), nn.Linear(config.n_hidden, C)

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights as GPT-2 does: normal(0, 0.02), smaller for what is added to the state."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)
            else:
                nn.init.normal_(p, 0.0, 0.02 * (2**-0.5 if "c_proj" in name else 1.0), generator=generator)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the next state, (..., C).

        Args:
            state: (..., C).
            embedded: the token's row of the target's embedding, (..., C).
        """
        x = torch.cat([self.ln_s(state), self.ln_e(embedded)], -1)  # (..., 2 C)
        return state + self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TargetEmbeddings:
    """What a head borrows from its target."""

    wte: Tensor
    """(V, C)."""
    lm_head: Tensor
    """(V, C)."""
    scale: float
    """The first C channels of the target's hidden state times this are what the head was trained on."""

    def to(self, device: torch.device, dtype: torch.dtype) -> TargetEmbeddings:
        """Return the same elsewhere or in another dtype."""
        wte = self.wte.to(device, dtype)
        return TargetEmbeddings(wte, wte if self.lm_head is self.wte else self.lm_head.to(device, dtype), self.scale)


def check(config: DraftHeadConfig, name: str, target: ModelConfig, vocabulary: str | None) -> None:
    """Raise NanoinferError unless a head can be one of the target `name`, whose tokenizer has that fingerprint.

    The target's width may be a multiple of the head's; `frame` says whether it is a widened model.
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
    """Return what a head needs of a target: the model that it was trained for, or that model widened (widen.py).

    A widened model has r copies of every channel; its final layer norm, or where the head is not tied its output
    head, is divided by r.

    Args:
        config: the head's.
        weights: the target's, of a shape that `check` takes.
        name: of the target, for the message.

    Raises:
        NanoinferError: the target is wider, and no widened model.
    """
    theirs, C = weights.config, config.n_embd
    r, tied = theirs.n_embd // C, theirs.tie_word_embeddings
    found: dict[str, Tensor] = {}
    for key, tensor in weights:
        if key in ("transformer.wte.weight", "lm_head.weight"):
            found[key] = tensor[:, :C].clone()  # not the whole embedding
            if not torch.equal(tensor, tensor[:, :C].repeat(1, r)):
                raise NanoinferError(
                    f"the draft head of {config.target!r} has n_embd={C}, the target {name!r} n_embd={theirs.n_embd},"
                    " and is no widened model: use a head that was trained for this target"
                )
        if tied and found:  # a tied head is named once, and first
            break
    wte = found["transformer.wte.weight"]
    return TargetEmbeddings(wte, wte, float(r)) if tied else TargetEmbeddings(wte, found["lm_head.weight"] * r, 1.0)


# Files ---------------------------------------------------------------------------------------------------


def find(name: str) -> Path | None:
    """Return the folder of a head by its name, built in or a path; None where there is no head of that name."""
    for folder in (BUILTIN / name, Path(name)):
        try:
            if (folder / CONFIG).is_file():
                return folder
        except (OSError, ValueError):  # too long, not ours to look into: no head, and load_model says what is wrong
            continue
    return None


def save(head: RecurrentHead, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a head as a folder.

    Args:
        head: its own dtype is not changed.
        folder: made if it is not there.
        dtype: dtype of the stored weights; None is the head's own.

    Raises:
        NanoinferError: the folder cannot be written.
    """
    from safetensors.torch import save as to_bytes

    tensors = {name: p.detach().to("cpu", dtype or p.dtype).contiguous() for name, p in head.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, to_bytes(tensors, metadata={"format": "pt"}))
        write_atomically(folder / CONFIG, json.dumps(asdict(head.config), indent=2).encode() + b"\n")
    except OSError as e:
        raise NanoinferError(f"{folder} cannot be written: {e.strerror}: choose another folder") from None


def load(folder: Path) -> RecurrentHead:
    """Return the head in a folder, in float32 and eval mode. The files need not be trusted.

    Raises:
        NanoinferError: a file is missing or broken, or the weights do not have the sizes that the config says.
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
    """Compare before anything is read or allocated."""
    if extra := sorted(shapes.keys() - wanted.keys()):
        raise NanoinferError(f"{path}: tensor {show(extra[0])} has no place in a draft head")
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            found = list(shapes[name]) if name in shapes else "missing"
            raise NanoinferError(f"{path}: tensor {name} is {found}, but the config makes it {list(shape)}")


def _checked(stored: StoredTensor, what: str) -> Tensor:
    if stored.dtype not in DTYPES:
        raise NanoinferError(f"{what} is {show(stored.dtype)}: weights must be one of {', '.join(DTYPES)}")
    tensor = stored.read().to(torch.float32)
    if not bool(tensor.isfinite().all()):
        raise NanoinferError(f"{what} has values that are not finite")
    return tensor
