"""`nanoinfer generate`: text from prompts; and `explain`: a page of a generation that a reader steps through."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import NO_FLAGS, config_flag, flags, llm_config, of_model, option
from nanoinfer.cli.terminal import complain, print_json, reading_stdin
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, ResultError
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.sampling_params import COMMAND_DEFAULTS, SamplingParams, StructuredOutputsParams
from nanoinfer.utils.files import read_text, require_writable, write_atomically


@dataclass(frozen=True)
class StructuredFlags:
    """The flags of structured outputs, of which at most one is given."""

    json_schema: str | None = None
    """JSON schema that the output must match: its text, or a file."""
    json_object: bool = False
    """The output must be a JSON object."""
    regex: str | None = None
    """Regular expression (Rust's syntax) that the whole output must match."""
    choice: tuple[str, ...] = ()
    """The output must be this string, or another one that is given so. May be repeated."""
    grammar: Path | None = None
    """File with a context-free grammar, Lark or GBNF, that the output must match."""

    def params(self) -> StructuredOutputsParams | None:
        """Return what the flags ask for, or None. Raises NanoinferError if several are given, or a file is bad."""
        if self == StructuredFlags():
            return None
        names = [
            f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) not in (None, False, ())
        ]
        if len(names) > 1:
            raise NanoinferError(f"{' and '.join(names)} are both given: leave one of them out")
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = read_text(Path(schema), "a JSON schema")
        grammar = None if self.grammar is None else read_text(self.grammar, "a grammar")
        return StructuredOutputsParams(schema, self.regex, self.choice or None, grammar, self.json_object or None)


@command("generate")
@argument(
    "prompts",
    metavar="[PROMPT]...",
    nargs=-1,
    help="Prompts. Without one, and without --file, stdin is read as one prompt.",
)
@option("prompt", "Prompt, instead of an argument. May be repeated.")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@option("file", "UTF-8 file to read as one prompt. May be repeated.")
@option("lines", "Read each line of the files or of stdin as a prompt, empty lines too.")
@option("token_ids", "Prompts are token ids: '15496 11 995'.")
@option("logit_bias", "Values to add to the logits of these token ids. May be repeated.", "ID=BIAS")
@option("echo", "Print each prompt before its output.")
@option("as_json", "Print one JSON object per prompt and line, with token ids and metrics.")
@config_flag("generation_config")
@flags(SamplingParams, "params", skip=("best_of", *NO_FLAGS), defaults=COMMAND_DEFAULTS)
@flags(StructuredFlags, "structured_flags")
@llm_config("speculation", "engine")
def generate(
    prompts: tuple[str, ...],
    prompt: tuple[str, ...],
    file: tuple[Path, ...],
    lines: bool,
    token_ids: bool,
    logit_bias: tuple[str, ...],
    echo: bool,
    as_json: bool,
    config: LLMConfig,
    params: SamplingParams,
    structured_flags: StructuredFlags,
) -> None:
    """Generate text from prompts, streamed as it is generated.

    Examples:
        nanoinfer generate "O Romeo,"                       # the built-in model
        nanoinfer generate -p "To be" -n 2 --temp 0.6 --seed 1 --max-tokens 200
        nanoinfer generate --model gpt2 --file prompts.txt --lines --json
        echo "To be" | nanoinfer generate --draft shakespeare-draft
        nanoinfer generate "Name:" --regex "[A-Z][a-z]{2,8}"
    """
    if prompts and prompt:
        raise NanoinferError(
            f"the prompts {prompts[0]!r:.40} (an argument) and {prompt[0]!r:.40} (--prompt): give arguments or --prompt"
        )
    texts = _read_prompts(list(prompts or prompt), file, lines)
    bias, structured = _parse_bias(logit_bias), structured_flags.params()
    params = replace(params, logit_bias=bias, structured_outputs=structured)
    inputs: list[Any] = [_parse_ids(t) for t in texts] if token_ids else list(texts)

    from nanoinfer.entrypoints.llm import LLM

    llm = LLM.from_config(config)
    params = of_model(params, llm)
    if not as_json and llm.tokenizer is None:
        llm.decode([])  # raises an error: there is no text to print
    ids, stream = llm.stream_outputs(inputs, params)
    shown = None if as_json else _InOrder(ids, params.n, partial(_heading, texts, params.n, echo))
    if failures := _print_stream(ids, stream, shown):
        for i, message in dict.fromkeys(failures):
            complain(f"prompt {i + 1} of {len(ids)}: {message}" if len(ids) > 1 else message)
        raise click.exceptions.Exit(1)


def _print_stream(
    ids: list[int], stream: Iterator[Delta | RequestOutput], shown: _InOrder | None
) -> list[tuple[int, str]]:
    """Print what is generated, as text, or without `shown` as JSON; return what failed: numbers of prompts, and why."""
    failures: list[tuple[int, str]] = []
    with shown or nullcontext():
        for item in stream:
            if isinstance(item, RequestOutput):
                messages = [o.error for o in item.outputs if o.error is not None]
                if shown is None:
                    try:
                        print_json(dataclasses.asdict(item))
                    except ResultError as e:
                        messages = messages or [str(e)]
                failures += [(ids.index(cast(int, item.request_id)), message) for message in messages]
            elif shown is not None:
                shown.add(item)
    return sorted(failures, key=lambda failure: failure[0])


