"""How `nanoinfer generate` decodes: sampling, the best of several samples, or beam search; structured outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nanoinfer.errors import NanoinferError
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanoinfer.utils.files import read_text

if TYPE_CHECKING:
    from nanoinfer.entrypoints.llm import LLM

EARLY_STOPPING: dict[str, bool | str] = {"false": False, "true": True, "never": "never"}
SHARED = ("n", "max_tokens", "ignore_eos")
"""Flags of sampling that a beam search has, too."""


@dataclass(frozen=True)
class BeamFlags:
    """The flags of beam search; None: not given."""

    beam_width: int | None = None
    """Beams of a beam search, instead of sampling; the best -n outputs are printed."""
    length_penalty: float | None = None
    """Exponent of the length that divides an output's log-probability (default: 1.0)."""
    early_stopping: str | None = None
    """When a beam search ends: false, true or never (default: false)."""

    def search(self, params: SamplingParams, defaults: SamplingParams) -> BeamSearchParams | None:
        """Return the parameters of the beam search that the flags ask for, or None.

        Args:
            params: from the flags of sampling.
            defaults: the same flags, if none is given.

        Raises:
            NanoinferError: flags contradict each other, or a value is out of range.
        """
        if self.beam_width is None:
            if self != BeamFlags():
                name = "--length-penalty" if self.length_penalty is not None else "--early-stopping"
                raise NanoinferError(f"{name} needs --beam-width: beam search uses it, sampling does not")
            return None
        for name in (f.name for f in fields(params) if f.name not in SHARED):
            if getattr(params, name) != getattr(defaults, name):
                flag = "--" + name.replace("_", "-") if name != "structured_outputs" else "a structured output"
                raise NanoinferError(f"{flag} is not used with --beam-width: leave one of them out")
        if params.n > self.beam_width:
            raise NanoinferError(f"n={params.n} is more than beam_width={self.beam_width}: raise --beam-width")
        if (early := self.early_stopping or "false") not in EARLY_STOPPING:
            raise NanoinferError(f"--early-stopping {early!r} is unknown: use one of {', '.join(EARLY_STOPPING)}")
        return BeamSearchParams(
            self.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=EARLY_STOPPING[early],
        )


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
        given = [
            f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) not in (None, False, ())
        ]
        if len(given) > 1:
            raise NanoinferError(f"{' and '.join(given)} are both given: leave one of them out")
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = read_text(Path(schema), "a JSON schema")
        grammar = None if self.grammar is None else read_text(self.grammar, "a grammar")
        return StructuredOutputsParams(schema, self.regex, self.choice or None, grammar, self.json_object or None)


def start(
    llm: LLM, prompts: list[Any], params: SamplingParams, beams: BeamSearchParams | None
) -> tuple[list[int], Iterator[Delta | RequestOutput]]:
    """Return the requests' ids, and their deltas and outputs: n of each prompt, also of a beam search."""
    if params.num_sequences > params.n:
        outputs = llm.generate(prompts, params)
        return [cast(int, o.request_id) for o in outputs], _at_once(outputs)
    ids, stream = llm.stream_outputs(prompts, beams or params)
    return ids, stream if beams is None else _first(stream, params.n)


def _at_once(outputs: list[RequestOutput]) -> Iterator[Delta | RequestOutput]:
    """Yield finished outputs as a stream does."""
    for output in outputs:
        for o in output.outputs:
            yield Delta(cast(int, output.request_id), o.index, o.text, o.finish_reason, len(o.token_ids), o.error)
        yield output


def _first(stream: Iterator[Delta | RequestOutput], n: int) -> Iterator[Delta | RequestOutput]:
    """Yield what belongs to the first n outputs of each request."""
    for item in stream:
        if isinstance(item, RequestOutput):
            yield replace(item, outputs=item.outputs[:n])
        elif item.index < n:
            yield item
