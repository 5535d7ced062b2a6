"""Load a model by name: built in, random, widened, a local folder or file (.pt, GGUF), or a Hub repository.

A name is resolved in this order: `wide:<model>:<preset>` (transforms.py); built-in models; `random:<preset>`; an
existing path; a model in a Python package, or a Hub repository id (hub.py). The path of a model.safetensors stands
for its folder; a GGUF file is known by its suffix or its first bytes. If a folder `a` exists, `a/b` is a path and is
not looked up on the Hub. A reader is imported where its format is read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.checkpoints import huggingface, packed, tokenizer_files
from nanoinfer.checkpoints.weights import Weights
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.errors import NanoinferError, about, escaped, show
from nanoinfer.models import pooling
from nanoinfer.models.model_info import Description
from nanoinfer.models.parameters import initialize
from nanoinfer.models.stored import is_safetensors
from nanoinfer.tokenizers.limits import MAX_TOKENS
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.files import first_bytes

if TYPE_CHECKING:
    from nanoinfer.models.transformer import Transformer
    from nanoinfer.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("nanoinfer")

BUILTIN = Path(__file__).parents[1] / "models" / "builtin"
GPT2_VOCABULARIES = (50257, 50304)  # GPT-2's, and nanoGPT's padding of it to a multiple of 64
GPT2_TOKENIZER_REPO = "openai-community/gpt2"
_NANOCHAT = re.compile(r"model_(\d{1,12})\.pt")


@dataclass
class LoadedModel(Description):
    """A model with its weights."""

    weights: Weights = field(kw_only=True)
    _gpt: Transformer | None = field(default=None, init=False, repr=False)

    @property
    def gpt(self) -> Transformer:
        """The reference model, loaded into memory on the CPU, in eval mode."""
        if self._gpt is None:
            from nanoinfer.checkpoints.gpt_loading import load_gpt

            self._gpt = load_gpt(self.weights)
        return self._gpt

    def take(self) -> Weights:
        """Return the weights and drop the reference to them, so that the caller's is the only one.

        Otherwise the file could stay open until the next garbage collection: an exception that the Hub library caught
        references all frames up to the caller's, and their local variables.
        """
        weights = self.weights
        del self.weights
        return weights


def builtin_names() -> list[str]:
    """Return the names of the models that ship inside the package."""
    return sorted(p.parent.name for p in BUILTIN.glob("*/config.json"))


def load_model(
    name: str, *, dtype: str = "float32", seed: int = 0, tokenizer: str | None = None, max_model_len: int | None = None
) -> LoadedModel:
    """Load a model by name.

    Args:
        name: see the module's docstring.
        dtype: dtype to compute in.
        seed: of random weights.
        tokenizer: where to load the tokenizer from, if not from the model: a built-in model, a folder, a
            tokenizer.json, a meta.pkl, or a Hub repository.
        max_model_len: context length; None: the model's.

    Raises:
        NanoinferError: the model does not exist, or one of its files is malformed or unsupported.
    """
    if not isinstance(name, (str, Path)) or not str(name):
        raise NanoinferError(f"model={show(name)} is not a name or a path")
    require_int("seed", seed, 0, 2**64 - 1)
    if str(name).startswith("wide:"):
        return _widened(str(name), dtype, seed, tokenizer, max_model_len)
    name, path = str(name), _model_place(name)
    if not path.exists() and not name.startswith("random:"):
        path = _find(name)
    opener = next(opener for applies, opener in _FORMATS if applies(name, path))
    loaded, own_tokenizer = opener(name, path, dtype, seed)
    loaded.weights = loaded.weights.shortened(max_model_len)
    loaded.config = loaded.weights.config
    try:
        loaded.tokenizer = load_tokenizer(tokenizer, loaded.config.vocab_size) if tokenizer else own_tokenizer()
    except NanoinferError as e:
        if tokenizer:
            raise
        loaded.no_tokenizer_reason = str(e)  # token ids still work; text raises this message
    if loaded.tokenizer is not None:
        _check_vocabulary(loaded.tokenizer, loaded.config, name)
        if opener is _open_nanochat:
            from nanoinfer.checkpoints import nanogpt

            loaded.weights, loaded.chat_template = nanogpt.with_special_tokens(loaded.weights, loaded.tokenizer)
            loaded.config = loaded.weights.config
    return loaded


_Opened = tuple[LoadedModel, Callable[[], "Tokenizer"]]
"""A model without its tokenizer, and what reads that; it raises NanoinferError if there is none."""


def _open_random(name: str, path: Path, dtype: str, seed: int) -> _Opened:
    from nanoinfer.models.presets import PRESETS

    preset = name.removeprefix("random:")
    if preset not in PRESETS:
        raise NanoinferError(f"model {show(name)}: preset {show(preset)} is unknown: use one of {', '.join(PRESETS)}")
    config = PRESETS[preset]
    weights = Weights(config, dtype, lambda: initialize(config, seed))
    return LoadedModel(name, config, weights=weights), lambda: _tokenizer_of(name, config)


def _open_gguf(name: str, path: Path, dtype: str, seed: int) -> _Opened:
    from nanoinfer.checkpoints.gguf import model as gguf
    from nanoinfer.checkpoints.gguf import tokenizer as gguf_tokenizer

    weights, metadata = gguf.open_file(path, dtype)
    loaded = LoadedModel(
        name, weights.config, weights=weights, chat_template=gguf_tokenizer.chat_template(metadata),
        tool_template=gguf_tokenizer.chat_template(metadata, gguf_tokenizer.TOOL_TEMPLATE),
        special_tokens=gguf_tokenizer.special_tokens(metadata), pooling=pooling.of_gguf(metadata),
    )  # fmt: skip
    return loaded, lambda: gguf_tokenizer.read_tokenizer(metadata, escaped(path))


def _open_nanochat(name: str, path: Path, dtype: str, seed: int) -> _Opened:
    from nanoinfer.checkpoints import nanogpt

    checkpoint = find_nanochat(path)
    assert checkpoint is not None
    weights, own = nanogpt.open_nanochat(checkpoint, dtype), nanogpt.find_tokenizer(checkpoint)
    config = weights.config
    read = lambda: nanogpt.load_nanochat_tokenizer(own) if own else _tokenizer_of(name, config, checkpoint.parent)  # noqa: E731
    return LoadedModel(name, config, weights=weights), read


def _open_nanogpt(name: str, path: Path, dtype: str, seed: int) -> _Opened:
    from nanoinfer.checkpoints import nanogpt

    weights, dataset = nanogpt.open_checkpoint(path, dtype)
    config, meta = weights.config, nanogpt.find_meta(path, dataset)
    read = lambda: nanogpt.load_meta(meta) if meta else _tokenizer_of(name, config, path.parent)  # noqa: E731
    return LoadedModel(name, config, weights=weights), read


def _open_folder(name: str, path: Path, dtype: str, seed: int) -> _Opened:
    weights = open_weights(path, dtype)
    config, loaded = weights.config, LoadedModel(name, weights.config, weights=weights, pooling=pooling.read(path))
    loaded.sampling_defaults = tokenizer_files.sampling_defaults(path)
    try:
        loaded.response_template = tokenizer_files.response_template(path)
        loaded.chat_template, loaded.special_tokens = tokenizer_files.read_chat_template(path)
        loaded.tool_template = tokenizer_files.tool_template(path)
    except NanoinferError as e:
        loaded.no_chat_template_reason = str(e)  # everything but chat works; chat raises this message
    return loaded, lambda: _tokenizer_of(name, config, path)


_FORMATS: tuple[tuple[Callable[[str, Path], object], Callable[[str, Path, str, int], _Opened]], ...] = (
    (lambda name, path: name.startswith("random:"), _open_random),
    (lambda name, path: is_gguf(path), _open_gguf),
    (lambda name, path: find_nanochat(path), _open_nanochat),
    (lambda name, path: path.exists() and not path.is_dir(), _open_nanogpt),
    (lambda name, path: True, _open_folder),
)
"""Whether a name or path is of a format, and what opens it; the first that applies does."""


def find_nanochat(path: Path) -> Path | None:
    """Return the checkpoint that a path stands for: itself, or the last one in its folder; None: there is none."""
    if not path.is_dir():
        return path if _NANOCHAT.fullmatch(path.name) and path.is_file() else None
    if (path / "config.json").exists():
        return None
    steps = {int(m[1]): p for p in path.glob("model_*.pt") if (m := _NANOCHAT.fullmatch(p.name))}
    return steps[max(steps)] if steps else None


def open_weights(path: Path, dtype: str = "float32") -> Weights:
    """Return the weights of a GGUF file, a packed folder or one in the Hugging Face layout: no tokenizer, no network.

    Raises:
        NanoinferError: a file is missing, malformed or unsupported.
    """
    if is_gguf(path):
        from nanoinfer.checkpoints.gguf import model as gguf

        return gguf.open_file(path, dtype)[0]
    return packed.open_folder(path) if packed.is_packed(path) else huggingface.open_folder(path, dtype)


def fit_engine(name: str, options: EngineConfig) -> EngineConfig:
    """Return the options of the engine; a folder of packed weights determines some of them.

    Raises:
        NanoinferError: the weights are packed for other options.
    """
    if not isinstance(name, (str, Path)) or str(name).startswith("wide:"):
        return options
    folder = packed.folder_of(_place(name))
    return packed.fit_engine(folder, options) if packed.is_packed(folder) else options


def _place(name: str | Path) -> Path:
    """Return the path for a name: a built-in model's folder, or the name as a path, which may not exist."""
    if str(name) in builtin_names():
        return BUILTIN / name
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:  # too long, no permission, no such user, a null byte
        raise NanoinferError(f"{str(name)[:100]!r} cannot be looked up: {escaped(e, 60)}") from None
    return path


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name or its first bytes: Ollama's files have no suffix."""
    named = path.suffix.lower() == ".gguf" and path.exists() and not path.is_dir()
    return named or first_bytes(path, 4) == b"GGUF"


