"""`nanoinfer profile`: where the time of one generation goes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, config_flag, flags, llm_config, option
from nanoinfer.cli.terminal import finite_json, report_console, report_table
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.environment import MAX_WAITED
from nanoinfer.utils.files import check_replaceable

if TYPE_CHECKING:
    from nanoinfer.profiling.profiler import Profile, ProfileRow

NUM_OPERATORS = 12  # shown one by one; --json has them all
PROMPT_TOKENS = 32
_TEXT = (
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip


@command("profile")
@argument("prompt", metavar="[PROMPT]", required=False, help="Prompt; without one, random tokens.")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@option("max_tokens", "Tokens to generate, end-of-text tokens or not.")
@option("prompt_tokens", f"Random tokens to use as a prompt, where none is given.  [default: {PROMPT_TOKENS}]")
@option("decode_only", "Begin after the first token.")
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
        nanoinfer profile "To be" --json | jq '.parts[] | {name, share_percent}'
    """
    if prompt is not None and prompt_tokens is not None:
        raise NanoinferError(f"prompt_tokens={prompt_tokens} has no use beside a prompt: give one of them")
    num_prompt_tokens = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    require_int("prompt_tokens", num_prompt_tokens, 1, 1 << 20)
    params = dataclasses.replace(params, max_tokens=max_tokens, ignore_eos=True)
    with _new_file(trace) if trace is not None else nullcontext() as partial:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its start on stderr otherwise

        from nanoinfer.entrypoints.llm import LLM
        from nanoinfer.profiling.profiler import profile as run
        from nanoinfer.profiling.profiler import random_prompts

        llm = LLM.from_config(config)
        given = random_prompts(llm, 1, num_prompt_tokens) if prompt is None else prompt
        result = run(llm, given, params, decode_only=decode_only, trace=partial)
    text = finite_json(dataclasses.asdict(result))
    if as_json:
        print(text)
    else:
        _show(result)


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` at the end of the block, unless an exception ends it.

    Raises:
        NanoinferError: nothing can be written there (before the block), or the disk is full (after it).
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        check_replaceable(path)
        # A folder: torch leaves files of its own beside a trace that it could not finish.
        folder = TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except OSError as e:
        raise _not_writable(path, e.strerror) from None
    with folder as name:
        partial = Path(name) / "trace.json"
        yield partial
        if not partial.exists() or not partial.read_bytes().rstrip().endswith(b"}"):  # torch raises no error
            raise _not_writable(path, "it was cut short, the disk may be full")
        os.replace(partial, path)


def _not_writable(path: Path, reason: str | None) -> NanoinferError:
    return NanoinferError(f"trace={path} cannot be written: {reason}: choose another place")


def _show(p: Profile) -> None:
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
    if (made := p.launches) is not None:
        console.print(
            f"a step runs {made.kernels_per_step:,.1f} kernels, {made.kernels_per_layer:,} in a layer; the host"
            f" launches {made.launches_per_step:,.1f}"
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
