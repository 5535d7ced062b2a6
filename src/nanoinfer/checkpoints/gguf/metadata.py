"""The metadata of an architecture in a GGUF file: keys are checked as they are read, and all must be known.

Scaled rotary positions and windows are fields of config.json here. Sources: llama.cpp, conversion/base.py and
src/llama-context.cpp; Ollama, convert/convert_gptoss.go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoinfer.checkpoints.gguf.file import Value
from nanoinfer.errors import NanoinferError, escaped, show
from nanoinfer.models.families.fields import Fields
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.checks import plain, require_int

_ZERO = (
    "expert_count expert_used_count expert_shared_count expert_shared_feed_forward_length leading_dense_block_count"
    " nextn_predict_layers attention.clamp_kqv attention.max_alibi_bias attention.sliding_window"
    " attention.temperature_scale attn_logit_softcapping final_logit_softcapping"
).split()
_ZERO_OR_ONE = ("expert_group_count", "expert_group_used_count", "expert_weights_scale")
_NOT_USED: dict[str, tuple[float, ...]] = dict.fromkeys(_ZERO, (0,)) | dict.fromkeys(_ZERO_OR_ONE, (0, 1))
"""Key -> the values that have no effect, as if the key were missing."""
_SAYS_NOTHING = re.compile(
    r"attention\.layer_norm(_rms)?_epsilon|rope\.(dimension_sections|freq_base_swa|scaling\.\w+)"
    r"|n_deepstack_layers|classifier\.output_labels|(vision|audio|mm|ssm)\..*"
)
"""Keys without effect where the architecture does not read them: of other norms, of the positions of images, of
windows, a scaling or state spaces that the model lacks, of parts that do not run."""
_OF_EXPERTS = re.compile(r"expert_(?!used_count)\w+|interleave_moe_layer_step|moe_every_n_layers")
"""Keys without effect in a model without experts."""
_MAX_LENGTH = 4096  # of a value: no architecture has more layers
LONG = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""Tensors with the divisors of longrope."""
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Row:
    """A key of the metadata that is a field of config.json: the same row reads and writes it."""

    key: str
    """Without the prefix of the architecture."""
    field: str
    kind: Callable[[Any], int | float | bool] = float
    """int, float or bool."""
    default: Any = ...
    """Value of the field if the key is missing, or what computes it from the other fields; ...: it must be there."""
    low: int = 1
    """The least integer."""
    omit: Any = None
    """A value of the field that is not written."""


class Metadata(Fields):
    """The metadata of one architecture; the prefix of its keys is added here."""

    def __init__(self, raw: Mapping[str, Value], arch: str, tensors: Mapping[str, StoredTensor]) -> None:
        ours = {k: v for k, v in raw.items() if k.startswith(f"{arch}.")}
        for key, value in ours.items():
            if isinstance(value, (str, list, np.ndarray)) and len(value) > _MAX_LENGTH:
                raise NanoinferError(f"{show(key)} has more than {_MAX_LENGTH} values")
        read = {key: plain(value) for key, value in ours.items()}
        idle = {f"{arch}.{name}": values for name, values in _NOT_USED.items()}
        numbers = {key: value for key, value in read.items() if type(value) in (int, float)}
        super().__init__({key: v for key, v in read.items() if key not in numbers or v not in idle.get(key, ())})
        self.arch, self.tensors = arch, tensors

    def key(self, name: str) -> str:
        """Return a key of this architecture: "block_count" -> "llama.block_count"."""
        return f"{self.arch}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.raw

    def int_(self, name: str, default: int | None = None, zeros: bool = False) -> int:
        """Return a positive integer. In a file, it may be a list of equal ones, one a layer; with `zeros`, or of 0."""
        if default is None:
            self.required(self.key(name))
        value = self.get(self.key(name), default)
        if isinstance(value, list):
            some = [one for one in value if not (zeros and one == 0)]
            value = some[0] if some and all(one == some[0] for one in some) else value
        return require_int(self.key(name), value, 1, 2**31 - 1)

    def ints(self, name: str, count: int) -> list[int]:
        """Return `count` positive integers, one for each layer, or a number that stands for all of them."""
        value = self.required(self.key(name))
        if not isinstance(value, list):
            return [self.int_(name)] * count
        if len(value) != count:
            raise self.error(self.key(name), f"is not a list of {count} numbers, one for each layer")
        return [require_int(self.key(name), one, 1, 2**31 - 1) for one in value]

    def float_(self, name: str, default: float | None) -> float | None:
        """Return a positive number."""
        return default if self.get(self.key(name)) is None else self.number(self.key(name), 1.0)

    def row(self, row: Row, fields: Mapping[str, Any]) -> Any:
        """Return the field of a row; `fields` are those that its default may need."""
        name = self.key(row.key)
        if row.default is ...:
            self.required(name)
        elif self.get(name) is None:
            return row.default(fields) if callable(row.default) else row.default
        if row.kind is bool:
            return self.flag(name, False)
        return self.integer(name, 1, row.low) if row.kind is int else self.number(name, 1.0)

    def pattern(self, num_layers: int, default: int | None = None) -> list[bool]:
        """Return which layers have a window: a list of the file, or all but every n-th layer."""
        pattern = self.get(key := self.key("attention.sliding_window_pattern"), default)
        if type(pattern) is int and pattern > 0:
            pattern = [(i + 1) % pattern != 0 for i in range(num_layers)]
        if not (isinstance(pattern, list) and len(pattern) == num_layers and all(type(one) is bool for one in pattern)):
            raise self.error(key, f"is not a list of {num_layers} booleans, one for each layer, or a number")
        return pattern

    def has_bias(self, name: str) -> bool:
        """Return whether a matrix of the first layer has a bias: "attn_q", also as a part of "attn_qkv"."""
        whole = "attn_qkv" if name == "attn_q" else name
        return any(f"blk.0.{one}.bias" in self.tensors for one in (name, whole))

    def check_known(self) -> None:
        """Raise NanoinferError if the architecture has a key that was not read."""
        if unknown := sorted(key for key in self.raw.keys() - self.known if not self._says_nothing(key)):
            value = show(self.raw[unknown[0]])
            raise NanoinferError(
                f"{escaped(unknown[0])}={value} is not supported: the model needs something that is not implemented"
            )

    def _says_nothing(self, key: str) -> bool:
        name, value = key.removeprefix(f"{self.arch}."), self.raw[key]
        if name == "attention.sliding_window_pattern":
            return "attention.sliding_window" not in self or (isinstance(value, list) and not any(value))
        without_experts = "expert_count" not in self and _OF_EXPERTS.fullmatch(name)
        return bool(without_experts or _SAYS_NOTHING.fullmatch(name))