def _model_place(name: str | Path) -> Path:
    """Return the path for a model's name; for a weight file in the Hugging Face layout, its folder.

    Raises:
        NanoinferError: the file has an unsupported format, or is one of several weight files.
    """
    path = packed.folder_of(_place(name))
    named = path.suffix == ".safetensors" or path.name == huggingface.PICKLED
    if path.is_file() and (named or is_safetensors(path)):
        huggingface.refuse_adapter(path.parent)
        beside = named and (path.parent / "config.json").is_file()
        if not beside or huggingface.weight_files(path.parent) != [path]:
            raise NanoinferError(
                f"model {show(str(name))} is a weight file without a config: give a folder that contains it as"
                " model.safetensors, with its config.json"
            )
        return path.parent
    return path


def split_wide(name: str) -> tuple[str, ModelConfig]:
    """Return the source and the preset of a widened model: wide:shakespeare:gpt2 -> "shakespeare", PRESETS["gpt2"].

    Raises:
        NanoinferError: a part is missing, or the preset is unknown.
    """
    from nanoinfer.models.presets import PRESETS

    source, _, preset = name.removeprefix("wide:").rpartition(":")
    presets = [name for name, config in PRESETS.items() if config.is_gpt2]
    if not source or preset not in presets or source.startswith("wide:wide:"):
        raise NanoinferError(
            f"model {show(name)}: a widened model is named wide:<model>:<preset>, is widened at most twice, and its"
            f" preset is one of {', '.join(presets)}"
        )
    return source, PRESETS[preset]


