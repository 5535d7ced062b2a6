"""`nanoinfer train`: train a model from scratch or from any model that loads."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.help import command
from nanoinfer.cli.options import flags, option
from nanoinfer.errors import NanoinferError, ResultError, escaped, missing_extra
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.training.loop import TrainProgress


@command("train")
@option("resume", "Continue from the last state saved in --out.")
@flags(TrainConfig, "config")
def train(resume: bool, config: TrainConfig) -> None:
    """Train a model or a draft model.

    Examples:
        nanoinfer train --data play.txt --out out/char
        nanoinfer train --data play.txt --out out/char --resume    # after Ctrl-C
        nanoinfer train --data notes.txt --out out/notes --init gpt2
        nanoinfer train --data notes.txt --out out/draft --distill out/notes
    """
    if importlib.util.find_spec("torch") is None:
        raise NanoinferError(f"training cannot run: {missing_extra('torch', 'torch')}")

    from nanoinfer.training import loop

    target = config.distill
    run = loop.prepare(config, resume=resume, complete=_Writer(config) if target is not None else None)
    num_parameters = sum(p.numel() for p in run.model.parameters())
    print(
        f"{num_parameters:,} parameters, {run.train.tokens.numel():,} training tokens,"
        f" {run.val.tokens.numel():,} validation tokens, on {run.device}",
        file=sys.stderr,
    )
    if run.step:
        print(f"resuming at step {run.step} of {config.max_steps}", file=sys.stderr)
    with ProgressBar("train") as bar:
        best = loop.train(run, _reporter(bar, config.max_steps, run.val_chars_per_token))
    if not math.isfinite(best):
        raise ResultError(f"training diverged: the best validation loss is {best}: use a smaller --learning-rate")
    bits = best / run.val_chars_per_token / math.log(2)
    what = "validation loss" if target is None else f"KL divergence from {target} on validation text"
    print(f"best {what} {best:.4f} nats per token ({bits:.4f} bits per character), model in {config.out}")


class _Writer:
    """The target of --distill, generating; loaded at the first call."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._target = config.distill
        self._llm: LLM | None = None

    def __call__(self, texts: list[list[int]], temperatures: list[float], num_tokens: int) -> list[list[int]]:
        """Return each sequence with `num_tokens` more tokens: a function of the arguments and the run's seed."""
        from nanoinfer import LLM, SamplingParams

        assert self._target is not None
        print(
            f"{escaped(self._target)} generates {num_tokens} tokens after each of {len(texts)} prompts", file=sys.stderr
        )
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
        """Return int8 where an engine has it: half the time; the probabilities to learn are float32 in any case."""
        from nanoinfer.engines.devices import resolve_device
        from nanoinfer.engines.registry import ENGINES

        if resolve_device(self._config.device) != "cpu" or ENGINES["native"].unavailable() is not None:
            return {}
        return {"quantization": "int8", "kv_cache_dtype": "int8"}


def _reporter(bar: ProgressBar, total: int, chars_per_token: float) -> Callable[[TrainProgress], None]:
    """Return what shows the progress of training: a bar on a terminal, and a line for each validation."""

    def report(progress: TrainProgress) -> None:
        rate = f"{progress.tokens_per_sec:,.0f} tok/s"
        bar.update(progress.step, total, f"loss {progress.loss:.3f}  {rate}")
        if progress.val_loss is not None:
            bits = progress.val_loss / chars_per_token / math.log(2)
            bar.print(
                f"step {progress.step}/{total}  loss {progress.loss:.4f}  val {progress.val_loss:.4f}"
                f" ({bits:.4f} bits/char)  {rate}"
            )

    return report