def scaling(m: Metadata) -> dict[str, Any] | None:
    """Return rope_scaling. llama.cpp stores Llama 3's as a divisor of each frequency, computed when converting."""
    kind = m.get(m.key("rope.scaling.type"), "yarn" if m.arch == "gptoss" else "none")  # Ollama's gptoss has none
    factor = m.float_("rope.scaling.factor", m.float_("rope.scale_linear", 1.0))
    m.get(m.key("rope.scaling.finetuned"))
    if m.arch in ("phi3", "minicpm") and any(name in m.tensors for name in LONG.values()):  # `architectures` reads them
        m.get(m.key("rope.scaling.original_context_length"))
        return None
    m.only(m.key("rope.scaling.attn_factor"), 1.0)
    if kind == "yarn":
        return _yarn(m, factor)
    if kind not in ("none", "linear"):
        raise m.error(m.key("rope.scaling.type"), "is not supported: only none, linear and yarn are")
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _yarn(m: Metadata, factor: float | None) -> dict[str, Any]:
    """Return rope_scaling of type yarn.

    The range of pairs that it blends is not rounded to whole numbers in gpt-oss: as in the model, other than in
    llama.cpp. In deepseek2, the multiplier is a tenth of DeepSeek's two `mscale`, which must be equal.
    """
    m.only(m.key("rope.scaling.yarn_ext_factor"), 1.0)
    share = m.float_("rope.scaling.yarn_log_multiplier", None) or 0.0
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": m.int_("rope.scaling.original_context_length"),
        "beta_fast": m.float_("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": m.float_("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": m.arch not in ("gpt-oss", "gptoss"),
    }
    if m.arch == "deepseek2":
        return fields | {"attention_factor": 1.0, "mscale_all_dim": round(share / 0.1, 6)}
    if (attention := m.float_("rope.scaling.yarn_attn_factor", None)) is not None:
        fields["attention_factor"] = attention
    return fields | {"mscale": 1.0, "mscale_all_dim": share}


def windows(m: Metadata, num_layers: int, step: int | None = None) -> dict[str, Any]:
    """Return the fields of the layers' windows; an empty dict if no layer has one.

    Args:
        m: the metadata.
        num_layers: number of layers.
        step: every how many layers one has no window if the file has no pattern; None: it must have one.
    """
    if "attention.sliding_window" not in m:
        return {}
    types = [LAYER_TYPES[local] for local in m.pattern(num_layers, step)]
    return {"sliding_window": m.int_("attention.sliding_window"), "use_sliding_window": True, "layer_types": types}