def _widened(name: str, dtype: str, seed: int, tokenizer: str | None, max_model_len: int | None) -> LoadedModel:
    from nanoinfer.checkpoints.transforms import widen

    source, shape = split_wide(name)
    loaded = load_model(source, dtype=dtype, seed=seed, tokenizer=tokenizer, max_model_len=max_model_len)
    with about(f"model {show(name)}"):
        weights = widen(loaded.take(), n_embd=shape.n_embd, n_layer=shape.n_layer)
    loaded.name, loaded.weights, loaded.config = name, weights, weights.config
    return loaded


def _find(name: str) -> Path:
    """Return the local folder or file of a model in a Python package or on the Hub. Raises NanoinferError without."""
    from nanoinfer.checkpoints import hub

    if name in hub.PACKAGES:
        return hub.find_packaged(name)
    parts = name.split("/")
    local = len(parts) > 2 or (len(parts) == 2 and os.path.exists(parts[0]))  # False for a name that is too long
    if not name.startswith(hub.SCHEME) and (
        local
        or name.startswith((".", "/", "~"))
        or name.endswith((".pt", ".bin", ".safetensors", ".gguf", ".GGUF", "/"))
    ):
        raise NanoinferError(f"model {show(name)}: there is no such file or folder")
    if (path := hub.find(name)) is None:
        raise NanoinferError(
            f"model {show(name)} is neither built in ({', '.join(builtin_names())}), nor random:<preset>, nor"
            " wide:<model>:<preset>, nor a path that exists, nor on the Hub as owner/repo, owner/repo:Q4_K_M or"
            " hf://owner/repo/name.gguf"
        )
    return path


