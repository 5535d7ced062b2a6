"""From a model's name to a loaded model: built in, random, widened, a local folder or file, or a Hub repository.

Names are tried in this order: `wide:<model>:<preset>`; `shakespeare` and the other built-in models;
`random:<preset>`; a path that exists; a Hub repository id. `./shakespeare` is the folder of that name.

`wide:shakespeare:gpt2-large` is the model `shakespeare` widened by duplication (widen.py) to that preset's width
and layers: the source's words, vocabulary, context length and tokenizer at about the preset's cost.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.checks import require_int
from nanoinfer.config import PRESETS, ModelConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.models import tokenizers
from nanoinfer.models.checkpoints import huggingface, nanogpt

if TYPE_CHECKING:
    import torch

    from nanoinfer.models.gpt import GPT
    from nanoinfer.models.tokenizers import Tokenizer

log = logging.getLogger("nanoinfer")

BUILTIN = Path(__file__).parent.parent / "builtin"
GPT2_VOCABULARIES = (50257, 50304)  # GPT-2's own, and nanoGPT's padding of it to a multiple of 64
GPT2_TOKENIZER_REPO = "openai-community/gpt2"


@dataclass
class LoadedModel:
    """A model with what belongs to it."""

    name: str
    gpt: GPT
    """On the CPU, in eval mode."""
    config: ModelConfig
    tokenizer: Tokenizer | None
    no_tokenizer_reason: str = ""
    """Why `tokenizer` is None, with the remedy."""

    def take(self) -> GPT:
        """Return the model and forget it, so that its weights are gone as soon as the caller needs them no more.

        Without this they may stay until the next collection of cycles: an error that the Hub's library caught keeps
        all frames up to the caller's alive, and what they hold.
        """
        gpt = self.gpt
        del self.gpt
        return gpt


def builtin_names() -> list[str]:
    """Return the names of the models that ship inside the package."""
    return sorted(p.parent.name for p in BUILTIN.glob("*/config.json"))


def load_model(
    name: str, *, dtype: torch.dtype | None = None, seed: int = 0, tokenizer: str | None = None
) -> LoadedModel:
    """Load a model by name.

    Args:
        name: see the module's docstring.
        dtype: dtype of the weights; None is float32.
        seed: for random weights.
        tokenizer: where to take the tokenizer from instead of the model's own place: a built-in model, a
            folder, a tokenizer.json, a meta.pkl, or a Hub repository.

    Raises:
        NanoinferError: no such model, or a file of it is broken or unsupported.
    """
    if not isinstance(name, (str, Path)) or not str(name):
        raise NanoinferError(f"model={name!r} is not a name or a path")
    require_int("seed", seed, 0, 2**64 - 1)
    if str(name).startswith("wide:"):
        return _widened(str(name), dtype, seed, tokenizer)
    name, path = str(name), _place(name)
    dataset = None
    if name.startswith("random:"):
        gpt, config = _random(name, dtype, seed)
    elif path.is_file():
        gpt, config, dataset = nanogpt.load_checkpoint(path, dtype)
    else:
        path = path if path.is_dir() else _hub_folder(name)
        gpt, config = huggingface.load_folder(path, dtype)
    loaded = LoadedModel(name, gpt, config, None)
    del gpt  # see LoadedModel.take
    try:
        loaded.tokenizer = load_tokenizer(tokenizer) if tokenizer else _own_tokenizer(name, path, config, dataset)
    except NanoinferError as e:
        if tokenizer:
            raise
        loaded.no_tokenizer_reason = str(e)  # token ids still work; text says why it does not
    if loaded.tokenizer is not None:
        _check_vocabulary(loaded.tokenizer, config, name)
    return loaded


def _place(name: str | Path) -> Path:
    """Return where a name would be on disk: a built-in model's folder, or the path of that name."""
    if str(name) in builtin_names():
        return BUILTIN / name
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as e:  # too long, not ours to look into, ~nobody
        raise NanoinferError(f"{str(name)[:100]!r} cannot be looked up: {' '.join(str(e).split())[:60]}") from None
    return path


def _random(name: str, dtype: torch.dtype | None, seed: int) -> tuple[GPT, ModelConfig]:
    import torch

    from nanoinfer.models.gpt import GPT

    preset = name.removeprefix("random:")
    if preset not in PRESETS:
        raise NanoinferError(f"model {name!r}: there is no preset {preset!r}: use one of {', '.join(PRESETS)}")
    with torch.device("meta"):
        gpt = GPT(PRESETS[preset])
    gpt = gpt.to_empty(device="cpu")
    gpt.tie_weights()
    gpt.init_weights(torch.Generator().manual_seed(seed))
    return gpt.to(dtype or torch.float32).requires_grad_(False).eval(), PRESETS[preset]


