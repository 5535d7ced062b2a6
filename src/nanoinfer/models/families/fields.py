"""The fields of a config.json: checked as they are read, and written back.

What several families share is here: rotary embeddings in the forms of transformers 4 and 5, scaled as in
modeling_rope_utils.py, and windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.errors import NanoinferError, show
from nanoinfer.utils.checks import require_float, require_int

# Fields of any config.json that do not change the logits of a plain forward pass: of all models of transformers, those
# for generation in old files, those of images, and those that published files have and no code reads.
HARMLESS = frozenset(
    "architectures torch_dtype dtype transformers_version _name_or_path name_or_path initializer_range use_cache"
    " return_dict output_hidden_states output_attentions gradient_checkpointing id2label label2id problem_type"
    " num_labels is_decoder pad_token_id tokenizer_class prefix finetuning_task torchscript use_bfloat16 tf_legacy_loss"
    " bos_token_id eos_token_id cross_attention_hidden_size task_specific_params chunk_size_feed_forward"
    " attention_dropout model_type _attn_implementation auto_map cache_implementation"
    " add_cross_attention bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample"
    " early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id"
    " forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams"
    " num_return_sequences output_scores pruned_heads remove_invalid_values repetition_penalty"
    " return_dict_in_generate sep_token_id suppress_tokens temperature tie_encoder_decoder top_k top_p typical_p"
    " image_token_id video_token_id vision_config vision_start_token_id vision_end_token_id vision_token_id"
    " _attn_implementation_autoset _flash_attn_2_enabled _num_labels is_llama_config max_sequence_length"
    " max_window_layers model_max_length neftune_noise_alpha perceiver_config pixel_shuffle_factor"
    " transformers.js_config unsloth_fixed unsloth_version use_mrope".split()
)
IDLE: dict[str, tuple[Any, ...]] = {
    "activation": ("swiglu",), "norm_type": ("layer_norm",), "mlp_type": ("default",), "full_attn_mod": (1,),
    "interpolate_factor": (1,), "pretraining_tp": (1,), "attention_bias": (), "lm_head_bias": (), "mlp_bias": (),
    "qkv_bias": (), "rope_interleaved": (), "shared_expert_intermediate_size": (), "qk_layer_norms": (),
    "use_resampler": (), "_sliding_window_pattern": (4,), "layer_switch": (4,), "use_embedding_sharing": (True,),
    "attention_softmax_in_fp32": (True,), "scale_attention_softmax_in_fp32": (True,), "scale_attn_weights": (True,),
}  # fmt: skip
"""Fields of published files that families do not read -> values with which they have no effect, as with null; of an
empty tuple, false and 0."""
ACTIVATIONS = {
    "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu", "silu": "silu", "swish": "silu",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip
# The sections of mrope have the same positions but in images.
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_RENAMED = {"mrope": "default", "su": "longrope"}
"""rope_type of older files -> its name in transformers."""
_HEADS = {"head_dim": "head_size", "num_key_value_heads": "num_kv_heads"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


class Fields:
    """The fields of a config.json. Reading one checks it; an error names the field, and the caller adds the file.

    Args:
        raw: the content of the file.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        idle = {name for name, values in IDLE.items() if raw.get(name) in (None, *(values or (False,)))}
        self.known: set[str] = {*HARMLESS, *idle}

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field without checking it; the default if it is missing."""
        self.known.add(name)
        return self.raw.get(name, default)

    def required(self, name: str) -> Any:
        """Return a field without checking it. Raise NanoinferError if it is missing or null."""
        if (value := self.get(name)) is None:
            raise NanoinferError(f"{name} is missing: add it")
        return value

    def error(self, name: str, reason: str) -> NanoinferError:
        """Return an error about a field."""
        return NanoinferError(f"{name}={show(self.raw.get(name))} {reason}")

    def integer(self, name: str, default: int, low: int = 1) -> int:
        """Return an integer of at least `low`; the default if the field is missing."""
        return require_int(name, self.get(name, default), low, 2**31 - 1)

    def window(self, name: str, default: int | None) -> int | None:
        """Return the width of a window, or None for null; the default if the field is missing."""
        value = self.get(name, default)
        return None if value is None else require_int(name, value, 1, 2**31 - 1)

    def number(self, name: str, default: float) -> float:
        """Return a positive number; the default if the field is missing."""
        return require_float(name, self.get(name, default), 1e-12, 1e12)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; the default if the field is missing."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "is neither true nor false")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Raise NanoinferError if a field is there and has none of these values."""
        if self.get(name, values[0]) not in values:
            raise self.error(name, f"is not supported: only {show(values[0])} is")

    def activation(self, name: str, default: str) -> str:
        """Return our name of an activation."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(name, f"is not supported: use one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def rotary(
        self,
        config: ModelConfig,
        theta: float = 10000.0,
        *,
        share: tuple[str, float] | None = None,
        kind: str | None = None,
        theta_field: str = "rope_theta",
        scaled: bool = True,
        original: int | None = None,
    ) -> Rotary:
        """Return the rotary embedding that `rope_parameters`, or `rope_theta` and `rope_scaling`, describe.

        Args:
            config: the model, without its layers.
            theta: default of the base.
            share: field with the share of a head that is rotated, and its default; None: only whole heads.
            kind: key of `rope_parameters` if it has one entry for each type of layer.
            theta_field: field of the base in configs without `rope_parameters`.
            scaled: whether `rope_scaling` applies to these layers.
            original: default of original_max_position_embeddings; None: that in the object, or the context length.
        """
        scaling, base = self.rope(kind, scaled), self.get(theta_field, theta)
        context = "original_max_position_embeddings"  # transformers reads the field outside the object first
        inside = scaling.get(context, config.block_size) if original is None else original
        values = read_scaling(_type(scaling), scaling, self.get(context, inside), config.block_size)
        if values.get("scaling") == "proportional":
            part = require_float("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0), 0.0, 1.0)
            values["num_turning"] = int(part * config.head_dim // 2)
            scaling = scaling | {"partial_rotary_factor": 1.0}
        dim = self._rotary_dim(config.head_dim, scaling, share)
        return Rotary(dim, **values | {"base": scaling.get("rope_theta", base)})

    def rope(self, kind: str | None = None, scaled: bool = True) -> dict[str, Any]:
        """Return the object with the rotary parameters of a type of layer; empty if there is none. As `rotary`."""
        rope, old = self.get("rope_parameters"), self.get("rope_scaling")
        rope = None if rope == {} else rope
        name = "rope_scaling" if rope is None else "rope_parameters"
        if rope is None:
            rope = old if scaled and old is not None else {}
        if isinstance(rope, dict) and kind is not None and kind in rope:
            rope = {} if rope[kind] is None else rope[kind]
        if not isinstance(rope, dict):
            raise self.error(name, "is not an object")
        allowed = _ROPE | SCALING_KEYS[_type(rope)] | (set(_LAYER_TYPES) if kind is not None else set())
        if unknown := sorted(rope.keys() - allowed):
            raise NanoinferError(f"the field {show(unknown[0])} in {name} is not supported")
        return rope

    def _rotary_dim(self, head_dim: int, rope: dict[str, Any], share: tuple[str, float] | None) -> int:
        name, default = ("partial_rotary_factor", 1.0) if share is None else share
        part = require_float(name, rope.get("partial_rotary_factor", self.get(name, default)), 1e-6, 1.0)
        if share is None and part != 1.0:
            raise NanoinferError(f"partial_rotary_factor={part} is not supported: only 1.0 is")
        if (dim := int(head_dim * part)) % 2 or dim < 2:
            raise NanoinferError(
                f"{name}={part} of head_dim={head_dim} is {dim} rotary dimensions: an even number >= 2 is needed"
            )
        return dim

    def windows(self, n_layer: int, window: int | None, sliding: Callable[[int], bool]) -> list[int | None]:
        """Return the window of each layer from `layer_types`, or from a rule for configs without it.

        Args:
            n_layer: number of layers.
            window: width of the windows; None: no layer has one.
            sliding: whether layer i has a window.
        """
        types = self.get("layer_types")
        if types is None:
            types = [_LAYER_TYPES[sliding(i)] for i in range(n_layer)]
        if not isinstance(types, list) or len(types) != n_layer:
            raise self.error("layer_types", f"is not a list of {n_layer} types, one for each layer")
        for kind in types:
            if kind not in _LAYER_TYPES:
                raise NanoinferError(f"layer_types has {show(kind)}: only {' and '.join(_LAYER_TYPES)} are supported")
        return [window if kind == "sliding_attention" else None for kind in types]

    def heads(self, config: ModelConfig, defaults: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the heads of each layer that are not the model's, as fields of `LayerKind`, from `per_layer_config`.

        Args:
            config: the model, without its layers.
            defaults: `per_layer_config` of configs without it.
        """
        by_layer, heads = self.get("per_layer_config", defaults), []
        if not isinstance(by_layer, dict) or by_layer.keys() - {str(i) for i in range(config.n_layer)}:
            raise self.error("per_layer_config", f"is not an object of {config.n_layer} layers")
        for own in (by_layer.get(str(i), {}) for i in range(config.n_layer)):
            if not isinstance(own, dict) or own.keys() - _HEADS.keys():
                raise self.error("per_layer_config", f"is not supported: only {' and '.join(_HEADS)} may differ")
            heads.append({_HEADS[k]: size for k, size in own.items() if size != getattr(config, _HEADS[k])})
        return heads


