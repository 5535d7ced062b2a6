"""config.json of the families: defaults of transformers, forms of rotary parameters, and bad fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.models import refuses
from nanoinfer.checkpoints import huggingface
from nanoinfer.config import LayerKind, ModelConfig, Rotary
from nanoinfer.errors import NanoinferError
from nanoinfer.models.families import FAMILIES

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
OWN_NAMES = ("gpt2", "gptj", "opt", "gpt_neo")  # of the fields in SHAPE
OWN: dict[str, dict[str, Any]] = {"gemma4_text": {"vocab_size_per_layer_input": 61}, "exaone": {"num_layers": 4}} | {
    "granitemoehybrid": {"mamba_n_heads": 4},
    "nemotron_h": {"hybrid_override_pattern": "M-*-"},
}
"""Fields that must fit SHAPE's."""
NO_CLASS = ("exaone", "minicpm")  # in transformers
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}


def read(folder: Path, model_type: str, **fields: Any) -> ModelConfig:
    shape = {} if model_type in OWN_NAMES else SHAPE | OWN.get(model_type, {})
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **shape, **fields}))
    return huggingface.read_config(folder / "config.json")


def rotary(config: ModelConfig) -> Rotary:
    (found,) = {kind.rotary for kind in config.layers}
    assert found is not None
    return found


@pytest.mark.parametrize("model_type", [t for t in (*FAMILIES, *huggingface.ALIASES) if t not in NO_CLASS])
def test_a_missing_field_has_the_default_of_transformers(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    if model_type in (*OWN_NAMES, "gpt_neox"):
        shape = shape if model_type == "gpt_neox" else {}
    else:
        shape |= {"hidden_size": 1280, "num_attention_heads": 160}  # a multiple of every default of num_key_value_heads
    shape |= OWN.get(model_type, {})
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    full = transformers.AutoConfig.for_model(model_type, **shape, **special).to_dict()
    (tmp_path / "full.json").write_text(json.dumps(full))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **shape, **special}))
    found, expected = (huggingface.read_config(tmp_path / name) for name in ("config.json", "full.json"))
    assert replace(found, head_size=found.head_dim, num_kv_heads=found.n_kv_head) == replace(
        expected, head_size=expected.head_dim, num_kv_heads=expected.n_kv_head
    )
    assert "unknown fields" not in caplog.text  # to us, of those that transformers writes


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_written_config_reads_as_the_same(model_type: str, tmp_path: Path) -> None:
    config = read(tmp_path, model_type, bos_token_id=1, eos_token_id=[2, 3])
    (tmp_path / "config.json").write_text(json.dumps(huggingface.config_to_dict(config, "float32")))
    assert huggingface.read_config(tmp_path / "config.json") == config
    assert config.family == model_type


TEXT_CONFIGS: list[tuple[str, object, object, tuple[int, ...]]] = [
    ("gemma3", 1, [1, 6], (1, 6)),
    ("gemma3", None, 6, (6,)),
    ("gemma3", [4, 5], None, (4, 5)),
    ("mistral3", ..., ..., (2,)),  # the default of transformers' class
    ("mistral3", ..., 3, (3,)),
    ("qwen3_vl", ..., 5, (5,)),
]


@pytest.mark.parametrize("kind,text,whole,expected", TEXT_CONFIGS)
def test_the_end_tokens_of_a_text_config_and_of_the_whole_are_kept(
    kind: str, text: object, whole: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": kind, "text_config": SHAPE | ({} if text is ... else {"eos_token_id": text})}
            | ({} if whole is ... else {"eos_token_id": whole})
        )
    )
    assert huggingface.read_config(tmp_path / "config.json").eos_token_ids == expected


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_rotary_parameters_have_the_forms_of_transformers_4_and_5(model_type: str, tmp_path: Path) -> None:
    new = LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32}
    given = {"full_attention": new, "sliding_attention": {"rope_theta": 10000.0}} if "gemma" in model_type else new
    wanted = read(tmp_path, model_type, rope_parameters=given)
    scaling = LLAMA3 | {"original_max_position_embeddings": 32}
    old = read(tmp_path, model_type, rope_theta=5e5, rope_scaling=scaling)
    assert old == wanted
    last = wanted.layers[-1].rotary if model_type != "gemma3_text" else None  # the 4 layers of gemma3 are local
    assert last is None or (last.base, last.scaling, last.factor, last.original_context) == (5e5, "llama3", 8.0, 32)
    assert read(tmp_path, model_type, rope_theta=5e5, rope_scaling=LLAMA3, original_max_position_embeddings=32) == old
    named = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    assert read(tmp_path, model_type, rope_theta=5e5, rope_scaling=named) == old
    assert read(tmp_path, model_type, rope_parameters=None, rope_scaling=None) == read(tmp_path, model_type)


