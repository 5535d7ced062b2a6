"""Parameters of one request with vLLM's names: SamplingParams, StructuredOutputsParams and BeamSearchParams;
PoolingParams of embeddings and scores, beside PoolingConfig of a model; LoRARequest, its adapter (docs/lora.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from nanoinfer.errors import NanoinferError, one_line, show
from nanoinfer.utils.checks import bounded, chosen, keep_fields, keep_int, require_choice, require_float, require_int

COMMAND_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 50}
"""Defaults of the commands and the page. Those of the fields are vLLM's, with which small models write noise."""
CHAT_MAX_TOKENS = 1024
"""Default of max_tokens for chats of the command line and the page."""
MAX_LOGPROBS = 1000
MAX_NUM_SAMPLES = 128
MAX_BEAM_WIDTH = 64
MAX_GRAMMAR_CHARS = 1 << 17
MAX_CHOICES = 10_000
OVERFLOWS = ("stop", "slide")
WHOLE_VOCABULARY = -1
"""Value of logprobs and prompt_logprobs: return the log-probability of every token."""


class RequestOutputKind(str, Enum):
    """Which outputs of a request `AsyncLLM` returns."""

    CUMULATIVE = "cumulative"
    """Each output has all tokens so far."""
    DELTA = "delta"
    """Each output has the tokens since the one before."""
    FINAL_ONLY = "final_only"
    """There is one output, at the end."""


class BadWords:
    """Token sequences that an output must not contain: the last token of one is excluded where the others precede it.

    Args:
        sequences: of one or more token ids each.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        # By the number of the tokens before the last one, and by these tokens: one look-up for each number.
        self._last: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in sequences:
            self._last.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)

    def excluded(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that would complete one of the sequences after the tokens of an output."""
        size = len(output)  # the last tokens of a shorter output are too few to be a key
        return [token for count, last in self._last.items() for token in last.get(tuple(output[size - count :]), ())]


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output must match: exactly one of json, regex, choice, grammar and json_object.

    Raises:
        NanoinferError: none or several of them are given, or a value has the wrong type or is too long.
    """

    json: Mapping[str, Any] | str | None = None
    """A JSON schema: an object, or its text. It is kept as text."""
    regex: str | None = None
    """A regular expression, of Rust's syntax, that the whole output must match."""
    choice: tuple[str, ...] | None = None
    """Strings, one of which the output must be."""
    grammar: str | None = None
    """A context-free grammar: Lark (llguidance's variant) or GBNF (llama.cpp's)."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """Generate JSON without white space between its parts."""
    disable_additional_properties: bool = True
    """Generate only the properties that a schema lists. False: others too, where it does not forbid them."""

    def __post_init__(self) -> None:
        keep_fields(self, "structured_outputs.")
        kinds = self._given
        if len(kinds) != 1:
            what = " and ".join(kinds) or "nothing"
            raise NanoinferError(f"structured_outputs has {what}: give exactly one of {', '.join(KINDS)}")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _as_text(self.json))
        for name in ("json", "regex", "grammar"):
            _check_text(f"structured_outputs.{name}", getattr(self, name))
        if self.choice is not None:
            self._check_choices()

    def _check_choices(self) -> None:
        choices: Any = self.choice
        if isinstance(choices, str) or not isinstance(choices, (list, tuple)) or not 1 <= len(choices) <= MAX_CHOICES:
            raise NanoinferError(
                f"structured_outputs.choice={show(choices)} is not a list of 1 to {MAX_CHOICES} strings"
            )
        for text in choices:
            if not isinstance(text, str) or not text:
                raise NanoinferError(f"structured_outputs.choice: {show(text)} is not a non-empty string")
        _check_text("structured_outputs.choice", "".join(choices))
        object.__setattr__(self, "choice", tuple(choices))

    @property
    def _given(self) -> list[str]:
        return [name for name in KINDS if (value := getattr(self, name)) is not None and value is not False]

    @property
    def kind(self) -> str:
        """The field that is given: one of KINDS."""
        return self._given[0]


KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _as_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as text, in the order of its keys."""
    try:
        return json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise NanoinferError(f"structured_outputs.json={show(schema)} is not JSON: {one_line(e)}") from None