def _read_prompts(arguments: list[str], files: tuple[Path, ...], lines: bool) -> list[str]:
    """Return the prompts: arguments, then files; stdin when there is neither."""
    texts = [read_text(path, "a prompt") for path in files]
    if lines and arguments and not files:
        raise NanoinferError("--lines needs --file or prompts on stdin: a prompt among the arguments is one prompt")
    if not arguments and not files:
        text = _read_stdin()
        texts.append(text if lines else re.sub(r"\r?\n\Z", "", text))  # without the newline at its end
    if lines:
        texts = [line for text in texts for line in split_lines(text)]
        if not texts and not arguments:
            raise NanoinferError("--lines: there is no line, so there is no prompt")
    return arguments + texts


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise NanoinferError("no prompt: give one as an argument, with --file, or on stdin")
    with reading_stdin(": give a prompt as an argument or with --file"):
        return sys.stdin.buffer.read().decode("utf-8")


def split_lines(text: str) -> list[str]:
    r""" "a\n\nb\r\n" -> ["a", "", "b"]: only \n and \r\n end a line; str.splitlines has ten more ends."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _parse_ids(text: str) -> list[int]:
    """ "15496 11" -> [15496, 11]; commas are accepted."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise NanoinferError(f"--token-ids: {text[:60]!r} is not a list of integers") from None


def _parse_bias(entries: tuple[str, ...]) -> dict[int, float] | None:
    """("50256=-100",) -> {50256: -100.0}; () -> None."""
    bias = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise NanoinferError(f"--logit-bias {entry!r} is not TOKEN_ID=BIAS") from None
    return bias or None


def _heading(prompts: list[str], n: int, echo: bool, i: int, k: int) -> str:
    """Return what precedes output k of prompt i: a line when there are several outputs, and the prompt for --echo."""
    parts = [f"prompt {i + 1} of {len(prompts)}"] if len(prompts) > 1 else []
    parts += [f"output {k + 1} of {n}"] if n > 1 else []
    line = f"--- {', '.join(parts)}: {prompts[i][:40]!r}\n" if parts else ""
    return line + (prompts[i] if echo else "")


class _InOrder:
    """Prints the outputs one after the other, in order.

    All are generated together. The current one is printed as it is generated, the others when it has ended.
    After an interrupt the text of the later ones is printed too.
    """

    def __init__(self, ids: list[int], n: int, before: Callable[[int, int], str]) -> None:
        self._order = [(request_id, k) for request_id in ids for k in range(n)]
        self._before = [before(i, k) for i in range(len(ids)) for k in range(n)]
        self._texts = dict.fromkeys(self._order, "")
        self._ended: set[tuple[int, int]] = set()
        self._turn = 0
        self._begun = False

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._ended.update(self._order)
            self._show()

    def add(self, delta: Delta) -> None:
        """Add what was generated, and print what is its turn."""
        key = (delta.request_id, delta.index)
        self._texts[key] += delta.text
        if delta.finish_reason is not None:
            self._ended.add(key)
        self._show()

    def _show(self) -> None:
        """Print what is new in the current output; continue with the next when it has ended."""
        while self._turn < len(self._order):
            key = self._order[self._turn]
            text, self._texts[key] = self._texts[key], ""
            if not self._begun:
                text, self._begun = self._before[self._turn] + text, True
            if text:
                print(text, end="", flush=True)
            if key not in self._ended:
                return
            print(flush=True)
            self._turn, self._begun = self._turn + 1, False


@command("explain")
@argument("prompts", metavar="PROMPT...", nargs=-1, required=True, help="One, or several that are generated together.")
@option("output", "HTML file to write.", "FILE")
@config_flag("model", default="shakespeare")
@config_flag("tokenizer")
@option("device_limits", "Also show the limit of each step: a device of `nanoinfer roofline`, or 'measure'.", "NAME")
@flags(SamplingParams, "params", skip=NO_FLAGS, defaults={**COMMAND_DEFAULTS, "max_tokens": 32})
@llm_config("engine", "speculation", "scheduler")
def explain(
    *, prompts: tuple[str, ...], output: Path, device_limits: str = "measure", config: LLMConfig, params: SamplingParams
) -> None:
    """Write a page that shows a generation step by step.

    Examples:
        nanoinfer explain "O Romeo," -o page.html
        nanoinfer explain "To be" "My lord," -o page.html -n 2 --draft prompt-lookup
        nanoinfer explain "To be" "My lord," -o page.html --max-num-seqs 1
    """
    require_writable(output.parent, output.name)

    from nanoinfer.entrypoints.llm import LLM
    from nanoinfer.explain.record import page, record
    from nanoinfer.roofline.ceilings import CPU_WORKLOAD, MEASURE, find_device, measure

    if config.engine.sampler == "auto":  # the logits of overlapped steps stay on the device
        config = replace(config, engine=replace(config.engine, sampler="reference"))
    llm = LLM.from_config(config)
    short = replace(CPU_WORKLOAD, num_bytes=1 << 28, matrix_size=768, num_rounds=5)  # takes about a second
    is_cpu = device_limits == MEASURE and llm.device == "cpu"
    ceiling = measure(short) if is_cpu else find_device(device_limits, llm.device)
    recording = record(llm, list(prompts), of_model(params, llm), ceiling, config.speculation.draft)
    write_atomically(output, page(recording).encode())
    print(f"{output}: {len(recording.steps)} steps")