def test_the_layers_of_gemma3_have_their_own_rotary_parameters(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    local, everywhere = Rotary(256, 1e4), Rotary(256, 1e6, "linear", 4.0)
    for fields in (
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear},
        {"rope_parameters": {"full_attention": linear | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"full_attention": linear, "sliding_attention": None}},
    ):
        config = read(tmp_path, "gemma3_text", sliding_window=8, sliding_window_pattern=2, **fields)
        assert config.layers == (LayerKind(8, local), LayerKind(None, everywhere)) * 2


def test_a_gemma3_without_windows_is_written_without_one(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma3_text", layer_types=["full_attention"] * 4)
    written = huggingface.config_to_dict(config, "float32")
    assert "sliding_window" not in written
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert (
        huggingface.read_config(tmp_path / "config.json").layers
        == config.layers
        == (LayerKind(None, Rotary(256, 1e6)),) * 4
    )


def test_older_names_of_rotary_embeddings(tmp_path: Path) -> None:
    assert read(tmp_path, "phi3", rope_scaling=LONG | {"type": "su", "rope_type": "su"}) == read(
        tmp_path, "phi3", rope_scaling=LONG
    )
    mrope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    assert rotary(read(tmp_path, "qwen2_vl", rope_scaling=mrope, rope_theta=5e5)) == Rotary(8, 5e5)


def test_a_text_config_leaves_out_the_sizes_of_its_class(tmp_path: Path) -> None:
    """As in the published config of LLaVA 1.5."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = read(
        tmp_path, "llava", text_config=text, vision_config={}, image_token_index=32000, **dict.fromkeys(SHAPE)
    )
    assert (config.n_layer, config.n_head, config.n_embd, config.mlp_dim) == (32, 32, 4096, 11008)
    assert (config.block_size, config.vocab_size, config.family) == (4096, 32064, "llama")


def test_the_context_before_scaling_is_the_context_length_if_it_is_missing(tmp_path: Path) -> None:
    assert rotary(read(tmp_path, "llama", rope_scaling=LLAMA3)).original_context == 96


def test_the_share_of_a_head_that_is_rotated(tmp_path: Path) -> None:
    assert rotary(read(tmp_path, "gpt_neox", rotary_pct=0.5)).dim == 4
    assert rotary(read(tmp_path, "gpt_neox", rope_parameters={"partial_rotary_factor": 1.0})).dim == 8
    assert rotary(read(tmp_path, "gpt_neox")).dim == 2
    assert rotary(read(tmp_path, "llama", partial_rotary_factor=1.0)).dim == 8


def test_null_is_the_default_where_transformers_allows_it(tmp_path: Path) -> None:
    config = read(tmp_path, "llama", num_key_value_heads=None, head_dim=None, rope_scaling=None)
    assert (config.n_kv_head, config.head_dim) == (6, 8)
    assert read(tmp_path, "mistral", sliding_window=None).windows == {None}
    assert read(tmp_path, "nanochat", final_logit_softcapping=None).logits_softcap is None


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 0}, "num_local_experts=0 is not an integer in [1, 2147483647]"),
    ("mixtral", {"num_local_experts": 5000}, "experts=5000 is not an integer in [1, 4096]"),
    ("mixtral", {"num_experts": 4, "num_local_experts": 8}, "num_experts=4 differs from num_local_experts: remove one"),
    ("mixtral", {"intermediate_size": None}, "intermediate_size is missing: add it"),
    ("mixtral", {"intermediate_size": 2.5}, "width of an expert=2.5 is not an integer"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported: only 7.0 is"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu' is"),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "truncate": None}}, "truncate=None is not a bool"),
    ("olmoe", {"norm_topk_prob": None}, "norm_topk_prob=None is neither true nor false"),
    ("qwen3_moe", {"mlp_only_layers": 2}, "mlp_only_layers=2 is not a list of layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not an integer in [1, 2147483647]"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 is not an integer in [1"),
    ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0 is not an integer in [1, 2147483647]"),
    ("deepseek_v2", {"qk_rope_head_dim": 7}, "partial_rotary_factor=1.0 of head_dim=7 is 7 rotary dimensions"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported: only 'greedy' is"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "groups of experts=None is not an integer in [1, 64]"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported: only False is"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported: only True is"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported: only 'sigmoid' is"),
    ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "groups of experts per token=5 is not an integer in [1, 4]"),
    ("deepseek_v3", {"n_group": 256, "topk_group": 8}, "experts that score a group=2 is not an integer in [1, 1]"),
    ("deepseek_v3", {"n_group": 64, "topk_group": 1}, "experts per token=8 is not an integer in [1, 4]"),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": "x"}}, "mscale_all_dim='x' is not a finite number"),
    ("llama", {"hidden_size": 50}, "hidden_size=50 is not a multiple of num_attention_heads=6"),
    ("llama", {"num_key_value_heads": 4}, "num_attention_heads=6 is not a multiple of num_key_value_heads=4"),
    ("llama", {"hidden_size": None}, "hidden_size is missing: add it"),
    ("llama", {"hidden_size": 48.0}, "hidden_size=48.0 is not an integer in [1, 2147483647]"),
    ("llama", {"intermediate_size": 2**31}, "intermediate_size=2147483648 is not an integer in [1, 2147483647]"),
    ("llama", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers=2147483647 is not an integer in [1, 10000]"),
    ("llama", {"head_dim": 0}, "head_dim=0 is not an integer in [1, 65536]"),
    ("llama", {"head_dim": 7}, "partial_rotary_factor=1.0 of head_dim=7 is 7 rotary dimensions"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a finite number in [0, 1]"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not a bool"),
    ("llama", {"attention_bias": None}, "attention_bias=None is neither true nor false"),
    ("llama", {"hidden_act": "tanh"}, "hidden_act='tanh' is not supported: use one of gelu_new"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp=2 is not supported: only 1 is"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported: only 1.0 is"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta=inf is not a finite number"),
    ("llama", {"rope_theta": 10**400}, "rope_theta=1000"),
    ("llama", {"rope_scaling": []}, "rope_scaling=[] is not an object"),
    ("llama", {"rope_scaling": {"rope_type": "ntk"}}, "rope_type='ntk' is not supported: use one of default,"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "rope factor=0.5 is not a finite number"),
    ("llama", {"rope_scaling": YARN | {"truncate": 1}}, "truncate=1 is not a bool"),
    ("llama", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "low_freq_factor=1.0 is not less than high_freq_factor=0.5"),
    ("llama", {"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": "x"}}, "mscale='x' is not a finite number"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor=None is not a list of numbers"),
    ("phi3", {"rope_scaling": LONG | {"long_factor": [1]}}, "long_factors has 1 numbers for 4 pairs of dimensions"),
    ("phi3", {"rope_scaling": LONG | {"short_factor": [1, 1, 1, "x"]}}, "short_factors='x' is not a finite number"),
    ("granite", {"logits_scaling": 0}, "logits_scaling=0 is not a finite number"),
    ("granitemoehybrid", {"layer_types": ["attention", "ssm"] * 2}, "layer_types=['attention', 'ssm', 'attention'"),
    ("granitemoehybrid", {"mamba_d_head": 9}, "mamba_n_heads=4 of mamba_d_head=9 values are not the"),
    ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit=[0.0, 0.1]"),
    ("nemotron_h", {"hybrid_override_pattern": "M--M"}, "hybrid_override_pattern='M--M' is not supported: it must be"),
    ("nemotron_h", {"layer_types": ["full_attention", "rnn"] * 2}, "layer_types=['full_attention', 'rnn', 'full_att"),
    ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "num_hidden_layers=4 is not supported: only 3 is"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers=[1.0, 1.0, 1.0, 1.0] is not a list of 5 numbers"),
    ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate=None is not supported with mamba_rms_norm"),
    ("falcon_h1", {"mamba_d_ssm": 1000}, "mamba_n_heads=128 of mamba_d_head=7 values are not the 1000 of a layer"),
    ("granitemoehybrid", {"position_embedding_type": "x"}, "position_embedding_type='x' is not supported: only None"),
    ("gpt_neo", {"attention_types": [["global"], 24]}, "attention_types=[['global'], 24] is not [[kinds, repeats]]"),
    (
        "gpt_neo",
        {"attention_types": [[["global"], 2**60]]},
        "attention_types=[[['global'], 1152921504606846976]] is not",
    ),
    (
        "gpt_neo",
        {"attention_types": [[["global", "nearby"], 12]]},
        "attention_types=[[['global', 'nearby'], 12]] is not [[",
    ),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported: only None is"),
    ("stablelm", {"qk_layernorm": 1}, "qk_layernorm=1 is neither true nor false"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True is not supported: only False is"),
    ("exaone4", {"sliding_window_pattern": "LLG_"}, "sliding_window_pattern='LLG_' is neither a positive integer nor"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope factor=None is not a finite number"),
    ("llama", {"rope_scaling": LLAMA3 | {"beta_fast": 1}}, "the field 'beta_fast' in rope_scaling is not supported"),
    ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0 is not less than"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "the field 'full_attention' in rope_parameters"),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings=0 is"),
    ("llama", {"quantization_config": {}}, "quantization_config={} is not supported: only None is"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported: only False is"),
    ("gpt_neox", {"rotary_pct": 0.4}, "rotary_pct=0.4 of head_dim=8 is 3 rotary dimensions"),
    ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct=1.5 is not a finite number in [1e-06, 1]"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0 is not an integer"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=['full_attention'] is not a list of 4 types"),
    ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention': only full_attention and"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window=None is not an integer"),
    ("gemma3_text", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0 is not a finite number"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] is not a list of 0 and 1 for 4 layers"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported: only True is"),
    ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512 is not supported: only 768 is"),
    ("bitnet", {"head_dim": 9}, "head_dim=9 is not supported: only 8 is"),
    ("mamba", {}, "model_type='mamba' is not supported: it must be one of the"),
    ("gemma3", {}, "text_config=None is not an object"),
    (
        "mistral3",
        {"text_config": {"model_type": "mamba"}},
        "model_type='mamba' is not supported: it must be one of the",
    ),
    ("gemma4_text", {"enable_moe_block": True}, "num_experts is missing: add it"),
    ("gemma4_text", GEMMA4_MOE | {"top_k_experts": None}, "top_k_experts is missing: add it"),
    ("gemma4_text", GEMMA4_MOE | {"moe_intermediate_size": 0}, "width of an expert=0 is not an integer"),
    ("gemma4_text", GEMMA4_MOE | {"top_k_experts": 6}, "experts per token=6 is not an integer in [1, 5]"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
    ("gemma4_text", {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input=7 is not vocab_size=61"),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 leaves no keys and values for layer 0"),
    ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 leaves no keys and values for layer 3"),
    ("gemma4_text", {"per_layer_config": {"4": {}}}, "per_layer_config={'4': {}} is not an object of 4 layers"),
    ("gemma4_text", {"per_layer_config": {"0": {"hidden_size": 2}}}, "per_layer_config={'0': {'hidden_size': 2}} is"),
    ("gemma4_text", {"per_layer_config": {"0": {"head_dim": "8"}}}, "head_dim='8' is not an integer"),
    ("gemma4_text", {"global_head_dim": 0}, "head_dim=0 is not an integer"),
    ("apertus", {}, "model_type='apertus' is not supported: its activation, which has parameters in each layer"),
    ("hunyuan_v1_dense", {}, "model_type='hunyuan_v1_dense' is not supported: its norms of queries and keys after"),
    ("minicpm", {"sparse_config": {}}, "sparse_config={} is not supported: only None is"),
    ("gemma3n", {}, "model_type='gemma3n' is not supported: its residual streams (AltUp, LAuReL) and sparse"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm=False is not supported: only True is"),
    (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "mamba"] * 2},
        "layer_types=['full_attention', 'mamba', 'full_attention', 'mamba'] has",
    ),
    ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "layer_types=['linear_attention'] is not a list of 4"),
    ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval=0 is not an integer in [1,"),
    ("qwen3_5_text", {"linear_num_key_heads": 5}, "32 heads of a state are no multiple of 5 of keys"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "taps of a convolution=1 is not an integer in [2, 64]"),
    (
        "lfm2",
        {"layer_types": ["conv", "linear_attention"] * 2},
        "layer_types=['conv', 'linear_attention', 'conv', 'linear_attention'] has",
    ),
    ("lfm2", {"full_attn_idxs": 2}, "full_attn_idxs=2 is not a list of layers"),
    ("lfm2", {"conv_bias": True}, "conv_bias=True is not supported: only False is"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types=['sparse', 'dense', 'sparse'"),
]


@pytest.mark.parametrize("model_type, fields, message", BAD, ids=[f"{m}-{'-'.join(f)}" for m, f, _ in BAD])
def test_a_bad_field_is_named_in_one_line(
    model_type: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NanoinferError) as e:
        read(tmp_path, model_type, **fields)
    assert str(e.value).startswith(f"{tmp_path / 'config.json'}: {message}")
    assert "\n" not in str(e.value)
    assert len(str(e.value)) - len(str(tmp_path)) < 500


@pytest.mark.parametrize("value,named", [(None, False), (0, False), (False, False), (1, True), ("x", True)])
def test_a_warning_is_for_a_field_that_could_change_the_result(
    value: object, named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published = {
        "use_mrope": True,
        "max_window_layers": 28,
        "pretraining_tp": 1,
        "scale_attn_weights": True,
        "max_length": 20,
    }
    read(tmp_path, "smollm3", rope_interleaved=value, **published)
    assert ("unknown fields are ignored: rope_interleaved" in caplog.text) is named
    assert named or not caplog.records


def test_fields_that_do_not_change_the_logits_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for model_type in FAMILIES:
        harmless = dict.fromkeys(FAMILIES[model_type].harmless, 0.1)
        assert read(tmp_path, model_type, attention_dropout=0.1, **harmless) == read(tmp_path, model_type)
    unknown = {record.args[1] for record in caplog.records if record.args}
    assert unknown <= {"num_key_value_heads", "num_hidden_layers"}  # of SHAPE: gpt_neox and exaone lack them


ODD = [
    None, True, -1, 0, 1, 3, 1.5, -0.0, 2**31 - 1, 2**31, 10**400, float("nan"), float("inf"), "x", "", [], {}, [None],
    [[1]], {"full_attention": 3}, {"rope_type": "llama3"}, {"rope_type": ["x"]}, {"type": {}}, {"rope_theta": "x"},
    {"rope_type": "linear", "factor": True}, ["full_attention"] * 4, ["sliding_attention"] * 4, [{}] * 4, [1, 0, 1, 1],
    LLAMA3 | {"original_max_position_embeddings": 1.5}, {"partial_rotary_factor": 10**400}, {3: 4},
]  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.nightly_if(lambda model_type: model_type != "gemma3_text")
def test_an_odd_value_of_any_field_is_read_or_an_error_of_one_line(model_type: str, tmp_path: Path) -> None:
    family = FAMILIES[model_type]
    fields = {*huggingface.config_to_dict(read(tmp_path, model_type), "float32"), *family.biases, *family.only, *ALWAYS}
    for name in sorted(fields - {"model_type"}):
        for value in ODD:
            message = ""
            try:
                read(tmp_path, model_type, **{name: value})
            except NanoinferError as e:
                message = str(e)
            assert "\n" not in message
            assert len(message) < 1000


ALWAYS = (
    "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types", "use_sliding_window",
    "max_window_layers", "no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern", "rotary_pct",
    "partial_rotary_factor", "original_max_position_embeddings", "quantization_config", "head_dim",
)  # fmt: skip


def test_fields_that_contradict_each_other_are_one_line() -> None:
    growing, other = Rotary(16, query_growth=0.1), Rotary(16, query_growth=0.1, original_context=64)
    shape: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64}
    for different in (Rotary(16), other):
        layers = (LayerKind(None, growing), LayerKind(None, different))
        refuses(lambda kinds=layers: ModelConfig(**shape, layers=kinds), "query_growth differs between layers")
    assert ModelConfig(**shape, layers=(LayerKind(None, growing), LayerKind())).layer(0).rotary == growing
    refuses(lambda: ModelConfig(**shape, layers=(LayerKind(None, Rotary(8, query_growth=0.1)),) * 2), "dim=16")
    refuses(lambda: ModelConfig(**shape, norm_placement="shared"), "parallel_residual=True")
    refuses(lambda: ModelConfig(**shape, head_bias=True), "tie_word_embeddings=False")