def _check_text(name: str, text: Any) -> None:
    """Check the text of a schema or grammar, unless it is None."""
    if text is None:
        return
    if not isinstance(text, str) or not text.strip():
        kinds = "an object or a string" if name.endswith("json") else "a string"
        raise NanoinferError(f"{name}={show(text)} is not {kinds} with content")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise NanoinferError(f"{name} has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS}: shorten it")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise NanoinferError(f"{name} contains a lone surrogate, which UTF-8 cannot encode: remove it")


_LISTS = ("stop_token_ids", "bad_words", "allowed_token_ids")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that control how the tokens of one request are sampled, and when its outputs end.

    They are applied to the logits in this order: repetition, presence and frequency penalties; logit_bias;
    allowed_token_ids; min_tokens and bad_words; then, unless temperature is 0, temperature, top_k, top_p and min_p.

    Raises:
        NanoinferError: a field is out of range, or two fields contradict each other.
    """

    max_tokens: int | None = bounded(128, 1)
    """Maximum number of tokens to generate per output (None in Python: up to the context length)."""
    temperature: float = bounded(1.0, 0.0, 1e6)
    """0 is greedy decoding; higher values are more random."""
    top_k: int = bounded(0, -1)
    """Sample from the k most likely tokens; 0 or -1: from all."""
    top_p: float = bounded(1.0, 0.0, 1.0, low_open=True)
    """Sample from the most likely tokens whose probabilities add up to this."""
    min_p: float = bounded(0.0, 0.0, 1.0)
    """Minimum probability, relative to that of the most likely token."""
    presence_penalty: float = bounded(0.0, -1e3, 1e3)
    """Subtract this from the logit of each token that has been generated."""
    frequency_penalty: float = bounded(0.0, -1e3, 1e3)
    """Subtract this from a token's logit for each time it has been generated."""
    repetition_penalty: float = bounded(1.0, 1e-3, 1e3)  # in this range no logit overflows
    """Divide positive logits of tokens in prompt and output by this, multiply negative ones; 1 is off."""
    seed: int | None = bounded(None, 0, 2**64 - 1)
    """Seed of the request (default: random; the output reports it)."""
    n: int = bounded(1, 1, MAX_NUM_SAMPLES)
    """Outputs to return for each prompt, at most 128."""
    best_of: int | None = bounded(None, 1, MAX_NUM_SAMPLES)
    """Outputs to generate, of which the n most likely per token are returned, at most 128 (default: n)."""
    stop: tuple[str, ...] = ()
    """Strings that end the output, which does not contain them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, whose text does not contain them."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token in the text."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    min_tokens: int = bounded(0, 0)
    """Minimum number of tokens before an end token or stop string ends the output."""
    logprobs: int | None = bounded(None, WHOLE_VOCABULARY, MAX_LOGPROBS)
    """Return the log-probability of each token and of this many of the most likely tokens; -1: of all tokens."""
    prompt_logprobs: int | None = bounded(None, WHOLE_VOCABULARY, MAX_LOGPROBS)
    """As logprobs, for each token of the prompt."""
    logit_bias: Mapping[int, float] | None = None
    """Values to add to the logits of these token ids."""
    bad_words: tuple[str, ...] = ()
    """Words that are not generated, at the beginning of the output or after a space."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Token ids that may be sampled (default: all)."""
    skip_special_tokens: bool = True
    """Leave special tokens, such as `<|im_end|>`, out of the text."""
    spaces_between_special_tokens: bool = True
    """No effect, as in vLLM with fast tokenizers."""
    detokenize: bool = True
    """Turn the tokens into text; false: the text is empty."""
    truncate_prompt_tokens: int | None = bounded(None, -1)
    """Keep the last tokens of the prompt, this many at most; -1: the context length (default: all)."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Which outputs AsyncLLM returns: cumulative, delta or final_only."""
    overflow: str = chosen("stop", OVERFLOWS)
    """At the context length: stop (finish_reason length) or slide (drop the oldest tokens)."""
    slide_stride: int | None = bounded(None, 1)
    """Tokens dropped at a time when sliding; 1 is nanoGPT's behavior (default: half the context length)."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must match: a JSON schema, a regular expression, ... (docs/structured-outputs.md)."""

    def __post_init__(self) -> None:
        self._keep_lists()
        keep_fields(self)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        if self.best_of is not None and self.best_of < self.n:
            raise NanoinferError(f"best_of={self.best_of} is less than n={self.n}: raise best_of, or lower n")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise NanoinferError(
                f"min_tokens={show(self.min_tokens)} is more than max_tokens={show(self.max_tokens)}: raise max_tokens"
            )
        if self.max_tokens is None and self.overflow == "slide":
            raise NanoinferError("max_tokens=None does not end with overflow='slide': set max_tokens")
        if self.slide_stride is not None and self.overflow != "slide":
            raise NanoinferError(f"slide_stride={show(self.slide_stride)} needs overflow='slide'")
        if self.truncate_prompt_tokens == 0:
            raise NanoinferError("truncate_prompt_tokens=0 leaves no prompt: give 1 or more, or -1")
        if self.stop and not self.detokenize:
            raise NanoinferError(f"stop={show(list(self.stop))} needs detokenize=True: a stop string ends a text")
        self._keep_objects()

    def _keep_lists(self) -> None:
        """Store lists as tuples. As in vLLM, stop="x" is stop=["x"], and None is an empty list."""
        for f in fields(self):
            if not str(f.type).startswith("tuple["):
                continue
            name, value = f.name, getattr(self, f.name)
            try:
                items = () if value is None else (value,) if isinstance(value, str) else tuple(value)
            except TypeError:
                raise NanoinferError(f"{name}={show(value)} is not a list") from None
            if isinstance(value, str) and name != "stop":
                raise NanoinferError(f"{name}={show(value)} is not a list")
            if name == "allowed_token_ids" and not items and not isinstance(value, (tuple, type(None))):
                raise NanoinferError("allowed_token_ids is empty: it excludes every token; leave it out, or list ids")
            if "str" not in str(f.type):
                items = tuple(require_int(name, token_id, 0) for token_id in items)
            elif empty := [text for text in items if not isinstance(text, str) or not text]:
                raise NanoinferError(f"{name}={show(empty[0])} is not a non-empty string")
            object.__setattr__(self, name, items)
        object.__setattr__(self, "allowed_token_ids", self.allowed_token_ids or None)  # () is the flag without a value

    def _keep_objects(self) -> None:
        """Store what names and mappings stand for."""
        require_choice("output_kind", self.output_kind, tuple(kind.value for kind in RequestOutputKind))
        object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise NanoinferError(f"logit_bias={show(self.logit_bias)} is not a dict of token id to bias")
            biases = {
                require_int("logit_bias token id", i, 0): require_float(f"logit_bias[{show(i)}]", bias, -1e6, 1e6)
                for i, bias in self.logit_bias.items()
            }
            object.__setattr__(self, "logit_bias", biases)
        structured: Any = self.structured_outputs
        if isinstance(structured, Mapping):
            names = [f.name for f in fields(StructuredOutputsParams)]
            for key in structured.keys() - {*names}:
                raise NanoinferError(f"structured_outputs has the unknown field {show(key)}: use {', '.join(names)}")
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**structured))
        elif structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise NanoinferError(f"structured_outputs={show(structured)} is not a StructuredOutputsParams")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: temperature is 0."""
        return self.temperature == 0

    @property
    def num_sequences(self) -> int:
        """Number of sequences to sample for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """As logprobs; 0 if best_of alone needs the log-probabilities of the sampled tokens."""
        return 0 if self.logprobs is None and self.num_sequences > self.n else self.logprobs


