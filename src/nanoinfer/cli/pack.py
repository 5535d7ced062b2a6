"""`nanoinfer pack`: pack a model's weights once, for engine native.

Examples:
    nanoinfer pack gpt2 --quantization int8 --output out/gpt2-int8
    nanoinfer pack out/notes --dtype bfloat16 --output out/notes-bf16
    nanoinfer pack gpt2 --quantization int4 --calibrate text.txt -o out/gpt2
    nanoinfer pack path/to/model-Q4_K_M.gguf --output out/model
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path

import click

from nanoinfer.cli.calibration import calibrate_model, calibration_flags, check_calibration, warn_if_quantized
from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import PATH, flags, tokenizer_flag
from nanoinfer.config import EngineConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.utils import environment
from nanoinfer.utils.arrays import format_names
from nanoinfer.utils.checks import require_choice
from nanoinfer.utils.files import escaped
from nanoinfer.utils.progress import ProgressBar

log = logging.getLogger("nanoinfer")
_FLAGS = ("dtype", "quantization", "threads")


@command("pack")
@argument("model", metavar="MODEL", help="Any model that `generate` loads, unless it is packed already.")
@click.option(
    "--output", "-o", metavar="FOLDER", type=PATH, required=True, help="Folder to write; must be empty or not exist."
)
@calibration_flags("--quantization int4")
@tokenizer_flag
@flags(EngineConfig, "options", skip=tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name not in _FLAGS))
def pack(
    model: str, output: Path, calibrate: Path | None, calibrate_tokens: int, tokenizer: str | None,
    options: EngineConfig,
) -> None:  # fmt: skip
    """Pack weights into a folder that engine native maps into memory."""
    from nanoinfer.checkpoints import chat_files, packed
    from nanoinfer.checkpoints.load import load_model
    from nanoinfer.engines.devices import resolve_dtype
    from nanoinfer.tokenizers import tokenizer as tokenizers
    from nanoinfer.utils.files import write_folder

    if options.quantization is not None:
        require_choice("quantization", options.quantization, packed.QUANTIZATIONS)
        if options.dtype != "auto":
            raise NanoinferError("the weight format is given twice: use either --quantization or --dtype")
    check_calibration(calibrate, options.quantization == "int4", options.quantization or options.dtype)
    loaded = load_model(model, tokenizer=tokenizer)
    if not loaded.weights.has_head:
        raise NanoinferError(f"{escaped(model)} has no output head, which a packed folder has: use it as it is")
    if loaded.pooling.unsupported:
        log.warning("no pooling is written: %s", loaded.pooling.unsupported)
    format = options.quantization or options.dtype
    if format != "auto":
        if options.quantization is not None:
            warn_if_quantized(loaded, format)
        loaded.weights = dataclasses.replace(loaded.weights, block_formats={})
    elif not loaded.weights.block_formats:
        raise NanoinferError("the weight format must be given: use either --quantization (int8, int4) or --dtype")
    else:
        format = resolve_dtype("auto", "cpu", loaded.weights.stored_dtype)
    block_formats = loaded.weights.block_formats
    note = "" if calibrate is None else calibrate_model(loaded, calibrate, calibrate_tokens, options.threads)
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
    write_folder(output, chat_files.to_files(*chat, loaded.tool_template))
    for name, files in loaded.pooling.to_files().items():
        write_folder(output / name, files)
    formats = " ".join(format_names(block_formats)) or format
    print(
        f"{escaped(output)}: {formats} weights of {escaped(model)}, {num_bytes:,} bytes{note}",
        file=sys.stderr,
    )