def load_tokenizer(name: str, num_tokens: int = MAX_TOKENS) -> Tokenizer:
    """Return the tokenizer of a built-in model, a folder, a tokenizer.json, meta.pkl or GGUF file, or a repository.

    `num_tokens`: of the model that it is for; a far larger one is refused before it is parsed.
    """
    name, path = str(name), _place(name)
    path = path if path.exists() else _find(name)
    if is_gguf(path):
        from nanoinfer.checkpoints.gguf import model as gguf

        return gguf.open_tokenizer(path)
    if path.is_file() and path.suffix == ".pkl":
        return _open_pickle(path)
    if path.is_file():
        return tokenizer_files.open_file(path, num_tokens)
    if (meta := path / "meta.pkl").is_file() and not (path / "tokenizer.json").is_file():
        return _open_pickle(meta)
    if (tokenizer := tokenizer_files.from_folder(path, num_tokens)) is None:
        names = ", ".join(tokenizer_files.NAMES)
        raise NanoinferError(
            f"{escaped(path)} has no tokenizer, which is one of {names} and meta.pkl: give a folder or file with one"
        )
    return tokenizer


def _open_pickle(path: Path) -> Tokenizer:
    """Return the tokenizer in nanochat's tokenizer.pkl or nanoGPT's meta.pkl."""
    from nanoinfer.checkpoints import nanogpt

    return nanogpt.load_nanochat_tokenizer(path) if path.name == nanogpt.TOKENIZER else nanogpt.load_meta(path)


def _tokenizer_of(name: str, config: ModelConfig, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer in a model's folder, or GPT-2's tokenizer for GPT-2's vocabulary size."""
    if folder is not None and (tokenizer := tokenizer_files.from_folder(folder, config.vocab_size)):
        return tokenizer
    if config.family == "gpt2" and config.vocab_size in GPT2_VOCABULARIES:
        try:
            return load_tokenizer(GPT2_TOKENIZER_REPO)
        except NanoinferError:
            raise NanoinferError(
                f"model {show(name)} uses GPT-2's tokenizer, which is not stored with it and could not be fetched from"
                " the Hugging Face Hub: give token ids, or tokenizer= a folder that has it (--tokenizer shakespeare"
                " is enough to measure speed)"
            ) from None
    raise NanoinferError(
        f"model {show(name)} has no tokenizer: its vocabulary of {config.vocab_size} tokens is not GPT-2's, and there"
        f" is none in its folder ({', '.join(tokenizer_files.NAMES)}, tokenizer.pkl, meta.pkl): give token ids, or"
        " tokenizer= a file or folder"
    )


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, name: str) -> None:
    """Compare a tokenizer with the rows of the model. Added tokens without a row are left out (Gemma 3 has one)."""
    size, rows = tokenizer.vocab_size, config.vocab_size
    if size > rows:
        core = getattr(tokenizer, "core", None)
        ids = core.get_vocab(with_added_tokens=True).values() if core is not None else range(size)
        added = core.get_added_tokens_decoder().keys() if core is not None else set()
        if not {i for i in ids if i >= rows} <= added - {tokenizer.bos_token_id, *tokenizer.suffix}:
            raise NanoinferError(
                f"the tokenizer has {size} tokens, but the model {show(name)} has only {rows}: use the tokenizer that"
                " the model was trained with"
            )
        tokenizer.vocab_size = rows
        log.info("%s: the model has no rows for tokens %d to %d: they are refused in a prompt", name, rows, size - 1)
    if size < rows:
        log.info("%s: token ids %d to %d are not in the tokenizer and are never sampled", name, size, rows - 1)
