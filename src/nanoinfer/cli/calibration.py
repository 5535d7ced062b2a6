"""What `pack` and `export` share: the flags --calibrate and --calibrate-tokens, a warning about quantized weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.cli.options import PATH, are_given
from nanoinfer.errors import NanoinferError, about
from nanoinfer.utils.arrays import format_names
from nanoinfer.utils.files import escaped, read_text
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from nanoinfer.checkpoints.load import LoadedModel

log = logging.getLogger("nanoinfer")
NUM_TOKENS = 16384
"""Default of --calibrate-tokens."""


def calibration_flags(formats: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds both flags. `formats`: those that are calibrated, for the help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        count = click.option(
            "--calibrate-tokens", metavar="INT", type=int, default=NUM_TOKENS, show_default=True,
            help="Tokens of the text to use at most, in windows that are spread over it.",
        )  # fmt: skip
        text = click.option(
            "--calibrate", metavar="FILE", type=PATH,
            help=f"UTF-8 text of the kind that the model is used for, by which {formats} weights rounding errors.",
        )  # fmt: skip
        return text(count(command))

    return decorate


def check_calibration(calibrate: Path | None, calibrated: bool, format: str) -> None:
    """Check the flags before a model is loaded. `calibrated`: whether errors are weighted in the format.

    Raises:
        NanoinferError: the format has no scales to choose, or only the number of tokens is given.
    """
    if calibrate is not None and not calibrated:
        raise NanoinferError(f"--calibrate has no effect on {format}, whose scales are not searched: leave it out")
    if calibrate is None and are_given(["calibrate_tokens"]):
        raise NanoinferError("--calibrate-tokens needs --calibrate FILE")


def calibrate_model(loaded: LoadedModel, path: Path, num_tokens: int, threads: int | None = None) -> str:
    """Add the calibration by a text to a model's weights, in place; return a note for the message about the result.

    Raises:
        NanoinferError: the text cannot be read or is too short; the model has no tokenizer; engine native is missing.
    """
    from nanoinfer.engines.calibrate import calibrate
    from nanoinfer.engines.registry import ENGINES

    text = read_text(path, "a calibration text")
    if (why := ENGINES["native"].unavailable()) is not None:
        raise NanoinferError(f"--calibrate needs engine native: {why}")
    if loaded.tokenizer is None:
        raise NanoinferError(f"--calibrate needs a tokenizer: {loaded.no_tokenizer_reason}")
    with ProgressBar("calibrate", lines=True) as bar, about(escaped(path)):
        found = calibrate(loaded.weights, text, loaded.tokenizer, num_tokens, threads, bar.update)
    loaded.weights = dataclasses.replace(loaded.weights, calibration=found)
    return f", calibrated on {found.num_tokens:,} tokens of {escaped(path)}"


def warn_if_quantized(loaded: LoadedModel, format: str) -> None:
    """Warn if weights that are quantized already are to be quantized again, in another format."""
    formats = format_names(loaded.weights.block_formats)
    own = loaded.weights.method or " + ".join(formats)
    if own and formats != [format.removesuffix("_MOE").lower()]:
        log.warning("%s is quantized already (%s): %s rounds its weights again", escaped(loaded.name), own, format)
