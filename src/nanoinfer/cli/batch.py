"""`nanoinfer batch`: completions of a file of prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, are_given, config_flag, flags, llm_config, of_model, option
from nanoinfer.cli.terminal import complain
from nanoinfer.config import LLMConfig, SchedulerConfig
from nanoinfer.errors import NanoinferError, escaped
from nanoinfer.sampling_params import COMMAND_DEFAULTS, SamplingParams, named_adapters
from nanoinfer.utils.checks import bounded, keep_fields, require_int
from nanoinfer.utils.files import read_text
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from nanoinfer.batch.files import LineReader, Output
    from nanoinfer.batch.run import BatchOptions

    Parts = Sequence[tuple[LineReader, Output]]

_CAPACITY = (
    "threads", "max_num_seqs", "kv_cache_memory", "graph_memory", "max_num_batched_tokens", "target_step_ms",
    "max_num_queued", "enable_prefix_caching", "prefix_cache_file", "enable_lora", "max_loras", "max_lora_rank",
)  # fmt: skip
"""Options that may change when a batch is continued: they do not determine what is generated."""


@dataclass(frozen=True)
class RayFlags:
    """The flags of a batch on a cluster; None: not given."""

    ray: str | None = None
    """Generate on a Ray cluster: HOST:PORT, auto (the one on this machine) or local (start one here)."""
    num_actors: int | None = bounded(None, 1, 1 << 20)
    """Replicas of the model on the cluster (default: as many as its nodes have CPUs for)."""
    cpus_per_actor: int | None = bounded(None, 1, 1 << 20)
    """CPUs of a replica, and its threads (default: those of the smallest node)."""

    def __post_init__(self) -> None:
        keep_fields(self)
        for name in ("num_actors", "cpus_per_actor"):
            if getattr(self, name) is not None and self.ray is None:
                raise NanoinferError(f"--{name.replace('_', '-')} needs --ray: one process has no actors")

    def job(self, config: LLMConfig, options: BatchOptions, **more: Any) -> Any:
        """Return the job of the cluster's actors."""
        from nanoinfer.ray.pool import Job

        own = tuple(are_given(f.name for f in dataclasses.fields(SamplingParams)))
        return Job(config, options, own, num_actors=self.num_actors, cpus_per_actor=self.cpus_per_actor, **more)


@command("batch")
@argument(
    "files", metavar="FILE...", nargs=-1, required=True,
    help="Input and output, or two folders; with --output, any number of inputs. - is stdin or stdout.",
)  # fmt: skip
@option("output", "File of the records, instead of a second argument.", "PATH")
@option("overwrite", "Start again, and replace the output and its state.")
@flags(RayFlags, "cluster")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@config_flag("chat_template")
@option("seed", "Lines without a seed get one from this and their number.")
@config_flag("generation_config")
@option("lora_modules", "Adapter that lines name as their model, as NAME=PATH. May be repeated.", "NAME=PATH")
@flags(SamplingParams, "params", skip=("seed", *NO_FLAGS), defaults=COMMAND_DEFAULTS)
@llm_config("pooling", "speculation", "engine")
def batch(
    *,
    files: tuple[str, ...],
    output: str | None,
    overwrite: bool,
    cluster: RayFlags,
    chat_template: Path | None,
    seed: int = 0,
    lora_modules: tuple[str, ...],
    config: LLMConfig,
    params: SamplingParams,
) -> None:
    """Generate for each line of a JSONL file; continue after an interruption.

    Examples:
        nanoinfer batch prompts.jsonl out.jsonl --max-tokens 200
        nanoinfer batch a.jsonl b.jsonl -o out.jsonl --model gpt2 --seed 1
        echo '{"prompt": "To be", "n": 2}' | nanoinfer batch - -
        nanoinfer batch prompts.jsonl out.jsonl --ray local --cpus-per-actor 1
        nanoinfer batch parts/ out/ --ray 10.0.0.5:6379
    """
    inputs, target = _split(files, output)
    require_int("seed", seed, 0, 2**64 - 1)
    template = read_text(chat_template, "a chat template") if chat_template is not None else None

    from nanoinfer.batch.files import open_parts
    from nanoinfer.batch.run import BatchOptions

    adapters = named_adapters(lora_modules)
    options = BatchOptions(params, seed, template, adapters)
    config = dataclasses.replace(config, engine=config.engine.with_adapters(len(adapters)))
    config = dataclasses.replace(config, scheduler=SchedulerConfig(target_step_ms=None))  # none is read token by token
    parts = open_parts(inputs, target, _settings(config, options), overwrite)
    if cluster.ray is not None and not all(reader.is_regular for reader, _ in parts):
        raise NanoinferError("--ray reads its input in several places: give regular files, no standard input or pipe")
    outputs = [records for _, records in parts]
    try:
        is_complete = _skip(parts)
        if num_records := sum(records.done.num_records for records in outputs):
            _note(f"{escaped(target)} {'is complete' if is_complete else 'continues'} after {num_records:,} lines")
        if not is_complete and cluster.ray is not None:
            from nanoinfer.ray import connect, pool

            with connect.connected(cluster.ray), ProgressBar("batch", lines=True) as bar:
                pool.run(parts, cluster.job(config, options, several=len(inputs) > 1), bar)
        elif not is_complete:
            _run(config, options, parts)
        for records in outputs:
            records.finish()
    except KeyboardInterrupt:
        for records in outputs:
            records.finish()
        how = "run the same command again to continue" if outputs[0].resumable else "this output cannot be continued"
        _note(f"interrupted after {sum(records.done.num_records for records in outputs):,} lines: {how}")
        raise
    finally:
        for reader, records in parts:
            records.close()
            reader.close()
    _report(outputs)


