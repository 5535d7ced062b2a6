"""`nanoinfer batch`: completions of a file of prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.cli import batch_ray
from nanoinfer.cli.batch_ray import RayFlags
from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, are_given, config_flag, flags, llm_config, of_model, option
from nanoinfer.cli.terminal import complain
from nanoinfer.config import LLMConfig, SchedulerConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import COMMAND_DEFAULTS, SamplingParams
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.files import read_text

if TYPE_CHECKING:
    from nanoinfer.batch.lines import LineReader
    from nanoinfer.batch.output import FileOutput, StreamOutput
    from nanoinfer.batch.run import BatchOptions

_CAPACITY = (
    "threads", "max_num_seqs", "kv_cache_memory", "graph_memory", "max_num_batched_tokens", "target_step_ms",
    "max_num_queued", "enable_prefix_caching",
)  # fmt: skip
"""Options that may change when a batch is continued: they do not determine what is generated."""


@command("batch")
@argument(
    "files", metavar="FILE...", nargs=-1, required=True,
    help="Input and output; with --output, any number of inputs. - is stdin or stdout.",
)  # fmt: skip
@option("output", "File of the records, instead of a second argument.", "PATH")
@option("overwrite", "Start again, and replace the output and its state.")
@flags(RayFlags, "cluster")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@config_flag("chat_template")
@config_flag("generic_tools")
@option("seed", "Lines without a seed get one from this and their number.")
@config_flag("generation_config")
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
    config: LLMConfig,
    params: SamplingParams,
) -> None:
    """Generate for each line of a JSONL file; continue after an interruption.

    Examples:
        nanoinfer batch prompts.jsonl out.jsonl --max-tokens 200
        nanoinfer batch a.jsonl b.jsonl -o out.jsonl --model gpt2 --seed 1
        echo '{"prompt": "To be", "n": 2}' | nanoinfer batch - -
        nanoinfer batch prompts.jsonl out.jsonl --ray local --cpus-per-actor 1
        nanoinfer batch shards/ out/ --ray 10.0.0.5:6379
    """
    inputs, target = _split(files, output)
    require_int("seed", seed, 0, 2**64 - 1)
    template = read_text(chat_template, "a chat template") if chat_template is not None else None

    from nanoinfer.batch.lines import LineReader
    from nanoinfer.batch.output import open_output, refuse_same_file
    from nanoinfer.batch.run import BatchOptions

    options = BatchOptions(params, seed, template)
    config = dataclasses.replace(config, scheduler=SchedulerConfig(target_step_ms=None))  # none is read token by token
    if cluster.has_shards(inputs, target):
        return _run_shards(cluster, inputs[0], target, overwrite, config, options)
    reader = LineReader(inputs)
    refuse_same_file(inputs, target)
    records = open_output(target, _settings(config, options), overwrite)
    try:
        records.skip(reader)
        if records.done.num_records:
            done = "is complete" if reader.at_end() else "continues"
            _note(f"{records.name} {done} after {records.done.num_records:,} lines")
        if reader.at_end():
            records.start()
        elif cluster.ray is not None:
            batch_ray.generate(cluster, config, options, reader, inputs, records)
        else:
            _run(config, options, reader, records)
        records.finish(complete=True)
    except KeyboardInterrupt:
        records.finish()
        how = "run the same command again to continue" if records.resumable else "this output cannot be continued"
        _note(f"interrupted after {records.done.num_records:,} lines: {how}")
        raise
    finally:
        records.close()
        reader.close()
    _report(records.done.num_records, records.done.num_errors, records.done.first_error)


def _run_shards(
    cluster: RayFlags, source: str, target: str, overwrite: bool, config: LLMConfig, options: BatchOptions
) -> None:
    shards = batch_ray.open_shards(source, target, _settings(config, options), overwrite)
    try:
        if done := shards.counts()[0]:
            _note(f"{target} {'is complete' if shards.complete else 'continues'} after {done:,} lines")
        if not shards.complete:
            batch_ray.generate_shards(cluster, config, options, shards)
    except KeyboardInterrupt:
        _note(f"interrupted after {shards.counts()[0]:,} lines: run the same command again to continue")
        raise
    finally:
        shards.close()
    _report(*shards.counts())


def _report(num_records: int, num_errors: int, first_error: str) -> None:
    """Print how many lines have failed, if any. The exit code is then 1."""
    if num_errors:
        complain(f"{num_errors:,} of {num_records:,} lines failed: see error in their records; first {first_error}")
        raise click.exceptions.Exit(1)


def _split(files: tuple[str, ...], output: str | None) -> tuple[list[str], str]:
    """Return the inputs and the output."""
    if output is not None:
        return list(files), output
    if len(files) != 2:
        given = "1 file is" if len(files) == 1 else f"{len(files)} files are"
        raise NanoinferError(f"{given} given: give one input and one output, or any number of inputs and --output")
    return [files[0]], files[1]


def _run(config: LLMConfig, options: BatchOptions, reader: LineReader, records: FileOutput | StreamOutput) -> None:
    """Load the model and write the records."""
    from nanoinfer.batch.run import BatchRunner
    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.utils.progress import ProgressBar

    llm = LLM.from_config(config)
    runner = BatchRunner(llm, dataclasses.replace(options, defaults=of_model(options.defaults, llm)))
    records.start()
    log = logging.getLogger("nanoinfer")
    level = log.level
    log.setLevel(logging.ERROR)  # a warning for each line that drops tokens is in its record
    try:
        with ProgressBar("batch", lines=True) as bar:
            runner.run(reader, records, bar)
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
        **dataclasses.asdict(options.defaults),
        "seed": options.seed,
        "generation_config": config.generation_config,
        "generic_tools": config.generic_tools,
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
