"""`nanoinfer pack` and `nanoinfer export`: write a model's weights in another format."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import config_flag, flags, option
from nanoinfer.config import EngineConfig
from nanoinfer.errors import NanoinferError, escaped
from nanoinfer.utils import environment
from nanoinfer.utils.arrays import format_names
from nanoinfer.utils.checks import require_choice
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from nanoinfer.checkpoints.load import LoadedModel

log = logging.getLogger("nanoinfer")
MAX_RANK = 1 << 14
"""Of an adapter that is merged: it costs nothing afterwards."""
_FLAGS = ("dtype", "quantization", "threads")


@command("pack")
@argument("model", metavar="MODEL", help="Any model that `generate` loads, unless it is packed already.")
@option("output", "Folder to write; must be empty or not exist.", "FOLDER")
@config_flag("tokenizer")
@option("merge", "Adapter (LoRA) to add to the weights: a folder of peft, or a GGUF file.", "PATH")
@flags(EngineConfig, "options", skip=tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name not in _FLAGS))
def pack(*, model: str, output: Path, tokenizer: str | None, merge: Path | None, options: EngineConfig) -> None:
    """Pack weights into a folder that engine native maps into memory.

    Examples:
        nanoinfer pack gpt2 --quantization int8 --output out/gpt2-int8
        nanoinfer pack out/notes --dtype bfloat16 --output out/notes-bf16
        nanoinfer pack path/to/model-Q4_K_M.gguf --output out/model
        nanoinfer pack base --merge adapter --dtype bfloat16 --output out/merged
    """
    from nanoinfer.checkpoints import packed, tokenizer_files
    from nanoinfer.checkpoints.load import load_model
    from nanoinfer.engines.devices import resolve_dtype
    from nanoinfer.tokenizers import tokenizer as tokenizers
    from nanoinfer.utils.files import write_folder

    if options.quantization is not None:
        require_choice("quantization", options.quantization, packed.QUANTIZATIONS)
        if options.dtype != "auto":
            raise NanoinferError("the weight format is given twice: use either --quantization or --dtype")
    format = options.quantization or options.dtype
    loaded = load_model(model, tokenizer=tokenizer)
    _merge(loaded, merge)
    if not loaded.weights.has_head:
        raise NanoinferError(f"{escaped(model)} has no output head, which a packed folder has: use it as it is")
    if loaded.pooling.unsupported:
        log.warning("no pooling is written: %s", loaded.pooling.unsupported)
    if format != "auto":
        if options.quantization is not None:
            _warn_if_quantized(loaded, format)
        loaded.weights = dataclasses.replace(loaded.weights, block_formats={})
    elif not loaded.weights.block_formats:
        raise NanoinferError("the weight format must be given: use either --quantization (int8, int4) or --dtype")
    else:
        format = resolve_dtype("auto", "cpu", loaded.weights.stored_dtype)
    block_formats = loaded.weights.block_formats
    tokenizer_json = None
    if loaded.tokenizer is None:
        log.warning("no tokenizer is written: %s", loaded.no_tokenizer_reason)
    else:
        tokenizer_json = tokenizers.to_json(loaded.tokenizer)
    with ProgressBar("pack", lines=True) as bar:
        num_bytes = packed.write_folder(
            loaded.take(), output, format, tokenizer_json, options.threads or environment.num_cpus(), bar.update
        )
    chat = loaded.chat_template, loaded.special_tokens, loaded.sampling_defaults, loaded.response_template
    write_folder(output, tokenizer_files.to_files(*chat, loaded.tool_template))
    for name, files in loaded.pooling.to_files().items():
        write_folder(output / name, files)
    formats = " ".join(format_names(block_formats)) or format
    print(f"{escaped(output)}: {formats} weights of {escaped(model)}, {num_bytes:,} bytes", file=sys.stderr)


@command("export")
@argument("model", metavar="MODEL", help="Any model that `generate` loads, unless it is packed.")
@argument("output", metavar="FILE", help="File to write, usually NAME.gguf.", type=click.Path(path_type=Path))
@option("format", "Format of the weights: F32, F16, BF16, Q8_0 or Q4_K_M; llama-quantize makes others of F16.", "NAME")
@option("force", "Replace the file if it exists.")
@config_flag("tokenizer")
@option("merge", "Adapter (LoRA) to add to the weights: a folder of peft, or a GGUF file.", "PATH")
@option("no_tokenizer", "Write no tokenizer: the file then takes token ids only.")
def export(
    *,
    model: str,
    output: Path,
    format: str = "F16",
    force: bool,
    tokenizer: str | None,
    merge: Path | None,
    no_tokenizer: bool,
) -> None:
    """Write a model as a GGUF file, which llama.cpp loads.

    Examples:
        nanoinfer export shakespeare shakespeare.gguf
        nanoinfer export out/notes notes.gguf --format Q8_0
        nanoinfer export path/to/folder model.gguf --format Q4_K_M
    """
    from nanoinfer.checkpoints.gguf import export as gguf_export
    from nanoinfer.checkpoints.load import load_model

    gguf_export.check_target(output, format, force)
    loaded = load_model(model, tokenizer=tokenizer)
    _merge(loaded, merge)
    if loaded.tokenizer is None and not no_tokenizer:
        log.warning("no tokenizer is written: %s", loaded.no_tokenizer_reason)
    try:
        metadata = gguf_export.describe_text(loaded, with_tokenizer=not no_tokenizer)
    except NanoinferError as e:
        raise NanoinferError(f"{escaped(model)}: {e}: --no-tokenizer writes the file without it") from None
    if format in gguf_export.QUANTIZED:
        _warn_if_quantized(loaded, format)
    is_quantized = bool(loaded.weights.method or loaded.weights.block_formats)
    file_bytes = loaded.weights.file_bytes
    with ProgressBar("export", lines=True) as bar:
        num_bytes = gguf_export.write_file(loaded.take(), output, format, metadata, Path(model).name, bar.update)
    if is_quantized and num_bytes > file_bytes:
        log.warning("the file is larger than the %s bytes of %s, which is quantized", f"{file_bytes:,}", escaped(model))
    print(f"{escaped(output)}: {escaped(model)} in {format}, {num_bytes:,} bytes", file=sys.stderr)


def _merge(loaded: LoadedModel, path: Path | None) -> None:
    """Add the updates of an adapter to the weights of a model. Raises NanoinferError as `read_adapter`."""
    if path is not None:
        from nanoinfer.checkpoints import adapters

        loaded.weights = adapters.merge(loaded.weights, adapters.read_adapter(path, loaded.config, MAX_RANK))


def _warn_if_quantized(loaded: LoadedModel, format: str) -> None:
    """Warn if weights that are quantized already are to be quantized again, in another format."""
    formats = format_names(loaded.weights.block_formats)
    own = loaded.weights.method or " + ".join(formats)
    if own and formats != [format.lower()]:
        log.warning("%s is quantized already (%s): %s rounds its weights again", escaped(loaded.name), own, format)
