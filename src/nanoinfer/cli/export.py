"""`nanoinfer export`: write a model as a GGUF file.

Examples:
    nanoinfer export shakespeare shakespeare.gguf
    nanoinfer export out/notes notes.gguf --format Q8_0
    nanoinfer export path/to/folder model.gguf --format Q4_K_M
    nanoinfer export my/folder model.gguf --format Q4_K_M --calibrate text.txt
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from nanoinfer.cli.calibration import calibrate_model, calibration_flags, check_calibration, warn_if_quantized
from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import PATH, tokenizer_flag
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import escaped
from nanoinfer.utils.progress import ProgressBar

log = logging.getLogger("nanoinfer")


@command("export")
@argument("model", metavar="MODEL", help="Any model that `generate` loads, unless it is packed.")
@argument("output", metavar="FILE", help="File to write, usually NAME.gguf.", type=PATH)
@click.option(
    "--format", metavar="NAME", default="F16", show_default=True,
    help="Format of the weights: F32, F16, BF16, Q8_0, Q4_0, Q4_K_M or MXFP4_MOE.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@calibration_flags("Q4_0 and Q4_K_M")
@tokenizer_flag
@click.option("--no-tokenizer", is_flag=True, help="Write no tokenizer: the file then takes token ids only.")
def export(
    model: str, output: Path, format: str, force: bool, calibrate: Path | None, calibrate_tokens: int,
    tokenizer: str | None, no_tokenizer: bool,
) -> None:  # fmt: skip
    """Write a model as a GGUF file, which llama.cpp loads."""
    from nanoinfer.checkpoints.gguf import export as gguf_export
    from nanoinfer.checkpoints.load import load_model

    gguf_export.check_target(output, format, force)
    check_calibration(calibrate, format in ("Q4_0", "Q4_K_M"), format)
    loaded = load_model(model, tokenizer=tokenizer)
    if loaded.tokenizer is None and not no_tokenizer:
        log.warning("no tokenizer is written: %s", loaded.no_tokenizer_reason)
    try:
        metadata = gguf_export.describe_text(loaded, with_tokenizer=not no_tokenizer)
    except NanoinferError as e:
        raise NanoinferError(f"{escaped(model)}: {e}: --no-tokenizer writes the file without it") from None
    if format not in ("F32", "F16", "BF16"):
        warn_if_quantized(loaded, format)
    is_quantized = bool(loaded.weights.method or loaded.weights.block_formats)
    file_bytes = loaded.weights.file_bytes
    note = "" if calibrate is None else calibrate_model(loaded, calibrate, calibrate_tokens)
    with ProgressBar("export", lines=True) as bar:
        num_bytes = gguf_export.write_file(loaded.take(), output, format, metadata, Path(model).name, bar.update)
    if is_quantized and num_bytes > file_bytes:
        log.warning("the file is larger than the %s bytes of %s, which is quantized", f"{file_bytes:,}", escaped(model))
    print(f"{escaped(output)}: {escaped(model)} in {format}, {num_bytes:,} bytes{note}", file=sys.stderr)
