"""`nanoinfer eval`: perplexity of a text file.

Examples:
    nanoinfer eval play.txt
    nanoinfer eval play.txt --model gpt2 --dtype bfloat16 --stride 256 --json
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from nanoinfer.cli.generate import ModelFlag, TokenizerFlag
from nanoinfer.cli.options import flags
from nanoinfer.cli.terminal import print_json
from nanoinfer.config import EngineConfig
from nanoinfer.errors import ResultError
from nanoinfer.files import read_text


@flags(EngineConfig, "engine_config")
def evaluate(
    file: Annotated[Path, typer.Argument(help="Text file, UTF-8.")],
    model: ModelFlag = "shakespeare",
    tokenizer: TokenizerFlag = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens that the window moves on by; every token sees block_size - stride tokens or more."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    engine_config: EngineConfig,
) -> None:
    """Print how well a model predicts a text: perplexity, and bits per character."""
    text = read_text(file)

    from nanoinfer.llm import LLM

    llm = LLM(model, tokenizer=tokenizer, **dataclasses.asdict(engine_config))
    start = time.perf_counter()
    with _progress() as progress:
        (score,) = llm.score(text, stride=stride, progress=progress)
    seconds = time.perf_counter() - start
    if not math.isfinite(score.log_likelihood):
        raise ResultError(
            f"model {model!r} gives {file} a log-likelihood of {score.log_likelihood}: its weights or its dtype"
            " overflow; try --dtype float32"
        )
    loss = -score.log_likelihood / score.num_tokens
    bits = -score.log_likelihood / math.log(2) / len(text)
    if as_json:
        result = dataclasses.asdict(score) | {
            "model": model,
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


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of (tokens scored, tokens in all) that draws a bar on stderr; None where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("eval"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("eval", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