def _skip(parts: Parts) -> bool:
    """Read the lines whose records are there; return whether no line is left."""
    is_complete = True
    for reader, records in parts:
        records.skip(reader)
        if reader.at_end():
            records.start()
            records.close()
        else:
            is_complete = False
    return is_complete


def _report(outputs: Sequence[Output]) -> None:
    """Print how many lines have failed, if any. The exit code is then 1."""
    num_records, num_errors = (sum(getattr(r.done, n) for r in outputs) for n in ("num_records", "num_errors"))
    if num_errors:
        first = next(records.done.first_error for records in outputs if records.done.first_error)
        complain(f"{num_errors:,} of {num_records:,} lines failed: see error in their records; first {first}")
        raise click.exceptions.Exit(1)


def _split(files: tuple[str, ...], output: str | None) -> tuple[list[str], str]:
    """Return the inputs and the output."""
    if output is not None:
        return list(files), output
    if len(files) != 2:
        count = "1 file is" if len(files) == 1 else f"{len(files)} files are"
        raise NanoinferError(f"{count} given: give one input and one output, or any number of inputs and --output")
    return [files[0]], files[1]


def _run(config: LLMConfig, options: BatchOptions, parts: Parts) -> None:
    """Load the model and write the records."""
    from nanoinfer.batch.run import BatchRunner
    from nanoinfer.entrypoints.llm import LLM

    llm = LLM.from_config(config)
    runner = BatchRunner(llm, dataclasses.replace(options, defaults=of_model(options.defaults, llm)))
    num_lines = 0
    log = logging.getLogger("nanoinfer")
    level = log.level
    log.setLevel(logging.ERROR)  # a warning for each line that drops tokens is in its record
    try:
        with ProgressBar("batch", lines=True) as bar:
            for reader, records in parts:
                reader.num_before = num_lines
                if not reader.at_end():
                    records.start()
                    runner.run(reader, records, bar)
                num_lines += reader.num_lines
    finally:
        log.setLevel(level)


def _settings(config: LLMConfig, options: BatchOptions) -> dict[str, Any]:
    """Return what determines the records, besides the input."""
    template = options.chat_template
    settings = {
        "model": _identify(config.model),
        "tokenizer": None if config.tokenizer is None else _identify(config.tokenizer),
        "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest()[:16],
        **dataclasses.asdict(config.engine),
        **dataclasses.asdict(config.speculation),
        **dataclasses.asdict(config.pooling),
        "adapters": {name: _identify(lora.lora_path) for name, lora in options.adapters.items()},
        **dataclasses.asdict(options.defaults),
        "seed": options.seed,
        "generation_config": config.generation_config,
        "flags": are_given(("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")),
    }
    return {name: value for name, value in settings.items() if name not in _CAPACITY}


def _identify(name: str) -> str:
    """Return the name of a model; for a local file or folder, with a hash of sizes and samples of its content."""
    try:
        path = Path(name).expanduser()
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
        digest = hashlib.sha256()
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with open(file, "rb") as f:
                for i in range(64):  # of a file of up to 1 MiB, everything
                    f.seek(i * max(1 << 14, size // 64))
                    digest.update(f.read(1 << 14))
    except (OSError, RuntimeError, ValueError):  # not a path: loading the model raises the error
        return name
    return f"{path.name} ({digest.hexdigest()[:16]})" if files else name


def _note(message: str) -> None:
    """Print a message on stderr."""
    print(f"nanoinfer: {message}", file=sys.stderr, flush=True)