RANGES: dict[str, tuple[Any, Any]] = {
    f.name: f.metadata["bounds"] for f in fields(SamplingParams) if "bounds" in f.metadata
}
"""Smallest and largest value (None: any) of each field of SamplingParams that is a number; integers where these are."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search: the names of vLLM, and early_stopping and length_penalty of transformers.

    The rule is that of transformers (docs/beam-search.md).

    Raises:
        NanoinferError: a field is out of range.
    """

    beam_width: int
    """Beams of each prompt, and outputs that are returned: 1 to 64. 1 is greedy decoding."""
    max_tokens: int | None = bounded(128, 1)
    """Maximum number of tokens to generate per output (None: up to the context length)."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    temperature: float = bounded(0.0, 0.0, 1e6)
    """Divide the logits by this before the log-probabilities are computed; 0 and 1: use them as they are."""
    length_penalty: float = bounded(1.0, -10.0, 10.0)  # no power of a length overflows
    """An output's score is its log-probability / (number of tokens ** length_penalty); -10 to 10."""
    include_stop_str_in_output: bool = False
    """Include the end token in the text. It is in the token ids in any case."""
    early_stopping: bool | str = False
    """When to end with beam_width finished outputs: True: at once. False: when no beam would have a better score if it
    ended now. "never": when no beam can reach a better score."""

    def __post_init__(self) -> None:
        keep_int(self, "beam_width", 1, MAX_BEAM_WIDTH)
        keep_fields(self)
        if not isinstance(early := self.early_stopping, bool) and not (isinstance(early, str) and early == "never"):
            raise NanoinferError(f"early_stopping={show(self.early_stopping)} is unknown: use False, True or 'never'")

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters of its requests: a sequence for each beam, with the same limits."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0.0,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=False,  # as in vLLM
        )


