"""`nanoinfer eval`: perplexity of a text file."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import config_flag, llm_config, option
from nanoinfer.cli.terminal import print_json
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.files import read_text
from nanoinfer.utils.progress import ProgressBar


@command("eval")
@argument("file", metavar="FILE", type=click.Path(path_type=Path), help="Text file, UTF-8.")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@option(
    "stride",
    "Tokens by which the window advances; each token is predicted from at least block_size - stride tokens"
    " (default: half of block_size).",
)
@option("as_json", "Print one JSON object.")
@llm_config("engine")
def evaluate(file: Path, stride: int | None, as_json: bool, config: LLMConfig) -> None:
    """Print the perplexity of a text file, and bits per character.

    Examples:
        nanoinfer eval play.txt
        nanoinfer eval play.txt --model gpt2 --stride 256 --json
    """
    text = read_text(file)

    from nanoinfer.entrypoints.llm import LLM

    llm = LLM.from_config(config)
    start = time.perf_counter()
    with ProgressBar("eval", lines=True) as bar:
        try:
            (score,) = llm.perplexity(text, stride=stride, progress=bar.update)
        except NanoinferError as e:
            raise type(e)(f"{file}: {e}") from None
    seconds = time.perf_counter() - start
    loss = -score.log_likelihood / score.num_tokens
    bits = -score.log_likelihood / math.log(2) / len(text)
    if as_json:
        result = dataclasses.asdict(score) | {
            "model": config.model,
            "engine": llm.engine_name,
            "loss_nats_per_token": loss,
            "bits_per_character": bits,
            "tokens_per_sec": score.num_tokens / seconds,
        }
        print_json(result)
        return
    print(
        f"perplexity {score.perplexity:.3f}, loss {loss:.4f} nats per token, {bits:.4f} bits per character"
        f" ({score.num_tokens:,} tokens scored, {len(text):,} characters, {score.num_tokens / seconds:,.0f} tokens/s)"
    )
