"""`nanoinfer train`: train a model from scratch or from any model that loads.

Examples:
    nanoinfer train --data shakespeare.txt --out out/char
    nanoinfer train --data shakespeare.txt --out out/char --resume          (after it was killed)
    nanoinfer train --data notes.txt --out out/notes --init gpt2 --block-size 256 --learning-rate 3e-5
    nanoinfer train --data notes.txt --out out/draft --distill out/notes --n-layer 2 --block-size 256
    nanoinfer train --data notes.txt --out out/head --draft-head out/notes --block-size 256
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.cli.options import flags
from nanoinfer.errors import ResultError
from nanoinfer.training.train_config import TrainConfig

if TYPE_CHECKING:
    from nanoinfer.llm import LLM
    from nanoinfer.training.loop import TrainProgress


@flags(TrainConfig, "config")
def train(
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last saved interval in --out.")] = False,
    *,
    config: TrainConfig,
) -> None:
    """Train a model; write it as a Hugging Face folder. Or train a draft head for one (--draft-head)."""
    from nanoinfer.training import loop, train_draft_head

    run: loop.TrainRun
    target = config.distill or config.draft_head
    if config.draft_head is not None:
        run = train_draft_head.prepare(config, resume=resume, complete=_Writer(config))
    else:
        run = loop.prepare(config, resume=resume, complete=_Writer(config) if config.distill is not None else None)
    num_parameters = sum(p.numel() for p in run.model.parameters())
    print(
        f"{num_parameters:,} parameters, {run.train.tokens.numel():,} training tokens,"
        f" {run.val.tokens.numel():,} validation tokens, on {run.device}",
        file=sys.stderr,
    )
    if run.step:
        print(f"resuming at step {run.step} of {config.max_steps}", file=sys.stderr)
    best = loop.train(run, _reporter(run.step, config.max_steps, run.val_chars_per_token))
    if not math.isfinite(best):
        raise ResultError(f"training diverged: the best validation loss is {best}: use a smaller --learning-rate")
    bits = best / run.val_chars_per_token / math.log(2)
    made = "model" if config.draft_head is None else "draft head"
    what = "validation loss" if target is None else f"KL divergence from {target} on validation text"
    print(f"best {what} {best:.4f} nats per token ({bits:.4f} bits per character), {made} in {config.out}")


class _Writer:
    """The target of --distill or --draft-head, writing; loaded when it is first asked to."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._target = config.distill or config.draft_head
        self._llm: LLM | None = None

    def __call__(self, texts: list[list[int]], temperatures: list[float], num_tokens: int) -> list[list[int]]:
        """Return each text with `num_tokens` more tokens: a function of the arguments and the run's seed."""
        from nanoinfer import LLM, SamplingParams

        assert self._target is not None
        print(f"{self._target} writes {len(texts)} texts on, {num_tokens} tokens each", file=sys.stderr)
        self._llm = self._llm or LLM(self._target, device=self._config.device, **self.precision())
        params = [
            SamplingParams(
                max_tokens=num_tokens, temperature=temperature, seed=self._config.seed * 1_000_003 + i, ignore_eos=True
            )
            for i, temperature in enumerate(temperatures)
        ]
        outputs = self._llm.generate(texts, params)
        return [text + output.check().outputs[0].token_ids for text, output in zip(texts, outputs, strict=True)]

    def precision(self) -> dict[str, Any]:
        """8 bits where there is an engine for them: half the time, and what is learned is the target's in float32."""
        from nanoinfer.engines.devices import resolve_device
        from nanoinfer.engines.registry import ENGINES

        if resolve_device(self._config.device).type != "cpu" or ENGINES["native"].unavailable() is not None:
            return {}
        return {"quantization": "int8", "kv_cache_dtype": "int8"}


class _reporter:
    """Progress on stderr: a bar on a terminal, one line per validation elsewhere."""

    def __init__(self, done: int, total: int, chars_per_token: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._chars_per_token = chars_per_token
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("train"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=total, completed=done, note="")
        self._total = total
        self._bar.start()

    def __call__(self, progress: TrainProgress) -> None:
        note = f"loss {progress.loss:.3f}  {progress.tokens_per_sec:,.0f} tok/s"
        self._bar.update(self._task, completed=progress.step, note=note)
        if progress.val_loss is not None:
            bits = progress.val_loss / self._chars_per_token / math.log(2)
            self._console.print(
                f"step {progress.step}/{self._total}  loss {progress.loss:.4f}  val {progress.val_loss:.4f}"
                f" ({bits:.4f} bits/char)  {progress.tokens_per_sec:,.0f} tok/s",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        if progress.step == self._total:
            self._bar.stop()