POOLING_TYPES = ("last", "mean")
"""The tokens whose hidden states make an embedding: the last one, or all (their mean)."""


@dataclass(frozen=True)
class PoolingParams:
    """What a request for an embedding or a score asks for.

    Raises:
        NanoinferError: a value is out of range.
    """

    dimensions: int | None = bounded(None, 1)
    """Number of values of an embedding, the first ones; None: all."""
    use_activation: bool | None = None
    """Whether an embedding is divided by its Euclidean norm; None: as the model's files say, else true."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens, of which the last are kept; -1: the context length; None: longer inputs are refused."""

    def __post_init__(self) -> None:
        keep_fields(self)
        if self.truncate_prompt_tokens != -1:
            keep_int(self, "truncate_prompt_tokens", 1, optional=True)


@dataclass(frozen=True)
class PoolingConfig:
    """How a model makes embeddings."""

    pooling_type: str = chosen("auto", ("auto", *POOLING_TYPES))
    """Tokens that make an embedding: last or mean; auto: as the model's files say, else last."""

    def __post_init__(self) -> None:
        keep_fields(self)


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter that a request is generated with.

    Raises:
        NanoinferError: a value is of a wrong type or out of range.
    """

    lora_name: str
    """Name of the adapter, for messages."""
    lora_int_id: int
    """Identifies the adapter: requests of the same number share it. At least 1."""
    lora_path: str
    """A folder of peft, or a GGUF file of an adapter. It is read when a request names it first."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise NanoinferError(f"{name}={show(value)} is not a string of one or more characters")
        keep_int(self, "lora_int_id", 1, 2**31 - 1)


def named_adapters(modules: Sequence[str]) -> dict[str, LoRARequest]:
    """Return adapters by their names: ["a=path"] -> {"a": LoRARequest("a", 1, "path")}.

    Raises:
        NanoinferError: a string is not of the form NAME=PATH, or a name is given twice.
    """
    adapters: dict[str, LoRARequest] = {}
    for i, module in enumerate(modules):
        name, separator, path = module.partition("=")
        if not separator or not name or not path or name in adapters:
            raise NanoinferError(f"lora_modules={show(module)} is not NAME=PATH with a name of its own")
        adapters[name] = LoRARequest(name, i + 1, path)
    return adapters
