"""`nanoinfer bench`, `profile`, `roofline` and `eval`: measurements of speed and quality, and limits of the hardware.

Tables and JSON documents go to stdout or to --output; progress goes to stderr. `bench` exits with 1 when a case failed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanoinfer.bench.results import to_json
from nanoinfer.bench.run import Plan
from nanoinfer.bench.run import run as run_plan
from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, config_flag, flags, llm_config, option
from nanoinfer.cli.terminal import finite_json, print_json, report_console, report_table
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.roofline.ceilings import DEVICES
from nanoinfer.roofline.report import Question, answer
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.environment import MAX_WAITED
from nanoinfer.utils.files import read_text, require_writable
from nanoinfer.utils.progress import ProgressBar

if TYPE_CHECKING:
    from rich.table import Table

    from nanoinfer.profiling.profiler import Profile, ProfileRow

NUM_OPERATORS = 12  # shown one by one; --json has them all
PROMPT_TOKENS = 32
_TEXT = (
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip
_PARTS = {
    "attention": "attention, 1 layer",
    "mlp": "MLP, 1 layer",
    "layer": "1 layer",
    "head": "head",
    "model": "model",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_STEPS = {"prefill": "prefill: N tokens of each sequence", "decode": "cached decoding: 1 token of each sequence"}


@command("bench")
@option("as_json", "Print the JSON documents instead of tables.")
@option("all_columns", "Show columns that do not fit.")
@flags(Plan, "plan")
def bench(as_json: bool, all_columns: bool, plan: Plan) -> None:
    """Measure engines and peers, next to the limits of the hardware.

    Examples:
        nanoinfer bench --suite ladder --model random:gpt2 --quick
        nanoinfer bench --engine static --engine native --batch 1 --batch 8
        nanoinfer bench --suite peers --output peers.json --report out/
        nanoinfer bench --resume peers.json                 # continue after Ctrl-C
    """
    results, interrupted = run_plan(plan, command="nanoinfer " + " ".join(sys.argv[1:]))
    text = finite_json([json.loads(to_json(r)) for r in results])
    if as_json:
        print(text)
    else:
        from rich.console import Console

        from nanoinfer.bench.table import show

        for r in results:
            show(r, Console(width=1000) if all_columns else Console())
    if interrupted:
        raise KeyboardInterrupt
    if any(r.failed for r in results):
        raise click.exceptions.Exit(1)


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


@command("profile")
@argument("prompt", metavar="[PROMPT]", required=False, help="Prompt; without one, random tokens.")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@option("max_tokens", "Tokens to generate, end-of-text tokens or not.")
@option("prompt_tokens", f"Random tokens to use as a prompt, where none is given.  [default: {PROMPT_TOKENS}]")
@option("decode_only", "Begin after the first token.")
@option("start", "Print the time from the start of a process to its first token instead, by part.")
@option("trace", "Write a Chrome trace of the profiled run to this file.")
@option("as_json", "Print one JSON object, with every operator.")
@flags(SamplingParams, "params", skip=("best_of", *_TEXT, *NO_FLAGS))
@llm_config("engine")
def profile(
    *,
    prompt: str | None,
    max_tokens: int = 32,
    prompt_tokens: int | None,
    decode_only: bool,
    start: bool,
    trace: Path | None,
    as_json: bool,
    config: LLMConfig,
    params: SamplingParams,
) -> None:
    """Print the time of each part of the model and of each operator.

    Examples:
        nanoinfer profile "O Romeo," --engine static
        nanoinfer profile --model random:gpt2 --prompt-tokens 512 --decode-only
        nanoinfer profile "To be" --trace trace.json        # for ui.perfetto.dev
        nanoinfer profile "To be" --start
        nanoinfer profile "To be" --json | jq '.parts[] | {name, share_percent}'
    """
    if prompt is not None and prompt_tokens is not None:
        raise NanoinferError(f"prompt_tokens={prompt_tokens} has no use beside a prompt: give one of them")
    num_prompt_tokens = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    require_int("prompt_tokens", num_prompt_tokens, 1, 1 << 20)
    params = dataclasses.replace(params, max_tokens=max_tokens, ignore_eos=True)
    if start and (decode_only or trace is not None):
        raise NanoinferError("start ends with the first token: leave out decode_only and trace")
    if trace is not None:
        require_writable(trace.parent, trace.name)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its start on stderr otherwise

    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.profiling.profiler import profile as profile_generation
    from nanoinfer.profiling.profiler import profile_start, random_prompts

    if start:
        parts = profile_start(config, prompt or [0] * num_prompt_tokens, dataclasses.replace(params, max_tokens=1))
        print(finite_json(parts) if as_json else "\n".join(f"{p:12} {s * 1e3:8.1f} ms" for p, s in parts.items()))
        return
    llm = LLM.from_config(config)
    prompts = random_prompts(llm, 1, num_prompt_tokens) if prompt is None else prompt
    result = profile_generation(llm, prompts, params, decode_only=decode_only, trace=trace)
    text = finite_json(dataclasses.asdict(result))
    if as_json:
        print(text)
    else:
        _show_profile(result)


def _show_profile(p: Profile) -> None:
    """Print the profile as text of at most 80 columns."""
    console = report_console()
    what = "decoding" if p.decode_only else "prompt and decoding"
    with console.capture() as text:  # printed at the end: rich itself exits when a pipe is closed
        console.print(
            f"{p.model} on {p.engine}, {p.device}, {p.dtype}; {what}: {p.num_tokens:,} tokens in {p.num_steps:,} steps"
        )
        console.print(f"\nby part of the model, of {_times(p.wall_sec, p)}")
        console.print(_table("part", [row for row in p.parts if row.calls or row.self_sec], p))
        if not p.tells_apart:
            console.print(f"{p.engine} runs the model in one call, so its parts cannot be distinguished.")
        if p.waited_sec is not None and p.waited_sec > MAX_WAITED * p.wall_sec:
            console.print(
                f"Its threads waited {p.waited_sec:,.2f} s for a core: the shares are not those of an idle machine."
                " Run it again when other programs have ended, or with fewer --threads."
            )
        if p.operators:
            _show_operators(console, p)
        else:
            console.print(f"{p.engine} runs no operators of PyTorch.")
    print(text.get(), end="")


def _show_operators(console: Any, p: Profile) -> None:
    """Print the second table, and the counts of calls and launches."""
    console.print(f"\nby operator, of {_times(p.profiled_sec, p)} under torch's profiler")
    launches, every = p.kernel_launches_per_token, _summed("", p.operators)
    without_operator = dataclasses.replace(
        every,
        name="none: Python, the profiler" if launches is None else "none: the GPU waits",
        calls=0,
        self_sec=max(0.0, p.profiled_sec - every.self_sec),
        share_percent=max(0.0, 100 - every.share_percent),
    )
    first, rest = p.operators[:NUM_OPERATORS], p.operators[NUM_OPERATORS:]
    rows = [*first, *([_summed(f"{len(rest)} more", rest)] if rest else []), without_operator]
    console.print(_table("operator", rows, p))
    console.print(f"\n{p.operator_calls_per_token:,.1f} operator calls a token, inner ones included", end="")
    console.print("" if launches is None else f"; {launches:,.1f} kernel launches a token")
    if (launched := p.launches) is not None:
        console.print(
            f"a step runs {launched.kernels_per_step:,.1f} kernels, {launched.kernels_per_layer:,} in a layer; the host"
            f" launches {launched.launches_per_step:,.1f}"
        )


def _times(seconds: float, p: Profile) -> str:
    """0.0455 -> "45.5 ms, 1.422 ms a token"."""
    return f"{1e3 * seconds:,.1f} ms, {1e3 * seconds / p.num_tokens:,.3f} ms a token"


def _summed(name: str, rows: list[ProfileRow]) -> ProfileRow:
    """Return one row for several."""
    from nanoinfer.profiling.profiler import ProfileRow

    return ProfileRow(name, *(sum(getattr(r, f) for r in rows) for f in ("calls", "self_sec", "share_percent")))


def _table(title: str, rows: list[ProfileRow], p: Profile) -> Any:
    """Return a table of shares, and of times and calls for each token."""
    table = report_table()
    table.add_column(title, overflow="fold", width=40)
    for column in ("share", "us a token", "calls a token"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name.removeprefix("aten::"),
            f"{row.share_percent:.1f}%",
            f"{1e6 * row.self_sec / p.num_tokens:,.1f}",
            f"{row.calls / p.num_tokens:,.1f}" if row.calls else "",
        )
    return table


@command("roofline")
@argument("model", metavar="MODEL", help="A preset (gpt2-xl), a built-in model, a folder, or a checkpoint file.")
@option("as_json", "Print one JSON document; keys name the units.")
@flags(Question, "question")
def roofline(model: str, as_json: bool, question: Question) -> None:
    """Print the FLOPs, bytes and time limits of a model on a device.

    Examples:
        nanoinfer roofline gpt2-xl --device h100 --batch 64 --context 1024
        nanoinfer roofline gpt2 --dtype int8                # measures this machine
        nanoinfer roofline model.gguf                       # the file's own formats
        nanoinfer roofline gpt2-xl --device a100 --json | jq .decode.tokens_per_sec
    """
    from nanoinfer.engines.devices import resolve_device

    local = "cpu" if question.device in DEVICES else resolve_device("auto")
    result = answer(model, question, local)
    text = finite_json(result, indent=2)
    if as_json:
        print(text)
    else:
        _show_roofline(result)


def _show_roofline(r: dict[str, Any]) -> None:
    """Print the document as text of at most 80 columns."""
    console = report_console()
    device, memory = r["device"], r["memory"]
    console.print(
        f"{r['model']}, {r['dtype']} weights, B = {r['batch']:,} sequences, N = {r['context_tokens']:,} tokens\n"
        f"on {device['name']}: {si(device['bandwidth_bytes_per_sec'], 'B/s')},"
        f" {si(device['flops_per_sec'][r['compute_dtype']], 'FLOP/s')} in {r['compute_dtype']},"
        f" ridge at {r['ridge_flops_per_byte']:,.1f} FLOP/B\n({device['source']})"
    )
    for key, title in _STEPS.items():
        console.print(f"\n{title}")
        console.print(_costs(r[key]))
        _print_step(console, r[key], device["bandwidth_bytes_per_sec"])
    console.print(
        f"\nKV cache: {memory['kv_cache_layer_formula']} bytes a layer = {si(memory['kv_cache_layer_bytes'], 'B')},\n"
        f"  {memory['kv_cache_formula']} bytes in all = {si(memory['kv_cache_bytes'], 'B')};"
        f" weights {si(memory['weight_bytes'], 'B')}" + _fits(memory["fits"], device["memory_bytes"])
    )
    g = r["generation"]
    console.print(
        f"\ncached over naive: {g['cached_over_naive']:,.2f} times for {g['num_new_tokens']:,} tokens after a prompt"
        f" of {g['num_prompt_tokens']:,}\n  ({si(g['cached_sec'], 's')} against {si(g['naive_sec'], 's')});"
        f" {g['cached_over_naive_last_step']:,.2f} times for the last token alone"
    )


def _costs(step: dict[str, Any]) -> Table:
    """Return the table of a step: for each part its FLOPs and bytes, as numbers and as formulas."""
    table = report_table()
    for column in ("part", "", "number", "formula"):
        table.add_column(column, justify="right" if column == "number" else "left", overflow="fold")
    for key, name in _PARTS.items():
        table.add_row(name, "FLOPs", si(step[key]["flops"], ""), step[key]["flops_formula"])
        table.add_row("", "bytes", si(step[key]["bytes"], ""), step[key]["bytes_formula"])
    return table


def _print_step(console: Any, step: dict[str, Any], bandwidth: float) -> None:
    """Print what a step is bound by and how long it takes."""
    console.print(
        f"{step['bound']}-bound, {step['bound_ratio']:,.2f} times: {si(step['memory_sec'], 's')} for the bytes,"
        f" {si(step['compute_sec'], 's')} for the FLOPs\n"
        f"{si(step['step_sec'], 's')} a step, {step['tokens_per_sec']:,.0f} tokens/s,"
        f" {step['intensity_flops_per_byte']:,.2f} FLOP/B"
    )
    if step["bandwidth_bytes_per_sec"] != bandwidth:
        console.print(
            f"the caches hold some of the bytes: {si(step['bandwidth_bytes_per_sec'], 'B/s')},"
            f" ridge at {step['ridge_flops_per_byte']:,.1f} FLOP/B"
        )


def _fits(fits: bool | None, limit: int | None) -> str:
    """Return the line about the device's memory."""
    if fits is None or limit is None:
        return ""
    return f"\n  {'fits in' if fits else 'DOES NOT FIT in'} the device's {si(limit, 'B')}"


def si(value: float, unit: str) -> str:
    """Return a number with an SI prefix, 4 digits.

    si(3115000000, "B") -> "3.115 GB"      si(0.00093, "s") -> "930 us"
    """
    scale, prefix = next(((s, p) for s, p in _PREFIXES if value >= s * 0.99995), _PREFIXES[-1])
    digits = f"{value / scale:.4g}" if value / scale < 9999.5 else f"{value / scale:,.0f}"
    return f"{digits} {prefix}{unit}".rstrip()