def head_fields(config: ModelConfig) -> dict[str, Any]:
    """Return `per_layer_config`, which `Fields.heads` reads."""
    own = {str(i): {t: getattr(k, o) for t, o in _HEADS.items() if getattr(k, o)} for i, k in enumerate(config.layers)}
    return {"per_layer_config": {i: heads for i, heads in own.items() if heads}}


def _type(rope: dict[str, Any]) -> str:
    """Return the rope_type of an object with rotary parameters. Raises NanoinferError if it is not supported."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = _RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in SCALING_KEYS:
        raise NanoinferError(f"rope_type={show(kind)} is not supported: use one of {', '.join(SCALING_KEYS)}")
    return kind


def rotated(f: Fields, config: ModelConfig, windows: list[int | None] | None = None, **options: Any) -> dict[str, Any]:
    """Return the layers of a model, all with the same rotary embedding.

    Args:
        f: the fields of config.json.
        config: the model, without its layers.
        windows: of each layer; None: no layer has one.
        options: of `Fields.rotary`.
    """
    rotary = f.rotary(config, **options)
    return {"layers": tuple(LayerKind(w, rotary) for w in windows or [None] * config.n_layer)}


def rope_fields(config: ModelConfig) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`, which all versions of transformers read: of the layers without window."""
    kinds = sorted((k for k in config.layers if k.rotary is not None), key=lambda k: k.window is not None)
    if not kinds or (rotary := kinds[0].rotary) is None:
        return {}
    return {"rope_theta": rotary.base, "rope_scaling": write_scaling(rotary)}