def split_wide(name: str) -> tuple[str, ModelConfig]:
    """wide:shakespeare:gpt2 -> the source's name, and the preset that gives the width and the layers.

    Raises:
        NanoinferError: a part is missing, or there is no such preset.
    """
    source, _, preset = name.removeprefix("wide:").rpartition(":")
    if not source or preset not in PRESETS:
        raise NanoinferError(
            f"model {name!r}: a widened model is wide:<model>:<preset>, with a preset of {', '.join(PRESETS)}"
        )
    return source, PRESETS[preset]


def _widened(name: str, dtype: torch.dtype | None, seed: int, tokenizer: str | None) -> LoadedModel:
    from nanoinfer.models.widen import widen

    source, shape = split_wide(name)
    loaded = load_model(source, seed=seed, tokenizer=tokenizer)  # float32: see widen
    try:
        gpt = widen(loaded.gpt, n_embd=shape.n_embd, n_layer=shape.n_layer)
    except NanoinferError as e:
        raise NanoinferError(f"model {name!r}: {e}") from None
    loaded.name, loaded.gpt, loaded.config = name, gpt.to(dtype) if dtype else gpt, gpt.config
    return loaded


def _hub_folder(name: str) -> Path:
    """Return the local folder of a Hub repository, or say that `name` is no model at all."""
    parts = name.split("/")
    if name.startswith((".", "/", "~")) or name.endswith((".pt", ".safetensors", "/")) or len(parts) > 2:
        raise NanoinferError(f"model {name!r}: there is no such file or folder")
    if not all(re.fullmatch(r"[\w][\w.-]*", part) for part in parts):
        raise NanoinferError(
            f"model {name!r} is neither built in ({', '.join(builtin_names())}), nor random:<preset>, nor"
            " wide:<model>:<preset>, nor a path that exists, nor a Hub repository id"
        )
    return huggingface.download(f"openai-community/{name}" if name in PRESETS else name)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a built-in model, a folder, a tokenizer.json or meta.pkl, or a Hub repository."""
    name, path = str(name), _place(name)
    if path.is_file() and path.suffix == ".pkl":
        return nanogpt.load_meta(path)
    if path.is_file():
        return tokenizers.from_file(path)
    folder = path if path.is_dir() else _hub_folder(name)
    if (meta := folder / "meta.pkl").is_file() and not (folder / "tokenizer.json").is_file():
        return nanogpt.load_meta(meta)
    if (found := tokenizers.from_folder(folder)) is None:
        raise NanoinferError(f"{folder} has no tokenizer.json, no vocab.json with merges.txt, and no meta.pkl")
    return found


def _own_tokenizer(name: str, path: Path, config: ModelConfig, dataset: str | None) -> Tokenizer:
    """Return the tokenizer that belongs to a model: beside its weights, or GPT-2's for GPT-2's vocabulary."""
    if path.is_file() and (meta := nanogpt.find_meta(path, dataset)):
        return nanogpt.load_meta(meta)
    folder = path if path.is_dir() else path.parent
    if not name.startswith("random:") and (found := tokenizers.from_folder(folder)):
        return found
    if config.vocab_size in GPT2_VOCABULARIES:
        try:
            return load_tokenizer(GPT2_TOKENIZER_REPO)
        except NanoinferError:
            raise NanoinferError(
                f"model {name!r} uses GPT-2's tokenizer, which is not beside it and could not be fetched from the"
                " Hugging Face Hub: give token ids, or tokenizer= a folder that has it (--tokenizer shakespeare"
                " will do for measuring speed)"
            ) from None
    raise NanoinferError(
        f"model {name!r} has no tokenizer: its vocabulary of {config.vocab_size} is not GPT-2's, and there is no"
        " tokenizer.json or meta.pkl beside it: give token ids, or tokenizer= a file"
    )


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, name: str) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise NanoinferError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {name!r} only {config.vocab_size}:"
            " they do not belong together"
        )
    if tokenizer.vocab_size < config.vocab_size:
        log.info(
            "%s: ids %d to %d have no text in the tokenizer and are never sampled",
            name, tokenizer.vocab_size, config.vocab_size - 1,
        )  # fmt: skip