def partial_fields(config: ModelConfig) -> dict[str, Any]:
    """Return `rope_fields` and the share of a head that is rotated."""
    rotary = config.layer(0).rotary
    assert rotary is not None
    return rope_fields(config) | {"partial_rotary_factor": rotary.dim / config.head_dim}


def typed_rope_fields(config: ModelConfig) -> dict[str, Any]:
    """Return `rope_parameters` with an entry for each type of layer."""
    ropes = {_LAYER_TYPES[kind.window is not None]: kind.rotary for kind in config.layers}
    plain = {name: {"rope_type": "default", "rope_theta": rotary.base} for name, rotary in ropes.items() if rotary}
    scaled = {name: write_scaling(rotary) or {} for name, rotary in ropes.items() if rotary}
    return {"rope_parameters": {name: fields | scaled[name] for name, fields in plain.items()}}


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of models whose layers differ in their windows, and `rope_fields`."""
    windows = [config.layer(i).window for i in range(config.n_layer)]
    width = max((w for w in windows if w is not None), default=None)
    types = [_LAYER_TYPES[w is not None] for w in windows]
    return rope_fields(config) | {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "layer_types": types,
    }


_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
_YARN = {"low_freq_factor": ("beta_slow", 1.0), "high_freq_factor": ("beta_fast", 32.0)}
SCALING_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", _ORIGINAL},
    "proportional": {"factor"},
    "llama3": {"factor", _ORIGINAL, *_LLAMA3.values()},
    "yarn": {
        "factor", _ORIGINAL, "beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate",
        "llama_4_scaling_beta", "max_position_embeddings",
    },
    "longrope": {"factor", _ORIGINAL, "short_factor", "long_factor", "attention_factor"},
}  # fmt: skip
"""rope_type -> the fields of rope_parameters that it reads, beside those of all types."""


def read_scaling(kind: str, rope: dict[str, Any], original: Any, block_size: int) -> dict[str, Any]:
    """Return the fields of `Rotary` that describe a scaling.

    Args:
        kind: rope_type; one of SCALING_KEYS.
        given: the object with the parameters.
        original: the context length before the frequencies were scaled.
        block_size: the context length.

    Raises:
        NanoinferError: a parameter is missing or malformed.
    """
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"scaling": kind, "factor": rope.get("factor")}
    if kind == "proportional":
        return {"scaling": kind, "factor": rope.get("factor", 1.0)}
    values: dict[str, Any] = {"scaling": kind, "original_context": require_int(_ORIGINAL, original, 1, 2**24)}
    if kind == "llama3":
        return values | {"factor": rope.get("factor")} | {o: rope.get(theirs) for o, theirs in _LLAMA3.items()}
    factor = rope.get("factor")
    factor = block_size / original if factor is None else require_float("rope factor", factor, 1.0, 1e6)
    attention = rope.get("attention_factor")
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if not isinstance(rope.get(name), list):
                raise NanoinferError(f"{name}={show(rope.get(name))} is not a list of numbers")
            values[f"{name}s"] = tuple(rope[name])
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
        return values | {"attention_factor": attention}
    if attention is None:
        scales = [rope.get("mscale"), rope.get("mscale_all_dim")]
        above, below = (require_float("mscale", s, 0.0, 1e3) for s in scales) if all(scales) else (1.0, 0.0)
        attention = magnitude(factor, above) / magnitude(factor, below)
    values |= {"factor": factor, "attention_factor": attention, "truncate": rope.get("truncate", True)}
    values |= {ours: rope.get(theirs) or default for ours, (theirs, default) in _YARN.items()}
    return values | {"query_growth": rope.get("llama_4_scaling_beta") or 0.0}


def magnitude(factor: float, scale: float) -> float:
    """Return by what yarn multiplies queries and keys for a longer context (Peng et al. 2023, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0


def write_scaling(rotary: Rotary) -> dict[str, Any] | None:
    """Return the object that `read_scaling` reads; None if the frequencies are not scaled."""
    if rotary.scaling == "none":
        return None
    rope: dict[str, Any] = {"rope_type": rotary.scaling}
    if rotary.scaling != "longrope":
        rope["factor"] = rotary.factor
    if rotary.scaling == "proportional":
        share = 2 * rotary.num_turning / rotary.dim  # half a pair more where the quotient was rounded down
        exact = int(share * rotary.dim // 2) == rotary.num_turning
        return rope | {"partial_rotary_factor": share if exact else share + 1 / rotary.dim}
    if rotary.scaling not in ("linear", "dynamic"):
        rope[_ORIGINAL] = rotary.original_context
    if rotary.scaling == "llama3":
        rope |= {theirs: getattr(rotary, ours) for ours, theirs in _LLAMA3.items()}
    if rotary.scaling in ("yarn", "longrope"):
        rope["attention_factor"] = rotary.attention_factor
    if rotary.scaling == "yarn":
        rope |= {theirs: getattr(rotary, ours) for ours, (theirs, _) in _YARN.items()}
        rope["truncate"] = rotary.truncate
    if rotary.scaling == "longrope":
        rope |= {"short_factor": list(rotary.short_factors), "long_factor": list(rotary.long_factors)}
    return rope | ({"llama_4_scaling_beta": rotary.query_growth} if rotary.query_growth else {})
